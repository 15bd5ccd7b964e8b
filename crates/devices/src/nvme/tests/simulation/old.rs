//! A backing with flushes beside each other, as it was before, to show that the simulation finds each of the two mistakes
//! that it made with them.

use std::os::fd::BorrowedFd;

use rackbus_memory::{DmaSlice, PinnedSlice};
use rustix::io::Errno;

use super::super::super::backing::parts::{FileAccess, FileQueue, Uring, UringOperation};
use super::super::super::backing::{
    Background, Backing, InlineResult, MediaError, MediumRequest, RequestResult,
};
use super::disk::{BLOCK, BLOCKS, Disk};

/// What was done wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlushMistake {
    /// What is written counts as durable when a flush starts: a second flush beside it is acknowledged at once.
    Early,
    /// A flush that failed is tried again, and may be acknowledged then.
    Forgets,
}

pub struct OldBacking {
    mistake: FlushMistake,
    ring: Uring<Disk>,
    dirty: bool,
    /// A flush failed, which is remembered.
    failed: bool,
    flushes: Vec<u32>,
    buffers: usize,
}

impl OldBacking {
    pub fn new(disk: Disk, mistake: FlushMistake) -> OldBacking {
        let (ring, flushes) = (Uring::new(disk), Vec::new());
        OldBacking { mistake, ring, dirty: true, failed: false, flushes, buffers: 0 }
    }

    fn take(&mut self, wait: bool, finished: &mut Vec<RequestResult>) {
        let mut reports = Vec::new();
        let report = |tag, result| reports.push((tag, result));
        if wait {
            self.ring.wait(report)
        } else {
            self.ring.reap(report)
        }
        for (tag, result) in reports {
            if let Some(at) = self.flushes.iter().position(|flush| *flush == tag) {
                self.flushes.swap_remove(at);
                let is_err = Result::is_err(&result);
                self.dirty |= is_err;
                self.failed |= is_err && self.mistake == FlushMistake::Early;
            } else {
                self.dirty = true;
                self.buffers -= 1;
            }
            finished.push((tag, Result::map_err(result, |_| MediaError::NotDurable)));
        }
    }
}

impl Backing for OldBacking {
    fn capacity(&self) -> u64 {
        (BLOCK * BLOCKS) as u64
    }
    fn volatile_cache(&self) -> bool {
        true
    }
    fn attempt(&mut self, request: &MediumRequest<&[DmaSlice<'_>]>) -> InlineResult {
        match request {
            MediumRequest::Read { offset, into } => {
                let length: usize = into.iter().map(DmaSlice::len).sum();
                match self.ring.system().transfer(FileAccess::Read, *offset, into) {
                    Ok(moved) if moved == length => InlineResult::Done(Ok(())),
                    Err(Errno::IO) => InlineResult::Done(Err(MediaError::Read)),
                    _ => InlineResult::WouldBlock,
                }
            }
            MediumRequest::Flush if self.failed => InlineResult::Done(Err(MediaError::NotDurable)),
            MediumRequest::Flush if !self.dirty => InlineResult::Done(Ok(())),
            _ => InlineResult::WouldBlock,
        }
    }
    fn background(&mut self) -> Option<&mut dyn Background> {
        Some(self)
    }
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Background for OldBacking {
    fn start(&mut self, tag: u32, request: MediumRequest<Vec<PinnedSlice>>) {
        let operation = match request {
            MediumRequest::Read { offset, into } => UringOperation::Transfer {
                access: FileAccess::Read,
                offset,
                buffers: into,
                durable: false,
            },
            MediumRequest::Write { offset, from, durable } => {
                self.dirty = true;
                UringOperation::Transfer {
                    access: FileAccess::Write,
                    offset,
                    buffers: from,
                    durable,
                }
            }
            MediumRequest::Flush => {
                self.dirty &= self.mistake != FlushMistake::Early;
                self.flushes.push(tag);
                return self.ring.start(tag, UringOperation::DataSync);
            }
            MediumRequest::Zero { offset, length, .. } => {
                self.dirty = true;
                let mode = libc::FALLOC_FL_PUNCH_HOLE;
                UringOperation::Allocate { mode, offset, length }
            }
        };
        self.buffers += 1;
        self.ring.start(tag, operation);
    }
    fn submit(&mut self) {
        self.ring.submit();
    }
    fn reap(&mut self, finished: &mut Vec<RequestResult>) {
        self.take(false, finished);
    }
    fn wait(&mut self, finished: &mut Vec<RequestResult>) {
        self.take(true, finished);
    }
    fn has_buffers(&self) -> bool {
        self.buffers > 0
    }
    fn abort(&mut self) {
        let mut finished = Vec::new();
        while self.ring.in_flight() > 0 {
            self.take(true, &mut finished);
        }
    }
    fn rearm(&mut self) -> bool {
        self.ring.has_queued() || self.ring.system().has_completion()
    }
}
