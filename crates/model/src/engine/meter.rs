//! Limits on what a function does in a second: jobs begin, in the order in which they come, as the part of
//! [`rackbus_qos`] lets them that keeps a live function to the same limits.

use std::collections::{BTreeMap, VecDeque};

use rackbus_qos::{Metered, OperationMeter};

use super::gate::nanoseconds;
use super::{Event, FlowId, MeterId, Step, World};
use crate::time::Time;

/// A function's limits, and the jobs that wait for them.
#[derive(Debug)]
pub(super) struct DeviceMeter {
    limits: OperationMeter,
    /// In order: jobs that wait, with the bytes and operations that each takes.
    waiting: VecDeque<(u32, [u64; 2])>,
    /// Since measuring began: the bytes and operations that were taken.
    taken: [u64; 2],
    /// By [`Metered`]: for how long jobs waited for that limit, those that now wait till `until` included.
    held: [Time; 2],
    until: Time,
    holds: Metered,
}

impl DeviceMeter {
    pub(super) fn is_whole(&self) -> bool {
        self.waiting.is_empty()
    }
}

impl World {
    /// Adds limits that jobs count against.
    pub fn add_meter(&mut self, limits: OperationMeter) -> MeterId {
        self.meters.push(DeviceMeter {
            limits,
            waiting: VecDeque::new(),
            taken: [0; 2],
            held: [Time::ZERO; 2],
            until: Time::ZERO,
            holds: Metered::Bytes,
        });
        MeterId((self.meters.len() - 1) as u32)
    }

    /// A meter has saved nothing by then; see [`OperationMeter::use_up`].
    pub fn use_up(&mut self, meter: MeterId, from: Time) {
        self.meters[meter.index()].limits.use_up(nanoseconds(from));
    }

    /// By meter: bytes and operations that a job of a flow takes. Of flows whose jobs all do the same.
    pub fn spent_by(&self, flow: FlowId) -> BTreeMap<MeterId, [u64; 2]> {
        let mut found = BTreeMap::new();
        self.add_spent(self.steps(flow), 1, &mut found);
        found
    }

    fn add_spent(&self, script: &[Step], times: u64, found: &mut BTreeMap<MeterId, [u64; 2]>) {
        for step in script {
            match *step {
                Step::Spend { meter, bytes, operations } => {
                    let sums = found.entry(meter).or_default();
                    for (sum, more) in sums.iter_mut().zip([bytes, operations]) {
                        *sum = sum.saturating_add(more.saturating_mul(times));
                    }
                }
                Step::Each(of, count, _) => {
                    self.add_spent(self.script(of), times.saturating_mul(count), found);
                }
                Step::All(first, count) => first
                    .following(count)
                    .for_each(|of| self.add_spent(self.script(of), times, found)),
                _ => {}
            }
        }
    }

    /// What a limit of a meter lets through in a second; `None` where it has no such limit.
    pub fn metered_rate(&self, meter: MeterId, of: Metered) -> Option<u64> {
        self.meters[meter.index()].limits.rate(of)
    }

    /// What was taken of a limit in the measured time, as a share of what came: more than 1 where a burst was saved before.
    pub fn metered_share(&self, meter: MeterId, of: Metered) -> Option<f64> {
        let rate = self.metered_rate(meter, of)? as f64;
        let came = rate * self.now.since(self.measured_from).seconds();
        let taken = self.meters[meter.index()].taken[of as usize] as f64;
        Some(if came > 0.0 { taken / came } else { 0.0 })
    }

    /// The share of the measured time for which jobs waited for a limit.
    pub fn held_share(&self, meter: MeterId, of: Metered) -> f64 {
        let here = &self.meters[meter.index()];
        let ahead = if here.holds == of { here.until.since(self.now) } else { Time::ZERO };
        self.share(here.held[of as usize].since(ahead))
    }

    /// A job takes so many bytes and operations; `false` when it has to wait for them.
    pub(super) fn spend(&mut self, meter: MeterId, job: u32, amounts: [u64; 2]) -> bool {
        let now = nanoseconds(self.now);
        let measuring = self.measuring();
        let here = &mut self.meters[meter.index()];
        if here.waiting.is_empty() && here.limits.is_ready(now) {
            here.take(amounts, measuring);
            return true;
        }
        here.waiting.push_back((job, amounts));
        if here.waiting.len() == 1 {
            self.wait_for_meter(meter.0);
        }
        false
    }

    /// The job that waits longest may go on, and those behind it that need not wait any more.
    pub(super) fn meter_timer(&mut self, meter: u32) {
        let now = nanoseconds(self.now);
        let measuring = self.measuring();
        loop {
            let here = &mut self.meters[meter as usize];
            let Some((job, amounts)) = here.waiting.front().copied() else { return };
            if !here.limits.is_ready(now) {
                return self.wait_for_meter(meter);
            }
            here.waiting.pop_front();
            here.take(amounts, measuring);
            self.wake_job(job);
        }
    }

    /// Looks at a meter again when its limits are ready.
    fn wait_for_meter(&mut self, meter: u32) {
        let (now, from) = (self.now, self.measured_from);
        let here = &mut self.meters[meter as usize];
        // What is later than time goes comes at its end.
        let at = Time::from_ns(here.limits.ready_at().min(u64::MAX / 1001));
        let at = at.max(now + Time::from_ps(1));
        (here.holds, here.until) = (here.limits.last_ready(), at);
        here.held[here.holds as usize] += at.since(now.max(from));
        self.events.schedule(at, Event::Meter(meter));
    }
}

impl DeviceMeter {
    fn take(&mut self, amounts: [u64; 2], measuring: bool) {
        let [bytes, operations] = amounts;
        self.limits.spend(bytes, operations);
        if measuring {
            self.taken.iter_mut().zip(amounts).for_each(|(sum, more)| *sum += more);
        }
    }
}
