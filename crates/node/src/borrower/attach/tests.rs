use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use rackbus_devices::nvme::{Nvme, NvmeConfig};
use rackbus_fabric::rack::Rack;
use rackbus_fabric::{Fabric, derive};
use rackbus_lease::{BorrowerAction, Message};
use rackbus_link::shm::ShmLink;
use rackbus_link::{Conversation, LinkError};
use rackbus_memory::{Handles, Lending, Stream};
use rackbus_pci::endpoint::Endpoint;
use rackbus_pci::vfio_user::Client;
use rackbus_vm::ProcessName;

use super::*;
use crate::BorrowError;
use crate::borrower::BorrowedFunctions;
use crate::borrower::fence_tests::{Follows, ended, grant};
use crate::borrower::host::HostError;
use crate::handover::parcel::{self, Parcel};
use crate::turns::LeaseUse;
use crate::users::VmUser;

const FUNCTION: &str = "alpha/nvme0";
const LONG: Duration = Duration::from_secs(30);

/// A link that says when it is asked to connect, and does so when it is told to.
struct Slow(mpsc::Sender<()>, Mutex<mpsc::Receiver<Arc<dyn Conversation>>>);

impl Connect for Slow {
    fn address(&self, _host: &str) -> String {
        unreachable!("the grant has it")
    }

    fn connect(&self, _address: &str, _hello: &Hello) -> Result<Arc<dyn Conversation>, LinkError> {
        self.0.send(()).unwrap();
        Ok(self.1.lock().unwrap().recv().unwrap())
    }
}

fn fabric() -> FabricHandle {
    let file = "name = \"test\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 MiB\"\n\
                [hosts.beta]\n";
    let rack = Rack::parse("rack.toml", file).unwrap();
    FabricHandle::new(Fabric::new(derive::here(&rack).unwrap()))
}

/// A borrower over a slow link.
struct Borrowing {
    _folder: tempfile::TempDir,
    functions: BorrowedFunctions,
    /// The link is asked to connect.
    asked: mpsc::Receiver<()>,
    connect: mpsc::Sender<Arc<dyn Conversation>>,
    /// What follows from the end of fronts.
    follows: mpsc::Receiver<Vec<BorrowerAction>>,
}

/// A drive that its lender offers the medium of. It is there as long as this is.
struct OfferingDrive {
    _drive: Endpoint,
    stream: UnixStream,
}

impl Borrowing {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ((asks, asked), (connect, connected)) = (mpsc::channel(), mpsc::channel());
        let (follows, following) = mpsc::channel();
        let link = Arc::new(Slow(asks, Mutex::new(connected)));
        let (listener, gate) = (Arc::new(Follows(follows)), Gate::new().unwrap());
        let functions =
            BorrowedFunctions::new("test", "beta", folder.path(), link, fabric(), listener, gate);
        Borrowing { _folder: folder, functions, asked, connect, follows: following }
    }

    /// Serves a lease as the agent does.
    fn open(&self, lease: u64) -> PathBuf {
        let grant = grant(lease, FUNCTION);
        self.functions.decide(|it| it.receive(0, Message::Granted(grant.clone())));
        let path = self.functions.open(grant).unwrap();
        let socket = Ok(path.display().to_string());
        self.functions.decide(|it| it.open_done(lease, socket));
        path
    }

    /// Serves a lease as the agent does, and has a user attach.
    fn attaching(&self, lease: u64) -> std::thread::JoinHandle<bool> {
        let path = self.open(lease);
        let user = std::thread::spawn(move || Client::connect(&path, LONG).is_ok());
        self.asked.recv().unwrap();
        user
    }

    /// Ends a lease as the agent does; what the control plane is told at once.
    fn end(&self, lease: u64) -> Vec<BorrowerAction> {
        self.functions.decide(|it| it.receive(0, ended(lease)));
        self.functions.close(lease);
        self.functions.decide(|it| it.close_done(lease))
    }

    /// Lets the link connect to a lender.
    fn lend(&self) -> OfferingDrive {
        let (lender, ours, _, _) = offered();
        self.connect.send(Arc::new(ours)).unwrap();
        lender
    }
}

/// A lender that has offered its medium, and the borrower's end with what is offered there.
fn offered() -> (OfferingDrive, UnixStream, OfferedMedium, Handles) {
    let config = NvmeConfig::memory(1 << 20, "M1");
    let mut drive = Endpoint::new(Box::new(Nvme::new(&config).unwrap()));
    let offer = drive.serve_medium(None).unwrap();
    let (class, description) = (offer.class.to_owned(), offer.description);
    let medium = OfferedMedium { class, description, session: None };
    let (stream, ours) = UnixStream::pair().unwrap();
    medium.send(&stream, &offer.handles).unwrap();
    (OfferingDrive { _drive: drive, stream }, ours, medium, offer.handles)
}

fn closed(lease: u64) -> BorrowerAction {
    BorrowerAction::Send(Message::Closed { lease })
}

#[test]
fn a_lease_that_ends_while_its_user_attaches_releases_the_lender() {
    let borrowing = Borrowing::new();
    let user = borrowing.attaching(1);
    assert_eq!(borrowing.end(1), [closed(1)]);
    let lender = borrowing.lend();
    assert!(!user.join().unwrap(), "a front began under a lease that was said to be closed");
    assert!(lender.stream.is_closed(), "the lender is held by a lease that has ended");
}

/// It ended after its front was let begin.
#[test]
fn what_attaches_to_a_lease_that_has_ended_lets_its_lender_go() {
    let borrowing = Borrowing::new();
    let grant = grant(1, FUNCTION);
    borrowing.functions.decide(|it| it.receive(0, Message::Granted(grant.clone())));
    let open = borrowing.functions.opened(grant);
    let slot = open.begin_front(Duration::ZERO).unwrap();
    let (lender, ours, medium, handles) = offered();
    let (access, lost) = (MediumAccess::Handles(handles), Box::new(drop));
    let front =
        PlacedDevice::start("d", &medium, access, Arc::new(ours), Lending::alone(), lost).unwrap();
    assert_eq!(borrowing.end(1), [], "its front runs");
    open.attached(Attachment::Medium(front.conversation(), None));
    assert!(lender.stream.is_closed(), "the lender is held by a lease that has ended");
    assert!(borrowing.follows.try_recv().is_err(), "its front runs");
    let _front = front.keeping(slot);
    assert_eq!(borrowing.follows.recv_timeout(LONG).unwrap(), [closed(1)]);
}

#[test]
fn a_lease_is_closed_when_its_front_has_ended() {
    let borrowing = Borrowing::new();
    let user = borrowing.attaching(1);
    let lender = borrowing.lend();
    assert!(user.join().unwrap());
    let at_once = borrowing.end(1);
    assert!(lender.stream.is_closed());
    // Its engine may be as fast as who closes.
    let told = match at_once.is_empty() {
        true => borrowing.follows.recv_timeout(LONG).unwrap(),
        false => at_once,
    };
    assert_eq!(told, [closed(1)]);
}

/// A program may open a function and release it just before the node is restarted in place: nobody has looked by then.
#[test]
fn what_was_used_before_a_restart_in_place_is_known_after_it() {
    let before = Borrowing::new();
    let user = before.attaching(1);
    let _lender = before.lend();
    assert!(user.join().unwrap());
    before.open(2);
    let begun = Instant::now();
    while before.functions.use_of(1) != LeaseUse::Released {
        assert!(begun.elapsed() < LONG, "its user stays");
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut parcel = Parcel::default();
    let mut saved = before.functions.save(&mut parcel).unwrap();
    let states = serde_json::to_vec(&std::mem::take(&mut saved.states)).unwrap();
    let decided = before.functions.decide(|borrower| borrower.clone());
    let (states, mut descriptors) = parcel::receive(parcel.send(&states).unwrap()).unwrap();
    let states = serde_json::from_slice(&states).unwrap();
    let after = Borrowing::new();
    let link = ShmLink::new("test", std::path::Path::new("/nowhere"), ["alpha"]);
    after.functions.resume(decided, (states, Vec::new()), &mut descriptors, &link).unwrap();
    assert_eq!(after.functions.use_of(1), LeaseUse::Released);
    assert_eq!(after.functions.use_of(2), LeaseUse::Unused);
}

/// Its device reaches this host's memory as a front here does.
#[test]
fn a_function_in_this_hosts_tree_appears_only_when_a_front_of_it_may_begin() {
    let borrowing = Borrowing::new();
    let in_host = |lease| Grant { placement: Placement::Host, ..grant(lease, FUNCTION) };
    let begin = |lease| {
        borrowing.functions.decide(|it| it.receive(0, Message::Granted(in_host(lease))));
    };
    begin(1);
    borrowing.functions.decide(|it| it.receive(0, ended(1)));
    let refused = borrowing.functions.open(in_host(1)).unwrap_err();
    assert!(matches!(refused, BorrowError::Front(FrontRefused::NotServed(1))), "{refused}");
    // One that cannot appear is none that still reaches anything, and its lender is not asked for it.
    begin(2);
    let refused = borrowing.functions.open(in_host(2)).unwrap_err();
    assert!(matches!(refused, BorrowError::Host(HostError::NoNtb(_))), "{refused}");
    borrowing.functions.fence.begin_front(2, Duration::ZERO).unwrap();
}

/// Says which VM runs, and hears which processes leases are to end with.
struct Starting {
    vm: Mutex<Option<VmUser>>,
    watched: Mutex<Vec<(VmUser, LeaseEnded)>>,
}

impl UseListener for Starting {
    fn lender_lost(&self, _grant: &Grant, _reason: &str) {}
    fn vm_of(&self, _socket: &Path) -> Option<String> {
        None
    }
    fn user_of(&self, _socket: &Path, _process: u32) -> Option<VmUser> {
        None
    }
    fn running_vm(&self, _socket: &Path) -> Option<VmUser> {
        self.vm.lock().unwrap().clone()
    }
    fn used(&self, _grant: &Grant, user: &VmUser, ended: LeaseEnded) {
        self.watched.lock().unwrap().push((user.clone(), ended));
    }
    fn front_ended(&self, _actions: Vec<BorrowerAction>) {}
}

/// A borrower with a lease that this process has asked for, for a VM which it starts.
fn starting() -> (tempfile::TempDir, BorrowedFunctions, Arc<Starting>) {
    let folder = tempfile::tempdir().unwrap();
    let listener = Arc::new(Starting { vm: Mutex::default(), watched: Mutex::default() });
    let link = Arc::new(Slow(mpsc::channel().0, Mutex::new(mpsc::channel().1)));
    let (told, gate) = (listener.clone(), Gate::new().unwrap());
    let functions =
        BorrowedFunctions::new("test", "beta", folder.path(), link, fabric(), told, gate);
    let starter = ProcessName::own().map(|name| name.to_string());
    functions.open(Grant { starter, ..grant(1, FUNCTION) }).unwrap();
    (folder, functions, listener)
}

/// The process that was watched last, and whether there is nothing to return when it ends.
fn watched(listener: &Starting) -> (VmUser, bool) {
    let (user, ended) = listener.watched.lock().unwrap().pop().unwrap();
    (user, ended())
}

#[test]
fn what_nobody_uses_goes_back_with_who_was_to_start_its_user() {
    let (_folder, functions, listener) = starting();
    let (user, needless) = watched(&listener);
    assert_eq!((user.process, needless), (std::process::id(), false));
    assert!(listener.watched.lock().unwrap().is_empty());
    // Nobody waits for processes of other machines, nor without need.
    let other = ProcessName { namespace: 1, ..ProcessName::own().unwrap() }.to_string();
    for (lease, starter) in [(2, Some(other)), (3, Some("vm1".to_owned())), (4, None)] {
        functions.open(Grant { starter, ..grant(lease, FUNCTION) }).unwrap();
        assert!(listener.watched.lock().unwrap().is_empty());
    }
}

#[test]
fn a_vm_that_runs_keeps_what_it_has_when_who_started_it_ends() {
    let (_folder, functions, listener) = starting();
    let (_, ended) = listener.watched.lock().unwrap().pop().unwrap();
    let vm = VmUser::new("vm1".to_owned(), std::process::id());
    *listener.vm.lock().unwrap() = Some(vm.clone());
    assert!(ended(), "it is taken from a VM that is about to open it");
    let (user, needless) = watched(&listener);
    assert_eq!((user, needless), (vm, false), "its lease ends with nobody");
    *listener.vm.lock().unwrap() = None;
    drop(functions);
    assert!(ended(), "the lease is gone");
}

/// What was returned before is not returned once more, and nobody reads in the log that it is.
#[test]
fn what_has_ended_does_not_go_back_with_who_started_its_user_or_used_it() {
    let (_folder, functions, listener) = starting();
    let (_, starter_needless) = listener.watched.lock().unwrap().pop().unwrap();
    *listener.vm.lock().unwrap() = Some(VmUser::new("vm1".to_owned(), std::process::id()));
    assert!(starter_needless());
    let (_, vm_needless) = listener.watched.lock().unwrap().pop().unwrap();
    *listener.vm.lock().unwrap() = None;
    assert!(!starter_needless() && !vm_needless());
    functions.close(1);
    assert!(starter_needless() && vm_needless());
}
