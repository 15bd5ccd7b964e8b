#![cfg(not(loom))]
//! Sessions of carried exchanges, simulated: two sides with the real cores, and between them a network that loses
//! connections, delays and cuts them off in one direction or both, and delivers attempts to connect late, twice
//! refused or out of order. Clocks run at different rates, and processes stall, or are replaced by others that go on with
//! what they wrote down.
//!
//! At every step: each operation is executed at most once, and answered at most once, with what it should be;
//! a flush that was answered covers all writes that were answered before it began; nothing grows beyond the number
//! of operations under way. At the end every operation was answered, or the session has ended, and it is over at the
//! side that asks before it is at the other.

mod model;
mod network;
mod side;

use rackbus_seeds::Simulation;

use model::Policy;
use side::{Reached, World};

const SIMULATION: Simulation =
    Simulation { test: "-p rackbus-memory --test session simulation", usual: 3_000 };

#[test]
fn simulation() {
    SIMULATION.run(|seed, traced| World::new(seed, Policy::Right, traced).run().map(drop));
}

/// What is simulated comes about.
#[test]
fn schedules_lose_connections_with_operations_under_way() {
    let all: Vec<Reached> =
        (0..200).map(|seed| World::new(seed, Policy::Right, false).run().unwrap()).collect();
    let sum = |of: fn(&Reached) -> u64| all.iter().map(of).sum::<u64>();
    let resumed = sum(|it| it.resumed);
    let repeated = [sum(|it| it.repeated[0]), sum(|it| it.repeated[1])];
    let answered = sum(|it| it.answered);
    println!("{resumed} resumed, {repeated:?} repeated, {answered} answered");
    let moved = [sum(|it| it.moved[0]), sum(|it| it.moved[1])];
    println!("{moved:?} went on in another process");
    assert!(moved.iter().all(|it| *it > 300));
    assert!(resumed > 300 && repeated.iter().all(|it| *it > 200) && answered > 3_000);
}

/// A policy that is wrong is found.
fn is_found(policy: Policy, said: &str) {
    let found = (0..500).find_map(|seed| World::new(seed, policy, false).run().err());
    let found = found.expect("it was not found");
    assert!(found.contains(said), "{found}");
}

#[test]
fn to_repeat_what_was_not_answered_whether_or_not_it_was_done_is_found() {
    is_found(Policy::RepeatUnanswered, "is executed twice");
}

#[test]
fn to_forget_answers_whose_connection_is_lost_is_found() {
    is_found(Policy::ForgetAnswers, "was never answered");
}

#[test]
fn to_forget_what_was_taken_in_the_next_process_is_found() {
    is_found(Policy::ForgetTaken, "was never answered");
}

#[test]
fn to_count_anew_in_the_next_process_is_found() {
    is_found(Policy::KeepNothingSent, "");
}

#[test]
fn to_go_on_with_a_lender_that_restarted_is_found() {
    is_found(Policy::ResumeRestarted, "");
}
