//! Operations in the background: what they keep alive, and how partial ones continue.
#![allow(unsafe_code)] // the system holds raw buffers until an operation has finished

use rackbus_memory::PinnedSlice;
use rustix::io::Errno;

use super::system::{Call, FileQueue};
use super::vectored::{FileAccess, MAX_BUFFERS, iovec};

/// An operation on the file, for the ring.
#[derive(Debug)]
pub enum UringOperation {
    /// Move bytes between the buffers and the file from `offset` on, all of them.
    Transfer {
        /// Whether the file is read or written.
        access: FileAccess,
        /// First byte in the file.
        offset: u64,
        /// Memory that data comes from or goes to, pinned while the operation runs.
        buffers: Vec<PinnedSlice>,
        /// A write ends only when its bytes survive a loss of power.
        durable: bool,
    },
    /// What was written becomes durable, as by `fdatasync(2)`.
    DataSync,
    /// Space is made, given back or zeroed, as by `fallocate(2)`.
    Allocate {
        /// Flags `FALLOC_FL_*` of `fallocate(2)`.
        mode: i32,
        /// Offset of the first byte in the file.
        offset: u64,
        /// How many bytes the operation is about.
        length: u64,
    },
}

/// How an operation ended without doing what it was to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UringFailure {
    /// The operating system failed the operation with this error.
    System(Errno),
    /// The file ended before the data did.
    Short,
}

/// An operation in flight. It owns what the system points to.
struct Slot {
    tag: u32,
    operation: UringOperation,
    /// The buffers that are still to be moved.
    rest: Vec<libc::iovec>,
    /// The first of them.
    first: usize,
}

// SAFETY: the raw pointers in `rest` point into `operation`'s buffers, which are `Send` and kept
// as long as the slot.
unsafe impl Send for Slot {}

/// The operations on one file.
pub struct Uring<S: FileQueue> {
    system: S,
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
    in_flight: usize,
}

impl<S: FileQueue> std::fmt::Debug for Uring<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring").field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}

impl<S: FileQueue> Uring<S> {
    /// A queue of operations that `system` carries out; none is in flight.
    pub fn new(system: S) -> Uring<S> {
        Uring { system, slots: Vec::new(), free: Vec::new(), in_flight: 0 }
    }

    /// The file and its queue.
    pub fn system(&mut self) -> &mut S {
        &mut self.system
    }

    /// As [`system`](Uring::system), to look at.
    pub fn system_ref(&self) -> &S {
        &self.system
    }

    /// Operations that have not finished.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Whether the system works on none of the operations in flight: all of them have ended, or wait to be
    /// submitted. The completion ring has room for all that a drive starts.
    pub fn is_settled(&mut self) -> bool {
        self.system.resting() >= self.in_flight
    }

    /// Queues `operation`; [`submit`](Uring::submit) sends it off.
    pub fn start(&mut self, tag: u32, operation: UringOperation) {
        let rest = match &operation {
            UringOperation::Transfer { buffers, .. } => {
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
        // SAFETY: the slot owns the buffers and the list of them, leaves the list as it is, and is
        // taken out after its completion only.
        while !unsafe { self.system.queue(index as u64, slot.call()) } {
            if self.system.submit(false).is_err() {
                std::thread::yield_now();
            }
        }
    }

    /// Sends off what is queued. What the system does not take now is sent with the next
    /// [`reap`](Uring::reap).
    pub fn submit(&mut self) {
        if self.system.has_queued()
            && let Err(cause) = self.system.submit(false)
        {
            tracing::debug!(%cause, "io_uring takes no submissions now");
            std::thread::yield_now();
        }
    }

    /// Whether something waits to be submitted: nobody may sleep until it was.
    pub fn has_queued(&mut self) -> bool {
        self.system.has_queued()
    }

    /// Reports each operation that has finished, by its tag. An operation that moved a part of
    /// its bytes continues with the rest.
    pub fn reap(&mut self, mut report: impl FnMut(u32, Result<(), UringFailure>)) {
        if self.in_flight == 0 {
            return;
        }
        while let Some((id, result)) = self.system.completion() {
            let index = usize::try_from(id).unwrap_or(usize::MAX);
            let Some(slot) = self.slots.get_mut(index).and_then(Option::as_mut) else {
                continue;
            };
            match slot.advance(result) {
                Some(result) => {
                    report(slot.tag, result);
                    self.slots[index] = None;
                    self.free.push(index);
                    self.in_flight -= 1;
                }
                None => self.push(index),
            }
        }
        self.submit();
    }

    /// Waits until something in flight has finished, if anything is, and reports as
    /// [`reap`](Uring::reap).
    pub fn wait(&mut self, report: impl FnMut(u32, Result<(), UringFailure>)) {
        if self.in_flight == 0 {
            return;
        }
        if !self.system.has_completion()
            && let Err(cause) = self.system.submit(true)
            && cause != Errno::INTR
        {
            tracing::debug!(%cause, "io_uring cannot wait now");
            std::thread::yield_now();
        }
        self.reap(report);
    }
}

impl<S: FileQueue> Drop for Uring<S> {
    fn drop(&mut self) {
        // The system writes into buffers of operations in flight; they must outlive it.
        while self.in_flight > 0 {
            self.wait(|_, _| {});
        }
    }
}

impl Slot {
    fn call(&self) -> Call<'_> {
        match &self.operation {
            UringOperation::Transfer { access, offset, durable, .. } => {
                let list = &self.rest[self.first..];
                Call::Transfer {
                    access: *access,
                    offset: offset + self.moved(),
                    buffers: &list[..list.len().min(MAX_BUFFERS)],
                    durable: *durable,
                }
            }
            UringOperation::DataSync => Call::DataSync,
            UringOperation::Allocate { mode, offset, length } => {
                Call::Allocate { mode: *mode, offset: *offset, length: *length }
            }
        }
    }

    /// Bytes moved so far.
    fn moved(&self) -> u64 {
        let UringOperation::Transfer { buffers, .. } = &self.operation else {
            return 0;
        };
        let all: usize = buffers.iter().map(|buffer| buffer.get().len()).sum();
        let left: usize = self.rest[self.first..].iter().map(|part| part.iov_len).sum();
        (all - left) as u64
    }

    /// Takes a completion's result in; `None` when there is more to do.
    fn advance(&mut self, result: i32) -> Option<Result<(), UringFailure>> {
        let Ok(mut moved) = usize::try_from(result) else {
            return match Errno::from_raw_os_error(-result) {
                Errno::INTR | Errno::AGAIN => None,
                cause => Some(Err(UringFailure::System(cause))),
            };
        };
        if !matches!(self.operation, UringOperation::Transfer { .. }) {
            return Some(Ok(()));
        }
        if moved == 0 && self.first < self.rest.len() {
            return Some(Err(UringFailure::Short));
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
