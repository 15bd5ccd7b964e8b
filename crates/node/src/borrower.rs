//! The borrower: serves each function this host has borrowed as a vfio-user socket.
//!
//! A lease only makes the socket. Who opens it (QEMU, a userspace driver) attaches to the lender,
//! and who closes it releases the function; the lease stays until it is returned, so that a VM may restart. The
//! socket outlives the lender: what is attached when the lender is lost goes on being answered,
//! as by an absent device. So does what is attached when the lease ends: a driver sees a card that
//! was pulled out, and its QEMU no broken connection.

mod attach;
mod fence;
pub mod host;
mod lease;
mod saved;
pub mod turns;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rackbus_control::api::{DeviceReport, PeerReport};
use rackbus_fabric::FabricHandle;
use rackbus_lease::{Borrower, BorrowerAction, FrontRefused, Grant, Placement};
use rackbus_link::{Connect, Hello, InWindow, LinkError, MediumSession, VERSIONS};
use rackbus_memory::exchange::session::SessionSide;
use rackbus_memory::{Carrier, Gate, Stream};
use rackbus_pci::vfio_user::Server;
use rackbus_vfio::PciAddress;
use rackbus_vm::{interrupts, lasting};

use attach::{AttachOpener, wanted};
use lease::{Attachment, Open};

use crate::borrower::host::{HostError, HostFunctions, WindowConversation};
use crate::handover::HandOverError;
use crate::lanes::Lanes;
use crate::lent_out::LentOut;
use crate::peers::PeerGroups;
use crate::remote::OnLost;
use crate::report;
use crate::sessions::{HOLD, HeldSession, hold_session, keep_silent};
use crate::users::VmUser;
#[cfg(test)]
pub(crate) use fence::tests as fence_tests;
pub(crate) use fence::{BorrowerFence, FrontSlot};

/// Why a function could not be opened here.
#[derive(Debug, thiserror::Error)]
pub enum BorrowError {
    /// The socket could not be made.
    #[error("the socket {path} cannot be served: {cause}")]
    Socket {
        /// Where it should be.
        path: PathBuf,
        /// Why the socket could not be made.
        cause: std::io::Error,
    },
    /// The lender does not lend it.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// It does not appear in this host's own PCI tree.
    #[error(transparent)]
    Host(#[from] HostError),
    /// It is not to reach this host's memory.
    #[error(transparent)]
    Front(#[from] FrontRefused),
}

/// Told when somebody uses a function, and when its lender was lost meanwhile.
pub trait UseListener: Send + Sync {
    /// The lender of `grant` is gone, for `reason`.
    fn lender_lost(&self, grant: &Grant, reason: &str);

    /// The link to the lender of `grant` was lost, or is back.
    fn link_changed(&self, grant: &Grant) {
        let _ = grant;
    }

    /// The VM of this host that the function at `socket` is meant for; nothing where it is a program's.
    fn vm_of(&self, socket: &Path) -> Option<String>;

    /// The process that has opened the function at `socket`, where the lease ends with it; nothing where another one may come
    /// after it.
    fn user_of(&self, socket: &Path, process: u32) -> Option<VmUser>;

    /// The VM that has the function at `socket` and runs, whether or not it has opened that.
    fn running_vm(&self, socket: &Path) -> Option<VmUser>;

    /// A VM uses the function of `grant`, or did last. `ended` says later whether the lease has ended, or has
    /// another user.
    fn used(&self, grant: &Grant, user: &VmUser, ended: LeaseEnded);

    /// The front of a lease that is being closed has ended, and this follows.
    fn front_ended(&self, actions: Vec<BorrowerAction>);
}

/// Whether a lease has ended, or has another user.
pub type LeaseEnded = Box<dyn Fn() -> bool + Send + Sync>;

/// Where a host of a rack has the sockets of what it borrowed.
pub fn functions_folder(run_dir: &Path, host: &str) -> PathBuf {
    run_dir.join(host).join("functions")
}

/// The socket of a borrowed function. It is named by its lease, whose number is never used again: the
/// socket of a lease that is still ending is another.
pub fn socket_path(folder: &Path, device: &str, lease: u64) -> PathBuf {
    folder.join(format!("{device}.{lease}.sock"))
}

/// All functions this host has borrowed.
pub struct BorrowedFunctions {
    rack: String,
    host: String,
    folder: PathBuf,
    link: Arc<dyn Connect>,
    fabric: FabricHandle,
    listener: Arc<dyn UseListener>,
    peers: Arc<PeerGroups>,
    gate: Gate,
    hold: Duration,
    lanes: Lanes,
    /// What is decided for all of it.
    fence: BorrowerFence,
    open: Mutex<BTreeMap<u64, Arc<Open>>>,
    /// Those in this host's own PCI tree.
    in_host: HostFunctions,
    /// Those of leases that have ended, whose users may still have the socket open.
    ended: Mutex<Vec<Arc<Open>>>,
}

impl std::fmt::Debug for BorrowedFunctions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BorrowedFunctions").field("host", &self.host).finish_non_exhaustive()
    }
}

impl BorrowedFunctions {
    /// A borrower on `host` that makes its sockets in `folder`, which exists, in a process with this
    /// `gate`. `fabric` decides which memory the fronts here reach.
    pub fn new(
        rack: &str,
        host: &str,
        folder: &Path,
        link: Arc<dyn Connect>,
        fabric: FabricHandle,
        listener: Arc<dyn UseListener>,
        gate: Gate,
    ) -> Self {
        let (peers, open, ended) = Default::default();
        let (rack, host, folder) = (rack.to_owned(), host.to_owned(), folder.to_owned());
        let in_host = HostFunctions::default();
        let fence = BorrowerFence::new(listener.clone());
        BorrowedFunctions {
            rack,
            host,
            folder,
            link,
            fabric,
            listener,
            peers,
            gate,
            hold: HOLD,
            lanes: Lanes::default(),
            fence,
            open,
            in_host,
            ended,
        }
    }

    /// The same on a host with these NTBs, by the host that each leads to.
    #[must_use]
    pub fn with_ntbs(self, ntbs: BTreeMap<String, PciAddress>) -> Self {
        BorrowedFunctions { in_host: HostFunctions::new(ntbs), ..self }
    }

    /// The same, whose fronts hold what is under way for so long while their mediums cannot be reached.
    #[must_use]
    pub fn with_hold(self, hold: Duration) -> Self {
        BorrowedFunctions { hold, ..self }
    }

    /// The same, which moves data of borrowed mediums beside the link as `lanes` says.
    #[must_use]
    pub fn with_lanes(self, lanes: Lanes) -> Self {
        BorrowedFunctions { lanes, ..self }
    }

    /// Has the lending protocol decide something. What it says is to be done takes time:
    /// [`open`](BorrowedFunctions::open), [`close`](BorrowedFunctions::close).
    pub fn decide<R>(&self, decide: impl FnOnce(&mut Borrower) -> R) -> R {
        self.fence.decide(decide)
    }

    /// Has the function appear in this host's own PCI tree, and returns its directory in sysfs.
    fn open_in_host(&self, grant: Grant) -> Result<PathBuf, BorrowError> {
        if let Some(path) = self.in_host.path(&grant) {
            return Ok(path);
        }
        // The function reaches this host's memory, as a front here does.
        let slot = self.fence.begin_front(grant.lease, host::SUCCESSION)?;
        self.in_host.ready(&grant.function.host)?;
        let hello = self.hello(&grant);
        let stream = self.link.connect(&grant.address, &hello)?;
        let InWindow { offset, epoch, session } = InWindow::receive(&*stream, &hello.to)?;
        let conversation = match session.zip(stream.carrier()) {
            Some((offered, carrier)) => {
                self.window_session(&grant, offered, HeldSession::Begins(self.hold), Some(carrier))?
            }
            None => WindowConversation { stream, session: None },
        };
        let ended = conversation.stream.clone();
        let on_lost = self.on_host_lost(&grant);
        let opened = self.in_host.open(grant, (offset, epoch), conversation, slot, on_lost);
        // A session does not end with what has it.
        Ok(opened.inspect_err(|_| ended.shut_down())?)
    }

    /// Told when the lender of a function in this host's own PCI tree is lost.
    fn on_host_lost(&self, grant: &Grant) -> OnLost {
        let (listener, lost) = (self.listener.clone(), grant.clone());
        Box::new(move |reason| listener.lender_lost(&lost, &reason))
    }

    /// The session with the lender of a function in this host's own PCI tree, which is on another machine: by a `first`
    /// connection, or the next one where another process had that.
    fn window_session(
        &self,
        grant: &Grant,
        offered: MediumSession,
        held: HeldSession<'_>,
        first: Option<Box<dyn Carrier>>,
    ) -> Result<WindowConversation, HostError> {
        let (listener, changed) = (self.listener.clone(), grant.clone());
        let on_change = Box::new(move |_| listener.link_changed(&changed));
        let (link, address) = (self.link.clone(), grant.address.clone());
        let hello = self.hello(grant);
        let session = hold_session(&offered, held, link, address, hello, on_change);
        let session = session.map_err(HostError::Session)?;
        let kept = keep_silent(&session, SessionSide::Asks, first);
        kept.inspect_err(|_| session.shut_down()).map_err(HostError::Session)?;
        let stream = Arc::new(session.clone());
        Ok(WindowConversation { stream, session: Some((offered, session)) })
    }

    /// Returns what a former node of this host left in its own PCI tree, and this one does not go on with.
    pub(crate) fn return_left(&self) {
        self.in_host.return_left();
    }

    fn hello(&self, grant: &Grant) -> Hello {
        Hello {
            versions: VERSIONS,
            rack: self.rack.clone(),
            from: self.host.clone(),
            to: grant.function.host.clone(),
            service: wanted(grant),
        }
    }

    /// Makes the function's socket and returns its path. Opening the same lease again changes
    /// nothing.
    ///
    /// # Errors
    /// [`BorrowError`].
    pub fn open(&self, grant: Grant) -> Result<PathBuf, BorrowError> {
        if grant.placement == Placement::Host {
            return self.open_in_host(grant);
        }
        let mut all = self.all();
        if let Some(open) = all.get(&grant.lease).filter(|open| open.grant.same_lease(&grant)) {
            return Ok(open.path.clone());
        }
        let path = socket_path(&self.folder, &grant.function.device, grant.lease);
        let open = self.opened(grant);
        let server = Server::bind_within(&path, self.opener(&open), self.gate.clone())
            .map_err(|cause| BorrowError::Socket { path: path.clone(), cause })?;
        *open.server() = Some(server);
        self.show_turn(&open);
        all.insert(open.grant.lease, open.clone());
        drop(all);
        self.opener(&open).tell_starter(&open);
        Ok(path)
    }

    /// A lease without its server.
    fn opened(&self, grant: Grant) -> Arc<Open> {
        let path = socket_path(&self.folder, &grant.function.device, grant.lease);
        let (server, attachment, fixed, membership, user, was_used) = Default::default();
        let lent_out = LentOut::new(self.fabric.clone(), &self.host);
        let fence = self.fence.clone();
        Arc::new(Open {
            grant,
            path,
            server,
            lent_out,
            attachment,
            fixed,
            fence,
            membership,
            user,
            was_used,
        })
    }

    fn opener(&self, open: &Arc<Open>) -> AttachOpener {
        AttachOpener {
            hello: self.hello(&open.grant),
            link: self.link.clone(),
            fabric: self.fabric.clone(),
            listener: self.listener.clone(),
            peers: self.peers.clone(),
            gate: self.gate.clone(),
            hold: self.hold,
            lanes: self.lanes.clone(),
            open: Arc::downgrade(open),
        }
    }

    /// Ends the socket of a lease that the protocol has ended: on return it is gone, and the lender is detached.
    /// Whoever still has it open finds an absent device there. Closing what is not open changes nothing.
    pub fn close(&self, lease: u64) {
        if self.in_host.close(lease) {
            return;
        }
        let Some(open) = self.all().remove(&lease) else { return };
        open.close();
        self.hide_turn(&open);
        if let Some(server) = &mut *open.server() {
            server.retire();
        }
        interrupts::forget(&open.path);
        lasting::forget(&open.path);
        let mut ended = self.ended();
        ended.retain(|open| open.process().is_some());
        ended.push(open);
    }

    /// Lets the lender of a lease go at once: who has its socket open finds an absent device there. The socket stays until it
    /// is [closed](BorrowedFunctions::close). Cutting off what is not open changes nothing.
    pub fn cut(&self, lease: u64) {
        if self.in_host.close(lease) {
            return;
        }
        let open = self.all().get(&lease).cloned();
        if let Some(open) = open {
            open.close();
        }
    }

    /// Whether all that is borrowed can go on in another process, as far as this is known before it is tried.
    ///
    /// # Errors
    /// What cannot, and why.
    pub(crate) fn can_be_saved(&self) -> Result<(), HandOverError> {
        self.in_host.can_be_saved()?;
        let not_held = |open: &&Arc<Open>| match &*open.attachment() {
            Some(Attachment::Medium(front, Some(session))) => {
                !front.is_gone() && session.timing().hold == 0
            }
            _ => false,
        };
        match self.all().values().find(not_held) {
            Some(open) => Err(HandOverError::NotHeld { function: open.grant.function.to_string() }),
            None => Ok(()),
        }
    }

    /// How the functions are whose fronts run here, by their names in the rack.
    pub fn fronts(&self) -> BTreeMap<String, DeviceReport> {
        let open: Vec<Arc<Open>> = self.all().values().cloned().collect();
        let report = |open: &Arc<Open>| {
            let attachment = open.attachment();
            let Attachment::Medium(front, session) = attachment.as_ref()? else { return None };
            let known = session.as_ref().map(|session| report::of_link(session, &open.grant));
            let known = known.unwrap_or_default();
            let report = report::of_engine(front.engine()?, known);
            Some((open.grant.function.to_string(), report))
        };
        open.iter().filter_map(report).collect()
    }

    /// How many requests of their users were refused here, of the functions that run at their lenders.
    pub fn refused(&self) -> Vec<(String, u64)> {
        let open: Vec<Arc<Open>> = self.all().values().cloned().collect();
        let count = |open: &Arc<Open>| match open.attachment().as_ref()? {
            Attachment::Function(lender) => {
                Some((open.grant.function.to_string(), lender.refused()))
            }
            Attachment::Medium(..) => None,
        };
        open.iter().filter_map(count).collect()
    }

    /// What the functions reach of others of the same user, by their names in the rack.
    pub fn peers(&self) -> BTreeMap<String, PeerReport> {
        self.peers.report()
    }

    /// The socket of a lease, and the process that uses it now.
    pub fn user(&self, lease: u64) -> Option<(PathBuf, Option<u32>)> {
        if let Some(path) = self.in_host.path_of(lease) {
            return Some((path, None));
        }
        let open = self.all().get(&lease)?.clone();
        Some((open.path.clone(), open.process()))
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Open>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self) -> MutexGuard<'_, Vec<Arc<Open>>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
