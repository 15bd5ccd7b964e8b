//! Copies by streaming stores, which neither read the destination's lines nor leave them in a cache.

/// How a processor streams.
pub(super) type StreamingCopy = unsafe fn(*const u8, *mut u8, usize);

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn streaming() -> Option<[StreamingCopy; 2]> {
    None
}

/// The widest way that gains anything: stores of 64 bytes were measured to be no faster than
/// those of 32. Page after page, and several pages at once.
#[cfg(target_arch = "x86_64")]
pub(super) fn streaming() -> Option<[StreamingCopy; 2]> {
    use x86::{PAGES, stream_avx2, stream_sse2};
    Some(match is_x86_feature_detected!("avx2") {
        true => [stream_avx2::<1>, stream_avx2::<PAGES>],
        false => [stream_sse2::<1>, stream_sse2::<PAGES>],
    })
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use std::arch::x86_64::{
        __m128i, __m256i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128, _mm256_loadu_si256,
        _mm256_stream_si256,
    };
    use std::ptr;

    /// On some processors a loop that follows one page after the other waits at each, as what they fetch ahead ends with
    /// the page: there several that are copied at once, each as a stream of its own, are faster (an Intel Xeon). Others are
    /// faster with one at a time (17 GB/s against 15 on an AMD EPYC of the fifth generation).
    pub(in super::super) const PAGES: usize = 4;
    const PAGE: usize = 4096;

    macro_rules! stream {
        ($name:ident, $feature:literal, $vector:ty, $load:ident, $store:ident) => {
            /// Copies `AT_ONCE` pages at once with streaming stores; all of them are seen by others before any later
            /// store.
            ///
            /// # Safety
            /// Both ranges are valid for `length` bytes and do not overlap; the processor has the
            /// feature.
            #[target_feature(enable = $feature)]
            pub(in super::super) unsafe fn $name<const AT_ONCE: usize>(
                source: *const u8,
                destination: *mut u8,
                length: usize,
            ) {
                const STEP: usize = 4 * size_of::<$vector>();
                let head = destination.align_offset(STEP).min(length);
                let end = head + (length - head) / STEP * STEP;
                let pages = head + (length - head) / (AT_ONCE * PAGE) * (AT_ONCE * PAGE);
                let step = |at: usize| {
                    // SAFETY: head, steps and tail are inside of the ranges, and the destination of
                    // each step is aligned to it.
                    unsafe {
                        let from = source.add(at).cast::<$vector>();
                        let to = destination.add(at).cast::<$vector>();
                        let a = $load(from);
                        let b = $load(from.add(1));
                        let c = $load(from.add(2));
                        let d = $load(from.add(3));
                        $store(to, a);
                        $store(to.add(1), b);
                        $store(to.add(2), c);
                        $store(to.add(3), d);
                    }
                };
                // SAFETY: as above.
                unsafe {
                    ptr::copy_nonoverlapping(source, destination, head);
                    for first in (head..pages).step_by(AT_ONCE * PAGE) {
                        for at in (first..first + PAGE).step_by(STEP) {
                            (0..AT_ONCE).for_each(|page| step(at + page * PAGE));
                        }
                    }
                    (pages..end).step_by(STEP).for_each(step);
                    let (from, to) = (source.add(end), destination.add(end));
                    ptr::copy_nonoverlapping(from, to, length - end);
                }
                _mm_sfence();
            }
        };
    }

    stream!(stream_avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256);
    stream!(stream_sse2, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128);
}
