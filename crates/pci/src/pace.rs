//! When an engine polls, spins and sleeps (pure).
//!
//! While there is work the engine polls. When there is none it spins for a while
//! ([`AdaptiveSpin`]), and sleeps after a spin in vain. The clock is looked at once in some polls:
//! a look costs as much as a poll that finds nothing.

use rackbus_memory::AdaptiveSpin;

use crate::function::Work;

/// Polls between two looks at the clock.
const POLLS_PER_CLOCK: u32 = 16;

/// What an engine does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Polls.
    Poll,
    /// Sleeps until something rings, or until this time.
    Sleep(Option<u64>),
}

/// The pace of one engine.
#[derive(Debug)]
pub struct Pace {
    spin: AdaptiveSpin,
    now_ns: u64,
    /// When the current spin began; `None` while there is work.
    idle_since: Option<u64>,
    polls: u32,
}

impl Pace {
    /// Begins at `now_ns`.
    pub fn new(spin: AdaptiveSpin, now_ns: u64) -> Pace {
        Pace { spin, now_ns, idle_since: None, polls: 0 }
    }

    /// The time to poll with, a few polls old.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Something happened outside of polls, or a sleep ended, at `now_ns`.
    pub fn disturbed(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        self.idle_since = None;
    }

    /// What follows a poll that found `work`.
    #[inline]
    pub fn after(&mut self, work: Work, clock: impl FnOnce() -> u64) -> Next {
        match work {
            Work::Done => {
                if self.idle_since.take().is_some() {
                    self.spin.found();
                }
                self.polls = self.polls.wrapping_add(1);
                if self.polls.is_multiple_of(POLLS_PER_CLOCK) {
                    self.now_ns = clock();
                }
                Next::Poll
            }
            Work::Idle => {
                self.polls = self.polls.wrapping_add(1);
                if !self.polls.is_multiple_of(POLLS_PER_CLOCK) {
                    return Next::Poll;
                }
                self.now_ns = clock();
                let since = *self.idle_since.get_or_insert(self.now_ns);
                if self.now_ns.saturating_sub(since) < self.spin.budget_ns() {
                    return Next::Poll;
                }
                self.spin.in_vain();
                Next::Sleep(None)
            }
            Work::Asleep(deadline) => Next::Sleep(deadline),
        }
    }
}
