//! Which bytes of a file are lent, however many ranges of it overlap.
//!
//! A virtual machine maps the same memory for each function that it borrows, and some of it twice:
//! counting lengths would count its memory several times.

use std::collections::BTreeMap;

/// A multiset of ranges: by its first byte, each run of bytes that are in equally many ranges.
#[derive(Debug, Clone, Default)]
pub(crate) struct Coverage {
    /// One past the run's last byte, and in how many ranges it is.
    runs: BTreeMap<u64, (u64, u32)>,
}

impl Coverage {
    /// Bytes of `[start, end)` that are in no range yet.
    pub fn missing(&self, start: u64, end: u64) -> u64 {
        let before = self.runs.range(..start).next_back();
        let inside = self.runs.range(start..end);
        let covered = before.into_iter().chain(inside).map(|(first, (last, _))| {
            let (from, to) = ((*first).max(start), (*last).min(end));
            to.saturating_sub(from)
        });
        (end - start) - covered.sum::<u64>()
    }

    /// Adds the range `[start, end)`.
    pub fn add(&mut self, start: u64, end: u64) {
        self.split(start);
        self.split(end);
        let mut gaps = Vec::new();
        let mut at = start;
        for (first, (last, count)) in self.runs.range_mut(start..end) {
            if at < *first {
                gaps.push((at, *first));
            }
            *count += 1;
            at = *last;
        }
        if at < end {
            gaps.push((at, end));
        }
        self.runs.extend(gaps.into_iter().map(|(from, to)| (from, (to, 1))));
        self.join(start);
        self.join(end);
    }

    /// Takes a range away that was [added](Coverage::add); the bytes that are in none any more.
    pub fn remove(&mut self, start: u64, end: u64) -> u64 {
        self.split(start);
        self.split(end);
        let mut freed = 0;
        let mut gone = Vec::new();
        for (first, (last, count)) in self.runs.range_mut(start..end) {
            *count -= 1;
            if *count == 0 {
                freed += *last - *first;
                gone.push(*first);
            }
        }
        for first in gone {
            self.runs.remove(&first);
        }
        self.join(start);
        self.join(end);
        freed
    }

    /// Whether it has no range.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Lets a run begin at `at`, if one has bytes on both sides of it.
    fn split(&mut self, at: u64) {
        let Some((_, (last, count))) = self.runs.range_mut(..at).next_back() else { return };
        if *last > at {
            let behind = (std::mem::replace(last, at), *count);
            self.runs.insert(at, behind);
        }
    }

    /// Makes one of the runs that meet at `at`, if they are in equally many ranges: so there are never
    /// more runs than ends of ranges.
    fn join(&mut self, at: u64) {
        let Some((last, count)) = self.runs.get(&at).copied() else { return };
        if let Some((_, before)) = self.runs.range_mut(..at).next_back()
            && *before == (at, count)
        {
            before.0 = last;
            self.runs.remove(&at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against a count for each byte.
        #[test]
        fn bytes_count_once_and_runs_do_not_pile_up(
            steps in prop::collection::vec((any::<bool>(), 0u64..48, 1u64..24), 1..60),
        ) {
            let (mut coverage, mut naive) = (Coverage::default(), [0u32; 80]);
            let mut ranges: Vec<(u64, u64)> = Vec::new();
            for (add, start, length) in steps {
                let bytes = |naive: &mut [u32; 80], (start, end): (u64, u64), by: i32| {
                    let mut changed = 0;
                    for byte in &mut naive[start as usize..end as usize] {
                        let before = *byte;
                        *byte = byte.checked_add_signed(by).unwrap();
                        changed += u64::from((before == 0) != (*byte == 0));
                    }
                    changed
                };
                if add || ranges.is_empty() {
                    let range = (start, start + length);
                    let missing = coverage.missing(range.0, range.1);
                    coverage.add(range.0, range.1);
                    prop_assert_eq!(missing, bytes(&mut naive, range, 1));
                    ranges.push(range);
                } else {
                    let range = ranges.swap_remove(start as usize % ranges.len());
                    prop_assert_eq!(coverage.remove(range.0, range.1), bytes(&mut naive, range, -1));
                }
                prop_assert!(coverage.runs.len() <= 2 * ranges.len());
                prop_assert_eq!(coverage.is_empty(), ranges.is_empty());
            }
        }
    }
}
