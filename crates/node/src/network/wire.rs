//! How the frames of an uplink are taken from its interface and given to it: by a packet socket, which leaves checksums
//! and segments to others, or by AF_XDP, where frames are as they are on the wire.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rackbus_fabric::rack::UplinkMode;
use rackbus_memory::vectored::write_with_head;
use rackbus_net::cut::{Cut, complete_checksum, missing_checksum};
use rackbus_net::fragment::fragments;
use rackbus_net::offload::{GSO_NONE, GSO_UDP_L4, NEEDS_CSUM};
use rackbus_net::{Cause, Frame, Offload};
use rackbus_netdev::packet::{PacketError, PacketSocket};
use rackbus_netdev::xdp::XdpPort;
use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

/// The interface of an uplink.
#[derive(Debug)]
pub enum UplinkWire {
    /// Frames go through a packet socket.
    Packet(PacketSocket),
    /// Frames go through AF_XDP rings.
    Xdp(Box<XdpPort>),
}

impl UplinkWire {
    /// Takes all frames that come to the interface `name`.
    ///
    /// # Errors
    /// [`PacketError`].
    pub fn open(name: &str, mode: UplinkMode) -> Result<UplinkWire, PacketError> {
        let packet = || PacketSocket::open(name).map(UplinkWire::Packet);
        let xdp = |copies| XdpPort::open(name, copies).map(|port| UplinkWire::Xdp(Box::new(port)));
        match mode {
            UplinkMode::Packet => packet(),
            UplinkMode::Xdp => xdp(true),
            UplinkMode::Auto => xdp(false).or_else(|cause| {
                tracing::debug!(%cause, "an uplink is used by a packet socket");
                packet()
            }),
        }
    }

    /// How frames come, for people.
    pub fn way(&self) -> &'static str {
        match self {
            UplinkWire::Packet(_) => "packet socket",
            UplinkWire::Xdp(port) => port.mode().words(),
        }
    }

    /// Name of the interface.
    pub fn name(&self) -> &str {
        match self {
            UplinkWire::Packet(socket) => socket.name(),
            UplinkWire::Xdp(port) => port.name(),
        }
    }

    /// Bytes of the longest IP packet that it takes.
    ///
    /// # Errors
    /// When it is gone.
    pub fn mtu(&self) -> io::Result<u16> {
        match self {
            UplinkWire::Packet(socket) => socket.mtu(),
            UplinkWire::Xdp(port) => port.mtu(),
        }
    }

    /// Whether it is up and has a carrier.
    pub fn is_up(&self) -> bool {
        match self {
            UplinkWire::Packet(socket) => socket.is_up(),
            UplinkWire::Xdp(port) => port.is_up(),
        }
    }

    /// The next frame, which goes into `buffer`; what is left to do to it, and its length.
    pub fn read(&mut self, buffer: &mut [u8]) -> Option<(Offload, usize)> {
        match self {
            UplinkWire::Packet(socket) => match socket.read(buffer) {
                Ok((header, length)) => Some((Offload::read_from_bytes(&header).ok()?, length)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
                Err(cause) => {
                    tracing::debug!(%cause, "an uplink cannot be read");
                    None
                }
            },
            UplinkWire::Xdp(port) => {
                let length = port.read(buffer)?;
                // Interfaces in memory leave checksums to each other, and cannot say so here.
                Some((missing_checksum(&buffer[..length]), length))
            }
        }
    }

    /// Frames that came, for whomever, and that the kernel or this process had no room for, since it was asked last.
    pub fn missed(&mut self) -> u64 {
        match self {
            UplinkWire::Packet(socket) => socket.missed(),
            UplinkWire::Xdp(port) => port.missed(),
        }
    }

    /// Sends a frame with nothing left to do to it, if there is room: nobody waits for it.
    pub fn put(&mut self, frame: &[u8]) {
        match self {
            UplinkWire::Packet(socket) => {
                let offload = Offload::default();
                let parts = [io::IoSlice::new(offload.as_bytes()), io::IoSlice::new(frame)];
                let _ = rustix::io::writev(socket, &parts);
            }
            UplinkWire::Xdp(port) => {
                port.put(frame);
                port.flush();
            }
        }
    }

    /// Gives it a frame.
    ///
    /// # Errors
    /// Why it is dropped.
    pub fn write(&mut self, frame: &Frame<'_>) -> Result<(), Cause> {
        match self {
            UplinkWire::Packet(socket) => write_frame(socket.as_fd(), frame),
            UplinkWire::Xdp(port) => write_whole(port, frame),
        }
    }

    /// Gives it the fragments of a packet that is too long for it.
    ///
    /// # Errors
    /// Why one is dropped, and what follows it.
    pub fn write_fragments(&mut self, frame: &Frame<'_>, mtu: u16) -> Result<(), Cause> {
        in_pieces(frame, |packet| {
            let fragments = fragments(packet, mtu).ok_or(Cause::Length)?;
            fragments.iter().try_for_each(|fragment| self.put_piece(fragment))
        })
    }

    /// Gives it a frame that is as it has to be on a wire.
    fn put_piece(&mut self, piece: &[u8]) -> Result<(), Cause> {
        match self {
            UplinkWire::Packet(socket) => write_piece(socket.as_fd(), piece),
            UplinkWire::Xdp(port) => put_piece(port, piece),
        }
    }

    /// Whether VLAN tags that the interface's peer keeps beside frames are lost: those of interfaces in memory.
    pub fn loses_tags(&self) -> bool {
        let device = std::path::Path::new("/sys/class/net").join(self.name()).join("device");
        matches!(self, UplinkWire::Xdp(_)) && !device.exists()
    }

    /// Whether the interface had no room yet for something that was given to it.
    pub fn has_unsent(&self) -> bool {
        matches!(self, UplinkWire::Xdp(port) if port.has_unsent())
    }

    /// Has the interface send what it had no room for before.
    pub fn flush_rest(&mut self) {
        if self.has_unsent() {
            self.flush();
        }
    }

    /// Has the interface send what was given to it.
    pub fn flush(&mut self) {
        if let UplinkWire::Xdp(port) = self {
            port.flush();
        }
    }
}

impl AsFd for UplinkWire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            UplinkWire::Packet(socket) => socket.as_fd(),
            UplinkWire::Xdp(port) => port.as_fd(),
        }
    }
}

/// Puts a frame into the ring as it has to be on a wire.
fn write_whole(port: &mut XdpPort, frame: &Frame<'_>) -> Result<(), Cause> {
    in_pieces(frame, |piece| put_piece(port, piece))
}

fn put_piece(port: &mut XdpPort, piece: &[u8]) -> Result<(), Cause> {
    if port.put(piece) { Ok(()) } else { Err(Cause::Full) }
}

/// Gives a frame to an interface of the kernel, by a packet socket or the queue of a TAP device.
///
/// # Errors
/// Why it is dropped.
pub fn write_frame(interface: BorrowedFd<'_>, frame: &Frame<'_>) -> Result<(), Cause> {
    match write_with_head(interface, frame.offload.as_bytes(), frame.bytes) {
        Ok(_) => Ok(()),
        Err(Errno::INVAL) => write_datagrams(interface, frame),
        Err(error) => Err(cause_of(error)),
    }
}

/// Why a frame is dropped that an interface of the kernel did not take.
fn cause_of(error: Errno) -> Cause {
    match error {
        Errno::INVAL => Cause::Offload,
        Errno::MSGSIZE => Cause::Length,
        Errno::NOBUFS | Errno::AGAIN | Errno::NOMEM => Cause::Full,
        // `EIO`: a TAP device that is down; `ENETDOWN` and `ENXIO`: another interface that is, or is gone.
        _ => Cause::Down,
    }
}

/// Gives datagrams one by one to a kernel that takes no frame of many of them: Linux before 6.2.
fn write_datagrams(interface: BorrowedFd<'_>, frame: &Frame<'_>) -> Result<(), Cause> {
    if frame.offload.gso_type != GSO_UDP_L4 {
        return Err(Cause::Offload);
    }
    in_pieces(frame, |piece| write_piece(interface, piece))
}

/// Gives a frame that is as it has to be on a wire.
fn write_piece(interface: BorrowedFd<'_>, piece: &[u8]) -> Result<(), Cause> {
    let nothing = Offload::default();
    let parts = [io::IoSlice::new(nothing.as_bytes()), io::IoSlice::new(piece)];
    rustix::io::writev(interface, &parts).map(|_| ()).map_err(cause_of)
}

/// A frame as it has to be on a wire: with its checksums, in pieces that fit, each of which is given to `put`.
fn in_pieces(
    frame: &Frame<'_>,
    mut put: impl FnMut(&[u8]) -> Result<(), Cause>,
) -> Result<(), Cause> {
    // Its sender may change it: what is cut is what was read.
    let mut bytes = vec![0; frame.bytes.len()];
    frame.bytes.copy_to(&mut bytes);
    if frame.offload.gso_type == GSO_NONE {
        if frame.offload.flags & NEEDS_CSUM != 0 {
            complete_checksum(&mut bytes, &frame.offload);
        }
        return put(&bytes);
    }
    let mut cut = Cut::new(bytes, &frame.offload).map_err(|_| Cause::Offload)?;
    let mut piece = Vec::new();
    while cut.next(&mut piece) {
        put(&piece)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rackbus_memory::SharedMemory;
    use rackbus_net::offload::GSO_TCPV4;

    use super::*;

    #[test]
    fn an_interface_without_room_is_full_and_one_that_does_not_work_is_down() {
        for (error, cause) in [
            (Errno::INVAL, Cause::Offload),
            (Errno::MSGSIZE, Cause::Length),
            (Errno::NOBUFS, Cause::Full),
            (Errno::AGAIN, Cause::Full),
            (Errno::NOMEM, Cause::Full),
            (Errno::IO, Cause::Down),
            (Errno::NETDOWN, Cause::Down),
            (Errno::NXIO, Cause::Down),
        ] {
            assert_eq!(cause_of(error), cause, "{error}");
        }
    }

    #[test]
    fn datagrams_are_given_one_by_one_where_they_are_not_taken_together() {
        const HEADERS: usize = 14 + 20 + 8;
        let mut bytes = vec![2; HEADERS + 100];
        bytes[12..14].copy_from_slice(&[8, 0]);
        (bytes[14], bytes[23]) = (0x45, 17);
        (bytes[20], bytes[21]) = (0x40, 0);
        let memory = SharedMemory::create("frame", 4096).unwrap();
        let place = memory.whole().part(0, bytes.len()).unwrap();
        place.copy_from(&bytes);
        let offload = Offload {
            flags: NEEDS_CSUM,
            gso_type: GSO_UDP_L4,
            hdr_len: (HEADERS as u16).into(),
            gso_size: 40.into(),
            csum_start: 34.into(),
            csum_offset: 6.into(),
        };
        let frame = Frame { offload, bytes: place };
        let (ours, theirs) = std::os::unix::net::UnixDatagram::pair().unwrap();
        write_datagrams(ours.as_fd(), &frame).unwrap();
        theirs.set_nonblocking(true).unwrap();
        let mut buffer = [0; 2000];
        for payload in [40, 40, 20] {
            let length = theirs.recv(&mut buffer).unwrap();
            let header = Offload::default();
            assert_eq!(length, header.as_bytes().len() + HEADERS + payload);
            assert!(buffer.starts_with(header.as_bytes()));
        }
        assert!(theirs.recv(&mut buffer).is_err());
        let other = Frame { offload: Offload { gso_type: GSO_TCPV4, ..offload }, bytes: place };
        assert_eq!(write_datagrams(ours.as_fd(), &other), Err(Cause::Offload));
    }
}
