//! In what parts a front asks another node for a long range of zeroes.
//!
//! A question is answered when all of it is done, and a reset or an unmap waits for those under way. What a medium
//! takes for them differs by thousands: one gives space back at once, another writes each zero. So the parts grow while
//! their answers are quick, which keeps them few (each counts as an operation by the drive's limits), and shrink where
//! they are slow.

use std::time::Duration;

/// Questions for zeroes that are under way at a time: more would be done in turn, and their answers come later.
pub const AT_ONCE: usize = 4;

/// Bytes of the first part of each kind.
pub const FIRST: u64 = 64 << 20;
const LEAST: u64 = 1 << 20;
/// Zeroes that have to be kept may be written one by one however quick the last ones were.
const MOST_ZEROED: u64 = 64 << 20;
const MOST_DEALLOCATED: u64 = 4 << 30;

/// An answer within this lets the next part be twice as long; that one is then answered well within [`SLOW`].
const QUICK: Duration = Duration::from_millis(250);
/// An answer after this makes the next part a quarter as long.
const SLOW: Duration = Duration::from_secs(1);

/// The lengths of the next parts.
#[derive(Debug)]
pub struct ZeroParts {
    zeroed: u64,
    deallocated: u64,
}

impl Default for ZeroParts {
    fn default() -> ZeroParts {
        ZeroParts { zeroed: FIRST, deallocated: FIRST }
    }
}

impl ZeroParts {
    /// Most bytes of the next part; of a range whose space may be given back when `deallocate`.
    pub fn most(&self, deallocate: bool) -> u64 {
        if deallocate { self.deallocated } else { self.zeroed }
    }

    /// A part of `length` bytes was answered after `took`.
    pub fn answered(&mut self, deallocate: bool, length: u64, took: Duration) {
        let (part, most) = match deallocate {
            true => (&mut self.deallocated, MOST_DEALLOCATED),
            false => (&mut self.zeroed, MOST_ZEROED),
        };
        if took > SLOW && length > LEAST {
            *part = (length / 4).next_power_of_two().clamp(LEAST, *part);
        } else if took < QUICK && length >= *part {
            *part = (*part * 2).min(most);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Seconds that a reset waits at most for one answer of a medium that writes at this rate, once its first parts
    /// were answered.
    fn wait_for(rate: f64, deallocate: bool) -> f64 {
        let mut parts = ZeroParts::default();
        for _ in 0..32 {
            let length = parts.most(deallocate);
            // Those at once are done in turn.
            let took = AT_ONCE as f64 * length as f64 / rate;
            parts.answered(deallocate, length, Duration::from_secs_f64(took));
        }
        AT_ONCE as f64 * parts.most(deallocate) as f64 / rate
    }

    proptest! {
        #[test]
        fn no_medium_keeps_a_reset_waiting_for_long(rate in 4e6f64..1e12, deallocate: bool) {
            prop_assert!(wait_for(rate, deallocate) <= 2.0);
        }

        #[test]
        fn parts_are_multiples_of_any_block(
            answers in prop::collection::vec((any::<bool>(), 0u64..1 << 33, 0u64..2_000), 0..64),
        ) {
            let mut parts = ZeroParts::default();
            for (deallocate, length, took) in answers {
                parts.answered(deallocate, length, Duration::from_millis(took));
                for deallocate in [false, true] {
                    let most = parts.most(deallocate);
                    prop_assert!((LEAST..=MOST_DEALLOCATED).contains(&most));
                    prop_assert!(most.is_multiple_of(LEAST));
                }
            }
        }
    }

    #[test]
    fn a_drive_that_gives_space_back_at_once_is_asked_seldom() {
        let (mut parts, mut questions, mut left) = (ZeroParts::default(), 0, 1u64 << 40);
        while left > 0 {
            let length = parts.most(true).min(left);
            parts.answered(true, length, Duration::from_millis(1));
            (questions, left) = (questions + 1, left - length);
        }
        assert!(questions < 270, "{questions} questions for 1 TiB");
    }
}
