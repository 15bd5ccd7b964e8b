//! The time that decisions are made at.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Milliseconds since 1970 that never go back while the process runs.
#[derive(Debug)]
pub(super) struct WallClock {
    pub(super) begun: Instant,
    pub(super) offset: u64,
}

impl WallClock {
    pub(super) fn new() -> Self {
        let offset = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        WallClock { begun: Instant::now(), offset: millis(offset) }
    }

    pub(super) fn now(&self) -> u64 {
        self.offset.saturating_add(millis(self.begun.elapsed()))
    }
}

pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
