//! The parts of a long copy to one memory, several under way at a time: each takes effect by itself, in their order.
//!
//! What is stored while a copy is made has no order with its bytes, so no look at memory lies between two parts, and the next is
//! sent while the other side decrypts and stores the one before. A look, which a flush for example waits for, and a copy to other
//! memory come when those under way have taken effect.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, PoisonError};

use rackbus_segment::coherence::MOST_UNDER_WAY;

use super::super::landing::LandedCopy;
use super::super::outbox::LetterQueue;
use super::copying::{LandedPlaces, QueuedCopy};
use super::{CommonMemory, ConnectionKey, End, Far, FarState};

/// A part that was sent.
struct SentPart {
    /// Its number among all copies.
    number: u64,
    batch: u64,
    landed: Option<Arc<LandedCopy>>,
}

impl Far {
    /// Sends the parts that go on with copies to one memory, as long as there are such and nothing else is due, and waits until
    /// they have taken effect; whether there were any. Not to a peer that takes one at a time.
    pub(super) fn stream_copies(&self) -> bool {
        let found = self.lock().streamed();
        let Some((link, memory, to)) = found.filter(|(_, memory, _)| !memory.is_waiting()) else {
            return false;
        };
        let mut sent = VecDeque::new();
        loop {
            self.note_streamed(&memory, &mut sent);
            let next = match sent.len() < MOST_UNDER_WAY {
                true => self.lock().next_streamed(link),
                false => None,
            };
            if let Some(copy) = next {
                sent.extend(self.send_part((link, &memory), copy, &to));
                continue;
            }
            let Some(oldest) = sent.front().map(|part| part.batch) else { return true };
            let has_room = sent.len() < MOST_UNDER_WAY;
            let goes_on = || {
                let state = self.lock();
                let is_over = !state.has_end(link, &memory);
                let is_next = has_room && state.can_stream(link);
                drop(state);
                is_over || is_next || memory.has_applied(oldest)
            };
            let is_there = self.wait_until(link.0, Some(&to), goes_on);
            if !is_there || !self.lock().has_end(link, &memory) {
                // Nobody answers for what is under way.
                let lost: Vec<(u64, bool)> = sent.iter().map(|part| (part.number, false)).collect();
                self.lock().copies_ended(&lost, BTreeMap::new());
                self.flushed.notify_all();
                return true;
            }
        }
    }

    /// Those of `sent` that have taken effect have ended.
    fn note_streamed(&self, memory: &CommonMemory, sent: &mut VecDeque<SentPart>) {
        while sent.front().is_some_and(|part| memory.has_applied(part.batch))
            && let Some(part) = sent.pop_front()
        {
            part.landed.iter().for_each(|landed| landed.free_slot());
            self.lock().copies_ended(&[(part.number, true)], BTreeMap::new());
            self.flushed.notify_all();
        }
    }

    /// Makes a part here, and sends it.
    fn send_part(
        &self,
        (link, memory): (ConnectionKey, &Arc<CommonMemory>),
        copy: QueuedCopy,
        to: &Arc<LetterQueue>,
    ) -> Option<SentPart> {
        // Until it is on its way: what takes effect here later is answered behind it.
        let effects = self.effects.read().unwrap_or_else(PoisonError::into_inner);
        let (number, landed) = (copy.number, copy.landed.clone());
        let batch = memory.go_on_with(copy)?;
        let place = landed.clone().map(|landed| (link, (landed, memory.clone())));
        let (sent, places) = ((link, batch), place.into_iter().collect::<LandedPlaces>());
        self.send_over((&[&sent], Some(to)), &places, false);
        drop(effects);
        let batch = sent.1.number();
        self.buffers.put(sent.1);
        Some(SentPart { number, batch, landed })
    }
}

impl FarState {
    /// The memory that copies go on to now, its connection, and whom that is said to.
    fn streamed(&self) -> Option<(ConnectionKey, Arc<CommonMemory>, Arc<LetterQueue>)> {
        let link = self.copies.front()?.link;
        let to = self.ways.get(&link.0).filter(|to| to.has_streams())?;
        match self.ends.get(&link).filter(|_| self.can_stream(link))? {
            End::Memory(memory) => Some((link, memory.clone(), to.clone())),
            End::Sender(_) | End::Receiver(_) => None,
        }
    }

    /// Whether a part is next that goes on with a copy to this memory, and nobody waits for anything else.
    fn can_stream(&self, link: ConnectionKey) -> bool {
        self.can_continue_copies() && self.copies.iter().all(|copy| copy.link == link)
    }

    fn next_streamed(&mut self, link: ConnectionKey) -> Option<QueuedCopy> {
        let next = if self.can_stream(link) { self.copies.pop_front() } else { None };
        self.continued += usize::from(next.is_some());
        next
    }

    /// Whether a connection still leads to this memory.
    fn has_end(&self, link: ConnectionKey, memory: &Arc<CommonMemory>) -> bool {
        matches!(self.ends.get(&link), Some(End::Memory(own)) if Arc::ptr_eq(own, memory))
    }
}
