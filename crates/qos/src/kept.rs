//! How far a tenant got the minimum that it was promised, second by second.
//!
//! A minimum is owed for the time in which the tenant has work waiting and is not held back by bounds of its own.
//! In each window what was owed is compared with what was done, in the unit that was bought, or in engine time where
//! the tenant's messages are dearer than those that it was bought for: then it gets the time that these take. What is
//! more in one window makes up for nothing in another.

use serde::{Deserialize, Serialize};

use crate::SECOND;

/// What is compared: so many nanoseconds at a time.
pub const WINDOW_NS: u64 = SECOND;
/// Whoever waited for less of a window than this says nothing about it.
const LEAST_WAIT_NS: u64 = WINDOW_NS / 10;
/// Hundredths of what is owed that are enough: a window ends between two turns.
const ENOUGH: u128 = 99;

/// How far a tenant got its minimum. All of it only grows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MinimumRecord {
    /// Nanoseconds in which it had work waiting and was not held back by its own bounds.
    pub waited_ns: u64,
    /// Seconds that were compared: it had work waiting for a tenth of each at least.
    pub windows: u64,
    /// What its minimum was for the time that it waited in these, in the unit that was bought.
    pub promised: u64,
    /// What it got of that.
    pub delivered: u64,
    /// Seconds in which it got less than 99 % of its minimum, and one message.
    pub violations: u64,
}

/// What a minimum is, each second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Promise {
    /// Units that were bought.
    pub units: u64,
    /// Nanoseconds of engine time.
    pub engine_ns: u64,
    /// Units of one message.
    pub one: u64,
}

/// Keeps count for one tenant.
#[derive(Debug)]
pub(crate) struct Keeping {
    promise: Option<Promise>,
    window_at: u64,
    /// Until when it was counted.
    seen: u64,
    waits: bool,
    /// It is held back by its own bounds until then.
    held_until: u64,
    /// In this window; what is owed in parts of a billion.
    waited_ns: u64,
    owed_units: u128,
    owed_ns: u128,
    units: u64,
    engine_ns: u64,
    total: MinimumRecord,
}

impl Keeping {
    pub(crate) fn new(promise: Option<Promise>, now: u64) -> Keeping {
        Keeping {
            promise,
            window_at: now,
            seen: now,
            waits: false,
            held_until: 0,
            waited_ns: 0,
            owed_units: 0,
            owed_ns: 0,
            units: 0,
            engine_ns: 0,
            total: MinimumRecord::default(),
        }
    }

    /// Goes on from what was counted before.
    pub(crate) fn go_on(&mut self, total: MinimumRecord) {
        self.total = total;
    }

    /// Another minimum from now on.
    pub(crate) fn promise(&mut self, promise: Option<Promise>, now: u64) {
        self.advance(now);
        (self.promise, self.held_until) = (promise, 0);
    }

    /// Whether it has work waiting from now on.
    pub(crate) fn wait(&mut self, waits: bool, now: u64) {
        if self.waits != waits {
            self.advance(now);
            self.waits = waits;
        }
    }

    /// Bounds of its own hold it back until then.
    pub(crate) fn hold(&mut self, until: u64, now: u64) {
        self.advance(now);
        self.held_until = until;
    }

    /// So much was done for it.
    pub(crate) fn got(&mut self, units: u64, engine_ns: u64, now: u64) {
        self.advance(now);
        self.units = self.units.saturating_add(units);
        self.engine_ns = self.engine_ns.saturating_add(engine_ns);
    }

    /// All windows that have ended.
    pub(crate) fn total(&mut self, now: u64) -> MinimumRecord {
        self.advance(now);
        self.total
    }

    fn advance(&mut self, now: u64) {
        while now.saturating_sub(self.window_at) >= WINDOW_NS {
            let end = self.window_at + WINDOW_NS;
            self.pass(end);
            self.close();
            // Where nothing is owed, nothing is to be compared.
            let skipped = if self.waits { 0 } else { (now - end) / WINDOW_NS * WINDOW_NS };
            (self.window_at, self.seen) = (end + skipped, end + skipped);
        }
        self.pass(now);
    }

    fn pass(&mut self, until: u64) {
        let from = self.seen.max(self.held_until.min(until));
        let waited = if self.waits { until.saturating_sub(from) } else { 0 };
        self.waited_ns += waited;
        if let Some(Promise { units, engine_ns, .. }) = self.promise {
            self.owed_units += u128::from(units) * u128::from(waited);
            self.owed_ns += u128::from(engine_ns) * u128::from(waited);
        }
        self.seen = self.seen.max(until);
    }

    fn close(&mut self) {
        let second = u128::from(SECOND);
        let owed = self.owed_units / second;
        self.total.waited_ns = self.total.waited_ns.saturating_add(self.waited_ns);
        if self.waited_ns >= LEAST_WAIT_NS && owed > 0 {
            let by_time = owed * u128::from(self.engine_ns) * second / self.owed_ns.max(1);
            let got = by_time.max(u128::from(self.units));
            let one = u128::from(self.promise.map_or(0, |promise| promise.one));
            self.total.windows += 1;
            self.total.violations += u64::from((got + one) * 100 < owed * ENOUGH);
            let add = |to: &mut u64, more: u128| {
                *to = to.saturating_add(u64::try_from(more).unwrap_or(u64::MAX));
            };
            add(&mut self.total.promised, owed);
            add(&mut self.total.delivered, got.min(owed));
        }
        (self.waited_ns, self.owed_units, self.owed_ns) = (0, 0, 0);
        (self.units, self.engine_ns) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PROMISE: Promise = Promise { units: 1000, engine_ns: SECOND / 2, one: 1 };

    fn keeping() -> Keeping {
        let mut keeping = Keeping::new(Some(PROMISE), 0);
        keeping.wait(true, 0);
        keeping
    }

    #[test]
    fn a_second_with_less_than_the_minimum_is_a_violation_and_more_in_the_next_does_not_mend_it() {
        let mut keeping = keeping();
        keeping.got(900, 0, SECOND / 2);
        keeping.got(1200, 0, 3 * SECOND / 2);
        keeping.got(989, 0, 5 * SECOND / 2);
        let kept = keeping.total(3 * SECOND);
        assert_eq!((kept.windows, kept.violations, kept.waited_ns), (3, 1, 3 * SECOND));
        assert_eq!((kept.promised, kept.delivered), (3000, 900 + 1000 + 989));
    }

    #[test]
    fn tenants_that_do_not_wait_or_reach_their_own_limit_are_owed_nothing() {
        let mut keeping = keeping();
        keeping.wait(false, SECOND / 20);
        assert_eq!(
            keeping.total(100 * SECOND),
            MinimumRecord { waited_ns: SECOND / 20, ..MinimumRecord::default() }
        );
        keeping.wait(true, 100 * SECOND);
        keeping.hold(100 * SECOND + SECOND / 2, 100 * SECOND);
        keeping.got(500, 0, 101 * SECOND - 1);
        let kept = keeping.total(101 * SECOND);
        assert_eq!((kept.windows, kept.violations), (1, 0));
        assert_eq!((kept.promised, kept.delivered), (500, 500));
    }

    #[test]
    fn dear_messages_are_owed_the_time_of_those_that_were_bought() {
        let mut keeping = keeping();
        keeping.got(10, SECOND / 2, SECOND / 2);
        keeping.got(10, SECOND / 4, 3 * SECOND / 2);
        let kept = keeping.total(2 * SECOND);
        assert_eq!((kept.violations, kept.promised, kept.delivered), (1, 2000, 1500));
    }

    #[test]
    fn a_change_of_the_minimum_counts_from_then_on() {
        let mut keeping = keeping();
        let less = Promise { units: 100, engine_ns: SECOND / 20, one: 1 };
        keeping.promise(Some(less), SECOND / 2);
        keeping.got(550, 0, SECOND - 1);
        let kept = keeping.total(SECOND);
        assert_eq!((kept.promised, kept.delivered, kept.violations), (550, 550, 0));
        keeping.promise(None, SECOND);
        assert_eq!(keeping.total(5 * SECOND).windows, 1);
    }

    proptest! {
        /// Whatever happens: no more is delivered than was promised, and a tenant that always gets its minimum is
        /// never violated.
        #[test]
        fn counts_agree(deeds in prop::collection::vec((0u64..400_000_000, 0u64..2000, 0u8..4), 1..60)) {
            let (mut keeping, mut served) = (keeping(), keeping());
            let mut now = 0;
            for (passed, units, deed) in deeds {
                // The served one gets each millisecond what is due.
                for _ in 0..passed / 1_000_000 {
                    now += 1_000_000;
                    served.got(1, 0, now);
                }
                match deed {
                    0 => keeping.wait(units % 2 == 0, now),
                    1 => keeping.hold(now + units * 100_000, now),
                    _ => keeping.got(units, 0, now),
                }
                let kept = keeping.total(now);
                prop_assert!(kept.delivered <= kept.promised && kept.violations <= kept.windows);
                prop_assert!(kept.waited_ns <= now);
            }
            prop_assert_eq!(served.total(now).violations, 0);
        }
    }
}
