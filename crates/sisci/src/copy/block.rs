//! Block transfers, at once or behind the caller.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use rackbus_memory::threads;

use super::BlockCallback;
use crate::constants::errors::*;
use crate::constants::*;
use crate::error::{Code, SciResult, check_flags, fail};
use crate::forks::{HeldLock, is_unusable};
use crate::handles::{HandleKind, RawHandle, find};
use crate::local::Argument;
use crate::maps::Map;

/// A transfer between two mappings (`sci_block_transfer_t`), under way or done.
#[derive(Debug)]
pub struct Block {
    progress: Arc<Progressing>,
}

/// How far it is, for those who wait for it.
#[derive(Debug, Default)]
pub(super) struct Progressing {
    pub(super) state: Mutex<Progress>,
    ended: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct Progress {
    /// The thread that is in the program's callback.
    calling: Option<ThreadId>,
    /// The error that it ended with, [`SCI_ERR_OK`] too. Known before the program is called for it.
    outcome: Option<u32>,
    done: bool,
}

/// The handles of those that ended last with a call of the program, and that nobody has waited for, with their outcomes: a
/// program that is called need not wait, and may.
static CALLED: Mutex<VecDeque<(usize, u32)>> = Mutex::new(VecDeque::new());
/// How many are remembered.
const MOST_CALLED: usize = 1024;

fn called() -> MutexGuard<'static, VecDeque<(usize, u32)>> {
    CALLED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends the handle of a transfer whose program has been called. A wait for it that comes later is answered once.
fn let_go(handle: RawHandle, outcome: u32) {
    // Held over both steps: whoever waits finds it in one of the two places.
    let mut called = called();
    if Block::table().take(handle).is_some() {
        if called.len() >= MOST_CALLED {
            called.pop_front();
        }
        called.push_back((handle.addr(), outcome));
    }
}

/// Somebody has waited for the transfer of a handle, which ends with that; its outcome, if its program was called for it.
fn waited_for(handle: RawHandle) -> Option<u32> {
    if is_unusable() {
        return None;
    }
    let mut called = called();
    if Block::table().take(handle).is_some() {
        return None;
    }
    let at = called.iter().position(|(it, _)| *it == handle.addr())?;
    called.remove(at).map(|(_, outcome)| outcome)
}

/// Ends those that are under way, and waits for them.
pub(super) fn end_blocks() {
    for block in Block::table().clear() {
        block.wait(None);
    }
    called().clear();
}

/// The locks of it all, in the order in which they are taken, held while the process forks.
pub(super) fn hold_blocks() -> [Option<HeldLock>; 2] {
    [crate::forks::hold_mutex(&CALLED), Block::table().hold()]
}

/// What a fork has of its parent's.
pub(super) fn forget_blocks() {
    std::mem::forget(Block::table().clear());
    called().clear();
}

/// A copy between two mappings: source, destination and bytes.
#[derive(Clone, Copy)]
pub(super) struct BlockTransfer {
    pub(super) from: (RawHandle, u32),
    pub(super) to: (RawHandle, u32),
    pub(super) size: u32,
}

impl BlockTransfer {
    /// Finds the mappings and checks the ranges.
    pub(super) fn begin(&self) -> SciResult<CheckedTransfer> {
        let (from, to) = (find::<Map>(self.from.0)?, find::<Map>(self.to.0)?);
        if !to.writable() {
            return fail(SCI_ERR_ACCESS);
        }
        let (source, target, size) = (self.from.1 as usize, self.to.1 as usize, self.size as usize);
        let has = |map: &Map, offset| map.mapping().whole().part(offset, size).is_some();
        match has(&from, source) && has(&to, target) {
            true => Ok(CheckedTransfer { from: (from, source), to: (to, target), size }),
            false => fail(SCI_ERR_OUT_OF_RANGE),
        }
    }
}

/// A copy that can be made: both mappings stay until it is, even if the program unmaps them.
pub(super) struct CheckedTransfer {
    from: (Arc<Map>, usize),
    to: (Arc<Map>, usize),
    size: usize,
}

impl CheckedTransfer {
    /// Copies, and says whether it arrived. The mappings are let go of before whoever waits hears of it, and removes what
    /// they are of.
    pub(super) fn run(self) -> SciResult<()> {
        let part = |(map, offset): &(Arc<Map>, usize)| {
            map.mapping().whole().part(*offset, self.size).map(|part| part.as_ptr())
        };
        let (Some(source), Some(_)) = (part(&self.from), part(&self.to)) else {
            return fail(SCI_ERR_OUT_OF_RANGE);
        };
        // SAFETY: both parts are inside of mappings that live until `self` is dropped.
        unsafe { self.to.0.copy_there(self.to.1, source, self.size)? };
        match self.from.0.lost() || self.to.0.lost() {
            true => fail(SCI_ERR_TRANSFER_FAILED),
            false => Ok(()),
        }
    }
}

impl Block {
    /// Waits until it is done: its outcome, or `None` after `timeout`. Its own callback does not wait for itself.
    pub(super) fn wait(&self, timeout: Option<Duration>) -> Option<u32> {
        let own = std::thread::current().id();
        let under_way = |it: &mut Progress| !it.done && it.calling != Some(own);
        let Progressing { state, ended } = &*self.progress;
        let state = state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = match timeout {
            None => ended.wait_while(state, under_way).unwrap_or_else(PoisonError::into_inner),
            Some(timeout) => {
                let waited = ended.wait_timeout_while(state, timeout, under_way);
                let (state, late) = waited.unwrap_or_else(PoisonError::into_inner);
                if late.timed_out() {
                    return None;
                }
                state
            }
        };
        state.outcome
    }
}

impl Progressing {
    fn now(&self, progress: Progress) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = progress;
        self.ended.notify_all();
    }
}

pub(super) fn transfer_behind(
    transfer: BlockTransfer,
    callback: BlockCallback,
    argument: Argument,
    flags: u32,
) -> SciResult<RawHandle> {
    check_flags(flags, SCI_FLAG_USE_CALLBACK)?;
    let call = match (flags & SCI_FLAG_USE_CALLBACK, callback) {
        (0, _) => None,
        (_, Some(call)) => Some(call),
        (_, None) => return fail(SCI_ERR_ILLEGAL_PARAMETER),
    };
    let transfer = transfer.begin()?;
    let progress = Arc::<Progressing>::default();
    let handle = Block::table().add(|_| Block { progress: progress.clone() });
    let own = handle.addr();
    let work = move || {
        let outcome = transfer.run().map_or_else(|Code(code)| code, |()| SCI_ERR_OK);
        let own = std::ptr::without_provenance_mut(own);
        if let Some(call) = call {
            let calling = Some(std::thread::current().id());
            progress.now(Progress { calling, outcome: Some(outcome), done: false });
            // SAFETY: the program gave its function for this.
            unsafe { call(argument.get(), own, outcome) };
        }
        progress.now(Progress { calling: None, outcome: Some(outcome), done: true });
        if call.is_some() {
            let_go(own, outcome);
        }
    };
    if threads::spawn("rackbus block", work).is_err() {
        Block::table().take(handle);
        return fail(SCI_ERR_SYSTEM);
    }
    Ok(handle)
}

/// Waits for a transfer, which is known no more then; its outcome is the answer.
pub(super) fn wait_block(block: RawHandle, timeout: u32, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    let outcome = match find::<Block>(block) {
        Ok(under_way) => match under_way.wait(crate::local::duration(timeout)) {
            Some(outcome) => {
                // Another thread that waited may have been first.
                waited_for(block);
                outcome
            }
            None => return fail(SCI_ERR_TIMEOUT),
        },
        Err(unknown) => waited_for(block).ok_or(unknown)?,
    };
    match outcome {
        SCI_ERR_OK => Ok(()),
        failed => fail(failed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_that_are_only_called_for_are_not_kept() {
        let begin = || Block::table().add(|_| Block { progress: Arc::default() });
        let handles: Vec<RawHandle> = (0..2 * MOST_CALLED).map(|_| begin()).collect();
        handles.iter().for_each(|handle| let_go(*handle, SCI_ERR_OK));
        assert!(Block::table().all().is_empty());
        assert_eq!(called().len(), MOST_CALLED);
        let (first, last) = (handles[0], handles[handles.len() - 1]);
        assert_eq!(wait_block(last, 0, 0), Ok(()), "it has ended");
        assert_eq!(wait_block(last, 0, 0), fail(SCI_ERR_ILLEGAL_PARAMETER), "waited for already");
        assert_eq!(wait_block(first, 0, 0), fail(SCI_ERR_ILLEGAL_PARAMETER), "too long ago");
        // One that was waited for while it was under way is no handle any more when its call returns.
        let waited = begin();
        assert_eq!(waited_for(waited), None);
        let_go(waited, SCI_ERR_OK);
        assert_eq!(wait_block(waited, 0, 0), fail(SCI_ERR_ILLEGAL_PARAMETER));
        let failed = begin();
        let_go(failed, SCI_ERR_TRANSFER_FAILED);
        assert_eq!(wait_block(failed, 0, 0), fail(SCI_ERR_TRANSFER_FAILED));
    }
}
