//! Which addresses lead where, in the IOMMU domain that a lent device and the lender's end of the NTB share (pure).
//!
//! Three ranges, all above 4 GiB and apart from what an IOMMU keeps for interrupts: *inbound*, as large as the
//! borrower's window 1, where the borrower's accesses arrive (control areas and BARs); *interrupts*, the lender's window
//! 1, which leads to the borrower's local APICs; *memory*, the lender's window 2, which leads to the borrower's memory.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::window::{AREA, MSI_ADDRESS, MSI_SIZE, PAGE};

/// The first address that is used.
const FIRST: u64 = 1 << 32;

/// The ranges of one NTB.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WindowPlan {
    /// Where the borrower's accesses through its window 1 arrive.
    pub inbound: Range<u64>,
    /// The lender's window 1.
    pub interrupts: Range<u64>,
    /// The lender's window 2.
    pub memory: Range<u64>,
}

impl WindowPlan {
    /// The ranges for the sizes of the borrower's window 1 and the lender's two windows. `None` for sizes that no
    /// windows have: not powers of two, or too large.
    pub fn new(inbound: u64, interrupts: u64, memory: u64) -> Option<WindowPlan> {
        let sizes = [inbound, interrupts, memory];
        let possible =
            |size: &u64| size.is_power_of_two() && (PAGE as u64..=1 << 46).contains(size);
        if !sizes.iter().all(possible) {
            return None;
        }
        // Each at a multiple of its own size, as translations are.
        let mut at = FIRST;
        let [inbound, interrupts, memory] = sizes.map(|size| {
            let begin = at.next_multiple_of(size);
            at = begin + size;
            begin..at
        });
        Some(WindowPlan { inbound, interrupts, memory })
    }

    /// Sizes of the other side's window 1 and of this side's.
    pub fn window_sizes(&self) -> [u64; 2] {
        [&self.inbound, &self.interrupts].map(|range| range.end - range.start)
    }

    /// Where a device reaches the borrower's [`MSI_ADDRESS`]: the borrower's end translates window 1 to that
    /// address, rounded down to the window's size.
    pub fn msi_base(&self) -> u64 {
        let size = self.interrupts.end - self.interrupts.start;
        self.interrupts.start + (MSI_ADDRESS & (size - 1))
    }

    /// Where the borrower's local APICs begin in the lender's window 1, in bytes; `None` where it has not all of them.
    pub fn local_apics(&self) -> Option<u64> {
        let offset = self.msi_base() - self.interrupts.start;
        (self.interrupts.end - self.interrupts.start >= offset + MSI_SIZE).then_some(offset)
    }
}

/// Room in the borrower's window 1, given to functions and taken back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WindowRoom {
    size: u64,
    /// What is taken, in order, apart from one another.
    taken: Vec<Range<u64>>,
}

impl WindowRoom {
    /// A window of `size` bytes, empty.
    pub fn new(size: u64) -> WindowRoom {
        WindowRoom { size, taken: Vec::new() }
    }

    /// Whether it can be that of a window of `size` bytes: what is taken lies inside, in order and apart.
    pub fn is_possible(&self, size: u64) -> bool {
        let apart = self.taken.windows(2).all(|two| two[0].end <= two[1].start);
        let inside = self.taken.iter().all(|range| range.start < range.end && range.end <= size);
        self.size == size && apart && inside
    }

    /// Where each part that is taken begins.
    pub fn taken(&self) -> Vec<u64> {
        self.taken.iter().map(|range| range.start).collect()
    }

    /// Takes room for a control area and for BARs of these sizes, each a power of two: offsets of all. `None` when
    /// there is not enough; then nothing is taken.
    pub fn take(&mut self, bars: &[u64]) -> Option<(u64, Vec<u64>)> {
        let before = self.taken.clone();
        let mut offsets = vec![0; bars.len()];
        // The large ones first, so that alignment wastes little.
        let mut order: Vec<usize> = (0..bars.len()).collect();
        order.sort_by_key(|nth| std::cmp::Reverse(bars[*nth]));
        let mut place = |bytes: u64, align: u64| self.place(bytes, align);
        let mut all = || {
            for nth in &order {
                let size = bars[*nth].max(PAGE as u64);
                offsets[*nth] = place(size, size)?;
            }
            place(AREA as u64, PAGE as u64)
        };
        match all() {
            Some(control) => Some((control, offsets)),
            None => {
                self.taken = before;
                None
            }
        }
    }

    /// Gives room back that was taken with these bars.
    pub fn give_back(&mut self, control: u64, offsets: &[u64]) {
        self.taken.retain(|range| range.start != control && !offsets.contains(&range.start));
    }

    fn place(&mut self, bytes: u64, align: u64) -> Option<u64> {
        let mut at = 0u64;
        for (nth, range) in self.taken.iter().enumerate() {
            if at.checked_add(bytes)? <= range.start {
                self.taken.insert(nth, at..at + bytes);
                return Some(at);
            }
            at = range.end.checked_next_multiple_of(align)?;
        }
        let end = at.checked_add(bytes).filter(|end| *end <= self.size)?;
        self.taken.push(at..end);
        Some(at)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_local_apics_are_where_the_module_expects_them() {
        let plan = WindowPlan::new(64 << 20, 64 << 20, 512 << 20).unwrap();
        assert_eq!(plan.msi_base() - plan.interrupts.start, 0xfee0_0000 - 0xfc00_0000);
        let small = WindowPlan::new(64 << 20, 1 << 20, 512 << 20).unwrap();
        assert_eq!(small.msi_base(), small.interrupts.start);
        assert_eq!(WindowPlan::new(3 << 20, 1 << 20, 1 << 20), None);
        assert_eq!(WindowPlan::new(0, 1 << 20, 1 << 20), None);
    }

    proptest! {
        #[test]
        fn ranges_are_aligned_and_apart(sizes in prop::array::uniform3(12u32..46)) {
            let [inbound, interrupts, memory] = sizes.map(|log2| 1u64 << log2);
            let plan = WindowPlan::new(inbound, interrupts, memory).unwrap();
            let ranges = [plan.inbound, plan.interrupts, plan.memory];
            for (range, size) in ranges.iter().zip([inbound, interrupts, memory]) {
                prop_assert_eq!(range.end - range.start, size);
                prop_assert!(range.start.is_multiple_of(size) && range.start >= FIRST);
            }
            prop_assert!(ranges[0].end <= ranges[1].start && ranges[1].end <= ranges[2].start);
        }

        /// What is taken lies inside, aligned and apart, and can be given back.
        #[test]
        fn room_is_taken_once(
            functions in prop::collection::vec(prop::collection::vec(4u32..24, 0..6), 1..20),
            returned in prop::collection::vec(any::<prop::sample::Index>(), 0..10),
        ) {
            let size = 64 << 20;
            let mut room = WindowRoom::new(size);
            let mut held = Vec::new();
            for bars in functions {
                let sizes: Vec<u64> = bars.iter().map(|log2| 1 << log2).collect();
                let before = room.clone();
                match room.take(&sizes) {
                    Some((control, offsets)) => held.push((control, offsets, sizes)),
                    None => prop_assert_eq!(&room, &before),
                }
            }
            for which in returned {
                if !held.is_empty() {
                    let (control, offsets, _) = held.swap_remove(which.index(held.len()));
                    room.give_back(control, &offsets);
                }
            }
            let mut ranges = Vec::new();
            for (control, offsets, sizes) in &held {
                ranges.push(*control..*control + AREA as u64);
                for (offset, bytes) in offsets.iter().zip(sizes) {
                    prop_assert!(offset.is_multiple_of(*bytes) && offset.is_multiple_of(4096));
                    ranges.push(*offset..*offset + bytes.max(&4096));
                }
            }
            ranges.sort_by_key(|range| range.start);
            prop_assert!(ranges.windows(2).all(|two| two[0].end <= two[1].start));
            prop_assert!(ranges.last().is_none_or(|last| last.end <= size));
            for (control, offsets, _) in held {
                room.give_back(control, &offsets);
            }
            prop_assert_eq!(room, WindowRoom::new(size));
        }
    }
}
