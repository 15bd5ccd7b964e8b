//! What is known of a lane, for other threads than its end's.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::exchange::lane::LaneError;

/// How it is with the lane beside a session's connections.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LaneStatus {
    /// The provider that moves its data, as its library names it: `verbs;ofi_rxm`.
    pub provider: String,
    /// Data move by it.
    pub up: bool,
    /// Why it is of no use.
    pub lost: Option<String>,
    /// How many times data have moved by it.
    pub moved: u64,
    /// Bytes of data that the lane has moved.
    pub bytes: u64,
    /// How many times data went by the connection although a lane was offered.
    pub fell_back: u64,
}

/// What an end notes of its lane, for other threads.
#[derive(Debug, Default)]
pub(super) struct LaneNote {
    state: Mutex<Option<LaneStatus>>,
    moved: AtomicU64,
    bytes: AtomicU64,
    pub(super) fell_back: AtomicU64,
}

impl LaneNote {
    pub(super) fn status(&self) -> Option<LaneStatus> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (moved, bytes) = (count(&self.moved), count(&self.bytes));
        Some(LaneStatus { moved, bytes, fell_back: count(&self.fell_back), ..state })
    }

    pub(super) fn begin(&self, provider: &str) {
        let status = LaneStatus { provider: provider.to_owned(), ..LaneStatus::default() };
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = Some(status);
    }

    pub(super) fn set(&self, up: bool, lost: Option<&LaneError>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(state) = state.as_mut() {
            (state.up, state.lost) = (up, lost.map(ToString::to_string));
        }
    }

    pub(super) fn count(&self, length: usize) {
        self.moved.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(length as u64, Ordering::Relaxed);
    }
}
