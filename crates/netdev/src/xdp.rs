//! A network interface of this machine as a switch port by AF_XDP: its frames go from the driver into memory of this
//! process, past the kernel's network stack, without a copy where the driver can do that.
//!
//! A program of five instructions, which the kernel runs for each frame, hands it to the socket of its receive queue
//! (`map`); without one the frame takes its usual way. There is no header of what is left to do: frames come
//! as they are on the wire, and go out so. All of it ends with the descriptors, and with the process, but for a setting of
//! the interface: a process that is killed leaves it without taking VLAN tags out of frames (`rxvlan`).
#![allow(unsafe_code)] // rings and frames in memory that the kernel shares, system calls that no library has

mod program;
mod ring;
mod turns;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll;

use crate::mapped::MappedArea;
use crate::packet::{self, Interface, PacketError};
use program::XdpProgram;
use ring::XdpRing;
use turns::QueueTurns;

/// Bytes of a place for a frame: a page, which every driver takes.
const PLACE: usize = 4096;
/// Bytes at the begin of a place that drivers keep for themselves (`XDP_PACKET_HEADROOM`).
const HEADROOM: usize = 256;
/// Bytes that some drivers keep at its end, for what the kernel keeps of a frame (`struct skb_shared_info`).
const TAILROOM: usize = 320;
/// Entries of each ring. The places of a queue are twice as many: a half to receive, a half to send.
const ENTRIES: u32 = 2048;
/// Queues of an interface that are used, at most.
const MOST_QUEUES: u32 = 64;
/// How long the kernel may take to give a queue back whose socket was closed, and between two looks.
const RELEASE: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_millis(10);
/// Times that the kernel is asked to send what lies in the ring; it takes 32 frames or more each time.
const KICKS: usize = 64;

/// The longest frame that one place holds. An interface with a larger MTU is no use with AF_XDP.
pub const LONGEST: usize = PLACE - HEADROOM - TAILROOM;
/// Bytes of an Ethernet header with two VLAN tags.
const HEADERS: usize = 22;

/// How the kernel hands frames over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XdpMode {
    /// The driver puts them into the process's memory.
    ZeroCopy,
    /// The kernel copies them there.
    Copy,
}

impl XdpMode {
    /// The mode in a few words, as commands print it.
    pub fn words(self) -> &'static str {
        match self {
            XdpMode::ZeroCopy => "AF_XDP, zero-copy",
            XdpMode::Copy => "AF_XDP, copied",
        }
    }
}

/// An interface whose frames come by AF_XDP.
#[derive(Debug)]
pub struct XdpPort {
    queues: Vec<Queue>,
    turns: QueueTurns,
    mode: XdpMode,
    /// Readable when one of the queues has frames.
    wake: OwnedFd,
    _program: XdpProgram,
    keeper: Keeper,
}

/// A receive queue of the interface, and the send queue of the same number.
#[derive(Debug)]
struct Queue {
    socket: OwnedFd,
    places: MappedArea,
    received: XdpRing<libc::xdp_desc>,
    fill: XdpRing<u64>,
    to_send: XdpRing<libc::xdp_desc>,
    sent: XdpRing<u64>,
    /// Places for frames to be sent that are free.
    free: Vec<u64>,
    /// Frames that did not fit into a buffer.
    cut_off: u64,
    /// Frames that were dropped until it was asked last.
    missed: u64,
}

impl XdpPort {
    /// Takes all frames that come to the interface `name`, in the network namespace of the calling thread. With
    /// `copies` also where the kernel has to copy them.
    ///
    /// # Errors
    /// [`PacketError`]; the interface is as it was.
    pub fn open(name: &str, copies: bool) -> Result<XdpPort, PacketError> {
        let fail = |cause: io::Error| packet::refused(name, cause);
        let (socket, interface) = packet::keeper(name)?;
        let index = interface.index;
        let mut keeper = Keeper { socket, interface, takes_tags_again: false };
        if keeper.interface.mtu(&keeper.socket).map_err(fail)? as usize + HEADERS > LONGEST {
            let text =
                format!("its MTU is too large for AF_XDP, which takes frames of {LONGEST} bytes");
            return Err(fail(io::Error::new(io::ErrorKind::Unsupported, text)));
        }
        let count = receive_queues(name).map_err(fail)?;
        let program = XdpProgram::load(count).map_err(fail)?;
        let modes = [XdpMode::ZeroCopy, XdpMode::Copy];
        let modes = modes.into_iter().filter(|it| copies || *it == XdpMode::ZeroCopy);
        let mut refusal = None;
        for mode in modes {
            let open = |number| Queue::open_when_free(index, number, mode);
            match (0..count).map(open).collect::<io::Result<Vec<Queue>>>() {
                Ok(queues) => {
                    let wake =
                        epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|it| fail(it.into()))?;
                    for (number, queue) in queues.iter().enumerate() {
                        let data = epoll::EventData::new_u64(number as u64);
                        epoll::add(&wake, &queue.socket, data, epoll::EventFlags::IN)
                            .map_err(|it| fail(it.into()))?;
                        program.hand_over(number as u32, queue.socket.as_fd()).map_err(fail)?;
                    }
                    keeper.leave_tags_in_frames().map_err(fail)?;
                    let mut program = program;
                    program.attach(index).map_err(fail)?;
                    return Ok(XdpPort {
                        turns: QueueTurns::of(queues.len()),
                        queues,
                        mode,
                        wake,
                        _program: program,
                        keeper,
                    });
                }
                Err(cause) => refusal = Some(cause),
            }
        }
        Err(fail(refusal.unwrap_or_else(|| io::ErrorKind::Unsupported.into())))
    }

    /// Whether frames are copied on their way from and to the interface.
    pub fn mode(&self) -> XdpMode {
        self.mode
    }

    /// Name of its interface.
    pub fn name(&self) -> &str {
        &self.keeper.interface.name
    }

    /// Bytes of the longest IP packet that goes out here: what the interface takes, which may be changed at any time, and
    /// has room in a place.
    ///
    /// # Errors
    /// When the interface is gone.
    pub fn mtu(&self) -> io::Result<u16> {
        let mtu = self.keeper.interface.mtu(&self.keeper.socket)?;
        Ok(mtu.min((LONGEST - HEADERS) as u16))
    }

    /// Whether the interface is up and has a carrier.
    pub fn is_up(&self) -> bool {
        self.keeper.interface.is_up(&self.keeper.socket)
    }

    /// The next frame, which goes into `buffer`; its length. What has no room is left out.
    pub fn read(&mut self, buffer: &mut [u8]) -> Option<usize> {
        self.turns.next(|queue| self.queues[queue].read(buffer))
    }

    /// Frames that came and were dropped since it was asked last: those that the kernel had no room for, and those that
    /// had none in a buffer.
    pub fn missed(&mut self) -> u64 {
        self.queues.iter_mut().map(Queue::missed).sum()
    }

    /// Puts a frame into the ring; false when that is full, or the frame too long. It goes with the next
    /// [`flush`](XdpPort::flush).
    pub fn put(&mut self, frame: &[u8]) -> bool {
        let queue = &mut self.queues[0];
        if queue.put(frame) {
            return true;
        }
        queue.kick();
        queue.put(frame)
    }

    /// Has the interface send what was put into the ring.
    pub fn flush(&mut self) {
        self.queues[0].kick();
    }

    /// Whether frames are in the ring that the interface has not taken; to be [flushed](XdpPort::flush) again.
    pub fn has_unsent(&self) -> bool {
        !self.queues[0].to_send.is_empty()
    }
}

impl AsFd for XdpPort {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

impl Queue {
    /// The kernel gives a queue back some time after its socket was closed.
    fn open_when_free(index: libc::c_int, number: u32, mode: XdpMode) -> io::Result<Queue> {
        let begun = Instant::now();
        loop {
            match Queue::open(index, number, mode) {
                Err(cause)
                    if cause.raw_os_error() == Some(libc::EBUSY) && begun.elapsed() < RELEASE =>
                {
                    std::thread::sleep(RETRY);
                }
                outcome => return outcome,
            }
        }
    }

    fn open(index: libc::c_int, number: u32, mode: XdpMode) -> io::Result<Queue> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        // SAFETY: the call takes numbers.
        let socket = unsafe { libc::socket(libc::AF_XDP, kind, 0) };
        if socket < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was made here and is nobody else's.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        let places = MappedArea::new(2 * ENTRIES as usize * PLACE)?;
        let registered = UmemRegistration {
            address: places.address().as_ptr() as u64,
            length: places.len() as u64,
            place: PLACE as u32,
            headroom: 0,
            flags: 0,
            metadata: 0,
        };
        packet::set(&socket, libc::SOL_XDP, libc::XDP_UMEM_REG, &registered)?;
        for option in [
            libc::XDP_UMEM_FILL_RING,
            libc::XDP_UMEM_COMPLETION_RING,
            libc::XDP_RX_RING,
            libc::XDP_TX_RING,
        ] {
            packet::set(&socket, libc::SOL_XDP, option, &ENTRIES)?;
        }
        let at = ring::offsets(&socket)?;
        let map = socket.as_fd();
        let mut fill = XdpRing::map(map, libc::XDP_UMEM_PGOFF_FILL_RING as i64, &at.fr, ENTRIES)?;
        let sent = XdpRing::map(map, libc::XDP_UMEM_PGOFF_COMPLETION_RING as i64, &at.cr, ENTRIES)?;
        let received = XdpRing::map(map, libc::XDP_PGOFF_RX_RING, &at.rx, ENTRIES)?;
        let to_send = XdpRing::map(map, libc::XDP_PGOFF_TX_RING, &at.tx, ENTRIES)?;
        for place in 0..u64::from(ENTRIES) {
            fill.push(place * PLACE as u64);
        }
        fill.publish();
        let wanted = match mode {
            XdpMode::ZeroCopy => libc::XDP_ZEROCOPY,
            XdpMode::Copy => libc::XDP_COPY,
        };
        let address = libc::sockaddr_xdp {
            sxdp_family: libc::AF_XDP as u16,
            sxdp_flags: wanted | libc::XDP_USE_NEED_WAKEUP,
            sxdp_ifindex: index as u32,
            sxdp_queue_id: number,
            sxdp_shared_umem_fd: 0,
        };
        packet::bind_to(&socket, &address)?;
        let free =
            (u64::from(ENTRIES)..2 * u64::from(ENTRIES)).map(|it| it * PLACE as u64).collect();
        Ok(Queue { socket, places, received, fill, to_send, sent, free, cut_off: 0, missed: 0 })
    }

    fn read(&mut self, buffer: &mut [u8]) -> Option<usize> {
        loop {
            let frame = self.received.pop()?;
            let (at, length) = (frame.addr as usize, frame.len as usize);
            let room = buffer.get_mut(..length);
            let whole = room.is_some_and(|room| self.places.read(at, room));
            self.received.release();
            self.fill.push(frame.addr / PLACE as u64 * PLACE as u64);
            self.fill.publish();
            if self.fill.wants_wake_up() {
                self.wake_up(libc::MSG_DONTWAIT);
            }
            if whole {
                return Some(length);
            }
            self.cut_off += 1;
        }
    }

    fn missed(&mut self) -> u64 {
        // SAFETY: all zeroes are such a structure.
        let nothing: libc::xdp_statistics = unsafe { std::mem::zeroed() };
        let told = packet::get(&self.socket, libc::SOL_XDP, libc::XDP_STATISTICS, nothing);
        let Ok(told) = told else { return 0 };
        // The kernel goes on counting.
        let all = told.rx_dropped.saturating_add(told.rx_ring_full).saturating_add(self.cut_off);
        all.saturating_sub(std::mem::replace(&mut self.missed, all))
    }

    fn put(&mut self, frame: &[u8]) -> bool {
        while let Some(place) = self.sent.pop() {
            self.sent.release();
            self.free.push(place / PLACE as u64 * PLACE as u64);
        }
        if frame.len() > LONGEST || self.to_send.is_full() {
            return false;
        }
        let Some(place) = self.free.pop() else { return false };
        self.places.write(place as usize, frame);
        self.to_send.push(libc::xdp_desc { addr: place, len: frame.len() as u32, options: 0 });
        true
    }

    fn kick(&mut self) {
        self.to_send.publish();
        for _ in 0..KICKS {
            if self.to_send.is_empty() || !self.to_send.wants_wake_up() {
                return;
            }
            // SAFETY: no bytes are sent by the call itself.
            let sent = unsafe {
                libc::sendto(
                    self.socket.as_raw_fd(),
                    std::ptr::null(),
                    0,
                    libc::MSG_DONTWAIT,
                    std::ptr::null(),
                    0,
                )
            };
            // Without room below, or with more in the ring, it says that it is to be asked again.
            let again = [libc::EAGAIN, libc::EBUSY, libc::ENOBUFS];
            let error = io::Error::last_os_error().raw_os_error();
            if sent < 0 && !error.is_some_and(|error| again.contains(&error)) {
                return;
            }
        }
    }

    fn wake_up(&self, flags: libc::c_int) {
        // SAFETY: no bytes are received by the call itself. That there is nothing to do is no error.
        unsafe {
            libc::recvfrom(
                self.socket.as_raw_fd(),
                std::ptr::null_mut(),
                0,
                flags,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            );
        }
    }
}

/// Keeps the interface promiscuous, and answers questions about it.
#[derive(Debug)]
struct Keeper {
    socket: OwnedFd,
    interface: Interface,
    /// The interface took VLAN tags out of frames before.
    takes_tags_again: bool,
}

impl Keeper {
    /// Has the interface leave VLAN tags in frames: what it says of them beside a frame does not come here, and a frame
    /// without its tag would be in another VLAN.
    fn leave_tags_in_frames(&mut self) -> io::Result<()> {
        // Without an answer it has no such feature.
        let Ok(flags) = packet::offload_flags(&self.socket, &self.interface.name, None) else {
            return Ok(());
        };
        if flags & packet::TAKES_TAGS == 0 {
            return Ok(());
        }
        let without = flags & !packet::TAKES_TAGS;
        let set = packet::offload_flags(&self.socket, &self.interface.name, Some(without));
        self.takes_tags_again = set.is_ok();
        match packet::offload_flags(&self.socket, &self.interface.name, None) {
            Ok(flags) if flags & packet::TAKES_TAGS == 0 => Ok(()),
            _ => {
                let text = "it takes VLAN tags out of frames, and cannot be told not to (rxvlan)";
                Err(io::Error::new(io::ErrorKind::Unsupported, text))
            }
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if self.takes_tags_again
            && self.interface.is_there(&self.socket).is_ok()
            && let Ok(flags) = packet::offload_flags(&self.socket, &self.interface.name, None)
        {
            let flags = flags | packet::TAKES_TAGS;
            // It may be gone meanwhile.
            let _ = packet::offload_flags(&self.socket, &self.interface.name, Some(flags));
        }
    }
}

/// What registers the memory of frames (`struct xdp_umem_reg`).
#[repr(C)]
struct UmemRegistration {
    address: u64,
    length: u64,
    place: u32,
    headroom: u32,
    flags: u32,
    metadata: u32,
}

/// How many receive queues the interface has. Frames of one that is not taken would go to the host and not here.
fn receive_queues(name: &str) -> io::Result<u32> {
    let folder = format!("/sys/class/net/{name}/queues");
    let all = std::fs::read_dir(folder)?.flatten();
    let count = all.filter(|it| it.file_name().to_string_lossy().starts_with("rx-")).count();
    match u32::try_from(count) {
        Ok(count @ 1..=MOST_QUEUES) => Ok(count),
        _ => {
            let text = format!("it has {count} receive queues; up to {MOST_QUEUES} can be taken");
            Err(io::Error::new(io::ErrorKind::Unsupported, text))
        }
    }
}
