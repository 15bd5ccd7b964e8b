//! A transfer is checked and started: between segments, with plain memory, or of a vector.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use rackbus_memory::Region;
use rackbus_memory::copy::{CopyLocation, PieceError, Transaction};

use super::{DmaCallback, DmaQueue, Ends, ended, queue_state};
use crate::constants::errors::*;
use crate::constants::layout::DmaVecElement;
use crate::constants::*;
use crate::error::{Code, SciResult, check_flags, fail};
use crate::handles::{RawHandle, find};
use crate::local::{Argument, SciLocalSegment, Using};
use crate::remote::SciRemoteSegment;

/// A transfer as programs ask for it.
pub(super) struct TransferRequest {
    pub(super) queue: RawHandle,
    pub(super) remote: RawHandle,
    pub(super) callback: DmaCallback,
    pub(super) argument: Argument,
    pub(super) flags: u32,
}

pub(super) const START_FLAGS: u32 = SCI_FLAG_USE_CALLBACK
    | SCI_FLAG_DMA_READ
    | SCI_FLAG_DMA_WAIT
    | SCI_FLAG_DMA_GLOBAL
    | SCI_FLAG_DMA_SYSDMA
    | SCI_FLAG_DMA_ADAPTER
    | SCI_FLAG_DMA_USER_MEM
    | SCI_FLAG_BROADCAST;

impl TransferRequest {
    pub(super) fn reads(&self) -> bool {
        self.flags & SCI_FLAG_DMA_READ != 0
    }

    /// Checks what does not depend on the pieces; the queue and the connected segment.
    fn check(&self) -> SciResult<(Arc<DmaQueue>, Arc<SciRemoteSegment>, Arc<Region>)> {
        check_flags(self.flags, START_FLAGS)?;
        if self.flags & SCI_FLAG_USE_CALLBACK != 0 && self.callback.is_none() {
            return fail(SCI_ERR_ILLEGAL_PARAMETER);
        }
        let queue = find::<DmaQueue>(self.queue)?;
        if queue.lock().gathered.is_some() {
            return fail(SCI_ERR_ILLEGAL_OPERATION);
        }
        let (remote, region) = connected(self.remote, self.reads())?;
        Ok((queue, remote, region))
    }

    pub(super) fn start(
        &self,
        queue: &DmaQueue,
        transaction: Transaction,
        ends: Ends,
    ) -> SciResult<()> {
        let call = self.callback.filter(|_| self.flags & SCI_FLAG_USE_CALLBACK != 0);
        let call = call.map(|function| (function, self.argument));
        let ticket = queue.start(self.queue, (transaction, ends), call)?;
        if self.flags & SCI_FLAG_DMA_WAIT == 0 {
            return Ok(());
        }
        match ended(queue_state(ticket.wait(None))) {
            SCI_ERR_OK => Ok(()),
            code => fail(code),
        }
    }

    fn piece(
        &self,
        transaction: &mut Transaction,
        (local, remote): (CopyLocation<'_>, CopyLocation<'_>),
        size: usize,
    ) -> SciResult<()> {
        add(transaction, (local, remote), size, self.reads())
    }
}

pub(super) fn add(
    transaction: &mut Transaction,
    (local, remote): (CopyLocation<'_>, CopyLocation<'_>),
    size: usize,
    reads: bool,
) -> SciResult<()> {
    if size == 0 {
        return fail(SCI_ERR_SIZE_ALIGNMENT);
    }
    let (from, to) = if reads { (remote, local) } else { (local, remote) };
    transaction.add(from, to, size).map_err(|error| match error {
        PieceError::OutOfRange { .. } => Code(SCI_ERR_OUT_OF_RANGE),
        PieceError::Denied { .. } => Code(SCI_ERR_ACCESS),
        PieceError::Lost(_) => Code(SCI_ERR_TRANSFER_FAILED),
    })
}

/// A connected segment, and its memory to be copied from or to.
pub(super) fn connected(
    remote: RawHandle,
    reads: bool,
) -> SciResult<(Arc<SciRemoteSegment>, Arc<Region>)> {
    let remote = find::<SciRemoteSegment>(remote)?;
    let segment = remote.segment().map_err(|_| Code(SCI_ERR_SEGMENT_NOT_CONNECTED))?;
    if remote.lost() {
        return fail(SCI_ERR_SEGMENT_NOT_CONNECTED);
    }
    if !reads && !segment.writable() {
        return fail(SCI_ERR_ACCESS);
    }
    let region = remote.whole()?;
    Ok((remote, region))
}

/// A prepared segment, to be used by a transfer, and its memory.
pub(super) fn prepared(local: RawHandle) -> SciResult<(Using, Arc<Region>)> {
    let local = find::<SciLocalSegment>(local)?;
    if !local.is_prepared() {
        return fail(SCI_ERR_SEGMENT_NOT_PREPARED);
    }
    let region = local.whole()?;
    Ok((Using::of(local)?, region))
}

pub(super) fn transfer(
    wanted: &TransferRequest,
    local: RawHandle,
    (local_offset, size, remote_offset): (usize, usize, usize),
) -> SciResult<()> {
    let (queue, remote, there) = wanted.check()?;
    let (using, here) = prepared(local)?;
    let mut transaction = Transaction::new();
    let places =
        (CopyLocation::shared(&here, local_offset), CopyLocation::shared(&there, remote_offset));
    wanted.piece(&mut transaction, places, size)?;
    wanted.start(&queue, transaction, Ends { locals: vec![using], remotes: vec![remote] })
}

/// # Safety
/// `memory` is `size` bytes that stay there until the transfer has ended.
pub(super) unsafe fn transfer_memory(
    wanted: &TransferRequest,
    memory: *mut c_void,
    (size, remote_offset): (usize, usize),
) -> SciResult<()> {
    let (queue, remote, there) = wanted.check()?;
    let Some(start) = NonNull::new(memory.cast::<u8>()) else {
        return fail(SCI_ERR_ILLEGAL_ADDRESS);
    };
    // SAFETY: as the caller says.
    let here = unsafe { CopyLocation::own(start, size) };
    let mut transaction = Transaction::new();
    wanted.piece(&mut transaction, (here, CopyLocation::shared(&there, remote_offset)), size)?;
    wanted.start(&queue, transaction, Ends { locals: Vec::new(), remotes: vec![remote] })
}

/// # Safety
/// `vector` is `length` elements.
pub(super) unsafe fn transfer_vector(
    wanted: &TransferRequest,
    local: RawHandle,
    vector: *const DmaVecElement,
    length: usize,
) -> SciResult<()> {
    let (queue, remote, there) = wanted.check()?;
    let (using, here) = prepared(local)?;
    if length == 0 || vector.is_null() {
        return fail(SCI_ERR_ILLEGAL_PARAMETER);
    }
    if length > DIS_DMA_MAX_VECLEN as usize {
        return fail(SCI_ERR_MAX_ENTRIES);
    }
    let mut transaction = Transaction::new();
    for nth in 0..length {
        // SAFETY: as the caller says.
        let element = unsafe { vector.add(nth).read_unaligned() };
        let places = (
            CopyLocation::shared(&here, element.local_offset as usize),
            CopyLocation::shared(&there, element.remote_offset as usize),
        );
        wanted.piece(&mut transaction, places, element.size as usize)?;
    }
    wanted.start(&queue, transaction, Ends { locals: vec![using], remotes: vec![remote] })
}
