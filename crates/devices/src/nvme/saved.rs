//! The drive's state as a value: taken by [`Function::save`], put back by [`Function::restore`].
//!
//! Everything that the host could tell the difference by is in it. What is left out begins anew:
//! credit of the arbiter, how long a queue was out of reach, how long an interrupt was put off.
//!
//! # Commands in flight
//!
//! A command is *in flight* from when it was fetched until its completion was posted. Those that
//! wait for the medium are part of the value and are done again; the life that was saved posts
//! nothing any more, so each completes once. That a command was carried out in part, or wholly,
//! before it is done again must not show:
//!
//! * Read, Compare, Verify: are executed again from the submission queue entry. They change nothing
//!   but the host's buffer, which is the controller's until the completion. What they give is what
//!   the blocks hold between submission and completion, as usual.
//! * Write: is executed again. The same data goes to the same place, and the host's buffer may not
//!   change before the completion. A command that overlaps it and was submitted before it completed
//!   has no order with it (NVM command set, 6.3: none between commands), done once or twice.
//! * A write with FUA that has moved its data and waits for its batch (`Durability`): the host's
//!   memory may be gone by then. A flush takes its place, or the error that it ended with.
//! * Write Zeroes, Dataset Management, and flushes, also that of a FUA read, of the write cache
//!   turned off and of a shutdown: hold nothing of the host any more. Their steps are written down,
//!   from the one that was under way on, and the host's list of ranges is not read again.
//! * Deletion of a submission queue: waits for the commands of the queue, in the next life as well.
//! * Asynchronous Event Requests and their Aborts: are lists of identifiers, taken over as they are.
//!   All other commands end in the same poll that fetches them, so none of them is ever in flight.
//!
//! Two things have to hold, or a command is done again too late, over what came after it: nothing
//! of the old life may be under way with the medium when the next one begins (a file's lock is
//! given back when the last operation on the file has ended, and a file is opened under its lock);
//! and a value is restored once.
//!
//! # A front and its medium
//!
//! A drive whose front is elsewhere has no commands; what the front asked for and did not get an answer to
//! is done again from the exchange (`DrivePortState`): its data is in the front's place, which the front leaves
//! alone until the answer. A front that is saved leaves operations at the other node. Whoever goes on waits
//! for their answers before it asks for anything: an old write that was still under way would change what a
//! new one wrote. How far the rings of the exchange were read is in its memory; a peer that changes that
//! harms itself alone, since every message is checked as usual.
//!
//! # What was acknowledged
//!
//! An acknowledged write is in the page cache, which outlives the process. A flush of the next life
//! asks the system anew: nothing is known to be durable at its beginning. But the system reports
//! data that it could not write back once for an open file, and the report may have gone to a flush
//! that was in flight: nobody heard of it, and the flush done again would succeed. So the file is
//! open a second time, as a *witness* that no operation uses: its report is still to come. It is
//! handed over, and asked before the next life begins; a drive whose medium had failed, or whose
//! witness says so, acknowledges no flush until it is scrubbed (`Backing::reload`).

use std::os::fd::OwnedFd;

use rackbus_memory::DmaSpace;
use rackbus_pci::{Bus, Mode, ModelState, RestoreError, SaveError};
use rackbus_spec::nvme::{IoOpcode, Sqe, Status};
use serde::{Deserialize, Serialize};
use zerocopy::transmute;

use super::backing::{self, MediumRequest};
use super::buffer::MemoryBuffer;
use super::config::{NvmeConfig, NvmeError};
use super::controller::{CommandOutcome, Nvme, REGION_TROUBLE};
use super::events::Events;
use super::features::Features;
use super::jobs::{
    ADMIN_LIMIT, COMPARISON_WEIGHT, Finish, JobRestart, JobState, JobStep, Owner, WEIGHT_LIMIT,
};
use super::logs::LogState;
use super::medium::{CLASS, DriveDescription, DrivePort, DrivePortState};
use super::persistent::PersistentRegion;
use super::queue::{CompletionQueue, CompletionState, SubmissionState};
use super::registers::NvmeRegisters;
use super::state::{ControllerState, HeldCompletion};

#[cfg(doc)]
use rackbus_pci::Function;

/// The version of [`DriveState`]. Since version 2 it has what goes on between a front and its medium.
pub const VERSION: u32 = 2;

/// Descriptors of a persistent memory region: of its file, and of what keeps that for one process.
const REGION_FILES: usize = 2;

/// A submission queue entry, or an entry of the error log, as numbers.
pub type Words = [u32; 16];

/// Bit fields as their number.
pub mod bits {
    use serde::{Deserialize, Deserializer, Serializer};

    /// Serializes a register as its number.
    pub fn serialize<T: Copy + Into<u32>, S: Serializer>(
        value: &T,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_u32((*value).into())
    }

    /// Makes a register from its number.
    pub fn deserialize<'de, T: From<u32>, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
        u32::deserialize(from).map(T::from)
    }
}

/// Whether a value is left out: states of drives without a region are as they were before there were any.
pub fn is_unset<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A completion that waits for its queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HeldState {
    qid: u16,
    cid: u16,
    status: u16,
    dw0: u32,
}

/// Everything that a drive's front is made of when it continues in another process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriveState {
    /// Which drive it is.
    drive: DriveDescription,
    /// Its medium failed to make data durable.
    failed: bool,
    /// Its persistent memory region did.
    #[serde(default, skip_serializing_if = "is_unset")]
    region_failed: bool,
    registers: NvmeRegisters,
    features: Features,
    logs: LogState,
    events: Events,
    /// Vectors that are to be raised, a bit each.
    vectors: u32,
    cqs: Vec<CompletionState>,
    /// In the order in which they were created.
    sqs: Vec<SubmissionState>,
    /// Addresses of the pages of shadow doorbells.
    shadow: Option<[u64; 2]>,
    held: Vec<HeldState>,
    pin: bool,
    mode: Mode,
    jobs: Vec<JobState>,
    /// Of a front: operations that the node with the medium still does.
    #[serde(default)]
    under_way_elsewhere: Vec<u32>,
    /// Of a drive whose front is elsewhere.
    #[serde(default)]
    port: Option<DrivePortState>,
}

fn invalid(what: impl Into<String>) -> RestoreError {
    RestoreError::Invalid(what.into())
}

/// Checks what a saved state says.
pub fn require(holds: bool, what: &str) -> Result<(), RestoreError> {
    if holds { Ok(()) } else { Err(invalid(what)) }
}

/// Base addresses of queues and shadow pages are those of pages.
pub fn require_page(address: u64) -> Result<(), RestoreError> {
    require(address.is_multiple_of(4096), "an address is not that of a page")
}

impl DriveState {
    /// The controller's state; its memory is looked up in `dma`.
    fn build(
        self,
        dma: &DmaSpace,
        now_ns: u64,
    ) -> Result<(ControllerState, Vec<JobState>), RestoreError> {
        self.features.check()?;
        self.events.check()?;
        let mut state = ControllerState::new(now_ns);
        state.registers = self.registers;
        state.features = self.features;
        state.events = self.events;
        state.logs = self.logs.restore(now_ns)?;
        state.pin = self.pin;
        state.mode = self.mode;
        state.shadow = match self.shadow {
            Some([values, events]) => Some(super::admin::shadow_pages(dma, values, events)?),
            None => None,
        };
        for saved in self.cqs {
            let slot = state.cqs.get_mut(usize::from(saved.id));
            let slot = slot.filter(|slot| slot.is_none());
            *slot.ok_or_else(|| invalid("a completion queue"))? = Some(saved.restore(dma)?);
        }
        for saved in self.sqs {
            require(usize::from(saved.id) < state.sqs.len(), "a submission queue")?;
            require(state.sq(saved.id).is_none(), "two submission queues are the same")?;
            require(state.cq(saved.cqid).is_some(), "a submission queue without completions")?;
            let queue = saved.restore(dma)?;
            if queue.deletion.is_some() {
                require(queue.id > 0 && state.cq(0).is_some(), "the deletion of a queue")?;
                state.cqs[0].iter_mut().for_each(CompletionQueue::reserve);
            }
            state.add_sq(queue);
        }
        require(self.held.len() <= HELD_LIMIT, "too many completions wait")?;
        for held in self.held {
            let cqid = state.sq(held.qid).map(|queue| queue.cqid);
            let cqid = cqid.ok_or_else(|| invalid("a completion of no queue"))?;
            state.cqs[usize::from(cqid)].iter_mut().for_each(CompletionQueue::reserve);
            let HeldState { qid, cid, status, dw0 } = held;
            state.held.push(HeldCompletion { qid, cid, status: Status(status), dw0 });
        }
        for vector in (0..32).filter(|vector| self.vectors & 1 << vector != 0) {
            // At once: how long they were put off is not known.
            state.vectors.posted(vector, now_ns, true);
        }
        // Reachable or not, as of now.
        state.resolve(dma);
        Ok((state, self.jobs))
    }

    /// Whether the commands in flight can be: of queues there are, within the drive, no more than
    /// are taken at a time.
    fn check_jobs(&self) -> Result<(), RestoreError> {
        let mut weight = 0;
        for job in &self.jobs {
            weight += match job.owner() {
                Owner::Shutdown => 1,
                Owner::Command(qid, sqe) => {
                    require(self.sqs.iter().any(|queue| queue.id == qid), "a command of no queue")?;
                    let compares = sqe.cdw0.opcode() == IoOpcode::Compare as u8;
                    if compares { COMPARISON_WEIGHT } else { 1 }
                }
            };
            match &job.again {
                // Those of the admin queue that move data end when they are taken.
                JobRestart::Command => require(job.queue.is_some_and(|qid| qid > 0), "a command")?,
                JobRestart::Ended(_) => {}
                JobRestart::Steps { steps, .. } => {
                    require(steps.len() <= STEPS_LIMIT, "a command of too many steps")?;
                    let size = self.drive.size;
                    require(steps.iter().all(|step| step.is_within(size)), "a range")?;
                }
            }
        }
        let most = WEIGHT_LIMIT + COMPARISON_WEIGHT + ADMIN_LIMIT;
        require(weight < most, "too many commands in flight")
    }
}

/// How commands end whose data did not become durable.
const NOT_DURABLE: u16 = Status::WRITE_FAULT.do_not_retry().0;
/// Completions that can wait: an entry is free for each.
const HELD_LIMIT: usize = 32 * super::registers::MAX_QUEUE_ENTRIES as usize;
/// The ranges of a Dataset Management command and a flush.
const STEPS_LIMIT: usize = rackbus_spec::nvme::data::DSM_MAX_RANGES + 1;

impl Nvme {
    /// Makes the drive that `config` describes, to continue from a saved state with the descriptors of
    /// its medium. Nothing else differs from [`new`](Nvme::new); [`Function::restore`] follows.
    ///
    /// # Errors
    /// As [`new`](Nvme::new).
    pub fn resume(config: &NvmeConfig, medium: Vec<OwnedFd>) -> Result<Nvme, NvmeError> {
        config.check()?;
        let mut own = medium;
        let mut buffer = own.split_off(backing::descriptor_count(config).min(own.len()));
        let mut region = buffer.split_off(usize::from(config.buffer > 0).min(buffer.len()));
        let files = if config.persistent > 0 { REGION_FILES } else { 0 };
        let exchange = region.split_off(files.min(region.len()));
        let backing = backing::open_again(config, own)?;
        let buffer = match (config.buffer, buffer.pop()) {
            (0, _) => None,
            (size, None) => Some(MemoryBuffer::new(size)?),
            (size, Some(file)) => Some(MemoryBuffer::again(file, size)?),
        };
        let region = match &config.persistent_file {
            Some(path) if config.persistent > 0 => {
                Some(PersistentRegion::again(path, config.persistent, region)?)
            }
            _ => None,
        };
        let mut drive = Nvme::with_memory(config, backing, buffer, region)?;
        drive.left.files = exchange;
        Ok(drive)
    }

    /// Makes a value of the controller's state: [`Function::save`] for a drive.
    pub(super) fn take_state(
        &mut self,
        bus: &Bus<'_>,
    ) -> Result<(ModelState, Vec<OwnedFd>), SaveError> {
        // What has ended is answered here, so that less is done again.
        if self.port.is_none() {
            self.reap(bus, false);
        }
        let mut medium = self.backing.descriptors()?;
        if let Some(buffer) = &self.buffer {
            medium.push(buffer.descriptor()?);
        }
        if let Some(region) = &self.region {
            medium.extend(region.files()?);
        }
        let port = match &mut self.port {
            Some(port) => Some(port.save(&mut *self.backing)?),
            None => None,
        };
        let (port, lost) = match port {
            Some((port, exchange, lost)) => {
                medium.extend(exchange);
                (Some(port), lost)
            }
            None => (None, false),
        };
        let background = self.backing.background();
        let outcome = |tag| background.as_ref().and_then(|background| background.outcome(tag));
        let jobs = self.state.jobs.save(outcome);
        let unheard = |job: &JobState| job.again == JobRestart::Ended(NOT_DURABLE);
        let failed = self.backing.has_failed() || lost || jobs.iter().any(unheard);
        let state = &self.state;
        let held = state.held.iter().map(|held| {
            let HeldCompletion { qid, cid, status, dw0 } = *held;
            HeldState { qid, cid, status: status.0, dw0 }
        });
        let queues = (0..state.active_count()).filter_map(|index| state.sq(state.active(index)?));
        let value = DriveState {
            drive: self.description(),
            failed,
            region_failed: self.region.as_ref().is_some_and(PersistentRegion::has_failed),
            registers: state.registers.clone(),
            features: state.features.clone(),
            logs: state.logs.save(bus.now_ns),
            events: state.events.clone(),
            vectors: state.vectors.waiting(),
            cqs: state.cqs.iter().flatten().map(|queue| queue.save()).collect(),
            sqs: queues.map(|queue| queue.save()).collect(),
            shadow: state.shadow.as_ref().map(|pages| pages.addresses()),
            held: held.collect(),
            pin: state.pin,
            mode: state.mode,
            jobs,
            under_way_elsewhere: self.backing.under_way_elsewhere(),
            port,
        };
        Ok((ModelState::new(CLASS, VERSION, &value)?, medium))
    }

    /// Goes on with a saved controller's state: [`Function::restore`] for a drive.
    pub(super) fn put_state(
        &mut self,
        bus: &Bus<'_>,
        model: &ModelState,
    ) -> Result<(), RestoreError> {
        let saved: DriveState = model.read(CLASS, VERSION)?;
        let here = self.description();
        if saved.drive != here {
            return Err(RestoreError::Different(format!(
                "of drive {:?} with {} bytes, this is {:?} with {}",
                saved.drive.serial, saved.drive.size, here.serial, here.size
            )));
        }
        saved.check_jobs()?;
        // How long commands took before is not known.
        self.counts.begin(bus.user.ticks());
        let failed = saved.failed;
        require(self.backing.expect(&saved.under_way_elsewhere), "what is under way elsewhere")?;
        let (port, region_failed) = (saved.port.clone(), saved.region_failed);
        if let (true, Some(region)) = (region_failed, &mut self.region) {
            region.inherit_failure();
            self.backing.health().fail(REGION_TROUBLE);
        }
        let (state, jobs) = saved.build(bus.dma, bus.now_ns)?;
        self.state = state;
        self.place_memory();
        match (failed, self.backing.has_failed()) {
            (true, _) => self.backing.inherit_failure(),
            // The host has not heard of it.
            (false, true) => self.check_health(),
            (false, false) => {}
        }
        if region_failed {
            // Whether the host has heard of it is not known: nobody may have asked before.
            self.check_health();
        }
        if let Some(port) = port {
            let end = std::mem::take(&mut self.left);
            let block = self.block();
            let resumed = DrivePort::resume(&mut *self.backing, block, end, &port);
            self.port = Some(resumed.map_err(|error| invalid(error.to_string()))?);
        }
        for job in jobs {
            self.do_again(bus, job);
        }
        self.counts.end(bus.user.ticks());
        self.submit();
        // Those whose last command was answered just now.
        for qid in 0..self.state.sqs.len() as u16 {
            self.finish_deletion(bus, qid);
        }
        Ok(())
    }

    /// Does what was in flight again.
    fn do_again(&mut self, bus: &Bus<'_>, job: JobState) {
        let owner = job.owner();
        // It was counted when it was taken.
        let counted = self.state.logs.traffic();
        let outcome = match (owner, job.again) {
            (Owner::Command(qid, sqe), JobRestart::Command) => self.io(bus, qid, &sqe),
            // Refused by `check_jobs`.
            (Owner::Shutdown, JobRestart::Command) => {
                CommandOutcome::failed(Status::INTERNAL_ERROR)
            }
            (_, JobRestart::Ended(status)) => {
                // It was with others of its batch: the host is told of the failure by this answer first.
                if status == NOT_DURABLE {
                    self.check_health();
                }
                CommandOutcome::failed(Status(status))
            }
            (owner, JobRestart::Steps { steps, cache_off }) => {
                let finish = if cache_off { Finish::CacheOff } else { Finish::Plain };
                let steps = steps.into_iter().map(MediumRequest::from).collect();
                let outcome = self.run(owner, steps, finish);
                if cache_off {
                    self.state.features.set_write_cache(outcome.is_err());
                }
                outcome.unwrap_or_else(CommandOutcome::failed)
            }
        };
        self.state.logs.set_traffic(counted);
        match (outcome, owner) {
            (CommandOutcome::Done(status, _), Owner::Shutdown) => {
                self.shutdown_finished(status.is_success());
            }
            (CommandOutcome::Done(status, dw0), Owner::Command(qid, sqe)) => {
                self.complete(bus, qid, &sqe, status, dw0);
                self.counts.done(qid, &sqe, status.is_success());
            }
            (CommandOutcome::Background, Owner::Command(qid, _)) => self.reserve(qid),
            (CommandOutcome::Background, Owner::Shutdown) | (CommandOutcome::Outstanding, _) => {}
        }
    }
}

/// An entry as numbers.
pub fn words(sqe: &Sqe) -> Words {
    transmute!(*sqe)
}

/// The entry of these numbers.
pub fn sqe(words: Words) -> Sqe {
    transmute!(words)
}

impl From<JobStep> for MediumRequest<Vec<rackbus_memory::PinnedSlice>> {
    fn from(step: JobStep) -> Self {
        match step {
            JobStep::Flush => MediumRequest::Flush,
            JobStep::Zero { offset, length, deallocate } => {
                MediumRequest::Zero { offset, length, deallocate }
            }
        }
    }
}
