//! The isolation test function: a device that a hostile user tells to read or write memory by DMA at any address, of any
//! length, and that does what it is told. What stops it is the domain that it is in, and nothing else.

use std::os::fd::{BorrowedFd, OwnedFd};

use rackbus_memory::Access;
use rackbus_pci::{
    Bar, Bus, Function, FunctionInfo, ModelState, ResetKind, RestoreError, SaveError, Work,
};

/// Registers in BAR 0, of 8 bytes each: the address and length of the next access.
pub const ADDRESS: u64 = 0x00;
pub const LENGTH: u64 = 0x08;
/// The byte that is written.
pub const VALUE: u64 = 0x10;
/// Writing it starts the access: [`READ`] or [`WRITE`].
pub const COMMAND: u64 = 0x18;
/// 0 not ended yet, [`DONE`] or [`REFUSED`].
pub const STATUS: u64 = 0x20;
/// [`sum`] of the bytes that were read.
pub const SUM: u64 = 0x28;

pub const READ: u64 = 1;
pub const WRITE: u64 = 2;
pub const DONE: u64 = 1;
pub const REFUSED: u64 = 2;

const REGISTERS: usize = 6;

/// What a read makes of its bytes (FNV-1a), from what it made of those before; begins with [`SUM_OF_NONE`].
pub fn sum(before: u64, bytes: &[u8]) -> u64 {
    let add = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(before, add)
}

pub const SUM_OF_NONE: u64 = 0xcbf2_9ce4_8422_2325;

pub struct Probe {
    info: FunctionInfo,
    registers: [u64; REGISTERS],
    pending: bool,
}

impl Probe {
    pub fn new() -> Box<Self> {
        let bar =
            Bar { index: 0, size: 0x1000, is_64bit: true, prefetchable: false, mappable: None };
        let info = FunctionInfo {
            vendor_id: 0x1234,
            device_id: 0x5679,
            subsystem_vendor_id: 0,
            subsystem_id: 0,
            revision: 1,
            class: [0xff, 0, 0],
            bars: vec![bar],
            msix_vectors: 1,
            msi_vectors: 1,
            vendor: Vec::new(),
            serial: 1,
        };
        Box::new(Probe { info, registers: [0; REGISTERS], pending: false })
    }

    fn at(&mut self, register: u64) -> &mut u64 {
        &mut self.registers[(register / 8) as usize]
    }

    fn access(&mut self, bus: &Bus<'_>) -> bool {
        let [address, length, value, command, ..] = self.registers;
        let Ok(length) = usize::try_from(length) else { return false };
        if command == READ {
            let mut read = SUM_OF_NONE;
            let outcome = bus.dma.walk(address, length, Access::READ, |slice| {
                let mut bytes = vec![0; slice.len()];
                slice.copy_to(&mut bytes);
                read = sum(read, &bytes);
            });
            *self.at(SUM) = read;
            return outcome.is_ok();
        }
        let outcome = bus.dma.walk(address, length, Access::WRITE, |slice| {
            slice.copy_from(&vec![value as u8; slice.len()]);
        });
        outcome.is_ok()
    }
}

impl Function for Probe {
    fn info(&self) -> &FunctionInfo {
        &self.info
    }

    fn bar_read(&mut self, _: &Bus<'_>, _: u8, offset: u64, data: &mut [u8]) {
        let bytes: Vec<u8> = self.registers.iter().flat_map(|it| it.to_le_bytes()).collect();
        for (at, byte) in (offset as usize..).zip(data) {
            *byte = bytes.get(at).copied().unwrap_or(0);
        }
    }

    fn bar_write(&mut self, _: &Bus<'_>, _: u8, offset: u64, data: &[u8]) {
        if let (Ok(value), true) = (data.try_into(), offset < SUM && offset.is_multiple_of(8)) {
            *self.at(offset) = u64::from_le_bytes(value);
            self.pending |= offset == COMMAND;
        }
    }

    fn reset(&mut self, _: &Bus<'_>, _: ResetKind) {
        (self.registers, self.pending) = ([0; REGISTERS], false);
    }

    fn poll(&mut self, bus: &Bus<'_>) -> Work {
        if !std::mem::take(&mut self.pending) {
            return Work::Asleep(None);
        }
        let reached = self.access(bus);
        *self.at(STATUS) = if reached { DONE } else { REFUSED };
        Work::Done
    }

    fn park(&mut self, _: &Bus<'_>) -> bool {
        !self.pending
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn quiesce(&mut self, _: &Bus<'_>) {}

    fn save(&mut self, _: &Bus<'_>) -> Result<(ModelState, Vec<OwnedFd>), SaveError> {
        Ok((ModelState::new("probe", 1, &(self.registers, self.pending))?, Vec::new()))
    }

    fn restore(&mut self, _: &Bus<'_>, state: &ModelState) -> Result<(), RestoreError> {
        (self.registers, self.pending) = state.read("probe", 1)?;
        Ok(())
    }
}
