//! Shared memory between machines: segments and interrupts of one are used on another, over TLS, by real nodes.

mod support;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rackbus_attach::{ConnectionChange, Location, Mapping, SegmentEvent, SegmentOptions, Session};
use support::PATIENCE;
use support::machines::{Machine, Machines};

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
    let remote = peer.connect(owner.node(), SEGMENT, 3_000).unwrap();
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
        let remote = session.connect(owner.node(), SEGMENT, 3_000).unwrap();
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
    let remote = peer.connect(owner.node(), 90, 3_000).unwrap();
    assert!(!remote.writable());
    store(&guarded.map(0, SIZE).unwrap(), 0, 5);
    let there = remote.map_as((0, SIZE), None, true).unwrap();
    wait_until("the owner's store", || load(&there, 0) == 5);
    let other = peer.connect(owner.node(), SEGMENT, 3_000).unwrap();
    assert!(peer.mutex(&other.map(0, SIZE).unwrap(), 0).is_err(), "a lock in what stands in");
    assert!(peer.connect(owner.node(), 8, 500).is_err(), "there is none");
    peer.probe(owner.node()).unwrap();
    // Removed in order: what was stored last is there.
    store(&open.map(0, SIZE).unwrap(), 64, 6);
    let last = other.map(0, SIZE).unwrap();
    drop(open);
    let soon = Some(Duration::from_secs(10));
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
    let remote = peer.connect(owner.node(), SEGMENT, 3_000).unwrap();
    let there = remote.map(0, SIZE).unwrap();
    let trigger = peer.connect_interrupt(owner.node(), 3, 3_000).unwrap();
    let sender = peer.connect_data_interrupt(owner.node(), 4, 3_000).unwrap();
    let soon = Some(Duration::from_secs(10));
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
