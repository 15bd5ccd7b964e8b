//! Accelerators in stock guests: `rackbus accel run` and a C program there, without a kernel module of ours.

use std::time::Duration;

use rackbus_e2e::guest::succeeded;
use rackbus_e2e::{Guest, RackProcesses, Result, ensure, programs};

use crate::RackWithGuests;

/// Where the guests run.
const HOST: &str = "gamma";

/// What the scripts have in common: where the accelerator is, what is sent through it, and how. Twice each: what
/// is mapped for a program goes with it, and the next one has other memory.
const PRELUDE: &str = "
    set -e
    cd /tmp
    address=$(basename $(dirname $(grep -l 0x7261 /sys/bus/pci/devices/*/device)))
    function=/sys/bus/pci/devices/$address
    program() { /tmp/programs/run \"$@\"; }
    accel() { program rackbus accel run \"$@\"; }
    bind() { bind_at $address $1; }
    bind_at() {
        [ ! -e /sys/bus/pci/devices/$1/driver ] || echo $1 >/sys/bus/pci/devices/$1/driver/unbind
        echo $2 >/sys/bus/pci/devices/$1/driver_override
        echo $1 >/sys/bus/pci/drivers_probe
    }
    tried() {
        for size in 0 1 1000000; do
            head -c $size /dev/urandom >in
            accel zstd+aes256gcm --key key <in >sealed
            accel aes256gcm-open+unzstd --key key <sealed >out
            cmp in out
            accel sha256 <in >digest
            [ \"$(cat digest)\" = \"$(sha256sum <in | cut -d' ' -f1)\" ]
        done
        head -c 200000 /dev/urandom >in
        program seal pci <in | grep '^4 blocks, 200000 bytes'
        echo \"$1: right\"
    }
    head -c 32 /dev/urandom >key
";

/// A guest with the programs and a function, and what more QEMU is to be told.
fn start(
    rack: &RackProcesses,
    name: &str,
    release: &str,
    functions: &[&str],
    more: &[&str],
) -> Result<Guest> {
    let example = programs::accelerator_example(rack)?;
    let disk = programs::qemu_arguments(&programs::disk_with(rack, &["rackbus"], &[example])?);
    let mut arguments = vec!["--"];
    arguments.extend(disk.iter().map(String::as_str));
    arguments.extend(more);
    let mut guest = Guest::start_with(rack, name, HOST, release, functions, &arguments)?;
    guest.booted()?;
    guest.run(&programs::unpack("/dev/vdb"))?;
    Ok(guest)
}

fn run(guest: &mut Guest, script: &str) -> Result<()> {
    println!("{}", guest.run(&format!("{PRELUDE}{script}"))?.trim());
    Ok(())
}

/// What QEMU is told for a guest that translates its functions' DMA.
const IOMMU: [&str; 2] = ["-device", "intel-iommu,intremap=on,caching-mode=on"];

/// The kernels of two releases.
const RELEASES: [&str; 2] = ["bookworm", "trixie"];

/// For root, in a guest without an IOMMU: with no driver, and with the kernel's for user space.
pub fn without_iommu(world: &mut RackWithGuests) -> Result<()> {
    without_iommu_in(world, RELEASES[0])
}

/// For anybody who may, in a guest that translates its functions' DMA.
pub fn with_iommu(world: &mut RackWithGuests) -> Result<()> {
    with_iommu_in(world, RELEASES[1])
}

/// Both, each on the other kernel.
pub fn in_other_guests(world: &mut RackWithGuests) -> Result<()> {
    without_iommu_in(world, RELEASES[1])?;
    with_iommu_in(world, RELEASES[0])
}

fn without_iommu_in(world: &mut RackWithGuests, release: &str) -> Result<()> {
    let mut guest = start(&world.rack, "uio", release, &["alpha/accel0.vf1"], &[])?;
    let said = guest.run(&format!("{PRELUDE} ! accel sha256 <key 2>&1"))?;
    ensure!(said.contains("nr_hugepages"), "without huge pages: {said}");
    run(&mut guest, "echo 4 >/proc/sys/vm/nr_hugepages; tried 'no driver'")?;
    run(&mut guest, "modprobe uio_pci_generic; bind uio_pci_generic; tried uio_pci_generic")?;
    guest.stop(&world.rack)
}

fn with_iommu_in(world: &mut RackWithGuests, release: &str) -> Result<()> {
    let mut guest = start(&world.rack, "vfio", release, &["alpha/accel0.vf2"], &IOMMU)?;
    let said = guest.run(&format!("{PRELUDE} ! accel sha256 <key 2>&1"))?;
    ensure!(said.contains("bind it to vfio-pci"), "with an IOMMU and no driver: {said}");
    run(&mut guest, "modprobe vfio_iommu_type1; modprobe vfio-pci; bind vfio-pci; tried vfio-pci")?;
    run(
        &mut guest,
        "chown 65534 /dev/vfio/$(basename $(readlink $function/iommu_group))
         program() { setpriv --reuid 65534 --clear-groups /tmp/programs/run \"$@\"; }
         tried 'vfio-pci, not root'",
    )?;
    guest.stop(&world.rack)
}

/// What a guest's drive has, through its accelerator, and the same by plain calls: chains whose results say all of the
/// input, with messages of several sizes, the last of which is shorter.
const DRIVE: &str = "
    drive=$(basename $(dirname $(grep -l 0x010802 /sys/bus/pci/devices/*/class)))
    filled() {
        head -c 800000 /dev/urandom >noise
        { cat noise; head -c 1000000 /dev/zero; cat noise; } >data
        truncate -s 3145728 data
        dd if=data of=/dev/nvme0n1 bs=1M oflag=direct status=none
        ! accel copy --drive $drive 2>said || exit 1
        grep 'driven by nvme' said
        truncate -s 2621440 data
    }
    through() {
        accel copy --drive $drive --length 2621440 >out
        cmp data out
        for size in 262144 1048576; do
            rm -f part.*; split -b $size -d -a 4 data part.
            accel zstd+sha256 --drive $drive --length 2621440 --message $size >all
            at=0; for part in part.*; do
                echo \"$(accel zstd+sha256 <$part)  $at\"; at=$((at + size))
            done >each
            cmp all each
        done
        head -c 16 /dev/zero | od -An -tx1 | tr -d ' \\n' >counter
        accel aes256ctr+copy --key key --counter $(cat counter) --drive $drive --from 1M --length 1M --message 64K >all
        tail -c +1048577 data | head -c 1048576 | accel aes256ctr --key key --counter $(cat counter) >each
        cmp all each
        ! accel copy --drive $drive --from 1G 2>said || exit 1
        grep 'beyond the drive' said
        echo \"$1: a drive's data came right\"
    }
";

/// How long all messages of a drive and each by itself may take: without KVM, and with programs that are not optimised.
const DRIVE_LIMIT: Duration = Duration::from_secs(240);

fn run_drive(guest: &mut Guest, script: &str) -> Result<()> {
    let script = format!("{PRELUDE}{DRIVE}{script}");
    let running = guest.begin(&script, DRIVE_LIMIT)?;
    println!("{}", succeeded(guest.name(), &script, &running.wait()?)?.trim());
    Ok(())
}

/// A drive and an accelerator of one guest, which translates their DMA, or gives them physical addresses.
pub fn from_drives(world: &mut RackWithGuests) -> Result<()> {
    let functions = ["alpha/nvme2", "alpha/accel0.vf1"];
    let mut guest = start(&world.rack, "inline", RELEASES[0], &functions, &[])?;
    run_drive(
        &mut guest,
        "echo 8 >/proc/sys/vm/nr_hugepages
         filled
         echo $drive >/sys/bus/pci/devices/$drive/driver/unbind; through 'no driver'
         modprobe uio_pci_generic; bind uio_pci_generic; bind_at $drive uio_pci_generic
         through uio_pci_generic",
    )?;
    guest.stop(&world.rack)?;
    let functions = ["alpha/nvme2", "alpha/accel0.vf2"];
    let mut guest = start(&world.rack, "inline", RELEASES[1], &functions, &IOMMU)?;
    run_drive(
        &mut guest,
        "modprobe vfio_iommu_type1; modprobe vfio-pci; bind vfio-pci
         filled
         echo $drive >/sys/bus/pci/devices/$drive/driver/unbind
         ! accel copy --drive $drive 2>said || exit 1
         grep 'bind it to vfio-pci' said
         bind_at $drive vfio-pci; through vfio-pci",
    )?;
    guest.stop(&world.rack)
}
