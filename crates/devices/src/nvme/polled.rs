//! The controller's registers as memory that a driver has mapped: what it stores is looked at, what the controller
//! changes is stored there. See [`rackbus_pci::polled`] for what that is and why NVMe's registers can be shared so.
//!
//! * CC is looked at in every poll. With a change of it while the controller is disabled, AQA, ASQ and ACQ are
//!   taken over first: a driver stores them before it enables (NVM Express base 1.4, section 7.6.1), and they hold
//!   still while it is enabled, as usual.
//! * Tail doorbells of the queues there are, in every poll; head doorbells when their queue has no room.
//! * CMBMSC of a drive with a memory buffer, in every poll; what it leads to is stored after it.
//! * CSTS is stored when it has changed, after what led to that.
//! * A doorbell is stored to by the controller in one case: it is 0 when its queue is made, which its driver waits
//!   for.
//! * INTMS and INTMC read 0 and are not looked at: with MSI-X a driver does not use them (section 3.1.3),
//!   and one that polls its completion queues need not.

use std::os::fd::OwnedFd;

use rackbus_pci::{Bus, NotPolled, WatchedRegisters, Work};
use rackbus_spec::nvme::registers::{self as offset, DOORBELLS};

use super::controller::Nvme;
use super::registers::NvmeRegisters;
use super::state::ControllerState;

/// Registers that a driver has mapped.
#[derive(Debug)]
pub struct Polled(WatchedRegisters);

/// Behind the last register before the doorbells that a driver without a persistent memory region knows.
const REGISTERS_END: u64 = offset::CMBSTS + 8;
/// The interrupt masks, which are events and not values.
const MASKS: [u64; 2] = [offset::INTMS, offset::INTMC];

/// Which of a queue pair's doorbells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DoorbellKind {
    /// Of the submission queue.
    Tail,
    /// Of the completion queue.
    Head,
}

/// The register of a doorbell.
fn register(qid: u16, side: DoorbellKind) -> u64 {
    let number = 2 * u64::from(qid) + u64::from(side == DoorbellKind::Head);
    DOORBELLS + number * (4 << super::registers::DOORBELL_STRIDE)
}

impl Polled {
    /// Memory of `length` bytes that shows the controller as it is.
    fn new(length: u64, state: &ControllerState, now_ns: u64) -> Result<Polled, NotPolled> {
        // No driver stores all ones to CC.
        let mut polled = Polled(WatchedRegisters::new(length, offset::CC, now_ns)?);
        polled.show(&state.registers);
        for queue in state.sqs.iter().flatten() {
            polled.set_doorbell(queue.id, DoorbellKind::Tail, queue.doorbell.value());
        }
        for queue in state.cqs.iter().flatten() {
            polled.set_doorbell(queue.id, DoorbellKind::Head, queue.doorbell.value());
        }
        Ok(polled)
    }

    /// Memory of `length` bytes that another process of the controller's had, or that was released here.
    pub fn again(registers: WatchedRegisters, length: u64) -> Result<Polled, NotPolled> {
        match registers.are(length, offset::CC) {
            true => Ok(Polled(registers)),
            false => Err(NotPolled::State),
        }
    }

    /// What is known of the memory, which is looked at no more.
    pub fn release(self) -> WatchedRegisters {
        self.0
    }

    /// Shows what registers hold that were written by message, or reset.
    pub fn show(&mut self, registers: &NvmeRegisters) {
        for at in (0..REGISTERS_END).step_by(4).filter(|at| !MASKS.contains(at)) {
            let mut word = [0; 4];
            registers.read(at, &mut word);
            self.0.show(at, u32::from_le_bytes(word));
        }
    }

    /// A new value of CMBMSC.
    #[inline]
    fn new_buffer_control(&mut self) -> Option<u64> {
        let [low, high] = [offset::CMBMSC, offset::CMBMSC + 4].map(|at| self.0.news(at));
        low.or(high).map(|_| self.0.registers().load_pair(offset::CMBMSC))
    }

    /// A new value of a doorbell, whatever it is.
    #[inline]
    pub fn new_doorbell(&mut self, qid: u16, side: DoorbellKind) -> Option<u32> {
        self.0.news(register(qid, side))
    }

    /// A doorbell is at `value`, and its driver stores nothing there meanwhile.
    fn set_doorbell(&mut self, qid: u16, side: DoorbellKind, value: u16) {
        self.0.show(register(qid, side), value.into());
    }

    /// A queue was made: its doorbell is 0.
    pub fn begin_queue(&mut self, qid: u16, side: DoorbellKind) {
        self.set_doorbell(qid, side, 0);
    }

    /// Their user has the device no more.
    pub fn retire(&self) {
        self.0.registers().retire();
    }
}

impl Nvme {
    /// Gives the registers as memory; see [`Function::poll_registers`](rackbus_pci::Function::poll_registers).
    pub(super) fn open_registers(
        &mut self,
        bus: &Bus<'_>,
        bar: u8,
        length: u64,
    ) -> Result<(OwnedFd, u64), NotPolled> {
        if bar != 0 {
            return Err(NotPolled::Bar(bar));
        }
        if self.port.is_some() {
            return Err(NotPolled::Elsewhere);
        }
        let polled = match &mut self.polled {
            Some(polled) => polled,
            none => none.insert(Polled::new(length, &self.state, bus.now_ns)?),
        };
        polled.0.registers().descriptor()
    }

    /// Does what the driver stored in CC asks for.
    #[inline]
    pub(super) fn look_at_registers(&mut self, bus: &Bus<'_>) {
        let Some(polled) = &mut self.polled else { return };
        if let Some(cc) = polled.0.news(offset::CC) {
            bus.user.before_access();
            let memory = polled.0.registers();
            let queues = [memory.load_pair(offset::ASQ), memory.load_pair(offset::ACQ)]
                .map(u64::to_le_bytes);
            let attributes = memory.load(offset::AQA).to_le_bytes();
            if !self.state.registers.cc.en() {
                self.write_register(bus, offset::AQA, &attributes);
                self.write_register(bus, offset::ASQ, &queues[0]);
                self.write_register(bus, offset::ACQ, &queues[1]);
            }
            self.write_register(bus, offset::CC, &cc.to_le_bytes());
        }
        if let Some(polled) = &mut self.polled
            && self.buffer.is_some()
            && let Some(control) = polled.new_buffer_control()
        {
            self.write_register(bus, offset::CMBMSC, &control.to_le_bytes());
            self.show_buffer();
        }
        // Events are told when there is room, which nothing else looks for.
        self.refresh_head(0);
    }

    /// Tells the driver where the memory buffer is, as its control says now.
    fn show_buffer(&mut self) {
        let Some(polled) = &mut self.polled else { return };
        for at in [offset::CMBLOC, offset::CMBSZ, offset::CMBSTS] {
            let mut word = [0; 4];
            self.state.registers.read(at, &mut word);
            polled.0.show(at, u32::from_le_bytes(word));
        }
    }

    /// Tells the driver what a poll has changed, and says when to look again.
    #[inline]
    pub(super) fn show_registers(&mut self, bus: &Bus<'_>, work: Work) -> Work {
        let Some(polled) = &mut self.polled else { return work };
        polled.0.tell(offset::CSTS, self.state.registers.csts.into());
        polled.0.look_again(work, bus.now_ns)
    }
}
