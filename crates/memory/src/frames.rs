//! Frames from one sender to one receiver through the receiver's memory: a ring of records of any length up to
//! that of the largest frame.
//!
//! The sender writes a frame straight into the ring, with a header that is its user's, and the frame's length
//! and validity in front (`marks`); the receiver finds it there, uses it in place and gives the room back. So a
//! frame is copied once, and nobody makes a system call while both are awake. Each side sleeps on a doorbell of
//! the ring's own, because the other side may write anything into all of it: it can end this conversation, and
//! no other.
//!
//! What comes out is not trusted: marks are read once and checked, and so is the credit; whoever breaks the
//! protocol gets [`RingBroken`], after which the ring is of no more use. The bytes of a frame may change while
//! they are looked at.

mod marks;

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::doorbell::{DOORBELL_BYTES, Doorbell, shared};
use crate::peer_event::PeerEvent;
use crate::region::Region;
use crate::slice::{DmaSlice, PinnedSlice};

use marks::{Broken, Credit, Marks, ReceiverMarks, RecordPlace, SenderMarks};

/// Bytes of the header that goes along with each frame.
pub const FRAME_HEADER: usize = 10;

/// Bytes of a line.
const LINE: usize = 64;
const MARK: usize = 8;
/// Where a frame begins in its record: what follows an Ethernet header of 14 bytes is aligned to 32.
const FRAME: usize = MARK + FRAME_HEADER;

/// Where the parts before the ring are: the doorbell for frames, the one for room, the credit.
const ROOM_BELL: usize = DOORBELL_BYTES;
const CREDIT: usize = 2 * DOORBELL_BYTES;
const RING: usize = 4 * LINE;

/// Bytes of the largest ring, 64 MiB.
const MAX_BYTES: usize = 1 << 26;

/// How a ring of frames lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FramesLayout {
    /// Bytes of the ring: a power of two, at most 64 MiB.
    pub ring_bytes: usize,
    /// Bytes of the longest frame; the ring holds two of them.
    pub longest: usize,
}

impl FramesLayout {
    /// Bytes of memory that it needs; `None` when there is no such ring.
    pub fn bytes(&self) -> Option<usize> {
        let possible = self.ring_bytes.is_power_of_two()
            && (LINE..=MAX_BYTES).contains(&self.ring_bytes)
            && (1..=MAX_BYTES).contains(&self.longest);
        let room = possible && 2 * lines_of(self.longest) < self.ring_bytes / LINE;
        room.then_some(RING + self.ring_bytes)
    }

    fn lines_of(&self, length: u32) -> Option<usize> {
        let length = length as usize;
        (1..=self.longest).contains(&length).then(|| lines_of(length))
    }
}

/// Lines of a record of a frame of so many bytes.
fn lines_of(length: usize) -> usize {
    (FRAME + length).div_ceil(LINE)
}

/// The other side of a ring does not keep to its protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the other side of a ring of frames violates the protocol")]
pub struct RingBroken;

impl From<Broken> for RingBroken {
    fn from(_: Broken) -> RingBroken {
        RingBroken
    }
}

/// Why a frame was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The receiver has no room now.
    #[error("the ring is full")]
    Full,
    /// It is empty, or longer than the ring's frames.
    #[error("the ring has no frames of that length")]
    Length,
    /// The ring is of no more use.
    #[error(transparent)]
    Broken(#[from] RingBroken),
}

/// What both sides have, checked.
#[derive(Debug)]
struct Memory {
    credit: NonNull<Credit>,
    ring: PinnedSlice,
    layout: FramesLayout,
    /// Rings when a frame was put in.
    frames: Doorbell,
    /// Rings when room was given back.
    room: Doorbell,
}

// SAFETY: the credit is an atomic inside of the region that `ring` keeps mapped.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(region: Arc<Region>, events: FrameEvents, layout: FramesLayout) -> Option<Memory> {
        layout.bytes()?;
        let credit = shared::<Credit>(&region, CREDIT)?;
        let frames = Doorbell::new(region.clone(), 0, events.frames)?;
        let room = Doorbell::new(region.clone(), ROOM_BELL, events.room)?;
        let ring = PinnedSlice::new(region, RING, layout.ring_bytes)?;
        Some(Memory { credit, ring, layout, frames, room })
    }

    #[inline]
    fn credit(&self) -> &Credit {
        // SAFETY: checked in `new`; the region stays mapped, and atomics are sound on memory that others change.
        unsafe { self.credit.as_ref() }
    }

    /// The bytes of a record from its first line on.
    #[inline]
    fn record(&self, line: usize, bytes: usize) -> DmaSlice<'_> {
        self.ring.get().part(line * LINE, bytes).expect("places are inside of the ring")
    }
}

impl Marks for Memory {
    #[inline]
    fn mark(&self, line: usize) -> &AtomicU64 {
        let at = self.record(line, MARK).as_ptr().cast::<AtomicU64>();
        // SAFETY: inside of the mapped ring, at the beginning of a line, which is aligned.
        unsafe { &*at }
    }
}

/// The events that the two sides of a ring sleep on; both have both.
#[derive(Debug)]
pub struct FrameEvents {
    /// The receiver's: there is a frame.
    pub frames: PeerEvent,
    /// The sender's: there is room.
    pub room: PeerEvent,
}

/// The side that sends.
#[derive(Debug)]
pub struct FrameSender {
    memory: Memory,
    putting: SenderMarks,
    /// The other side closed a doorbell, which is not its to close.
    broken: bool,
}

impl FrameSender {
    /// The sender of the ring in `region`, which nobody has used yet: zeroes. `None` when the region is too
    /// small, or cannot be both read and written.
    pub fn new(
        region: Arc<Region>,
        events: FrameEvents,
        layout: FramesLayout,
    ) -> Option<FrameSender> {
        let memory = Memory::new(region, events, layout)?;
        let putting = SenderMarks::new(layout.ring_bytes / LINE);
        Some(FrameSender { memory, putting, broken: false })
    }

    /// Writes a frame: `head`, and behind it `parts` without their first bytes, as many as `head` has. The receiver
    /// gets it with the next [`flush`](FrameSender::flush), or when a frame finds no room.
    ///
    /// # Errors
    /// [`FrameError`]; nothing was written.
    #[inline]
    pub fn send(
        &mut self,
        header: &[u8; FRAME_HEADER],
        head: &[u8],
        parts: &[DmaSlice<'_>],
    ) -> Result<(), FrameError> {
        self.send_rewritten(header, head, &[], (parts, head.len())).map(drop)
    }

    /// Writes a frame whose beginning is another one than its owner's: `begin`, `rest`, and behind them parts without
    /// so many of their first bytes. Its length.
    ///
    /// # Errors
    /// [`FrameError`]; nothing was written.
    #[inline]
    pub fn send_rewritten(
        &mut self,
        header: &[u8; FRAME_HEADER],
        begin: &[u8],
        rest: &[u8],
        (parts, mut skip): (&[DmaSlice<'_>], usize),
    ) -> Result<usize, FrameError> {
        let behind = parts.iter().map(DmaSlice::len).sum::<usize>().saturating_sub(skip);
        let length = begin.len() + rest.len() + behind;
        let (place, lines) = self.place(length)?;
        let record = self.memory.record(self.putting.line(place), FRAME + length);
        let frame = record.part(FRAME, length).expect("a part of it");
        frame.copy_from(begin);
        if !rest.is_empty() {
            frame.part(begin.len(), rest.len()).expect("a part of it").copy_from(rest);
        }
        let mut at = begin.len() + rest.len();
        for part in parts {
            let skipped = skip.min(part.len());
            skip -= skipped;
            let rest = part.part(skipped, part.len() - skipped).expect("a part of it");
            let to = frame.part(at, rest.len()).expect("as long as all parts");
            at += to.copy_from_slice(rest);
        }
        record.part(MARK, FRAME_HEADER).expect("a part of it").copy_from(header);
        self.putting.add(&self.memory, place, lines, length as u32);
        Ok(length)
    }

    #[inline]
    fn place(&mut self, length: usize) -> Result<(RecordPlace, usize), FrameError> {
        let lines = u32::try_from(length).ok().and_then(|it| self.memory.layout.lines_of(it));
        let lines = lines.ok_or(FrameError::Length)?;
        if self.broken {
            return Err(RingBroken.into());
        }
        let room = self.putting.room(self.memory.credit(), lines).map_err(RingBroken::from)?;
        match room {
            Some(place) => Ok((place, lines)),
            None => {
                // The receiver makes no room by frames that it does not know of.
                self.flush();
                Err(FrameError::Full)
            }
        }
    }

    /// Hands over what was written since the last call, and wakes the receiver if it sleeps.
    #[inline]
    pub fn flush(&mut self) {
        if self.putting.announce(&self.memory) {
            self.memory.frames.ring();
        }
    }

    /// Whether a frame of `length` bytes has room now.
    pub fn has_room(&mut self, length: usize) -> bool {
        !matches!(self.place(length), Err(FrameError::Full))
    }

    /// Asks that room for a frame of `length` bytes rings the event ([`AsFd`]). False when there is room already.
    pub fn park(&mut self, length: usize) -> bool {
        let seen = self.memory.room.count();
        self.broken |= self.memory.room.is_closed();
        !self.broken && !self.has_room(length) && self.memory.room.arm(seen)
    }

    /// Takes the event back to rest, after it rang.
    pub fn unpark(&mut self) {
        self.memory.room.disarm();
    }

    /// Bytes of the ring that the receiver has not given back yet.
    pub fn used(&self) -> usize {
        self.putting.used(self.memory.credit()) * LINE
    }

    /// Frames that were handed over and that the receiver has not given back yet, as far as it left their marks alone.
    pub fn unread(&self) -> u64 {
        let layout = self.memory.layout;
        self.putting.unread(&self.memory, self.memory.credit(), |length| layout.lines_of(length))
    }
}

impl AsFd for FrameSender {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.room.as_fd()
    }
}

/// A frame in the ring.
#[derive(Debug, Clone, Copy)]
pub struct ReceivedFrame<'a> {
    /// The header that came along, read once.
    pub header: [u8; FRAME_HEADER],
    /// The frame's bytes, which its sender may still change.
    pub bytes: DmaSlice<'a>,
}

/// The frame that was looked at: what was read of it once.
#[derive(Debug, Clone, Copy)]
struct Current {
    line: usize,
    length: u32,
    header: [u8; FRAME_HEADER],
}

/// The side that receives, whose memory it is.
#[derive(Debug)]
pub struct FrameReceiver {
    memory: Memory,
    taking: ReceiverMarks,
    /// Line and length of the next frame, since it was looked at.
    current: Option<Current>,
    /// The other side closed a doorbell, which is not its to close.
    broken: bool,
}

impl FrameReceiver {
    /// The receiver of the ring in `region`, as [`FrameSender::new`].
    pub fn new(
        region: Arc<Region>,
        events: FrameEvents,
        layout: FramesLayout,
    ) -> Option<FrameReceiver> {
        let memory = Memory::new(region, events, layout)?;
        let taking = ReceiverMarks::new(layout.ring_bytes / LINE);
        Some(FrameReceiver { memory, taking, current: None, broken: false })
    }

    /// The next frame, which stays the next until it is [consumed](FrameReceiver::consume).
    ///
    /// # Errors
    /// [`RingBroken`].
    #[inline]
    pub fn peek(&mut self) -> Result<Option<ReceivedFrame<'_>>, RingBroken> {
        // Read once: what was checked stays what is used.
        let Current { line, length, header } = match self.current {
            Some(current) => current,
            None if self.broken => return Err(RingBroken),
            None => {
                let layout = self.memory.layout;
                let found = self.taking.next(&self.memory, |length| layout.lines_of(length))?;
                let Some(found) = found else {
                    self.settle();
                    return Ok(None);
                };
                let (line, length) = found;
                let record = self.memory.record(line, FRAME + length as usize);
                let mut header = [0; FRAME_HEADER];
                record.part(MARK, FRAME_HEADER).expect("a part of it").copy_to(&mut header);
                *self.current.insert(Current { line, length, header })
            }
        };
        let record = self.memory.record(line, FRAME + length as usize);
        let bytes = record.part(FRAME, length as usize).expect("a part of it");
        Ok(Some(ReceivedFrame { header, bytes }))
    }

    /// Gives the room of the next frame back, if it was looked at.
    #[inline]
    pub fn consume(&mut self) {
        let Some(Current { length, .. }) = self.current.take() else { return };
        if self.taking.release(self.memory.credit(), lines_of(length as usize)) {
            self.memory.room.ring();
        }
    }

    #[inline]
    fn settle(&mut self) {
        if self.taking.settle(self.memory.credit()) {
            self.memory.room.ring();
        }
    }

    /// Asks that the next frame rings the event ([`AsFd`]), once. False when there is a frame already, or the
    /// ring is broken.
    pub fn park(&mut self) -> bool {
        let seen = self.memory.frames.count();
        self.broken |= self.memory.frames.is_closed();
        matches!(self.peek(), Ok(None)) && self.memory.frames.arm(seen)
    }

    /// Takes the event back to rest, after it rang.
    pub fn unpark(&mut self) {
        self.memory.frames.disarm();
    }
}

impl AsFd for FrameReceiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.frames.as_fd()
    }
}

#[cfg(test)]
mod tests;
