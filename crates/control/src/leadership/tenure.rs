//! A leadership as those see it who act by it: until when, in which term, fenced by which revision.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rackbus_lease::Millis;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::watch;

use super::core::Won;
use crate::etcd::Revision;

/// Reads the clock that a tenure is measured by, which never goes back.
pub type TenureClock = Arc<dyn Fn() -> Millis + Send + Sync>;

/// This machine's clock, which goes on while it sleeps.
pub fn machine_clock() -> TenureClock {
    Arc::new(now)
}

/// Milliseconds since this machine was started, asleep or not.
pub(super) fn now() -> Millis {
    let time = clock_gettime(ClockId::Boottime);
    let (seconds, nanoseconds) = (time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs());
    seconds * 1000 + nanoseconds / 1_000_000
}

/// A leadership that was won. Over when its time is, or when [ended](Tenure::end), for ever then.
pub struct Tenure {
    /// The revision that made the leader's key.
    pub revision: Revision,
    term: AtomicU64,
    until: AtomicU64,
    over: watch::Sender<bool>,
    clock: TenureClock,
}

impl std::fmt::Debug for Tenure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tenure")
            .field("term", &self.term)
            .field("revision", &self.revision)
            .finish()
    }
}

impl Tenure {
    /// The leadership that was won, until then by this clock.
    pub fn new(won: Won, until: Millis, clock: TenureClock) -> Tenure {
        let (term, until) = (AtomicU64::new(won.term), AtomicU64::new(until));
        Tenure { revision: won.revision, term, until, over: watch::Sender::new(false), clock }
    }

    /// The term. It grows where nodes know of a later one: the records were an older copy.
    pub fn term(&self) -> u64 {
        self.term.load(Ordering::Acquire)
    }

    /// The term was raised in the store.
    pub fn set_term(&self, term: u64) {
        self.term.fetch_max(term, Ordering::AcqRel);
    }

    /// Whether whoever acts by it must not any more.
    pub fn is_over(&self) -> bool {
        *self.over.borrow() || (self.clock)() >= self.until.load(Ordering::Acquire)
    }

    /// It was renewed; what is over stays so.
    pub fn extend(&self, until: Millis) {
        match self.is_over() {
            true => self.end(),
            false => drop(self.until.fetch_max(until, Ordering::AcqRel)),
        }
    }

    /// Ends the tenure now: nothing is committed or answered in it any more.
    pub fn end(&self) {
        self.over.send_replace(true);
    }

    /// Waits until it is ended, or its time is over without a renewal.
    pub async fn ended(&self) {
        let mut over = self.over.subscribe();
        loop {
            let left = self.until.load(Ordering::Acquire).saturating_sub((self.clock)());
            if left == 0 || *over.borrow_and_update() {
                return;
            }
            let time = Duration::from_millis(left);
            drop(tokio::time::timeout(time, over.changed()).await);
        }
    }
}
