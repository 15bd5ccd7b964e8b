//! Limits on operations and on the bytes that these move, each a token bucket.
//!
//! A bucket may be overdrawn by what is taken while it has a token, and then nothing is taken until the debt is
//! paid: so the rates hold over any time, to within the burst and one operation.

use crate::bucket::Bucket;
use crate::tenant::RateLimit;

/// What a limit counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Metered {
    /// Bytes that operations move.
    Bytes,
    /// Operations, however many bytes each moves.
    Operations,
}

/// Counts operations and their bytes against limits, and says when the next may be taken.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OperationMeter {
    bytes: Option<Bucket>,
    operations: Option<Bucket>,
}

impl OperationMeter {
    /// With full buckets, of limits that are none where there is `None`.
    pub fn full(bytes: Option<RateLimit>, operations: Option<RateLimit>) -> OperationMeter {
        let bucket = |limit: RateLimit| Bucket::full(limit.rate, limit.burst, 0);
        OperationMeter { bytes: bytes.map(bucket), operations: operations.map(bucket) }
    }

    /// Only one token of each bucket is left from then on; see [`Bucket::use_up`].
    pub fn use_up(&mut self, from: u64) {
        self.bytes.iter_mut().chain(&mut self.operations).for_each(|bucket| bucket.use_up(from));
    }

    /// Whether nothing is limited.
    #[inline]
    pub fn is_unlimited(&self) -> bool {
        self.bytes.is_none() && self.operations.is_none()
    }

    /// What may pass each second; `None` without such a limit.
    pub fn rate(&self, metered: Metered) -> Option<u64> {
        self.bucket(metered).map(Bucket::rate)
    }

    /// Whether something may be taken now.
    #[inline]
    pub fn is_ready(&mut self, now: u64) -> bool {
        self.bytes.iter_mut().chain(&mut self.operations).all(|bucket| bucket.ready(now))
    }

    /// Operations about so many bytes were taken.
    #[inline]
    pub fn spend(&mut self, bytes: u64, operations: u64) {
        if let Some(bucket) = &mut self.bytes {
            bucket.spend(bytes);
        }
        if let Some(bucket) = &mut self.operations {
            bucket.spend(operations);
        }
    }

    /// When something may be taken, if nothing else is: `u64::MAX` for never.
    pub fn ready_at(&self) -> u64 {
        self.bytes.iter().chain(&self.operations).map(Bucket::ready_at).max().unwrap_or(0)
    }

    /// The limit that is waited for longest.
    pub fn last_ready(&self) -> Metered {
        let at = |metered| self.bucket(metered).map(Bucket::ready_at);
        if at(Metered::Operations) > at(Metered::Bytes) {
            Metered::Operations
        } else {
            Metered::Bytes
        }
    }

    fn bucket(&self, metered: Metered) -> Option<&Bucket> {
        match metered {
            Metered::Bytes => self.bytes.as_ref(),
            Metered::Operations => self.operations.as_ref(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SECOND;

    fn limit(rate: u64, burst: u64) -> Option<RateLimit> {
        Some(RateLimit { rate, burst })
    }

    fn used_up(bytes: Option<RateLimit>, operations: Option<RateLimit>) -> OperationMeter {
        let mut meter = OperationMeter::full(bytes, operations);
        meter.use_up(0);
        meter
    }

    /// Operations of 100 bytes that are taken in a time, by somebody who always has more.
    fn taken(mut meter: OperationMeter, till: u64) -> u64 {
        let (mut now, mut count) = (0, 0);
        while now < till {
            match meter.is_ready(now) {
                true => {
                    meter.spend(100, 1);
                    count += 1;
                }
                false => now = meter.ready_at(),
            }
        }
        count
    }

    #[test]
    fn a_meter_that_is_used_up_gives_its_rates_from_the_beginning() {
        for (bytes, operations, expected) in [
            (limit(100_000, 5_000), limit(5_000, 250), 1_000),
            (limit(1_000_000, 5_000), limit(50, 2), 50),
        ] {
            assert!(taken(used_up(bytes, operations), SECOND).abs_diff(expected) <= 1);
            assert!(taken(OperationMeter::full(bytes, operations), SECOND) > expected);
        }
    }

    /// Nothing comes of the time before it was used up.
    #[test]
    fn a_meter_that_is_used_up_later_has_saved_nothing_by_then() {
        let mut meter = OperationMeter::full(limit(1_000, 100), None);
        meter.use_up(5 * SECOND);
        assert!(meter.is_ready(5 * SECOND));
        meter.spend(11, 1);
        assert_eq!(meter.ready_at(), 5 * SECOND + 11 * SECOND / 1_000);
    }

    /// What is not used comes back as burst.
    #[test]
    fn a_burst_that_was_used_up_fills_again() {
        let mut meter = used_up(limit(1_000, 100), None);
        assert!(meter.is_ready(SECOND));
        meter.spend(100, 1);
        assert!(!meter.is_ready(SECOND));
        assert_eq!(meter.ready_at(), SECOND + SECOND / 1_000);
    }

    #[test]
    fn the_limit_that_holds_up_is_told() {
        let mut meter = used_up(limit(1_000, 10), limit(10, 1));
        meter.spend(10, 1);
        assert_eq!(meter.last_ready(), Metered::Operations);
        meter.spend(10_000, 0);
        assert_eq!(meter.last_ready(), Metered::Bytes);
        assert_eq!(
            (meter.rate(Metered::Bytes), meter.rate(Metered::Operations)),
            (Some(1_000), Some(10))
        );
        let mut only = OperationMeter::full(None, limit(10, 1));
        only.spend(0, 5);
        assert_eq!((only.last_ready(), only.rate(Metered::Bytes)), (Metered::Operations, None));
        assert!(OperationMeter::default().is_unlimited() && OperationMeter::default().is_ready(0));
    }
}
