//! Cross-machine memory copy (CMMC, Marlin's section 4.3): a receiver exports an area, a sender
//! registers it and gets a handle, and writes at an offset, with a signal to the receiver if it
//! wants one.
//!
//! Bytes go from the sender's memory to the receiver's in one copy, by the sender's own thread or
//! by the channels of its copy engine (HRDMA, section 3.2); to another machine by the host's node.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rackbus_memory::DmaSlice;
use rackbus_memory::copy::{
    CopyEngine, CopyEngineOptions, CopyLocation, PieceError, Statistics, Ticket, Transaction,
    TransactionState,
};
use rackbus_segment::message::{NodeId, SegmentId};

use crate::carrying::CarriedCopy;
use crate::interrupts::{DataInterrupt, InterruptError, RemoteDataInterrupt, after, in_time};
use crate::memory::Mapping;
use crate::segments::{LocalSegment, RemoteSegment, SegmentOptions};
use crate::session::{AttachError, Session};

/// Why a write failed, wholly or in part.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The range is not inside, or memory cannot be copied from or to.
    #[error(transparent)]
    Piece(#[from] PieceError),
    /// The receiver is gone, or has taken the area away: not all bytes arrived.
    #[error("the receiver's area is gone; not all bytes arrived")]
    Gone,
    /// Between machines: nobody answered in time that the bytes are there.
    #[error("nobody says that the bytes arrived: {0}")]
    Unconfirmed(AttachError),
    /// The copy was aborted.
    #[error("the copy was aborted; not all bytes arrived")]
    Aborted,
    /// The bytes arrived, but the receiver was not told, or, with [`InterruptError::Unconfirmed`], may not have been.
    #[error("the bytes arrived, but nobody says that the receiver was told: {0}")]
    Signal(#[from] InterruptError),
}

/// What a sender needs to know of an area; the receiver gives it away as it likes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AreaKey {
    /// The host whose process receives.
    pub node: NodeId,
    /// The segment that the area is.
    pub segment: SegmentId,
    /// The data interrupt that signals go to.
    pub signals: u32,
}

/// What a receiver is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteNotice {
    /// First byte that was written.
    pub offset: u64,
    /// Length of the copy in bytes.
    pub length: u64,
    /// What the sender says of them.
    pub tag: u64,
}

/// Bytes of a [`WriteNotice`] as it is sent.
const NOTICE_BYTES: usize = 24;

/// Whether the receiver is to be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// No: it looks by itself.
    None,
    /// Yes, with a number of the sender's.
    Tagged(u64),
}

impl WriteNotice {
    fn to_bytes(self) -> [u8; NOTICE_BYTES] {
        let mut bytes = [0; NOTICE_BYTES];
        for (part, value) in bytes.chunks_mut(8).zip([self.offset, self.length, self.tag]) {
            part.copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    fn of_bytes(bytes: &[u8]) -> Option<WriteNotice> {
        let mut words = bytes.chunks_exact(8).map(|part| part.try_into().map(u64::from_le_bytes));
        let mut word = || words.next()?.ok();
        Some(WriteNotice { offset: word()?, length: word()?, tag: word()? })
    }
}

/// The notice that was `taken` into `bytes` where a message was found that is longer than a notice, and so is none: that
/// is thrown away. Another thread may have taken it meanwhile, and then the first message is another sender's, which counts.
fn in_place_of_a_longer_one(
    taken: Result<usize, InterruptError>,
    bytes: &[u8],
) -> Result<Option<WriteNotice>, InterruptError> {
    match taken {
        Ok(NOTICE_BYTES) => Ok(WriteNotice::of_bytes(bytes)),
        Ok(_) | Err(InterruptError::TimedOut | InterruptError::BufferTooShort(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Memory that others may write to. It ends when it is dropped.
#[derive(Debug)]
pub struct ExportedArea {
    segment: LocalSegment,
    mapping: Mapping,
    signals: DataInterrupt,
    node: NodeId,
}

impl Session {
    /// Exports `size` bytes to be written to by those who know the key (and whom the rack's rules
    /// allow).
    ///
    /// # Errors
    /// [`AttachError::Refused`] when so much is not left.
    pub fn export_area(&self, size: u64) -> Result<ExportedArea, AttachError> {
        let options = SegmentOptions { choose: true, ..SegmentOptions::shared(0, size) };
        let segment = self.create_segment(&options)?;
        let mapping = segment.map(0, size)?;
        let signals = self.create_data_interrupt(None)?;
        segment.set_available()?;
        Ok(ExportedArea { segment, mapping, signals, node: self.node() })
    }

    /// Registers an area of another host (or of this one) to write to.
    ///
    /// # Errors
    /// [`AttachError::Refused`] when it is gone, or the rules do not allow it.
    pub fn register_area(&self, key: AreaKey) -> Result<RemoteArea, AttachError> {
        let segment = self.connect(key.node, key.segment, u32::MAX)?;
        if !segment.writable() {
            return Err(AttachError::ReadOnly);
        }
        let mapping = segment.map(0, segment.size())?;
        let signals = self.connect_data_interrupt(key.node, key.signals, u32::MAX)?;
        Ok(RemoteArea { segment: Arc::new(segment), mapping, signals })
    }
}

impl ExportedArea {
    /// How senders find the area: its host, its segment, and the interrupt that announces copies.
    pub fn key(&self) -> AreaKey {
        let (segment, signals) = (self.segment.id(), self.signals.number());
        AreaKey { node: self.node, segment, signals }
    }

    /// The area's memory in this process.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Waits until a sender signals what it has written. What it says is checked to be inside of
    /// the area; that it wrote there is the sender's word.
    ///
    /// # Errors
    /// [`InterruptError::TimedOut`] after `timeout` (`None` waits for ever).
    pub fn wait(&self, timeout: Option<Duration>) -> Result<WriteNotice, InterruptError> {
        let deadline = after(timeout);
        let mut buffer = [0; NOTICE_BYTES];
        loop {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            let written = match self.signals.receive(&mut buffer, left) {
                Ok(length) => buffer.get(..length).and_then(WriteNotice::of_bytes),
                Err(InterruptError::BufferTooShort(length)) => {
                    let mut other = vec![0; length];
                    let taken = self.signals.receive(&mut other, Some(Duration::ZERO));
                    in_place_of_a_longer_one(taken, &other)?
                }
                Err(error) => return Err(error),
            };
            let inside = |it: &WriteNotice| {
                it.offset.checked_add(it.length).is_some_and(|end| end <= self.segment.size())
            };
            if let Some(written) = written.filter(inside) {
                return Ok(written);
            }
            in_time(deadline)?;
        }
    }
}

/// An area of another process, to be written to: the handle.
#[derive(Debug)]
pub struct RemoteArea {
    segment: Arc<RemoteSegment>,
    mapping: Mapping,
    signals: RemoteDataInterrupt,
}

impl RemoteArea {
    /// Size of the receiver's area in bytes.
    pub fn size(&self) -> u64 {
        self.segment.size()
    }

    /// Whether the receiver is gone, or has taken the area away.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.segment.watch().lost()
    }

    /// Writes `bytes` at `offset`, by this thread, and tells the receiver if `signal` says so. When
    /// it returns, they are there.
    ///
    /// # Errors
    /// [`CopyError`].
    #[inline]
    pub fn write(&self, offset: u64, bytes: &[u8], signal: Signal) -> Result<(), CopyError> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let Some(part) = self.mapping.whole().part(start, bytes.len()) else {
            return self.out_of_range(start, bytes.len());
        };
        if self.segment.is_far() {
            self.write_far(offset, bytes, part)?;
        } else {
            part.copy_from(bytes);
        }
        self.tell(WriteNotice { offset, length: bytes.len() as u64, tag: 0 }, signal)
    }

    /// Writes to another machine: the bytes are there when this returns.
    fn write_far(&self, offset: u64, bytes: &[u8], here: DmaSlice<'_>) -> Result<(), CopyError> {
        let source = |from: usize, to: DmaSlice<'_>| to.copy_from(&bytes[from..]);
        let carried = match bytes.is_empty() {
            true => None,
            false => self.segment.carry(offset, (&source, bytes.len()), &|| false),
        };
        let outcome = carried.map(|outcome| outcome.map(|_| ())).unwrap_or_else(|| {
            here.copy_from(bytes);
            self.segment.flush()
        });
        outcome.map_err(|error| self.unconfirmed(error))
    }

    /// A connection that is lost is answered for by what it was lost with.
    fn unconfirmed(&self, error: AttachError) -> CopyError {
        match self.is_gone() {
            true => CopyError::Gone,
            false => CopyError::Unconfirmed(error),
        }
    }

    /// Ends a write whose bytes are there: the receiver is told if it is to be.
    #[inline]
    fn tell(&self, written: WriteNotice, signal: Signal) -> Result<(), CopyError> {
        if self.is_gone() {
            return gone();
        }
        match signal {
            Signal::None => Ok(()),
            Signal::Tagged(tag) => self.signal(WriteNotice { tag, ..written }),
        }
    }

    /// What is not inside, out of the way of what is.
    #[cold]
    fn out_of_range(&self, offset: usize, length: usize) -> Result<(), CopyError> {
        Err(PieceError::OutOfRange { offset, length, size: self.mapping.len() }.into())
    }

    fn signal(&self, written: WriteNotice) -> Result<(), CopyError> {
        Ok(self.signals.send(&written.to_bytes())?)
    }

    fn ended(
        &self,
        state: TransactionState,
        carried: Option<&CarriedCopy>,
        (written, signal): (WriteNotice, Signal),
    ) -> Result<(), CopyError> {
        if let Some(error) = carried.and_then(CarriedCopy::take_failure) {
            return Err(self.unconfirmed(error));
        }
        match state {
            TransactionState::Done if carried.is_some_and(|carried| !carried.is_carried()) => {
                self.segment.flush().map_err(|error| self.unconfirmed(error))?;
                self.tell(written, signal)
            }
            TransactionState::Done if carried.is_some() => self.tell(written, signal),
            // A receiver that left since has had them.
            TransactionState::Done => match signal {
                Signal::None => Ok(()),
                Signal::Tagged(tag) => self.signal(WriteNotice { tag, ..written }),
            },
            TransactionState::Aborted | TransactionState::Posted => Err(CopyError::Aborted),
            TransactionState::Failed(_) => Err(CopyError::Gone),
        }
    }
}

#[cold]
fn gone() -> Result<(), CopyError> {
    Err(CopyError::Gone)
}

/// A copy engine for a sender that does something else meanwhile.
#[derive(Debug)]
pub struct Copier(CopyEngine);

/// A write that was submitted. Dropping it aborts nothing, but tells nobody.
#[derive(Debug)]
pub struct SubmittedWrite<'a> {
    area: &'a RemoteArea,
    ticket: Ticket,
    /// What brings it to another machine.
    carried: Option<Arc<CarriedCopy>>,
    written: WriteNotice,
    signal: Signal,
}

impl Copier {
    /// Starts the engine's channels.
    ///
    /// # Errors
    /// When the system has no threads left.
    pub fn start(options: &CopyEngineOptions) -> Result<Copier, AttachError> {
        let failed = |cause| AttachError::System { what: "a thread of the copy engine", cause };
        Ok(Copier(CopyEngine::start("rackbus copy", options).map_err(failed)?))
    }

    /// What each channel did so far.
    pub fn statistics(&self) -> Vec<Statistics> {
        self.0.channels().iter().map(|channel| channel.statistics()).collect()
    }

    /// Submits writing `length` bytes of a mapping from `from` to an area at `offset`, to the least
    /// busy channel.
    ///
    /// # Errors
    /// [`CopyError::Piece`] when a range is not inside.
    pub fn write<'a>(
        &self,
        area: &'a RemoteArea,
        offset: u64,
        source: (&Mapping, usize),
        length: usize,
        signal: Signal,
    ) -> Result<SubmittedWrite<'a>, CopyError> {
        self.gather(area, &[(offset, source.1, length)], source.0, signal)
    }

    /// Submits several pieces of a mapping, each as (offset in the area, offset in the mapping,
    /// bytes); those that continue from each other are copied as one. The receiver is told of the
    /// first piece's place and of all bytes.
    ///
    /// # Errors
    /// [`CopyError::Piece`] when a range is not inside; nothing is copied then.
    pub fn gather<'a>(
        &self,
        area: &'a RemoteArea,
        pieces: &[(u64, usize, usize)],
        source: &Mapping,
        signal: Signal,
    ) -> Result<SubmittedWrite<'a>, CopyError> {
        let mut transaction = Transaction::new();
        for (offset, from, length) in pieces {
            let to = usize::try_from(*offset).unwrap_or(usize::MAX);
            let from = CopyLocation::shared(source.region(), *from);
            transaction.add(from, CopyLocation::shared(area.mapping.region(), to), *length)?;
        }
        let offset = pieces.first().map_or(0, |piece| piece.0);
        let written = WriteNotice { offset, length: transaction.bytes(), tag: 0 };
        let far = area.segment.is_far();
        let carried = far.then(|| CarriedCopy::new(&area.segment, area.mapping.region()));
        // Decided when the bytes are copied: a receiver that leaves later has had them.
        let transaction = match &carried {
            Some(carried) => transaction.between(carried.clone()),
            None => transaction.between(area.segment.watch().clone()),
        };
        let ticket = self.0.least_busy().submit(transaction);
        Ok(SubmittedWrite { area, ticket, carried, written, signal })
    }
}

impl SubmittedWrite<'_> {
    /// Waits until all bytes are there, and tells the receiver if it is to be told.
    ///
    /// # Errors
    /// [`CopyError`].
    pub fn finish(self) -> Result<(), CopyError> {
        let state = self.ticket.wait(None);
        self.area.ended(state, self.carried.as_deref(), (self.written, self.signal))
    }

    /// Asks to end without copying more.
    pub fn abort(&self) {
        self.ticket.abort();
    }

    /// Whether it has ended, one way or the other.
    pub fn is_over(&self) -> bool {
        self.ticket.poll().ended()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_that_is_taken_in_the_place_of_another_message_counts() {
        let notice = WriteNotice { offset: 1, length: 2, tag: 3 };
        let mut bytes = vec![0; 100];
        bytes[..NOTICE_BYTES].copy_from_slice(&notice.to_bytes());
        let taken = |taken| in_place_of_a_longer_one(taken, &bytes);
        assert_eq!(taken(Ok(NOTICE_BYTES)), Ok(Some(notice)));
        assert_eq!(taken(Ok(100)), Ok(None), "it only begins like one");
        assert_eq!(taken(Err(InterruptError::TimedOut)), Ok(None));
        assert_eq!(taken(Err(InterruptError::BufferTooShort(200))), Ok(None));
        assert_eq!(taken(Err(InterruptError::Gone)), Err(InterruptError::Gone));
    }
}
