//! Admin commands (NVM Express base 1.4, section 5).

use rackbus_memory::DmaSpace;
use rackbus_pci::{Bus, RestoreError};
use rackbus_spec::nvme::command::{
    AbortCdw10, AdminOpcode, CreateCqCdw11, CreateSqCdw11, FeaturesCdw10, LogCdw10, PSDT_PRP,
    QueueCdw10,
};
use rackbus_spec::nvme::features as fid;
use rackbus_spec::nvme::{NSID_ALL, Sqe, Status, identify, log};
use zerocopy::IntoBytes;

use super::backing::MediumRequest;
use super::controller::{CommandOutcome, Nvme};
use super::features::{Features, supported};
use super::identify::{MAX_TRANSFER, NSID};
use super::interrupts::VECTORS;
use super::jobs::{Finish, Owner, Steps};
use super::logs;
use super::persistent::PersistentRegion;
use super::polled::DoorbellKind;
use super::queue::{CompletionQueue, SubmissionQueue};
use super::registers::MAX_QUEUE_ENTRIES;
use super::saved::require_page;
use super::shadow::ShadowPages;
use super::transfer::DataDirection;

const INVALID_FIELD: Status = Status::INVALID_FIELD.do_not_retry();
/// Bit 0 of dword 0 of an Abort's completion: the command was not aborted (section 5.1.1).
const NOT_ABORTED: u32 = 1;

impl Nvme {
    /// Executes a command of the admin queue.
    pub(super) fn admin(&mut self, bus: &Bus<'_>, sqe: &Sqe) -> CommandOutcome {
        if sqe.cdw0.fuse() != 0 || sqe.cdw0.psdt() != PSDT_PRP {
            return CommandOutcome::failed(INVALID_FIELD);
        }
        let result = match AdminOpcode::from_u8(sqe.cdw0.opcode()) {
            None => Err(Status::INVALID_OPCODE.do_not_retry()),
            Some(AdminOpcode::AsyncEventRequest) => {
                return match self.state.events.request(sqe.cdw0.cid()) {
                    Ok(()) => CommandOutcome::Outstanding,
                    Err(_) => CommandOutcome::failed(Status::AER_LIMIT_EXCEEDED.do_not_retry()),
                };
            }
            Some(AdminOpcode::Identify) => self.identify(bus, sqe),
            Some(AdminOpcode::CreateCq) => self.create_cq(bus, sqe),
            Some(AdminOpcode::CreateSq) => self.create_sq(bus, sqe),
            Some(AdminOpcode::DeleteCq) => self.delete_cq(bus, sqe),
            Some(AdminOpcode::DeleteSq) => {
                return self.delete_sq(sqe).unwrap_or_else(CommandOutcome::failed);
            }
            Some(AdminOpcode::GetFeatures) => self.get_features(bus, sqe),
            Some(AdminOpcode::SetFeatures) => {
                return self.set_features(bus, sqe).unwrap_or_else(CommandOutcome::failed);
            }
            Some(AdminOpcode::GetLogPage) => self.get_log_page(bus, sqe),
            Some(AdminOpcode::Abort) => self.abort(sqe),
            Some(AdminOpcode::DoorbellBufferConfig) => self.doorbell_buffer_config(bus, sqe),
        };
        match result {
            Ok(dw0) => CommandOutcome::Done(Status::SUCCESS, dw0),
            Err(status) => CommandOutcome::failed(status),
        }
    }

    /// Copies `data` to the host.
    fn send(&mut self, bus: &Bus<'_>, sqe: &Sqe, data: &[u8]) -> Result<(), Status> {
        let page = self.state.registers.page_size();
        self.transfer.parse(bus.dma, sqe, data.len(), page, false, DataDirection::ToHost)?;
        self.transfer.copy_from(bus.dma, data)
    }

    /// Copies `data.len()` bytes from the host.
    fn receive(&mut self, bus: &Bus<'_>, sqe: &Sqe, data: &mut [u8]) -> Result<(), Status> {
        let page = self.state.registers.page_size();
        self.transfer.parse(bus.dma, sqe, data.len(), page, false, DataDirection::FromHost)?;
        self.transfer.copy_to(bus.dma, data)
    }

    /// Identify (section 5.15).
    fn identify(&mut self, bus: &Bus<'_>, sqe: &Sqe) -> Result<u32, Status> {
        let namespace = match sqe.nsid {
            NSID => Ok(()),
            _ => Err(Status::INVALID_NAMESPACE.do_not_retry()),
        };
        let data = match (sqe.cdw10 & 0xff) as u8 {
            identify::CNS_CONTROLLER => self.identity.controller().as_bytes().to_vec(),
            identify::CNS_NAMESPACE => {
                namespace?;
                self.identity.namespace().as_bytes().to_vec()
            }
            identify::CNS_NAMESPACE_DESCRIPTORS => {
                namespace?;
                self.identity.namespace_descriptors()
            }
            identify::CNS_ACTIVE_NAMESPACES => {
                // Section 5.15.2.3: namespaces above the one given; the last two are no start.
                if sqe.nsid >= NSID_ALL - 1 {
                    return Err(Status::INVALID_NAMESPACE.do_not_retry());
                }
                let mut list = vec![0; identify::IDENTIFY_SIZE];
                if sqe.nsid < NSID {
                    list[..4].copy_from_slice(&NSID.to_le_bytes());
                }
                list
            }
            _ => return Err(INVALID_FIELD),
        };
        self.send(bus, sqe, &data)?;
        Ok(0)
    }

    /// The base address and the number of entries of a queue to create.
    fn new_ring(&self, sqe: &Sqe, contiguous: bool) -> Result<(u64, u16), Status> {
        let entries = u32::from(QueueCdw10::from(sqe.cdw10).qsize()) + 1;
        if entries < 2 || entries > u32::from(MAX_QUEUE_ENTRIES) {
            return Err(Status::INVALID_QUEUE_SIZE.do_not_retry());
        }
        // CAP.CQR: queues are contiguous.
        if !contiguous {
            return Err(INVALID_FIELD);
        }
        let base = sqe.dptr[0];
        if !base.is_multiple_of(self.state.registers.page_size()) {
            return Err(Status::PRP_OFFSET_INVALID.do_not_retry());
        }
        Ok((base, entries as u16))
    }

    /// Create I/O Completion Queue (section 5.3).
    fn create_cq(&mut self, bus: &Bus<'_>, sqe: &Sqe) -> Result<u32, Status> {
        let qid = QueueCdw10::from(sqe.cdw10).qid();
        let cdw11 = CreateCqCdw11::from(sqe.cdw11);
        if !self.state.features.grants(qid, true) || self.state.cq(qid).is_some() {
            return Err(Status::INVALID_QUEUE_ID.do_not_retry());
        }
        if self.state.registers.cc.iocqes() != 4 {
            return Err(Status::INVALID_QUEUE_SIZE.do_not_retry());
        }
        let (base, size) = self.new_ring(sqe, cdw11.pc())?;
        if cdw11.iv() >= VECTORS {
            return Err(Status::INVALID_INTERRUPT_VECTOR.do_not_retry());
        }
        let vector = cdw11.ien().then_some(cdw11.iv());
        let mut queue = CompletionQueue::new(bus.dma, qid, base, size, vector);
        if !queue.reachable() {
            return Err(Status::DATA_TRANSFER_ERROR.do_not_retry());
        }
        if let Some(pages) = &self.state.shadow {
            queue.doorbell.attach(cq_slot(qid), pages);
        }
        self.state.cqs[usize::from(qid)] = Some(queue);
        if let Some(polled) = &mut self.polled {
            polled.begin_queue(qid, DoorbellKind::Head);
        }
        Ok(0)
    }

    /// Create I/O Submission Queue (section 5.4).
    fn create_sq(&mut self, bus: &Bus<'_>, sqe: &Sqe) -> Result<u32, Status> {
        let qid = QueueCdw10::from(sqe.cdw10).qid();
        let cdw11 = CreateSqCdw11::from(sqe.cdw11);
        if !self.state.features.grants(qid, false) || self.state.sq(qid).is_some() {
            return Err(Status::INVALID_QUEUE_ID.do_not_retry());
        }
        if self.state.registers.cc.iosqes() != 6 {
            return Err(Status::INVALID_QUEUE_SIZE.do_not_retry());
        }
        let (base, size) = self.new_ring(sqe, cdw11.pc())?;
        let cqid = cdw11.cqid();
        if !self.state.features.grants(cqid, true) {
            return Err(Status::INVALID_QUEUE_ID.do_not_retry());
        }
        if self.state.cq(cqid).is_none() {
            return Err(Status::COMPLETION_QUEUE_INVALID.do_not_retry());
        }
        let mut queue = SubmissionQueue::new(bus.dma, qid, cqid, base, size);
        if !queue.reachable() {
            return Err(Status::DATA_TRANSFER_ERROR.do_not_retry());
        }
        if let Some(pages) = &self.state.shadow {
            queue.doorbell.attach(sq_slot(qid), pages);
        }
        self.state.add_sq(queue);
        if let Some(polled) = &mut self.polled {
            polled.begin_queue(qid, DoorbellKind::Tail);
        }
        Ok(0)
    }

    /// Delete I/O Completion Queue (section 5.5).
    fn delete_cq(&mut self, bus: &Bus<'_>, sqe: &Sqe) -> Result<u32, Status> {
        let qid = QueueCdw10::from(sqe.cdw10).qid();
        match self.state.cq(qid) {
            Some(queue) if qid != 0 => {
                if queue.users > 0 {
                    return Err(Status::INVALID_QUEUE_DELETION.do_not_retry());
                }
            }
            _ => return Err(Status::INVALID_QUEUE_ID.do_not_retry()),
        }
        self.state.cqs[usize::from(qid)] = None;
        self.update_pin(bus);
        Ok(0)
    }

    /// Delete I/O Submission Queue (section 5.6). No further command is fetched from it; what was
    /// fetched completes first, also where its completion queue is out of reach now.
    fn delete_sq(&mut self, sqe: &Sqe) -> Result<CommandOutcome, Status> {
        let qid = QueueCdw10::from(sqe.cdw10).qid();
        let queue = self.state.sqs.get_mut(usize::from(qid)).and_then(Option::as_mut);
        let queue = queue.filter(|queue| qid != 0 && queue.deletion.is_none());
        let queue = queue.ok_or(Status::INVALID_QUEUE_ID.do_not_retry())?;
        if self.state.jobs.any_of(qid) || self.state.held.iter().any(|held| held.qid == qid) {
            queue.deletion = Some(*sqe);
            return Ok(CommandOutcome::Background);
        }
        self.state.remove_sq(qid);
        Ok(CommandOutcome::DONE)
    }

    /// Ends the deletion of submission queue `qid` if it was asked for and nothing of it is left.
    pub(super) fn finish_deletion(&mut self, bus: &Bus<'_>, qid: u16) {
        let deletion = self.state.sq(qid).and_then(|queue| queue.deletion);
        if let Some(sqe) = deletion
            && !self.state.jobs.any_of(qid)
            && !self.state.held.iter().any(|held| held.qid == qid)
        {
            self.state.remove_sq(qid);
            self.release(0);
            self.complete(bus, 0, &sqe, Status::SUCCESS, 0);
        }
    }

    /// Get Features (section 5.13).
    fn get_features(&mut self, bus: &Bus<'_>, sqe: &Sqe) -> Result<u32, Status> {
        let cdw10 = FeaturesCdw10::from(sqe.cdw10);
        let capabilities =
            supported(cdw10.fid(), self.identity.volatile_cache).ok_or(INVALID_FIELD)?;
        let defaults = Features::default();
        let features = match cdw10.sel() {
            fid::SELECT_CURRENT => &self.state.features,
            fid::SELECT_DEFAULT | fid::SELECT_SAVED => &defaults,
            fid::SELECT_SUPPORTED => return Ok(capabilities.into()),
            _ => return Err(INVALID_FIELD),
        };
        if capabilities.namespace_specific() && sqe.nsid != NSID && sqe.nsid != NSID_ALL {
            return Err(Status::INVALID_NAMESPACE.do_not_retry());
        }
        if cdw10.fid() != fid::HOST_IDENTIFIER {
            return features.get(cdw10.fid(), sqe.cdw11);
        }
        let id = features.host_id();
        self.send(bus, sqe, &id[..host_id_length(sqe)])?;
        Ok(0)
    }

    /// Set Features (section 5.21).
    fn set_features(&mut self, bus: &Bus<'_>, sqe: &Sqe) -> Result<CommandOutcome, Status> {
        let cdw10 = FeaturesCdw10::from(sqe.cdw10);
        let capabilities =
            supported(cdw10.fid(), self.identity.volatile_cache).ok_or(INVALID_FIELD)?;
        if cdw10.sv() {
            return Err(Status::FEATURE_NOT_SAVEABLE.do_not_retry());
        }
        match sqe.nsid {
            0 | NSID_ALL => {}
            NSID if capabilities.namespace_specific() => {}
            NSID => return Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC.do_not_retry()),
            _ => return Err(Status::INVALID_NAMESPACE.do_not_retry()),
        }
        match cdw10.fid() {
            fid::HOST_IDENTIFIER => {
                let mut id = [0; 16];
                self.receive(bus, sqe, &mut id[..host_id_length(sqe)])?;
                self.state.features.set_host_id(id);
                Ok(CommandOutcome::DONE)
            }
            // Section 5.21.1.6: what the cache holds must not be lost with it. Off from here on, so that nothing comes
            // into it after the flush has begun; what is under way follows when it is done.
            fid::VOLATILE_WRITE_CACHE if sqe.cdw11 & 1 == 0 => {
                let was_on = self.state.features.write_cache();
                let finish = if was_on { Finish::CacheOff } else { Finish::Plain };
                self.state.features.set_write_cache(false);
                self.state.jobs.flush_what_is_written();
                let steps = Steps::from([MediumRequest::Flush]);
                let outcome = self.run(Owner::Command(0, *sqe), steps, finish);
                if outcome.is_err() {
                    self.state.features.set_write_cache(was_on);
                }
                outcome
            }
            // Section 5.21.1.7: only before the first queue is created.
            fid::NUMBER_OF_QUEUES if self.state.has_io_queues() => {
                Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry())
            }
            feature => {
                let dw0 = self.state.features.set(feature, sqe.cdw11)?;
                self.check_health();
                Ok(CommandOutcome::Done(Status::SUCCESS, dw0))
            }
        }
    }

    /// Get Log Page (section 5.14).
    fn get_log_page(&mut self, bus: &Bus<'_>, sqe: &Sqe) -> Result<u32, Status> {
        let cdw10 = LogCdw10::from(sqe.cdw10);
        let page = match cdw10.lid() {
            log::ERROR_INFORMATION => self.state.logs.error_information(),
            log::SMART_HEALTH => {
                let warning = self.critical_warning();
                self.state.logs.smart_health(bus.now_ns, warning).as_bytes().to_vec()
            }
            log::FIRMWARE_SLOT => logs::firmware_slot(self.identity.firmware()).as_bytes().to_vec(),
            log::COMMANDS_SUPPORTED => logs::commands_supported().as_bytes().to_vec(),
            _ => return Err(Status::INVALID_LOG_PAGE.do_not_retry()),
        };
        let dwords = u64::from(cdw10.numdl()) | u64::from(sqe.cdw11 & 0xffff) << 16;
        let length = (dwords + 1) * 4;
        let offset = u64::from(sqe.cdw12) | u64::from(sqe.cdw13) << 32;
        // LPA bit 2: offsets are in bytes, dword aligned, and not beyond the page.
        if length > MAX_TRANSFER || !offset.is_multiple_of(4) || offset > page.len() as u64 {
            return Err(INVALID_FIELD);
        }
        let mut data = page[offset as usize..].to_vec();
        data.resize(length as usize, 0);
        self.send(bus, sqe, &data)?;
        if !cdw10.rae() {
            self.state.events.log_was_read(cdw10.lid());
            self.check_health();
        }
        Ok(0)
    }

    /// Abort (section 5.1). What was fetched is executed already or with the backing, so only
    /// Asynchronous Event Requests can be aborted.
    fn abort(&mut self, sqe: &Sqe) -> Result<u32, Status> {
        let cdw10 = AbortCdw10::from(sqe.cdw10);
        if self.state.sq(cdw10.sqid()).is_none() {
            return Err(INVALID_FIELD);
        }
        let aborted = cdw10.sqid() == 0 && self.state.events.abort(cdw10.cid());
        Ok(if aborted { 0 } else { NOT_ABORTED })
    }

    /// Doorbell Buffer Config (section 5.7).
    fn doorbell_buffer_config(&mut self, bus: &Bus<'_>, sqe: &Sqe) -> Result<u32, Status> {
        let page = self.state.registers.page_size();
        let [values, events] = sqe.dptr;
        if !values.is_multiple_of(page) || !events.is_multiple_of(page) || values == events {
            return Err(INVALID_FIELD);
        }
        let pages = ShadowPages::new(bus.dma, values, events, SHADOW_BYTES);
        if pages.values.is_none() {
            return Err(Status::DATA_TRANSFER_ERROR.do_not_retry());
        }
        // The admin queue's doorbells are not shadowed.
        for queue in self.state.sqs.iter_mut().flatten().filter(|queue| queue.id > 0) {
            queue.doorbell.attach(sq_slot(queue.id), &pages);
        }
        for queue in self.state.cqs.iter_mut().flatten().filter(|queue| queue.id > 0) {
            queue.doorbell.attach(cq_slot(queue.id), &pages);
        }
        self.state.shadow = Some(pages);
        Ok(0)
    }

    /// The critical warning byte of the SMART log.
    fn critical_warning(&self) -> u8 {
        let mut warning = 0;
        if self.state.features.is_temperature_beyond(logs::TEMPERATURE) {
            warning |= log::WARNING_TEMPERATURE;
        }
        if self.backing.has_failed() {
            warning |= log::WARNING_RELIABILITY;
        }
        if self.region.as_ref().is_some_and(PersistentRegion::has_failed) {
            warning |= log::WARNING_REGION;
        }
        warning
    }

    /// Raises an event for each critical warning that the host wants to hear of.
    pub(super) fn check_health(&mut self) {
        let warning = self.critical_warning() & self.state.features.smart_events();
        for (bit, info) in [
            (log::WARNING_TEMPERATURE, fid::SMART_TEMPERATURE),
            (log::WARNING_RELIABILITY, fid::SMART_RELIABILITY),
            (log::WARNING_REGION, fid::SMART_RELIABILITY),
        ] {
            if warning & bit != 0 {
                self.state.events.raise(fid::EVENT_SMART, info);
            }
        }
    }
}

/// Bytes used of each shadow doorbell page: the doorbells of 32 queue pairs.
const SHADOW_BYTES: usize = 4096;
const STRIDE: usize = 4 << super::registers::DOORBELL_STRIDE;
const _: () = assert!(2 * STRIDE * (super::features::IO_QUEUES as usize + 1) <= SHADOW_BYTES);

/// The pages at these addresses.
///
/// # Errors
/// When no command could have configured them.
pub fn shadow_pages(dma: &DmaSpace, values: u64, events: u64) -> Result<ShadowPages, RestoreError> {
    require_page(values)?;
    require_page(events)?;
    Ok(ShadowPages::new(dma, values, events, SHADOW_BYTES))
}

/// Where in the shadow pages the doorbell of submission queue `qid` is.
pub fn sq_slot(qid: u16) -> usize {
    2 * usize::from(qid) * STRIDE
}

/// Where that of completion queue `qid` is.
pub fn cq_slot(qid: u16) -> usize {
    (2 * usize::from(qid) + 1) * STRIDE
}

/// Bytes of the host identifier that a command means: EXHID in dword 11 (section 5.21.1.24).
fn host_id_length(sqe: &Sqe) -> usize {
    if sqe.cdw11 & 1 != 0 { 16 } else { 8 }
}
