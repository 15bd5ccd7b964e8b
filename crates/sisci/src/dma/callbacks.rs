//! Callbacks of transfers that have ended, on a thread of their own.

use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;

use rackbus_memory::threads;

use super::DmaCallbackFn;
use crate::calling::Calling;
use crate::constants::errors::*;
use crate::error::{Code, SciResult};
use crate::local::Argument;

/// A program's callback that is to be called, with its arguments.
pub(super) struct PendingCallback {
    pub(super) calling: Arc<Calling>,
    pub(super) function: DmaCallbackFn,
    pub(super) argument: Argument,
    pub(super) own: usize,
    pub(super) status: u32,
}

/// The thread that calls programs' functions: not a channel's, on which such a function could not
/// wait for another transfer of the same channel.
pub(super) static CALLBACKS: Mutex<Option<(mpsc::Sender<PendingCallback>, JoinHandle<()>)>> =
    Mutex::new(None);

pub(super) fn callbacks() -> SciResult<mpsc::Sender<PendingCallback>> {
    let mut callbacks = CALLBACKS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((sender, _)) = callbacks.as_ref() {
        return Ok(sender.clone());
    }
    let (sender, receiver) = mpsc::channel::<PendingCallback>();
    let call = move || {
        for PendingCallback { calling, function, argument, own, status } in receiver {
            let own = std::ptr::without_provenance_mut(own);
            // A transfer ends once, so what is answered changes nothing.
            // SAFETY: the program gave its function for this.
            calling.during(|| unsafe { function(argument.get(), own, status) });
        }
    };
    let thread = threads::spawn("rackbus dma callbacks", call);
    let thread = thread.map_err(|_| Code(SCI_ERR_SYSTEM))?;
    Ok(callbacks.insert((sender, thread)).0.clone())
}
