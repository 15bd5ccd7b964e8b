//! What a network function counts beside its operations; its lender shows it.

use std::sync::atomic::{AtomicU64, Ordering};

/// What is counted beside operations.
#[derive(Debug, Default)]
pub struct NicCounters {
    /// Frames that a driver did not want.
    pub filtered: AtomicU64,
    /// Frames that did not fit into the buffers that their driver has.
    pub too_large: AtomicU64,
    /// Frames whose driver made no buffers available for too long.
    pub no_buffers: AtomicU64,
    /// Frames for a queue that there is not.
    pub no_queue: AtomicU64,
    /// Frames that could not be cut for a driver that takes none so large.
    pub not_cut: AtomicU64,
    /// Frames that were dropped by the network, or on the way to it.
    pub not_sent: AtomicU64,
    /// Times that a direction waited for its rate.
    pub throttled: AtomicU64,
    /// Times that a driver broke its device.
    pub faults: AtomicU64,
}

/// One more. Only one thread adds to each.
pub(super) fn count(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}
