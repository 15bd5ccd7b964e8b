//! Operations that wait for the disk: started, continued piece by piece, and ended.

use rackbus_memory::PinnedSlice;
use rustix::io::Errno;

use super::{FileBacking, NOT_DURABLE, allocate_mode, media_error};
use crate::nvme::backing::durability::{Asks, NotDurable};
use crate::nvme::backing::system::FileQueue;
use crate::nvme::backing::uring::{UringFailure, UringOperation};
use crate::nvme::backing::vectored::FileAccess;
use crate::nvme::backing::zeroing::{ZeroBy, ZeroPiece, Zeroing};
use crate::nvme::backing::{Background, MediaError, MediumRequest, RequestResult};

/// A request that was started; its index is its tag in the ring.
#[derive(Debug)]
pub(super) struct RequestSlot {
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
        piece: ZeroPiece,
        since_ns: u64,
    },
}

impl<S: FileQueue> FileBacking<S> {
    fn keep(&mut self, tag: u32, work: Work) -> u32 {
        let pins = matches!(work, Work::Read | Work::Write | Work::Durable { .. });
        self.pinning += usize::from(pins);
        let slot = Some(RequestSlot { tag: Some(tag), work, pins });
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
    fn finish(&mut self, index: u32, result: Result<(), MediaError>, out: &mut Vec<RequestResult>) {
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
                    UringOperation::Transfer { access, offset, buffers, durable: true }
                }
                _ => UringOperation::DataSync,
            };
            self.ring.start(index, operation);
        }
    }

    /// Starts the next piece of a range to be zeroed; finishes it when there is none.
    fn start_piece(&mut self, index: u32, out: &mut Vec<RequestResult>) {
        let now_ns = self.ring.system().now_ns();
        let Some(RequestSlot { tag, work: Work::Zero { zeroing, piece, since_ns }, .. }) =
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
            Some(mode) => {
                UringOperation::Allocate { mode, offset: next.offset, length: next.length }
            }
            None => match PinnedSlice::new(self.zeroes.region().clone(), 0, next.length as usize) {
                Some(zeroes) => UringOperation::Transfer {
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

    fn piece_ended(&mut self, index: u32, result: Result<(), Errno>, out: &mut Vec<RequestResult>) {
        self.durability.change_ended();
        let now_ns = self.ring.system().now_ns();
        let Some(RequestSlot { work: Work::Zero { zeroing, piece, since_ns }, .. }) =
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
    pub(super) fn asked(&mut self, index: u32, ok: bool, out: &mut Vec<RequestResult>) {
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
    fn ended(
        &mut self,
        index: u32,
        result: Result<(), UringFailure>,
        out: &mut Vec<RequestResult>,
    ) {
        let Some(slot) = self.slots.get_mut(index as usize).and_then(Option::as_mut) else {
            return;
        };
        let result = result.map_err(|failure| match failure {
            UringFailure::System(cause) => cause,
            UringFailure::Short => Errno::IO,
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

    fn settle(
        &mut self,
        reports: Vec<(u32, Result<(), UringFailure>)>,
        out: &mut Vec<RequestResult>,
    ) {
        for (index, result) in reports {
            self.ended(index, result, out);
        }
        self.start_batch();
        self.ring.submit();
    }
}

impl<S: FileQueue> Background for FileBacking<S> {
    fn start(&mut self, tag: u32, request: MediumRequest<Vec<PinnedSlice>>) {
        match request {
            MediumRequest::Read { offset, into } => {
                let index = self.keep(tag, Work::Read);
                let (access, buffers) = (FileAccess::Read, into);
                self.ring.start(
                    index,
                    UringOperation::Transfer { access, offset, buffers, durable: false },
                );
            }
            MediumRequest::Write { offset, from, durable: false } => {
                let index = self.keep(tag, Work::Write);
                self.durability.change_begun();
                let (access, buffers) = (FileAccess::Write, from);
                self.ring.start(
                    index,
                    UringOperation::Transfer { access, offset, buffers, durable: false },
                );
            }
            MediumRequest::Write { offset, from, durable: true } => {
                let index = self.keep(tag, Work::Durable { offset, from, error: None });
                self.durability.ask(index, Asks::Write);
            }
            MediumRequest::Flush => {
                let index = self.keep(tag, Work::Flush);
                self.durability.ask(index, Asks::Flush);
            }
            MediumRequest::Zero { offset, length, deallocate } => {
                let zeroing = self.zeroing.begin(offset, length, deallocate);
                let piece = ZeroPiece { offset, length: 0, by: ZeroBy::Writing };
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

    fn reap(&mut self, finished: &mut Vec<RequestResult>) {
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

    fn wait(&mut self, finished: &mut Vec<RequestResult>) {
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
            Some(RequestSlot { work: Work::Durable { error, .. }, pins: false, .. }) => {
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
        let changes = |slot: &RequestSlot| slot.pins || matches!(slot.work, Work::Zero { .. });
        while self.slots.iter().flatten().any(changes) {
            self.wait(&mut nobody);
        }
    }

    fn rearm(&mut self) -> bool {
        self.ring.system_ref().clear_wake();
        self.ring.has_queued() || !self.early.is_empty() || self.ring.system().has_completion()
    }
}
