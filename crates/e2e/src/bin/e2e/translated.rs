//! A guest that translates its functions' DMA by itself: each page that its driver maps is told to the lender, and
//! queues and buffers lie in many such mappings.

use std::time::Duration;

use rackbus_e2e::guest::succeeded;
use rackbus_e2e::{Guest, Result, ensure};

use crate::RackWithGuests;
use crate::guests::remove;

/// QEMU tells vfio-user servers of mappings in caching mode only.
const IOMMU: [&str; 3] = ["--", "-device", "intel-iommu,intremap=on,caching-mode=on"];

/// How long fio may take: each of its buffers is mapped and unmapped by messages.
const FIO: Duration = Duration::from_secs(240);

/// The kind of the drive's IOMMU domain: `DMA` or `DMA-FQ` where the kernel maps what a driver asks for.
const DOMAIN: &str = "cat $(readlink -f /sys/class/nvme/nvme0/device)/iommu_group/type";

/// Deep queues, and transfers of many pages at odd places; all is verified.
const VERIFY: &str = "cd /tmp && fio --name=verify --filename=/dev/nvme0n1 --rw=randrw \
    --bsrange=4k-256k --direct=1 --ioengine=libaio --iodepth=16 --numjobs=4 --size=8M \
    --offset_increment=8M --verify=crc32c --verify_fatal=1 --group_reporting";

/// A drive that is there at boot, and one that is plugged in after it has gone.
pub fn drives(world: &mut RackWithGuests) -> Result<()> {
    let rack = &world.rack;
    let mut guest =
        Guest::start_with(rack, "translating", "gamma", "trixie", &["alpha/nvme0"], &IOMMU)?;
    guest.booted()?;
    guest.wait_drives(1)?;
    verified(&mut guest)?;
    remove(rack, &mut guest, "translating", "alpha/nvme0")?;
    rack.json(&["vm", "add", "translating", "alpha/nvme1"])?;
    guest.wait_drives(1)?;
    verified(&mut guest)?;
    let refused = rack.device("alpha/nvme1")?["report"]["dma_refused"].clone();
    ensure!(refused == 0, "the drive was refused {refused} accesses to its guest's memory");
    guest.stop(rack)
}

fn verified(guest: &mut Guest) -> Result<()> {
    let domain = guest.run(DOMAIN)?;
    ensure!(domain.starts_with("DMA"), "the guest does not translate the drive's DMA: {domain}");
    let running = guest.begin(VERIFY, FIO)?;
    let said = succeeded(guest.name(), VERIFY, &running.wait()?)?;
    ensure!(said.contains("err= 0") && said.contains("read: IOPS"), "fio found errors: {said}");
    Ok(())
}
