//! Gates: a device takes up jobs in the order that a policy of [`rackbus_qos`] decides, so many turns at a time. So
//! what shapes a live accelerator shapes a modelled one.

use std::collections::BTreeMap;
use std::fmt;

use rackbus_qos::MessageRoundRobin;
use rackbus_qos::simulation::Policy;
use rackbus_qos::{EngineTurn, NextTurn, QueuedMessage, TenantArbiter, TenantId, TurnResult};

use crate::time::Time;

use super::{Event, GateId, World};

/// A job as a gate's policy sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admitted {
    /// The tenant that the job belongs to.
    pub tenant: u32,
    /// Of which of its queues.
    pub queue: u16,
    /// Bytes that count for a rate in bytes.
    pub ingress: u64,
    /// Bytes that come out of the device.
    pub egress: u64,
    /// For how long it keeps the device busy.
    pub cost: Time,
}

/// What decides at a gate.
pub trait Decides: Policy + Send {
    /// For how many nanoseconds a tenant's own limits held it back so far.
    fn throttled_ns(&self, tenant: TenantId) -> u64;
}

impl Decides for TenantArbiter {
    fn throttled_ns(&self, tenant: TenantId) -> u64 {
        self.usage(tenant).map_or(0, |usage| usage.throttled_ns)
    }
}

impl Decides for MessageRoundRobin {
    fn throttled_ns(&self, _tenant: TenantId) -> u64 {
        0
    }
}

pub(super) struct DeviceGate {
    policy: Box<dyn Decides>,
    /// Turns under way at most.
    units: usize,
    /// While more work than this is under way, in nanoseconds, nobody else is let through.
    window: u64,
    /// Work under way: what jobs cost that were let through.
    under_way: u64,
    /// By number: the turns under way, and how many of their jobs are.
    turns: BTreeMap<u64, (EngineTurn, usize)>,
    /// By job: the turn that it is in.
    jobs: BTreeMap<u32, u64>,
    made: u64,
    /// When it looks again, or [`Time::MAX`].
    wake: Time,
}

impl fmt::Debug for DeviceGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("units", &self.units).finish_non_exhaustive()
    }
}

impl DeviceGate {
    pub(super) fn is_whole(&self) -> bool {
        self.turns.is_empty()
    }
}

impl World {
    /// Adds a gate with so many turns under way at a time.
    pub fn add_gate(&mut self, units: usize, policy: Box<dyn Decides>) -> GateId {
        let (turns, jobs) = (BTreeMap::new(), BTreeMap::new());
        let (window, under_way) = (u64::MAX, 0);
        self.gates.push(DeviceGate {
            policy,
            units,
            window,
            under_way,
            turns,
            jobs,
            made: 0,
            wake: Time::MAX,
        });
        GateId((self.gates.len() - 1) as u32)
    }

    /// Another policy for a gate that nobody has come to yet.
    pub fn set_policy(&mut self, gate: GateId, units: usize, policy: Box<dyn Decides>) {
        let here = &mut self.gates[gate.index()];
        (here.units, here.policy) = (units, policy);
    }

    /// Lets nobody else through while more work than `window` is under way, as jobs' costs tell.
    pub fn set_window(&mut self, gate: GateId, window: Time) {
        self.gates[gate.index()].window = nanoseconds(window);
    }

    /// The share of all simulated time for which a tenant's limits at a gate held it back.
    pub fn throttled_share(&self, gate: GateId, tenant: u32) -> f64 {
        let span = self.gates[gate.index()].policy.throttled_ns(TenantId(tenant));
        span as f64 / nanoseconds(self.now).max(1) as f64
    }

    /// A job comes to a gate.
    pub(super) fn enter(&mut self, gate: GateId, job: u32, admitted: Admitted) {
        let now = nanoseconds(self.now);
        let Admitted { tenant, queue, ingress, egress, cost } = admitted;
        let (tag, cost_ns) = (job.into(), nanoseconds(cost).max(1));
        let message = QueuedMessage { tag, ingress, egress, cost_ns, granule: 0, done: 0 };
        self.gates[gate.index()].policy.submit(TenantId(tenant), queue, message, now);
        self.admit(gate);
    }

    /// A job that a gate let in has ended.
    pub(super) fn leave(&mut self, gate: GateId, job: u32) {
        let now = nanoseconds(self.now);
        let here = &mut self.gates[gate.index()];
        let Some(number) = here.jobs.remove(&job) else { return };
        let Some((_, left)) = here.turns.get_mut(&number) else { return };
        *left -= 1;
        if *left > 0 {
            return;
        }
        if let Some((turn, _)) = here.turns.remove(&number) {
            let messages = || turn.pieces.iter().map(|piece| piece.message);
            let engine_ns = messages().map(|message| message.cost_ns).sum();
            here.under_way -= engine_ns;
            let egress = messages().map(|message| message.egress).sum();
            here.policy.complete(&turn, TurnResult { engine_ns, egress }, now);
        }
        self.admit(gate);
    }

    /// A gate's tenants may continue.
    pub(super) fn gate_timer(&mut self, gate: u32) {
        self.gates[gate as usize].wake = Time::MAX;
        self.admit(GateId(gate));
    }

    fn admit(&mut self, gate: GateId) {
        let now = nanoseconds(self.now);
        loop {
            let here = &mut self.gates[gate.index()];
            if here.turns.len() >= here.units || here.under_way > here.window {
                return;
            }
            match here.policy.next(now) {
                NextTurn::Run(turn) => {
                    let costs = turn.pieces.iter().map(|piece| piece.message.cost_ns);
                    here.under_way += costs.sum::<u64>();
                    let number = here.made;
                    here.made += 1;
                    let jobs: Vec<u32> =
                        turn.pieces.iter().map(|piece| piece.message.tag as u32).collect();
                    here.jobs.extend(jobs.iter().map(|job| (*job, number)));
                    here.turns.insert(number, (turn, jobs.len()));
                    jobs.into_iter().for_each(|job| self.wake_job(job));
                }
                NextTurn::Wait(at) => {
                    // What is later than time goes comes at its end.
                    let at = Time::from_ns(at.max(now + 1).min(u64::MAX / 1001));
                    if at < here.wake {
                        here.wake = at;
                        self.events.schedule(at, Event::Gate(gate.0));
                    }
                    return;
                }
                NextTurn::Idle => return,
            }
        }
    }
}

pub(super) fn nanoseconds(time: Time) -> u64 {
    time.ps() / 1000
}
