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

fn bytes_from(from: &SharedMemory, start: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    from.whole().part(start, length).unwrap().copy_to(&mut bytes);
    bytes
}

/// A copy that is no part of another.
fn whole(offset: u64) -> CopyPart {
    CopyPart { offset, follows: false }
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

/// What was stored before the first one is told with it, also where the others copy to; what is stored meanwhile, with a later
/// look, which nobody waits for.
#[test]
fn the_parts_of_a_long_copy_follow_each_other_without_a_look_at_other_memory() {
    let mut side = Side::new();
    let (replica, _) = settled(&mut side);
    let from = source(1);
    let begin = |offset: u64, length, follows| {
        let bytes = bytes_from(&from, offset as usize, length);
        side.far.begin_copy(REPLICA.1, bytes, CopyPart { offset, follows }).unwrap()
    };
    let put = |at: usize, value: u8| {
        replica.region().unwrap().whole().part(at, 1).unwrap().copy_from(&[value]);
    };
    let applied = |batch| {
        side.hear(REPLICA.0, CarriedMessage::AppliedAlone { connection: REPLICA.1, batch });
    };
    // Asked for while nobody looks, so that they are in the next cycles.
    let effects = side.far.effects.clone();
    let none_looks = effects.write().unwrap();
    put(3000, 99);
    let parts = [begin(0, 2000, false), begin(2000, 2000, true), begin(4000, 96, true)];
    drop(none_looks);
    let before = side.owner.next();
    assert!(
        matches!(&before, CarriedMessage::Stores { batch: 1, last: false, runs, .. } if runs[..] == [(3000, 1)]),
        "{before:?}"
    );
    assert!(matches!(side.owner.next(), CarriedMessage::Copied { batch: 1, last: true, .. }));
    put(10, 77);
    applied(1);
    let mut number = 1;
    for at in [2000, 4000] {
        let told = side.owner.next();
        assert!(matches!(told, CarriedMessage::Copied { offset, last: true, .. } if offset == at));
        number += 1;
        applied(number);
    }
    let until = Instant::now() + COMES;
    let flushes = parts.map(|part| part.wait(until).expect("it took effect"));
    assert!(matches!(flushes, [Some(_), None, None]), "only the first comes with a look");
    side.far.end_copy(REPLICA.1, flushes[0], until).unwrap();
    let stored = side.owner.next();
    assert!(
        matches!(&stored, CarriedMessage::Stores { batch: 4, runs, .. } if runs[..] == [(10, 1)]),
        "{stored:?}"
    );
    applied(4);
    let mut expected: Vec<u8> = (0..SIZE).map(|at| 1_u8.wrapping_add(at as u8)).collect();
    expected[10] = 77;
    assert_eq!(bytes_of(&replica, 0, SIZE as usize), expected);
    assert_eq!(side.owner.receive(COMES_NOT), None);
}

/// Parts of 10 bytes of a copy, the first of them behind a look, begun before any is made.
fn begin_parts(side: &Side, count: u64) -> Vec<BegunCopy> {
    let effects = side.far.effects.clone();
    let none_looks = effects.write().unwrap();
    let part = |nth: u64| CopyPart { offset: nth * 10, follows: nth > 0 };
    let begin = |nth| side.far.begin_copy(REPLICA.1, vec![nth as u8; 10], part(nth)).unwrap();
    let begun = (0..count).map(begin).collect();
    drop(none_looks);
    begun
}

/// The next that is told is this part, in a batch of so much higher a number.
fn next_part(side: &Side, nth: u64) {
    let told = side.owner.next();
    let is_it = matches!(
        told,
        CarriedMessage::Copied { offset, batch, last: true, .. }
            if (offset, batch) == (nth * 10, nth + 1)
    );
    assert!(is_it, "{told:?}");
}

fn applied(side: &Side, nth: u64) {
    let (connection, batch) = (REPLICA.1, nth + 1);
    side.hear(REPLICA.0, CarriedMessage::AppliedAlone { connection, batch });
}

#[test]
fn parts_that_follow_are_under_way_together_and_a_flush_waits_for_them_and_not_for_the_rest() {
    let mut side = Side::new();
    let (replica, _) = settled(&mut side);
    let parts = begin_parts(&side, 8);
    next_part(&side, 0);
    assert_eq!(side.owner.receive(COMES_NOT), None, "the look is waited for");
    applied(&side, 0);
    (1..=4).for_each(|nth| next_part(&side, nth));
    assert_eq!(side.owner.receive(COMES_NOT), None, "no more than four");
    applied(&side, 1);
    next_part(&side, 5);
    store(&replica, &[9; 8]);
    let flush = side.far.begin_flush();
    (2..=5).for_each(|nth| applied(&side, nth));
    let looked = side.owner.next();
    assert!(
        matches!(&looked, CarriedMessage::Stores { batch: 7, last: false, runs, .. } if runs[..] == [(0, 8)]),
        "{looked:?}"
    );
    next_part(&side, 6);
    applied(&side, 6);
    assert!(side.far.has_flushed_within(flush, COMES));
    next_part(&side, 7);
    applied(&side, 7);
    let until = Instant::now() + COMES;
    assert!(parts.into_iter().all(|part| part.wait(until).is_some()));
}

#[test]
fn an_older_node_is_sent_one_part_at_a_time() {
    let mut side = Side::new();
    let (ours, packets) = Packets::pair().unwrap();
    side.far.end(FarConversation::ToOwner);
    side.owner = Peer { packets, outbox: LetterQueue::to_node(Arc::new(ours), (5, None)) };
    side.far.begin(FarConversation::ToOwner, side.owner.outbox.clone());
    settled(&mut side);
    let parts = begin_parts(&side, 4);
    for nth in 0..4 {
        next_part(&side, nth);
        assert_eq!(side.owner.receive(COMES_NOT), None);
        applied(&side, nth);
    }
    let until = Instant::now() + COMES;
    assert!(parts.into_iter().all(|part| part.wait(until).is_some()));
}

#[test]
fn parts_that_are_under_way_are_not_waited_for_when_their_connection_is_over() {
    let mut side = Side::new();
    settled(&mut side);
    let parts = begin_parts(&side, 7);
    next_part(&side, 0);
    applied(&side, 0);
    (1..=4).for_each(|nth| next_part(&side, nth));
    side.far.forget(REPLICA);
    let until = Instant::now() + COMES;
    let flushes: Vec<_> = parts.into_iter().map(|part| part.wait(until)).collect();
    assert!(Instant::now() < until);
    assert!(flushes[0].is_some() && flushes[1..] == [None; 6]);
    assert_eq!(
        side.far.end_copy(REPLICA.1, flushes[0].unwrap(), until),
        Err(Refusal::NotResponding)
    );
    assert!(side.far.lock().copying.is_empty() && side.far.flush());
}

/// The end of its conversation is heard later: until then, the connection is there.
#[test]
fn what_a_node_does_not_answer_is_not_said_to_have_taken_effect() {
    for answered in [0, 1] {
        let mut side = Side::with_limit(COMES_NOT);
        settled(&mut side);
        let parts = begin_parts(&side, answered + 1);
        (0..answered).for_each(|nth| {
            next_part(&side, nth);
            applied(&side, nth);
        });
        next_part(&side, answered);
        let until = Instant::now() + COMES;
        let took: Vec<bool> = parts.into_iter().map(|part| part.wait(until).is_some()).collect();
        let expected: Vec<bool> = (0..=answered).map(|nth| nth < answered).collect();
        assert_eq!(took, expected);
        assert!(side.owner.outbox.is_given_up());
        let flush = side.far.begin_flush();
        assert!(!side.far.has_flushed_within(flush, COMES_NOT));
    }
}

/// Once the wake-up was lost while the part was waited for, and the pause after copies was waited for as well.
#[test]
fn what_is_said_behind_stores_does_not_wait_for_the_pause_after_copies() {
    let mut side = Side::new();
    settled(&mut side);
    let _parts = begin_parts(&side, 2);
    next_part(&side, 0);
    applied(&side, 0);
    next_part(&side, 1);
    side.far.lock().looked = COMES * 60;
    side.far.say_behind_stores(HOME.0, &[9]);
    // The thread that looks has woken up, and goes on waiting for the part.
    while side.far.lock().now {
        std::thread::yield_now();
    }
    applied(&side, 1);
    let said = CarriedMessage::Said { message: Cow::Owned(vec![9]), given: None };
    assert_eq!(side.connector.next(), said);
}

/// No flush waits for them.
#[test]
fn stores_are_looked_for_while_a_long_copy_goes_on() {
    let mut side = Side::new();
    let (replica, _) = settled(&mut side);
    let parts = begin_parts(&side, 20);
    next_part(&side, 0);
    applied(&side, 0);
    next_part(&side, 1);
    side.far.lock().look_due = None;
    replica.region().unwrap().whole().part(4000, 1).unwrap().copy_from(&[9]);
    applied(&side, 1);
    (2..=16).for_each(|nth| {
        next_part(&side, nth);
        applied(&side, nth);
    });
    let looked = side.owner.next();
    assert!(
        matches!(&looked, CarriedMessage::Stores { batch: 18, last: false, runs, .. } if runs[..] == [(4000, 1)]),
        "{looked:?}"
    );
    (17..20).for_each(|nth| {
        next_part(&side, nth);
        applied(&side, nth);
    });
    let until = Instant::now() + COMES;
    assert!(parts.into_iter().all(|part| part.wait(until).is_some()));
}

#[test]
fn a_part_that_nobody_waits_for_any_more_is_not_made() {
    let mut side = Side::new();
    let (replica, _) = settled(&mut side);
    let effects = side.far.effects.clone();
    let none_looks = effects.write().unwrap();
    let begin = |value| side.far.begin_copy(REPLICA.1, vec![value; 10], whole(0)).unwrap();
    let (first, second) = (begin(1), begin(2));
    drop(second);
    drop(none_looks);
    assert!(matches!(side.owner.next(), CarriedMessage::Copied { batch: 1, .. }));
    side.hear(REPLICA.0, CarriedMessage::AppliedAlone { connection: REPLICA.1, batch: 1 });
    assert!(first.wait(Instant::now() + COMES).is_some());
    assert!(side.far.flush());
    assert_eq!(side.owner.receive(COMES_NOT), None);
    assert_eq!(bytes_of(&replica, 0, 10), [1; 10]);
    assert!(side.far.lock().copying.is_empty());
}

/// Where further machines have the memory, the end of a copy waits until they have it.
#[test]
fn a_copy_that_is_told_on_has_ended_when_it_was_passed_on() {
    let mut side = Side::new();
    settled(&mut side);
    let copy = copying(&side, &source(1));
    assert!(matches!(side.owner.next(), CarriedMessage::Copied { batch: 1, .. }));
    side.hear(REPLICA.0, CarriedMessage::Applied { connection: REPLICA.1, batch: 1 });
    assert_eq!(side.owner.next(), CarriedMessage::PassOn { number: 1 });
    assert_eq!(side.owner.receive(COMES_NOT), None);
    assert!(!copy.is_finished());
    side.hear(REPLICA.0, CarriedMessage::PassedOn { number: 1 });
    assert!(copy.join().unwrap());
}

/// Parts of other copies come without a pause: a flush that is waited for meanwhile has its look behind those under way.
#[test]
fn a_flush_waits_for_no_more_than_the_parts_under_way_of_the_copies_of_others() {
    let mut side = Side::new();
    let (replica, _) = settled(&mut side);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let copies: Vec<_> = (0..2_u64)
            .map(|nth| {
                let (far, stop) = (side.far.clone(), &stop);
                scope.spawn(move || {
                    let part = CopyPart { offset: 64 * (nth + 1), follows: true };
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        let begun = far.begin_copy(REPLICA.1, vec![5; 64], part).unwrap();
                        assert_eq!(begun.wait(Instant::now() + PATIENCE), Some(None));
                    }
                })
            })
            .collect();
        let (mut flushing, mut copied, mut told, mut answered) = (None, 0, 0, 0);
        while copies.iter().any(|copy| !copy.is_finished()) {
            // Each is answered when the next is told, so that one is always under way; else nothing more comes.
            let next = side.owner.receive(COMES_NOT);
            let until = if next.is_some() { told } else { told + 1 };
            match next {
                Some(CarriedMessage::Copied { .. }) => (copied, told) = (copied + 1, told + 1),
                Some(CarriedMessage::Stores { last, .. }) => told += u64::from(last),
                None => {}
                other => panic!("{other:?}"),
            }
            let until = until.min(told);
            (answered..until).for_each(|nth| applied(&side, nth));
            answered = answered.max(until);
            if copied == 10 && flushing.is_none() {
                store(&replica, &[1; 8]);
                let far = side.far.clone();
                flushing = Some(scope.spawn(move || far.flush()));
            }
            let is_flushed = flushing.as_ref().is_some_and(|flushing| flushing.is_finished());
            stop.fetch_or(is_flushed || copied > 1000, std::sync::atomic::Ordering::Relaxed);
        }
        assert!(flushing.is_some_and(|flushing| flushing.join().unwrap()));
        assert!(copied < 1000, "the flush does not end before the copies");
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
