//! A VM at a borrowing host has a drive of another host by its own host's `vfio-pci`, as QEMU passes a host's device to a VM: the
//! VM's BIOS boots from the drive, and a stock kernel there drives it and has its interrupts. QEMU maps all of the VM's memory.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rackbus_e2e::guest::succeeded;
use rackbus_e2e::{CheckFailure, Result};
use rackbus_vm::metal::programs::collect_qemu;
use rackbus_vm::{Assets, BareMetalMachine, GuestRelease, VmIommu};

use crate::isolated::BINDS;
use crate::metal::{
    BorrowerMachine, DRIVE, MetalHosts, PRELUDE, explained, join_with, run, start_with,
};

/// What the lender's node models.
const MODELS: &str = "[hosts.alpha.devices.m0]\nkind = \"nvme\"\nsize = \"64 MiB\"\n";

/// A VM of 128 MiB in huge pages. These machines have no KVM inside. What it prints is in `serial`; `ended` has QEMU's status. The
/// function is behind a port, so that it can be unplugged.
const VM: &str = r#"
    qemu() {
        /mnt/files/qemu/run qemu-system-x86_64 -L /mnt/files/qemu -machine q35,memory-backend=ram \
            -accel tcg -nodefaults -no-user-config -display none "$@"
    }
    start() {
        options=$1
        shift
        rm -f serial monitor ended
        mkfifo monitor
        (
            exec 3<>monitor
            status=0
            qemu -m 128 -object memory-backend-memfd,id=ram,size=128M,hugetlb=on,prealloc=on \
                -monitor stdio -serial file:serial -device pcie-root-port,id=port1,chassis=1,slot=1 \
                -device vfio-pci,host=ff00:00:00.0,bus=port1$options "$@" <monitor >qemu.log 2>&1 || status=$?
            echo $status >ended
        ) &
    }
    eventually() { until "$@"; do [ ! -e ended ] || { cat qemu.log; tail -n 40 serial; return 1; }; sleep 0.1; done; }
    printed() { [ -e serial ] && [ $(grep -c "$2" serial) -ge $1 ]; }
    reads() { tail -n 1 serial | grep -q '[.][.][.][.]'; }
    ended() { until_ok test -s ended; [ $(cat ended) = $1 ]; }
    prepare() {
        modprobe vfio_iommu_type1 allow_unsafe_interrupts=1
        modprobe vfio-pci
        echo 3 >/proc/sys/vm/drop_caches
        echo 1 >/proc/sys/vm/compact_memory
        echo 64 >/proc/sys/vm/nr_hugepages
        [ $(cat /proc/sys/vm/nr_hugepages) = 64 ]
    }
"#;

/// The first program of a VM's kernel: with the drivers that it takes for the drive, and no more.
const INIT: &str = r#"#!/bin/busybox sh
bb=/bin/busybox
$bb mount -t proc proc /proc
$bb mount -t sysfs sys /sys
$bb mount -t devtmpfs dev /dev
echo Linux runs
while read -r module; do
    case $module in *crc*|nvme*) $bb insmod /modules/$module 2>/dev/null ;; esac
done </modules/order
until [ -b /dev/nvme0n1 ]; do $bb usleep 50000; done
$bb dd if=/dev/urandom of=/data bs=64k count=4 2>/dev/null
$bb dd if=/data of=/dev/nvme0n1 bs=64k seek=512 conv=fsync 2>/dev/null
echo 3 >/proc/sys/vm/drop_caches
$bb dd if=/dev/nvme0n1 bs=64k skip=512 count=4 2>/dev/null | $bb cmp - /data && $bb sha256sum /data | $bb sed 's/^/wrote /'
$bb grep nvme /proc/interrupts
echo interrupts end
exec $bb sleep 86400
"#;

/// How long a kernel may take that is translated twice, on a busy machine.
const BOOT: Duration = Duration::from_secs(1800);

/// What is where a VM's kernel has written.
const SUM: &str = "dd if=/dev/nvme0n1 bs=64k skip=512 count=4 status=none | sha256sum";

/// What spares a kernel time under translation, of what is no matter here.
const QUICK: &str = "console=ttyS0 quiet mitigations=off tsc=reliable lpj=4000000 apparmor=0 \
                     cryptomgr.notests nmi_watchdog=0 panic=-1";

fn start_hosts(dir: &Path) -> Result<MetalHosts> {
    let borrower = BorrowerMachine {
        iommu: VmIommu::Translating,
        append: "iommu=pt",
        memory_mib: 1024,
        files: |folder| {
            let assets = Assets::of_user();
            let files = assets.guest(GuestRelease::Trixie)?;
            std::fs::copy(files.kernel, folder.join("vmlinuz"))?;
            std::fs::copy(files.initrd, folder.join("initrd"))?;
            std::fs::write(folder.join("init"), INIT)?;
            assemble_boot_sector(&folder.join("boot.img"))?;
            Ok(collect_qemu(&assets, &folder.join("qemu"))?)
        },
    };
    let mut hosts = start_with(dir, GuestRelease::Trixie, &DRIVE, &borrower)?;
    let joined = join_with(&mut hosts, MODELS);
    explained(&mut hosts, joined)?;
    run(&mut hosts.borrower, &format!("{VM} prepare"))?;
    Ok(hosts)
}

/// The boot sector and the one behind it, in a file.
fn assemble_boot_sector(to: &Path) -> Result<()> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/guest/boot.S");
    let mut compiler = Command::new("cc");
    compiler.args(["-m32", "-nostdlib", "-static", "-no-pie"]);
    compiler.arg("-Wl,--oformat=binary,-Ttext=0x7c00,--build-id=none");
    let output = compiler.arg("-o").arg(to).arg(source).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(CheckFailure(format!("{source}: {}", String::from_utf8_lossy(&output.stderr))))
}

/// VMs boot by their BIOS from a drive of the lender's machine and from one that its node models: one that is reset and killed while
/// it reads, and another one after it.
pub fn boots(dir: &Path) -> Result<()> {
    let mut hosts = start_hosts(dir)?;
    let outcome = booted(&mut hosts, "d0").and_then(|()| booted(&mut hosts, "m0"));
    explained(&mut hosts, outcome)
}

fn booted(hosts: &mut MetalHosts, drive: &str) -> Result<()> {
    let MetalHosts { lender, borrower, ntb: [_, far], .. } = hosts;
    // A VM whose memory is none of the host's, but the window's, ends before it has run.
    run(
        borrower,
        &format!(
            "{BINDS}{VM}
            borrow {drive}
            write
            dd if=/mnt/files/boot.img of=/dev/nvme0n1 conv=notrunc,fsync status=none
            bind vfio-pci
            refused qemu -m 64 -device vfio-pci,host=ff00:00:00.0 \
                -object memory-backend-file,id=ram,size=64M,share=on,mem-path=/sys/bus/pci/devices/{far}/resource2
            grep 'vfio.*Numerical result out of range' refused
            start ,bootindex=0
            eventually printed 1 'second sector was read'
            echo system_reset >monitor
            eventually printed 2 'second sector was read'
            eventually reads
            grep 'dma_map.*ERANGE\\|dma_map.*Numerical result out of range' qemu.log"
        ),
    )?;
    has_own_mappings(lender, drive, true)?;
    run(borrower, &format!("{VM} pkill -KILL -f qemu-system; ended 137"))?;
    has_own_mappings(lender, drive, false)?;
    run(
        borrower,
        &format!(
            "{BINDS}{VM}
            start ,bootindex=0
            eventually printed 1 'second sector was read'
            echo quit >monitor
            ended 0
            bind ''
            until_ok test -b /dev/nvme0n1
            verify
            rackbus return alpha/{drive}
            [ ! -e $device ]
            healthy"
        ),
    )
    .map(drop)
}

/// Whether the drive reaches what has been mapped for a VM, which are many pieces, or the window, which is one.
fn has_own_mappings(lender: &mut BareMetalMachine, drive: &str, many: bool) -> Result<()> {
    let wanted = if many { "-gt" } else { "=" };
    run(
        lender,
        &format!(
            "pieces() {{ rackbus reach alpha/{drive} | grep -c 'memory lent by beta'; }}
            wanted() {{ [ $(pieces) {wanted} 1 ]; }}
            until_ok wanted
            rackbus reach alpha/{drive} | grep 'memory lent by beta' | head -n 4"
        ),
    )
    .map(drop)
}

/// A stock kernel in a VM drives both drives by its own driver: interrupts arrive, and what it writes is there afterwards.
pub fn stock_kernel(dir: &Path) -> Result<()> {
    let mut hosts = start_hosts(dir)?;
    let outcome = driven(&mut hosts, "m0").and_then(|_| {
        let written = driven(&mut hosts, "d0")?;
        // The lender's own driver has its drive again, and finds what the VM has written.
        run(
            &mut hosts.lender,
            &format!(
                "pkill -TERM -f 'files/rackbus node'
                until_ok back
                until_ok test -b /dev/nvme0n1
                {SUM} | grep {written}"
            ),
        )
    });
    explained(&mut hosts, outcome.map(drop))
}

/// Gives the digest of what the VM has written.
fn driven(hosts: &mut MetalHosts, drive: &str) -> Result<String> {
    let MetalHosts { borrower, .. } = hosts;
    run(
        borrower,
        &format!(
            "{BINDS}{VM}
            mkdir -p inner
            cp /mnt/files/init inner
            chmod +x inner/init
            (cd inner; echo init | cpio -o -H newc) 2>/dev/null >own
            cat /mnt/files/initrd own >initrd
            borrow {drive}
            bind vfio-pci
            start '' -kernel /mnt/files/vmlinuz -initrd initrd -append '{QUICK}'"
        ),
    )?;
    let script = format!("{PRELUDE}{VM} eventually printed 1 'interrupts end'");
    let output = borrower.begin(&script, BOOT)?.wait()?;
    succeeded(borrower.name(), &script, &output)?;
    run(
        borrower,
        &format!(
            "{VM}
            cat serial
            grep -e vfio-msix -e rackbus /proc/interrupts
            awk '/vfio-msix/ {{ n += $2 + $3 }} END {{ exit n == 0 }}' /proc/interrupts
            for queue in nvme0q0 nvme0q1; do
                awk -v queue=$queue '$0 ~ queue && /MSIX/ && $2 > 0 {{ found = 1 }} END {{ exit !found }}' serial
            done"
        ),
    )?;
    run(
        borrower,
        &format!(
            "{BINDS}{VM}
            echo quit >monitor
            ended 0
            bind ''
            until_ok test -b /dev/nvme0n1
            {SUM} | grep $(sed -n 's/^wrote \\([0-9a-f]*\\).*/\\1/p' serial)
            rackbus return alpha/{drive} >returned
            [ ! -e $device ]
            healthy"
        ),
    )
    .map(|said| said.split(' ').next().unwrap_or_default().to_owned())
}
