//! A virtual function: one tenant's way to the engines.
//!
//! It takes descriptors from the tenant's rings, checks them, and gives them to its medium; what comes
//! back it completes. So a tenant's mistakes, and its floods, are dealt with on the thread of its own
//! function. With the engines in the same process they reach memory themselves, as long as the function has it:
//! before mappings change, operations release theirs, and those that are not over look it up again.

mod descriptors;
mod registers;

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use rackbus_memory::{Access, Carried, CarriedSession, DmaSlice};
use rackbus_pci::operations::Tally;
use rackbus_pci::{
    Bar, Bus, Function, FunctionInfo, MediumOffer, MediumRefused, ModelState, NotPolled,
    Operations, ResetKind, RestoreError, SaveError, WatchedRegisters, Work,
};
use rackbus_qos::{LevelRefused, ServiceLevel, TenantId};
use rackbus_spec::accel::{
    BAR_SIZE, CLASS_CODE, DEVICE_ID, Descriptor, OPERATIONS, OperationStatus, VENDOR_ID, shadow,
};

use super::job::FinishedJob;
use super::medium::{Local, Medium};
use super::pool::EnginePool;
use super::queue::QueuePair;
use super::{QUEUES, waiting};

pub(super) use descriptors::DescriptorOutcome;

/// Names of the operations, for what is counted.
pub(super) const NAMES: [&str; OPERATIONS.len()] = {
    let mut names = [""; OPERATIONS.len()];
    let mut at = 0;
    while at < names.len() {
        names[at] = OPERATIONS[at].name();
        at += 1;
    }
    names
};

/// A tenant's function of an accelerator, whose operations its medium does.
#[derive(Debug)]
pub struct Front<M: Medium> {
    info: FunctionInfo,
    pub(super) medium: M,
    operations: Operations,
    pub(super) running: bool,
    pub(super) shadow: u64,
    pub(super) queues: Vec<QueuePair>,
    /// What is under way, by number.
    pub(super) pending: BTreeMap<u64, PendingOperation<M::Work>>,
    /// The queue pair that descriptors are taken from first: another one in each poll.
    first: u16,
    /// A context was made in this poll, which may have taken long.
    pub(super) created: bool,
    /// Some of those have no memory, because mappings changed.
    pub(super) memory_released: bool,
    /// The shadow doorbells say that it sleeps.
    pub(super) told_asleep: bool,
    /// Its registers as memory, where its user has them so.
    pub(super) polled: Option<WatchedRegisters>,
    /// All doorbells are stored in them, because the shadow doorbells have said that it sleeps for as long as it runs.
    pub(super) doorbells_in_registers: bool,
}

/// A function whose engines are in the same process.
pub type Accelerator = Front<Local>;

pub(super) struct PendingOperation<W> {
    pub queue: u16,
    pub descriptor: Descriptor,
    pub work: W,
    pub begun: u64,
}

impl<W> std::fmt::Debug for PendingOperation<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PendingOperation")
            .field("descriptor", &self.descriptor)
            .finish_non_exhaustive()
    }
}

/// Why a function cannot be obtained.
#[derive(Debug, thiserror::Error)]
pub enum AcceleratorError {
    /// The engines cannot be started, or there are no descriptors left.
    #[error("the engines cannot be started: {0}")]
    Start(#[from] std::io::Error),
    /// Its service level cannot be kept.
    #[error(transparent)]
    Level(#[from] LevelRefused),
}

impl Accelerator {
    /// The function of `tenant`, with its service level if it has one.
    ///
    /// # Errors
    /// [`AcceleratorError`].
    pub fn new(
        pool: &Arc<EnginePool>,
        tenant: TenantId,
        level: Option<&ServiceLevel>,
        serial: u64,
    ) -> Result<Accelerator, AcceleratorError> {
        let operations = Operations::new(&NAMES);
        let local = Local::new(pool, tenant, level, operations.clone())?;
        Ok(Front::with_medium(local, serial, operations))
    }

    /// What came with a saved state that is to be restored.
    pub(super) fn bring(&mut self, files: Vec<OwnedFd>) {
        self.medium.files = files;
    }
}

impl<M: Medium> Front<M> {
    /// The function with this serial number, which counts what it does in `operations`.
    pub(super) fn with_medium(medium: M, serial: u64, operations: Operations) -> Front<M> {
        let bar =
            Bar { index: 0, size: BAR_SIZE, is_64bit: true, prefetchable: false, mappable: None };
        let info = FunctionInfo {
            vendor_id: VENDOR_ID,
            device_id: DEVICE_ID,
            subsystem_vendor_id: VENDOR_ID,
            subsystem_id: DEVICE_ID,
            revision: 1,
            class: CLASS_CODE,
            bars: vec![bar],
            msix_vectors: QUEUES,
            msi_vectors: QUEUES,
            vendor: Vec::new(),
            serial,
        };
        Front {
            info,
            medium,
            operations,
            running: false,
            shadow: 0,
            queues: vec![QueuePair::default(); usize::from(QUEUES)],
            pending: BTreeMap::new(),
            first: 0,
            created: false,
            memory_released: false,
            told_asleep: false,
            polled: None,
            doorbells_in_registers: false,
        }
    }

    /// No engine touches memory on return; operations go on when [`take_up`](Accelerator::take_up) has looked it
    /// up again.
    pub(super) fn release_memory(&mut self) {
        for pending in self.pending.values() {
            self.medium.release_memory(&pending.work);
        }
        self.memory_released = !self.pending.is_empty();
    }

    /// Gives up what is under way. On return nothing of it touches memory.
    pub(super) fn cancel(&mut self, which: impl Fn(&PendingOperation<M::Work>) -> bool) {
        self.pending.retain(|_, pending| {
            let over = which(pending);
            if over {
                self.medium.cancel(&pending.work);
            }
            !over
        });
    }

    /// As after power-on. Keys are wiped: operations that used them have ended.
    fn stop(&mut self) {
        self.running = false;
        self.cancel(|_| true);
        self.medium.stop();
        self.queues.fill(QueuePair::default());
        self.shadow = 0;
        (self.memory_released, self.told_asleep) = (false, false);
        self.doorbells_in_registers = false;
        self.show_all();
    }

    /// The shadow doorbells, where the tenant has them. A function that may not master the bus asks for none: nothing would be
    /// refused that anybody wants, and whoever lets it master the bus again wakes it.
    pub(super) fn shadow<'a>(&self, bus: &Bus<'a>) -> Option<DmaSlice<'a>> {
        if self.shadow == 0 || !self.running || !bus.dma.master() {
            return None;
        }
        let page = bus.dma.slice(self.shadow, shadow::SIZE, Access::READ | Access::WRITE).ok()?;
        self.shadow.is_multiple_of(shadow::SIZE as u64).then_some(page)
    }

    /// The shadow doorbells, where doorbells are looked for there.
    fn shadow_doorbells<'a>(&self, bus: &Bus<'a>) -> Option<DmaSlice<'a>> {
        if self.doorbells_in_registers { None } else { self.shadow(bus) }
    }

    /// Takes the doorbells from the shadow page.
    fn look(&mut self, page: DmaSlice<'_>) {
        for (number, queue) in self.queues.iter_mut().enumerate().filter(|(_, q)| q.is_on()) {
            let at = shadow::DOORBELL + number * shadow::STRIDE;
            let tail = page.load_u32(at, Ordering::Acquire);
            let head = page.load_u32(at + 4, Ordering::Acquire);
            if let (Some(tail), Some(head)) = (tail, head) {
                queue.ring(tail, head);
            }
        }
    }

    pub(super) fn tell_asleep(&mut self, page: DmaSlice<'_>, asleep: bool) {
        if self.told_asleep != asleep {
            self.told_asleep = asleep;
            page.store_u32(shadow::ASLEEP, asleep.into(), Ordering::Relaxed);
            fence(Ordering::SeqCst);
        }
    }

    /// An operation has ended.
    pub(super) fn finish(&mut self, bus: &Bus<'_>, finished: FinishedJob) {
        let Some(pending) = self.pending.remove(&finished.number) else { return };
        let PendingOperation { queue, descriptor, begun, .. } = pending;
        self.end(bus, (queue, &descriptor), finished, [begun, bus.user.ticks()]);
    }

    /// Counts an operation that has ended, which took from one reading of the processor's counter to the other, and
    /// completes it.
    fn end(
        &mut self,
        bus: &Bus<'_>,
        (queue, descriptor): (u16, &Descriptor),
        finished: FinishedJob,
        time: [u64; 2],
    ) {
        let FinishedJob { status, written, value, .. } = finished;
        let good = status == OperationStatus::Success;
        let bytes = u64::from(descriptor.input_length);
        count(&self.operations, descriptor.stages[0], bytes, good, time);
        let value = u32::try_from(value).unwrap_or(u32::MAX);
        self.complete(bus, queue, descriptor.id, status, written as u32, value);
    }

    pub(super) fn complete(
        &mut self,
        bus: &Bus<'_>,
        queue: u16,
        id: u16,
        status: OperationStatus,
        output: u32,
        value: u32,
    ) {
        if let Some(queue) = self.queues.get_mut(usize::from(queue)) {
            queue.complete(bus, id, status, output, value);
        }
    }

    /// Mappings have changed: what is under way looks up its memory again.
    fn take_up(&mut self, bus: &Bus<'_>) {
        self.memory_released = false;
        let mut gone = Vec::new();
        for (number, pending) in &self.pending {
            let order = (pending.queue, &pending.descriptor);
            if let Err(status) = self.medium.take_up(bus.dma, order, &pending.work) {
                self.medium.cancel(&pending.work);
                gone.push((*number, status));
            }
        }
        if !gone.is_empty() {
            self.medium.forget_given_up();
        }
        for (number, status) in gone {
            self.finish(bus, FinishedJob { number, status, written: 0, value: 0 });
        }
    }

    /// A poll of a front that runs here.
    fn turn(&mut self, bus: &Bus<'_>) -> Work {
        if self.running {
            bus.user.before_access();
        }
        let finished = self.medium.take_finished(bus.dma);
        if !self.running {
            return Work::Asleep(None);
        }
        if self.memory_released {
            self.take_up(bus);
        }
        let page = self.shadow_doorbells(bus);
        if let Some(page) = page {
            self.tell_asleep(page, false);
            self.look(page);
        }
        let mut some = !finished.is_empty();
        for finished in finished {
            self.finish(bus, finished);
        }
        self.first = (self.first + 1) % QUEUES;
        self.created = false;
        for number in (self.first..QUEUES).chain(0..self.first) {
            if self.queues[usize::from(number)].has_work() {
                some |= self.take(bus, number);
            }
            if self.created {
                // The other queues' may take as long, and are taken in the next polls.
                break;
            }
        }
        // What its own thread has done meanwhile.
        for finished in self.medium.take_finished(bus.dma) {
            self.finish(bus, finished);
            some = true;
        }
        self.interrupt(bus);
        let waits = self.queues.iter().any(QueuePair::waits);
        match some {
            true => Work::Done,
            // What comes into memory rings for nobody.
            false if waits => Work::Asleep(Some(bus.now_ns + waiting::LOOK_NS)),
            false if page.is_some() || !self.pending.is_empty() => Work::Idle,
            false => Work::Asleep(None),
        }
    }

    /// Raises the interrupts of queue pairs with new completions. A driver that stops to poll says so, and looks
    /// at its ring after that: what was written before is ordered before the look at what it said.
    pub(super) fn interrupt(&mut self, bus: &Bus<'_>) {
        if !self.queues.iter().any(|queue| queue.news) {
            return;
        }
        let page = self.shadow(bus);
        fence(Ordering::SeqCst);
        for (number, queue) in self.queues.iter_mut().enumerate() {
            let at = shadow::DOORBELL + number * shadow::STRIDE + shadow::POLLS;
            let polls = || page.and_then(|page| page.load_u32(at, Ordering::Relaxed)) == Some(1);
            if std::mem::take(&mut queue.news)
                && let Ok(vector) = u16::try_from(queue.vector)
                && !polls()
            {
                bus.irq.trigger(vector);
            }
        }
    }
}

/// Counts an operation on so many bytes, which took from one reading of the processor's counter to the other.
pub(super) fn count(
    operations: &Operations,
    operation: u8,
    bytes: u64,
    good: bool,
    [begun, ended]: [u64; 2],
) {
    let mut tally = Tally::default();
    tally.count(bytes, good);
    let kind = usize::from(operation).wrapping_sub(1);
    operations.add(kind, tally, ended.saturating_sub(begun));
}

impl<M: Medium> Function for Front<M> {
    fn info(&self) -> &FunctionInfo {
        &self.info
    }

    fn operations(&self) -> Operations {
        self.operations.clone()
    }

    fn bar_read(&mut self, _bus: &Bus<'_>, _bar: u8, offset: u64, data: &mut [u8]) {
        if !offset.is_multiple_of(4) {
            return;
        }
        for (at, word) in (offset..).step_by(4).zip(data.chunks_exact_mut(4)) {
            word.copy_from_slice(&self.read4(at).to_le_bytes());
        }
    }

    fn bar_write(&mut self, _bus: &Bus<'_>, _bar: u8, offset: u64, data: &[u8]) {
        if !offset.is_multiple_of(4) {
            return;
        }
        for (at, word) in (offset..).step_by(4).zip(data.chunks_exact(4)) {
            let mut value = [0; 4];
            value.copy_from_slice(word);
            self.write4(at, u32::from_le_bytes(value));
            self.show_written(at);
        }
    }

    fn reset(&mut self, _bus: &Bus<'_>, kind: ResetKind) {
        self.stop();
        if kind == ResetKind::Scrub {
            self.medium.scrub();
            self.retire_registers();
        }
    }

    fn poll(&mut self, bus: &Bus<'_>) -> Work {
        if let Some(work) = self.medium.serve(bus) {
            return work;
        }
        if self.polled.is_none() {
            return self.turn(bus);
        }
        self.look_at_registers(bus);
        let work = self.turn(bus);
        self.show_registers(bus, work)
    }

    fn park(&mut self, bus: &Bus<'_>) -> bool {
        if let Some(page) = self.shadow_doorbells(bus) {
            self.tell_asleep(page, true);
            self.look(page);
        }
        // With as many under way as may be, the next one that ends rings.
        let full = self.medium.room(self.pending.len()) == 0;
        let wanted = |queue: &QueuePair| queue.has_work() && queue.waits_until.is_none();
        let idle = full || !self.queues.iter().any(wanted);
        self.medium.sleep() && idle
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.medium.wake_fd()
    }

    fn serve_medium(&mut self, carried: Option<Carried>) -> Result<MediumOffer, MediumRefused> {
        self.medium.offer(self.info.serial, carried)
    }

    fn carried_by(&mut self, session: CarriedSession) {
        self.medium.carried_by(session);
    }

    fn quiesce(&mut self, _bus: &Bus<'_>) {
        self.release_memory();
    }

    fn poll_registers(&mut self, bus: &Bus<'_>, bar: u8) -> Result<(OwnedFd, u64), NotPolled> {
        self.open_registers(bus, bar)
    }

    fn retire_registers(&mut self) {
        if let Some(polled) = self.polled.take() {
            polled.registers().retire();
        }
    }

    fn release_registers(&mut self) -> Option<WatchedRegisters> {
        self.polled.take()
    }

    fn watch_registers(&mut self, registers: WatchedRegisters) -> Result<(), NotPolled> {
        self.watch(registers)
    }

    fn save(&mut self, bus: &Bus<'_>) -> Result<(ModelState, Vec<OwnedFd>), SaveError> {
        self.take_state(bus)
    }

    fn take_back(&mut self) {
        self.medium.take_back();
    }

    fn restore(&mut self, bus: &Bus<'_>, state: &ModelState) -> Result<(), RestoreError> {
        self.put_state(bus, state)
    }
}
