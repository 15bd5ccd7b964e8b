use std::sync::atomic::AtomicUsize;
use std::thread;

use super::*;
use crate::event::Event;
use crate::region::SharedMemory;

/// Longer than any of these waits may take.
const LONG: Option<Duration> = Some(Duration::from_secs(20));

fn no_spin() -> AdaptiveSpin {
    AdaptiveSpin::new(0, 0)
}

fn memory() -> SharedMemory {
    SharedMemory::create("doorbell", 4096).unwrap()
}

fn doorbell(memory: &SharedMemory) -> Doorbell {
    Doorbell::new(memory.region().clone(), 64, Event::new().unwrap()).unwrap()
}

#[test]
fn is_refused_where_it_cannot_lie() {
    let memory = memory();
    let at = |offset| Doorbell::new(memory.region().clone(), offset, Event::new().unwrap());
    assert!(at(4096 - 64).is_some());
    for offset in [4, 32, 4096 - 32, 4096, usize::MAX - 63] {
        assert!(at(offset).is_none(), "{offset}");
    }
    let readable = Region::map(memory.as_fd(), 0, 4096, Access::READ).unwrap();
    assert!(Doorbell::new(Arc::new(readable), 0, Event::new().unwrap()).is_none());
}

#[test]
fn a_ring_before_the_wait_is_not_lost() {
    let memory = memory();
    let bell = doorbell(&memory);
    bell.ring();
    bell.ring();
    assert_eq!(bell.wait(0, &mut no_spin(), LONG), Ok(2));
    let short = Some(Duration::from_millis(1));
    assert_eq!(bell.wait(2, &mut no_spin(), short), Err(WaitError::TimedOut));
    assert_eq!(bell.wait(2, &mut AdaptiveSpin::default(), short), Err(WaitError::TimedOut));
}

#[test]
fn rings_wake_all_sleepers_every_time() {
    const WAITERS: usize = 3;
    const ROUNDS: u32 = 300;
    let memory = memory();
    let arrived = AtomicUsize::new(0);
    thread::scope(|scope| {
        for waiter in 0..WAITERS {
            let bell = doorbell(&memory);
            let arrived = &arrived;
            scope.spawn(move || {
                // One of them spins, so that both ways are taken at the same time.
                let mut spin = if waiter == 0 { AdaptiveSpin::default() } else { no_spin() };
                for round in 0..ROUNDS {
                    assert_eq!(bell.wait(round, &mut spin, LONG), Ok(round + 1));
                    arrived.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        let bell = doorbell(&memory);
        for round in 1..=ROUNDS as usize {
            bell.ring();
            while arrived.load(Ordering::SeqCst) < round * WAITERS {
                thread::yield_now();
            }
        }
    });
}

#[test]
fn the_count_wraps_around() {
    let memory = memory();
    memory.whole().store_u32(64, u32::MAX, Ordering::SeqCst).unwrap();
    let bell = doorbell(&memory);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| bell.wait(u32::MAX, &mut no_spin(), LONG));
        // Asleep, or about to be: the turn is odd.
        while memory.whole().load_u32(68, Ordering::SeqCst).unwrap() & 1 == 0 {
            thread::yield_now();
        }
        bell.ring();
        assert_eq!(waiter.join().unwrap(), Ok(0));
    });
}

#[test]
fn closing_wakes_all_and_is_for_ever() {
    let memory = memory();
    let bell = doorbell(&memory);
    thread::scope(|scope| {
        let waiters: Vec<_> =
            (0..3).map(|_| scope.spawn(|| bell.wait(0, &mut no_spin(), None))).collect();
        while memory.whole().load_u32(68, Ordering::SeqCst).unwrap() & 1 == 0 {
            thread::yield_now();
        }
        doorbell(&memory).close();
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), Err(WaitError::Closed));
        }
    });
    assert!(bell.is_closed());
    // A peer opens the line again: who knew that it was closed stays with that.
    memory.whole().fill(0);
    assert!(bell.is_closed());
    assert_eq!(bell.wait(0, &mut no_spin(), None), Err(WaitError::Closed));
}

#[test]
fn the_event_rings_once_for_each_time_it_was_armed() {
    let memory = memory();
    let bell = doorbell(&memory);
    bell.ring();
    assert!(!bell.event.drain(), "nobody had asked");
    assert!(!bell.arm(0), "it rang since");
    assert!(bell.arm(1));
    bell.ring();
    bell.ring();
    Event::wait_any(&[bell.as_fd()], Some(20_000_000_000));
    assert!(bell.event.drain());
    bell.ring();
    assert!(!bell.event.drain(), "it was armed once");
    assert!(bell.arm(bell.count()));
    bell.close();
    assert!(bell.event.drain(), "closing rings too");
    assert!(!bell.arm(bell.count()));
}

/// Who shares the line asks to be woken by an event whose counter is full, and that waits.
#[test]
fn a_poller_whose_event_takes_no_ring_keeps_nobody() {
    let memory = memory();
    let peers = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    rustix::io::write(&peers, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let event = PeerEvent::new(peers).unwrap();
    let bell = Doorbell::new(memory.region().clone(), 64, event).unwrap();
    let (done, ended) = std::sync::mpsc::channel();
    thread::spawn(move || {
        assert!(bell.arm(0));
        bell.ring();
        bell.disarm();
        bell.disarm();
        let _ = done.send(());
    });
    ended.recv_timeout(Duration::from_secs(10)).expect("the ring waits for the peer");
}

#[test]
fn garbage_from_a_peer_delays_no_wait() {
    let memory = memory();
    let bell = doorbell(&memory);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut word = 0x9e37_79b9_7f4a_7c15u64;
            while !done.load(Ordering::Relaxed) {
                word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                // Not the flag that closes: that would end each wait at once.
                memory.whole().store_u64(64, word, Ordering::SeqCst).unwrap();
                memory.whole().store_u32(76, word as u32, Ordering::SeqCst).unwrap();
            }
        });
        let begun = Instant::now();
        for _ in 0..200 {
            let timeout = Some(Duration::from_micros(200));
            let _ = bell.wait(bell.count(), &mut no_spin(), timeout);
            bell.ring();
        }
        assert!(begun.elapsed() < Duration::from_secs(10));
        done.store(true, Ordering::Relaxed);
    });
}

/// A virtual machine counts a ring by itself and has it told by somebody outside.
#[test]
fn a_ring_that_was_counted_elsewhere_wakes_who_polls() {
    let memory = memory();
    let bell = doorbell(&memory);
    assert!(bell.arm(0));
    assert!(bell.line().ring().poller);
    assert!(!bell.event.drain());
    bell.relay();
    assert!(bell.event.drain());
    assert_eq!(bell.count(), 1);
}

/// The far side of a virtual machine that lets go of who waits only after [`RECHECK`].
#[derive(Default)]
struct SlowFar {
    waits: AtomicUsize,
}

impl FarEvent for SlowFar {
    fn seen(&self) -> u64 {
        0
    }

    fn wait(&self, _seen: u64) {
        self.waits.fetch_add(1, Ordering::SeqCst);
        thread::sleep(RECHECK);
    }
}

#[test]
fn a_deadline_is_kept_where_the_far_side_keeps_none() {
    let memory = memory();
    let bell = doorbell(&memory);
    let far = SlowFar::default();
    // The last one leaves time for one wait, and not for another one, also when this thread is held up in between.
    for (timeout, waits) in
        [(Duration::ZERO, 0), (Duration::from_millis(10), 0), (RECHECK * 3 / 2, 1)]
    {
        let begun = Instant::now();
        assert_eq!(bell.wait_far(&far, 0, &mut no_spin(), Some(timeout)), None);
        let took = begun.elapsed();
        assert!(took >= timeout && took < timeout + RECHECK / 2, "{timeout:?} took {took:?}");
        assert_eq!(far.waits.swap(0, Ordering::SeqCst), waits, "{timeout:?}");
    }
    let within = Some(RECHECK - Duration::from_millis(1));
    thread::scope(|scope| {
        let waiter = scope.spawn(|| bell.wait_far(&far, 0, &mut no_spin(), within));
        thread::sleep(Duration::from_millis(5));
        bell.ring();
        assert_eq!(waiter.join().unwrap(), Some(Look::Rung(1)));
    });
}
