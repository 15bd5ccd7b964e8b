use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

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

/// A user that finds its function absent lets it go at once, which is before whoever watches the lender has looked.
#[test]
fn a_lender_that_is_lost_is_told_however_soon_its_user_lets_go() {
    for _ in 0..200 {
        let (lender, borrower) = UnixStream::pair().unwrap();
        let (asked, _asks) = channel();
        let function = Vectors { shape: DeviceShape::new(Vec::new(), 1, 0), asked };
        let ended = lender.try_clone().unwrap();
        let serving = std::thread::spawn(move || serve(&lender, &function));
        let (told, tells) = channel();
        let on_lost = Box::new(move |reason| told.send(reason).unwrap());
        let device = RemoteDevice::attach(Arc::new(borrower), on_lost).unwrap();
        ended.shutdown(std::net::Shutdown::Both).unwrap();
        let read = device.read(FunctionRegion::Config, 0, 4).unwrap();
        assert_eq!(read, [0xff; 4]);
        drop(device);
        tells.recv_timeout(Duration::from_secs(60)).expect("nobody is told");
        let _ = serving.join().unwrap();
    }
}

/// One that lets go of a function which is there has lost nothing.
#[test]
fn a_user_that_lets_go_has_not_lost_its_lender() {
    let (lender, borrower) = UnixStream::pair().unwrap();
    let (asked, _asks) = channel();
    let function = Vectors { shape: DeviceShape::new(Vec::new(), 1, 0), asked };
    std::thread::spawn(move || serve(&lender, &function));
    let (told, tells) = channel::<String>();
    let on_lost = Box::new(move |reason| told.send(reason).unwrap());
    drop(RemoteDevice::attach(Arc::new(borrower), on_lost).unwrap());
    // It ends with the thread that could tell.
    assert_eq!(tells.recv_timeout(Duration::from_secs(60)), Err(RecvTimeoutError::Disconnected));
}
