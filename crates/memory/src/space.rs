//! A function's view of memory: its IOMMU domain, and the mapped regions behind it.
//!
//! What a function reaches, the fabric decided and keeps ([`rackbus_fabric::loan`]). This holds its
//! loans, each with the memory that it leads to, sorted by address: so an access asks nobody.
//! It is the only way from an address that a driver wrote somewhere to bytes (invariant I1): what
//! no mapping covers is refused, counted, and reported with its address.
//!
//! One thread owns a `DmaSpace`, the one that runs the function: so no lock is taken on the way
//! to memory, and a mapping goes away between two operations, never during one.

mod error;
mod fault;
mod files;
mod limits;
mod mapping;
mod peers;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use rackbus_fabric::{Access, BarPlace, Domain, Fault, FaultCause, Hit, Loan};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::handle::MemoryHandle;
use crate::refusals::Refusals;
use crate::region::Region;
use crate::revoker::{Revoker, revoke_region};
use crate::slice::{DmaSlice, PinnedPieces, PinnedSlice};

pub use error::MapError;
pub use fault::DmaFault;
use files::Files;
pub use files::{Behind, KEPT_FILES};
use limits::MappingSlot;
pub use limits::{max_mappings, system_mappings};
pub use mapping::PreparedMapping;
pub use peers::PeerBytes;
use peers::Peers;

/// Why a range could not be unmapped.
pub use rackbus_fabric::UnmapError;

/// A range of a function's addresses: the loan that it is reached by, and the memory if there is any.
#[derive(Debug)]
struct Window {
    loan: Loan,
    behind: Behind,
    region: Option<Mapped>,
    /// The part of another function's BAR that it is a window to; otherwise it is the user's own mapping.
    place: Option<BarPlace>,
}

/// A mapped region, counted against what the process may have.
#[derive(Debug)]
struct Mapped {
    region: Arc<Region>,
    _slot: MappingSlot,
}

/// A mapping of a function, as its user made it.
#[derive(Debug, Clone, Copy)]
pub struct DmaMapping<'a> {
    /// What the function calls its first byte.
    pub iova: u64,
    /// Its length in bytes.
    pub length: u64,
    /// What the function may do.
    pub access: Access,
    /// What is behind it.
    pub behind: &'a Behind,
}

/// The IOMMU domain of one function with the windows it leads to.
#[derive(Debug, Default)]
pub struct DmaSpace {
    domain: Domain<Window>,
    peers: Peers,
    mapped_bytes: Arc<AtomicU64>,
    master: bool,
    generation: u64,
    refusals: Refusals,
    revoker: Revoker,
    files: Files,
}

impl DmaSpace {
    /// Nothing mapped, bus mastering off.
    pub fn new() -> Self {
        DmaSpace::default()
    }

    /// Whether `[iova, iova + length)` is mapped to just that memory, or to none.
    pub fn has(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<&MemoryHandle>,
    ) -> bool {
        let mapping = self.domain.get(iova, length);
        mapping.is_some_and(|m| m.access == access && m.target.behind.is(memory))
    }

    /// Takes the mappings inside of `[iova, iova + length)` away: who translates DMA itself gives many of them
    /// up at once. On return nothing reaches their memory any more, even through a [`PinnedSlice`] that
    /// somebody kept.
    ///
    /// # Errors
    /// When there is none, or one is inside in part; nothing changes then.
    pub fn unmap(&mut self, iova: u64, length: u64) -> Result<(), UnmapError> {
        let windows = self.domain.unmap_within(iova, length)?;
        self.release_windows(windows);
        Ok(())
    }

    fn release_windows(&mut self, windows: Vec<Window>) {
        self.generation += 1;
        for window in windows {
            // A mapping without memory may be where a window is.
            let has_memory = window.region.is_some();
            // First: whoever revokes meanwhile finds it, or nothing of it is reached any more.
            release(window.region);
            if has_memory {
                self.revoker.forget(window.loan.range().0);
            }
        }
    }

    /// Takes every mapping of its user away, windows not; returns how many there were.
    pub fn unmap_all(&mut self) -> usize {
        let windows = self.domain.clear();
        let count = windows.len();
        self.release_windows(windows);
        count
    }

    /// Releases all memory: its owner truncated some of it. The mappings stay, as ones that no
    /// memory is behind, until their owner takes them away; windows are closed.
    pub fn drop_memory(&mut self) {
        self.close_windows();
        self.generation += 1;
        for window in self.domain.targets_mut() {
            window.loan.end();
            // To map the same again is to map what is there then, and not what was there.
            window.behind = Behind::Nothing;
            release(window.region.take());
        }
        // Last: whoever revokes meanwhile finds what is reached still.
        self.revoker.forget_all();
    }

    /// What takes all memory away, from any thread.
    pub fn revoker(&self) -> &Revoker {
        &self.revoker
    }

    /// A new user begins, whose memory may be mapped.
    pub fn begin(&mut self) {
        self.revoker.renew();
    }

    /// Lets the function master the bus, or not: its command register's bus-master bit.
    pub fn set_master(&mut self, on: bool) {
        // What was looked up while bus mastering was off was refused.
        self.generation += u64::from(self.master != on);
        self.master = on;
    }

    /// Whether the function may master the bus.
    pub fn master(&self) -> bool {
        self.master
    }

    /// Moves whenever a mapping comes or goes, or bus mastering does; a cached [`PinnedSlice`] is stale then.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The mappings of its user, by address.
    pub fn mappings(&self) -> impl Iterator<Item = DmaMapping<'_>> {
        self.domain.iter().map(|mapping| mapping.target.mapping())
    }

    /// How many mappings and windows there are.
    pub fn len(&self) -> usize {
        self.domain.len() + self.peers.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The accesses that were refused.
    pub fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    /// Whether the user truncated any memory that it mapped.
    pub fn truncated(&self) -> bool {
        self.domain.iter().any(|m| m.target.is_truncated())
    }

    /// The memory at `[iova, iova + length)`, all of it in one window.
    ///
    /// # Errors
    /// [`DmaFault`] when any byte of it is not mapped with `access`, or windows meet inside it
    /// (use [`walk`](DmaSpace::walk) for those).
    #[inline]
    pub fn slice(
        &self,
        iova: u64,
        length: usize,
        access: Access,
    ) -> Result<DmaSlice<'_>, DmaFault> {
        let (window, region, offset) = self.piece(iova, length as u64, length as u64, access)?;
        self.peers.count(window, access, length);
        region.slice(offset, length).ok_or_else(|| self.refuse(no_memory(iova, length as u64)))
    }

    /// As [`slice`](DmaSpace::slice), but keeps the mapping alive; see [`PinnedSlice`].
    ///
    /// # Errors
    /// As [`slice`](DmaSpace::slice).
    pub fn pin(&self, iova: u64, length: usize, access: Access) -> Result<PinnedSlice, DmaFault> {
        let (window, region, offset) = self.piece(iova, length as u64, length as u64, access)?;
        self.peers.count(window, access, length);
        PinnedSlice::new(region.clone(), offset, length)
            .ok_or_else(|| self.refuse(no_memory(iova, length as u64)))
    }

    /// As [`pin`](DmaSpace::pin), of memory in which windows may meet: a piece in each.
    ///
    /// # Errors
    /// [`DmaFault`] when any byte is not mapped with `access`.
    pub fn pin_pieces(
        &self,
        iova: u64,
        length: usize,
        access: Access,
    ) -> Result<PinnedPieces, DmaFault> {
        let pinned = self.pin_uncounted(iova, length, access)?;
        self.count_moved(iova, length, access);
        Ok(pinned)
    }

    /// The same for memory of a transfer that is counted at another time: before, where it is looked up again, or
    /// [afterwards](DmaSpace::count_moved).
    ///
    /// # Errors
    /// As [`pin_pieces`](DmaSpace::pin_pieces).
    pub fn pin_uncounted(
        &self,
        iova: u64,
        length: usize,
        access: Access,
    ) -> Result<PinnedPieces, DmaFault> {
        let mut pieces: Option<PinnedPieces> = None;
        let mut done = 0;
        loop {
            let Some(at) = iova.checked_add(done as u64) else {
                return Err(self.refuse(domain_fault(iova, length as u64, FaultCause::Wraps)));
            };
            let left = length - done;
            let (_, region, offset) = self.piece(at, left as u64, left.min(1) as u64, access)?;
            let count = (region.len() - offset).min(left);
            let piece = PinnedSlice::new(region.clone(), offset, count);
            let piece = piece.ok_or_else(|| self.refuse(no_memory(at, count as u64)))?;
            done = match &mut pieces {
                None if count == left => return Ok(PinnedPieces::new(piece)),
                None => {
                    pieces = Some(PinnedPieces::new(piece));
                    count
                }
                Some(pieces) => {
                    pieces.push(done, piece);
                    done + count
                }
            };
            if done == length
                && let Some(pieces) = pieces
            {
                return Ok(pieces);
            }
        }
    }

    /// Visits the memory at `[iova, iova + length)` in order, window by window. Nothing is visited
    /// unless all of it can be reached.
    ///
    /// # Errors
    /// [`DmaFault`] when any byte is not mapped with `access`.
    pub fn walk<'a>(
        &'a self,
        iova: u64,
        length: usize,
        access: Access,
        mut visit: impl FnMut(DmaSlice<'a>),
    ) -> Result<(), DmaFault> {
        // Most of what is asked for lies in one window, which is then looked up once.
        if length > 0
            && let Some(slice) = self.slice_if_mapped(iova, length, access)
        {
            visit(slice);
            return Ok(());
        }
        self.pieces(iova, length, access, &mut |_, _| {})?;
        self.pieces(iova, length, access, &mut |window, slice| {
            self.peers.count(window, access, slice.len());
            visit(slice);
        })
    }

    /// Copies from memory at `iova` into `out`.
    ///
    /// # Errors
    /// As [`walk`](DmaSpace::walk); nothing is copied then.
    pub fn read(&self, iova: u64, out: &mut [u8]) -> Result<(), DmaFault> {
        if let Some(slice) = self.slice_if_mapped(iova, out.len(), Access::READ) {
            slice.copy_to(out);
            return Ok(());
        }
        let mut done = 0;
        self.walk(iova, out.len(), Access::READ, |slice| {
            done += slice.copy_to(&mut out[done..]);
        })
    }

    /// Copies `data` to memory at `iova`.
    ///
    /// # Errors
    /// As [`walk`](DmaSpace::walk); nothing is copied then.
    pub fn write(&self, iova: u64, data: &[u8]) -> Result<(), DmaFault> {
        if let Some(slice) = self.slice_if_mapped(iova, data.len(), Access::WRITE) {
            slice.copy_from(data);
            return Ok(());
        }
        let mut done = 0;
        self.walk(iova, data.len(), Access::WRITE, |slice| {
            done += slice.copy_from(&data[done..]);
        })
    }

    /// Copies a plain value from memory at `iova`.
    ///
    /// # Errors
    /// As [`walk`](DmaSpace::walk).
    pub fn read_obj<T: FromBytes + IntoBytes>(&self, iova: u64) -> Result<T, DmaFault> {
        let mut value = T::new_zeroed();
        self.read(iova, value.as_mut_bytes())?;
        Ok(value)
    }

    /// Copies a plain value to memory at `iova`.
    ///
    /// # Errors
    /// As [`walk`](DmaSpace::walk).
    pub fn write_obj<T: IntoBytes + Immutable>(
        &self,
        iova: u64,
        value: &T,
    ) -> Result<(), DmaFault> {
        self.write(iova, value.as_bytes())
    }

    fn pieces<'a>(
        &'a self,
        iova: u64,
        length: usize,
        access: Access,
        visit: &mut impl FnMut(&'a Window, DmaSlice<'a>),
    ) -> Result<(), DmaFault> {
        let mut done = 0;
        while done < length {
            let Some(at) = iova.checked_add(done as u64) else {
                return Err(self.refuse(domain_fault(iova, length as u64, FaultCause::Wraps)));
            };
            let (window, region, offset) = self.piece(at, (length - done) as u64, 1, access)?;
            let count = (region.len() - offset).min(length - done);
            let slice = region
                .slice(offset, count)
                .ok_or_else(|| self.refuse(no_memory(at, count as u64)))?;
            visit(window, slice);
            done += count;
        }
        Ok(())
    }

    /// As [`slice`](DmaSpace::slice), for who has another way to what is not mapped here: nothing is counted as
    /// refused.
    #[inline]
    pub fn slice_if_mapped(
        &self,
        iova: u64,
        length: usize,
        access: Access,
    ) -> Option<DmaSlice<'_>> {
        let (window, slice) = self.find_slice(iova, length, access)?;
        self.peers.count(window, access, length);
        Some(slice)
    }

    /// The same for who may move nothing there: what it does move it [counts](DmaSpace::count_moved) itself.
    #[inline]
    pub fn slice_uncounted(
        &self,
        iova: u64,
        length: usize,
        access: Access,
    ) -> Option<DmaSlice<'_>> {
        self.find_slice(iova, length, access).map(|(_, slice)| slice)
    }

    /// Whether all of it could be reached, in however many pieces; nothing is counted as refused.
    pub fn is_mapped(&self, iova: u64, length: usize, access: Access) -> bool {
        let mut done = 0;
        while done < length {
            let left = (length - done) as u64;
            let hit = iova.checked_add(done as u64).map(|at| self.find(at, left, access));
            match hit {
                Some(Ok(hit)) if hit.length > 0 => done += hit.length.min(left) as usize,
                _ => return false,
            }
        }
        self.master
    }

    #[inline]
    fn find_slice(
        &self,
        iova: u64,
        length: usize,
        access: Access,
    ) -> Option<(&Window, DmaSlice<'_>)> {
        if !self.master {
            return None;
        }
        let hit = self.find(iova, length as u64, access).ok()?;
        let region = &hit.target.region.as_ref()?.region;
        if hit.length < length as u64 || region.truncated() {
            return None;
        }
        let slice = region.slice(usize::try_from(hit.offset).ok()?, length)?;
        Some((hit.target, slice))
    }

    /// The mapping at `iova`, or the window where its user has mapped no memory.
    #[inline]
    fn find(&self, iova: u64, length: u64, access: Access) -> Result<Hit<'_, Window>, Fault> {
        match self.domain.resolve(iova, length, access) {
            Ok(hit) if hit.target.region.is_some() => Ok(hit),
            other => self.peers.resolve_or((iova, length, access), other),
        }
    }

    /// The region at `iova` and the offset in it, with at least `least` of `length` bytes there.
    #[inline]
    fn piece(
        &self,
        iova: u64,
        length: u64,
        least: u64,
        access: Access,
    ) -> Result<(&Window, &Arc<Region>, usize), DmaFault> {
        if !self.master {
            return Err(self.refuse(DmaFault::NotMaster { address: iova, length }));
        }
        let hit = match self.find(iova, length, access) {
            Ok(hit) => hit,
            Err(fault) => return Err(self.refuse(DmaFault::Domain(fault))),
        };
        if hit.length < least {
            // The domain answered for the whole range, so the sum cannot wrap.
            let beyond = iova + hit.length;
            let missing = domain_fault(beyond, least - hit.length, FaultCause::NotMapped);
            return Err(self.refuse(missing));
        }
        match hit.target.region.as_ref().map(|mapped| &mapped.region) {
            Some(region) if region.truncated() => {
                Err(self.refuse(DmaFault::Truncated { address: iova, length }))
            }
            Some(region) => {
                let offset = usize::try_from(hit.offset)
                    .map_err(|_| self.refuse(no_memory(iova, length)))?;
                Ok((hit.target, region, offset))
            }
            None => Err(self.refuse(no_memory(iova, length))),
        }
    }

    #[cold]
    fn refuse(&self, fault: DmaFault) -> DmaFault {
        self.refusals.note(fault);
        tracing::debug!(%fault, "DMA refused");
        fault
    }
}

fn domain_fault(address: u64, length: u64, cause: FaultCause) -> DmaFault {
    DmaFault::Domain(Fault { address, length, cause })
}

fn no_memory(address: u64, length: u64) -> DmaFault {
    DmaFault::NoMemory { address, length }
}

/// Releases a window's memory. Somebody may still hold a pinned slice of it: their memory is replaced.
fn release(region: Option<Mapped>) {
    if let Some(Mapped { region, .. }) = region
        && Arc::strong_count(&region) > 1
    {
        revoke_region(&region);
    }
}
