//! Sequences: whether what was stored through a map has arrived.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use super::block::{end_blocks, forget_blocks, hold_blocks};
use crate::constants::errors::*;
use crate::constants::*;
use crate::error::{Code, SciResult, check_flags, fail};
use crate::forks::HeldLock;
use crate::handles::{HandleKind, RawHandle, find};
use crate::maps::Map;
use crate::remote::{Left, SciRemoteSegment};

/// A sequence (`sci_sequence_t`): the stores to a mapping between two checks.
#[derive(Debug)]
pub struct Sequence {
    pub(super) map: Arc<Map>,
    /// The segment was found gone by a start or a check.
    seen_gone: AtomicBool,
}

impl Drop for Sequence {
    fn drop(&mut self) {
        self.map.sequences.fetch_sub(1, Ordering::AcqRel);
    }
}

pub(super) fn create_sequence(map: RawHandle, flags: u32) -> SciResult<RawHandle> {
    check_flags(flags, SCI_FLAG_FAST_BARRIER)?;
    let map = find::<Map>(map)?;
    map.sequences.fetch_add(1, Ordering::AcqRel);
    let seen_gone = AtomicBool::new(map.lost());
    Ok(Sequence::table().add(|_| Sequence { map, seen_gone }))
}

/// Ends the sequences on a mapping that is unmapped.
pub(crate) fn end_sequences(map: &Arc<Map>) {
    drop(Sequence::table().take_all(|sequence| Arc::ptr_eq(&sequence.map, map)));
}

pub(super) fn remove_sequence(sequence: RawHandle, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    Sequence::table().take(sequence).map(drop).ok_or(Code(SCI_ERR_ILLEGAL_PARAMETER))
}

/// Ends every sequence and block transfer of the process.
pub(crate) fn end_all() {
    drop(Sequence::table().clear());
    end_blocks();
}

/// The locks of it all, held while the process forks.
pub(crate) fn hold() -> Vec<HeldLock> {
    [Sequence::table().hold()].into_iter().chain(hold_blocks()).flatten().collect()
}

/// What a fork has of its parent's.
pub(crate) fn forget_all() {
    std::mem::forget(Sequence::table().clear());
    forget_blocks();
}

/// Stores that were made arrive in order, as the memory is coherent; whether there is somebody at
/// the other end is what can be wrong with them.
pub(super) fn start(sequence: RawHandle) -> SciResult<()> {
    fence(Ordering::SeqCst);
    let sequence = find::<Sequence>(sequence)?;
    let flushed = sequence.map.flush();
    let gone = sequence.map.lost();
    sequence.seen_gone.store(gone, Ordering::Release);
    if gone { fail(SCI_ERR_TRANSFER_FAILED) } else { flushed }
}

/// The same for the stores since the last look. Those that were made before the owner left arrived,
/// so the first look after it is good; not so where the memory was taken away, or the host is gone. To
/// another machine they arrive here, unless the program wants that not.
pub(super) fn check(sequence: RawHandle, flush: bool) -> SciResult<()> {
    fence(Ordering::SeqCst);
    let sequence = find::<Sequence>(sequence)?;
    let left = || sequence.map.remote().and_then(SciRemoteSegment::left);
    // Who has left takes nothing any more; who leaves during it may not have had all.
    let flushed = if flush && left().is_none() { sequence.map.flush() } else { Ok(()) };
    if sequence.map.truncated() {
        return fail(SCI_ERR_TRANSFER_FAILED);
    }
    let Some(left) = left() else { return flushed };
    let seen = sequence.seen_gone.swap(true, Ordering::AcqRel);
    match left {
        Left::InPlace if !seen => flushed,
        Left::InPlace | Left::Away => fail(SCI_ERR_TRANSFER_FAILED),
    }
}
