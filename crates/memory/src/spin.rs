//! How long to poll before going to sleep: long enough to catch the next request of a busy peer,
//! short enough that an idle one costs nothing.
//!
//! A wake-up across cores costs tens of microseconds, a polled cache line a fraction of one. The
//! rule is that of halt polling in KVM: what counts is how long the wait was, not whether this spin
//! was long enough for it. A wait that a spin within the bounds would have caught doubles the next
//! one, a longer wait halves it. Were an unsuccessful spin to halve the next one by itself, two sides that
//! answer each other and both slept once would sleep for ever: each waits for as long as the other
//! takes to wake up, which is more than a short spin.

use std::time::{Duration, Instant};

/// The spinning time, adapted to what the last spins found. Pure: the caller has the clock.
#[derive(Debug, Clone)]
pub struct AdaptiveSpin {
    current_ns: u64,
    min_ns: u64,
    max_ns: u64,
}

impl AdaptiveSpin {
    /// Between `min_ns` and `max_ns`, beginning in between.
    pub fn new(min_ns: u64, max_ns: u64) -> Self {
        let max_ns = max_ns.max(min_ns);
        AdaptiveSpin { current_ns: (max_ns / 2).max(min_ns), min_ns, max_ns }
    }

    /// The default one, that was at `budget_ns` when it was left: for several threads that spin for
    /// the same thing and keep no more than that number in common.
    pub fn resumed(budget_ns: u64) -> Self {
        let spin = AdaptiveSpin::default();
        AdaptiveSpin { current_ns: budget_ns.clamp(spin.min_ns, spin.max_ns), ..spin }
    }

    /// How long to spin now, in nanoseconds.
    pub fn budget_ns(&self) -> u64 {
        self.current_ns
    }

    /// The longest that it may ever be: what waits longer is better asleep.
    pub fn longest_ns(&self) -> u64 {
        self.max_ns
    }

    pub(crate) fn budget(&self) -> Duration {
        Duration::from_nanos(self.current_ns)
    }

    /// Work came while spinning.
    pub fn found(&mut self) {
        self.current_ns = self.current_ns.saturating_mul(2).max(STEP_NS).min(self.max_ns);
    }

    /// Work came after `waited_ns` in all, an unsuccessful spin before it included.
    pub fn waited(&mut self, waited_ns: u64) {
        if waited_ns <= self.max_ns {
            self.found();
        } else {
            self.current_ns = (self.current_ns / 2).max(self.min_ns);
        }
    }
}

/// The shortest spin but none.
const STEP_NS: u64 = 1_000;

/// As a number that spins are given in.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Looks between two looks at the clock, which costs as much as several of them with their pauses.
const LOOKS_PER_CLOCK: u32 = 16;

/// After this long a spin lets others have the processor between its looks: what it waits for may
/// have to run there.
const ALONE: Duration = Duration::from_micros(4);

/// A yield that took longer let somebody else run.
const SWITCH: Duration = Duration::from_micros(1);

/// One spin, with the clock: `while spinning.goes_on() { look }`.
///
/// It pauses before each look, however short the wait. Looks without a pause keep fetching the line
/// from the processor that is about to write it: on an AMD EPYC a polled exchange took 1.4 times as
/// long as one of bare lines, and 1.1 to 1.2 times with pauses.
#[derive(Debug)]
pub struct Spinning {
    budget: Duration,
    /// Looks until the next one at the clock.
    left: u32,
    begun: Option<Instant>,
    /// Somebody else had the processor when it was offered last.
    shared: bool,
}

impl Spinning {
    /// One of `budget` from the first look on; none at all when that is zero.
    pub fn new(budget: Duration) -> Spinning {
        // The clock is for spins that last: an answer that is there soon comes before it.
        let left = if budget.is_zero() { 0 } else { LOOKS_PER_CLOCK };
        Spinning { budget, left, begun: None, shared: false }
    }

    /// One that goes on for ever: what is waited for never rings.
    pub fn endless() -> Spinning {
        Spinning::new(Duration::MAX)
    }

    /// Begins anew for the next wait. Where somebody else wanted the processor in the one before, it is offered from the
    /// first look on.
    pub fn restart(&mut self) {
        *self = Spinning { shared: self.shared, ..Spinning::new(self.budget) };
        if self.shared {
            self.left = self.left.min(1);
        }
    }

    /// Whether to look once more.
    #[inline]
    pub fn goes_on(&mut self) -> bool {
        if self.left == 0 && !self.has_time_left() {
            return false;
        }
        self.left -= 1;
        std::hint::spin_loop();
        true
    }

    /// Looks at the clock.
    fn has_time_left(&mut self) -> bool {
        let now = Instant::now();
        let spun = now - *self.begun.get_or_insert(now);
        if spun >= self.budget {
            return false;
        }
        if self.shared || spun > ALONE {
            std::thread::yield_now();
            self.shared = now.elapsed() > SWITCH;
        }
        self.left = if self.shared { 1 } else { LOOKS_PER_CLOCK };
        true
    }
}

impl Default for AdaptiveSpin {
    /// 5 µs to 100 µs: from a few cache-line round trips to about twice what a wake-up costs.
    fn default() -> Self {
        AdaptiveSpin::new(5_000, 100_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn stays_within_its_bounds(
            min in 0u64..1000, span in 0u64..100_000,
            waits in prop::collection::vec(prop::option::of(0u64..300_000), 0..64),
        ) {
            let mut spin = AdaptiveSpin::new(min, min + span);
            for wait in waits {
                match wait {
                    None => spin.found(),
                    Some(ns) => spin.waited(ns),
                }
                prop_assert!((min..=min + span).contains(&spin.budget_ns()));
            }
        }

        /// Two sides answer each other and both slept: they find out of it when a wake-up there
        /// and one back take no longer than the longest spin.
        #[test]
        fn two_sides_that_answer_each_other_stop_sleeping(
            wake_up in 1_000u64..45_000, work in 50u64..4_000,
            first in 0u64..100_000, second in 0u64..100_000,
        ) {
            let mut sides = [AdaptiveSpin::resumed(first), AdaptiveSpin::resumed(second)];
            // Since when the one waits that is answered next.
            let (mut now, mut since, mut slept) = (0, 0, 0);
            for turn in 0..40 {
                let spin = &mut sides[turn % 2];
                let asleep = now - since > spin.budget_ns();
                if asleep {
                    now += wake_up;
                    slept = turn;
                    spin.waited(now - since);
                } else {
                    spin.found();
                }
                // It works, answers and waits; the other one has waited since its own answer.
                since = now;
                now += work;
            }
            prop_assert!(slept < 20, "still asleep in turn {slept}");
        }
    }

    /// Where somebody else wanted the processor in one wait, the next one offers it at its second look, and not after
    /// microseconds; of nobody else nothing is left to the next wait.
    #[test]
    fn a_wait_begins_as_the_one_before_ended() {
        for shared in [true, false] {
            let mut spinning = Spinning::endless();
            spinning.shared = shared;
            spinning.restart();
            assert!(spinning.goes_on());
            assert_eq!(spinning.left == 0, shared);
            assert!(spinning.begun.is_none() && spinning.goes_on());
        }
        let mut none = Spinning { shared: true, ..Spinning::new(Duration::ZERO) };
        none.restart();
        assert!(!none.goes_on());
    }

    #[test]
    fn adapts_both_ways() {
        let mut spin = AdaptiveSpin::new(1, 100_000);
        for _ in 0..12 {
            spin.found();
        }
        assert_eq!(spin.budget_ns(), 100_000);
        for _ in 0..20 {
            spin.waited(100_001);
        }
        assert_eq!(spin.budget_ns(), 1);
        spin.waited(100_000);
        assert_eq!(spin.budget_ns(), STEP_NS);
    }
}
