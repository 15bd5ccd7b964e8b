//! Functions in this host's own PCI tree: borrowed through an NTB, by the kernel module.
//!
//! The conversation with the lender stays open for as long as the function is borrowed; its end is the function's
//! loss. Between machines it is a session, which outlives its connection. A node that ends returns what it had, and one
//! that starts returns what its predecessor left, which its lenders have taken away by then, or do soon. A return that does
//! not end well is tried again until it does.
//!
//! The module keeps what is borrowed whoever has its device file open: so a node that is restarted in place passes on the
//! conversations, and which functions they are about (`saved`).

mod late;
mod saved;

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rackbus_lease::Grant;
use rackbus_link::MediumSession;
use rackbus_memory::{CarriedSession, Stream};
use rackbus_metal::MetalError;
use rackbus_metal::borrower::{BorrowedState, Module, ModuleStatus, WantedFunction, bind};
use rackbus_vfio::{PciAddress, Sysfs};
use rustix::io::Errno;
use tracing::Span;

use super::fence::FrontSlot;
use crate::remote::OnLost;
use late::{LateReturns, is_gone, is_under_way};
pub use saved::SavedInHost;

/// A name's most bytes, as the module has it.
const NAME_BYTES: usize = 63;
/// How long a driver may take to release its function.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a former function of the same name may take to go: its driver is asked, and then not asked any more.
pub(super) const SUCCESSION: Duration = Duration::from_secs(25);

/// Why a function does not appear in this host.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// No NTB leads to its lender.
    #[error("the rack file names no NTB from this host to {0}: write [hosts.HOST.ntb.{0}]")]
    NoNtb(String),
    /// The kernel module refuses, or there is none.
    #[error(transparent)]
    Module(#[from] MetalError),
    /// The lender speaks of another lease.
    #[error("{lender} lends it in epoch {epoch}, and the lease is of epoch {lease}")]
    Epoch {
        /// Name of the lender's host.
        lender: String,
        /// The epoch that the lender's node says.
        epoch: u64,
        /// The epoch that the lease has.
        lease: u64,
    },
    /// A thread cannot be started.
    #[error("a thread cannot be started: {0}")]
    Thread(std::io::Error),
    /// What outlives the connection to the lender cannot be made.
    #[error("the session with its lender cannot be kept: {0}")]
    Session(std::io::Error),
}

/// The functions in this host's tree, by their leases.
#[derive(Default)]
pub struct HostFunctions {
    /// By the host that each leads to.
    ntbs: BTreeMap<String, PciAddress>,
    /// Each with what lets it reach this host's memory.
    functions: Mutex<BTreeMap<u64, (Arc<HostFunction>, FrontSlot)>>,
    /// What could not be returned yet.
    late: LateReturns,
}

/// The conversation with the lender of a function in this host's tree.
#[derive(Clone)]
pub(super) struct WindowConversation {
    /// Open for as long as the function is lent.
    pub(super) stream: Arc<dyn Stream>,
    /// What outlives its connection, between machines, and how the lender offered that.
    pub(super) session: Option<(MediumSession, CarriedSession)>,
}

impl WindowConversation {
    /// Why it has ended.
    fn end_reason(&self) -> String {
        let reason = self.session.as_ref().and_then(|(_, session)| session.end_reason());
        reason.map_or_else(|| "its lender released it".to_owned(), |reason| reason.to_string())
    }
}

struct HostFunction {
    grant: Grant,
    known: KnownFunction,
    path: PathBuf,
    conversation: WindowConversation,
    /// The lease has ended here: the end of the conversation is no loss.
    ended: AtomicBool,
}

impl HostFunctions {
    /// For a host with these NTBs, by the host that each leads to.
    pub fn new(ntbs: BTreeMap<String, PciAddress>) -> HostFunctions {
        let (functions, late) = Default::default();
        HostFunctions { ntbs, functions, late }
    }

    /// Returns what a former node borrowed through the NTBs by leases, and this one does not go on with.
    pub fn return_left(&self) {
        if self.ntbs.is_empty() {
            return;
        }
        let own = |ntb| self.ntbs.values().any(|own| *own == ntb);
        let here: Vec<u32> = self.all().values().map(|(it, _)| it.known.handle).collect();
        return_all(|status| own(status.ntb) && !here.contains(&status.handle), &self.late);
    }

    /// The NTB that leads to a lender, with the module as its driver, and the module. To be asked before the lender is: that one
    /// gives a place in its window away for as long as the link is up, also where nothing comes of it here.
    ///
    /// # Errors
    /// [`HostError`]; nothing can be borrowed from there now.
    pub(super) fn ready(&self, lender: &str) -> Result<(PciAddress, Module), HostError> {
        let ntb = self.ntbs.get(lender).copied();
        let ntb = ntb.ok_or_else(|| HostError::NoNtb(lender.to_owned()))?;
        bind(&Sysfs::here(), ntb)?;
        Ok((ntb, Module::open()?))
    }

    /// Makes the function at an offset and epoch of the lender's window appear in this host, for as long as `conversation` is
    /// open; its directory in sysfs. It has `slot` until it is gone, which is after its driver has released it. `lost` is
    /// called when the lender goes.
    ///
    /// # Errors
    /// [`HostError`]; nothing has changed.
    pub(super) fn open(
        &self,
        grant: Grant,
        (offset, epoch): (u64, u64),
        conversation: WindowConversation,
        slot: FrontSlot,
        lost: OnLost,
    ) -> Result<PathBuf, HostError> {
        self.late.work_off();
        let lender = &grant.function.host;
        let (ntb, module) = self.ready(lender)?;
        if epoch != grant.epoch {
            return Err(HostError::Epoch { lender: lender.clone(), epoch, lease: grant.epoch });
        }
        let name = lease_name(grant.lease, &grant.function.to_string());
        let wanted = WantedFunction { ntb, offset, epoch, name, vectors: None };
        let borrowed = module.borrow(&wanted)?;
        let known = KnownFunction { handle: borrowed.handle, place: (ntb, offset, epoch) };
        let path = folder_of(borrowed.domain);
        let ended = AtomicBool::new(false);
        let function = HostFunction { grant, known, path, conversation, ended };
        self.keep(Arc::new(function), slot, lost)
    }

    /// Watches a function that is here, until its lease is [closed](HostFunctions::close).
    fn keep(
        &self,
        function: Arc<HostFunction>,
        slot: FrontSlot,
        lost: OnLost,
    ) -> Result<PathBuf, HostError> {
        let lease = function.grant.lease;
        let (watched, about) = (function.clone(), Span::current());
        let watch = move || {
            // Whoever hears of a loss says by itself which lease it is.
            if let Some(reason) = about.in_scope(|| watched.wait_for_end()) {
                lost(reason);
            }
        };
        if let Err(cause) = std::thread::Builder::new().name("host function".into()).spawn(watch) {
            function.give_back(slot, &self.late);
            return Err(HostError::Thread(cause));
        }
        let path = function.path.clone();
        self.all().insert(lease, (function, slot));
        Ok(path)
    }

    /// Where the function of a lease is, if it is here.
    pub fn path(&self, grant: &Grant) -> Option<PathBuf> {
        let all = self.all();
        let function = all.get(&grant.lease).filter(|(it, _)| it.grant.same_lease(grant));
        function.map(|(it, _)| it.path.clone())
    }

    /// The directory of the function of a lease.
    pub fn path_of(&self, lease: u64) -> Option<PathBuf> {
        self.all().get(&lease).map(|(function, _)| function.path.clone())
    }

    /// Ends a lease's function: on return it is gone, or will be, and its lender is detached. False when there is none.
    pub fn close(&self, lease: u64) -> bool {
        self.late.work_off();
        let Some((function, slot)) = self.all().remove(&lease) else { return false };
        function.ended.store(true, Ordering::Release);
        function.give_back(slot, &self.late);
        // Only now: the function's driver may have written to it until here.
        function.conversation.stream.shut_down();
        true
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<u64, (Arc<HostFunction>, FrontSlot)>> {
        self.functions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for HostFunctions {
    fn drop(&mut self) {
        let leases: Vec<u64> = self.all().keys().copied().collect();
        for lease in leases {
            self.close(lease);
        }
    }
}

/// A function that the module had when it was borrowed.
#[derive(Debug, Clone, Copy)]
struct KnownFunction {
    handle: u32,
    /// The NTB, the offset and the epoch that it was borrowed with.
    place: (PciAddress, u64, u64),
}

impl KnownFunction {
    /// Whether the module's function of that handle is this one: handles begin anew with the module.
    fn is_there(self, module: &Module) -> Result<bool, MetalError> {
        match module.status(self.handle) {
            Ok(it) => Ok((it.ntb, it.offset, it.epoch) == self.place),
            Err(error) if is_gone(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Has its driver release it; done when the module does not have it any more.
    fn give_back(self, force: bool) -> Result<(), MetalError> {
        let returned = Module::open().and_then(|module| match self.is_there(&module)? {
            true => module.give_back(self.handle, force, PATIENCE),
            false => Ok(()),
        });
        match returned {
            // Somebody else returned it.
            Err(error) if is_gone(&error) => Ok(()),
            returned => returned,
        }
    }
}

impl HostFunction {
    /// Has its driver release it. Who uses it still, loses it. `slot` is let go when it is gone.
    fn give_back(&self, slot: FrontSlot, late: &LateReturns) {
        let outcome = match self.known.give_back(false) {
            Err(MetalError::Refused { errno: Errno::BUSY, .. }) => {
                tracing::warn!(function = %self.grant.function, "it is returned although it is in use");
                self.known.give_back(true)
            }
            outcome => outcome,
        };
        after_return(self.known, &self.grant.function.to_string(), Some(slot), outcome, late);
    }

    /// Waits until it has ended; why, where that was a loss.
    fn wait_for_end(&self) -> Option<String> {
        let module = Module::open();
        let stream = &self.conversation.stream;
        let mut looked = false;
        loop {
            match &module {
                // What has changed before is looked at first.
                Ok(_) if !std::mem::replace(&mut looked, true) => {}
                Ok(module) => stream.wait_closed_or(module.as_fd()),
                Err(_) => stream.wait_closed(),
            }
            if self.ended.load(Ordering::Acquire) {
                return None;
            }
            if stream.is_closed() {
                self.lose();
                return Some(self.conversation.end_reason());
            }
            let Ok(module) = &module else { continue };
            module.changes();
            let reason = match module.status(self.known.handle) {
                Ok(it) if (it.ntb, it.offset, it.epoch) != self.known.place => {
                    "the module was loaded anew"
                }
                Ok(it) if it.state == BorrowedState::Borrowed => continue,
                Ok(it) => it.reason.unwrap_or("it was returned by hand"),
                Err(_) => "it was returned by hand",
            };
            return Some(reason.to_owned());
        }
    }

    /// Its lender is gone.
    fn lose(&self) {
        let outcome = Module::open().and_then(|module| match self.known.is_there(&module)? {
            true => module.lost(self.known.handle),
            false => Ok(()),
        });
        if let Err(error) = outcome {
            tracing::error!(function = %self.grant.function, %error, "the kernel module could not be told that the function is lost");
        }
    }
}

/// The name that the module keeps of what was borrowed by a lease. The lease comes first: what is too long is cut off,
/// and by the lease it is known again after a crash.
fn lease_name(lease: u64, function: &str) -> String {
    let mut name = format!("lease {lease}: {function}");
    while name.len() > NAME_BYTES {
        name.pop();
    }
    name
}

/// Whether a name is that of something that was borrowed by a lease, and not by hand.
fn is_of_lease(name: &str) -> bool {
    let lease = name.strip_prefix("lease ").and_then(|rest| rest.split_once(": "));
    let now = lease.is_some_and(|(number, _)| number.parse::<u64>().is_ok());
    // As nodes of earlier versions named them, of which one may have ended just now.
    now || name.contains(" by lease ")
}

/// The directory of the function that is alone in this PCI domain.
fn folder_of(domain: u32) -> PathBuf {
    format!("/sys/bus/pci/devices/{domain:04x}:00:00.0").into()
}

/// Returns those that were borrowed by leases and are `left`.
fn return_all(left: impl Fn(&ModuleStatus) -> bool, late: &LateReturns) {
    // Without the module nothing is borrowed.
    let Ok(module) = Module::open() else { return };
    let handles = module.handles().unwrap_or_default();
    for status in handles.into_iter().filter_map(|handle| module.status(handle).ok()) {
        if !left(&status) || !is_of_lease(&status.name) {
            continue;
        }
        tracing::info!(function = status.name, "a lease that a former node left was returned");
        let place = (status.ntb, status.offset, status.epoch);
        let known = KnownFunction { handle: status.handle, place };
        after_return(known, &status.name, None, known.give_back(true), late);
    }
}

/// Looks at how a return ended. One that is not done goes on in a thread: until then the function may reach this host's
/// memory, and the module keeps its place in the window, where nothing else can be borrowed. It has `slot` until it ends.
fn after_return(
    known: KnownFunction,
    function: &str,
    slot: Option<FrontSlot>,
    outcome: Result<(), MetalError>,
    late: &LateReturns,
) {
    match outcome {
        Ok(()) => return,
        Err(error) if is_under_way(&error) => {
            tracing::warn!(
                function,
                "its driver has not released it yet; it is returned when it does"
            );
        }
        Err(error) => {
            tracing::error!(function, %error, "the function is not returned; it is tried again");
        }
    }
    late.add(function, Box::new(move || known.give_back(true)), slot);
}

#[cfg(test)]
mod tests;
