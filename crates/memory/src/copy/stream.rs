//! Copies by streaming stores, which neither read the destination's lines nor leave them in a cache.

/// How a processor streams.
pub(super) type StreamingCopy = unsafe fn(*const u8, *mut u8, usize);

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn streaming() -> Option<StreamingCopy> {
    None
}

/// The widest way that gains anything: stores of 64 bytes were measured to be no faster than
/// those of 32.
#[cfg(target_arch = "x86_64")]
pub(super) fn streaming() -> Option<StreamingCopy> {
    Some(if is_x86_feature_detected!("avx2") { x86::stream_avx2 } else { x86::stream_sse2 })
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use std::arch::x86_64::{
        __m128i, __m256i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128, _mm256_loadu_si256,
        _mm256_stream_si256,
    };
    use std::ptr;

    /// A loop that follows one page after the other waits at each: what a processor fetches ahead ends with the page. So
    /// several are copied at once, each as a stream of its own.
    const PAGES: usize = 4;
    const PAGE: usize = 4096;

    macro_rules! stream {
        ($name:ident, $feature:literal, $vector:ty, $load:ident, $store:ident) => {
            /// Copies with streaming stores; all of them are seen by others before any later store.
            ///
            /// # Safety
            /// Both ranges are valid for `length` bytes and do not overlap; the processor has the
            /// feature.
            #[target_feature(enable = $feature)]
            pub(in super::super) unsafe fn $name(
                source: *const u8,
                destination: *mut u8,
                length: usize,
            ) {
                const STEP: usize = 4 * size_of::<$vector>();
                let head = destination.align_offset(STEP).min(length);
                let end = head + (length - head) / STEP * STEP;
                let pages = head + (length - head) / (PAGES * PAGE) * (PAGES * PAGE);
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
                    for first in (head..pages).step_by(PAGES * PAGE) {
                        for at in (first..first + PAGE).step_by(STEP) {
                            (0..PAGES).for_each(|page| step(at + page * PAGE));
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
