//! A clock that stands still until it is moved on.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rackbus_pci::endpoint::Clock;

/// Where the time stands.
#[derive(Debug, Clone, Default)]
pub(crate) struct ManualClock(pub(crate) Arc<AtomicU64>);

impl Clock for ManualClock {
    fn now_ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn ticks(&self) -> u64 {
        self.now_ns()
    }
}
