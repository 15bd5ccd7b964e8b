//! Locks in memory of one host for parties on two other machines: directories under random delays, duplicates, cuts,
//! deaths, restarts and moves of the memory.
//!
//! What holds: nobody's lock is let go under it as long as its connection is there, whatever comes twice or late; and
//! when all is at rest, a lock is held by nobody who does not know it. Of a holder that died somebody is told. Nobody passes a barrier before all have arrived
//! who live and were not cut off, nobody else is taken for dead, and in the end nobody waits for who is gone. A failing seed prints the command that replays
//! it; `RACKBUS_SEEDS` says how many to run.

#[path = "locks/world.rs"]
mod world;

use rackbus_seeds::Simulation;
use world::{Mistake, World};

const SEEDS: u64 = 30_000;
/// A planted mistake is found by one of so many seeds.
const FOUND_WITHIN: u64 = 5_000;

fn run(seed: u64, mistake: Mistake, traced: bool) -> Result<(), String> {
    let mut world = World::new(seed, mistake, traced);
    let rounds = 1 + world.random.below(4);
    for _ in 0..rounds {
        for _ in 0..10 + world.random.below(80) {
            world.step()?;
        }
        world.rest()?;
    }
    world.rest_at_barrier()
}

#[test]
fn a_lock_is_its_holders_until_it_is_let_go_or_cut_off() {
    Simulation { test: "-p rackbus-segment --test locks", usual: SEEDS }
        .run(|seed, traced| run(seed, Mistake::None, traced));
}

#[test]
fn planted_mistakes_are_found() {
    for mistake in [
        Mistake::LosesLateRelease,
        Mistake::ForgetsDeaths,
        Mistake::MissesCuts,
        Mistake::TakesTwice,
        Mistake::ArrivesTwice,
    ] {
        let found = (0..FOUND_WITHIN).find(|seed| run(*seed, mistake, false).is_err());
        assert!(found.is_some(), "{mistake:?} went unnoticed");
        println!("{mistake:?} is found by seed {found:?}");
    }
}
