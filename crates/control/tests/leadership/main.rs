//! Three control planes and their store, simulated: the code that decides who leads and the store that commits, against
//! a cluster in memory, under delay, loss of requests and of answers, partitions, freezes at any point, deaths, and
//! clocks that run at different speeds.
//!
//! What holds at every moment: one of them at most may act as the leader; terms only grow; what was committed is
//! committed once, is found by every later leader, and whoever reads from a leader reads nothing older.

mod world;

use rackbus_seeds::Simulation;

const SIMULATION: Simulation =
    Simulation { test: "-p rackbus-control --test leadership", usual: 3_000 };

#[test]
fn there_is_one_leader_and_nothing_that_it_committed_is_lost() {
    SIMULATION.run(world::run);
}
