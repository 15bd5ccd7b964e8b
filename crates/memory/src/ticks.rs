//! A coarse measure of passing time that costs a fraction of a look at the clock.
//!
//! For finding out that a thread did not run for long. It says nothing about when that was, and two
//! processors' counters may differ: a difference that makes no sense counts as a gap, which only
//! costs whoever looks a closer look.
#![allow(unsafe_code)] // reading the processor's counter

/// As many ticks as no gap has: at most 50 ms with any counter that counts 670 million times a second
/// or more (what has one counts a thousand million times), some milliseconds with the fastest.
pub const GAP: u64 = 1 << 25;

/// The processor's time stamp counter.
#[cfg(target_arch = "x86_64")]
#[inline]
pub fn now() -> u64 {
    // SAFETY: the instruction reads a counter, and every processor of this architecture has it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// Nanoseconds since the first look, where the processor's counter is not known to be fast enough.
#[cfg(not(target_arch = "x86_64"))]
pub fn now() -> u64 {
    static FIRST: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    let first = FIRST.get_or_init(std::time::Instant::now);
    u64::try_from(first.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Whether there was a gap between two looks.
#[inline]
pub fn is_gap(before: u64, now: u64) -> bool {
    now.wrapping_sub(before) > GAP
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{is_gap, now};

    #[test]
    fn a_thread_that_stalled_for_50_ms_finds_a_gap_and_one_that_runs_does_not() {
        let before = now();
        std::thread::sleep(Duration::from_millis(50));
        assert!(is_gap(before, now()));
        // It may be kept from running at any moment, but not each time.
        assert!((0..100).any(|_| {
            let (begun, before) = (Instant::now(), now());
            while begun.elapsed() < Duration::from_micros(100) {}
            !is_gap(before, now())
        }));
    }

    #[test]
    fn a_counter_that_goes_back_counts_as_a_gap() {
        assert!(is_gap(1000, 999) && !is_gap(u64::MAX, 999));
    }
}
