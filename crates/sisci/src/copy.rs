//! Stores by the processor: copies into mappings, sequences that tell whether they arrived, and
//! block transfers between mappings.
//!
//! A copy is a copy of memory; the checks before it are what the handle costs. So the mapping that
//! a thread copied to last is remembered (`LAST`), for as long as nothing was unmapped.

mod block;
mod sequence;

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering, fence};

use rackbus_memory::copy::copy_bytes;

use crate::constants::errors::*;
use crate::constants::*;
use crate::error::{SciResult, check_flags, check_place, fail, finish, put};
use crate::handles::{RawHandle, find, kind};
use crate::local::Argument;
use crate::maps::Map;
pub use block::Block;
use block::{BlockTransfer, transfer_behind, wait_block};
pub use sequence::Sequence;
pub(crate) use sequence::end_all;
pub(crate) use sequence::end_sequences;
pub(crate) use sequence::forget_all;
pub(crate) use sequence::hold;
use sequence::{Disorder, check, create_sequence, remove_sequence, start};

/// How a sequence is (`sci_sequence_status_t`).
type Status = u32;
const OK: Status = 0;
const NOT_RETRIABLE: Status = 2;
const PENDING: Status = 3;

kind!(Sequence, 5);

kind!(Block, 6);

/// Counts what would make a remembered mapping wrong.
static UNMAPPED: AtomicU64 = AtomicU64::new(0);

/// A mapping by its handle, with the count of [`UNMAPPED`] at which it was looked up.
#[derive(Clone, Copy)]
struct Last {
    handle: usize,
    unmapped: u64,
    start: *mut u8,
    length: usize,
    writable: bool,
}

thread_local! {
    /// The mapping that this thread copied to last.
    static LAST: Cell<Last> = const {
        Cell::new(Last {
            handle: 0,
            unmapped: 0,
            start: std::ptr::null_mut(),
            length: 0,
            writable: false,
        })
    };
}

/// To be called when a handle finds its mapping no more, before that is unmapped.
pub(crate) fn forget_last() {
    UNMAPPED.fetch_add(1, Ordering::AcqRel);
}

/// `length` bytes of a mapping from `offset`, to be written or only read: where they are.
#[inline]
fn part(handle: RawHandle, offset: usize, length: usize, write: bool) -> SciResult<*mut u8> {
    let unmapped = UNMAPPED.load(Ordering::Acquire);
    let mut last = LAST.get();
    if last.handle != handle.addr() || last.unmapped != unmapped {
        let map = find::<Map>(handle)?;
        let whole = map.mapping().whole();
        let (handle, start, length) = (handle.addr(), whole.as_ptr(), whole.len());
        last = Last { handle, unmapped, start, length, writable: map.writable() };
        LAST.set(last);
    }
    if write && !last.writable {
        return fail(SCI_ERR_ACCESS);
    }
    match offset.checked_add(length) {
        // SAFETY: inside of the mapping.
        Some(end) if end <= last.length => Ok(unsafe { last.start.add(offset) }),
        _ => fail(SCI_ERR_OUT_OF_RANGE),
    }
}

/// Copies to a mapping, or from it.
///
/// # Safety
/// `memory` is `size` bytes that the program may read, or write when `flags` say so.
#[inline]
unsafe fn copy(
    sequence: RawHandle,
    memory: *mut u8,
    (map, offset): (RawHandle, usize),
    size: usize,
    flags: u32,
) -> SciResult<()> {
    check_flags(flags, SCI_FLAG_BLOCK_READ | SCI_FLAG_ERROR_CHECK)?;
    let there = part(map, offset, size, flags & SCI_FLAG_BLOCK_READ == 0)?;
    if memory.is_null() && size > 0 {
        return fail(SCI_ERR_ILLEGAL_ADDRESS);
    }
    // SAFETY: both are `size` bytes, as the caller says and as was checked.
    unsafe {
        match flags & (SCI_FLAG_BLOCK_READ | SCI_FLAG_ERROR_CHECK) {
            0 => copy_bytes(memory, there, size),
            SCI_FLAG_ERROR_CHECK => {
                let to = find::<Map>(map)?;
                to.copy_there(offset, memory, size)?;
                return check_arrival(sequence, &[], &[&to]);
            }
            _ => copy_bytes(there, memory, size),
        }
    }
    match flags & SCI_FLAG_ERROR_CHECK {
        0 => Ok(()),
        _ => check_arrival(sequence, &[map], &[]),
    }
}

/// Fails where what was stored to `maps` did not arrive, or to the mapping of the sequence, which may be another one; or where
/// the segments of those are gone that have all that was stored, `there`.
fn check_arrival(sequence: RawHandle, maps: &[RawHandle], there: &[&Arc<Map>]) -> SciResult<()> {
    let mut also = match sequence.is_null() {
        true => None,
        false => Some(find::<Sequence>(sequence)?.map.clone()),
    };
    for map in maps {
        let map = find::<Map>(*map)?;
        has_arrived(&map)?;
        also = also.filter(|it| !Arc::ptr_eq(it, &map));
    }
    for map in there {
        is_there(map)?;
        also = also.filter(|it| !Arc::ptr_eq(it, map));
    }
    also.map_or(Ok(()), |map| has_arrived(&map))
}

fn has_arrived(map: &Map) -> SciResult<()> {
    map.flush()?;
    is_there(map)
}

fn is_there(map: &Map) -> SciResult<()> {
    match map.lost() {
        true => fail(SCI_ERR_TRANSFER_FAILED),
        false => Ok(()),
    }
}

/// Tells a program how a sequence is.
///
/// # Safety
/// `error` is null or can be written to.
unsafe fn status(error: *mut u32, outcome: Result<(), Disorder>) -> Status {
    // SAFETY: as the caller says.
    unsafe { finish(error, outcome.map_err(|disorder| disorder.code)) };
    outcome.map_or_else(|disorder| disorder.status, |()| OK)
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
    fn pthread_setcanceltype(kind: c_int, before: *mut c_int) -> c_int;
}

/// `PTHREAD_CANCEL_DISABLE` of Linux's C libraries.
const CANCEL_DISABLE: c_int = 1;
/// Their `PTHREAD_CANCEL_DEFERRED`.
const CANCEL_DEFERRED: c_int = 0;

/// This thread is not cancelled before the [end](NotCancelled::end); it may be there.
struct NotCancelled {
    state: c_int,
    kind: c_int,
}

impl NotCancelled {
    fn begin() -> NotCancelled {
        let mut before = NotCancelled { state: 0, kind: 0 };
        // SAFETY: both change how this thread may be cancelled, and say how it was.
        unsafe {
            // First the type: a signal that was sent while the thread could be cancelled may come after it cannot, and
            // glibc up to 2.40 looks only at the type then.
            pthread_setcanceltype(CANCEL_DEFERRED, &raw mut before.kind);
            pthread_setcancelstate(CANCEL_DISABLE, &raw mut before.state);
        }
        before
    }

    fn end(self) {
        // SAFETY: as it was before. The state comes last: what holds locks is over by then.
        unsafe {
            pthread_setcanceltype(self.kind, std::ptr::null_mut());
            pthread_setcancelstate(self.state, std::ptr::null_mut());
        }
    }
}

/// Stores are in order; those to another machine arrive here. What is wrong with them, a check tells.
///
/// Programs cancel threads in here, which is no harm to a fence. What asks the node holds locks meanwhile, so the
/// thread is cancelled after it.
fn flush(sequence: RawHandle) {
    fence(Ordering::SeqCst);
    // Without a sequence the processor's buffers are meant: what is in order here arrives in order.
    if sequence.is_null() || !crate::library::between_machines() {
        return;
    }
    let undisturbed = NotCancelled::begin();
    if let Ok(sequence) = find::<Sequence>(sequence) {
        let _ = sequence.map.flush();
    }
    undisturbed.end();
}

/// Called when a block transfer has ended (`sci_cb_block_transfer_t`).
pub type BlockCallback = Option<unsafe extern "C" fn(*mut c_void, RawHandle, u32) -> c_int>;

/// Which way of copying a program chose: there is one, which chooses by itself.
static CHOSEN: AtomicI32 = AtomicI32::new(5);

api! {
    "C-unwind";

    /// Stores before it arrive before those after it.
    fn SCIStoreBarrier(sequence: RawHandle, _flags: u32) {
        flush(sequence);
    }

    /// Stores before it are on their way.
    fn SCIFlush(sequence: RawHandle, _flags: u32) {
        flush(sequence);
    }

    /// What was read ahead is forgotten.
    fn SCIFlushReadBuffers(_sequence: RawHandle) {
        fence(Ordering::SeqCst);
    }
}

api! {
    /// Makes a sequence on a mapping.
    fn SCICreateMapSequence(
        map: RawHandle,
        sequence: *mut RawHandle,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe {
            let made = check_place(sequence).and_then(|()| create_sequence(map, flags));
            if let Some(handle) = finish(error, made) {
                put(sequence, handle);
            }
        }
    }

    /// Removes a sequence, by which stores to a mapping are checked.
    fn SCIRemoveSequence(sequence: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, remove_sequence(sequence, flags)) };
    }

    /// Begins to look for errors.
    fn SCIStartSequence(sequence: RawHandle, flags: u32, error: *mut u32) -> Status {
        // SAFETY: as the caller says.
        unsafe {
            let known = check_flags(flags, 0).map_err(Disorder::from);
            status(error, known.and_then(|()| start(sequence)))
        }
    }

    /// Whether all stores since the last look arrived.
    fn SCICheckSequence(sequence: RawHandle, flags: u32, error: *mut u32) -> Status {
        let known = check_flags(flags, SCI_FLAG_NO_FLUSH | SCI_FLAG_NO_STORE_BARRIER);
        let known = known.map_err(Disorder::from);
        // SAFETY: as the caller says.
        unsafe { status(error, known.and_then(|()| check(sequence, flags & SCI_FLAG_NO_FLUSH == 0))) }
    }

    /// Copies to a mapping, or with BLOCK_READ from it.
    fn SCIMemCpy(
        sequence: RawHandle,
        memory: *mut c_void,
        map: RawHandle,
        offset: usize,
        size: usize,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe { finish(error, copy(sequence, memory.cast(), (map, offset), size, flags)) };
    }

    /// The same to two mappings.
    fn SCIMemCpy_dual(
        sequence: RawHandle,
        memory: *mut c_void,
        first: RawHandle,
        second: RawHandle,
        offset: usize,
        size: usize,
        flags: u32,
        error: *mut u32,
    ) {
        let known = check_flags(flags, SCI_FLAG_ERROR_CHECK);
        // SAFETY: as the caller says.
        unsafe {
            let both = known
                .and_then(|()| part(second, offset, size, true))
                .and_then(|_| copy(sequence, memory.cast(), (first, offset), size, 0))
                .and_then(|()| copy(sequence, memory.cast(), (second, offset), size, 0))
                .and_then(|()| match flags & SCI_FLAG_ERROR_CHECK {
                    0 => Ok(()),
                    // Both have been written by now, whichever of them does not arrive.
                    _ => check_arrival(sequence, &[first, second], &[]),
                });
            finish(error, both);
        }
    }

    /// Copies from memory to where a mapping is.
    fn SCIMemWrite(
        memory: *mut c_void,
        remote: *mut c_void,
        size: usize,
        flags: u32,
        error: *mut u32,
    ) {
        let known = check_flags(flags, 0);
        let there = known.and_then(|()| match memory.is_null() || remote.is_null() {
            true if size > 0 => fail(SCI_ERR_ILLEGAL_ADDRESS),
            _ => Ok(()),
        });
        // SAFETY: the program says that both are so many bytes.
        unsafe {
            if there.is_ok() {
                copy_bytes(memory.cast(), remote.cast(), size);
            }
            finish(error, there);
        }
    }

    /// Copies to a mapping, as 1.x programs do.
    fn SCIMemCopy(
        memory: *mut c_void,
        map: RawHandle,
        offset: u32,
        size: u32,
        flags: u32,
        error: *mut u32,
    ) {
        let place = (map, offset as usize);
        // SAFETY: as the caller says.
        unsafe {
            finish(error, copy(std::ptr::null_mut(), memory.cast(), place, size as usize, flags))
        };
    }

    /// Caches are coherent: there is nothing to do.
    fn SCICacheSync(
        map: RawHandle,
        _address: *mut c_void,
        _length: usize,
        flags: u32,
        error: *mut u32,
    ) {
        let known = check_flags(flags, SCI_FLAG_CACHE_FLUSH | SCI_FLAG_CACHE_INVALIDATE);
        let there = known.and_then(|()| match map.is_null() {
            true => Ok(()),
            false => find::<Map>(map).and_then(|map| map.flush()),
        });
        fence(Ordering::SeqCst);
        // SAFETY: as the caller says.
        unsafe { finish(error, there) };
    }

    /// The way of copying that was chosen.
    fn GetSciMemCopyFunction() -> c_int {
        CHOSEN.load(Ordering::Relaxed)
    }

    /// Chooses a way of copying; all are the same one here.
    fn SetSciMemCopyFunction(index: c_int) {
        CHOSEN.store(index, Ordering::Relaxed);
    }

    /// Copies from one mapping to another.
    fn SCITransferBlock(
        source: RawHandle,
        source_offset: u32,
        target: RawHandle,
        target_offset: u32,
        size: u32,
        flags: u32,
        error: *mut u32,
    ) {
        let transfer = BlockTransfer { from: (source, source_offset), to: (target, target_offset), size };
        // SAFETY: as the caller says.
        unsafe { finish(error, check_flags(flags, 0).and_then(|()| transfer.begin()?.run())) };
    }

    /// The same in the background.
    fn SCITransferBlockAsync(
        source: RawHandle,
        source_offset: u32,
        target: RawHandle,
        target_offset: u32,
        size: u32,
        block: *mut RawHandle,
        callback: BlockCallback,
        argument: *mut c_void,
        flags: u32,
        error: *mut u32,
    ) {
        let transfer = BlockTransfer { from: (source, source_offset), to: (target, target_offset), size };
        // SAFETY: as the caller says.
        unsafe {
            // One that calls the program ends with that, and is told by it: its handle may have no place.
            let place = match flags & SCI_FLAG_USE_CALLBACK {
                0 => check_place(block),
                _ => Ok(()),
            };
            let begun = place
                .and_then(|()| transfer_behind(transfer, callback, Argument(argument), flags));
            if let Some(handle) = finish(error, begun) {
                put(block, handle);
            }
        }
    }

    /// Waits for a transfer in the background; its handle ends with it.
    fn SCIWaitForBlockTransfer(block: RawHandle, timeout: u32, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, wait_block(block, timeout, flags)) };
    }

    /// A transfer that has begun runs to its end, which is soon: waits for it, and answers as that wait does.
    fn SCIAbortBlockTransfer(block: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, wait_block(block, SCI_INFINITE_TIMEOUT, flags)) };
    }
}
