//! How many rings of an interrupt's doorbell were taken, where several threads may wait for them.
//!
//! A thread has the right to take the next ring before that comes, while it has nothing else to do. What is left
//! to do when the ring is there is two stores: taking it by an exchange would delay whoever is woken by as long as a
//! tenth of a ring's whole way.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The rings that were taken, and whether a thread has the right to take the next one.
#[derive(Debug)]
pub(super) struct TakenRings {
    count: AtomicU32,
    claimed: AtomicBool,
}

/// The right to take the next ring. It ends when it is dropped.
#[derive(Debug)]
pub(super) struct RingClaim<'a>(&'a TakenRings);

impl TakenRings {
    pub(super) fn new(count: u32) -> TakenRings {
        TakenRings { count: AtomicU32::new(count), claimed: AtomicBool::new(false) }
    }

    /// How many were taken, modulo 2^32.
    pub(super) fn count(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    /// The right to take the next one, unless another thread has it.
    #[inline]
    pub(super) fn claim(&self) -> Option<RingClaim<'_>> {
        (!self.claimed.swap(true, Ordering::Acquire)).then_some(RingClaim(self))
    }

    /// Ends the claim of a thread that does not exist: in a fork, that of another thread of its parent's.
    pub(super) fn end_claim(&self) {
        self.claimed.store(false, Ordering::Release);
    }
}

impl RingClaim<'_> {
    pub(super) fn count(&self) -> u32 {
        // Nobody else stores it, and what was stored came before the claim.
        self.0.count.load(Ordering::Relaxed)
    }

    /// Takes rings: so many are taken now.
    #[inline]
    pub(super) fn take(self, count: u32) {
        self.0.count.store(count, Ordering::Relaxed);
    }
}

impl Drop for RingClaim<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.claimed.store(false, Ordering::Release);
    }
}
