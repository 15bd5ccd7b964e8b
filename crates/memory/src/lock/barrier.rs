//! A barrier in shared memory whose parties may die.
//!
//! Nothing is counted: each party writes how far it is into a slot of its own, and whoever finds
//! that all have arrived moves the phase on. So a death at any point leaves nothing half done.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::{LockError, LockOwner, until};
use crate::doorbell::{DOORBELL_BYTES, Doorbell, shared};
use crate::event::Event;
use crate::region::Region;

/// Largest number of parties, which bounds the memory a barrier takes.
const MAX_PARTIES: usize = 4096;

/// Phases that were completed, modulo 2^32.
#[repr(C, align(64))]
struct Phase(AtomicU32);

/// What one party writes, in a cache line of its own.
#[repr(C, align(64))]
struct Slot {
    /// Phases it has arrived at the end of, modulo 2^32.
    arrived: AtomicU32,
    /// Not zero when it is dead.
    dead: AtomicU32,
}

/// One party's end of a barrier.
#[derive(Debug)]
pub struct SharedBarrier {
    /// Both inside of the region that the doorbell keeps mapped.
    phase: NonNull<Phase>,
    slots: Vec<NonNull<Slot>>,
    doorbell: Doorbell,
    parties: Vec<LockOwner>,
    mine: usize,
    /// Phases that this party has passed.
    passed: u32,
}

// SAFETY: phase and slots are atomics in memory that the doorbell's region keeps mapped.
unsafe impl Send for SharedBarrier {}
// SAFETY: as above.
unsafe impl Sync for SharedBarrier {}

/// Whether phase `number` modulo 2^32 comes after `other`.
fn after(number: u32, other: u32) -> bool {
    (1..=u32::MAX / 2).contains(&number.wrapping_sub(other))
}

impl SharedBarrier {
    /// Bytes of a barrier for so many parties.
    pub fn bytes(parties: usize) -> usize {
        size_of::<Phase>() + DOORBELL_BYTES + parties.saturating_mul(size_of::<Slot>())
    }

    /// The barrier at `offset` of `region` between `parties`, for the one that is `me`; zeroes are
    /// a new barrier. All must name the same parties in the same order.
    ///
    /// `None` when `me` is not one of them, one is there twice, there are more than 4096, or the
    /// barrier is not inside, not aligned to a cache line, or cannot be both read and written.
    pub fn new(
        region: Arc<Region>,
        offset: usize,
        event: Event,
        parties: &[LockOwner],
        me: LockOwner,
    ) -> Option<SharedBarrier> {
        let mine = parties.iter().position(|party| *party == me)?;
        let mut ids: Vec<_> = parties.iter().map(|party| party.id).collect();
        ids.sort_unstable();
        ids.dedup();
        if ids.len() < parties.len() || parties.len() > MAX_PARTIES {
            return None;
        }
        region.slice(offset, SharedBarrier::bytes(parties.len()))?;
        let phase = shared::<Phase>(&region, offset)?;
        let first = offset + SharedBarrier::bytes(0);
        let slot = |index| shared::<Slot>(&region, first + index * size_of::<Slot>());
        let slots = (0..parties.len()).map(slot).collect::<Option<Vec<_>>>()?;
        let doorbell = Doorbell::new(region, offset + size_of::<Phase>(), event)?;
        let parties = parties.to_vec();
        let mut barrier = SharedBarrier { phase, slots, doorbell, parties, mine, passed: 0 };
        // It cannot have gone on without this party, unless that was declared dead.
        barrier.passed = barrier.phase().load(Ordering::SeqCst);
        Some(barrier)
    }

    fn phase(&self) -> &AtomicU32 {
        // SAFETY: checked in `new`; the region stays mapped, and atomics are sound on memory that
        // others change.
        unsafe { &self.phase.as_ref().0 }
    }

    fn slots(&self) -> impl Iterator<Item = &Slot> {
        // SAFETY: as above.
        self.slots.iter().map(|slot| unsafe { slot.as_ref() })
    }

    fn slot(&self, index: usize) -> &Slot {
        // SAFETY: as above.
        unsafe { self.slots[index].as_ref() }
    }

    /// The same end of a party that has passed so many phases, modulo 2^32.
    #[must_use]
    pub fn having_passed(self, phases: u32) -> SharedBarrier {
        SharedBarrier { passed: phases, ..self }
    }

    /// Phases that this party has passed, modulo 2^32.
    pub fn passed(&self) -> u32 {
        self.passed
    }

    /// Phases that all have passed, modulo 2^32.
    pub fn phases(&self) -> u32 {
        self.phase().load(Ordering::SeqCst)
    }

    /// Arrives, and waits until all parties that live have; how many those are.
    ///
    /// # Errors
    /// [`LockError::TimedOut`] after `timeout` (`None` waits for ever): the arrival stays, and the
    /// next call waits for the same phase. [`LockError::Excluded`] when this party was declared
    /// dead, [`LockError::Closed`] when the memory was taken away.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<usize, LockError> {
        let next = self.passed.wrapping_add(1);
        let mine = self.slot(self.mine);
        // In one order with the looks at the others' slots: the last one to arrive sees them all.
        mine.arrived.store(next, Ordering::SeqCst);
        until(&self.doorbell, timeout, || {
            self.complete(self.passed);
            let passed = after(self.phase().load(Ordering::SeqCst), self.passed);
            (passed || mine.dead.load(Ordering::SeqCst) != 0).then_some(())
        })?;
        if mine.dead.load(Ordering::SeqCst) != 0 {
            return Err(LockError::Excluded);
        }
        self.passed = next;
        Ok(self.slots().filter(|slot| slot.dead.load(Ordering::SeqCst) == 0).count())
    }

    /// Says that `who` is dead, in this and all earlier lives: nobody waits for it any more. True
    /// when it is one of the parties.
    pub fn declare_dead(&self, who: LockOwner) -> bool {
        let Some(index) = self.parties.iter().position(|party| party.died_with(who)) else {
            return false;
        };
        self.slot(index).dead.store(1, Ordering::SeqCst);
        self.complete(self.phase().load(Ordering::SeqCst));
        // It may be somebody who lives, and waits.
        self.doorbell.ring();
        true
    }

    /// Moves the phase on if it is still `phase` and all who live have arrived at its end.
    fn complete(&self, phase: u32) {
        let all = self.slots().all(|slot| {
            slot.dead.load(Ordering::SeqCst) != 0
                || after(slot.arrived.load(Ordering::SeqCst), phase)
        });
        let next = phase.wrapping_add(1);
        let order = Ordering::SeqCst;
        if all && self.phase().compare_exchange(phase, next, order, order).is_ok() {
            self.doorbell.ring();
        }
    }
}
