//! Data in a file or on a block device, through the page cache.
//!
//! What the cache has is read at once (`RWF_NOWAIT`); the rest goes to io_uring, so a cache miss
//! costs the other commands nothing. A write that covers whole pages is a copy into the cache
//! and made at once too, unless the kernel has begun to throttle writers: then, and for anything
//! that must reach the medium (flush, FUA), io_uring again. So an acknowledged write survives the
//! death of this process, and an acknowledged flush or FUA write the loss of power, as far as the
//! file system and the medium keep their promises (invariant I5; [`super::durability`] says when
//! a flush may be acknowledged).

mod background;

use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use rackbus_memory::{DmaSlice, SharedMemory};
use rackbus_pci::Health;
use rustix::io::Errno;

use super::super::config::NvmeError;
use super::durability::{Durability, NotDurable};
use super::open::{self, OpenedFile};
use super::system::{FileQueue, Kernel};
use super::uring::Uring;
use super::vectored::{FileAccess, MAX_BUFFERS};
use super::zeroing::{WRITTEN_PIECE, ZeroBy, ZeroPolicy};
use super::{Background, Backing, InlineResult, MediaError, MediumRequest, RequestResult};
use background::RequestSlot;

/// The page cache's unit: a write of whole pages never has to read one first.
const PAGE: u64 = 4096;
/// A write into the page cache that took longer was throttled or waited for the file system.
const SLOW_WRITE_NS: u64 = 2_000_000;
/// For how long writes then go through io_uring.
const THROTTLED_NS: u64 = 100_000_000;

const NOT_DURABLE: &str = "the medium did not take data that it was to make durable: flushes fail \
                           until it is returned";

/// A file or block device.
#[derive(Debug)]
pub struct FileBacking<S: FileQueue = Kernel> {
    ring: Uring<S>,
    capacity: u64,
    throttled_until_ns: u64,
    durability: Durability<u32>,
    health: Health,
    zeroing: ZeroPolicy,
    /// Zeroes to write where the medium has no other way.
    zeroes: SharedMemory,
    slots: Vec<Option<RequestSlot>>,
    free: Vec<u32>,
    /// Slots whose requests may still use buffers of the host.
    pinning: usize,
    /// Finished before anybody waited for it.
    early: Vec<RequestResult>,
}

impl FileBacking {
    /// Over an opened file.
    ///
    /// # Errors
    /// As [`new`](FileBacking::new), and when the system gives no io_uring.
    pub fn open(opened: OpenedFile) -> Result<FileBacking, NvmeError> {
        let (capacity, zero_alignment) = (opened.capacity, opened.zero_alignment);
        let system = Kernel::new(opened).map_err(NvmeError::Uring)?;
        FileBacking::new(system, capacity, zero_alignment)
    }

    /// Over the file that `opened` has of `path`, after another process had it, whose witness is `witness`.
    ///
    /// # Errors
    /// As [`open`](FileBacking::open), and without a witness of this file: what the drive
    /// acknowledged would not be known to be there.
    pub fn open_again(
        opened: OpenedFile,
        path: &Path,
        witness: Option<OwnedFd>,
    ) -> Result<FileBacking, NvmeError> {
        let witness = witness.map(File::from).ok_or_else(|| io::Error::other("none was given"));
        let witness = witness.and_then(|witness| open::check_same(&opened.file, witness));
        let witness = witness.map_err(|cause| {
            let path = path.to_owned();
            NvmeError::File { what: "no descriptor of the earlier process for", path, cause }
        })?;
        let (capacity, zero_alignment) = (opened.capacity, opened.zero_alignment);
        let system = Kernel::new(OpenedFile { witness, ..opened }).map_err(NvmeError::Uring)?;
        FileBacking::again(system, capacity, zero_alignment)
    }
}

impl<S: FileQueue> FileBacking<S> {
    /// The file that `system` has, of `capacity` bytes; it zeroes in multiples of
    /// `zero_alignment` bytes.
    ///
    /// # Errors
    /// When the system has no memory or descriptors left.
    pub fn new(mut system: S, capacity: u64, zero_alignment: u64) -> Result<Self, NvmeError> {
        load(&mut system).map_err(|cause| NvmeError::Load(cause.into()))?;
        FileBacking::around(system, capacity, zero_alignment)
    }

    /// The same after another process had the file, for the same user: what is read stays what it
    /// was, and what was lost since the file was loaded counts as a failure of this one.
    ///
    /// # Errors
    /// As [`new`](FileBacking::new).
    pub fn again(mut system: S, capacity: u64, zero_alignment: u64) -> Result<Self, NvmeError> {
        let asked = system.ask_witness();
        let mut backing = FileBacking::around(system, capacity, zero_alignment)?;
        if let Err(cause) = asked {
            tracing::error!(%cause, "data that was written earlier did not reach the medium");
            backing.inherit_failure();
        }
        Ok(backing)
    }

    fn around(system: S, capacity: u64, zero_alignment: u64) -> Result<Self, NvmeError> {
        Ok(FileBacking {
            ring: Uring::new(system),
            capacity,
            throttled_until_ns: 0,
            durability: Durability::default(),
            health: Health::default(),
            zeroing: ZeroPolicy::new(zero_alignment),
            zeroes: SharedMemory::create("nvme-zeroes", WRITTEN_PIECE)?,
            slots: Vec::new(),
            free: Vec::new(),
            pinning: 0,
            early: Vec::new(),
        })
    }

    fn read(&mut self, offset: u64, into: &[DmaSlice<'_>]) -> InlineResult {
        if into.len() > MAX_BUFFERS {
            return InlineResult::WouldBlock;
        }
        let length: usize = into.iter().map(DmaSlice::len).sum();
        match self.ring.system().transfer(FileAccess::Read, offset, into) {
            Ok(moved) if moved == length => InlineResult::Done(Ok(())),
            // In part not in the cache, beyond the end, interrupted: io_uring finds out.
            Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::OPNOTSUPP) => InlineResult::WouldBlock,
            Err(cause) => InlineResult::Done(Err(media_error(FileAccess::Read, cause))),
        }
    }

    fn write(&mut self, offset: u64, from: &[DmaSlice<'_>], durable: bool) -> InlineResult {
        let length: usize = from.iter().map(DmaSlice::len).sum();
        let whole_pages = offset.is_multiple_of(PAGE) && (length as u64).is_multiple_of(PAGE);
        if durable || !whole_pages || from.len() > MAX_BUFFERS {
            return InlineResult::WouldBlock;
        }
        let before = self.ring.system().now_ns();
        if before < self.throttled_until_ns {
            return InlineResult::WouldBlock;
        }
        let moved = self.ring.system().transfer(FileAccess::Write, offset, from);
        self.durability.changed();
        let after = self.ring.system().now_ns();
        let slow = after.saturating_sub(before) > SLOW_WRITE_NS;
        self.throttled_until_ns = if slow { after + THROTTLED_NS } else { 0 };
        match moved {
            Ok(moved) if moved == length => InlineResult::Done(Ok(())),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => InlineResult::WouldBlock,
            Err(cause) => InlineResult::Done(Err(media_error(FileAccess::Write, cause))),
        }
    }
}

impl<S: FileQueue> Backing for FileBacking<S> {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn volatile_cache(&self) -> bool {
        true
    }

    fn attempt(&mut self, request: &MediumRequest<&[DmaSlice<'_>]>) -> InlineResult {
        match request {
            MediumRequest::Read { offset, into } => self.read(*offset, into),
            MediumRequest::Write { offset, from, durable } => self.write(*offset, from, *durable),
            MediumRequest::Flush => match self.durability.known() {
                Some(answer) => {
                    InlineResult::Done(answer.map_err(|NotDurable| MediaError::NotDurable))
                }
                None => InlineResult::WouldBlock,
            },
            MediumRequest::Zero { .. } => InlineResult::WouldBlock,
        }
    }

    fn background(&mut self) -> Option<&mut dyn Background> {
        Some(self)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.ring.system_ref().wake_fd()
    }

    fn has_failed(&self) -> bool {
        self.durability.has_failed()
    }

    fn health(&self) -> Health {
        self.health.clone()
    }

    fn is_settled(&mut self) -> bool {
        self.ring.is_settled()
    }

    fn descriptors(&mut self) -> io::Result<Vec<OwnedFd>> {
        Ok(self.ring.system_ref().witness()?.into_iter().collect())
    }

    fn inherit_failure(&mut self) {
        self.durability.inherit_failure();
        self.health.fail(NOT_DURABLE);
    }

    fn reload(&mut self) -> Result<(), MediaError> {
        if !self.durability.has_failed() {
            return Ok(());
        }
        // Flushes that nobody waits for any more may still be with the system.
        let mut nobody = Vec::new();
        while self.ring.in_flight() > 0 {
            self.wait(&mut nobody);
        }
        load(self.ring.system()).map_err(|cause| {
            tracing::error!(%cause, "the drive's data could not be loaded anew");
            MediaError::NotDurable
        })?;
        self.durability.reloaded();
        self.health.recover();
        tracing::warn!(
            "the drive was opened anew after a failed flush; it holds what its medium has"
        );
        Ok(())
    }
}

/// Brings what is read in line with what the medium holds, whatever could not be written before.
fn load<S: FileQueue>(system: &mut S) -> Result<(), Errno> {
    system.reload().or_else(|cause| {
        tracing::error!(%cause, "data that was written earlier did not reach the medium");
        // The report was of what is lost already; a medium that works takes the rest.
        system.reload()
    })
}

fn allocate_mode(by: ZeroBy) -> Option<i32> {
    let mode = match by {
        ZeroBy::Range => libc::FALLOC_FL_ZERO_RANGE,
        ZeroBy::Hole => libc::FALLOC_FL_PUNCH_HOLE,
        ZeroBy::Writing => return None,
    };
    Some(mode | libc::FALLOC_FL_KEEP_SIZE)
}

fn media_error(access: FileAccess, cause: Errno) -> MediaError {
    match (access, cause) {
        (_, Errno::FAULT) => MediaError::Buffer,
        (FileAccess::Read, _) => MediaError::Read,
        (_, Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => MediaError::NoSpace,
        (_, Errno::ROFS | Errno::PERM | Errno::ACCESS | Errno::BADF) => MediaError::ReadOnly,
        _ => MediaError::Write,
    }
}
