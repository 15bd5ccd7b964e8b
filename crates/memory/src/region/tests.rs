//! Memory that moves, is lent, and is adopted in part; huge pages.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use proptest::prelude::*;
use rackbus_seeds::huge::{HUGE_PAGE, HugePages};
use rustix::fs::MemfdFlags;

use super::*;

const BOTH: Access = Access::READ.union(Access::WRITE);

fn file(size: u64) -> OwnedFd {
    SharedMemory::reserve("test", size).unwrap()
}

#[test]
fn memory_moves_under_a_writer_without_losing_a_write() {
    let (old, new) = (file(8192), file(8192));
    let region = Region::map(old.as_fd(), 0, 8192, BOTH).unwrap();
    let other = Region::map(old.as_fd(), 0, 8192, BOTH).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut last = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                last += 1;
                region.whole().store_u64(4096, last, Ordering::Release).unwrap();
            }
            last
        });
        while region.whole().load_u64(4096, Ordering::Acquire).unwrap() < 1000 {}
        region.freeze(0, 8192).unwrap();
        let at_move = region.whole().load_u64(4096, Ordering::Acquire).unwrap();
        crate::sparse::copy_sparse((&old, 0), (&new, 0), 8192).unwrap();
        region.adopt(0, 8192, HandleRef::of_descriptor(new.as_fd()), 0).unwrap();
        // Readers are there already, writers not before they are let.
        assert_eq!(region.whole().load_u64(4096, Ordering::Acquire), Some(at_move));
        let copy = Region::map(new.as_fd(), 0, 8192, BOTH).unwrap();
        copy.whole().store_u64(0, 7, Ordering::Release).unwrap();
        assert_eq!(region.whole().load_u64(0, Ordering::Acquire), Some(7));
        assert_eq!(region.whole().load_u64(4096, Ordering::Acquire), Some(at_move));
        region.unfreeze().unwrap();
        while region.whole().load_u64(4096, Ordering::Acquire).unwrap() < at_move + 1000 {}
        stop.store(true, Ordering::Relaxed);
        let last = writer.join().unwrap();
        assert_eq!(region.whole().load_u64(4096, Ordering::Acquire), Some(last));
        // The old memory has nothing of what came after.
        assert_eq!(other.whole().load_u64(4096, Ordering::Acquire), Some(at_move));
    });
}

#[test]
fn own_memory_is_lent_and_given_back_with_its_bytes() {
    let room = Region::reserve(8192, BOTH).unwrap();
    room.whole().part(4096, 4).unwrap().copy_from(b"mine");
    let address = room.whole().as_ptr() as usize;
    std::mem::forget(room);
    let shared = file(8192);
    // SAFETY: the range was reserved above and forgotten.
    let over = unsafe { Region::map_over(address, HandleRef::of_descriptor(shared.as_fd()), 8192) }
        .unwrap();
    let other = Region::map(shared.as_fd(), 4096, 4, BOTH).unwrap();
    let mut text = [0; 4];
    other.whole().copy_to(&mut text);
    assert_eq!(&text, b"mine");
    other.whole().copy_from(b"ours");
    over.whole().part(4096, 4).unwrap().copy_to(&mut text);
    assert_eq!(&text, b"ours");
    drop(over);
    // SAFETY: given back, the range is private memory of this process.
    let after = unsafe { std::ptr::read((address + 4096) as *const [u8; 4]) };
    assert_eq!(&after, b"ours");
    other.whole().copy_from(b"else");
    // SAFETY: as above.
    let after = unsafe { std::ptr::read((address + 4096) as *const [u8; 4]) };
    assert_eq!(&after, b"ours");
}

#[test]
fn no_store_is_lost_while_memory_is_lent_and_given_back() {
    const LENGTH: usize = 32 << 20;
    const ROUNDS: u32 = 5;
    let room = Region::reserve(LENGTH as u64, BOTH).unwrap();
    let address = room.whole().as_ptr() as usize;
    std::mem::forget(room);
    // SAFETY: the range was reserved and forgotten; it is mapped as long as the process lives.
    let count = unsafe { &*std::ptr::with_exposed_provenance::<AtomicU64>(address + 4096) };
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut stored = 0;
            while !done.load(Ordering::Relaxed) {
                count.fetch_add(1, Ordering::Relaxed);
                stored += 1;
            }
            stored
        });
        for _ in 0..ROUNDS {
            let shared = file(LENGTH as u64);
            // SAFETY: as above.
            drop(
                unsafe {
                    Region::map_over(
                        address,
                        HandleRef::of_descriptor(shared.as_fd()),
                        LENGTH as u64,
                    )
                }
                .unwrap(),
            );
        }
        done.store(true, Ordering::Relaxed);
        assert_eq!(writer.join().unwrap(), count.load(Ordering::Relaxed));
    });
}

#[test]
fn a_part_of_a_mapping_is_adopted_from_elsewhere() {
    let (all, page) = (file(4 * 4096), file(4096));
    let region = Region::map(all.as_fd(), 4096, 2 * 4096, BOTH).unwrap();
    Region::map(page.as_fd(), 0, 4096, BOTH).unwrap().whole().copy_from(b"page");
    region.freeze(8192, 4096).unwrap();
    region.adopt(8192, 4096, HandleRef::of_descriptor(page.as_fd()), 0).unwrap();
    region.unfreeze().unwrap();
    let mut text = [0; 4];
    region.whole().part(4096, 4).unwrap().copy_to(&mut text);
    assert_eq!(&text, b"page");
    region.whole().part(0, 1).unwrap().copy_from(b"x");
    // What lies outside of the mapping does not matter.
    region.adopt(0, 4096, HandleRef::of_descriptor(page.as_fd()), 0).unwrap();
    region.whole().part(0, 1).unwrap().copy_to(&mut text[..1]);
    assert_eq!(text[0], b'x');
}

/// Whether huge pages were asked for in the mapping that an address is in.
fn asked(address: usize) -> bool {
    let all = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut inside = false;
    for line in all.lines() {
        let range = line.split(' ').next().unwrap().split_once('-').and_then(|(start, end)| {
            let number = |text| usize::from_str_radix(text, 16).ok();
            Some(number(start)?..number(end)?)
        });
        if let Some(range) = range {
            inside = range.contains(&address);
        } else if let (true, Some(flags)) = (inside, line.strip_prefix("VmFlags:")) {
            return flags.split(' ').any(|flag| flag == "hg");
        }
    }
    panic!("nothing is mapped at {address:#x}");
}

#[test]
fn huge_pages_are_asked_for_where_they_fit() {
    const MIB: u64 = 1 << 20;
    if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
        eprintln!("the system has no transparent huge pages: not tested");
        return;
    }
    let start = |region: &Region| region.whole().as_ptr() as usize;
    let (large, small, next) = (file(4 * MIB), file(MIB), file(4 * MIB));
    let region = Region::map(large.as_fd(), 0, 4 * MIB, BOTH).unwrap();
    assert!(asked(start(&region)) && asked(start(&region) + region.len() - 1));
    assert!(!asked(start(&Region::map(small.as_fd(), 0, MIB, BOTH).unwrap())));
    // For memory that has moved as well.
    region.freeze(0, 4 * MIB).unwrap();
    region.adopt(0, 4 * MIB, HandleRef::of_descriptor(next.as_fd()), 0).unwrap();
    assert!(asked(start(&region)));
}

#[test]
fn memory_of_huge_pages_is_unmapped_and_its_truncation_survived() {
    let Some(_reserved) = HugePages::reserve(2) else { return };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let file = rustix::fs::memfd_create("rackbus huge test", flags).unwrap();
    rustix::fs::ftruncate(&file, 2 * HUGE_PAGE).unwrap();
    let map = || Region::map(file.as_fd(), HUGE_PAGE - 4096, 8192, BOTH).unwrap();
    let there =
        || std::fs::read_to_string("/proc/self/maps").unwrap().contains("rackbus huge test");
    let region = map();
    region.whole().write_obj(4096, &7_u64).unwrap();
    assert!(there());
    drop(region);
    assert!(!there(), "it is still mapped");
    let region = map();
    assert_eq!(region.whole().read_obj::<u64>(4096), Some(7));
    rustix::fs::ftruncate(&file, 0).unwrap();
    assert_eq!(region.whole().read_obj::<u64>(4096), Some(0));
    assert!(region.truncated());
    region.revoke().unwrap();
    drop(region);
    assert!(!there(), "it is still mapped");
}

#[test]
fn memory_of_a_device_is_mapped_in_whole_pages_without_asking_what_the_file_is() {
    let memory = SharedMemory::create("bar", 8192).unwrap();
    memory.whole().store_u32(4096, 7, std::sync::atomic::Ordering::Release).unwrap();
    let both = Access::READ | Access::WRITE;
    let map = |offset, length| Region::map_device(memory.as_fd(), offset, length, both);
    let bar = map(4096, 4096).unwrap();
    assert_eq!(bar.whole().load_u32(0, std::sync::atomic::Ordering::Acquire), Some(7));
    for (offset, length) in [(0, 0), (8, 4096), (0, 100), (0, u64::MAX)] {
        assert!(map(offset, length).is_err(), "{offset} {length}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Wherever a range begins and ends, and whatever part of the file is mapped.
    #[test]
    fn bytes_that_are_hidden_are_read_when_they_are_shown(
        (page, length) in (0_u64..3, 1_u64..3 * PAGE),
        (offset, hidden) in (0_u64..4 * PAGE, 1_u64..2 * PAGE),
    ) {
        let file = file(6 * PAGE);
        let all = Region::map(file.as_fd(), 0, 6 * PAGE, BOTH).unwrap();
        let region = Region::map(file.as_fd(), page * PAGE, length, BOTH).unwrap();
        // A kernel that cannot do it for a page does it for nothing.
        let can = region.hide(page * PAGE, PAGE);
        region.show(page * PAGE, PAGE);
        prop_assert_eq!(region.hide(offset, hidden), can);
        let (from, to) = (offset.max(page * PAGE), (offset + hidden).min(page * PAGE + length));
        let places: Vec<u64> = if can && from < to { vec![from, to - 1] } else { Vec::new() };
        std::thread::scope(|scope| {
            let read = |at: u64| {
                let region = &region;
                scope.spawn(move || {
                    let mut byte = [0];
                    region.whole().part((at - page * PAGE) as usize, 1).unwrap().copy_to(&mut byte);
                    byte[0]
                })
            };
            let readers: Vec<_> = places.iter().map(|at| read(*at)).collect();
            std::thread::yield_now();
            for at in &places {
                assert_eq!(all.whole().part(*at as usize, 1).unwrap().copy_from(&[7]), 1);
            }
            region.show(offset, hidden);
            let heard: Vec<u8> = readers.into_iter().map(|reader| reader.join().unwrap()).collect();
            assert!(heard.iter().all(|byte| *byte == 7), "{heard:?}");
        });
    }
}
