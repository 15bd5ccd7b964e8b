//! What a file backing asks of the operating system: reads and writes that do not wait, and a
//! queue of operations that go on by themselves.
//!
//! [`Kernel`] is io_uring on an open file. The simulation of the storage path is another
//! implementation, with a page cache that loses what was not flushed, operations that are short,
//! slow, out of order or fail, and a clock of its own.
#![allow(unsafe_code)] // the kernel holds raw buffers until an operation has finished

use std::fs::File;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use io_uring::{IoUring, opcode, types};
use rackbus_memory::{DmaSlice, Event};
use rustix::fs::Advice;
use rustix::io::Errno;

use super::open::OpenedFile;
use super::shared::LockedFile;
use super::vectored::{FileAccess, transfer};

/// Entries of the submission ring; the completion ring has twice as many.
const ENTRIES: u32 = 256;

/// An operation on the file.
#[derive(Debug, Clone, Copy)]
pub enum Call<'a> {
    /// Moves bytes between the buffers and the file from `offset` on, as many as it likes.
    Transfer {
        /// Whether the file is read or written.
        access: FileAccess,
        /// First byte in the file.
        offset: u64,
        /// The buffers, at most [`MAX_BUFFERS`](super::vectored::MAX_BUFFERS).
        buffers: &'a [libc::iovec],
        /// A write ends only when its bytes survive a loss of power (`RWF_DSYNC`).
        durable: bool,
    },
    /// What was written becomes durable, as by `fdatasync(2)`.
    DataSync,
    /// `fallocate` with `mode` (`FALLOC_FL_*`).
    Allocate {
        /// Flags `FALLOC_FL_*` of `fallocate(2)`.
        mode: i32,
        /// Offset of the first byte in the file.
        offset: u64,
        /// How many bytes the call is about.
        length: u64,
    },
}

/// One file and the queue of operations on it.
pub trait FileQueue: Send {
    /// Monotonic time in nanoseconds.
    fn now_ns(&self) -> u64;

    /// Moves what can be moved without waiting for the medium; returns the bytes moved.
    ///
    /// # Errors
    /// The system's; `AGAIN` when it would have to wait, `OPNOTSUPP` when it cannot tell.
    fn transfer(
        &mut self,
        access: FileAccess,
        offset: u64,
        slices: &[DmaSlice<'_>],
    ) -> Result<usize, Errno>;

    /// Queues `call` for the next [`submit`](FileQueue::submit); its completion carries `id`. False
    /// when the queue is full: submit first.
    ///
    /// # Safety
    /// The memory of the buffers, and the list that names them, stay mapped and in place until
    /// [`completion`](FileQueue::completion) has returned `id`.
    unsafe fn queue(&mut self, id: u64, call: Call<'_>) -> bool;

    /// Hands queued calls to the system, all of them or a part; waits for a completion if `wait`.
    ///
    /// # Errors
    /// When the system takes none now; they stay queued.
    fn submit(&mut self, wait: bool) -> Result<(), Errno>;

    /// Whether calls are queued that the system has not taken.
    fn has_queued(&mut self) -> bool;

    /// The next completion: the id of its call and the system's result.
    fn completion(&mut self) -> Option<(u64, i32)>;

    /// Whether [`completion`](FileQueue::completion) has one.
    fn has_completion(&mut self) -> bool;

    /// Calls that the system does nothing for: queued, or ended with their completion not taken yet.
    fn resting(&mut self) -> usize;

    /// Readable when a completion has come; none where nobody can sleep on it.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Takes [`wake_fd`](FileQueue::wake_fd) back to not readable.
    fn clear_wake(&self);

    /// The witness, for the next process that has the file: open on the same file, and not asked
    /// since the file was loaded. None where there is no such thing.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    fn witness(&self) -> std::io::Result<Option<OwnedFd>>;

    /// Asks the witness whether anything that was written since the file was loaded did not reach
    /// the medium, whoever else has been told so; writes back what was not. May wait.
    ///
    /// # Errors
    /// When it did not, or is not known to have.
    fn ask_witness(&mut self) -> Result<(), Errno>;

    /// After a failed flush: brings what is read in line with what the medium holds. The system
    /// keeps pages that it could not write, as if they were written; they are dropped.
    ///
    /// # Errors
    /// When what remains cannot be written either.
    fn reload(&mut self) -> Result<(), Errno>;
}

/// The file systems' page cache through io_uring.
pub struct Kernel {
    ring: IoUring,
    file: File,
    /// The file, opened once more.
    witness: File,
    event: Event,
    /// `RWF_*` for reads that must not wait; `None` when there is no such thing here.
    read_now: Option<i32>,
    /// First byte of the file that is the drive's, and how many are.
    start: u64,
    capacity: u64,
    /// Keeps a file that other functions use too for this process.
    _held: Option<Arc<LockedFile>>,
    epoch: Instant,
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernel").field("file", &self.file).finish_non_exhaustive()
    }
}

impl Kernel {
    /// A ring for an opened file.
    ///
    /// # Errors
    /// When the kernel has no io_uring for this process.
    pub fn new(opened: OpenedFile) -> std::io::Result<Kernel> {
        let OpenedFile { file, witness, start, capacity, read_now, held, .. } = opened;
        let ring = IoUring::new(ENTRIES)?;
        let event = Event::new()?;
        ring.submitter().register_eventfd(event.as_fd().as_raw_fd())?;
        let epoch = Instant::now();
        Ok(Kernel { ring, file, witness, event, read_now, start, capacity, _held: held, epoch })
    }
}

fn errno(cause: &std::io::Error) -> Errno {
    Errno::from_io_error(cause).unwrap_or(Errno::IO)
}

impl FileQueue for Kernel {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn transfer(
        &mut self,
        access: FileAccess,
        offset: u64,
        slices: &[DmaSlice<'_>],
    ) -> Result<usize, Errno> {
        let flags = match access {
            FileAccess::Read => self.read_now.ok_or(Errno::OPNOTSUPP)?,
            FileAccess::Write => 0,
        };
        transfer(self.file.as_fd(), access, self.start + offset, slices, flags)
    }

    unsafe fn queue(&mut self, id: u64, call: Call<'_>) -> bool {
        let (file, start) = (types::Fd(self.file.as_raw_fd()), self.start);
        let entry = match call {
            Call::Transfer { access, offset, buffers, durable } => {
                let count = u32::try_from(buffers.len()).unwrap_or(u32::MAX);
                let flags = if durable { libc::RWF_DSYNC } else { 0 };
                match access {
                    FileAccess::Read => opcode::Readv::new(file, buffers.as_ptr(), count)
                        .offset(start + offset)
                        .rw_flags(flags)
                        .build(),
                    FileAccess::Write => opcode::Writev::new(file, buffers.as_ptr(), count)
                        .offset(start + offset)
                        .rw_flags(flags)
                        .build(),
                }
            }
            Call::DataSync => opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
            Call::Allocate { mode, offset, length } => {
                opcode::Fallocate::new(file, length).offset(start + offset).mode(mode).build()
            }
        };
        // SAFETY: the caller keeps buffers and list until the completion is taken.
        unsafe { self.ring.submission().push(&entry.user_data(id)) }.is_ok()
    }

    fn submit(&mut self, wait: bool) -> Result<(), Errno> {
        self.ring.submit_and_wait(usize::from(wait)).map(|_| ()).map_err(|cause| errno(&cause))
    }

    fn has_queued(&mut self) -> bool {
        !self.ring.submission().is_empty()
    }

    fn completion(&mut self) -> Option<(u64, i32)> {
        let entry = self.ring.completion().next()?;
        Some((entry.user_data(), entry.result()))
    }

    fn has_completion(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    fn resting(&mut self) -> usize {
        let queued = self.ring.submission().len();
        queued + self.ring.completion().len()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.event.as_fd())
    }

    fn clear_wake(&self) {
        self.event.drain();
    }

    fn witness(&self) -> std::io::Result<Option<OwnedFd>> {
        Ok(Some(self.witness.as_fd().try_clone_to_owned()?))
    }

    fn ask_witness(&mut self) -> Result<(), Errno> {
        rustix::fs::fdatasync(&self.witness)
    }

    fn reload(&mut self) -> Result<(), Errno> {
        rustix::fs::fdatasync(&self.file)?;
        // Nothing is left to be written. What it has to say is of data that is dropped here.
        let _ = self.ask_witness();
        // Pages that are clean, written or not, go.
        let length = NonZeroU64::new(self.capacity);
        rustix::fs::fadvise(&self.file, self.start, length, Advice::DontNeed)
    }
}
