//! Copies of many bytes to memory of another machine, whose range is known: they are told without being looked for.
//!
//! Who looks at all memory makes them, before it looks. So what was stored before a copy was asked for goes with it or
//! before it, and what is stored when it has ended behind it.

use std::collections::BTreeMap;
use std::sync::Arc;

use rackbus_memory::Region;
use rackbus_segment::Handle;

use super::super::objects::Object;
use super::{CommonMemory, ConnectionKey, Far, FarConversation, FarState, PATIENCE};

/// A copy that somebody waits for.
#[derive(Debug)]
pub struct QueuedCopy {
    /// Its number among all.
    number: u64,
    link: ConnectionKey,
    offset: u64,
    from: Arc<Region>,
    start: usize,
    length: usize,
}

impl QueuedCopy {
    /// Makes the copy here: its offset, and its bytes, which are read once.
    pub(super) fn make(&self, to: &Object) -> (u64, Vec<u8>) {
        let mut bytes = vec![0; self.length];
        if let Some(from) = self.from.whole().part(self.start, self.length) {
            from.copy_to(&mut bytes);
        }
        let here = to.region().ok();
        let offset = usize::try_from(self.offset).ok();
        if let Some((here, offset)) = here.zip(offset)
            && let Some(part) = here.whole().part(offset, self.length)
        {
            part.copy_from(&bytes);
        }
        (self.offset, bytes)
    }
}

impl Far {
    /// Copies `length` bytes of `from`, from its byte `start`, to `offset` of the memory that a connection leads to, and waits
    /// until they have taken effect there, and where they are told on from there. False when they have not in time, the
    /// connection has ended or is not for stores, or a range is not inside; then they may be there still.
    pub fn copy(
        &self,
        connection: Handle,
        (from, start): (&Arc<Region>, usize),
        (offset, length): (u64, u32),
    ) -> bool {
        let link = (FarConversation::ToOwner, connection);
        let Some(size) = self.memory(link).and_then(|memory| memory.copied_to()) else {
            return false;
        };
        let length = length as usize;
        let is_inside = offset.checked_add(length as u64).is_some_and(|end| end <= size);
        if length == 0 || !is_inside || from.whole().part(start, length).is_none() {
            return false;
        }
        let (from, number) = (from.clone(), 0);
        let flush = self.begin_copy(QueuedCopy { number, link, offset, from, start, length });
        let Some((number, flush)) = flush else { return false };
        let done = self.has_flushed_within(flush, PATIENCE);
        // What is copied from is not read for it any more when this returns.
        self.lock().copies.retain(|copy| copy.number != number);
        done && self.has_connection(connection)
    }

    /// Has a copy made: its number, and that of the flush that is done when it has taken effect. A peer that does not know
    /// copies is told what it changes.
    fn begin_copy(&self, copy: QueuedCopy) -> Option<(u64, u64)> {
        let memory = self.memory(copy.link)?;
        let mut state = self.lock();
        let mut number = 0;
        if state.ways.get(&copy.link.0)?.has_copies() {
            state.copied += 1;
            number = state.copied;
            state.copies.push_back(QueuedCopy { number, ..copy });
        } else {
            // It may take long.
            drop(state);
            copy.make(&memory.object());
            state = self.lock();
        }
        let flush = state.flushes.want();
        state.now = true;
        drop(state);
        self.kick.notify_all();
        Some((number, flush))
    }
}

impl FarState {
    /// Takes the next copy to each of these memories, by its place among them.
    pub(super) fn take_copies(
        &mut self,
        links: &[(ConnectionKey, Arc<CommonMemory>)],
    ) -> BTreeMap<usize, QueuedCopy> {
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

    /// Puts those back that could not be made. Whether copies wait for the next look.
    pub(super) fn put_back(&mut self, left: BTreeMap<usize, QueuedCopy>) -> bool {
        left.into_values().for_each(|copy| self.copies.push_front(copy));
        let FarState { copies, ends, .. } = self;
        copies.retain(|copy| ends.contains_key(&copy.link));
        !copies.is_empty()
    }
}
