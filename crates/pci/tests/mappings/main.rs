//! Mappings and loans of two functions under seeded random requests, accesses and losses, against a plain model of
//! who reaches what at each moment.
//!
//! Two users map files for their functions, the same again, and over what they truncated; unmap, open windows to a
//! BAR of another function, and truncate and extend their files. Memory is revoked from outside while accesses are
//! under way: an access may look its memory up in one step and touch it in a later one. Conversations end in each
//! way, and functions continue in other endpoints. What is checked after every step:
//!
//! * A request is taken or refused as the model says, and one that is refused changes nothing.
//! * Each access reaches the memory that the model says, or none; nothing reaches what was revoked or unmapped.
//! * What an endpoint has mapped, what its fabric says that it reaches, and the model are the same.
//! * Refusals and the bytes of windows are counted once each.
//!
//! When all are gone, nothing is reached, counted as lent or mapped by the process any more. Huge pages are left out:
//! a machine need not have any.
//!
//! A failing seed prints the command that replays it; `RACKBUS_SEEDS` says how many seeds to run.

mod files;
mod model;
#[allow(dead_code, reason = "accesses are made here and not by its registers")]
#[path = "../common/probe.rs"]
mod probe;
mod schedule;
mod subject;
mod world;

use files::Files;
use rackbus_seeds::{Random, Simulation};
use subject::Policy;
use world::World;

const SEEDS: u64 = 100_000;
/// So many show each old policy.
const FOUND_WITHIN: u64 = 10_000;

fn run(files: &Files, seed: u64, policy: Policy, traced: bool) -> Result<(), String> {
    let mut random = Random(seed);
    let mut world = World::new(files, policy)?;
    for nth in 0..1 + random.below(80) {
        let step = schedule::step(&mut random);
        if traced {
            println!("{nth:>4}  {step:?}");
        }
        world.take(&step).and_then(|()| world.check()).map_err(|e| format!("{step:?}: {e}"))?;
    }
    world.end(seed.is_multiple_of(16))
}

#[test]
fn what_is_mapped_is_reached_and_nothing_else() {
    let simulation = Simulation { test: "-p rackbus-pci --test mappings", usual: SEEDS };
    simulation
        .run_with(Files::new, |files, seed, traced| run(files, seed, Policy::Current, traced));
}

/// A simulation that does not find what once was wrong would prove nothing.
#[test]
fn old_policies_are_found() {
    let files = Files::new();
    // Each by what it does wrong.
    for (policy, reason) in [
        (Policy::UnmapsTruncated, ": mappings: "),
        (Policy::RefusesTheSame, ": mapped: false, where the model has true"),
        (Policy::RevokesByTheFunction, ": loans: "),
    ] {
        let find = |seed| {
            let error = run(&files, seed, policy, false).err()?;
            error.contains(reason).then_some((seed, error))
        };
        let found = (0..FOUND_WITHIN).find_map(find);
        assert!(found.is_some(), "{policy:?} went unnoticed");
        println!("{policy:?} is found: {found:?}");
    }
}
