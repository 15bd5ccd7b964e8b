//! Submission and completion queues (NVM Express base 1.4, section 4.1): rings in the host's
//! memory, with an index that each side owns.
//!
//! The ring's memory is resolved once and kept ([`PinnedPieces`]: a guest that translates DMA itself
//! maps it page by page); when the function's mappings change it is resolved again. Entries are
//! read and written at most once each.

use std::sync::atomic::Ordering;

use rackbus_memory::{Access, DmaSlice, DmaSpace, PinnedPieces};
use rackbus_pci::RestoreError;
use rackbus_spec::nvme::Sqe;
use rackbus_spec::nvme::command::SQE_SIZE;
use rackbus_spec::nvme::completion::{CQE_SIZE, Cqe};
use serde::{Deserialize, Serialize};
use zerocopy::IntoBytes;

use super::admin::{cq_slot, sq_slot};
use super::interrupts::VECTORS;
use super::registers::MAX_QUEUE_ENTRIES;
use super::saved::{Words, require, require_page, sqe, words};
use super::shadow::{DoorbellState, ShadowDoorbell};

/// The memory of a queue's entries, as its driver gave it.
#[derive(Debug)]
struct Ring {
    base: u64,
    length: usize,
    /// Bytes of an entry.
    entry: usize,
    access: Access,
    memory: Option<PinnedPieces>,
}

impl Ring {
    fn new(dma: &DmaSpace, base: u64, entries: u16, entry: usize, access: Access) -> Ring {
        let length = usize::from(entries) * entry;
        let memory = pin_asked((dma, access), (base, length), entry);
        Ring { base, length, entry, access, memory }
    }

    fn resolve(&mut self, dma: &DmaSpace) {
        self.memory = pin_ring((dma, self.access), (self.base, self.length), self.entry);
    }

    /// Its memory is wanted now: where it cannot be reached, that is a refused access.
    fn want(&self, dma: &DmaSpace) {
        if self.memory.is_none() {
            let _ = pin_asked((dma, self.access), (self.base, self.length), self.entry);
        }
    }

    /// The entry at `index`; `None` when the ring's memory cannot be reached.
    #[inline]
    fn entry(&self, index: u16) -> Option<DmaSlice<'_>> {
        self.memory.as_ref()?.at(usize::from(index) * self.entry, self.entry)
    }
}

/// Memory that is looked at without a command of its driver's, where it can be reached and has entries of so many bytes. Nothing
/// counts as refused: a hypervisor that maps its guest's memory anew takes away and gives back what nobody wants meanwhile.
pub(super) fn pin_ring(
    (dma, access): (&DmaSpace, Access),
    (address, length): (u64, usize),
    entry: usize,
) -> Option<PinnedPieces> {
    let mapped = dma.is_mapped(address, length, access);
    mapped.then(|| pin_asked((dma, access), (address, length), entry))?
}

/// The same for a driver that asks for it: what cannot be reached counts as refused. A drive that may not master the bus asks for
/// none.
pub(super) fn pin_asked(
    (dma, access): (&DmaSpace, Access),
    (address, length): (u64, usize),
    entry: usize,
) -> Option<PinnedPieces> {
    let pieces = dma.master().then(|| dma.pin_pieces(address, length, access).ok())?;
    // Mappings are of pages. One that ends inside an entry is as good as none.
    pieces.filter(|pieces| pieces.meet_at(entry))
}

/// `index` moved `by` entries on in a ring of `size`.
#[inline]
fn advance(index: u16, by: u16, size: u16) -> u16 {
    let next = u32::from(index) + u32::from(by);
    let size = u32::from(size);
    (if next >= size { next - size } else { next }) as u16
}

/// Entries from `from` up to `to` in a ring of `size`.
#[inline]
fn distance(from: u16, to: u16, size: u16) -> u16 {
    if to >= from { to - from } else { size - from + to }
}

/// A submission queue: where it lies and how far it was read.
#[derive(Debug)]
pub struct SubmissionQueue {
    /// Its identifier; 0 is the admin queue.
    pub id: u16,
    /// The completion queue its completions go to.
    pub cqid: u16,
    size: u16,
    head: u16,
    /// The host's tail doorbell.
    pub doorbell: ShadowDoorbell,
    /// Since when it has commands or completions that cannot be reached.
    pub unreachable_since: Option<u64>,
    /// The command that asked to delete it.
    pub deletion: Option<Sqe>,
    ring: Ring,
}

impl SubmissionQueue {
    /// A queue of `size` entries (at least 2) at `base`.
    pub fn new(dma: &DmaSpace, id: u16, cqid: u16, base: u64, size: u16) -> Self {
        let ring = Ring::new(dma, base, size, SQE_SIZE, Access::READ);
        let doorbell = ShadowDoorbell::new(size);
        let (unreachable_since, deletion) = (None, None);
        SubmissionQueue { id, cqid, size, head: 0, doorbell, unreachable_since, deletion, ring }
    }

    /// Looks up the ring's memory again.
    pub fn resolve(&mut self, dma: &DmaSpace) {
        self.ring.resolve(dma);
    }

    /// Whether the ring's memory can be reached.
    pub fn reachable(&self) -> bool {
        self.ring.memory.is_some()
    }

    /// Its memory is wanted now: where it cannot be reached, that is a refused access.
    pub fn want(&self, dma: &DmaSpace) {
        self.ring.want(dma);
    }

    /// The queue as a value, commands that were read and not completed included.
    pub fn save(&self) -> SubmissionState {
        let SubmissionQueue { id, cqid, size, head, .. } = *self;
        let (base, doorbell) = (self.ring.base, self.doorbell.save());
        let deletion = self.deletion.as_ref().map(words);
        SubmissionState { id, cqid, base, size, head, doorbell, deletion }
    }

    /// Entries the host has submitted and nobody has fetched, as far as the doorbell is known.
    #[inline]
    pub fn pending(&self) -> u16 {
        distance(self.head, self.doorbell.value(), self.size)
    }

    /// The index of the next entry to fetch: the SQ Head Pointer of completions.
    #[inline]
    pub fn head(&self) -> u16 {
        self.head
    }

    /// Asks for the next `count` entries to come near, where they are in one piece.
    #[inline]
    pub fn prefetch(&self, count: u16) {
        let Some(memory) = &self.ring.memory else {
            return;
        };
        let until_end = count.min(self.size - self.head);
        let part = |first: u16, entries: u16| {
            memory.at(usize::from(first) * SQE_SIZE, usize::from(entries) * SQE_SIZE)
        };
        if let Some(lines) = part(self.head, until_end) {
            lines.prefetch();
        }
        if let Some(lines) = part(0, count - until_end) {
            lines.prefetch();
        }
    }

    /// A copy of the entry `ahead` of the next one, without fetching it: only a hint of what
    /// comes, since the host may still change it.
    #[inline]
    pub fn peek(&self, ahead: u16) -> Option<Sqe> {
        let index = advance(self.head, ahead, self.size);
        self.ring.entry(index)?.read_obj(0)
    }

    /// Fetches the next entry. `None` when the ring's memory cannot be reached.
    #[inline]
    pub fn fetch(&mut self) -> Option<Sqe> {
        let sqe = self.peek(0)?;
        self.head = advance(self.head, 1, self.size);
        Some(sqe)
    }
}

/// A submission queue that was saved.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SubmissionState {
    /// The identifier that its driver gave it.
    pub id: u16,
    /// Identifier of the completion queue that its commands are completed to.
    pub cqid: u16,
    base: u64,
    size: u16,
    head: u16,
    doorbell: DoorbellState,
    deletion: Option<Words>,
}

fn check_ring(base: u64, size: u16, index: u16) -> Result<(), RestoreError> {
    require_page(base)?;
    require((2..=MAX_QUEUE_ENTRIES).contains(&size) && index < size, "a queue's size")
}

impl SubmissionState {
    /// The queue, with its memory looked up in `dma`.
    ///
    /// # Errors
    /// When there can be no such queue.
    pub fn restore(self, dma: &DmaSpace) -> Result<SubmissionQueue, RestoreError> {
        check_ring(self.base, self.size, self.head)?;
        let mut queue = SubmissionQueue::new(dma, self.id, self.cqid, self.base, self.size);
        queue.head = self.head;
        queue.doorbell = self.doorbell.restore(self.size, sq_slot(self.id))?;
        queue.deletion = self.deletion.map(sqe);
        Ok(queue)
    }
}

/// A completion queue that was saved.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompletionState {
    /// The identifier that its driver gave it.
    pub id: u16,
    vector: Option<u16>,
    base: u64,
    size: u16,
    tail: u16,
    phase: bool,
    doorbell: DoorbellState,
}

impl CompletionState {
    /// The queue, with its memory looked up in `dma`. Who uses it, and what is kept of it, is for
    /// the caller to say.
    ///
    /// # Errors
    /// When there can be no such queue.
    pub fn restore(self, dma: &DmaSpace) -> Result<CompletionQueue, RestoreError> {
        check_ring(self.base, self.size, self.tail)?;
        require(self.vector.is_none_or(|vector| vector < VECTORS), "an interrupt vector")?;
        let mut queue = CompletionQueue::new(dma, self.id, self.base, self.size, self.vector);
        (queue.tail, queue.phase) = (self.tail, self.phase);
        queue.doorbell = self.doorbell.restore(self.size, cq_slot(self.id))?;
        Ok(queue)
    }
}

/// A completion queue: where it lies, how far it was written, and what has no room yet.
#[derive(Debug)]
pub struct CompletionQueue {
    /// Its identifier; 0 is the admin queue.
    pub id: u16,
    /// The interrupt vector that it signals.
    pub vector: u16,
    /// Whether it interrupts at all.
    pub interrupts: bool,
    /// How many submission queues use it.
    pub users: u16,
    size: u16,
    tail: u16,
    phase: bool,
    /// Commands that are executing and will complete here.
    reserved: u16,
    /// The host's head doorbell.
    pub doorbell: ShadowDoorbell,
    ring: Ring,
}

impl CompletionQueue {
    /// A queue of `size` entries (at least 2) at `base`.
    pub fn new(dma: &DmaSpace, id: u16, base: u64, size: u16, vector: Option<u16>) -> Self {
        let access = Access::READ | Access::WRITE;
        CompletionQueue {
            id,
            vector: vector.unwrap_or(0),
            interrupts: vector.is_some(),
            users: 0,
            size,
            tail: 0,
            phase: true,
            reserved: 0,
            doorbell: ShadowDoorbell::new(size),
            ring: Ring::new(dma, base, size, CQE_SIZE, access),
        }
    }

    /// Looks up the ring's memory again.
    pub fn resolve(&mut self, dma: &DmaSpace) {
        self.ring.resolve(dma);
    }

    /// Whether the ring's memory can be reached.
    pub fn reachable(&self) -> bool {
        self.ring.memory.is_some()
    }

    /// Its memory is wanted now: where it cannot be reached, that is a refused access.
    pub fn want(&self, dma: &DmaSpace) {
        self.ring.want(dma);
    }

    /// The queue as a value, completions that have no room yet included.
    pub fn save(&self) -> CompletionState {
        let CompletionQueue { id, size, tail, phase, .. } = *self;
        let vector = self.interrupts.then_some(self.vector);
        let (base, doorbell) = (self.ring.base, self.doorbell.save());
        CompletionState { id, vector, base, size, tail, phase, doorbell }
    }

    /// Whether the host has completions to look at, as far as its doorbell is known.
    #[inline]
    pub fn holds_completions(&self) -> bool {
        self.doorbell.value() != self.tail
    }

    /// How many completions the host has not consumed, as far as its doorbell is known.
    #[inline]
    fn used(&self) -> u16 {
        distance(self.doorbell.value(), self.tail, self.size)
    }

    /// Entries free for commands that have not started yet.
    #[inline]
    pub fn room(&self) -> u16 {
        (self.size - 1).saturating_sub(self.used()).saturating_sub(self.reserved)
    }

    /// Whether `head` is a value that the host's doorbell may take: it cannot run ahead of the
    /// completions there are.
    pub fn accepts_head(&self, head: u32) -> bool {
        u16::try_from(head).is_ok_and(|head| {
            head < self.size && distance(self.doorbell.value(), head, self.size) <= self.used()
        })
    }

    /// Keeps an entry for a command that started and will complete later.
    pub fn reserve(&mut self) {
        self.reserved = self.reserved.saturating_add(1);
    }

    /// Gives back an entry kept by [`reserve`](CompletionQueue::reserve).
    pub fn release(&mut self) {
        self.reserved = self.reserved.saturating_sub(1);
    }

    /// Posts `cqe` with the right phase tag. False when the ring's memory cannot be reached.
    #[inline]
    pub fn post(&mut self, mut cqe: Cqe) -> bool {
        let Some(entry) = self.ring.entry(self.tail) else {
            return false;
        };
        cqe.status_phase = cqe.status_phase & !1 | u16::from(self.phase);
        let bytes = cqe.as_bytes();
        let half = |at: usize| {
            u64::from_le_bytes(*bytes[at..].first_chunk().expect("an entry is 16 bytes"))
        };
        // The half with the phase tag goes last, and after everything the command wrote: a host
        // that sees the tag sees the data.
        let stored = entry
            .store_u64(0, half(0), Ordering::Relaxed)
            .and_then(|()| entry.store_u64(8, half(8), Ordering::Release));
        if stored.is_none() {
            return false;
        }
        self.tail = advance(self.tail, 1, self.size);
        if self.tail == 0 {
            self.phase = !self.phase;
        }
        true
    }

    /// Whether the doorbell's event index should be moved on; see [`ShadowDoorbell::keep_away`].
    #[inline]
    pub fn wants_refresh(&self) -> bool {
        self.doorbell.is_stale(self.tail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn distance_undoes_advance(size in 2u16..=4096, from in any::<u16>(), by in any::<u16>()) {
            let (from, by) = (from % size, by % size);
            let to = advance(from, by, size);
            prop_assert!(to < size);
            prop_assert_eq!(distance(from, to, size), by);
        }
    }
}
