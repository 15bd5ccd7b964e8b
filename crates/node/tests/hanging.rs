//! A function whose engine hangs, and a host that stalled: what the borrower had lent is not
//! touched any more, whatever the engine does.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use rackbus_control::api::{Device as ApiDevice, DeviceState, HostState, RackStatus};
use rackbus_control::service::{Inventory, InventoryDevice};
use rackbus_control::{ControlClient, ServiceOptions};
use rackbus_fabric::rack::DeviceCapability;
use rackbus_fabric::{Fabric, FabricHandle};
use rackbus_lease::{BorrowerAction, Config, Grant, LenderAction, Message, Placement};
use rackbus_link::shm::ShmLink;
use rackbus_link::{Connect, Hello, IncomingConnection, Link, Purpose, VERSIONS};
use rackbus_memory::{
    Access, DmaSpace, Event, GatePassage, Handles, PinnedSlice, SharedMemory, Stream,
};
use rackbus_node::agent::{Agent, AgentIdentity, inbox};
use rackbus_node::borrower::{BorrowedFunctions, LeaseEnded, UseListener, functions_folder};
use rackbus_node::unplug::Unplugger;
use rackbus_node::users::VmUser;
use rackbus_node::{LendError, LentFunctions, Modelled, RemoteDevice, control_socket};
use rackbus_pci::endpoint::FunctionRegion;
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::{Client, ClientError, ServedDevice};
use rackbus_pci::{Bar, Bus, Function, FunctionInfo, ResetKind, Work};
use rackbus_spec::vfio_user::irq;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

const RACK: &str = "name = \"test\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\n\
                    size = \"1 MiB\"\n[hosts.beta]\n";
/// How long the lender waits for its engine here: one that does not hang answers within it also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);
const LONG: Duration = Duration::from_secs(60);

/// Where the device model waits until it is released.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    moved: Condvar,
}

#[derive(Default)]
struct GateState {
    reached: bool,
    open: bool,
    passed: bool,
}

impl Gate {
    fn change(&self, change: impl FnOnce(&mut GateState)) {
        change(&mut self.state.lock().unwrap());
        self.moved.notify_all();
    }

    fn wait(&self, until: impl Fn(&GateState) -> bool) {
        let state = self.state.lock().unwrap();
        let (_state, waited) =
            self.moved.wait_timeout_while(state, LONG, |state| !until(state)).unwrap();
        assert!(!waited.timed_out(), "it never came");
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Where {
    Poll,
    Quiesce,
}

/// Hangs where it is told to after a register was written, and then goes on as if nothing had been.
struct Hanging {
    info: FunctionInfo,
    place: Where,
    gate: Arc<Gate>,
    memory: Option<PinnedSlice>,
}

impl Hanging {
    fn new(place: Where, gate: Arc<Gate>) -> Self {
        let bar =
            Bar { index: 0, size: 0x1000, is_64bit: true, prefetchable: false, mappable: None };
        let info = FunctionInfo {
            vendor_id: 0x1234,
            device_id: 0x5678,
            subsystem_vendor_id: 0,
            subsystem_id: 0,
            revision: 1,
            class: [0xff, 0, 0],
            bars: vec![bar],
            msix_vectors: 1,
            msi_vectors: 0,
            vendor: Vec::new(),
            serial: 1,
        };
        Hanging { info, place, gate, memory: None }
    }

    fn hang(&mut self, bus: &Bus<'_>) {
        let Some(memory) = self.memory.take() else { return };
        self.gate.change(|gate| gate.reached = true);
        self.gate.wait(|gate| gate.open);
        memory.get().fill(0xbb);
        let _ = bus.dma.write(0, &[0xbb; 8]);
        bus.irq.trigger(0);
        self.gate.change(|gate| gate.passed = true);
    }

    fn pin(dma: &DmaSpace) -> PinnedSlice {
        dma.pin(0, 0x1000, Access::WRITE).unwrap()
    }
}

impl Function for Hanging {
    fn info(&self) -> &FunctionInfo {
        &self.info
    }

    fn bar_read(&mut self, _: &Bus<'_>, _: u8, _: u64, _: &mut [u8]) {}

    fn bar_write(&mut self, bus: &Bus<'_>, _: u8, _: u64, _: &[u8]) {
        self.memory = Some(Hanging::pin(bus.dma));
    }

    fn reset(&mut self, _: &Bus<'_>, _: ResetKind) {}

    fn poll(&mut self, bus: &Bus<'_>) -> Work {
        if self.place == Where::Poll {
            self.hang(bus);
        }
        Work::Asleep(None)
    }

    fn park(&mut self, _: &Bus<'_>) -> bool {
        true
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn quiesce(&mut self, bus: &Bus<'_>) {
        if self.place == Where::Quiesce {
            self.hang(bus);
        }
    }
}

fn fabric() -> FabricHandle {
    let rack = rackbus_fabric::rack::Rack::parse("rack.toml", RACK).unwrap();
    FabricHandle::new(Fabric::new(rackbus_fabric::derive::here(&rack).unwrap()))
}

fn lender(place: Where, gate: &Arc<Gate>) -> Arc<LentFunctions> {
    let lender = LentFunctions::new("alpha", fabric()).with_patience(PATIENCE);
    let gate = gate.clone();
    let make = move || Ok(Box::new(Hanging::new(place, gate.clone())) as Box<dyn Function>);
    let modelled = Modelled::new("nvme0", Box::new(make), EngineOptions::default());
    lender.add("nvme0", Arc::new(modelled)).unwrap();
    Arc::new(lender)
}

/// The borrower of an epoch, with memory and an interrupt wired.
struct User {
    client: Client,
    memory: SharedMemory,
    event: Event,
}

/// Nobody closes the gate of this process.
fn passage() -> GatePassage {
    rackbus_memory::Gate::new().unwrap().enter()
}

fn incoming(stream: UnixStream, epoch: u64) -> IncomingConnection {
    let service = Purpose::Function { device: "nvme0".into(), lease: epoch, epoch };
    let (rack, from, to) = ("test".into(), "beta".into(), "alpha".into());
    let hello = Hello { versions: VERSIONS, rack, from, to, service };
    IncomingConnection { hello, version: VERSIONS.newest(), stream: Arc::new(stream) }
}

/// The welcome comes first; vfio-user takes over from there.
fn hear_welcome(stream: &UnixStream) {
    let mut length = [0; 4];
    stream.receive(&mut length, &mut Handles::new()).unwrap();
    let mut welcome = vec![0; u32::from_le_bytes(length) as usize];
    stream.receive(&mut welcome, &mut Handles::new()).unwrap();
}

/// The control plane has the lender let beta in.
fn arm(lender: &LentFunctions, epoch: u64) {
    let (device, borrower) = ("nvme0".to_owned(), "beta".to_owned());
    let message = Message::Arm {
        incarnation: 0,
        device,
        lease: epoch,
        epoch,
        borrower,
        placement: Placement::Lender,
        level: None,
        serve_for: None,
    };
    let decided = lender.receive(0, message);
    let [LenderAction::Arm { device, epoch, .. }] = &decided[..] else { panic!("{decided:?}") };
    let said = lender.arm(device, *epoch, None);
    assert!(matches!(said[..], [LenderAction::Send(Message::Armed { .. })]), "{said:?}");
}

/// The control plane has the lender take its function back.
fn decide_revocation(lender: &LentFunctions, epoch: u64) {
    let revoke = Message::Revoke { incarnation: 0, device: "nvme0".to_owned(), epoch };
    let decided = lender.receive(0, revoke);
    assert!(matches!(decided[..], [LenderAction::Revoke { .. }]), "{decided:?}");
}

fn borrow(lender: &Arc<LentFunctions>, epoch: u64) -> User {
    arm(lender, epoch);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (incoming, lender) = (incoming(theirs, epoch), lender.clone());
    std::thread::spawn(move || lender.attend(incoming, &passage()));
    hear_welcome(&ours);
    let client = Client::with_stream(Arc::new(ours)).unwrap();
    let memory = SharedMemory::create("guest", 0x1000).unwrap();
    client.write(7, 4, &6u16.to_le_bytes()).unwrap();
    client.dma_map(0, 0x1000, Access::all(), Some((memory.as_fd(), 0))).unwrap();
    let event = Event::new().unwrap();
    let wire = event.as_fd().try_clone_to_owned().unwrap();
    client.wire_irqs(irq::MSIX, 0, &[Some(wire)]).unwrap();
    memory.whole().fill(0xaa);
    User { client, memory, event }
}

impl User {
    fn untouched(&self) -> bool {
        let mut bytes = [0; 0x1000];
        self.memory.whole().copy_to(&mut bytes);
        bytes == [0xaa; 0x1000] && !self.event.drain()
    }
}

fn revocation_of_what_hangs(place: Where) {
    let gate = Arc::new(Gate::default());
    let lender = lender(place, &gate);
    let user = borrow(&lender, 1);
    user.client.write(0, 0, &[1]).unwrap();
    if place == Where::Poll {
        gate.wait(|gate| gate.reached);
    }
    decide_revocation(&lender, 1);
    let error = lender.revoke("nvme0", 1).unwrap_err();
    assert!(matches!(error, LendError::Hangs { .. }), "{error}");
    let trouble = || lender.report()["nvme0"].trouble.clone();
    assert!(trouble().unwrap().contains("does not answer"));
    let (device, borrower) = ("nvme0".to_owned(), "beta".to_owned());
    let next = Message::Arm {
        incarnation: 0,
        device,
        lease: 2,
        epoch: 2,
        borrower,
        placement: Placement::Lender,
        level: None,
        serve_for: None,
    };
    assert_eq!(
        lender.receive(0, next),
        [],
        "it is lent while its old borrower's memory is reachable"
    );
    // It comes back with addresses of the borrower's in its hands.
    gate.change(|gate| gate.open = true);
    gate.wait(|gate| gate.passed);
    assert!(user.untouched(), "the engine reaches the borrower's memory");
    let said = lender.finish("nvme0", 1);
    assert!(
        matches!(said[..], [LenderAction::Send(Message::Revoked { epoch: 1, .. })]),
        "{said:?}"
    );
    assert!(user.untouched());
    assert_eq!(trouble(), None);
    assert!(matches!(user.client.write(0, 0, &[1]), Err(ClientError::Wire(_))));
    // The next borrower has a function that works.
    let next = borrow(&lender, 2);
    next.client.write(0, 0, &[1]).unwrap();
    if place == Where::Quiesce {
        next.client.dma_unmap_all().unwrap();
    }
    Event::wait_any(&[next.event.as_fd()], Some(20_000_000_000));
    assert!(next.event.drain(), "its interrupts arrive");
    assert_eq!(next.memory.whole().read_obj::<u8>(0), Some(0xbb));
}

#[test]
fn an_engine_that_hangs_in_a_poll_loses_its_borrowers_memory() {
    revocation_of_what_hangs(Where::Poll);
}

#[test]
fn an_engine_that_hangs_while_it_waits_for_io_loses_its_borrowers_memory() {
    revocation_of_what_hangs(Where::Quiesce);
}

/// The test runs itself as the lender, which is stopped for longer than its borrower waits.
#[test]
fn a_lender_that_stalled_does_not_go_on_with_what_was_given_up() {
    const LENDER: &str = "RACKBUS_LENDER_SOCKET";
    if let Ok(path) = std::env::var(LENDER) {
        let gate = Arc::new(Gate::default());
        gate.change(|gate| gate.open = true);
        let lender = lender(Where::Poll, &gate);
        arm(&lender, 1);
        lender.attend(incoming(UnixStream::connect(path).unwrap(), 1), &passage());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("link.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let mut lender = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_lender_that_stalled_does_not_go_on_with_what_was_given_up"])
        .env(LENDER, &path)
        .spawn()
        .unwrap();
    let stream = listener.accept().unwrap().0;
    hear_welcome(&stream);
    stream.set_read_timeout(Some(LONG)).unwrap();
    let stream = Arc::new(stream);
    let (lost, loss) = std::sync::mpsc::channel();
    let on_lost = Box::new(move |_| lost.send(()).unwrap());
    let device = RemoteDevice::attach(stream.clone(), on_lost).unwrap();
    let memory = SharedMemory::create("guest", 0x1000).unwrap();
    device.write(FunctionRegion::Config, 4, vec![6, 0], false).unwrap();
    device.map(0, 0x1000, Access::all(), Some(memory.handle(0))).unwrap();
    device.write(FunctionRegion::Bar(0), 0, vec![1], false).unwrap();
    while memory.whole().read_obj::<u8>(0x800) != Some(0xbb) {
        std::thread::yield_now();
    }

    let pid = Pid::from_child(&lender);
    kill_process(pid, Signal::STOP).unwrap();
    waitpid(Some(pid), WaitOptions::UNTRACED).unwrap();
    // It is not waited for long from now on.
    stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    // The guest asks for something, gets no answer, and does something else with its memory.
    device.write(FunctionRegion::Bar(0), 0, vec![1], true).unwrap();
    assert_eq!(device.read(FunctionRegion::Bar(0), 0, 4).unwrap(), [0xff; 4], "it is given up");
    loss.recv_timeout(LONG).unwrap();
    memory.whole().fill(0xaa);
    kill_process(pid, Signal::CONT).unwrap();
    assert!(lender.wait().unwrap().success());
    let mut bytes = [0; 0x1000];
    memory.whole().copy_to(&mut bytes);
    assert!(bytes == [0xaa; 0x1000], "the lender wrote into memory that is somebody else's");
}

/// Nobody is told of losses here.
struct Unheard;

impl UseListener for Unheard {
    fn vm_of(&self, _socket: &Path) -> Option<String> {
        None
    }
    fn user_of(&self, _: &Path, _: u32) -> Option<VmUser> {
        None
    }
    fn running_vm(&self, _: &Path) -> Option<VmUser> {
        None
    }
    fn lender_lost(&self, _: &Grant, _: &str) {}
    fn used(&self, _: &Grant, _: &VmUser, _: LeaseEnded) {}
    fn front_ended(&self, _: Vec<BorrowerAction>) {}
}

/// A control plane with hosts alpha, whose device hangs, and beta, in this process.
async fn rack(run_dir: &Path, gate: &Arc<Gate>) -> ControlClient {
    let nvme0 = InventoryDevice {
        function: "alpha/nvme0".parse().unwrap(),
        kind: "nvme".into(),
        capabilities: &[DeviceCapability::Blocks],
        detail: String::new(),
        separable: true,
        windows: Default::default(),
    };
    let inventory = Inventory {
        sections: Default::default(),
        rack: "test".into(),
        hosts: vec!["alpha".into(), "beta".into()],
        devices: vec![nvme0].into(),
        ..Inventory::default()
    };
    let options = ServiceOptions {
        inventory,
        read_rack: None,
        read_file: None,
        config: Config::default(),
        database: run_dir.join("state.db"),
        log_lines_left_out: || 0,
        is_node: Arc::new(|_, _| false),
    };
    let control = control_socket(run_dir);
    let client = ControlClient::new(&control);
    let service = rackbus_control::Service::open(options).unwrap();
    let socket = control.clone();
    tokio::spawn(async move { rackbus_control::serve(service, &socket).await });
    for (host, lender) in [
        ("alpha", lender(Where::Poll, gate)),
        ("beta", Arc::new(LentFunctions::new("beta", fabric()))),
    ] {
        let folder = functions_folder(run_dir, host);
        std::fs::create_dir_all(&folder).unwrap();
        let link = Arc::new(ShmLink::new("test", run_dir, ["alpha", "beta"]));
        let listener = link.listen(host).unwrap();
        let attending = lender.clone();
        std::thread::spawn(move || {
            while let Ok(caller) = listener.accept() {
                let attending = attending.clone();
                std::thread::spawn(move || attending.attend(caller.hear().unwrap(), &passage()));
            }
        });
        let address = link.address(host);
        let (host, control) = (host.to_owned(), control.clone());
        let unheard = Arc::new(Unheard);
        let borrower = BorrowedFunctions::new(
            "test",
            &host,
            &folder,
            link,
            fabric(),
            unheard,
            rackbus_memory::Gate::new().unwrap(),
        );
        let unplugger = Unplugger::new(run_dir, &host);
        let term = folder.join("control.term");
        let identity = AgentIdentity { host, address, control, term };
        let (heard, inbox) = inbox();
        let (borrower, observe) = (Arc::new(borrower), Box::new(Default::default));
        let agent = Agent::new(identity, lender, borrower, unplugger, observe, heard);
        tokio::spawn(agent.run(inbox));
    }
    let up = async {
        let all_up = |status: RackStatus| status.hosts.iter().all(|it| it.state == HostState::Up);
        while !client.status().await.is_ok_and(all_up) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, up).await.expect("the hosts do not come up");
    client
}

/// The user is told why a function is not offered again, and it is when it can be.
#[tokio::test(flavor = "multi_thread")]
async fn a_return_that_waits_for_what_hangs_says_so_and_ends() {
    let folder = tempfile::tempdir().unwrap();
    let gate = Arc::new(Gate::default());
    let client = rack(folder.path(), &gate).await;
    let look = async |until: &dyn Fn(&ApiDevice) -> bool| {
        let looking = async {
            loop {
                let devices = client.devices().await.unwrap_or_default();
                if let Some(device) = devices.into_iter().find(until) {
                    return device;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(LONG, looking).await.expect("it never comes to that")
    };
    look(&|device| device.state == DeviceState::Offered).await;
    let lease = client.borrow("alpha/nvme0", "beta").await.unwrap();
    let socket = lease.socket.unwrap();
    let (reached, memory) = (gate.clone(), SharedMemory::create("guest", 0x1000).unwrap());
    let using = tokio::task::spawn_blocking(move || {
        let user = Client::connect(Path::new(&socket), Duration::from_secs(60)).unwrap();
        user.write(7, 4, &6u16.to_le_bytes()).unwrap();
        user.dma_map(0, 0x1000, Access::all(), Some((memory.as_fd(), 0))).unwrap();
        memory.whole().fill(0xaa);
        user.write(0, 0, &[1]).unwrap();
        reached.wait(|gate| gate.reached);
        (user, memory)
    });
    let (_user, memory) = using.await.unwrap();
    let returning = {
        let client = client.clone();
        tokio::spawn(async move { client.give_back(lease.lease).await })
    };
    let trouble = |device: &ApiDevice| device.report.as_ref()?.trouble.clone();
    let hanging = look(&|device| trouble(device).is_some()).await;
    assert_eq!(hanging.state, DeviceState::Returning, "{hanging:?}");
    let refused = client.borrow("alpha/nvme0", "beta").await.unwrap_err().to_string();
    assert!(refused.contains("does not answer"), "{refused}");
    assert!(!returning.is_finished(), "it is said to be back");
    gate.change(|gate| gate.open = true);
    assert!(returning.await.unwrap().unwrap().returned);
    assert_eq!(memory.whole().read_obj::<u8>(0), Some(0xaa));
    look(&|device| device.state == DeviceState::Offered && trouble(device).is_none()).await;
}
