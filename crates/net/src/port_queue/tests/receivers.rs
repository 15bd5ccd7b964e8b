//! How a queue fares beside receivers that take nothing, or slowly, or are not there.

use super::*;

/// A station that takes nothing costs those who send to it, and to others, its patience once.
#[test]
fn a_station_that_stalls_stops_nobody() {
    let mut world = World::new(1);
    let send = |world: &mut World, to: usize| {
        let all = world.stations.all();
        let frame = [&all[to].mac.0[..], &all[0].mac.0, &KIND, &[0; 1400]].concat();
        world.queues[0].send_checked(Offload::default(), &frame, &[])
    };
    assert_eq!(send(&mut world, 1), SendOutcome::Full);
    world.answer(true);
    assert_eq!(send(&mut world, 2), SendOutcome::Full);
    world.answer(true);
    let mut taken = 0;
    while send(&mut world, 1) == SendOutcome::Done {
        taken += 1;
    }
    assert!(taken > 500, "{taken}");
    assert_eq!(send(&mut world, 2), SendOutcome::Done);
    world.clock.fetch_add(crate::pressure::PATIENCE_NS, Ordering::Relaxed);
    for _ in 0..100 {
        assert_eq!(send(&mut world, 1), SendOutcome::Dropped(Cause::Full));
        assert_eq!(send(&mut world, 2), SendOutcome::Done);
    }
    while world.queues[1].next().is_some() {
        world.queues[1].consume();
    }
    assert_eq!(send(&mut world, 1), SendOutcome::Done);
    let drops = &world.queues[0].handle().counters().peers[1].drops;
    assert_eq!(drops.all().find(|(cause, _)| *cause == Cause::Full), Some((Cause::Full, 100)));
}

/// Station 1 takes 128 KiB every 10 ms, and station 2 at once. For a second of such slots in which `from` sends a frame to
/// each: those that 2 got one in, in percent, and whether it was ever waited for a receiver.
fn beside_a_slow_one(from: usize) -> (u64, bool) {
    const SLOT_NS: u64 = 20_000;
    let mut world = World::with("uplinks = [\"a/eth1\"]\n", 1);
    let all = world.stations.all();
    let source = if from < STATIONS { all[from].mac.0 } else { [2, 9, 9, 9, 9, 9] };
    let frame = |to: usize| [&all[to].mac.0[..], &source, &KIND, &[0; 1400]].concat();
    let frames = [frame(1), frame(2)];
    for (nth, frame) in frames.iter().enumerate() {
        world.queues[from].send_checked(Offload::default(), frame, &[]);
        world.open(PortQueueId { station: from, number: 0 }, nth + 1);
    }
    let (mut next, mut got, mut waited) = (0, 0, false);
    for slot in 0..1_000_000_000 / SLOT_NS {
        world.clock.fetch_add(SLOT_NS, Ordering::Relaxed);
        for _ in 0..2 {
            if world.queues[from].send_checked(Offload::default(), &frames[next], &[])
                == SendOutcome::Full
            {
                waited = true;
                break;
            }
            next = 1 - next;
        }
        world.queues[from].flush();
        if world.queues[2].next().is_some() {
            world.queues[2].consume();
            got += 1;
        }
        let taken = if slot % (10_000_000 / SLOT_NS) == 0 { 131_072 / 1414 } else { 0 };
        for _ in 0..taken {
            if world.queues[1].next().is_some() {
                world.queues[1].consume();
            }
        }
    }
    (got * 100 / (1_000_000_000 / SLOT_NS), waited)
}

#[test]
fn a_slow_receiver_keeps_up_no_others() {
    let (got, waited) = beside_a_slow_one(0);
    assert!(got >= 70 && waited, "{got} % from a host");
    let (got, waited) = beside_a_slow_one(STATIONS);
    assert!(got >= 99 && !waited, "{got} % from an uplink");
}

/// For how long the queue of station `from` was stopped, in milliseconds, by frames in turns for stations whose rings
/// never open and for one whose ring does, a pair each millisecond for two seconds; and how many that one got.
fn beside_dead_ones(from: usize, dead: [usize; 2], open: usize) -> (u64, usize) {
    let mut world = World::with("uplinks = [\"a/eth1\"]\n", 1);
    let all = world.stations.all();
    let source = if from < STATIONS { all[from].mac.0 } else { [2, 9, 9, 9, 9, 9] };
    let frame = |to: usize| [&all[to].mac.0[..], &source, &KIND, &[0; 100]].concat();
    let frames = [frame(dead[0]), frame(open), frame(dead[1]), frame(open)];
    world.queues[from].send_checked(Offload::default(), &frame(open), &[]);
    world.open(PortQueueId { station: from, number: 0 }, open);
    let (mut next, mut stopped, mut got) = (0, 0, 0);
    for _ in 0..2_000 {
        world.clock.fetch_add(1_000_000, Ordering::Relaxed);
        for _ in 0..2 {
            if world.queues[from].send_checked(Offload::default(), &frames[next], &[])
                == SendOutcome::Full
            {
                stopped += 1;
                break;
            }
            next = (next + 1) % frames.len();
        }
        world.queues[from].flush();
        while world.queues[open].next().is_some() {
            world.queues[open].consume();
            got += 1;
        }
    }
    (stopped, got)
}

#[test]
fn the_stations_of_a_dead_machine_stop_a_queue_once() {
    let (stopped, got) = beside_dead_ones(0, [1, 2], 3);
    assert!((400..=500).contains(&stopped), "a host's queue was stopped for {stopped} ms");
    assert!(got >= 1_400, "{got}");
    let (stopped, got) = beside_dead_ones(STATIONS, [1, 2], 3);
    assert!((1..=50).contains(&stopped), "an uplink's queue was stopped for {stopped} ms");
    assert!(got >= 1_900, "{got}");
}
