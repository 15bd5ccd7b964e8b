//! A network interface of this machine as a switch port: a packet socket (packet(7)) that takes all frames, with
//! what is left to do to them (`PACKET_VNET_HDR`), so that one large segment stays one frame where the interface has
//! it so.
//!
//! Frames come by a ring that is shared with the kernel (`ring`), and large ones by system calls.
//! The kernel takes the outer VLAN tag out of a frame and tells it beside; it is put back.
#![allow(unsafe_code)] // socket options and messages that no library has

mod ring;

use std::cell::Cell;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use ring::{ReceiveRing, Slot};

/// Bytes of a frame's header of what is left to do (`struct virtio_net_hdr`).
pub const HEADER: usize = 10;
/// Bytes before a VLAN tag.
const ADDRESSES: usize = 12;
/// Bytes of a VLAN tag.
const TAG: usize = 4;
/// In the header's flags: a checksum is to be computed.
const NEEDS_CSUM: u8 = 1;
/// Where the header has the length of all headers, and where the checksum begins to count.
const LENGTHS: [usize; 2] = [2, 6];
/// Bytes that the kernel keeps for frames that were not read yet.
const RECEIVE_BUFFER: libc::c_int = 4 << 20;

/// A packet socket on one interface.
#[derive(Debug)]
pub struct PacketSocket {
    socket: OwnedFd,
    interface: Interface,
    /// None where the kernel has no memory for it.
    ring: Option<ReceiveRing>,
    /// Frames that did not fit into a buffer.
    cut_off: Cell<u64>,
}

/// Why an interface cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PacketError {
    /// There is none of that name.
    #[error("there is no network interface {0:?} in this network namespace; `ip link` lists them")]
    NoInterface(String),
    /// The process may not.
    #[error(
        "packets of {0} may not be sent and received; run the node as root, or with CAP_NET_RAW"
    )]
    NotPermitted(String),
    /// The system refused the step that is named.
    #[error("the network interface {0}: {1}")]
    System(String, io::Error),
}

impl PacketSocket {
    /// Takes all frames that come to the interface `name`, in the network namespace of the calling thread.
    ///
    /// # Errors
    /// [`PacketError`].
    pub fn open(name: &str) -> Result<PacketSocket, PacketError> {
        let fail = |cause| refused(name, cause);
        let (socket, interface) = keeper(name)?;
        for option in [libc::PACKET_VNET_HDR, libc::PACKET_AUXDATA, libc::PACKET_IGNORE_OUTGOING] {
            set(&socket, libc::SOL_PACKET, option, &1 as &libc::c_int).map_err(fail)?;
        }
        // Without the right to more it is as much as everybody may have (`net.core.rmem_max`).
        set(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &RECEIVE_BUFFER)
            .or_else(|_| set(&socket, libc::SOL_SOCKET, libc::SO_RCVBUF, &RECEIVE_BUFFER))
            .map_err(fail)?;
        let ring = ReceiveRing::new(&socket, interface.mtu(&socket).map_err(fail)?).ok();
        bind(&socket, interface.index).map_err(fail)?;
        Ok(PacketSocket { socket, interface, ring, cut_off: Cell::new(0) })
    }

    /// Name of its interface.
    pub fn name(&self) -> &str {
        &self.interface.name
    }

    /// Bytes of the longest IP packet that the interface takes.
    ///
    /// # Errors
    /// When it is gone.
    pub fn mtu(&self) -> io::Result<u16> {
        self.interface.mtu(&self.socket)
    }

    /// Whether the interface is up and has a carrier. That it was down is forgotten with this: the system calls the socket
    /// readable until somebody has heard of it, and who takes frames out of the ring does not.
    pub fn is_up(&self) -> bool {
        let _ = get(&self.socket, libc::SOL_SOCKET, libc::SO_ERROR, 0 as libc::c_int);
        self.interface.is_up(&self.socket)
    }

    /// Frames that came and were dropped since it was asked last: those that the kernel had no room for, and those that
    /// had none in a buffer.
    pub fn missed(&self) -> u64 {
        let nothing = libc::tpacket_stats { tp_packets: 0, tp_drops: 0 };
        // The kernel begins anew each time that it is asked.
        let told = get(&self.socket, libc::SOL_PACKET, libc::PACKET_STATISTICS, nothing);
        let dropped = told.map_or(0, |told| u64::from(told.tp_drops));
        dropped + self.cut_off.take()
    }

    /// The next frame, which goes into `buffer`; what is left to do to it, and its length. What has no room with
    /// a tag is left out.
    ///
    /// # Errors
    /// The system's: `WouldBlock` when there is none now.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<([u8; HEADER], usize)> {
        loop {
            let Received { mut header, length, tag } = self.next(buffer)?;
            if length.is_none() {
                self.cut_off.set(self.cut_off.get() + 1);
            }
            let Some(length) = length.filter(|length| *length >= ADDRESSES) else { continue };
            let Some(tag) = tag else { return Ok((header, length)) };
            buffer.copy_within(ADDRESSES..length, ADDRESSES + TAG);
            buffer[ADDRESSES..ADDRESSES + TAG].copy_from_slice(&tag);
            move_on(&mut header);
            return Ok((header, length + TAG));
        }
    }

    fn next(&mut self, buffer: &mut [u8]) -> io::Result<Received> {
        let Some(ring) = &mut self.ring else { return self.receive(buffer) };
        match ring.take(buffer) {
            Slot::Empty => Err(io::ErrorKind::WouldBlock.into()),
            Slot::Taken(received) => Ok(received),
            Slot::Queued => {
                // An error of the interface's (it was down) is told once, before the frame, which stays in the queue.
                let is_of_interface = |error: &io::Error| error.kind() != io::ErrorKind::WouldBlock;
                let received = match self.receive(buffer) {
                    Err(error) if is_of_interface(&error) => self.receive(buffer),
                    received => received,
                };
                let stays = received.as_ref().is_err_and(is_of_interface);
                if let Some(ring) = self.ring.as_mut().filter(|_| !stays) {
                    ring.release();
                }
                received
            }
        }
    }

    fn receive(&self, buffer: &mut [u8]) -> io::Result<Received> {
        let mut header = [0; HEADER];
        // Room for a tag behind what is read.
        let room = buffer.len().saturating_sub(TAG);
        let mut parts = [
            libc::iovec { iov_base: header.as_mut_ptr().cast(), iov_len: HEADER },
            libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: room },
        ];
        let mut control = Control([0; 64]);
        // SAFETY: all zeroes are such a structure.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (parts.as_mut_ptr(), parts.len());
        (message.msg_control, message.msg_controllen) =
            (control.0.as_mut_ptr().cast(), control.0.len());
        // SAFETY: all parts of the message are writable for their lengths as long as the call lasts.
        let read = unsafe { libc::recvmsg(self.socket.as_raw_fd(), &mut message, 0) };
        let read = usize::try_from(read).map_err(|_| io::Error::last_os_error())?;
        let whole = message.msg_flags & libc::MSG_TRUNC == 0;
        let length = read.checked_sub(HEADER).filter(|_| whole);
        Ok(Received { header, length, tag: tag(&message) })
    }
}

/// Why the interface `name` cannot be used, as the system says it.
pub(crate) fn refused(name: &str, cause: io::Error) -> PacketError {
    match cause.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => PacketError::NotPermitted(name.to_owned()),
        Some(libc::ENODEV | libc::ENXIO) => PacketError::NoInterface(name.to_owned()),
        _ => PacketError::System(name.to_owned(), cause),
    }
}

/// A socket that keeps the interface `name` promiscuous. Nothing comes to it before it is bound to a protocol.
pub(crate) fn keeper(name: &str) -> Result<(OwnedFd, Interface), PacketError> {
    let fail = |cause| refused(name, cause);
    let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: the call takes numbers.
    let socket = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
    if socket < 0 {
        return Err(fail(io::Error::last_os_error()));
    }
    // SAFETY: the descriptor was made here and is nobody else's.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    let index = rustix::net::netdevice::name_to_index(&socket, name);
    let index = index.map_err(|cause| fail(cause.into()))? as libc::c_int;
    let promiscuous = libc::packet_mreq {
        mr_ifindex: index,
        mr_type: libc::PACKET_MR_PROMISC as u16,
        mr_alen: 0,
        mr_address: [0; 8],
    };
    set(&socket, libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP, &promiscuous).map_err(fail)?;
    Ok((socket, Interface { name: name.to_owned(), index }))
}

/// An interface that a socket is bound to: what its name means may change, and what the socket is bound to does not.
#[derive(Debug)]
pub(crate) struct Interface {
    pub name: String,
    pub index: libc::c_int,
}

impl Interface {
    /// Fails where its name is another interface's now, or nobody's.
    pub fn is_there(&self, socket: &OwnedFd) -> io::Result<()> {
        let index = rustix::net::netdevice::name_to_index(socket, &self.name)?;
        match libc::c_int::try_from(index) {
            Ok(index) if index == self.index => Ok(()),
            _ => Err(Errno::NODEV.into()),
        }
    }

    /// Bytes of the longest IP packet that it takes.
    pub fn mtu(&self, socket: &OwnedFd) -> io::Result<u16> {
        self.is_there(socket)?;
        let mtu = asked(socket, &self.name, libc::SIOCGIFMTU)?;
        // SAFETY: the kernel wrote this member.
        let mtu = unsafe { mtu.ifr_ifru.ifru_mtu };
        Ok(u16::try_from(mtu).unwrap_or(u16::MAX))
    }

    /// Whether it is up and has a carrier.
    pub fn is_up(&self, socket: &OwnedFd) -> bool {
        let wanted = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        // SAFETY: the kernel wrote this member.
        let has = |flags: libc::ifreq| unsafe { flags.ifr_ifru.ifru_flags } & wanted == wanted;
        self.is_there(socket).is_ok()
            && asked(socket, &self.name, libc::SIOCGIFFLAGS).is_ok_and(has)
    }
}

/// The interface takes VLAN tags out of the frames that it receives (`ETH_FLAG_RXVLAN`).
pub(crate) const TAKES_TAGS: u32 = 1 << 8;
/// Commands of `SIOCETHTOOL`: such flags are read, and set.
const GET_FLAGS: u32 = 0x25;
const SET_FLAGS: u32 = 0x26;

/// What the interface `name` does by itself to frames, as flags; they are set where some are given.
pub(crate) fn offload_flags(socket: &OwnedFd, name: &str, flags: Option<u32>) -> io::Result<u32> {
    let mut value = match flags {
        None => [GET_FLAGS, 0],
        Some(flags) => [SET_FLAGS, flags],
    };
    let mut request = request(name);
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: the command reads two words and may write the second, which are there as long as the call lasts.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &mut request) } {
        0 => Ok(value[1]),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A question about the interface `name`.
fn request(name: &str) -> libc::ifreq {
    // SAFETY: all zeroes are such a structure.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()).take(libc::IFNAMSIZ - 1) {
        *to = from as libc::c_char;
    }
    request
}

fn asked(socket: &OwnedFd, name: &str, question: libc::Ioctl) -> io::Result<libc::ifreq> {
    let mut request = request(name);
    // SAFETY: the question reads the name and writes a number, both in the structure.
    match unsafe { libc::ioctl(socket.as_raw_fd(), question, &mut request) } {
        0 => Ok(request),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A frame as the kernel gives it.
struct Received {
    header: [u8; HEADER],
    /// Its length; none where it had no room.
    length: Option<usize>,
    /// The tag that the kernel took out of it.
    tag: Option<[u8; TAG]>,
}

/// Tells that something about the interfaces of a network namespace has changed.
#[derive(Debug)]
pub struct LinkMonitor(OwnedFd);

impl LinkMonitor {
    /// For the namespace of the calling thread.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn open() -> io::Result<LinkMonitor> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let kind = SocketType::RAW;
        // No protocol is that of routes.
        let socket = socket_with(AddressFamily::NETLINK, kind, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, RTMGRP_LINK))?;
        Ok(LinkMonitor(socket))
    }

    /// Whether anything has changed since it was asked last.
    pub fn has_changed(&self) -> bool {
        let mut buffer = [0; 8192];
        let mut changed = false;
        // An error other than that there is nothing tells of messages that were lost.
        while let Ok((count, _)) =
            rustix::net::recv(&self.0, &mut buffer, rustix::net::RecvFlags::empty())
        {
            changed |= count > 0;
        }
        changed
    }

    /// Waits until something has changed, or `other` is readable, for no longer than `timeout`.
    pub fn wait(&self, other: BorrowedFd<'_>, timeout: Option<Duration>) {
        let mut both =
            [PollFd::new(&self.0, PollFlags::IN), PollFd::from_borrowed_fd(other, PollFlags::IN)];
        let timeout = timeout.and_then(|it| it.try_into().ok());
        // Interrupted, it is asked again.
        let _ = poll(&mut both, timeout.as_ref());
    }
}

impl AsFd for LinkMonitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The group of netlink messages about interfaces (rtnetlink(7)).
const RTMGRP_LINK: u32 = 1;

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Room for what is told beside a frame, aligned as that is.
#[repr(align(8))]
struct Control([u8; 64]);

/// The tag that the kernel took out of a frame and told beside it.
fn tag(message: &libc::msghdr) -> Option<[u8; TAG]> {
    // SAFETY: the kernel filled the control messages in, and said how far.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !next.is_null() {
        // SAFETY: it is one of the message's headers.
        let header = unsafe { &*next };
        let told = header.cmsg_level == libc::SOL_PACKET
            && header.cmsg_type == libc::PACKET_AUXDATA
            && header.cmsg_len >= size_of::<libc::cmsghdr>() + size_of::<libc::tpacket_auxdata>();
        if told {
            // SAFETY: the header's data is this structure, and may lie anywhere.
            let told: libc::tpacket_auxdata =
                unsafe { libc::CMSG_DATA(next).cast::<libc::tpacket_auxdata>().read_unaligned() };
            return tag_of(told.tp_status, told.tp_vlan_tpid, told.tp_vlan_tci);
        }
        // SAFETY: as for the first.
        next = unsafe { libc::CMSG_NXTHDR(message, next) };
    }
    None
}

/// A tag as the kernel tells it beside a frame.
fn tag_of(status: u32, kind: u16, value: u16) -> Option<[u8; TAG]> {
    if status & libc::TP_STATUS_VLAN_VALID == 0 {
        return None;
    }
    let kind = if status & libc::TP_STATUS_VLAN_TPID_VALID == 0 { 0x8100 } else { kind };
    let ([a, b], [c, d]) = (kind.to_be_bytes(), value.to_be_bytes());
    Some([a, b, c, d])
}

/// What is left to do to a frame lies a tag further on.
fn move_on(header: &mut [u8; HEADER]) {
    for at in LENGTHS {
        let length = u16::from_ne_bytes([header[at], header[at + 1]]);
        if at == LENGTHS[0] && length != 0 || at == LENGTHS[1] && header[0] & NEEDS_CSUM != 0 {
            let length = length.saturating_add(TAG as u16);
            header[at..at + 2].copy_from_slice(&length.to_ne_bytes());
        }
    }
}

/// Sets an option of a socket, whose value is a plain structure or number of the kernel's.
pub(crate) fn set<T>(
    socket: &OwnedFd,
    level: libc::c_int,
    option: libc::c_int,
    value: &T,
) -> io::Result<()> {
    let (value, length) = (std::ptr::from_ref(value).cast(), size_of::<T>() as libc::socklen_t);
    // SAFETY: the value is readable for its length, and the kernel copies it.
    match unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, value, length) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// An option of a socket, a plain structure of numbers; what the kernel knows nothing of stays as in `value`.
pub(crate) fn get<T: Copy>(
    socket: &OwnedFd,
    level: libc::c_int,
    option: libc::c_int,
    mut value: T,
) -> io::Result<T> {
    let mut length = size_of::<T>() as libc::socklen_t;
    let place = (&raw mut value).cast();
    // SAFETY: the value is writable for its length, and any bytes are numbers.
    match unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, place, &mut length) } {
        0 => Ok(value),
        _ => Err(io::Error::last_os_error()),
    }
}

fn bind(socket: &OwnedFd, index: libc::c_int) -> io::Result<()> {
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: (libc::ETH_P_ALL as u16).to_be(),
        sll_ifindex: index,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    bind_to(socket, &address)
}

/// Binds a socket to an address, a structure of its family.
pub(crate) fn bind_to<T>(socket: &OwnedFd, address: &T) -> io::Result<()> {
    let length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the address is readable for its length, and the kernel copies it.
    match unsafe { libc::bind(socket.as_raw_fd(), std::ptr::from_ref(address).cast(), length) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests;
