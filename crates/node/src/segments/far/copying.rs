//! Copies of many bytes to memory of another machine, whose range is known: they are told without being looked for.
//!
//! Who looks at all memory makes them, before it looks. So what was stored before a copy was asked for goes with it or
//! before it, and what is stored when it has ended behind it. A long copy is made in parts: the first is made so, and those
//! after it without a look, since what is stored while a copy is made has no order with its bytes. Before the last one is
//! answered, all memory is looked at again.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use rackbus_memory::Region;
use rackbus_segment::Handle;
use rackbus_segment::coherence::{Batch, PAGE};

use super::super::objects::Object;
use super::pair::collect_copies;
use super::{CommonMemory, ConnectionKey, Far, FarConversation, FarState, PATIENCE};

/// A copy as a process asks for it, or a part of one.
#[derive(Debug, Clone, Copy)]
pub struct CopyPart {
    /// First byte in the memory that is copied to.
    pub offset: u64,
    /// Number of bytes.
    pub length: u32,
    /// Whether the part before it was made: what was stored since need not be there before this one.
    pub follows: bool,
    /// Number of bytes behind it that the parts after it copy to.
    pub rest: u64,
}

/// A copy that somebody waits for.
#[derive(Debug)]
pub struct QueuedCopy {
    /// Its number among all.
    number: u64,
    link: ConnectionKey,
    from: Arc<Region>,
    start: usize,
    part: CopyPart,
}

impl QueuedCopy {
    /// Makes the copy here: its offset, and its bytes, which are read once.
    pub(super) fn make(&self, to: &Object) -> (u64, Vec<u8>) {
        let (offset, length) = (self.part.offset, self.part.length as usize);
        let mut bytes = vec![0; length];
        if let Some(from) = self.from.whole().part(self.start, length) {
            from.copy_to(&mut bytes);
        }
        if let Some((here, at)) = to.region().ok().zip(usize::try_from(offset).ok())
            && let Some(part) = here.whole().part(at, length)
        {
            part.copy_from(&bytes);
        }
        (offset, bytes)
    }

    /// Whether parts follow.
    pub(super) fn goes_on(&self) -> bool {
        self.part.rest > 0
    }

    /// The pages of which nothing need be told but what is copied there, now or by the parts after it.
    pub(super) fn overwritten_pages(&self) -> Range<u64> {
        let CopyPart { offset, length, rest, .. } = self.part;
        let end = (offset + u64::from(length)).saturating_add(rest);
        offset.div_ceil(PAGE as u64)..end / PAGE as u64
    }
}

/// What is copied in a cycle, each by the place of its memory among all that is looked at.
pub(super) type CopiesByPlace = BTreeMap<usize, QueuedCopy>;

impl Far {
    /// Copies a part from `from`, from its byte `start`, to the memory that a connection leads to, and waits until its bytes
    /// have taken effect there; of the last part of a copy, also all that was stored before, and where they are told on
    /// from there. False when they have not in time, the connection has ended or is not for stores, or a range is not inside;
    /// then they may be there still.
    pub fn copy(
        &self,
        connection: Handle,
        (from, start): (&Arc<Region>, usize),
        part: CopyPart,
    ) -> bool {
        let link = (FarConversation::ToOwner, connection);
        let Some(size) = self.memory(link).and_then(|memory| memory.copied_to()) else {
            return false;
        };
        let length = u64::from(part.length);
        let is_inside = part.offset.checked_add(length).is_some_and(|end| end <= size);
        if length == 0 || !is_inside || from.whole().part(start, part.length as usize).is_none() {
            return false;
        }
        let until = Instant::now() + PATIENCE;
        let copy = QueuedCopy { number: 0, link, from: from.clone(), start, part };
        let Some((number, flush)) = self.begin_copy(copy) else { return false };
        let waiting = |it: &mut FarState| it.copying.contains(&number) && !it.ways.is_empty();
        let waited = self.flushed.wait_timeout_while(self.lock(), PATIENCE, waiting);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        // What is copied from is not read for it any more when this returns.
        state.copies.retain(|copy| copy.number != number);
        let is_there = !state.copying.remove(&number) && state.ends.contains_key(&link);
        drop(state);
        let left = || until.saturating_duration_since(Instant::now());
        let is_flushed = |flush| self.has_flushed_within(flush, left());
        is_there && flush.is_none_or(is_flushed) && self.has_connection(connection)
    }

    /// Has a copy made: its number, and of the last part of one, that of the flush which is done when all of it is. A peer
    /// that does not know copies is told what it changes.
    fn begin_copy(&self, copy: QueuedCopy) -> Option<(u64, Option<u64>)> {
        let (memory, is_last) = (self.memory(copy.link)?, !copy.goes_on());
        let mut state = self.lock();
        let mut number = 0;
        if state.ways.get(&copy.link.0)?.has_copies() {
            state.copied += 1;
            number = state.copied;
            state.copying.insert(number);
            state.copies.push_back(QueuedCopy { number, ..copy });
        } else {
            // It may take long.
            drop(state);
            copy.make(&memory.object());
            state = self.lock();
        }
        let flush = is_last.then(|| state.flushes.want());
        state.now = true;
        drop(state);
        self.kick.notify_all();
        Some((number, flush))
    }

    /// Makes and sends the copies that need no look at all other memory, if no others are due: whether that was so.
    pub(super) fn copy_on(&self) -> bool {
        let effects = self.effects.read().unwrap_or_else(PoisonError::into_inner);
        let (links, ways, mut copies) = {
            let mut state = self.lock();
            let follow = |copy: &QueuedCopy| copy.part.follows;
            if state.copies.is_empty() || !state.copies.iter().all(follow) {
                return false;
            }
            let of_copies =
                |link: &ConnectionKey| state.copies.iter().any(|copy| copy.link == *link);
            let mut links = state.told_memories();
            links.retain(|(link, _)| of_copies(link));
            let copies = state.take_copies(&links);
            (links, state.ways.clone(), copies)
        };
        let numbers = numbers(&copies);
        let pairs: Vec<Arc<CommonMemory>> = links.iter().map(|(_, pair)| pair.clone()).collect();
        let batches = collect_copies(&pairs, &mut copies);
        let is_some = !batches.is_empty();
        let batches: Vec<(ConnectionKey, Batch)> =
            batches.into_iter().map(|(at, batch)| (links[at].0, batch)).collect();
        self.send(&batches, &ways, effects);
        self.lock().copies_ended(&numbers, copies);
        self.flushed.notify_all();
        is_some
    }
}

impl FarState {
    /// Takes the next copy to each of these memories.
    pub(super) fn take_copies(
        &mut self,
        links: &[(ConnectionKey, Arc<CommonMemory>)],
    ) -> CopiesByPlace {
        let mut taken = BTreeMap::new();
        if self.copies.is_empty() {
            return taken;
        }
        for (at, (link, _)) in links.iter().enumerate() {
            if let Some(found) = self.copies.iter().position(|copy| copy.link == *link) {
                taken.extend(self.copies.remove(found).map(|copy| (at, copy)));
            }
        }
        taken
    }

    /// Those with these numbers were taken, and have taken effect but for those that are `left`, which are put back. Those whose
    /// connection has ended are made no more.
    pub(super) fn copies_ended(&mut self, taken: &[u64], left: CopiesByPlace) {
        let is_left = |number: &u64| left.values().any(|copy| copy.number == *number);
        let ended: Vec<u64> = taken.iter().copied().filter(|number| !is_left(number)).collect();
        self.copying.retain(|number| !ended.contains(number));
        left.into_values().for_each(|copy| self.copies.push_front(copy));
        let FarState { copies, copying, ends, .. } = self;
        copies.retain(|copy| {
            let stays = ends.contains_key(&copy.link);
            if !stays {
                copying.remove(&copy.number);
            }
            stays
        });
        // Others were waiting for these, or for a look at all memory.
        self.now |= !ended.is_empty() && (!self.copies.is_empty() || self.flushes.has_waiting());
    }
}

/// The numbers of copies.
pub(super) fn numbers(copies: &CopiesByPlace) -> Vec<u64> {
    copies.values().map(|copy| copy.number).collect()
}
