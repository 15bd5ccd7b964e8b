//! Interrupts of a function, within reach of it: what its user has wired to them.
//!
//! An interrupt is a message-signalled write (PCIe base 6.0, section 6.1.4) to an address of the user's host. It is checked
//! by the interrupt remapping of the function's host and not by its IOMMU domain, as in VT-d (specification 4.1,
//! section 5): no range of addresses that a driver may map is taken for it.

use std::sync::Arc;

use super::{Lending, Loan, LoanError, LoanRecord};
use crate::domain::Access;
use crate::system::{AddressTarget, FunctionInterrupt, Requester};

impl Lending {
    /// Lets the function raise `interrupt`, which its user has wired.
    ///
    /// # Errors
    /// [`LoanError`], also when it may raise that already; nothing changes then.
    pub fn lend_interrupt(&self, interrupt: FunctionInterrupt) -> Result<Loan, LoanError> {
        let requester = Requester::Interrupts(self.function);
        let (at, access) = (interrupt.place(), Access::WRITE);
        let range = (FunctionInterrupt::MESSAGE, access);
        let target = AddressTarget::Wired(interrupt);
        let entries = self.fabric.lock().lend(requester, at, range, self.owner, target)?;
        let record = Some(Arc::new(LoanRecord::new(&self.fabric, entries)));
        Ok(Loan { range: (at, FunctionInterrupt::MESSAGE), access, record, memory: () })
    }
}
