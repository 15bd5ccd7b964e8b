//! Data of a borrowed drive through an accelerator on its way to the program: it tells both functions at once, and
//! takes results; between the drive's read and the accelerator's result no processor of its does anything.
//!
//! The drive reads into memory of its driver's, which the accelerator reaches too. For each message there are a read of
//! the drive's, and two descriptors: one that waits for the drive's completion, and behind it the operations. While
//! the accelerator works on a message, the drive reads the next ones: as many as it has queues here, one in each, so
//! that it is known where each completion will be. Whichever of them the drive ends first, the accelerator works on them
//! in the order of the drive's data.

mod nonces;
mod range;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rackbus_spec::accel::{Operation, OperationStatus};
use rackbus_spec::nvme::IoOpcode;

use nonces::{check_nonces, work_at};
use range::{AskedMessage, Range, WAITS, take};

use super::{Accel, AccelError, MessageSpan, MessageWork};
use crate::device::{DmaAddresses, FunctionPlace};
use crate::drive::DriveOptions;
use crate::queue::DriveBuffer;
use crate::{Drive, DriveError};

/// Reads of a drive in flight at most.
const READS: usize = 8;
/// Bytes of memory for messages, which bound the reads in flight where messages are large.
const MEMORY: usize = 8 << 20;
/// Messages that the accelerator knows of, each with a place for what comes out.
const TOLD: usize = 3;
/// Messages that have been read and whose results were not taken, beside those that are read.
const READ: usize = TOLD - 1;
/// How long a drive may take for a read.
const READ_LIMIT: Duration = Duration::from_secs(10);
/// How long the accelerator waits for one, which ends before who waits for the accelerator gives up.
const WAIT_LIMIT: Duration = Duration::from_secs(15);
/// Bytes that a message cannot have.
const NO_MESSAGE: SourceError = SourceError::Request(
    "a message is whole blocks, and no more than drive and accelerator take at once (1 MiB mostly)",
);

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
        status: OperationStatus,
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

/// A drive whose data go through an accelerator.
#[derive(Debug)]
pub struct DriveSource {
    drive: Drive,
    /// Where the accelerator reaches the memory that the driver shares with the drive.
    reached: DmaAddresses,
    /// Bytes of a message: whole blocks.
    message: usize,
    /// Places for messages in the drive's memory: for those that are read, and [`READ`] more.
    slots: Vec<DriveBuffer>,
}

impl DriveSource {
    /// Opens the drive at a place for an accelerator, in messages of `message` bytes.
    ///
    /// # Errors
    /// [`SourceError`]; a message is whole blocks, and no more than drive and accelerator take at once.
    pub fn open(
        accel: &mut Accel,
        place: &FunctionPlace,
        message: usize,
    ) -> Result<DriveSource, SourceError> {
        if message == 0 || message > accel.info().largest as usize {
            return Err(NO_MESSAGE);
        }
        let most = (MEMORY / message).saturating_sub(READ).clamp(1, READS);
        let data = message.checked_mul(most + READ).ok_or(NO_MESSAGE)?;
        // One read at a time in each queue: where its completion will be is known then.
        let options = DriveOptions { depth: 1, data };
        DriveSource::with_drive(accel, Drive::open_at(place, options, most as u16)?, message)
    }

    /// The same with a drive that has room for two messages more than it has queues, and one command in flight in each of
    /// these at most.
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
            return Err(NO_MESSAGE);
        }
        // Where memory is in several pieces, fewer may fit, and fewer are read at a time then.
        let slots = drive.buffers(message, drive.queues() + READ);
        if drive.pair(0).is_none_or(|(queue, _)| queue.depth() != 1) || slots.len() <= READ {
            return Err(SourceError::Request("the drive is open for something else"));
        }
        let reached = accel.reach(drive.memory())?;
        Ok(DriveSource { drive, reached, message, slots })
    }

    /// How many messages are read at a time, each by a queue of its own.
    fn reads(&self) -> usize {
        self.slots.len() - READ
    }

    /// Where the accelerator reaches `length` bytes of the drive's memory.
    fn address(&self, offset: usize, length: usize) -> Result<u64, SourceError> {
        let address = self.reached.piece(offset, length);
        address.ok_or(SourceError::Request(
            "the drive's memory is in smaller pieces for the accelerator",
        ))
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
    /// AES-CTR counts on from message to message, as if the range were one; it is the first operation then. What is
    /// sealed or opened by AES-GCM needs a nonce for each message, so a range is one message there.
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
        if accel.depth(0) < 2 * TOLD as u32 {
            return Err(SourceError::Request(
                "the accelerator is open with too few descriptors under way: it takes 6",
            ));
        }
        if length > self.message as u64 {
            check_nonces(work.stages)?;
        }
        accel.check_idle()?;
        self.check_idle()?;
        let data = room.min(accel.data_size());
        let room = (data / TOLD).min(accel.info().largest as usize);
        let places = accel.places(data, room, TOLD);
        if places.is_empty() {
            return Err(SourceError::Request(
                "the accelerator's memory for data is in smaller pieces than what may come out",
            ));
        }
        let (asked, told, under_way) = (0, 0, VecDeque::new());
        let (at, end) = (offset, offset + length);
        let mut range =
            Range { work, first: offset, at, end, room, places, asked, told, under_way };
        let mut outcome = Ok(());
        loop {
            if outcome.is_ok() {
                outcome = self.begin(accel, &mut range);
            }
            if outcome.is_err() {
                // What the accelerator does not know of ends with its read.
                range.under_way.truncate(range.known());
                range.told = range.asked;
            }
            let Some(oldest) = range.under_way.front_mut() else {
                self.drain();
                self.drive.abandon();
                // What is under way still is of this range, whose failure was another one.
                accel.give_up(0);
                return outcome;
            };
            if oldest.read.is_none() {
                // The drive may have the next one now.
                oldest.read = Some(self.finish(oldest.number));
                continue;
            }
            // Of what is behind a failure nothing is handed over.
            let next = match outcome.is_ok() {
                true => take(accel, &mut range, &mut each),
                false => take(accel, &mut range, &mut |_, _| Ok(())),
            };
            outcome = outcome.and(next);
        }
    }

    /// Reads of an earlier range that the drive never answered may be answered at any time, into memory that is used
    /// again.
    fn check_idle(&mut self) -> Result<(), SourceError> {
        for nth in 0..self.drive.queues() {
            let Some((queue, device)) = self.drive.pair(nth) else { continue };
            if queue.in_flight() > 0 && queue.poll(device)?.is_none() {
                return Err(SourceError::Request(
                    "the drive has not answered reads of an earlier range: open it again",
                ));
            }
        }
        Ok(())
    }

    /// Waits until the drive has answered what was given up, for as long as one read may take.
    fn drain(&mut self) {
        let begun = Instant::now();
        while begun.elapsed() < READ_LIMIT {
            let mut is_idle = true;
            for nth in 0..self.drive.queues() {
                let Some((queue, device)) = self.drive.pair(nth) else { continue };
                device.progress();
                // What went wrong is known already.
                is_idle &= queue.in_flight() == 0 || !matches!(queue.poll(device), Ok(None));
            }
            if is_idle {
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Asks the drive for as many messages as it can read now, and tells the accelerator of as many as have a place for
    /// what comes out.
    fn begin(&mut self, accel: &mut Accel, range: &mut Range<'_>) -> Result<(), SourceError> {
        while range.at < range.end && range.under_way.len() < self.slots.len() {
            let nth = range.asked % self.reads();
            let Some((queue, device)) = self.drive.pair(nth) else { break };
            if queue.in_flight() > 0 {
                if queue.poll(device)?.is_none() {
                    break;
                }
                let before = range.asked.checked_sub(self.reads());
                let mut under_way = range.under_way.iter_mut();
                if let Some(message) = under_way.find(|message| Some(message.number) == before) {
                    message.read = Some(Ok(()));
                }
            }
            let length = (range.end - range.at).min(self.message as u64) as usize;
            let message = self.ask(range.asked, range.at, length)?;
            range.under_way.push_back(message);
            (range.asked, range.at) = (range.asked + 1, range.at + length as u64);
        }
        while range.told < range.asked && range.known() < range.places.len() {
            let place = range.place(range.told);
            let output = accel.span(range.places[place], range.room)?;
            let Some(message) = range.under_way.get(range.known()) else { break };
            let AskedMessage { offset, buffer, awaited: (at, condition), .. } = message;
            let address = self.address(buffer.offset(), buffer.len())?;
            let input = MessageSpan { address, segments: 0, length: buffer.len() as u32 };
            let work = work_at(range.work, offset - range.first);
            let mut operations = Accel::describe_spans(&work, input, output)?;
            let word = self.address(*at, size_of::<u32>())?;
            let mut wait = Accel::describe_wait(word, *condition, WAIT_LIMIT);
            (wait.id, operations.id) = (place as u16 | WAITS, place as u16);
            [&wait, &operations].into_iter().try_for_each(|it| accel.push(0, it))?;
            accel.ring(0)?;
            // From here on it is under way there, whatever the drive does.
            range.told += 1;
        }
        Ok(())
    }

    /// Asks the drive for a message.
    fn ask(
        &mut self,
        number: usize,
        offset: u64,
        length: usize,
    ) -> Result<AskedMessage, SourceError> {
        let block = u64::from(self.drive.info().block_size);
        let nth = number % self.reads();
        let buffer = DriveBuffer { length, ..self.slots[number % self.slots.len()] };
        let Some((queue, device)) = self.drive.pair(nth) else {
            return Err(SourceError::Request("the drive has no such queue"));
        };
        let blocks = (length as u64 / block) as u32;
        let id = queue.submit(IoOpcode::Read, offset / block, blocks, buffer, false)?;
        let awaited = queue.awaited(id);
        queue.ring(device)?;
        let (read, waited, done) = (None, None, None);
        Ok(AskedMessage { number, offset, length, buffer, awaited, read, waited, done })
    }

    /// Waits until the drive has completed a message's read, with whatever status: the accelerator sees that, too.
    fn finish(&mut self, number: usize) -> Result<(), SourceError> {
        let nth = number % self.reads();
        let Some((queue, device)) = self.drive.pair(nth) else { return Ok(()) };
        let begun = Instant::now();
        let mut looks = 0u32;
        // It may have been seen already, when the next one was to be asked for.
        while queue.in_flight() > 0 && queue.poll(device)?.is_none() {
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

    /// Lets the accelerator reach the drive's memory no more, and gives the drive back.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn close(self, accel: &mut Accel) -> Result<(), SourceError> {
        Ok(accel.leave(self.drive.memory().len())?)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use rackbus_devices::accel::{Accelerator, EnginePool, PoolOptions};
    use rackbus_devices::nvme::{Nvme, NvmeConfig};
    use rackbus_qos::TenantId;

    use super::super::AccelOptions;
    use super::*;
    use crate::InThreadFunction;
    use crate::device::stoppable::Stoppable;

    #[test]
    fn a_range_is_possible_again_when_what_was_given_up_of_another_has_ended() {
        const MESSAGE: usize = 64 << 10;
        let pool = EnginePool::new(PoolOptions::default());
        let model = Accelerator::new(&pool, TenantId(1), None, 1).unwrap();
        let (device, stopped) = Stoppable::new(Box::new(model));
        let mut accel = Accel::start(Box::new(device), AccelOptions::default()).unwrap();
        let model = Nvme::new(&NvmeConfig::memory(1 << 20, "M1")).unwrap();
        let options = DriveOptions { depth: 1, data: 3 * MESSAGE };
        let mut drive =
            Drive::with_device(Box::new(InThreadFunction::new(Box::new(model))), options).unwrap();
        drive.write(0, &[7; 1 << 20], false).unwrap();
        let mut source = DriveSource::with_drive(&mut accel, drive, MESSAGE).unwrap();
        let stages = [(Operation::Copy, 0)];
        let work = MessageWork { stages: &stages, ..MessageWork::default() };
        let (range, room) = (DriveRange { offset: 0, length: 1 << 20 }, accel.data_size());
        let late = source.run(&mut accel, room, &work, range, |_, _| {
            stopped.store(true, Ordering::Relaxed);
            Ok(())
        });
        assert!(matches!(late, Err(SourceError::Accel(AccelError::Device(_)))), "{late:?}");
        assert!(accel.under_way(0) > 0, "nothing was given up");
        let refused = source.run(&mut accel, room, &work, range, |_, _| Ok(()));
        assert!(matches!(refused, Err(SourceError::Accel(AccelError::Request(_)))), "{refused:?}");
        stopped.store(false, Ordering::Relaxed);
        let begun = Instant::now();
        let mut taken = 0;
        loop {
            let each = |_, result: &[u8]| {
                assert!(result.iter().all(|byte| *byte == 7));
                taken += result.len();
                Ok(())
            };
            match source.run(&mut accel, room, &work, range, each) {
                Ok(()) => break assert_eq!(taken, 1 << 20),
                Err(SourceError::Accel(AccelError::Request(_)))
                    if begun.elapsed() < Duration::from_secs(10) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }
}
