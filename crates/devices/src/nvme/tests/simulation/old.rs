//! The policy that acknowledged flushes too early, to show that the simulation finds it: a flag
//! that is cleared when a flush starts, and flushes beside each other.

use std::os::fd::BorrowedFd;

use rackbus_memory::{DmaSlice, PinnedSlice};
use rustix::io::Errno;

use super::super::super::backing::parts::{FileAccess, FileQueue, Uring, UringOperation};
use super::super::super::backing::{
    Background, Backing, InlineResult, MediaError, MediumRequest, RequestResult,
};
use super::disk::{BLOCK, BLOCKS, Disk};

pub struct OldBacking {
    ring: Uring<Disk>,
    dirty: bool,
    flushes: Vec<u32>,
    buffers: usize,
}

impl OldBacking {
    pub fn new(disk: Disk) -> OldBacking {
        OldBacking { ring: Uring::new(disk), dirty: true, flushes: Vec::new(), buffers: 0 }
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
                self.dirty |= Result::is_err(&result);
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
                self.dirty = false;
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
