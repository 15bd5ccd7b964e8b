//! How an operation begins: it is done by the function's own thread at once, or put before the engines.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rackbus_memory::{DmaSlice, DmaSpace, ticks};
use rackbus_spec::accel::{Descriptor, Operation, OperationStatus};
use zeroize::Zeroizing;

use super::super::super::at_once::{Attempt, ShortOperation};
use super::super::super::clock::thread_ns;
use super::super::super::contexts::LARGEST_CONTEXT;
use super::super::super::engines::Context;
use super::super::super::gather::{Gather, MessageMemory};
use super::super::super::job::{self, EngineJob, JobEngines};
use super::super::super::request::{self, CheckedDescriptor, StageContexts};
use super::super::{OperationOrder, SubmitOutcome};
use super::{Local, LocalWork};

/// Where the memory of an operation that begins is.
pub enum OrderMemory<'a> {
    /// Where its descriptor says, in what the function has mapped.
    Mapped(&'a DmaSpace),
    /// Here: its input and its output.
    Held((Gather, Gather)),
}

/// The same when it was looked up.
enum ReachedMemory<'a> {
    /// For as long as the function's own thread does nothing else.
    Borrowed(&'a DmaSpace, (DmaSlice<'a>, DmaSlice<'a>)),
    /// For as long as the operation is under way.
    Held((Gather, Gather)),
}

impl Local {
    /// Begins an operation that was not begun before, where its message is no longer than the tenant's level says.
    ///
    /// # Errors
    /// The status that it ends with at once.
    pub(in super::super) fn begin_first(
        &mut self,
        order: &OperationOrder<'_>,
        memory: OrderMemory<'_>,
        taken: u64,
    ) -> Result<SubmitOutcome<LocalWork>, OperationStatus> {
        let first = order.plan.operations()[0];
        let is_message = !matches!(first, Operation::CreateContext | Operation::DestroyContext);
        if is_message && order.descriptor.input_length > self.largest.load(Ordering::Relaxed) {
            return Err(OperationStatus::InvalidField);
        }
        self.start(order, memory, (0, taken))
    }

    /// Begins an operation on this memory, of which `done` bytes were done in an earlier life. It was taken up at `taken`
    /// by the processor's counter.
    pub(in super::super) fn start(
        &mut self,
        order: &OperationOrder<'_>,
        memory: OrderMemory<'_>,
        (done, taken): (usize, u64),
    ) -> Result<SubmitOutcome<LocalWork>, OperationStatus> {
        let OperationOrder { number, descriptor, plan, .. } = *order;
        match plan.operations() {
            [Operation::CreateContext, of] => {
                // Patterns may take long to compile: not with an engine in hand that others wait for.
                self.own.release(&self.pool);
                let (input, _) = match memory {
                    OrderMemory::Mapped(dma) => request::memory(dma, descriptor)?,
                    OrderMemory::Held(memory) => memory,
                };
                let created = self.create_context(*of, &input);
                return created.map(|handle| SubmitOutcome::Over(handle.into()));
            }
            [Operation::DestroyContext] => {
                let there = self.contexts.destroy(descriptor.contexts[0]);
                return if there {
                    Ok(SubmitOutcome::Over(0))
                } else {
                    Err(OperationStatus::InvalidContext)
                };
            }
            _ => {}
        }
        let (kind, profile_ns) = (descriptor.stages[0], self.profile_ns(plan, descriptor));
        let short = ShortOperation { number, kind, profile_ns, begun: taken };
        let here = done == 0 && self.begun.is_empty();
        let reached = self.reach(memory, descriptor, here.then_some(&short))?;
        let contexts = request::contexts(plan, descriptor, &self.contexts)?;
        let start = |spare: &mut _| request::start(plan, descriptor, &contexts, 0, spare);
        let attempt = match &reached {
            ReachedMemory::Borrowed(_, memory) => {
                self.own.run((&self.pool, self.tenant), short, memory, start)
            }
            ReachedMemory::Held(memory) if here => {
                self.own.run((&self.pool, self.tenant), short, memory, start)
            }
            ReachedMemory::Held(_) => Attempt::Refused,
        };
        let engines = match attempt {
            Attempt::Ended(finished, time) => {
                if let ReachedMemory::Borrowed(dma, _) = reached {
                    request::count_moved(dma, descriptor);
                }
                return Ok(SubmitOutcome::Ended(finished, time));
            }
            Attempt::Left(course, engine_ns) => Some(JobEngines::Running(course, engine_ns)),
            Attempt::Refused => None,
        };
        let held = match reached {
            ReachedMemory::Borrowed(dma, _) => request::memory(dma, descriptor)?,
            ReachedMemory::Held(memory) => memory,
        };
        Ok(SubmitOutcome::Work(self.put(order, held, contexts, (engines, profile_ns), done)))
    }

    /// The memory of an operation, which may be done `here`. Where it is, its memory is needed no longer than that. An
    /// engine's time is taken before the memory is looked up, but not behind a descriptor that was refused: of many of
    /// these, each would take a turn in which nothing is done.
    #[inline]
    fn reach<'a>(
        &mut self,
        memory: OrderMemory<'a>,
        descriptor: &Descriptor,
        here: Option<&ShortOperation>,
    ) -> Result<ReachedMemory<'a>, OperationStatus> {
        let dma = match memory {
            OrderMemory::Held(memory) => return Ok(ReachedMemory::Held(memory)),
            OrderMemory::Mapped(dma) => dma,
        };
        let in_doubt = std::mem::take(&mut self.refused_last);
        if request::has_lists(descriptor) {
            // Nor do long lists keep others waiting.
            self.own.release(&self.pool);
        } else if let Some(short) = here.filter(|_| !in_doubt)
            && self.own.hold((&self.pool, self.tenant), short)
            && let Some(memory) = request::borrowed_memory(dma, descriptor)
        {
            dma.revoker().before_access_at(short.begun);
            return Ok(ReachedMemory::Borrowed(dma, memory));
        }
        request::memory(dma, descriptor).map(ReachedMemory::Held)
    }

    /// Keeps an operation for the engines, which have done some of it where there are any.
    fn put(
        &mut self,
        order: &OperationOrder<'_>,
        memory: (Gather, Gather),
        contexts: StageContexts,
        (engines, profile_ns): (Option<JobEngines>, f64),
        done: usize,
    ) -> LocalWork {
        let OperationOrder { number, descriptor, plan, .. } = *order;
        let handles = descriptor.contexts.into_iter();
        let used = handles.zip(&contexts).filter_map(|(h, context)| Some((h, context.clone()?)));
        let used: Vec<(u16, Arc<Context>)> = used.collect();
        self.left_data = true;
        let engines = engines.unwrap_or_else(|| {
            let (plan, descriptor) = (*plan, *descriptor);
            let start =
                move |spare: &mut _| request::start(&plan, &descriptor, &contexts, done, spare);
            JobEngines::Waiting(Box::new(start), done)
        });
        let done = match &engines {
            JobEngines::Running(course, _) => course.read,
            _ => done,
        };
        let kind = descriptor.stages[0];
        let input = job::JobInput { number, kind, profile_ns, engines, memory };
        let job = Arc::new(EngineJob::new(input, self.outbox.clone()));
        self.begun.push((job.clone(), done));
        LocalWork { job, refused: None, contexts: used }
    }

    /// What the profiles say that a descriptor costs, before anything is known of its content.
    fn profile_ns(&mut self, plan: &CheckedDescriptor, from: &Descriptor) -> f64 {
        let Descriptor { stages, input_length, .. } = *from;
        if let Some((known, profile_ns)) = self.costed
            && known == (stages, input_length)
        {
            return profile_ns;
        }
        let cost = |operation: &Operation| self.pool.cost_ns(*operation, input_length.into());
        let profile_ns = plan.operations().iter().map(cost).sum();
        self.costed = Some(((stages, input_length), profile_ns));
        profile_ns
    }

    fn create_context(&mut self, of: Operation, input: &Gather) -> Result<u16, OperationStatus> {
        if input.len() > LARGEST_CONTEXT as usize {
            return Err(OperationStatus::InvalidField);
        }
        let mut data = Zeroizing::new(vec![0; input.len()]);
        input.read(0, &mut data);
        // Compiling patterns takes as long as engines take for many messages: it is charged like them.
        let before = thread_ns();
        let created = self.contexts.create(of, data);
        self.pool.charge(self.tenant, thread_ns().saturating_sub(before));
        self.charged_until = created.is_err().then(ticks::now);
        created
    }
}
