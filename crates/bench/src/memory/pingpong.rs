//! Two threads on two processors that answer each other.

use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::typical;
use crate::BenchError;
use crate::machine::{SERVER_CPU, pin};
use crate::report::median;

/// One side of a ping-pong.
pub trait PingPongEnd {
    /// Sends something to the other side.
    ///
    /// # Errors
    /// When there is no way any more.
    fn send(&mut self) -> Result<(), BenchError>;

    /// Waits for the next thing that the other side sends.
    ///
    /// # Errors
    /// When there is no way any more.
    fn wait(&mut self) -> Result<(), BenchError>;
}

/// Bytes that one side alone uses, in cache lines of their own: the sides are threads of one process here,
/// and what they allocate would lie side by side.
#[derive(Debug)]
pub struct PrivateBuffer {
    memory: Vec<u8>,
    range: Range<usize>,
}

/// Cache lines are fetched in pairs.
const LINES: usize = 128;

impl PrivateBuffer {
    /// A buffer of `bytes` zeroes.
    pub fn new(bytes: usize) -> PrivateBuffer {
        let memory = vec![0; bytes + 2 * LINES];
        let start = memory.as_ptr().align_offset(LINES);
        PrivateBuffer { memory, range: start..start + bytes }
    }
}

impl Deref for PrivateBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.range.clone()]
    }
}

impl DerefMut for PrivateBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.range.clone()]
    }
}

/// How long who is to be woken has been left alone: longer than anybody spins.
const ALONE: Duration = Duration::from_micros(250);

/// Round trips between two looks at the clock.
const BATCH: u64 = 64;

/// Half of a round trip between two sides that both answer at once, in nanoseconds.
///
/// # Errors
/// When a side fails.
pub fn one_way(
    near: &mut impl PingPongEnd,
    far: &mut (impl PingPongEnd + Send),
    time: Duration,
) -> Result<f64, BenchError> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let over = &over;
        let answers = scope.spawn(move || {
            pin(SERVER_CPU);
            loop {
                far.wait()?;
                if over.load(Ordering::Relaxed) {
                    return Ok(());
                }
                far.send()?;
            }
        });
        let trip = typical(time, BATCH, || {
            near.send()?;
            near.wait()
        });
        over.store(true, Ordering::SeqCst);
        near.send()?;
        let answered: Result<(), BenchError> =
            answers.join().unwrap_or_else(|_| Err(BenchError::Peer("a thread panicked".into())));
        answered?;
        Ok(trip? * 1e9 / 2.0)
    })
}

/// From sending to the moment at which a side that slept continues, in microseconds: the median.
///
/// # Errors
/// When a side fails.
pub fn wake_up(
    near: &mut impl PingPongEnd,
    far: &mut (impl PingPongEnd + Send),
    time: Duration,
) -> Result<f64, BenchError> {
    let (over, woken, begun) = (AtomicBool::new(false), AtomicU64::new(0), Instant::now());
    let now = || u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
    std::thread::scope(|scope| {
        let (over, woken) = (&over, &woken);
        let sleeper = scope.spawn(move || {
            pin(SERVER_CPU);
            while !over.load(Ordering::SeqCst) {
                far.wait()?;
                woken.store(now(), Ordering::Release);
            }
            Ok(())
        });
        let mut took = Vec::new();
        while begun.elapsed() < time {
            let alone = Instant::now();
            while alone.elapsed() < ALONE {}
            woken.store(0, Ordering::SeqCst);
            let sent = now();
            near.send()?;
            let woken = loop {
                let woken = woken.load(Ordering::Acquire);
                if woken != 0 || sleeper.is_finished() {
                    break woken;
                }
            };
            took.push(woken.saturating_sub(sent) as f64 / 1e3);
        }
        over.store(true, Ordering::SeqCst);
        near.send()?;
        let slept: Result<(), BenchError> =
            sleeper.join().unwrap_or_else(|_| Err(BenchError::Peer("a thread panicked".into())));
        slept.map(|()| median(&took))
    })
}
