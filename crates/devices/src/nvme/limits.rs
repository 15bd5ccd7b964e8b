//! What a drive's user may do in a second (pure): bytes and operations, each a token bucket.
//!
//! The rates hold over any time, to within the burst and one command ([`OperationMeter`], which the timing model asks, too),
//! also over resets and users: who opens the drive again and again gets no burst each time.
//! What holds back data holds back nothing of the administration.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rackbus_qos::{OperationMeter, RateLimit};

use super::identify::MAX_TRANSFER;

/// A bucket holds what comes in this part of a second.
const BURST: u64 = 20;

/// Bounds on a drive's operations. None where there is no number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Bytes moved each second. Zeroing counts as one longest transfer at most, deallocating as nothing.
    pub bytes: Option<u64>,
    /// Commands of I/O queues each second.
    pub operations: Option<u64>,
}

impl Limits {
    /// The buckets of bytes and of operations that keep to them.
    pub fn buckets(self) -> [Option<RateLimit>; 2] {
        let limit = |rate: u64| RateLimit { rate, burst: rate / BURST };
        [self.bytes.map(limit), self.operations.map(limit)]
    }
}

/// The least that a limit may be. What a front elsewhere has asked for ends in time then, and nobody takes
/// its drive for lost: some ten longest transfers a second, and some hundred operations.
pub const LEAST: Limits = Limits { bytes: Some(10_000_000), operations: Some(100) };

/// Counts how often work of a drive's users had to wait because of limits.
#[derive(Debug, Clone, Default)]
pub struct LimitDelays(Arc<AtomicU64>);

/// Whom it counts for makes no drive another one.
impl PartialEq for LimitDelays {
    fn eq(&self, _other: &LimitDelays) -> bool {
        true
    }
}

impl Eq for LimitDelays {}

impl LimitDelays {
    /// How often work was there and had to wait.
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Counts operations and bytes against [`Limits`], and says when the next may begin.
#[derive(Debug, Default)]
pub struct Meter {
    limits: OperationMeter,
    delays: LimitDelays,
    /// Work is waiting, and was counted.
    delaying: bool,
}

impl Meter {
    /// With full buckets; what has to wait is counted in `delays`.
    pub fn new(limits: Limits, delays: LimitDelays) -> Meter {
        let [bytes, operations] = limits.buckets();
        Meter { limits: OperationMeter::full(bytes, operations), delays, delaying: false }
    }

    /// Whether something may be taken now.
    #[inline]
    pub fn is_ready(&mut self, now_ns: u64) -> bool {
        if self.limits.is_unlimited() {
            return true;
        }
        let ready = self.limits.is_ready(now_ns);
        self.delaying &= !ready;
        ready
    }

    /// Something about `bytes` bytes was taken. It counts for no more than the longest transfer: zeroing
    /// moves no data, and a command must not keep its user out for long.
    #[inline]
    pub fn spend(&mut self, bytes: u64) {
        self.limits.spend(bytes.min(MAX_TRANSFER), 1);
    }

    /// Work is there and nothing may be taken; returns when something may be.
    pub fn delay(&mut self) -> u64 {
        if !std::mem::replace(&mut self.delaying, true) {
            self.delays.0.fetch_add(1, Ordering::Relaxed);
        }
        self.limits.ready_at()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    proptest! {
        /// Who always has work gets no more than either limit, a burst and one command, and no less than the
        /// one that binds.
        #[test]
        fn both_limits_hold_and_one_of_them_is_used_up(
            bytes in 1_000_000u64..1_000_000_000,
            operations in 100u64..1_000_000,
            sizes in prop::collection::vec(0u64..1 << 20, 1..8),
        ) {
            let limits = Limits { bytes: Some(bytes), operations: Some(operations) };
            let mut meter = Meter::new(limits, LimitDelays::default());
            let (mut now, mut moved, mut taken) = (0, 0u64, 0u64);
            while now < SECOND && taken < 100_000 {
                if meter.is_ready(now) {
                    let size = sizes[taken as usize % sizes.len()];
                    meter.spend(size);
                    moved += size;
                    taken += 1;
                } else {
                    let next = meter.delay();
                    prop_assert!(next > now, "it is not ready and will not be later");
                    now = next;
                }
            }
            let came = |rate: u64| (u128::from(rate) * u128::from(now) / u128::from(SECOND)) as u64;
            prop_assert!(moved <= came(bytes) + bytes / BURST + (1 << 20) + 1);
            prop_assert!(taken <= came(operations) + operations / BURST + 2);
            let used = moved + 1 >= came(bytes) || taken + 1 >= came(operations);
            prop_assert!(used || taken == 100_000, "{moved} and {taken} in {now} ns");
        }
    }

    #[test]
    fn without_limits_nothing_waits() {
        let mut meter = Meter::new(Limits::default(), LimitDelays::default());
        meter.spend(u64::MAX);
        assert!(meter.is_ready(0));
    }

    #[test]
    fn a_wait_is_counted_once_however_often_it_is_looked_at() {
        let delays = LimitDelays::default();
        let limits = Limits { bytes: None, operations: Some(10) };
        let mut meter = Meter::new(limits, delays.clone());
        for _ in 0..2 {
            let now = meter.delay();
            assert!(meter.is_ready(now));
            meter.spend(0);
            assert!(!meter.is_ready(now));
            let next = meter.delay();
            assert_eq!(meter.delay(), next);
            assert!(meter.is_ready(next));
        }
        assert_eq!(delays.count(), 4);
    }
}
