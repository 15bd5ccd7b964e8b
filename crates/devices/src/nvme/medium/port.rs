//! The end that has the blocks: takes operations of a front elsewhere and does them.
//!
//! The front is hostile: a message is copied out once, and its tag, range and length are checked
//! before anything is done. One that breaks the rules is not listened to any more.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rackbus_memory::exchange::MESSAGE_BYTES;
use rackbus_memory::exchange::session::SessionSide;
use rackbus_memory::{
    Carried, Exchange, ExchangeError, ExchangeHandles, InheritedEnd, PinnedSlice,
};
use rackbus_pci::{Bus, Work};
use zerocopy::{FromBytes, IntoBytes};

use super::super::backing::{Backing, InlineResult, MediaError, MediumRequest, RequestResult};
use super::super::limits::Meter;
use super::{Answer, Ask, AskState, DrivePortState, FLAG, LAYOUT, TAGS, TURN_BYTES, kind, number};
use crate::either::either_of;

/// Operations taken in one poll: a revocation waits no longer than these take to begin.
const TURN: usize = 32;

/// Serves the medium to one front.
#[derive(Debug)]
pub struct DrivePort {
    exchange: Exchange,
    /// Operations under way, by tag.
    asks: [Option<Ask>; TAGS as usize],
    under_way: usize,
    /// Those of them that wait until the drive's limits let them begin, in their order.
    waiting: VecDeque<u32>,
    /// The front is not listened to any more.
    over: bool,
    finished: Vec<RequestResult>,
    /// Of the exchange's event and the backing's: an engine waits for one descriptor.
    either: OwnedFd,
    /// Offsets and lengths are multiples of this.
    block: u64,
}

impl DrivePort {
    /// Over `backing`, in blocks of `block` bytes; with what the front joins by.
    ///
    /// # Errors
    /// When memory or descriptors cannot be obtained.
    pub fn new(
        backing: &dyn Backing,
        block: u64,
    ) -> Result<(DrivePort, ExchangeHandles), ExchangeError> {
        let (exchange, handles) = Exchange::create("nvme-medium", LAYOUT)?;
        Ok((DrivePort::with_exchange(exchange, backing, block)?, handles))
    }

    /// The same for a front whose operations `carried` carries.
    ///
    /// # Errors
    /// As [`new`](DrivePort::new).
    pub fn carried(
        carried: Carried,
        backing: &dyn Backing,
        block: u64,
    ) -> Result<DrivePort, ExchangeError> {
        DrivePort::with_exchange(Exchange::carried("nvme-medium", carried, LAYOUT)?, backing, block)
    }

    fn with_exchange(
        exchange: Exchange,
        backing: &dyn Backing,
        block: u64,
    ) -> Result<DrivePort, ExchangeError> {
        let either = either_of([Some(exchange.as_fd()), backing.wake_fd()])
            .map_err(|cause| ExchangeError::Events(cause.into()))?;
        let (asks, finished) = ([None; TAGS as usize], Vec::new());
        let waiting = VecDeque::new();
        Ok(DrivePort {
            exchange,
            asks,
            under_way: 0,
            waiting,
            over: false,
            finished,
            either,
            block,
        })
    }

    /// What was asked for and is not answered, to be done again by whoever [resumes](DrivePort::resume) it, and
    /// what that needs of the exchange. What has ended is answered first. True beside it when data was lost
    /// that nobody has heard of.
    ///
    /// # Errors
    /// When there are no descriptors left; it continues as it was.
    pub fn save(
        &mut self,
        backing: &mut dyn Backing,
    ) -> std::io::Result<(DrivePortState, Vec<OwnedFd>, bool)> {
        if self.under_way > 0
            && let Some(background) = backing.background()
        {
            background.reap(&mut self.finished);
        }
        for (tag, result) in std::mem::take(&mut self.finished) {
            self.answer(tag, result);
        }
        self.exchange.ring();
        let files = self.exchange.pass_on()?;
        let background = backing.background();
        let lost = |ask: &Ask| {
            let outcome = background.as_ref().and_then(|it| it.outcome(ask.tag.get()));
            outcome == Some(Err(MediaError::NotDurable))
        };
        let unheard = self.asks.iter().flatten().any(lost);
        let asks = self.asks.iter().flatten().map(AskState::from).collect();
        Ok((DrivePortState { asks, over: self.over }, files, unheard))
    }

    /// Goes on here after all with what was [saved](DrivePort::save).
    pub fn take_back(&mut self) {
        self.exchange.take_back();
    }

    /// Goes on over `backing` where an earlier port was saved. What it had taken begins with the next polls.
    ///
    /// # Errors
    /// As [`new`](DrivePort::new).
    pub fn resume(
        backing: &mut dyn Backing,
        block: u64,
        end: InheritedEnd,
        state: &DrivePortState,
    ) -> Result<DrivePort, ExchangeError> {
        let exchange = Exchange::again(SessionSide::Answers, end, LAYOUT)?;
        let mut port = DrivePort::with_exchange(exchange, backing, block)?;
        port.over = state.over;
        for ask in &state.asks {
            if !port.take(backing, None, &Ask::from(ask)) {
                port.close();
            }
        }
        if let Some(background) = backing.background() {
            background.submit();
        }
        port.exchange.ring();
        Ok(port)
    }

    /// Answers what has finished and takes operations.
    pub fn poll(&mut self, backing: &mut dyn Backing, meter: &mut Meter, bus: &Bus<'_>) -> Work {
        let (mut done, mut worked) = (0, false);
        if self.under_way > 0
            && let Some(background) = backing.background()
        {
            worked = background.works_in_looks();
            background.reap(&mut self.finished);
        }
        for (tag, result) in std::mem::take(&mut self.finished) {
            self.answer(tag, result);
            done += 1;
        }
        if !self.waiting.is_empty() {
            done += self.begin(backing, meter, bus);
        }
        let (mut message, mut moved) = ([0; MESSAGE_BYTES], 0);
        for nth in 0..TURN {
            if self.over || moved >= TURN_BYTES {
                break;
            }
            let Some(length) = self.exchange.receive(&mut message) else { break };
            if nth == 0 {
                bus.user.before_access();
            }
            if bus.dma.revoker().is_revoked() {
                // It was given up while this host stalled: what it asked for is not done.
                self.close();
                break;
            }
            done += 1;
            let ask = message.get(..length).and_then(|bytes| Ask::read_from_bytes(bytes).ok());
            // Whatever the length is, it is checked when the operation is taken.
            moved = ask.map_or(moved, |ask| moved.saturating_add(ask.length.get()));
            if !ask.is_some_and(|ask| self.take(backing, Some((&mut *meter, bus.now_ns)), &ask)) {
                tracing::warn!("a front violates the protocol and is disconnected");
                self.close();
            }
        }
        if done > 0 {
            if let Some(background) = backing.background() {
                background.submit();
            }
            self.exchange.ring();
            return Work::Done;
        }
        if worked {
            return Work::Done;
        }
        if !self.waiting.is_empty() {
            return Work::Asleep(Some(meter.delay()));
        }
        match self.exchange.is_closed() && self.under_way == 0 {
            true => Work::Asleep(None),
            false => Work::Idle,
        }
    }

    /// Begins what waits for the drive's limits, as far as they let it; returns how many.
    fn begin(&mut self, backing: &mut dyn Backing, meter: &mut Meter, bus: &Bus<'_>) -> usize {
        let mut begun = 0;
        while begun < TURN && meter.is_ready(bus.now_ns) {
            if begun == 0 {
                bus.user.before_access();
            }
            if bus.dma.revoker().is_revoked() {
                self.close();
                break;
            }
            let Some(tag) = self.waiting.pop_front() else { break };
            let ask = self.asks.get(tag as usize).copied().flatten();
            if let Some((ask, request)) = ask.and_then(|ask| Some((ask, self.request(&ask)?))) {
                self.start(backing, meter, &ask, request);
            }
            begun += 1;
        }
        begun
    }

    /// Takes an operation, which begins `now` where the drive's limits let it; false when it is none that there can
    /// be.
    fn take(
        &mut self,
        backing: &mut dyn Backing,
        now: Option<(&mut Meter, u64)>,
        ask: &Ask,
    ) -> bool {
        let (tag, offset, length) = (ask.tag.get(), ask.offset.get(), ask.length.get());
        let end = offset.checked_add(length);
        let inside = end.is_some_and(|end| end <= backing.capacity())
            && offset.is_multiple_of(self.block)
            && length.is_multiple_of(self.block);
        if !inside || (length == 0 && ask.kind != kind::FLUSH) {
            return false;
        }
        let Some(request) = self.request(ask) else { return false };
        match self.asks.get_mut(tag as usize) {
            Some(slot @ None) => *slot = Some(*ask),
            _ => return false,
        }
        self.under_way += 1;
        let first = self.waiting.is_empty();
        match now {
            Some((meter, now_ns)) => {
                if first && meter.is_ready(now_ns) {
                    self.start(backing, meter, ask, request);
                } else {
                    self.waiting.push_back(tag);
                }
            }
            None => self.waiting.push_back(tag),
        }
        true
    }

    /// What is asked for, with the place of its data.
    fn request(&self, ask: &Ask) -> Option<MediumRequest<Vec<PinnedSlice>>> {
        let (tag, offset, length) = (ask.tag.get(), ask.offset.get(), ask.length.get());
        let flag = ask.flags & FLAG != 0;
        let data = || self.exchange.data(tag, usize::try_from(length).ok()?);
        match ask.kind {
            kind::READ => Some(MediumRequest::Read { offset, into: vec![data()?] }),
            kind::WRITE => {
                Some(MediumRequest::Write { offset, from: vec![data()?], durable: flag })
            }
            kind::FLUSH => Some(MediumRequest::Flush),
            kind::ZERO => Some(MediumRequest::Zero { offset, length, deallocate: flag }),
            _ => None,
        }
    }

    fn start(
        &mut self,
        backing: &mut dyn Backing,
        meter: &mut Meter,
        ask: &Ask,
        request: MediumRequest<Vec<PinnedSlice>>,
    ) {
        let deallocates = ask.kind == kind::ZERO && ask.flags & FLAG != 0;
        meter.spend(if deallocates { 0 } else { ask.length.get() });
        let tag = ask.tag.get();
        match attempt(backing, &request) {
            InlineResult::Done(result) => self.answer(tag, result),
            InlineResult::WouldBlock => match backing.background() {
                Some(background) => background.start(tag, request),
                None => self.answer(tag, Err(MediaError::Aborted)),
            },
        }
    }

    fn answer(&mut self, tag: u32, result: Result<(), MediaError>) {
        let ask = self.asks.get_mut(tag as usize).and_then(Option::take);
        self.under_way -= usize::from(ask.is_some());
        let read = ask.filter(|ask| ask.kind == kind::READ && result.is_ok());
        // Its length was checked against the place.
        let data = read.map(|ask| (tag, ask.length.get() as usize));
        let answer = Answer { tag: tag.into(), result: number(result).into() };
        // There is room for one answer of each tag, unless the front does not take them.
        if self.exchange.send(answer.as_bytes(), data).is_err() {
            self.close();
        }
    }

    fn close(&mut self) {
        self.over = true;
        self.exchange.close();
        // Nobody hears of what has not begun.
        for tag in std::mem::take(&mut self.waiting) {
            let ask = self.asks.get_mut(tag as usize).and_then(Option::take);
            self.under_way -= usize::from(ask.is_some());
        }
    }

    /// Ends it: on return nothing that the front asked for is under way, and it hears no more.
    pub fn end(&mut self, backing: &mut dyn Backing) {
        self.close();
        if let Some(background) = backing.background() {
            background.abort();
        }
    }

    /// The engine is about to sleep; false when there is something to do.
    pub fn park(&mut self, backing: &mut dyn Backing) -> bool {
        let quiet = self.exchange.rest();
        if let Some(background) = backing.background()
            && background.rearm()
        {
            // Also what an earlier user gave up, which nobody else takes in.
            background.reap(&mut self.finished);
            return false;
        }
        quiet || self.exchange.is_closed()
    }

    /// Readable when there is something to do.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.either.as_fd()
    }
}

fn attempt(backing: &mut dyn Backing, request: &MediumRequest<Vec<PinnedSlice>>) -> InlineResult {
    match request {
        MediumRequest::Read { offset, into } => {
            let into: Vec<_> = into.iter().map(PinnedSlice::get).collect();
            backing.attempt(&MediumRequest::Read { offset: *offset, into: &into })
        }
        MediumRequest::Write { offset, from, durable } => {
            let from: Vec<_> = from.iter().map(PinnedSlice::get).collect();
            let request =
                MediumRequest::Write { offset: *offset, from: &from[..], durable: *durable };
            backing.attempt(&request)
        }
        MediumRequest::Flush => backing.attempt(&MediumRequest::Flush),
        MediumRequest::Zero { offset, length, deallocate } => {
            backing.attempt(&MediumRequest::Zero {
                offset: *offset,
                length: *length,
                deallocate: *deallocate,
            })
        }
    }
}
