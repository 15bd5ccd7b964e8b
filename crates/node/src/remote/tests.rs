use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};

use rackbus_memory::Event;
use rackbus_pci::vfio_user::serve;

use super::*;

/// A lender's function, which tells which vectors it is asked about.
struct Vectors {
    shape: DeviceShape,
    asked: Sender<(u32, usize)>,
}

impl ServedDevice for Vectors {
    fn shape(&self) -> &DeviceShape {
        &self.shape
    }

    fn read(&self, _: FunctionRegion, _: u64, count: usize) -> Result<Vec<u8>, RequestRefused> {
        Ok(vec![0; count])
    }

    fn write(&self, _: FunctionRegion, _: u64, _: Vec<u8>, _: bool) -> Result<(), RequestRefused> {
        Ok(())
    }

    fn map(
        &self,
        _: u64,
        _: u64,
        _: Access,
        _: Option<MemoryHandle>,
    ) -> Result<(), RequestRefused> {
        Ok(())
    }

    fn unmap(&self, _: u64, _: u64) -> Result<(), RequestRefused> {
        Ok(())
    }

    fn unmap_all(&self) -> Result<(), RequestRefused> {
        Ok(())
    }

    fn set_irqs(&self, change: IrqChange) -> Result<(), RequestRefused> {
        let asked = match change {
            IrqChange::WireVectors(start, events) => (start, events.len()),
            IrqChange::FireVectors(vectors) => (u32::from(vectors[0]), vectors.len()),
            other => panic!("{other:?}"),
        };
        self.asked.send(asked).unwrap();
        Ok(())
    }

    fn reset(&self) -> Result<(), RequestRefused> {
        Ok(())
    }
}

/// A function of another host with so many vectors, and what that host is asked about.
fn remote(msix: u16, msi: u16) -> (RemoteDevice, Receiver<(u32, usize)>) {
    let (lender, borrower) = UnixStream::pair().unwrap();
    let (asked, asks) = channel();
    let device = Vectors { shape: DeviceShape::new(Vec::new(), msix, msi), asked };
    std::thread::spawn(move || serve(&lender, &device));
    (RemoteDevice::attach(Arc::new(borrower), Box::new(|_| {})).unwrap(), asks)
}

/// Physical functions have one kind of messages or both, and as many vectors of each as they like.
#[test]
fn vectors_are_wired_and_fired_whichever_kind_of_messages_a_function_has() {
    for (msix, msi, vectors) in [(4, 0, 4), (0, 4, 4), (8, 2, 8), (2, 8, 8)] {
        let (device, asks) = remote(msix, msi);
        let event = Event::new().unwrap();
        let wire = || Some(event.as_fd().try_clone_to_owned().unwrap());
        let last = vectors - 1;
        device.set_irqs(IrqChange::WireVectors(last, vec![wire()])).unwrap();
        device.set_irqs(IrqChange::FireVectors(vec![last as u16])).unwrap();
        let asked: Vec<_> = asks.try_iter().collect();
        assert_eq!(asked, [(last, 1); 2], "{msix} vectors of MSI-X, {msi} of MSI");
    }
}
