//! A connection in virtual time: pieces of bytes that come later, or never.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rackbus_memory::{Carrier, StreamError};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::super::SILENCE;

/// What one direction of a connection has taken and not delivered.
#[derive(Debug)]
pub(super) struct Pipe {
    /// Each piece with the time from which it is there.
    pub pieces: VecDeque<(u64, Vec<u8>)>,
    pub held: usize,
    pub room: usize,
    pub delay: u64,
    /// What is in it comes, and then nothing any more.
    pub broken: bool,
    /// What goes in vanishes, and nobody is told.
    pub silent: bool,
}

/// A side of a connection: what it sends into, and what it receives from.
#[derive(Debug, Clone)]
pub(super) struct PipeEnd {
    pub to: Arc<Mutex<Pipe>>,
    pub from: Arc<Mutex<Pipe>>,
    pub clock: Arc<AtomicU64>,
    /// Nobody waits for it.
    pub socket: Arc<UnixStream>,
}

impl PipeEnd {
    /// Whether an end that sleeps is woken by it.
    pub fn is_ready(&self, held: bool) -> bool {
        let (from, to) = (self.from.lock().unwrap(), self.to.lock().unwrap());
        let now = self.clock.load(Ordering::Relaxed);
        let comes = from.pieces.front().map_or(from.broken, |(at, _)| *at <= now);
        comes || (held && to.held < to.room)
    }
}

impl Carrier for PipeEnd {
    fn send(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        let mut to = self.to.lock().unwrap();
        if to.broken {
            return Err(StreamError::Socket(Errno::CONNRESET));
        }
        let count = bytes.len().min(to.room - to.held.min(to.room));
        if count > 0 {
            let at = self.clock.load(Ordering::Relaxed) + to.delay;
            let at = to.pieces.back().map_or(at, |(last, _)| at.max(*last));
            to.held += count;
            if !to.silent {
                to.pieces.push_back((at, bytes[..count].to_vec()));
            }
        }
        Ok(count)
    }

    fn flush(&mut self) -> Result<bool, StreamError> {
        Ok(true)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, StreamError> {
        let mut from = self.from.lock().unwrap();
        let now = self.clock.load(Ordering::Relaxed);
        match from.pieces.pop_front() {
            Some((at, piece)) if at <= now => {
                let count = piece.len().min(buffer.len());
                buffer[..count].copy_from_slice(&piece[..count]);
                if count < piece.len() {
                    from.pieces.push_front((at, piece[count..].to_vec()));
                }
                from.held -= count;
                Ok(count)
            }
            Some(later) => {
                from.pieces.push_front(later);
                Ok(0)
            }
            None if from.broken => Err(StreamError::Socket(Errno::CONNRESET)),
            None => Ok(0),
        }
    }

    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn shut_down(&self) {
        self.to.lock().unwrap().broken = true;
        self.from.lock().unwrap().broken = true;
    }
}

/// Whether a thread runs that sleeps since then, if it does.
pub(super) fn woken(
    asleep: Option<u64>,
    now: u64,
    side: &PipeEnd,
    held: bool,
    fds: &[BorrowedFd<'_>],
) -> bool {
    let Some(since) = asleep else { return true };
    let mut fds: Vec<_> =
        fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    side.is_ready(held)
        || now - since >= SILENCE.as_nanos() as u64
        || rustix::event::poll(&mut fds, Some(&at_once)).is_ok_and(|count| count > 0)
}
