//! Windows to BARs of other functions: what a function reaches beside its user's memory.
//!
//! They are the borrower's node's, which learns from configuration space where its user has them. The user
//! itself may map the same range with no memory behind it: QEMU does, for it has no descriptor of a BAR that
//! it maps for its guest. Such a mapping says nothing of the memory there, so a window shows through it.
//! Where the user maps memory of its own, that is what it means by the address, and the window gives way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rackbus_fabric::{Access, BarPlace, Domain, Fault, Hit, Loan, UnmapError};

use super::{Behind, DmaMapping, DmaSpace, MapError, Window, release};
use crate::handle::MemoryHandle;

/// Bytes that a function moved by its DMA from and to BARs of others: counted by its thread when it looks up
/// the memory of a transfer, read by anybody. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct PeerBytes(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    read: AtomicU64,
    written: AtomicU64,
}

impl PeerBytes {
    /// Bytes read from others, and bytes written to others.
    pub fn get(&self) -> (u64, u64) {
        (self.0.read.load(Ordering::Relaxed), self.0.written.load(Ordering::Relaxed))
    }

    fn add(&self, access: Access, bytes: usize) {
        let count = if access.contains(Access::WRITE) { &self.0.written } else { &self.0.read };
        count.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// The windows of one function.
#[derive(Debug, Default)]
pub(super) struct Peers {
    windows: Domain<Window>,
    bytes: PeerBytes,
}

impl Peers {
    pub fn len(&self) -> usize {
        self.windows.len()
    }

    /// As [`Domain::resolve`], or what was found `otherwise`.
    #[cold]
    pub fn resolve_or<'a>(
        &'a self,
        (address, length, access): (u64, u64, Access),
        otherwise: Result<Hit<'a, Window>, Fault>,
    ) -> Result<Hit<'a, Window>, Fault> {
        if self.windows.is_empty() {
            return otherwise;
        }
        self.windows.resolve(address, length, access).or(otherwise)
    }

    /// Counts bytes that are handed out of a window.
    #[inline]
    pub fn count(&self, window: &Window, access: Access, bytes: usize) {
        if window.place.is_some() {
            self.bytes.add(access, bytes);
        }
    }
}

impl DmaSpace {
    /// Opens a window to `place`, a part of a BAR of another function, as [`map`](DmaSpace::map) maps.
    ///
    /// # Errors
    /// [`MapError`]; the space is unchanged then, and the loan has ended.
    pub fn open_window(
        &mut self,
        loan: Loan<Option<MemoryHandle>>,
        place: BarPlace,
    ) -> Result<(), MapError> {
        let ((iova, length), access) = (loan.range(), loan.access());
        self.peers.windows.check(iova, length)?;
        let memory = loan.memory().as_ref();
        let prepared = self.prepare_memory((iova, length), access, memory, Some(&place))?;
        let window = self.window(loan, Some(place), prepared)?;
        self.peers.windows.map(iova, length, access, window)?;
        self.generation += 1;
        Ok(())
    }

    /// Whether a window to just that memory is open.
    pub fn has_window(
        &self,
        (iova, length): (u64, u64),
        access: Access,
        place: &BarPlace,
        memory: &MemoryHandle,
    ) -> bool {
        let window = self.peers.windows.get(iova, length);
        window.is_some_and(|m| {
            let target = &m.target;
            m.access == access
                && target.place.as_ref() == Some(place)
                && target.behind.is(Some(memory))
        })
    }

    /// Closes the window of exactly `[iova, iova + length)`, as [`unmap`](DmaSpace::unmap) unmaps.
    ///
    /// # Errors
    /// When there is no such window.
    pub fn close_window(&mut self, iova: u64, length: u64) -> Result<(), UnmapError> {
        let window = self.peers.windows.unmap(iova, length)?;
        self.generation += 1;
        // First: whoever revokes meanwhile finds it, or nothing of it is reached any more.
        release(window.region);
        self.revoker.forget(iova);
        Ok(())
    }

    /// Closes all windows; nothing of other functions is reached any more.
    pub fn close_windows(&mut self) {
        self.close_windows_that(|_| true);
    }

    /// Whether any window has an address of `[iova, iova + length)`.
    pub fn windows_meet(&self, iova: u64, length: u64) -> bool {
        self.peers.windows.iter().any(|m| m.target.meets(iova, length))
    }

    /// Its user is about to map memory of its own at `[iova, iova + length)`: windows there give way.
    pub fn give_way(&mut self, iova: u64, length: u64) {
        self.close_windows_that(|window| window.meets(iova, length));
    }

    /// Whether the memory behind any window was truncated.
    pub fn windows_truncated(&self) -> bool {
        self.peers.windows.iter().any(|m| m.target.is_truncated())
    }

    /// Closes windows whose memory was truncated.
    pub fn close_truncated_windows(&mut self) {
        self.close_windows_that(Window::is_truncated);
    }

    fn close_windows_that(&mut self, close: impl Fn(&Window) -> bool) {
        let closing = self.peers.windows.iter().filter(|m| close(&m.target));
        let ranges: Vec<(u64, u64)> = closing.map(|m| m.target.loan.range()).collect();
        for (iova, length) in ranges {
            // It was found just now.
            let _ = self.close_window(iova, length);
        }
    }

    /// The windows, by address, each with what it leads to.
    pub fn windows(&self) -> impl Iterator<Item = (DmaMapping<'_>, &BarPlace)> {
        self.peers
            .windows
            .iter()
            .filter_map(|mapping| Some((mapping.target.mapping(), mapping.target.place.as_ref()?)))
    }

    /// Counts what a transfer moved, of which nothing was counted: memory that is mapped.
    #[inline]
    pub fn count_moved(&self, iova: u64, length: usize, access: Access) {
        if self.peers.len() > 0 {
            // Whoever moved it has found all of it.
            let _ = self.pieces(iova, length, access, &mut |window, slice| {
                self.peers.count(window, access, slice.len());
            });
        }
    }

    /// What was moved through windows.
    pub fn peer_bytes(&self) -> &PeerBytes {
        &self.peers.bytes
    }
}

impl Window {
    /// As its user made it.
    pub(super) fn mapping(&self) -> DmaMapping<'_> {
        let ((iova, length), access) = (self.loan.range(), self.loan.access());
        let behind: &Behind = &self.behind;
        DmaMapping { iova, length, access, behind }
    }

    fn meets(&self, iova: u64, length: u64) -> bool {
        let last = |start: u64, length: u64| start.saturating_add(length.saturating_sub(1));
        let (start, own) = self.loan.range();
        length > 0 && start <= last(iova, length) && iova <= last(start, own)
    }

    pub(super) fn is_truncated(&self) -> bool {
        self.region.as_ref().is_some_and(|mapped| mapped.region.truncated())
    }
}
