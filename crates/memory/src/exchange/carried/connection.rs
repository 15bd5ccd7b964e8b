//! One connection of a carried exchange: frames go out in chunks, and come in piece by piece.

use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::event::epoll;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::super::session::FrameOutbox;
use super::super::{Carrier, ExchangeLayout, MESSAGE_BYTES, place};
use crate::region::Region;
use crate::stream::StreamError;

/// Bytes that are received, or put together to be sent, at once.
pub(super) const CHUNK: usize = 64 << 10;

/// What kinds of frames there are.
pub(super) mod kind {
    /// A message, which is numbered.
    pub const MESSAGE: u8 = 0;
    /// The first on a connection: so many messages were received on all before.
    pub const RESUME: u8 = 1;
    /// A sign of life: its number is in the place of the tag, and that of the last one that was heard in the place
    /// of the length.
    pub const BEAT: u8 = 2;
}

/// What is before each message.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct FrameHeader {
    /// Bytes of the message.
    pub message: U16,
    pub kind: u8,
    pub reserved: u8,
    /// Bytes of data that follow it.
    pub data: U32,
    /// The place that these are of.
    pub tag: U32,
    /// How many messages the sender has received in this session.
    pub seen: U64,
}

pub(super) const HEADER: usize = size_of::<FrameHeader>();

/// A message that waits to be sent, or to be acknowledged.
#[derive(Debug)]
pub(super) struct SessionFrame {
    pub message: [u8; MESSAGE_BYTES],
    pub message_length: usize,
    pub tag: u32,
    pub length: usize,
    /// Bytes of header, message and data that were given to this connection.
    pub taken: usize,
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

/// What was received of a connection.
#[derive(Debug)]
pub(super) enum Came {
    /// A message of so many bytes.
    Message(usize),
    /// The beginning of the next message, whose data may be still to come; or of none.
    Begun(FrameHeader),
    /// Nothing that is whole.
    Nothing,
    /// A frame that the protocol does not allow: the connection is given up.
    Wrong,
}

/// One connection of a session: its carrier, and what is half received or sent.
#[derive(Debug)]
pub(super) struct Connection {
    /// Its number in the session.
    pub number: u64,
    carrier: Box<dyn Carrier>,
    /// The other side has said on it what it has received; until then, no message is sent.
    pub joined: bool,
    /// Something came since this was looked at last.
    pub heard: bool,
    /// What is sent before the next message.
    control: Option<FrameHeader>,
    /// What was put together from frames, and how much of it the carrier has taken.
    chunk: Vec<u8>,
    sent: usize,
    /// The carrier has something that it could not send yet.
    unflushed: bool,
    /// What was received, from the first byte that nobody has looked at.
    buffer: Box<[u8]>,
    unread: std::ops::Range<usize>,
    incoming: Option<Incoming>,
    /// Its socket wakes this end also when something can be sent.
    waits_to_send: bool,
}

impl Connection {
    /// One whose socket makes `readiness` readable. Who `speaks` first says what it has received.
    pub(super) fn new(
        number: u64,
        carrier: Box<dyn Carrier>,
        speaks: bool,
        readiness: &impl AsFd,
    ) -> rustix::io::Result<Connection> {
        let data = epoll::EventData::new_u64(0);
        epoll::add(readiness, carrier.socket(), data, epoll::EventFlags::IN)?;
        Ok(Connection {
            number,
            carrier,
            joined: false,
            heard: false,
            control: speaks.then(|| FrameHeader { kind: kind::RESUME, ..FrameHeader::default() }),
            chunk: Vec::with_capacity(CHUNK),
            sent: 0,
            unflushed: false,
            buffer: vec![0; CHUNK].into_boxed_slice(),
            unread: 0..0,
            incoming: None,
            waits_to_send: false,
        })
    }

    /// Its socket wakes nobody any more, and it carries nothing. `meant` tells the other side that the session
    /// has ended.
    pub(super) fn end(&self, readiness: &impl AsFd, meant: bool) {
        // One that is closed already is not among them.
        let _ = epoll::delete(readiness, self.carrier.socket());
        match meant {
            true => self.carrier.finish(),
            false => self.carrier.shut_down(),
        }
    }

    /// Has something sent that is no message.
    pub(super) fn say(&mut self, what: FrameHeader) {
        self.control.get_or_insert(what);
    }

    /// Sends what waits, as far as that goes now.
    pub(super) fn send(
        &mut self,
        outbox: &mut FrameOutbox<SessionFrame>,
        places: (&Arc<Region>, ExchangeLayout),
        seen: u64,
    ) -> Result<(), StreamError> {
        loop {
            if self.sent == self.chunk.len() {
                self.refill(outbox, places, seen);
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
    fn refill(
        &mut self,
        outbox: &mut FrameOutbox<SessionFrame>,
        (region, layout): (&Arc<Region>, ExchangeLayout),
        seen: u64,
    ) {
        self.chunk.clear();
        self.sent = 0;
        while self.chunk.len() < CHUNK {
            let frame = if self.joined { outbox.next_unsent() } else { None };
            // Not within a message.
            if frame.as_ref().is_none_or(|frame| frame.taken == 0)
                && let Some(control) = self.control.take()
            {
                let control = FrameHeader { seen: seen.into(), ..control };
                self.chunk.extend_from_slice(control.as_bytes());
                continue;
            }
            let Some(frame) = frame else { return };
            let head = HEADER + frame.message_length;
            if frame.taken == 0 {
                let header = FrameHeader {
                    message: (frame.message_length as u16).into(),
                    data: (frame.length as u32).into(),
                    tag: frame.tag.into(),
                    seen: seen.into(),
                    kind: kind::MESSAGE,
                    reserved: 0,
                };
                self.chunk.extend_from_slice(header.as_bytes());
                self.chunk.extend_from_slice(&frame.message[..frame.message_length]);
                frame.taken = head;
            }
            let done = frame.taken - head;
            let count = (frame.length - done).min(CHUNK.saturating_sub(self.chunk.len()));
            if count > 0 {
                let from = self.chunk.len();
                self.chunk.resize(from + count, 0);
                let place = place(region, layout, 0, frame.tag, frame.length);
                let part = place.as_ref().and_then(|place| place.get().part(done, count));
                part.map(|part| part.copy_to(&mut self.chunk[from..]));
                frame.taken += count;
            }
            if frame.taken < head + frame.length {
                return;
            }
            outbox.advance();
        }
    }

    /// Whether something waits to be sent.
    pub(super) fn has_unsent(&self, outbox: &FrameOutbox<SessionFrame>) -> bool {
        self.unflushed
            || self.sent < self.chunk.len()
            || self.control.is_some()
            || (self.joined && outbox.has_unsent())
    }

    /// Has its socket wake this end also when something can be sent, or not any more.
    pub(super) fn wait_to_send(&mut self, readiness: &impl AsFd, waits: bool) {
        if waits == self.waits_to_send {
            return;
        }
        let sending = if waits { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
        let wanted = epoll::EventFlags::IN | sending;
        let data = epoll::EventData::new_u64(0);
        if epoll::modify(readiness, self.carrier.socket(), data, wanted).is_ok() {
            self.waits_to_send = waits;
        }
    }

    /// Receives more; false when there is nothing now.
    pub(super) fn fill(&mut self) -> Result<bool, StreamError> {
        if self.unread.is_empty() {
            self.unread = 0..0;
        } else if self.unread.start > 0 {
            // What is left is less than a header and a message.
            self.buffer.copy_within(self.unread.clone(), 0);
            self.unread = 0..self.unread.len();
        }
        let count = self.carrier.receive(&mut self.buffer[self.unread.end..])?;
        self.unread.end += count;
        self.heard |= count > 0;
        Ok(count > 0)
    }

    /// What came next, from what was received.
    pub(super) fn take(
        &mut self,
        message: &mut [u8; MESSAGE_BYTES],
        (region, layout): (&Arc<Region>, ExchangeLayout),
    ) -> Came {
        if let Some(header) = self.take_control() {
            return Came::Begun(header);
        }
        let Some(incoming) = self.incoming.as_mut() else { return self.begin(layout) };
        let unread = &self.buffer[self.unread.clone()];
        let count = unread.len().min(incoming.length - incoming.done);
        if count > 0 {
            let place = place(region, layout, 0, incoming.tag, incoming.length);
            let part = place.as_ref().and_then(|place| place.get().part(incoming.done, count));
            part.map(|part| part.copy_from(&unread[..count]));
            incoming.done += count;
            self.unread.start += count;
        }
        if incoming.done < incoming.length {
            return Came::Nothing;
        }
        let Some(incoming) = self.incoming.take() else { return Came::Nothing };
        let length = incoming.message_length;
        message[..length].copy_from_slice(&incoming.message[..length]);
        Came::Message(length)
    }

    /// Takes a header and its message, when both were received and are such.
    fn begin(&mut self, layout: ExchangeLayout) -> Came {
        let unread = &self.buffer[self.unread.clone()];
        let Ok((header, rest)) = FrameHeader::read_from_prefix(unread) else {
            return Came::Nothing;
        };
        let (message_length, length) = (header.message.get() as usize, header.data.get() as usize);
        let tag = header.tag.get();
        let fits = header.kind == kind::MESSAGE
            && self.joined
            && message_length <= MESSAGE_BYTES
            && length <= layout.data_bytes
            && tag < layout.tags;
        if !fits {
            return Came::Wrong;
        }
        let Some(text) = rest.get(..message_length) else { return Came::Nothing };
        let mut message = [0; MESSAGE_BYTES];
        message[..message_length].copy_from_slice(text);
        self.unread.start += HEADER + message_length;
        self.incoming = Some(Incoming { message, message_length, tag, length, done: 0 });
        Came::Begun(header)
    }

    /// What came next, if it is whole and no message.
    pub(super) fn take_control(&mut self) -> Option<FrameHeader> {
        let unread = &self.buffer[self.unread.clone()];
        let (header, _) = FrameHeader::read_from_prefix(unread).ok()?;
        let expected = match header.kind {
            kind::RESUME => !self.joined,
            kind::BEAT => self.joined,
            _ => false,
        };
        if self.incoming.is_some() || !expected || header.message.get() != 0 {
            return None;
        }
        self.unread.start += HEADER;
        Some(header)
    }

    /// Whether there is something to take: a message, more of its data, or something that is none.
    pub(super) fn has_some(&self) -> bool {
        let unread = &self.buffer[self.unread.clone()];
        match &self.incoming {
            Some(incoming) => !unread.is_empty() || incoming.done == incoming.length,
            None => FrameHeader::read_from_prefix(unread).is_ok_and(|(header, rest)| {
                let length = header.message.get() as usize;
                length > MESSAGE_BYTES || rest.len() >= length
            }),
        }
    }
}
