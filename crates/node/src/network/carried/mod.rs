//! Frames between machines: rings whose two ends share no memory.
//!
//! The sender's queue has a ring in its own machine's memory, and the receiver's queue one in its own; what lies in the one
//! is put into the other over the connection between the two nodes, which also has their questions and answers
//! ([`messages`](super::messages)). A thread at each end does that: `sending` at the node that asked for the rings,
//! `receiving` at the one that has their receivers. Neither queue knows of it.
//!
//! Of each ring a *window* of bytes may be on its way, which its receiver gives back as it has put them into the ring
//! there. So a receiver that is stopped holds up its own ring alone, which becomes full at the sender, and is waited for
//! and then dropped for there as if both shared memory. A frame is put in once and in order; what was on its way when a
//! connection is lost is lost, and counted by the sender.

mod receiving;
mod sending;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rackbus_memory::frames::FRAME_HEADER;
use rackbus_memory::{Carrier, Event, StreamError};
use rackbus_net::port::MAX_FRAME;
use rackbus_net::port_queue::LAYOUT;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use serde::Serialize;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::messages::encode;

pub(super) use receiving::ReceivingEnd;
pub(super) use sending::SendingEnd;

/// Bytes of a ring that may be on their way: as many as the ring itself holds.
const WINDOW: usize = LAYOUT.ring_bytes;
/// Bytes that are put together before they are given to the connection.
const GATHERED: usize = 128 << 10;
/// Bytes of answers that a peer may leave untaken.
const UNTAKEN: usize = 1 << 20;
/// Bytes of the longest message.
const MAX_MESSAGE: usize = 4096;
/// Messages that wait to be sent at most: a node that takes none is disconnected.
const MAX_WAITING: usize = 4096;
/// How long an end looks for work before it sleeps: about what a wake-up takes.
const LINGER: Duration = Duration::from_micros(50);
/// After how much silence a peer that owes something is asked whether it is there, and after how much more it is lost.
const SILENCE: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(2);

/// What a [`Head`] is of.
mod kind {
    /// A message in JSON, of `length` bytes.
    pub const MESSAGE: u8 = 1;
    /// A frame of `length` bytes for a ring.
    pub const FRAME: u8 = 2;
    /// `length` bytes of a ring's window are given back, with as many frames as the header's first four bytes say.
    pub const CREDIT: u8 = 3;
    /// To be answered at once.
    pub const LOOK: u8 = 4;
    /// The answer to that.
    pub const SEEN: u8 = 5;
}

/// What is before everything that is sent.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Head {
    length: U32,
    kind: u8,
    spare: u8,
    header: [u8; FRAME_HEADER],
    ring: U64,
}

const HEAD: usize = size_of::<Head>();

/// Bytes of a window that a frame of so many bytes takes.
fn cost(length: usize) -> usize {
    HEAD + length
}

/// The connection is of no more use.
#[derive(Debug, thiserror::Error)]
pub(super) enum Over {
    #[error("the connection is lost: {0}")]
    Lost(#[from] StreamError),
    #[error("it does not answer")]
    Silent,
    #[error("it violates the protocol")]
    Violation,
    #[error("it is not needed any more")]
    Ended,
    #[error("its connection cannot be waited for: {0}")]
    Wait(Errno),
}

/// Messages that other threads have for the peer.
#[derive(Debug)]
pub(super) struct MessageQueue<M> {
    waiting: Mutex<Waiting<M>>,
    event: Event,
}

#[derive(Debug)]
struct Waiting<M> {
    messages: VecDeque<M>,
    ended: bool,
}

impl<M> MessageQueue<M> {
    pub fn new() -> std::io::Result<MessageQueue<M>> {
        let waiting = Waiting { messages: VecDeque::new(), ended: false };
        Ok(MessageQueue { waiting: Mutex::new(waiting), event: Event::new()? })
    }

    fn lock(&self) -> MutexGuard<'_, Waiting<M>> {
        // Each change of it is whole before anything can fail.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a message sent; false when the peer takes none.
    pub fn say(&self, message: M) -> bool {
        let mut waiting = self.lock();
        if waiting.ended || waiting.messages.len() >= MAX_WAITING {
            return false;
        }
        waiting.messages.push_back(message);
        drop(waiting);
        self.event.ring();
        true
    }

    /// Has the connection closed; messages that wait are not sent.
    pub fn end(&self) {
        self.lock().ended = true;
        self.event.ring();
    }

    /// The message to send next; an error once the conversation was ended here.
    fn take(&self) -> Result<Option<M>, Over> {
        let mut waiting = self.lock();
        match waiting.ended {
            true => Err(Over::Ended),
            false => Ok(waiting.messages.pop_front()),
        }
    }
}

/// A connection, with what is to be sent over it and what came.
#[derive(Debug)]
struct Wire {
    carrier: Box<dyn Carrier>,
    out: Vec<u8>,
    /// How much of that the carrier has taken.
    taken: usize,
    /// The carrier holds something that the socket did not take.
    held: bool,
    buffer: Vec<u8>,
    from: usize,
    to: usize,
    /// When something came last.
    heard: Instant,
    /// When the peer was asked for a sign of life, which it has not given.
    looked: Option<Instant>,
}

impl Wire {
    fn new(carrier: Box<dyn Carrier>, now: Instant) -> Wire {
        Wire {
            carrier,
            out: Vec::with_capacity(GATHERED + HEAD + MAX_FRAME),
            taken: 0,
            held: false,
            buffer: vec![0; 2 * (HEAD + MAX_FRAME)],
            from: 0,
            to: 0,
            heard: now,
            looked: None,
        }
    }

    /// Refuses a peer that asks and takes no answers.
    fn is_taken(&self) -> Result<(), Over> {
        match self.out.len() - self.taken < UNTAKEN {
            true => Ok(()),
            false => Err(Over::Silent),
        }
    }

    /// Whether more may be put in now.
    fn has_room(&self) -> bool {
        self.out.len() - self.taken < GATHERED
    }

    fn put(&mut self, head: &Head) {
        self.out.extend_from_slice(head.as_bytes());
    }

    fn put_message(&mut self, message: &impl Serialize) {
        let text = encode(message);
        let length = (text.len() as u32).into();
        self.put(&Head { length, kind: kind::MESSAGE, ..Head::default() });
        self.out.extend_from_slice(&text);
    }

    /// Sends what can be sent now; whether there was anything.
    fn give(&mut self) -> Result<bool, Over> {
        let mut some = false;
        while self.taken < self.out.len() {
            match self.carrier.send(&self.out[self.taken..])? {
                0 => break,
                count => self.taken += count,
            }
            some = true;
        }
        if self.taken >= GATHERED || self.taken == self.out.len() {
            // Where more comes all the time than is taken, it never becomes empty by itself.
            self.out.drain(..self.taken);
            self.taken = 0;
        }
        self.held = !self.carrier.flush()? || !self.out.is_empty();
        Ok(some)
    }

    /// Receives what is there; whether there was anything.
    fn receive(&mut self, now: Instant) -> Result<bool, Over> {
        if self.from > 0 {
            self.buffer.copy_within(self.from..self.to, 0);
            (self.to, self.from) = (self.to - self.from, 0);
        }
        let begun = self.to;
        // Until there is no room, or nothing: a read need not take all that is there.
        while self.to < self.buffer.len() {
            match self.carrier.receive(&mut self.buffer[self.to..]) {
                Ok(0) => break,
                Ok(count) => self.to += count,
                // What came before the end is heard first; the end is said again.
                Err(_) if self.to > begun => break,
                Err(error) => return Err(error.into()),
            }
        }
        if self.to > begun {
            (self.heard, self.looked) = (now, None);
        }
        Ok(self.to > begun)
    }

    /// The next of what came, if all of it is there, and where the bytes behind it are.
    fn next(&mut self) -> Result<Option<(Head, std::ops::Range<usize>)>, Over> {
        let here = &self.buffer[self.from..self.to];
        let Ok((head, _)) = Head::read_from_prefix(here) else { return Ok(None) };
        let most = match head.kind {
            kind::MESSAGE => MAX_MESSAGE,
            kind::FRAME => MAX_FRAME,
            _ => 0,
        };
        let behind = if most == 0 { 0 } else { head.length.get() as usize };
        if behind > most {
            return Err(Over::Violation);
        }
        if here.len() < HEAD + behind {
            return Ok(None);
        }
        let start = self.from + HEAD;
        self.from = start + behind;
        Ok(Some((head, start..self.from)))
    }

    /// Asks a peer that `owes` something for a sign of life, and finds that it gives none.
    fn look(&mut self, owes: bool, now: Instant) -> Result<(), Over> {
        match self.looked {
            Some(looked) if now.duration_since(looked) > PATIENCE => return Err(Over::Silent),
            None if owes && now.duration_since(self.heard) > SILENCE => {
                self.put(&Head { kind: kind::LOOK, ..Head::default() });
                self.looked = Some(now);
            }
            _ => {}
        }
        Ok(())
    }

    /// Waits until something comes, what is held can be sent, one of `others` is readable, or a second has passed.
    fn wait(&self, others: &[BorrowedFd<'_>]) -> Result<(), Over> {
        let socket = self.carrier.socket();
        let flags = if self.held { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let mut fds = vec![PollFd::from_borrowed_fd(socket, flags)];
        fds.extend(others.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)));
        let limit = Timespec { tv_sec: SILENCE.as_secs() as i64, tv_nsec: 0 };
        match rustix::event::poll(&mut fds, Some(&limit)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(Over::Wait(error)),
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.carrier.shut_down();
    }
}

/// For how long there was nothing to do.
#[derive(Debug, Default)]
struct Idle(Option<Instant>);

impl Idle {
    /// There was something to do, or not: whether it is time to sleep.
    fn is_over(&mut self, some: bool) -> bool {
        if some {
            self.0 = None;
            return false;
        }
        let over = self.0.get_or_insert_with(Instant::now).elapsed() > LINGER;
        if !over {
            // Who has something for it may need this processor.
            std::thread::yield_now();
        }
        over
    }
}
