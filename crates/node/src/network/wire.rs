//! How the frames of an uplink are taken from its interface and given to it: by a packet socket, which leaves checksums
//! and segments to others, or by AF_XDP, where frames are as they are on the wire.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rackbus_fabric::rack::UplinkMode;
use rackbus_memory::vectored::write_with_head;
use rackbus_net::cut::{Cut, complete_checksum, missing_checksum};
use rackbus_net::offload::{GSO_NONE, NEEDS_CSUM};
use rackbus_net::{Cause, Frame, Offload};
use rackbus_netdev::packet::{PacketError, PacketSocket};
use rackbus_netdev::xdp::XdpPort;
use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

/// The interface of an uplink.
#[derive(Debug)]
pub enum UplinkWire {
    /// By a packet socket.
    Packet(PacketSocket),
    /// By AF_XDP.
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
            UplinkWire::Packet(socket) => {
                match write_with_head(socket.as_fd(), frame.offload.as_bytes(), frame.bytes) {
                    Ok(_) => Ok(()),
                    Err(Errno::MSGSIZE) => Err(Cause::Length),
                    Err(Errno::INVAL) => Err(Cause::Offload),
                    Err(Errno::NOBUFS | Errno::AGAIN) => Err(Cause::Full),
                    Err(_) => Err(Cause::Down),
                }
            }
            UplinkWire::Xdp(port) => write_whole(port, frame),
        }
    }

    /// Whether VLAN tags that the interface's peer keeps beside frames are lost: those of interfaces in memory.
    pub fn loses_tags(&self) -> bool {
        let device = std::path::Path::new("/sys/class/net").join(self.name()).join("device");
        matches!(self, UplinkWire::Xdp(_)) && !device.exists()
    }

    /// Has the interface send what it had no room for before.
    pub fn flush_rest(&mut self) {
        if let UplinkWire::Xdp(port) = self
            && port.has_unsent()
        {
            port.flush();
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

/// Puts a frame into the ring as it has to be on a wire: with its checksums, in pieces that fit.
fn write_whole(port: &mut XdpPort, frame: &Frame<'_>) -> Result<(), Cause> {
    // Its sender may change it: what is cut is what was read.
    let mut bytes = vec![0; frame.bytes.len()];
    frame.bytes.copy_to(&mut bytes);
    if frame.offload.gso_type == GSO_NONE {
        if frame.offload.flags & NEEDS_CSUM != 0 {
            complete_checksum(&mut bytes, &frame.offload);
        }
        return if port.put(&bytes) { Ok(()) } else { Err(Cause::Full) };
    }
    let mut cut = Cut::new(bytes, &frame.offload).map_err(|_| Cause::Offload)?;
    let mut piece = Vec::new();
    while cut.next(&mut piece) {
        if !port.put(&piece) {
            return Err(Cause::Full);
        }
    }
    Ok(())
}
