//! What one transaction copies: a list of pieces, each from one place to another.
//!
//! Pieces that continue where the one before ended, on both sides, are merged: a copy of 128 KiB has
//! 32 times fewer beginnings than 32 copies of 4 KiB. The regions are held, so that their mappings
//! outlive the copying.

use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

use rackbus_fabric::Access;
use smallvec::SmallVec;

use super::bytes;
use super::ticket::{CopyFailure, TransactionState};
use crate::doorbell::Doorbell;
use crate::guard;
use crate::region::Region;
use crate::slice::DmaSlice;

/// Where bytes come from or go to.
#[derive(Debug, Clone, Copy)]
pub struct CopyLocation<'a>(At<'a>);

#[derive(Debug, Clone, Copy)]
enum At<'a> {
    Shared { region: &'a Arc<Region>, offset: usize },
    Own { start: NonNull<u8>, length: usize },
}

impl<'a> CopyLocation<'a> {
    /// From `offset` of a region.
    pub fn shared(region: &'a Arc<Region>, offset: usize) -> CopyLocation<'a> {
        CopyLocation(At::Shared { region, offset })
    }

    /// `length` bytes of this process' own memory.
    ///
    /// # Safety
    /// They are readable, and writable where bytes are copied to here, until the transaction has
    /// ended (its state is not [`TransactionState::Posted`] any more); until then no reference to them is
    /// used.
    pub unsafe fn own(start: NonNull<u8>, length: usize) -> CopyLocation<'a> {
        CopyLocation(At::Own { start, length })
    }
}

/// Why a piece was not added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PieceError {
    /// The piece is not inside of the memory.
    #[error("a piece of {length} bytes at {offset:#x} is not inside of {size:#x} bytes of memory")]
    OutOfRange {
        /// Its first byte there.
        offset: usize,
        /// Length of the piece in bytes.
        length: usize,
        /// Bytes that are there.
        size: usize,
    },
    /// The memory is not mapped for this: the source must be readable, the destination writable.
    #[error("the memory is not mapped to be copied {direction}")]
    Denied {
        /// The word "from" or "to", for the message.
        direction: &'static str,
    },
    /// The memory is gone.
    #[error(transparent)]
    Lost(#[from] CopyFailure),
}

/// Those whom bytes are from and for. Shared, so that asking them costs a transaction no allocation
/// where they are known already.
pub trait TransferParties: Send + Sync {
    /// Whether one of them is gone for good.
    fn are_gone(&self) -> bool;

    /// The transaction ends, in whatever way, before anybody is told: what is held for it alone is
    /// released. Itself it is dropped with the ticket, by who submitted: a count that two processors
    /// change in turns costs more than a short copy.
    fn release(&self) {}

    /// Brings a piece where it is for by other means than a copy into its memory, looking at `stop` now and then: for
    /// memory that stands for that of another machine. Whether all of it is there, which it is not when `stop` ended it;
    /// `None` leaves it to the channel. What failed otherwise is for [`are_gone`](TransferParties::are_gone) to say.
    fn carry(&self, _piece: &CopyPiece<'_>, _stop: &dyn Fn() -> bool) -> Option<bool> {
        None
    }
}

/// A piece of a transaction that is being carried out: its bytes, and where they are to go.
#[derive(Debug)]
pub struct CopyPiece<'a> {
    start: *const u8,
    length: usize,
    destination: *const u8,
    region: *const Region,
    _bytes: PhantomData<&'a [u8]>,
}

impl CopyPiece<'_> {
    /// How many bytes it has, at least one.
    #[expect(clippy::len_without_is_empty, reason = "a piece has at least one byte")]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Where in `region` its bytes are to go, if that is where.
    pub fn offset_in(&self, region: &Arc<Region>) -> Option<usize> {
        let is_there = std::ptr::eq(self.region, Arc::as_ptr(region));
        is_there.then(|| self.destination.addr() - region.whole().as_ptr().addr())
    }

    /// Whether some of its bytes are to be overwritten by others of them.
    pub fn overlaps(&self) -> bool {
        self.start.addr().abs_diff(self.destination.addr()) < self.length
    }

    /// Copies its bytes from the one at `from` to `to`, as many as both have; how many.
    pub fn copy_to(&self, from: usize, to: DmaSlice<'_>) -> usize {
        let count = self.length.saturating_sub(from).min(to.len());
        if count > 0 {
            // SAFETY: inside of the piece, whose bytes are readable for as long as it is carried out, and of the slice.
            unsafe { bytes::copy(self.start.add(from), to.as_ptr(), count) };
        }
        count
    }
}

/// What runs when a transaction has ended.
pub(super) type Then = Box<dyn FnOnce(TransactionState) + Send>;

/// A piece, checked: addresses in this process.
#[derive(Debug, Clone, Copy)]
struct Piece {
    source: *const u8,
    destination: *mut u8,
    length: usize,
    /// Which regions they are in, by the address of the region; null is own memory.
    regions: [*const Region; 2],
}

impl Piece {
    /// The piece for who brings it to its place otherwise.
    fn as_carried(&self) -> CopyPiece<'_> {
        CopyPiece {
            start: self.source,
            length: self.length,
            destination: self.destination,
            region: self.regions[1],
            _bytes: PhantomData,
        }
    }

    /// Merges `next` into this one if it continues where this one ends, both in the same memory, and
    /// the whole is at most `limit` bytes.
    ///
    /// Not when the whole would overlap itself: then the second piece reads what the first wrote.
    fn merge(&mut self, next: &Piece, limit: usize) -> bool {
        let whole = self.length.saturating_add(next.length);
        let goes_on = self.source.wrapping_add(self.length) == next.source
            && self.destination.wrapping_add(self.length) == next.destination
            && self.regions == next.regions;
        let apart = (self.source as usize).abs_diff(self.destination as usize) >= whole;
        let merged = goes_on && apart && whole <= limit;
        if merged {
            self.length = whole;
        }
        merged
    }
}

/// A scatter-gather list, and what is to happen when all of it is copied.
#[derive(Default)]
pub struct Transaction {
    pieces: SmallVec<[Piece; 1]>,
    held: SmallVec<[Arc<Region>; 2]>,
    limit: Option<usize>,
    pub(super) added: u64,
    bytes: u64,
    /// The guard's count before any region was looked at.
    replaced_before: Option<u64>,
    parties: Option<Arc<dyn TransferParties>>,
    /// In a place of its own: most have none, and what is passed to the channel's processor is
    /// cache lines.
    at_end: Option<Box<AtEnd>>,
}

/// Who is told of a transaction's end.
#[derive(Default)]
struct AtEnd {
    then: Option<Then>,
    ring: Option<Arc<Doorbell>>,
}

// SAFETY: the addresses are of memory that `held` keeps mapped, or that the caller promised to be
// valid; they are accessed by one thread at a time, the channel's.
unsafe impl Send for Transaction {}
// SAFETY: a shared transaction gives out nothing but numbers.
unsafe impl Sync for Transaction {}

impl fmt::Debug for Transaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Transaction");
        debug.field("pieces", &self.pieces.len()).field("bytes", &self.bytes).finish()
    }
}

impl Transaction {
    /// One without pieces, which merges all that continue from each other.
    pub fn new() -> Transaction {
        Transaction::default()
    }

    /// Merges pieces only up to `limit` bytes; 0 merges none.
    #[must_use]
    pub fn merging_up_to(mut self, limit: usize) -> Transaction {
        self.limit = Some(limit);
        self
    }

    /// One that copies a single piece; see [`add`](Transaction::add).
    ///
    /// # Errors
    /// [`PieceError`].
    pub fn of(
        source: CopyLocation<'_>,
        destination: CopyLocation<'_>,
        length: usize,
    ) -> Result<Transaction, PieceError> {
        let mut transaction = Transaction::new();
        transaction.add(source, destination, length)?;
        Ok(transaction)
    }

    /// Adds a piece, to be copied after those before it.
    ///
    /// # Errors
    /// [`PieceError`], and the transaction is as it was.
    pub fn add(
        &mut self,
        source: CopyLocation<'_>,
        destination: CopyLocation<'_>,
        length: usize,
    ) -> Result<(), PieceError> {
        self.replaced_before.get_or_insert_with(guard::replaced_count);
        let (from, from_region) = check(source, length, Access::READ, "from")?;
        let (to, to_region) = check(destination, length, Access::WRITE, "to")?;
        let regions = [from_region, to_region].map(|r| r.map_or(std::ptr::null(), Arc::as_ptr));
        let piece = Piece { source: from, destination: to, length, regions };
        self.added += 1;
        if length == 0 {
            return Ok(());
        }
        self.bytes += length as u64;
        let limit = self.limit.unwrap_or(usize::MAX);
        if self.pieces.last_mut().is_some_and(|last| last.merge(&piece, limit)) {
            return Ok(());
        }
        for region in [from_region, to_region].into_iter().flatten() {
            // Most lists go between two regions; holding one twice does no harm.
            if !self.held.iter().rev().take(2).any(|held| Arc::ptr_eq(held, region)) {
                self.held.push(region.clone());
            }
        }
        self.pieces.push(piece);
        Ok(())
    }

    /// Asks `parties` once, when all bytes are copied: if one of them is gone, the transaction has
    /// failed ([`CopyFailure::Gone`]). How it ended is decided by then, whatever becomes of them later.
    /// They are [released](TransferParties::release) before the end is told.
    #[must_use]
    pub fn between(mut self, parties: Arc<dyn TransferParties>) -> Transaction {
        self.parties = Some(parties);
        self
    }

    /// Runs `then` on the channel's thread when the transaction has ended, in whatever way. It
    /// should be short: the channel copies nothing meanwhile.
    #[must_use]
    pub fn then(mut self, then: impl FnOnce(TransactionState) + Send + 'static) -> Transaction {
        self.at_end().then = Some(Box::new(then));
        self
    }

    /// Rings `doorbell` when the transaction has ended, in whatever way.
    #[must_use]
    pub fn ring(mut self, doorbell: Arc<Doorbell>) -> Transaction {
        self.at_end().ring = Some(doorbell);
        self
    }

    fn at_end(&mut self) -> &mut AtEnd {
        self.at_end.get_or_insert_default()
    }

    /// Bytes of all pieces.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Pieces to copy, after merging.
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// The first piece's addresses.
    pub(super) fn first(&self) -> (*const u8, *mut u8) {
        let none = (std::ptr::null(), std::ptr::null_mut());
        self.pieces.first().map_or(none, |piece| (piece.source, piece.destination))
    }

    /// Copies all pieces, looking at `stop` between them; false when that ended it.
    pub(super) fn copy(&self, stop: impl Fn() -> bool) -> bool {
        self.pieces.iter().all(|piece| {
            if let Some(parties) = &self.parties
                && let Some(whole) = parties.carry(&piece.as_carried(), &stop)
            {
                return whole;
            }
            // SAFETY: the piece is this transaction's.
            !stop() && unsafe { copy_piece(piece.source, piece.destination, piece.length, &stop) }
        })
    }

    /// Whether somebody is to be told of the end.
    pub(super) fn tells(&self) -> bool {
        self.at_end.is_some() || self.parties.is_some()
    }

    /// Whether the process at the other end of the copy is gone; asked once.
    pub(super) fn gone(&self) -> bool {
        self.parties.as_ref().is_some_and(|parties| parties.are_gone())
    }

    /// Who is to be told of the end; once.
    pub(super) fn told(&mut self) -> (Option<Then>, Option<Arc<Doorbell>>) {
        if let Some(parties) = &self.parties {
            parties.release();
        }
        // Not written to where there is none: its cache line is the submitter's.
        if self.at_end.is_none() {
            return (None, None);
        }
        self.at_end.take().map_or((None, None), |at_end| (at_end.then, at_end.ring))
    }

    /// The guard's count when the regions were known to be whole.
    pub(super) fn replaced_before(&self) -> u64 {
        self.replaced_before.unwrap_or_else(guard::replaced_count)
    }

    /// What became of the regions since they were added.
    #[cold]
    pub(super) fn loss(&self) -> Option<CopyFailure> {
        self.held.iter().find_map(|region| loss(region))
    }
}

/// Copies one piece, looking at `stop` now and then; false when that ended it.
///
/// # Safety
/// The piece is one of a transaction's that was not dropped.
pub(super) unsafe fn copy_piece(
    source: *const u8,
    destination: *mut u8,
    length: usize,
    stop: impl Fn() -> bool,
) -> bool {
    // SAFETY: the addresses were checked when the piece was added, and the transaction holds the
    // regions; own memory is valid by the promise of `CopyLocation::own`.
    unsafe {
        if !bytes::is_large(length) {
            bytes::copy(source, destination, length);
            return true;
        }
        bytes::copy_large(source, destination, length, stop)
    }
}

fn loss(region: &Region) -> Option<CopyFailure> {
    if region.revoked() {
        Some(CopyFailure::Revoked)
    } else {
        region.truncated().then_some(CopyFailure::Truncated)
    }
}

/// The address of `length` bytes at `place`, and the region they are in.
fn check<'a>(
    place: CopyLocation<'a>,
    length: usize,
    access: Access,
    direction: &'static str,
) -> Result<(*mut u8, Option<&'a Arc<Region>>), PieceError> {
    match place.0 {
        At::Own { start, length: size } if length <= size => Ok((start.as_ptr(), None)),
        At::Own { length: size, .. } => Err(PieceError::OutOfRange { offset: 0, length, size }),
        At::Shared { region, offset } => {
            if !region.access().contains(access) {
                return Err(PieceError::Denied { direction });
            }
            if let Some(failure) = loss(region) {
                return Err(failure.into());
            }
            let size = region.len();
            let slice = region.slice(offset, length);
            let slice = slice.ok_or(PieceError::OutOfRange { offset, length, size })?;
            Ok((slice.as_ptr(), Some(region)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::SharedMemory;
    use proptest::prelude::*;
    use std::os::fd::AsFd;

    const SIZE: usize = 256;

    fn memory() -> SharedMemory {
        let memory = SharedMemory::create("copy", SIZE as u64).unwrap();
        let bytes: Vec<u8> = (0..SIZE).map(|at| at as u8).collect();
        memory.whole().copy_from(&bytes);
        memory
    }

    fn bytes(memory: &SharedMemory) -> Vec<u8> {
        let mut bytes = vec![0; SIZE];
        memory.whole().copy_to(&mut bytes);
        bytes
    }

    /// Lists where many pieces continue from the one before.
    fn list() -> impl Strategy<Value = Vec<(usize, usize, usize)>> {
        let piece = (0..SIZE, 0..SIZE, 0usize..24, any::<bool>());
        prop::collection::vec(piece, 0..20).prop_map(|pieces| {
            let mut list: Vec<(usize, usize, usize)> = Vec::new();
            for (from, to, length, goes_on) in pieces {
                let (from, to) = match list.last() {
                    Some((from, to, length)) if goes_on => (from + length, to + length),
                    _ => (from, to),
                };
                if from.max(to) + length <= SIZE {
                    list.push((from, to, length));
                }
            }
            list
        })
    }

    proptest! {
        #[test]
        fn merged_pieces_copy_what_the_single_ones_would(list in list(), limit in 0usize..100, same in any::<bool>()) {
            let (source, destination) = (memory(), memory());
            let source = if same { &destination } else { &source };
            let mut transaction = Transaction::new().merging_up_to(limit);
            let mut model = bytes(&destination);
            for (from, to, length) in &list {
                let (from, to, length) = (*from, *to, *length);
                let piece = if same { model[from..from + length].to_vec() } else { bytes(source)[from..from + length].to_vec() };
                model[to..to + length].copy_from_slice(&piece);
                let source = CopyLocation::shared(source.region(), from);
                transaction.add(source, CopyLocation::shared(destination.region(), to), length).unwrap();
            }
            prop_assert!(transaction.copy(|| false));
            prop_assert_eq!(bytes(&destination), model);
            let lengths: usize = transaction.pieces.iter().map(|piece| piece.length).sum();
            prop_assert_eq!(lengths as u64, transaction.bytes());
            prop_assert_eq!(transaction.added, list.len() as u64);
            let longest = list.iter().map(|piece| piece.2).max().unwrap_or(0);
            prop_assert!(transaction.pieces.iter().all(|piece| piece.length <= limit.max(longest)));
        }
    }

    #[test]
    fn pages_that_follow_each_other_become_pieces_of_the_limit() {
        let memory = SharedMemory::create("copy", 2 << 20).unwrap();
        let list = |limit| {
            let mut transaction = Transaction::new().merging_up_to(limit);
            for page in 0..256 {
                let source = CopyLocation::shared(memory.region(), page << 12);
                let destination = CopyLocation::shared(memory.region(), (1 << 20) + (page << 12));
                transaction.add(source, destination, 4096).unwrap();
            }
            (transaction.pieces(), transaction.held.len())
        };
        assert_eq!(list(0), (256, 1));
        assert_eq!(list(32 << 12), (8, 1));
        assert_eq!(list(usize::MAX), (1, 1));
    }

    #[test]
    fn pieces_that_cannot_be_copied_are_refused() {
        let memory = memory();
        let readable = Region::map(memory.as_fd(), 0, SIZE as u64, Access::READ).unwrap();
        let readable = Arc::new(readable);
        let place = |offset| CopyLocation::shared(memory.region(), offset);
        let mut transaction = Transaction::new();
        for (from, to, length) in [(0, SIZE - 1, 2), (SIZE, 0, 1), (usize::MAX, 0, 2)] {
            let refused = transaction.add(place(from), place(to), length);
            assert!(matches!(refused, Err(PieceError::OutOfRange { .. })), "{from} {to} {length}");
        }
        let refused = transaction.add(place(0), CopyLocation::shared(&readable, 0), 1);
        assert_eq!(refused, Err(PieceError::Denied { direction: "to" }));
        assert_eq!(transaction.add(CopyLocation::shared(&readable, 0), place(0), 1), Ok(()));
        readable.revoke().unwrap();
        let refused = transaction.add(CopyLocation::shared(&readable, 0), place(0), 1);
        assert_eq!(refused, Err(PieceError::Lost(CopyFailure::Revoked)));
        assert_eq!((transaction.pieces(), transaction.bytes()), (1, 1));
        assert_eq!(transaction.loss(), Some(CopyFailure::Revoked));
    }
}
