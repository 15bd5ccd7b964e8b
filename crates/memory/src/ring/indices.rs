//! The two indices of a ring of messages, and the rules by which each side moves its own.
//!
//! Both count for ever (modulo 2^32); each is written by one side only, which keeps its own copy
//! and never reads back what it wrote: the peer could have changed it. Of the peer's index a side
//! keeps the value that it saw last, and looks again only when that one says full or empty; so in a
//! busy ring most messages cost no transfer of the other's line.
//!
//! An index that says there are more messages than slots is a peer's lie: the producer takes the
//! ring as full then, the consumer as empty.

use crate::sync::{AtomicU32, Ordering};

/// An index on a line of its own.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Index(AtomicU32);

/// The indices, as they lie at the head of a ring.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Indices {
    /// Messages put in; the producer's.
    tail: Index,
    /// Messages taken out; the consumer's.
    head: Index,
}

/// The indices as their producer knows them.
#[derive(Debug)]
pub(crate) struct ProducerIndices {
    slots: u32,
    tail: u32,
    head_seen: u32,
}

impl ProducerIndices {
    /// Goes on where `indices` are, in a ring of `slots`.
    pub fn new(indices: &Indices, slots: u32) -> ProducerIndices {
        let tail = indices.tail.0.load(Ordering::Relaxed);
        ProducerIndices { slots, tail, head_seen: indices.head.0.load(Ordering::Acquire) }
    }

    /// The number of a free slot (to be taken modulo the slots), if there is one.
    #[inline]
    pub fn free(&mut self, indices: &Indices) -> Option<u32> {
        if self.tail.wrapping_sub(self.head_seen) >= self.slots {
            self.head_seen = indices.head.0.load(Ordering::Acquire);
            if self.tail.wrapping_sub(self.head_seen) >= self.slots {
                return None;
            }
        }
        Some(self.tail)
    }

    /// Publishes the slot that [`free`](Self::free) gave.
    #[inline]
    pub fn publish(&mut self, indices: &Indices) {
        self.tail = self.tail.wrapping_add(1);
        indices.tail.0.store(self.tail, Ordering::Release);
    }
}

/// The indices as their consumer knows them.
#[derive(Debug)]
pub(crate) struct ConsumerIndices {
    slots: u32,
    head: u32,
    tail_seen: u32,
}

impl ConsumerIndices {
    /// Goes on where `indices` are, in a ring of `slots`.
    pub fn new(indices: &Indices, slots: u32) -> ConsumerIndices {
        let head = indices.head.0.load(Ordering::Relaxed);
        ConsumerIndices { slots, head, tail_seen: head }
    }

    /// The number of the oldest message's slot (to be taken modulo the slots), if there is one.
    #[inline]
    pub fn oldest(&mut self, indices: &Indices) -> Option<u32> {
        if self.tail_seen == self.head {
            let tail = indices.tail.0.load(Ordering::Acquire);
            if tail == self.head || tail.wrapping_sub(self.head) > self.slots {
                return None;
            }
            self.tail_seen = tail;
        }
        Some(self.head)
    }

    /// Gives the slot that [`oldest`](Self::oldest) gave back to the producer.
    #[inline]
    pub fn release(&mut self, indices: &Indices) {
        self.head = self.head.wrapping_add(1);
        indices.head.0.store(self.head, Ordering::Release);
    }

    /// Messages that wait now.
    pub fn len(&self, indices: &Indices) -> u32 {
        let waiting = indices.tail.0.load(Ordering::Acquire).wrapping_sub(self.head);
        if waiting > self.slots { 0 } else { waiting }
    }
}
