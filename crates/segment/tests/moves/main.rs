//! The moving of memory (freeze, copy, adopt, unfreeze, abandon) under seeded random schedules, with
//! keepers that are slow, silent or liars, nodes that die, and memory that is removed meanwhile.
//!
//! Each memory has a value; a store is followed by a signal that no node carries (a doorbell), so
//! that whoever shares the memory looks at once. What is checked:
//!
//! * A store before a signal is seen by everybody who has not been cut off.
//! * No store of an honest writer is lost to a move, and no writer waits for ever.
//! * A node knows where the bytes of a segment are that its owner stores to.
//! * I4: who was cut off shares no memory with those who stayed, once it is said to be so.
//!
//! A failing seed prints the command that replays it with its trace; `RACKBUS_SEEDS` says how many
//! seeds to run.

mod processes;
mod schedule;
mod world;

use rackbus_seeds::{Random, Simulation};
use rackbus_segment::{NodeId, SessionId};
use world::World;

const NODES: [NodeId; 3] = [4, 8, 12];
/// One that is emptied at once, and one that takes its time.
const SIZES: [u64; 2] = [8192, 8 << 20];
const SEEDS: u64 = 100_000;
/// So many show each mistake.
const FOUND_WITHIN: u64 = 10_000;

type Who = (NodeId, SessionId);

/// One of several, if there is one.
fn one<T: Copy>(random: &mut Random, of: &[T]) -> Option<T> {
    of.get(random.below(of.len())).copied()
}

/// A deliberate mistake, to prove that the simulation notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    None,
    /// Writers go on when they have the new memory, and not when all have it.
    UnfreezeAtAdoption,
    /// What is given back during a move is forgotten before it is unfrozen.
    ForgetFirst,
    /// The node says that it has copied before it has.
    LateCopy,
    /// The node says that memory is empty before it is.
    NeverEmptied,
}

fn run(seed: u64, mistake: Mistake, traced: bool) -> Result<(), (String, String)> {
    let mut world = World::new(seed, mistake, traced);
    let rounds = 1 + world.random.below(6);
    let outcome = (0..rounds).try_for_each(|_| {
        let steps = 20 + world.random.below(120);
        (0..steps).try_for_each(|_| world.step())?;
        world.rest()
    });
    outcome.map_err(|error| (error, world.trace.unwrap_or_default()))
}

#[test]
fn a_move_loses_nothing_and_leaves_nobody_behind() {
    let simulation = Simulation { test: "-p rackbus-segment --test moves", usual: SEEDS };
    simulation.run(|seed, traced| {
        run(seed, Mistake::None, traced).map_err(|(error, trace)| format!("{error}\n{trace}"))
    });
}

/// A simulation that finds no planted mistake would prove nothing.
#[test]
fn planted_mistakes_are_found() {
    use Mistake::{ForgetFirst, LateCopy, NeverEmptied, UnfreezeAtAdoption};
    // Each by what it does wrong: a signal comes before its store, a writer is forgotten, a store is lost, and bytes stay.
    for (mistake, reason) in [
        (UnfreezeAtAdoption, " was signalled "),
        (ForgetFirst, " waits for ever"),
        (LateCopy, " reads "),
        (NeverEmptied, " was cut off and still reads "),
    ] {
        let find = |seed| {
            let (error, _) = run(seed, mistake, false).err()?;
            error.contains(reason).then_some((seed, error))
        };
        let found = (0..FOUND_WITHIN).find_map(find);
        assert!(found.is_some(), "{mistake:?} went unnoticed");
        println!("{mistake:?} is found: {found:?}");
    }
}
