//! The library as a whole: initialised and terminated, descriptors, and what is known of hosts.

use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rackbus_attach::{NodeAddress, Session};

use crate::constants::errors::*;
use crate::constants::*;
use crate::error::{
    Code, SciResult, check_adapter, check_flags, check_place, explain, fail, finish, put,
};
use crate::forks::HeldLock;
use crate::handles::{HandleKind, RawHandle, find, kind};

/// Room of a list of node ids, the zero at its end included.
const NODE_LIST: usize = 8;
/// The sort of adapter that every host of a rack has.
const RACKBUS_ADAPTER: c_int = 1;

static INITIALIZED: AtomicBool = AtomicBool::new(false);
/// The process that attached, and its session. Never held while a session is opened, which may take many seconds: a fork
/// waits for it.
static SESSION: Mutex<Option<(u32, Session)>> = Mutex::new(None);

/// What a program opens to use an adapter (`sci_desc_t`).
#[derive(Debug)]
pub struct SciDescriptor {
    session: Session,
    children: AtomicUsize,
}
kind!(SciDescriptor, 1);

/// Something that was made with a descriptor, which cannot be closed before it.
#[derive(Debug)]
pub struct Child(Arc<SciDescriptor>);

impl Child {
    pub(crate) fn of(sd: RawHandle) -> SciResult<Child> {
        if !INITIALIZED.load(Ordering::Acquire) {
            return fail(SCI_ERR_NOT_INITIALIZED);
        }
        let descriptor = find::<SciDescriptor>(sd)?;
        descriptor.children.fetch_add(1, Ordering::AcqRel);
        Ok(Child(descriptor))
    }

    /// The same once more.
    pub(crate) fn again(&self) -> Child {
        self.0.children.fetch_add(1, Ordering::AcqRel);
        Child(self.0.clone())
    }

    pub(crate) fn session(&self) -> &Session {
        &self.0.session
    }

    pub(crate) fn is_of(&self, descriptor: &SciDescriptor) -> bool {
        std::ptr::eq(&*self.0, descriptor)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.0.children.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Whether the process is on a host that is a machine of its own.
static BETWEEN_MACHINES: AtomicBool = AtomicBool::new(false);

/// Whether stores to remote segments go to other machines. Takes no lock.
pub(crate) fn between_machines() -> bool {
    BETWEEN_MACHINES.load(Ordering::Acquire)
}

/// The process' session with its node. A new one where there is none yet, the node has started
/// anew, or the process is a fork of the one that had it.
pub(crate) fn session() -> SciResult<Session> {
    if crate::forks::is_unusable() {
        return fail(SCI_ERR_NOT_INITIALIZED);
    }
    forget_parents_session();
    if let Some(session) = current(&lock_session()) {
        return Ok(session);
    }
    let opened = NodeAddress::from_environment()
        .map_err(|error| error.to_string())
        .and_then(|place| Session::open(place).map_err(|error| error.to_string()));
    match opened {
        Ok(opened) => Ok(begin(opened)),
        Err(error) => {
            // The API has numbers only; this says what to do.
            explain(error);
            fail(SCI_ERR_NO_LINK_ACCESS)
        }
    }
}

fn lock_session() -> MutexGuard<'static, Option<(u32, Session)>> {
    SESSION.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The session of this process, while its node is there.
fn current(session: &Option<(u32, Session)>) -> Option<Session> {
    let (owner, session) = session.as_ref()?;
    (*owner == std::process::id() && !session.is_gone()).then(|| session.clone())
}

/// Makes a session the process', unless another thread that opened one at the same time was first: then that thread's, and
/// this one ends.
fn begin(opened: Session) -> Session {
    let mut session = lock_session();
    if let Some(first) = current(&session) {
        return first;
    }
    BETWEEN_MACHINES.store(opened.between_machines(), Ordering::Release);
    *session = Some((std::process::id(), opened.clone()));
    opened
}

/// Lets go of a session that is a parent's: its sockets are the parent's, too. As long as this process had them, the node
/// would not see that the parent ends.
fn abandon(session: Option<(u32, Session)>) {
    if let Some((_, session)) = &session {
        session.abandon_in_fork();
    }
    std::mem::forget(session);
}

/// Lets go of a session that is a parent's, with all that was had through it; whether there was one.
fn forget_parents_session() -> bool {
    // Held to the end: nobody else begins a session before what was the parent's is gone.
    let mut session = lock_session();
    let parents = session.take_if(|(owner, _)| *owner != std::process::id());
    let found = parents.is_some();
    if found {
        abandon(parents);
        forget_parents();
    }
    found
}

fn initialize(flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    crate::forks::expect();
    session()?;
    INITIALIZED.store(true, Ordering::Release);
    Ok(())
}

fn open(flags: u32) -> SciResult<RawHandle> {
    check_flags(flags, SCI_FLAG_THREAD_SAFE)?;
    if !INITIALIZED.load(Ordering::Acquire) {
        return fail(SCI_ERR_NOT_INITIALIZED);
    }
    let session = session()?;
    let children = AtomicUsize::new(0);
    Ok(SciDescriptor::table().add(|_| SciDescriptor { session, children }))
}

fn close(sd: RawHandle, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    let descriptor = find::<SciDescriptor>(sd)?;
    crate::remote::release_lost(&descriptor);
    if descriptor.children.load(Ordering::Acquire) > 0 {
        return fail(SCI_ERR_BUSY);
    }
    SciDescriptor::table().take(sd).map(drop).ok_or(Code(SCI_ERR_ILLEGAL_PARAMETER))
}

/// The locks of it all, held while the process forks.
pub(crate) fn hold() -> Vec<Option<HeldLock>> {
    vec![crate::forks::hold_mutex(&SESSION), SciDescriptor::table().hold()]
}

/// The process is a new fork: nothing that it finds is its own. Takes no lock.
pub(crate) fn end_in_fork() {
    INITIALIZED.store(false, Ordering::Release);
    crate::copy::forget_last();
}

/// The same, with all locks free: forgets what is the parent's.
pub(crate) fn begin_anew() {
    end_in_fork();
    abandon(lock_session().take());
    forget_parents();
}

/// What a fork has of its parent's: handles that are not its, and threads that it does not have.
/// Nothing of it is ended, as that would be the parent's.
fn forget_parents() {
    crate::interrupts::forget_all();
    crate::dma::forget_all();
    crate::copy::forget_all();
    crate::maps::forget_all();
    crate::devices::forget_all();
    crate::remote::forget_all();
    crate::local::forget_all();
    std::mem::forget(SciDescriptor::table().clear());
}

/// Ends everything that was not ended, in the order in which things need each other.
fn terminate() {
    INITIALIZED.store(false, Ordering::Release);
    if crate::forks::is_unusable() || forget_parents_session() {
        return;
    }
    crate::interrupts::end_all();
    crate::dma::end_all();
    crate::copy::end_all();
    crate::maps::end_all();
    crate::devices::end_all();
    crate::remote::end_all();
    crate::local::end_all();
    drop(SciDescriptor::table().clear());
    let session = lock_session().take();
    if let Some((_, session)) = session {
        session.close();
    }
}

/// A node id as programs give it.
pub(crate) fn node_id(session: &Session, node: u32) -> SciResult<u32> {
    match node {
        SCI_LOCAL_HOST => Ok(session.node()),
        0 | 0x1_0000.. => fail(SCI_ERR_ILLEGAL_NODEID),
        node => Ok(node),
    }
}

fn local_node_id(adapter: u32, flags: u32) -> SciResult<u32> {
    check_flags(flags, 0)?;
    check_adapter(adapter)?;
    Ok(session()?.node())
}

/// Node ids of a host by its name, as a list with a zero at its end.
fn ids_of(name: *const c_char, flags: u32) -> SciResult<[u32; NODE_LIST]> {
    check_flags(flags, 0)?;
    if name.is_null() {
        return fail(SCI_ERR_ILLEGAL_PARAMETER);
    }
    // SAFETY: a program's name is a C string.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let mut list = [0; NODE_LIST];
    let session = session()?;
    if let Some((node, _)) = session.hosts().iter().find(|(_, host)| *host == name) {
        list[0] = *node;
    }
    Ok(list)
}

fn probe(sd: RawHandle, adapter: u32, node: u32, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    check_adapter(adapter)?;
    let child = Child::of(sd)?;
    let node = node_id(child.session(), node)?;
    child.session().probe(node).map_err(|error| match Code::from(error) {
        Code(SCI_ERR_NODE_NOT_RESPONDING) => Code(SCI_ERR_NO_REMOTE_LINK_ACCESS),
        other => other,
    })
}

api! {
    /// Makes the library ready; it is called before anything else.
    fn SCIInitialize(flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, initialize(flags)) };
    }

    /// Ends everything that the process has through the library.
    fn SCITerminate() {
        terminate();
    }

    /// Opens a descriptor, by which everything else is made.
    fn SCIOpen(sd: *mut RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe {
            if let Some(handle) = finish(error, check_place(sd).and_then(|()| open(flags))) {
                put(sd, handle);
            }
        }
    }

    /// Closes a descriptor; what was made by it has to be removed before.
    fn SCIClose(sd: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, close(sd, flags)) };
    }

    /// This host's node id.
    fn SCIGetLocalNodeId(adapter: u32, node: *mut u32, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe {
            if let Some(id) = finish(error, local_node_id(adapter, flags)) {
                put(node, id);
            }
        }
    }

    /// The node ids of a host, by its name.
    fn SCIGetNodeIdByAdapterName(
        name: *const c_char,
        list: *mut [u32; NODE_LIST],
        kind: *mut c_int,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe {
            // Programs look at the list, whatever the error says.
            let ids = finish(error, ids_of(name, flags)).unwrap_or_default();
            put(list, ids);
            put(kind, if ids[0] == 0 { 0 } else { RACKBUS_ADAPTER });
        }
    }

    /// The same, with the local adapter that leads there.
    fn SCIGetNodeInfoByAdapterName(
        name: *const c_char,
        adapter: *mut u32,
        list: *mut [u32; NODE_LIST],
        kind: *mut c_int,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe {
            SCIGetNodeIdByAdapterName(name, list, kind, flags, error);
            put(adapter, 0);
        }
    }

    /// What an error means.
    fn SCIGetErrorString(code: u32) -> *const c_char {
        text(code).as_ptr()
    }

    /// The name of a sort of adapter.
    fn SCIGetAdapterTypeString(kind: u32) -> *const c_char {
        adapter_name(kind).as_ptr()
    }

    /// The name of a family of adapters.
    fn SCIGetAdapterFamilyString(kind: u32) -> *const c_char {
        adapter_name(kind).as_ptr()
    }

    /// Whether a host can be reached.
    fn SCIProbeNode(sd: RawHandle, adapter: u32, node: u32, flags: u32, error: *mut u32) -> c_int {
        // SAFETY: as the caller says.
        unsafe { finish(error, probe(sd, adapter, node, flags)) }.map_or(0, |()| 1)
    }
}

fn adapter_name(kind: u32) -> &'static CStr {
    if kind == RACKBUS_ADAPTER as u32 { c"rackbus" } else { c"unknown" }
}
