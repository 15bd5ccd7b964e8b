//! Block transfers, at once or behind the caller.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use rackbus_memory::copy::copy_bytes;

use super::BlockCallback;
use crate::constants::errors::*;
use crate::constants::*;
use crate::error::{Code, SciResult, check_flags, fail};
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
    };
    if std::thread::Builder::new().name("rackbus block".into()).spawn(work).is_err() {
        Block::table().take(handle);
        return fail(SCI_ERR_SYSTEM);
    }
    Ok(handle)
}

pub(super) fn wait_block(block: RawHandle, timeout: u32, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    match find::<Block>(block)?.wait(crate::local::duration(timeout)) {
        true => {
            Block::table().take(block);
            Ok(())
        }
        false => fail(SCI_ERR_TIMEOUT),
    }
}
