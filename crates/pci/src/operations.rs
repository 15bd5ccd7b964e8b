//! Operations that a function has done, and how long they took: counted by its model, read by anybody.
//!
//! One thread adds, the one that runs the function, so adding needs no locked instruction; a reader may
//! see an operation's parts one after the other. Times are counted in ticks of the processor and put
//! into nanoseconds when they are read: what is not looked at costs a model a few stores.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rackbus_memory::ticks;

/// Parts of each power of two, so that a time is known to within an eighth.
const PARTS: u32 = 4;
/// Buckets of a distribution: up to any number of ticks.
const BUCKETS: usize = 252;

/// The bucket of a time.
#[inline]
fn bucket(ticks: u64) -> usize {
    if ticks < u64::from(PARTS) {
        return ticks as usize;
    }
    let octave = ticks.ilog2();
    let part = (ticks >> (octave - 2)) as u32 & (PARTS - 1);
    ((octave - 1) * PARTS + part) as usize
}

/// The middle of a bucket, in ticks.
fn middle(bucket: usize) -> f64 {
    let (octave, part) = (bucket as u32 / PARTS + 1, bucket as u32 % PARTS);
    if octave == 1 {
        return f64::from(part);
    }
    2f64.powi(octave as i32 - 2) * (f64::from(PARTS + part) + 0.5)
}

/// Operations of one kind that ended together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// How many, those that failed among them.
    pub done: u32,
    /// How many of them ended with an error.
    pub failed: u32,
    /// Bytes of data that they moved.
    pub bytes: u64,
}

impl Tally {
    /// One more has ended.
    #[inline]
    pub fn count(&mut self, bytes: u64, succeeded: bool) {
        self.done += 1;
        if succeeded {
            self.bytes += bytes;
        } else {
            self.failed += 1;
        }
    }
}

#[derive(Debug)]
struct Kind {
    done: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
    ticks: AtomicU64,
    latency: [AtomicU64; BUCKETS],
}

impl Default for Kind {
    fn default() -> Kind {
        Kind {
            done: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            ticks: AtomicU64::new(0),
            latency: [const { AtomicU64::new(0) }; BUCKETS],
        }
    }
}

/// Only one thread adds: a load and a store.
#[inline]
fn add(counter: &AtomicU64, more: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

/// What was counted of one kind of operation.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OperationCounts {
    /// How many ended, those that failed among them.
    pub done: u64,
    /// How many of them ended with an error.
    pub failed: u64,
    /// Bytes of data that those that succeeded moved.
    pub bytes: u64,
    /// Nanoseconds that all took together.
    pub total_ns: u64,
    /// How many took at most the bound of the same place, and more than the one before; one more at
    /// the end for those that took longer than all bounds.
    pub latency: Vec<u64>,
}

#[derive(Debug)]
struct Shared {
    names: &'static [&'static str],
    kinds: Vec<Kind>,
    begun: (u64, Instant),
}

/// The operations of one function, by kind; cheap to clone.
#[derive(Debug, Clone)]
pub struct Operations(Arc<Shared>);

impl Default for Operations {
    fn default() -> Operations {
        Operations::new(&[])
    }
}

impl Operations {
    /// Nothing done yet, of the kinds that have these names.
    pub fn new(names: &'static [&'static str]) -> Operations {
        let kinds = names.iter().map(|_| Kind::default()).collect();
        Operations(Arc::new(Shared { names, kinds, begun: (ticks::now(), Instant::now()) }))
    }

    /// Adds operations of the kind with this place that took so many ticks each. For one thread
    /// alone.
    #[inline]
    pub fn add(&self, kind: usize, tally: Tally, ticks: u64) {
        let Some(kind) = self.0.kinds.get(kind) else { return };
        let done = u64::from(tally.done);
        add(&kind.done, done);
        add(&kind.bytes, tally.bytes);
        add(&kind.ticks, ticks.saturating_mul(done));
        add(&kind.latency[bucket(ticks)], done);
        if tally.failed > 0 {
            add(&kind.failed, tally.failed.into());
        }
    }

    /// What was counted so far, by the kinds' names, with times sorted by `bounds` (nanoseconds,
    /// ascending).
    pub fn counts(&self, bounds: &[u64]) -> Vec<(&'static str, OperationCounts)> {
        let (ticks, instant) = self.0.begun;
        let passed = ticks::now().saturating_sub(ticks).max(1) as f64;
        let tick = (instant.elapsed().as_nanos() as f64 / passed).max(f64::MIN_POSITIVE);
        let kinds = self.0.names.iter().zip(&self.0.kinds);
        kinds.map(|(name, kind)| (*name, kind.counts(tick, bounds))).collect()
    }
}

impl Kind {
    /// `tick` is how many nanoseconds one takes.
    fn counts(&self, tick: f64, bounds: &[u64]) -> OperationCounts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut latency = vec![0; bounds.len() + 1];
        for (bucket, count) in self.latency.iter().map(get).enumerate().filter(|(_, n)| *n > 0) {
            let ns = middle(bucket) * tick;
            latency[bounds.partition_point(|bound| (*bound as f64) < ns)] += count;
        }
        OperationCounts {
            done: get(&self.done),
            failed: get(&self.failed),
            bytes: get(&self.bytes),
            total_ns: (get(&self.ticks) as f64 * tick) as u64,
            latency,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_bucket_is_known_to_within_an_eighth(ticks in 1u64..u64::MAX) {
            let middle = middle(bucket(ticks));
            prop_assert!((middle / ticks as f64 - 1.0).abs() <= 0.13, "{ticks}: {middle}");
        }

        #[test]
        fn longer_times_are_in_later_buckets(a: u64, b: u64) {
            prop_assert_eq!(bucket(a.min(b)) <= bucket(a.max(b)), true);
            prop_assert!(bucket(a) < BUCKETS);
        }
    }

    #[test]
    fn what_was_added_is_counted_by_kind_and_time() {
        let operations = Operations::new(&["read", "write"]);
        let mut tally = Tally::default();
        tally.count(4096, true);
        tally.count(4096, false);
        operations.add(1, tally, 1000);
        operations.add(1, Tally { done: 1, failed: 0, bytes: 1 }, u64::MAX / 4);
        operations.add(7, tally, 1);
        let kind = &operations.0.kinds[1];
        // One tick is two nanoseconds.
        let counts = kind.counts(2.0, &[1000, 3000]);
        let expected = OperationCounts {
            done: 3,
            failed: 1,
            bytes: 4097,
            total_ns: counts.total_ns,
            latency: vec![0, 2, 1],
        };
        assert_eq!(counts, expected);
        assert!(counts.total_ns > 4000);
        assert_eq!(
            operations.0.kinds[0].counts(2.0, &[1]),
            OperationCounts { latency: vec![0, 0], ..OperationCounts::default() }
        );
    }

    #[test]
    fn times_are_nanoseconds_when_read() {
        let operations = Operations::new(&["read"]);
        std::thread::sleep(std::time::Duration::from_millis(20));
        let (begun, _) = operations.0.begun;
        let slept = ticks::now().wrapping_sub(begun);
        operations.add(0, Tally { done: 1, failed: 0, bytes: 0 }, slept);
        let (_, counts) = operations.counts(&[10_000_000]).remove(0);
        assert_eq!(counts.latency, [0, 1]);
        assert!(counts.total_ns >= 15_000_000, "{counts:?}");
    }
}
