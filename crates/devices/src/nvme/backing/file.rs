//! Data in a file or on a block device, through the page cache.
//!
//! What the cache has is read at once (`RWF_NOWAIT`); the rest goes to io_uring, so a cache miss
//! costs the other commands nothing. A write that covers whole pages is a copy into the cache
//! and made at once too, unless the kernel has begun to throttle writers: then, and for anything
//! that must reach the medium (flush, FUA), io_uring again. So an acknowledged write survives the
//! death of this process, and an acknowledged flush or FUA write the loss of power, as far as the
//! file system and the medium keep their promises (invariant I5).

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rackbus_memory::{DmaSlice, PinnedSlice};
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::super::config::NvmeError;
use super::uring::{Failure, Operation, Uring};
use super::vectored::{MAX_BUFFERS, Way, transfer};
use super::{Attempt, Background, Backing, Finished, MediaError, Request};

/// The page cache's unit: a write of whole pages never has to read one first.
const PAGE: u64 = 4096;
/// A write into the page cache that took longer was throttled or waited for the file system.
const SLOW_WRITE: Duration = Duration::from_millis(2);
/// How long another process may hold the file before it counts as in use.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);
/// For how long writes then go through io_uring.
const THROTTLED_FOR: Duration = Duration::from_millis(100);
/// File systems without a medium, where no read waits for one: tmpfs and hugetlbfs. They do not
/// know `RWF_NOWAIT`.
const MEMORY_FILE_SYSTEMS: [i64; 2] = [0x0102_1994, 0x9584_58f6];

/// How a range is made to read as zeroes: what the medium does not support is tried no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ZeroBy {
    Range,
    Hole,
    Writing,
}

/// A file or block device.
#[derive(Debug)]
pub struct FileBacking {
    ring: Uring,
    capacity: u64,
    /// `RWF_*` for reads that must not wait; `None` when there is no such thing here.
    read_now: Option<i32>,
    throttled_until: Option<Instant>,
    /// Something may be in a volatile cache.
    dirty: bool,
    /// Requests that io_uring has, by tag: to know what an error means and what to try next.
    started: Vec<(u32, Kind)>,
    zero_by: ZeroBy,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Read,
    Write,
    Flush,
    Zero { offset: u64, length: u64, deallocate: bool, by: ZeroBy },
}

impl FileBacking {
    /// Opens `path`, or makes it with `size` bytes. A size of 0 takes what is there.
    ///
    /// # Errors
    /// [`NvmeError`] when it cannot be opened, is in use, or has another size.
    pub fn open(path: &Path, size: u64, block_size: u32) -> Result<FileBacking, NvmeError> {
        let fail = |what: &'static str| {
            let path = path.to_owned();
            move |cause: io::Error| NvmeError::File { what, path, cause }
        };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(size > 0)
            .truncate(false)
            .open(path)
            .map_err(fail("cannot open"))?;
        match lock(&file) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                return Err(NvmeError::InUse { path: path.to_owned() });
            }
            Err(cause) => return Err(fail("cannot lock")(cause.into())),
        }
        let capacity = size_up(&mut file, size, block_size).map_err(fail("cannot use"))?;
        let read_now = probe(file.as_fd()).map_err(fail("cannot read"))?;
        let ring = Uring::new(OwnedFd::from(file)).map_err(NvmeError::Uring)?;
        Ok(FileBacking {
            ring,
            capacity,
            read_now,
            throttled_until: None,
            // An earlier process may have left writes in the cache.
            dirty: true,
            started: Vec::new(),
            zero_by: ZeroBy::Range,
        })
    }

    fn read(&mut self, offset: u64, into: &[DmaSlice<'_>]) -> Attempt {
        let Some(flags) = self.read_now else {
            return Attempt::WouldBlock;
        };
        if into.len() > MAX_BUFFERS {
            return Attempt::WouldBlock;
        }
        let length: usize = into.iter().map(DmaSlice::len).sum();
        match transfer(self.ring.file(), Way::Read, offset, into, flags) {
            Ok(moved) if moved == length => Attempt::Done(Ok(())),
            // In part not in the cache, beyond the end, interrupted: io_uring finds out.
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Attempt::WouldBlock,
            Err(cause) => Attempt::Done(Err(media_error(Kind::Read, cause))),
        }
    }

    fn write(&mut self, offset: u64, from: &[DmaSlice<'_>], durable: bool) -> Attempt {
        let length: usize = from.iter().map(DmaSlice::len).sum();
        let whole_pages = offset.is_multiple_of(PAGE) && (length as u64).is_multiple_of(PAGE);
        if durable || !whole_pages || from.len() > MAX_BUFFERS {
            return Attempt::WouldBlock;
        }
        let before = Instant::now();
        if self.throttled_until.is_some_and(|until| before < until) {
            return Attempt::WouldBlock;
        }
        self.dirty = true;
        let moved = transfer(self.ring.file(), Way::Write, offset, from, 0);
        let after = Instant::now();
        let slow = after.duration_since(before) > SLOW_WRITE;
        self.throttled_until = slow.then(|| after + THROTTLED_FOR);
        match moved {
            Ok(moved) if moved == length => Attempt::Done(Ok(())),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Attempt::WouldBlock,
            Err(cause) => Attempt::Done(Err(media_error(Kind::Write, cause))),
        }
    }

    fn start_zero(&mut self, tag: u32, offset: u64, length: u64, deallocate: bool, by: ZeroBy) {
        self.started.push((tag, Kind::Zero { offset, length, deallocate, by }));
        let mode = match by {
            ZeroBy::Range => libc::FALLOC_FL_ZERO_RANGE,
            ZeroBy::Hole | ZeroBy::Writing => libc::FALLOC_FL_PUNCH_HOLE,
        };
        let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
        self.ring.start(tag, Operation::Allocate { mode, offset, length });
    }

    /// Sorts out what io_uring reported; a way of zeroing that is not supported leads to the next.
    fn settle(&mut self, reports: Vec<(u32, Result<(), Failure>)>, finished: &mut Vec<Finished>) {
        for (tag, result) in reports {
            let Some(at) = self.started.iter().position(|(started, _)| *started == tag) else {
                continue;
            };
            let (_, kind) = self.started.swap_remove(at);
            let result = result.map_err(|failure| match failure {
                Failure::System(cause) => cause,
                Failure::Short => Errno::IO,
            });
            match (kind, result) {
                (Kind::Zero { offset, length, deallocate, by }, Err(Errno::OPNOTSUPP)) => {
                    self.zero_otherwise(tag, offset, length, deallocate, by, finished);
                    continue;
                }
                (Kind::Write | Kind::Zero { .. }, _) => self.dirty = true,
                (Kind::Flush, Err(_)) => self.dirty = true,
                _ => {}
            }
            finished.push((tag, result.map_err(|cause| media_error(kind, cause))));
        }
    }

    fn zero_otherwise(
        &mut self,
        tag: u32,
        offset: u64,
        length: u64,
        deallocate: bool,
        by: ZeroBy,
        finished: &mut Vec<Finished>,
    ) {
        // Asked to deallocate, the hole was tried first.
        let next = match (by, deallocate) {
            (ZeroBy::Range, false) => ZeroBy::Hole,
            (ZeroBy::Hole, true) => ZeroBy::Range,
            _ => ZeroBy::Writing,
        };
        if !deallocate {
            self.zero_by = self.zero_by.max(next);
        }
        if next == ZeroBy::Writing {
            self.dirty = true;
            finished.push((tag, write_zeroes(self.ring.file(), offset, length)));
        } else {
            self.start_zero(tag, offset, length, deallocate, next);
            self.ring.submit();
        }
    }
}

impl Backing for FileBacking {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn volatile_cache(&self) -> bool {
        true
    }

    fn attempt(&mut self, request: &Request<&[DmaSlice<'_>]>) -> Attempt {
        match request {
            Request::Read { offset, into } => self.read(*offset, into),
            Request::Write { offset, from, durable } => self.write(*offset, from, *durable),
            Request::Flush if !self.dirty => Attempt::Done(Ok(())),
            Request::Flush => Attempt::WouldBlock,
            Request::Zero { offset, length, deallocate: false }
                if self.zero_by == ZeroBy::Writing =>
            {
                self.dirty = true;
                Attempt::Done(write_zeroes(self.ring.file(), *offset, *length))
            }
            Request::Zero { .. } => Attempt::WouldBlock,
        }
    }

    fn background(&mut self) -> Option<&mut dyn Background> {
        Some(self)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.ring.event().as_fd())
    }
}

impl Background for FileBacking {
    fn start(&mut self, tag: u32, request: Request<Vec<PinnedSlice>>) {
        let (kind, operation) = match request {
            Request::Read { offset, into } => (
                Kind::Read,
                Operation::Transfer { way: Way::Read, offset, buffers: into, flags: 0 },
            ),
            Request::Write { offset, from, durable } => {
                self.dirty = true;
                let flags = if durable { libc::RWF_DSYNC } else { 0 };
                let operation =
                    Operation::Transfer { way: Way::Write, offset, buffers: from, flags };
                (Kind::Write, operation)
            }
            Request::Flush => {
                // What is written from now on, or is being written, sets it again.
                self.dirty = false;
                (Kind::Flush, Operation::DataSync)
            }
            Request::Zero { offset, length, deallocate } => {
                self.dirty = true;
                let by = if deallocate { ZeroBy::Hole } else { self.zero_by };
                return self.start_zero(tag, offset, length, deallocate, by);
            }
        };
        self.started.push((tag, kind));
        self.ring.start(tag, operation);
    }

    fn submit(&mut self) {
        self.ring.submit();
    }

    fn reap(&mut self, finished: &mut Vec<Finished>) {
        if self.started.is_empty() || !self.ring.has_finished() {
            return;
        }
        let mut reports = Vec::new();
        self.ring.reap(|tag, result| reports.push((tag, result)));
        self.settle(reports, finished);
    }

    fn drain(&mut self, finished: &mut Vec<Finished>) {
        while !self.started.is_empty() {
            let mut reports = Vec::new();
            self.ring.drain(|tag, result| reports.push((tag, result)));
            self.settle(reports, finished);
        }
    }

    fn rearm(&mut self) -> bool {
        self.ring.event().drain();
        self.ring.has_finished()
    }
}

/// Takes the file for this process alone. A process that was killed may hold its files a moment
/// longer, until the kernel has finished what it had in flight.
fn lock(file: &File) -> Result<(), Errno> {
    let start = Instant::now();
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if start.elapsed() < LOCK_PATIENCE => {
                std::thread::sleep(LOCK_PATIENCE / 100);
            }
            result => return result,
        }
    }
}

/// The capacity to use: `size`, which a new or empty file is brought to.
fn size_up(file: &mut File, size: u64, block_size: u32) -> io::Result<u64> {
    let kind = file.metadata()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(io::Error::other("it is neither a file nor a block device"));
    }
    let there = file.seek(SeekFrom::End(0))?;
    if kind.is_file() && there == 0 && size > 0 {
        file.set_len(size)?;
        return Ok(size);
    }
    let fits = if kind.is_file() { size == there } else { size <= there };
    if size > 0 && !fits {
        let text =
            format!("it has {there} bytes, the drive is to have {size}; give size = {there}");
        return Err(io::Error::other(text));
    }
    let capacity = if size > 0 { size } else { there - there % u64::from(block_size) };
    if capacity == 0 {
        return Err(io::Error::other("it is empty; give the drive a size"));
    }
    Ok(capacity)
}

/// Finds the flags for a read that does not wait: a short read tells whether the file system
/// knows them.
fn probe(file: BorrowedFd<'_>) -> io::Result<Option<i32>> {
    let kind = rustix::fs::fstatfs(file)?;
    #[allow(clippy::unnecessary_cast, reason = "f_type differs between architectures")]
    if MEMORY_FILE_SYSTEMS.contains(&(kind.f_type as i64)) {
        return Ok(Some(0));
    }
    let mut byte = [0u8; 1];
    let mut buffers = [io::IoSliceMut::new(&mut byte)];
    match rustix::io::preadv2(file, &mut buffers, 0, rustix::io::ReadWriteFlags::NOWAIT) {
        Ok(_) | Err(Errno::AGAIN) => Ok(Some(libc::RWF_NOWAIT)),
        Err(Errno::OPNOTSUPP) => Ok(None),
        Err(cause) => Err(cause.into()),
    }
}

/// Writes zeroes where nothing better is supported.
fn write_zeroes(file: BorrowedFd<'_>, offset: u64, length: u64) -> Result<(), MediaError> {
    const CHUNK: usize = 256 << 10;
    let zeroes = vec![0u8; CHUNK];
    let mut done = 0;
    while done < length {
        let count = usize::try_from(length - done).unwrap_or(CHUNK).min(CHUNK);
        match rustix::io::pwrite(file, &zeroes[..count], offset + done) {
            Ok(0) => return Err(MediaError::Write),
            Ok(moved) => done += moved as u64,
            Err(Errno::INTR) => {}
            Err(cause) => return Err(media_error(Kind::Write, cause)),
        }
    }
    Ok(())
}

fn media_error(kind: Kind, cause: Errno) -> MediaError {
    match (kind, cause) {
        (_, Errno::FAULT) => MediaError::Buffer,
        (Kind::Read, _) => MediaError::Read,
        (_, Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => MediaError::NoSpace,
        (_, Errno::ROFS | Errno::PERM | Errno::ACCESS | Errno::BADF) => MediaError::ReadOnly,
        _ => MediaError::Write,
    }
}
