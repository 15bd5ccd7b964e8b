//! One connection of a carried exchange: frames go out in chunks, and come in piece by piece.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::event::epoll;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::super::lane::LaneNews;
use super::super::session::FrameOutbox;
use super::super::{Carrier, ExchangeLayout, MESSAGE_BYTES, place};
use super::beside::Beside;
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
    /// A message, which is numbered, whose data are left in their place: so many, of this tag.
    pub const LEFT: u8 = 3;
    /// How it is with the lane, in the place of the tag; that of [`RESUME`] has it, too.
    pub const LANE: u8 = 4;
    /// Asks for data that were left: so many, of this tag.
    pub const FETCH: u8 = 5;
    /// The data that were asked for.
    pub const FETCHED: u8 = 6;
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

impl FrameHeader {
    /// One that says how it is with the lane.
    pub(super) fn of_lane(kind: u8, news: LaneNews) -> FrameHeader {
        FrameHeader { kind, tag: news.number().into(), ..FrameHeader::default() }
    }
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
    /// How its data go.
    pub way: DataTransport,
}

/// How the data of a message are transported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DataTransport {
    /// In the same message, behind its header.
    Behind,
    /// By this transfer of the lane; the message is sent when that has ended.
    Moving(u64),
    /// They are left in their place.
    Left,
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
    /// Data that are not behind it, but left: their tag and length.
    left: Option<(u32, usize)>,
    /// It is no message, but data that were asked for.
    fetched: bool,
}

/// What was received of a connection.
#[derive(Debug)]
pub(super) enum Came {
    /// A message of so many bytes, and the tag and length of data that were left for it.
    Message(usize, Option<(u32, usize)>),
    /// The data of this tag, so many bytes, which were asked for.
    Fetched(u32, usize),
    /// The beginning of the next message, whose data may be still to come; or of none.
    Begun(FrameHeader),
    /// Nothing that is whole.
    Nothing,
    /// A frame that the protocol does not allow: the connection is given up.
    Wrong,
}

/// One connection of a session: its carrier, and what is half received or sent.
#[derive(Debug)]
pub(super) struct CarrierConnection {
    /// Its number in the session.
    pub number: u64,
    carrier: Box<dyn Carrier>,
    /// The other side has said on it what it has received; until then, no message is sent.
    pub joined: bool,
    /// Something came since this was looked at last.
    pub heard: bool,
    /// What is sent before the next message: one sign of life, what has changed of the lane, which changes three times at
    /// most, and a request for the data of each place.
    controls: VecDeque<FrameHeader>,
    /// Data that the other side asks for: tag, length, and how many bytes of header and data were given to this
    /// connection.
    fetched: VecDeque<(u32, usize, usize)>,
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

impl CarrierConnection {
    /// One whose socket makes `readiness` readable. Who `speaks` first says what it has received, and how it is with
    /// the lane.
    pub(super) fn new(
        number: u64,
        carrier: Box<dyn Carrier>,
        speaks: Option<LaneNews>,
        readiness: &impl AsFd,
    ) -> rustix::io::Result<CarrierConnection> {
        let data = epoll::EventData::new_u64(0);
        epoll::add(readiness, carrier.socket(), data, epoll::EventFlags::IN)?;
        Ok(CarrierConnection {
            number,
            carrier,
            joined: false,
            heard: false,
            controls: speaks
                .map(|news| FrameHeader::of_lane(kind::RESUME, news))
                .into_iter()
                .collect(),
            fetched: VecDeque::new(),
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

    /// Has something sent that is no message, behind all such that waits. A sign of life says no more than one that
    /// still waits.
    pub(super) fn say(&mut self, what: FrameHeader) {
        if what.kind != kind::BEAT || self.controls.iter().all(|it| it.kind != kind::BEAT) {
            self.controls.push_back(what);
        }
    }

    /// How many places' data the other side asks for that are not sent.
    pub(super) fn unfetched(&self) -> usize {
        self.fetched.len()
    }

    /// Has the data sent that the other side asks for.
    pub(super) fn send_fetched(&mut self, tag: u32, length: usize) {
        self.fetched.push_back((tag, length, 0));
    }

    /// Sends what waits, as far as that goes now.
    pub(super) fn send(
        &mut self,
        outbox: &mut FrameOutbox<SessionFrame>,
        places: (&Arc<Region>, ExchangeLayout),
        seen: u64,
        lane: Option<&Beside>,
    ) -> Result<(), StreamError> {
        loop {
            if self.sent == self.chunk.len() {
                self.refill(outbox, places, seen, lane);
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
        places: (&Arc<Region>, ExchangeLayout),
        seen: u64,
        lane: Option<&Beside>,
    ) {
        self.chunk.clear();
        self.sent = 0;
        while self.chunk.len() < CHUNK {
            let waits = |frame: &SessionFrame| matches!(frame.way, DataTransport::Moving(_));
            let frame = match outbox.unsent() {
                Some(frame) if self.joined && !waits(frame) => outbox.next_unsent(),
                _ => None,
            };
            let within = self.fetched.front().is_some_and(|(_, _, taken)| *taken > 0);
            // Not within a message.
            if frame.as_ref().is_none_or(|frame| frame.taken == 0) {
                if !within && let Some(control) = self.controls.pop_front() {
                    let control = FrameHeader { seen: seen.into(), ..control };
                    self.chunk.extend_from_slice(control.as_bytes());
                    continue;
                }
                if !self.fetched.is_empty() {
                    self.refill_fetched(places, seen);
                    continue;
                }
            }
            let Some(frame) = frame else { return };
            let head = HEADER + frame.message_length;
            if frame.taken == 0 {
                if lane.is_some_and(|lane| lane.leaves(frame.length)) {
                    frame.way = DataTransport::Left;
                }
                let left = frame.way == DataTransport::Left;
                let header = FrameHeader {
                    message: (frame.message_length as u16).into(),
                    data: (frame.length as u32).into(),
                    tag: frame.tag.into(),
                    seen: seen.into(),
                    kind: if left { kind::LEFT } else { kind::MESSAGE },
                    reserved: 0,
                };
                self.chunk.extend_from_slice(header.as_bytes());
                self.chunk.extend_from_slice(&frame.message[..frame.message_length]);
                frame.taken = head;
            }
            if frame.way == DataTransport::Left {
                outbox.advance();
                continue;
            }
            frame.taken += self.append(places, (frame.tag, frame.length), frame.taken - head);
            if frame.taken < head + frame.length {
                return;
            }
            outbox.advance();
        }
    }

    /// Puts more together of the data that the other side asked for.
    fn refill_fetched(&mut self, places: (&Arc<Region>, ExchangeLayout), seen: u64) {
        let Some((tag, length, taken)) = self.fetched.pop_front() else { return };
        if taken == 0 {
            let header = FrameHeader {
                message: 0.into(),
                data: (length as u32).into(),
                tag: tag.into(),
                seen: seen.into(),
                kind: kind::FETCHED,
                reserved: 0,
            };
            self.chunk.extend_from_slice(header.as_bytes());
        }
        let taken = taken.max(HEADER);
        let taken = taken + self.append(places, (tag, length), taken - HEADER);
        if taken < HEADER + length {
            self.fetched.push_front((tag, length, taken));
        }
    }

    /// Appends more of a place's data, of which `done` bytes are sent; returns how many.
    fn append(
        &mut self,
        (region, layout): (&Arc<Region>, ExchangeLayout),
        (tag, length): (u32, usize),
        done: usize,
    ) -> usize {
        let count = (length - done).min(CHUNK.saturating_sub(self.chunk.len()));
        if count > 0 {
            let from = self.chunk.len();
            self.chunk.resize(from + count, 0);
            let place = place(region, layout, 0, tag, length);
            let part = place.as_ref().and_then(|place| place.get().part(done, count));
            part.map(|part| part.copy_to(&mut self.chunk[from..]));
        }
        count
    }

    /// Whether something waits to be sent.
    pub(super) fn has_unsent(&self, outbox: &FrameOutbox<SessionFrame>) -> bool {
        self.unflushed
            || self.sent < self.chunk.len()
            || !self.controls.is_empty()
            || !self.fetched.is_empty()
            || (self.joined
                && outbox.unsent().is_some_and(|it| !matches!(it.way, DataTransport::Moving(_))))
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
        lane: Option<&Beside>,
    ) -> Came {
        if let Some(header) = self.take_control(lane.is_some()) {
            return Came::Begun(header);
        }
        let Some(incoming) = self.incoming.as_mut() else { return self.begin(layout, lane) };
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
        match incoming.fetched {
            true => Came::Fetched(incoming.tag, incoming.length),
            false => Came::Message(length, incoming.left),
        }
    }

    /// Takes a header and its message, when both were received and are such.
    fn begin(&mut self, layout: ExchangeLayout, lane: Option<&Beside>) -> Came {
        let unread = &self.buffer[self.unread.clone()];
        let Ok((header, rest)) = FrameHeader::read_from_prefix(unread) else {
            return Came::Nothing;
        };
        let (message_length, length) = (header.message.get() as usize, header.data.get() as usize);
        let tag = header.tag.get();
        let may_come = match header.kind {
            kind::MESSAGE => true,
            kind::LEFT => lane.is_some_and(Beside::may_be_left),
            kind::FETCHED => {
                message_length == 0 && lane.is_some_and(|lane| lane.expects(tag, length))
            }
            _ => false,
        };
        let fits = may_come
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
        let left = (header.kind == kind::LEFT).then_some((tag, length));
        let length = if left.is_some() { 0 } else { length };
        let fetched = header.kind == kind::FETCHED;
        self.incoming =
            Some(Incoming { message, message_length, tag, length, done: 0, left, fetched });
        Came::Begun(header)
    }

    /// What came next, if it is whole and no message.
    pub(super) fn take_control(&mut self, has_lane: bool) -> Option<FrameHeader> {
        let unread = &self.buffer[self.unread.clone()];
        let (header, _) = FrameHeader::read_from_prefix(unread).ok()?;
        let expected = match header.kind {
            kind::RESUME => !self.joined,
            kind::BEAT => self.joined,
            // A side whose lane is of no use says so to one that never had any.
            kind::LANE => self.joined,
            kind::FETCH => self.joined && has_lane,
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
