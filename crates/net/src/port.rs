//! The end of the network that one sender and receiver holds: a virtual network function, the interface of
//! a host, an uplink.
//!
//! A port belongs to one thread, which calls it. Between the ports of a rack are rings in shared memory: what is
//! sent is copied into the ring of its receiver, where that finds it; nothing else is copied on the way.

use std::os::fd::BorrowedFd;

use rackbus_fabric::rack::PortRules;
use rackbus_memory::DmaSlice;

use crate::address::MacAddress;
use crate::offload::Offload;

/// The longest frame: an IP packet of 65,535 bytes behind an Ethernet header with two VLAN tags.
pub const MAX_FRAME: usize = 65_535 + 14 + 8;

/// The shortest frame that a port takes: an Ethernet header. Frames are padded by whoever puts them on a wire.
pub const MIN_FRAME: usize = 14;

/// How sending a frame ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendOutcome {
    /// It was taken, and lies with all its receivers that had room.
    Done,
    /// Its receiver has no room now. It may be sent again after [`NetworkPort::wake_fd`] rang or a poll later; a port
    /// bounds for how long it says so, and drops frames for that receiver then.
    Full,
    /// It was dropped and counted.
    Dropped(Cause),
}

/// Why a frame was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Cause {
    /// Its receiver had no room for too long.
    Full,
    /// Nobody in the rack has the address that it is for, and there is no uplink.
    Unknown,
    /// It comes from an address that is not its sender's.
    Spoofed,
    /// It is in a VLAN that its sender is not in.
    Vlan,
    /// It is shorter than its headers, or longer than the network's frames.
    Length,
    /// What it leaves to others to do makes no sense.
    Offload,
    /// Its sender has used up its rate.
    Rate,
    /// Its receiver is gone, or its link is down.
    Down,
    /// It was not taken from its sender's interface in time, whose queue was full.
    Unread,
}

/// A frame that lies in a ring. Its sender may still change it: what is to be believed is read once.
#[derive(Debug, Clone, Copy)]
pub struct Frame<'a> {
    /// What is left to do to it; sound for its length.
    pub offload: Offload,
    /// The Ethernet frame, from the destination address on, without the check sequence.
    pub bytes: DmaSlice<'a>,
}

/// One end of the network.
pub trait NetworkPort: Send {
    /// The Ethernet address that it sends from and receives by. It never changes.
    fn mac(&self) -> MacAddress;

    /// Bytes of the longest IP packet that the network takes: 1280 to 65,535.
    fn mtu(&self) -> u16;

    /// Whether the network behind it works. A change rings [`NetworkPort::wake_fd`].
    fn is_up(&self) -> bool;

    /// Its owner takes frames from now on, or does not: then what is there is given up, and what comes for it is
    /// dropped ([`Cause::Down`]). A new port's owner does not.
    fn attend(&mut self, on: bool) {
        if !on {
            while self.next().is_some() {
                self.consume();
            }
        }
    }

    /// Sends a frame, whose bytes are those of `parts` in order. Never waits.
    fn send(&mut self, offload: Offload, parts: &[DmaSlice<'_>]) -> SendOutcome;

    /// Tells receivers of what was sent since the last call: one wake-up for many frames. Called after each
    /// burst.
    fn flush(&mut self);

    /// The next frame that came for it. It stays the next until it is [consumed](NetworkPort::consume).
    fn next(&mut self) -> Option<Frame<'_>>;

    /// Gives the room of the [next](NetworkPort::next) frame back.
    fn consume(&mut self);

    /// Its owner stops polling: from now on what comes, or room that became free for what was
    /// [`SendOutcome::Full`], rings [`NetworkPort::wake_fd`]. False when there is something already.
    fn park(&mut self) -> bool;

    /// Its owner polls again.
    fn unpark(&mut self);

    /// Readable when something came after [`NetworkPort::park`]; emptied by [`NetworkPort::unpark`].
    fn wake_fd(&self) -> BorrowedFd<'_>;
}

/// What the rack file says of a port.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PortOptions {
    /// Its address; without one it is [derived](MacAddress::derived) from its name.
    pub mac: Option<MacAddress>,
    /// The VLANs that it is in, and how many addresses may be behind it.
    pub rules: PortRules,
    /// It may send from its own IP addresses only.
    pub anti_spoofing: bool,
}

/// Where ports are had, by the name of the function that each is for: `alpha/nic0.vf1`.
pub trait PortSource: Send + Sync + std::fmt::Debug {
    /// The port of `function`, which nobody else holds.
    ///
    /// # Errors
    /// When it is held already, the network is down, or memory cannot be obtained.
    fn port(&self, function: &str) -> std::io::Result<Box<dyn NetworkPort>>;
}
