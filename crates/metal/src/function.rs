//! A function that is lent through an NTB: its control area, what its borrower asks for, and its end.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rackbus_memory::Event;

use crate::device::{ReadyDevice, WindowDevice, event, table_of};
use crate::error::MetalError;
use crate::isolated::{IsolatedMemory, MappingRefusal, MappingRequest};
use crate::lender::{AGAIN, BEAT, locked, locked_within};
use crate::loan::LentStatus;
use crate::log_pace::LogPace;
use crate::ntb::{DOORBELL, Ntb};
use crate::ranges::{LentRanges, WindowRanges};
use crate::requests::{FunctionRequest, RequestRing, Writable};
use crate::room::LoanPlace;
use crate::saved::{LoanState, SavedLoan, impossible};
use crate::window::{ControlArea, DIRECT, FunctionStatus, Offer, RING_ENTRIES, WindowBar};

/// How long one that was isolated is shown as revoked before its control area is gone: longer than the borrower's module takes
/// from one look to the next, as that cannot say that it has seen it.
const SHOWN_REVOKED: Duration = Duration::from_secs(1);

/// Told, once, why a function was taken away from its borrower.
pub type OnTakenAway = Box<dyn Fn(&str) + Send + Sync>;

/// A function, its control area, and what the borrower asked for.
pub(crate) struct ControlledFunction {
    device: Box<dyn WindowDevice>,
    area: ControlArea,
    /// What is mapped for the borrower, while it is lent: dropped, it is not mapped any more. Who changes the device for
    /// the borrower holds this; nothing is changed after the end.
    mappings: Mutex<Option<Box<dyn LentRanges>>>,
    requests: Mutex<RequestRing>,
    /// What it reaches while it is isolated. Changed while `requests` is held.
    isolated: Mutex<Option<IsolatedMemory>>,
    /// How often that is logged.
    isolations: Mutex<LogPace>,
    /// Bytes of the window onto the borrower's memory.
    window: u64,
    /// Offset of its control area in the borrower's window 1.
    control: u64,
    epoch: u64,
    lost: OnTakenAway,
    /// Nobody at the borrower uses it any more.
    released: AtomicBool,
    carried_out: AtomicU64,
    refused: AtomicU32,
    resets: AtomicU64,
    trouble: Mutex<Option<String>>,
    /// Nothing is done for the borrower: another process may go on. Looked at while `requests` is held.
    paused: AtomicBool,
    /// It is being taken away, or was.
    ended: AtomicBool,
    /// Rings when there may be something to do.
    wake: Event,
}

impl std::fmt::Debug for ControlledFunction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControlledFunction").field("status", &self.status()).finish_non_exhaustive()
    }
}

impl ControlledFunction {
    /// Lends a device that is ready, at a place in the borrower's window.
    pub fn new(
        ntb: &Ntb,
        ready: ReadyDevice,
        (control, offsets): (u64, Vec<u64>),
        (epoch, lost): (u64, OnTakenAway),
    ) -> Result<ControlledFunction, MetalError> {
        let ReadyDevice { device, image, bars } = ready;
        let (msix, _) = table_of(&device.name(), &image, &bars)?;
        let plan = ntb.plan();
        let area = ControlArea::new()?;
        let mut shown = [WindowBar::default(); 6];
        for (bar, offset) in bars.iter().zip(&offsets) {
            shown[usize::from(bar.number)] = WindowBar::new(*offset, bar.size, bar.flags);
        }
        let places = (plan.inbound.start, control, &offsets[..]);
        let ranges = WindowRanges::lend(ntb.container(), places, &area, bars)?;
        let offer = Offer {
            epoch,
            vectors: msix.entries.into(),
            flags: if ntb.is_direct() { DIRECT } else { 0 },
            dma: (plan.memory.start, plan.memory.end - plan.memory.start),
            msi_base: plan.msi_base(),
            doorbell: DOORBELL,
            mappings: device.most_mappings(),
            bars: shown,
        };
        let lent = (device, Box::new(ranges) as Box<dyn LentRanges>, area);
        let places = (control, epoch, offer.dma.1);
        let function = ControlledFunction::assemble(lent, image.writable, places, lost)?;
        function.area.publish(&offer, &image.bytes);
        Ok(function)
    }

    /// Goes on with a function that another process had lent, by its control area. `device` goes on with what that one was.
    ///
    /// # Errors
    /// When the area is none, or was taken from the borrower.
    pub fn again(
        ntb: &Ntb,
        device: Box<dyn WindowDevice>,
        (state, area): (&LoanState, [OwnedFd; 2]),
        lost: OnTakenAway,
    ) -> Result<ControlledFunction, MetalError> {
        let area = ControlArea::adopt(area)?;
        let epoch = state.requests.epoch();
        if !area.is_ready(epoch) {
            return Err(impossible("a function that was taken from its borrower meanwhile"));
        }
        let (plan, control) = (ntb.plan(), state.place.control);
        let begin = plan.inbound.start + control;
        let mappings = WindowRanges::again(ntb.container(), &state.ranges, begin);
        let mappings = Box::new(mappings) as Box<dyn LentRanges>;
        let window = plan.memory.end - plan.memory.start;
        let (lent, places) = ((device, mappings, area), (control, epoch, window));
        let function = ControlledFunction::assemble(lent, state.requests.writable(), places, lost)?;
        *locked(&function.requests) = state.requests.clone();
        function.released.store(state.released, Ordering::Relaxed);
        function.carried_out.store(state.carried_out, Ordering::Relaxed);
        function.resets.store(state.resets, Ordering::Relaxed);
        Ok(function)
    }

    /// Does nothing for the borrower, and loses nothing of what it asks for. What is being done for it is waited for.
    ///
    /// # Errors
    /// When that takes longer than `limit`, as a reset of a device that hangs, or the function is isolated: another process would
    /// not know what is mapped for it. It goes on then.
    pub fn pause(&self, limit: Duration) -> Result<(), MetalError> {
        // Before the lock, which is not fair: who carries requests out is not to go on with the next one.
        self.paused.store(true, Ordering::Release);
        match locked_within(&self.requests, limit) {
            Some(_requests) if locked(&self.isolated).is_some() => {
                self.go_on();
                return Err(MetalError::Isolated(self.device.name()));
            }
            Some(requests) => drop(requests),
            None => {
                self.go_on();
                return Err(MetalError::Late(self.device.name()));
            }
        }
        self.device.pause(true);
        Ok(())
    }

    /// Whether it cannot be [paused](ControlledFunction::pause) for another process, as it is isolated: also while a mapping is
    /// being made for it. Waits for nothing.
    pub fn is_isolated(&self) -> bool {
        locked_within(&self.isolated, AGAIN).is_none_or(|isolated| isolated.is_some())
    }

    /// Goes on after a [pause](ControlledFunction::pause).
    pub fn go_on(&self) {
        self.paused.store(false, Ordering::Release);
        self.device.pause(false);
        self.wake();
    }

    /// What is mapped for the borrower; nothing of one that is being taken away, which takes as long as its device likes.
    /// Nobody else holds this for longer than a moment while it is [paused](ControlledFunction::pause).
    fn mapped(&self) -> Option<MutexGuard<'_, Option<Box<dyn LentRanges>>>> {
        loop {
            let mappings = locked_within(&self.mappings, AGAIN);
            // Looked at with the lock, or without it because the end may have that: it says so before.
            if self.ended.load(Ordering::Acquire) {
                return None;
            }
            if mappings.is_some() {
                return mappings;
            }
        }
    }

    /// As another process goes on with it at its place, while it is [paused](ControlledFunction::pause); nothing of one that
    /// is being taken away.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn save(&self, place: &LoanPlace) -> std::io::Result<Option<SavedLoan>> {
        let requests = locked(&self.requests);
        let Some(mappings) = self.mapped() else { return Ok(None) };
        let Some(mapped) = &*mappings else { return Ok(None) };
        let device = self.device.save()?;
        let released = self.released.load(Ordering::Relaxed);
        let counts = [&self.carried_out, &self.resets].map(|count| count.load(Ordering::Relaxed));
        let counts = (released, counts[0], counts[1]);
        let (place, ranges) = (place.clone(), mapped.ranges());
        let state = |device| LoanState::new(place, ranges, requests.clone(), counts, device);
        Ok(Some(SavedLoan::new(state, self.area.descriptors()?, device)))
    }

    /// The part of its control area that has the heartbeat, for a process that goes on with it.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn shown(&self) -> std::io::Result<OwnedFd> {
        let [shown, _] = self.area.descriptors()?;
        Ok(shown)
    }

    /// A device, what is mapped of it, and its area, in which nothing is shown yet.
    fn assemble(
        (device, mappings, area): (Box<dyn WindowDevice>, Box<dyn LentRanges>, ControlArea),
        writable: Writable,
        (control, epoch, window): (u64, u64, u64),
        lost: OnTakenAway,
    ) -> Result<ControlledFunction, MetalError> {
        Ok(ControlledFunction {
            area,
            mappings: Mutex::new(Some(mappings)),
            requests: Mutex::new(RequestRing::new(epoch, writable)),
            isolated: Mutex::default(),
            isolations: Mutex::default(),
            window,
            control,
            epoch,
            lost,
            released: AtomicBool::new(false),
            carried_out: AtomicU64::new(0),
            refused: AtomicU32::new(0),
            resets: AtomicU64::new(0),
            trouble: Mutex::new(None),
            paused: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            wake: event()?,
            device,
        })
    }

    /// Gives its heartbeat another value.
    pub fn beat(&self, value: u32) {
        self.area.beat(value);
    }

    /// There may be something to do.
    pub fn wake(&self) {
        self.wake.ring();
    }

    /// Whether the borrower has said that nobody there uses it: also by a request that was not carried out any more.
    pub fn is_released(&self) -> bool {
        let mut requests = locked(&self.requests);
        let producer = self.area.producer();
        while let Some(request) = requests.next(producer, |number| self.area.entry(number)) {
            let released = matches!(request, FunctionRequest::Release);
            self.released.store(released, Ordering::Relaxed);
            requests.done();
        }
        self.released.load(Ordering::Relaxed)
    }

    /// Does what the borrower asks for, until it is taken away.
    pub fn serve(&self) {
        let mut asked = Instant::now();
        let mut more = false;
        loop {
            let mut events = vec![self.wake.as_fd()];
            events.extend(self.device.alarm());
            let wait = if more { 0 } else { BEAT.as_nanos() as u64 };
            Event::wait_any(&events, Some(wait));
            self.wake.drain();
            // Where there is no alarm the device itself is asked: not for each doorbell, which others ring too.
            if self.device.alarm().is_some() || asked.elapsed() >= BEAT {
                asked = Instant::now();
                if let Some(trouble) = self.device.trouble() {
                    self.fail(trouble);
                }
            }
            if self.ended.load(Ordering::Acquire) {
                return self.end();
            }
            more = match self.serve_some() {
                ServeOutcome::Ended => return self.end(),
                ServeOutcome::All => false,
                ServeOutcome::One => true,
            };
        }
    }

    /// Does what the borrower asks for, and no more than a ring has room for or a beat takes: a borrower may fill its
    /// ring as fast as it is worked off, and the device is to be looked at meanwhile.
    fn serve_some(&self) -> ServeOutcome {
        let begun = Instant::now();
        for _ in 0..RING_ENTRIES {
            match self.serve_one() {
                ServeOutcome::One if begun.elapsed() < BEAT => {}
                served => return served,
            }
        }
        ServeOutcome::One
    }

    /// Does one thing that the borrower asks for.
    fn serve_one(&self) -> ServeOutcome {
        let mut requests = locked(&self.requests);
        let mut mappings = locked(&self.mappings);
        let Some(mapped) = &mut *mappings else { return ServeOutcome::Ended };
        // Who takes it away may wait for these locks, which are not fair: it is not to wait for a borrower's next requests.
        if self.ended.load(Ordering::Acquire) {
            return ServeOutcome::Ended;
        }
        if self.paused.load(Ordering::Acquire) {
            return ServeOutcome::All;
        }
        let producer = self.area.producer();
        let next = requests.next(producer, |number| self.area.entry(number));
        let outcome = match next {
            Some(request) => {
                let outcome = self.carry_out(request, &mut **mapped);
                requests.done();
                self.carried_out.fetch_add(1, Ordering::Relaxed);
                outcome
            }
            None => Ok(()),
        };
        let (consumer, refused) = requests.progress();
        self.refused.store(refused, Ordering::Relaxed);
        self.area.consumed(consumer, refused);
        drop((requests, mappings));
        if let Err(trouble) = outcome {
            self.fail(&trouble.to_string());
            return ServeOutcome::Ended;
        }
        if next.is_some() { ServeOutcome::One } else { ServeOutcome::All }
    }

    fn carry_out(
        &self,
        request: FunctionRequest,
        mapped: &mut dyn LentRanges,
    ) -> Result<(), MetalError> {
        tracing::debug!(device = self.device.name(), ?request, "the borrower asks");
        self.released.store(matches!(request, FunctionRequest::Release), Ordering::Relaxed);
        match request {
            FunctionRequest::Master(on) => self.device.set_master(on),
            FunctionRequest::Msix => Ok(()),
            FunctionRequest::DeviceControl(bits) => self.device.set_device_control(bits),
            // Whoever has it next, has it as at the beginning.
            FunctionRequest::Release if locked(&self.isolated).is_some() => {
                self.isolate(false, mapped)
            }
            FunctionRequest::Reset | FunctionRequest::Release => {
                self.resets.fetch_add(1, Ordering::Relaxed);
                self.device.reset()
            }
            FunctionRequest::Isolate(on) => {
                let refusal = self.may_isolate(on).err();
                if refusal.is_none() {
                    self.isolate(on, mapped)?;
                }
                self.answer(refusal);
                Ok(())
            }
            FunctionRequest::Map(on) => {
                let wanted = self.area.mapping();
                let outcome = if on { self.map(wanted) } else { self.unmap(wanted)? };
                self.answer(outcome.err());
                Ok(())
            }
        }
    }

    /// Tells the borrower what came of a request about what the device reaches.
    fn answer(&self, refusal: Option<MappingRefusal>) {
        self.area.answer(refusal.map_or(0, MappingRefusal::errno));
    }

    fn may_isolate(&self, on: bool) -> Result<(), MappingRefusal> {
        match (on, locked(&self.isolated).is_some()) {
            (true, false) => self.device.may_isolate(),
            (false, true) => Ok(()),
            _ => Err(MappingRefusal::Invalid),
        }
    }

    /// Isolates the device, or has it reach all of the window again. Where that fails it is of no more use.
    fn isolate(&self, on: bool, mapped: &mut dyn LentRanges) -> Result<(), MetalError> {
        if let Some(left_out) = locked(&self.isolations).line(Instant::now()) {
            let device = self.device.name();
            tracing::info!(device, on, left_out, "isolated for its borrower's VFIO");
        }
        self.resets.fetch_add(1, Ordering::Relaxed);
        // One that fails in between is isolated still, for a borrower whose VFIO has mapped memory: it is shown as revoked.
        self.device.isolate(on, mapped)?;
        let memory = || IsolatedMemory::new(self.window, self.device.most_mappings());
        *locked(&self.isolated) = on.then(memory);
        Ok(())
    }

    fn map(&self, wanted: MappingRequest) -> Result<(), MappingRefusal> {
        let mut isolated = locked(&self.isolated);
        let memory = isolated.as_mut().ok_or(MappingRefusal::Invalid)?;
        let mapping = memory.map(wanted)?;
        self.device.map(&mapping).inspect_err(|_| memory.end(&mapping))
    }

    /// Ends a mapping. One that cannot be ended ends the function.
    fn unmap(&self, wanted: MappingRequest) -> Result<Result<(), MappingRefusal>, MetalError> {
        let mut isolated = locked(&self.isolated);
        let Some(memory) = isolated.as_mut() else { return Ok(Err(MappingRefusal::Invalid)) };
        let mapping = match memory.find(wanted) {
            Ok(mapping) => mapping,
            Err(refusal) => return Ok(Err(refusal)),
        };
        self.device.unmap(&mapping)?;
        memory.end(&mapping);
        Ok(Ok(()))
    }

    /// It is of no more use: the borrower loses it, who lent it is told, and its thread takes it away. Waits for nothing.
    pub fn fail(&self, trouble: &str) {
        if self.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        self.area.set_state(FunctionStatus::Revoked);
        self.device.cut();
        tracing::error!(device = self.device.name(), trouble, "a lent function is taken away");
        locked(&self.trouble).get_or_insert_with(|| trouble.to_owned());
        (self.lost)(trouble);
        self.wake();
    }

    /// Takes it away, whatever its borrower does. Waits for what is being done for the borrower: a reset of a device, or
    /// what a model is doing, which reaches the borrower's memory no more.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.area.set_state(FunctionStatus::Revoked);
        let is_cut = self.device.cut();
        let mut mappings = locked(&self.mappings);
        let Some(mapped) = mappings.take() else { return };
        // A device that still masters the bus would run into faults.
        let mut mapped = Some(mapped);
        if is_cut {
            self.end_mapped(mapped.take());
        }
        match self.device.set_master(false) {
            Ok(()) => self.end_mapped(mapped),
            Err(error) => {
                tracing::warn!(device = self.device.name(), %error, "bus mastering could not be turned off");
                drop(mapped);
            }
        }
        if let Err(error) = self.device.reset() {
            // Closing it resets it, too.
            tracing::warn!(device = self.device.name(), %error, "the function could not be reset yet");
        }
        drop(mappings);
        self.wake();
    }

    /// The borrower reaches nothing of the device any more, which reaches nothing of the borrower's memory.
    fn end_mapped(&self, mapped: Option<Box<dyn LentRanges>>) {
        // The borrower's module is to see it: what VFIO has mapped there is somebody else's once the area is gone after that.
        if mapped.is_some() && locked(&self.isolated).is_some() {
            std::thread::sleep(SHOWN_REVOKED);
        }
        drop(mapped);
    }

    /// What is known of it. Waits for nothing.
    pub fn status(&self) -> LentStatus {
        LentStatus {
            device: self.device.name(),
            offset: self.control,
            epoch: self.epoch,
            requests: self.carried_out.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            resets: self.resets.load(Ordering::Relaxed),
            trouble: locked(&self.trouble).clone(),
        }
    }
}

/// What was done for a borrower.
enum ServeOutcome {
    /// All that it asked for.
    All,
    /// One request; more may be there.
    One,
    /// The function is not lent any more.
    Ended,
}

#[cfg(test)]
mod tests;
