//! Data of a borrowed drive through an accelerator on its way to the program: it tells both functions at once, and
//! takes results; between the drive's read and the accelerator's result no processor of its does anything.
//!
//! The drive reads into memory of its driver's, which the accelerator reaches too. For each message there are a read of
//! the drive's, and two descriptors: one that waits for the drive's completion, and behind it the operations. While
//! the accelerator works on a message, the drive reads the next one.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use rackbus_spec::accel::{Completion, Operation, Status};
use rackbus_spec::nvme::IoOpcode;

use super::{Accel, AccelError, MessageSpan, MessageWork};
use crate::drive::DriveOptions;
use crate::{Drive, DriveError, DriveQueue};

/// Messages under way: one that is read, and those that the accelerator works on.
const SLOTS: usize = 3;
/// How long a drive may take for a read.
const READ_LIMIT: Duration = Duration::from_secs(10);
/// How long the accelerator waits for one, which ends before who waits for the accelerator gives up.
const WAIT_LIMIT: Duration = Duration::from_secs(15);
/// Set in the identifier of a descriptor that waits.
const WAITS: u16 = 0x8000;

/// Why data did not come through.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The drive failed, or its queue could not be made.
    #[error(transparent)]
    Drive(#[from] DriveError),
    /// The accelerator failed, or refused what it was asked for.
    #[error(transparent)]
    Accel(#[from] AccelError),
    /// The drive could not read what was asked for.
    #[error("the drive could not read {length} bytes at {offset}")]
    Read {
        /// Where the message begins on the drive, in bytes.
        offset: u64,
        /// Bytes of the message.
        length: usize,
    },
    /// The accelerator ended a message with an error.
    #[error("the message at {offset} failed: {status}")]
    Message {
        /// Where it begins on the drive, in bytes.
        offset: u64,
        /// What the accelerator answered.
        status: Status,
    },
    /// What is asked for cannot be.
    #[error("{0}")]
    Request(&'static str),
    /// Who takes the results wants no more.
    #[error("the callback that takes the results ended it")]
    Ended,
}

/// Bytes of a drive, and the messages that they are cut into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DriveRange {
    /// Where it begins, in bytes: a multiple of the drive's block size.
    pub offset: u64,
    /// How many bytes are read: a multiple of the drive's block size.
    pub length: u64,
}

/// Takes what came out of a message, with where that begins on the drive.
type Take<'a> = dyn FnMut(u64, &[u8]) -> Result<(), SourceError> + 'a;

/// A drive whose data go through an accelerator.
#[derive(Debug)]
pub struct DriveSource {
    drive: Drive,
    /// Where the accelerator reaches the memory that the driver shares with the drive.
    address: u64,
    /// Bytes of a message: whole blocks.
    message: usize,
}

/// A message under way.
#[derive(Debug)]
struct Message {
    slot: usize,
    offset: u64,
    length: usize,
    waited: Option<u16>,
    done: Option<Completion>,
}

impl DriveSource {
    /// Opens the drive at the vfio-user socket `path` for an accelerator, in messages of `message` bytes.
    ///
    /// # Errors
    /// [`SourceError`]; a message is whole blocks, and no more than drive and accelerator take at once.
    pub fn open(
        accel: &mut Accel,
        path: &Path,
        message: usize,
    ) -> Result<DriveSource, SourceError> {
        // One read at a time: where its completion will be is known then.
        let options = DriveOptions { depth: 1, data: SLOTS * message };
        DriveSource::with_drive(accel, Drive::open(path, options)?, message)
    }

    /// The same with a drive that has room for three messages, and one command in flight at most.
    ///
    /// # Errors
    /// As [`open`](DriveSource::open).
    pub fn with_drive(
        accel: &mut Accel,
        mut drive: Drive,
        message: usize,
    ) -> Result<DriveSource, SourceError> {
        let info = drive.info();
        let most = info.max_transfer.min(accel.info().largest as usize);
        if message == 0 || !message.is_multiple_of(info.block_size as usize) || message > most {
            return Err(SourceError::Request(
                "a message is whole blocks, and no more than drive and accelerator take at once (1 MiB mostly)",
            ));
        }
        if drive.parts().0.depth() != 1 || drive.buffer(0, SLOTS * message).is_none() {
            return Err(SourceError::Request("the drive is open for something else"));
        }
        let address = accel.reach(drive.memory())?;
        Ok(DriveSource { drive, address, message })
    }

    /// Bytes of a message for these operations: as many as can be, but half of that where more may come out than goes in.
    pub fn usual_message(accel: &Accel, stages: &[(Operation, u16)]) -> usize {
        let shrinks = |stage: &(Operation, u16)| {
            use Operation::{Blake3, Copy, Crc32c, Sha3_512, Sha256};
            matches!(stage.0, Copy | Sha256 | Sha3_512 | Blake3 | Crc32c)
        };
        let largest = accel.info().largest as usize;
        if stages.iter().all(shrinks) { largest } else { largest / 2 }
    }

    /// The drive that data comes from, to be used while no range is under way.
    pub fn drive(&mut self) -> &mut Drive {
        &mut self.drive
    }

    /// Does `work` on each message of `range`, and hands over what comes out with the place that it is of, in the order
    /// of the drive. It uses `room` bytes of the accelerator's memory for data and its first queue, where nothing else
    /// is under way. What fails ends it, when nothing is under way any more.
    ///
    /// # Errors
    /// [`SourceError`].
    pub fn run(
        &mut self,
        accel: &mut Accel,
        room: usize,
        work: &MessageWork<'_>,
        range: DriveRange,
        mut each: impl FnMut(u64, &[u8]) -> Result<(), SourceError>,
    ) -> Result<(), SourceError> {
        let info = self.drive.info();
        let block = u64::from(info.block_size);
        let DriveRange { offset, length } = range;
        let end =
            offset.checked_add(length).filter(|end| *end <= info.blocks.saturating_mul(block));
        if end.is_none() {
            return Err(SourceError::Request("the range is beyond the drive's end"));
        }
        if !offset.is_multiple_of(block) || !length.is_multiple_of(block) {
            return Err(SourceError::Request("the range is not of whole blocks of the drive"));
        }
        if accel.depth(0) < 2 * SLOTS as u32 {
            return Err(SourceError::Request(
                "the accelerator is open with too few descriptors under way: it takes 6",
            ));
        }
        if accel.under_way(0) > 0 {
            return Err(SourceError::Request("other descriptors are under way"));
        }
        let room = (room.min(accel.data_size()) / SLOTS).min(accel.info().largest as usize);
        let mut under_way = VecDeque::new();
        let mut outcome = Ok(());
        let mut at = 0;
        for slot in (0..SLOTS).cycle() {
            if at == length {
                break;
            }
            if under_way.len() == SLOTS {
                outcome = take(accel, &mut under_way, room, &mut each);
            }
            if outcome.is_ok() {
                let count = (length - at).min(self.message as u64) as usize;
                let message = Message::new(slot, offset + at, count);
                outcome = self.begin(accel, work, message, room, &mut under_way);
                at += count as u64;
            }
            if outcome.is_err() {
                break;
            }
        }
        while !under_way.is_empty() {
            // Of what is behind a failure nothing is handed over.
            let next = match outcome.is_ok() {
                true => take(accel, &mut under_way, room, &mut each),
                false => take(accel, &mut under_way, room, &mut |_, _| Ok(())),
            };
            outcome = outcome.and(next);
        }
        outcome
    }

    /// Tells accelerator and drive of a message, and waits until the drive has read it. It is under way as soon as the
    /// accelerator knows of it, whatever the drive does.
    fn begin(
        &mut self,
        accel: &mut Accel,
        work: &MessageWork<'_>,
        message: Message,
        room: usize,
        under_way: &mut VecDeque<Message>,
    ) -> Result<(), SourceError> {
        let Message { slot, offset, length, .. } = message;
        let block = u64::from(self.drive.info().block_size);
        let none = SourceError::Request("the drive has no memory for it");
        let buffer = self.drive.buffer(slot * self.message, length).ok_or(none)?;
        let output = accel.span(slot * room, room)?;
        let place = self.address + buffer.offset() as u64;
        let input = MessageSpan { address: place, segments: 0, length: length as u32 };
        let mut operations = Accel::describe_spans(work, input, output)?;
        let (queue, _, _) = self.drive.parts();
        let blocks = (length as u64 / block) as u32;
        let id = queue.submit(IoOpcode::Read, offset / block, blocks, buffer, false)?;
        let (at, condition) = queue.awaited(id);
        let mut wait = Accel::describe_wait(self.address + at as u64, condition, WAIT_LIMIT);
        (wait.id, operations.id) = (slot as u16 | WAITS, slot as u16);
        [&wait, &operations].into_iter().try_for_each(|it| accel.push(0, it))?;
        accel.ring(0)?;
        under_way.push_back(message);
        let (queue, device, _) = self.drive.parts();
        queue.ring(device)?;
        finish(queue, device)
    }

    /// Lets the accelerator reach the drive's memory no more, and gives the drive back.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn close(self, accel: &mut Accel) -> Result<(), SourceError> {
        Ok(accel.leave(self.address, self.drive.memory().len())?)
    }
}

impl Message {
    fn new(slot: usize, offset: u64, length: usize) -> Message {
        Message { slot, offset, length, waited: None, done: None }
    }
}

/// Waits for the drive's completion, with whatever status: the accelerator sees that, too.
fn finish(
    queue: &mut DriveQueue,
    device: &mut dyn crate::DrivenFunction,
) -> Result<(), SourceError> {
    let begun = Instant::now();
    let mut looks = 0u32;
    while queue.poll(device)?.is_none() {
        looks = looks.wrapping_add(1);
        match device.progress() || !looks.is_multiple_of(1024) {
            true => std::hint::spin_loop(),
            false => std::thread::yield_now(),
        }
        if looks.is_multiple_of(1024) && begun.elapsed() > READ_LIMIT {
            return Err(DriveError::TimedOut("read").into());
        }
    }
    Ok(())
}

/// Takes the oldest message when it has ended, and hands it over.
fn take(
    accel: &mut Accel,
    under_way: &mut VecDeque<Message>,
    room: usize,
    each: &mut Take<'_>,
) -> Result<(), SourceError> {
    let Some(oldest) = under_way.front().map(|message| message.slot) else { return Ok(()) };
    loop {
        if let Some(Message { waited: Some(_), done: Some(_), .. }) = under_way.front() {
            break;
        }
        // Two descriptors for each message; those of later ones may end before.
        let completion = match accel.wait(0) {
            Ok(completion) => completion,
            Err(error) => {
                under_way.clear();
                return Err(error.into());
            }
        };
        let slot = usize::from(completion.id & !WAITS);
        let Some(message) = under_way.iter_mut().find(|message| message.slot == slot) else {
            under_way.clear();
            // Nothing of it may be taken for what follows.
            while accel.under_way(0) > 0 && accel.wait(0).is_ok() {}
            return Err(AccelError::Unsupported("it completed what nobody sent").into());
        };
        match completion.id & WAITS {
            0 => message.done = Some(completion),
            _ => message.waited = Some(completion.status),
        }
    }
    let Some(Message { offset, length, waited, done: Some(done), .. }) = under_way.pop_front()
    else {
        return Ok(());
    };
    match waited.and_then(Status::from_number) {
        Some(Status::Success) => {}
        Some(Status::ConditionFailed) => return Err(SourceError::Read { offset, length }),
        status => {
            let status = status.unwrap_or(Status::EngineFailed);
            return Err(SourceError::Message { offset, status });
        }
    }
    let status = Status::from_number(done.status).unwrap_or(Status::EngineFailed);
    if status != Status::Success {
        return Err(SourceError::Message { offset, status });
    }
    let mut result = vec![0; (done.output as usize).min(room)];
    if let Some(from) = accel.data(oldest * room, result.len()) {
        from.copy_to(&mut result);
    }
    each(offset, &result)
}
