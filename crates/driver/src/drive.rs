//! Bringing a drive up, and whole requests on it.

mod admin;
mod elsewhere;
mod pairs;

use std::path::Path;
use std::time::Duration;

use rackbus_memory::{DmaSlice, SharedMemory};
use rackbus_pci::machine::FunctionKind;
use rackbus_spec::nvme::command::{Cdw0, DsmCdw11, RwCdw12};
use rackbus_spec::nvme::data::DsmRange;
use rackbus_spec::nvme::{IoOpcode, Sqe, Status};
use zerocopy::IntoBytes;

use crate::DriveError;
use crate::device::{DmaAddresses, DrivenFunction, FunctionPlace};
use crate::queue::{DriveBuffer, DriveQueue, PAGE, PairLayout};
use admin::{Admin, admin_queue, enable, wait};
use pairs::place_pairs;

/// Where the shared memory begins in the drive's address space, where the driver can choose.
const IOVA: u64 = 1 << 32;
/// Entries of the admin queue.
const ADMIN_ENTRIES: u16 = 16;
/// What drives of this machine are: controllers of non-volatile memory, with the interface of NVM Express.
const KIND: FunctionKind = FunctionKind::Class(0x01_0802);
/// How long a drive may take for a command.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// After this long without an answer its status is looked at, and then again and again.
const LOOK_AFTER: Duration = Duration::from_millis(100);
/// Looks at the completion queue between two looks at the clock.
const SPINS: u32 = 256;

// The shared memory, in bytes from its start: pages for the two shadow buffers, the admin queues
// and identify data; then the I/O queue pair; then the data.
const SHADOW_VALUES: usize = 0;
const SHADOW_EVENTS: usize = PAGE;
const ADMIN_SQ: usize = 2 * PAGE;
const ADMIN_CQ: usize = 3 * PAGE;
const IDENTIFY: usize = 4 * PAGE;
const IO_SQ: usize = 5 * PAGE;

/// How to use a drive.
#[derive(Debug, Clone, Copy)]
pub struct DriveOptions {
    /// Commands in flight, 1 to 512.
    pub depth: u16,
    /// Bytes of memory for data.
    pub data: usize,
}

impl Default for DriveOptions {
    /// 32 commands, 4 MiB.
    fn default() -> Self {
        DriveOptions { depth: 32, data: 4 << 20 }
    }
}

/// What the drive says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriveInfo {
    /// Serial number, without the spaces that pad it.
    pub serial: String,
    /// Model number, without the spaces that pad it.
    pub model: String,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Capacity in logical blocks.
    pub blocks: u64,
    /// Most bytes that one command moves.
    pub max_transfer: usize,
    /// Whether writes need a flush to survive a loss of power.
    pub volatile_cache: bool,
}

/// An open drive with one I/O queue, or several.
pub struct Drive {
    device: Box<dyn DrivenFunction>,
    memory: SharedMemory,
    addresses: DmaAddresses,
    queue: DriveQueue,
    /// The others, behind the first one.
    others: Vec<DriveQueue>,
    info: DriveInfo,
    data: DriveBuffer,
    /// What is in flight is the command of a whole request that gave up waiting for it.
    late: bool,
}

impl std::fmt::Debug for Drive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Drive").field("info", &self.info).finish_non_exhaustive()
    }
}

impl Drive {
    /// Opens the drive at a vfio-user socket.
    ///
    /// # Errors
    /// [`DriveError`] when it cannot be reached, started or used.
    pub fn open(path: &Path, options: DriveOptions) -> Result<Drive, DriveError> {
        Drive::open_at(&FunctionPlace::Socket(path.to_owned()), options, 1)
    }

    /// Opens the drive there, with queues as [`with_queues`](Drive::with_queues).
    ///
    /// # Errors
    /// As [`open`](Drive::open).
    pub fn open_at(
        place: &FunctionPlace,
        options: DriveOptions,
        queues: u16,
    ) -> Result<Drive, DriveError> {
        Drive::with_queues(place.open(TIME_LIMIT, KIND)?, options, queues)
    }

    /// Starts the drive behind `device`.
    ///
    /// # Errors
    /// As [`open`](Drive::open).
    pub fn with_device(
        device: Box<dyn DrivenFunction>,
        options: DriveOptions,
    ) -> Result<Drive, DriveError> {
        Drive::with_queues(device, options, 1)
    }

    /// The same with as many queues as the drive grants of `queues`, one at least, each as deep as `options` say.
    ///
    /// # Errors
    /// As [`open`](Drive::open).
    pub fn with_queues(
        device: Box<dyn DrivenFunction>,
        options: DriveOptions,
        queues: u16,
    ) -> Result<Drive, DriveError> {
        let mut device = device;
        if !(1..=512).contains(&options.depth) {
            return Err(DriveError::Request("1 to 512 commands may be in flight"));
        }
        let (places, data) = place_pairs(options.depth, queues);
        let length = data + options.data.max(PAGE).next_multiple_of(PAGE);
        let memory = device.memory("nvme-driver", length)?;
        // Declared behind the memory: where this fails, the function is stopped before its memory is given back.
        let mut device = device;
        let addresses = device.start(IOVA, &memory)?;
        let iova = addresses.piece(0, data);
        let iova = iova.ok_or(DriveError::Unsupported("it needs more memory in one piece"))?;
        let dstrd = enable(&mut *device, iova)?;
        let queue = admin_queue(&memory, &addresses, dstrd);
        let mut admin = Admin { device: &mut *device, queue, iova };
        let (mut info, sgl, shadowed) = admin.identify(&memory)?;
        if !sgl {
            info.max_transfer = info.max_transfer.min(PAGE);
        }
        let shadow = if shadowed { Some(admin.shadow_doorbells()?) } else { None };
        let granted = if queues > 1 { admin.request_queues(queues)? } else { 1 };
        let mut made = Vec::new();
        for place in places.into_iter().take(granted.into()) {
            let place = PairLayout { dstrd, shadow, ..place };
            admin.create_queues(place)?;
            made.push(DriveQueue::new(&memory, &addresses, place, sgl));
        }
        let none = DriveError::Unsupported("it has no I/O queue");
        let mut made = made.into_iter();
        let (queue, others) = (made.next().ok_or(none)?, made.collect());
        // There may be more than was asked for.
        let data = DriveBuffer { offset: data, length: memory.len() - data };
        Ok(Drive { device, memory, addresses, queue, others, info, data, late: false })
    }

    /// What the drive says of itself.
    pub fn info(&self) -> &DriveInfo {
        &self.info
    }

    /// The queue, with the device that it is used with and the memory for data. Who takes it also takes what still
    /// completes of a request that failed.
    pub fn parts(&mut self) -> (&mut DriveQueue, &mut dyn DrivenFunction, DriveBuffer) {
        self.late = false;
        (&mut self.queue, &mut *self.device, self.data)
    }

    /// `length` bytes of the memory for data from `offset` on.
    pub fn buffer(&self, offset: usize, length: usize) -> Option<DriveBuffer> {
        let end = offset.checked_add(length)?;
        (end <= self.data.length).then(|| DriveBuffer { offset: self.data.offset + offset, length })
    }

    /// Up to `most` parts of the memory for data of `length` bytes each, which the drive reaches in one piece each.
    pub(crate) fn buffers(&self, length: usize, most: usize) -> Vec<DriveBuffer> {
        let range = (self.data.offset, self.data.offset + self.data.length);
        let places = self.addresses.places(range, length, most);
        places.into_iter().map(|offset| DriveBuffer { offset, length }).collect()
    }

    /// Reads `out.len()` bytes, whole blocks, from block `lba` on.
    ///
    /// # Errors
    /// [`DriveError`].
    pub fn read(&mut self, lba: u64, out: &mut [u8]) -> Result<(), DriveError> {
        let pieces = self.pieces(lba, out.len())?;
        for ((lba, blocks, buffer), out) in pieces.iter().zip(out.chunks_mut(self.piece())) {
            self.transfer(IoOpcode::Read, *lba, *blocks, *buffer, false)?;
            self.slice(*buffer)?.copy_to(out);
        }
        Ok(())
    }

    /// Writes `data`, whole blocks, from block `lba` on. With `fua`, it is on the medium on
    /// return.
    ///
    /// # Errors
    /// [`DriveError`].
    pub fn write(&mut self, lba: u64, data: &[u8], fua: bool) -> Result<(), DriveError> {
        let pieces = self.pieces(lba, data.len())?;
        for ((lba, blocks, buffer), data) in pieces.iter().zip(data.chunks(self.piece())) {
            self.check_idle()?;
            self.slice(*buffer)?.copy_from(data);
            self.transfer(IoOpcode::Write, *lba, *blocks, *buffer, fua)?;
        }
        Ok(())
    }

    /// Whether the drive has `data`, whole blocks, from block `lba` on.
    ///
    /// # Errors
    /// [`DriveError`].
    pub fn compare(&mut self, lba: u64, data: &[u8]) -> Result<bool, DriveError> {
        let pieces = self.pieces(lba, data.len())?;
        for ((lba, blocks, buffer), data) in pieces.iter().zip(data.chunks(self.piece())) {
            self.check_idle()?;
            self.slice(*buffer)?.copy_from(data);
            match self.transfer(IoOpcode::Compare, *lba, *blocks, *buffer, false) {
                Ok(()) => {}
                Err(DriveError::Command { status, .. })
                    if status.code() == Status::COMPARE_FAILURE =>
                {
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Brings everything written before to the medium.
    ///
    /// # Errors
    /// [`DriveError`].
    pub fn flush(&mut self) -> Result<(), DriveError> {
        self.run("flush", io(IoOpcode::Flush))
    }

    /// Makes `blocks` blocks from `lba` on read as zeroes.
    ///
    /// # Errors
    /// [`DriveError`].
    pub fn write_zeroes(&mut self, lba: u64, blocks: u64) -> Result<(), DriveError> {
        let mut done = 0;
        while done < blocks {
            let count = (blocks - done).min(1 << 16);
            let mut sqe = io(IoOpcode::WriteZeroes);
            let at = lba.saturating_add(done);
            (sqe.cdw10, sqe.cdw11) = (at as u32, (at >> 32) as u32);
            sqe.cdw12 = RwCdw12::new().with_nlb((count - 1) as u16).into();
            self.run("write zeroes", sqe)?;
            done += count;
        }
        Ok(())
    }

    /// Gives the space of `blocks` blocks from `lba` on back; they read as zeroes.
    ///
    /// # Errors
    /// [`DriveError`].
    pub fn deallocate(&mut self, lba: u64, blocks: u32) -> Result<(), DriveError> {
        let range = DsmRange { attributes: 0, nlb: blocks, slba: lba };
        let buffer = DriveBuffer { offset: self.data.offset, length: size_of::<DsmRange>() };
        self.check_idle()?;
        self.slice(buffer)?.copy_from(range.as_bytes());
        let mut sqe = io(IoOpcode::DatasetManagement);
        sqe.cdw11 = DsmCdw11::new().with_ad(true).into();
        self.queue.point_to(&mut sqe, buffer)?;
        self.run("deallocate", sqe)
    }

    /// Bytes of the pieces that requests are cut into.
    fn piece(&self) -> usize {
        let most = self.info.max_transfer.min(self.data.length);
        most - most % self.info.block_size as usize
    }

    /// Cuts a request into commands: block, number of blocks and buffer of each.
    fn pieces(&self, lba: u64, length: usize) -> Result<Vec<(u64, u32, DriveBuffer)>, DriveError> {
        let block = self.info.block_size as usize;
        if !length.is_multiple_of(block) {
            return Err(DriveError::Request("the length is not a multiple of the block size"));
        }
        let piece = self.piece();
        let cut = |start: usize| {
            let length = piece.min(length - start);
            let buffer = DriveBuffer { offset: self.data.offset, length };
            let lba = lba.checked_add((start / block) as u64);
            let lba = lba.ok_or(DriveError::Request("the blocks are beyond the drive's end"))?;
            Ok((lba, (length / block) as u32, buffer))
        };
        (0..length).step_by(piece).map(cut).collect()
    }

    fn slice(&self, buffer: DriveBuffer) -> Result<DmaSlice<'_>, DriveError> {
        let part = self.memory.whole().part(buffer.offset, buffer.length);
        part.ok_or(DriveError::Request("the buffer is no part of the drive's memory"))
    }

    fn transfer(
        &mut self,
        opcode: IoOpcode,
        lba: u64,
        blocks: u32,
        buffer: DriveBuffer,
        fua: bool,
    ) -> Result<(), DriveError> {
        self.check_idle()?;
        self.queue.submit(opcode, lba, blocks, buffer, fua)?;
        self.finish(name(opcode))
    }

    fn run(&mut self, name: &'static str, sqe: Sqe) -> Result<(), DriveError> {
        self.check_idle()?;
        self.queue.push(sqe)?;
        self.finish(name)
    }

    /// A whole request waits for the next completion, which has to be its own, and uses the buffer, which a command in
    /// flight may still read or write. A former request's command may have completed meanwhile.
    fn check_idle(&mut self) -> Result<(), DriveError> {
        if self.late {
            self.take_late()?;
        }
        match self.queue.in_flight() {
            0 if !self.late => Ok(()),
            _ => Err(DriveError::Request("the queue has other commands in flight")),
        }
    }

    fn finish(&mut self, name: &'static str) -> Result<(), DriveError> {
        let rung = self.queue.ring(&mut *self.device);
        let done = rung.and_then(|()| wait(&mut self.queue, &mut *self.device, name));
        self.late = self.queue.in_flight() > 0;
        done.map(drop)
    }
}

/// What is asked for, in errors.
fn name(opcode: IoOpcode) -> &'static str {
    match opcode {
        IoOpcode::Read => "read",
        IoOpcode::Write => "write",
        _ => "compare",
    }
}

/// An I/O command on the namespace without arguments.
fn io(opcode: IoOpcode) -> Sqe {
    let mut sqe = Sqe { nsid: 1, ..Sqe::default() };
    sqe.cdw0 = Cdw0::new().with_opcode(opcode as u8);
    sqe
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rackbus_devices::nvme::{Nvme, NvmeConfig};

    use super::*;
    use crate::device::stoppable::Stoppable;

    fn stoppable() -> (Drive, Arc<AtomicBool>) {
        stoppable_with(1)
    }

    fn stoppable_with(queues: u16) -> (Drive, Arc<AtomicBool>) {
        let nvme = Nvme::new(&NvmeConfig::memory(1 << 20, "LATE")).unwrap();
        let (device, stopped) = Stoppable::new(Box::new(nvme));
        let options = DriveOptions::default();
        (Drive::with_queues(Box::new(device), options, queues).unwrap(), stopped)
    }

    /// What is read into the memory for data by any queue keeps requests from using that.
    #[test]
    fn what_was_abandoned_in_any_queue_ends_before_a_request_uses_the_memory() {
        for nth in [0, 1] {
            let (mut drive, stopped) = stoppable_with(2);
            drive.write(0, &[1; 512], false).unwrap();
            stopped.store(true, Ordering::Relaxed);
            let data = drive.data;
            let (queue, device) = drive.pair(nth).unwrap();
            queue.submit(IoOpcode::Read, 0, 1, data, false).unwrap();
            queue.ring(device).unwrap();
            drive.abandon();
            let refused = drive.write(8, &[2; 512], false);
            assert!(matches!(refused, Err(DriveError::Request(_))), "{refused:?}");
            stopped.store(false, Ordering::Relaxed);
            let again = |drive: &mut Drive| drive.write(8, &[2; 512], false).is_ok();
            assert!((0..100).any(|_| again(&mut drive)), "it is not usable again");
            let mut back = [0; 512];
            drive.read(8, &mut back).unwrap();
            assert!(back == [2; 512], "a late read changed what was written");
        }
    }

    #[test]
    fn a_late_write_writes_its_own_data_and_the_drive_goes_on_after_it() {
        type Request = fn(&mut Drive) -> Result<(), DriveError>;
        let others: [Request; 3] = [
            |drive| drive.write(8, &[2; 512], false),
            |drive| drive.compare(8, &[2; 512]).map(drop),
            |drive| drive.deallocate(8, 1),
        ];
        for other in others {
            let (mut drive, stopped) = stoppable();
            stopped.store(true, Ordering::Relaxed);
            let late = drive.write(0, &[1; 512], false);
            assert!(matches!(late, Err(DriveError::TimedOut(_))), "{late:?}");
            let refused = other(&mut drive);
            assert!(matches!(refused, Err(DriveError::Request(_))), "{refused:?}");
            stopped.store(false, Ordering::Relaxed);
            // It may take a few looks, and no more.
            assert!((0..100).any(|_| other(&mut drive).is_ok()), "it is not usable again");
            let mut back = [0; 512];
            drive.read(0, &mut back).unwrap();
            assert!(back == [1; 512], "another request's data was written");
        }
    }

    #[test]
    fn commands_that_were_put_in_beside_requests_are_not_taken_for_late_ones() {
        let (mut drive, stopped) = stoppable();
        stopped.store(true, Ordering::Relaxed);
        assert!(drive.flush().is_err());
        stopped.store(false, Ordering::Relaxed);
        let (queue, device, data) = drive.parts();
        let id = queue.submit(IoOpcode::Read, 0, 1, data, false).unwrap();
        queue.ring(device).unwrap();
        for _ in 0..100 {
            device.progress();
        }
        assert!(matches!(drive.flush(), Err(DriveError::Request(_))));
        let (queue, device, _) = drive.parts();
        let ended: Vec<_> = std::iter::from_fn(|| queue.poll(device).unwrap()).collect();
        assert_eq!(ended.len(), 2);
        assert_eq!(ended[1].id, id);
        drive.flush().unwrap();
    }
}
