//! Local segments: created, prepared, offered, removed; and segments that another process of this
//! host shares.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use rackbus_attach::{
    AttachError, Callback, Change, LocalSegment, Mapping, Refusal, RemoteSegment, SegmentEvent,
    SegmentKind, SegmentOptions, Watch, Withdrawal,
};

use rackbus_memory::Region;

use crate::constants::errors::*;
use crate::constants::*;
use crate::error::{Code, Outcome, check_adapter, check_flags, fail, finish, put};
use crate::forks::Held;
use crate::handles::{Kind, RawHandle, find, kind};
use crate::library::Child;

/// What happened to a segment (`sci_segment_cb_reason_t`).
pub(crate) type Reason = u32;
pub(crate) const CONNECT: Reason = 1;
pub(crate) const DISCONNECT: Reason = 2;
const NOT_OPERATIONAL: Reason = 3;
const LOST: Reason = 5;

/// What a callback answers (`sci_callback_action_t`): anything but this goes on.
pub(crate) const CANCEL: u32 = 1;

/// `sci_cb_local_segment_t`.
pub type LocalCallback =
    Option<unsafe extern "C" fn(*mut c_void, RawHandle, Reason, u32, u32, u32) -> u32>;

/// A local segment (`sci_local_segment_t`).
#[derive(Debug)]
pub struct Local {
    source: Source,
    prepared: AtomicBool,
    /// Number of mappings that the process has of it.
    pub(crate) mapped: AtomicUsize,
    /// Transfers that use it, and [`REMOVED`].
    transfers: AtomicUsize,
    /// All of it, for the copy engine.
    whole: OnceLock<Arc<Region>>,
    /// The program's own memory, where it is the segment's.
    registered: Mutex<Option<Mapping>>,
    child: Child,
}
kind!(Local, 2);

/// The segment is removed: no other transfer uses it.
const REMOVED: usize = 1 << (usize::BITS - 1);

/// A transfer's use of a segment.
#[derive(Debug)]
pub(crate) struct Using(Arc<Local>);

impl Using {
    /// Of a segment that was not removed.
    pub(crate) fn of(local: Arc<Local>) -> Outcome<Using> {
        let one_more = |count: usize| (count & REMOVED == 0).then_some(count + 1);
        let used = local.transfers.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more);
        used.map_or_else(|_| fail(SCI_ERR_SEGMENT_NOT_PREPARED), |_| Ok(Using(local)))
    }

    /// Whether its memory is nobody's any more.
    pub(crate) fn gone(&self) -> bool {
        let attached =
            matches!(&self.0.source, Source::Attached(segment) if segment.watch().lost());
        attached || self.0.transfers.load(Ordering::Acquire) & REMOVED != 0
    }
}

impl Drop for Using {
    fn drop(&mut self) {
        self.0.transfers.fetch_sub(1, Ordering::AcqRel);
    }
}

#[derive(Debug)]
enum Source {
    Own(LocalSegment),
    /// Another process' of this host.
    Attached(RemoteSegment),
}

/// Something of the program's to hand back to its callback.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Argument(pub *mut c_void);
// SAFETY: it is never looked at here, only handed back; its thread safety is the program's.
unsafe impl Send for Argument {}
// SAFETY: as above.
unsafe impl Sync for Argument {}

impl Argument {
    /// The pointer; a method, so that closures capture the whole.
    pub(crate) fn get(&self) -> *mut c_void {
        self.0
    }
}

/// A handle that is known only after what it stands for was made.
pub(crate) type LateHandle = Arc<OnceLock<usize>>;

/// Waits until a handle is known: its maker is just about to tell.
pub(crate) fn late(handle: &LateHandle) -> RawHandle {
    loop {
        if let Some(address) = handle.get() {
            return std::ptr::without_provenance_mut(*address);
        }
        std::thread::yield_now();
    }
}

impl Local {
    pub(crate) fn size(&self) -> u64 {
        match &self.source {
            Source::Own(segment) => segment.size(),
            Source::Attached(segment) => segment.size(),
        }
    }

    pub(crate) fn address(&self) -> Option<u64> {
        match &self.source {
            Source::Own(segment) => segment.address(),
            Source::Attached(segment) => segment.address(),
        }
    }

    /// Waits until what was stored before is at everybody's who is connected.
    pub(crate) fn flush(&self) -> Outcome<()> {
        match &self.source {
            Source::Own(segment) => Ok(segment.flush()?),
            Source::Attached(_) => Ok(()),
        }
    }

    pub(crate) fn is_prepared(&self) -> bool {
        self.prepared.load(Ordering::Acquire) || matches!(self.source, Source::Attached(_))
    }

    pub(crate) fn map(
        &self,
        range: (u64, u64),
        address: Option<usize>,
        read_only: bool,
    ) -> Outcome<Mapping> {
        Ok(match &self.source {
            Source::Own(segment) => segment.map_as(range, address, read_only)?,
            Source::Attached(segment) => segment.map_as(range, address, read_only)?,
        })
    }

    /// All of its memory, for the copy engine.
    pub(crate) fn whole(&self) -> Outcome<Arc<Region>> {
        if let Some(region) = self.whole.get() {
            return Ok(region.clone());
        }
        let region = self.map((0, self.size()), None, false)?.region().clone();
        Ok(self.whole.get_or_init(|| region).clone())
    }

    fn own(&self) -> Outcome<&LocalSegment> {
        match &self.source {
            Source::Own(segment) => Ok(segment),
            Source::Attached(_) => fail(SCI_ERR_ILLEGAL_OPERATION),
        }
    }

    fn watch(&self) -> &Arc<Watch> {
        match &self.source {
            Source::Own(segment) => segment.watch(),
            Source::Attached(segment) => segment.watch(),
        }
    }
}

fn reason(event: SegmentEvent, own_node: u32) -> (Reason, u32) {
    match event {
        SegmentEvent::Connected(node) => (CONNECT, node),
        SegmentEvent::Disconnected(node) => (DISCONNECT, node),
        SegmentEvent::Remote(change) => (remote_reason(change), own_node),
    }
}

/// What a change of a connection's far end is called.
pub(crate) fn remote_reason(change: Change) -> Reason {
    match change {
        Change::Disconnect | Change::Removed | Change::Revoked => DISCONNECT,
        Change::NotOperational => NOT_OPERATIONAL,
        Change::Lost => LOST,
    }
}

fn calling(
    callback: LocalCallback,
    argument: Argument,
    flags: u32,
    own_node: u32,
) -> Outcome<(Option<Callback>, LateHandle)> {
    let handle = LateHandle::default();
    if flags & SCI_FLAG_USE_CALLBACK == 0 {
        return Ok((None, handle));
    }
    let call = callback.map_or_else(|| fail(SCI_ERR_ILLEGAL_PARAMETER), Ok)?;
    let known = handle.clone();
    let callback = Box::new(move |event| {
        let (reason, node) = reason(event, own_node);
        // SAFETY: the program gave its function for this.
        unsafe { call(argument.get(), late(&known), reason, node, 0, SCI_ERR_OK) != CANCEL }
    });
    Ok((Some(callback), handle))
}

fn create(
    sd: RawHandle,
    id: u32,
    size: usize,
    (callback, argument): (LocalCallback, Argument),
    flags: u32,
) -> Outcome<RawHandle> {
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
        if let AttachError::Refused(Refusal::OtherSize { .. }) = error {
            // The API has numbers only; this says what to do.
            eprintln!("libsisci: multicast segment {id:#x} of {size} bytes: {error}");
        }
    })?;
    Ok(add(Source::Own(segment), child, &handle))
}

fn add(source: Source, child: Child, late: &LateHandle) -> RawHandle {
    let handle = Local::table().add(|_| Local {
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

fn attach(
    sd: RawHandle,
    id: u32,
    (callback, argument): (LocalCallback, Argument),
    flags: u32,
) -> Outcome<(RawHandle, usize)> {
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

fn prepare(handle: RawHandle, adapter: u32, flags: u32) -> Outcome<()> {
    check_flags(flags, SCI_FLAG_DMA_SOURCE_ONLY | SCI_FLAG_BROADCAST | SCI_FLAG_DMA_GLOBAL)?;
    check_adapter(adapter)?;
    find::<Local>(handle)?.prepared.store(true, Ordering::Release);
    Ok(())
}

fn set_available(handle: RawHandle, adapter: u32, flags: u32) -> Outcome<()> {
    check_flags(flags, SCI_FLAG_BROADCAST)?;
    check_adapter(adapter)?;
    let local = find::<Local>(handle)?;
    let segment = local.own()?;
    if segment.kind() == SegmentKind::Private {
        return fail(SCI_ERR_ILLEGAL_OPERATION);
    }
    if !local.is_prepared() {
        return fail(SCI_ERR_SEGMENT_NOT_PREPARED);
    }
    Ok(segment.set_available()?)
}

fn set_unavailable(handle: RawHandle, adapter: u32, flags: u32) -> Outcome<()> {
    check_flags(flags, SCI_FLAG_FORCE_DISCONNECT | SCI_FLAG_NOTIFY)?;
    check_adapter(adapter)?;
    let local = find::<Local>(handle)?;
    let how = match (flags & SCI_FLAG_FORCE_DISCONNECT != 0, flags & SCI_FLAG_NOTIFY != 0) {
        (true, _) => Withdrawal::Force,
        (_, true) => Withdrawal::Notify,
        _ => Withdrawal::Quiet,
    };
    Ok(local.own()?.set_unavailable(how)?)
}

fn remove(handle: RawHandle, flags: u32) -> Outcome<()> {
    check_flags(flags, SCI_FLAG_FORCE_REMOVE)?;
    let local = find::<Local>(handle)?;
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
    let Some(local) = Local::table().take(handle) else { return fail(SCI_ERR_ILLEGAL_PARAMETER) };
    end(&local)
}

fn end(local: &Local) -> Outcome<()> {
    // First the memory, then the segment: what the program goes on to write is its own again.
    let registered = local.registered.lock().unwrap_or_else(PoisonError::into_inner).take();
    drop(registered);
    if let Source::Own(segment) = &local.source {
        segment.remove()?;
    }
    Ok(())
}

/// Removes every local segment of the process.
pub(crate) fn end_all() {
    for local in Local::table().clear() {
        // The node ends what it is not told to end.
        let _ = end(&local);
    }
}

/// The locks of it all, held while the process forks.
pub(crate) fn hold() -> Vec<Held> {
    [Local::table().hold()].into_iter().flatten().collect()
}

/// What a fork has of its parent's.
pub(crate) fn forget_all() {
    std::mem::forget(Local::table().clear());
}

fn wait(handle: RawHandle, timeout: u32, flags: u32) -> Outcome<(Reason, u32)> {
    check_flags(flags, 0)?;
    let (watch, own_node) = {
        let local = find::<Local>(handle)?;
        (local.watch().clone(), local.child.session().node())
    };
    wait_on(&watch, timeout).map(|event| reason(event, own_node))
}

/// Waits for something to happen, as programs say how long.
pub(crate) fn wait_on(watch: &Watch, timeout: u32) -> Outcome<SegmentEvent> {
    watch.wait(duration(timeout)).map_or_else(
        || fail(if watch.has_ended() { SCI_ERR_CANCELLED } else { SCI_ERR_TIMEOUT }),
        Ok,
    )
}

/// A time limit in milliseconds as programs give it.
pub(crate) fn duration(timeout: u32) -> Option<Duration> {
    (timeout != SCI_INFINITE_TIMEOUT).then(|| Duration::from_millis(timeout.into()))
}

fn share(handle: RawHandle, flags: u32) -> Outcome<()> {
    check_flags(flags, 0)?;
    Ok(find::<Local>(handle)?.own()?.share()?)
}

fn register(address: *mut c_void, size: usize, handle: RawHandle, flags: u32) -> Outcome<()> {
    check_flags(flags, SCI_FLAG_LOCK_USER_MEM)?;
    let local = find::<Local>(handle)?;
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

api! {
    /// Creates a segment.
    fn SCICreateSegment(
        sd: RawHandle,
        segment: *mut RawHandle,
        id: u32,
        size: usize,
        callback: LocalCallback,
        argument: *mut c_void,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe {
            let called = (callback, Argument(argument));
            if let Some(handle) = finish(error, create(sd, id, size, called, flags)) {
                put(segment, handle);
            }
        }
    }

    /// Makes a segment ready for others.
    fn SCIPrepareSegment(segment: RawHandle, adapter: u32, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, prepare(segment, adapter, flags)) };
    }

    /// Lets others connect.
    fn SCISetSegmentAvailable(segment: RawHandle, adapter: u32, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, set_available(segment, adapter, flags)) };
    }

    /// Lets nobody connect any more.
    fn SCISetSegmentUnavailable(segment: RawHandle, adapter: u32, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, set_unavailable(segment, adapter, flags)) };
    }

    /// Removes a segment.
    fn SCIRemoveSegment(segment: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, remove(segment, flags)) };
    }

    /// A segment's size in bytes, as it was created.
    fn SCIGetLocalSegmentSize(segment: RawHandle) -> usize {
        find::<Local>(segment).map_or(0, |local| usize::try_from(local.size()).unwrap_or(usize::MAX))
    }

    /// A segment's number.
    fn SCIGetLocalSegmentId(segment: RawHandle) -> u32 {
        find::<Local>(segment).map_or(0, |local| match &local.source {
            Source::Own(segment) => segment.id(),
            Source::Attached(segment) => segment.id(),
        })
    }

    /// Waits for something to happen to a segment.
    fn SCIWaitForLocalSegmentEvent(
        segment: RawHandle,
        node: *mut u32,
        adapter: *mut u32,
        timeout: u32,
        flags: u32,
        error: *mut u32,
    ) -> Reason {
        // SAFETY: as the caller says.
        unsafe {
            let Some((reason, source)) = finish(error, wait(segment, timeout, flags)) else {
                return 0;
            };
            put(node, source);
            put(adapter, 0);
            reason
        }
    }

    /// Lets other processes of this host attach.
    fn SCIShareSegment(segment: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, share(segment, flags)) };
    }

    /// Attaches to a segment that another process of this host shares.
    fn SCIAttachLocalSegment(
        sd: RawHandle,
        segment: *mut RawHandle,
        id: u32,
        size: *mut usize,
        callback: LocalCallback,
        argument: *mut c_void,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe {
            let called = (callback, Argument(argument));
            if let Some((handle, bytes)) = finish(error, attach(sd, id, called, flags)) {
                put(segment, handle);
                put(size, bytes);
            }
        }
    }

    /// Makes the program's own memory the memory of an empty segment.
    fn SCIRegisterSegmentMemory(
        address: *mut c_void,
        size: usize,
        segment: RawHandle,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe { finish(error, register(address, size, segment, flags)) };
    }
}
