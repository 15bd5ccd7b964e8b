//! How much engine time a device really has: its engines are threads, and there may be fewer processors than those, or
//! processors that share a core. So it is measured, with as many threads at work at the same time, how fast each of them
//! is while it has a processor. What else the machine does meanwhile changes nothing of that.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rackbus_qos::admission::RESERVE;
use rackbus_qos::{Capacity, SECOND};

use super::clock::thread_ns;
use super::engines::Sha256State;

/// For how long all threads work in a round.
const ROUND: Duration = Duration::from_millis(5);
/// Rounds of a measurement: what others do on a core that is shared only takes from one.
const ROUNDS: u32 = 5;
/// Bytes of a piece of work: little beside a round, and within every cache.
const PIECE: usize = 4096;

/// What so many engines have together, when all of them work.
pub fn measure(workers: u32) -> Capacity {
    let whole = Capacity::of(workers);
    if workers < 2 {
        // What operations cost is measured with one.
        return whole;
    }
    let alone_ns = piece_ns();
    let speed = (0..ROUNDS).map(|_| round(workers, alone_ns)).fold(0.0, f64::max).min(1.0);
    let processors = std::thread::available_parallelism()
        .map_or(workers, |it| u32::try_from(it.get()).unwrap_or(u32::MAX).min(workers));
    let engine_ns = (f64::from(processors) * speed * SECOND as f64) as u64;
    // Of less than what is never promised, a measurement says nothing.
    let enough = whole.engine_ns / 1000 * u64::from(1000 - RESERVE);
    if engine_ns >= enough { whole } else { Capacity { engine_ns, ..whole } }
}

fn work() {
    let mut state = Sha256State::default();
    state.add(std::hint::black_box(&[0; PIECE]));
    std::hint::black_box(state.finish());
}

/// Processor time of a piece of work that nothing else disturbs, in nanoseconds.
fn piece_ns() -> f64 {
    const PIECES: u32 = 16;
    let rounds = (0..50).map(|_| {
        let before = thread_ns();
        (0..PIECES).for_each(|_| work());
        thread_ns().saturating_sub(before)
    });
    rounds.min().unwrap_or(1).max(1) as f64 / f64::from(PIECES)
}

/// Has so many threads work at the same time, or as many as can be started: how long one thread alone would take for what
/// all of them did, as a part of the processor time that they took.
fn round(workers: u32, alone_ns: f64) -> f64 {
    let (ready, end) = (AtomicU32::new(0), OnceLock::new());
    let count = || {
        ready.fetch_add(1, Ordering::Release);
        let end = loop {
            match end.get() {
                Some(end) => break *end,
                None => std::thread::yield_now(),
            }
        };
        let (mut done, begun) = (0u64, thread_ns());
        loop {
            work();
            done += 1;
            if Instant::now() > end {
                return (done, thread_ns().saturating_sub(begun));
            }
        }
    };
    let (pieces, took_ns) = std::thread::scope(|scope| {
        let start = |_| std::thread::Builder::new().spawn_scoped(scope, count).ok();
        let threads: Vec<_> = (0..workers).filter_map(start).collect();
        while (ready.load(Ordering::Acquire) as usize) < threads.len() {
            std::thread::yield_now();
        }
        let _ = end.set(Instant::now() + ROUND);
        let done = threads.into_iter().map(|thread| thread.join().unwrap_or((0, 0)));
        done.fold((0, 0), |sum, it| (sum.0 + it.0, sum.1 + it.1))
    });
    pieces as f64 * alone_ns / took_ns.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_beyond_the_processors_that_there_are_add_nothing() {
        let processors = std::thread::available_parallelism().unwrap().get() as u64;
        assert_eq!(measure(1), Capacity::of(1));
        let engine_ns = measure(processors as u32 * 4).engine_ns;
        assert!(engine_ns > SECOND / 10, "{engine_ns}");
        assert!(engine_ns <= processors * SECOND, "{engine_ns} of {processors} processors");
    }
}
