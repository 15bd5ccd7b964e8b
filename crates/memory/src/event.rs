//! A descriptor that rings, between threads or processes: an eventfd. One that a peer made is a
//! [`PeerEvent`](crate::PeerEvent).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags};

/// An eventfd: ringing adds to a counter, draining takes it back to zero.
#[derive(Debug)]
pub struct Event(OwnedFd);

impl Event {
    /// A new one, at rest, non-blocking.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new() -> std::io::Result<Event> {
        Ok(Event(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// One that another process [made](Event::new) and passed on.
    ///
    /// # Errors
    /// When it is no eventfd.
    pub fn adopt(fd: OwnedFd) -> std::io::Result<Event> {
        check_eventfd(fd.as_fd())?;
        Ok(Event(fd))
    }

    /// Rings. Returns false when the descriptor does not take it (closed pipe, full counter: a
    /// full counter means it is already ringing).
    pub fn ring(&self) -> bool {
        rustix::io::write(&self.0, &1u64.to_ne_bytes()).is_ok()
    }

    /// Takes the counter back to zero; true when it had been rung.
    pub fn drain(&self) -> bool {
        let mut count = [0u8; 8];
        rustix::io::read(&self.0, &mut count).is_ok()
    }

    /// Sleeps until one of `fds` is readable or `timeout_ns` has passed; `None` waits for ever. False
    /// when none is known to be readable.
    pub fn wait_any(fds: &[BorrowedFd<'_>], timeout_ns: Option<u64>) -> bool {
        let mut polled: Vec<PollFd<'_>> =
            fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
        let timeout = timeout_ns.map(|ns| rustix::time::Timespec {
            tv_sec: i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: (ns % 1_000_000_000).try_into().expect("below a second"),
        });
        // An interrupted or failed wait is a wake-up too many: the caller looks at its work anyway.
        rustix::event::poll(&mut polled, timeout.as_ref()).is_ok_and(|ready| ready > 0)
    }

    /// Sleeps until it rings or `timeout_ns` has passed; true when it rang (and drains it).
    pub fn wait(&self, timeout_ns: Option<u64>) -> bool {
        Event::wait_any(&[self.as_fd()], timeout_ns);
        self.drain()
    }
}

/// Refuses what is no eventfd: the kernel names the file.
pub(crate) fn check_eventfd(fd: BorrowedFd<'_>) -> std::io::Result<()> {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    match name.as_os_str() == "anon_inode:[eventfd]" {
        true => Ok(()),
        false => Err(std::io::Error::other(format!("{} is not an eventfd", name.display()))),
    }
}

impl From<Event> for OwnedFd {
    fn from(event: Event) -> OwnedFd {
        event.0
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
