//! The controller: enabling, resetting, shutting down (NVM Express base 1.4, sections 3.1.5,
//! 7.3, 7.6), and the loop that takes commands from the queues and posts completions.
//!
//! Everything the host shares is hostile: entries are copied once, every index and address is
//! checked, and what is wrong is answered with a status, an asynchronous event, or, where the
//! queues themselves cannot be reached, with Controller Fatal Status.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};

use rackbus_memory::{Carried, ExchangeFiles};
use rackbus_pci::{
    Bar, Bus, Function, FunctionInfo, Health, MediumOffer, MediumRefused, Mode, ModelState,
    Operations, ResetKind, RestoreError, SaveError, Work,
};
use rackbus_spec::nvme::features as fid;
use rackbus_spec::nvme::registers::{
    DOORBELLS, SHN_NONE, SHST_COMPLETE, SHST_NORMAL, SHST_OCCURRING,
};
use rackbus_spec::nvme::{CLASS_CODE, Status};

use super::arbitration::{Arbiter, RoundRobin};
use super::backing::{self, Backing, Finished};
use super::config::{NvmeConfig, NvmeError};
use super::identify::{DEVICE_ID, Identity, MAX_TRANSFER, VENDOR_ID};
use super::interrupts::VECTORS;
use super::jobs::{Finish, Owner, Steps};
use super::limits::Meter;
use super::medium::{CLASS, Description, Port};
use super::operations::Counts;
use super::queue::{CompletionQueue, SubmissionQueue};
use super::registers::{Change, DOORBELL_STRIDE};
use super::state::State;
use super::transfer::Transfer;

/// The BAR of registers and doorbells: a page of each, and room to the next power of two.
const BAR_SIZE: u64 = 16 << 10;
/// How long a queue with commands may be out of reach: a hypervisor may take mappings away and
/// put them back, a driver that gave a wrong address will not.
const UNREACHABLE_NS: u64 = 100_000_000;

/// What became of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It is done, with this status and dword 0.
    Done(Status, u32),
    /// It completes later; an entry of its completion queue is kept for it.
    Background,
    /// It is an event request, which may wait for ever and keeps no entry.
    Outstanding,
}

impl Outcome {
    /// Done without error.
    pub(super) const DONE: Outcome = Outcome::Done(Status::SUCCESS, 0);

    /// Done with an error.
    pub(super) fn failed(status: Status) -> Outcome {
        Outcome::Done(status, 0)
    }
}

/// An NVMe controller with one namespace, over a backing.
pub struct Nvme {
    info: FunctionInfo,
    pub(super) identity: Identity,
    pub(super) backing: Box<dyn Backing>,
    pub(super) transfer: Transfer,
    pub(super) state: State,
    /// Reports of the backing; kept to allocate once.
    pub(super) finished: Vec<Finished>,
    /// Whose turn it is.
    pub(super) arbiter: Box<dyn Arbiter>,
    /// What its user may do in a second.
    pub(super) meter: Meter,
    /// Bytes that the command being executed is about.
    pub(super) cost: u64,
    /// The commands that it has answered.
    pub(super) counts: Counts,
    /// A front elsewhere has the medium.
    pub(super) port: Option<Port>,
    /// The exchange with a front elsewhere, that an earlier life of the drive had.
    pub(super) exchange: Option<ExchangeFiles>,
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
    /// [`NvmeError`] when the description is wrong or its file or memory cannot be had.
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
        config.check()?;
        let identity = Identity::new(config, backing.capacity(), backing.volatile_cache());
        let bar =
            Bar { index: 0, size: BAR_SIZE, is_64bit: true, prefetchable: false, mappable: None };
        let info = FunctionInfo {
            vendor_id: VENDOR_ID,
            device_id: DEVICE_ID,
            subsystem_vendor_id: VENDOR_ID,
            subsystem_id: DEVICE_ID,
            revision: 1,
            class: [(CLASS_CODE >> 16) as u8, (CLASS_CODE >> 8) as u8, CLASS_CODE as u8],
            bars: vec![bar],
            msix_vectors: VECTORS,
            msi_vectors: VECTORS,
            vendor: Vec::new(),
            serial: identity.pci_serial(),
        };
        Ok(Nvme {
            info,
            identity,
            backing,
            transfer: Transfer::new(MAX_TRANSFER)?,
            state: State::new(0),
            finished: Vec::new(),
            arbiter: Box::new(RoundRobin::default()),
            meter: Meter::new(config.limits, config.delays.clone()),
            cost: 0,
            counts: Counts::new(config.block_size),
            port: None,
            exchange: None,
            config: config.clone(),
        })
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
    pub(super) fn description(&self) -> Description {
        Description {
            size: self.backing.capacity(),
            block_size: self.config.block_size,
            serial: self.config.serial.clone(),
            model: self.config.model.clone(),
            volatile_cache: self.backing.volatile_cache(),
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
        let steps = Steps::from([backing::Request::Flush]);
        match self.run(Owner::Shutdown, steps, Finish::Plain) {
            Ok(Outcome::Background) => self.submit(),
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
        self.state.jobs = Default::default();
    }

    /// Raises the interrupts that are due; returns when to look again.
    #[inline]
    fn interrupt(&mut self, bus: &Bus<'_>) -> Option<u64> {
        if !self.state.vectors.any_waiting() {
            return None;
        }
        let (coalescing, exempt) = self.state.features.coalescing();
        self.raise(bus, coalescing, exempt)
    }

    fn raise(
        &mut self,
        bus: &Bus<'_>,
        coalescing: fid::InterruptCoalescing,
        exempt: u32,
    ) -> Option<u64> {
        // A message that the mask holds back is sent when it is taken away, if it matters then.
        let sent = match bus.irq.mode() {
            Mode::Pin => 0,
            Mode::Msi { .. } => !self.state.registers.interrupt_mask,
            Mode::Msix => !0,
        };
        let next = self.state.vectors.deliver(bus.now_ns, coalescing, exempt, |vector| {
            if sent & 1 << vector != 0 {
                bus.irq.trigger(vector);
            }
        });
        self.update_pin(bus);
        next
    }

    /// The vectors of queues that interrupt and hold completions, a bit each (section 7.5.1.1: the
    /// interrupt status before it is masked).
    fn holding(&self) -> u32 {
        let queues = self.state.cqs.iter().flatten();
        let holding = queues.filter(|queue| queue.interrupts && queue.holds_completions());
        holding.fold(0, |vectors, queue| vectors | 1 << queue.vector)
    }

    /// The interrupt mask was written. A vector that is masked no more and has completions waiting
    /// sends its message now (section 7.5.1.1): MSI tells of a change, and that was held back.
    fn mask_changed(&mut self, bus: &Bus<'_>, old: u32) {
        let unmasked = old & !self.state.registers.interrupt_mask;
        if unmasked != 0 && matches!(bus.irq.mode(), Mode::Msi { .. }) {
            self.send_held(bus, unmasked);
        }
        self.update_pin(bus);
    }

    /// The driver enabled another kind of interrupts: what was told by the old one alone is told by
    /// the new one as well.
    fn mode_changed(&mut self, bus: &Bus<'_>) {
        self.state.mode = bus.irq.mode();
        match self.state.mode {
            Mode::Pin => {}
            Mode::Msi { .. } => self.send_held(bus, !self.state.registers.interrupt_mask),
            Mode::Msix => self.send_held(bus, !0),
        }
        self.update_pin(bus);
    }

    /// Sends the messages of those of `vectors` that have completions waiting.
    fn send_held(&mut self, bus: &Bus<'_>, vectors: u32) {
        self.refresh_heads();
        let due = self.holding() & vectors;
        (0..VECTORS).filter(|vector| due & 1 << vector != 0).for_each(|v| bus.irq.trigger(v));
    }

    /// Brings the interrupt pin in line (section 7.5.1.1): high while a queue that interrupts
    /// holds completions and its vector is not masked.
    pub(super) fn update_pin(&mut self, bus: &Bus<'_>) {
        let level = bus.irq.mode() == Mode::Pin
            && self.holding() & !self.state.registers.interrupt_mask != 0;
        if level != self.state.pin {
            self.state.pin = level;
            bus.irq.intx(level);
        }
    }

    /// With a pin interrupt pending, the host's progress matters even when there is room.
    fn refresh_pin(&mut self, bus: &Bus<'_>) {
        bus.user.before_access();
        self.refresh_heads();
        self.update_pin(bus);
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

impl Function for Nvme {
    fn info(&self) -> &FunctionInfo {
        &self.info
    }

    fn health(&self) -> Health {
        self.backing.health()
    }

    fn operations(&self) -> Operations {
        self.counts.operations()
    }

    fn bar_read(&mut self, _bus: &Bus<'_>, bar: u8, offset: u64, data: &mut [u8]) {
        if bar == 0 && offset < DOORBELLS {
            self.state.registers.read(offset, data);
        }
    }

    fn bar_write(&mut self, bus: &Bus<'_>, bar: u8, offset: u64, data: &[u8]) {
        if bar != 0 {
            return;
        }
        if let Some(at) = offset.checked_sub(DOORBELLS) {
            if let Ok(value) = <[u8; 4]>::try_from(data) {
                self.ring(bus, at, u32::from_le_bytes(value));
            }
            return;
        }
        let mut changes = Vec::new();
        self.state.registers.write(offset, data, |_, change| changes.push(change));
        for change in changes {
            match change {
                Change::Configuration(old) => self.configure(bus, old.en(), old.shn()),
                Change::InterruptMask(old) => self.mask_changed(bus, old),
                Change::None => {}
            }
        }
    }

    fn reset(&mut self, bus: &Bus<'_>, kind: ResetKind) {
        self.abort_jobs();
        if let Some(mut port) = self.port.take() {
            port.end(&mut *self.backing);
        }
        if self.state.pin {
            bus.irq.intx(false);
        }
        let fresh = State::new(bus.now_ns);
        let old = std::mem::replace(&mut self.state, fresh);
        match kind {
            // Logs count over resets, for as long as one user has the drive.
            ResetKind::FunctionLevel => self.state.logs = old.logs,
            ResetKind::Scrub => {
                self.transfer.scrub();
                self.meter.renew(self.config.limits);
                // One that fails again goes on failing: its next flush says so.
                let _ = self.backing.reload();
            }
        }
    }

    fn poll(&mut self, bus: &Bus<'_>) -> Work {
        if let Some(port) = &mut self.port {
            return port.poll(&mut *self.backing, &mut self.meter, bus);
        }
        if self.state.generation != bus.dma.generation() {
            self.state.resolve(bus.dma);
        }
        let mut done = 0;
        if !self.state.jobs.is_empty() {
            done += self.reap(bus, false);
        }
        if self.state.mode != bus.irq.mode() {
            self.mode_changed(bus);
        }
        if !self.is_running() || !bus.dma.master() {
            self.advance_shutdown();
            self.state.untimed = true;
            return match (done, self.state.jobs.is_empty()) {
                (0, true) => Work::Asleep(None),
                (0, false) => Work::Idle,
                _ => Work::Done,
            };
        }
        if !self.state.held.is_empty() {
            self.post_held(bus);
        }
        done += self.poll_queues(bus);
        if self.state.events.has_next() {
            done += self.tell_events(bus);
        }
        if self.state.pin {
            self.refresh_pin(bus);
        }
        let due = self.interrupt(bus);
        if done > 0 {
            self.submit();
            return Work::Done;
        }
        let reach = self.check_reach(bus);
        self.state.untimed = false;
        let limit = self.limit(bus);
        if reach.is_none()
            && limit.is_none()
            && (self.state.is_polled() || !self.state.jobs.is_empty())
        {
            self.state.untimed = true;
            return Work::Idle;
        }
        Work::Asleep([due, reach, limit].into_iter().flatten().min())
    }

    fn park(&mut self, bus: &Bus<'_>) -> bool {
        if let Some(port) = &mut self.port {
            return port.park(&mut *self.backing);
        }
        if self.state.untimed && self.state.vectors.any_waiting() {
            self.raise(bus, Default::default(), u32::MAX);
        }
        if let Some(background) = self.backing.background()
            && background.rearm()
        {
            // A flush that was given up ends when nobody waits for it any more.
            self.reap(bus, false);
            return false;
        }
        if !self.is_running() || !bus.dma.master() {
            return true;
        }
        let Some(pages) = &self.state.shadow else {
            return true;
        };
        let (values, events) = (pages.values.as_ref(), pages.events.as_ref());
        for queue in self.state.sqs.iter_mut().flatten() {
            queue.doorbell.arm(events);
        }
        // Of a completion queue only its being full, or the pin, is waited for.
        let pin = self.state.pin;
        for queue in self.state.cqs.iter_mut().flatten() {
            if pin || queue.room() == 0 {
                queue.doorbell.arm(events);
            }
        }
        // Pairs with the barrier that the host has between its store and its look at the event
        // index: one of the two sees the other's store.
        fence(Ordering::SeqCst);
        let news = self.state.sqs.iter().flatten().any(|queue| queue.doorbell.has_news(values))
            || self
                .state
                .cqs
                .iter()
                .flatten()
                .any(|queue| (pin || queue.room() == 0) && queue.doorbell.has_news(values));
        !news
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.port {
            Some(port) => Some(port.wake_fd()),
            None => self.backing.wake_fd(),
        }
    }

    fn serve_medium(&mut self, carried: Option<Carried>) -> Result<MediumOffer, MediumRefused> {
        if self.port.is_some() {
            return Err(MediumRefused::InUse);
        }
        let description = serde_json::to_string(&self.description()).unwrap_or_default();
        let (port, files) = match carried {
            None => {
                let (port, files) = Port::new(&*self.backing, self.block())?;
                (port, files.into())
            }
            Some(carried) => (Port::carried(carried, &*self.backing, self.block())?, Vec::new()),
        };
        self.port = Some(port);
        Ok(MediumOffer { class: CLASS, description, files })
    }

    fn save(&mut self, bus: &Bus<'_>) -> Result<(ModelState, Vec<OwnedFd>), SaveError> {
        self.take_state(bus)
    }

    fn restore(&mut self, bus: &Bus<'_>, state: &ModelState) -> Result<(), RestoreError> {
        self.put_state(bus, state)
    }

    fn quiesce(&mut self, bus: &Bus<'_>) {
        while self.backing.background().is_some_and(|background| background.has_buffers()) {
            self.reap(bus, true);
        }
        self.interrupt(bus);
        if self.state.generation != bus.dma.generation() {
            // What could be reached since the last poll, if only now, is noted.
            self.state.resolve(bus.dma);
        }
        // What was resolved may be gone on the next poll.
        self.state.unresolve();
    }
}
