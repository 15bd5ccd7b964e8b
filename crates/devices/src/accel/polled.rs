//! A function's registers as memory that its driver has mapped: what it stores is looked at, what the function changes is
//! stored there. See [`rackbus_pci::polled`] for what that is and why an accelerator's registers can be shared so.
//!
//! * CONTROL is looked at in every poll. Before it says that the function runs, SHADOW is taken over. When it stops, all
//!   registers are shown as after power-on, STATUS last: a driver waits for that.
//! * ENABLE of each queue pair, in every poll while the function runs. Before it makes the queue pair, that one's other
//!   registers are taken over, and its doorbells become 0; STATE is stored after that, and a driver waits for it.
//! * Doorbells of the queue pairs that there are, in every poll.
//! * Where the page of shadow doorbells can be reached when the function begins to run, it says from then on that the
//!   function sleeps, so that a driver stores all doorbells in the registers, too. They are looked at there alone, which
//!   is this process' memory; the page may be another machine's, and each look at it a read across an NTB.

use std::os::fd::OwnedFd;

use rackbus_pci::{Bus, NotPolled, WatchedRegisters, Work};
use rackbus_spec::accel::{BAR_SIZE, queue_state, registers as reg};

use super::QUEUES;
use super::function::Front;
use super::medium::Medium;

/// The registers of queue pair `number`.
fn queue(number: u16) -> u64 {
    reg::QUEUE + u64::from(number) * reg::QUEUE_STRIDE
}

/// The doorbells of queue pair `number`: the submission ring's tail, the completion ring's head.
fn doorbells(number: u16) -> [u64; 2] {
    let tail = reg::DOORBELL + u64::from(number) * reg::DOORBELL_STRIDE;
    [tail, tail + 4]
}

/// What a queue pair is made from: all of its registers up to ENABLE.
fn described(number: u16) -> impl Iterator<Item = u64> {
    (queue(number)..queue(number) + reg::ENABLE).step_by(4)
}

impl<M: Medium> Front<M> {
    /// Gives the registers as memory; see [`Function::poll_registers`](rackbus_pci::Function::poll_registers).
    pub(super) fn open_registers(
        &mut self,
        bus: &Bus<'_>,
        bar: u8,
    ) -> Result<(OwnedFd, u64), NotPolled> {
        if bar != 0 {
            return Err(NotPolled::Bar(bar));
        }
        if self.medium.serves_elsewhere() {
            return Err(NotPolled::Elsewhere);
        }
        if let Some(polled) = &self.polled {
            return polled.registers().descriptor();
        }
        // No driver stores all ones to CONTROL.
        let polled = WatchedRegisters::new(BAR_SIZE, reg::CONTROL, bus.now_ns)?;
        let given = polled.registers().descriptor()?;
        self.polled = Some(polled);
        self.show_all();
        Ok(given)
    }

    /// Looks at registers again that were released, here or in another process.
    pub(super) fn watch(&mut self, registers: WatchedRegisters) -> Result<(), NotPolled> {
        if self.medium.serves_elsewhere() {
            return Err(NotPolled::Elsewhere);
        }
        if !registers.are(BAR_SIZE, reg::CONTROL) {
            return Err(NotPolled::State);
        }
        self.polled = Some(registers);
        Ok(())
    }

    /// Shows registers as they are, whatever is in the memory.
    fn show(&mut self, registers: impl Iterator<Item = u64>) {
        for at in registers {
            let value = self.read4(at);
            if let Some(polled) = &mut self.polled {
                polled.show(at, value);
            }
        }
    }

    /// Shows all registers, those last for which a driver waits.
    pub(super) fn show_all(&mut self) {
        if self.polled.is_none() {
            return;
        }
        let first = (0..reg::STATUS).step_by(4);
        self.show(first.chain([reg::SHADOW, reg::SHADOW + 4]));
        for number in 0..QUEUES {
            self.show_queue(number);
        }
        self.show([reg::STATUS].into_iter());
    }

    /// Shows a queue pair's registers and doorbells, and then its state.
    fn show_queue(&mut self, number: u16) {
        let at = queue(number);
        self.show(described(number).chain([at + reg::ENABLE]).chain(doorbells(number)));
        self.show([at + reg::STATE].into_iter());
    }

    /// Shows what a write by message to the word at `offset` has changed.
    pub(super) fn show_written(&mut self, offset: u64) {
        if self.polled.is_none() {
            return;
        }
        match self.queue_at(offset, reg::QUEUE, reg::QUEUE_STRIDE) {
            Some((number, reg::ENABLE)) => self.show_queue(number as u16),
            _ => self.show([offset].into_iter()),
        }
    }

    /// Does what the driver's stores to registers ask for.
    #[inline]
    pub(super) fn look_at_registers(&mut self, bus: &Bus<'_>) {
        let Some(polled) = &mut self.polled else { return };
        if polled.is_retired() {
            return;
        }
        if let Some(control) = polled.news(reg::CONTROL) {
            bus.user.before_access();
            let was_running = self.running;
            self.take_over([reg::SHADOW, reg::SHADOW + 4].into_iter());
            self.write4(reg::CONTROL, control);
            if !was_running && let Some(page) = self.shadow(bus) {
                self.tell_asleep(page, true);
                self.doorbells_in_registers = true;
            }
        }
        if !self.running {
            return;
        }
        for number in 0..QUEUES {
            self.look_at_queue(number);
        }
    }

    /// Does what the driver's stores to a queue pair's registers and doorbells ask for.
    #[inline]
    fn look_at_queue(&mut self, number: u16) {
        let Some(polled) = &mut self.polled else { return };
        let at = queue(number) + reg::ENABLE;
        let is_there = self.queues[usize::from(number)].state != queue_state::OFF;
        if let Some(enable) = polled.news(at)
            && (enable & 1 == 1) != is_there
        {
            self.take_over(described(number));
            self.write4(at, enable);
            self.show(doorbells(number).into_iter());
        }
        if !self.queues[usize::from(number)].is_on() {
            return;
        }
        for at in doorbells(number) {
            if let Some(value) = self.polled.as_mut().and_then(|polled| polled.news(at)) {
                self.write4(at, value);
            }
        }
    }

    /// Writes what the driver has stored in these registers, as if it came by message.
    fn take_over(&mut self, registers: impl Iterator<Item = u64>) {
        for at in registers {
            if let Some(polled) = &mut self.polled {
                let value = polled.registers().load(at);
                self.write4(at, value);
            }
        }
    }

    /// Tells the driver what a poll has changed, and says when to look again.
    #[inline]
    pub(super) fn show_registers(&mut self, bus: &Bus<'_>, work: Work) -> Work {
        let Some(polled) = &mut self.polled else { return work };
        for (number, pair) in (0..QUEUES).zip(&self.queues) {
            polled.tell(queue(number) + reg::STATE, pair.state);
        }
        polled.tell(reg::STATUS, self.running.into());
        polled.look_again(work, bus.now_ns)
    }
}
