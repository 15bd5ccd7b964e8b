//! Copies whose range is known: how they are told, in what order, and what takes effect of them.

use rackbus_memory::SharedMemory;

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

/// A copy that is no part of another.
fn whole(offset: u64, length: u32) -> CopyPart {
    CopyPart { offset, length, follows: false, rest: 0 }
}

/// Copies 50 bytes from byte 20 of `from` to byte 100, beside the test.
fn copying(side: &Side, from: &SharedMemory) -> std::thread::JoinHandle<bool> {
    let (far, from) = (side.far.clone(), from.region().clone());
    std::thread::spawn(move || far.copy(REPLICA.1, (&from, 20), whole(100, 50)))
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
    side.owner = Peer { packets, outbox: LetterQueue::to_node(Arc::new(ours), 3) };
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
    let region = from.region();
    for (start, offset, length) in [
        (0, SIZE - 1, 2),
        (0, u64::MAX, 1),
        (SIZE as usize - 1, 0, 2),
        (usize::MAX, 0, 1),
        (0, 0, 0),
    ] {
        assert!(!side.far.copy(REPLICA.1, (region, start), whole(offset, length)));
    }
    assert!(!side.far.copy(Handle(99), (region, 0), whole(0, 1)), "there is no such connection");
    let copy = copying(&side, &from);
    assert!(matches!(side.owner.next(), CarriedMessage::Copied { .. }));
    side.far.end(FarConversation::ToOwner);
    assert!(!copy.join().unwrap());
    assert!(side.far.lock().copies.is_empty());
    assert!(!side.far.copy(REPLICA.1, (region, 0), whole(0, 1)), "the conversation is over");
}

/// What is stored meanwhile is told behind them, and what they overwrite anyway not at all.
#[test]
fn the_parts_of_a_long_copy_follow_each_other_without_a_look_at_other_memory() {
    let mut side = Side::new();
    let (replica, _) = settled(&mut side);
    let from = source(1);
    let copy = |part: CopyPart| {
        let (far, from) = (side.far.clone(), from.region().clone());
        std::thread::spawn(move || far.copy(REPLICA.1, (&from, part.offset as usize), part))
    };
    let part = |offset, length, follows, rest| CopyPart { offset, length, follows, rest };
    let put = |at: usize, value: u8| {
        replica.region().unwrap().whole().part(at, 1).unwrap().copy_from(&[value]);
    };
    let applied = |batch| {
        side.hear(REPLICA.0, CarriedMessage::AppliedAlone { connection: REPLICA.1, batch });
    };
    let effects = side.far.effects.clone();
    let none_looks = effects.write().unwrap();
    put(3000, 99);
    let first = copy(part(0, 2000, false, 2096));
    let begun = Instant::now();
    while side.far.lock().copies.is_empty() {
        assert!(begun.elapsed() < COMES, "it is not asked for");
        std::thread::yield_now();
    }
    drop(none_looks);
    assert!(matches!(side.owner.next(), CarriedMessage::Copied { batch: 1, last: true, .. }));
    put(10, 77);
    applied(1);
    assert!(first.join().unwrap());
    let second = copy(part(2000, 2000, true, 96));
    // Who looks may have found what was stored to the first part, and what the others overwrite.
    let mut next = side.owner.next();
    let mut batch = 2;
    if matches!(next, CarriedMessage::Stores { .. }) {
        applied(batch);
        (next, batch) = (side.owner.next(), 3);
    }
    assert!(matches!(next, CarriedMessage::Copied { offset: 2000, last: true, .. }), "{next:?}");
    put(11, 78);
    applied(batch);
    assert!(second.join().unwrap());
    let third = copy(part(4000, 96, true, 0));
    let mut is_copied = false;
    while !third.is_finished() {
        match side.owner.receive(COMES_NOT) {
            Some(CarriedMessage::Copied { offset: 4000, .. }) => is_copied = true,
            Some(CarriedMessage::Stores { last: true, .. }) => {}
            None => continue,
            other => panic!("{other:?}"),
        }
        batch += 1;
        applied(batch);
    }
    assert!(third.join().unwrap() && is_copied);
    let mut expected: Vec<u8> = (0..SIZE).map(|at| 1_u8.wrapping_add(at as u8)).collect();
    (expected[10], expected[11]) = (77, 78);
    assert_eq!(bytes_of(&replica, 0, SIZE as usize), expected);
    let pair = side.far.memory(REPLICA).unwrap();
    assert!(!pair.is_waiting());
    assert_eq!(side.owner.receive(COMES_NOT), None, "all was told before the last part had ended");
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
