//! The newest of the kernels that set-up prepares, with borrowed drives.

use rackbus_e2e::{Guest, Result};

use crate::RackWithGuests;
use crate::guests::each_queue;

/// It stays in the VM until that ends: it has MSI-X, which QEMU up to 11.1 cannot unplug. It has a memory buffer of 8 MiB.
const WITH_MSIX: &str = "beta/nvme1";
/// It is plugged in while the guest runs, and unplugged.
const WITH_MSI: &str = "alpha/nvme0";

/// Linux 7 drives one drive with MSI-X and another one with MSI, and has a queue for each processor on both: all queues
/// do I/O, whose data is verified. Programs get the memory buffer of the first one from it.
pub fn newest(world: &mut RackWithGuests) -> Result<()> {
    let rack = &world.rack;
    let kept = [WITH_MSIX];
    let mut guest =
        Guest::start_with(rack, "newest", "gamma", "trixie-backports", &kept, &["--msix"])?;
    guest.booted()?;
    guest.wait_drives(1)?;
    println!("            Linux {}", guest.run("uname -r")?.trim());
    each_queue(&mut guest, "nvme0", "PCI-MSIX")?;
    own_buffer(&mut guest)?;
    rack.json(&["vm", "add", "newest", WITH_MSI])?;
    guest.wait_drives(2)?;
    each_queue(&mut guest, "nvme1", "PCI-MSI-")?;
    rack.json(&["vm", "remove", "newest", WITH_MSI])?;
    guest.wait_drives(1)?;
    guest.stop(rack)
}

/// This kernel has `CONFIG_PCI_P2PDMA`: its NVMe driver offers the drive's memory buffer, fio maps a part of it, and the
/// drive reads into that and writes from it.
fn own_buffer(guest: &mut Guest) -> Result<()> {
    guest
        .run(
            "at=/sys/class/nvme/nvme0/device/p2pmem; cd /tmp\n\
             [ \"$(cat $at/size)\" = 8388608 ] || { ls $at; cat $at/size; exit 1; }\n\
             fio --name=buffer --filename=/dev/nvme0n1 --iomem=mmapshared:$at/allocate --direct=1 \
             --rw=randrw --bs=64k --size=4M --verify=crc32c --verify_fatal=1 >fio.out 2>&1 || \
             { cat fio.out; dmesg | tail; exit 1; }",
        )
        .map(drop)
}
