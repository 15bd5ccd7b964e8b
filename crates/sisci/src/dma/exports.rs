//! The functions of DMA queues and channels, as programs call them.

use std::ffi::c_void;

use super::channels::{assign, give_back, known, request};
use super::transfer::{TransferRequest, transfer_memory, transfer_vector};
use super::*;
use crate::error::{check_place, finish, put};

api! {
    /// Makes a queue for so many transfers.
    fn SCICreateDMAQueue(
        sd: RawHandle,
        queue: *mut RawHandle,
        adapter: u32,
        max_entries: u32,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe {
            let made = check_place(queue).and_then(|()| match flags & SCI_FLAG_DMA_PHDMA {
                0 => create(sd, adapter, max_entries, flags),
                // Transfers from raw bus addresses.
                _ => fail(SCI_ERR_NOT_SUPPORTED),
            });
            if let Some(handle) = finish(error, made) {
                put(queue, handle);
            }
        }
    }

    /// Removes a queue whose transfers have ended.
    fn SCIRemoveDMAQueue(queue: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, remove(queue, flags)) };
    }

    /// Ends what is under way.
    fn SCIAbortDMAQueue(queue: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, abort(queue, flags)) };
    }

    /// How a queue is.
    fn SCIDMAQueueState(queue: RawHandle) -> QueueState {
        find::<DmaQueue>(queue).map_or(ERROR, |queue| queue.state())
    }

    /// Waits for the transfer that was started.
    fn SCIWaitForDMAQueue(
        queue: RawHandle,
        timeout: u32,
        flags: u32,
        error: *mut u32,
    ) -> QueueState {
        // SAFETY: as the caller says.
        match unsafe { finish(error, wait(queue, timeout, flags)) } {
            Some(state) => state,
            None => find::<DmaQueue>(queue).map_or(ERROR, |queue| queue.state()),
        }
    }

    /// Copies between a local and a remote segment.
    fn SCIStartDmaTransfer(
        queue: RawHandle,
        local: RawHandle,
        remote: RawHandle,
        local_offset: usize,
        size: usize,
        remote_offset: usize,
        callback: DmaCallback,
        argument: *mut c_void,
        flags: u32,
        error: *mut u32,
    ) {
        let wanted = TransferRequest { queue, remote, callback, argument: Argument(argument), flags };
        let range = (local_offset, size, remote_offset);
        // SAFETY: as the caller says.
        unsafe { finish(error, transfer(&wanted, local, range)) };
    }

    /// The same with the program's own memory.
    fn SCIStartDmaTransferMem(
        queue: RawHandle,
        memory: *mut c_void,
        remote: RawHandle,
        size: usize,
        remote_offset: usize,
        callback: DmaCallback,
        argument: *mut c_void,
        flags: u32,
        error: *mut u32,
    ) {
        let wanted = TransferRequest { queue, remote, callback, argument: Argument(argument), flags };
        // SAFETY: as the caller says.
        unsafe { finish(error, transfer_memory(&wanted, memory, (size, remote_offset))) };
    }

    /// The same for several pieces.
    fn SCIStartDmaTransferVec(
        queue: RawHandle,
        local: RawHandle,
        remote: RawHandle,
        length: usize,
        vector: *mut DmaVecElement,
        callback: DmaCallback,
        argument: *mut c_void,
        flags: u32,
        error: *mut u32,
    ) {
        let wanted = TransferRequest { queue, remote, callback, argument: Argument(argument), flags };
        // SAFETY: as the caller says.
        unsafe { finish(error, transfer_vector(&wanted, local, vector, length)) };
    }

    /// Another name of [`SCIStartDmaTransfer`].
    fn DISStartDmaTransfer(
        queue: RawHandle,
        local: RawHandle,
        remote: RawHandle,
        local_offset: usize,
        size: usize,
        remote_offset: usize,
        callback: DmaCallback,
        argument: *mut c_void,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: the same promises.
        unsafe {
            SCIStartDmaTransfer(
                queue, local, remote, local_offset, size, remote_offset, callback, argument,
                flags, error,
            );
        }
    }

    /// Another name of [`SCIStartDmaTransferVec`].
    fn DISStartDmaTransferVec(
        queue: RawHandle,
        local: RawHandle,
        remote: RawHandle,
        length: usize,
        vector: *mut DmaVecElement,
        callback: DmaCallback,
        argument: *mut c_void,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: the same promises.
        unsafe {
            SCIStartDmaTransferVec(
                queue, local, remote, length, vector, callback, argument, flags, error,
            );
        }
    }

    /// Asks for a channel.
    fn SCIRequestDMAChannel(
        sd: RawHandle,
        channel: *mut RawHandle,
        adapter: u32,
        kind: u32,
        number: u32,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe {
            let taken =
                check_place(channel).and_then(|()| request(sd, adapter, kind, number, flags));
            if let Some(handle) = finish(error, taken) {
                put(channel, handle);
            }
        }
    }

    /// Lets a queue use a channel.
    fn SCIAssignDMAChannel(channel: RawHandle, queue: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, assign(channel, queue, flags)) };
    }

    /// Gives a channel back.
    fn SCIReturnDMAChannel(channel: RawHandle, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, give_back(channel)) };
    }

    /// Announces a segment's use.
    fn SCIPrepareLocalSegmentForDMA(channel: RawHandle, segment: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, known::<SciLocalSegment>(channel, segment, flags)) };
    }

    /// Ends what [`SCIPrepareLocalSegmentForDMA`] announced; both only check their handles.
    fn SCIUnprepareLocalSegmentForDMA(channel: RawHandle, segment: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, known::<SciLocalSegment>(channel, segment, flags)) };
    }

    /// Announces a segment's use.
    fn SCIPrepareRemoteSegmentForDMA(channel: RawHandle, segment: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, known::<SciRemoteSegment>(channel, segment, flags)) };
    }

    /// Ends what [`SCIPrepareRemoteSegmentForDMA`] announced; both only check their handles.
    fn SCIUnprepareRemoteSegmentForDMA(channel: RawHandle, segment: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, known::<SciRemoteSegment>(channel, segment, flags)) };
    }

    /// Adds a transfer to a queue (1.x).
    fn SCIEnqueueDMATransfer(
        queue: RawHandle,
        local: RawHandle,
        remote: RawHandle,
        local_offset: u32,
        remote_offset: u32,
        size: u32,
        flags: u32,
        error: *mut u32,
    ) -> QueueState {
        let range = (local_offset, remote_offset, size);
        // SAFETY: as the caller says.
        match unsafe { finish(error, enqueue(queue, (local, remote), range, flags)) } {
            Some(state) => state,
            None => find::<DmaQueue>(queue).map_or(ERROR, |queue| queue.state()),
        }
    }

    /// Starts what was gathered (1.x).
    fn SCIPostDMAQueue(
        queue: RawHandle,
        callback: DmaCallback,
        argument: *mut c_void,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe { finish(error, post(queue, callback, Argument(argument), flags)) };
    }

    /// Makes a queue idle again (1.x).
    fn SCIResetDMAQueue(queue: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, reset(queue, flags)) };
    }
}
