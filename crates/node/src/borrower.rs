//! The borrower: serves each function this host has borrowed as a vfio-user socket.
//!
//! A lease only makes the socket. Who opens it (QEMU, a userspace driver) attaches to the lender,
//! and who closes it lets go; the lease stays until it is returned, so that a VM may restart. The
//! socket outlives the lender: what is attached when the lender is lost goes on being answered,
//! as by an absent device. So does what is attached when the lease ends: a driver sees a card that
//! was pulled out, and its QEMU no broken connection.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rackbus_control::api::DeviceReport;
use rackbus_control::lease_span;
use rackbus_fabric::FabricHandle;
use rackbus_lease::{Grant, Placement};
use rackbus_link::{Connect, Hello, Medium, Service, VERSION};
use rackbus_memory::Stream;
use rackbus_pci::vfio_user::{Device, DeviceError, Opener, Server, Shown, ShownWith};
use rackbus_vm::{Interrupts, interrupts};
use rustix::io::Errno;

use crate::front::{MediumConversation, PlacedDevice};
use crate::remote::RemoteDevice;
use crate::report;

/// Why a function could not be opened here.
#[derive(Debug, thiserror::Error)]
pub enum BorrowError {
    /// The socket could not be made.
    #[error("the socket {path} cannot be served: {cause}")]
    Socket {
        /// Where it should be.
        path: PathBuf,
        /// Why not.
        cause: std::io::Error,
    },
}

/// Told when somebody uses a function, and when its lender was lost meanwhile.
pub trait UseListener: Send + Sync {
    /// The lender of `grant` is gone, for `reason`.
    fn lender_lost(&self, grant: &Grant, reason: &str);

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
    open: Mutex<BTreeMap<u64, Arc<Open>>>,
}

impl std::fmt::Debug for BorrowedFunctions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BorrowedFunctions").field("host", &self.host).finish_non_exhaustive()
    }
}

/// One borrowed function.
struct Open {
    grant: Grant,
    path: PathBuf,
    server: Mutex<Option<Server>>,
    /// Ends the conversation with the lender, while a user has the socket open.
    end: Mutex<Option<End>>,
    /// The lease has ended: who is being attached lets the lender go at once.
    closed: AtomicBool,
    /// Of the front, where it runs here.
    front: Mutex<Option<MediumConversation>>,
}

/// Lets the lender go: what was attached answers as an absent device from then on.
type End = Box<dyn Fn() + Send>;

impl Open {
    fn server(&self) -> MutexGuard<'_, Option<Server>> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The process that uses it now.
    fn process(&self) -> Option<u32> {
        self.server().as_ref().and_then(Server::client_pid)
    }

    fn end(&self) -> MutexGuard<'_, Option<End>> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A user has attached; `end` lets the lender go.
    fn attached(&self, end: End) {
        let mut current = self.end();
        if self.closed.load(Ordering::Relaxed) {
            end();
        }
        *current = Some(end);
    }

    /// The lease has ended: lets the lender go, also for a user that is attaching now.
    fn close(&self) {
        let current = self.end();
        self.closed.store(true, Ordering::Relaxed);
        if let Some(end) = &*current {
            end();
        }
    }

    fn front(&self) -> MutexGuard<'_, Option<MediumConversation>> {
        self.front.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BorrowedFunctions {
    /// A borrower on `host` that makes its sockets in `folder`, which exists. `fabric` decides which
    /// memory the fronts here reach.
    pub fn new(
        rack: &str,
        host: &str,
        folder: &Path,
        link: Arc<dyn Connect>,
        fabric: FabricHandle,
        listener: Arc<dyn UseListener>,
    ) -> Self {
        let (rack, host, folder) = (rack.to_owned(), host.to_owned(), folder.to_owned());
        BorrowedFunctions { rack, host, folder, link, fabric, listener, open: Mutex::default() }
    }

    /// Makes the function's socket and returns its path. Opening the same lease again changes
    /// nothing.
    ///
    /// # Errors
    /// [`BorrowError`].
    pub fn open(&self, grant: Grant) -> Result<PathBuf, BorrowError> {
        let mut all = self.all();
        if let Some(open) = all.get(&grant.lease).filter(|open| open.grant.same_lease(&grant)) {
            return Ok(open.path.clone());
        }
        let path = socket_path(&self.folder, &grant.function.device, grant.lease);
        let open = Arc::new(Open {
            grant,
            path: path.clone(),
            server: Mutex::default(),
            end: Mutex::default(),
            closed: AtomicBool::new(false),
            front: Mutex::default(),
        });
        let opener = AttachOpener {
            hello: Hello {
                version: VERSION,
                rack: self.rack.clone(),
                from: self.host.clone(),
                to: open.grant.function.host.clone(),
                service: wanted(&open.grant),
            },
            link: self.link.clone(),
            fabric: self.fabric.clone(),
            listener: self.listener.clone(),
            open: Arc::downgrade(&open),
        };
        let server = Server::bind(&path, opener)
            .map_err(|cause| BorrowError::Socket { path: path.clone(), cause })?;
        *open.server() = Some(server);
        all.insert(open.grant.lease, open);
        Ok(path)
    }

    /// Ends a lease's socket: on return it is gone, and the lender is let go. Whoever still has it
    /// open finds an absent device there. Closing what is not open changes nothing.
    pub fn close(&self, lease: u64) {
        let Some(open) = self.all().remove(&lease) else { return };
        open.close();
        let server = open.server().take();
        if let Some(server) = server {
            server.retire();
        }
        interrupts::forget(&open.path);
    }

    /// How the functions are whose fronts run here, by their names in the rack.
    pub fn fronts(&self) -> BTreeMap<String, DeviceReport> {
        let open: Vec<Arc<Open>> = self.all().values().cloned().collect();
        let report = |open: &Arc<Open>| {
            let front = open.front();
            let report = report::of_engine(front.as_ref()?.engine()?, DeviceReport::default());
            Some((open.grant.function.to_string(), report))
        };
        open.iter().filter_map(report).collect()
    }

    /// The socket of a lease, and the process that uses it now.
    pub fn user(&self, lease: u64) -> Option<(PathBuf, Option<u32>)> {
        let open = self.all().get(&lease)?.clone();
        Some((open.path.clone(), open.process()))
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Open>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The half of the function that is attached to.
fn wanted(grant: &Grant) -> Service {
    let Grant { lease, epoch, .. } = *grant;
    let device = grant.function.device.clone();
    match grant.placement {
        Placement::Lender => Service::Function { device, lease, epoch },
        Placement::Borrower => Service::Medium { device, lease, epoch },
    }
}

/// Attaches to the lender for each client that opens the socket.
struct AttachOpener {
    hello: Hello,
    link: Arc<dyn Connect>,
    fabric: FabricHandle,
    listener: Arc<dyn UseListener>,
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
        if let Some(process) = open.process() {
            let lease = self.open.clone();
            // Nobody is there any more, or still that one.
            let same = move |open: &Arc<Open>| open.process().is_none_or(|now| now == process);
            let ended = Box::new(move || !lease.upgrade().is_some_and(|open| same(&open)));
            self.listener.opened(&open.grant, &open.path, process, ended);
        }
        tracing::info!(process = open.process(), "in use");
        Ok(device)
    }
}

/// Shows `device` with the kind of interrupts that its user wants. Without MSI-X a function can be
/// taken out of every running QEMU, which the loss of its lender needs.
fn show(path: &Path, device: impl Device + 'static) -> Result<Box<dyn Device>, DeviceError> {
    let msix = Interrupts::noted(path) != Interrupts::Msi;
    let shown = Shown::choose(device.shape(), msix);
    Ok(Box::new(ShownWith::new(device, shown)?))
}

impl AttachOpener {
    /// The device at the other end of `stream`, or the front here of the medium there.
    fn attach(
        &self,
        open: &Arc<Open>,
        stream: Arc<dyn Stream>,
    ) -> Result<Box<dyn Device>, DeviceError> {
        let (listener, lost) = (self.listener.clone(), self.open.clone());
        let on_lost = Box::new(move |reason: String| {
            if let Some(open) = lost.upgrade() {
                listener.lender_lost(&open.grant, &reason);
            }
        });
        let none = |error: String| DeviceError::new(Errno::NODEV, error);
        match open.grant.placement {
            Placement::Lender => {
                let device = RemoteDevice::attach(stream, on_lost);
                let device = device.map_err(|error| none(error.to_string()))?;
                let conversation = device.conversation();
                open.attached(Box::new(move || conversation.end()));
                show(&open.path, device)
            }
            Placement::Borrower => {
                let offered = Medium::receive(&*stream, &self.hello.to);
                let (medium, files) = offered.map_err(|error| none(error.to_string()))?;
                let function = &open.grant.function;
                let lending = self.fabric.front_lending(&function.to_string(), &self.hello.from);
                let lending = lending.map_err(|error| none(error.to_string()))?;
                let name = &function.device;
                let device = PlacedDevice::start(name, &medium, files, stream, lending, on_lost)?;
                let conversation = device.conversation();
                *open.front() = Some(conversation.clone());
                open.attached(Box::new(move || conversation.end()));
                show(&open.path, device)
            }
        }
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
    use rackbus_link::LinkError;
    use rackbus_pci::endpoint::Endpoint;
    use rackbus_pci::vfio_user::Client;

    use super::*;

    /// A link that says when it is asked to connect, and does so when it is told to.
    struct Slow(mpsc::Sender<()>, Mutex<mpsc::Receiver<Arc<dyn Stream>>>);

    impl Connect for Slow {
        fn address(&self, _host: &str) -> String {
            unreachable!("the grant has it")
        }

        fn connect(&self, _address: &str, _hello: &Hello) -> Result<Arc<dyn Stream>, LinkError> {
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
        fn opened(&self, _grant: &Grant, _socket: &Path, _process: u32, _ended: LeaseEnded) {}
    }

    #[test]
    fn a_lease_that_ends_while_its_user_attaches_lets_the_lender_go() {
        let folder = tempfile::tempdir().unwrap();
        let ((asked, asks), (connect, connected)) = (mpsc::channel(), mpsc::channel());
        let link = Arc::new(Slow(asked, Mutex::new(connected)));
        let functions =
            BorrowedFunctions::new("test", "beta", folder.path(), link, fabric(), Arc::new(Nobody));
        let (function, address) = ("alpha/nvme0".parse().unwrap(), "nowhere".to_owned());
        let placement = Placement::Borrower;
        let grant = Grant { lease: 1, function, epoch: 1, address, ttl: 1000, placement };
        let path = functions.open(grant).unwrap();
        let user = std::thread::spawn(move || Client::connect(&path, Duration::from_secs(30)));
        asks.recv().unwrap();
        functions.close(1);
        let mut lender =
            Endpoint::new(Box::new(Nvme::new(&NvmeConfig::memory(1 << 20, "M1")).unwrap()));
        let offer = lender.serve_medium().unwrap();
        let medium = Medium { class: offer.class.to_owned(), description: offer.description };
        let (theirs, ours) = UnixStream::pair().unwrap();
        medium.send(&theirs, &offer.files).unwrap();
        connect.send(Arc::new(ours)).unwrap();
        let _user = user.join().unwrap().unwrap();
        assert!(theirs.is_closed(), "the lender is held by a lease that has ended");
    }
}
