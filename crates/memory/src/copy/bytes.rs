//! Copying bytes: the one place that decides how.
//!
//! A plain copy reads the destination's lines before it overwrites them, and leaves them in the
//! cache. *Streaming* stores do neither: to memory that is in no cache that is 1.3 to 1.7 times as
//! fast, but to lines that are in one 0.7 times. So a large copy chooses, part by part
//! ([`choice`](super::choice)), by whether its destination is in a cache ([`cache`](super::cache)), or
//! was copied to so lately that it should be, and by how fast both ways were.

use std::cell::RefCell;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering, compiler_fence};

use super::choice::{Choice, CopyMethod};
use super::pages;
use super::stream::streaming;
use crate::ticks;

/// Bytes copied between two looks at the cache, and at whether to stop.
const ROUND: usize = 4 << 20;

/// No copy of fewer bytes is large: it would pay for a look that gains little.
pub(super) const LEAST: usize = 1 << 20;

/// From how many bytes on a copy is large; [`LEAST`] until the cache was asked for its size.
static LARGE: AtomicUsize = AtomicUsize::new(LEAST);

/// Whether a copy is large: both its ends together are more than the processor's own cache holds.
#[inline]
pub(super) fn is_large(length: usize) -> bool {
    length >= LARGE.load(Ordering::Relaxed)
}

/// Asks the system for the size of the processor's own cache, the second level; and whether a copy
/// is large by it.
#[cold]
fn is_large_here(length: usize) -> bool {
    static ASKED: std::sync::Once = std::sync::Once::new();
    ASKED.call_once(|| LARGE.store(own_caches()[1].max(LEAST), Ordering::Relaxed));
    is_large(length)
}

/// Bytes of the processor's own caches for data, the first and the second level; 0 where the system does not say.
pub fn own_caches() -> [usize; 2] {
    static BYTES: OnceLock<[usize; 2]> = OnceLock::new();
    // Of the first level, the one for data comes before the one for instructions.
    *BYTES.get_or_init(|| {
        let caches = caches();
        let of = |wanted| caches.iter().find(|(level, _)| *level == wanted);
        [1, 2].map(|level| of(level).map_or(0, |(_, bytes)| *bytes))
    })
}

/// Bytes of the last cache before memory, which processors share; 0 where the system does not say.
fn last_cache() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| caches().into_iter().max().map_or(0, |(_, bytes)| bytes))
}

/// The caches as the system describes the first processor's: level and bytes.
fn caches() -> Vec<(u32, usize)> {
    let folder = std::path::Path::new("/sys/devices/system/cpu/cpu0/cache");
    let about = |index: usize, what: &str| {
        std::fs::read_to_string(folder.join(format!("index{index}/{what}"))).ok()
    };
    let one = |index| {
        Some((about(index, "level")?.trim().parse().ok()?, kibibytes(&about(index, "size")?)?))
    };
    (0..8).filter_map(one).collect()
}

thread_local! {
    static CHOICE: RefCell<Choice> = const { RefCell::new(Choice::new()) };
}

/// A size as the system writes it: `2048K`.
fn kibibytes(text: &str) -> Option<usize> {
    text.trim().strip_suffix('K')?.parse::<usize>().ok()?.checked_mul(1024)
}

/// Copies of up to so many bytes store each byte once.
const SMALL: usize = 64;
const _: () = assert!(SMALL + 1 == 65, "`copy` matches by it");

/// Copies `length` bytes; the two ranges may overlap, by their addresses: not where the same memory is mapped twice.
///
/// Up to 64 bytes are stored from the first to the last, each once: a receiver that clears a flag
/// when it has seen it does not find it set again by the same copy. 1, 2, 4, 8 and 16 bytes are one
/// load and one store.
///
/// # Safety
/// `source` is readable and `destination` writable for `length` bytes. Others may change them
/// meanwhile: what is copied then is any mixture.
#[inline(always)]
pub unsafe fn copy(source: *const u8, destination: *mut u8, length: usize) {
    // SAFETY: as promised.
    unsafe {
        match length {
            // The long ones first: they pay for a call already.
            65.. => copy_long(source, destination, length),
            _ => copy_small(source, &mut To(destination), length),
        }
    }
}

/// Copies `length` bytes to memory that nobody else looks at, and that does not overlap the source.
///
/// Some bytes of a small copy are stored twice, which takes fewer and longer pieces than to store each once. A
/// consumer that is quicker than its producer finds rings empty, and not its producer them full: then the line of
/// the index moves between the two processors once for many messages, and not for each.
///
/// # Safety
/// As [`copy`], of ranges that do not overlap; that somebody else sees a byte stored twice does no harm.
#[inline(always)]
pub unsafe fn copy_out(source: *const u8, destination: *mut u8, length: usize) {
    // SAFETY: as promised; a `T` is no longer than the range, and twice a `T` no shorter.
    unsafe {
        match length {
            65.. => copy_long(source, destination, length),
            33.. => copy_quarters(source, destination, length),
            16.. => copy_ends::<u128>(source, destination, length),
            8.. => copy_ends::<u64>(source, destination, length),
            4.. => copy_ends::<u32>(source, destination, length),
            2.. => copy_ends::<u16>(source, destination, length),
            1 => *destination = *source,
            0 => {}
        }
    }
}

/// Copies more than [`SMALL`] bytes. Each kind of copy is a call from where it is chosen: those of a kibibyte would feel
/// a call in between.
///
/// # Safety
/// As [`copy`].
#[inline(always)]
unsafe fn copy_long(source: *const u8, destination: *mut u8, length: usize) {
    // SAFETY: as promised.
    unsafe {
        if pages::is_below(length) {
            ptr::copy(source, destination, length);
        } else if pages::is_page(length) {
            pages::copy(source, destination, length);
        // What is below any limit needs no look at the one that holds here.
        } else if length < LEAST || !is_large(length) {
            ptr::copy(source, destination, length);
        } else {
            copy_all_of_large(source, destination, length);
        }
    }
}

/// [`copy_large`] that nobody stops.
///
/// # Safety
/// As [`copy`].
#[cold]
#[inline(never)]
unsafe fn copy_all_of_large(source: *const u8, destination: *mut u8, length: usize) {
    // SAFETY: as promised.
    unsafe { copy_large(source, destination, length, || false) };
}

/// Copies the first and the last bytes of a range that make a `T`.
///
/// # Safety
/// As [`copy_out`]; `length` is one to two times the size of `T`, which is plain bytes.
#[inline(always)]
unsafe fn copy_ends<T: Copy>(source: *const u8, destination: *mut u8, length: usize) {
    let last = length - size_of::<T>();
    // SAFETY: both ends are inside of the range. Both are read before one is written, so the
    // ranges may overlap.
    unsafe {
        let first_end = source.cast::<T>().read_unaligned();
        let last_end = source.add(last).cast::<T>().read_unaligned();
        destination.cast::<T>().write_unaligned(first_end);
        destination.add(last).cast::<T>().write_unaligned(last_end);
    }
}

/// Copies the first and the last 32 bytes of a range.
///
/// # Safety
/// As [`copy_out`]; `length` is 32 to 64.
#[inline(always)]
unsafe fn copy_quarters(source: *const u8, destination: *mut u8, length: usize) {
    let last = length - 32;
    // SAFETY: all four are inside of the range.
    unsafe {
        // In registers of their own: a compiler may copy two of them as one by way of the stack.
        let quarters =
            [0, 16, last, last + 16].map(|at| (at, source.add(at).cast::<u128>().read_unaligned()));
        for (at, quarter) in quarters {
            destination.add(at).cast::<u128>().write_unaligned(quarter);
        }
    }
}

/// Where a small copy stores.
trait Put {
    /// Stores `value` in one piece, `at` bytes from the beginning.
    ///
    /// # Safety
    /// It is inside of the destination.
    unsafe fn put<T: Copy>(&mut self, at: usize, value: T);

    /// Copies `length` bytes from `source` on where the destination is among them, and its pieces would be stored before
    /// others are read; whether it is.
    ///
    /// # Safety
    /// As [`copy`], of at most [`SMALL`] bytes.
    unsafe fn copied_overlapping(&mut self, source: *const u8, length: usize) -> bool;
}

/// Memory from this address on.
struct To(*mut u8);

impl Put for To {
    #[inline(always)]
    unsafe fn put<T: Copy>(&mut self, at: usize, value: T) {
        // SAFETY: as promised.
        unsafe { self.0.add(at).cast::<T>().write_unaligned(value) }
        // The compiler is free to store later pieces before, or to store again, what it takes for memory of this
        // thread alone.
        compiler_fence(Ordering::SeqCst);
    }

    #[inline(always)]
    unsafe fn copied_overlapping(&mut self, source: *const u8, length: usize) -> bool {
        let overlaps = self.0.addr().abs_diff(source.addr()) < length;
        if overlaps {
            // SAFETY: as promised.
            unsafe { copy_overlapping(source, self.0, length) };
        }
        overlaps
    }
}

/// Copies up to [`SMALL`] bytes without a call.
///
/// # Safety
/// As [`copy`].
#[inline(always)]
unsafe fn copy_small(source: *const u8, to: &mut impl Put, length: usize) {
    // Questions of few lengths each: of one with all of them a compiler makes a jump through a table, which takes longer
    // than the copy.
    // SAFETY: the sizes fit the length.
    unsafe {
        match length {
            17.. => match length {
                64 => copy_as::<u128, 4>(source, to),
                _ => {
                    rare();
                    match length {
                        32 => copy_as::<u128, 2>(source, to),
                        _ => copy_parts(source, to, length),
                    }
                }
            },
            8.. => match length {
                8 => copy_as::<u64, 1>(source, to),
                16 => copy_as::<u128, 1>(source, to),
                _ => copy_parts(source, to, length),
            },
            4.. => match length {
                4 => copy_as::<u32, 1>(source, to),
                _ => copy_parts(source, to, length),
            },
            _ => match length {
                2 => copy_as::<u16, 1>(source, to),
                1 => copy_as::<u8, 1>(source, to),
                _ => copy_parts(source, to, length),
            },
        }
    }
}

/// Tells the compiler that what leads here is less common than what does not: of several questions it would ask another
/// one first.
#[cold]
#[inline(always)]
fn rare() {}

/// Copies `COUNT` pieces, all read before one is written, so the ranges may overlap.
///
/// # Safety
/// As [`copy`], for that many bytes; `T` is plain bytes.
#[inline(always)]
unsafe fn copy_as<T: Copy, const COUNT: usize>(source: *const u8, to: &mut impl Put) {
    // SAFETY: the pieces are the range.
    unsafe {
        let pieces: [T; COUNT] = source.cast::<[T; COUNT]>().read_unaligned();
        for (nth, piece) in pieces.into_iter().enumerate() {
            to.put(nth * size_of::<T>(), piece);
        }
    }
}

/// Copies fewer than [`SMALL`] bytes, as pieces of 16, 8, 4, 2 and 1 bytes.
///
/// # Safety
/// As [`copy`].
#[inline]
unsafe fn copy_parts(source: *const u8, to: &mut impl Put, length: usize) {
    /// # Safety
    /// Where `there`, the `T` at `at` is inside of both ranges.
    #[inline(always)]
    unsafe fn part<T: Copy>(source: *const u8, to: &mut impl Put, at: usize, there: bool) {
        if there {
            // SAFETY: as promised.
            unsafe { to.put(at, source.add(at).cast::<T>().read_unaligned()) }
        }
    }
    // SAFETY: each piece begins where the ones before it end, inside of the range.
    unsafe {
        if to.copied_overlapping(source, length) {
            return;
        }
        part::<u128>(source, to, 0, length & 32 != 0);
        part::<u128>(source, to, 16, length & 32 != 0);
        part::<u128>(source, to, length & 32, length & 16 != 0);
        part::<u64>(source, to, length & !15, length & 8 != 0);
        if length & 7 != 0 {
            part::<u32>(source, to, length & !7, length & 4 != 0);
            part::<u16>(source, to, length & !3, length & 2 != 0);
            part::<u8>(source, to, length & !1, length & 1 != 0);
        }
    }
}

/// [`copy_parts`] of bytes that are set aside first.
///
/// # Safety
/// As [`copy`].
#[cold]
#[inline(never)]
unsafe fn copy_overlapping(source: *const u8, destination: *mut u8, length: usize) {
    let mut aside = [0; SMALL];
    // SAFETY: as promised; what is set aside is as long as the longest.
    unsafe {
        ptr::copy_nonoverlapping(source, aside.as_mut_ptr(), length);
        copy_parts(aside.as_ptr(), &mut To(destination), length);
    }
}

/// The same for large copies, asking `stop` between rounds of some megabytes; false when that ended
/// it.
///
/// # Safety
/// As [`copy`].
pub(crate) unsafe fn copy_large(
    source: *const u8,
    destination: *mut u8,
    length: usize,
    stop: impl Fn() -> bool,
) -> bool {
    // A handler of a signal may copy while this thread looks at its choice: then nothing is known.
    let by_choice = |start: *const u8, length: usize| {
        // SAFETY: it is asked about parts of the destination.
        let cold = || unsafe { is_cold(start, length) };
        CHOICE.with(|choice| {
            let choice = choice.try_borrow_mut();
            // Half of the cache: the source needs a place, too.
            let cache = last_cache() / 2;
            choice.ok().map(|mut it| it.choose(start.addr(), length, cache, cold))
        })
    };
    let took = |chosen, length, ticks| {
        CHOICE.with(|choice| {
            if let (Ok(mut choice), Some(chosen)) = (choice.try_borrow_mut(), chosen) {
                choice.took(chosen, length, ticks);
            }
        });
    };
    let choose = |start, length| {
        let (chosen, begun) = (by_choice(start, length), ticks::now());
        let way = chosen.map_or(CopyMethod::Plain, |chosen| chosen.way);
        (way, move || took(chosen, length, ticks::now().wrapping_sub(begun)))
    };
    // SAFETY: as promised.
    unsafe { copy_by(source, destination, length, choose, stop) }
}

/// [`copy_large`] with somebody who says how each part of the destination is copied, and what is
/// called when it was.
///
/// # Safety
/// As [`copy`].
unsafe fn copy_by<F: FnOnce()>(
    source: *const u8,
    destination: *mut u8,
    length: usize,
    choose: impl Fn(*const u8, usize) -> (CopyMethod, F),
    stop: impl Fn() -> bool,
) -> bool {
    let apart = (source as usize).abs_diff(destination as usize) >= length;
    let stream = if apart && is_large_here(length) { streaming() } else { None };
    let Some([page_by_page, pages_at_once]) = stream else {
        // SAFETY: as promised.
        unsafe { ptr::copy(source, destination, length) };
        return true;
    };
    for at in (0..length).step_by(ROUND) {
        if stop() {
            return false;
        }
        let count = ROUND.min(length - at);
        // SAFETY: inside of both ranges, which do not overlap.
        unsafe {
            let (source, destination) = (source.add(at), destination.add(at));
            let (way, done) = choose(destination, count);
            match way {
                CopyMethod::Stream => page_by_page(source, destination, count),
                CopyMethod::StreamPages => pages_at_once(source, destination, count),
                CopyMethod::Plain => ptr::copy_nonoverlapping(source, destination, count),
            }
            done();
        }
    }
    true
}

/// Whether a range is in no cache.
///
/// # Safety
/// It is readable.
#[cfg(target_arch = "x86_64")]
unsafe fn is_cold(start: *const u8, length: usize) -> bool {
    // SAFETY: as promised.
    unsafe { super::cache::is_cold(start, length) }
}

/// # Safety
/// None: where nothing streams, nobody asks.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn is_cold(_start: *const u8, _length: usize) -> bool {
    false
}

#[cfg(test)]
mod tests;
