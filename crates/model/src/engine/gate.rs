//! Gates: a device takes up jobs in the order that a policy of [`rackbus_qos`] decides, so many turns at a time. So
//! what shapes a live accelerator shapes a modelled one.

use std::collections::BTreeMap;
use std::fmt;

use rackbus_qos::simulation::Policy;
use rackbus_qos::{Done, Message, Next, TenantId, Turn};

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

pub(super) struct Gate {
    policy: Box<dyn Policy + Send>,
    /// Turns under way at most.
    units: usize,
    /// By number: the turns under way, and how many of their jobs are.
    turns: BTreeMap<u64, (Turn, usize)>,
    /// By job: the turn that it is in.
    jobs: BTreeMap<u32, u64>,
    made: u64,
    /// When it looks again, or [`Time::MAX`].
    wake: Time,
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("units", &self.units).finish_non_exhaustive()
    }
}

impl Gate {
    pub(super) fn is_whole(&self) -> bool {
        self.turns.is_empty()
    }
}

impl World {
    /// Adds a gate with so many turns under way at a time.
    pub fn add_gate(&mut self, units: usize, policy: Box<dyn Policy + Send>) -> GateId {
        let (turns, jobs) = (BTreeMap::new(), BTreeMap::new());
        self.gates.push(Gate { policy, units, turns, jobs, made: 0, wake: Time::MAX });
        GateId((self.gates.len() - 1) as u32)
    }

    /// Another policy for a gate that nobody has come to yet.
    pub fn set_policy(&mut self, gate: GateId, units: usize, policy: Box<dyn Policy + Send>) {
        let here = &mut self.gates[gate.index()];
        (here.units, here.policy) = (units, policy);
    }

    /// A job comes to a gate.
    pub(super) fn enter(&mut self, gate: GateId, job: u32, admitted: Admitted) {
        let now = nanoseconds(self.now);
        let Admitted { tenant, queue, ingress, egress, cost } = admitted;
        let (tag, cost_ns) = (job.into(), nanoseconds(cost).max(1));
        let message = Message { tag, ingress, egress, cost_ns, granule: 0, done: 0 };
        self.gates[gate.index()].policy.submit(TenantId(tenant), queue, message, now);
        self.admit(gate);
    }

    /// A job that a gate let in is over.
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
            let egress = messages().map(|message| message.egress).sum();
            here.policy.complete(&turn, Done { engine_ns, egress }, now);
        }
        self.admit(gate);
    }

    /// A gate's tenants may go on.
    pub(super) fn gate_timer(&mut self, gate: u32) {
        self.gates[gate as usize].wake = Time::MAX;
        self.admit(GateId(gate));
    }

    fn admit(&mut self, gate: GateId) {
        let now = nanoseconds(self.now);
        loop {
            let here = &mut self.gates[gate.index()];
            if here.turns.len() >= here.units {
                return;
            }
            match here.policy.next(now) {
                Next::Run(turn) => {
                    let number = here.made;
                    here.made += 1;
                    let jobs: Vec<u32> =
                        turn.pieces.iter().map(|piece| piece.message.tag as u32).collect();
                    here.jobs.extend(jobs.iter().map(|job| (*job, number)));
                    here.turns.insert(number, (turn, jobs.len()));
                    jobs.into_iter().for_each(|job| self.wake_job(job));
                }
                Next::Wait(at) if at < u64::MAX => {
                    let at = Time::from_ns(at.max(now + 1));
                    if at < here.wake {
                        here.wake = at;
                        self.events.schedule(at, Event::Gate(gate.0));
                    }
                    return;
                }
                Next::Wait(_) | Next::Idle => return,
            }
        }
    }
}

fn nanoseconds(time: Time) -> u64 {
    time.ps() / 1000
}
