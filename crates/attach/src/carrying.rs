//! Copies to memory of another machine: what is mapped of it here only stands for it, so the node copies.
//!
//! The bytes go through memory that the node has in common with this process, a part at a time: one is copied by the node
//! while the next is put there.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rackbus_memory::copy::{CopyPiece, TransferParties};
use rackbus_memory::{DmaSlice, Region, SharedMemory};
use rackbus_segment::Handle;
use rackbus_segment::message::{COPY_BUFFER, Refusal, Reply, SessionRequest};

use crate::segments::RemoteSegment;
use crate::session::{AttachError, Session, lock};

/// Parts of a copy that are under way at a time.
const PARTS: usize = 2;
/// How many bytes each of them has at most.
const PART: usize = COPY_BUFFER as usize / PARTS;
/// Parts after which others who want something of the node have a turn.
const TURN: usize = 4;

/// Bytes that are copied from: puts those from a place on into memory, as many as it has room for, and says how many.
pub type CopySource<'a> = dyn Fn(usize, DmaSlice<'_>) -> usize + 'a;

/// The memory that a session copies from, from its first copy on.
#[derive(Debug, Default)]
pub(crate) struct CopyBuffer(Mutex<CopyState>);

#[derive(Debug, Default)]
struct CopyState {
    memory: Option<SharedMemory>,
    /// Where the copy goes on of which the node had a part last: the connection, and the first byte.
    next: Option<(Handle, u64)>,
    /// Copies that others have a turn before, by their numbers: the connections. One of which a part may have been lost is not
    /// among them, since the node says that once, to whoever copies to the connection next.
    interrupted: BTreeMap<u64, Handle>,
    /// The number of the last one.
    last: u64,
}

impl CopyState {
    /// Another copy has a turn, if one waits for it.
    fn interrupt(&mut self, connection: Handle) -> u64 {
        self.last += 1;
        self.interrupted.insert(self.last, connection);
        self.last
    }

    /// A copy goes on that was interrupted.
    ///
    /// # Errors
    /// [`Refusal::NotResponding`] where one of its parts may have been lost.
    fn resume(&mut self, interruption: u64) -> Result<(), AttachError> {
        self.interrupted
            .remove(&interruption)
            .map(drop)
            .ok_or_else(|| Refusal::NotResponding.into())
    }

    /// What the node said of a turn.
    fn note(&mut self, connection: Handle, outcome: &Result<(), AttachError>) {
        if matches!(outcome, Err(AttachError::Refused(Refusal::NotResponding))) {
            self.interrupted.retain(|_, of| *of != connection);
        }
    }
}

/// Parts of a copy that are asked for in one turn.
struct CopyTurn {
    /// Their bytes, of those of the copy.
    range: std::ops::Range<usize>,
    /// Whether the node had the part before them last of all copies.
    follows: bool,
    /// Bytes of the whole copy.
    length: usize,
}

impl Session {
    /// Copies `length` bytes to `offset` of the memory that a connection to another machine leads to. Whether all are
    /// there, and what was stored before: not when `stop` said so first. Also then, nothing of them is stored any more.
    ///
    /// # Errors
    /// [`AttachError::Refused`] when the other machine did not answer in time, or the connection has ended.
    pub(crate) fn copy(
        &self,
        (connection, offset): (Handle, u64),
        (source, length): (&CopySource<'_>, usize),
        stop: &dyn Fn() -> bool,
    ) -> Result<bool, AttachError> {
        if !self.is_own() {
            // A fork has the locks as they were.
            return Err(AttachError::Forked);
        }
        let (mut from, mut length, mut is_stopped, mut interruption) = (0, length, false, None);
        while from < length {
            // For one turn: others copy in between.
            let mut state = lock(&self.copy_buffer().0);
            interruption.take().map_or(Ok(()), |it| state.resume(it))?;
            if stop() {
                if from == 0 {
                    return Ok(false);
                }
                // With the last part, all have taken effect that are under way.
                (is_stopped, length) = (true, length.min(from + PART));
            }
            if state.memory.is_none() {
                state.memory = match self.call(&SessionRequest::CopyBuffer)? {
                    (Reply::Memory, mut beside) => Some(beside.shared_memory(COPY_BUFFER.into())?),
                    _ => return Err(AttachError::Protocol),
                };
            }
            let next = state.next.take();
            let follows = from > 0 && next == Some((connection, offset + from as u64));
            let Some(buffer) = state.memory.as_ref() else { return Err(AttachError::Protocol) };
            let until = length.min(from + TURN * PART);
            let turn = CopyTurn { range: from..until, follows, length };
            let outcome = self.copy_turn((connection, offset), source, &turn, buffer);
            state.note(connection, &outcome);
            outcome?;
            state.next = Some((connection, offset + until as u64));
            from = until;
            interruption = (from < length).then(|| state.interrupt(connection));
        }
        Ok(!is_stopped)
    }

    /// Copies a few parts, while nobody else asks the node for something over this session.
    fn copy_turn(
        &self,
        (connection, offset): (Handle, u64),
        source: &CopySource<'_>,
        turn: &CopyTurn,
        buffer: &SharedMemory,
    ) -> Result<(), AttachError> {
        let range = &turn.range;
        let mut line = self.line()?;
        let (mut begun, mut outcome) = (0, Ok(()));
        for (nth, at) in range.clone().step_by(PART).enumerate() {
            if begun == PARTS {
                begun -= 1;
                outcome = line.finish().and_then(is_done);
            }
            if outcome.is_err() {
                break;
            }
            let (place, length) = (nth % PARTS * PART, PART.min(range.end - at));
            let part = buffer.whole().part(place, length).ok_or(AttachError::Protocol)?;
            if source(at, part) != length {
                outcome = Err(AttachError::Protocol);
                break;
            }
            let (from, length) = (place as u32, length as u32);
            let follows = nth > 0 || turn.follows;
            let more = at + (length as usize) < turn.length;
            let offset = offset + at as u64;
            #[rustfmt::skip]
            let request = SessionRequest::Copy { connection, offset, from, length, follows, more };
            if let Err(error) = line.begin(&request) {
                line.give_up(begun);
                return Err(error);
            }
            begun += 1;
        }
        for _ in 0..begun {
            let ended = line.finish().and_then(is_done);
            outcome = outcome.and(ended);
        }
        outcome
    }
}

impl RemoteSegment {
    /// Copies to `offset` of the segment where it is on another machine: from `source`, so many bytes. Whether all are
    /// there, which they are not when `stop` said so; `None` where a copy to a mapping, and a [flush](RemoteSegment::flush)
    /// behind it, is the way.
    pub fn carry(
        &self,
        offset: u64,
        source: (&CopySource<'_>, usize),
        stop: &dyn Fn() -> bool,
    ) -> Option<Result<bool, AttachError>> {
        let (session, handle) = self.carried_by()?;
        Some(session.copy((handle, offset), source, stop))
    }
}

fn is_done(reply: Reply) -> Result<(), AttachError> {
    match reply {
        Reply::Done => Ok(()),
        Reply::Refused(refusal) => Err(refusal.into()),
        _ => Err(AttachError::Protocol),
    }
}

/// A copy to a segment of another machine by a copy engine: its parties, which carry it there.
#[derive(Debug)]
pub struct CarriedCopy {
    segment: Arc<RemoteSegment>,
    /// What is mapped of the segment from its first byte, which the copy is to.
    region: Arc<Region>,
    is_carried: AtomicBool,
    failure: Mutex<Option<AttachError>>,
}

impl CarriedCopy {
    /// Of a copy to `region`, which is mapped of `segment` from its first byte.
    pub fn new(segment: &Arc<RemoteSegment>, region: &Arc<Region>) -> Arc<CarriedCopy> {
        let (segment, region) = (segment.clone(), region.clone());
        let (is_carried, failure) = Default::default();
        Arc::new(CarriedCopy { segment, region, is_carried, failure })
    }

    /// Whether its bytes went to the other machine by themselves. Else they are there when the segment was
    /// [flushed](RemoteSegment::flush).
    pub fn is_carried(&self) -> bool {
        self.is_carried.load(Ordering::Acquire)
    }

    /// Takes why not all bytes are there, when they were carried.
    pub fn take_failure(&self) -> Option<AttachError> {
        lock(&self.failure).take()
    }
}

impl TransferParties for CarriedCopy {
    fn are_gone(&self) -> bool {
        lock(&self.failure).is_some() || self.segment.watch().lost()
    }

    fn carry(&self, piece: &CopyPiece<'_>, stop: &dyn Fn() -> bool) -> Option<bool> {
        let offset = piece.offset_in(&self.region).filter(|_| !piece.overlaps())?;
        if lock(&self.failure).is_some() {
            // It has ended, and the peer is asked nothing more for it.
            return Some(true);
        }
        let source = |from: usize, to: DmaSlice<'_>| piece.copy_to(from, to);
        let outcome = self.segment.carry(offset as u64, (&source, piece.len()), stop)?;
        self.is_carried.store(true, Ordering::Release);
        Some(outcome.unwrap_or_else(|error| {
            *lock(&self.failure) = Some(error);
            true
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_told_of_a_loss_that_the_node_said_to_another_one() {
        let (here, other) = (Handle(1), Handle(2));
        let lost = || Err(AttachError::from(Refusal::NotResponding));
        let mut state = CopyState::default();
        let interrupted = [here, other, here].map(|connection| state.interrupt(connection));
        state.note(here, &Err(AttachError::from(Refusal::Illegal("outside".into()))));
        assert!(state.resume(interrupted[0]).is_ok());
        state.note(here, &lost());
        assert!(state.resume(interrupted[1]).is_ok());
        assert!(matches!(
            state.resume(interrupted[2]),
            Err(AttachError::Refused(Refusal::NotResponding))
        ));
        assert!(state.interrupted.is_empty());
        // What begins later has lost nothing.
        let later = state.interrupt(here);
        assert!(state.resume(later).is_ok());
    }
}
