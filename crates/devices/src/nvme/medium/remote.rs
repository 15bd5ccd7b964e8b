//! The end that has the controller: a backing whose blocks another node has.
//!
//! Data passes through the exchange: the other node never sees the memory of this side's user. A
//! write's data is copied when the operation is sent, a read's when its answer comes.

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rackbus_memory::{
    Carried, DmaSlice, Event, ExchangeError, ExchangeHandles, InheritedEnd, PinnedSlice,
};
use rackbus_pci::Health;

use super::super::backing::{
    Background, Backing, InlineResult, MediaError, MediumRequest, RequestResult,
};
use super::zero_parts::{self, ZeroParts};
use super::{Answer, Ask, DriveDescription, FLAG, LAYOUT, TAGS, TURN_BYTES, kind, result};
use crate::front_exchange::FrontExchange;
use crate::lost::Lost;

/// Between two looks whether the other node is lost, when something is waited for.
const LOOK: Duration = Duration::from_millis(100);

/// How long the node that has the blocks may take for its next answer when a reset or an unmap waits
/// for it: as long as an engine may take before it counts as hanging.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often that in all, however many answers a reset or an unmap waits for: a node that answers as
/// slowly as it may would keep a guest waiting for minutes.
const ANSWERS: u32 = 6;

/// An operation that the other node has.
#[derive(Debug)]
struct Operation {
    /// Of who started it; `None` when it was given up.
    owner: Option<u32>,
    /// Where what it reads goes.
    into: Vec<PinnedSlice>,
    /// The part of a range of zeroes that it is.
    zeroes: Option<ZeroPart>,
}

/// A part of a range of zeroes.
#[derive(Debug)]
struct ZeroPart {
    length: u64,
    deallocate: bool,
    sent: Instant,
    /// What follows when this part is done.
    rest: Option<MediumRequest<Vec<PinnedSlice>>>,
}

/// Blocks that another node has.
#[derive(Debug)]
pub struct RemoteBacking {
    description: DriveDescription,
    exchange: FrontExchange,
    /// Operations in progress, by their tags in the exchange.
    operations: [Option<Operation>; TAGS as usize],
    /// Tags that are free; the one freed last is used first, its data may still be near.
    free: Vec<u32>,
    /// Tags of operations of an earlier life of the front, which end before any of this one begins: they
    /// would change what came after them.
    earlier: usize,
    /// What waits for a tag.
    waiting: VecDeque<(u32, MediumRequest<Vec<PinnedSlice>>)>,
    /// Ranges of zeroes, which wait for a tag and until fewer of them are under way.
    zeroes_waiting: VecDeque<(u32, MediumRequest<Vec<PinnedSlice>>)>,
    zero_parts: ZeroParts,
    patience: Duration,
    /// Since when a reset or an unmap waits for answers.
    held_up_since: Option<Instant>,
    failed: bool,
    health: Health,
}

impl RemoteBacking {
    /// Over what the other node offered.
    ///
    /// # Errors
    /// [`ExchangeError`] when that is not fit.
    pub fn new(
        description: DriveDescription,
        handles: ExchangeHandles,
        lost: Lost,
    ) -> Result<RemoteBacking, ExchangeError> {
        Ok(RemoteBacking::with_exchange(description, FrontExchange::join(handles, LAYOUT, lost)?))
    }

    /// The same over what `carried` carries.
    ///
    /// # Errors
    /// As [`new`](RemoteBacking::new).
    pub fn carried(
        description: DriveDescription,
        carried: Carried,
        lost: Lost,
    ) -> Result<RemoteBacking, ExchangeError> {
        let exchange = FrontExchange::carried("nvme-front", carried, LAYOUT, lost)?;
        Ok(RemoteBacking::with_exchange(description, exchange))
    }

    fn with_exchange(description: DriveDescription, exchange: FrontExchange) -> RemoteBacking {
        RemoteBacking {
            description,
            exchange,
            operations: [const { None }; TAGS as usize],
            free: (0..TAGS).rev().collect(),
            earlier: 0,
            waiting: VecDeque::new(),
            zeroes_waiting: VecDeque::new(),
            zero_parts: ZeroParts::default(),
            patience: PATIENCE,
            held_up_since: None,
            failed: false,
            health: Health::default(),
        }
    }

    /// The same where an earlier life of the front is gone on with; [`expect`](Backing::expect) follows.
    ///
    /// # Errors
    /// As [`new`](RemoteBacking::new).
    pub fn again(
        description: DriveDescription,
        end: InheritedEnd,
        lost: Lost,
    ) -> Result<RemoteBacking, ExchangeError> {
        let exchange = FrontExchange::again(end, LAYOUT, lost)?;
        Ok(RemoteBacking::with_exchange(description, exchange))
    }

    /// The drive, as its lender described it.
    pub fn description(&self) -> &DriveDescription {
        &self.description
    }

    /// With another patience than usual.
    #[cfg(test)]
    pub(super) fn with_patience(self, patience: Duration) -> RemoteBacking {
        RemoteBacking { patience, ..self }
    }

    fn under_way(&self) -> usize {
        TAGS as usize - self.free.len()
    }

    /// Whether nothing waits to be sent.
    fn none_waits(&self) -> bool {
        self.waiting.is_empty() && self.zeroes_waiting.is_empty()
    }

    /// Sends what waits, as far as there are tags.
    fn advance(&mut self) {
        while self.earlier == 0 && !self.none_waits() {
            let Some(&tag) = self.free.last() else { return };
            let Some((owner, request)) = self.next() else { return };
            self.free.pop();
            self.send(tag, owner, request);
        }
    }

    /// The next that may be sent. Zeroes first: they take few of the tags, and would not get one from a deep queue.
    fn next(&mut self) -> Option<(u32, MediumRequest<Vec<PinnedSlice>>)> {
        if !self.zeroes_waiting.is_empty() {
            let operations = self.operations.iter().flatten();
            if operations.filter(|it| it.zeroes.is_some()).count() < zero_parts::AT_ONCE {
                return self.zeroes_waiting.pop_front();
            }
        }
        self.waiting.pop_front()
    }

    fn send(&mut self, tag: u32, owner: u32, request: MediumRequest<Vec<PinnedSlice>>) {
        let mut ask = Ask {
            tag: tag.into(),
            kind: kind::FLUSH,
            flags: 0,
            reserved: [0; 2],
            offset: 0.into(),
            length: 0.into(),
        };
        let (mut buffers, mut data, mut zeroes) = (Vec::new(), None, None);
        match request {
            MediumRequest::Read { offset, into } => {
                (ask.kind, ask.offset) = (kind::READ, offset.into());
                ask.length = bytes(&into).into();
                buffers = into;
            }
            MediumRequest::Write { offset, from, durable } => {
                (ask.kind, ask.offset) = (kind::WRITE, offset.into());
                ask.flags = if durable { FLAG } else { 0 };
                ask.length = bytes(&from).into();
                self.copy(tag, &from, |place, host| {
                    place.copy_from_slice(host);
                });
                data = Some((tag, ask.length.get() as usize));
            }
            MediumRequest::Flush => {}
            MediumRequest::Zero { offset, length, deallocate } => {
                let part = length.min(self.zero_parts.most(deallocate));
                (ask.kind, ask.offset) = (kind::ZERO, offset.into());
                ask.flags = if deallocate { FLAG } else { 0 };
                ask.length = part.into();
                let (offset, length) = (offset + part, length - part);
                let rest = MediumRequest::Zero { offset, length, deallocate };
                let (rest, sent) = ((length > 0).then_some(rest), Instant::now());
                zeroes = Some(ZeroPart { length: part, deallocate, sent, rest });
            }
        }
        let operation = Operation { owner: Some(owner), into: buffers, zeroes };
        self.operations[tag as usize] = Some(operation);
        self.exchange.send(&ask, data);
    }

    /// Pairs the place for data of `tag` with `buffers`, piece by piece.
    fn copy(&self, tag: u32, buffers: &[PinnedSlice], one: impl Fn(DmaSlice<'_>, DmaSlice<'_>)) {
        let mut at = 0;
        for buffer in buffers {
            let host = buffer.get();
            let Some(place) = self.exchange.data(tag, at + host.len()) else { return };
            if let Some(part) = place.get().part(at, host.len()) {
                one(part, host);
            }
            at += host.len();
        }
    }

    /// Ends the operation with `tag`; returns how many bytes were copied for it.
    fn finish(
        &mut self,
        tag: u32,
        outcome: Result<(), MediaError>,
        out: &mut Vec<RequestResult>,
    ) -> u64 {
        let slot = self.operations.get_mut(tag as usize);
        let Some(Operation { owner, into, zeroes }) = slot.and_then(Option::take) else {
            // An answer to nothing that was asked.
            self.exchange.break_off();
            return 0;
        };
        if outcome.is_ok()
            && let Some(ZeroPart { length, deallocate, sent, rest }) = zeroes
        {
            self.zero_parts.answered(deallocate, length, sent.elapsed());
            if let (Some(owner), Some(rest)) = (owner, rest) {
                if self.zeroes_waiting.is_empty() {
                    self.send(tag, owner, rest);
                    return 0;
                }
                // Ranges take turns, so that a short one does not wait for all of those before it.
                self.zeroes_waiting.push_back((owner, rest));
                self.free.push(tag);
                return 0;
            }
        }
        let mut copied = 0;
        if outcome.is_ok() && owner.is_some() {
            self.copy(tag, &into, |place, host| {
                host.copy_from_slice(place);
            });
            copied = bytes(&into);
        }
        if outcome == Err(MediaError::NotDurable) && !self.failed {
            self.fail();
        }
        self.free.push(tag);
        self.earlier = self.earlier.saturating_sub(1);
        out.extend(owner.map(|owner| (owner, outcome)));
        copied
    }

    fn fail(&mut self) {
        self.failed = true;
        self.health.fail(
            "the medium did not take data that it was to make durable: flushes fail until it \
             is returned",
        );
    }

    /// The node has kept a reset or an unmap waiting for too long.
    fn give_up(&self, since: Instant) {
        if !self.exchange.is_lost() {
            tracing::error!(
                "the node that has the drive's blocks keeps a reset or an unmap waiting for {:?}; it \
                 counts as lost",
                since.elapsed()
            );
        }
        self.exchange.give_up();
    }

    /// Takes in what was answered, and sends what waited for that. Returns whether anything was answered, or nothing
    /// will be any more.
    fn take_answers(&mut self, finished: &mut Vec<RequestResult>) -> bool {
        let (mut answered, mut copied) = (false, 0);
        // As many as there can be: a peer that answers without pause keeps nobody.
        for _ in 0..TAGS {
            if copied >= TURN_BYTES {
                break;
            }
            let Some(answer) = self.exchange.receive::<Answer>() else { break };
            copied += self.finish(answer.tag.get(), result(answer.result.get()), finished);
            answered = true;
        }
        self.advance();
        self.submit();
        if self.exchange.is_lost() {
            self.fail_all(finished);
            return true;
        }
        answered
    }

    /// Nobody answers any more: everything fails.
    fn fail_all(&mut self, out: &mut Vec<RequestResult>) {
        // What waits to be sent is sent from places that are free from here on.
        self.exchange.close();
        for tag in 0..TAGS {
            if self.operations[tag as usize].is_some() {
                self.finish(tag, Err(MediaError::Unreachable), out);
            }
        }
        let (zeroes, others) = (&mut self.zeroes_waiting, &mut self.waiting);
        let waiting = zeroes.drain(..).chain(others.drain(..));
        out.extend(waiting.map(|(owner, _)| (owner, Err(MediaError::Unreachable))));
    }
}

impl Backing for RemoteBacking {
    fn capacity(&self) -> u64 {
        self.description.size
    }

    fn volatile_cache(&self) -> bool {
        self.description.volatile_cache
    }

    fn attempt(&mut self, request: &MediumRequest<&[DmaSlice<'_>]>) -> InlineResult {
        match request {
            // What was not made durable once is not, whatever the medium says of what came after it.
            MediumRequest::Flush if self.failed => InlineResult::Done(Err(MediaError::NotDurable)),
            _ => InlineResult::WouldBlock,
        }
    }

    fn background(&mut self) -> Option<&mut dyn Background> {
        Some(self)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.exchange.wake_fd()
    }

    fn has_failed(&self) -> bool {
        self.failed
    }

    fn health(&self) -> Health {
        self.health.clone()
    }

    /// The exchange, as it is [passed on](rackbus_memory::Exchange::pass_on).
    fn descriptors(&mut self) -> std::io::Result<Vec<OwnedFd>> {
        self.exchange.pass_on()
    }

    fn take_back(&mut self) {
        self.exchange.take_back();
    }

    fn under_way_elsewhere(&self) -> Vec<u32> {
        let tags = 0..TAGS;
        tags.filter(|tag| self.operations[*tag as usize].is_some()).collect()
    }

    fn expect(&mut self, numbers: &[u32]) -> bool {
        let unfit = |tag: &u32| self.operations.get(*tag as usize).is_none_or(Option::is_some);
        if self.under_way() > 0 || numbers.iter().any(unfit) {
            return false;
        }
        for tag in numbers {
            let (owner, into, zeroes) = (None, Vec::new(), None);
            self.operations[*tag as usize] = Some(Operation { owner, into, zeroes });
        }
        self.free.retain(|tag| self.operations[*tag as usize].is_none());
        self.earlier = self.under_way();
        self.exchange.set_told();
        true
    }

    fn inherit_failure(&mut self) {
        self.fail();
    }

    /// The node that has the blocks opens them anew when this conversation ends.
    fn reload(&mut self) -> Result<(), MediaError> {
        if self.failed { Err(MediaError::NotDurable) } else { Ok(()) }
    }
}

impl Background for RemoteBacking {
    fn start(&mut self, tag: u32, request: MediumRequest<Vec<PinnedSlice>>) {
        if self.under_way() == 0 && self.none_waits() {
            // Whoever waited before has what it waited for.
            self.held_up_since = None;
        }
        match request {
            MediumRequest::Zero { .. } => self.zeroes_waiting.push_back((tag, request)),
            _ => self.waiting.push_back((tag, request)),
        }
        self.advance();
    }

    fn submit(&mut self) {
        self.exchange.ring();
    }

    fn reap(&mut self, finished: &mut Vec<RequestResult>) {
        self.held_up_since = None;
        self.take_answers(finished);
    }

    fn wait(&mut self, finished: &mut Vec<RequestResult>) {
        let begun = Instant::now();
        let held_up_since = *self.held_up_since.get_or_insert(begun);
        self.submit();
        if held_up_since.elapsed() > ANSWERS * self.patience {
            self.give_up(held_up_since);
        }
        // Until there is an answer: to a part of a range of zeroes, and to what was given up, too, of which nothing is
        // reported.
        while !self.take_answers(finished) && self.under_way() > 0 {
            if self.exchange.rest() && !self.exchange.is_lost() {
                Event::wait_any(&[self.exchange.as_fd()], Some(LOOK.as_nanos() as u64));
            }
            if begun.elapsed() > self.patience {
                self.give_up(held_up_since);
            }
        }
    }

    fn has_buffers(&self) -> bool {
        let reads = self.operations.iter().flatten().any(|operation| !operation.into.is_empty());
        let has_buffers = |request: &MediumRequest<_>| {
            matches!(request, MediumRequest::Read { .. } | MediumRequest::Write { .. })
        };
        reads || self.waiting.iter().any(|(_, request)| has_buffers(request))
    }

    fn abort(&mut self) {
        self.waiting.clear();
        self.zeroes_waiting.clear();
        for operation in self.operations.iter_mut().flatten() {
            operation.owner = None;
        }
        let mut nobody = Vec::new();
        while self.under_way() > 0 {
            self.wait(&mut nobody);
        }
        self.held_up_since = None;
    }

    fn rearm(&mut self) -> bool {
        let quiet = self.exchange.rest();
        match self.exchange.is_lost() {
            // Nothing comes any more; what is under way is still to fail.
            true => self.under_way() > 0 || !self.none_waits(),
            false => !quiet && !self.exchange.is_untold(),
        }
    }
}

fn bytes(buffers: &[PinnedSlice]) -> u64 {
    buffers.iter().map(|buffer| buffer.get().len() as u64).sum()
}
