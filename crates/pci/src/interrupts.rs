//! The interrupts of a function, as its user sees them: an eventfd for each vector of MSI-X or MSI,
//! and one for INTx.
//!
//! The engine that runs the function signals the descriptors itself; when the user is a VM on
//! another host of the rack, they are the VM's own. A vector without a descriptor is one its
//! driver does not listen to (it polls, or it masked it).

mod loans;

use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};

use rackbus_fabric::LoanError;
use rackbus_memory::{PeerEvent, Revoker};
use serde::{Deserialize, Serialize};

use crate::endpoint::IrqChange;
use crate::state::{Descriptors, InterruptState, RestoreError};

pub use loans::{InterruptLoans, LoanChange};

/// Why a change of the interrupt wiring was refused.
#[derive(Debug, thiserror::Error)]
pub enum WiringError {
    /// The vectors are not all there are.
    #[error("vectors {start}+{count} are not inside the function's {available}")]
    OutOfRange {
        /// First vector of the change.
        start: u32,
        /// How many it names.
        count: u32,
        /// How many the function has.
        available: u32,
    },
    /// The function may not raise interrupts of the user's host.
    #[error(transparent)]
    NotLent(#[from] LoanError),
    /// The descriptor cannot carry interrupts.
    #[error("descriptor for vector {vector}: {cause}")]
    Descriptor {
        /// The vector it was meant for.
        vector: u32,
        /// What is wrong with it.
        cause: std::io::Error,
    },
}

/// The kind of interrupts that a function's driver enabled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// None of the messages: the INTx pin.
    #[default]
    Pin,
    /// MSI, with as many vectors as the driver enabled.
    Msi {
        /// How many: those from here on send nothing.
        vectors: u16,
    },
    /// Interrupts by MSI-X, a vector each.
    Msix,
}

/// All interrupts of one function. Owned by its engine's thread.
#[derive(Debug)]
pub struct Interrupts {
    vectors: Vec<Option<PeerEvent>>,
    /// Signalled while masked or unwired; delivered when that ends (PCIe base 6.0, section 6.1.4.5).
    pending: Vec<Cell<bool>>,
    mode: Mode,
    intx: Option<PeerEvent>,
    intx_level: Cell<bool>,
    intx_masked: Cell<bool>,
    intx_disabled: bool,
    /// Once it has revoked, nothing is signalled any more.
    revoker: Revoker,
}

impl Interrupts {
    /// `vectors` vectors, of MSI-X or MSI, and one INTx pin, nothing wired.
    pub fn new(vectors: u16) -> Self {
        Interrupts::under(vectors, Revoker::default())
    }

    /// The same, which go nowhere once `revoker` has taken the function's memory away.
    pub(crate) fn under(vectors: u16, revoker: Revoker) -> Self {
        let count = usize::from(vectors);
        Interrupts {
            vectors: (0..count).map(|_| None).collect(),
            pending: vec![Cell::new(false); count],
            mode: Mode::Pin,
            intx: None,
            intx_level: Cell::new(false),
            intx_masked: Cell::new(false),
            intx_disabled: false,
            revoker,
        }
    }

    /// Raises vector `vector`; nothing happens for one that does not exist or is not enabled.
    pub fn trigger(&self, vector: u16) {
        if matches!(self.mode, Mode::Msi { vectors } if vector >= vectors) {
            return;
        }
        match self.vectors.get(usize::from(vector)) {
            Some(Some(event)) if !self.revoker.is_revoked() => event.ring(),
            Some(Some(_)) => {}
            Some(None) => self.pending[usize::from(vector)].set(true),
            None => {}
        }
    }

    /// Sets the level of the INTx pin. A rising level signals once; it signals again when the
    /// user unmasks the pin while it is still high, as a level-triggered line does.
    pub fn intx(&self, level: bool) {
        self.intx_level.set(level);
        if level {
            self.signal_intx();
        }
    }

    /// Signals INTx by software, whatever the level of the pin, which stays as it is.
    pub(crate) fn fire_intx(&self) {
        self.signal_intx();
    }

    /// The kind of interrupts that the driver enabled in configuration space.
    #[inline]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The level of the INTx pin, as the status register shows it.
    pub fn intx_level(&self) -> bool {
        self.intx_level.get()
    }

    /// How many vectors there are.
    pub fn vectors(&self) -> usize {
        self.vectors.len()
    }

    /// Whether vector `vector` was raised and not delivered: its bit in the PBA.
    pub fn is_pending(&self, vector: usize) -> bool {
        self.pending.get(vector).is_some_and(Cell::get)
    }

    /// Changes the wiring, or fires, as a user asks.
    ///
    /// # Errors
    /// When a vector does not exist or a descriptor is not fit; nothing changes then.
    pub fn change(&mut self, change: IrqChange) -> Result<(), WiringError> {
        match change {
            IrqChange::WireVectors(start, fds) => return self.wire_vectors(start, fds),
            IrqChange::UnwireVectors => self.unwire_vectors(),
            IrqChange::FireVectors(vectors) => vectors.iter().for_each(|v| self.trigger(*v)),
            IrqChange::WireIntx(fd) => return self.wire_intx(fd),
            IrqChange::MaskIntx(masked) => self.mask_intx(masked),
            IrqChange::FireIntx => self.fire_intx(),
        }
        Ok(())
    }

    /// The driver enabled this kind of interrupts.
    pub fn set_mode(&mut self, mode: Mode) {
        self.mode = mode;
    }

    /// The command register's interrupt-disable bit.
    pub(crate) fn set_intx_disabled(&mut self, disabled: bool) {
        let was = std::mem::replace(&mut self.intx_disabled, disabled);
        if was && !disabled && self.intx_level.get() {
            self.signal_intx();
        }
    }

    /// Wires the vectors from `start` on; `None` takes a wire away. All or nothing.
    ///
    /// # Errors
    /// When a vector does not exist or a descriptor is no eventfd.
    pub(crate) fn wire_vectors(
        &mut self,
        start: u32,
        fds: Vec<Option<OwnedFd>>,
    ) -> Result<(), WiringError> {
        let (available, count) = (self.vectors.len(), fds.len());
        let first = start as usize;
        if first.checked_add(count).is_none_or(|end| end > available) {
            return Err(WiringError::OutOfRange {
                start,
                count: u32::try_from(count).unwrap_or(u32::MAX),
                available: u32::try_from(available).unwrap_or(u32::MAX),
            });
        }
        let mut events = Vec::with_capacity(count);
        for (vector, fd) in (start..).zip(fds) {
            let event = fd.map(PeerEvent::new).transpose();
            events.push(event.map_err(|cause| WiringError::Descriptor { vector, cause })?);
        }
        for (index, event) in (first..).zip(events) {
            if let Some(event) = &event
                && self.pending[index].take()
            {
                event.ring();
            }
            self.vectors[index] = event;
        }
        Ok(())
    }

    /// Takes the wire of every vector away.
    pub(crate) fn unwire_vectors(&mut self) {
        self.vectors.iter_mut().for_each(|slot| *slot = None);
        self.pending.iter().for_each(|bit| bit.set(false));
    }

    /// Wires INTx, or takes its wire away.
    ///
    /// # Errors
    /// When the descriptor is no eventfd.
    pub(crate) fn wire_intx(&mut self, fd: Option<OwnedFd>) -> Result<(), WiringError> {
        let event = fd.map(PeerEvent::new).transpose();
        self.intx = event.map_err(|cause| WiringError::Descriptor { vector: 0, cause })?;
        self.intx_masked.set(false);
        if self.intx_level.get() {
            self.signal_intx();
        }
        Ok(())
    }

    /// The user masks or unmasks INTx.
    pub(crate) fn mask_intx(&self, masked: bool) {
        self.intx_masked.set(masked);
        if !masked && self.intx_level.get() {
            self.signal_intx();
        }
    }

    /// Signals once and masks the pin until the user has handled it (VFIO calls this
    /// *automasked*): the user unmasks at the end of its interrupt.
    fn signal_intx(&self) {
        let silent = self.intx_disabled || self.mode != Mode::Pin || self.revoker.is_revoked();
        if silent || self.intx_masked.get() {
            return;
        }
        if let Some(event) = &self.intx {
            self.intx_masked.set(true);
            event.ring();
        }
    }

    /// As after power-on, nothing wired.
    pub fn clear(&mut self) {
        let vectors = u16::try_from(self.vectors.len()).unwrap_or(0);
        *self = Interrupts::under(vectors, self.revoker.clone());
    }

    /// Levels and pending bits as after a function-level reset; the wires stay, they are the
    /// user's.
    pub fn reset_levels(&mut self) {
        self.pending.iter().for_each(|bit| bit.set(false));
        self.intx_level.set(false);
        self.intx_masked.set(false);
        self.intx_disabled = false;
        self.mode = Mode::Pin;
    }

    /// Levels, bits and wires, the latter appended to `descriptors`.
    pub(crate) fn save(&self, descriptors: &mut Vec<OwnedFd>) -> std::io::Result<InterruptState> {
        let mut keep = |event: &PeerEvent| {
            let number = u32::try_from(descriptors.len()).unwrap_or(u32::MAX);
            descriptors.push(event.as_fd().try_clone_to_owned()?);
            Ok::<u32, std::io::Error>(number)
        };
        let mut wires = Vec::new();
        for (vector, event) in (0..).zip(&self.vectors) {
            if let Some(event) = event {
                wires.push((vector, keep(event)?));
            }
        }
        let intx = self.intx.as_ref().map(keep).transpose()?;
        let pending = (0..).zip(&self.pending).filter(|(_, bit)| bit.get());
        Ok(InterruptState {
            wires,
            pending: pending.map(|(vector, _)| vector).collect(),
            intx,
            intx_level: self.intx_level.get(),
            intx_masked: self.intx_masked.get(),
        })
    }

    /// As they were when they were saved. Nothing is signalled: what was raised was delivered, or
    /// waits for a wire.
    pub(crate) fn restore(
        &mut self,
        saved: &InterruptState,
        descriptors: &mut Descriptors,
    ) -> Result<(), RestoreError> {
        for (vector, number) in &saved.wires {
            self.wire_vectors(*vector, vec![Some(descriptors.take(*number)?)])?;
        }
        if let Some(number) = saved.intx {
            self.wire_intx(Some(descriptors.take(number)?))?;
        }
        for vector in &saved.pending {
            let bit = usize::try_from(*vector).ok().and_then(|at| self.pending.get(at));
            let bit = bit.ok_or_else(|| RestoreError::Invalid(format!("vector {vector}")))?;
            bit.set(true);
        }
        self.intx_level.set(saved.intx_level);
        self.intx_masked.set(saved.intx_masked);
        Ok(())
    }
}
