//! Memory that is lent by way of others: counted where it is, with its loans elsewhere.

use super::{FabricHandle, LoanError};
use crate::system::ObjectKey;
use crate::topology::HostId;

/// Bytes of a host that count as lent until this is dropped.
#[derive(Debug)]
pub struct CountedBytes {
    fabric: FabricHandle,
    owner: HostId,
    object: ObjectKey,
    offset: u64,
    length: u64,
}

impl FabricHandle {
    /// Counts `length` bytes of `object`, which `owner` has, as lent. What is counted or lent of the same bytes
    /// besides counts once.
    ///
    /// # Errors
    /// [`LoanError::TooMuch`] when the host does not have so much; nothing changes then.
    pub fn count(
        &self,
        owner: HostId,
        object: ObjectKey,
        offset: u64,
        length: u64,
    ) -> Result<CountedBytes, LoanError> {
        self.lock().count(owner, object, offset, length)?;
        Ok(CountedBytes { fabric: self.clone(), owner, object, offset, length })
    }
}

impl Drop for CountedBytes {
    fn drop(&mut self) {
        self.fabric.lock().discount(self.owner, (self.object, self.offset), self.length);
    }
}
