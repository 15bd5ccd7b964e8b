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

use rackbus_segment::Handle;
use rackbus_segment::coherence::{Batch, PAGE};
use rackbus_segment::message::Refusal;

use super::super::landing::LandedCopy;
use super::super::objects::Object;
use super::cycle::of_links;
use super::pair::collect_copies;
use super::{CommonMemory, ConnectionKey, Far, FarConversation, FarState, PATIENCE};

/// A copy as a process asks for it, or a part of one: its bytes are apart.
#[derive(Debug, Clone, Copy)]
pub struct CopyPart {
    /// First byte in the memory that is copied to.
    pub offset: u64,
    /// Whether it goes on where the part before it ended, which was made: what was stored since need not be there before it.
    pub follows: bool,
    /// Whether a part follows.
    pub more: bool,
}

/// A copy that somebody waits for.
#[derive(Debug)]
pub struct QueuedCopy {
    /// Its number among all.
    number: u64,
    link: ConnectionKey,
    bytes: Vec<u8>,
    part: CopyPart,
    /// Where its bytes are at the other side, if they have landed there.
    landed: Option<Arc<LandedCopy>>,
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

    /// The pages that it overwrites as a whole: of these, nothing else need be told.
    pub(super) fn overwritten_pages(&self) -> Range<u64> {
        let (offset, page) = (self.part.offset, PAGE as u64);
        offset.div_ceil(page)..(offset + self.bytes.len() as u64) / page
    }
}

/// How far a copy is.
#[derive(Debug, Default)]
pub(super) struct CopyProgress {
    /// The flush that is done when all is that was stored before the end of the copy.
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
            landed.note_effect();
        }
    }
}

/// The numbers of copies.
pub(super) fn numbers(copies: &CopiesByPlace) -> Vec<u64> {
    copies.values().map(|copy| copy.number).collect()
}

impl Far {
    /// Copies a part to the memory that a connection leads to, and waits until its bytes have taken effect there; with the
    /// last part of a copy, also all that was stored before, and where they are told on from there.
    ///
    /// # Errors
    /// [`Refusal::Illegal`] where nothing is copied: bytes that are not inside, or memory that is only loaded from.
    /// [`Refusal::NotResponding`] when they have not taken effect in time, or the connection has ended: they may be there
    /// still.
    pub fn copy(&self, connection: Handle, bytes: Vec<u8>, part: CopyPart) -> Result<(), Refusal> {
        let link = (FarConversation::ToOwner, connection);
        let memory = self.memory(link).ok_or(Refusal::NotResponding)?;
        let size = memory.copied_to();
        let size = size.ok_or_else(|| Refusal::Illegal("the memory may only be read".into()))?;
        let end = part.offset.checked_add(bytes.len() as u64);
        if bytes.is_empty() || end.is_none_or(|end| end > size) {
            return Err(Refusal::Illegal("a copy of bytes that are not inside".into()));
        }
        let until = Instant::now() + PATIENCE;
        let copy = QueuedCopy { number: 0, link, bytes, part, landed: None };
        let flush = self.has_copied(copy, &memory).ok_or(Refusal::NotResponding)?;
        let left = || until.saturating_duration_since(Instant::now());
        let is_flushed = |flush| self.has_flushed_within(flush, left());
        match flush.is_none_or(is_flushed) && self.has_connection(connection) {
            true => Ok(()),
            false => Err(Refusal::NotResponding),
        }
    }

    /// Has a copy made, and waits until it has taken effect: of the last part of one, the number of the flush that is to be
    /// waited for. A peer that does not know copies is told what it changes. `None` when it has not in time, or the
    /// connection has ended.
    fn has_copied(&self, copy: QueuedCopy, memory: &CommonMemory) -> Option<Option<u64>> {
        let is_last = !copy.part.more;
        let state = self.lock();
        if !state.ways.get(&copy.link.0)?.has_copies() {
            // It may take long.
            drop(state);
            self.count_copied(false, copy.bytes.len());
            copy.make(&memory.object());
            return Some(is_last.then(|| self.begin_flush()));
        }
        drop(state);
        let landed = self.land(&copy.bytes);
        let mut state = self.lock();
        if !state.ends.contains_key(&copy.link) {
            // The connection has ended meanwhile, and nobody makes it.
            return None;
        }
        self.count_copied(landed.is_some(), copy.bytes.len());
        state.last_copy += 1;
        let number = state.last_copy;
        state.copying.insert(number, CopyProgress::default());
        state.copies.push_back(QueuedCopy { number, landed: landed.clone(), ..copy });
        state.now = true;
        self.kick.notify_all();
        let waiting = |it: &mut FarState| {
            it.copying.get(&number).is_some_and(|progress| !progress.has_taken_effect)
        };
        let waited = self.flushed.wait_timeout_while(state, PATIENCE, waiting);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.copies.retain(|copy| copy.number != number);
        let progress = state.copying.remove(&number).filter(|it| it.has_taken_effect)?;
        Some(progress.flush)
    }

    /// Makes and sends the copies that are waited for, if they need no look at all other memory, and nobody waits for one
    /// since the last of these; whether that was so.
    pub(super) fn continue_copies(&self) -> bool {
        let effects = self.effects.read().unwrap_or_else(PoisonError::into_inner);
        let (links, ways, mut copies) = {
            let mut state = self.lock();
            if !state.can_continue_copies() {
                state.has_continued = false;
                return false;
            }
            state.has_continued = true;
            let mut links = state.told_memories();
            links.retain(|(link, _)| state.copies.iter().any(|copy| copy.link == *link));
            let copies = state.take_copies(&links);
            (links, state.ways.clone(), copies)
        };
        let taken = numbers(&copies);
        let pairs: Vec<Arc<CommonMemory>> = links.iter().map(|(_, pair)| pair.clone()).collect();
        let landed = landed_of(&links, &copies);
        let batches = of_links(&links, collect_copies(&pairs, &mut copies));
        self.send((&batches, &landed), &ways, effects);
        note_effects(&batches, &landed);
        self.lock().copies_ended(&taken, copies);
        self.flushed.notify_all();
        !batches.is_empty()
    }
}

impl FarState {
    /// Whether all copies that are waited for go on with others, and no look at all memory is due in between.
    fn can_continue_copies(&self) -> bool {
        let is_look_due = self.flushes.has_waiting() || !self.closing.is_empty();
        let is_next_look = self.has_continued && is_look_due;
        !is_next_look && !self.copies.is_empty() && self.copies.iter().all(|copy| copy.part.follows)
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
        for copy in taken.values().filter(|copy| !copy.part.more) {
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
            let stays = ends.contains_key(&copy.link);
            if !stays {
                copying.remove(&copy.number);
            }
            stays
        });
    }

    /// Those with these numbers were taken, and have taken effect but for those that are `left`, which are put back. Those whose
    /// connection has ended are made no more.
    pub(super) fn copies_ended(&mut self, taken: &[u64], left: CopiesByPlace) {
        let is_left = |number: &u64| left.values().any(|copy| copy.number == *number);
        let ended: Vec<u64> = taken.iter().copied().filter(|number| !is_left(number)).collect();
        for number in &ended {
            if let Some(progress) = self.copying.get_mut(number) {
                progress.has_taken_effect = true;
            }
        }
        left.into_values().for_each(|copy| self.copies.push_front(copy));
        self.forget_copies();
        // Others were waiting for these, or for a look at all memory.
        self.now |= !ended.is_empty() && (!self.copies.is_empty() || self.flushes.has_waiting());
    }
}
