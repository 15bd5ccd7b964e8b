//! What the user of a physical function, or of another program's, has wired to its interrupts: one record for both, with a
//! loan for each wire. A modelled function's endpoint has its own.

use std::sync::{Mutex, MutexGuard, PoisonError};

use rackbus_fabric::{FunctionInterrupt, LoanError};
use rackbus_memory::Lending;
use rackbus_pci::endpoint::IrqChange;
use rackbus_pci::interrupts::{InterruptLoans, WiringError};
use rackbus_pci::vfio_user::RequestRefused;

/// The interrupts that a function may raise, until this is dropped.
#[derive(Debug, Default)]
pub(crate) struct WiredInterrupts(Mutex<InterruptLoans>);

impl WiredInterrupts {
    /// Those that were wired in another process, with new loans.
    ///
    /// # Errors
    /// They are not lent here.
    pub fn resumed(
        lending: &Lending,
        vectors: impl Iterator<Item = u32>,
        pin: bool,
    ) -> Result<WiredInterrupts, LoanError> {
        let mut loans = InterruptLoans::default();
        let prepared = loans.prepare_wired(lending, vectors, pin)?;
        loans.apply(prepared);
        Ok(WiredInterrupts(Mutex::new(loans)))
    }

    /// Has `carry_out` change the wiring, and what is lent with it. Only one thread at a time changes it.
    ///
    /// # Errors
    /// What is wired cannot be lent, and nothing is changed then; or what `carry_out` says, which may have wired a part of
    /// it: all of that stays lent as long as the user is there.
    pub fn change(
        &self,
        lending: &Lending,
        change: IrqChange,
        carry_out: impl FnOnce(IrqChange) -> Result<(), RequestRefused>,
    ) -> Result<(), RequestRefused> {
        // Whoever carries it out may wait for another process: not under the lock.
        let loans = self.lock().prepare(lending, &change).map_err(WiringError::from)?;
        let outcome = carry_out(change);
        match &outcome {
            Ok(()) => self.lock().apply(loans),
            Err(_) => self.lock().keep(loans),
        }
        outcome
    }

    /// The vectors that are wired, and whether the pin is.
    pub fn wired(&self) -> (Vec<u32>, bool) {
        let (mut vectors, mut pin) = (Vec::new(), false);
        for interrupt in self.lock().wired() {
            match interrupt {
                FunctionInterrupt::Vector(vector) => vectors.push(vector.into()),
                FunctionInterrupt::Pin => pin = true,
            }
        }
        (vectors, pin)
    }

    fn lock(&self) -> MutexGuard<'_, InterruptLoans> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
