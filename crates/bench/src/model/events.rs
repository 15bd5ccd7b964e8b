//! Pending events: the hold model, in which every event that happens schedules itself again after
//! a random delay, so that always as many are pending.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hint::black_box;
use std::time::{Duration, Instant};

use rackbus_model::queue::EventQueue;
use rackbus_model::random::RandomSequence;
use rackbus_model::time::Time;

use super::{Bench, simpy_peer};
use crate::{BenchError, peers};

const UNIT: &str = "M events/s";
/// Events between two looks at the clock.
const BATCH: u64 = 8192;

/// After how long an event happens again.
#[derive(Debug, Clone, Copy)]
pub enum Spread {
    /// Anything from 1 ns to 1 us.
    Even,
    /// From 1 ns to 100 us, every octave as likely.
    Octaves,
    /// 10 ns: all events of a moment meet again.
    Same,
}

/// A sequence of delays.
#[derive(Debug)]
pub struct DelaySequence {
    random: RandomSequence,
    spread: Spread,
}

impl DelaySequence {
    /// The sequence for a spread: always the same.
    pub fn new(spread: Spread) -> DelaySequence {
        DelaySequence { random: RandomSequence::new(1), spread }
    }

    /// The next delay in ticks: picoseconds, or what else a peer has.
    #[inline]
    pub fn ticks(&mut self) -> u64 {
        let bits = self.random.bits();
        match self.spread {
            Spread::Even => 1_000 + (bits >> 44),
            Spread::Octaves => {
                let least = 1_000 << (((bits & 0xffff) * 17) >> 16);
                least + (((bits >> 40) * least) >> 24)
            }
            Spread::Same => 10_000,
        }
    }
}

/// A set of pending events.
trait Pending: Default {
    fn schedule(&mut self, at: Time, event: u32);
    fn pop(&mut self) -> Option<(Time, u32)>;
}

impl Pending for EventQueue<u32> {
    #[inline]
    fn schedule(&mut self, at: Time, event: u32) {
        EventQueue::schedule(self, at, event);
    }

    #[inline]
    fn pop(&mut self) -> Option<(Time, u32)> {
        EventQueue::pop(self)
    }
}

/// What one writes without a library: the standard heap, ties broken by a sequence number.
#[derive(Default)]
struct BareHeap {
    heap: BinaryHeap<Reverse<(u64, u64, u32)>>,
    sequence: u64,
}

impl Pending for BareHeap {
    #[inline]
    fn schedule(&mut self, at: Time, event: u32) {
        self.heap.push(Reverse((at.ps(), self.sequence, event)));
        self.sequence += 1;
    }

    #[inline]
    fn pop(&mut self) -> Option<(Time, u32)> {
        self.heap.pop().map(|Reverse((at, _, event))| (Time::from_ps(at), event))
    }
}

/// Events per second of the bare heap, of so many pending.
pub(super) fn bare_heap(pending: u32, time: Duration) -> f64 {
    hold::<BareHeap>(pending, Spread::Even, time)
}

/// Holds `pending` events for about `time`; returns events per second.
fn hold<P: Pending>(pending: u32, spread: Spread, time: Duration) -> f64 {
    let (mut events, mut delays) = (P::default(), DelaySequence::new(spread));
    for event in 0..pending {
        events.schedule(Time::from_ps(delays.ticks()), event);
    }
    rate(time, || {
        for _ in 0..BATCH {
            let Some((now, event)) = events.pop() else { unreachable!("each comes back") };
            events.schedule(now + Time::from_ps(delays.ticks()), black_box(event));
        }
        Ok(BATCH)
    })
    .unwrap_or_default()
}

/// Calls `batch`, which says how much it did, for about `time` after a tenth of that to warm up;
/// returns how much was done per second.
///
/// # Errors
/// That of `batch`.
pub fn rate(
    time: Duration,
    mut batch: impl FnMut() -> Result<u64, BenchError>,
) -> Result<f64, BenchError> {
    let mut done_in = |time: Duration| {
        let (mut done, start) = (0, Instant::now());
        while start.elapsed() < time {
            done += batch()?;
        }
        Ok(done as f64 / start.elapsed().as_secs_f64())
    };
    done_in(time / 10)?;
    done_in(time)
}

impl Bench<'_> {
    /// Our queue against the bare heap and, of even delays, whole simulators.
    pub(super) fn events(&mut self) -> Result<(), BenchError> {
        for pending in [16, 1024, 65536] {
            let case = format!("events k={pending}");
            self.against_heap(&case, pending, Spread::Even)?;
            self.against_nexosim(&case, pending)?;
            self.against_simpy(&case, pending)?;
        }
        self.against_heap("events k=1024, 1 ns to 100 us", 1024, Spread::Octaves)?;
        self.against_heap("events k=1024, at the same time", 1024, Spread::Same)
    }

    fn against_heap(&mut self, case: &str, pending: u32, spread: Spread) -> Result<(), BenchError> {
        if !self.wanted(case) {
            return Ok(());
        }
        let time = self.settings.time;
        self.rates(
            case,
            "bare BinaryHeap",
            UNIT,
            || Ok(hold::<EventQueue<u32>>(pending, spread, time) / 1e6),
            || Ok(hold::<BareHeap>(pending, spread, time) / 1e6),
        )
    }

    #[cfg(not(feature = "peers"))]
    fn against_nexosim(&mut self, case: &str, _pending: u32) -> Result<(), BenchError> {
        if self.wanted(case) {
            self.report.left_out(&format!("{case}, nexosim"), "built without the peers feature");
        }
        Ok(())
    }

    #[cfg(feature = "peers")]
    fn against_nexosim(&mut self, case: &str, pending: u32) -> Result<(), BenchError> {
        if !self.wanted(case) {
            return Ok(());
        }
        let time = self.settings.time;
        self.rates(
            case,
            "nexosim, one model",
            UNIT,
            || Ok(hold::<EventQueue<u32>>(pending, Spread::Even, time) / 1e6),
            || Ok(super::nexosim_peer::hold(pending, time)? / 1e6),
        )
    }

    fn against_simpy(&mut self, case: &str, pending: u32) -> Result<(), BenchError> {
        if !self.wanted(case) {
            return Ok(());
        }
        if !peers::installed(simpy_peer::PYTHON) {
            self.report.left_out(&format!("{case}, SimPy"), "not installed by scripts/setup bench");
            return Ok(());
        }
        let time = self.settings.time;
        self.rates(
            case,
            "SimPy",
            UNIT,
            || Ok(hold::<EventQueue<u32>>(pending, Spread::Even, time) / 1e6),
            || Ok(simpy_peer::hold(pending, time)? / 1e6),
        )
    }
}
