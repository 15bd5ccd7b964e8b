//! Units that a policy of [`rackbus_qos`] gives out: the engines of an accelerator, which its functions have in common.
//!
//! A job's work is a message, which the policy serves in turns as the live device does: a long one in pieces, between
//! which others' come. A unit works on one turn at a time.

use std::collections::BTreeMap;
use std::fmt;

use rackbus_qos::{EngineTurn, NextTurn, QueuedMessage, TenantId, TurnResult};

use super::gate::nanoseconds;
use super::{Admitted, Decides, DistributionId, Event, ResourceId, World};
use crate::time::Time;

/// What gives out a resource's units.
pub(super) struct SharedUnits {
    policy: Box<dyn Decides>,
    /// Messages are interrupted at multiples of so many bytes of their input.
    granule: u64,
    /// By job: for how long its message keeps a unit busy in all.
    spans: BTreeMap<u32, Time>,
    /// When the policy is asked again, or [`Time::MAX`].
    wake: Time,
}

/// A turn that a unit works on, and what comes of it.
pub(super) struct UnitTurn {
    resource: u32,
    turn: EngineTurn,
    done: TurnResult,
}

impl fmt::Debug for SharedUnits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedUnits").field("granule", &self.granule).finish_non_exhaustive()
    }
}

impl SharedUnits {
    pub(super) fn is_whole(&self) -> bool {
        self.spans.is_empty()
    }

    /// How long a turn takes in picoseconds, with its pieces as far as its time lasts. At least one granule of each
    /// message that is begun is done.
    fn fit(&self, turn: &mut EngineTurn) -> (Time, TurnResult) {
        let (budget, mut took, mut egress) = (u128::from(turn.budget_ns) * 1000, 0, 0);
        for piece in &mut turn.pieces {
            let message = &piece.message;
            let span = self.spans.get(&(message.tag as u32)).map_or(0, |span| span.ps());
            let span = u128::from(span);
            if message.ingress == 0 {
                (took, egress) = (took + span, egress + message.egress);
                continue;
            }
            let bytes = u128::from(message.ingress);
            if self.granule > 0 && span > 0 {
                let fits = budget.saturating_sub(took) * bytes / span;
                let fits = u64::try_from(fits).unwrap_or(u64::MAX);
                let fits = fits.div_ceil(self.granule).max(1).saturating_mul(self.granule);
                piece.length = piece.length.min(fits);
            }
            piece.over = message.done + piece.length >= message.ingress;
            let part = |whole: u128| whole * u128::from(piece.length) / bytes;
            took += part(span);
            egress += part(message.egress.into()) as u64;
        }
        let took = Time::from_ps(u64::try_from(took).unwrap_or(u64::MAX / 4));
        (took, TurnResult { engine_ns: took.ps().div_ceil(1000), egress })
    }
}

impl World {
    /// Adds a resource of so many units, which `policy` gives out for messages of [`Step::Work`](super::Step::Work); these
    /// can be interrupted at multiples of `granule` bytes of their input.
    pub fn add_shared_resource(
        &mut self,
        units: u32,
        granule: u64,
        policy: Box<dyn Decides>,
    ) -> ResourceId {
        let resource = self.add_resource(units);
        let shared = SharedUnits { policy, granule, spans: BTreeMap::new(), wake: Time::MAX };
        self.resources[resource.index()].shared = Some(Box::new(shared));
        resource
    }

    /// A job has work for a shared resource; `false` when its end is still to come, as of all steps.
    pub(super) fn work(
        &mut self,
        resource: ResourceId,
        job: u32,
        of: Admitted,
        drawn: Option<DistributionId>,
    ) -> bool {
        let now = nanoseconds(self.now);
        let span = match drawn {
            Some(distribution) => self.draw(self.jobs[job].flow, distribution),
            None => of.cost,
        };
        let Some(shared) = self.resources[resource.index()].shared.as_mut() else { return true };
        shared.spans.insert(job, span);
        let message = QueuedMessage {
            tag: job.into(),
            ingress: of.ingress,
            egress: of.egress,
            cost_ns: nanoseconds(of.cost).max(1),
            granule: shared.granule,
            done: 0,
        };
        shared.policy.submit(TenantId(of.tenant), of.queue, message, now);
        self.give_turns(resource.0);
        false
    }

    /// A unit has finished the turn of that number.
    pub(super) fn turn_ended(&mut self, number: u32) {
        let (now, from) = (self.now, self.measured_from);
        let Some(UnitTurn { resource, turn, done }) = self.unit_turns[number].take() else {
            return;
        };
        self.unit_turns.remove(number);
        let here = &mut self.resources[resource as usize];
        let Some(shared) = &mut here.shared else { return };
        shared.policy.complete(&turn, done, nanoseconds(now));
        let over = turn.pieces.iter().filter(|piece| piece.over);
        let over: Vec<u32> = over.map(|piece| piece.message.tag as u32).collect();
        over.iter().for_each(|job| _ = shared.spans.remove(job));
        here.count(now, from);
        here.free += 1;
        over.into_iter().for_each(|job| self.wake_job(job));
        self.give_turns(resource);
    }

    /// The policy is asked whether a tenant may continue.
    pub(super) fn look_at_units(&mut self, resource: u32) {
        let now = self.now;
        let Some(shared) = &mut self.resources[resource as usize].shared else { return };
        // One that an earlier time took the place of is none.
        if shared.wake == now {
            shared.wake = Time::MAX;
            self.give_turns(resource);
        }
    }

    /// Units that are free begin with turns, as long as there are any.
    fn give_turns(&mut self, resource: u32) {
        let (now, from) = (self.now, self.measured_from);
        let here = &mut self.resources[resource as usize];
        while here.free > 0 {
            let Some(shared) = &mut here.shared else { return };
            match shared.policy.next(nanoseconds(now)) {
                NextTurn::Run(mut turn) => {
                    let (span, done) = shared.fit(&mut turn);
                    here.count(now, from);
                    here.free -= 1;
                    let number = self.unit_turns.put(Some(UnitTurn { resource, turn, done }));
                    self.events.schedule(now + span, Event::Turn(number));
                }
                NextTurn::Wait(at) => {
                    // What is later than time goes comes at its end.
                    let at = Time::from_ns(at.max(nanoseconds(now) + 1).min(u64::MAX / 1001));
                    if at < shared.wake {
                        shared.wake = at;
                        self.events.schedule(at, Event::Units(resource));
                    }
                    return;
                }
                NextTurn::Idle => return,
            }
        }
    }
}
