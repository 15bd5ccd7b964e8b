//! From a descriptor in a ring to an operation before the engines.

use std::sync::Arc;

use rackbus_pci::Bus;
use rackbus_spec::accel::{Descriptor, Operation, Status};
use zeroize::Zeroizing;

use super::super::contexts::LARGEST_CONTEXT;
use super::super::job::{Job, Order};
use super::super::profile::engine_clock;
use super::super::request::{self, Plan, check};
use super::super::waiting::{self, Look};
use super::{Accelerator, MOST, Pending};

/// Descriptors that are taken from a queue at once, so that one does not keep the others waiting.
const BATCH: usize = 64;

/// What became of a descriptor at once.
pub(in super::super) enum Begun {
    /// Engines are to do it.
    Job(Arc<Job>),
    /// It is done, with this as the completion's value.
    Over(u32),
}

impl Accelerator {
    /// Takes descriptors from a queue.
    pub(super) fn take(&mut self, bus: &Bus<'_>, number: u16) -> bool {
        let mut jobs = Vec::new();
        let mut some = false;
        for _ in 0..BATCH.min(MOST.saturating_sub(self.pending.len())) {
            let queue = &mut self.queues[usize::from(number)];
            let Some(descriptor) = queue.peek(bus) else { break };
            let begun = match waiting::look(bus, queue, &descriptor) {
                Look::NotYet => break,
                Look::Over(outcome) => outcome.map(|()| Begun::Over(0)),
                Look::Begin => {
                    queue.take();
                    self.begin(bus, number, &descriptor, 0)
                }
            };
            some = true;
            match begun {
                Ok(Begun::Job(job)) => jobs.push((job, 0)),
                Ok(Begun::Over(value)) => {
                    let operation = descriptor.stages[0];
                    self.count(operation, 0, true, bus.user.ticks(), bus.user.ticks());
                    self.complete(bus, number, descriptor.id, Status::Success, 0, value);
                }
                Err(status) => {
                    self.count(descriptor.stages[0], 0, false, 0, 0);
                    self.complete(bus, number, descriptor.id, status, 0, 0);
                }
            }
            // Patterns may take long to compile, and who takes the function back waits for that.
            if descriptor.stages[0] == Operation::CreateContext as u8 {
                break;
            }
        }
        self.pool.submit(self.tenant, number, jobs, &mut self.scratch);
        some
    }

    /// Begins what a descriptor asks for, of which `done` bytes were done in an earlier life.
    pub(in super::super) fn begin(
        &mut self,
        bus: &Bus<'_>,
        queue: u16,
        from: &Descriptor,
        done: usize,
    ) -> Result<Begun, Status> {
        let plan = check(from)?;
        match plan.operations() {
            [Operation::CreateContext, of] => {
                return self.create_context(bus, *of, from).map(|n| Begun::Over(n.into()));
            }
            [Operation::DestroyContext] => {
                let there = self.contexts.destroy(from.contexts[0]);
                return if there { Ok(Begun::Over(0)) } else { Err(Status::InvalidContext) };
            }
            _ => {}
        }
        let start = request::start(&plan, from, &self.contexts, done)?;
        let used = from.contexts[..plan.operations().len()].iter();
        let contexts = used.filter_map(|handle| Some((*handle, self.contexts.get(*handle)?)));
        let contexts = contexts.collect();
        let memory = request::memory(bus.dma, from)?;
        let number = self.next;
        self.next += 1;
        let order = Order {
            number,
            kind: from.stages[0],
            profile_ns: self.profile_ns(&plan, from),
            start,
            memory,
            done,
        };
        let job = Arc::new(Job::new(order, self.outbox.clone()));
        let begun = bus.user.ticks();
        let pending = Pending { queue, descriptor: *from, job: job.clone(), contexts, begun };
        self.pending.insert(number, pending);
        Ok(Begun::Job(job))
    }

    /// What the profiles say that a descriptor costs, before anything is known of its content.
    fn profile_ns(&self, plan: &Plan, from: &Descriptor) -> f64 {
        let cost = |operation: &Operation| {
            let profile = self.pool.profiles()?.get(operation.name())?;
            Some(profile.cost_ns(from.input_length.into(), 1000))
        };
        plan.operations().iter().filter_map(cost).sum()
    }

    fn create_context(
        &mut self,
        bus: &Bus<'_>,
        of: Operation,
        from: &Descriptor,
    ) -> Result<u16, Status> {
        if from.input_length > LARGEST_CONTEXT {
            return Err(Status::InvalidField);
        }
        let (input, _) = request::memory(bus.dma, from)?;
        let mut data = Zeroizing::new(vec![0; input.len()]);
        input.read(0, &mut data);
        // Compiling patterns takes as long as engines take for many messages: it is charged like them.
        let before = engine_clock();
        let created = self.contexts.create(of, data);
        self.pool.charge(self.tenant, engine_clock().saturating_sub(before));
        created
    }
}
