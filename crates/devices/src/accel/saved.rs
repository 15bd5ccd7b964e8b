//! A function's state as a value: taken by [`Function::save`], put back by [`Function::restore`].
//!
//! # Descriptors under way
//!
//! A descriptor is *under way* from when it was read from its ring until its completion was written. Those are
//! part of the value and are begun again; the life that was saved writes no completion any more, so each is
//! completed once. That it was done in part, or wholly, before it is done again must not show:
//!
//! * Input and output are apart: the input is as it was, for the tenant leaves it alone until the completion, and
//!   the output is written anew, the same.
//! * Input and output may be the same memory where the output is as long as the input at every point
//!   ([`Plan::keeps_length`]). Then what was put out has taken the place of the input, and the operation goes on
//!   behind it. All that an engine read beyond that is still there.
//! * Operations on contexts end in the poll that reads them, so none of them is ever under way. One that waits is
//!   still in the ring; its limit begins anew.
//! * A context that was destroyed after a descriptor that uses it was read is known to that descriptor alone, and
//!   its key is not kept for it: it ends with *no such context* then.
//!
//! # Keys
//!
//! What contexts are made of is not in the value, which is text that may be copied anywhere. It goes along as
//! memory, which whoever restores the value wipes, and contexts are made of it anew.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rackbus_pci::{Bus, ModelState, RestoreError, SaveError};
use rackbus_spec::accel::{Descriptor, Operation, Status};
use serde::{Deserialize, Serialize};
use zerocopy::transmute;

use super::contexts::{ContextState, Contexts};
use super::function::{Accelerator, Begun, MOST, Pending};
use super::queue::Queue;
use super::request::{self, Plan};
use super::{CLASS, QUEUES};

#[cfg(doc)]
use rackbus_pci::Function;

/// The version of [`AcceleratorState`].
pub const VERSION: u32 = 1;

/// All that a function is made of when it goes on in another process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AcceleratorState {
    running: bool,
    shadow: u64,
    /// The shadow doorbells say that it sleeps.
    asleep: bool,
    queues: Vec<Queue>,
    contexts: Vec<ContextState>,
    /// In the order in which they were read.
    under_way: Vec<UnderWay>,
}

/// A descriptor under way.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct UnderWay {
    queue: u16,
    descriptor: [u64; 8],
    /// Bytes that are done and are not to be done again.
    done: u32,
    /// One of its contexts is not what its handle names any more.
    orphaned: bool,
}

fn require(holds: bool, what: &str) -> Result<(), RestoreError> {
    if holds { Ok(()) } else { Err(RestoreError::Invalid(what.to_owned())) }
}

impl UnderWay {
    fn of(pending: &Pending, contexts: &Contexts) -> UnderWay {
        let plan = request::check(&pending.descriptor);
        let keeps = plan.is_ok_and(|plan| plan.keeps_length());
        let done = if keeps { pending.job.written() as u32 } else { 0 };
        let same = |(handle, used): &(u16, _)| {
            contexts.get(*handle).is_some_and(|context| Arc::ptr_eq(&context, used))
        };
        let orphaned = !pending.contexts.iter().all(same);
        UnderWay {
            queue: pending.queue,
            descriptor: transmute!(pending.descriptor),
            done,
            orphaned,
        }
    }

    /// Whether it is one that can be under way.
    fn check(&self) -> Result<Descriptor, RestoreError> {
        let descriptor: Descriptor = transmute!(self.descriptor);
        let of_contexts = |plan: &Plan| {
            let first = plan.operations().first();
            matches!(
                first,
                Some(Operation::CreateContext | Operation::DestroyContext | Operation::Wait)
            )
        };
        let plan = request::check(&descriptor);
        let plan =
            plan.map_err(|status| RestoreError::Invalid(format!("a descriptor: {status}")))?;
        require(!of_contexts(&plan), "a descriptor that is never under way")?;
        require(self.done == 0 || plan.keeps_length(), "a descriptor that is done in part")?;
        require(self.done <= descriptor.input_length, "a descriptor that is more than done")?;
        Ok(descriptor)
    }
}

impl Accelerator {
    /// Makes a value of the function's state. Engines touch none of its memory any more.
    pub(super) fn take_state(
        &mut self,
        bus: &Bus<'_>,
    ) -> Result<(ModelState, Vec<OwnedFd>), SaveError> {
        let (contexts, medium) = self.contexts.save()?;
        self.let_go();
        // What has ended is answered here, so that less is done again.
        if self.running {
            bus.user.before_access();
            for finished in self.outbox.take() {
                self.finish(bus, finished);
            }
            self.interrupt(bus);
        }
        // A queue pair in error completes nothing.
        let completed = |pending: &&Pending| self.queues[usize::from(pending.queue)].is_on();
        let under_way = self.pending.values().filter(completed);
        let under_way = under_way.map(|pending| UnderWay::of(pending, &self.contexts));
        let value = AcceleratorState {
            running: self.running,
            shadow: self.shadow,
            asleep: self.told_asleep,
            queues: self.queues.clone(),
            contexts,
            under_way: under_way.collect(),
        };
        Ok((ModelState::new(CLASS, VERSION, &value)?, vec![medium]))
    }

    /// Goes on with a saved function's state.
    pub(super) fn put_state(
        &mut self,
        bus: &Bus<'_>,
        model: &ModelState,
    ) -> Result<(), RestoreError> {
        let saved: AcceleratorState = model.read(CLASS, VERSION)?;
        require(saved.queues.len() == usize::from(QUEUES), "the number of queue pairs")?;
        require(saved.queues.iter().all(Queue::is_possible), "a queue pair")?;
        require(saved.under_way.len() <= MOST, "too many descriptors are under way")?;
        let idle = saved.under_way.is_empty() && saved.queues.iter().all(|queue| !queue.is_on());
        require(saved.running || idle, "a function that is stopped and works")?;
        let descriptors = saved.under_way.iter().map(UnderWay::check);
        let descriptors = descriptors.collect::<Result<Vec<_>, _>>()?;
        let mut queues = saved.queues;
        for under_way in &saved.under_way {
            let queue = queues.get_mut(usize::from(under_way.queue));
            require(queue.is_some_and(Queue::go_on), "a descriptor of no queue pair")?;
        }
        let medium = self.medium.take().ok_or("no memory with contexts came with it");
        let contexts = medium.and_then(|medium| Contexts::restore(&saved.contexts, medium));
        self.contexts = contexts.map_err(|what| RestoreError::Invalid(what.to_owned()))?;
        (self.running, self.shadow, self.told_asleep) = (saved.running, saved.shadow, saved.asleep);
        self.queues = queues;
        for (under_way, descriptor) in saved.under_way.iter().zip(descriptors) {
            self.do_again(bus, under_way, &descriptor);
        }
        Ok(())
    }

    fn do_again(&mut self, bus: &Bus<'_>, under_way: &UnderWay, descriptor: &Descriptor) {
        let (queue, done) = (under_way.queue, under_way.done as usize);
        let begun = match under_way.orphaned {
            true => Err(Status::InvalidContext),
            false => self.begin(bus, queue, descriptor, done),
        };
        match begun {
            Ok(Begun::Job(job)) => {
                self.pool.submit(self.tenant, queue, vec![(job, done)], &mut self.scratch)
            }
            // Refused by `check`.
            Ok(Begun::Over(value)) => {
                self.complete(bus, queue, descriptor.id, Status::Success, 0, value);
            }
            Err(status) => self.complete(bus, queue, descriptor.id, status, 0, 0),
        }
    }
}
