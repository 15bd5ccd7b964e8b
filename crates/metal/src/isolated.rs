//! What an isolated function reaches of its borrower's memory (pure): what the borrower's kernel has had mapped for a user of
//! its VFIO, and nothing else.
//!
//! The borrower says where the function finds which part of its memory. All of it may be wrong on purpose, so what is made is
//! inside of the window onto that memory, apart from what there is, in whole pages, and of a bounded number. A mapping ends as
//! it was made, never in part.

use std::collections::BTreeMap;
use std::ops::Range;

use rackbus_memory::Access;

use crate::window::{MSI_SIZE, PAGE};

/// Where an isolated function reaches the borrower's local APICs: beside where x86 has its own, where no machine has memory.
pub const MAPPED_MSI: u64 = 0xfef0_0000;
/// Mappings of one function at most: as many as VFIO makes in a container by default, less that of the interrupts.
pub const MOST_MAPPINGS: u32 = 65_534;

/// Bits of what the borrower says that the function may do.
const READ: u32 = 1;
const WRITE: u32 = 2;

/// A mapping as the borrower describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MappingRequest {
    /// Where the function finds it.
    pub iova: u64,
    /// Where it begins in the borrower's memory.
    pub address: u64,
    /// How many bytes it has.
    pub size: u64,
    /// What the function may do there, in bits.
    pub access: u32,
}

/// A mapping that can be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IsolatedMapping {
    /// Where the function finds it.
    pub iova: u64,
    /// Where it begins in the window onto the borrower's memory.
    pub offset: u64,
    /// How many bytes it has.
    pub size: u64,
    /// What the function may do there.
    pub access: Access,
}

/// Why nothing changes of what a function reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum MappingRefusal {
    /// Nothing is mapped there.
    NotMapped = 2,
    /// The device or its IOMMU refuses.
    Failed = 5,
    /// There is no memory for it, or the borrower lends no more.
    NoMemory = 12,
    /// Others have the IOMMU group of the device, too.
    Busy = 16,
    /// A part of the addresses is taken.
    Taken = 17,
    /// It is none, or the function is not isolated, or is already.
    Invalid = 22,
    /// There are as many as there may be.
    TooMany = 28,
    /// It is not in the window.
    Beyond = 34,
    /// It cannot be isolated.
    Unsupported = 95,
}

impl MappingRefusal {
    /// The error number by which the borrower is told (Linux, `include/uapi/asm-generic/errno.h`).
    pub fn errno(self) -> u32 {
        self as u32
    }
}

/// The mappings of a function that is isolated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IsolatedMemory {
    /// Bytes of the window onto the borrower's memory.
    window: u64,
    most: usize,
    /// By where the function finds them.
    mapped: BTreeMap<u64, IsolatedMapping>,
}

impl IsolatedMemory {
    /// Nothing is mapped of a window of `window` bytes; at most `most` mappings can be.
    pub fn new(window: u64, most: u32) -> IsolatedMemory {
        IsolatedMemory { window, most: most as usize, mapped: BTreeMap::new() }
    }

    /// Enters a mapping, which is to be made then. Where that fails, it is [ended](IsolatedMemory::end).
    ///
    /// # Errors
    /// When it cannot be; nothing changes then.
    pub fn map(&mut self, wanted: MappingRequest) -> Result<IsolatedMapping, MappingRefusal> {
        let MappingRequest { iova, address, size, access } = wanted;
        let range = pages(iova, size).ok_or(MappingRefusal::Invalid)?;
        let inside = pages(address, size).ok_or(MappingRefusal::Invalid)?;
        let access = access_of(access).ok_or(MappingRefusal::Invalid)?;
        if inside.end > self.window {
            return Err(MappingRefusal::Beyond);
        }
        let interrupts = MAPPED_MSI..MAPPED_MSI + MSI_SIZE;
        let before = self.mapped.range(..range.end).next_back();
        let is_taken = before.is_some_and(|(at, it)| at + it.size > range.start);
        if is_taken || (range.start < interrupts.end && interrupts.start < range.end) {
            return Err(MappingRefusal::Taken);
        }
        if self.mapped.len() >= self.most {
            return Err(MappingRefusal::TooMany);
        }
        let mapping = IsolatedMapping { iova, offset: address, size, access };
        self.mapped.insert(iova, mapping);
        Ok(mapping)
    }

    /// The mapping that begins and ends so.
    ///
    /// # Errors
    /// When there is none.
    pub fn find(&self, wanted: MappingRequest) -> Result<IsolatedMapping, MappingRefusal> {
        let found = self.mapped.get(&wanted.iova).filter(|it| it.size == wanted.size);
        found.copied().ok_or(MappingRefusal::NotMapped)
    }

    /// A mapping has ended, or was not made.
    pub fn end(&mut self, mapping: &IsolatedMapping) {
        self.mapped.remove(&mapping.iova);
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.mapped.len()
    }
}

/// The range of these bytes, if it is one of whole pages.
fn pages(start: u64, size: u64) -> Option<Range<u64>> {
    let page = PAGE as u64;
    let whole = size > 0 && start.is_multiple_of(page) && size.is_multiple_of(page);
    let end = start.checked_add(size).filter(|_| whole)?;
    Some(start..end)
}

fn access_of(bits: u32) -> Option<Access> {
    match bits {
        READ => Some(Access::READ),
        WRITE => Some(Access::WRITE),
        _ if bits == READ | WRITE => Some(Access::READ | Access::WRITE),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WINDOW: u64 = 1 << 20;
    const P: u64 = PAGE as u64;

    fn wanted(iova: u64, address: u64, size: u64) -> MappingRequest {
        MappingRequest { iova, address, size, access: READ | WRITE }
    }

    #[test]
    fn what_is_no_mapping_or_outside_of_the_window_is_refused() {
        let mut memory = IsolatedMemory::new(WINDOW, 10);
        let invalid = [
            wanted(1, 0, P),
            wanted(0, 1, P),
            wanted(0, 0, P + 1),
            wanted(0, 0, 0),
            wanted(u64::MAX - P + 1, 0, P),
            wanted(0, u64::MAX - P + 1, P),
            MappingRequest { access: 0, ..wanted(0, 0, P) },
            MappingRequest { access: 4 | READ, ..wanted(0, 0, P) },
        ];
        for wanted in invalid {
            assert_eq!(memory.map(wanted), Err(MappingRefusal::Invalid), "{wanted:x?}");
        }
        for wanted in [wanted(0, WINDOW, P), wanted(0, WINDOW - P, 2 * P), wanted(0, P, WINDOW)] {
            assert_eq!(memory.map(wanted), Err(MappingRefusal::Beyond), "{wanted:x?}");
        }
        assert_eq!(memory.count(), 0);
        memory.map(wanted(0, 0, WINDOW)).unwrap();
    }

    #[test]
    fn addresses_are_taken_once_and_those_of_interrupts_never() {
        let mut memory = IsolatedMemory::new(WINDOW, 10);
        memory.map(wanted(4 * P, 0, 2 * P)).unwrap();
        for (iova, pages) in [(4, 1), (5, 1), (5, 3), (3, 2), (0, 16)] {
            let refused = memory.map(wanted(iova * P, 0, pages * P));
            assert_eq!(refused, Err(MappingRefusal::Taken), "{iova} {pages}");
        }
        // The same memory may be found at several places.
        memory.map(wanted(6 * P, 0, P)).unwrap();
        memory.map(wanted(3 * P, 0, P)).unwrap();
        let last = MAPPED_MSI + MSI_SIZE - P;
        for iova in [MAPPED_MSI, last, MAPPED_MSI - P] {
            let refused = memory.map(wanted(iova, 0, 2 * P));
            assert_eq!(refused, Err(MappingRefusal::Taken), "{iova:x}");
        }
        memory.map(wanted(MAPPED_MSI - P, 0, P)).unwrap();
        memory.map(wanted(MAPPED_MSI + MSI_SIZE, 0, P)).unwrap();
    }

    #[test]
    fn a_mapping_ends_as_it_was_made() {
        let mut memory = IsolatedMemory::new(WINDOW, 2);
        let first = memory.map(wanted(0, 0, 2 * P)).unwrap();
        memory.map(wanted(2 * P, 0, P)).unwrap();
        assert_eq!(memory.map(wanted(8 * P, 0, P)), Err(MappingRefusal::TooMany));
        for (iova, size) in [(0, P), (0, 3 * P), (P, P), (16 * P, P)] {
            let found = memory.find(wanted(iova, 0, size));
            assert_eq!(found, Err(MappingRefusal::NotMapped), "{iova:x}+{size:x}");
        }
        assert_eq!(memory.find(wanted(0, 0, 2 * P)), Ok(first));
        memory.end(&first);
        assert_eq!(memory.find(wanted(0, 0, 2 * P)), Err(MappingRefusal::NotMapped));
        memory.map(wanted(P, 0, P)).unwrap();
    }

    proptest! {
        /// Whatever is asked for, what a function reaches is what was made and has not ended, page by page, in the window.
        #[test]
        fn pages_are_reached_as_a_table_of_pages_says(
            steps in prop::collection::vec((any::<bool>(), 0u64..24, 0u64..24, 0u64..6), 1..60),
        ) {
            const PAGES: u64 = 16;
            let most = 5;
            let mut memory = IsolatedMemory::new(PAGES * P, most);
            // By page: the page of the window, and where its mapping begins and ends.
            let mut table: BTreeMap<u64, (u64, (u64, u64))> = BTreeMap::new();
            for (on, iova, address, size) in steps {
                let asked = wanted(iova * P, address * P, size * P);
                let pages = iova..iova + size;
                let whole = (iova, size);
                if on {
                    let count = table.values().map(|(_, of)| of).collect::<std::collections::BTreeSet<_>>().len();
                    let free = pages.clone().all(|page| !table.contains_key(&page));
                    let can = size > 0 && address + size <= PAGES && free && count < most as usize;
                    let made = memory.map(asked);
                    prop_assert_eq!(made.is_ok(), can, "{:?}", made);
                    if can {
                        table.extend(pages.clone().map(|page| (page, (address + page - iova, whole))));
                    }
                } else {
                    let can = size > 0 && pages.clone().all(|page| table.get(&page).is_some_and(|it| it.1 == whole));
                    let found = memory.find(asked);
                    prop_assert_eq!(found.is_ok(), can);
                    if let Ok(found) = found {
                        memory.end(&found);
                        table.retain(|_, (_, of)| *of != whole);
                    }
                }
                let reached: Vec<(u64, u64)> = memory
                    .mapped
                    .values()
                    .flat_map(|it| (0..it.size / P).map(|n| (it.iova / P + n, it.offset / P + n)))
                    .collect();
                let expected: Vec<(u64, u64)> = table.iter().map(|(page, (to, _))| (*page, *to)).collect();
                prop_assert_eq!(reached, expected);
            }
        }
    }
}
