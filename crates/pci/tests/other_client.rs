//! The server used by somebody else's client: the `vfio_user` crate's, which cloud-hypervisor uses.

mod common;

use std::os::fd::{AsFd, AsRawFd};

use common::{DESTINATION, GO, LENGTH, SHARED_PAGE, SOURCE, STATUS, serve_copier};
use rackbus_memory::{Event, SharedMemory};
use rackbus_spec::vfio_user::{IrqSetFlags, irq, region};

#[test]
fn a_foreign_client_drives_the_device() {
    let function = serve_copier();
    let mut client = vfio_user::Client::new(function.server().path()).unwrap();
    let bar = client.region(0).unwrap();
    assert_eq!(bar.size, 0x2000);
    assert!(bar.file_offset.is_some(), "the mappable part's descriptor arrived");
    let areas: Vec<_> = bar.sparse_areas.iter().map(|area| (area.offset, area.size)).collect();
    assert_eq!(areas, [(SHARED_PAGE, 0x1000)]);
    assert_eq!(client.get_irq_info(irq::MSIX).unwrap().count, 20);

    let memory = SharedMemory::create("foreign", 0x2000).unwrap();
    memory.whole().copy_from(b"carried over");
    client.dma_map(0, 0x4000, 0x2000, memory.as_fd().as_raw_fd()).unwrap();
    let event = Event::new().unwrap();
    let wire = (IrqSetFlags::DATA_EVENTFD | IrqSetFlags::ACTION_TRIGGER).bits();
    client.set_irqs(irq::MSIX, wire, 0, 1, &[event.as_fd().as_raw_fd()]).unwrap();
    client.region_write(region::CONFIG, 4, &6u16.to_le_bytes()).unwrap();
    client.region_write(region::CONFIG, 0x92, &0x8000u16.to_le_bytes()).unwrap();
    for (at, value) in [(SOURCE, 0x4000u64), (DESTINATION, 0x5000), (LENGTH, 12), (GO, 1)] {
        client.region_write(0, at, &value.to_le_bytes()).unwrap();
    }
    assert!(event.wait(Some(1_000_000_000)), "the interrupt arrived");
    let mut status = [0];
    client.region_read(0, STATUS, &mut status).unwrap();
    assert_eq!(status, [1]);
    let mut out = [0; 12];
    memory.region().slice(0x1000, 12).unwrap().copy_to(&mut out);
    assert_eq!(&out, b"carried over");
    client.dma_unmap(0x4000, 0x2000).unwrap();
    client.reset().unwrap();
    client.shutdown().unwrap();
}
