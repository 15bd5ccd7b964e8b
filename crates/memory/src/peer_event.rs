//! Ringing an eventfd that somebody else made, without ever waiting for it.
//!
//! Whether a write to an eventfd blocks is a flag of its open file description, which whoever
//! passed the descriptor shares: a hostile peer clears `O_NONBLOCK`, fills the counter, and a
//! `write` blocks for ever. So the kernel rings it: an asynchronous read of nothing that names the
//! eventfd for its completion (`IOCB_FLAG_RESFD`, io_submit(2)). The kernel adds to the counter
//! where there is room and never waits. Where a process may have no such context, the flag and the
//! room are looked at before each write, which holds against everybody but a peer that is faster.
#![allow(unsafe_code)] // system calls that no library has

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::event::{PollFd, PollFlags};
use rustix::io::{Errno, ReadWriteFlags};

use crate::event::{Event, check_eventfd};
use crate::window::WindowEvent;

/// Completions that the context keeps; nobody reads them, they are thrown away in batches.
const EVENTS: u32 = 256;
const CMD_PREAD: u16 = 0;
const FLAG_RESFD: u32 = 1;

/// An eventfd that a peer passed, to be rung; in a virtual machine, the file that stands for one.
#[derive(Debug)]
pub struct PeerEvent(Kind);

#[derive(Debug)]
enum Kind {
    Eventfd(OwnedFd),
    Window(WindowEvent),
}

impl PeerEvent {
    /// Takes a descriptor that a peer passed. Only an eventfd is accepted: other files (a pipe, a
    /// socket, a file on somebody's own file system) could make whoever rings wait.
    ///
    /// # Errors
    /// When it is no eventfd.
    pub fn new(fd: OwnedFd) -> std::io::Result<PeerEvent> {
        let fd = match WindowEvent::new(fd) {
            Ok(event) => return Ok(PeerEvent(Kind::Window(event))),
            Err(fd) => fd,
        };
        check_eventfd(fd.as_fd())?;
        Ok(PeerEvent(Kind::Eventfd(fd)))
    }

    /// The same event once more.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn try_clone(&self) -> std::io::Result<PeerEvent> {
        let fd = self.as_fd().try_clone_to_owned()?;
        Ok(PeerEvent(match &self.0 {
            Kind::Eventfd(_) => Kind::Eventfd(fd),
            Kind::Window(_) => return PeerEvent::new(fd),
        }))
    }

    /// The file that stands for an eventfd, in a virtual machine.
    pub(crate) fn window(&self) -> Option<&WindowEvent> {
        match &self.0 {
            Kind::Window(event) => Some(event),
            Kind::Eventfd(_) => None,
        }
    }

    /// Rings. A full counter is left as it is: it is ringing already.
    pub fn ring(&self) {
        if let Kind::Window(event) = &self.0 {
            return event.ring();
        }
        if !Context::get().is_some_and(|context| context.ring(self.as_fd())) {
            self.ring_if_ready();
        }
    }

    /// Takes the counter back to zero; true when it had been rung.
    pub fn drain(&self) -> bool {
        if self.window().is_some() {
            return true;
        }
        let mut count = [0; 8];
        // At no offset: an eventfd has no place to read from.
        let parts = &mut [std::io::IoSliceMut::new(&mut count)];
        match rustix::io::preadv2(self, parts, u64::MAX, ReadWriteFlags::NOWAIT) {
            // A kernel that knows no such read of an eventfd (before 5.8).
            Err(Errno::OPNOTSUPP) => {
                self.is(PollFlags::IN) && rustix::io::read(self, &mut count).is_ok()
            }
            outcome => outcome.is_ok(),
        }
    }

    /// Whether the descriptor is ready now. A counter that has overflowed reports an error, and
    /// blocks writers as a full one does.
    fn is(&self, ready: PollFlags) -> bool {
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut polled = [PollFd::new(self, ready)];
        rustix::event::poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().contains(ready)
    }

    fn ring_if_ready(&self) {
        let flags = rustix::fs::fcntl_getfl(self);
        let blocking = |flags: &rustix::fs::OFlags| !flags.contains(rustix::fs::OFlags::NONBLOCK);
        if flags.is_ok_and(|flags| blocking(&flags)) && !self.is(PollFlags::OUT) {
            return;
        }
        // Nothing to do about a descriptor that takes no ring: it is its owner's.
        let _ = rustix::io::write(self, &1u64.to_ne_bytes());
    }
}

impl From<PeerEvent> for OwnedFd {
    fn from(event: PeerEvent) -> OwnedFd {
        match event.0 {
            Kind::Eventfd(fd) => fd,
            Kind::Window(event) => event.into(),
        }
    }
}

impl From<Event> for PeerEvent {
    fn from(event: Event) -> PeerEvent {
        PeerEvent(Kind::Eventfd(event.into()))
    }
}

impl AsFd for PeerEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Kind::Eventfd(fd) => fd.as_fd(),
            Kind::Window(event) => event.as_fd(),
        }
    }
}

/// `struct iocb` of `linux/aio_abi.h`.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    #[cfg(target_endian = "little")]
    key: u32,
    rw_flags: i32,
    #[cfg(target_endian = "big")]
    key: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    resfd: u32,
}

/// The process's context of asynchronous I/O.
struct Context {
    id: libc::c_ulong,
    /// A file to read nothing from.
    nothing: OwnedFd,
    rung: AtomicU32,
}

impl Context {
    fn get() -> Option<&'static Context> {
        static CONTEXT: OnceLock<Option<Context>> = OnceLock::new();
        CONTEXT.get_or_init(Context::new).as_ref()
    }

    /// `None` where the system has none to give.
    fn new() -> Option<Context> {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let nothing = rustix::fs::memfd_create("rackbus-nothing", flags).ok()?;
        let mut id: libc::c_ulong = 0;
        // SAFETY: io_setup writes the context's id to where it is told, which is a valid place.
        let set_up = unsafe { libc::syscall(libc::SYS_io_setup, EVENTS, &raw mut id) };
        if set_up != 0 {
            let cause = std::io::Error::last_os_error();
            tracing::warn!(%cause, "no asynchronous I/O: eventfds of peers are looked at first");
            return None;
        }
        Some(Context { id, nothing, rung: AtomicU32::new(0) })
    }

    /// False when the context cannot: it belongs to the process that made it, not to its child.
    fn ring(&self, event: BorrowedFd<'_>) -> bool {
        if self.rung.fetch_add(1, Ordering::Relaxed).is_multiple_of(EVENTS / 4) {
            self.forget_completions();
        }
        let fd = |fd: BorrowedFd<'_>| u32::try_from(fd.as_raw_fd()).unwrap_or(u32::MAX);
        let mut read = Iocb {
            opcode: CMD_PREAD,
            fd: fd(self.nothing.as_fd()),
            flags: FLAG_RESFD,
            resfd: fd(event),
            ..Iocb::default()
        };
        for _ in 0..2 {
            let mut list = [&raw mut read];
            // SAFETY: the list names one iocb, which the kernel has copied when the call returns;
            // it reads no bytes, so it has no buffer.
            let submitted =
                unsafe { libc::syscall(libc::SYS_io_submit, self.id, 1, list.as_mut_ptr()) };
            if submitted == 1 {
                return true;
            }
            // The completions' ring is full.
            self.forget_completions();
        }
        false
    }

    fn forget_completions(&self) {
        let mut events = [[0u64; 4]; EVENTS as usize];
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the array has room for as many events (32 bytes each) as are asked for, and the
        // time is a valid one: none, so that the call does not wait.
        unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.id,
                0,
                EVENTS,
                events.as_mut_ptr(),
                &raw mut now,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn count(fd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    /// A peer's eventfd that blocks writers: its counter is full.
    fn full() -> (OwnedFd, PeerEvent) {
        let peers = eventfd(0, EventfdFlags::empty()).unwrap();
        let event = PeerEvent::new(peers.try_clone().unwrap()).unwrap();
        rustix::io::write(&peers, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        (peers, event)
    }

    #[test]
    fn ringing_counts_and_outlasts_the_ring_of_completions() {
        let peers = eventfd(0, EventfdFlags::empty()).unwrap();
        let event = PeerEvent::new(peers.try_clone().unwrap()).unwrap();
        let rings = u64::from(EVENTS) * 5;
        (0..rings).for_each(|_| event.ring());
        assert_eq!(count(&peers), rings);
        event.ring_if_ready();
        assert_eq!(count(&peers), 1);
    }

    #[test]
    fn a_full_counter_that_blocks_writers_does_not_block_us() {
        let (peers, event) = full();
        let (done, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            event.ring();
            event.ring_if_ready();
            let _ = done.send(());
        });
        ended.recv_timeout(std::time::Duration::from_secs(10)).expect("the ring blocked");
        assert!(count(&peers) >= u64::MAX - 1);
    }

    #[test]
    fn draining_waits_for_no_ring() {
        let peers = eventfd(0, EventfdFlags::empty()).unwrap();
        let event = PeerEvent::new(peers.try_clone().unwrap()).unwrap();
        event.ring();
        assert!(event.drain());
        // The peer made the descriptor one that waits.
        assert!(!event.drain());
    }

    #[test]
    fn what_is_no_eventfd_is_refused() {
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert!(PeerEvent::new(pipe).is_err());
    }
}
