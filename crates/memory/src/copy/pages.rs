//! Copies of about a page within the processor's first cache, by the widest vectors there are.
//!
//! The system's `memcpy` copies from some 2 KiB on by one string instruction where the processor is said to be fast at
//! it. That instruction begins slowly, and nothing that follows begins before it has ended: for a page in the first
//! cache that is an eighth to a quarter of the time, and many times that where the destination is a little above the
//! source by the last twelve bits. A loop of 64-byte or 32-byte vectors has none of that. Which is fastest, and for
//! which lengths, is measured once, when the process maps its first memory.

use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::bytes;

/// From so many bytes on a copy is one of these, or large.
static FIRST: AtomicUsize = AtomicUsize::new(bytes::LEAST);

/// As many byte lengths from [`FIRST`] on are copied by the loop; 0 where it is not faster, or nobody has measured.
static SPAN: AtomicUsize = AtomicUsize::new(0);

/// Whether a copy of so many bytes is too short for [`copy`], and for anything but `memcpy`.
#[inline(always)]
pub(super) fn is_below(length: usize) -> bool {
    length < FIRST.load(Ordering::Relaxed)
}

/// Whether a copy of so many bytes is for [`copy`].
#[inline(always)]
pub(super) fn is_page(length: usize) -> bool {
    length.wrapping_sub(FIRST.load(Ordering::Relaxed)) < SPAN.load(Ordering::Relaxed)
}

/// Measures which way of copying pages is faster here, the first time: when the process maps its first memory, or before.
pub fn calibrate() {
    static MEASURED: Once = Once::new();
    MEASURED.call_once(|| {
        // A quarter of the first cache: source and destination leave room for what the program has there.
        let first = bytes::own_caches()[0];
        if let Some(faster) = vectors::faster_up_to(first, first / 4) {
            // Who sees the one before the other uses `copy` for lengths that it is not faster at, or not for some.
            SPAN.store(faster.len(), Ordering::Relaxed);
            FIRST.store(faster.start, Ordering::Relaxed);
        }
    });
}

#[cfg(target_arch = "x86_64")]
pub(super) use vectors::copy;

/// # Safety
/// As [`std::ptr::copy`].
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn copy(source: *const u8, destination: *mut u8, length: usize) {
    // SAFETY: as promised.
    unsafe { std::ptr::copy(source, destination, length) }
}

#[cfg(not(target_arch = "x86_64"))]
mod vectors {
    /// Nothing but `memcpy` is known here.
    pub(super) fn faster_up_to(_first: usize, _most: usize) -> Option<std::ops::Range<usize>> {
        None
    }
}

#[cfg(target_arch = "x86_64")]
mod vectors {
    use std::arch::x86_64::{
        __m256i, __m512i, _mm256_loadu_si256, _mm256_store_si256, _mm256_storeu_si256,
        _mm512_loadu_si512, _mm512_store_si512, _mm512_storeu_si512,
    };
    use std::hint::black_box;
    use std::ops::Range;
    use std::ptr;
    use std::sync::atomic::{AtomicBool, Ordering};

    use crate::ticks;

    /// Bytes of what is copied to find out which way is faster: a page, and the lengths around it that may be copied
    /// as one is.
    const LENGTHS: [usize; 4] = [1 << 10, 2 << 10, PAGE, 8 << 10];
    const PAGE: usize = 4096;
    const LONGEST: usize = LENGTHS[LENGTHS.len() - 1];
    /// Places of the destination in its page that are tried, at the same distance, and the first of them: a load is held up
    /// by a store before it whose address ends in the same twelve bits, so how fast a way is depends on the place.
    const PLACES: usize = 16;
    const ABOVE: usize = 16;
    /// Copies between two looks at the counter, and how often each way is measured.
    const COPIES: usize = 16;
    const ROUNDS: usize = 8;

    /// Whether [`copy`] uses vectors of 64 bytes, and not of 32.
    static WIDE: AtomicBool = AtomicBool::new(false);

    /// Copies `length` bytes, at least 64; the ranges may overlap.
    ///
    /// # Safety
    /// As [`ptr::copy`]; [`faster_up_to`] has found them faster.
    #[inline]
    pub(in super::super) unsafe fn copy(source: *const u8, destination: *mut u8, length: usize) {
        // SAFETY: as promised: the vectors that were measured are there.
        unsafe {
            match WIDE.load(Ordering::Relaxed) {
                true => copy_512(source, destination, length),
                false => copy_256(source, destination, length),
            }
        }
    }

    /// A function that copies by vectors of one kind.
    macro_rules! copy_by {
        ($name:ident, $feature:literal, $vector:ty, $load:ident, $store:ident, $store_aligned:ident) => {
            /// Copies `length` bytes, at least those of a vector; the ranges may overlap.
            ///
            /// # Safety
            /// As [`ptr::copy`]; the processor has such vectors.
            #[target_feature(enable = $feature)]
            #[inline(never)]
            unsafe fn $name(source: *const u8, destination: *mut u8, length: usize) {
                const VECTOR: usize = size_of::<$vector>();
                if source.addr().abs_diff(destination.addr()) < length {
                    // SAFETY: as promised.
                    unsafe { ptr::copy(source, destination, length) };
                    return;
                }
                // SAFETY: the first and the last vector are inside, since there are as many bytes; those between end
                // before the last one does, and those that are stored aligned begin at a multiple of their size.
                unsafe {
                    let load = |at: usize| $load(source.add(at).cast());
                    let last = length - VECTOR;
                    let (head, tail) = (load(0), load(last));
                    $store(destination.cast(), head);
                    let mut at = VECTOR - destination.addr() % VECTOR;
                    while at + 4 * VECTOR <= length {
                        let four = [0, 1, 2, 3].map(|nth| load(at + nth * VECTOR));
                        for (nth, vector) in four.into_iter().enumerate() {
                            $store_aligned(destination.add(at + nth * VECTOR).cast(), vector);
                        }
                        at += 4 * VECTOR;
                    }
                    while at < last {
                        $store_aligned(destination.add(at).cast(), load(at));
                        at += VECTOR;
                    }
                    $store(destination.add(last).cast(), tail);
                }
            }
        };
    }

    copy_by!(
        copy_512,
        "avx512f",
        __m512i,
        _mm512_loadu_si512,
        _mm512_storeu_si512,
        _mm512_store_si512
    );
    copy_by!(copy_256, "avx", __m256i, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_store_si256);

    /// The lengths of up to `most` bytes, a page's among them, that the processor copies faster by vectors than by
    /// `memcpy`, within a first cache of `first` bytes and from behind it; `None` when a page is not. [`copy`] then uses
    /// the faster vectors.
    ///
    /// Within the cache by what all places take together: at most of them the two ways may be so close that another program
    /// beside this one decides, at some of them one takes many times as long. From behind it, a string instruction may
    /// fetch ahead what a loop waits for, the more so the longer it is, and most of all from another processor's cache.
    pub(super) fn faster_up_to(first: usize, most: usize) -> Option<Range<usize>> {
        let bytes = (2 * first).max(2 * LONGEST);
        let (source, mut destination) = (vec![1; bytes + PAGE], vec![0; bytes + PAGE]);
        let page = LENGTHS.iter().position(|length| *length == PAGE)?;
        let within = LENGTHS.map(|length| within(&source, &mut destination, length));
        let wide = within[page][2] < within[page][1];
        WIDE.store(wide, Ordering::Relaxed);
        let is_faster = |[library, narrow, by_wide]: [u64; 3]| {
            let vectors = if wide { by_wide } else { narrow };
            vectors < library
        };
        let both = std::array::from_fn(|nth| {
            is_faster(within[nth]) && is_faster(behind(&source, &mut destination, LENGTHS[nth]))
        });
        faster(both, page, most)
    }

    /// Ticks of copies of so many bytes within the first cache, at all places that are tried.
    fn within(source: &[u8], destination: &mut [u8], length: usize) -> [u64; 3] {
        let places = if length == PAGE { PLACES } else { PLACES / 4 };
        let from = &source[source.as_ptr().align_offset(PAGE)..][..length];
        let page = destination.as_ptr().align_offset(PAGE);
        let mut all = [0_u64; 3];
        for to in (ABOVE..PAGE).step_by(PAGE / places) {
            let to = &mut destination[page + to..][..length];
            let ticks = measure(from, to, COPIES, length);
            all.iter_mut().zip(ticks).for_each(|(all, ticks)| *all = all.saturating_add(ticks));
        }
        all
    }

    /// Ticks of copies of so many bytes after the other, from the beginning of both to the end.
    fn behind(source: &[u8], destination: &mut [u8], length: usize) -> [u64; 3] {
        let whole = source.len() / length * length;
        measure(&source[..whole], &mut destination[..whole], 1, length)
    }

    /// The lengths around the one at `page` that vectors copy faster, of [`LENGTHS`] for each of which it is said; up to
    /// `most` where that holds for the longest.
    fn faster(is_faster: [bool; LENGTHS.len()], page: usize, most: usize) -> Option<Range<usize>> {
        let (shorter, longer) = is_faster.split_at(page);
        let below = shorter.iter().rev().take_while(|it| **it).count();
        let above = longer.iter().take_while(|it| **it).count();
        let end = match above == longer.len() {
            true => most,
            false => most.min(LENGTHS.get(page + above.checked_sub(1)?)? + 1),
        };
        let start = LENGTHS[page - below];
        (start < end).then_some(start..end)
    }

    /// Ticks of copying `source` to `destination` so many times, `length` bytes at a time: by `memcpy`, by vectors of 32
    /// bytes and by those of 64.
    fn measure(source: &[u8], destination: &mut [u8], times: usize, length: usize) -> [u64; 3] {
        let [narrow, wide] = [is_x86_feature_detected!("avx"), is_x86_feature_detected!("avx512f")];
        let there = [(true, ptr::copy as Way), (narrow, copy_256), (wide, copy_512)];
        let mut best = [u64::MAX; 3];
        for _ in 0..ROUNDS {
            for (best, (_, way)) in best.iter_mut().zip(there).filter(|(_, (there, _))| *there) {
                let begun = ticks::now();
                for _ in 0..times {
                    let to = destination.chunks_exact_mut(length);
                    for (from, to) in source.chunks_exact(length).zip(to) {
                        // SAFETY: both slices have as many bytes; the feature is there.
                        unsafe { black_box(way)(from.as_ptr(), to.as_mut_ptr(), length) };
                    }
                }
                *best = (*best).min(ticks::now().wrapping_sub(begun));
            }
        }
        black_box(destination);
        best
    }

    /// A way to copy.
    type Way = unsafe fn(*const u8, *mut u8, usize);

    #[cfg(test)]
    mod tests {
        use proptest::prelude::*;

        use super::*;

        #[test]
        fn lengths_around_a_page_are_copied_as_one_where_that_is_faster() {
            let of = |is_faster| faster(is_faster, 2, 12_000);
            assert_eq!(of([true; 4]), Some(1024..12_000));
            assert_eq!(of([false, true, true, true]), Some(2048..12_000));
            assert_eq!(of([true, false, true, false]), Some(4096..4097));
            assert_eq!(of([true, true, false, true]), None);
            assert_eq!(faster([true; 4], 2, 512), None);
        }

        proptest! {
            #[test]
            fn vectors_copy_exactly_the_range(
                from in 0usize..130, to in 0usize..130, length in 64usize..5000, apart in any::<bool>()
            ) {
                let ways = [
                    (is_x86_feature_detected!("avx"), copy_256 as Way),
                    (is_x86_feature_detected!("avx512f"), copy_512),
                ];
                for (_, way) in ways.into_iter().filter(|(there, _)| *there) {
                    let mut bytes: Vec<u8> = (0..11_000_usize).map(|at| ((at * 31) >> 3) as u8).collect();
                    let to = if apart { 5200 + to } else { to };
                    let mut expected = bytes.clone();
                    expected.copy_within(from..from + length, to);
                    let start = bytes.as_mut_ptr();
                    // SAFETY: both ranges are inside of the vector, and the processor has these vectors.
                    unsafe { way(start.add(from), start.add(to), length) };
                    prop_assert!(bytes == expected);
                }
            }
        }
    }
}
