//! How long the user of a function that is taken back has to release it. The time may become shorter while the node
//! waits.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rackbus_lease::Millis;
use rackbus_vm::UNPLUG;

/// Until when the user of one lease is waited for: shared by who waits and who hears that there is less time.
#[derive(Debug, Clone)]
pub(crate) struct ReleaseLimit(Arc<Mutex<Until>>);

#[derive(Debug)]
struct Until {
    guest: Instant,
    program: Instant,
}

impl Until {
    /// `within` milliseconds for a guest from now, or [`UNPLUG`] where nobody said, and `grace` for a program.
    fn from_now(within: Option<Millis>, grace: Millis) -> Until {
        let now = Instant::now();
        // A day is longer than anybody may ask for; the sum of a greater time may overflow.
        let after = |time: Duration| now + time.min(Duration::from_secs(24 * 60 * 60));
        Until {
            guest: after(within.map_or(UNPLUG, Duration::from_millis)),
            program: after(Duration::from_millis(grace)),
        }
    }
}

impl ReleaseLimit {
    /// A guest has `within` milliseconds from now, or [`UNPLUG`] where nobody said; a program has `grace`.
    pub(crate) fn new(within: Option<Millis>, grace: Millis) -> Self {
        ReleaseLimit(Arc::new(Mutex::new(Until::from_now(within, grace))))
    }

    /// They have no more than that from now.
    pub(crate) fn hasten(&self, within: Option<Millis>, grace: Millis) {
        let (asked, mut until) = (Until::from_now(within, grace), self.lock());
        until.guest = until.guest.min(asked.guest);
        until.program = until.program.min(asked.program);
    }

    /// What a guest has left.
    pub(crate) fn guest(&self) -> Duration {
        self.lock().guest.saturating_duration_since(Instant::now())
    }

    /// What a program has left.
    pub(crate) fn program(&self) -> Duration {
        self.lock().program.saturating_duration_since(Instant::now())
    }

    fn lock(&self) -> MutexGuard<'_, Until> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_becomes_shorter_and_never_longer() {
        let limit = ReleaseLimit::new(Some(3_600_000), 60_000);
        assert!(limit.guest() > Duration::from_secs(3000) && limit.program() > UNPLUG);
        limit.hasten(Some(7_200_000), 120_000);
        assert!(limit.guest() <= Duration::from_secs(3600), "not longer");
        assert!(limit.program() <= Duration::from_secs(60), "not longer");
        limit.hasten(None, 0);
        assert!(limit.guest() <= UNPLUG, "a function that nobody lends any more");
        assert_eq!(limit.program(), Duration::ZERO);
        limit.hasten(Some(0), 60_000);
        assert_eq!(limit.guest(), Duration::ZERO);
    }
}
