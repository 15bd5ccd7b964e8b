use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use proptest::prelude::*;

use super::*;
use crate::event::Event;
use crate::region::SharedMemory;

const NOW: Option<Duration> = Some(Duration::ZERO);
const LONG: Option<Duration> = Some(Duration::from_secs(30));

fn owner(id: u32, generation: u32) -> LockOwner {
    LockOwner { id: NonZeroU32::new(id).unwrap(), generation }
}

fn memory() -> SharedMemory {
    SharedMemory::create("lock", 4096).unwrap()
}

fn mutex(memory: &SharedMemory, me: LockOwner) -> SharedMutex {
    SharedMutex::new(memory.region().clone(), 64, Event::new().unwrap(), me).unwrap()
}

fn barrier(memory: &SharedMemory, parties: &[LockOwner], me: LockOwner) -> SharedBarrier {
    let event = Event::new().unwrap();
    SharedBarrier::new(memory.region().clone(), 0, event, parties, me).unwrap()
}

#[derive(Debug, Clone)]
enum Step {
    Lock(usize),
    Unlock,
    Die(usize),
    DeclareAgain(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0usize..3).prop_map(Step::Lock),
        2 => Just(Step::Unlock),
        1 => (0usize..3).prop_map(Step::Die),
        1 => (0usize..3).prop_map(Step::DeclareAgain),
    ]
}

proptest! {
    #[test]
    fn a_mutex_has_one_holder_and_reports_each_death_once(steps in prop::collection::vec(step(), 0..60)) {
        let memory = memory();
        let mut lives = [0u32, 0, 0].map(|_| u32::MAX - 2);
        let me = |index: usize, lives: &[u32; 3]| owner(index as u32 + 1, lives[index]);
        let mut ends: Vec<SharedMutex> = (0..3).map(|index| mutex(&memory, me(index, &lives))).collect();
        // Who holds it, and whether the last holder died.
        let (mut holder, mut died) = (None, false);
        for step in steps {
            match step {
                Step::Lock(index) => {
                    let locked = ends[index].lock(NOW);
                    match locked {
                        Err(error) => {
                            prop_assert_eq!(error, LockError::TimedOut);
                            prop_assert!(holder.is_some());
                        }
                        Ok(locked) => {
                            prop_assert!(holder.is_none());
                            prop_assert_eq!(matches!(locked, Locked::OwnerDied(_)), died);
                            std::mem::forget(locked);
                            (holder, died) = (Some(index), false);
                        }
                    }
                }
                Step::Unlock => {
                    if let Some(index) = holder.take() {
                        drop(mutex::guard(&ends[index]));
                    }
                }
                Step::Die(index) => {
                    let dead = me(index, &lives);
                    lives[index] = lives[index].wrapping_add(1);
                    ends[index] = mutex(&memory, me(index, &lives));
                    prop_assert_eq!(ends[(index + 1) % 3].declare_dead(dead), holder == Some(index));
                    if holder == Some(index) {
                        (holder, died) = (None, true);
                    }
                }
                Step::DeclareAgain(index) => {
                    // What is known of a former life says nothing about this one.
                    let former = owner(index as u32 + 1, lives[index].wrapping_sub(1));
                    prop_assert!(!ends[index].declare_dead(former));
                }
            }
            prop_assert_eq!(ends[0].owner(), holder.map(|index| me(index, &lives)));
        }
    }

    #[test]
    fn a_barrier_waits_for_all_who_live(steps in prop::collection::vec((0usize..4, prop::bool::weighted(0.1)), 0..80)) {
        let memory = memory();
        // Begins near the end of the numbers, to go around.
        for line in [0, 2, 3, 4, 5] {
            memory.whole().store_u32(line * 64, u32::MAX - 3, Ordering::SeqCst).unwrap();
        }
        let parties: Vec<LockOwner> = (1..=4).map(|id| owner(id, 7)).collect();
        let mut ends: Vec<_> = parties.iter().map(|me| barrier(&memory, &parties, *me)).collect();
        let mut live: BTreeSet<usize> = (0..4).collect();
        // Who has arrived and not passed, and whether all have arrived.
        let (mut arrived, mut open) = (BTreeSet::new(), BTreeSet::new());
        for (index, dies) in steps {
            if dies {
                prop_assert!(ends[(index + 1) % 4].declare_dead(parties[index]));
                live.remove(&index);
                arrived.remove(&index);
                open.remove(&index);
            } else {
                let outcome = ends[index].wait(NOW);
                if !live.contains(&index) {
                    prop_assert_eq!(outcome, Err(LockError::Excluded));
                    continue;
                }
                if open.remove(&index) {
                    prop_assert_eq!(outcome, Ok(live.len()));
                    continue;
                }
                arrived.insert(index);
                if live.iter().all(|index| arrived.contains(index)) && open.is_empty() {
                    prop_assert_eq!(outcome, Ok(live.len()));
                    open = std::mem::take(&mut arrived);
                    open.remove(&index);
                } else {
                    prop_assert_eq!(outcome, Err(LockError::TimedOut));
                }
            }
            if !live.is_empty() && !arrived.is_empty() && live.iter().all(|index| arrived.contains(index)) && open.is_empty() {
                // The death completed the phase.
                open = std::mem::take(&mut arrived);
            }
        }
    }
}

#[test]
fn threads_exclude_each_other() {
    const EACH: u64 = 5000;
    let memory = memory();
    thread::scope(|scope| {
        for id in 1..=3 {
            let mutex = mutex(&memory, owner(id, 0));
            let memory = &memory;
            scope.spawn(move || {
                for _ in 0..EACH {
                    let _guard = mutex.lock(LONG).unwrap().guard();
                    let count = memory.whole().load_u64(1024, Ordering::Relaxed).unwrap();
                    memory.whole().store_u64(1024, count + 1, Ordering::Relaxed).unwrap();
                }
            });
        }
    });
    assert_eq!(memory.whole().load_u64(1024, Ordering::Relaxed), Some(3 * EACH));
}

#[test]
fn a_sleeper_gets_the_lock_of_a_dead_holder() {
    let memory = memory();
    let (first, second) = (mutex(&memory, owner(1, 0)), mutex(&memory, owner(2, 0)));
    std::mem::forget(first.lock(NOW).unwrap());
    thread::scope(|scope| {
        let waiting = scope.spawn(|| matches!(second.lock(LONG), Ok(Locked::OwnerDied(_))));
        // Asleep, or about to be: the doorbell's turn is odd.
        while memory.whole().load_u32(64 + 64 + 4, Ordering::SeqCst).unwrap() & 1 == 0 {
            thread::yield_now();
        }
        assert!(mutex(&memory, owner(3, 0)).declare_dead(owner(1, 0)));
        assert!(waiting.join().unwrap());
    });
    assert!(matches!(first.lock(NOW), Ok(Locked::Clean(_))));
}

#[test]
fn what_does_not_fit_is_refused() {
    let memory = memory();
    let mutex = |offset| {
        SharedMutex::new(memory.region().clone(), offset, Event::new().unwrap(), owner(1, 0))
    };
    assert!(mutex(4096 - MUTEX_BYTES).is_some());
    assert!(mutex(4096 - 64).is_none() && mutex(8).is_none() && mutex(usize::MAX - 63).is_none());
    let parties = [owner(1, 0), owner(2, 0)];
    let barrier = |offset, parties: &[LockOwner], me| {
        let event = Event::new().unwrap();
        SharedBarrier::new(memory.region().clone(), offset, event, parties, me).is_some()
    };
    assert!(barrier(4096 - SharedBarrier::bytes(2), &parties, owner(2, 0)));
    assert!(!barrier(4096 - SharedBarrier::bytes(1), &parties, owner(2, 0)));
    assert!(!barrier(0, &parties, owner(2, 1)), "another life is another party");
    assert!(!barrier(0, &[owner(1, 0), owner(1, 1)], owner(1, 0)));
}

#[test]
fn a_peer_that_rings_at_each_look_delays_nobody_beyond_the_timeout() {
    let memory = memory();
    let bell = Doorbell::new(memory.region().clone(), 0, Event::new().unwrap()).unwrap();
    let begun = Instant::now();
    let outcome = until(&bell, Some(Duration::from_millis(5)), || -> Option<()> {
        assert!(begun.elapsed() < Duration::from_secs(5), "it looks for ever");
        bell.ring();
        None
    });
    assert_eq!(outcome, Err(LockError::TimedOut));
}

#[test]
fn a_scribbling_peer_delays_nobody_beyond_the_timeout() {
    let memory = memory();
    let parties = [owner(1, 0), owner(2, 0)];
    let (lock, mut barrier) =
        (mutex(&memory, owner(1, 0)), barrier(&memory, &parties, owner(1, 0)));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut word = 0x9e37_79b9_7f4a_7c15u64;
            while !done.load(Ordering::Relaxed) {
                word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                let at = (word >> 33) as usize % 64 * 8;
                memory.whole().store_u64(at, word, Ordering::Relaxed).unwrap();
            }
        });
        let begun = Instant::now();
        for _ in 0..200 {
            let timeout = Some(Duration::from_micros(200));
            let _ = lock.lock(timeout);
            let _ = barrier.wait(timeout);
            lock.declare_dead(owner(1, 0));
        }
        assert!(begun.elapsed() < Duration::from_secs(10));
        done.store(true, Ordering::Relaxed);
    });
}
