//! What was refused to a function: counted by its thread, read by anybody.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::space::DmaFault;

/// The accesses that were refused to one function; cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Refusals(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    count: AtomicU64,
    by_cause: [AtomicU64; DmaFault::CAUSES.len()],
    last: Mutex<Option<DmaFault>>,
}

impl Refusals {
    /// How many there were, and the last of them.
    pub fn get(&self) -> (u64, Option<DmaFault>) {
        let last = *self.0.last.lock().unwrap_or_else(PoisonError::into_inner);
        (self.0.count.load(Ordering::Relaxed), last)
    }

    /// How many there were of each cause that there were any of.
    pub fn by_cause(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let counts = self.0.by_cause.iter().map(|count| count.load(Ordering::Relaxed));
        DmaFault::CAUSES.into_iter().zip(counts).filter(|(_, count)| *count > 0)
    }

    pub(crate) fn note(&self, fault: DmaFault) {
        self.0.count.fetch_add(1, Ordering::Relaxed);
        self.0.by_cause[fault.cause()].fetch_add(1, Ordering::Relaxed);
        // Somebody reads: the fault before is as good, and nobody waits here.
        if let Ok(mut last) = self.0.last.try_lock() {
            *last = Some(fault);
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
        let counted: Vec<_> = refusals.by_cause().collect();
        assert_eq!(counted, [("bus mastering is off", 2), ("truncated", 1)]);
        assert_eq!(refusals.get().0, 3);
    }
}
