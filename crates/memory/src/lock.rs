//! Locks and barriers between processes that survive the death of who holds them.
//!
//! Memory cannot tell that a process has died; its host's node can. Each party has an [`LockOwner`], a
//! number that is its own in the whole rack; whoever learns that an owner is dead declares it, on
//! each lock and barrier, as often as it likes: the lock is freed and its next holder is told, the
//! barrier waits for one party less.
//!
//! Who waits polls for a short time and then sleeps on a [`Doorbell`].
//!
//! The parties trust each other not to break the lock: who shares its memory can hold it for ever,
//! or let somebody else in. Nobody can make another one crash, loop or miss its timeout.

mod barrier;
mod mutex;

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

pub use barrier::SharedBarrier;
pub use mutex::{Locked, MUTEX_BYTES, SharedMutex, SharedMutexGuard};

use crate::doorbell::{Doorbell, WaitError};
use crate::spin::AdaptiveSpin;

/// A party: a process, say. All its threads may be one owner or several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LockOwner {
    /// Its number, unique in the rack among those that live.
    pub id: NonZeroU32,
    /// How often the number was given out before: a greater one is a later party.
    pub generation: u32,
}

impl LockOwner {
    /// As it is written into a lock; never zero.
    fn to_word(self) -> u64 {
        u64::from(self.id.get()) | u64::from(self.generation) << 32
    }

    fn of_word(word: u64) -> Option<LockOwner> {
        let id = NonZeroU32::new(word as u32)?;
        Some(LockOwner { id, generation: (word >> 32) as u32 })
    }

    /// Whether `other`'s death is this one's too: the same number, and no later life of it.
    fn died_with(self, other: LockOwner) -> bool {
        self.id == other.id && other.generation.wrapping_sub(self.generation) <= u32::MAX / 2
    }
}

/// Why a lock was not taken or a barrier not passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LockError {
    /// Others did not get there in time.
    #[error("not all parties reached the barrier in time")]
    TimedOut,
    /// Its doorbell was closed, or its memory was taken away.
    #[error("the lock was closed")]
    Closed,
    /// This party was declared dead: the others go on without it.
    #[error("this party was declared dead")]
    Excluded,
    /// Of memory on another machine: its host notes no more locks and barriers for this one. Nothing was taken, and
    /// nobody has arrived.
    #[error(
        "the processes of this machine have as many locks and barriers on another as they may; let some go, or disconnect"
    )]
    TooMany,
}

/// Tries again at each ring until `attempt` gives something or the time has ended.
fn until<T>(
    doorbell: &Doorbell,
    timeout: Option<Duration>,
    mut attempt: impl FnMut() -> Option<T>,
) -> Result<T, LockError> {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let mut spin = AdaptiveSpin::default();
    loop {
        let seen = doorbell.count();
        if let Some(outcome) = attempt() {
            return Ok(outcome);
        }
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        // Not left to the doorbell: a ring that came meanwhile counts there, however late it is.
        if left.is_some_and(|left| left.is_zero()) {
            return Err(LockError::TimedOut);
        }
        match doorbell.wait(seen, &mut spin, left) {
            Ok(_) => {}
            Err(WaitError::TimedOut) => return Err(LockError::TimedOut),
            Err(WaitError::Closed) => return Err(LockError::Closed),
        }
    }
}

#[cfg(test)]
mod tests;
