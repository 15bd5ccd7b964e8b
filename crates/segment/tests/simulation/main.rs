//! Three hosts' directories under random requests, delays and deaths: what holds whenever all is
//! at rest, and that it comes to rest.
//!
//! The simulation is the shells: it makes objects (numbers), carries messages in their order but
//! at any time, copies and empties memory (noting it), lets time pass, and ends sessions, nodes and
//! conversations. Sessions do what the library does: they answer what is moved. Some never do. A
//! failing seed prints the command that replays it; `RACKBUS_SEEDS` says how many seeds to run.

mod check;
mod rack;
mod schedule;

use rack::Rack;
use rackbus_seeds::{Random, Simulation};
use rackbus_segment::NodeId;

const NODES: [NodeId; 3] = [4, 8, 12];
const SEEDS: u64 = 100_000;
/// So many show each old policy.
const FOUND_WITHIN: u64 = 10_000;

/// What shells do, or did once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Policy {
    Current,
    /// A directory heard what time it is when something was due and never else: a deadline that it set after a
    /// while could have passed already.
    TimeOfTheLastTick,
    /// That a conversation ended was heard when the node had begun the next one, and ended what that one led to.
    EndsTheNextConversation,
}

fn run(policy: Policy, seed: u64, traced: bool) -> Result<(), String> {
    let mut random = Random(seed);
    let mut rack = Rack::new(policy);
    for node in NODES {
        rack.new_session(node, true);
        rack.new_session(node, true);
    }
    for nth in 0..1 + random.below(120) {
        let step = schedule::step(&mut random);
        if traced {
            println!("{nth:>4}  {step:?}");
        }
        rack.take(&step);
        // What is due is done at once.
        rack.tick();
        if nth % 40 == 39 {
            rack.rest();
            rack.check()?;
        }
    }
    rack.rest();
    rack.check()?;
    // Nothing is left of anything when all are gone.
    let all: Vec<_> = rack.clients.keys().copied().collect();
    for who in all {
        rack.end_session(who);
    }
    rack.rest();
    for (node, store) in &rack.stores {
        if !store.live.is_empty() {
            return Err(format!("host {node} keeps {:?}", store.live));
        }
    }
    Ok(())
}

#[test]
fn what_is_taken_away_is_gone_and_what_is_left_is_whole() {
    let simulation = Simulation { test: "-p rackbus-segment --test simulation", usual: SEEDS };
    simulation.run(|seed, traced| run(Policy::Current, seed, traced));
}

/// A simulation that does not find what once was wrong would prove nothing.
#[test]
fn old_policies_are_found() {
    // Each by what it does wrong.
    for (policy, reason) in [
        (Policy::TimeOfTheLastTick, "answers, and is cut off"),
        (Policy::EndsTheNextConversation, " connections to its memory"),
    ] {
        let find = |seed| {
            let error = run(policy, seed, false).err()?;
            error.contains(reason).then_some((seed, error))
        };
        let found = (0..FOUND_WITHIN).find_map(find);
        assert!(found.is_some(), "{policy:?} went unnoticed");
        println!("{policy:?} is found: {found:?}");
    }
}
