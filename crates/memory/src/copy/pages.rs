//! Copies of about a page within the processor's first cache, by the widest vectors there are.
//!
//! The system's `memcpy` copies from some 2 KiB on by one string instruction where the processor is said to be fast at
//! it. That instruction begins slowly, and nothing that follows begins before it has ended: for a page in the first
//! cache that is an eighth of the time. A loop of 64-byte vectors has neither. Which of both is faster is measured
//! once, when the process maps its first memory.

use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

/// From so many bytes on a copy may be one of these: below, `memcpy` has loops of its own.
const LEAST: usize = 1 << 10;

/// As many byte lengths from [`LEAST`] on are copied by the loop; 0 where it is not faster, or nobody has measured.
static SPAN: AtomicUsize = AtomicUsize::new(0);

/// Whether a copy of so many bytes is for [`copy`].
#[inline]
pub(super) fn is_page(length: usize) -> bool {
    length.wrapping_sub(LEAST) < SPAN.load(Ordering::Relaxed)
}

/// Measures which way is faster here, the first time.
pub(crate) fn calibrate() {
    static MEASURED: Once = Once::new();
    MEASURED.call_once(|| {
        // A quarter of the first cache: source and destination leave room for what the program has there.
        let most = super::bytes::own_caches()[0] / 4;
        if most > LEAST && vectors::are_faster() {
            SPAN.store(most - LEAST, Ordering::Relaxed);
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
    pub(super) fn are_faster() -> bool {
        false
    }
}

#[cfg(target_arch = "x86_64")]
mod vectors {
    use std::arch::x86_64::{__m512i, _mm512_loadu_si512, _mm512_store_si512, _mm512_storeu_si512};
    use std::hint::black_box;
    use std::ptr;

    use crate::ticks;

    /// Bytes of a vector, and of a line of the cache.
    const VECTOR: usize = size_of::<__m512i>();
    /// Bytes that are copied to find out which way is faster.
    const PAGE: usize = 4096;
    /// Copies between two looks at the counter, and how often both ways are measured.
    const COPIES: usize = 16;
    const ROUNDS: usize = 16;

    /// Copies `length` bytes, at least [`VECTOR`]; the ranges may overlap.
    ///
    /// # Safety
    /// As [`ptr::copy`]; [`are_faster`] has found the processor to have such vectors.
    #[target_feature(enable = "avx512f")]
    #[inline(never)]
    pub(in super::super) unsafe fn copy(source: *const u8, destination: *mut u8, length: usize) {
        if source.addr().abs_diff(destination.addr()) < length {
            // SAFETY: as promised.
            unsafe { ptr::copy(source, destination, length) };
            return;
        }
        // SAFETY: the first and the last vector are inside, since there are as many bytes; those between end before
        // the last one does, and those that are stored aligned begin at a multiple of their size.
        unsafe {
            let load = |at: usize| _mm512_loadu_si512(source.add(at).cast());
            let last = length - VECTOR;
            let (head, tail) = (load(0), load(last));
            _mm512_storeu_si512(destination.cast(), head);
            let mut at = VECTOR - destination.addr() % VECTOR;
            while at + 4 * VECTOR <= length {
                let four = [0, 1, 2, 3].map(|nth| load(at + nth * VECTOR));
                for (nth, vector) in four.into_iter().enumerate() {
                    _mm512_store_si512(destination.add(at + nth * VECTOR).cast(), vector);
                }
                at += 4 * VECTOR;
            }
            while at < last {
                _mm512_store_si512(destination.add(at).cast(), load(at));
                at += VECTOR;
            }
            _mm512_storeu_si512(destination.add(last).cast(), tail);
        }
    }

    /// Whether the processor has such vectors, and copies pages faster by them than by `memcpy`.
    pub(super) fn are_faster() -> bool {
        is_x86_feature_detected!("avx512f") && {
            let (source, mut destination) = (vec![1; PAGE], vec![0; PAGE]);
            let mut best = [u64::MAX; 2];
            for _ in 0..ROUNDS {
                for (best, way) in best.iter_mut().zip([ptr::copy, copy as Way]) {
                    let begun = ticks::now();
                    for _ in 0..COPIES {
                        // SAFETY: both vectors have as many bytes; the feature is there.
                        unsafe { black_box(way)(source.as_ptr(), destination.as_mut_ptr(), PAGE) };
                    }
                    *best = (*best).min(ticks::now().wrapping_sub(begun));
                }
            }
            black_box(&mut destination);
            let [library, vectors] = best;
            vectors < library
        }
    }

    /// A way to copy.
    type Way = unsafe fn(*const u8, *mut u8, usize);

    #[cfg(test)]
    mod tests {
        use proptest::prelude::*;

        use super::*;

        proptest! {
            #[test]
            fn vectors_copy_exactly_the_range(
                from in 0usize..130, to in 0usize..130, length in VECTOR..5000, apart in any::<bool>()
            ) {
                if is_x86_feature_detected!("avx512f") {
                    let mut bytes: Vec<u8> = (0..11_000_usize).map(|at| ((at * 31) >> 3) as u8).collect();
                    let to = if apart { 5200 + to } else { to };
                    let mut expected = bytes.clone();
                    expected.copy_within(from..from + length, to);
                    let start = bytes.as_mut_ptr();
                    // SAFETY: both ranges are inside of the vector.
                    unsafe { copy(start.add(from), start.add(to), length) };
                    prop_assert!(bytes == expected);
                }
            }
        }
    }
}
