//! File operations in the background, through io_uring.
#![allow(unsafe_code)] // the kernel holds raw buffers until an operation has finished

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use io_uring::{IoUring, opcode, squeue, types};
use rackbus_memory::{Event, PinnedSlice};
use rustix::io::Errno;

use super::vectored::{MAX_BUFFERS, Way, iovec};

/// Entries of the submission ring; the completion ring has twice as many.
const ENTRIES: u32 = 256;

/// What to do with the file.
#[derive(Debug)]
pub enum Operation {
    /// Move bytes between the buffers and the file from `offset` on, all of them; `flags` are
    /// `RWF_*`.
    Transfer {
        /// The direction.
        way: Way,
        /// First byte in the file.
        offset: u64,
        /// The buffers.
        buffers: Vec<PinnedSlice>,
        /// `RWF_*`.
        flags: i32,
    },
    /// `fdatasync`.
    DataSync,
    /// `fallocate` with `mode`.
    Allocate {
        /// `FALLOC_FL_*`.
        mode: i32,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
}

/// How an operation ended: the bytes it was to move were not all there is no error but
/// [`Failure::Short`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// The system's reason.
    System(Errno),
    /// The file ended before the data did.
    Short,
}

/// An operation in flight. It owns what the kernel points to.
struct Slot {
    tag: u32,
    operation: Operation,
    /// The buffers that are still to be moved.
    rest: Vec<libc::iovec>,
    /// The first of them.
    first: usize,
}

// SAFETY: the raw pointers in `rest` point into `operation`'s buffers, which are `Send` and kept
// as long as the slot.
unsafe impl Send for Slot {}

/// An io_uring for one file.
pub struct Uring {
    ring: IoUring,
    file: OwnedFd,
    event: Event,
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
    in_flight: usize,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring").field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}

impl Uring {
    /// A ring for `file`.
    ///
    /// # Errors
    /// When the kernel has no io_uring for this process.
    pub fn new(file: OwnedFd) -> std::io::Result<Uring> {
        let ring = IoUring::new(ENTRIES)?;
        let event = Event::new()?;
        ring.submitter().register_eventfd(event.as_fd().as_raw_fd())?;
        Ok(Uring { ring, file, event, slots: Vec::new(), free: Vec::new(), in_flight: 0 })
    }

    /// The file.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Readable when an operation has finished.
    pub fn event(&self) -> &Event {
        &self.event
    }

    /// Queues `operation`; [`submit`](Uring::submit) sends it off.
    pub fn start(&mut self, tag: u32, operation: Operation) {
        let rest = match &operation {
            Operation::Transfer { buffers, .. } => {
                buffers.iter().map(|buffer| iovec(buffer.get())).collect()
            }
            _ => Vec::new(),
        };
        let slot = Slot { tag, operation, rest, first: 0 };
        let index = self.free.pop().unwrap_or(self.slots.len());
        if index == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[index] = Some(slot);
        self.in_flight += 1;
        self.push(index);
    }

    fn push(&mut self, index: usize) {
        let Some(slot) = &self.slots[index] else {
            return;
        };
        let entry = slot.entry(types::Fd(self.file.as_raw_fd())).user_data(index as u64);
        loop {
            // SAFETY: the buffers that `entry` names are mapped and its iovec list is unchanged
            // until the slot is taken out, which happens after its completion.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return;
            }
            self.submit();
        }
    }

    /// Sends off what is queued.
    pub fn submit(&mut self) {
        if !self.ring.submission().is_empty()
            && let Err(cause) = self.ring.submit()
        {
            // Nothing is lost: the entries stay queued and the next submission takes them.
            tracing::debug!(%cause, "io_uring takes no submissions now");
            std::thread::yield_now();
        }
    }

    /// Reports each operation that has finished, by its tag. An operation that moved a part of
    /// its bytes goes on with the rest.
    pub fn reap(&mut self, mut report: impl FnMut(u32, Result<(), Failure>)) {
        if self.in_flight == 0 {
            return;
        }
        let mut again = false;
        loop {
            let next = self.ring.completion().next();
            let Some(entry) = next else { break };
            let index = usize::try_from(entry.user_data()).unwrap_or(usize::MAX);
            let Some(slot) = self.slots.get_mut(index).and_then(Option::as_mut) else {
                continue;
            };
            match slot.advance(entry.result()) {
                Some(result) => {
                    report(slot.tag, result);
                    self.slots[index] = None;
                    self.free.push(index);
                    self.in_flight -= 1;
                }
                None => {
                    self.push(index);
                    again = true;
                }
            }
        }
        if again {
            self.submit();
        }
    }

    /// Waits until nothing is in flight, reporting as [`reap`](Uring::reap).
    pub fn drain(&mut self, mut report: impl FnMut(u32, Result<(), Failure>)) {
        while self.in_flight > 0 {
            if let Err(cause) = self.ring.submit_and_wait(1)
                && cause.raw_os_error() != Some(libc::EINTR)
            {
                tracing::debug!(%cause, "io_uring cannot wait now");
                std::thread::yield_now();
            }
            self.reap(&mut report);
        }
    }

    /// Whether a completion is waiting.
    pub fn has_finished(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // The kernel writes into buffers of operations in flight; they must outlive it.
        self.drain(|_, _| {});
    }
}

impl Slot {
    fn entry(&self, file: types::Fd) -> squeue::Entry {
        match &self.operation {
            Operation::Transfer { way, offset, flags, .. } => {
                let moved: u64 = self.moved();
                let list = &self.rest[self.first..];
                let count = list.len().min(MAX_BUFFERS) as u32;
                match way {
                    Way::Read => opcode::Readv::new(file, list.as_ptr(), count)
                        .offset(offset + moved)
                        .rw_flags(*flags)
                        .build(),
                    Way::Write => opcode::Writev::new(file, list.as_ptr(), count)
                        .offset(offset + moved)
                        .rw_flags(*flags)
                        .build(),
                }
            }
            Operation::DataSync => {
                opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build()
            }
            Operation::Allocate { mode, offset, length } => {
                opcode::Fallocate::new(file, *length).offset(*offset).mode(*mode).build()
            }
        }
    }

    /// Bytes moved so far.
    fn moved(&self) -> u64 {
        let Operation::Transfer { buffers, .. } = &self.operation else {
            return 0;
        };
        let all: usize = buffers.iter().map(|buffer| buffer.get().len()).sum();
        let left: usize = self.rest[self.first..].iter().map(|part| part.iov_len).sum();
        (all - left) as u64
    }

    /// Takes a completion's result in; `None` when there is more to do.
    fn advance(&mut self, result: i32) -> Option<Result<(), Failure>> {
        let Ok(mut moved) = usize::try_from(result) else {
            return match Errno::from_raw_os_error(-result) {
                Errno::INTR | Errno::AGAIN => None,
                cause => Some(Err(Failure::System(cause))),
            };
        };
        if !matches!(self.operation, Operation::Transfer { .. }) {
            return Some(Ok(()));
        }
        if moved == 0 && self.first < self.rest.len() {
            return Some(Err(Failure::Short));
        }
        while let Some(part) = self.rest.get_mut(self.first) {
            if moved < part.iov_len {
                part.iov_base = part.iov_base.cast::<u8>().wrapping_add(moved).cast();
                part.iov_len -= moved;
                return None;
            }
            moved -= part.iov_len;
            self.first += 1;
        }
        Some(Ok(()))
    }
}
