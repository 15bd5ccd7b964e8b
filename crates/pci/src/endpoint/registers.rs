//! Registers of a function as memory.

use std::os::fd::OwnedFd;

use super::Endpoint;
use crate::function::Bus;
use crate::polled::{NotPolled, WatchedRegisters};
use crate::state::{Descriptors, RegistersState, RestoreError};

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
        let given = self.function.poll_registers(&bus, bar)?;
        self.polled_bar = bar;
        Ok(given)
    }

    /// Registers that were given as memory read all ones from now on.
    pub fn retire_registers(&mut self) {
        self.function.retire_registers();
        if let Some(released) = self.released.take() {
            released.registers().retire();
        }
    }

    /// Registers in memory as a value, whose descriptor is appended; the model, which was saved, looks at them no more.
    pub(super) fn release_registers(
        &mut self,
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<Option<RegistersState>, NotPolled> {
        self.released = self.function.release_registers();
        let Some(released) = &self.released else { return Ok(None) };
        let (file, _) = released.registers().descriptor()?;
        let memory = u32::try_from(descriptors.len()).unwrap_or(u32::MAX);
        descriptors.push(file);
        Ok(Some(RegistersState { bar: self.polled_bar, memory, watched: released.state() }))
    }

    /// The model has its registers again, after it was saved in vain.
    pub(super) fn reclaim_registers(&mut self) {
        if let Some(released) = self.released.take()
            && let Err(error) = self.function.watch_registers(released)
        {
            tracing::error!(%error, "a function does not look at its registers any more");
        }
    }

    /// Goes on with the registers that another process had in memory.
    pub(super) fn restore_registers(
        &mut self,
        state: &RegistersState,
        descriptors: &mut Descriptors,
    ) -> Result<(), RestoreError> {
        let file = descriptors.take(state.memory)?;
        self.polled_bar = state.bar;
        let registers = WatchedRegisters::resume(file, &state.watched, self.now_ns)?;
        Ok(self.function.watch_registers(registers)?)
    }
}
