//! Data in the lender's memory.

use std::os::fd::{AsFd, OwnedFd};

use rackbus_memory::{DmaSlice, RegionError, SharedMemory};
use rackbus_pci::Health;
use rustix::fs::FallocateFlags;

use super::{Background, Backing, InlineResult, MediaError, MediumRequest};

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
        MemoryBacking { memory, capacity, health: Health::default() }
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
            MediumRequest::Read { offset, into } => {
                self.copy(*offset, into, MediaError::Read, |data, host| {
                    host.copy_from_slice(data);
                })
            }
            MediumRequest::Write { offset, from, .. } => {
                self.copy(*offset, from, MediaError::Write, |data, host| {
                    data.copy_from_slice(host);
                })
            }
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
        None
    }

    fn descriptors(&mut self) -> std::io::Result<Vec<OwnedFd>> {
        Ok(vec![self.memory.descriptor()?])
    }
}
