//! A function's life ends as a value, and another one begins with it.

use std::os::fd::OwnedFd;

use rackbus_fabric::BarPlace;
use rackbus_memory::MemoryHandle;

use super::Endpoint;
use crate::function::Bus;
use crate::interrupts::WiringError;
use crate::state::{
    Claim, Descriptors, FunctionState, InterruptState, MappingSaver, RegistersState, RestoreError,
    SaveError, Saved, VERSION, WindowState, sparse,
};

fn not_given() -> RestoreError {
    RestoreError::Invalid("memory of a device that is not there".to_owned())
}

impl Endpoint {
    /// The whole function as a value, to continue with elsewhere: what is under way is part of it. From
    /// now on nothing happens here any more, until this is dropped or the value
    /// [taken back](Endpoint::take_back): the model takes no commands and
    /// answers none, registers read as ones. What is under way with the medium may still end; it
    /// has when the endpoint is dropped or scrubbed.
    ///
    /// # Errors
    /// [`SaveError`]; the function goes on here as it was.
    pub fn save(&mut self) -> Result<Saved, SaveError> {
        if self.ended {
            return Err(SaveError::Ended);
        }
        self.user.check();
        if self.dma.revoker().is_revoked() && !self.dma.is_empty() {
            return Err(SaveError::Revoked);
        }
        self.tick();
        let mut descriptors = vec![Claim::create()?];
        let mut saver = MappingSaver::new(&mut descriptors);
        let (mappings, windows) = (saver.mappings(&self.dma)?, saver.windows(&self.dma)?);
        let bus = Bus { dma: &self.dma, irq: &self.irq, user: &self.user, now_ns: self.now_ns };
        let (model, medium) = self.function.save(&bus)?;
        let rest = self.save_rest(&mut descriptors).inspect_err(|_| {
            self.function.take_back();
            self.reclaim_registers();
        });
        let (registers, interrupts) = rest?;
        self.ended = true;
        let state = FunctionState {
            version: VERSION,
            config: self.config.save(),
            msix_table: sparse(&self.msix_table),
            interrupts,
            mappings,
            windows,
            registers,
            claim: 0,
            descriptors: u32::try_from(descriptors.len()).unwrap_or(u32::MAX),
            model,
        };
        Ok(Saved { state, descriptors, medium })
    }

    /// What is saved after the model, which may have raised interrupts just now.
    fn save_rest(
        &mut self,
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<(Option<RegistersState>, InterruptState), SaveError> {
        let registers = self.release_registers(descriptors)?;
        Ok((registers, self.irq.save(descriptors)?))
    }

    /// Whether what is under way with the medium has ended, after a [save](Endpoint::save).
    pub fn is_settled(&mut self) -> bool {
        self.function.is_settled()
    }

    /// Goes on here after all with what was [saved](Endpoint::save), which is of no use any more then.
    ///
    /// # Errors
    /// [`RestoreError`] when somebody has gone on from it; then nothing happens here any more.
    pub fn take_back(&mut self, saved: Saved) -> Result<(), RestoreError> {
        let mut descriptors = Descriptors::new(saved.descriptors, saved.state.descriptors)?;
        Claim::take(descriptors.take(saved.state.claim)?)?;
        self.ended = false;
        self.function.take_back();
        self.reclaim_registers();
        Ok(())
    }

    /// Goes on from `state` with the descriptors that belong to it, on an endpoint that is as new.
    /// The model has been given a medium that nothing of its earlier life uses any more. What was
    /// restored once, here or anywhere, is refused.
    ///
    /// # Errors
    /// [`RestoreError`]; the endpoint is scrubbed then, and the state may be restored elsewhere.
    pub fn restore(
        &mut self,
        state: &FunctionState,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), RestoreError> {
        let descriptors = Descriptors::new(descriptors, state.descriptors);
        let claimed = descriptors.and_then(|mut descriptors| {
            let claim = Claim::take(descriptors.take(state.claim)?)?;
            Ok((descriptors, claim))
        });
        let restored = claimed.and_then(|(descriptors, claim)| {
            let restored = self.try_restore(state, descriptors);
            if restored.is_err() {
                claim.give_back();
            }
            restored
        });
        if restored.is_err() {
            self.scrub();
        }
        restored
    }

    /// The function [goes on](Endpoint::restore) with this memory of a device, in the place of that in which its user's memory
    /// was reached by the process before.
    pub fn give_memory(&mut self, memory: MemoryHandle) {
        self.given = Some(memory);
    }

    fn try_restore(
        &mut self,
        state: &FunctionState,
        mut descriptors: Descriptors,
    ) -> Result<(), RestoreError> {
        self.tick();
        for mapping in &state.mappings {
            let memory = match mapping.memory {
                Some((number, offset)) => Some(descriptors.memory(number, offset)?),
                None if mapping.device => Some(self.given.take().ok_or_else(not_given)?),
                None => None,
            };
            let mapped = self.map(mapping.iova, mapping.length, mapping.access(), memory);
            mapped.map_err(|cause| RestoreError::Map { iova: mapping.iova, cause })?;
        }
        for WindowState { mapping, function, bar, offset } in &state.windows {
            let no_memory = || RestoreError::Invalid("a window without memory".to_owned());
            let (number, at) = mapping.memory.ok_or_else(no_memory)?;
            let place = BarPlace { function: function.clone(), bar: *bar, offset: *offset };
            let memory = descriptors.bar(number, at, &place)?;
            let (iova, length) = (mapping.iova, mapping.length);
            let opened = self.open_window(iova, length, mapping.access(), place, memory);
            opened.map_err(|cause| RestoreError::Map { iova, cause })?;
        }
        self.config.restore(&state.config);
        for (at, byte) in &state.msix_table {
            let slot = usize::try_from(*at).ok().and_then(|at| self.msix_table.get_mut(at));
            *slot.ok_or_else(|| RestoreError::Invalid(format!("MSI-X table byte {at}")))? = *byte;
        }
        // While the mode is that of an endpoint as new and no level is high, nothing is signalled.
        let vectors = state.interrupts.wires.iter().map(|(vector, _)| *vector);
        let pin = state.interrupts.intx.is_some();
        let loans = self.interrupt_loans.prepare_wired(&self.lending, vectors, pin);
        let loans = loans.map_err(WiringError::from)?;
        self.irq.restore(&state.interrupts, &mut descriptors)?;
        self.hold_interrupts(loans);
        self.apply_config();
        let bus = Bus { dma: &self.dma, irq: &self.irq, user: &self.user, now_ns: self.now_ns };
        self.function.restore(&bus, &state.model)?;
        match &state.registers {
            Some(registers) => self.restore_registers(registers, &mut descriptors),
            None => Ok(()),
        }
    }
}
