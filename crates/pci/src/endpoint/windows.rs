//! Windows of a function to BARs of others that its user has: peer-to-peer.

use rackbus_fabric::BarPlace;
use rackbus_memory::{Access, MapError, MemoryHandle, UnmapError};

use super::Endpoint;

impl Endpoint {
    /// Opens a window: the function reaches `memory`, which is part of the BAR at `place`, at
    /// `[iova, iova + length)`. One that is open there to the same memory stays: the node that opened it was
    /// restarted, and opens it again.
    ///
    /// # Errors
    /// [`MapError`]; nothing changes then.
    pub fn open_window(
        &mut self,
        iova: u64,
        length: u64,
        access: Access,
        place: BarPlace,
        memory: MemoryHandle,
    ) -> Result<(), MapError> {
        if self.dma.has_window((iova, length), access, &place, &memory) {
            return Ok(());
        }
        let loan = self.lending.lend_bar(iova, length, access, &place, memory)?;
        self.dma.open_window(loan, place)
    }

    /// Closes a window. On return nothing of it is read or written any more.
    ///
    /// # Errors
    /// When there is no window of exactly this range.
    pub fn close_window(&mut self, iova: u64, length: u64) -> Result<(), UnmapError> {
        self.quiesce();
        self.dma.close_window(iova, length)
    }

    /// The user maps memory of its own there.
    pub(super) fn give_way(&mut self, iova: u64, length: u64) {
        if self.dma.windows_meet(iova, length) {
            self.quiesce();
            self.dma.give_way(iova, length);
        }
    }

    /// Closes windows to what is not there any more; true when there were any.
    pub(super) fn close_truncated_windows(&mut self) -> bool {
        if !self.dma.windows_truncated() {
            return false;
        }
        self.quiesce();
        self.dma.close_truncated_windows();
        true
    }
}
