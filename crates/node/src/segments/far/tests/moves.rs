//! Memory that two hosts have in common, while it is moved here.

use super::*;

/// Parts of a copy that go on come while the memory of the first is being moved: all take effect behind it, in their order.
#[test]
fn parts_of_a_copy_that_came_while_memory_was_moved_take_effect_one_after_the_other() {
    let mut side = Side::new();
    let (_, home) = settled(&mut side);
    let memory = side.far.memory(HOME).unwrap();
    memory.pause();
    for batch in 1..=4_u64 {
        side.hear(
            HOME.0,
            CarriedMessage::Copied {
                connection: HOME.1,
                batch,
                last: true,
                held: false,
                // Each has the last byte of the one before.
                offset: 9 * (batch - 1),
                data: Cow::Owned(vec![batch as u8; 10]),
            },
        );
    }
    assert_eq!(side.connector.receive(COMES_NOT), None);
    side.far.resume(HOME);
    for batch in 1..=4 {
        let applied = CarriedMessage::AppliedAlone { connection: HOME.1, batch };
        assert_eq!(side.connector.next(), applied);
    }
    let mut bytes = [0; 37];
    home.region().unwrap().whole().copy_to(&mut bytes);
    let expected: Vec<u8> = (0..37_u8).map(|at| (at / 9).min(3) + 1).collect();
    assert_eq!(bytes[..], expected);
}

#[test]
fn what_came_while_memory_was_moved_takes_effect_after_it() {
    let mut side = Side::new();
    let (_, home) = settled(&mut side);
    side.far.memory(HOME).unwrap().pause();
    side.hear(HOME.0, stores(HOME, 1, false));
    assert_eq!(side.connector.receive(COMES_NOT), None, "takes effect during a move");
    // Who reads what hosts have in common is not waited for by who ends the move, but by what takes effect.
    let effects = side.far.effects.clone();
    let reading = effects.read().unwrap();
    side.far.resume(HOME);
    assert_eq!(side.connector.receive(COMES_NOT), None, "takes effect during a snapshot");
    drop(reading);
    assert_eq!(
        side.connector.next(),
        CarriedMessage::AppliedAlone { connection: HOME.1, batch: 1 }
    );
    let mut bytes = [0; 8];
    home.region().unwrap().whole().part(0, 8).unwrap().copy_to(&mut bytes);
    assert_eq!(bytes, [3; 8]);
}

/// Once the service waited for that, and all who wanted something of it.
#[test]
fn a_move_waits_for_a_snapshot_without_the_service() {
    let mut side = Side::new();
    let (_, home) = settled(&mut side);
    let memory = side.far.memory(HOME).unwrap();
    let snapshot = memory.lock();
    memory.pause();
    let (ticket, connection) = (Handle(5), HOME.1);
    let frozen = ConnectorMessage::Frozen { ticket, connection };
    side.far.answer_settled(memory.clone(), frozen.clone());
    assert!(side.settled.recv_timeout(COMES_NOT).is_err(), "it is still read");
    drop(snapshot);
    assert_eq!(side.settled.recv_timeout(COMES), Ok(frozen));
    let snapshot = memory.lock();
    memory.adopt(home);
    let adopted = ConnectorMessage::Adopted { ticket, connection };
    side.far.answer_settled(memory.clone(), adopted.clone());
    assert!(side.settled.recv_timeout(COMES_NOT).is_err(), "it is still read where it was");
    drop(snapshot);
    assert_eq!(side.settled.recv_timeout(COMES), Ok(adopted));
}

/// Once who asked whether a batch had taken effect waited for its memory with the lock that all others need.
#[test]
fn nobody_but_who_waits_for_a_batch_waits_for_its_memory() {
    let mut side = Side::new();
    let (_, home) = settled(&mut side);
    store(&home, &[1; 8]);
    batch_under_way(&side);
    let memory = side.far.memory(HOME).unwrap();
    // Not each time somebody is just about to ask.
    let end = Instant::now() + COMES_NOT;
    while Instant::now() < end {
        side.far.kick();
        let read = memory.lock();
        let until = Instant::now() + COMES;
        while side.far.state.try_lock().is_err() {
            assert!(Instant::now() < until, "the lock is held by who waits for the memory");
            std::thread::yield_now();
        }
        drop(read);
    }
}

/// Once such memory was passed over, and what was stored to other memory after it came first.
#[test]
fn memory_that_is_being_moved_is_told_with_all_else() {
    let mut side = Side::new();
    let (flag, data) = settled(&mut side);
    let both = side.far.effects.clone();
    let both = both.write().unwrap();
    side.far.memory(HOME).unwrap().pause();
    store(&data, &[1; 8]);
    store(&flag, &[2; 8]);
    drop(both);
    let far = side.far.clone();
    let flushing = std::thread::spawn(move || far.flush());
    assert!(matches!(side.owner.next(), CarriedMessage::Stores { last: true, held: true, .. }));
    side.hear(REPLICA.0, CarriedMessage::Held { connection: REPLICA.1, batch: 1 });
    assert!(matches!(side.connector.next(), CarriedMessage::Stores { batch: 2, last: true, .. }));
    side.hear(HOME.0, CarriedMessage::Applied { connection: HOME.1, batch: 2 });
    side.hear(REPLICA.0, CarriedMessage::AppliedAlone { connection: REPLICA.1, batch: 1 });
    assert!(flushing.join().unwrap());
}

/// Once what came for the other memory took effect at once.
#[test]
fn what_takes_effect_with_memory_that_is_being_moved_waits_with_it() {
    let mut side = Side::new();
    let (_, home) = settled(&mut side);
    let other = (FarConversation::ToConnector, Handle(3));
    let flag = side.add(other);
    assert!(matches!(side.connector.next(), CarriedMessage::Stores { batch: 1, .. }));
    side.hear(HOME.0, CarriedMessage::Applied { connection: other.1, batch: 1 });
    let first = |object: &Object| {
        let mut bytes = [0; 8];
        object.region().unwrap().whole().part(0, 8).unwrap().copy_to(&mut bytes);
        bytes
    };
    side.far.memory(HOME).unwrap().pause();
    side.hear(HOME.0, stores(HOME, 1, true));
    assert_eq!(side.connector.next(), CarriedMessage::Held { connection: HOME.1, batch: 1 });
    side.hear(HOME.0, stores(other, 1, false));
    assert_eq!(side.connector.receive(COMES_NOT), None);
    assert_eq!([first(&home), first(&flag)], [[0; 8]; 2]);
    side.far.resume(HOME);
    let applied =
        |(_, connection): ConnectionKey| CarriedMessage::AppliedAlone { connection, batch: 1 };
    assert_eq!([side.connector.next(), side.connector.next()], [applied(HOME), applied(other)]);
    assert_eq!([first(&home), first(&flag)], [[3; 8]; 2]);
}

#[test]
fn a_home_that_moves_the_memory_passes_on_afterwards() {
    let passing = Arc::default();
    let (mut beta, gamma) = (Side::of(LIMIT, &passing), Side::of(LIMIT, &passing));
    let (_, home) = settled(&mut beta);
    gamma.far.add_memory(HOME, home.clone(), (SIZE, true));
    assert!(matches!(gamma.connector.next(), CarriedMessage::Stores { batch: 1, .. }));
    gamma.hear(HOME.0, CarriedMessage::Applied { connection: HOME.1, batch: 1 });
    beta.hear(HOME.0, stores(HOME, 1, false));
    assert_eq!(beta.connector.next(), CarriedMessage::Applied { connection: HOME.1, batch: 1 });
    assert!(matches!(gamma.connector.next(), CarriedMessage::Stores { batch: 2, .. }));
    // One connection leads to where the memory will be, and the other to where it was.
    let [at_beta, at_gamma] = [&beta, &gamma].map(|side| side.far.memory(HOME).unwrap());
    at_beta.pause();
    at_gamma.pause();
    let id = beta.store.memory(SIZE).unwrap();
    let moved = beta.store.get(id).unwrap().clone();
    store(&moved, &[3; 8]);
    at_beta.adopt(moved.clone());
    beta.hear(HOME.0, CarriedMessage::PassOn { number: 1 });
    assert_eq!(beta.connector.receive(COMES_NOT), None, "gamma has not applied it");
    at_gamma.adopt(moved);
    beta.far.resume(HOME);
    gamma.far.resume(HOME);
    assert_eq!(beta.connector.receive(COMES_NOT), None, "gamma has not applied it");
    gamma.hear(HOME.0, CarriedMessage::Applied { connection: HOME.1, batch: 2 });
    assert_eq!(beta.connector.next(), CarriedMessage::PassedOn { number: 1 });
}

/// Once nobody was told of it: who had asked for the connection waited in vain.
#[test]
fn memory_is_complete_also_where_it_waited_for_a_move() {
    let mut side = Side::new();
    side.add(HOME);
    assert!(matches!(side.connector.next(), CarriedMessage::Stores { batch: 1, last: true, .. }));
    side.hear(HOME.0, CarriedMessage::Applied { connection: HOME.1, batch: 1 });
    side.add(REPLICA);
    side.far.memory(HOME).unwrap().pause();
    side.hear(HOME.0, stores(HOME, 1, true));
    side.hear(REPLICA.0, stores(REPLICA, 1, false));
    assert!(side.complete.lock().unwrap().is_empty());
    side.far.resume(HOME);
    let applied = |connection| CarriedMessage::Applied { connection, batch: 1 };
    assert_eq!(side.owner.next(), applied(REPLICA.1));
    let begun = Instant::now();
    while side.complete.lock().unwrap().is_empty() && begun.elapsed() < COMES {
        std::thread::yield_now();
    }
    assert_eq!(*side.complete.lock().unwrap(), [REPLICA.1]);
}
