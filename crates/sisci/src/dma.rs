//! DMA queues and channels: transfers by the copy engine.
//!
//! The engine is one for the process, with a few channels; a queue uses the channel that it was
//! assigned, or the least busy one. A queue has one transfer at a time, as the API says.

mod callbacks;
mod channels;
mod exports;
mod transfer;

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use rackbus_memory::DmaSlice;
use rackbus_memory::copy::{
    CopyEngine, CopyEngineOptions, CopyLocation, CopyPiece, Ticket, Transaction, TransactionState,
    TransferParties,
};

use crate::calling::Calling;
use crate::constants::errors::*;
use crate::constants::layout::DmaVecElement;
use crate::constants::*;
use crate::error::{Code, SciResult, check_adapter, check_flags, fail};
use crate::forks::HeldLock;
use crate::handles::{HandleKind, RawHandle, find, kind};
use crate::library::Child;
use crate::local::{Argument, SciLocalSegment, Using, duration};
use crate::query::DMA_CHANNELS;
use crate::remote::SciRemoteSegment;

use callbacks::{CALLBACKS, PendingCallback, callbacks};
pub use channels::DmaChannel;
pub use exports::*;
use transfer::{add, connected, prepared, transfer};

/// How a queue is (`sci_dma_queue_state_t`).
type QueueState = u32;
const IDLE: QueueState = 0;
const GATHER: QueueState = 1;
const POSTED: QueueState = 2;
const DONE: QueueState = 3;
const ABORTED: QueueState = 4;
const ERROR: QueueState = 5;

/// No channel was assigned.
const NO_CHANNEL: u32 = u32::MAX;

/// Called when a queue's transfers have ended (`sci_cb_dma_t`).
pub type DmaCallback = Option<DmaCallbackFn>;

/// A callback of a program, as the C API declares it.
pub type DmaCallbackFn = unsafe extern "C" fn(*mut c_void, RawHandle, u32) -> u32;

/// The process' copy engine, which lives as long as the process.
static ENGINE: RwLock<Option<&'static CopyEngine>> = RwLock::new(None);

fn engine() -> SciResult<&'static CopyEngine> {
    if let Some(engine) = *ENGINE.read().unwrap_or_else(PoisonError::into_inner) {
        return Ok(engine);
    }
    let mut started = ENGINE.write().unwrap_or_else(PoisonError::into_inner);
    if let Some(engine) = *started {
        return Ok(engine);
    }
    let options =
        CopyEngineOptions { channels: DMA_CHANNELS as usize, ..CopyEngineOptions::default() };
    let engine = CopyEngine::start("rackbus dma", &options).map_err(|_| Code(SCI_ERR_SYSTEM))?;
    Ok(started.insert(Box::leak(Box::new(engine))))
}

/// Transfers that are done one after the other (`sci_dma_queue_t`).
#[derive(Debug)]
pub struct DmaQueue {
    max_entries: u32,
    work: Mutex<Work>,
    channel: AtomicU32,
    assigned: Mutex<Option<Arc<DmaChannel>>>,
    /// Where the program is called for its transfers.
    calling: Arc<Calling>,
    _child: Child,
}
kind!(DmaQueue, 12);

/// What a queue is at.
#[derive(Debug, Default)]
struct Work {
    gathered: Option<Gathered>,
    /// A transfer that was started, ended or not.
    running: Option<Arc<Ticket>>,
}

/// Pieces that wait to be posted.
#[derive(Debug, Default)]
struct Gathered {
    transaction: Transaction,
    entries: u32,
    ends: Ends,
}

/// The segments that a transfer is between.
#[derive(Debug, Default)]
struct Ends {
    locals: Vec<Using>,
    remotes: Vec<Arc<SciRemoteSegment>>,
}

/// The same of a transfer that was submitted. They are in use until it ends.
struct SubmittedEnds {
    ends: Mutex<Ends>,
    /// Whether some of them may be on another machine.
    is_far: bool,
    /// Those to which bytes went by themselves, and whether that failed.
    carried: Mutex<Vec<Arc<SciRemoteSegment>>>,
    has_failed: AtomicBool,
}

impl SubmittedEnds {
    fn new(ends: Ends) -> Arc<SubmittedEnds> {
        let is_on_other = |remote: &SciRemoteSegment| remote.segment().is_ok_and(|it| it.is_far());
        let is_far = ends.remotes.iter().any(|remote| is_on_other(remote));
        let (carried, has_failed) = Default::default();
        Arc::new(SubmittedEnds { ends: Mutex::new(ends), is_far, carried, has_failed })
    }

    fn lock(&self) -> MutexGuard<'_, Ends> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The segment that has a piece's destination, and the offset there.
    fn destination(&self, piece: &CopyPiece<'_>) -> Option<(Arc<SciRemoteSegment>, u64)> {
        let ends = self.lock();
        ends.remotes.iter().find_map(|remote| {
            let offset = piece.offset_in(&remote.whole().ok()?)?;
            Some((remote.clone(), offset as u64))
        })
    }
}

impl TransferParties for SubmittedEnds {
    /// Bytes from or for somebody who is gone did not arrive; those for another machine arrive here.
    fn are_gone(&self) -> bool {
        let ends = self.lock();
        if self.has_failed.load(Ordering::Acquire) {
            return true;
        }
        // What was carried there is there.
        let carried = self.carried.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let is_carried =
            |remote: &Arc<SciRemoteSegment>| carried.iter().any(|it| Arc::ptr_eq(it, remote));
        let arrives = |remote: &Arc<SciRemoteSegment>| is_carried(remote) || remote.flush().is_ok();
        // Asked last: who is lost meanwhile has not had all.
        let lost = |remote: &Arc<SciRemoteSegment>| !arrives(remote) || remote.lost();
        ends.locals.iter().any(Using::gone) || ends.remotes.iter().any(lost)
    }

    fn release(&self) {
        let ends = std::mem::take(&mut *self.lock());
        drop(ends);
        self.carried.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn carry(&self, piece: &CopyPiece<'_>, stop: &dyn Fn() -> bool) -> Option<bool> {
        if !self.is_far || piece.overlaps() {
            return None;
        }
        let (remote, offset) = self.destination(piece)?;
        if self.has_failed.load(Ordering::Acquire) {
            // It has ended, and nobody is asked anything more for it.
            return Some(true);
        }
        let source = |from: usize, to: DmaSlice<'_>| piece.copy_to(from, to);
        let outcome = remote.segment().ok()?.carry(offset, (&source, piece.len()), stop)?;
        self.has_failed.fetch_or(outcome.is_err(), Ordering::AcqRel);
        let mut carried = self.carried.lock().unwrap_or_else(PoisonError::into_inner);
        if !carried.iter().any(|it| Arc::ptr_eq(it, &remote)) {
            carried.push(remote);
        }
        Some(outcome.unwrap_or(true))
    }
}

impl Ends {
    fn add(&mut self, other: Ends) {
        for remote in other.remotes {
            if !self.remotes.iter().any(|known| Arc::ptr_eq(known, &remote)) {
                self.remotes.push(remote);
            }
        }
        self.locals.extend(other.locals);
    }
}

fn queue_state(state: TransactionState) -> QueueState {
    match state {
        TransactionState::Posted => POSTED,
        TransactionState::Done => DONE,
        TransactionState::Aborted => ABORTED,
        TransactionState::Failed(_) => ERROR,
    }
}

fn ended(state: QueueState) -> u32 {
    match state {
        DONE => SCI_ERR_OK,
        ABORTED => SCI_ERR_CANCELLED,
        _ => SCI_ERR_TRANSFER_FAILED,
    }
}

impl DmaQueue {
    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> QueueState {
        let work = self.lock();
        match (&work.gathered, &work.running) {
            (Some(_), _) => GATHER,
            (None, Some(running)) => queue_state(running.poll()),
            (None, None) => IDLE,
        }
    }

    /// Submits a transaction, if none is under way.
    fn start(
        &self,
        own: RawHandle,
        (transaction, ends): (Transaction, Ends),
        call: Option<(DmaCallbackFn, Argument)>,
    ) -> SciResult<Arc<Ticket>> {
        // Decided when the bytes are copied: who leaves later has had them.
        let transaction = transaction.between(SubmittedEnds::new(ends));
        let transaction = match call {
            None => transaction,
            Some((function, argument)) => {
                let (own, callbacks, calling) = (own.addr(), callbacks()?, self.calling.clone());
                transaction.then(move |state| {
                    let status = ended(queue_state(state));
                    // The thread lives as long as there is one of these.
                    let _ = callbacks.send(PendingCallback {
                        calling,
                        function,
                        argument,
                        own,
                        status,
                    });
                })
            }
        };
        let engine = engine()?;
        let mut work = self.lock();
        if work.running.as_ref().is_some_and(|running| !running.poll().ended()) {
            return fail(SCI_ERR_ILLEGAL_OPERATION);
        }
        let number = self.channel.load(Ordering::Acquire) as usize;
        let channel = engine.channels().get(number).unwrap_or_else(|| engine.least_busy());
        let ticket = Arc::new(channel.submit(transaction));
        work.running = Some(ticket.clone());
        Ok(ticket)
    }
}

fn create(sd: RawHandle, adapter: u32, max_entries: u32, flags: u32) -> SciResult<RawHandle> {
    check_flags(flags, SCI_FLAG_DMA_GLOBAL | SCI_FLAG_DMA_SYSDMA | SCI_FLAG_DMA_ADAPTER)?;
    check_adapter(adapter)?;
    if max_entries == 0 {
        return fail(SCI_ERR_ILLEGAL_PARAMETER);
    }
    let child = Child::of(sd)?;
    Ok(DmaQueue::table().add(|_| DmaQueue {
        max_entries,
        work: Mutex::default(),
        channel: AtomicU32::new(NO_CHANNEL),
        assigned: Mutex::default(),
        calling: Arc::default(),
        _child: child,
    }))
}

fn remove(queue: RawHandle, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    if find::<DmaQueue>(queue)?.state() == POSTED {
        return fail(SCI_ERR_ILLEGAL_OPERATION);
    }
    let queue = DmaQueue::table().take(queue).ok_or(Code(SCI_ERR_ILLEGAL_PARAMETER))?;
    queue.unassign();
    queue.calling.end();
    Ok(())
}

impl DmaQueue {
    fn unassign(&self) {
        self.channel.store(NO_CHANNEL, Ordering::Release);
        let before = self.assigned.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(channel) = before {
            channel.queues.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn abort(queue: RawHandle, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    let queue = find::<DmaQueue>(queue)?;
    let running = {
        let mut work = queue.lock();
        work.gathered = None;
        work.running.clone()
    };
    if let Some(running) = running {
        running.abort();
        running.wait(None);
    }
    Ok(())
}

fn wait(queue: RawHandle, timeout: u32, flags: u32) -> SciResult<QueueState> {
    check_flags(flags, 0)?;
    let running = find::<DmaQueue>(queue)?.lock().running.clone();
    let Some(running) = running else { return fail(SCI_ERR_ILLEGAL_OPERATION) };
    match queue_state(running.wait(duration(timeout))) {
        POSTED => fail(SCI_ERR_TIMEOUT),
        state => Ok(state),
    }
}

fn enqueue(
    queue: RawHandle,
    (local, remote): (RawHandle, RawHandle),
    (local_offset, remote_offset, size): (u32, u32, u32),
    flags: u32,
) -> SciResult<QueueState> {
    check_flags(flags, SCI_FLAG_DMA_READ | SCI_FLAG_DMA_POST)?;
    let found = find::<DmaQueue>(queue)?;
    let reads = flags & SCI_FLAG_DMA_READ != 0;
    let (remote, there) = connected(remote, reads)?;
    let (using, here) = prepared(local)?;
    let places = (
        CopyLocation::shared(&here, local_offset as usize),
        CopyLocation::shared(&there, remote_offset as usize),
    );
    {
        let mut work = found.lock();
        if work.running.is_some() {
            return fail(SCI_ERR_ILLEGAL_OPERATION);
        }
        let gathered = work.gathered.get_or_insert_default();
        if gathered.entries >= found.max_entries {
            return fail(SCI_ERR_MAX_ENTRIES);
        }
        let added = add(&mut gathered.transaction, places, size as usize, reads);
        if added.is_ok() {
            gathered.entries += 1;
            gathered.ends.add(Ends { locals: vec![using], remotes: vec![remote] });
        }
        if gathered.entries == 0 {
            work.gathered = None;
        }
        added?;
    }
    if flags & SCI_FLAG_DMA_POST != 0 {
        post(queue, None, Argument(std::ptr::null_mut()), 0)?;
    }
    Ok(found.state())
}

fn post(queue: RawHandle, callback: DmaCallback, argument: Argument, flags: u32) -> SciResult<()> {
    check_flags(flags, SCI_FLAG_USE_CALLBACK)?;
    let found = find::<DmaQueue>(queue)?;
    let call = match (flags & SCI_FLAG_USE_CALLBACK, callback) {
        (0, _) => None,
        (_, Some(function)) => Some((function, argument)),
        (_, None) => return fail(SCI_ERR_ILLEGAL_PARAMETER),
    };
    let gathered = found.lock().gathered.take();
    let Some(gathered) = gathered else { return fail(SCI_ERR_ILLEGAL_OPERATION) };
    found.start(queue, (gathered.transaction, gathered.ends), call).map(drop)
}

fn reset(queue: RawHandle, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    let queue = find::<DmaQueue>(queue)?;
    if queue.state() == POSTED {
        return fail(SCI_ERR_ILLEGAL_OPERATION);
    }
    *queue.lock() = Work::default();
    Ok(())
}

/// Ends every queue and channel of the process.
pub(crate) fn end_all() {
    let queues = DmaQueue::table().clear();
    for queue in &queues {
        if let Some(running) = &queue.lock().running {
            running.abort();
            running.wait(None);
        }
        queue.unassign();
    }
    drop(DmaChannel::table().clear());
    let callbacks = CALLBACKS.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some((sender, thread)) = callbacks {
        // What has ended is still told; who ends everything from a callback is not waited for.
        drop(sender);
        if thread.thread().id() != std::thread::current().id() {
            // It does not panic; if it did, the panic hook has reported it.
            let _ = thread.join();
        }
    }
    queues.iter().for_each(|queue| queue.calling.end());
}

/// The locks of it all, held while the process forks.
pub(crate) fn hold() -> Vec<Option<HeldLock>> {
    vec![
        crate::forks::hold_mutex(&CALLBACKS),
        crate::forks::hold_lock(&ENGINE),
        DmaQueue::table().hold(),
        DmaChannel::table().hold(),
    ]
}

/// What a fork has of its parent's.
pub(crate) fn forget_all() {
    std::mem::forget(DmaQueue::table().clear());
    std::mem::forget(DmaChannel::table().clear());
    channels::forget_users();
    // Their threads are the parent's.
    *ENGINE.write().unwrap_or_else(PoisonError::into_inner) = None;
    std::mem::forget(CALLBACKS.lock().unwrap_or_else(PoisonError::into_inner).take());
}
