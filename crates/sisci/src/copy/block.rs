//! Block transfers, at once or behind the caller.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use rackbus_memory::copy::copy_bytes;
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
    done: bool,
}

/// The handles of those that ended last with a call of the program, and that nobody has waited for: a program that is
/// called need not wait, and may.
static CALLED: Mutex<VecDeque<usize>> = Mutex::new(VecDeque::new());
/// How many are remembered.
const MOST_CALLED: usize = 1024;

fn called() -> MutexGuard<'static, VecDeque<usize>> {
    CALLED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends the handle of a transfer whose program has been called. A wait for it that comes later is good once.
fn let_go(handle: RawHandle) {
    // Held over both steps: whoever waits finds it in one of the two places.
    let mut called = called();
    if Block::table().take(handle).is_some() {
        if called.len() >= MOST_CALLED {
            called.pop_front();
        }
        called.push_back(handle.addr());
    }
}

/// Somebody has waited for the transfer of a handle; whether it was known as one.
fn waited_for(handle: RawHandle) -> bool {
    if is_unusable() {
        return false;
    }
    let mut called = called();
    if Block::table().take(handle).is_some() {
        return true;
    }
    match called.iter().position(|it| *it == handle.addr()) {
        Some(at) => called.remove(at).is_some(),
        None => false,
    }
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
    pub(super) fn run(&self) -> SciResult<()> {
        let (from, to) = (find::<Map>(self.from.0)?, find::<Map>(self.to.0)?);
        if !to.writable() {
            return fail(SCI_ERR_ACCESS);
        }
        let part = |map: &Map, offset: u32| {
            let slice = map.mapping().whole();
            slice.part(offset as usize, self.size as usize).map(|part| part.as_ptr())
        };
        let (Some(source), Some(target)) = (part(&from, self.from.1), part(&to, self.to.1)) else {
            return fail(SCI_ERR_OUT_OF_RANGE);
        };
        // SAFETY: both parts are inside of mappings that live until `from` and `to` are dropped.
        unsafe { copy_bytes(source, target, self.size as usize) };
        to.flush()?;
        match from.lost() || to.lost() {
            true => fail(SCI_ERR_TRANSFER_FAILED),
            false => Ok(()),
        }
    }
}

impl Block {
    /// Waits until it is done; false after `timeout`. Its own callback does not wait for itself.
    pub(super) fn wait(&self, timeout: Option<Duration>) -> bool {
        let own = std::thread::current().id();
        let under_way = |it: &mut Progress| !it.done && it.calling != Some(own);
        let Progressing { state, ended } = &*self.progress;
        let state = state.lock().unwrap_or_else(PoisonError::into_inner);
        match timeout {
            None => {
                drop(ended.wait_while(state, under_way));
                true
            }
            Some(timeout) => {
                let waited = ended.wait_timeout_while(state, timeout, under_way);
                !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
            }
        }
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
    find::<Map>(transfer.from.0)?;
    find::<Map>(transfer.to.0)?;
    let progress = Arc::<Progressing>::default();
    let handle = Block::table().add(|_| Block { progress: progress.clone() });
    let [from, to, own] = [transfer.from.0, transfer.to.0, handle].map(|handle| handle.addr());
    let (offsets, size) = ((transfer.from.1, transfer.to.1), transfer.size);
    let work = move || {
        let raw = std::ptr::without_provenance_mut;
        let transfer =
            BlockTransfer { from: (raw(from), offsets.0), to: (raw(to), offsets.1), size };
        let status = transfer.run().map_or_else(|Code(code)| code, |()| SCI_ERR_OK);
        if let Some(call) = call {
            let calling = Some(std::thread::current().id());
            progress.now(Progress { calling, done: false });
            // SAFETY: the program gave its function for this.
            unsafe { call(argument.get(), raw(own), status) };
        }
        progress.now(Progress { calling: None, done: true });
        if call.is_some() {
            let_go(raw(own));
        }
    };
    if threads::spawn("rackbus block", work).is_err() {
        Block::table().take(handle);
        return fail(SCI_ERR_SYSTEM);
    }
    Ok(handle)
}

pub(super) fn wait_block(block: RawHandle, timeout: u32, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    match find::<Block>(block) {
        Ok(under_way) if !under_way.wait(crate::local::duration(timeout)) => fail(SCI_ERR_TIMEOUT),
        // Another thread that waited may have been first.
        Ok(_) => {
            waited_for(block);
            Ok(())
        }
        Err(_) if waited_for(block) => Ok(()),
        Err(unknown) => Err(unknown),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_that_are_only_called_for_are_not_kept() {
        let begin = || Block::table().add(|_| Block { progress: Arc::default() });
        let handles: Vec<RawHandle> = (0..2 * MOST_CALLED).map(|_| begin()).collect();
        handles.iter().for_each(|handle| let_go(*handle));
        assert!(Block::table().all().is_empty());
        assert_eq!(called().len(), MOST_CALLED);
        let (first, last) = (handles[0], handles[handles.len() - 1]);
        assert_eq!(wait_block(last, 0, 0), Ok(()), "it has ended");
        assert_eq!(wait_block(last, 0, 0), fail(SCI_ERR_ILLEGAL_PARAMETER), "waited for already");
        assert_eq!(wait_block(first, 0, 0), fail(SCI_ERR_ILLEGAL_PARAMETER), "too long ago");
        // One that was waited for while it was under way is no handle any more when its call returns.
        let waited = begin();
        assert!(waited_for(waited));
        let_go(waited);
        assert_eq!(wait_block(waited, 0, 0), fail(SCI_ERR_ILLEGAL_PARAMETER));
    }
}
