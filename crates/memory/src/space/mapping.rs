//! How what is lent to a function is mapped: first into this process, where it may be refused, then for the function.

use std::sync::Arc;

use rackbus_fabric::{Access, BarPlace, Loan};

use super::limits::{MappingSlot, max_mappings};
use super::{Behind, DmaSpace, MapError, Mapped, Window};
use crate::handle::MemoryHandle;

/// Memory that is mapped into this process, and not yet for a function.
#[derive(Debug)]
pub struct PreparedMapping(Option<Mapped>);

impl DmaSpace {
    /// Maps what is lent: until it is unmapped, the function reaches it, as far as there is memory behind
    /// it. The loan ends with the mapping. A mapping of the same range that lost its memory, or was made
    /// with none, is given this one's.
    ///
    /// # Errors
    /// [`MapError`]; the space is unchanged then, and the loan has ended.
    pub fn map(&mut self, loan: Loan<Option<MemoryHandle>>) -> Result<(), MapError> {
        let ((iova, length), access) = (loan.range(), loan.access());
        let prepared = self.prepare(iova, length, access, loan.memory().as_ref())?;
        self.map_prepared(loan, prepared)
    }

    /// Maps `memory` into this process, for a mapping of `[iova, iova + length)` to come: what there may be to refuse
    /// is refused here, while nothing has changed.
    ///
    /// # Errors
    /// As [`map`](DmaSpace::map).
    pub fn prepare(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<&MemoryHandle>,
    ) -> Result<PreparedMapping, MapError> {
        self.check(iova, length, access, memory)?;
        self.prepare_memory((iova, length), access, memory, None)
    }

    /// As [`map`](DmaSpace::map), with what was [prepared](DmaSpace::prepare) for it.
    ///
    /// # Errors
    /// As [`map`](DmaSpace::map).
    pub fn map_prepared(
        &mut self,
        loan: Loan<Option<MemoryHandle>>,
        prepared: PreparedMapping,
    ) -> Result<(), MapError> {
        let ((iova, length), access) = (loan.range(), loan.access());
        self.check(iova, length, access, loan.memory().as_ref())?;
        let window = self.window(loan, None, prepared)?;
        if self.has(iova, length, access, None) {
            // It has no memory that would have to be released.
            let _ = self.domain.unmap(iova, length);
        }
        // Checked above: it is refused no more.
        self.domain.map(iova, length, access, window)?;
        self.generation += 1;
        Ok(())
    }

    /// Whether the user has nothing mapped in `[iova, iova + length)`, or a mapping that `memory` would be
    /// put behind, and could map it.
    fn check(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<&MemoryHandle>,
    ) -> Result<(), MapError> {
        if memory.is_some() && self.has(iova, length, access, None) {
            return Ok(());
        }
        Ok(self.domain.check(iova, length)?)
    }

    /// Maps memory, that of a window to `place` where there is one.
    pub(super) fn prepare_memory(
        &self,
        (iova, length): (u64, u64),
        access: Access,
        memory: Option<&MemoryHandle>,
        place: Option<&BarPlace>,
    ) -> Result<PreparedMapping, MapError> {
        // What the new one takes the place of is counted no more.
        let again = memory.is_some() && self.has(iova, length, access, None);
        if self.len() - usize::from(again) >= max_mappings() {
            return Err(MapError::TooMany(max_mappings()));
        }
        let Some(memory) = memory else { return Ok(PreparedMapping(None)) };
        if self.revoker.is_revoked() {
            return Err(MapError::Revoked);
        }
        // Each has one, whatever others have taken: where it reaches all of its user's memory by that, it can have it again.
        let slot = MappingSlot::take(length, &self.mapped_bytes, self.is_empty())?;
        let region = Arc::new(memory.map(length, access, place.is_some())?);
        Ok(PreparedMapping(Some(Mapped { region, _slot: slot })))
    }

    /// What is lent, mapped; with `place`, a window to that.
    pub(super) fn window(
        &mut self,
        loan: Loan<Option<MemoryHandle>>,
        place: Option<BarPlace>,
        PreparedMapping(region): PreparedMapping,
    ) -> Result<Window, MapError> {
        if let Some(Mapped { region, .. }) = &region
            && !self.revoker.admit(loan.range().0, region, loan.ending())
        {
            return Err(MapError::Revoked);
        }
        let (loan, memory) = loan.into_parts();
        let behind = memory.map_or(Behind::Nothing, |memory| self.files.keep(&memory));
        Ok(Window { loan, behind, region, place })
    }
}
