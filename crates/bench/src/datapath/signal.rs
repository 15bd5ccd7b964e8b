//! Interrupts and messages from one processor to the other.
#![allow(unsafe_code)] // the raw ring has no checks

use std::cell::UnsafeCell;
use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use rackbus_memory::{
    AdaptiveSpin, Consumer, DOORBELL_BYTES, Doorbell, Event, Producer, RingLayout, SharedMemory,
};

use super::{Bench, rate};
use crate::BenchError;
use crate::machine::{CLIENT_CPU, SERVER_CPU, pin};

/// Things done between two looks at the clock.
const BATCH: u64 = 256;
/// Bytes of a message: with its length, one cache line.
const MESSAGE: usize = 60;
const SLOTS: u32 = 256;

#[derive(Default)]
#[repr(align(64))]
struct Line(AtomicU32);

/// What one thread alone changes, in cache lines of its own: otherwise it depends on how a compiler lays out
/// a stack whether the other thread's lines are in between. Lines are fetched in pairs.
#[repr(align(128))]
struct Apart<T>(T);

impl Bench<'_> {
    pub(super) fn signals(&mut self) -> Result<(), BenchError> {
        let time = self.settings.time;
        let polled = AdaptiveSpin::new(20_000_000, 20_000_000);
        self.pairs(
            "doorbell there and back, polled",
            "two lines, polled",
            "us",
            || Ok(1e6 / doorbells(time, &polled, BATCH)?),
            || Ok(1e6 / lines(time)),
        )?;
        let asleep = AdaptiveSpin::new(0, 0);
        self.pairs(
            "doorbell there and back, asleep",
            "eventfd",
            "us",
            || Ok(1e6 / doorbells(time, &asleep, 16)?),
            || Ok(1e6 / events(time)?),
        )?;
        self.pairs(
            "messages of 60 B",
            "ring without checks",
            "M/s",
            || Ok(messages(time)? / 1e6),
            || Ok(raw_messages(time) / 1e6),
        )
    }
}

/// Round trips per second over two doorbells.
fn doorbells(time: Duration, spin: &AdaptiveSpin, batch: u64) -> Result<f64, BenchError> {
    let memory = SharedMemory::create("bench-doorbells", 2 * DOORBELL_BYTES as u64)?;
    let bell = |offset| {
        let event = Event::new().map_err(BenchError::io("making an eventfd"))?;
        Ok::<_, BenchError>(Doorbell::new(memory.region().clone(), offset, event).expect("fits"))
    };
    let (there, back) = (bell(0)?, bell(DOORBELL_BYTES)?);
    Ok(thread::scope(|scope| {
        scope.spawn(|| {
            pin(SERVER_CPU);
            let (mut spin, mut seen) = (spin.clone(), 0);
            while let Ok(count) = there.wait(seen, &mut spin, None) {
                seen = count;
                back.ring();
            }
        });
        pin(CLIENT_CPU);
        let (mut spin, mut seen) = (spin.clone(), 0);
        let rate = rate(time, batch, || {
            for _ in 0..batch {
                there.ring();
                seen = back.wait(seen, &mut spin, None).expect("nobody closes it");
            }
        });
        there.close();
        rate
    }))
}

/// Round trips per second of two polled lines.
fn lines(time: Duration) -> f64 {
    let (there, back) = (Line::default(), Line::default());
    thread::scope(|scope| {
        scope.spawn(|| {
            pin(SERVER_CPU);
            let mut seen = 0;
            while seen != u32::MAX {
                let now = there.0.load(Ordering::Acquire);
                if now != seen {
                    seen = now;
                    back.0.store(now, Ordering::Release);
                } else {
                    spin_loop();
                }
            }
        });
        pin(CLIENT_CPU);
        let mut number = 0;
        let rate = rate(time, BATCH, || {
            for _ in 0..BATCH {
                number += 1;
                there.0.store(number, Ordering::Release);
                while back.0.load(Ordering::Acquire) != number {
                    spin_loop();
                }
            }
        });
        there.0.store(u32::MAX, Ordering::Release);
        rate
    })
}

/// Round trips per second of two eventfds, both sides asleep in between.
fn events(time: Duration) -> Result<f64, BenchError> {
    let event = || Event::new().map_err(BenchError::io("making an eventfd"));
    let (there, back) = (event()?, event()?);
    let stop = AtomicBool::new(false);
    Ok(thread::scope(|scope| {
        scope.spawn(|| {
            pin(SERVER_CPU);
            while !stop.load(Ordering::Relaxed) {
                there.wait(None);
                back.ring();
            }
        });
        pin(CLIENT_CPU);
        let rate = rate(time, 16, || {
            for _ in 0..16 {
                there.ring();
                back.wait(None);
            }
        });
        stop.store(true, Ordering::Relaxed);
        there.ring();
        rate
    }))
}

/// Messages per second through a ring, copied in and out.
fn messages(time: Duration) -> Result<f64, BenchError> {
    let layout = RingLayout { slots: SLOTS, slot_bytes: MESSAGE as u32 };
    let bytes = layout.bytes().expect("a ring that can be");
    let memory = SharedMemory::create("bench-ring", bytes as u64)?;
    let mut producer = Apart(Producer::new(memory.region().clone(), 0, layout).expect("fits"));
    let mut consumer = Apart(Consumer::new(memory.region().clone(), 0, layout).expect("fits"));
    let stop = Apart(AtomicBool::new(false));
    Ok(thread::scope(|scope| {
        let stop = &stop.0;
        scope.spawn(move || {
            pin(SERVER_CPU);
            let mut message = [0; MESSAGE];
            while !stop.load(Ordering::Relaxed) {
                while consumer.0.pop(&mut message).is_some() {
                    black_box(&message);
                }
            }
        });
        pin(CLIENT_CPU);
        let message = black_box([1; MESSAGE]);
        let rate = rate(time, BATCH, || {
            for _ in 0..BATCH {
                while producer.0.push(&message).is_err() {}
            }
        });
        stop.store(true, Ordering::Relaxed);
        rate
    }))
}

/// What two processors can do at best: slots, two indices, no checks.
struct RawRing {
    tail: RawIndex,
    head: RawIndex,
    slots: [Slot; SLOTS as usize],
}

#[derive(Default)]
#[repr(align(64))]
struct RawIndex(AtomicU64);

#[repr(align(64))]
struct Slot(UnsafeCell<[u8; MESSAGE]>);

// SAFETY: a slot is the producer's before the tail says that it is full, and the consumer's until
// the head says that it is empty.
unsafe impl Sync for Slot {}

fn raw_messages(time: Duration) -> f64 {
    let slots = [const { Slot(UnsafeCell::new([0; MESSAGE])) }; SLOTS as usize];
    let ring = RawRing { tail: RawIndex::default(), head: RawIndex::default(), slots };
    let stop = Apart(AtomicBool::new(false));
    thread::scope(|scope| {
        let (ring, stop) = (&ring, &stop.0);
        scope.spawn(move || {
            pin(SERVER_CPU);
            let mut head = 0;
            while !stop.load(Ordering::Relaxed) {
                let tail = ring.tail.0.load(Ordering::Acquire);
                while head < tail {
                    // SAFETY: between head and tail; see `Slot`.
                    black_box(unsafe { *ring.slots[head as usize % SLOTS as usize].0.get() });
                    head += 1;
                    ring.head.0.store(head, Ordering::Release);
                }
            }
        });
        pin(CLIENT_CPU);
        let message = black_box([1; MESSAGE]);
        let (mut tail, mut head) = (0, 0);
        let rate = rate(time, BATCH, || {
            for _ in 0..BATCH {
                while tail - head == u64::from(SLOTS) {
                    head = ring.head.0.load(Ordering::Acquire);
                }
                // SAFETY: the slot was taken out; see `Slot`.
                unsafe { *ring.slots[tail as usize % SLOTS as usize].0.get() = message };
                tail += 1;
                ring.tail.0.store(tail, Ordering::Release);
            }
        });
        stop.store(true, Ordering::Relaxed);
        rate
    })
}
