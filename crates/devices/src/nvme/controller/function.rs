//! The controller as its engine sees it: registers are read and written, queues polled, and its state saved.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};

use rackbus_memory::{AsHandle, Carried, CarriedSession, Handles};
use rackbus_pci::{
    Bus, Function, FunctionInfo, Health, MediumOffer, MediumRefused, ModelState, NotPolled,
    Operations, ResetKind, RestoreError, SaveError, WatchedRegisters, Work,
};
use rackbus_spec::nvme::registers::DOORBELLS;

use super::{BAR_SIZE, Nvme};
use crate::nvme::buffer::MemoryBuffer;
use crate::nvme::medium::{CLASS, DrivePort};
use crate::nvme::polled::Polled;
use crate::nvme::registers::RegisterEffect;
use crate::nvme::state::ControllerState;
use crate::nvme::{buffer, persistent};

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

    fn own_memory(&self) -> u64 {
        self.buffer.as_ref().map_or(0, MemoryBuffer::size)
    }

    fn bar_read(&mut self, _bus: &Bus<'_>, bar: u8, offset: u64, data: &mut [u8]) {
        match (bar, &self.buffer, &self.region) {
            (0, ..) if offset < DOORBELLS => {
                if persistent::is_barrier(offset, data.len()) {
                    self.make_region_durable();
                }
                self.state.registers.read(offset, data);
            }
            (buffer::BAR, Some(buffer), _) => buffer.read(offset, data),
            (persistent::BAR, _, Some(region)) => region.read(offset, data),
            _ => {}
        }
    }

    fn bar_write(&mut self, bus: &Bus<'_>, bar: u8, offset: u64, data: &[u8]) {
        if bar != 0 {
            match (bar, &self.buffer, &self.region) {
                (buffer::BAR, Some(buffer), _) => buffer.write(offset, data),
                (persistent::BAR, _, Some(region)) => region.write(offset, data),
                _ => {}
            }
            return;
        }
        if let Some(at) = offset.checked_sub(DOORBELLS) {
            if let Ok(value) = <[u8; 4]>::try_from(data) {
                self.ring(bus, at, u32::from_le_bytes(value));
            }
            return;
        }
        self.write_register(bus, offset, data);
        if let Some(polled) = &mut self.polled {
            polled.show(&self.state.registers);
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
        let fresh = ControllerState::new(bus.now_ns);
        let old = std::mem::replace(&mut self.state, fresh);
        match kind {
            // Logs count over resets, for as long as one user has the drive.
            ResetKind::FunctionLevel => self.state.logs = old.logs,
            ResetKind::Scrub => {
                self.transfer.scrub();
                // One that fails again goes on failing: its next flush says so.
                let _ = self.backing.reload();
                self.renew_memory();
                self.retire_registers();
            }
        }
        self.place_memory();
        if let Some(polled) = &mut self.polled {
            polled.show(&self.state.registers);
        }
    }

    fn poll(&mut self, bus: &Bus<'_>) -> Work {
        if let Some(port) = &mut self.port {
            return port.poll(&mut *self.backing, &mut self.meter, bus);
        }
        if self.polled.is_none() {
            return self.turn(bus);
        }
        self.look_at_registers(bus);
        let work = self.turn(bus);
        self.show_registers(bus, work)
    }

    fn park(&mut self, bus: &Bus<'_>) -> bool {
        if let Some(port) = &mut self.port {
            return port.park(&mut *self.backing);
        }
        if self.state.untimed && self.state.vectors.any_waiting() {
            self.raise(bus, Default::default(), u32::MAX);
        }
        if !self.put_off.is_empty() {
            // Nobody would wake it for the next part of a Verify.
            return false;
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
        let mut described = self.description();
        let (port, handles) = match carried {
            None => {
                let (port, exchange) = DrivePort::new(&*self.backing, self.block())?;
                let mut handles = Handles::from(exchange);
                if let Some(region) = &self.region {
                    let region = region.handle().map_err(MediumRefused::Files)?;
                    handles.push(region.as_handle()).map_err(MediumRefused::Files)?;
                }
                (port, handles)
            }
            Some(carried) => {
                // Whoever is on another machine cannot map it.
                described.persistent = 0;
                (DrivePort::carried(carried, &*self.backing, self.block())?, Handles::new())
            }
        };
        let description = serde_json::to_string(&described).unwrap_or_default();
        self.port = Some(port);
        Ok(MediumOffer { class: CLASS, description, handles })
    }

    fn front_memory(&self) -> &'static [u8] {
        if self.region.is_some() { &[persistent::BAR] } else { &[] }
    }

    fn carried_by(&mut self, session: CarriedSession) {
        self.left.session = Some(session);
    }

    fn poll_registers(&mut self, bus: &Bus<'_>, bar: u8) -> Result<(OwnedFd, u64), NotPolled> {
        if self.region.is_some() {
            return Err(NotPolled::Barrier);
        }
        self.open_registers(bus, bar, BAR_SIZE)
    }

    fn retire_registers(&mut self) {
        if let Some(polled) = self.polled.take() {
            polled.retire();
        }
    }

    fn release_registers(&mut self) -> Option<WatchedRegisters> {
        self.polled.take().map(Polled::release)
    }

    fn watch_registers(&mut self, registers: WatchedRegisters) -> Result<(), NotPolled> {
        if self.region.is_some() {
            return Err(NotPolled::Barrier);
        }
        if self.port.is_some() {
            return Err(NotPolled::Elsewhere);
        }
        self.polled = Some(Polled::again(registers, BAR_SIZE)?);
        Ok(())
    }

    fn save(&mut self, bus: &Bus<'_>) -> Result<(ModelState, Vec<OwnedFd>), SaveError> {
        self.take_state(bus)
    }

    fn is_settled(&mut self) -> bool {
        self.backing.is_settled()
    }

    fn take_back(&mut self) {
        self.backing.take_back();
        if let Some(port) = &mut self.port {
            port.take_back();
        }
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

impl Nvme {
    /// A driver writes registers, by message or in memory.
    pub(in crate::nvme) fn write_register(&mut self, bus: &Bus<'_>, offset: u64, data: &[u8]) {
        let mut changes = Vec::new();
        self.state.registers.write(offset, data, |_, change| changes.push(change));
        for change in changes {
            match change {
                RegisterEffect::Configuration(old) => self.configure(bus, old.en(), old.shn()),
                RegisterEffect::InterruptMask(old) => self.mask_changed(bus, old),
                RegisterEffect::Buffer | RegisterEffect::Persistent => self.place_memory(),
                RegisterEffect::None => {}
            }
        }
    }

    /// A poll of a front that runs here.
    #[inline]
    fn turn(&mut self, bus: &Bus<'_>) -> Work {
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
}
