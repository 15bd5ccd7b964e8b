//! Whether memory is in a cache: found by how long some loads from it take.
//!
//! A cache's size does not tell what it holds, and caches differ: where the one takes 15 ns for a
//! load that a shared cache answers, another takes 40. So the limit between a hit and a miss is
//! measured on this machine, once, with lines that were thrown out of the cache.
#![cfg(target_arch = "x86_64")]

use std::arch::x86_64::{_mm_clflush, _mm_lfence, _mm_mfence, _rdtsc};
use std::sync::OnceLock;

/// Lines that are looked at to judge a range.
const SAMPLES: usize = 9;
/// Lines that are looked at to find the limit, and how often.
const TRIALS: usize = 33;
const ROUNDS: usize = 8;

const PAGE: usize = 4096;
const LINE: usize = 64;

/// Whether most of `length` bytes from `start` are in no cache. Looks at some of them only.
///
/// # Safety
/// They are readable. Others may change them meanwhile.
pub(super) unsafe fn is_cold(start: *const u8, length: usize) -> bool {
    // SAFETY: as promised.
    unsafe { is_cold_by(*LIMIT.get_or_init(limit), start, length) }
}

/// [`is_cold`], where a load that takes more than `limit` cycles is a miss.
///
/// # Safety
/// As [`is_cold`].
unsafe fn is_cold_by(limit: u64, start: *const u8, length: usize) -> bool {
    let skipped = start.align_offset(PAGE).min(length);
    let (start, pages) = (start.wrapping_add(skipped), (length - skipped) / PAGE);
    if pages < SAMPLES {
        return false;
    }
    let misses = (0..SAMPLES).filter(|nth| {
        let at = nth * pages / SAMPLES * PAGE + line_of(*nth);
        // SAFETY: inside of the range.
        unsafe { cycles(start.wrapping_add(at), false) > limit }
    });
    misses.count() > SAMPLES / 2
}

/// Where in its page the `nth` sample is: not the same place in all, and not at its ends.
fn line_of(nth: usize) -> usize {
    (nth * 29 + 7) % (PAGE / LINE / 2) * LINE
}

/// Cycles of a load. Before it another one, half a page away, sees to the address translation;
/// with `thrown_out`, the line is thrown out of the cache in between.
///
/// # Safety
/// `at` is readable and in the first half of a page's length of readable memory.
unsafe fn cycles(at: *const u8, thrown_out: bool) -> u64 {
    // SAFETY: as promised; the fences keep the loads between the looks at the counter.
    unsafe {
        at.wrapping_add(PAGE / 2).read_volatile();
        if thrown_out {
            _mm_clflush(at);
            _mm_mfence();
        }
        _mm_lfence();
        let begun = _rdtsc();
        _mm_lfence();
        at.read_volatile();
        _mm_lfence();
        _rdtsc().wrapping_sub(begun)
    }
}

/// Cycles from which on a load is a miss.
static LIMIT: OnceLock<u64> = OnceLock::new();

/// Measures it: between a load from the nearest cache and one from memory, nearer to memory, as
/// shared caches are slower than the nearest one. A load counts that is quicker than three of four: others that use
/// memory meanwhile make it slower, and a limit above what a load takes without them would call nothing cold.
fn limit() -> u64 {
    let memory = vec![1_u8; (TRIALS + 1) * PAGE];
    let quick = |thrown_out: bool| {
        let mut taken: Vec<u64> = (0..ROUNDS * TRIALS)
            .map(|nth| {
                let nth = nth % TRIALS;
                let at = memory[nth * PAGE + line_of(nth)..].as_ptr();
                // SAFETY: a page follows in the vector.
                unsafe {
                    cycles(at, false);
                    cycles(at, thrown_out)
                }
            })
            .collect();
        taken.sort_unstable();
        taken[ROUNDS * TRIALS / 4]
    };
    let (hit, miss) = (quick(false), quick(true));
    match miss > 2 * hit {
        true => hit + (miss - hit) * 3 / 5,
        // The counter does not tell: nothing is cold.
        false => u64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether most of some looks say that a range is cold.
    fn judged(limit: u64, memory: &[u8], before: impl Fn(&[u8])) -> bool {
        let cold = |_: &i32| {
            before(memory);
            // SAFETY: the range is the slice.
            unsafe { is_cold_by(limit, memory.as_ptr(), memory.len()) }
        };
        (0..21).filter(cold).count() > 10
    }

    #[test]
    fn what_was_just_read_is_warm_and_what_was_thrown_out_is_cold() {
        let memory = vec![1_u8; 64 * PAGE];
        let lines = |memory: &[u8], each: fn(*const u8)| {
            memory.chunks(LINE).for_each(|line| each(line.as_ptr()));
        };
        let read = |memory: &[u8]| {
            lines(memory, |line| {
                // SAFETY: each line is inside of the slice.
                std::hint::black_box(unsafe { line.read_volatile() });
            });
        };
        let thrown_out = |memory: &[u8]| {
            // SAFETY: as above.
            lines(memory, |line| unsafe { _mm_clflush(line) });
            // SAFETY: a fence touches nothing.
            unsafe { _mm_mfence() };
        };
        let is_right = |_: &u32| {
            let limit = limit();
            // A processor whose counter does not tell calls nothing cold.
            let tells = limit != u64::MAX;
            !judged(limit, &memory, read) && judged(limit, &memory, thrown_out) == tells
        };
        // How long a load takes changes with what other programs do: seldom between the measurement and the looks.
        assert!((0..15).filter(is_right).count() > 7);
    }

    #[test]
    fn what_is_too_short_to_be_judged_is_warm() {
        // SAFETY: nothing is read.
        assert!(!unsafe { is_cold(std::ptr::null(), SAMPLES * PAGE - 1) });
    }
}
