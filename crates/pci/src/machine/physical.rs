//! Where memory of this process lies physically: what a function without an IOMMU reaches it by.
//!
//! The kernel may move pages of any kind but one while a program uses them, pinned by `mlock` or not: huge
//! pages that were put aside stay. So this is for memory in huge pages.
//!
//! Source: Linux, `Documentation/admin-guide/mm/pagemap.rst`.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rackbus_memory::SharedMemory;

use super::{MachineError, MemoryWindow, ReachedRun, file};

const PAGEMAP: &str = "/proc/self/pagemap";
const PAGE: u64 = 4096;
const HUGE_PAGE: u64 = 2 << 20;
/// An entry of the page map: the page is there, and its number.
const PRESENT: u64 = 1 << 63;
const NUMBER: u64 = (1 << 55) - 1;

/// Where `memory`, in huge pages that were written to, lies.
///
/// # Errors
/// [`MachineError`], when the kernel does not tell.
pub fn runs(memory: &SharedMemory) -> Result<Vec<ReachedRun>, MachineError> {
    let first = memory.whole().as_ptr() as u64;
    let pagemap = File::open(PAGEMAP).map_err(file(PAGEMAP))?;
    let entry = |offset: u64| {
        let mut entry = [0; 8];
        pagemap.read_exact_at(&mut entry, (first + offset) / PAGE * 8).map_err(file(PAGEMAP))?;
        Ok(u64::from_ne_bytes(entry))
    };
    joined((0..memory.len() as u64).step_by(HUGE_PAGE as usize), entry)
}

/// Where a function finds the runs of memory of `length` bytes that it reaches by `window`.
///
/// # Errors
/// [`MachineError::OutsideWindow`].
pub fn through(
    mut runs: Vec<ReachedRun>,
    length: u64,
    window: MemoryWindow,
) -> Result<Vec<ReachedRun>, MachineError> {
    let mut end = length;
    for run in runs.iter_mut().rev() {
        let (address, size) = (run.address, window.size);
        let last = address.checked_add(end - run.offset).filter(|last| *last <= size);
        let found = last.and_then(|_| window.base.checked_add(address));
        run.address = found.ok_or(MachineError::OutsideWindow { address, size })?;
        end = run.offset;
    }
    Ok(runs)
}

/// The runs that huge pages at these offsets make, as the page map has them.
fn joined(
    offsets: impl Iterator<Item = u64>,
    entry: impl Fn(u64) -> Result<u64, MachineError>,
) -> Result<Vec<ReachedRun>, MachineError> {
    let mut runs: Vec<ReachedRun> = Vec::new();
    for offset in offsets {
        let found = entry(offset)?;
        // Without the right to see it, the number reads as 0.
        let (present, number) = (found & PRESENT != 0, found & NUMBER);
        if !present || number == 0 {
            return Err(MachineError::NoAddresses);
        }
        let address = number * PAGE;
        let follows = |run: &ReachedRun| run.address.wrapping_add(offset - run.offset) == address;
        if !runs.last().is_some_and(follows) {
            runs.push(ReachedRun { offset, address });
        }
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_leads_to_runs_that_are_in_it_as_a_whole() {
        let run = |offset, address| ReachedRun { offset, address };
        let runs = vec![run(0, 0x20_0000), run(HUGE_PAGE, 0x80_0000)];
        let (base, length) = (1 << 40, 2 * HUGE_PAGE);
        let window = |size| MemoryWindow { base, size };
        let found = through(runs.clone(), length, window(0xa0_0000)).unwrap();
        assert_eq!(found, [run(0, base + 0x20_0000), run(HUGE_PAGE, base + 0x80_0000)]);
        for (size, at) in [(0x9f_ffff, 0x80_0000), (0x30_0000, 0x80_0000), (0, 0x80_0000)] {
            let refused = through(runs.clone(), length, window(size)).unwrap_err();
            let MachineError::OutsideWindow { address, .. } = refused else { panic!("{refused}") };
            assert_eq!(address, at, "{size:#x}");
        }
        let beyond = MemoryWindow { base: u64::MAX, size: u64::MAX };
        assert!(through(runs, length, beyond).is_err());
    }

    #[test]
    fn huge_pages_that_lie_side_by_side_are_one_run() {
        let pages = [0x4_0000_0000, 0x4_0020_0000, 0x1_0000_0000, 0x1_0040_0000u64];
        let entry = |offset: u64| Ok(PRESENT | (pages[(offset / HUGE_PAGE) as usize] / PAGE));
        let runs = joined((0..4).map(|page| page * HUGE_PAGE), entry).unwrap();
        let run = |page: u64, address| ReachedRun { offset: page * HUGE_PAGE, address };
        assert_eq!(runs, [run(0, pages[0]), run(2, pages[2]), run(3, pages[3])]);
    }

    #[test]
    fn an_address_that_is_not_told_is_refused() {
        for entry in [0, PRESENT, 77] {
            let refused = joined([0].into_iter(), |_| Ok(entry)).unwrap_err();
            assert!(matches!(refused, MachineError::NoAddresses), "{entry:#x}");
        }
    }
}
