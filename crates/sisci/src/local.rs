//! Local segments: created, prepared, offered, removed; and segments that another process of this
//! host shares.

mod calls;

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use rackbus_attach::devices::{BorrowedDevice, DeviceError, DeviceMapping};
use rackbus_attach::{
    Callback, ConnectionChange, LocalSegment, Mapping, RemoteSegment, SegmentEvent, SegmentKind,
    Watch,
};

use rackbus_memory::Region;

use crate::constants::errors::*;
use crate::constants::*;
use crate::error::{SciResult, check_flags, check_place, fail, finish, put};
use crate::forks::HeldLock;
use crate::handles::{HandleKind, RawHandle, find, kind};
use crate::library::Child;
use calls::{
    attach, create, end, prepare, register, remove, set_available, set_unavailable, share,
};

/// What happened to a segment (`sci_segment_cb_reason_t`).
pub(crate) type Reason = u32;
pub(crate) const CONNECT: Reason = 1;
pub(crate) const DISCONNECT: Reason = 2;
const NOT_OPERATIONAL: Reason = 3;
const LOST: Reason = 5;

/// What a callback answers (`sci_callback_action_t`): anything but this goes on.
pub(crate) const CANCEL: u32 = 1;

/// Called with what happens to a local segment (`sci_cb_local_segment_t`).
pub type LocalCallback =
    Option<unsafe extern "C" fn(*mut c_void, RawHandle, Reason, u32, u32, u32) -> u32>;

/// A local segment (`sci_local_segment_t`).
#[derive(Debug)]
pub struct SciLocalSegment {
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
kind!(SciLocalSegment, 2);

/// The segment is removed: no other transfer uses it.
const REMOVED: usize = 1 << (usize::BITS - 1);

/// A transfer's use of a segment.
#[derive(Debug)]
pub(crate) struct Using(Arc<SciLocalSegment>);

impl Using {
    /// Of a segment that was not removed.
    pub(crate) fn of(local: Arc<SciLocalSegment>) -> SciResult<Using> {
        let one_more = |count: usize| (count & REMOVED == 0).then_some(count + 1);
        let used = local.transfers.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more);
        used.map_or_else(|_| fail(SCI_ERR_SEGMENT_NOT_PREPARED), |_| Ok(Using(local)))
    }

    /// Whether its memory has no owner any more.
    pub(crate) fn gone(&self) -> bool {
        self.0.far_end().is_some_and(Watch::lost)
            || self.0.transfers.load(Ordering::Acquire) & REMOVED != 0
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

impl SciLocalSegment {
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
    pub(crate) fn flush(&self) -> SciResult<()> {
        match &self.source {
            Source::Own(segment) => Ok(segment.flush()?),
            Source::Attached(segment) => Ok(segment.flush_to_all()?),
        }
    }

    /// What happens at its far end, where it has one: the process that owns what was attached, or the home of the group that
    /// it is a member of. An own segment that is neither is at its end itself.
    pub(crate) fn far_end(&self) -> Option<&Watch> {
        match &self.source {
            Source::Attached(segment) => Some(segment.watch()),
            Source::Own(segment) => {
                (segment.kind() == SegmentKind::Group).then(|| &**segment.watch())
            }
        }
    }

    /// Whether what was attached is its owner's no more.
    pub(crate) fn is_left(&self) -> bool {
        matches!(&self.source, Source::Attached(segment) if segment.watch().lost())
    }

    /// Whether its home may be another machine, which has what is stored only once that was sent.
    pub(crate) fn is_far(&self) -> bool {
        match &self.source {
            Source::Attached(segment) => segment.is_far(),
            Source::Own(segment) => {
                segment.kind() == SegmentKind::Group && self.child.session().between_machines()
            }
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
    ) -> SciResult<Mapping> {
        Ok(match &self.source {
            Source::Own(segment) => segment.map_as(range, address, read_only)?,
            Source::Attached(segment) => segment.map_as(range, address, read_only)?,
        })
    }

    /// Lets a device reach a part of it.
    pub(crate) fn map_for(
        &self,
        device: &BorrowedDevice,
        range: (u64, u64),
    ) -> Result<DeviceMapping, DeviceError> {
        match &self.source {
            Source::Own(segment) => device.map_local(segment, range),
            Source::Attached(segment) => device.map_remote(segment, range),
        }
    }

    /// All of its memory, for the copy engine.
    pub(crate) fn whole(&self) -> SciResult<Arc<Region>> {
        if let Some(region) = self.whole.get() {
            return Ok(region.clone());
        }
        let region = self.map((0, self.size()), None, false)?.region().clone();
        Ok(self.whole.get_or_init(|| region).clone())
    }

    fn own(&self) -> SciResult<&LocalSegment> {
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
        SegmentEvent::Attempted => (CONNECT, own_node),
    }
}

/// What a change of a connection's far end is called.
pub(crate) fn remote_reason(change: ConnectionChange) -> Reason {
    match change {
        ConnectionChange::Disconnect | ConnectionChange::Removed | ConnectionChange::Revoked => {
            DISCONNECT
        }
        ConnectionChange::NotOperational => NOT_OPERATIONAL,
        ConnectionChange::Lost => LOST,
    }
}

fn calling(
    callback: LocalCallback,
    argument: Argument,
    flags: u32,
    own_node: u32,
) -> SciResult<(Option<Callback>, LateHandle)> {
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

/// Removes every local segment of the process.
pub(crate) fn end_all() {
    for local in SciLocalSegment::table().clear() {
        // The node ends what it is not told to end.
        let _ = end(&local);
    }
}

/// The locks of it all, held while the process forks.
pub(crate) fn hold() -> Vec<Option<HeldLock>> {
    vec![SciLocalSegment::table().hold()]
}

/// What a fork has of its parent's.
pub(crate) fn forget_all() {
    std::mem::forget(SciLocalSegment::table().clear());
}

fn wait(handle: RawHandle, timeout: u32, flags: u32) -> SciResult<(Reason, u32)> {
    check_flags(flags, 0)?;
    let (watch, own_node) = {
        let local = find::<SciLocalSegment>(handle)?;
        (local.watch().clone(), local.child.session().node())
    };
    wait_on(&watch, timeout).map(|event| reason(event, own_node))
}

/// Waits for something to happen, as programs say how long. Not where a callback is told what happens: nothing would ever
/// come here.
pub(crate) fn wait_on(watch: &Watch, timeout: u32) -> SciResult<SegmentEvent> {
    if watch.has_callback() {
        return fail(SCI_ERR_ILLEGAL_OPERATION);
    }
    watch.wait(duration(timeout)).map_or_else(
        || fail(if watch.has_ended() { SCI_ERR_CANCELLED } else { SCI_ERR_TIMEOUT }),
        Ok,
    )
}

/// A time limit in milliseconds as programs give it.
pub(crate) fn duration(timeout: u32) -> Option<Duration> {
    (timeout != SCI_INFINITE_TIMEOUT).then(|| Duration::from_millis(timeout.into()))
}

api! {
    /// Makes a segment of so many bytes, which others cannot connect to yet.
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
            let made = check_place(segment).and_then(|()| create(sd, id, size, called, flags));
            if let Some(handle) = finish(error, made) {
                put(segment, handle);
            }
        }
    }

    /// Makes a segment ready for others.
    fn SCIPrepareSegment(segment: RawHandle, adapter: u32, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, prepare(segment, adapter, flags)) };
    }

    /// Lets other hosts connect to the segment by its number.
    fn SCISetSegmentAvailable(segment: RawHandle, adapter: u32, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, set_available(segment, adapter, flags)) };
    }

    /// Lets nobody connect any more.
    fn SCISetSegmentUnavailable(segment: RawHandle, adapter: u32, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, set_unavailable(segment, adapter, flags)) };
    }

    /// Removes a segment; who is connected is told, or with the force flag cut off.
    fn SCIRemoveSegment(segment: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, remove(segment, flags)) };
    }

    /// A segment's size in bytes, as it was created.
    fn SCIGetLocalSegmentSize(segment: RawHandle) -> usize {
        find::<SciLocalSegment>(segment).map_or(0, |local| usize::try_from(local.size()).unwrap_or(usize::MAX))
    }

    /// The number by which others connect to a segment; 0 for no handle.
    fn SCIGetLocalSegmentId(segment: RawHandle) -> u32 {
        find::<SciLocalSegment>(segment).map_or(0, |local| match &local.source {
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
            let attached = check_place(segment).and_then(|()| attach(sd, id, called, flags));
            if let Some((handle, bytes)) = finish(error, attached) {
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
