//! A BAR of a function, within reach of another one's DMA, or of its user's processors.
//!
//! The memory is behind a function of another host, or of the same: its owner is that host, wherever the
//! function that reaches it runs, and who borrowed both has none of it.

use std::sync::Arc;

use super::{Lending, Loan, LoanError, LoanRecord, UnknownPart};
use crate::domain::Access;
use crate::system::{AddressTarget, Requester, SpaceError};
use crate::topology::ComponentKind;

/// A place in a BAR of a function of the rack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BarPlace {
    /// Name of the function that has the BAR, `HOST/DEVICE`.
    pub function: String,
    /// The BAR, 0 to 5.
    pub bar: u8,
    /// Bytes from its beginning.
    pub offset: u64,
}

impl Lending {
    /// Lets the function reach the BAR of another: `length` bytes from `place` on, which `memory` leads to
    /// and the function calls `[iova, iova + length)`.
    ///
    /// # Errors
    /// [`LoanError`]; nothing changes then.
    pub fn lend_bar<M>(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        place: &BarPlace,
        memory: M,
    ) -> Result<Loan<Option<M>>, LoanError> {
        let mut fabric = self.fabric.lock();
        let unknown = || UnknownPart(place.function.clone());
        let device = fabric.topology().named(&place.function).ok_or_else(unknown)?;
        let part = fabric.topology().component(device);
        let misplaced = || SpaceError::Misplaced(place.function.clone());
        let owner =
            part.host.filter(|_| part.kind == ComponentKind::Device).ok_or_else(misplaced)?;
        let target = AddressTarget::Bar { device, bar: place.bar, offset: place.offset };
        let requester = Requester::Device(self.function);
        let entries = fabric.lend(requester, iova, (length, access), owner, target)?;
        drop(fabric);
        let record = Some(Arc::new(LoanRecord::new(&self.fabric, entries)));
        Ok(Loan { range: (iova, length), access, record, memory: Some(memory) })
    }

    /// Lets the processors of the user's host reach a part of the function's own BAR: what the user may map.
    ///
    /// # Errors
    /// [`LoanError`]; nothing changes then.
    pub fn share_bar(&self, bar: u8, (offset, length): (u64, u64)) -> Result<Loan, LoanError> {
        let device = self.function;
        let owner = self.fabric.lock().host_of(Requester::Device(device))?;
        let target = AddressTarget::Bar { device, bar, offset };
        self.fabric.share(self.owner, owner, length, Access::READ | Access::WRITE, target)
    }
}
