//! The controller: enabling, resetting, shutting down (NVM Express base 1.4, sections 3.1.5,
//! 7.3, 7.6), and the loop that takes commands from the queues and posts completions.
//!
//! Everything the host shares is hostile: entries are copied once, every index and address is
//! checked, and what is wrong is answered with a status, an asynchronous event, or, where the
//! queues themselves cannot be reached, with Controller Fatal Status.

mod function;
mod signals;

use std::collections::VecDeque;

use rackbus_memory::{InheritedEnd, PinnedSlice};
use rackbus_pci::{Bar, Bus, FunctionInfo};
use rackbus_spec::nvme::features as fid;
use rackbus_spec::nvme::registers::{SHN_NONE, SHST_COMPLETE, SHST_NORMAL, SHST_OCCURRING};
use rackbus_spec::nvme::{CLASS_CODE, Status};

use super::arbitration::{Arbiter, RoundRobin};
use super::backing::{self, Backing, MediumRequest, RequestResult};
use super::buffer::MemoryBuffer;
use super::config::{NvmeConfig, NvmeError};
use super::identify::{DEVICE_ID, Identity, MAX_TRANSFER, VENDOR_ID};
use super::interrupts::VECTORS;
use super::jobs::{Finish, Owner, Steps};
use super::limits::Meter;
use super::medium::{DriveDescription, DrivePort};
use super::operations::Counts;
use super::persistent::PersistentRegion;
use super::polled::{DoorbellKind, Polled};
use super::queue::{CompletionQueue, SubmissionQueue};
use super::registers::DOORBELL_STRIDE;
use super::state::ControllerState;
use super::transfer::DataPointers;

/// The BAR of registers and doorbells: a page of each, and room to the next power of two.
const BAR_SIZE: u64 = 16 << 10;
/// How long a queue with commands may be out of reach: a hypervisor may take mappings away and
/// put them back, a driver that gave a wrong address will not.
const UNREACHABLE_NS: u64 = 100_000_000;

/// What its health says when the region fails.
pub(super) const REGION_TROUBLE: &str =
    "its persistent memory region may have lost what was stored";

/// The outcome of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CommandOutcome {
    /// It is done, with this status and dword 0.
    Done(Status, u32),
    /// It completes later; an entry of its completion queue is kept for it.
    Background,
    /// It is an event request, which may wait for ever and keeps no entry.
    Outstanding,
}

impl CommandOutcome {
    /// Done without error, with 0 as the completion's dword 0.
    pub(super) const DONE: CommandOutcome = CommandOutcome::Done(Status::SUCCESS, 0);

    /// Done with an error.
    pub(super) fn failed(status: Status) -> CommandOutcome {
        CommandOutcome::Done(status, 0)
    }
}

/// An NVMe controller with one namespace, over a backing.
pub struct Nvme {
    info: FunctionInfo,
    pub(super) identity: Identity,
    pub(super) backing: Box<dyn Backing>,
    pub(super) transfer: DataPointers,
    /// Its memory buffer, if it has one.
    pub(super) buffer: Option<MemoryBuffer>,
    /// Its persistent memory region, if it has one.
    pub(super) region: Option<PersistentRegion>,
    pub(super) state: ControllerState,
    /// Reports of the backing; kept to allocate once.
    pub(super) finished: Vec<RequestResult>,
    /// The next parts of Verify commands, by the tags of their jobs, in the order in which they have their turns.
    pub(super) put_off: VecDeque<(u32, MediumRequest<Vec<PinnedSlice>>)>,
    /// Whose turn it is.
    pub(super) arbiter: Box<dyn Arbiter>,
    /// What its user may do in a second.
    pub(super) meter: Meter,
    /// Bytes that the command being executed is about.
    pub(super) cost: u64,
    /// The commands that it has answered.
    pub(super) counts: Counts,
    /// A front elsewhere has the medium.
    pub(super) port: Option<DrivePort>,
    /// The exchange with a front elsewhere, that an earlier life of the drive had.
    pub(super) left: InheritedEnd,
    /// Its registers as memory, where its user has them so.
    pub(super) polled: Option<Polled>,
    config: NvmeConfig,
}

impl std::fmt::Debug for Nvme {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nvme").field("identity", &self.identity).finish_non_exhaustive()
    }
}

impl Nvme {
    /// Makes the drive that `config` describes.
    ///
    /// # Errors
    /// [`NvmeError`] when the description is wrong or its file or memory cannot be obtained.
    pub fn new(config: &NvmeConfig) -> Result<Nvme, NvmeError> {
        config.check()?;
        let backing = backing::open(config)?;
        Nvme::with_backing(config, backing)
    }

    /// As [`new`](Nvme::new) with a backing made elsewhere.
    ///
    /// # Errors
    /// As [`new`](Nvme::new).
    pub fn with_backing(config: &NvmeConfig, backing: Box<dyn Backing>) -> Result<Nvme, NvmeError> {
        let buffer = match config.buffer {
            0 => None,
            size => Some(MemoryBuffer::new(size)?),
        };
        let region = match (&config.persistent_file, config.persistent) {
            (_, 0) => None,
            (Some(path), size) => Some(PersistentRegion::open(path, size)?),
            (None, _) => return Err(NvmeError::Config("its region has no file".to_owned())),
        };
        Nvme::with_memory(config, backing, buffer, region)
    }

    /// As [`with_backing`](Nvme::with_backing), with this memory of its own.
    pub(super) fn with_memory(
        config: &NvmeConfig,
        backing: Box<dyn Backing>,
        buffer: Option<MemoryBuffer>,
        region: Option<PersistentRegion>,
    ) -> Result<Nvme, NvmeError> {
        config.check()?;
        let identity = Identity::new(config, backing.capacity(), backing.volatile_cache());
        let bar =
            Bar { index: 0, size: BAR_SIZE, is_64bit: true, prefetchable: false, mappable: None };
        let memory = buffer.as_ref().map(MemoryBuffer::bar);
        let memory = memory.into_iter().chain(region.as_ref().map(PersistentRegion::bar));
        let info = FunctionInfo {
            vendor_id: VENDOR_ID,
            device_id: DEVICE_ID,
            subsystem_vendor_id: VENDOR_ID,
            subsystem_id: DEVICE_ID,
            revision: 1,
            class: [(CLASS_CODE >> 16) as u8, (CLASS_CODE >> 8) as u8, CLASS_CODE as u8],
            bars: [bar].into_iter().chain(memory).collect(),
            msix_vectors: VECTORS,
            msi_vectors: VECTORS,
            vendor: Vec::new(),
            serial: identity.pci_serial(),
        };
        let mut drive = Nvme {
            info,
            identity,
            backing,
            transfer: DataPointers::new(MAX_TRANSFER)?,
            buffer,
            region,
            state: ControllerState::new(0),
            finished: Vec::new(),
            put_off: VecDeque::new(),
            arbiter: Box::new(RoundRobin::default()),
            meter: Meter::new(config.limits, config.delays.clone()),
            cost: 0,
            counts: Counts::new(config.block_size),
            port: None,
            left: InheritedEnd::default(),
            polled: None,
            config: config.clone(),
        };
        drive.place_memory();
        Ok(drive)
    }

    /// The drive goes to somebody else, who finds an empty buffer, and the region as it was.
    fn renew_memory(&mut self) {
        if let Some(Err(error)) = self.buffer.as_mut().map(MemoryBuffer::renew) {
            tracing::error!(%error, "the drive goes without its memory buffer, for which there is no memory");
        }
        let Some(region) = &mut self.region else { return };
        let had_failed = region.has_failed();
        match region.renew() {
            Err(error) => {
                tracing::error!(%error, "the drive goes without its persistent memory region");
                self.backing.health().fail(&format!("{REGION_TROUBLE}: {error}"));
            }
            Ok(()) if had_failed && !self.backing.has_failed() => self.backing.health().recover(),
            Ok(()) => {}
        }
    }

    /// A driver asks whether what it has stored in the region is durable: it is, or PMRSTS says so.
    fn make_region_durable(&mut self) {
        let Some(region) = &mut self.region else { return };
        if region.fails_to_be_durable() {
            self.backing.health().fail(REGION_TROUBLE);
            self.check_health();
        }
        self.place_memory();
    }

    /// The registers are others, or were written: buffer and region are where they say.
    pub(super) fn place_memory(&mut self) {
        let registers = &mut self.state.registers;
        registers.buffer = self.buffer.as_ref().map_or(0, MemoryBuffer::size);
        registers.region = self.region.as_ref().map(PersistentRegion::shown);
        let (buffer, region) = (registers.buffer_control(), registers.region_control());
        self.transfer.set_windows([
            self.buffer.as_ref().and_then(|memory| memory.window(buffer)),
            self.region.as_ref().and_then(|memory| memory.window(region)),
        ]);
    }

    /// Bytes that offsets and lengths on the medium are multiples of.
    pub(super) fn block(&self) -> u64 {
        self.config.block_size.into()
    }

    /// As it is, with another order of the queues.
    #[cfg(test)]
    pub(super) fn with_arbiter(self, arbiter: Box<dyn Arbiter>) -> Nvme {
        Nvme { arbiter, ..self }
    }

    /// Which drive it is.
    pub(super) fn description(&self) -> DriveDescription {
        DriveDescription {
            size: self.backing.capacity(),
            block_size: self.config.block_size,
            serial: self.config.serial.clone(),
            model: self.config.model.clone(),
            volatile_cache: self.backing.volatile_cache(),
            buffer: self.config.buffer,
            persistent: self.config.persistent,
        }
    }

    /// Whether commands are taken from the queues.
    #[inline]
    fn is_running(&self) -> bool {
        let csts = self.state.registers.csts;
        csts.rdy() && !csts.cfs() && csts.shst() == SHST_NORMAL
    }

    /// Acts on a write to CC (controller configuration, section 3.1.5): enables, resets or shuts down.
    fn configure(&mut self, bus: &Bus<'_>, was_enabled: bool, was_shn: u8) {
        let cc = self.state.registers.cc;
        match (was_enabled, cc.en()) {
            (false, true) => self.enable(bus),
            (true, false) => {
                self.abort_jobs();
                self.state.reset_controller();
                self.state.registers.csts = Default::default();
                self.update_pin(bus);
            }
            _ => {}
        }
        if cc.shn() != SHN_NONE && was_shn == SHN_NONE {
            self.shut_down();
        }
    }

    /// Section 7.6.1: creates the admin queues, or reports that they are impossible.
    fn enable(&mut self, bus: &Bus<'_>) {
        let registers = &self.state.registers;
        if !registers.can_enable() {
            self.fail();
            return;
        }
        let (aqa, asq, acq) = (registers.aqa, registers.asq, registers.acq);
        self.state.generation = bus.dma.generation();
        self.state.cqs[0] = Some(CompletionQueue::new(bus.dma, 0, acq, aqa.acqs() + 1, Some(0)));
        self.state.add_sq(SubmissionQueue::new(bus.dma, 0, 0, asq, aqa.asqs() + 1));
        if let Some(polled) = &mut self.polled {
            polled.begin_queue(0, DoorbellKind::Tail);
            polled.begin_queue(0, DoorbellKind::Head);
        }
        self.state.registers.csts.set_shst(SHST_NORMAL);
        self.state.registers.csts.set_rdy(true);
    }

    /// Section 7.6.2: no further command is taken; those there are end, then what was written
    /// becomes durable.
    fn shut_down(&mut self) {
        self.state.registers.csts.set_shst(SHST_OCCURRING);
        self.advance_shutdown();
    }

    /// Starts the flush of a shutdown when nothing else is under way.
    fn advance_shutdown(&mut self) {
        let occurring = self.state.registers.csts.shst() == SHST_OCCURRING;
        if !occurring || !self.state.jobs.is_empty() || self.state.registers.csts.cfs() {
            return;
        }
        let steps = Steps::from([MediumRequest::Flush]);
        match self.run(Owner::Shutdown, steps, Finish::Plain) {
            Ok(CommandOutcome::Background) => self.submit(),
            result => self.shutdown_finished(result.is_ok()),
        }
    }

    /// The flush of a shutdown has finished. One that failed is never complete.
    pub(super) fn shutdown_finished(&mut self, durable: bool) {
        if self.state.registers.csts.shst() != SHST_OCCURRING {
            return;
        }
        if durable {
            self.state.registers.csts.set_shst(SHST_COMPLETE);
        } else {
            self.fail();
        }
    }

    /// Controller Fatal Status: nothing but a reset helps (section 9.5).
    pub(super) fn fail(&mut self) {
        self.state.registers.csts.set_cfs(true);
    }

    /// A doorbell register was written.
    fn ring(&mut self, bus: &Bus<'_>, offset: u64, value: u32) {
        if !self.state.registers.csts.rdy() {
            return;
        }
        let stride = 4u64 << DOORBELL_STRIDE;
        let index = offset / stride;
        let qid = usize::try_from(index / 2).unwrap_or(usize::MAX);
        let shadow = self.state.shadow.as_ref().and_then(|pages| pages.values.as_ref());
        let bad = match (offset.is_multiple_of(stride), index.is_multiple_of(2)) {
            (false, _) => Some(fid::ERROR_INVALID_DOORBELL),
            (true, true) => match self.state.sqs.get_mut(qid).and_then(Option::as_mut) {
                None => Some(fid::ERROR_INVALID_DOORBELL),
                // The value is in the shadow page; the write only woke us.
                Some(queue) if queue.doorbell.is_shadowed() && shadow.is_some() => None,
                Some(queue) => {
                    (!queue.doorbell.take(value)).then_some(fid::ERROR_INVALID_DOORBELL_VALUE)
                }
            },
            (true, false) => match self.state.cqs.get_mut(qid).and_then(Option::as_mut) {
                None => Some(fid::ERROR_INVALID_DOORBELL),
                Some(queue) if queue.doorbell.is_shadowed() && shadow.is_some() => None,
                Some(queue) if !queue.accepts_head(value) => {
                    Some(fid::ERROR_INVALID_DOORBELL_VALUE)
                }
                Some(queue) => {
                    (!queue.doorbell.take(value)).then_some(fid::ERROR_INVALID_DOORBELL_VALUE)
                }
            },
        };
        if let Some(info) = bad {
            self.state.events.raise(fid::EVENT_ERROR, info);
        }
        self.update_pin(bus);
    }

    /// Sends started work off.
    pub(super) fn submit(&mut self) {
        if let Some(background) = self.backing.background() {
            background.submit();
        }
    }

    /// Gives up what goes on in the background; its commands never complete.
    fn abort_jobs(&mut self) {
        if let Some(background) = self.backing.background() {
            background.abort();
        }
        self.put_off.clear();
        self.state.jobs = Default::default();
    }

    fn refresh_heads(&mut self) {
        for qid in 1..self.state.cqs.len() {
            self.refresh_head(qid as u16);
        }
    }

    /// A queue with commands or completions is out of reach: fatal after a while. Returns when.
    fn check_reach(&mut self, bus: &Bus<'_>) -> Option<u64> {
        let deadline = self.state.unreachable_since()?.saturating_add(UNREACHABLE_NS);
        if bus.now_ns >= deadline {
            self.fail();
            return None;
        }
        Some(deadline)
    }
}
