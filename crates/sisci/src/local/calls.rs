//! Local segments are made, prepared, made available, and removed.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use rackbus_attach::{AttachError, Refusal, SegmentKind, SegmentOptions, Withdrawal};

use super::{Argument, LateHandle, LocalCallback, REMOVED, SciLocalSegment, Source, calling};
use crate::constants::errors::*;
use crate::constants::*;
use crate::error::{Code, SciResult, check_adapter, check_flags, explain, fail};
use crate::handles::{HandleKind, RawHandle, find};
use crate::library::Child;

pub(super) fn create(
    sd: RawHandle,
    id: u32,
    size: usize,
    (callback, argument): (LocalCallback, Argument),
    flags: u32,
) -> SciResult<RawHandle> {
    let known = SCI_FLAG_USE_CALLBACK
        | SCI_FLAG_EMPTY
        | SCI_FLAG_PRIVATE
        | SCI_FLAG_DMA_GLOBAL
        | SCI_FLAG_ALLOW_UNICAST
        | SCI_FLAG_BROADCAST
        | SCI_FLAG_AUTO_ID;
    check_flags(flags, known)?;
    let has = |flag| flags & flag != 0;
    let kind = match (has(SCI_FLAG_BROADCAST), has(SCI_FLAG_PRIVATE), has(SCI_FLAG_EMPTY)) {
        (true, true, _) | (true, _, true) | (_, true, true) => return fail(SCI_ERR_ILLEGAL_FLAG),
        // A member's own copy is the group's: there is nothing that unicast would reach alone.
        (true, ..) if has(SCI_FLAG_ALLOW_UNICAST) => return fail(SCI_ERR_FLAG_NOT_IMPLEMENTED),
        (true, ..) => SegmentKind::Group,
        (_, true, _) => SegmentKind::Private,
        (.., true) => SegmentKind::Empty,
        _ => SegmentKind::Shared,
    };
    let child = Child::of(sd)?;
    let own_node = child.session().node();
    let (callback, handle) = calling(callback, argument, flags, own_node)?;
    let choose = has(SCI_FLAG_AUTO_ID);
    let options = SegmentOptions { id, choose, size: size as u64, kind };
    let segment = child.session().create_segment_watched(&options, callback);
    let segment = segment.inspect_err(|error| {
        if let AttachError::Refused(Refusal::OtherSize { .. } | Refusal::Illegal(_)) = error {
            // The API has numbers only; this says what to do.
            explain(format_args!("multicast segment {id:#x} of {size} bytes: {error}"));
        }
    })?;
    Ok(add(Source::Own(segment), child, &handle))
}

fn add(source: Source, child: Child, late: &LateHandle) -> RawHandle {
    let handle = SciLocalSegment::table().add(|_| SciLocalSegment {
        source,
        prepared: AtomicBool::new(false),
        mapped: AtomicUsize::new(0),
        transfers: AtomicUsize::new(0),
        whole: OnceLock::new(),
        registered: Mutex::new(None),
        child,
    });
    // Set once, here.
    let _ = late.set(handle.addr());
    handle
}

pub(super) fn attach(
    sd: RawHandle,
    id: u32,
    (callback, argument): (LocalCallback, Argument),
    flags: u32,
) -> SciResult<(RawHandle, usize)> {
    check_flags(flags, SCI_FLAG_USE_CALLBACK | SCI_FLAG_BROADCAST)?;
    let child = Child::of(sd)?;
    let own_node = child.session().node();
    let (callback, handle) = calling(callback, argument, flags, own_node)?;
    let segment = child.session().attach(id, callback).map_err(|error| match error.into() {
        Code(SCI_ERR_CONNECTION_REFUSED) => Code(SCI_ERR_ACCESS),
        other => other,
    })?;
    let size = usize::try_from(segment.size()).unwrap_or(usize::MAX);
    Ok((add(Source::Attached(segment), child, &handle), size))
}

pub(super) fn prepare(handle: RawHandle, adapter: u32, flags: u32) -> SciResult<()> {
    check_flags(flags, SCI_FLAG_DMA_SOURCE_ONLY | SCI_FLAG_BROADCAST | SCI_FLAG_DMA_GLOBAL)?;
    check_adapter(adapter)?;
    find::<SciLocalSegment>(handle)?.prepared.store(true, Ordering::Release);
    Ok(())
}

pub(super) fn set_available(handle: RawHandle, adapter: u32, flags: u32) -> SciResult<()> {
    check_flags(flags, SCI_FLAG_BROADCAST)?;
    check_adapter(adapter)?;
    let local = find::<SciLocalSegment>(handle)?;
    let segment = local.own()?;
    if segment.kind() == SegmentKind::Private {
        return fail(SCI_ERR_ILLEGAL_OPERATION);
    }
    if !local.is_prepared() {
        return fail(SCI_ERR_SEGMENT_NOT_PREPARED);
    }
    Ok(segment.set_available()?)
}

pub(super) fn set_unavailable(handle: RawHandle, adapter: u32, flags: u32) -> SciResult<()> {
    check_flags(flags, SCI_FLAG_FORCE_DISCONNECT | SCI_FLAG_NOTIFY)?;
    check_adapter(adapter)?;
    let local = find::<SciLocalSegment>(handle)?;
    let how = match (flags & SCI_FLAG_FORCE_DISCONNECT != 0, flags & SCI_FLAG_NOTIFY != 0) {
        (true, _) => Withdrawal::Force,
        (_, true) => Withdrawal::Notify,
        _ => Withdrawal::Quiet,
    };
    Ok(local.own()?.set_unavailable(how)?)
}

pub(super) fn remove(handle: RawHandle, flags: u32) -> SciResult<()> {
    check_flags(flags, SCI_FLAG_FORCE_REMOVE)?;
    let local = find::<SciLocalSegment>(handle)?;
    let forced = flags & SCI_FLAG_FORCE_REMOVE != 0;
    if local.mapped.load(Ordering::Acquire) > 0 && !forced {
        return fail(SCI_ERR_BUSY);
    }
    // A transfer that uses it would copy what is not there any more, and say that all is well.
    let unused = local.transfers.compare_exchange(0, REMOVED, Ordering::AcqRel, Ordering::Acquire);
    if unused.is_err() {
        if !forced {
            return fail(SCI_ERR_BUSY);
        }
        local.transfers.fetch_or(REMOVED, Ordering::AcqRel);
    }
    let Some(local) = SciLocalSegment::table().take(handle) else {
        return fail(SCI_ERR_ILLEGAL_PARAMETER);
    };
    end(&local)
}

pub(super) fn end(local: &SciLocalSegment) -> SciResult<()> {
    // First the memory, then the segment: what the program goes on to write is its own again.
    let registered = local.registered.lock().unwrap_or_else(PoisonError::into_inner).take();
    drop(registered);
    match &local.source {
        Source::Own(segment) => segment.remove()?,
        // The connection stays for as long as its memory is mapped; who waits, or is called, learns the end now.
        Source::Attached(segment) => segment.end_watch(),
    }
    Ok(())
}

pub(super) fn share(handle: RawHandle, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    Ok(find::<SciLocalSegment>(handle)?.own()?.share()?)
}

pub(super) fn register(
    address: *mut c_void,
    size: usize,
    handle: RawHandle,
    flags: u32,
) -> SciResult<()> {
    check_flags(flags, SCI_FLAG_LOCK_USER_MEM)?;
    let local = find::<SciLocalSegment>(handle)?;
    let segment = local.own()?;
    if segment.kind() != SegmentKind::Empty || segment.has_memory() {
        return fail(SCI_ERR_ILLEGAL_OPERATION);
    }
    if size as u64 != segment.size() {
        return fail(SCI_ERR_OUT_OF_RANGE);
    }
    if address.is_null() || !address.addr().is_multiple_of(4096) {
        return fail(SCI_ERR_ILLEGAL_ADDRESS);
    }
    if !size.is_multiple_of(4096) {
        return fail(SCI_ERR_SIZE_ALIGNMENT);
    }
    // SAFETY: the program says that this is its memory, and the checks above that it is whole
    // pages; it is given back before the segment ends.
    let mapping = unsafe { segment.register(address.expose_provenance()) }?;
    *local.registered.lock().unwrap_or_else(PoisonError::into_inner) = Some(mapping);
    Ok(())
}
