//! An end of an exchange whose messages and data go as bytes to a process that shares no memory with this one.
//!
//! A frame is a header, the message, and the data that go along, which the other side finds in the place of
//! the same tag. Nothing waits: what a [`Carrier`] does not take now is sent later, from the place itself, and
//! each tag has at most one message that waits.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::epoll;
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{ExchangeError, ExchangeLayout, MESSAGE_BYTES, place, unfit};
use crate::region::{Region, SharedMemory};
use crate::ring::PushError;
use crate::slice::PinnedSlice;
use crate::stream::StreamError;

/// Bytes that are received, or put together to be sent, at once.
const CHUNK: usize = 64 << 10;

/// Carries bytes to another process and back, in order. Nothing waits.
pub trait Carrier: Send + std::fmt::Debug {
    /// Takes as many of `bytes` as can be sent before long; 0 when the other side has to take some before.
    ///
    /// # Errors
    /// [`StreamError`]; the conversation is over.
    fn send(&mut self, bytes: &[u8]) -> Result<usize, StreamError>;

    /// Sends what it has taken, as far as that goes now; true when nothing of it is left.
    ///
    /// # Errors
    /// As [`send`](Carrier::send).
    fn flush(&mut self) -> Result<bool, StreamError>;

    /// Receives what is there, into the beginning of `buffer`; 0 when there is nothing.
    ///
    /// # Errors
    /// [`StreamError::Closed`] when nothing comes any more, and as [`send`](Carrier::send).
    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, StreamError>;

    /// Readable when something came, writable when something can be sent.
    fn socket(&self) -> BorrowedFd<'_>;

    /// Ends the conversation in both directions.
    fn shut_down(&self);
}

/// What is before each message.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    /// Bytes of the message.
    message: U32,
    /// Bytes of data that follow it.
    data: U32,
    /// The place that these are of.
    tag: U32,
}

const HEADER: usize = size_of::<Header>();

/// A message that waits to be sent.
#[derive(Debug)]
struct Frame {
    head: [u8; HEADER + MESSAGE_BYTES],
    head_length: usize,
    tag: u32,
    length: usize,
    /// Bytes of header, message and data that were taken from it.
    taken: usize,
}

/// A message that is being received.
#[derive(Debug)]
struct Incoming {
    message: [u8; MESSAGE_BYTES],
    message_length: usize,
    tag: u32,
    length: usize,
    /// Bytes of the data that are in their place.
    done: usize,
}

/// One end of an exchange between processes that share no memory.
#[derive(Debug)]
pub(super) struct CarriedEnd {
    carrier: Box<dyn Carrier>,
    layout: ExchangeLayout,
    /// The places for data of this side.
    region: Arc<Region>,
    outgoing: VecDeque<Frame>,
    /// What was put together from frames, and how much of it the carrier has taken.
    chunk: Vec<u8>,
    sent: usize,
    /// The carrier has something that it could not send yet.
    unflushed: bool,
    /// What was received, from the first byte that nobody has looked at.
    buffer: Box<[u8]>,
    unread: std::ops::Range<usize>,
    incoming: Option<Incoming>,
    /// Readable when there is something to do.
    readiness: OwnedFd,
    /// It is also readable when something can be sent.
    waits_to_send: bool,
    closed: AtomicBool,
}

impl CarriedEnd {
    pub(super) fn new(
        name: &str,
        carrier: Box<dyn Carrier>,
        layout: ExchangeLayout,
    ) -> Result<CarriedEnd, ExchangeError> {
        layout.places().ok_or_else(|| unfit(layout))?;
        let bytes = layout.data_bytes.next_multiple_of(super::PAGE) * layout.tags as usize;
        let region = SharedMemory::create(name, bytes.max(super::PAGE) as u64)?.region().clone();
        let system = |errno: rustix::io::Errno| ExchangeError::Events(errno.into());
        let readiness = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system)?;
        let data = epoll::EventData::new_u64(0);
        epoll::add(&readiness, carrier.socket(), data, epoll::EventFlags::IN).map_err(system)?;
        Ok(CarriedEnd {
            carrier,
            layout,
            region,
            outgoing: VecDeque::new(),
            chunk: Vec::with_capacity(CHUNK),
            sent: 0,
            unflushed: false,
            buffer: vec![0; CHUNK].into_boxed_slice(),
            unread: 0..0,
            incoming: None,
            readiness,
            waits_to_send: false,
            closed: AtomicBool::new(false),
        })
    }

    pub(super) fn send(
        &mut self,
        message: &[u8],
        data: Option<(u32, usize)>,
    ) -> Result<(), PushError> {
        if message.len() > MESSAGE_BYTES {
            let slot_bytes = MESSAGE_BYTES as u32;
            return Err(PushError::TooLong { length: message.len(), slot_bytes });
        }
        if self.outgoing.len() >= self.layout.tags as usize {
            return Err(PushError::Full);
        }
        let (tag, length) = data.unwrap_or_default();
        let header = Header {
            message: (message.len() as u32).into(),
            data: (length as u32).into(),
            tag: tag.into(),
        };
        let mut head = [0; HEADER + MESSAGE_BYTES];
        let head_length = HEADER + message.len();
        head[..HEADER].copy_from_slice(header.as_bytes());
        head[HEADER..head_length].copy_from_slice(message);
        self.outgoing.push_back(Frame { head, head_length, tag, length, taken: 0 });
        Ok(())
    }

    pub(super) fn ring(&mut self) {
        self.advance();
    }

    /// Sends what waits, as far as that goes now.
    fn advance(&mut self) {
        let moved = self.try_advance();
        if let Err(error) = moved {
            self.fail(error);
        }
    }

    fn try_advance(&mut self) -> Result<(), StreamError> {
        loop {
            if self.sent == self.chunk.len() {
                self.refill();
            }
            if self.chunk.is_empty() {
                break;
            }
            match self.carrier.send(&self.chunk[self.sent..])? {
                0 => break,
                count => self.sent += count,
            }
        }
        self.unflushed = !self.carrier.flush()?;
        Ok(())
    }

    /// Puts together what is sent next.
    fn refill(&mut self) {
        self.chunk.clear();
        self.sent = 0;
        while self.chunk.len() < CHUNK
            && let Some(frame) = self.outgoing.front_mut()
        {
            if frame.taken < frame.head_length {
                self.chunk.extend_from_slice(&frame.head[frame.taken..frame.head_length]);
                frame.taken = frame.head_length;
            }
            let done = frame.taken - frame.head_length;
            let count = (frame.length - done).min(CHUNK.saturating_sub(self.chunk.len()));
            if count > 0 {
                let from = self.chunk.len();
                self.chunk.resize(from + count, 0);
                let place = place(&self.region, self.layout, 0, frame.tag, frame.length);
                let part = place.as_ref().and_then(|place| place.get().part(done, count));
                part.map(|part| part.copy_to(&mut self.chunk[from..]));
                frame.taken += count;
            }
            if frame.taken < frame.head_length + frame.length {
                return;
            }
            self.outgoing.pop_front();
        }
    }

    fn fail(&self, error: StreamError) {
        if !self.closed.swap(true, Ordering::Relaxed) && error != StreamError::Closed {
            tracing::warn!(%error, "the conversation about a medium failed");
        }
        self.carrier.shut_down();
    }

    pub(super) fn receive(&mut self, message: &mut [u8; MESSAGE_BYTES]) -> Option<usize> {
        if self.is_closed() {
            return None;
        }
        if self.has_unsent() {
            self.advance();
        }
        loop {
            if let Some(length) = self.take(message) {
                return Some(length);
            }
            if self.is_closed() || !self.fill() {
                return None;
            }
        }
    }

    fn has_unsent(&self) -> bool {
        self.unflushed || self.sent < self.chunk.len() || !self.outgoing.is_empty()
    }

    /// Receives more; false when there is nothing now.
    fn fill(&mut self) -> bool {
        if self.unread.is_empty() {
            self.unread = 0..0;
        } else if self.unread.start > 0 {
            // What is left is less than a header and a message.
            self.buffer.copy_within(self.unread.clone(), 0);
            self.unread = 0..self.unread.len();
        }
        match self.carrier.receive(&mut self.buffer[self.unread.end..]) {
            Ok(count) => {
                self.unread.end += count;
                count > 0
            }
            Err(error) => {
                self.fail(error);
                false
            }
        }
    }

    /// The next message, when all of it and of its data was received.
    fn take(&mut self, message: &mut [u8; MESSAGE_BYTES]) -> Option<usize> {
        if self.incoming.is_none() {
            self.begin()?;
        }
        let incoming = self.incoming.as_mut()?;
        let unread = &self.buffer[self.unread.clone()];
        let count = unread.len().min(incoming.length - incoming.done);
        if count > 0 {
            let place = place(&self.region, self.layout, 0, incoming.tag, incoming.length)?;
            place.get().part(incoming.done, count)?.copy_from(&unread[..count]);
            incoming.done += count;
            self.unread.start += count;
        }
        if incoming.done < incoming.length {
            return None;
        }
        let incoming = self.incoming.take()?;
        message[..incoming.message_length]
            .copy_from_slice(&incoming.message[..incoming.message_length]);
        Some(incoming.message_length)
    }

    /// Takes a header and its message, when both were received and are such.
    fn begin(&mut self) -> Option<()> {
        let unread = &self.buffer[self.unread.clone()];
        let (header, rest) = Header::read_from_prefix(unread).ok()?;
        let (message_length, length) = (header.message.get() as usize, header.data.get() as usize);
        let tag = header.tag.get();
        let fits = message_length <= MESSAGE_BYTES
            && length <= self.layout.data_bytes
            && tag < self.layout.tags;
        if !fits {
            tracing::warn!("a message that is longer than any may be ends the conversation");
            self.close();
            return None;
        }
        let text = rest.get(..message_length)?;
        let mut message = [0; MESSAGE_BYTES];
        message[..message_length].copy_from_slice(text);
        self.unread.start += HEADER + message_length;
        self.incoming = Some(Incoming { message, message_length, tag, length, done: 0 });
        Some(())
    }

    pub(super) fn rest(&mut self) -> bool {
        if self.is_closed() {
            return false;
        }
        if self.has_unsent() {
            self.advance();
        }
        let waits = self.has_unsent();
        if waits != self.waits_to_send {
            let sending = if waits { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
            let wanted = epoll::EventFlags::IN | sending;
            let data = epoll::EventData::new_u64(0);
            if epoll::modify(&self.readiness, self.carrier.socket(), data, wanted).is_ok() {
                self.waits_to_send = waits;
            }
        }
        // Bytes that the carrier has received already make no descriptor readable.
        while !self.has_message() {
            if !self.fill() {
                return !self.is_closed();
            }
        }
        false
    }

    /// Whether there is a message to take, or more of its data, or something that is none.
    fn has_message(&self) -> bool {
        let unread = &self.buffer[self.unread.clone()];
        match &self.incoming {
            Some(incoming) => !unread.is_empty() || incoming.done == incoming.length,
            None => Header::read_from_prefix(unread).is_ok_and(|(header, rest)| {
                let length = header.message.get() as usize;
                length > MESSAGE_BYTES || rest.len() >= length
            }),
        }
    }

    pub(super) fn data(&self, tag: u32, length: usize) -> Option<PinnedSlice> {
        place(&self.region, self.layout, 0, tag, length)
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        self.carrier.shut_down();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }
}

impl Drop for CarriedEnd {
    fn drop(&mut self) {
        self.close();
    }
}

impl AsFd for CarriedEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readiness.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::os::unix::net::UnixStream;

    use proptest::prelude::*;

    use super::super::Exchange;
    use super::*;
    use crate::event::Event;

    const LAYOUT: ExchangeLayout = ExchangeLayout { tags: 4, data_bytes: 200_000 };

    /// A socket that takes and gives at most so many bytes at once.
    #[derive(Debug)]
    struct Socket(UnixStream, usize);

    fn outcome(result: std::io::Result<usize>) -> Result<usize, StreamError> {
        match result {
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
            other => other.map_err(|_| StreamError::Closed),
        }
    }

    impl Carrier for Socket {
        fn send(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
            let count = bytes.len().min(self.1);
            outcome(self.0.write(&bytes[..count]))
        }

        fn flush(&mut self) -> Result<bool, StreamError> {
            Ok(true)
        }

        fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, StreamError> {
            let count = buffer.len().min(self.1);
            match self.0.read(&mut buffer[..count]) {
                Ok(0) => Err(StreamError::Closed),
                other => outcome(other),
            }
        }

        fn socket(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }

        fn shut_down(&self) {
            let _ = self.0.shutdown(std::net::Shutdown::Both);
        }
    }

    fn both(at_once: usize) -> (Exchange, Exchange) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let end = |socket: UnixStream| {
            socket.set_nonblocking(true).unwrap();
            Exchange::carried("exchange", Box::new(Socket(socket, at_once)), LAYOUT).unwrap()
        };
        (end(ours), end(theirs))
    }

    /// Receives a message, while the other side goes on sending.
    fn receive(to: &mut Exchange, from: &mut Exchange, out: &mut [u8; MESSAGE_BYTES]) -> usize {
        loop {
            match to.receive(out) {
                Some(length) => return length,
                None => from.ring(),
            }
            assert!(!to.is_closed() && !from.is_closed());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        /// Whatever the pieces in which bytes go, all messages and data arrive, in order.
        #[test]
        fn messages_and_their_data_arrive_in_order(
            at_once in prop_oneof![1usize..100, 1000usize..100_000],
            messages in prop::collection::vec((0usize..=MESSAGE_BYTES, 0usize..3000), 1..40),
            large in 0usize..=LAYOUT.data_bytes,
        ) {
            let (mut one, mut other) = both(at_once);
            let large = if at_once < 100 { large / 50 } else { large };
            let sent = messages.iter().copied().chain([(5, large)]).enumerate();
            let mut message = [0; MESSAGE_BYTES];
            for (number, (length, data)) in sent {
                let (tag, byte) = (number as u32 % LAYOUT.tags, number as u8);
                one.data(tag, data).unwrap().get().fill(byte);
                one.send(&vec![byte; length], Some((tag, data))).unwrap();
                one.ring();
                prop_assert_eq!(receive(&mut other, &mut one, &mut message), length);
                prop_assert!(message[..length].iter().all(|it| *it == byte));
                let mut read = vec![!byte; data];
                other.data(tag, data).unwrap().get().copy_to(&mut read);
                prop_assert!(read.iter().all(|it| *it == byte));
            }
        }

        /// Whatever a peer sends, nothing but places of its own tags changes, and nothing panics.
        #[test]
        fn a_hostile_peer_does_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            let mut end = Exchange::carried("e", Box::new(Socket(ours, 7)), LAYOUT).unwrap();
            theirs.write_all(&bytes).unwrap();
            let mut message = [0; MESSAGE_BYTES];
            while end.receive(&mut message).is_some() {}
            let _ = end.rest();
            drop(theirs);
            prop_assert!(end.receive(&mut message).is_none() && end.is_closed());
        }
    }

    #[test]
    fn a_peer_that_takes_nothing_is_not_waited_for() {
        let (mut one, mut other) = both(1 << 20);
        for tag in 0..LAYOUT.tags {
            one.send(b"m", Some((tag, LAYOUT.data_bytes))).unwrap();
            one.ring();
        }
        // The socket holds less than that.
        assert!(one.rest(), "there is something to receive");
        let mut message = [0; MESSAGE_BYTES];
        for _ in 0..LAYOUT.tags {
            assert_eq!(receive(&mut other, &mut one, &mut message), 1);
        }
        assert!(Event::wait_any(&[one.as_fd()], Some(0)) || one.rest());
    }

    #[test]
    fn what_comes_while_it_rests_makes_it_readable() {
        let (mut one, mut other) = both(1 << 20);
        assert!(other.rest() && !Event::wait_any(&[other.as_fd()], Some(0)));
        one.send(b"hello", None).unwrap();
        one.ring();
        assert!(Event::wait_any(&[other.as_fd()], Some(1_000_000_000)));
        assert!(!other.rest(), "there is a message");
        let mut message = [0; MESSAGE_BYTES];
        assert_eq!(other.receive(&mut message), Some(5));
        assert!(other.rest());
        drop(one);
        assert!(Event::wait_any(&[other.as_fd()], Some(1_000_000_000)));
        assert!(!other.rest() && other.is_closed());
    }

    #[test]
    fn a_tag_that_there_is_not_ends_it() {
        for (message, data, tag) in
            [(1, 1, 4), (61, 0, 0), (1, 200_001, 0), (u32::MAX, u32::MAX, 0)]
        {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            let mut end = Exchange::carried("e", Box::new(Socket(ours, 99)), LAYOUT).unwrap();
            let head = Header { message: message.into(), data: data.into(), tag: tag.into() };
            theirs.write_all(head.as_bytes()).unwrap();
            theirs.write_all(&[0; 100]).unwrap();
            assert_eq!(end.receive(&mut [0; MESSAGE_BYTES]), None);
            assert!(end.is_closed(), "{message} {data} {tag}");
        }
    }
}
