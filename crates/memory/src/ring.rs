//! Messages from one process to another through shared memory, in order, without a system call:
//! a ring with one producer and one consumer.
//!
//! The indices have a line each; then come the slots, each a length and the message's bytes. Who
//! has to be told that there is something rings a [`Doorbell`](crate::Doorbell) after
//! [`Producer::push`].
//!
//! The peer is hostile: its index and its lengths are read once and checked, and what a message
//! holds is copied out before anybody looks at it.

mod indices;

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::doorbell::shared;
use crate::region::Region;
use crate::slice::{DmaSlice, PinnedSlice};

use indices::{ConsumerIndices, Indices, ProducerIndices};

/// Bytes of the length before each message.
const LENGTH_BYTES: usize = 4;

/// The most slots of a ring.
const MAX_SLOTS: u32 = 1 << 20;
/// The most bytes of a slot.
const MAX_SLOT_BYTES: u32 = 1 << 24;

/// How a ring lies in memory; both sides must agree on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingLayout {
    /// Messages that it holds: a power of two, at most 2^20.
    pub slots: u32,
    /// Bytes of the longest message: 1 to 2^24. A slot is whole cache lines, and 4 bytes of it are
    /// the message's length: 60 bytes fill one line.
    pub slot_bytes: u32,
}

impl RingLayout {
    /// Bytes of the ring: the indices and all slots. `None` when it is not a ring that can be.
    pub fn bytes(&self) -> Option<usize> {
        let slots_fit = self.slots.is_power_of_two() && self.slots <= MAX_SLOTS;
        let slot_fits = (1..=MAX_SLOT_BYTES).contains(&self.slot_bytes);
        (slots_fit && slot_fits).then(|| size_of::<Indices>() + self.slots as usize * self.stride())
    }

    /// From one slot to the next: whole cache lines, so that nobody writes the line that the other
    /// side reads.
    #[inline]
    fn stride(&self) -> usize {
        (LENGTH_BYTES + self.slot_bytes as usize).next_multiple_of(64)
    }
}

/// Why a message was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// All slots hold messages that the consumer has not taken yet.
    #[error("the ring is full until its consumer takes a message")]
    Full,
    /// The message is longer than a slot.
    #[error("a message of {length} bytes is longer than the ring's slots of {slot_bytes}")]
    TooLong {
        /// Length of the message in bytes.
        length: usize,
        /// Bytes of the longest message.
        slot_bytes: u32,
    },
}

/// What both sides have: the indices and the slots, checked.
#[derive(Debug)]
struct Memory {
    indices: NonNull<Indices>,
    slots: PinnedSlice,
    layout: RingLayout,
}

// SAFETY: the indices are atomics inside of the region that `slots` keeps mapped.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(region: Arc<Region>, offset: usize, layout: RingLayout) -> Option<Memory> {
        let bytes = layout.bytes()?;
        let indices = shared::<Indices>(&region, offset)?;
        let head = size_of::<Indices>();
        let slots = PinnedSlice::new(region, offset.checked_add(head)?, bytes - head)?;
        Some(Memory { indices, slots, layout })
    }

    #[inline]
    fn indices(&self) -> &Indices {
        // SAFETY: checked in `new`; the region stays mapped, and atomics are sound on memory that
        // others change.
        unsafe { self.indices.as_ref() }
    }

    /// The slot of message `number`.
    #[inline]
    fn slot(&self, number: u32) -> DmaSlice<'_> {
        let index = (number & (self.layout.slots - 1)) as usize;
        let stride = self.layout.stride();
        self.slots.get().part(index * stride, stride).expect("the layout has that many slots")
    }
}

/// The side that puts messages in.
#[derive(Debug)]
pub struct Producer {
    memory: Memory,
    putting: ProducerIndices,
}

impl Producer {
    /// The producer of the ring at `offset` of `region`; zeroes are an empty ring. There must be
    /// one at a time. `None` when the ring is not inside, not aligned to a cache line, or the
    /// region cannot be both read and written.
    pub fn new(region: Arc<Region>, offset: usize, layout: RingLayout) -> Option<Producer> {
        let memory = Memory::new(region, offset, layout)?;
        let putting = ProducerIndices::new(memory.indices(), layout.slots);
        Some(Producer { memory, putting })
    }

    /// Puts a message in, behind all others.
    ///
    /// # Errors
    /// [`PushError`], and nothing was put in.
    #[inline]
    pub fn push(&mut self, message: &[u8]) -> Result<(), PushError> {
        let slot_bytes = self.memory.layout.slot_bytes;
        let length = match u32::try_from(message.len()) {
            Ok(length) if length <= slot_bytes => length,
            _ => return Err(PushError::TooLong { length: message.len(), slot_bytes }),
        };
        let number = self.putting.free(self.memory.indices()).ok_or(PushError::Full)?;
        let slot = self.memory.slot(number);
        slot.store_u32(0, length, Ordering::Relaxed).expect("slots are aligned");
        slot.part(LENGTH_BYTES, message.len()).expect("checked above").copy_from(message);
        self.putting.publish(self.memory.indices());
        Ok(())
    }
}

/// The side that takes messages out.
#[derive(Debug)]
pub struct Consumer {
    memory: Memory,
    taking: ConsumerIndices,
    malformed: u64,
}

impl Consumer {
    /// The consumer of the ring at `offset` of `region`, as [`Producer::new`].
    pub fn new(region: Arc<Region>, offset: usize, layout: RingLayout) -> Option<Consumer> {
        let memory = Memory::new(region, offset, layout)?;
        let taking = ConsumerIndices::new(memory.indices(), layout.slots);
        Some(Consumer { memory, taking, malformed: 0 })
    }

    /// Takes the oldest message out into `buffer`; its length, or `None` when there is none. A
    /// message that is longer than `buffer` stays where it is: call again with a buffer of that
    /// length.
    #[inline]
    pub fn pop(&mut self, buffer: &mut [u8]) -> Option<usize> {
        // Each round takes a message out, so a producer that only sends rubbish is not followed
        // further than once around.
        for _ in 0..self.memory.layout.slots {
            let number = self.taking.oldest(self.memory.indices())?;
            let slot = self.memory.slot(number);
            let length = slot.load_u32(0, Ordering::Relaxed).expect("slots are aligned");
            if length > self.memory.layout.slot_bytes {
                self.malformed = self.malformed.saturating_add(1);
                self.taking.release(self.memory.indices());
                continue;
            }
            let length = length as usize;
            if let Some(buffer) = buffer.get_mut(..length) {
                slot.part(LENGTH_BYTES, length).expect("checked above").copy_to(buffer);
                self.taking.release(self.memory.indices());
            }
            return Some(length);
        }
        None
    }

    /// Whether no message waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Messages that wait now.
    pub fn len(&self) -> usize {
        self.taking.len(self.memory.indices()) as usize
    }

    /// Messages that were thrown away because their length was longer than a slot: a producer that
    /// does not keep to the layout.
    pub fn malformed(&self) -> u64 {
        self.malformed
    }
}

#[cfg(test)]
mod tests;
