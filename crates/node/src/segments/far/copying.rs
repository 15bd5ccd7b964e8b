//! Copies of many bytes to memory of another machine, whose range is known: they are told without being looked for.
//!
//! Who looks at all memory makes them, before it looks. So what was stored before a copy was asked for goes with it or
//! before it, and what is stored when it has ended behind it. A long copy is made in parts: the first is made so, and those
//! after it without a look, since what is stored while a copy is made has no order with its bytes. Who asks for a part does
//! not wait for it ([`BegunCopy`]) but with the last one, so that the next is ready when one has taken effect.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use rackbus_segment::Handle;
use rackbus_segment::coherence::{Batch, PAGE};
use rackbus_segment::message::Refusal;

use super::super::landing::LandedCopy;
use super::super::objects::Object;
use super::cycle::of_links;
use super::pair::collect_copies;
use super::{CommonMemory, ConnectionKey, Far, FarConversation, FarState};

/// Parts that are made without a look at all memory in between, at least: behind these, one is due as soon as looks take a
/// tenth of the time again.
const MOST_CONTINUED: usize = 16;

/// A copy as a process asks for it, or a part of one: its bytes are apart.
#[derive(Debug, Clone, Copy)]
pub struct CopyPart {
    /// First byte in the memory that is copied to.
    pub offset: u64,
    /// Whether it goes on where the part before it ended: what was stored since need not be there before it.
    pub follows: bool,
}

/// A copy that somebody waits for.
#[derive(Debug)]
pub struct QueuedCopy {
    /// Its number among all.
    pub(super) number: u64,
    pub(super) link: ConnectionKey,
    bytes: Vec<u8>,
    part: CopyPart,
    /// Where its bytes are at the other side, if they have landed there.
    pub(super) landed: Option<Arc<LandedCopy>>,
}

impl QueuedCopy {
    /// Makes the copy here: its offset, and its bytes.
    pub(super) fn make(self, to: &Object) -> (u64, Vec<u8>) {
        let offset = self.part.offset;
        if let Some((here, at)) = to.region().ok().zip(usize::try_from(offset).ok())
            && let Some(part) = here.whole().part(at, self.bytes.len())
        {
            part.copy_from(&self.bytes);
        }
        (offset, self.bytes)
    }

    /// Whether it stays in the queue. Where it does not, it is told to nobody, and its slot is free.
    fn stays_if(&self, stays: bool) -> bool {
        if !stays {
            self.landed.iter().for_each(|landed| landed.free_slot());
        }
        stays
    }

    /// The pages that it overwrites as a whole: of these, nothing else need be told.
    pub(super) fn overwritten_pages(&self) -> Range<u64> {
        let (offset, page) = (self.part.offset, PAGE as u64);
        offset.div_ceil(page)..(offset + self.bytes.len() as u64) / page
    }
}

/// How far a copy is.
#[derive(Debug, Default)]
pub(super) struct CopyProgress {
    /// The flush that is done when all is that was stored before the copy, of its first part.
    flush: Option<u64>,
    has_taken_effect: bool,
}

/// What is copied in a cycle, each by the place of its memory among all that is looked at.
pub(super) type CopiesByPlace = BTreeMap<usize, QueuedCopy>;

/// Where the bytes of copies have landed, by their connections, and the memory that they are for.
pub(super) type LandedPlaces = BTreeMap<ConnectionKey, (Arc<LandedCopy>, Arc<CommonMemory>)>;

/// Those of `copies` that have landed: copies whose batch is not made with these are made with others.
pub(super) fn landed_of(
    links: &[(ConnectionKey, Arc<CommonMemory>)],
    copies: &CopiesByPlace,
) -> LandedPlaces {
    let landed = copies.iter().filter_map(|(at, copy)| {
        let (link, memory) = &links[*at];
        Some((*link, (copy.landed.clone()?, memory.clone())))
    });
    landed.collect()
}

/// Has the slots of those that took effect with `batches` free, which were sent and waited for. One whose answer did not come
/// has its slot for ever.
pub(super) fn note_effects(batches: &[(ConnectionKey, Batch)], landed: &LandedPlaces) {
    for (link, batch) in batches {
        if let Some((landed, memory)) = landed.get(link)
            && batch.copied().is_some()
            && !memory.is_waiting()
        {
            landed.free_slot();
        }
    }
}

/// Copies that were taken to be made: their numbers, and the memory that each is to.
pub(super) type TakenCopies = Vec<(u64, Arc<CommonMemory>)>;

pub(super) fn taken_of(
    links: &[(ConnectionKey, Arc<CommonMemory>)],
    copies: &CopiesByPlace,
) -> TakenCopies {
    copies.iter().map(|(at, copy)| (copy.number, links[*at].1.clone())).collect()
}

/// Which of those that were taken have taken effect, when their batches are waited for no more. Waits for who reads or stores
/// to the memory.
pub(super) fn outcomes(taken: &TakenCopies) -> Vec<(u64, bool)> {
    taken.iter().map(|(number, memory)| (*number, !memory.is_waiting())).collect()
}

/// A part of a copy that was asked for. Where it is dropped before it was made, it is not made.
#[derive(Debug)]
pub struct BegunCopy {
    far: Arc<Far>,
    connection: Handle,
    /// None where a peer that does not know copies is told what it changes.
    number: Option<u64>,
}

impl BegunCopy {
    /// The connection whose memory it is to.
    pub fn connection(&self) -> Handle {
        self.connection
    }

    /// Waits until it has taken effect: the number of the flush that is done when all is that was stored before it, of the
    /// first part of a copy. `None` when it has not in time, or the connection has ended.
    pub fn wait(self, until: Instant) -> Option<Option<u64>> {
        let Some(number) = self.number else { return Some(None) };
        let waiting = |it: &mut FarState| {
            it.copying.get(&number).is_some_and(|progress| !progress.has_taken_effect)
        };
        let (far, left) = (&self.far, until.saturating_duration_since(Instant::now()));
        let waited = far.flushed.wait_timeout_while(far.lock(), left, waiting);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        let progress = state.copying.remove(&number).filter(|it| it.has_taken_effect)?;
        Some(progress.flush)
    }
}

impl Drop for BegunCopy {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            let mut state = self.far.lock();
            state.copies.retain(|copy| copy.stays_if(copy.number != number));
            state.copying.remove(&number);
        }
    }
}

impl Far {
    /// Memory of `length` bytes for a copy, with anything in it.
    pub fn copy_buffer(&self, length: usize) -> Vec<u8> {
        self.buffers.take(length)
    }

    /// Begins to copy a part to the memory that a connection leads to, behind those that were begun before.
    ///
    /// # Errors
    /// [`Refusal::Illegal`] where nothing is copied: bytes that are not inside, or memory that is only loaded from.
    /// [`Refusal::NotResponding`] when the connection has ended.
    pub fn begin_copy(
        self: &Arc<Self>,
        connection: Handle,
        bytes: Vec<u8>,
        part: CopyPart,
    ) -> Result<BegunCopy, Refusal> {
        let link = (FarConversation::ToOwner, connection);
        let memory = self.memory(link).ok_or(Refusal::NotResponding)?;
        let size = memory.copied_to();
        let size = size.ok_or_else(|| Refusal::Illegal("the memory may only be read".into()))?;
        let end = part.offset.checked_add(bytes.len() as u64);
        if bytes.is_empty() || end.is_none_or(|end| end > size) {
            return Err(Refusal::Illegal("a copy of bytes that are not inside".into()));
        }
        let copy = QueuedCopy { number: 0, link, bytes, part, landed: None };
        let number = self.queue_copy(copy, &memory).ok_or(Refusal::NotResponding)?;
        Ok(BegunCopy { far: self.clone(), connection, number })
    }

    /// Waits, behind the last part of a copy, until all that was stored before the copy is there, by the `flush` of its first
    /// part, and where that and the copy are told on.
    ///
    /// # Errors
    /// [`Refusal::NotResponding`] when it is not in time, or the connection has ended.
    pub fn end_copy(
        &self,
        connection: Handle,
        flush: Option<u64>,
        until: Instant,
    ) -> Result<(), Refusal> {
        let is_passing = self.lock().flushes.is_passing();
        let flush = flush.filter(|_| !is_passing).unwrap_or_else(|| self.begin_flush());
        let left = until.saturating_duration_since(Instant::now());
        match self.has_flushed_within(flush, left) && self.has_connection(connection) {
            true => Ok(()),
            false => Err(Refusal::NotResponding),
        }
    }

    /// Has a copy made: its number. A peer that does not know copies is told what it changes, which has no number. `None` when
    /// the connection has ended.
    fn queue_copy(&self, copy: QueuedCopy, memory: &CommonMemory) -> Option<Option<u64>> {
        let state = self.lock();
        if !state.ways.get(&copy.link.0)?.has_copies() {
            // It may take long.
            drop(state);
            self.count_copied(false, copy.bytes.len());
            copy.make(&memory.object());
            return Some(None);
        }
        drop(state);
        let landed = self.land(&copy.bytes);
        let mut state = self.lock();
        if !state.ends.contains_key(&copy.link) {
            // The connection has ended meanwhile, and nobody makes it.
            landed.iter().for_each(|landed| landed.free_slot());
            return None;
        }
        self.count_copied(landed.is_some(), copy.bytes.len());
        state.last_copy += 1;
        let number = state.last_copy;
        state.copying.insert(number, CopyProgress::default());
        state.copies.push_back(QueuedCopy { number, landed, ..copy });
        state.now = true;
        self.kick.notify_all();
        Some(Some(number))
    }

    /// Makes and sends the copies that are waited for, if they need no look at all other memory, and nobody waits for one
    /// since the last of these; whether that was so.
    pub(super) fn continue_copies(&self) -> bool {
        if self.stream_copies() {
            return true;
        }
        let effects = self.effects.read().unwrap_or_else(PoisonError::into_inner);
        let (links, ways, mut copies) = {
            let mut state = self.lock();
            if !state.can_continue_copies() {
                state.continued = 0;
                return false;
            }
            let mut links = state.told_memories();
            links.retain(|(link, _)| state.copies.iter().any(|copy| copy.link == *link));
            let copies = state.take_copies(&links);
            state.continued += copies.len().max(1);
            (links, state.ways.clone(), copies)
        };
        let taken = taken_of(&links, &copies);
        let pairs: Vec<Arc<CommonMemory>> = links.iter().map(|(_, pair)| pair.clone()).collect();
        let landed = landed_of(&links, &copies);
        let batches = of_links(&links, collect_copies(&pairs, &mut copies));
        self.send((&batches, &landed), &ways, effects);
        note_effects(&batches, &landed);
        let outcomes = outcomes(&taken);
        self.lock().copies_ended(&outcomes, copies);
        self.flushed.notify_all();
        let is_some = !batches.is_empty();
        batches.into_iter().for_each(|(_, batch)| self.buffers.put(batch));
        is_some
    }
}

impl FarState {
    /// Whether all copies that are waited for go on with others, and no look at all memory is due in between.
    pub(super) fn can_continue_copies(&self) -> bool {
        let is_waited_for = self.flushes.has_waiting() || !self.closing.is_empty();
        let is_next_look = self.continued > 0 && (is_waited_for || self.is_look_overdue());
        !is_next_look && !self.copies.is_empty() && self.copies.iter().all(|copy| copy.part.follows)
    }

    /// Whether what is stored has been looked for by nobody for long, because of copies.
    fn is_look_overdue(&self) -> bool {
        self.continued >= MOST_CONTINUED && self.look_due.is_none_or(|due| Instant::now() >= due)
    }

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
        for copy in taken.values().filter(|copy| !copy.part.follows) {
            // Not before: the flush of one that still waits is not done with a look that comes first.
            if let Some(progress) = self.copying.get_mut(&copy.number) {
                progress.flush = Some(self.flushes.want());
            }
        }
        taken
    }

    /// Copies whose connection has ended are made no more, and not waited for.
    pub(super) fn forget_copies(&mut self) {
        let FarState { copies, copying, ends, .. } = self;
        copies.retain(|copy| {
            let stays = copy.stays_if(ends.contains_key(&copy.link));
            if !stays {
                copying.remove(&copy.number);
            }
            stays
        });
    }

    /// Those with these numbers were taken, and each has taken effect or is lost, but for those that are `left`, which are put
    /// back. Those whose connection has ended are made no more.
    pub(super) fn copies_ended(&mut self, outcomes: &[(u64, bool)], left: CopiesByPlace) {
        let is_left = |number: &u64| left.values().any(|copy| copy.number == *number);
        let ended: Vec<(u64, bool)> =
            outcomes.iter().copied().filter(|(number, _)| !is_left(number)).collect();
        for (number, has_taken_effect) in &ended {
            match self.copying.get_mut(number).filter(|_| *has_taken_effect) {
                Some(progress) => progress.has_taken_effect = true,
                // Who waits for it finds that nobody answers for it.
                None => drop(self.copying.remove(number)),
            }
        }
        left.into_values().for_each(|copy| self.copies.push_front(copy));
        self.forget_copies();
        // Others were waiting for these, or for a look at all memory.
        self.now |= !ended.is_empty() && (!self.copies.is_empty() || self.flushes.has_waiting());
    }
}
