//! The messages of a range that are under way: those that the drive reads, and, of these the oldest, those that the
//! accelerator knows of.

use std::collections::VecDeque;

use rackbus_spec::accel::{Completion, Condition, OperationStatus};

use super::SourceError;
use crate::accel::{Accel, AccelError, MessageWork};
use crate::queue::DriveBuffer;

/// Set in the identifier of a descriptor that waits.
pub(super) const WAITS: u16 = 0x8000;

/// Takes what came out of a message, with where that begins on the drive.
pub(super) type Take<'a> = dyn FnMut(u64, &[u8]) -> Result<(), SourceError> + 'a;

/// A message whose read the drive knows of.
#[derive(Debug)]
pub(super) struct AskedMessage {
    /// Which of all messages of the range.
    pub(super) number: usize,
    pub(super) offset: u64,
    pub(super) length: usize,
    pub(super) buffer: DriveBuffer,
    /// Where the word is that says that it was read, and what that is then.
    pub(super) awaited: (usize, Condition),
    /// How waiting for the drive ended; nothing as long as it reads.
    pub(super) read: Option<Result<(), SourceError>>,
    pub(super) waited: Option<u16>,
    pub(super) done: Option<Completion>,
}

/// What is done with the messages of a range.
pub(super) struct Range<'a> {
    pub(super) work: &'a MessageWork<'a>,
    /// Where on the drive the range begins, in bytes.
    pub(super) first: u64,
    /// What is left of it begins here, and ends there.
    pub(super) at: u64,
    pub(super) end: u64,
    /// Bytes of each place for what comes out, and where these places are in the accelerator's memory for data: one for each
    /// message that the accelerator knows of.
    pub(super) room: usize,
    pub(super) places: Vec<usize>,
    /// Messages that the drive was asked for so far.
    pub(super) asked: usize,
    /// Messages that the accelerator was told of so far.
    pub(super) told: usize,
    /// In the order of the drive's data; the accelerator knows of the first ones.
    pub(super) under_way: VecDeque<AskedMessage>,
}

impl Range<'_> {
    /// Messages that the accelerator knows of and that are under way.
    pub(super) fn known(&self) -> usize {
        self.under_way.len() - (self.asked - self.told)
    }

    /// Which place a message's output has.
    pub(super) fn place(&self, number: usize) -> usize {
        number % self.places.len().max(1)
    }
}

/// Takes the oldest message when it has ended, and hands it over.
pub(super) fn take(
    accel: &mut Accel,
    range: &mut Range<'_>,
    each: &mut Take<'_>,
) -> Result<(), SourceError> {
    let (room, first) = (range.room, range.told - range.known());
    let (known, places) = (range.known(), range.places.len().max(1));
    loop {
        if let Some(AskedMessage { waited: Some(_), done: Some(_), .. }) = range.under_way.front() {
            break;
        }
        // Two descriptors for each message; those of later ones may end before.
        let completion = match accel.wait(0) {
            Ok(completion) => completion,
            Err(error) => {
                range.under_way.clear();
                range.told = range.asked;
                return Err(error.into());
            }
        };
        let place = usize::from(completion.id & !WAITS);
        let mut known = range.under_way.iter_mut().take(known);
        let Some(message) = known.find(|message| message.number % places == place) else {
            range.under_way.clear();
            range.told = range.asked;
            // Nothing of it may be taken for what follows.
            while accel.under_way(0) > 0 && accel.wait(0).is_ok() {}
            return Err(AccelError::Unsupported("it completed what nobody sent").into());
        };
        match completion.id & WAITS {
            0 => message.done = Some(completion),
            _ => message.waited = Some(completion.status),
        }
    }
    let Some(message) = range.under_way.pop_front() else { return Ok(()) };
    let AskedMessage { offset, length, read, waited, done: Some(done), .. } = message else {
        return Ok(());
    };
    read.unwrap_or(Ok(()))?;
    match waited.and_then(OperationStatus::from_number) {
        Some(OperationStatus::Success) => {}
        Some(OperationStatus::ConditionFailed) => return Err(SourceError::Read { offset, length }),
        status => {
            let status = status.unwrap_or(OperationStatus::EngineFailed);
            return Err(SourceError::Message { offset, status });
        }
    }
    let status = OperationStatus::from_number(done.status).unwrap_or(OperationStatus::EngineFailed);
    if status != OperationStatus::Success {
        return Err(SourceError::Message { offset, status });
    }
    let mut result = vec![0; (done.output as usize).min(room)];
    if let Some(from) = accel.data(range.places[range.place(first)], result.len()) {
        from.copy_to(&mut result);
    }
    each(offset, &result)
}
