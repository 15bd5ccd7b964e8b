//! An endpoint of libfabric with all that belongs to it, for one lane.
//!
//! One thread at a time uses it (`FI_THREAD_DOMAIN`): whoever has it by `&mut`, or behind a lock.

use std::ffi::{CStr, CString, c_int, c_void};
use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::ptr::{null, null_mut};
use std::sync::Arc;

use rackbus_memory::Region;

use crate::abi::{
    self, Av, AvAttr, Cq, CqAttr, CqErrEntry, Ep, Fid, FidDomain, FidFabric, Info, Mr,
};
use crate::{Library, RmaError};

/// Bytes of the longest address that is taken.
pub(crate) const MAX_ADDRESS: usize = 256;

/// What the memory is registered for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RegistrationUse {
    /// Transfers of this side.
    Local,
    /// Those of the other side.
    Exposed,
}

/// A provider that libfabric found, with what it needs to open endpoints.
pub(crate) struct FoundProvider {
    library: &'static Library,
    list: *mut Info,
    provider: String,
    /// The end of a write means that its data are in memory at the other side.
    delivers: bool,
}

// SAFETY: the list belongs to this value alone, and the library may be called from any thread.
unsafe impl Send for FoundProvider {}

impl FoundProvider {
    /// The best way by `provider`, from the interface with address `from` where its addresses are such.
    pub(crate) fn find(
        library: &'static Library,
        provider: &str,
        from: Option<IpAddr>,
    ) -> Result<FoundProvider, RmaError> {
        let core = provider.split(';').next().unwrap_or_default();
        // Others have no addresses of the Internet.
        let from = from.filter(|_| matches!(core, "tcp" | "verbs" | "sockets"));
        let flags = [abi::FI_DELIVERY_COMPLETE, 0];
        let sources = [from, None];
        let tries = sources.iter().skip(usize::from(from.is_none()));
        let none = || RmaError::Provider(provider.to_owned());
        tries
            .flat_map(|source| flags.map(|flags| (source, flags)))
            .find_map(|(source, flags)| FoundProvider::ask(library, provider, *source, flags))
            .ok_or_else(none)
    }

    fn ask(
        library: &'static Library,
        provider: &str,
        from: Option<IpAddr>,
        op_flags: u64,
    ) -> Option<FoundProvider> {
        let name = CString::new(provider).ok()?;
        let node = from.map(|ip| CString::new(ip.to_string())).transpose().ok()?;
        let mut list = null_mut();
        // SAFETY: hints are made by the library with all their parts, which are filled in here; the name is memory of
        // malloc, as the library frees it with the hints; the node's name outlives the call.
        let status = unsafe {
            let hints = (library.dupinfo)(null());
            if hints.is_null() {
                return None;
            }
            (*hints).caps = abi::FI_MSG | abi::FI_RMA;
            (*hints).mode = abi::FI_CONTEXT | abi::FI_CONTEXT2 | abi::FI_RX_CQ_DATA;
            (*(*hints).tx_attr).op_flags = op_flags;
            (*(*hints).ep_attr).kind = abi::FI_EP_RDM;
            let domain = (*hints).domain_attr;
            (*domain).threading = abi::FI_THREAD_DOMAIN;
            (*domain).mr_mode = abi::FI_MR_LOCAL
                | abi::FI_MR_VIRT_ADDR
                | abi::FI_MR_ALLOCATED
                | abi::FI_MR_PROV_KEY
                | abi::FI_MR_ENDPOINT;
            (*(*hints).fabric_attr).prov_name = libc::strdup(name.as_ptr());
            let (node, flags) = match &node {
                Some(node) => (node.as_ptr(), abi::FI_SOURCE),
                None => (null(), 0),
            };
            let status = (library.getinfo)(abi::VERSION, node, null(), flags, hints, &raw mut list);
            (library.freeinfo)(hints);
            status
        };
        if status != 0 || list.is_null() {
            return None;
        }
        // SAFETY: an entry of the library's list has all its parts, and its name ends with zero.
        let found = unsafe { CStr::from_ptr((*(*list).fabric_attr).prov_name) };
        let provider = found.to_string_lossy().into_owned();
        Some(FoundProvider { library, list, provider, delivers: op_flags != 0 })
    }

    /// Name of the libfabric provider.
    pub(crate) fn provider(&self) -> &str {
        &self.provider
    }
}

impl Drop for FoundProvider {
    fn drop(&mut self) {
        // SAFETY: the list is this value's.
        unsafe { (self.library.freeinfo)(self.list) };
    }
}

/// What an operation's context points to: room that providers use as they like (`struct fi_context2`).
#[repr(C)]
struct Context([*mut c_void; 8]);

/// An endpoint of libfabric's. Its parts are closed in the order that libfabric documents.
pub(crate) struct RmaEndpoint {
    library: &'static Library,
    found: FoundProvider,
    fabric: *mut FidFabric,
    domain: *mut FidDomain,
    av: *mut Av,
    cq: *mut Cq,
    ep: *mut Ep,
    mr: *mut Mr,
    region: Option<Arc<Region>>,
    /// Those of transfers; the library writes to them until it has released the endpoint.
    contexts: Box<[Context]>,
    wake: Option<OwnedFd>,
    mr_mode: c_int,
    /// Whether the library has released it, once it was to.
    closed: Option<bool>,
}

// SAFETY: all pointers are to objects that belong to this value alone and may be used from any thread, by one at a
// time; the type is not `Sync`.
unsafe impl Send for RmaEndpoint {}

impl std::fmt::Debug for RmaEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RmaEndpoint")
            .field("provider", &self.found.provider)
            .finish_non_exhaustive()
    }
}

/// Calls a function of an object's table.
macro_rules! call {
    ($object:expr, $table:ident . $name:ident ( $($argument:expr),* )) => {{
        // SAFETY: an object that the library made has its tables, which stay as long as it does; an entry is there
        // when the table is large enough, which those of version 1.17 and later are for what is used here.
        let function = unsafe { (*(*$object).$table).$name };
        match function {
            // SAFETY: the arguments are of the documented types, and what they point to outlives the call.
            Some(function) => unsafe { function($($argument),*) },
            None => -libc::ENOSYS as _,
        }
    }};
}

impl RmaEndpoint {
    /// One by `provider` for so many `transfers` at once, from the interface with address `from` where its addresses are
    /// such.
    pub(crate) fn open(
        provider: &str,
        from: Option<IpAddr>,
        transfers: usize,
    ) -> Result<RmaEndpoint, RmaError> {
        let library = Library::load()?;
        let found = FoundProvider::find(library, provider, from)?;
        let info = found.list;
        // SAFETY: an entry of the library's list has all its parts.
        let mr_mode = unsafe { (*(*info).domain_attr).mr_mode };
        let mut endpoint = RmaEndpoint {
            library,
            found,
            fabric: null_mut(),
            domain: null_mut(),
            av: null_mut(),
            cq: null_mut(),
            ep: null_mut(),
            mr: null_mut(),
            region: None,
            contexts: (0..transfers).map(|_| Context([null_mut(); 8])).collect(),
            wake: None,
            mr_mode,
            closed: None,
        };
        // SAFETY: the entry is the library's, and the place takes the answer.
        let status =
            unsafe { (library.fabric)((*info).fabric_attr, &raw mut endpoint.fabric, null_mut()) };
        library.check("fi_fabric", status)?;
        let status = call!(
            endpoint.fabric,
            ops.domain(endpoint.fabric, info, &raw mut endpoint.domain, null_mut())
        );
        library.check("fi_domain", status)?;
        let mut attributes = AvAttr {
            kind: abi::FI_AV_TABLE,
            rx_ctx_bits: 0,
            count: 1,
            ep_per_node: 0,
            name: null(),
            map_addr: null_mut(),
            flags: 0,
        };
        let (domain, attributes) = (endpoint.domain, &raw mut attributes);
        let status =
            call!(domain, ops.av_open(domain, attributes, &raw mut endpoint.av, null_mut()));
        library.check("fi_av_open", status)?;
        endpoint.open_queue()?;
        let status = call!(domain, ops.endpoint(domain, info, &raw mut endpoint.ep, null_mut()));
        library.check("fi_endpoint", status)?;
        let ep = endpoint.ep.cast::<Fid>();
        let parts =
            [(endpoint.cq.cast::<Fid>(), abi::FI_TRANSMIT | abi::FI_RECV), (endpoint.av.cast(), 0)];
        for (part, flags) in parts {
            library.check("fi_ep_bind", call!(ep, ops.bind(ep, part, flags)))?;
        }
        library.check("fi_enable", call!(ep, ops.control(ep, abi::FI_ENABLE, null_mut())))?;
        Ok(endpoint)
    }

    /// The queue of completions, with a descriptor to wait for where the provider has such.
    fn open_queue(&mut self) -> Result<(), RmaError> {
        let domain = self.domain;
        let mut open = |wait_obj| {
            let mut attributes = CqAttr {
                size: 256,
                flags: 0,
                format: abi::FI_CQ_FORMAT_CONTEXT,
                wait_obj,
                signaling_vector: 0,
                wait_cond: 0,
                wait_set: null_mut(),
            };
            let (attributes, cq) = (&raw mut attributes, &raw mut self.cq);
            call!(domain, ops.cq_open(domain, attributes, cq, null_mut()))
        };
        if open(abi::FI_WAIT_FD) != 0 {
            self.library.check("fi_cq_open", open(abi::FI_WAIT_NONE))?;
            return Ok(());
        }
        let mut fd: RawFd = -1;
        let cq = self.cq.cast::<Fid>();
        let status = call!(cq, ops.control(cq, abi::FI_GETWAIT, (&raw mut fd).cast()));
        if status == 0 && fd >= 0 {
            // SAFETY: the queue has this descriptor open as long as it lives.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            self.wake = fd.try_clone_to_owned().ok();
        }
        Ok(())
    }

    /// Name of the libfabric provider.
    pub(crate) fn provider(&self) -> &str {
        &self.found.provider
    }

    /// Whether the end of a write means that its data are in memory at the other side.
    pub(crate) fn delivers(&self) -> bool {
        self.found.delivers
    }

    /// Bytes that one transfer moves at most.
    pub(crate) fn most(&self) -> usize {
        // SAFETY: an entry of the library's list has all its parts.
        unsafe { (*(*self.found.list).ep_attr).max_msg_size }
    }

    /// Readable when something is to be [polled](RmaEndpoint::poll), after [`rest`](RmaEndpoint::rest).
    pub(crate) fn wake(&self) -> Option<&OwnedFd> {
        self.wake.as_ref()
    }

    /// Whether its descriptor wakes for whatever comes next; false when it is to be polled before.
    pub(crate) fn rest(&mut self) -> bool {
        if self.wake.is_none() {
            // The library takes no queue here that nobody can wait for.
            return false;
        }
        let mut fids = [self.cq.cast::<Fid>()];
        call!(self.fabric, ops.trywait(self.fabric, fids.as_mut_ptr(), 1)) == 0
    }

    /// The address by which the other side connects to it.
    pub(crate) fn address(&self) -> Result<Vec<u8>, RmaError> {
        let mut bytes = vec![0u8; MAX_ADDRESS];
        let mut length = bytes.len();
        let (ep, at) = (self.ep.cast::<Fid>(), bytes.as_mut_ptr().cast::<c_void>());
        let status = call!(self.ep, cm.getname(ep, at, &raw mut length));
        self.library.check("fi_getname", status)?;
        bytes.truncate(length);
        Ok(bytes)
    }

    /// The endpoint with `address`, by the number that transfers name it by.
    pub(crate) fn peer(&mut self, address: &[u8]) -> Result<u64, RmaError> {
        // A provider reads as many bytes as its addresses have, whatever the other side sent.
        let mut room = [0u8; 2 * MAX_ADDRESS];
        room.get_mut(..address.len()).ok_or(RmaError::Offer)?.copy_from_slice(address);
        let mut peer = u64::MAX;
        let (av, at) = (self.av, room.as_ptr().cast::<c_void>());
        let status = call!(av, ops.insert(av, at, 1, &raw mut peer, 0, null_mut()));
        match self.library.check("fi_av_insert", status)? {
            1 => Ok(peer),
            _ => Err(RmaError::Offer),
        }
    }

    /// Registers the memory, which is kept as long as this lives; under `key` where keys are not the provider's.
    pub(crate) fn register(
        &mut self,
        region: &Arc<Region>,
        usage: RegistrationUse,
        key: u64,
    ) -> Result<(), RmaError> {
        self.region = Some(region.clone());
        if usage == RegistrationUse::Local && self.mr_mode & abi::FI_MR_LOCAL == 0 {
            return Ok(());
        }
        let access = match usage {
            RegistrationUse::Local => abi::FI_READ | abi::FI_WRITE,
            RegistrationUse::Exposed => abi::FI_REMOTE_READ | abi::FI_REMOTE_WRITE,
        };
        // SAFETY: an entry of the library's list has all its parts.
        let key_size = unsafe { (*(*self.found.list).domain_attr).mr_key_size };
        let bits = key_size.saturating_mul(8);
        let key = if bits < 64 { key & ((1 << bits) - 1) } else { key };
        let (domain, whole) = (self.domain.cast::<Fid>(), region.whole());
        let (at, length) = (whole.as_ptr().cast_const().cast::<c_void>(), whole.len());
        let mr = &raw mut self.mr;
        let status =
            call!(self.domain, mr.reg(domain, at, length, access, 0, key, 0, mr, null_mut()));
        self.library.check("fi_mr_reg", status).map_err(|error| match error {
            RmaError::Call { call, cause } => {
                let cause = format!(
                    "{cause} (an adapter keeps {} MiB in memory for it: see `ulimit -l`)",
                    length >> 20
                );
                RmaError::Call { call, cause }
            }
            other => other,
        })?;
        if self.mr_mode & abi::FI_MR_ENDPOINT != 0 {
            let (mr, ep) = (self.mr.cast::<Fid>(), self.ep.cast::<Fid>());
            self.library.check("fi_mr_bind", call!(mr, ops.bind(mr, ep, 0)))?;
            let status = call!(mr, ops.control(mr, abi::FI_ENABLE, null_mut()));
            self.library.check("fi_mr_enable", status)?;
        }
        Ok(())
    }

    /// By which address and key the other side reaches the memory.
    pub(crate) fn reached_by(&self) -> Option<(u64, u64)> {
        let region = self.region.as_ref()?;
        if self.mr.is_null() {
            return None;
        }
        let virtual_address = self.mr_mode & abi::FI_MR_VIRT_ADDR != 0;
        let base = if virtual_address { region.whole().as_ptr() as u64 } else { 0 };
        // SAFETY: the registration is there.
        Some((base, unsafe { (*self.mr).key }))
    }

    /// Begins to move `length` bytes at `offset` of the registered memory, to `remote` if it is a `write`. False when there
    /// is no room. [`poll`](RmaEndpoint::poll) tells its end by `number`, which no other transfer has until then.
    pub(crate) fn begin(
        &mut self,
        write: bool,
        (offset, length): (usize, usize),
        (peer, address, key): (u64, u64, u64),
        number: usize,
    ) -> Result<bool, RmaError> {
        let place = self.region.as_ref().and_then(|region| region.slice(offset, length));
        let at = place.ok_or(RmaError::Offer)?.as_ptr().cast::<c_void>();
        let context = self.contexts.get_mut(number).ok_or(RmaError::Offer)?;
        let context = (&raw mut *context).cast::<c_void>();
        // SAFETY: the registration is there, if it is not null.
        let descriptor = unsafe { self.mr.as_ref() }.map_or(null_mut(), |mr| mr.mem_desc);
        let ep = self.ep;
        let (call, status) = match write {
            true => (
                "fi_write",
                call!(ep, rma.write(ep, at, length, descriptor, peer, address, key, context)),
            ),
            false => (
                "fi_read",
                call!(ep, rma.read(ep, at, length, descriptor, peer, address, key, context)),
            ),
        };
        match status {
            0 => Ok(true),
            status if status == -abi::FI_EAGAIN => Ok(false),
            status => Err(self.library.explain(call, status)),
        }
    }

    /// Lets the provider go on, and takes the numbers of up to 16 transfers that have ended; how many.
    pub(crate) fn poll(&mut self, ended: &mut [usize; 16]) -> Result<usize, RmaError> {
        let first = self.contexts.as_ptr() as usize;
        // Entries of this format are contexts.
        let (cq, at) = (self.cq, ended.as_mut_ptr().cast::<c_void>());
        let status: isize = call!(cq, ops.read(cq, at, ended.len()));
        match status {
            count if count >= 0 => {
                for context in &mut *ended {
                    *context = context.wrapping_sub(first) / size_of::<Context>();
                }
                Ok(count.unsigned_abs())
            }
            status if status == -abi::FI_EAGAIN => Ok(0),
            status if status == -abi::FI_EAVAIL => Err(self.failure()),
            status => Err(self.library.explain("fi_cq_read", status)),
        }
    }

    /// What the queue of errors says.
    fn failure(&mut self) -> RmaError {
        // SAFETY: zeroes are an entry; one with no room for more data of the error.
        let mut entry: CqErrEntry = unsafe { std::mem::zeroed() };
        let (cq, at) = (self.cq, &raw mut entry);
        let status: isize = call!(cq, ops.readerr(cq, at, 0));
        let number = if status > 0 { entry.err as isize } else { status };
        self.library.explain("transfer", number)
    }

    /// Has the library release it: on return nothing reaches the memory by it. False when it does not.
    pub(crate) fn close(mut self) -> bool {
        self.release()
    }

    fn release(&mut self) -> bool {
        if let Some(closed) = self.closed {
            return closed;
        }
        let close = |fid: *mut Fid| {
            // One that was not made is closed.
            fid.is_null() || call!(fid, ops.close(fid)) == 0
        };
        let (mr, ep) = (self.mr.cast::<Fid>(), self.ep.cast::<Fid>());
        // What is exposed goes first: nobody begins to reach it any more.
        let closed = close(mr) & close(ep);
        let closed = closed
            && close(self.cq.cast())
            && close(self.av.cast())
            && close(self.domain.cast())
            && close(self.fabric.cast());
        if !closed {
            tracing::error!(
                provider = self.found.provider,
                "libfabric does not release an endpoint; its memory is kept"
            );
            // An adapter could still reach the one, and the library write to the others.
            std::mem::forget(self.region.take());
            std::mem::forget(std::mem::take(&mut self.contexts));
        }
        self.closed = Some(closed);
        closed
    }
}

impl Drop for RmaEndpoint {
    fn drop(&mut self) {
        self.release();
    }
}
