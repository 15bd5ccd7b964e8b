//! The engines of the same process.

mod begin;
mod work;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use rackbus_memory::ticks;
use rackbus_memory::{Carried, CarriedSession, DmaSpace, Handles, InheritedEnd};
use rackbus_pci::{Bus, MediumOffer, MediumRefused, Operations, Work as Polled};
use rackbus_qos::{ServiceLevel, TenantId, Usage};
use rackbus_spec::accel::{Descriptor, Operation, OperationStatus, STAGES};
use serde::{Deserialize, Serialize};

use super::super::at_once::{Attempt, OwnEngine, ShortOperation};
use super::super::clock::thread_ns;
use super::super::contexts::{ContextState, Contexts};
use super::super::engines::wipe_stack;
use super::super::function::AcceleratorError;
use super::super::gather::{Gather, MessageMemory};
use super::super::job::{self, EngineJob, FinishedJob, JobEngines};
use super::super::outbox::CompletionOutbox;
use super::super::pool::EnginePool;
use super::super::profile::rentable;
use super::super::request;
use super::super::{CLASS, MediumError};
use super::port::AcceleratorPortState;
use super::{
    AcceleratorDescription, AcceleratorPort, Medium, OperationOrder, RefusedDescriptor,
    SubmitOutcome,
};

pub use begin::OrderMemory;
pub use work::LocalWork;

/// Operations of a function before the engines at most: each has the memory that it is about mapped.
pub const MOST: usize = 4096;

/// The kind of what asks for no operation that there is, among operations' numbers.
const REFUSED: u8 = 0;

/// A tenant's part of a device's engines.
#[derive(Debug)]
pub struct Local {
    pub(super) pool: Arc<EnginePool>,
    pub(super) tenant: TenantId,
    pub(super) outbox: Arc<CompletionOutbox>,
    /// Where operations of a front elsewhere are counted; those of the function's own it counts itself.
    pub(super) operations: Operations,
    /// Input bytes of the longest message that the tenant's level lets it send.
    largest: Arc<AtomicU32>,
    /// For operations that the function's own thread does.
    own: OwnEngine,
    contexts: Contexts,
    /// Operations were passed to the engines, and their threads have not wiped what that left.
    left_data: bool,
    /// When the making of a context ended, which failed and is charged; until that is refused.
    charged_until: Option<u64>,
    /// What the last descriptor cost by the profiles, by its operations and the bytes of its input: the next one is mostly
    /// alike.
    costed: Option<(([u8; STAGES], u32), f64)>,
    /// The last descriptor was refused, and the next one may be too.
    refused_last: bool,
    /// What has begun and was not submitted, each with the input bytes of it that are done.
    begun: Vec<(Arc<EngineJob>, usize)>,
    /// Names that were given to operations so far. What an engine has ended may come when its operation was given
    /// up long since, and another user's is under way.
    numbers: u64,
    /// What users before this one have used.
    recorded: Usage,
    /// The front elsewhere that has the engines in the place of this function.
    port: Option<AcceleratorPort>,
    /// What came with a saved state that is to be restored.
    pub(in super::super) files: Vec<OwnedFd>,
    /// What carries the operations of the port that is to be restored.
    session: Option<CarriedSession>,
}

/// What a saved function has beside its operations. What contexts are made of is in memory beside, and behind that
/// are the files of the exchange where there is a port.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalState {
    contexts: Vec<ContextState>,
    port: Option<AcceleratorPortState>,
}

/// How far an operation came.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedLocalWork {
    /// Bytes that are done and are not to be done again.
    done: u32,
    /// One of its contexts is not what its handle names any more.
    orphaned: bool,
}

impl Local {
    /// The part of `tenant`, with its service level if it has one.
    ///
    /// # Errors
    /// [`AcceleratorError`].
    pub fn new(
        pool: &Arc<EnginePool>,
        tenant: TenantId,
        level: Option<&ServiceLevel>,
        operations: Operations,
    ) -> Result<Local, AcceleratorError> {
        pool.start()?;
        // One that is held is given back by whoever holds it.
        if level.is_some() || !pool.is_held(tenant) {
            pool.set_level(tenant, level)?;
        }
        Ok(Local {
            pool: pool.clone(),
            tenant,
            outbox: Arc::new(CompletionOutbox::new()?),
            operations,
            largest: pool.largest(tenant),
            own: OwnEngine::default(),
            contexts: Contexts::default(),
            left_data: false,
            charged_until: None,
            costed: None,
            refused_last: false,
            begun: Vec::new(),
            numbers: 0,
            recorded: Usage::default(),
            port: None,
            files: Vec::new(),
            session: None,
        })
    }

    /// Whether one of the contexts of work is not what its handle names any more.
    pub(super) fn is_orphaned(&self, work: &LocalWork) -> bool {
        let same = |(handle, used): &(u16, _)| {
            self.contexts.get(*handle).is_some_and(|context| Arc::ptr_eq(&context, used))
        };
        !work.contexts.iter().all(same)
    }

    /// Memory is there again for work that released it. Where an engine gave it up meanwhile, it is to be submitted.
    pub(super) fn resume(&mut self, work: &LocalWork, memory: (Gather, Gather)) {
        if let Some(done) = work.job.take_up(memory) {
            self.begun.push((work.job.clone(), done));
        }
    }

    /// Wipes all contexts, and gives up what was passed to the engines.
    pub(super) fn clear(&mut self) {
        self.own.release(&self.pool);
        self.begun.clear();
        self.pool.clear(self.tenant);
        drop(self.outbox.take());
        self.contexts.clear();
        let before = thread_ns();
        self.own.scrub();
        wipe_stack();
        let each_ns = thread_ns().saturating_sub(before);
        if std::mem::take(&mut self.left_data) {
            // Each engine takes about as long as this thread, and none is kept from others more often than this tenant
            // had turns.
            self.pool.wipe();
            self.pool.charge(self.tenant, each_ns * u64::from(self.pool.options().workers));
        }
    }

    /// With the port, which is taken away meanwhile.
    fn with_port<T>(
        &mut self,
        use_it: impl FnOnce(&mut AcceleratorPort, &mut Local) -> T,
    ) -> Option<T> {
        let mut port = self.port.take()?;
        let outcome = use_it(&mut port, self);
        self.port = Some(port);
        Some(outcome)
    }
}

impl Medium for Local {
    type Work = LocalWork;
    type SavedWork = SavedLocalWork;
    type Saved = LocalState;

    fn operations(&self) -> u64 {
        rentable().fold(0, |bits, operation| bits | 1 << operation as u8)
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn room(&self, under_way: usize) -> usize {
        MOST.saturating_sub(under_way)
    }

    fn begin(
        &mut self,
        dma: &DmaSpace,
        order: &OperationOrder<'_>,
        taken: u64,
    ) -> Result<SubmitOutcome<LocalWork>, OperationStatus> {
        self.begin_first(order, OrderMemory::Mapped(dma), taken)
    }

    fn may_create(&mut self) -> bool {
        !self.pool.owes(self.tenant)
    }

    fn refuse(
        &mut self,
        refused: RefusedDescriptor,
        status: OperationStatus,
    ) -> SubmitOutcome<LocalWork> {
        let RefusedDescriptor { number, begun } = refused;
        self.refused_last = true;
        let begun = self.charged_until.take().unwrap_or(begun);
        let memory = <(Gather, Gather)>::default();
        if self.begun.is_empty() {
            let (kind, profile_ns) = (REFUSED, 0.0);
            let short = ShortOperation { number, kind, profile_ns, begun };
            let outcome = self.own.run((&self.pool, self.tenant), short, &memory, |_| Err(status));
            if let Attempt::Ended(finished, time) = outcome {
                return SubmitOutcome::Ended(finished, time);
            }
        }
        // It waits for its turn like any operation; what it took until now is charged at once.
        self.pool.charge_ticks(self.tenant, ticks::now().wrapping_sub(begun));
        let engines = JobEngines::Waiting(Box::new(move |_| Err(status)), 0);
        let input = job::JobInput { number, kind: REFUSED, profile_ns: 0.0, engines, memory };
        let job = Arc::new(EngineJob::new(input, self.outbox.clone()));
        self.begun.push((job.clone(), 0));
        SubmitOutcome::Work(LocalWork { job, refused: Some(status), contexts: Vec::new() })
    }

    fn refused(&self, work: &LocalWork) -> Option<OperationStatus> {
        work.refused()
    }

    fn submit(&mut self, queue: u16) {
        self.own.release(&self.pool);
        let jobs = std::mem::take(&mut self.begun);
        self.pool.submit(self.tenant, queue, jobs);
    }

    fn take_finished(&mut self, _dma: &DmaSpace) -> Vec<FinishedJob> {
        self.outbox.take()
    }

    fn release_memory(&mut self, work: &LocalWork) {
        work.release_memory();
    }

    fn take_up(
        &mut self,
        dma: &DmaSpace,
        (queue, descriptor): (u16, &Descriptor),
        work: &LocalWork,
    ) -> Result<(), OperationStatus> {
        if !work.job.is_memory_released() {
            return Ok(());
        }
        let (input, output) = request::memory_again(dma, descriptor)?;
        // A list that has changed meanwhile is not what was begun.
        if input.len() != work.job.input_length || output.len() != work.job.output_length {
            return Err(OperationStatus::InvalidField);
        }
        self.resume(work, (input, output));
        self.submit(queue);
        Ok(())
    }

    fn cancel(&mut self, work: &LocalWork) {
        work.cancel();
    }

    fn forget_given_up(&mut self) {
        self.pool.forget_given_up(self.tenant);
    }

    fn stop(&mut self) {
        if let Some(mut port) = self.port.take() {
            port.end();
        }
        self.clear();
    }

    fn sleep(&mut self) -> bool {
        let quiet = self.with_port(|port, _| port.rest()).unwrap_or(true);
        self.outbox.sleep() && quiet
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.port.as_ref().map_or(self.outbox.event().as_fd(), AcceleratorPort::wake_fd))
    }

    fn scrub(&mut self) {
        self.own.scrub();
        let usage = self.pool.usage(self.tenant).unwrap_or_default();
        let before = std::mem::replace(&mut self.recorded, usage);
        if usage.operations == before.operations {
            return;
        }
        let level = self.pool.level(self.tenant).map(|level| level.to_string());
        tracing::info!(
            level = level.as_deref().unwrap_or("none"),
            operations = usage.operations - before.operations,
            ingress = usage.ingress - before.ingress,
            egress = usage.egress - before.egress,
            engine_ns = usage.engine_ns - before.engine_ns,
            throttled_ns = usage.throttled_ns - before.throttled_ns,
            "the user of an accelerator has released it"
        );
    }

    fn offer(
        &mut self,
        serial: u64,
        carried: Option<Carried>,
    ) -> Result<MediumOffer, MediumRefused> {
        if self.port.is_some() {
            return Err(MediumRefused::InUse);
        }
        let description = AcceleratorDescription { serial, operations: self.operations() };
        let description = serde_json::to_string(&description).unwrap_or_default();
        let event = self.outbox.event().as_fd();
        let (port, handles) = match carried {
            None => AcceleratorPort::new(event).map(|(port, it)| (port, it.into()))?,
            Some(carried) => (AcceleratorPort::carried(carried, event)?, Handles::new()),
        };
        self.port = Some(port);
        Ok(MediumOffer { class: CLASS, description, handles })
    }

    fn serve(&mut self, bus: &Bus<'_>) -> Option<Polled> {
        self.with_port(|port, local| port.poll(local, bus))
    }

    fn serves_elsewhere(&self) -> bool {
        self.port.is_some()
    }

    fn carried_by(&mut self, session: CarriedSession) {
        self.session = Some(session);
    }

    fn save(&mut self, bus: &Bus<'_>) -> std::io::Result<(LocalState, Vec<OwnedFd>)> {
        let (contexts, memory) = self.contexts.save()?;
        let mut files = vec![memory];
        let port = self.with_port(|port, local| port.save(local, bus)).transpose()?;
        let port = port.map(|(port, exchange)| {
            files.extend(exchange);
            port
        });
        Ok((LocalState { contexts, port }, files))
    }

    fn take_back(&mut self) {
        self.with_port(AcceleratorPort::take_back);
    }

    fn save_work(&self, order: &OperationOrder<'_>, work: &LocalWork) -> SavedLocalWork {
        let done = if order.plan.keeps_length() { work.job.written() as u32 } else { 0 };
        SavedLocalWork { done, orphaned: self.is_orphaned(work) }
    }

    fn restore(&mut self, bus: &Bus<'_>, saved: &LocalState) -> Result<(), MediumError> {
        let mut files = std::mem::take(&mut self.files).into_iter();
        let memory = files.next().ok_or(MediumError("no memory with contexts came with it"))?;
        self.contexts = Contexts::restore(&saved.contexts, memory).map_err(MediumError)?;
        let Some(state) = &saved.port else { return Ok(()) };
        let end = InheritedEnd { files: files.collect(), session: self.session.take() };
        let port = AcceleratorPort::resume(end, self, state, bus);
        self.port = Some(port.map_err(|error| {
            tracing::error!(%error, "the connection of an accelerator's front on another node is lost");
            MediumError("the exchange with a front elsewhere")
        })?);
        Ok(())
    }

    fn check_saved(
        &self,
        order: &OperationOrder<'_>,
        saved: &SavedLocalWork,
    ) -> Result<(), MediumError> {
        let require = |holds, what| if holds { Ok(()) } else { Err(MediumError(what)) };
        let first = order.plan.operations()[0];
        let of_contexts =
            matches!(first, Operation::CreateContext | Operation::DestroyContext | Operation::Wait);
        require(!of_contexts, "a descriptor that is never under way")?;
        let keeps = saved.done == 0 || order.plan.keeps_length();
        require(keeps, "a descriptor that is done in part")?;
        require(saved.done <= order.descriptor.input_length, "a descriptor that is more than done")
    }

    fn begin_again(
        &mut self,
        dma: &DmaSpace,
        order: &OperationOrder<'_>,
        saved: &SavedLocalWork,
    ) -> Result<SubmitOutcome<LocalWork>, OperationStatus> {
        if saved.orphaned {
            return Err(OperationStatus::InvalidContext);
        }
        self.start(order, OrderMemory::Mapped(dma), (saved.done as usize, ticks::now()))
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.stop();
        self.pool.leave(self.tenant);
    }
}
