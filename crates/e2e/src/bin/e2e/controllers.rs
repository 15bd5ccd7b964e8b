//! A host borrows a drive that has two controllers. Its kernel (NVMe native multipath) has one disk for both ways to the
//! drive, which hangs below neither function; who uses it is asked before the last way is returned.

use std::path::Path;

use rackbus_e2e::Result;
use rackbus_vm::GuestRelease;

use crate::metal::{MetalHosts, begin, explained, join, run, start};

/// The lender's drive: one namespace, which two controllers share.
const DRIVE: [&str; 8] = [
    "-device",
    "nvme-subsys,id=subsystem,nqn=metal0",
    "-device",
    "nvme,serial=metal0,subsys=subsystem,x-max-bounce-buffer-size=33554432",
    "-device",
    "nvme,serial=metal0,subsys=subsystem,x-max-bounce-buffer-size=33554432",
    "-device",
    "nvme-ns,drive=medium,shared=on",
];

/// A partition table's entry, for `printf %b`: of Linux, from block 2048 on, of 65536 blocks.
const PARTITION: &str = r"\0\0\0\0\0203\0\0\0\0\010\0\0\0\0\01\0";

/// What the borrower's scripts have in common.
const USES: &str = r#"
    ways() { [ $(ls -d /sys/block/nvme*c*n1 2>/dev/null | wc -l) = $1 ]; }
    is_head() { readlink /sys/block/nvme0n1 | grep -q nvme-subsystem; }
    in_use() { refused rackbus metal return $1 --timeout 1 | grep 'in use'; [ -b /dev/nvme0n1 ]; }
    partition() {
        printf "%b" "$1" >sector
        truncate -s 64 sector
        printf '\125\252' >>sector
        dd if=sector of=/dev/nvme0n1 bs=1 seek=446 conv=fsync status=none
        blockdev --rereadpt /dev/nvme0n1
    }
    handle() { rackbus metal list | grep "$1" | cut -d' ' -f1; }
    borrow() { until_ok rackbus borrow alpha/$1 --for beta --placement host; }
    undamaged() { healthy; dmesg | { ! grep -e EXT4-fs.error -e lost.sync; }; }
"#;

/// Who lends by hand, among the processes of a host.
const LEND: &str = "files/rackbus --json metal lend";

/// With Linux 6.1 at both hosts.
pub fn bookworm(dir: &Path) -> Result<()> {
    borrowed(dir, GuestRelease::Bookworm)
}

/// With Linux 6.12 at both hosts.
pub fn trixie(dir: &Path) -> Result<()> {
    borrowed(dir, GuestRelease::Trixie)
}

fn borrowed(dir: &Path, guest: GuestRelease) -> Result<()> {
    let mut hosts = start(dir, guest, &DRIVE)?;
    let outcome = one_way(&mut hosts).and_then(|()| two_ways(&mut hosts));
    explained(&mut hosts, outcome)
}

/// One of the controllers is borrowed. Whoever uses the disk is seen, and nobody comes while it goes.
fn one_way(hosts: &mut MetalHosts) -> Result<()> {
    let MetalHosts { lender, borrower, ntb: [near, far], .. } = &mut *hosts;
    let lend = format!(
        "sh -c 'modprobe vfio-pci; exec rackbus --json metal lend $0 --ntb {near} --epoch 7' $(drives | head -n 1)"
    );
    begin(lender, "lend.log", &lend)?;
    run(lender, "until_ok grep -q epoch lend.log")?;
    let offset = run(lender, "value offset lend.log")?;
    let borrow =
        format!("rackbus metal borrow alpha/nvme0 --ntb {far} --offset {offset} --epoch 7");
    run(
        borrower,
        &format!(
            "{USES}
            {borrow}
            until_ok test -b /dev/nvme0n1
            is_head
            ways 1
            write
            mount /dev/nvme0n1 /mnt/a
            in_use 1
            umount /mnt/a
            partition '{PARTITION}'
            until_ok test -b /dev/nvme0n1p1
            mke2fs -q /dev/nvme0n1p1
            mount /dev/nvme0n1p1 /mnt/a
            in_use 1
            umount /mnt/a
            partition ''
            exec 3</dev/nvme0n1
            in_use 1
            exec 3<&-
            mkswap /dev/nvme0n1 >/dev/null
            swapon /dev/nvme0n1
            in_use 1
            swapoff /dev/nvme0n1
            write
            rackbus metal return 1
            [ ! -e /dev/nvme0n1 ]
            {borrow}
            until_ok test -b /dev/nvme0n1
            verify
            mount /dev/nvme0n1 /mnt/a
            rackbus metal return 2 --force
            [ ! -e /dev/nvme0n1 ]
            umount /mnt/a
            dmesg -C"
        ),
    )?;
    mounted_meanwhile(hosts, &borrow)?;
    run(
        &mut hosts.lender,
        &format!(
            "back() {{ [ $(ls -d /sys/bus/pci/drivers/nvme/*:* | wc -l) = 2 ]; }}
            pkill -TERM -f '{LEND}'
            until_ok back"
        ),
    )?;
    Ok(())
}

/// A return has found nobody, and its driver is held up: who mounts the disk now is refused. It waits for a reset, which
/// takes as long as the lender stands still.
fn mounted_meanwhile(hosts: &mut MetalHosts, borrow: &str) -> Result<()> {
    let MetalHosts { lender, borrower, .. } = hosts;
    run(
        borrower,
        &format!(
            "echo 60000 >/sys/module/rackbus/parameters/silence_ms
            {borrow}
            until_ok test -b /dev/nvme0n1
            mke2fs -q /dev/nvme0n1"
        ),
    )?;
    run(lender, &format!("pkill -STOP -f '{LEND}'"))?;
    begin(borrower, "reset.log", "sh -c 'echo 1 | tee /sys/bus/pci/devices/*ff00:00:00.0/reset'")?;
    run(borrower, "until_ok sh -c 'dmesg | grep \"not ready.*after FLR\"'")?;
    begin(borrower, "return.log", "rackbus metal return 3 --timeout 60")?;
    run(
        borrower,
        "until_ok sh -c 'rackbus metal list | grep returning'
        refused mount -t ext2 /dev/nvme0n1 /mnt/a | grep -e busy -e 'open blockdev'
        refused rackbus metal return 3 --timeout 1 | grep 'not released'
        [ ! -s return.log ]",
    )?;
    run(lender, &format!("pkill -CONT -f '{LEND}'"))?;
    run(
        borrower,
        &format!(
            "{USES}
            until_ok grep returned return.log
            [ ! -e /dev/nvme0n1 ]
            undamaged
            echo 5000 >/sys/module/rackbus/parameters/silence_ms"
        ),
    )?;
    Ok(())
}

/// Both controllers are borrowed. One of them may go under a file system, the other one may not then.
fn two_ways(hosts: &mut MetalHosts) -> Result<()> {
    join(hosts)?;
    let MetalHosts { borrower, .. } = hosts;
    run(
        borrower,
        &format!(
            "{USES}
            borrow d0
            borrow d1
            until_ok ways 2
            write
            verify
            mount /dev/nvme0n1 /mnt/a
            rackbus metal return $(handle d0) --timeout 5
            ways 1
            dd if=/dev/urandom of=/mnt/a/more bs=64k count=16 conv=fsync status=none
            in_use $(handle d1)
            borrow d0
            until_ok ways 2
            first=$(handle d0)
            second=$(handle d1)
            rackbus metal return $first --timeout 3 >first 2>&1 &
            rackbus metal return $second --timeout 3 >second 2>&1 || true
            wait
            grep -H . first second
            [ $(cat first second | grep -c 'in use') = 1 ]
            [ $(cat first second | grep -c returned) = 1 ]
            ways 1
            dd if=/dev/urandom of=/mnt/a/more bs=64k count=16 conv=fsync status=none
            umount /mnt/a
            verify
            rackbus metal return $(handle lease)
            [ ! -e /dev/nvme0n1 ]
            until_ok gone
            undamaged"
        ),
    )?;
    Ok(())
}
