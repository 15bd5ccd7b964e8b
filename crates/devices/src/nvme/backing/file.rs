//! Data in a file or on a block device, through the page cache.
//!
//! What the cache has is read at once (`RWF_NOWAIT`); the rest goes to io_uring, so a cache miss
//! costs the other commands nothing. A write that covers whole pages is a copy into the cache
//! and made at once too, unless the kernel has begun to throttle writers: then, and for anything
//! that must reach the medium (flush, FUA), io_uring again. So an acknowledged write survives the
//! death of this process, and an acknowledged flush or FUA write the loss of power, as far as the
//! file system and the medium keep their promises (invariant I5; [`super::durability`] says when
//! a flush may be acknowledged).

use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use rackbus_memory::{DmaSlice, PinnedSlice, SharedMemory};
use rackbus_pci::Health;
use rustix::io::Errno;

use super::super::config::NvmeError;
use super::durability::{Asks, Durability, NotDurable};
use super::open::{self, Opened};
use super::system::{Kernel, System};
use super::uring::{Failure, Operation, Uring};
use super::vectored::{FileAccess, MAX_BUFFERS};
use super::zeroing::{Piece, WRITTEN_PIECE, ZeroBy, ZeroPolicy, Zeroing};
use super::{Attempt, Background, Backing, Finished, MediaError, Request};

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
pub struct FileBacking<S: System = Kernel> {
    ring: Uring<S>,
    capacity: u64,
    throttled_until_ns: u64,
    durability: Durability<u32>,
    health: Health,
    zeroing: ZeroPolicy,
    /// Zeroes to write where the medium has no other way.
    zeroes: SharedMemory,
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    /// Slots whose requests may still use buffers of the host.
    pinning: usize,
    /// Finished before anybody waited for it.
    early: Vec<Finished>,
}

/// A request that was started; its index is its tag in the ring.
#[derive(Debug)]
struct Slot {
    /// Who waits for it; nobody after it was aborted.
    tag: Option<u32>,
    work: Work,
    /// It has buffers of the host that it may still use.
    pins: bool,
}

#[derive(Debug)]
enum Work {
    Read,
    Write,
    /// A write that must be durable: its buffers until it is started, its own error afterwards.
    Durable {
        offset: u64,
        from: Vec<PinnedSlice>,
        error: Option<MediaError>,
    },
    Flush,
    Zero {
        zeroing: Zeroing,
        piece: Piece,
        since_ns: u64,
    },
}

impl FileBacking {
    /// Over an opened file.
    ///
    /// # Errors
    /// As [`new`](FileBacking::new), and when the system gives no io_uring.
    pub fn open(opened: Opened) -> Result<FileBacking, NvmeError> {
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
        opened: Opened,
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
        let system = Kernel::new(Opened { witness, ..opened }).map_err(NvmeError::Uring)?;
        FileBacking::again(system, capacity, zero_alignment)
    }
}

impl<S: System> FileBacking<S> {
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

    fn read(&mut self, offset: u64, into: &[DmaSlice<'_>]) -> Attempt {
        if into.len() > MAX_BUFFERS {
            return Attempt::WouldBlock;
        }
        let length: usize = into.iter().map(DmaSlice::len).sum();
        match self.ring.system().transfer(FileAccess::Read, offset, into) {
            Ok(moved) if moved == length => Attempt::Done(Ok(())),
            // In part not in the cache, beyond the end, interrupted: io_uring finds out.
            Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::OPNOTSUPP) => Attempt::WouldBlock,
            Err(cause) => Attempt::Done(Err(media_error(FileAccess::Read, cause))),
        }
    }

    fn write(&mut self, offset: u64, from: &[DmaSlice<'_>], durable: bool) -> Attempt {
        let length: usize = from.iter().map(DmaSlice::len).sum();
        let whole_pages = offset.is_multiple_of(PAGE) && (length as u64).is_multiple_of(PAGE);
        if durable || !whole_pages || from.len() > MAX_BUFFERS {
            return Attempt::WouldBlock;
        }
        let before = self.ring.system().now_ns();
        if before < self.throttled_until_ns {
            return Attempt::WouldBlock;
        }
        let moved = self.ring.system().transfer(FileAccess::Write, offset, from);
        self.durability.changed();
        let after = self.ring.system().now_ns();
        let slow = after.saturating_sub(before) > SLOW_WRITE_NS;
        self.throttled_until_ns = if slow { after + THROTTLED_NS } else { 0 };
        match moved {
            Ok(moved) if moved == length => Attempt::Done(Ok(())),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Attempt::WouldBlock,
            Err(cause) => Attempt::Done(Err(media_error(FileAccess::Write, cause))),
        }
    }

    fn keep(&mut self, tag: u32, work: Work) -> u32 {
        let pins = matches!(work, Work::Read | Work::Write | Work::Durable { .. });
        self.pinning += usize::from(pins);
        let slot = Some(Slot { tag: Some(tag), work, pins });
        match self.free.pop() {
            Some(index) => {
                self.slots[index as usize] = slot;
                index
            }
            None => {
                self.slots.push(slot);
                (self.slots.len() - 1) as u32
            }
        }
    }

    /// Forgets the request in slot `index` and tells who waits for it.
    fn finish(&mut self, index: u32, result: Result<(), MediaError>, out: &mut Vec<Finished>) {
        let Some(slot) = self.slots.get_mut(index as usize).and_then(Option::take) else {
            return;
        };
        self.free.push(index);
        self.pinning -= usize::from(slot.pins);
        out.extend(slot.tag.map(|tag| (tag, result)));
    }

    /// Starts what asks for durability, once the last batch has ended.
    fn start_batch(&mut self) {
        for index in self.durability.next_batch() {
            let operation = match self.slots[index as usize].as_mut().map(|slot| &mut slot.work) {
                Some(Work::Durable { offset, from, .. }) => {
                    let (access, offset, buffers) =
                        (FileAccess::Write, *offset, std::mem::take(from));
                    self.durability.change_begun();
                    Operation::Transfer { access, offset, buffers, durable: true }
                }
                _ => Operation::DataSync,
            };
            self.ring.start(index, operation);
        }
    }

    /// Starts the next piece of a range to be zeroed; finishes it when there is none.
    fn start_piece(&mut self, index: u32, out: &mut Vec<Finished>) {
        let now_ns = self.ring.system().now_ns();
        let Some(Slot { tag, work: Work::Zero { zeroing, piece, since_ns }, .. }) =
            self.slots[index as usize].as_mut()
        else {
            return;
        };
        let Some(next) = self.zeroing.piece(zeroing) else {
            return self.finish(index, Ok(()), out);
        };
        if tag.is_none() {
            return self.finish(index, Err(MediaError::Aborted), out);
        }
        (*piece, *since_ns) = (next, now_ns);
        let operation = match allocate_mode(next.by) {
            Some(mode) => Operation::Allocate { mode, offset: next.offset, length: next.length },
            None => match PinnedSlice::new(self.zeroes.region().clone(), 0, next.length as usize) {
                Some(zeroes) => Operation::Transfer {
                    access: FileAccess::Write,
                    offset: next.offset,
                    buffers: vec![zeroes],
                    durable: false,
                },
                None => return self.finish(index, Err(MediaError::Write), out),
            },
        };
        self.durability.change_begun();
        self.ring.start(index, operation);
    }

    fn piece_ended(&mut self, index: u32, result: Result<(), Errno>, out: &mut Vec<Finished>) {
        self.durability.change_ended();
        let now_ns = self.ring.system().now_ns();
        let Some(Slot { work: Work::Zero { zeroing, piece, since_ns }, .. }) =
            self.slots[index as usize].as_mut()
        else {
            return;
        };
        match result {
            Ok(()) => self.zeroing.done(zeroing, *piece, now_ns.saturating_sub(*since_ns)),
            // EINVAL: the medium has blocks that this piece does not fit.
            Err(cause @ (Errno::OPNOTSUPP | Errno::INVAL))
                if self.zeroing.unsupported(zeroing, *piece, cause == Errno::OPNOTSUPP) => {}
            Err(cause) => {
                return self.finish(index, Err(media_error(FileAccess::Write, cause)), out);
            }
        }
        self.start_piece(index, out);
    }

    /// A flush or a durable write ended: its batch is answered when it was the last of it.
    fn asked(&mut self, index: u32, ok: bool, out: &mut Vec<Finished>) {
        let had_failed = self.durability.has_failed();
        let Some((answered, answer)) = self.durability.asked(index, ok) else {
            return;
        };
        if answer.is_err() && !had_failed {
            tracing::error!(
                "the medium did not take data that it was to make durable; no flush succeeds \
                 until the drive is opened anew"
            );
            self.health.fail(NOT_DURABLE);
        }
        for index in answered {
            let own = match self.slots[index as usize].as_ref().map(|slot| &slot.work) {
                Some(Work::Durable { error: Some(error), .. }) => Err(*error),
                _ => answer.map_err(|NotDurable| MediaError::NotDurable),
            };
            self.finish(index, own, out);
        }
    }

    /// Takes in what the ring reported about slot `index`.
    fn ended(&mut self, index: u32, result: Result<(), Failure>, out: &mut Vec<Finished>) {
        let Some(slot) = self.slots.get_mut(index as usize).and_then(Option::as_mut) else {
            return;
        };
        let result = result.map_err(|failure| match failure {
            Failure::System(cause) => cause,
            Failure::Short => Errno::IO,
        });
        self.pinning -= usize::from(std::mem::take(&mut slot.pins));
        match &mut slot.work {
            Work::Read => {
                let result = result.map_err(|cause| media_error(FileAccess::Read, cause));
                self.finish(index, result, out);
            }
            Work::Write => {
                self.durability.change_ended();
                let result = result.map_err(|cause| media_error(FileAccess::Write, cause));
                self.finish(index, result, out);
            }
            Work::Durable { error, .. } => {
                self.durability.change_ended();
                *error = result.err().map(|cause| media_error(FileAccess::Write, cause));
                // A buffer out of reach is the host's fault; any other error may be the one
                // report of data that was lost.
                let ok = matches!(error, None | Some(MediaError::Buffer));
                if !ok {
                    *error = error.map(|_| MediaError::NotDurable);
                }
                self.asked(index, ok, out);
            }
            Work::Flush => {
                if let Err(cause) = result {
                    tracing::warn!(%cause, "a flush failed");
                }
                self.asked(index, result.is_ok(), out);
            }
            Work::Zero { .. } => self.piece_ended(index, result, out),
        }
    }

    fn settle(&mut self, reports: Vec<(u32, Result<(), Failure>)>, out: &mut Vec<Finished>) {
        for (index, result) in reports {
            self.ended(index, result, out);
        }
        self.start_batch();
        self.ring.submit();
    }
}

impl<S: System> Backing for FileBacking<S> {
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
            Request::Flush => match self.durability.known() {
                Some(answer) => Attempt::Done(answer.map_err(|NotDurable| MediaError::NotDurable)),
                None => Attempt::WouldBlock,
            },
            Request::Zero { .. } => Attempt::WouldBlock,
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

    fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
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

impl<S: System> Background for FileBacking<S> {
    fn start(&mut self, tag: u32, request: Request<Vec<PinnedSlice>>) {
        match request {
            Request::Read { offset, into } => {
                let index = self.keep(tag, Work::Read);
                let (access, buffers) = (FileAccess::Read, into);
                self.ring
                    .start(index, Operation::Transfer { access, offset, buffers, durable: false });
            }
            Request::Write { offset, from, durable: false } => {
                let index = self.keep(tag, Work::Write);
                self.durability.change_begun();
                let (access, buffers) = (FileAccess::Write, from);
                self.ring
                    .start(index, Operation::Transfer { access, offset, buffers, durable: false });
            }
            Request::Write { offset, from, durable: true } => {
                let index = self.keep(tag, Work::Durable { offset, from, error: None });
                self.durability.ask(index, Asks::Write);
            }
            Request::Flush => {
                let index = self.keep(tag, Work::Flush);
                self.durability.ask(index, Asks::Flush);
            }
            Request::Zero { offset, length, deallocate } => {
                let zeroing = self.zeroing.begin(offset, length, deallocate);
                let piece = Piece { offset, length: 0, by: ZeroBy::Writing };
                let index = self.keep(tag, Work::Zero { zeroing, piece, since_ns: 0 });
                let mut early = std::mem::take(&mut self.early);
                self.start_piece(index, &mut early);
                self.early = early;
            }
        }
    }

    fn submit(&mut self) {
        self.start_batch();
        self.ring.submit();
    }

    fn reap(&mut self, finished: &mut Vec<Finished>) {
        finished.append(&mut self.early);
        if self.ring.has_queued() {
            self.ring.submit();
        }
        if self.ring.in_flight() == 0 || !self.ring.system().has_completion() {
            return;
        }
        let mut reports = Vec::new();
        self.ring.reap(|index, result| reports.push((index, result)));
        self.settle(reports, finished);
    }

    fn wait(&mut self, finished: &mut Vec<Finished>) {
        self.start_batch();
        finished.append(&mut self.early);
        let mut reports = Vec::new();
        self.ring.wait(|index, result| reports.push((index, result)));
        self.settle(reports, finished);
    }

    fn has_buffers(&self) -> bool {
        self.pinning > 0
    }

    fn outcome(&self, tag: u32) -> Option<Result<(), MediaError>> {
        match self.slots.iter().flatten().find(|slot| slot.tag == Some(tag)) {
            Some(Slot { work: Work::Durable { error, .. }, pins: false, .. }) => {
                Some(error.map_or(Ok(()), Err))
            }
            _ => None,
        }
    }

    fn abort(&mut self) {
        let waiting: Vec<u32> = self.durability.cancel_waiting().collect();
        let mut nobody = Vec::new();
        for index in waiting {
            self.finish(index, Err(MediaError::Aborted), &mut nobody);
        }
        for slot in self.slots.iter_mut().flatten() {
            slot.tag = None;
        }
        self.early.clear();
        // A flush changes nothing: it may go on, and what was written waits for its batch.
        let changes = |slot: &Slot| slot.pins || matches!(slot.work, Work::Zero { .. });
        while self.slots.iter().flatten().any(changes) {
            self.wait(&mut nobody);
        }
    }

    fn rearm(&mut self) -> bool {
        self.ring.system_ref().clear_wake();
        self.ring.has_queued() || !self.early.is_empty() || self.ring.system().has_completion()
    }
}

/// Brings what is read in line with what the medium holds, whatever could not be written before.
fn load<S: System>(system: &mut S) -> Result<(), Errno> {
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
