//! What goes from one process of a node to the next: bytes, and descriptors that the bytes name by number.
//!
//! It goes through a socket whose other end the next process has as its standard input: descriptors come
//! out of it as new ones, which are closed if nobody takes them, so that none is passed on by mistake.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rackbus_memory::packets::{MAX_PACKET, MAX_PACKET_DESCRIPTORS};
use rackbus_memory::{AdaptiveSpin, HandleRef, Packets, ResourceHandle, StreamError};
use rustix::fs::MemfdFlags;

/// Descriptors on their way.
#[derive(Debug, Default)]
pub struct Parcel(Vec<OwnedFd>);

impl Parcel {
    /// Puts in a copy of a descriptor; its number.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn put(&mut self, fd: BorrowedFd<'_>) -> io::Result<u32> {
        let number = u32::try_from(self.0.len()).map_err(io::Error::other)?;
        self.0.push(fd.try_clone_to_owned()?);
        Ok(number)
    }

    /// Puts in copies of several; their numbers.
    ///
    /// # Errors
    /// As [`put`](Parcel::put).
    pub fn put_all<'f>(
        &mut self,
        fds: impl IntoIterator<Item = &'f OwnedFd>,
    ) -> io::Result<Vec<u32>> {
        fds.into_iter().map(|fd| self.put(fd.as_fd())).collect()
    }

    /// The same of what leads to something of the link's.
    ///
    /// # Errors
    /// As [`put`](Parcel::put).
    pub fn put_handle(&mut self, handle: HandleRef<'_>) -> io::Result<u32> {
        self.put(handle.as_descriptor())
    }

    /// Sends it with `bytes`. What is returned is to be the standard input of the next process.
    ///
    /// # Errors
    /// When the system has no room for it.
    pub fn send(self, bytes: &[u8]) -> io::Result<OwnedFd> {
        let mut text =
            File::from(rustix::fs::memfd_create("rackbus-handover", MemfdFlags::CLOEXEC)?);
        text.write_all(bytes)?;
        let (ours, theirs) = Packets::pair()?;
        let all = std::iter::once(text.as_fd()).chain(self.0.iter().map(AsFd::as_fd));
        let all: Vec<_> = all.map(HandleRef::of_descriptor).collect();
        for some in all.chunks(MAX_PACKET_DESCRIPTORS) {
            ours.send(&[0], some).map_err(io::Error::other)?;
        }
        Ok(theirs.into())
    }
}

/// Descriptors that have come.
#[derive(Debug, Default)]
pub struct ParcelDescriptors(Vec<Option<OwnedFd>>);

/// Receives what was [sent](Parcel::send).
///
/// # Errors
/// When nothing was, or not all of it came.
pub fn receive(socket: OwnedFd) -> io::Result<(Vec<u8>, ParcelDescriptors)> {
    let packets = Packets::from_peer(socket)?;
    let (mut fds, mut buffer) = (Vec::new(), vec![0; MAX_PACKET]);
    loop {
        // All of it was sent before this process began.
        match packets.receive(&mut buffer, &mut AdaptiveSpin::default(), None) {
            Ok(packet) => {
                let packet = packet.whole().map_err(io::Error::other)?;
                fds.extend(packet.handles.into_descriptors());
            }
            Err(StreamError::Closed) => break,
            Err(error) => return Err(io::Error::other(error)),
        }
    }
    let mut fds = fds.into_iter();
    let text = fds.next().ok_or_else(|| io::Error::other("there is nothing to go on with"))?;
    let (mut text, mut bytes) = (File::from(text), Vec::new());
    text.rewind()?;
    text.read_to_end(&mut bytes)?;
    Ok((bytes, ParcelDescriptors(fds.map(Some).collect())))
}

impl ParcelDescriptors {
    /// The one with this number. Each is taken once.
    ///
    /// # Errors
    /// When there is none, or it was taken.
    pub fn take(&mut self, number: u32) -> io::Result<OwnedFd> {
        let taken = self.0.get_mut(number as usize).and_then(Option::take);
        taken.ok_or_else(|| io::Error::other(format!("there is no descriptor {number}")))
    }

    /// The same, where it leads to something of the link's.
    ///
    /// # Errors
    /// As [`take`](ParcelDescriptors::take).
    pub fn take_handle(&mut self, number: u32) -> io::Result<ResourceHandle> {
        self.take(number).map(ResourceHandle::of_descriptor)
    }

    /// Those with these numbers.
    ///
    /// # Errors
    /// As [`take`](ParcelDescriptors::take).
    pub fn take_all(&mut self, numbers: &[u32]) -> io::Result<Vec<OwnedFd>> {
        numbers.iter().map(|number| self.take(*number)).collect()
    }
}

#[cfg(test)]
mod tests {
    use rackbus_memory::Event;

    use super::*;

    #[test]
    fn bytes_and_many_descriptors_arrive_in_order() {
        let events: Vec<Event> = (0..200).map(|_| Event::new().unwrap()).collect();
        let mut parcel = Parcel::default();
        for (expected, event) in events.iter().enumerate() {
            assert_eq!(parcel.put(event.as_fd()).unwrap() as usize, expected);
        }
        let bytes = vec![7; 3 << 20];
        let (text, mut descriptors) = receive(parcel.send(&bytes).unwrap()).unwrap();
        assert_eq!(text, bytes);
        for number in [199, 0, 64] {
            let fd = descriptors.take(number).unwrap();
            rustix::io::write(&fd, &1u64.to_ne_bytes()).unwrap();
            assert!(events[number as usize].drain(), "descriptor {number} is another");
            assert!(descriptors.take(number).is_err(), "it is there twice");
        }
        assert!(descriptors.take(200).is_err());
    }
}
