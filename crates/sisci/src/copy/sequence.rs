//! Sequences: whether what was stored through a map has arrived.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use super::block::{end_blocks, forget_blocks, hold_blocks};
use super::{NOT_RETRIABLE, PENDING, Status};
use crate::constants::errors::*;
use crate::constants::*;
use crate::error::{Code, SciResult, check_flags};
use crate::forks::HeldLock;
use crate::handles::{HandleKind, RawHandle, find};
use crate::maps::{Arrival, Map};
use crate::remote::Departure;

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
pub(crate) fn hold() -> Vec<Option<HeldLock>> {
    [Sequence::table().hold()].into_iter().chain(hold_blocks()).collect()
}

/// What a fork has of its parent's.
pub(crate) fn forget_all() {
    std::mem::forget(Sequence::table().clear());
    forget_blocks();
}

/// Why a sequence is not in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Disorder {
    /// How the sequence is.
    pub(super) status: Status,
    /// The error beside it.
    pub(super) code: Code,
}

impl Disorder {
    /// Stores are lost, or nobody takes them any more.
    const FAILED: Disorder =
        Disorder { status: NOT_RETRIABLE, code: Code(SCI_ERR_TRANSFER_FAILED) };
    /// Nobody says yet whether stores arrived: it is to be asked again.
    const PENDING: Disorder = Disorder { status: PENDING, code: Code(SCI_ERR_TRANSFER_FAILED) };
}

impl From<Code> for Disorder {
    fn from(code: Code) -> Disorder {
        Disorder { status: NOT_RETRIABLE, code }
    }
}

/// Stores that were made arrive in order, as the memory is coherent; whether there is somebody at
/// the other end is what can be wrong with them.
pub(super) fn start(sequence: RawHandle) -> Result<(), Disorder> {
    fence(Ordering::SeqCst);
    let sequence = find::<Sequence>(sequence)?;
    let arrival = sequence.map.arrival();
    let gone = sequence.map.lost();
    sequence.seen_gone.store(gone, Ordering::Release);
    judge(arrival, if gone { Place::Gone } else { Place::There })
}

/// The same for the stores since the last look. Those that were made before the owner left arrived, so the first look after it
/// is good; not so where the memory was taken away, or the host is gone. To another machine they arrive here, unless the
/// program wants that not.
pub(super) fn check(sequence: RawHandle, flush: bool) -> Result<(), Disorder> {
    fence(Ordering::SeqCst);
    let sequence = find::<Sequence>(sequence)?;
    let map = &sequence.map;
    // Who has left takes nothing any more; who leaves during it may not have had all.
    let asks = flush && map.left().is_none();
    let arrival = if asks { map.arrival() } else { Arrival::There };
    if map.truncated() {
        return judge(arrival, Place::Gone);
    }
    let place = match map.left() {
        None => Place::There,
        Some(left) => {
            let seen = sequence.seen_gone.swap(true, Ordering::AcqRel);
            match left {
                // What another machine had been sent when its process left, nobody knows who did not ask before.
                Departure::InPlace if !seen && (asks || !map.is_far()) => Place::Leaving,
                Departure::InPlace | Departure::Away => Place::Gone,
            }
        }
    };
    judge(arrival, place)
}

/// Where the memory of a sequence is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// At its owner, who takes what is stored.
    There,
    /// The owner has left since the last look, and had what came before.
    Leaving,
    /// Nobody takes what is stored, or some of it went elsewhere.
    Gone,
}

/// How a sequence is. A link that stands still for a moment loses nothing, as long as somebody is at its end.
fn judge(arrival: Arrival, place: Place) -> Result<(), Disorder> {
    match (place, arrival) {
        (Place::There | Place::Leaving, Arrival::There) => Ok(()),
        (Place::There, Arrival::NotYet) => Err(Disorder::PENDING),
        _ => Err(Disorder::FAILED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_that_is_late_is_pending_only_while_the_owner_is_there() {
        for (place, arrival, status) in [
            (Place::There, Arrival::NotYet, PENDING),
            (Place::There, Arrival::Failed, NOT_RETRIABLE),
            (Place::Leaving, Arrival::NotYet, NOT_RETRIABLE),
            (Place::Leaving, Arrival::Failed, NOT_RETRIABLE),
            (Place::Gone, Arrival::There, NOT_RETRIABLE),
            (Place::Gone, Arrival::NotYet, NOT_RETRIABLE),
            (Place::Gone, Arrival::Failed, NOT_RETRIABLE),
        ] {
            let ended = judge(arrival, place).map_err(|it| it.status);
            assert_eq!(ended, Err(status), "{place:?}, {arrival:?}");
        }
        for place in [Place::There, Place::Leaving] {
            assert_eq!(judge(Arrival::There, place), Ok(()));
        }
    }
}
