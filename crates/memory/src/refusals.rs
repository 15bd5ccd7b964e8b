//! What was refused to a function: counted by its thread, read by anybody.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::space::DmaFault;

/// Refusals that follow each other with shorter pauses are one burst.
const PAUSE: Duration = Duration::from_secs(1);

/// Refusals that follow each other within a second: where a function began to go astray, and where it was last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefusalBurst<F> {
    /// The one that it began with.
    pub first: F,
    /// The newest one so far; the same as the first where it is alone.
    pub last: F,
    at: Instant,
}

impl<F: Copy> RefusalBurst<F> {
    /// The burst that `fault`, which was refused at `now`, belongs to, where `before` is the newest one until then.
    #[must_use]
    pub fn with(before: Option<RefusalBurst<F>>, fault: F, now: Instant) -> RefusalBurst<F> {
        let goes_on = before.filter(|burst| now.saturating_duration_since(burst.at) < PAUSE);
        let first = goes_on.map_or(fault, |burst| burst.first);
        RefusalBurst { first, last: fault, at: now }
    }
}

/// The accesses that were refused to one function; cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Refusals(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    count: AtomicU64,
    by_cause: [AtomicU64; DmaFault::CAUSES.len()],
    burst: Mutex<Option<RefusalBurst<DmaFault>>>,
}

impl Refusals {
    /// How many there were, and the last of them.
    pub fn get(&self) -> (u64, Option<DmaFault>) {
        let last = self.burst().map(|burst| burst.last);
        (self.0.count.load(Ordering::Relaxed), last)
    }

    /// The newest of them that followed each other.
    pub fn burst(&self) -> Option<RefusalBurst<DmaFault>> {
        *self.0.burst.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many there were of each cause, zeroes too: who computes rates of a counter has to see it before the first.
    pub fn by_cause(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let counts = self.0.by_cause.iter().map(|count| count.load(Ordering::Relaxed));
        DmaFault::CAUSES.into_iter().zip(counts)
    }

    pub(crate) fn note(&self, fault: DmaFault) {
        self.0.count.fetch_add(1, Ordering::Relaxed);
        self.0.by_cause[fault.cause()].fetch_add(1, Ordering::Relaxed);
        // Somebody reads: the fault before is as good, and nobody waits here.
        if let Ok(mut burst) = self.0.burst.try_lock() {
            *burst = Some(RefusalBurst::with(*burst, fault, Instant::now()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_counted_by_cause() {
        let refusals = Refusals::default();
        let (address, length) = (0x1000, 8);
        refusals.note(DmaFault::NotMaster { address, length });
        refusals.note(DmaFault::Truncated { address, length });
        refusals.note(DmaFault::NotMaster { address, length });
        assert_eq!(refusals.by_cause().count(), DmaFault::CAUSES.len());
        let counted: Vec<_> = refusals.by_cause().filter(|(_, count)| *count > 0).collect();
        assert_eq!(counted, [("bus mastering is off", 2), ("truncated", 1)]);
        assert_eq!(refusals.get().0, 3);
        let burst = refusals.burst().unwrap();
        assert_eq!(burst.last, DmaFault::NotMaster { address, length });
        assert_eq!(refusals.get().1, Some(burst.last));
    }

    #[test]
    fn a_burst_ends_with_a_second_without_refusals() {
        let begun = Instant::now();
        let after = |ms| begun + Duration::from_millis(ms);
        let steps = [(0, 1, 1), (900, 2, 1), (1800, 3, 1), (2800, 4, 4), (2800, 5, 4)];
        let mut burst = None;
        for (ms, fault, first) in steps {
            let now = RefusalBurst::with(burst, fault, after(ms));
            assert_eq!((now.first, now.last), (first, fault), "after {ms} ms");
            burst = Some(now);
        }
    }
}
