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
    last: Mutex<Option<DmaFault>>,
}

impl Refusals {
    /// How many there were, and the last of them.
    pub fn get(&self) -> (u64, Option<DmaFault>) {
        let last = *self.0.last.lock().unwrap_or_else(PoisonError::into_inner);
        (self.0.count.load(Ordering::Relaxed), last)
    }

    pub(crate) fn note(&self, fault: DmaFault) {
        self.0.count.fetch_add(1, Ordering::Relaxed);
        // Somebody reads: the fault before is as good, and nobody waits here.
        if let Ok(mut last) = self.0.last.try_lock() {
            *last = Some(fault);
        }
    }
}
