//! The algorithms in shared memory, run through every order of accesses that the memory model
//! allows (loom): no wake-up is lost, no message is lost, mixed with another or reordered.
//!
//! The very same source files as in the crate, over loom's atomics instead of the standard
//! library's. `make test-loom` runs it.
#![cfg(loom)]

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
}

#[path = "../src/ring/indices.rs"]
#[allow(dead_code, reason = "not all of it is part of a model")]
mod indices;
#[path = "../src/doorbell/line.rs"]
#[allow(dead_code, reason = "not all of it is part of a model")]
mod line;
#[path = "../src/frames/marks.rs"]
#[allow(dead_code, reason = "not all of it is part of a model")]
mod marks;
#[path = "../src/guard/slot.rs"]
#[allow(dead_code, reason = "not all of it is part of a model")]
mod slot;

use indices::{ConsumerIndices, Indices, ProducerIndices};
use line::{DoorbellLine, Look};
use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use marks::{Credit, Marks};
use slot::GuardSlot;

/// A doorbell as it is used: the line, and the futex as the system promises it. Sleeping compares
/// the turn and falls asleep in one step, waking wakes all who sleep.
#[derive(Default)]
struct Bell {
    line: DoorbellLine,
    kernel: Mutex<()>,
    sleepers: Condvar,
    event: Mutex<bool>,
    polled: Condvar,
}

impl Bell {
    fn wake(&self, wake: line::Wake) {
        if wake.sleepers {
            let _held = self.kernel.lock().unwrap();
            self.sleepers.notify_all();
        }
        if wake.poller {
            *self.event.lock().unwrap() = true;
            self.polled.notify_all();
        }
    }

    fn ring(&self) {
        self.wake(self.line.ring());
    }

    fn close(&self) {
        self.wake(self.line.close());
    }

    /// As `Doorbell::wait` with no time to spin and none to give up: a lost wake-up is a deadlock,
    /// which loom reports.
    fn wait(&self, seen: u32) -> Look {
        loop {
            match self.line.announce(seen) {
                Err(found) => return found,
                Ok(turn) => {
                    let held = self.kernel.lock().unwrap();
                    if self.line.turn() == turn {
                        drop(self.sleepers.wait(held).unwrap());
                    }
                }
            }
        }
    }

    /// As `Doorbell::wait` with a time limit that has ended when it comes to sleep.
    fn wait_briefly(&self, seen: u32) -> Look {
        match self.line.announce(seen) {
            Err(found) => found,
            Ok(_) => self.line.look(seen),
        }
    }

    fn poll(&self, seen: u32) -> Look {
        loop {
            let look = self.line.arm(seen);
            if look != Look::Same {
                return look;
            }
            let mut rung = self.event.lock().unwrap();
            while !*rung {
                rung = self.polled.wait(rung).unwrap();
            }
            *rung = false;
        }
    }
}

fn model(test: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    // Schedules with more forced switches than this show nothing that fewer do not.
    model.preemption_bound = Some(3);
    model.check(test);
}

#[test]
fn a_sleeper_hears_of_each_ring() {
    model(|| {
        let bell = Arc::new(Bell::default());
        let ringer = bell.clone();
        let ringing = thread::spawn(move || {
            ringer.ring();
            ringer.ring();
        });
        let mut seen = 0;
        while seen != 2 {
            match bell.wait(seen) {
                Look::Rung(count) => seen = count,
                look => panic!("{look:?}"),
            }
        }
        ringing.join().unwrap();
    });
}

#[test]
fn a_late_ringer_takes_no_wake_up_from_a_new_sleeper() {
    model(|| {
        let bell = Arc::new(Bell::default());
        // One waits for the first ring, one for the second; the rings come from two sides.
        let (first, second) = (bell.clone(), bell.clone());
        let waiting = thread::spawn(move || assert_ne!(first.wait(0), Look::Same));
        let ringing = thread::spawn(move || second.ring());
        bell.ring();
        let mut seen = bell.line.count();
        while seen != 2 {
            match bell.wait(seen) {
                Look::Rung(count) => seen = count,
                look => panic!("{look:?}"),
            }
        }
        waiting.join().unwrap();
        ringing.join().unwrap();
    });
}

#[test]
fn a_waiter_that_gives_up_takes_no_wake_up_from_others() {
    model(|| {
        let bell = Arc::new(Bell::default());
        let (hasty, ringer) = (bell.clone(), bell.clone());
        let giving_up = thread::spawn(move || hasty.wait_briefly(0));
        let ringing = thread::spawn(move || ringer.ring());
        assert_eq!(bell.wait(0), Look::Rung(1));
        ringing.join().unwrap();
        let found = giving_up.join().unwrap();
        assert!([Look::Same, Look::Rung(1)].contains(&found), "{found:?}");
    });
}

#[test]
fn a_ring_before_the_time_is_over_is_found() {
    model(|| {
        let bell = Arc::new(Bell::default());
        let ringer = bell.clone();
        let ringing = thread::spawn(move || ringer.ring());
        let first = bell.wait_briefly(0);
        ringing.join().unwrap();
        // It rang meanwhile at the latest: who comes back later does not miss it.
        assert_eq!(bell.wait_briefly(0), Look::Rung(1), "{first:?} before");
        assert_eq!(bell.wait(0), Look::Rung(1));
    });
}

#[test]
fn the_carry_of_the_count_wakes_a_sleeper() {
    model(|| {
        let bell = Arc::new(Bell { line: DoorbellLine::at(u32::MAX), ..Bell::default() });
        let ringer = bell.clone();
        let ringing = thread::spawn(move || ringer.ring());
        assert_eq!(bell.wait(u32::MAX), Look::Rung(0));
        ringing.join().unwrap();
    });
}

#[test]
fn closing_wakes_all_sleepers() {
    model(|| {
        let bell = Arc::new(Bell::default());
        let (closer, other) = (bell.clone(), bell.clone());
        let closing = thread::spawn(move || closer.close());
        let waiting = thread::spawn(move || assert_eq!(other.wait(0), Look::Closed));
        assert_eq!(bell.wait(0), Look::Closed);
        closing.join().unwrap();
        waiting.join().unwrap();
    });
}

#[test]
fn the_poller_hears_of_a_ring_beside_a_sleeper() {
    model(|| {
        let bell = Arc::new(Bell::default());
        let (ringer, sleeper) = (bell.clone(), bell.clone());
        let ringing = thread::spawn(move || ringer.ring());
        let waiting = thread::spawn(move || assert_eq!(sleeper.wait(0), Look::Rung(1)));
        assert_eq!(bell.poll(0), Look::Rung(1));
        ringing.join().unwrap();
        waiting.join().unwrap();
    });
}

const SLOTS: u32 = 2;

/// A ring whose slots are plain memory: loom reports when both sides touch one at a time.
struct Ring {
    indices: Indices,
    slots: [UnsafeCell<u32>; SLOTS as usize],
    bell: Bell,
}

// SAFETY: loom checks that no slot is ever accessed from two threads at a time.
unsafe impl Sync for Ring {}
// SAFETY: as above.
unsafe impl Send for Ring {}

impl Ring {
    fn new() -> Arc<Ring> {
        let slots = std::array::from_fn(|_| UnsafeCell::new(0));
        Arc::new(Ring { indices: Indices::default(), slots, bell: Bell::default() })
    }

    fn slot(&self, number: u32) -> &UnsafeCell<u32> {
        &self.slots[(number % SLOTS) as usize]
    }

    fn push(&self, putting: &mut ProducerIndices, message: u32) -> bool {
        let Some(number) = putting.free(&self.indices) else { return false };
        // SAFETY: what these tests are about; loom reports where it does not hold.
        self.slot(number).with_mut(|slot| unsafe { *slot = message });
        putting.publish(&self.indices);
        true
    }

    fn pop(&self, taking: &mut ConsumerIndices) -> Option<u32> {
        let number = taking.oldest(&self.indices)?;
        // SAFETY: as above.
        let message = self.slot(number).with(|slot| unsafe { *slot });
        taking.release(&self.indices);
        Some(message)
    }
}

#[test]
fn a_ring_loses_truncates_and_reorders_nothing() {
    // One and a half times around, so that slots are used again.
    const MESSAGES: u32 = 3;
    model(|| {
        let ring = Ring::new();
        let producer = ring.clone();
        let producing = thread::spawn(move || {
            let mut putting = ProducerIndices::new(&producer.indices, SLOTS);
            for message in 1..=MESSAGES {
                while !producer.push(&mut putting, message) {
                    thread::yield_now();
                }
            }
        });
        let mut taking = ConsumerIndices::new(&ring.indices, SLOTS);
        for message in 1..=MESSAGES {
            let taken = loop {
                match ring.pop(&mut taking) {
                    Some(message) => break message,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(taken, message);
        }
        producing.join().unwrap();
    });
}

#[test]
fn a_consumer_that_sleeps_between_messages_gets_all() {
    model(|| {
        let ring = Ring::new();
        let producer = ring.clone();
        let producing = thread::spawn(move || {
            let mut putting = ProducerIndices::new(&producer.indices, SLOTS);
            for message in 1..=2 {
                assert!(producer.push(&mut putting, message));
                producer.bell.ring();
            }
        });
        let mut taking = ConsumerIndices::new(&ring.indices, SLOTS);
        for message in 1..=2 {
            let taken = loop {
                let seen = ring.bell.line.count();
                match ring.pop(&mut taking) {
                    Some(message) => break message,
                    None => ring.bell.wait(seen),
                };
            };
            assert_eq!(taken, message);
        }
        producing.join().unwrap();
    });
}

#[test]
fn a_slot_that_is_used_again_claims_no_foreign_address() {
    model(|| {
        let slot = Arc::new(GuardSlot::default());
        slot.register(10, 20);
        let user = slot.clone();
        let using = thread::spawn(move || {
            user.retire();
            user.register(30, 40);
        });
        // Between the two ranges is somebody else's memory.
        assert_eq!(slot.around(25), None);
        let found = slot.around(35);
        assert!([None, Some((30, 40))].contains(&found), "{found:?}");
        using.join().unwrap();
        assert_eq!((slot.around(15), slot.around(35)), (None, Some((30, 40))));
    });
}

/// The futex that writers of a frozen slot wait on, as the system promises it.
struct Frozen {
    slot: GuardSlot,
    kernel: Mutex<()>,
    writers: Condvar,
}

impl Frozen {
    fn new() -> Arc<Frozen> {
        let slot = GuardSlot::default();
        slot.register(10, 20);
        slot.freeze();
        Arc::new(Frozen { slot, kernel: Mutex::new(()), writers: Condvar::new() })
    }

    /// As the handler of a write to the slot's range, until the write may be tried again.
    fn write(&self) {
        while self.slot.around(15).is_some() && self.slot.frozen() {
            let held = self.kernel.lock().unwrap();
            if self.slot.frozen() {
                drop(self.writers.wait(held).unwrap());
            }
        }
    }

    fn wake(&self) {
        let _held = self.kernel.lock().unwrap();
        self.writers.notify_all();
    }
}

#[test]
fn every_writer_goes_on_after_an_unfreeze() {
    model(|| {
        let frozen = Frozen::new();
        let writer = frozen.clone();
        let writing = thread::spawn(move || writer.write());
        frozen.slot.unfreeze();
        frozen.wake();
        frozen.write();
        writing.join().unwrap();
    });
}

#[test]
fn every_writer_goes_on_when_its_range_is_retired_and_used_again() {
    model(|| {
        let frozen = Frozen::new();
        let writer = frozen.clone();
        let writing = thread::spawn(move || writer.write());
        if frozen.slot.retire() {
            frozen.wake();
        }
        frozen.slot.register(30, 40);
        writing.join().unwrap();
    });
}

/// A ring of frames: the marks of its lines, and what is written behind them.
struct Frames {
    marks: Vec<sync::AtomicU64>,
    bytes: Vec<UnsafeCell<u32>>,
    credit: Credit,
    room: Bell,
    frames: Bell,
}

// SAFETY: what is in the cells is accessed as the algorithm says; loom reports where two do so at once.
unsafe impl Sync for Frames {}
// SAFETY: as above.
unsafe impl Send for Frames {}

impl Marks for Frames {
    fn mark(&self, line: usize) -> &sync::AtomicU64 {
        &self.marks[line]
    }
}

impl Frames {
    fn new(lines: usize) -> Frames {
        Frames {
            marks: (0..lines).map(|_| sync::AtomicU64::new(0)).collect(),
            bytes: (0..lines).map(|_| UnsafeCell::new(0)).collect(),
            credit: Credit::default(),
            room: Bell::default(),
            frames: Bell::default(),
        }
    }
}

/// A sender of frames of these lengths in lines, which announces `batch` at once and sleeps while there is no room.
fn send_frames(ring: &Frames, lengths: &[usize], batch: usize) {
    let mut putting = marks::SenderMarks::new(ring.marks.len());
    let announce = |putting: &mut marks::SenderMarks| {
        if putting.announce(ring) {
            ring.frames.ring();
        }
    };
    for (number, lines) in lengths.iter().enumerate() {
        let place = loop {
            let seen = ring.room.line.count();
            match putting.room(&ring.credit, *lines).unwrap() {
                Some(place) => break place,
                None => {
                    announce(&mut putting);
                    let _ = ring.room.poll(seen);
                }
            }
        };
        for line in putting.line(place)..putting.line(place) + lines {
            // SAFETY: see `Frames`.
            ring.bytes[line].with_mut(|at| unsafe { *at = number as u32 });
        }
        putting.add(ring, place, *lines, *lines as u32);
        if (number + 1).is_multiple_of(batch) {
            announce(&mut putting);
        }
    }
    announce(&mut putting);
}

/// A receiver of as many frames, which sleeps while there is none.
fn receive_frames(ring: &Frames, lengths: &[usize]) {
    let mut taking = marks::ReceiverMarks::new(ring.marks.len());
    for (number, lines) in lengths.iter().enumerate() {
        let (line, length) = loop {
            let seen = ring.frames.line.count();
            match taking.next(ring, |length| Some(length as usize)).unwrap() {
                Some(found) => break found,
                None => {
                    if taking.settle(&ring.credit) {
                        ring.room.ring();
                    }
                    let _ = ring.frames.poll(seen);
                }
            }
        };
        assert_eq!(length as usize, *lines);
        for at in line..line + lines {
            // SAFETY: see `Frames`.
            assert_eq!(ring.bytes[at].with(|at| unsafe { *at }), number as u32);
        }
        if taking.release(&ring.credit, *lines) {
            ring.room.ring();
        }
    }
}

#[test]
fn frames_arrive_whole_in_order_and_nobody_sleeps_for_ever() {
    // The last goes around the end of four lines, and waits for those before it to be taken.
    for (lengths, batch) in [([2, 1, 2], 1), ([2, 1, 2], 2), ([1, 1, 2], 3)] {
        model(move || {
            let ring = Arc::new(Frames::new(4));
            let sending = ring.clone();
            let sender = thread::spawn(move || send_frames(&sending, &lengths, batch));
            receive_frames(&ring, &lengths);
            sender.join().unwrap();
        });
    }
}
