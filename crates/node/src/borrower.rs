//! The borrower: serves each function this host has borrowed as a vfio-user socket.
//!
//! A lease only makes the socket. Who opens it (QEMU, a userspace driver) attaches to the lender,
//! and who closes it lets go; the lease stays until it is returned, so that a VM may restart. The
//! socket outlives the lender: what is attached when the lender is lost goes on being answered,
//! as by an absent device. So does what is attached when the lease ends: a driver sees a card that
//! was pulled out, and its QEMU no broken connection.

pub mod host;
mod saved;
pub mod turns;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rackbus_control::api::{DeviceReport, PeerReport};
use rackbus_control::lease_span;
use rackbus_fabric::FabricHandle;
use rackbus_lease::{Grant, Placement};
use rackbus_link::{Connect, Hello, InWindow, LinkError, Medium, Service, VERSION};
use rackbus_memory::exchange::session::Side;
use rackbus_memory::{Carried, CarriedSession, Gate, Stream};
use rackbus_pci::MediumAccess;
use rackbus_pci::vfio_user::{Device, DeviceError, DeviceShape, Opener, Server, Shown, ShownWith};
use rackbus_vfio::PciAddress;
use rackbus_vm::{Interrupts, interrupts};
use rustix::io::Errno;

use crate::borrower::host::{HostError, HostFunctions};
use crate::front::{MediumConversation, PlacedDevice};
use crate::lent_out::LentOut;
use crate::peers::{Followed, Membership, PeerGroups, Windows};
use crate::remote::{Conversation, OnLost, RemoteDevice};
use crate::report;
use crate::sessions::{HOLD, hold_session};

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

    /// A process opened the socket of `grant`'s lease. `ended` says later whether the lease has ended,
    /// or somebody else's.
    fn opened(&self, grant: &Grant, socket: &Path, process: u32, ended: LeaseEnded);
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

/// A borrowed function, from the grant of its lease to its end.
struct Open {
    grant: Grant,
    path: PathBuf,
    server: Mutex<Option<Server>>,
    /// What the function is lent, where it runs at its lender.
    lent_out: LentOut,
    /// The conversation with the lender, since a user had the socket open.
    attachment: Mutex<Option<Attachment>>,
    /// Bytes of configuration space that its user is shown instead of the function's.
    fixed: Mutex<Vec<(u64, u8)>>,
    /// The lease has ended: who is being attached lets the lender go at once.
    closed: AtomicBool,
    /// Among the functions of its user, while that has it open.
    membership: Mutex<Option<Arc<Membership>>>,
}

/// The conversation with a lender.
enum Attachment {
    /// About the function.
    Function(Conversation),
    /// About its medium; the front runs here. Beside it the session, where that is on another machine.
    Medium(MediumConversation, Option<CarriedSession>),
}

impl Attachment {
    /// Lets the lender go: what was attached answers as an absent device from then on.
    fn end(&self) {
        match self {
            Attachment::Function(conversation) => conversation.end(),
            Attachment::Medium(conversation, _) => conversation.end(),
        }
    }
}

impl Open {
    fn server(&self) -> MutexGuard<'_, Option<Server>> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The process that uses it now.
    fn process(&self) -> Option<u32> {
        self.server().as_ref().and_then(Server::client_pid)
    }

    fn fixed(&self) -> MutexGuard<'_, Vec<(u64, u8)>> {
        self.fixed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attachment(&self) -> MutexGuard<'_, Option<Attachment>> {
        self.attachment.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A user has attached.
    fn attached(&self, attachment: Attachment) {
        let mut current = self.attachment();
        if self.closed.load(Ordering::Relaxed) {
            attachment.end();
        }
        *current = Some(attachment);
    }

    /// The lease has ended: lets the lender go, also for a user that is attaching now.
    fn close(&self) {
        self.leave_peers();
        let current = self.attachment();
        self.closed.store(true, Ordering::Relaxed);
        if let Some(attachment) = &*current {
            attachment.end();
        }
    }

    /// The windows that it has, each an address and a length.
    fn windows(&self) -> Vec<(u64, u64)> {
        let membership = self.membership.lock().unwrap_or_else(PoisonError::into_inner);
        membership.as_ref().map(|membership| membership.windows()).unwrap_or_default()
    }

    /// No other function of its user reaches it from now on, nor it any.
    fn leave_peers(&self) {
        let membership = self.membership.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(membership) = membership {
            membership.leave();
        }
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

    /// Has the function appear in this host's own PCI tree, and returns its directory in sysfs.
    fn open_in_host(&self, grant: Grant) -> Result<PathBuf, BorrowError> {
        if let Some(path) = self.in_host.path(&grant) {
            return Ok(path);
        }
        let hello = self.hello(&grant);
        let stream = self.link.connect(&grant.address, &hello)?;
        let place = InWindow::receive(&*stream, &hello.to)?;
        let (listener, lost) = (self.listener.clone(), grant.clone());
        let on_lost: OnLost = Box::new(move |reason| listener.lender_lost(&lost, &reason));
        Ok(self.in_host.open(grant, place, stream, on_lost)?)
    }

    fn hello(&self, grant: &Grant) -> Hello {
        Hello {
            version: VERSION,
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
        all.insert(open.grant.lease, open);
        Ok(path)
    }

    /// A lease without its server.
    fn opened(&self, grant: Grant) -> Arc<Open> {
        let path = socket_path(&self.folder, &grant.function.device, grant.lease);
        let (server, attachment, fixed, closed, membership) = Default::default();
        let lent_out = LentOut::new(self.fabric.clone(), &self.host);
        Arc::new(Open { grant, path, server, lent_out, attachment, fixed, closed, membership })
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
            open: Arc::downgrade(open),
        }
    }

    /// Ends a lease's socket: on return it is gone, and the lender is let go. Whoever still has it
    /// open finds an absent device there. Closing what is not open changes nothing.
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
        let mut ended = self.ended();
        ended.retain(|open| open.process().is_some());
        ended.push(open);
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

/// The half of the function that is attached to.
fn wanted(grant: &Grant) -> Service {
    let Grant { lease, epoch, .. } = *grant;
    let device = grant.function.device.clone();
    match grant.placement {
        Placement::Lender => Service::Function { device, lease, epoch },
        Placement::Borrower => Service::Medium { device, lease, epoch },
        Placement::Host => Service::Window { device, lease, epoch },
    }
}

/// Attaches to the lender for each client that opens the socket.
struct AttachOpener {
    hello: Hello,
    link: Arc<dyn Connect>,
    fabric: FabricHandle,
    listener: Arc<dyn UseListener>,
    peers: Arc<PeerGroups>,
    gate: Gate,
    hold: Duration,
    open: std::sync::Weak<Open>,
}

impl Opener for AttachOpener {
    fn open(&self) -> Result<Box<dyn Device>, DeviceError> {
        let gone = || DeviceError::new(Errno::NODEV, "the lease was returned");
        let open = self.open.upgrade().ok_or_else(gone)?;
        let _about = lease_span(open.grant.lease).entered();
        let stream = self
            .link
            .connect(&open.grant.address, &self.hello)
            .map_err(|error| DeviceError::new(Errno::NODEV, error.to_string()))?;
        let device = self.attach(&open, stream)?;
        self.tell_use(&open);
        tracing::info!(process = open.process(), "in use");
        Ok(device)
    }
}

/// Shows `device` with the kind of interrupts that its user wants. Without MSI-X a function can be
/// taken out of every running QEMU, which the loss of its lender needs.
fn show(open: &Open, device: impl Device + 'static) -> Result<Box<dyn Device>, DeviceError> {
    let msix = Interrupts::noted(&open.path) != Interrupts::Msi;
    let shown = Shown::choose(device.shape(), msix);
    let shown = ShownWith::new(device, shown)?;
    *open.fixed() = shown.fixed_bytes().to_vec();
    Ok(Box::new(shown))
}

impl AttachOpener {
    /// Tells who watches users of the one that is there.
    fn tell_use(&self, open: &Arc<Open>) {
        let Some(process) = open.process() else { return };
        let lease = self.open.clone();
        // Nobody is there any more, or still that one.
        let same = move |open: &Arc<Open>| open.process().is_none_or(|now| now == process);
        let ended = Box::new(move || !lease.upgrade().is_some_and(|open| same(&open)));
        self.listener.opened(&open.grant, &open.path, process, ended);
    }

    /// Tells once that the lender is lost.
    fn on_lost(&self) -> OnLost {
        let (listener, lost) = (self.listener.clone(), self.open.clone());
        let gate = self.gate.clone();
        Box::new(move |reason: String| {
            if let Some(open) = lost.upgrade() {
                // Windows of others are closed at their lenders: no other process takes those conversations
                // up meanwhile. One that goes on in this one's place finds the lender lost by itself.
                let _passage = gate.enter();
                open.leave_peers();
                listener.lender_lost(&open.grant, &reason);
            }
        })
    }

    /// The device at the other end of `stream`, or the front here of the medium there.
    fn attach(
        &self,
        open: &Arc<Open>,
        stream: Arc<dyn rackbus_link::Conversation>,
    ) -> Result<Box<dyn Device>, DeviceError> {
        let on_lost = self.on_lost();
        let none = |error: String| DeviceError::new(Errno::NODEV, error);
        match open.grant.placement {
            Placement::Host => Err(none("it is in this host's own PCI tree".to_owned())),
            Placement::Lender => {
                let device = RemoteDevice::attach(stream, on_lost);
                let device = device.map_err(|error| none(error.to_string()))?;
                let device = device.counted_by(open.lent_out.clone());
                let conversation = device.conversation();
                let windows = Box::new(conversation.clone());
                open.attached(Attachment::Function(conversation));
                show(open, self.follow(open, device, Some(windows)))
            }
            Placement::Borrower => {
                let offered = Medium::receive(&*stream, &self.hello.to);
                let (medium, files) = offered.map_err(|error| none(error.to_string()))?;
                let function = &open.grant.function;
                let lending = self.fabric.front_lending(&function.to_string(), &self.hello.from);
                let lending = lending.map_err(|error| none(error.to_string()))?;
                let name = &function.device;
                let Some(carrier) = stream.carrier() else {
                    let access = MediumAccess::Files(files);
                    let device =
                        PlacedDevice::start(name, &medium, access, stream, lending, on_lost)?;
                    open.attached(Attachment::Medium(device.conversation(), None));
                    return show(open, self.follow(open, device, None));
                };
                let session = self.session(open, &medium)?;
                let side = Side::Asks;
                let carried = Carried { carrier, session: session.clone(), side };
                let ended = session.clone();
                // Why that is over is known better there.
                let on_lost: OnLost = Box::new(move |reason| {
                    on_lost(ended.end_reason().map_or(reason, |end| end.to_string()));
                });
                let (access, stream) = (MediumAccess::Carried(carried), Arc::new(session.clone()));
                let device = PlacedDevice::start(name, &medium, access, stream, lending, on_lost);
                let device = device.inspect_err(|_| session.shut_down())?;
                open.attached(Attachment::Medium(device.conversation(), Some(session)));
                show(open, self.follow(open, device, None))
            }
        }
    }

    /// The session with the lender of `medium` on another machine.
    fn session(&self, open: &Open, medium: &Medium) -> Result<CarriedSession, DeviceError> {
        let none = |error: String| DeviceError::new(Errno::NODEV, error);
        let older =
            || none(format!("the node of {} is older than this one; upgrade it", self.hello.to));
        let offered = medium.session.as_ref().ok_or_else(older)?;
        let (link, address) = (self.link.clone(), open.grant.address.clone());
        let (listener, grant) = (self.listener.clone(), open.grant.clone());
        let on_change = Box::new(move |_| listener.link_changed(&grant));
        let hello = self.hello.clone();
        let session = hold_session(offered, self.hold, link, address, hello, on_change);
        session.map_err(|error| none(error.to_string()))
    }

    /// `device`, among the functions of its user: those of a VM, or of a group.
    fn follow(
        &self,
        open: &Open,
        device: impl Device + 'static,
        windows: Option<Box<dyn Windows>>,
    ) -> Box<dyn Device> {
        match self.join(open, device.shape(), windows) {
            Some(membership) => Box::new(Followed::new(device, membership)),
            None => Box::new(device),
        }
    }

    /// The same for a device that another process of this node followed, which its user has programmed. It
    /// `had` these windows, each an address and a length.
    fn follow_again(
        &self,
        open: &Open,
        device: impl Device + 'static,
        windows: Option<Box<dyn Windows>>,
        had: Vec<(u64, u64)>,
    ) -> Box<dyn Device> {
        match self.join(open, device.shape(), windows) {
            Some(membership) => {
                membership.inherit(had);
                Box::new(Followed::again(device, membership, &self.peers, self.gate.clone()))
            }
            None => Box::new(device),
        }
    }

    fn join(
        &self,
        open: &Open,
        shape: &DeviceShape,
        windows: Option<Box<dyn Windows>>,
    ) -> Option<Arc<Membership>> {
        let vm = self.listener.vm_of(&open.path).map(|vm| format!("VM {vm}"));
        let group = || Some(format!("group {}", open.grant.group.as_ref()?));
        let user = vm.or_else(group)?;
        let name = open.grant.function.to_string();
        let membership = Arc::new(self.peers.join(&user, &name, shape, windows));
        *open.membership.lock().unwrap_or_else(PoisonError::into_inner) = Some(membership.clone());
        Some(membership)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc;
    use std::time::Duration;

    use rackbus_devices::nvme::{Nvme, NvmeConfig};
    use rackbus_fabric::rack::Rack;
    use rackbus_fabric::{Fabric, derive};
    use rackbus_link::Conversation;
    use rackbus_memory::Stream;
    use rackbus_pci::endpoint::Endpoint;
    use rackbus_pci::vfio_user::Client;

    use super::*;

    /// A link that says when it is asked to connect, and does so when it is told to.
    struct Slow(mpsc::Sender<()>, Mutex<mpsc::Receiver<Arc<dyn Conversation>>>);

    impl Connect for Slow {
        fn address(&self, _host: &str) -> String {
            unreachable!("the grant has it")
        }

        fn connect(
            &self,
            _address: &str,
            _hello: &Hello,
        ) -> Result<Arc<dyn Conversation>, LinkError> {
            self.0.send(()).unwrap();
            Ok(self.1.lock().unwrap().recv().unwrap())
        }
    }

    struct Nobody;

    fn fabric() -> FabricHandle {
        let file = "name = \"test\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 MiB\"\n\
                    [hosts.beta]\n";
        let rack = Rack::parse("rack.toml", file).unwrap();
        FabricHandle::new(Fabric::new(derive::here(&rack).unwrap()))
    }

    impl UseListener for Nobody {
        fn lender_lost(&self, _grant: &Grant, _reason: &str) {}
        fn vm_of(&self, _socket: &Path) -> Option<String> {
            None
        }
        fn opened(&self, _grant: &Grant, _socket: &Path, _process: u32, _ended: LeaseEnded) {}
    }

    #[test]
    fn a_lease_that_ends_while_its_user_attaches_lets_the_lender_go() {
        let folder = tempfile::tempdir().unwrap();
        let ((asked, asks), (connect, connected)) = (mpsc::channel(), mpsc::channel());
        let link = Arc::new(Slow(asked, Mutex::new(connected)));
        let (fabric, gate) = (fabric(), Gate::new().unwrap());
        let functions = BorrowedFunctions::new(
            "test",
            "beta",
            folder.path(),
            link,
            fabric,
            Arc::new(Nobody),
            gate,
        );
        let (function, address) = ("alpha/nvme0".parse().unwrap(), "nowhere".to_owned());
        let placement = Placement::Borrower;
        let grant = Grant {
            lease: 1,
            function,
            epoch: 1,
            address,
            ttl: 1000,
            placement,
            group: None,
            turn: None,
        };
        let path = functions.open(grant).unwrap();
        let user = std::thread::spawn(move || Client::connect(&path, Duration::from_secs(30)));
        asks.recv().unwrap();
        functions.close(1);
        let mut lender =
            Endpoint::new(Box::new(Nvme::new(&NvmeConfig::memory(1 << 20, "M1")).unwrap()));
        let offer = lender.serve_medium(None).unwrap();
        let medium =
            Medium { class: offer.class.to_owned(), description: offer.description, session: None };
        let (theirs, ours) = UnixStream::pair().unwrap();
        medium.send(&theirs, &offer.files).unwrap();
        connect.send(Arc::new(ours)).unwrap();
        let _user = user.join().unwrap().unwrap();
        assert!(theirs.is_closed(), "the lender is held by a lease that has ended");
    }
}
