//! Memory that is zeroed before it is freed, where a tenant's data is worked on.
//!
//! Libraries that compress keep what they have seen in memory of their own, and free that as it is. They obtain it from
//! the program's allocator, so that is where it can be wiped: a program that runs engines declares a
//! [`WipingAllocator`] as its global one. It zeroes what a thread frees as long as that has a [`WipeFreed`], and is the
//! system's allocator otherwise.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{Ordering, compiler_fence};

thread_local! {
    /// How many of this thread's [`WipeFreed`] there are.
    static WIPING: Cell<u32> = const { Cell::new(0) };
    /// How often this thread wiped what it freed.
    static WIPED: Cell<u64> = const { Cell::new(0) };
}

/// As long as it is there, what its thread frees is zeroed before that, where the program's allocator is a
/// [`WipingAllocator`].
#[derive(Debug)]
pub struct WipeFreed(PhantomData<*const ()>);

impl WipeFreed {
    /// From now on, until it is dropped. They may be nested.
    #[inline]
    pub fn begin() -> WipeFreed {
        // A thread that ends has no such variable any more, and does not work on anything.
        let _ = WIPING.try_with(|depth| depth.set(depth.get() + 1));
        WipeFreed(PhantomData)
    }
}

impl Drop for WipeFreed {
    #[inline]
    fn drop(&mut self) {
        let _ = WIPING.try_with(|depth| depth.set(depth.get().saturating_sub(1)));
    }
}

/// Whether the program's allocator is a [`WipingAllocator`].
pub fn is_installed() -> bool {
    let count = || WIPED.try_with(Cell::get).unwrap_or(0);
    let _wiping = WipeFreed::begin();
    let before = count();
    drop(std::hint::black_box(Box::new(0u8)));
    count() != before
}

/// The system's allocator, which zeroes what is freed under a [`WipeFreed`].
#[derive(Debug, Clone, Copy)]
pub struct WipingAllocator;

#[inline]
fn wipes() -> bool {
    WIPING.try_with(Cell::get).is_ok_and(|depth| depth > 0)
}

// SAFETY: all memory is the system allocator's, with the layouts that it was asked for. What is done beside that writes
// to memory that its owner has given back, and copies to memory as long as what is copied.
unsafe impl GlobalAlloc for WipingAllocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    #[inline]
    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises, nobody uses the memory any more, which is as long as its layout says.
        unsafe {
            if wipes() {
                wipe(place, layout.size());
                let _ = WIPED.try_with(|count| count.set(count.get().wrapping_add(1)));
            }
            System.dealloc(place, layout);
        }
    }

    #[inline]
    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !wipes() {
            // SAFETY: as the caller promises.
            return unsafe { System.realloc(place, layout, size) };
        }
        // SAFETY: the caller promises that the new size makes a layout. Where there is no other memory the old one stays,
        // else it is as long as what is copied, and the old one is nobody's any more.
        unsafe {
            let other = System.alloc(Layout::from_size_align_unchecked(size, layout.align()));
            if !other.is_null() {
                ptr::copy_nonoverlapping(place, other, size.min(layout.size()));
                self.dealloc(place, layout);
            }
            other
        }
    }
}

/// Zeroes memory that is about to be freed, which a compiler would leave out.
///
/// # Safety
/// `length` bytes at `place` may be written to.
#[inline(never)]
unsafe fn wipe(place: *mut u8, length: usize) {
    // SAFETY: as promised.
    unsafe { ptr::write_bytes(place, 0, length) };
    std::hint::black_box(place);
    compiler_fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: usize = 4096;

    /// Memory with the byte 7 in it, and its layout.
    fn used() -> (*mut u8, Layout) {
        let layout = Layout::from_size_align(LENGTH, 64).unwrap();
        // SAFETY: the layout is not empty, and the memory as long as it says.
        unsafe {
            let place = WipingAllocator.alloc(layout);
            assert!(!place.is_null());
            ptr::write_bytes(place, 7, LENGTH);
            (place, layout)
        }
    }

    #[test]
    fn memory_moves_with_what_is_in_it_while_it_is_wiped() {
        for (size, wiping) in [(2 * LENGTH, true), (LENGTH / 2, true), (2 * LENGTH, false)] {
            let guard = wiping.then(WipeFreed::begin);
            let (place, layout) = used();
            // SAFETY: the memory is of this layout, and is freed with the size that it has then.
            unsafe {
                let other = WipingAllocator.realloc(place, layout, size);
                assert!((0..size.min(LENGTH)).all(|at| *other.add(at) == 7), "{size} bytes");
                WipingAllocator.dealloc(other, Layout::from_size_align(size, 64).unwrap());
            }
            drop(guard);
        }
    }

    #[test]
    fn what_is_wiped_is_zero_and_a_thread_wipes_as_long_as_one_of_its_guards_is_there() {
        let (place, layout) = used();
        // SAFETY: the memory is as long as the layout says, and freed afterwards.
        unsafe {
            wipe(place, LENGTH);
            assert!((0..LENGTH).all(|at| *place.add(at) == 0));
            WipingAllocator.dealloc(place, layout);
        }
        assert!(!wipes() && !is_installed(), "the allocator of this program is not declared");
        let first = WipeFreed::begin();
        let second = WipeFreed::begin();
        drop(first);
        assert!(wipes() && !std::thread::spawn(wipes).join().unwrap());
        drop(second);
        assert!(!wipes());
    }
}
