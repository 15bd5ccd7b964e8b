//! How much engine time something took: the processor's time of the thread that did it, so that what else ran meanwhile
//! is nobody's. That clock is a system call, which takes longer than a short operation; so most is measured by the
//! processor's counter, and the clock is asked where the counter says that a thread may have been kept from running.

use std::time::Instant;

use rackbus_memory::ticks;
use rustix::time::{ClockId, clock_gettime};

/// Shorter times than this are not looked into: to be kept from running takes longer.
const DOUBT_NS: u64 = 10_000;
/// The clock was asked this long before at most when something is measured, so that what a thread may be charged for
/// others is bounded by it.
const STALE_NS: u64 = 50_000;

/// Engine time that the calling thread used so far, in nanoseconds.
pub fn thread_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// How fast the processor's counter counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TickRate {
    /// Nanoseconds that 2^32 ticks take, one at least: whole numbers are multiplied sooner than others are rounded.
    ns: u64,
}

impl TickRate {
    /// The rate since `then`, a while ago.
    pub fn since((ticks, instant): (u64, Instant)) -> TickRate {
        let passed = ticks::now().saturating_sub(ticks).max(1);
        let ns = (instant.elapsed().as_nanos() << 32) / u128::from(passed);
        TickRate { ns: u64::try_from(ns).unwrap_or(u64::MAX).max(1) }
    }

    /// So many ticks in nanoseconds.
    pub fn ns(self, ticks: u64) -> u64 {
        ((u128::from(ticks) * u128::from(self.ns)) >> 32) as u64
    }

    /// So many nanoseconds in ticks.
    pub fn ticks(self, ns: u64) -> u64 {
        u64::try_from((u128::from(ns) << 32) / u128::from(self.ns)).unwrap_or(u64::MAX)
    }
}

/// Measures what a thread does. It belongs to one thread; on another one it may take a time once for shorter than it
/// was.
#[derive(Debug, Default)]
pub struct EngineClock {
    /// What the thread's clock said, and the counter then.
    asked: Option<(u64, u64)>,
}

impl EngineClock {
    /// Something begins that is measured; the counter.
    pub fn begin(&mut self, rate: TickRate) -> u64 {
        let now = ticks::now();
        let asked = self.asked.filter(|(_, at)| rate.ns(now.wrapping_sub(*at)) < STALE_NS);
        if asked.is_none() {
            self.asked = Some((thread_ns(), now));
        }
        now
    }

    /// It has taken so long by the counter, and ends now: how long it took at most, in nanoseconds.
    pub fn end(&mut self, counted_ns: u64) -> u64 {
        let Some((asked, _)) = self.asked.filter(|_| counted_ns >= DOUBT_NS) else {
            return counted_ns;
        };
        let now = thread_ns();
        self.asked = Some((now, ticks::now()));
        // Of another thread, the clock says nothing.
        now.checked_sub(asked).map_or(counted_ns, |used| used.min(counted_ns))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_a_thread_did_is_measured_and_what_it_slept_is_not() {
        let then = (ticks::now(), Instant::now());
        std::thread::sleep(Duration::from_millis(2));
        let rate = TickRate::since(then);
        assert!(rate.ns(rate.ticks(1_000_000)).abs_diff(1_000_000) < 1000);
        let mut clock = EngineClock::default();
        let begun = clock.begin(rate);
        let before = thread_ns();
        while thread_ns() - before < 200_000 {}
        let used = clock.end(rate.ns(ticks::now() - begun));
        assert!((200_000..20_000_000).contains(&used), "{used}");
        let begun = clock.begin(rate);
        std::thread::sleep(Duration::from_millis(20));
        let counted = rate.ns(ticks::now() - begun);
        let used = clock.end(counted);
        assert!(counted >= 20_000_000 && used < counted / 2, "{used} of {counted}");
        // What is short is taken as it was counted.
        clock.begin(rate);
        assert_eq!(clock.end(DOUBT_NS - 1), DOUBT_NS - 1);
    }
}
