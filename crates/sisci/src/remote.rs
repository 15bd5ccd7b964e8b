//! Remote segments: connected to, watched, disconnected from.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rackbus_attach::{
    AttachError, BROADCAST_NODE, Callback, ConnectionChange, RemoteSegment, SegmentEvent, Watch,
};
use rackbus_memory::{Region, threads};

use crate::calling::Calling;
use crate::constants::errors::*;
use crate::constants::*;
use crate::devices::DeviceUse;
use crate::error::{Code, SciResult, check_adapter, check_flags, check_place, fail, finish, put};
use crate::forks::{HeldLock, is_unusable};
use crate::handles::{HandleKind, RawHandle, find, kind};
use crate::library::{Child, SciDescriptor, node_id};
use crate::local::{Argument, CANCEL, CONNECT, LateHandle, Reason, late, remote_reason, wait_on};

/// Called with what happens to a remote segment (`sci_cb_remote_segment_t`).
pub type RemoteCallback = Option<unsafe extern "C" fn(*mut c_void, RawHandle, Reason, u32) -> u32>;

/// A remote segment (`sci_remote_segment_t`).
#[derive(Debug)]
pub struct SciRemoteSegment {
    /// Not there while a connection is being made in the background.
    segment: Arc<OnceLock<RemoteSegment>>,
    /// What it was asked to be.
    asked: (u32, u32),
    /// Number of mappings that the process has of it.
    pub(crate) mapped: AtomicUsize,
    /// All of it, for the copy engine.
    whole: OnceLock<Arc<Region>>,
    /// Where the program is called for it.
    calling: Arc<Calling>,
    /// Until it is disconnected, or its descriptor is closed when it leads nowhere any more.
    child: Mutex<Option<Child>>,
    /// The device whose memory it is, if it is one's, until it is disconnected.
    device: Mutex<Option<DeviceUse>>,
}
kind!(SciRemoteSegment, 3);

/// How a connection's far end went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Departure {
    /// The memory is where it was.
    InPlace,
    /// The memory was taken away, or is out of reach.
    Away,
}

impl Departure {
    /// How what is watched went, if it did.
    pub(crate) fn of(watch: &Watch) -> Option<Departure> {
        Some(match watch.ending()? {
            ConnectionChange::Removed | ConnectionChange::Lost if !watch.is_unreachable() => {
                Departure::InPlace
            }
            _ => Departure::Away,
        })
    }
}

/// What those were asked to be that were disconnected last: programs ask after it.
static FORMER: Mutex<VecDeque<(usize, (u32, u32))>> = Mutex::new(VecDeque::new());
/// How many are remembered.
const MOST_FORMER: usize = 1024;

/// The node and the number that a connection was asked for, also after it.
fn asked(handle: RawHandle) -> Option<(u32, u32)> {
    if let Ok(remote) = find::<SciRemoteSegment>(handle) {
        return Some(remote.asked);
    }
    if is_unusable() {
        return None;
    }
    let former = FORMER.lock().unwrap_or_else(PoisonError::into_inner);
    former.iter().rev().find(|(it, _)| *it == handle.addr()).map(|(_, asked)| *asked)
}

impl SciRemoteSegment {
    /// The connected segment, or the error that a program gets without one.
    pub(crate) fn segment(&self) -> SciResult<&RemoteSegment> {
        self.segment.get().map_or_else(|| fail(SCI_ERR_NOT_CONNECTED), Ok)
    }

    /// All of its memory, for the copy engine.
    pub(crate) fn whole(&self) -> SciResult<Arc<Region>> {
        if let Some(region) = self.whole.get() {
            return Ok(region.clone());
        }
        let segment = self.segment()?;
        let region = segment.map(0, segment.size())?.region().clone();
        Ok(self.whole.get_or_init(|| region).clone())
    }

    /// Waits until what was stored before is at its owner's. Between machines only that takes any time.
    pub(crate) fn flush(&self) -> SciResult<()> {
        Ok(self.segment()?.flush()?)
    }

    /// Whether the segment is gone for good.
    pub(crate) fn lost(&self) -> bool {
        self.watch().is_some_and(Watch::lost)
    }

    /// What happens to the segment, once it is connected.
    pub(crate) fn watch(&self) -> Option<&Watch> {
        Some(self.segment.get()?.watch())
    }

    /// Takes what keeps the descriptor open.
    fn child(&self) -> MutexGuard<'_, Option<Child>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nobody is called for it any more.
    fn end(&self) {
        // First, so that a call that waits for another one to return does not keep the watch.
        self.calling.end();
        if let Some(segment) = self.segment.get() {
            segment.end_watch();
        }
        drop(self.child().take());
        drop(self.device.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// Connections to what is gone do not keep their descriptor open.
pub(crate) fn release_lost(descriptor: &SciDescriptor) {
    for remote in SciRemoteSegment::table().all().iter().filter(|remote| remote.lost()) {
        drop(remote.child().take_if(|child| child.is_of(descriptor)));
    }
}

/// The program's function, to be called with what happened and how that went.
struct Call {
    function: unsafe extern "C" fn(*mut c_void, RawHandle, Reason, u32) -> u32,
    argument: Argument,
    calling: Arc<Calling>,
}

impl Call {
    /// Whether the program wants to be called again.
    fn call(&self, handle: RawHandle, reason: Reason, status: u32) -> bool {
        let (function, argument) = (self.function, self.argument.get());
        // SAFETY: the program gave its function for this.
        let answer = self.calling.during(|| unsafe { function(argument, handle, reason, status) });
        answer.is_some_and(|answer| answer != CANCEL)
    }
}

struct ConnectRequest {
    node: u32,
    id: u32,
    timeout: u32,
}

fn connect(
    sd: RawHandle,
    wanted: ConnectRequest,
    adapter: u32,
    (callback, argument): (RemoteCallback, Argument),
    flags: u32,
) -> SciResult<RawHandle> {
    let known = SCI_FLAG_USE_CALLBACK | SCI_FLAG_ASYNCHRONOUS_CONNECT | SCI_FLAG_BROADCAST;
    check_flags(flags, known)?;
    check_adapter(adapter)?;
    let child = Child::of(sd)?;
    let node = match flags & SCI_FLAG_BROADCAST {
        0 => node_id(child.session(), wanted.node)?,
        // Whichever member is named: the group is what is meant.
        _ => BROADCAST_NODE,
    };
    let wanted = ConnectRequest { node, ..wanted };
    let calling = Arc::<Calling>::default();
    let call = match (flags & SCI_FLAG_USE_CALLBACK, callback) {
        (0, _) => None,
        (_, Some(function)) => Some(Call { function, argument, calling: calling.clone() }),
        (_, None) => return fail(SCI_ERR_ILLEGAL_PARAMETER),
    };
    let known = LateHandle::default();
    let later = known.clone();
    let attempt = Attempt::default();
    let how = attempt.clone();
    let watched: Option<Callback> = call.map(|call| {
        Box::new(move |event| match event {
            SegmentEvent::Remote(change) => {
                call.call(late(&later), remote_reason(change), SCI_ERR_OK)
            }
            SegmentEvent::Attempted => call.call(late(&later), CONNECT, how.outcome()),
            SegmentEvent::Connected(_) | SegmentEvent::Disconnected(_) => true,
        }) as Callback
    });
    if flags & SCI_FLAG_ASYNCHRONOUS_CONNECT != 0 {
        let Some(watched) = watched else { return fail(SCI_ERR_ILLEGAL_PARAMETER) };
        return connect_behind(wanted, (child, calling), (watched, attempt), known);
    }
    let segment = Arc::new(OnceLock::new());
    let made = child.session().connect_watched(node, wanted.id, wanted.timeout, watched)?;
    // Set once, here.
    let _ = segment.set(made);
    Ok(add(segment, &wanted, (child, calling), &known))
}

/// How an attempt to connect in the background ended: its error, [`SCI_ERR_OK`] too.
#[derive(Debug, Clone, Default)]
struct Attempt(Arc<OnceLock<u32>>);

impl Attempt {
    fn ended(&self, outcome: u32) {
        // There is one end.
        let _ = self.0.set(outcome);
    }

    /// Waits until it is known: whoever had its end told is just about to say how.
    fn outcome(&self) -> u32 {
        loop {
            if let Some(outcome) = self.0.get() {
                return *outcome;
            }
            std::thread::yield_now();
        }
    }
}

/// Connects on a thread of its own. The program is told how that went where it is told of everything else, and before it.
fn connect_behind(
    wanted: ConnectRequest,
    (child, calling): (Child, Arc<Calling>),
    (callback, attempt): (Callback, Attempt),
    known: LateHandle,
) -> SciResult<RawHandle> {
    // Not the descriptor: it may be closed when the connection was ended before it was made.
    let session = child.session().clone();
    let segment = Arc::new(OnceLock::new());
    let handle = add(segment.clone(), &wanted, (child, calling), &known);
    let connect = move || {
        let keep = |made: Result<RemoteSegment, AttachError>| {
            let outcome = match made {
                Ok(made) => {
                    // Set once, here.
                    let _ = segment.set(made);
                    SCI_ERR_OK
                }
                Err(error) => Code::from(error).0,
            };
            attempt.ended(outcome);
        };
        session.connect_attempt(wanted.node, wanted.id, wanted.timeout, callback, keep);
    };
    match threads::spawn("rackbus connect", connect) {
        Ok(_) => Ok(handle),
        Err(_) => {
            SciRemoteSegment::table().take(handle);
            fail(SCI_ERR_SYSTEM)
        }
    }
}

fn add(
    segment: Arc<OnceLock<RemoteSegment>>,
    wanted: &ConnectRequest,
    (child, calling): (Child, Arc<Calling>),
    late: &LateHandle,
) -> RawHandle {
    let asked = (wanted.node, wanted.id);
    let mapped = AtomicUsize::new(0);
    let handle = SciRemoteSegment::table().add(|_| {
        let (whole, child) = (OnceLock::new(), Mutex::new(Some(child)));
        SciRemoteSegment { segment, asked, mapped, whole, calling, child, device: Mutex::default() }
    });
    // Set once, here.
    let _ = late.set(handle.addr());
    handle
}

/// A handle of memory of a device.
pub(crate) fn add_of_device(segment: RemoteSegment, child: Child, device: DeviceUse) -> RawHandle {
    let asked = (segment.node(), segment.id());
    let (segment, calling) = (Arc::new(OnceLock::from(segment)), Arc::default());
    let (mapped, whole) = (AtomicUsize::new(0), OnceLock::new());
    let (child, device) = (Mutex::new(Some(child)), Mutex::new(Some(device)));
    SciRemoteSegment::table().add(|_| SciRemoteSegment {
        segment,
        asked,
        mapped,
        whole,
        calling,
        child,
        device,
    })
}

fn disconnect(handle: RawHandle, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    let remote = find::<SciRemoteSegment>(handle)?;
    if remote.mapped.load(Ordering::Acquire) > 0 && !remote.lost() {
        return fail(SCI_ERR_BUSY);
    }
    SciRemoteSegment::table().take(handle).ok_or(Code(SCI_ERR_ILLEGAL_PARAMETER))?;
    let mut former = FORMER.lock().unwrap_or_else(PoisonError::into_inner);
    if former.len() >= MOST_FORMER {
        former.pop_front();
    }
    former.push_back((handle.addr(), remote.asked));
    drop(former);
    remote.end();
    Ok(())
}

/// Disconnects every remote segment of the process.
pub(crate) fn end_all() {
    SciRemoteSegment::table().clear().iter().for_each(|remote| remote.end());
}

/// The locks of it all, held while the process forks.
pub(crate) fn hold() -> Vec<Option<HeldLock>> {
    vec![SciRemoteSegment::table().hold(), crate::forks::hold_mutex(&FORMER)]
}

/// What a fork has of its parent's.
pub(crate) fn forget_all() {
    std::mem::forget(SciRemoteSegment::table().clear());
}

fn wait(handle: RawHandle, timeout: u32, flags: u32) -> SciResult<Reason> {
    check_flags(flags, 0)?;
    let watch: Arc<Watch> = find::<SciRemoteSegment>(handle)?.segment()?.watch().clone();
    match wait_on(&watch, timeout)? {
        SegmentEvent::Remote(change) => Ok(remote_reason(change)),
        // Only callbacks are told of attempts.
        SegmentEvent::Connected(_) | SegmentEvent::Disconnected(_) | SegmentEvent::Attempted => {
            fail(SCI_ERR_ILLEGAL_OPERATION)
        }
    }
}

api! {
    /// Connects to a segment.
    fn SCIConnectSegment(
        sd: RawHandle,
        segment: *mut RawHandle,
        node: u32,
        id: u32,
        adapter: u32,
        callback: RemoteCallback,
        argument: *mut c_void,
        timeout: u32,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe {
            let (wanted, called) = (ConnectRequest { node, id, timeout }, (callback, Argument(argument)));
            let made =
                check_place(segment).and_then(|()| connect(sd, wanted, adapter, called, flags));
            if let Some(handle) = finish(error, made) {
                put(segment, handle);
            }
        }
    }

    /// Disconnects from a segment.
    fn SCIDisconnectSegment(segment: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, disconnect(segment, flags)) };
    }

    /// A segment's size in bytes, as it was created.
    fn SCIGetRemoteSegmentSize(segment: RawHandle) -> usize {
        let size = |remote: Arc<SciRemoteSegment>| Ok(remote.segment()?.size());
        let size = find::<SciRemoteSegment>(segment).and_then(size).unwrap_or(0);
        usize::try_from(size).unwrap_or(usize::MAX)
    }

    /// A segment's number on its host.
    fn SCIGetRemoteSegmentId(segment: RawHandle) -> u32 {
        asked(segment).map_or(0, |asked| asked.1)
    }

    /// The host that a segment is on.
    fn SCIGetRemoteSegmentNodeId(segment: RawHandle) -> u32 {
        asked(segment).map_or(0, |asked| asked.0)
    }

    /// Waits for something to happen to a segment.
    fn SCIWaitForRemoteSegmentEvent(
        segment: RawHandle,
        status: *mut u32,
        timeout: u32,
        flags: u32,
        error: *mut u32,
    ) -> Reason {
        // SAFETY: as the caller says.
        unsafe {
            let Some(reason) = finish(error, wait(segment, timeout, flags)) else { return 0 };
            put(status, SCI_ERR_OK);
            reason
        }
    }
}
