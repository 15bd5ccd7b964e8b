//! Which addresses of an IOMMU domain can be mapped still, for people (pure).
//!
//! There may be as many mappings as VFIO allows, and whoever has a range refused may have chosen all of them. So they are gone
//! through once, in their order, and of what is left between them a few ranges are named.

use std::fmt::Write;

/// Pages that are mapped at least.
const PAGE: u64 = 4096;
/// Ranges that are named; the others are counted.
const NAMED: usize = 8;

/// What is left of ranges that can be mapped; each range is a first and a last address. `taken` is what is mapped, apart from
/// each other and in the order of its addresses.
pub(crate) fn usable(
    mut ranges: Vec<(u64, u64)>,
    taken: impl Iterator<Item = (u64, u64)>,
) -> String {
    if ranges.is_empty() {
        return "the ranges that it does not tell".to_owned();
    }
    ranges.sort_unstable();
    let (mut named, mut others) = (Vec::new(), 0);
    let mut found = |from: u64, to: u64| match to.checked_sub(from) {
        Some(bytes) if bytes >= PAGE - 1 && named.len() < NAMED => named.push((from, to)),
        Some(bytes) if bytes >= PAGE - 1 => others += 1,
        _ => {}
    };
    let mut taken = taken.peekable();
    // The first address behind what was taken until now; `None` behind the last one that there is.
    let mut behind = Some(0u64);
    for (from, to) in ranges {
        while let Some((first, last)) = taken.next_if(|(first, _)| *first <= to) {
            if let (Some(at), Some(before)) = (behind, first.checked_sub(1)) {
                found(at.max(from), before);
            }
            behind = behind.and_then(|at| Some(at.max(last.checked_add(1)?)));
        }
        if let Some(at) = behind {
            found(at.max(from), to);
        }
    }
    let mut text = String::new();
    for (nth, (from, to)) in named.iter().enumerate() {
        let _ = write!(text, "{}{from:#x}-{to:#x}", if nth > 0 { ", " } else { "" });
    }
    match others {
        _ if named.is_empty() => "no range".to_owned(),
        0 => text,
        others => format!("{text} and {others} ranges more"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_free_ranges_are_reported() {
        let ranges = vec![(0, 0xfedf_ffff), (0xfef0_0000, u64::MAX)];
        let left =
            usable(ranges.clone(), [(0, 0xffff), (0xfee0_0000 - 0x1000, 0xfedf_ffff)].into_iter());
        assert_eq!(left, "0x10000-0xfedfefff, 0xfef00000-0xffffffffffffffff");
        assert_eq!(usable(vec![(0, 0xfff)], [(0, 0xfff)].into_iter()), "no range");
        assert_eq!(usable(Vec::new(), std::iter::empty()), "the ranges that it does not tell");
        let all = usable(ranges, [(0xfef0_0000, u64::MAX)].into_iter());
        assert_eq!(all, "0x0-0xfedfffff");
    }

    /// As many as VFIO makes in a container by default, with a page between any two.
    #[test]
    fn a_report_about_many_mappings_is_short_and_soon_there() {
        let taken = |n: u64| (2 * n * PAGE, (2 * n + 1) * PAGE - 1);
        let begun = Instant::now();
        let text = usable(vec![(0, u64::MAX)], (0..65_535).map(taken));
        assert!(begun.elapsed() < Duration::from_millis(500), "{:?}", begun.elapsed());
        assert!(text.starts_with("0x1000-0x1fff, 0x3000-0x3fff, "), "{text}");
        assert!(text.ends_with(" and 65527 ranges more"), "{text}");
        assert_eq!(text.matches('-').count(), NAMED);
    }

    proptest! {
        /// What is named and counted is what a table of pages says.
        #[test]
        fn what_is_left_is_what_nobody_has(
            ranges in prop::collection::btree_set(0u64..40, 0..6),
            taken in prop::collection::btree_set(0u64..40, 0..20),
        ) {
            // Every two of them are the ends of one.
            let pairs = |ends: BTreeSet<u64>| {
                let ends: Vec<u64> = ends.into_iter().collect();
                let pair = |it: &[u64]| (it[0] * PAGE, it[1] * PAGE - 1);
                ends.chunks_exact(2).map(pair).collect::<Vec<_>>()
            };
            let (ranges, taken) = (pairs(ranges), pairs(taken));
            prop_assume!(!ranges.is_empty());
            let inside = |all: &[(u64, u64)], page: u64| {
                all.iter().position(|(from, to)| (*from..=*to).contains(&(page * PAGE)))
            };
            let mut left: Vec<(u64, u64)> = Vec::new();
            let mut before = None;
            for page in 0..40 {
                let of = inside(&ranges, page).filter(|_| inside(&taken, page).is_none());
                match (of, before, left.last_mut()) {
                    (Some(range), Some(same), Some(last)) if range == same => last.1 += PAGE,
                    (Some(_), ..) => left.push((page * PAGE, (page + 1) * PAGE - 1)),
                    (None, ..) => {}
                }
                before = of;
            }
            let named: Vec<String> =
                left.iter().take(NAMED).map(|(from, to)| format!("{from:#x}-{to:#x}")).collect();
            let expected = match left.len().checked_sub(NAMED) {
                _ if left.is_empty() => "no range".to_owned(),
                None | Some(0) => named.join(", "),
                Some(others) => format!("{} and {others} ranges more", named.join(", ")),
            };
            prop_assert_eq!(usable(ranges, taken.into_iter()), expected);
        }
    }
}
