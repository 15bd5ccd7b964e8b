#![cfg(not(loom))]
//! Exchanges with a lane beside their connections, simulated: two real ends over sockets that are cut off, and a lane
//! whose transfers end in any order, fail, or land after the side that asks has given it up. Either end goes on in another
//! process now and then.
//!
//! At every step: each operation is done once, with the data that it was asked with, however long that takes; it is
//! answered once, with its own data; and nothing moves by memory that was taken away. At the end every operation was
//! answered, or the session has ended.

mod hostile;
mod network;
mod stored;
mod world;

use rackbus_seeds::Simulation;

use network::Closing;
use world::{Reached, World};

const SIMULATION: Simulation =
    Simulation { test: "-p rackbus-memory --test lane simulation", usual: 600 };

#[test]
fn simulation() {
    SIMULATION.run(|seed, traced| World::new(seed, Closing::AtOnce, traced).run().map(drop));
}

/// What is simulated comes about.
#[test]
fn schedules_lose_lanes_with_transfers_under_way() {
    let all: Vec<Reached> =
        (0..300).map(|seed| World::new(seed, Closing::AtOnce, false).run().unwrap()).collect();
    let sum = |of: fn(&Reached) -> u64| all.iter().map(of).sum::<u64>();
    let (moved, lost) = (sum(|it| it.moved), sum(|it| it.lost));
    let (fell_back, late) = (sum(|it| it.fell_back), sum(|it| it.late));
    let (resumed, revoked) = (sum(|it| it.resumed), sum(|it| it.revoked));
    println!("{moved} moved, {lost} lost, {fell_back} fell back, {late} late, {resumed} resumed");
    assert!(moved > 1_000 && lost > 40 && fell_back > 100, "{moved} {lost} {fell_back}");
    let moved_on = sum(|it| it.moved_on);
    println!("{moved_on} went on in another process");
    assert!(moved_on > 100, "{moved_on}");
    assert!(late > 10 && resumed > 50 && revoked > 20, "{late} {resumed} {revoked}");
}

/// A side that answers which leaves its memory where it is when the lane is given up hears of data that an earlier
/// transfer changes later.
#[test]
fn to_keep_memory_exposed_when_the_lane_is_given_up_is_found() {
    let found =
        (0..2_000).find_map(|seed| World::new(seed, Closing::WithTheSession, false).run().err());
    let found = found.expect("it was not found");
    assert!(found.contains("other data"), "{found}");
}
