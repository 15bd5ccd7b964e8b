//! A mutex in shared memory whose holder may die.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{LockError, LockOwner, until};
use crate::doorbell::{DOORBELL_BYTES, Doorbell, shared};
use crate::event::Event;
use crate::region::Region;

/// Bytes of a mutex in a region: who holds it, and a doorbell.
pub const MUTEX_BYTES: usize = 64 + DOORBELL_BYTES;

/// Value of a lock that nobody holds.
const FREE: u64 = 0;
/// Nobody holds it, and the last holder died: no owner has the number zero.
const LEFT_BY_DEAD: u64 = 1 << 32;

#[repr(C, align(64))]
struct Holder(AtomicU64);

/// One party's end of a mutex.
#[derive(Debug)]
pub struct SharedMutex {
    /// Inside of the region that the doorbell keeps mapped.
    holder: NonNull<Holder>,
    doorbell: Doorbell,
    me: LockOwner,
}

// SAFETY: the holder is an atomic in memory that the doorbell's region keeps mapped.
unsafe impl Send for SharedMutex {}
// SAFETY: as above.
unsafe impl Sync for SharedMutex {}

/// The lock is held, by this guard; which way is for the caller to look at.
#[derive(Debug)]
#[must_use = "dropping it unlocks at once"]
pub enum Locked<G> {
    /// As the last holder left it.
    Clean(G),
    /// The last holder died, or was cut off, while it held it: what it protects may be half changed. Only this
    /// holder is told.
    OwnerDied(G),
}

impl<G> Locked<G> {
    /// The guard, for whoever need not know.
    pub fn guard(self) -> G {
        match self {
            Locked::Clean(guard) | Locked::OwnerDied(guard) => guard,
        }
    }

    /// The same with a guard that is made of this one.
    pub fn map<H>(self, make: impl FnOnce(G) -> H) -> Locked<H> {
        match self {
            Locked::Clean(guard) => Locked::Clean(make(guard)),
            Locked::OwnerDied(guard) => Locked::OwnerDied(make(guard)),
        }
    }
}

/// Holds the lock, and unlocks when dropped.
#[derive(Debug)]
#[must_use = "dropping it unlocks at once"]
pub struct SharedMutexGuard<'a>(&'a SharedMutex);

impl SharedMutex {
    /// The mutex in the [`MUTEX_BYTES`] from `offset` of `region`, for the party `me`; zeroes are a
    /// free mutex. `None` when they are not inside, not aligned to a cache line, or the region
    /// cannot be both read and written.
    pub fn new(
        region: Arc<Region>,
        offset: usize,
        event: Event,
        me: LockOwner,
    ) -> Option<SharedMutex> {
        let holder = shared::<Holder>(&region, offset)?;
        let doorbell = Doorbell::new(region, offset.checked_add(size_of::<Holder>())?, event)?;
        Some(SharedMutex { holder, doorbell, me })
    }

    fn holder(&self) -> &AtomicU64 {
        // SAFETY: checked in `new`; the region stays mapped, and atomics are sound on memory that
        // others change.
        unsafe { &self.holder.as_ref().0 }
    }

    /// Takes the lock if nobody holds it.
    pub fn try_lock(&self) -> Option<Locked<SharedMutexGuard<'_>>> {
        let take = |from| {
            let to = self.me.to_word();
            self.holder().compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        // A guard is made only for a lock that is held: dropping one unlocks.
        if take(FREE) {
            Some(Locked::Clean(SharedMutexGuard(self)))
        } else if take(LEFT_BY_DEAD) {
            Some(Locked::OwnerDied(SharedMutexGuard(self)))
        } else {
            None
        }
    }

    /// Takes the lock, waiting for at most `timeout` (`None` waits for ever) until it is free. Not
    /// for a thread that holds it.
    ///
    /// # Errors
    /// [`LockError::TimedOut`], or [`LockError::Closed`] when the memory was taken away.
    pub fn lock(
        &self,
        timeout: Option<Duration>,
    ) -> Result<Locked<SharedMutexGuard<'_>>, LockError> {
        until(&self.doorbell, timeout, || self.try_lock())
    }

    /// Who holds it now.
    pub fn owner(&self) -> Option<LockOwner> {
        LockOwner::of_word(self.holder().load(Ordering::Relaxed))
    }

    /// Unlocks it if this party holds it, whoever has the guard; whether it did.
    pub fn unlock(&self) -> bool {
        self.release(self.me.to_word(), FREE)
    }

    /// Says that `who` is dead, in this and all earlier lives: if it held the lock, the lock is
    /// free, and its next holder is told. True when it did.
    pub fn declare_dead(&self, who: LockOwner) -> bool {
        let word = self.holder().load(Ordering::Relaxed);
        let held = LockOwner::of_word(word).is_some_and(|owner| owner.died_with(who));
        // If the word has changed, somebody else has declared it already.
        held && self.release(word, LEFT_BY_DEAD)
    }

    fn release(&self, from: u64, to: u64) -> bool {
        let released =
            self.holder().compare_exchange(from, to, Ordering::Release, Ordering::Relaxed).is_ok();
        if released {
            self.doorbell.ring();
        }
        released
    }
}

impl Drop for SharedMutexGuard<'_> {
    fn drop(&mut self) {
        // It is not ours any more when we were declared dead.
        self.0.release(self.0.me.to_word(), FREE);
    }
}

/// The guard of a mutex that is held, for tests that forgot theirs.
#[cfg(test)]
pub(super) fn guard(mutex: &SharedMutex) -> SharedMutexGuard<'_> {
    SharedMutexGuard(mutex)
}
