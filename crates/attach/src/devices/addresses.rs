//! Which of the addresses that borrowed devices use lead somewhere (pure).
//!
//! All devices of a process share one space, so that a BAR of one of them and memory that is mapped for another
//! are never at the same address.

use std::collections::BTreeMap;

/// First address: below are those that devices may take for 32-bit ones.
const BEGIN: u64 = 1 << 32;
/// Behind the last address: every processor's I/O address translation has 48 bits.
const END: u64 = 1 << 47;
/// The size of a page, in bytes.
pub const PAGE: u64 = 4096;

/// Ranges that are in use, each by its first address.
#[derive(Debug, Default)]
pub struct UsedAddresses {
    used: BTreeMap<u64, u64>,
}

impl UsedAddresses {
    /// Takes `length` bytes, in whole pages, at a multiple of `align`, a power of two; the lowest that are free.
    /// `None` when there are no so many.
    pub fn take(&mut self, length: u64, align: u64) -> Option<u64> {
        let align = align.max(PAGE);
        let length = length.max(1).checked_next_multiple_of(PAGE)?;
        let mut at = BEGIN.checked_next_multiple_of(align)?;
        for (start, taken) in &self.used {
            if at.checked_add(length)? <= *start {
                break;
            }
            at = at.max(start.checked_add(*taken)?).checked_next_multiple_of(align)?;
        }
        if at.checked_add(length)? > END {
            return None;
        }
        self.used.insert(at, length);
        Some(at)
    }

    /// Gives a range back, by its first address.
    pub fn give_back(&mut self, address: u64) {
        self.used.remove(&address);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_given_back_is_taken_again() {
        let mut addresses = UsedAddresses::default();
        let first = addresses.take(1, 1).unwrap();
        let second = addresses.take(3 * PAGE, 1).unwrap();
        assert_eq!((first, second), (BEGIN, BEGIN + PAGE));
        addresses.give_back(first);
        assert_eq!(addresses.take(PAGE, PAGE), Some(first));
        assert_eq!(addresses.take(1 << 40, 1 << 40), Some(1 << 40));
        for more in [(u64::MAX, 1), (1 << 47, 1), (1, 1 << 47), (1 << 46, 1 << 46)] {
            let before = addresses.used.clone();
            let taken = addresses.take(more.0, more.1);
            // The last one fits exactly once.
            assert_eq!(taken.is_some(), more.0 == 1 << 46, "{more:?}");
            addresses.used = before;
        }
    }

    proptest! {
        #[test]
        fn ranges_are_apart_and_aligned_and_inside(
            asked in prop::collection::vec((1u64..1 << 36, 0u32..40, any::<bool>()), 1..60)
        ) {
            let mut addresses = UsedAddresses::default();
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (length, shift, give_back) in asked {
                let align = 1 << shift;
                if let Some(at) = addresses.take(length, align) {
                    prop_assert!(at >= BEGIN && at + length <= END && at % align == 0 && at % PAGE == 0);
                    let apart = held.iter().all(|held| at + length <= held.0 || held.0 + held.1 <= at);
                    prop_assert!(apart);
                    held.push((at, length));
                }
                if give_back && !held.is_empty() {
                    let (at, _) = held.remove(held.len() / 2);
                    addresses.give_back(at);
                }
            }
        }
    }
}
