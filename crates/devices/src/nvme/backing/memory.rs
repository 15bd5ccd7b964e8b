//! Data in the lender's memory.
//!
//! Everything is done at once but a long range that is to read as zeroes: that is done piece by piece, one in each look
//! at what has finished, so that commands of other queues are done between.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};

use rackbus_memory::{DmaSlice, PinnedSlice, RegionError, SharedMemory};
use rackbus_pci::Health;
use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;

use super::{Background, Backing, InlineResult, MediaError, MediumRequest, RequestResult};

/// Most bytes that are made zeroes at once, and what pieces end at multiples of: a huge page is given back as a whole,
/// and is split where only a part of it is.
pub const ZERO_PIECE: u64 = 2 << 20;
/// From this length on, giving pages back to the system is cheaper than filling them with zeroes.
const PUNCH_FROM: u64 = 64 << 10;
/// How much of what comes next is asked to come near ahead of its copy.
const PREFETCH: usize = 1024;

/// Memory that lives as long as the drive, in whatever processes. It has no cache above it and no medium below: what
/// is written is as durable as it will ever be.
#[derive(Debug)]
pub struct MemoryBacking {
    memory: SharedMemory,
    capacity: u64,
    /// Of the drive's persistent memory region: memory does not fail.
    health: Health,
    /// Long ranges that are to be made zeroes, the first of them piece by piece.
    zeroing: VecDeque<LongZero>,
    /// What was started and is done, until the next look.
    finished: Vec<RequestResult>,
}

/// The rest of a range that is being made zeroes, for who started it with this tag.
#[derive(Debug)]
struct LongZero {
    tag: u32,
    next: u64,
    end: u64,
}

impl MemoryBacking {
    /// `capacity` bytes of zeroes; pages are taken when they are first written.
    ///
    /// # Errors
    /// When the system has no memory or descriptors left.
    pub fn new(capacity: u64) -> Result<Self, RegionError> {
        Ok(MemoryBacking::around(SharedMemory::create("nvme", capacity)?, capacity))
    }

    /// The `capacity` bytes that another process had, in its `memory`.
    ///
    /// # Errors
    /// When it is none.
    pub fn again(capacity: u64, memory: OwnedFd) -> Result<Self, RegionError> {
        Ok(MemoryBacking::around(SharedMemory::adopt(memory, capacity)?, capacity))
    }

    fn around(memory: SharedMemory, capacity: u64) -> MemoryBacking {
        let (health, zeroing, finished) = Default::default();
        MemoryBacking { memory, capacity, health, zeroing, finished }
    }

    fn data(&self, offset: u64, length: usize) -> Option<DmaSlice<'_>> {
        self.memory.whole().part(usize::try_from(offset).ok()?, length)
    }

    fn zero(&self, offset: u64, length: u64) -> Result<(), MediaError> {
        if length >= PUNCH_FROM {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            if rustix::fs::fallocate(self.memory.as_fd(), flags, offset, length).is_ok() {
                return Ok(());
            }
        }
        let bytes = usize::try_from(length).map_err(|_| MediaError::Write)?;
        self.data(offset, bytes).ok_or(MediaError::Write)?.fill(0);
        Ok(())
    }

    /// Does the next piece of the first range.
    fn zero_piece(&mut self) {
        let Some(mut range) = self.zeroing.pop_front() else { return };
        // Pages that were never written take no time: a whole drive is often given back.
        let first = match rustix::fs::seek(self.memory.as_fd(), SeekFrom::Data(range.next)) {
            Ok(first) => first.max(range.next).min(range.end),
            Err(Errno::NXIO) => range.end,
            Err(_) => range.next,
        };
        let end = (first + 1).next_multiple_of(ZERO_PIECE).min(range.end);
        let result = match first < end {
            true => self.zero(first, end - first),
            false => Ok(()),
        };
        range.next = end;
        if result.is_err() || end == range.end {
            self.finished.push((range.tag, result));
        } else {
            // Ranges end one after the other, so that whoever waits for the next answer has it soon.
            self.zeroing.push_front(range);
        }
    }

    fn read(&self, offset: u64, into: &[DmaSlice<'_>]) -> Result<(), MediaError> {
        self.copy(offset, into, MediaError::Read, |data, host| {
            host.copy_from_slice(data);
        })
    }

    fn write(&self, offset: u64, from: &[DmaSlice<'_>]) -> Result<(), MediaError> {
        self.copy(offset, from, MediaError::Write, |data, host| {
            data.copy_from_slice(host);
        })
    }

    fn copy(
        &self,
        mut offset: u64,
        slices: &[DmaSlice<'_>],
        error: MediaError,
        one: impl Fn(DmaSlice<'_>, DmaSlice<'_>),
    ) -> Result<(), MediaError> {
        for slice in slices {
            let data = self.data(offset, slice.len()).ok_or(error)?;
            one(data, *slice);
            offset += slice.len() as u64;
        }
        Ok(())
    }
}

impl Backing for MemoryBacking {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn health(&self) -> Health {
        self.health.clone()
    }

    fn volatile_cache(&self) -> bool {
        false
    }

    fn attempt(&mut self, request: &MediumRequest<&[DmaSlice<'_>]>) -> InlineResult {
        InlineResult::Done(match request {
            MediumRequest::Zero { length, .. } if *length > ZERO_PIECE => {
                return InlineResult::WouldBlock;
            }
            MediumRequest::Read { offset, into } => self.read(*offset, into),
            MediumRequest::Write { offset, from, .. } => self.write(*offset, from),
            MediumRequest::Flush => Ok(()),
            MediumRequest::Zero { offset, length, .. } => self.zero(*offset, *length),
        })
    }

    fn prefetch(&self, offset: u64, length: usize) {
        if let Some(data) = self.data(offset, length.min(PREFETCH)) {
            data.prefetch();
        }
    }

    fn background(&mut self) -> Option<&mut dyn Background> {
        Some(self)
    }

    fn descriptors(&mut self) -> std::io::Result<Vec<OwnedFd>> {
        Ok(vec![self.memory.descriptor()?])
    }
}

impl Background for MemoryBacking {
    fn start(&mut self, tag: u32, request: MediumRequest<Vec<PinnedSlice>>) {
        let result = match request {
            MediumRequest::Zero { offset, length, .. } => {
                let (next, end) = (offset, offset + length);
                return self.zeroing.push_back(LongZero { tag, next, end });
            }
            MediumRequest::Flush => Ok(()),
            MediumRequest::Read { offset, into } => {
                let into: Vec<_> = into.iter().map(PinnedSlice::get).collect();
                self.read(offset, &into)
            }
            MediumRequest::Write { offset, from, .. } => {
                let from: Vec<_> = from.iter().map(PinnedSlice::get).collect();
                self.write(offset, &from)
            }
        };
        self.finished.push((tag, result));
    }

    fn submit(&mut self) {}

    fn works_in_looks(&self) -> bool {
        !self.zeroing.is_empty()
    }

    fn reap(&mut self, finished: &mut Vec<RequestResult>) {
        self.zero_piece();
        finished.append(&mut self.finished);
    }

    fn wait(&mut self, finished: &mut Vec<RequestResult>) {
        self.reap(finished);
    }

    fn has_buffers(&self) -> bool {
        false
    }

    fn abort(&mut self) {
        self.zeroing.clear();
        self.finished.clear();
    }

    fn rearm(&mut self) -> bool {
        // Nobody rings for the next piece: the engine may not sleep before the last.
        !self.zeroing.is_empty() || !self.finished.is_empty()
    }
}
