//! What waits for a channel: a ring that one thread empties, filled by any number of threads, one
//! at a time.
//!
//! A slot is one cache line with all that a transaction of one piece is; its number says that it
//! is filled. So a submission is one line that goes from one processor to another. The lock is
//! between submitters only: the channel does not take it. What does not fit into the ring waits
//! behind the lock, and the channel asks for it when the ring is empty.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Slots of the ring.
const SLOTS: u64 = 256;

#[repr(C, align(64))]
struct Slot<T> {
    /// One more than the number of the item in it; what it was before the ring came around, until
    /// it is filled.
    filled: AtomicU64,
    item: UnsafeCell<MaybeUninit<T>>,
}

/// What submitters change, under one lock.
#[derive(Debug)]
struct Front<T> {
    /// Items put into the ring.
    put: u64,
    /// Items taken out, when somebody looked last.
    taken: u64,
    /// What found no slot, in order.
    waiting: VecDeque<T>,
    closed: bool,
}

/// See the module's documentation.
pub(super) struct CopyQueue<T> {
    slots: Box<[Slot<T>]>,
    front: Mutex<Front<T>>,
    /// Items taken out of the ring; the channel writes it.
    taken: Line<AtomicU64>,
    /// Whether there is something in `Front::waiting`.
    waiting: Line<AtomicBool>,
}

#[derive(Default)]
#[repr(align(64))]
struct Line<T>(T);

// SAFETY: an item is written by whoever holds the lock before it is published, and read by the
// only taker afterwards, until the taker gives the slot back.
unsafe impl<T: Send> Sync for CopyQueue<T> {}

impl<T> std::fmt::Debug for CopyQueue<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CopyQueue").field("taken", &self.taken.0).finish_non_exhaustive()
    }
}

impl<T> CopyQueue<T> {
    /// Bytes that a slot takes in memory.
    pub const SLOT_BYTES: usize = size_of::<Slot<T>>();

    pub fn new() -> CopyQueue<T> {
        let slot =
            |_| Slot { filled: AtomicU64::new(0), item: UnsafeCell::new(MaybeUninit::uninit()) };
        CopyQueue {
            slots: (0..SLOTS).map(slot).collect(),
            front: Mutex::new(Front { put: 0, taken: 0, waiting: VecDeque::new(), closed: false }),
            taken: Line::default(),
            waiting: Line::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Front<T>> {
        // Nothing panics while it is held.
        self.front.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slot(&self, number: u64) -> &Slot<T> {
        &self.slots[(number % SLOTS) as usize]
    }

    /// Puts an item behind all others; gives it back when the queue is closed.
    pub fn put(&self, item: T) -> Result<(), T> {
        let mut front = self.lock();
        if front.closed {
            return Err(item);
        }
        if !front.waiting.is_empty() {
            front.waiting.push_back(item);
        } else if let Err(item) = self.publish(&mut front, item) {
            front.waiting.push_back(item);
            self.waiting.0.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Puts an item into the ring; gives it back when that is full.
    fn publish(&self, front: &mut Front<T>, item: T) -> Result<(), T> {
        if front.put - front.taken == SLOTS {
            front.taken = self.taken.0.load(Ordering::Acquire);
            if front.put - front.taken == SLOTS {
                return Err(item);
            }
        }
        let slot = self.slot(front.put);
        front.put += 1;
        // SAFETY: the slot's former item was taken, and only the holder of the lock fills slots.
        unsafe { (*slot.item.get()).write(item) };
        slot.filled.store(front.put, Ordering::Release);
        Ok(())
    }

    /// Closes the queue: nothing is put in any more. What waits can still be taken.
    pub fn close(&self) {
        self.lock().closed = true;
    }

    /// Whether [`take`](CopyQueue::take) would find something after `taken` items.
    #[inline]
    pub fn has(&self, taken: u64) -> bool {
        self.slot(taken).filled.load(Ordering::Acquire) == taken + 1
            || self.waiting.0.load(Ordering::Acquire)
    }

    /// Takes the oldest item out. `taken` is how many the caller took before.
    ///
    /// # Safety
    /// There is one taker, and all items that were taken so far were counted in `taken`.
    #[inline]
    pub unsafe fn take(&self, taken: &mut u64) -> Option<T> {
        let slot = self.slot(*taken);
        if slot.filled.load(Ordering::Acquire) != *taken + 1 {
            if !self.waiting.0.load(Ordering::Acquire) {
                return None;
            }
            self.refill();
            if slot.filled.load(Ordering::Acquire) != *taken + 1 {
                return None;
            }
        }
        *taken += 1;
        // SAFETY: it was filled, and is filled again only after the store below.
        let item = unsafe { (*slot.item.get()).assume_init_read() };
        self.taken.0.store(*taken, Ordering::Release);
        Some(item)
    }

    /// Asks the processor to bring the slot near that is taken after `taken` items.
    #[inline]
    pub fn prefetch(&self, taken: u64) {
        crate::slice::prefetch(std::ptr::from_ref(self.slot(taken)).cast());
    }

    /// Moves what waits into the ring, as far as there is room.
    #[cold]
    fn refill(&self) {
        let mut front = self.lock();
        while let Some(item) = front.waiting.pop_front() {
            if let Err(item) = self.publish(&mut front, item) {
                front.waiting.push_front(item);
                return;
            }
        }
        self.waiting.0.store(false, Ordering::Release);
    }
}

impl<T> Drop for CopyQueue<T> {
    fn drop(&mut self) {
        let mut taken = *self.taken.0.get_mut();
        // SAFETY: nobody else is left.
        while let Some(item) = unsafe { self.take(&mut taken) } {
            drop(item);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn is_a_queue_however_far_it_is_behind(steps in prop::collection::vec((0usize..400, 0usize..400), 1..12)) {
            let queue = CopyQueue::new();
            let (mut model, mut next, mut taken) = (VecDeque::new(), 0, 0);
            for (puts, takes) in steps {
                for _ in 0..puts {
                    prop_assert_eq!(queue.put(next), Ok(()));
                    model.push_back(next);
                    next += 1;
                }
                for _ in 0..takes {
                    prop_assert_eq!(queue.has(taken), !model.is_empty());
                    // SAFETY: the only taker.
                    prop_assert_eq!(unsafe { queue.take(&mut taken) }, model.pop_front());
                }
            }
            queue.close();
            prop_assert_eq!(queue.put(next), Err(next));
        }
    }

    #[test]
    fn what_was_not_taken_is_dropped() {
        let item = std::sync::Arc::new(());
        let queue = CopyQueue::new();
        for _ in 0..SLOTS + 5 {
            queue.put(item.clone()).unwrap();
        }
        drop(queue);
        assert_eq!(std::sync::Arc::strong_count(&item), 1);
    }

    #[test]
    fn keeps_the_order_of_each_submitter() {
        const EACH: u64 = 20_000;
        let queue = CopyQueue::new();
        std::thread::scope(|scope| {
            for submitter in 0..3usize {
                let queue = &queue;
                scope.spawn(move || {
                    for number in 0..EACH {
                        queue.put((submitter, number)).unwrap();
                    }
                });
            }
            let (mut next, mut taken) = ([0; 3], 0);
            while taken < 3 * EACH {
                // SAFETY: the only taker.
                match unsafe { queue.take(&mut taken) } {
                    Some((submitter, number)) => {
                        assert_eq!(number, next[submitter]);
                        next[submitter] += 1;
                    }
                    None => std::thread::yield_now(),
                }
            }
        });
    }
}
