//! Copies whose range is known: how they are told, in what order, and what takes effect of them.

use rackbus_memory::SharedMemory;
use rackbus_segment::message::Refusal;

use super::*;

/// Memory to copy from, whose bytes count from `first`.
fn source(first: u8) -> SharedMemory {
    let memory = SharedMemory::create("copies", SIZE).unwrap();
    let bytes: Vec<u8> = (0..SIZE).map(|at| first.wrapping_add(at as u8)).collect();
    memory.whole().copy_from(&bytes);
    memory
}

fn bytes_of(object: &Object, offset: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    object.region().unwrap().whole().part(offset, length).unwrap().copy_to(&mut bytes);
    bytes
}

fn bytes_from(from: &SharedMemory, start: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    from.whole().part(start, length).unwrap().copy_to(&mut bytes);
    bytes
}

/// A copy that is no part of another.
fn whole(offset: u64) -> CopyPart {
    CopyPart { offset, follows: false, more: false }
}

/// Copies 50 bytes from byte 20 of `from` to byte 100, beside the test.
fn copying(side: &Side, from: &SharedMemory) -> std::thread::JoinHandle<bool> {
    let (far, bytes) = (side.far.clone(), bytes_from(from, 20, 50));
    std::thread::spawn(move || far.copy(REPLICA.1, bytes, whole(100)).is_ok())
}

#[test]
fn a_copy_is_told_behind_what_was_stored_before_it_and_waited_for() {
    let mut side = Side::new();
    let (replica, _) = settled(&mut side);
    // Both in one look: who looks waits until both are there.
    let effects = side.far.effects.clone();
    let none_looks = effects.write().unwrap();
    store(&replica, &[9; 8]);
    let (from, to) = (source(1), REPLICA.1);
    let copy = copying(&side, &from);
    let begun = Instant::now();
    while side.far.lock().copies.is_empty() {
        assert!(begun.elapsed() < COMES, "it is not asked for");
        std::thread::yield_now();
    }
    drop(none_looks);
    let (stored, copied) = (side.owner.next(), side.owner.next());
    assert!(
        matches!(&stored, CarriedMessage::Stores { batch: 1, last: false, runs, .. } if runs[..] == [(0, 8)]),
        "{stored:?}"
    );
    let data: Vec<u8> = (21..71).collect();
    assert_eq!(
        copied,
        CarriedMessage::Copied {
            connection: to,
            batch: 1,
            last: true,
            held: false,
            offset: 100,
            data: Cow::Owned(data.clone()),
        }
    );
    assert_eq!(bytes_of(&replica, 100, 50), data, "it is here as well");
    assert!(!copy.is_finished(), "it has not taken effect");
    side.hear(REPLICA.0, CarriedMessage::AppliedAlone { connection: to, batch: 1 });
    assert!(copy.join().unwrap());
    // The same once more is told again: nobody looks whether the other side has it.
    let copy = copying(&side, &from);
    assert!(matches!(side.owner.next(), CarriedMessage::Copied { batch: 2, last: true, .. }));
    side.hear(REPLICA.0, CarriedMessage::AppliedAlone { connection: to, batch: 2 });
    assert!(copy.join().unwrap());
    // And nothing is found of it by who looks.
    assert!(side.far.flush());
    assert_eq!(side.owner.receive(COMES_NOT), None);
}

#[test]
fn what_was_copied_takes_effect_without_keeping_anybody_from_it() {
    let mut side = Side::new();
    let (_, home) = settled(&mut side);
    let part = |batch, last, offset, value| CarriedMessage::Copied {
        connection: HOME.1,
        batch,
        last,
        held: false,
        offset,
        data: Cow::Owned(vec![value; 100]),
    };
    side.hear(HOME.0, part(1, false, 1001, 5));
    assert_eq!(bytes_of(&home, 1001, 1), [0], "as a whole, with its batch");
    side.hear(HOME.0, part(1, true, 1101, 6));
    let applied = |batch| CarriedMessage::AppliedAlone { connection: HOME.1, batch };
    assert_eq!(side.connector.next(), applied(1));
    assert_eq!(bytes_of(&home, 1000, 202), [&[0][..], &[5; 100], &[6; 100], &[0]].concat());
    assert_eq!(*side.hidden.lock().unwrap(), [vec![]]);
    // With a store before it, nobody sees the one without the other: also where that is a word.
    side.hear(HOME.0, {
        let (runs, data) = (vec![(0, 8)], Cow::Owned(vec![3; 8]));
        let connection = HOME.1;
        CarriedMessage::Stores { connection, batch: 2, last: false, held: false, runs, data }
    });
    side.hear(HOME.0, part(2, true, 200, 7));
    assert_eq!(side.connector.next(), applied(2));
    assert_eq!(side.hidden.lock().unwrap()[1..], [vec![(HOME, 0, 8)]]);
    assert_eq!((bytes_of(&home, 0, 8), bytes_of(&home, 299, 2)), (vec![3; 8], vec![7, 0]));
    // Nothing of it goes back.
    assert!(side.far.flush());
    assert_eq!(side.connector.receive(COMES_NOT), None);
}

#[test]
fn an_older_node_is_told_a_copy_as_what_it_changes() {
    let mut side = Side::new();
    let (ours, packets) = Packets::pair().unwrap();
    side.far.end(FarConversation::ToOwner);
    side.owner = Peer { packets, outbox: LetterQueue::to_node(Arc::new(ours), (3, None)) };
    side.far.begin(FarConversation::ToOwner, side.owner.outbox.clone());
    settled(&mut side);
    let copy = copying(&side, &source(1));
    let stored = side.owner.next();
    assert!(
        matches!(&stored, CarriedMessage::Stores { last: true, runs, .. } if runs[..] == [(100, 50)]),
        "{stored:?}"
    );
    side.hear(REPLICA.0, CarriedMessage::AppliedAlone { connection: REPLICA.1, batch: 1 });
    assert!(copy.join().unwrap());
}

#[test]
fn a_copy_that_cannot_be_is_refused_and_one_whose_connection_is_lost_fails() {
    let mut side = Side::new();
    settled(&mut side);
    let from = source(1);
    for (offset, length) in [(SIZE - 1, 2), (u64::MAX, 1), (SIZE, 1), (0, 0)] {
        let refused = side.far.copy(REPLICA.1, vec![1; length], whole(offset));
        assert!(matches!(refused, Err(Refusal::Illegal(_))), "{refused:?}");
    }
    let gone = Err(Refusal::NotResponding);
    assert_eq!(side.far.copy(Handle(99), vec![1], whole(0)), gone, "there is no such connection");
    let copy = copying(&side, &from);
    assert!(matches!(side.owner.next(), CarriedMessage::Copied { .. }));
    side.far.end(FarConversation::ToOwner);
    assert!(!copy.join().unwrap());
    assert!(side.far.lock().copies.is_empty());
    assert_eq!(side.far.copy(REPLICA.1, vec![1], whole(0)), gone, "the conversation is over");
    assert!(side.far.lock().copying.is_empty());
}

/// What was stored before the first one is told with it, also where the others copy to; what is stored meanwhile, when all
/// memory is looked at for the last one.
#[test]
fn the_parts_of_a_long_copy_follow_each_other_without_a_look_at_other_memory() {
    let mut side = Side::new();
    let (replica, _) = settled(&mut side);
    let from = source(1);
    let copy = |offset: u64, length, follows, more| {
        let (far, bytes) = (side.far.clone(), bytes_from(&from, offset as usize, length));
        let part = CopyPart { offset, follows, more };
        std::thread::spawn(move || far.copy(REPLICA.1, bytes, part).is_ok())
    };
    let put = |at: usize, value: u8| {
        replica.region().unwrap().whole().part(at, 1).unwrap().copy_from(&[value]);
    };
    let applied = |batch| {
        side.hear(REPLICA.0, CarriedMessage::AppliedAlone { connection: REPLICA.1, batch });
    };
    let effects = side.far.effects.clone();
    // Asked for while nobody looks, so that it is in the next cycle.
    let asked = |begin: Box<dyn FnOnce() -> std::thread::JoinHandle<bool> + '_>| {
        let none_looks = effects.write().unwrap();
        let begun = Instant::now();
        let copying = begin();
        while side.far.lock().copies.is_empty() {
            assert!(begun.elapsed() < COMES, "it is not asked for");
            std::thread::yield_now();
        }
        drop(none_looks);
        copying
    };
    let first = asked(Box::new(|| {
        put(3000, 99);
        copy(0, 2000, false, true)
    }));
    let before = side.owner.next();
    assert!(
        matches!(&before, CarriedMessage::Stores { batch: 1, last: false, runs, .. } if runs[..] == [(3000, 1)]),
        "{before:?}"
    );
    assert!(matches!(side.owner.next(), CarriedMessage::Copied { batch: 1, last: true, .. }));
    put(10, 77);
    let second = asked(Box::new(|| {
        applied(1);
        assert!(first.join().unwrap());
        copy(2000, 2000, true, true)
    }));
    let mut batch = 1;
    let mut next = || {
        batch += 1;
        (batch, side.owner.next())
    };
    let (mut number, mut told) = next();
    if matches!(told, CarriedMessage::Stores { .. }) {
        // Who looked in between found what was stored meanwhile.
        applied(number);
        (number, told) = next();
    }
    assert!(matches!(told, CarriedMessage::Copied { offset: 2000, last: true, .. }), "{told:?}");
    applied(number);
    assert!(second.join().unwrap());
    let third = copy(4000, 96, true, false);
    let mut is_copied = false;
    while !third.is_finished() {
        match side.owner.receive(COMES_NOT) {
            Some(CarriedMessage::Copied { offset: 4000, .. }) => is_copied = true,
            Some(CarriedMessage::Stores { last: true, .. }) => {}
            None => continue,
            other => panic!("{other:?}"),
        }
        number += 1;
        applied(number);
    }
    assert!(third.join().unwrap() && is_copied);
    let mut expected: Vec<u8> = (0..SIZE).map(|at| 1_u8.wrapping_add(at as u8)).collect();
    expected[10] = 77;
    assert_eq!(bytes_of(&replica, 0, SIZE as usize), expected);
    assert_eq!(side.owner.receive(COMES_NOT), None, "all was told before the last part had ended");
}

/// Parts of other copies come without a pause: a flush that is waited for meanwhile has its look.
#[test]
fn a_flush_waits_for_no_more_than_one_part_of_the_copies_of_others() {
    let mut side = Side::new();
    let (replica, _) = settled(&mut side);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let copies: Vec<_> = (0..2_u64)
            .map(|nth| {
                let (far, stop) = (side.far.clone(), &stop);
                scope.spawn(move || {
                    let part = CopyPart { offset: 64 * (nth + 1), follows: true, more: true };
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        far.copy(REPLICA.1, vec![5; 64], part).unwrap();
                    }
                })
            })
            .collect();
        let mut flushing = None;
        let (mut batch, mut copied) = (0, 0);
        while !flushing.as_ref().is_some_and(std::thread::ScopedJoinHandle::is_finished) {
            let told = side.owner.next();
            copied += usize::from(matches!(told, CarriedMessage::Copied { .. }));
            if copied == 10 && flushing.is_none() {
                store(&replica, &[1; 8]);
                let far = side.far.clone();
                flushing = Some(scope.spawn(move || far.flush()));
            }
            assert!(copied < 1000, "the flush does not end");
            if matches!(told, CarriedMessage::Stores { last: false, .. }) {
                // A copy is in the same batch.
                continue;
            }
            let begun = Instant::now();
            // With each that takes effect, the next one is asked for already.
            while side.far.lock().copies.is_empty() {
                assert!(begun.elapsed() < COMES, "nobody copies");
                std::thread::yield_now();
            }
            batch += 1;
            side.hear(REPLICA.0, CarriedMessage::AppliedAlone { connection: REPLICA.1, batch });
        }
        assert!(flushing.is_some_and(|flushing| flushing.join().unwrap()));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        while copies.iter().any(|copy| !copy.is_finished()) {
            let told = side.owner.receive(COMES_NOT);
            if told.is_some_and(|told| !matches!(told, CarriedMessage::Stores { last: false, .. }))
            {
                batch += 1;
                side.hear(REPLICA.0, CarriedMessage::AppliedAlone { connection: REPLICA.1, batch });
            }
        }
    });
}

/// Several are asked for at a time; each is made, and a flush is done when those before it are.
#[test]
fn copies_to_one_memory_are_made_one_after_the_other() {
    let mut side = Side::new();
    let (replica, _) = settled(&mut side);
    let effects = side.far.effects.clone();
    let none_looks = effects.write().unwrap();
    let sources: Vec<SharedMemory> = (1..=3).map(|nth| source(nth * 40)).collect();
    let copies: Vec<_> = sources.iter().map(|from| copying(&side, from)).collect();
    let begun = Instant::now();
    while side.far.lock().copies.len() < 3 {
        assert!(begun.elapsed() < COMES, "they are not asked for");
        std::thread::yield_now();
    }
    drop(none_looks);
    let mut last = Vec::new();
    for batch in 1..=3 {
        let CarriedMessage::Copied { batch: told, data, .. } = side.owner.next() else {
            panic!("it is no copy");
        };
        assert_eq!(told, batch);
        last = data.into_owned();
        let applied = CarriedMessage::AppliedAlone { connection: REPLICA.1, batch };
        side.hear(REPLICA.0, applied);
    }
    assert!(copies.into_iter().all(|copy| copy.join().unwrap()));
    assert_eq!(bytes_of(&replica, 100, 50), last);
}
