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
//!   ([`CheckedDescriptor::keeps_length`]). Then what was put out has taken the place of the input, and the operation continues
//!   behind it. All that an engine read beyond that is still there.
//! * Operations on contexts end in the poll that reads them, so none of them is ever under way. One that waits is
//!   still in the ring; its limit begins anew.
//! * With the engines at another node, operations on contexts may be under way, too. Nothing is done again then: that
//!   node goes on meanwhile, and answers whoever has the exchange.
//! * A context that was destroyed after a descriptor that uses it was read is known to that descriptor alone, and
//!   its key is not kept for it: it ends with *no such context* then.
//!
//! # Keys
//!
//! What contexts are made of is not in the value, which is text that may be copied anywhere. It goes along as
//! memory, which whoever restores the value wipes, and contexts are made of it anew.

use std::os::fd::OwnedFd;

use rackbus_pci::{Bus, ModelState, RestoreError, SaveError};
use rackbus_spec::accel::{Descriptor, OperationStatus};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use zerocopy::transmute;

use super::function::{DescriptorOutcome, Front, PendingOperation};
use super::job::FinishedJob;
use super::medium::{MOST, Medium, OperationOrder, SubmitOutcome};
use super::queue::QueuePair;
use super::request::{self, CheckedDescriptor};
use super::{CLASS, MediumError, QUEUES};

#[cfg(doc)]
use rackbus_pci::Function;

/// The version of [`FrontState`].
pub const VERSION: u32 = 2;

/// All that a function is made of when it continues in another process: `S` of its medium, and `W` of each operation.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FrontState<S, W> {
    running: bool,
    shadow: u64,
    /// The shadow doorbells say that it sleeps.
    asleep: bool,
    /// All doorbells are in its registers in memory. Programs that know no such functions continue with others.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    doorbells_in_registers: bool,
    queues: Vec<QueuePair>,
    /// In the order in which they were read.
    under_way: Vec<UnderWay<W>>,
    medium: S,
}

/// A descriptor under way.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct UnderWay<W> {
    queue: u16,
    descriptor: [u64; 8],
    work: W,
}

/// What a program wrote that knew no fronts elsewhere, as it is written now. It had contexts beside the operations, and
/// how far an operation came beside its descriptor.
fn of_version_1(model: &ModelState) -> ModelState {
    let mut state = model.state.clone();
    if let Some(fields) = state.as_object_mut() {
        if let Some(contexts) = fields.remove("contexts") {
            fields.insert("medium".to_owned(), json!({ "contexts": contexts, "port": null }));
        }
        let under_way = fields.get_mut("under_way").and_then(Value::as_array_mut);
        for operation in under_way.into_iter().flatten().filter_map(Value::as_object_mut) {
            let work = ["done", "orphaned"].map(|name| operation.remove_entry(name));
            let work: Map<String, Value> = work.into_iter().flatten().collect();
            operation.insert("work".to_owned(), work.into());
        }
    }
    ModelState { class: model.class.clone(), version: VERSION, state }
}

fn require(holds: bool, what: &str) -> Result<(), RestoreError> {
    if holds { Ok(()) } else { Err(RestoreError::Invalid(what.to_owned())) }
}

fn invalid(error: MediumError) -> RestoreError {
    RestoreError::Invalid(error.to_string())
}

impl<M: Medium> Front<M> {
    /// Makes a value of the function's state. Engines touch none of its memory any more.
    pub(super) fn take_state(
        &mut self,
        bus: &Bus<'_>,
    ) -> Result<(ModelState, Vec<OwnedFd>), SaveError> {
        self.release_memory();
        // What has ended is answered here, so that less is done again.
        if self.running {
            bus.user.before_access();
            for finished in self.medium.take_finished(bus.dma) {
                self.finish(bus, finished);
            }
            // Nor is what was refused and waits for its turn: it was never under way for whoever goes on.
            for (number, status) in self.refused() {
                self.finish(bus, FinishedJob { number, status, written: 0, value: 0 });
            }
            self.interrupt(bus);
        }
        // A queue pair in error completes nothing.
        let on: Vec<bool> = self.queues.iter().map(QueuePair::is_on).collect();
        self.cancel(|pending| !on[usize::from(pending.queue)]);
        let (medium, files) = self.medium.save(bus)?;
        let under_way = self.pending.values().filter_map(|pending| self.under_way(pending));
        let value = FrontState {
            running: self.running,
            shadow: self.shadow,
            asleep: self.told_asleep,
            doorbells_in_registers: self.doorbells_in_registers,
            queues: self.queues.clone(),
            under_way: under_way.collect(),
            medium,
        };
        Ok((ModelState::new(CLASS, VERSION, &value)?, files))
    }

    /// What was refused and has not ended, each with its status. It is given up.
    fn refused(&mut self) -> Vec<(u64, OperationStatus)> {
        let refused = |(number, pending): (&u64, &PendingOperation<M::Work>)| {
            let status = self.medium.refused(&pending.work)?;
            Some((*number, status))
        };
        let refused: Vec<_> = self.pending.iter().filter_map(refused).collect();
        for (number, _) in &refused {
            if let Some(pending) = self.pending.get(number) {
                self.medium.cancel(&pending.work);
            }
        }
        refused
    }

    fn under_way(&self, pending: &PendingOperation<M::Work>) -> Option<UnderWay<M::SavedWork>> {
        let PendingOperation { queue, descriptor, work, .. } = pending;
        // It was checked when it began.
        let plan = request::check(descriptor).ok()?;
        let order = OperationOrder { number: 0, queue: *queue, descriptor, plan: &plan };
        let work = self.medium.save_work(&order, work);
        Some(UnderWay { queue: *queue, descriptor: transmute!(*descriptor), work })
    }

    /// Goes on with a saved function's state.
    pub(super) fn put_state(
        &mut self,
        bus: &Bus<'_>,
        model: &ModelState,
    ) -> Result<(), RestoreError> {
        let model = match model.version {
            1 => &of_version_1(model),
            _ => model,
        };
        let saved: FrontState<M::Saved, M::SavedWork> = model.read(CLASS, VERSION)?;
        require(saved.queues.len() == usize::from(QUEUES), "the number of queue pairs")?;
        require(saved.queues.iter().all(QueuePair::is_possible), "a queue pair")?;
        require(saved.under_way.len() <= MOST, "too many descriptors are under way")?;
        let idle = saved.under_way.is_empty() && saved.queues.iter().all(|queue| !queue.is_on());
        require(saved.running || idle, "a function that is stopped and works")?;
        let checked = saved.under_way.iter().map(|under_way| self.check(under_way));
        let checked = checked.collect::<Result<Vec<_>, _>>()?;
        let mut queues = saved.queues;
        for under_way in &saved.under_way {
            let queue = queues.get_mut(usize::from(under_way.queue));
            require(queue.is_some_and(QueuePair::go_on), "a descriptor of no queue pair")?;
        }
        self.medium.restore(bus, &saved.medium).map_err(invalid)?;
        (self.running, self.shadow, self.told_asleep) = (saved.running, saved.shadow, saved.asleep);
        self.doorbells_in_registers = saved.doorbells_in_registers;
        self.queues = queues;
        for (under_way, (descriptor, plan)) in saved.under_way.iter().zip(checked) {
            let queue = under_way.queue;
            let number = self.medium.number();
            let order = OperationOrder { number, queue, descriptor: &descriptor, plan: &plan };
            let begun = self.medium.begin_again(bus.dma, &order, &under_way.work);
            let ended = match begun
                .map(|begun: SubmitOutcome<_>| self.note(bus, number, (queue, &descriptor), begun))
            {
                Ok(DescriptorOutcome::Over(value)) => Some((OperationStatus::Success, value)),
                Ok(DescriptorOutcome::UnderWay | DescriptorOutcome::Ended(_)) => None,
                Err(status) => Some((status, 0)),
            };
            if let Some((status, value)) = ended {
                self.complete(bus, queue, descriptor.id, status, 0, value);
            }
            self.medium.submit(queue);
        }
        Ok(())
    }

    /// The descriptor, where it is one that can be under way.
    fn check(
        &self,
        under_way: &UnderWay<M::SavedWork>,
    ) -> Result<(Descriptor, CheckedDescriptor), RestoreError> {
        let descriptor: Descriptor = transmute!(under_way.descriptor);
        let plan = request::check(&descriptor);
        let plan =
            plan.map_err(|status| RestoreError::Invalid(format!("a descriptor: {status}")))?;
        let order = OperationOrder {
            number: 0,
            queue: under_way.queue,
            descriptor: &descriptor,
            plan: &plan,
        };
        self.medium.check_saved(&order, &under_way.work).map_err(invalid)?;
        Ok((descriptor, plan))
    }
}
