//! What guests do with borrowed drives.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rackbus_e2e::guest::{CPUS, field, succeeded};
use rackbus_e2e::{CheckFailure, Guest, RackProcesses, Result, ensure};
use rackbus_vm::{Assets, GuestRelease as Release};
use serde_json::Value;

use crate::RackWithGuests;

/// How long fio may take in a guest on a busy machine.
const FIO: Duration = Duration::from_secs(240);

/// Borrows a function into a running guest.
pub fn add(rack: &RackProcesses, guest: &mut Guest, name: &str, function: &str) -> Result<()> {
    rack.json(&["vm", "add", name, function])?;
    guest.wait_drives(1)
}

/// Takes a function out of a running guest.
pub fn remove(rack: &RackProcesses, guest: &mut Guest, name: &str, function: &str) -> Result<()> {
    rack.json(&["vm", "remove", name, function])?;
    guest.wait_drives(0)
}

/// Whether this machine's QEMU takes out what has MSI-X: the command line found it out when it started the guests.
pub fn unplugs_msix() -> Result<bool> {
    let not_again = |_: &Path| Err::<(), _>(std::io::Error::other("this is not known yet"));
    Ok(rackbus_vm::interrupts::unplugs_msix(&Assets::of_user(), not_again)?)
}

/// The demonstration's core: what one guest wrote, the other finds, on another host, whose node is asked for it.
pub fn data_follows(world: &mut RackWithGuests) -> Result<()> {
    let RackWithGuests { rack, old, new } = world;
    add(rack, old, "old", "alpha/nvme0")?;
    let sum = old.run(
        "mkfs.ext4 -q /dev/nvme?n1 && mount /dev/nvme?n1 /mnt/a && \
         dd if=/dev/urandom of=/mnt/a/data bs=1M count=32 status=none && \
         sha256sum </mnt/a/data && umount /mnt/a",
    )?;
    remove(rack, old, "old", "alpha/nvme0")?;
    let host = new.vm().record().host.clone();
    let lease = rack.json(&["borrow", "alpha/nvme0", "--for", &host, "--vm", "new"])?;
    ensure!(lease["vm"] == "new", "it is not said where the drive is: {lease}");
    new.wait_drives(1)?;
    let found = new.run("mount /dev/nvme?n1 /mnt/a && sha256sum </mnt/a/data && umount /mnt/a")?;
    rack.json(&["return", "alpha/nvme0"])?;
    new.wait_drives(0)?;
    ensure!(found == sum, "written {sum}, found {found}");
    Ok(())
}

/// A stock guest finds memory in a BAR, and a program there maps it: fio writes it through the mapping
/// and verifies.
pub fn memory(world: &mut RackWithGuests) -> Result<()> {
    let rack = &world.rack;
    let mut guest = Guest::start(rack, "ram", "gamma", "trixie", &["alpha/ram0"])?;
    guest.booted()?;
    let device = guest.run("dirname $(grep -ls 0x726d /sys/bus/pci/devices/*/device)")?;
    let device = device.trim();
    let listed = guest.run(&format!("lspci -n -v -s $(basename {device})"))?;
    let is_memory =
        listed.contains("0500: 1234:726d") && listed.contains("prefetchable) [size=64M]");
    ensure!(is_memory, "lspci shows something else:\n{listed}");
    // A colon separates files for fio.
    let file = format!("{device}/resource2").replace(':', "\\:");
    let script = format!(
        "echo 1 >{device}/enable && cd /tmp && fio --name=verify '--filename={file}' \
         --ioengine=mmap --rw=write --bs=64k --size=64M --allow_file_create=0 --invalidate=0 \
         --verify=crc32c --verify_fatal=1"
    );
    let text = guest.begin(&script, FIO)?.wait()?;
    ensure!(succeeded("ram", &script, &text)?.contains("err= 0"), "fio found errors");
    guest.stop(rack)
}

/// With the controller at the borrower, a stock guest finds the same drive: what it wrote under load
/// and verified, the next guest finds with the controller at the lender.
pub fn strict_isolation(world: &mut RackWithGuests) -> Result<()> {
    const SCRIPT: &str = "cd /tmp && fio --name=verify --filename=$(ls -d /dev/nvme?n1) \
        --rw=randrw --bs=4k-32k --bsrange=4k-32k --direct=1 --ioengine=libaio --iodepth=8 \
        --size=16M --offset=64M --verify=crc32c --verify_fatal=1";
    let RackWithGuests { rack, old, new } = world;
    rack.json(&["vm", "add", "old", "alpha/nvme0", "--isolation", "strict"])?;
    old.wait_drives(1)?;
    let leases = rack.json(&["leases"])?;
    ensure!(
        leases[0]["placement"] == "borrower",
        "the controller is not at the borrower: {leases}"
    );
    let text = old.begin(SCRIPT, FIO)?.wait()?;
    ensure!(succeeded("old", SCRIPT, &text)?.contains("err= 0"), "fio found errors");
    let sum = old.run(
        "mkfs.ext4 -q /dev/nvme?n1 && mount -o discard /dev/nvme?n1 /mnt/a && \
         dd if=/dev/urandom of=/mnt/a/data bs=1M count=16 status=none && \
         sha256sum </mnt/a/data && umount /mnt/a && fstrim --version >/dev/null",
    )?;
    remove(rack, old, "old", "alpha/nvme0")?;
    add(rack, new, "new", "alpha/nvme0")?;
    let found = new.run("mount /dev/nvme?n1 /mnt/a && sha256sum </mnt/a/data && umount /mnt/a")?;
    remove(rack, new, "new", "alpha/nvme0")?;
    ensure!(found == sum, "written {sum}, found {found}");
    Ok(())
}

/// nvme-cli of both kernels: identify, logs, features, reset, flush.
pub fn administration(world: &mut RackWithGuests) -> Result<()> {
    let RackWithGuests { rack, old, new } = world;
    add(rack, old, "old", "alpha/nvme0")?;
    add(rack, new, "new", "alpha/nvme1")?;
    let first = administer(old, 512)?;
    let second = administer(new, 4096)?;
    remove(rack, old, "old", "alpha/nvme0")?;
    remove(rack, new, "new", "alpha/nvme1")?;
    ensure!(first != second, "two drives have one serial number: {first}");
    Ok(())
}

/// Checks one drive of a guest; gives its serial number.
fn administer(guest: &mut Guest, block: u64) -> Result<String> {
    guest.run(
        "ln -sf $(ls -d /dev/nvme? | head -n 1) /tmp/ctrl; ln -sf $(ls -d /dev/nvme?n1) /tmp/ns",
    )?;
    let controller = guest.run("nvme id-ctrl /tmp/ctrl")?;
    let serial = field(&controller, "sn")?;
    ensure!(!serial.is_empty(), "no serial number in {controller}");
    ensure!(field(&controller, "nn")? == "1", "not one namespace: {controller}");
    let namespace = guest.run("nvme id-ns /tmp/ns")?;
    let blocks = field(&namespace, "nsze")?;
    let blocks = u64::from_str_radix(blocks.trim_start_matches("0x"), 16).unwrap_or(0);
    ensure!(blocks == (256 << 20) / block, "{blocks} blocks of {block}: {namespace}");
    let size = guest.run("blockdev --getss --getsize64 /tmp/ns")?;
    ensure!(size == format!("{block}\n{}", 256 << 20), "block size and size: {size}");
    let smart = guest.run("nvme smart-log /tmp/ctrl")?;
    ensure!(field(&smart, "critical_warning")? == "0", "{smart}");
    guest.run("nvme error-log /tmp/ctrl -e 4")?;
    // Temperature threshold: set, get, set back.
    let threshold = |guest: &mut Guest| guest.run("nvme get-feature /tmp/ctrl --feature-id=4");
    let before = threshold(guest)?;
    guest.run("nvme set-feature /tmp/ctrl --feature-id=4 --value=0x150")?;
    ensure!(threshold(guest)?.to_lowercase().contains("150"), "the threshold was not taken");
    guest.run("nvme reset /tmp/ctrl; for i in $(seq 100); do blockdev --getss /tmp/ns >/dev/null 2>&1 && exit 0; sleep 0.1; done; exit 1")?;
    ensure!(threshold(guest)? == before, "a reset did not bring the threshold's default back");
    guest.run("nvme flush /tmp/ns")?;
    // A wrong command is refused by the drive, and the error log says so.
    let wrong = guest.run("nvme admin-passthru /tmp/ctrl --opcode=0xff 2>&1; true")?;
    ensure!(wrong.to_lowercase().contains("invalid"), "opcode 0xff was not refused: {wrong}");
    Ok(serial)
}

/// fio with data verification, four jobs, both guests at once.
pub fn verified_io(world: &mut RackWithGuests) -> Result<()> {
    const SCRIPT: &str = "cd /tmp && fio --name=verify --filename=$(ls -d /dev/nvme?n1) \
        --rw=randrw --bs=4k-32k --bsrange=4k-32k --direct=1 --ioengine=libaio --iodepth=8 --numjobs=4 \
        --size=8M --offset_increment=8M --verify=crc32c --verify_fatal=1 --group_reporting";
    let RackWithGuests { rack, old, new } = world;
    add(rack, old, "old", "alpha/nvme0")?;
    add(rack, new, "new", "alpha/nvme1")?;
    let first = old.begin(SCRIPT, FIO)?;
    let second = new.begin(SCRIPT, FIO)?;
    for (name, running) in [("old", first), ("new", second)] {
        let text = succeeded(name, SCRIPT, &running.wait()?)?;
        ensure!(text.contains("err= 0"), "fio found errors: {text}");
        ensure!(text.contains("read: IOPS"), "fio read nothing: {text}");
    }
    remove(rack, old, "old", "alpha/nvme0")?;
    remove(rack, new, "new", "alpha/nvme1")
}

/// What loads the drive DRIVE for some seconds, and verifies: as many processes as processors, each bound to one.
const LOAD: &str = "cd /tmp && fio --name=load --filename=/dev/DRIVEn1 --rw=randrw \
    --bs=4k --direct=1 --ioengine=libaio --iodepth=8 --size=8M --offset_increment=8M \
    --numjobs=$(nproc) --cpus_allowed=0-$(($(nproc) - 1)) --cpus_allowed_policy=split \
    --time_based --verify=crc32c --verify_fatal=1 --runtime=";

/// Loads a drive (`nvme0`) for so many seconds, in which all must be in order.
fn verified_load(guest: &mut Guest, drive: &str, seconds: u32) -> Result<()> {
    let load = LOAD.replace("DRIVE", drive);
    guest.run(&format!("{load}{seconds} >fio.out 2>&1 || {{ cat fio.out; exit 1; }}")).map(drop)
}

/// A guest has a queue for each of its processors on this drive, with an interrupt of its own whose name has `kind` in
/// it; each does I/O, whose data is verified.
pub fn each_queue(guest: &mut Guest, drive: &str, kind: &str) -> Result<()> {
    let said =
        guest.run(&format!("dmesg | grep '{drive}: .*default/read/poll queues' | tail -n 1"))?;
    ensure!(said.contains(&format!(" {CPUS}/0/0 ")), "not a queue a processor: {said}");
    verified_load(guest, drive, 2)?;
    // Per line of the drive's: its count on each processor. Queue 0 is the admin queue.
    let used = guest.run(&format!(
        "awk '/{kind}/ && /{drive}q[1-9]/ {{ n = 0; for (i = 2; i <= {CPUS} + 1; i++) n += $i; \
         if (n > 0) used++ }} END {{ print used + 0 }}' /proc/interrupts"
    ))?;
    ensure!(
        used == CPUS,
        "{used} of {CPUS} queues interrupted: {}",
        guest.run("cat /proc/interrupts")?
    );
    Ok(())
}

/// The only drive of a guest, as its kernel names it: `nvme0`.
fn only_drive(guest: &mut Guest) -> Result<String> {
    guest.run("basename $(ls -d /dev/nvme?n1) n1")
}

/// Each processor of a guest has a queue and an interrupt of its own. The drive is unplugged in the
/// middle of its work and plugged in again, several times.
pub fn queues(world: &mut RackWithGuests) -> Result<()> {
    let RackWithGuests { rack, old, new } = world;
    for (guest, name) in [(old, "old"), (new, "new")] {
        guest.run("dmesg -C")?;
        add(rack, guest, name, "alpha/nvme0")?;
        let drive = only_drive(guest)?;
        each_queue(guest, &drive, "MSI")?;
        remove(rack, guest, name, "alpha/nvme0")?;
        for _ in 0..2 {
            add(rack, guest, name, "alpha/nvme0")?;
            let load = LOAD.replace("DRIVE", &only_drive(guest)?);
            let running =
                guest.begin(&format!("{load}60 >fio.out 2>&1"), Duration::from_secs(90))?;
            busy(guest)?;
            remove(rack, guest, name, "alpha/nvme0")?;
            ensure!(!running.wait()?.ok(), "fio did not notice that its drive went");
        }
        add(rack, guest, name, "alpha/nvme0")?;
        let drive = only_drive(guest)?;
        verified_load(guest, &drive, 1)?;
        remove(rack, guest, name, "alpha/nvme0")?;
    }
    Ok(())
}

/// Waits until the guest's drive has done some hundred operations.
pub fn busy(guest: &mut Guest) -> Result<()> {
    let script = "d=$(basename $(ls -d /dev/nvme?n1)); for i in $(seq 400); do \
        [ $(awk '{print $1 + $5}' /sys/block/$d/stat) -gt 500 ] && exit 0; sleep 0.05; done; \
        cat /sys/block/$d/stat; exit 1";
    guest.run(script).map(drop)
}

/// blkdiscard and write-zeroes: what was there reads as zeroes, and nothing else changed.
pub fn zeroes(world: &mut RackWithGuests) -> Result<()> {
    const SCRIPT: &str = "set -e; d=$(ls -d /dev/nvme?n1); cd /tmp; \
        head -c 8388608 /dev/urandom >pattern; \
        dd if=pattern of=$d bs=1M oflag=direct status=none; \
        blkdiscard -o 1048576 -l 1048576 $d; \
        blkdiscard -z -o 3145728 -l 1048576 $d; \
        ss=$(blockdev --getss $d); \
        nvme write-zeroes $d --start-block=$((5242880 / ss)) --block-count=$((65536 / ss - 1)); \
        sync; echo 3 >/proc/sys/vm/drop_caches; \
        cp pattern expected; \
        for hole in 1048576:1048576 3145728:1048576 5242880:65536; do \
            dd if=/dev/zero of=expected bs=64k seek=$((${hole%:*} / 65536)) \
               count=$((${hole#*:} / 65536)) conv=notrunc status=none; done; \
        dd if=$d bs=1M count=8 iflag=direct status=none | cmp - expected";
    let RackWithGuests { rack, old, new } = world;
    add(rack, old, "old", "alpha/nvme0")?;
    add(rack, new, "new", "alpha/nvme1")?;
    old.run(SCRIPT)?;
    new.run(SCRIPT)?;
    remove(rack, old, "old", "alpha/nvme0")?;
    remove(rack, new, "new", "alpha/nvme1")
}

/// Who asks second is refused, by name of the holder, whoever asks.
pub fn second_borrower(world: &mut RackWithGuests) -> Result<()> {
    let RackWithGuests { rack, old, .. } = world;
    add(rack, old, "old", "alpha/nvme0")?;
    for host in ["gamma", "alpha", "beta"] {
        let said = rack.refused(&["borrow", "alpha/nvme0", "--for", host])?;
        ensure!(said.contains("beta"), "the holder is not named: {said}");
    }
    ensure!(rack.device("alpha/nvme0")?["holder"] == "beta", "the holder is not shown");
    remove(rack, old, "old", "alpha/nvme0")?;
    let (lease, _) = rack.borrow("alpha/nvme0", "gamma")?;
    rack.give_back(lease)
}

/// A QEMU that somebody starts with what `vm args` prints finds the drive, with a queue for each of its
/// processors; and with one queue where its machine remaps no interrupts.
pub fn own_qemu(world: &mut RackWithGuests) -> Result<()> {
    let rack = &world.rack;
    let mut arguments = vec!["vm", "args", "--host", "gamma", "--borrow", "alpha/nvme1"];
    arguments.extend(["--memory", "256M", "--max-memory", "1G"]);
    for (remaps, queues) in [(true, 2), (false, 1)] {
        let value = rack.json(&arguments)?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let mut printed: Vec<String> =
            value["arguments"].as_array().into_iter().flatten().map(text).collect();
        if !remaps {
            let iommu = printed.iter().position(|it| it.starts_with("intel-iommu,"));
            let at = iommu.ok_or_else(|| CheckFailure(format!("no IOMMU in {printed:?}")))?;
            printed.drain(at - 1..=at);
        }
        started_by_hand(rack, &printed, queues)?;
        // Nobody returns it: it ends with that QEMU, and others can have it then.
        rack.wait("the lease of a QEMU that was killed ends", Duration::from_secs(20), |rack| {
            let devices = rack.json(&["devices"]).ok()?;
            let free = |it: &Value| it["function"] == "alpha/nvme1" && it["state"] == "offered";
            devices.as_array()?.iter().any(free).then_some(())
        })?;
    }
    Ok(())
}

/// Starts a QEMU with two processors and waits until its guest's driver has set so many I/O queues up.
fn started_by_hand(rack: &RackProcesses, printed: &[String], queues: usize) -> Result<()> {
    let assets = Assets::of_user();
    let files = assets.guest(Release::Trixie)?;
    let log = rack.run_dir().join("own.log");
    let mut qemu = Command::new(assets.qemu()?)
        .args(["-nodefaults", "-display", "none", "-accel", assets.accel()?.name(), "-cpu", "max"])
        .args(["-smp", "2"])
        .args(printed)
        .arg("-kernel")
        .arg(files.kernel)
        .arg("-initrd")
        .arg(files.initrd)
        .args(["-append", "console=ttyS0", "-serial", &format!("file:{}", log.display())])
        .env("RACKBUS_RUN_DIR", rack.run_dir())
        .stdin(Stdio::null())
        .stderr(std::fs::File::create(rack.run_dir().join("own-qemu.log"))?)
        .spawn()?;
    // The guest's kernel says so when its NVMe driver has set the drive up.
    let said = rack.wait("the guest's driver finds the drive", Duration::from_secs(180), |_| {
        let console = std::fs::read_to_string(&log).unwrap_or_default();
        console.lines().find(|line| line.contains("default/read/poll queues")).map(str::to_owned)
    });
    qemu.kill()?;
    qemu.wait()?;
    std::fs::remove_file(&log)?;
    let said = said?;
    ensure!(said.contains(&format!(" {queues}/0/0 ")), "not {queues} queues: {said}");
    Ok(())
}

/// A plugged-in drive that nobody uses: its lender's process sleeps.
pub fn idle(world: &mut RackWithGuests) -> Result<()> {
    let RackWithGuests { rack, old, .. } = world;
    add(rack, old, "old", "alpha/nvme0")?;
    old.run("dd if=$(ls -d /dev/nvme?n1) of=/dev/null bs=4k count=256 iflag=direct status=none")?;
    // What the last access caused (a flush, adaptive polling) ends first.
    std::thread::sleep(Duration::from_secs(2));
    let before = rack.ticks("alpha")?;
    std::thread::sleep(Duration::from_secs(5));
    let used = rack.ticks("alpha")? - before;
    remove(rack, old, "old", "alpha/nvme0")?;
    // 500 ticks are 5 s; heartbeats and the like may take a few milliseconds.
    ensure!(used <= 3, "an idle lender used {used} ticks of 10 ms in 5 s");
    Ok(())
}
