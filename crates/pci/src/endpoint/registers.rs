//! Registers of a function as memory.

use std::os::fd::OwnedFd;

use super::Endpoint;
use crate::function::Bus;
use crate::polled::NotPolled;

#[cfg(doc)]
use crate::function::Function;

impl Endpoint {
    /// Gives the registers of a BAR as memory; see [`Function::poll_registers`].
    ///
    /// # Errors
    /// [`NotPolled`].
    pub fn poll_registers(&mut self, bar: u8) -> Result<(OwnedFd, u64), NotPolled> {
        if self.ended {
            return Err(NotPolled::Elsewhere);
        }
        self.tick();
        let bus = Bus { dma: &self.dma, irq: &self.irq, user: &self.user, now_ns: self.now_ns };
        self.function.poll_registers(&bus, bar)
    }

    /// Registers that were given as memory read all ones from now on.
    pub fn retire_registers(&mut self) {
        self.function.retire_registers();
    }
}
