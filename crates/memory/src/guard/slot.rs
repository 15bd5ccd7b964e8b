//! One registered range, as a signal handler reads it while others change it.
//!
//! The handler may not lock, so it reads atomics. A slot is used again for another range: the
//! *version* is odd while its range changes, and another one afterwards, so that a reader never
//! takes the beginning of one range and the end of another for a third that is somebody else's.
//! `tests/loom.rs` compiles this file over loom's atomics; what those cannot do is in `guard`.

use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// State of a slot in which no range is registered.
pub(super) const FREE: u32 = 0;
/// State of a slot whose range has all its memory.
const WHOLE: u32 = 1;
/// A range that lost at least one page.
const TRUNCATED: u32 = 2;

/// See the module's documentation. One writer at a time; any number of readers.
#[derive(Debug, Default)]
pub(crate) struct GuardSlot {
    pub(super) version: AtomicU32,
    pub(super) state: AtomicU32,
    pub(super) start: AtomicU64,
    pub(super) end: AtomicU64,
    /// 1 while a part of the range may not be written: what writers wait on (a futex).
    pub(super) frozen: AtomicU32,
}

impl GuardSlot {
    /// Registers a range; the slot is free.
    pub(crate) fn register(&self, start: u64, end: u64) {
        // Each store is released, each load acquired: who reads a part of the new range reads
        // this version too, or a later one.
        self.version.fetch_add(1, Ordering::AcqRel);
        self.start.store(start, Ordering::Release);
        self.end.store(end, Ordering::Release);
        self.frozen.store(0, Ordering::Release);
        self.state.store(WHOLE, Ordering::Release);
        self.version.fetch_add(1, Ordering::AcqRel);
    }

    /// Takes the range out; whether writers waited, who are to be woken.
    pub(crate) fn retire(&self) -> bool {
        self.state.store(FREE, Ordering::Release);
        self.frozen.swap(0, Ordering::AcqRel) == 1
    }

    /// The range, if one is registered and `address` is inside. A slot that is being changed has
    /// none: nobody can have reached its range yet.
    pub(crate) fn around(&self, address: u64) -> Option<(u64, u64)> {
        let version = self.version.load(Ordering::Acquire);
        let state = self.state.load(Ordering::Acquire);
        let (start, end) = (self.start.load(Ordering::Acquire), self.end.load(Ordering::Acquire));
        let stable = version.is_multiple_of(2) && self.version.load(Ordering::Acquire) == version;
        (stable && state != FREE && (start..end).contains(&address)).then_some((start, end))
    }

    /// A page of the range was replaced.
    pub(crate) fn tear(&self) {
        // Not one that was retired meanwhile.
        let _ = self.state.compare_exchange(WHOLE, TRUNCATED, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Whether the range's file became shorter than the range.
    #[inline]
    pub(crate) fn truncated(&self) -> bool {
        self.state.load(Ordering::Relaxed) == TRUNCATED
    }

    /// From now on writers wait.
    pub(crate) fn freeze(&self) {
        self.frozen.store(1, Ordering::Release);
    }

    /// From now on they do not; those that wait are to be woken.
    pub(crate) fn unfreeze(&self) {
        self.frozen.store(0, Ordering::Release);
    }

    /// Whether writes to the range wait, because its memory is being moved.
    pub(crate) fn frozen(&self) -> bool {
        self.frozen.load(Ordering::Acquire) == 1
    }
}
