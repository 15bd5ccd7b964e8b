//! Tenants and engines in simulated time.
//!
//! Engines take exactly as long as their content says and nothing else happens on the processor, so
//! what is measured is the policy and not the machine: the [`TenantArbiter`] that the live device asks, or
//! what devices do without one ([`unshaped`](crate::unshaped), [`by_size`]). A run is determined by its seed.

pub mod by_size;
pub mod experiments;
pub mod load;
pub mod report;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use crate::arbiter::TenantArbiter;
use crate::turn::{EngineTurn, NextTurn, QueuedMessage, TenantId, TurnResult};
use crate::unshaped::MessageRoundRobin;

pub use load::{Load, MessageArrivals, MessageCosts};
use load::{MessageSource, SimulatedOperation};
use report::Recorder;
pub use report::TenantReport;

/// Decides what a free engine does.
pub trait Policy {
    /// A tenant puts a message into one of its queues at `now`, in nanoseconds.
    fn submit(&mut self, tenant: TenantId, queue: u16, message: QueuedMessage, now: u64);
    /// What an engine that is free does.
    fn next(&mut self, now: u64) -> NextTurn;
    /// A turn has ended.
    fn complete(&mut self, turn: &EngineTurn, done: TurnResult, now: u64);
}

impl Policy for TenantArbiter {
    fn submit(&mut self, tenant: TenantId, queue: u16, message: QueuedMessage, now: u64) {
        TenantArbiter::submit(self, tenant, queue, message, now);
    }

    fn next(&mut self, now: u64) -> NextTurn {
        TenantArbiter::next(self, now)
    }

    fn complete(&mut self, turn: &EngineTurn, done: TurnResult, now: u64) {
        TenantArbiter::complete(self, turn, done, now);
    }
}

impl Policy for MessageRoundRobin {
    fn submit(&mut self, tenant: TenantId, queue: u16, message: QueuedMessage, _now: u64) {
        // Without shares, a tenant is whoever sends something.
        self.set(tenant);
        MessageRoundRobin::submit(self, tenant, queue, message);
    }

    fn next(&mut self, _now: u64) -> NextTurn {
        MessageRoundRobin::next_turn(self)
    }

    fn complete(&mut self, turn: &EngineTurn, done: TurnResult, _now: u64) {
        MessageRoundRobin::complete(self, turn, done);
    }
}

/// What happens at a moment, in this order where several things do.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// An engine has finished its turn.
    Finished(usize),
    /// A tenant sends a message by a queue.
    Arrival { load: usize, queue: u16 },
    /// An engine looks again.
    Look,
}

struct World<'a> {
    policy: &'a mut dyn Policy,
    now: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    sequence: u64,
    sources: Vec<MessageSource>,
    recorders: Vec<Recorder>,
    /// The messages that are under way, by tag: whose, and what they really are.
    operations: BTreeMap<u64, (usize, u16, SimulatedOperation)>,
    engines: Vec<Option<(EngineTurn, TurnResult)>>,
    looks: BTreeSet<u64>,
    next_tag: u64,
}

/// Runs `loads` for `length_ns` on so many engines. Tenant `n` of the policy is `loads[n]`.
pub fn run(
    policy: &mut dyn Policy,
    engines: usize,
    loads: &[Load],
    length_ns: u64,
    seed: u64,
) -> Vec<TenantReport> {
    let mut world = World {
        policy,
        now: 0,
        events: BinaryHeap::new(),
        sequence: 0,
        sources: loads
            .iter()
            .zip(0..)
            .map(|(load, number)| MessageSource::new(load.clone(), seed, number))
            .collect(),
        recorders: loads.iter().map(|_| Recorder::new(length_ns)).collect(),
        operations: BTreeMap::new(),
        engines: vec![None; engines],
        looks: BTreeSet::new(),
        next_tag: 0,
    };
    for load in 0..loads.len() {
        for (queue, at) in world.sources[load].first() {
            world.at(at, Event::Arrival { load, queue });
        }
    }
    while let Some(Reverse((at, _, event))) = world.events.pop() {
        if at >= length_ns {
            break;
        }
        world.now = at;
        world.happen(event);
        // Everything of this moment first, then the engines that are free.
        if world.events.peek().is_none_or(|Reverse((next, ..))| *next > at) {
            world.dispatch();
        }
    }
    world.recorders.into_iter().map(Recorder::finish).collect()
}

impl World<'_> {
    fn at(&mut self, at: u64, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((at, self.sequence, event)));
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Look => {
                self.looks.remove(&self.now);
            }
            Event::Arrival { load, queue } => {
                let operation = self.sources[load].operation(self.now);
                let tag = self.next_tag;
                self.next_tag += 1;
                self.operations.insert(tag, (load, queue, operation));
                let tenant = TenantId(load as u32);
                let message = operation.message(tag);
                self.policy.submit(tenant, queue, message, self.now);
                if let Some(next) = self.sources[load].next_open(self.now) {
                    self.at(next, Event::Arrival { load, queue });
                }
            }
            Event::Finished(engine) => {
                let Some((turn, done)) = self.engines[engine].take() else { return };
                self.policy.complete(&turn, done, self.now);
                self.record(&turn, done);
            }
        }
    }

    fn record(&mut self, turn: &EngineTurn, done: TurnResult) {
        let load = turn.tenant.0 as usize;
        self.recorders[load].turn(self.now, turn, done);
        for piece in turn.pieces.iter().filter(|piece| piece.over) {
            let Some((_, queue, operation)) = self.operations.remove(&piece.message.tag) else {
                continue;
            };
            self.recorders[load].ended(self.now, &operation);
            if let Some(next) = self.sources[load].next_closed(self.now) {
                self.at(next, Event::Arrival { load, queue });
            }
        }
    }

    fn dispatch(&mut self) {
        for engine in 0..self.engines.len() {
            if self.engines[engine].is_some() {
                continue;
            }
            match self.policy.next(self.now) {
                NextTurn::Run(turn) => self.begin(engine, turn),
                NextTurn::Wait(at) => {
                    if at < u64::MAX && self.looks.insert(at.max(self.now + 1)) {
                        self.at(at.max(self.now + 1), Event::Look);
                    }
                    break;
                }
                NextTurn::Idle => break,
            }
        }
    }

    /// An engine does what it is given, and stops between two granules when its budget is used up.
    fn begin(&mut self, engine: usize, mut turn: EngineTurn) {
        let mut done = TurnResult::default();
        let mut pieces = Vec::with_capacity(turn.pieces.len());
        for mut piece in std::mem::take(&mut turn.pieces) {
            let Some((_, _, operation)) = self.operations.get(&piece.message.tag) else { continue };
            let left = turn.budget_ns.saturating_sub(done.engine_ns);
            let (length, engine_ns, egress) = operation.work(&piece, left);
            piece.over = piece.message.done + length >= piece.message.ingress;
            piece.length = length;
            done.engine_ns += engine_ns;
            done.egress += egress;
            pieces.push(piece);
        }
        turn.pieces = pieces;
        let at = self.now + done.engine_ns.max(1);
        self.engines[engine] = Some((turn, done));
        self.at(at, Event::Finished(engine));
    }
}
