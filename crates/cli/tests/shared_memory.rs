//! Shared memory between machines: segments and interrupts of one are used on another, over TLS, by real nodes.

mod support;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rackbus_attach::{
    ConnectionChange, Copier, Location, Locked, Mapping, SegmentEvent, SegmentKind, SegmentOptions,
    Session, Signal, WriteNotice,
};
use support::PATIENCE;
use support::machines::{Machine, Machines};
use support::segments::answered;

const RACK: &str = r#"
name = "lab"

[[share]]
host = "alpha"
segments = "90-99"
with = ["beta"]
access = "read"

[[share]]
host = "alpha"
segments = "*"
with = "*"
access = "write"

[hosts.alpha]
[hosts.beta]
[hosts.gamma]
"#;

const SIZE: u64 = 3 * 4096;
const SEGMENT: u32 = 7;

/// A machine whose node is up, and a process on it.
fn on(rack: &Machines, host: &str) -> (Machine, Session) {
    let machine = rack.joined(host);
    let session = Session::open(&Location { run_dir: machine.run_dir(), host: host.to_owned() });
    (machine, session.unwrap())
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "timed out: {what}");
        std::thread::yield_now();
    }
}

fn load(mapping: &Mapping, at: usize) -> u64 {
    mapping.whole().load_u64(at, Ordering::Acquire).unwrap()
}

fn store(mapping: &Mapping, at: usize, value: u64) {
    mapping.whole().store_u64(at, value, Ordering::Release).unwrap();
}

/// Data on the last page, the flag on the first one, there and back again: by plain loads and stores.
#[test]
fn a_flag_comes_after_its_data_in_both_directions() {
    const ROUNDS: u64 = 300;
    const DATA: std::ops::Range<usize> = 8192..8192 + 1024;
    let rack = Machines::start(RACK);
    let ((_alpha, owner), (_beta, peer)) = (on(&rack, "alpha"), on(&rack, "beta"));
    let segment = owner.create_segment(&SegmentOptions::shared(SEGMENT, SIZE)).unwrap();
    let home = segment.map(0, SIZE).unwrap();
    store(&home, 16, 77);
    segment.set_available().unwrap();
    let remote = answered(|| peer.connect(owner.node(), SEGMENT, 3_000)).unwrap();
    assert!(remote.is_far() && remote.writable());
    let there = remote.map(0, SIZE).unwrap();
    assert_eq!(load(&there, 16), 77, "what was there before is there");
    let fill = |mapping: &Mapping, round: u64| {
        mapping.whole().part(DATA.start, DATA.len()).unwrap().fill(round as u8);
    };
    let check = |mapping: &Mapping, round: u64| {
        let mut read = [0; 1024];
        mapping.whole().part(DATA.start, DATA.len()).unwrap().copy_to(&mut read);
        assert!(read.iter().all(|byte| *byte == round as u8), "round {round}: {:?}", &read[..8]);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in (1..2 * ROUNDS).step_by(2) {
                wait_until("the owner's flag", || load(&there, 0) == round);
                check(&there, round);
                fill(&there, round + 1);
                store(&there, 8, round + 1);
            }
        });
        for round in (1..2 * ROUNDS).step_by(2) {
            fill(&home, round);
            store(&home, 0, round);
            wait_until("the peer's flag", || load(&home, 8) == round + 1);
            check(&home, round + 1);
        }
    });
}

#[test]
fn two_machines_that_store_into_one_page_lose_nothing() {
    let rack = Machines::start(RACK);
    let ((_alpha, owner), (_beta, peer)) = (on(&rack, "alpha"), on(&rack, "beta"));
    let (_gamma, third) = on(&rack, "gamma");
    let segment = owner.create_segment(&SegmentOptions::shared(SEGMENT, SIZE)).unwrap();
    segment.set_available().unwrap();
    let home = segment.map(0, SIZE).unwrap();
    let [at_beta, at_gamma] = [&peer, &third].map(|session| {
        let remote = answered(|| session.connect(owner.node(), SEGMENT, 3_000)).unwrap();
        (remote.map(0, SIZE).unwrap(), remote)
    });
    let all = [&home, &at_beta.0, &at_gamma.0];
    std::thread::scope(|scope| {
        for (host, mapping) in all.into_iter().enumerate() {
            scope.spawn(move || {
                // Each has every third byte, so that no word is of one host alone.
                for turn in 1..=20_u8 {
                    for at in (host..4096).step_by(3) {
                        mapping.whole().write_obj(at, &(turn * 3 + host as u8)).unwrap();
                    }
                }
            });
        }
    });
    at_beta.1.flush().unwrap();
    at_gamma.1.flush().unwrap();
    segment.flush().unwrap();
    let expected: Vec<u8> = (0..4096).map(|at| 60 + (at % 3) as u8).collect();
    for (host, mapping) in all.into_iter().enumerate() {
        let is_there = || {
            let mut read = vec![0; 4096];
            mapping.whole().copy_to(&mut read);
            read == expected
        };
        wait_until(&format!("host {host} has all bytes"), is_there);
    }
}

#[test]
fn what_may_only_be_loaded_is_not_stored_to_and_a_death_is_told() {
    let rack = Machines::start(RACK);
    let ((mut alpha, owner), (_beta, peer)) = (on(&rack, "alpha"), on(&rack, "beta"));
    let offer = |id| {
        let segment = owner.create_segment(&SegmentOptions::shared(id, SIZE)).unwrap();
        segment.set_available().unwrap();
        segment
    };
    let (guarded, open) = (offer(90), offer(SEGMENT));
    let remote = answered(|| peer.connect(owner.node(), 90, 3_000)).unwrap();
    assert!(!remote.writable());
    store(&guarded.map(0, SIZE).unwrap(), 0, 5);
    let there = remote.map_as((0, SIZE), None, true).unwrap();
    wait_until("the owner's store", || load(&there, 0) == 5);
    let other = answered(|| peer.connect(owner.node(), SEGMENT, 3_000)).unwrap();
    assert!(peer.connect(owner.node(), 8, 500).is_err(), "there is none");
    peer.probe(owner.node()).unwrap();
    // Removed in order: what was stored last is there.
    store(&open.map(0, SIZE).unwrap(), 64, 6);
    let last = other.map(0, SIZE).unwrap();
    drop(open);
    let soon = Some(PATIENCE);
    assert_eq!(other.watch().wait(soon), Some(SegmentEvent::Remote(ConnectionChange::Removed)));
    assert_eq!(load(&last, 64), 6);
    alpha.crash();
    let told = [remote.watch().wait(soon), remote.watch().wait(soon)];
    let changes = [ConnectionChange::NotOperational, ConnectionChange::Lost]
        .map(|it| Some(SegmentEvent::Remote(it)));
    assert_eq!(told, changes);
    assert_eq!(load(&there, 0), 5, "what is mapped stays");
}

#[test]
fn interrupts_come_after_what_was_stored_before() {
    const ROUNDS: u64 = 200;
    let rack = Machines::start(RACK);
    let ((_alpha, owner), (_beta, peer)) = (on(&rack, "alpha"), on(&rack, "beta"));
    let segment = owner.create_segment(&SegmentOptions::shared(SEGMENT, SIZE)).unwrap();
    segment.set_available().unwrap();
    let home = segment.map(0, SIZE).unwrap();
    let interrupt = owner.create_interrupt(Some(3), false, true).unwrap();
    let data = owner.create_data_interrupt(Some(4)).unwrap();
    let remote = answered(|| peer.connect(owner.node(), SEGMENT, 3_000)).unwrap();
    let there = remote.map(0, SIZE).unwrap();
    let trigger = answered(|| peer.connect_interrupt(owner.node(), 3, 3_000)).unwrap();
    let sender = answered(|| peer.connect_data_interrupt(owner.node(), 4, 3_000)).unwrap();
    let soon = Some(PATIENCE);
    for round in 1..=ROUNDS {
        store(&there, 4096, round);
        trigger.trigger().unwrap();
        interrupt.wait(soon).unwrap();
        assert_eq!(load(&home, 4096), round);
        store(&there, 4096, round + 1);
        sender.send(&round.to_le_bytes()).unwrap();
        let mut message = [0; 8];
        assert_eq!(data.receive(&mut message, soon), Ok(8));
        assert_eq!((u64::from_le_bytes(message), load(&home, 4096)), (round, round + 1));
    }
}

/// The copy service: what was written to an area is there when the call returns, signalled or not.
#[test]
fn an_area_of_another_machine_is_written_to() {
    let rack = Machines::start(RACK);
    let ((mut alpha, owner), (_beta, peer)) = (on(&rack, "alpha"), on(&rack, "beta"));
    let area = owner.export_area(SIZE).unwrap();
    let remote = peer.register_area(area.key()).unwrap();
    let byte = |at| {
        let mut read = [0];
        area.mapping().whole().part(at, 1).unwrap().copy_to(&mut read);
        read[0]
    };
    for round in 1..=50_u8 {
        remote.write(4000, &[round; 200], Signal::None).unwrap();
        assert_eq!((byte(4000), byte(4199)), (round, round), "unsignalled");
        remote.write(0, &[round; 4096], Signal::Tagged(u64::from(round))).unwrap();
        let written = area.wait(Some(PATIENCE)).unwrap();
        assert_eq!(written, WriteNotice { offset: 0, length: 4096, tag: u64::from(round) });
        assert_eq!((byte(0), byte(4095)), (round, round), "signalled");
    }
    let copier = Copier::start(&Default::default()).unwrap();
    let source = peer.create_segment(&SegmentOptions::shared(SEGMENT, SIZE)).unwrap();
    let source = source.map(0, SIZE).unwrap();
    source.whole().fill(77);
    copier.write(&remote, 8, (&source, 0), 9000, Signal::None).unwrap().finish().unwrap();
    assert_eq!((byte(7), byte(8), byte(9007), byte(9008)), (50, 77, 77, 0));
    alpha.crash();
    let begun = Instant::now();
    while remote.write(0, &[1; 8], Signal::None).is_ok() {
        assert!(begun.elapsed() < PATIENCE, "a dead machine's area is written to");
    }
}

/// Three machines count in memory of one of them, under a lock of it: plain loads and stores, of which none is lost.
#[test]
fn a_lock_of_another_machine_keeps_others_out_and_shows_what_they_stored() {
    const ROUNDS: u64 = 40;
    const COUNT: usize = 8192;
    let rack = Machines::start(RACK);
    let ((_alpha, owner), (_beta, peer)) = (on(&rack, "alpha"), on(&rack, "beta"));
    let (_gamma, third) = on(&rack, "gamma");
    let segment = owner.create_segment(&SegmentOptions::shared(SEGMENT, SIZE)).unwrap();
    segment.set_available().unwrap();
    let home = segment.map(0, SIZE).unwrap();
    let far = [&peer, &third].map(|session| {
        let remote = answered(|| session.connect(owner.node(), SEGMENT, 3_000)).unwrap();
        (remote.map(0, SIZE).unwrap(), remote)
    });
    let all = [(&owner, &home), (&peer, &far[0].0), (&third, &far[1].0)];
    let parties = all.map(|(session, _)| session.holder());
    std::thread::scope(|scope| {
        for (session, mapping) in all {
            scope.spawn(move || {
                let mutex = session.mutex(mapping, 64).unwrap();
                let mut barrier = session.barrier(mapping, 4096, &parties).unwrap();
                for round in 1..=ROUNDS {
                    let locked = mutex.lock(Some(PATIENCE)).unwrap();
                    assert!(matches!(locked, Locked::Clean(_)));
                    store(mapping, COUNT, load(mapping, COUNT) + 1);
                    drop(locked);
                    if round % 10 == 0 {
                        assert_eq!(barrier.wait(Some(PATIENCE)), Ok(3));
                        // Nobody has gone on: all have counted, and nobody more.
                        assert_eq!(load(mapping, COUNT), 3 * round);
                        assert_eq!(barrier.wait(Some(PATIENCE)), Ok(3));
                    }
                }
            });
        }
    });
    assert_eq!(load(&home, COUNT), 3 * ROUNDS);
}

#[test]
fn a_lock_is_free_when_its_holder_is_dead_or_cut_off_and_the_next_is_told() {
    let rack = Machines::start(RACK);
    let ((_alpha, owner), (mut beta, peer)) = (on(&rack, "alpha"), on(&rack, "beta"));
    let (_gamma, third) = on(&rack, "gamma");
    let segment = owner.create_segment(&SegmentOptions::shared(SEGMENT, SIZE)).unwrap();
    segment.set_available().unwrap();
    let home = segment.map(0, SIZE).unwrap();
    let map = |session: &Session| {
        let remote = answered(|| session.connect(owner.node(), SEGMENT, 3_000)).unwrap();
        (remote.map(0, SIZE).unwrap(), remote)
    };
    let (at_beta, at_gamma) = (map(&peer), map(&third));
    let here = owner.mutex(&home, 0).unwrap();
    let there = third.mutex(&at_gamma.0, 0).unwrap();
    assert!(third.mutex(&at_gamma.0, 8).is_err(), "not at a multiple of 64");
    // A process that ends, on another machine.
    let dies =
        Session::open(&Location { run_dir: beta.run_dir(), host: "beta".to_owned() }).unwrap();
    let at_dead = map(&dies);
    let mutex = dies.mutex(&at_dead.0, 0).unwrap();
    std::mem::forget(mutex.lock(Some(PATIENCE)).unwrap());
    assert!(here.try_lock().is_none() && there.try_lock().is_none());
    dies.close();
    let locked = there.lock(Some(PATIENCE)).unwrap();
    assert!(matches!(locked, Locked::OwnerDied(_)));
    drop(locked);
    assert!(matches!(here.lock(Some(PATIENCE)), Ok(Locked::Clean(_))), "it is told once");
    // A process that ends, on the machine that has the memory.
    let dies =
        Session::open(&Location { run_dir: _alpha.run_dir(), host: "alpha".to_owned() }).unwrap();
    let local = answered(|| dies.connect(owner.node(), SEGMENT, 3_000)).unwrap();
    let mutex = dies.mutex(&local.map(0, SIZE).unwrap(), 0).unwrap();
    std::mem::forget(mutex.lock(Some(PATIENCE)).unwrap());
    dies.close();
    assert!(matches!(there.lock(Some(PATIENCE)), Ok(Locked::OwnerDied(_))));
    // A machine that ends.
    let mutex = peer.mutex(&at_beta.0, 0).unwrap();
    std::mem::forget(mutex.lock(Some(PATIENCE)).unwrap());
    beta.crash();
    assert!(matches!(here.lock(Some(PATIENCE)), Ok(Locked::OwnerDied(_))));
    assert!(matches!(there.lock(Some(PATIENCE)), Ok(Locked::Clean(_))));
    drop(segment);
    let begun = Instant::now();
    while there.lock(Some(Duration::ZERO)).is_ok() {
        assert!(begun.elapsed() < PATIENCE, "the memory is gone");
    }
}

/// Reflective memory on three machines: what was flushed is at the third before the flag behind it.
#[test]
fn a_group_on_three_machines_keeps_data_before_flags() {
    const ROUNDS: u64 = 100;
    let rack = Machines::start(RACK);
    let ((_alpha, home), (_beta, writer)) = (on(&rack, "alpha"), on(&rack, "beta"));
    let (_gamma, reader) = on(&rack, "gamma");
    let group = |session: &Session| {
        let kind = SegmentKind::Group;
        let options = SegmentOptions { id: 40, choose: false, size: SIZE, kind };
        let segment = session.create_segment(&options).unwrap();
        (segment.map(0, SIZE).unwrap(), segment)
    };
    let (at_home, (written, member), (read, answers)) =
        (group(&home), group(&writer), group(&reader));
    let mutex = reader.mutex(&read, 1024).unwrap();
    drop(mutex.lock(Some(PATIENCE)).unwrap());
    for round in 1..=ROUNDS {
        // On another page, and word for word, so that a batch would not have it first.
        (0..64).for_each(|at| store(&written, 4096 + 64 * at, round));
        member.flush().unwrap();
        // It is there when the call returns.
        assert!((0..64).all(|at| load(&read, 4096 + 64 * at) == round));
        assert_eq!(load(&at_home.0, 4096), round);
        store(&written, 0, round);
        wait_until("the flag on the third machine", || load(&read, 0) == round);
        store(&read, 8, round);
        answers.flush().unwrap();
        assert_eq!(load(&written, 8), round);
    }
}

/// Each of three machines stores to memory of the next one, and flushes: each home passes on to a third that waits as well.
#[test]
fn flushes_of_three_machines_in_a_ring_end() {
    const ROUNDS: u64 = 200;
    let rack = Machines::start(RACK);
    let machines = ["alpha", "beta", "gamma"].map(|host| on(&rack, host));
    let sessions: Vec<&Session> = machines.iter().map(|(_, session)| session).collect();
    let homes: Vec<_> = sessions
        .iter()
        .map(|session| {
            let segment = session.create_segment(&SegmentOptions::shared(SEGMENT, SIZE)).unwrap();
            segment.set_available().unwrap();
            segment
        })
        .collect();
    let connect = |from: usize, to: usize| {
        let remote =
            answered(|| sessions[from].connect(sessions[to].node(), SEGMENT, 3_000)).unwrap();
        (remote.map(0, SIZE).unwrap(), remote)
    };
    let next: Vec<_> = (0..3).map(|at| connect(at, (at + 1) % 3)).collect();
    let third: Vec<_> = (0..3).map(|at| connect(at, (at + 2) % 3)).collect();
    let together = std::sync::Barrier::new(3);
    std::thread::scope(|scope| {
        for at in 0..3 {
            let (next, third, together) = (&next[at], &third, &together);
            scope.spawn(move || {
                for round in 1..=ROUNDS {
                    together.wait();
                    store(&next.0, 8, round);
                    next.1.flush().unwrap();
                    // Who has the same memory beside its home is the one before this.
                    assert_eq!(load(&third[(at + 2) % 3].0, 8), round, "it is there");
                }
            });
        }
    });
    drop(homes);
}

/// Each process of a machine has memory of its own that stands for another machine's.
#[test]
fn what_was_flushed_is_at_another_process_of_the_same_machine() {
    let rack = Machines::start(RACK);
    let ((_alpha, owner), (beta, writer)) = (on(&rack, "alpha"), on(&rack, "beta"));
    let location = Location { run_dir: beta.run_dir(), host: "beta".to_owned() };
    let reader = Session::open(&location).unwrap();
    let segment = owner.create_segment(&SegmentOptions::shared(SEGMENT, SIZE)).unwrap();
    segment.set_available().unwrap();
    let map = |session: &Session| {
        let remote = answered(|| session.connect(owner.node(), SEGMENT, 3_000)).unwrap();
        (remote.map(0, SIZE).unwrap(), remote)
    };
    let (written, read) = (map(&writer), map(&reader));
    for round in 1..=200 {
        store(&written.0, 8, round);
        written.1.flush().unwrap();
        assert_eq!(load(&read.0, 8), round, "it is there");
    }
}
