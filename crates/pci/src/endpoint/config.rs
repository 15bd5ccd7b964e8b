//! What an endpoint answers by itself: configuration space, and the MSI-X table and its pending bits.

use super::{Endpoint, FunctionRegion};
use crate::config::{MSIX_BAR, MsixPlace, msix_layout};
use crate::function::{Bar, Bus, FunctionInfo};

impl Endpoint {
    /// The place in a BAR of the model's that an access to configuration space reaches through a capability.
    pub(super) fn reached(&self, offset: u64, length: usize) -> Option<(u8, u64)> {
        let (bar, place) = self.config.reaches(offset, length)?;
        let inside = self.check(FunctionRegion::Bar(bar), place, length).is_ok();
        (inside && self.in_msix(bar, place).is_none()).then_some((bar, place))
    }

    pub(super) fn read_config(&mut self, offset: u64, data: &mut [u8]) {
        match self.reached(offset, data.len()) {
            Some((bar, place)) => {
                data.fill(0);
                let bus =
                    Bus { dma: &self.dma, irq: &self.irq, user: &self.user, now_ns: self.now_ns };
                self.function.bar_read(&bus, bar, place, data);
            }
            None => self.config.read(offset, data, self.irq.intx_level()),
        }
    }

    pub(super) fn write_config(&mut self, offset: u64, data: &[u8]) {
        let effects = self.config.write(offset, data);
        if effects.reset {
            self.reset();
            return;
        }
        if effects.command || effects.interrupts {
            if self.dma.master() && !self.config.masters_bus() {
                self.quiesce();
            }
            self.apply_config();
        }
    }

    /// Brings DMA space and interrupts in line with what configuration space says.
    pub(super) fn apply_config(&mut self) {
        use rackbus_spec::pcie::Command;
        self.dma.set_master(self.config.masters_bus());
        self.irq.set_mode(self.config.mode());
        self.irq.set_intx_disabled(self.config.command().contains(Command::INTERRUPT_DISABLE));
    }

    /// How far into the MSI-X structure an offset in a BAR is, if it is in it.
    pub(super) fn in_msix(&self, bar: u8, offset: u64) -> Option<u64> {
        let inside = || offset.checked_sub(self.msix.table.into());
        if bar == self.msix.bar { inside() } else { None }
    }

    pub(super) fn write_msix(&mut self, offset: u64, data: &[u8]) {
        for (at, byte) in (offset..).zip(data) {
            if let Some(slot) = usize::try_from(at).ok().and_then(|at| self.msix_table.get_mut(at))
            {
                *slot = *byte;
            }
        }
    }

    pub(super) fn read_msix(&self, offset: u64, data: &mut [u8]) {
        let table = self.msix_table.len() as u64;
        for (at, byte) in (offset..).zip(data.iter_mut()) {
            *byte = match at.checked_sub(table) {
                None => self.msix_table[usize::try_from(at).unwrap_or(0)],
                Some(pba) => {
                    let first = usize::try_from(pba).unwrap_or(usize::MAX).saturating_mul(8);
                    (0..8).fold(0, |bits, bit| {
                        bits | u8::from(self.irq.is_pending(first.saturating_add(bit))) << bit
                    })
                }
            };
        }
    }
}

/// `info` with the BAR of the MSI-X structure, if that has one of its own.
pub(super) fn with_msix_bar(info: &FunctionInfo) -> FunctionInfo {
    let mut info = info.clone();
    if MsixPlace::of(&info).bar != MSIX_BAR {
        return info;
    }
    info.bars.push(Bar {
        index: MSIX_BAR,
        size: msix_layout(info.msix_vectors).0,
        is_64bit: true,
        prefetchable: false,
        mappable: None,
    });
    info
}
