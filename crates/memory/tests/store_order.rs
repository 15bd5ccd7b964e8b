//! In which order a small copy stores, as the processor does it and not as the source says it: a compiler may move
//! plain stores. The destination lies across two pages of which one cannot be written; what was stored before the
//! first store into that page is looked at when that store faults. A debug build keeps the order by itself: `make test`
//! runs this in a release build as well.
#![cfg(not(loom))]

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use rackbus_memory::copy::copy_bytes;
use rackbus_memory::{Access, DmaSlice, Region, SharedMemory};
use rustix::mm::{MprotectFlags, mprotect};

const PAGE: usize = 4096;
/// No copy of more bytes promises an order.
const MOST: usize = 64;
/// The longest piece that is stored at once.
const PIECE: usize = 16;

/// The first of the two pages.
static PAGES: AtomicUsize = AtomicUsize::new(0);
/// Where the copy's destination begins.
static DESTINATION: AtomicUsize = AtomicUsize::new(0);
/// As many of the destination's bytes as were stored, from the first on, when a store faulted; plus one. All ones where
/// others were.
static STORED: AtomicUsize = AtomicUsize::new(0);

/// Notes what is stored, and lets the store that faulted be done.
extern "C" fn look(_signal: libc::c_int) {
    let destination = DESTINATION.load(Ordering::Relaxed) as *const u8;
    // SAFETY: both pages can be read.
    let byte = |at: usize| unsafe { destination.add(at).read_volatile() };
    let stored = (0..MOST).take_while(|at| byte(*at) != 0).count();
    let is_prefix = (stored..MOST).all(|at| byte(at) == 0);
    STORED.store(if is_prefix { stored + 1 } else { usize::MAX }, Ordering::Relaxed);
    let pages = PAGES.load(Ordering::Relaxed) as *mut _;
    // SAFETY: the two pages are this test's own.
    let opened = unsafe { mprotect(pages, 2 * PAGE, MprotectFlags::READ | MprotectFlags::WRITE) };
    if opened.is_err() {
        std::process::abort();
    }
}

/// Copies to a part of a mapping as programs do.
#[inline(never)]
fn write(to: DmaSlice<'_>, data: &[u8]) {
    assert_eq!(to.copy_from(data), data.len());
}

/// Copies as the C library does.
#[inline(never)]
fn copy(to: DmaSlice<'_>, data: &[u8]) {
    // SAFETY: the slice is as long as the data.
    unsafe { copy_bytes(data.as_ptr(), to.as_ptr(), data.len()) };
}

#[test]
fn small_copies_store_from_the_first_byte_to_the_last() {
    let memory = SharedMemory::create("pages", 3 * PAGE as u64).unwrap();
    let file = memory.descriptor().unwrap();
    let access = Access::READ | Access::WRITE;
    let region = Region::map(file.as_fd(), 0, 3 * PAGE as u64, access).unwrap();
    PAGES.store(region.whole().as_ptr().addr(), Ordering::Relaxed);
    // In the place of the one that guards memory, which knows of no such fault.
    // SAFETY: the handler calls nothing that a handler may not call.
    unsafe {
        let handler: extern "C" fn(libc::c_int) = look;
        assert_ne!(libc::signal(libc::SIGSEGV, handler as usize), libc::SIG_ERR);
    }
    for length in 2..=MOST {
        for split in 1..length {
            for protected in [0, 1] {
                check(&region, length, split, protected, write);
                check(&region, length, split, protected, copy);
            }
        }
    }
}

/// Copies `length` bytes, `split` of them into the first page, while one of the two is protected.
fn check(
    region: &Region,
    length: usize,
    split: usize,
    protected: usize,
    copy: fn(DmaSlice<'_>, &[u8]),
) {
    let source = [0xa5_u8; MOST];
    region.whole().fill(0);
    let destination = region.slice(PAGE - split, length).unwrap();
    DESTINATION.store(destination.as_ptr().addr(), Ordering::Relaxed);
    STORED.store(0, Ordering::Relaxed);
    let page = region.slice(protected * PAGE, PAGE).unwrap().as_ptr();
    // SAFETY: the page is the region's own, and is opened again by the first store to it.
    unsafe { mprotect(page.cast(), PAGE, MprotectFlags::READ) }.unwrap();
    copy(destination, &source[..length]);
    let mut stored = [0; MOST];
    destination.copy_to(&mut stored);
    assert!(stored[..length] == source[..length], "{length} bytes at {split}");
    let stored = STORED.load(Ordering::Relaxed);
    let case = format!("{length} bytes, {split} of them in the first page, page {protected}");
    assert_ne!(stored, 0, "nothing faulted: {case}");
    assert_ne!(stored, usize::MAX, "something after a gap was stored: {case}");
    let least = if protected == 0 { 0 } else { (split + 1).saturating_sub(PIECE) };
    let most = if protected == 0 { 0 } else { split };
    assert!((least..=most).contains(&(stored - 1)), "{} were stored: {case}", stored - 1);
}
