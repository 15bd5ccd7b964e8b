//! Accelerators in stock guests: `rackbus accel run` and a C program there, without a kernel module of ours.

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
    bind() {
        [ ! -e $function/driver ] || echo $address >$function/driver/unbind
        echo $1 >$function/driver_override
        echo $address >/sys/bus/pci/drivers_probe
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
    function: &str,
    more: &[&str],
) -> Result<Guest> {
    let example = programs::accelerator_example(rack)?;
    let disk = programs::qemu_arguments(&programs::disk_with(rack, &["rackbus"], &[example])?);
    let mut arguments = vec!["--"];
    arguments.extend(disk.iter().map(String::as_str));
    arguments.extend(more);
    let mut guest = Guest::start_with(rack, name, HOST, release, &[function], &arguments)?;
    guest.booted()?;
    guest.run(&programs::unpack("/dev/vdb"))?;
    Ok(guest)
}

fn run(guest: &mut Guest, script: &str) -> Result<()> {
    println!("{}", guest.run(&format!("{PRELUDE}{script}"))?.trim());
    Ok(())
}

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
    let mut guest = start(&world.rack, "uio", release, "alpha/accel0.vf1", &[])?;
    let said = guest.run(&format!("{PRELUDE} ! accel sha256 <key 2>&1"))?;
    ensure!(said.contains("nr_hugepages"), "without huge pages: {said}");
    run(&mut guest, "echo 4 >/proc/sys/vm/nr_hugepages; tried 'no driver'")?;
    run(&mut guest, "modprobe uio_pci_generic; bind uio_pci_generic; tried uio_pci_generic")?;
    guest.stop(&world.rack)
}

fn with_iommu_in(world: &mut RackWithGuests, release: &str) -> Result<()> {
    let iommu = ["-device", "intel-iommu,intremap=on,caching-mode=on"];
    let mut guest = start(&world.rack, "vfio", release, "alpha/accel0.vf2", &iommu)?;
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
