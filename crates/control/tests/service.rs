//! The control plane's process by itself: callers that go, nodes that do not listen, a store that
//! makes it wait. The nodes are played by the test.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rackbus_control::api::{
    BorrowRequest, Change, DeviceReport, DeviceState, EventKind, EventRecord, HostState, Isolation,
    LONGEST_LEVEL, Lease, LeaseStage, NodeMessages, NodeReport, Placement,
};
use rackbus_control::client::JsonLines;
use rackbus_control::compositions::CompositionSpec;
use rackbus_control::said::NodeLine;
use rackbus_control::service::{Inventory, InventoryDevice};
use rackbus_control::store::{Commit, MemoryStore, StoreError};
use rackbus_control::together::BorrowAllRequest;
use rackbus_control::{ControlClient, ControlClientError, Service, ServiceOptions, serve};
use rackbus_fabric::rack::DeviceCapability;
use rackbus_lease::{Config, LevelChange, Message, Record};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// After this long a test fails instead of waiting on.
const PATIENCE: Duration = Duration::from_secs(120);

struct Control {
    folder: tempfile::TempDir,
    client: ControlClient,
}

impl Control {
    /// A control plane with two hosts that have registered.
    async fn start() -> Control {
        Control::start_with(None).await
    }

    /// The same, whose state is in `store`.
    async fn start_with(store: Option<MemoryStore>) -> Control {
        let folder = tempfile::tempdir().unwrap();
        let device = InventoryDevice {
            function: "alpha/nvme0".parse().unwrap(),
            kind: "nvme".to_owned(),
            capabilities: &[DeviceCapability::Blocks],
            detail: String::new(),
            separable: true,
            windows: Default::default(),
        };
        let accel = InventoryDevice {
            function: "alpha/accel0.vf1".parse().unwrap(),
            kind: "accelerator".to_owned(),
            capabilities: &[DeviceCapability::Engines],
            detail: String::new(),
            separable: false,
            windows: Default::default(),
        };
        let inventory = Inventory {
            sections: Default::default(),
            rack: "lab".to_owned(),
            hosts: vec!["alpha".to_owned(), "beta".to_owned()],
            devices: vec![device, accel].into(),
            ..Inventory::default()
        };
        let database = folder.path().join("control.db");
        let options = ServiceOptions {
            inventory,
            read_rack: None,
            read_file: None,
            config: Config::default(),
            database,
            log_lines_left_out: || 7,
            is_node: Arc::new(|_, _| false),
        };
        let service = match store {
            Some(store) => Service::open_with(options, Box::new(store)),
            None => Service::open(options),
        };
        let service = service.unwrap();
        let socket = folder.path().join("control.sock");
        let client = ControlClient::new(&socket);
        let serving: Arc<Path> = socket.into();
        tokio::spawn(async move { serve(service, &serving).await });
        while client.status().await.is_err() {
            tokio::task::yield_now().await;
        }
        let control = Control { folder, client };
        control.say("alpha", vec![register("alpha", true)]).await.unwrap();
        control.say("beta", vec![register("beta", false)]).await.unwrap();
        control
    }

    async fn say(&self, host: &str, messages: Vec<Message>) -> Result<(), ControlClientError> {
        self.client.say(host, &NodeMessages { messages, report: None }).await
    }

    /// The nodes do what the only lease there is needs to become active.
    async fn activate(&self) -> Lease {
        let lease = self.wait_stage(LeaseStage::Arming).await;
        let device = "nvme0".to_owned();
        let armed = Message::Armed { incarnation: 1, device, epoch: lease.epoch, change: None };
        self.say("alpha", vec![armed]).await.unwrap();
        self.wait_stage(LeaseStage::Opening).await;
        let opened = Message::Opened { lease: lease.lease, outcome: Ok("socket".to_owned()) };
        self.say("beta", vec![opened]).await.unwrap();
        self.wait_stage(LeaseStage::Active).await
    }

    /// The nodes do what its return needs.
    async fn take_back(&self, lease: &Lease) {
        self.say("beta", vec![Message::Closed { lease: lease.lease }]).await.unwrap();
        let device = "nvme0".to_owned();
        let revoked = Message::Revoked { incarnation: 1, device, epoch: lease.epoch };
        self.say("alpha", vec![revoked]).await.unwrap();
    }

    /// A request as any program may make it: its status and its answer.
    async fn ask(&self, method: &str, path: &str, key: &str, body: &str) -> (u16, String) {
        let mut caller = UnixStream::connect(self.path("control.sock")).await.unwrap();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: rackbus\r\nconnection: close\r\n\
             idempotency-key: {key}\r\ncontent-type: application/json\r\n\
             content-length: {length}\r\n\r\n{body}"
        );
        caller.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        caller.read_to_string(&mut answer).await.unwrap();
        let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
        let body = answer.split_once("\r\n\r\n").unwrap().1;
        (status, body.to_owned())
    }

    /// What happened, of one kind or of all.
    async fn events(&self, kind: Option<EventKind>) -> Vec<EventRecord> {
        let mut lines = self.client.events(kind, None, false).await.unwrap();
        let mut events = Vec::new();
        while let Some(event) = lines.next().await {
            events.push(event);
        }
        events
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Waits until the only lease there ever was stands at `stage`.
    async fn wait_stage(&self, stage: LeaseStage) -> Lease {
        let looked = async {
            loop {
                let leases = self.client.leases(true).await.unwrap();
                if let Some(lease) = leases.into_iter().find(|l| l.stage == stage) {
                    return lease;
                }
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, looked).await.expect("nothing happens any more")
    }
}

fn register(host: &str, lends: bool) -> Message {
    let devices = lends.then(|| ("nvme0".to_owned(), 0)).into_iter().collect();
    let address = host.to_owned();
    Message::Register { incarnation: 1, devices, newest_lease: 0, address }
}

fn register_again(host: &str, incarnation: u64) -> Message {
    let devices = [("nvme0".to_owned(), 0)].into();
    Message::Register { incarnation, devices, newest_lease: 0, address: host.to_owned() }
}

/// What is said next, beside that the control plane is there.
async fn next_message(heard: &mut JsonLines<NodeLine>) -> Option<Message> {
    loop {
        let said = heard.next().await?;
        assert!(said.term > 0, "{said:?}");
        if said.message.is_some() {
            return said.message;
        }
    }
}

/// A node that was spoken to in a later term than the control plane knows of: its records are an older copy.
#[tokio::test]
async fn a_control_plane_goes_on_in_a_later_term_than_all_that_nodes_know() {
    let control = Control::start().await;
    let first = control.client.listen("alpha", 0).await.unwrap().next().await.unwrap();
    let later = control.client.listen("alpha", 40).await.unwrap().next().await.unwrap();
    assert_eq!((first.term, later.term), (1, 41));
    let same = control.client.listen("beta", 41).await.unwrap().next().await.unwrap();
    assert_eq!(same.term, 41);
    // One node cannot use up the numbers, however often it says so.
    let said = control.client.listen("beta", u64::MAX).await;
    let Err(ControlClientError::Refused(refused)) = said else { panic!("it is heard: {said:?}") };
    assert_eq!(refused.code, "implausible_term");
    let status = control.client.control().await.unwrap();
    assert_eq!((status.term, status.leads, status.store.as_str()), (Some(41), true, "sqlite"));
}

/// The test runs itself as another process of the same user.
#[tokio::test]
async fn only_its_node_acts_for_a_host() {
    const STRANGER: &str = "RACKBUS_CONTROL_STRANGER";
    if let Some(socket) = std::env::var_os(STRANGER) {
        let client = ControlClient::new(Path::new(&socket));
        let said = NodeMessages { messages: vec![register("alpha", false)], report: None };
        let spoken = client.say("alpha", &said).await;
        let heard = client.listen("alpha", 0).await.map(drop);
        for refused in [spoken, heard] {
            let Err(ControlClientError::Refused(refused)) = refused else {
                panic!("a stranger is heard: {refused:?}")
            };
            assert_eq!(refused.code, "not_the_node");
        }
        client.status().await.expect("it may ask like everybody");
        return;
    }
    let control = Control::start().await;
    let mut stranger = tokio::process::Command::new(std::env::current_exe().unwrap());
    stranger.args(["--exact", "only_its_node_acts_for_a_host"]);
    stranger.env(STRANGER, control.path("control.sock"));
    assert!(stranger.status().await.unwrap().success());
}

/// A function that its lender must run whole: no lease is begun, and a composition that could not be borrowed
/// is not saved.
#[tokio::test]
async fn terms_that_cannot_be_kept_are_refused_before_anything_is_decided() {
    let control = Control::start().await;
    let strict = BorrowRequest {
        isolation: Isolation::Strict,
        ..BorrowRequest::new("alpha/accel0.vf1", "beta")
    };
    let error = control.client.borrow_as(&strict).await.unwrap_err();
    let ControlClientError::Refused(error) = error else { panic!("{error}") };
    assert_eq!(error.code, "inseparable");
    assert!(error.error.starts_with("alpha/accel0.vf1 cannot be borrowed with strict"), "{error}");
    let windows = [(Isolation::Shared, "no_window"), (Isolation::Strict, "contradiction")];
    for (isolation, code) in windows {
        let placement = Some(Placement::Host);
        let in_tree =
            BorrowRequest { isolation, placement, ..BorrowRequest::new("alpha/nvme0", "beta") };
        let error = control.client.borrow_as(&in_tree).await.unwrap_err();
        let ControlClientError::Refused(error) = error else { panic!("{error}") };
        assert_eq!(error.code, code, "{error}");
    }
    let level = Some("x".repeat(1 << 20));
    let long = BorrowRequest { level, ..BorrowRequest::new("alpha/nvme0", "beta") };
    let error = control.client.borrow_as(&long).await.unwrap_err();
    let ControlClientError::Refused(error) = error else { panic!("{error}") };
    assert_eq!(error.code, "bad_request");
    let spec = CompositionSpec {
        name: "both".to_owned(),
        borrower: "beta".to_owned(),
        functions: vec!["alpha/nvme0".to_owned(), "alpha/accel0.vf1".to_owned()],
        isolation: Isolation::Strict,
    };
    let error = control.client.save_composition(&spec).await.unwrap_err();
    let ControlClientError::Refused(error) = error else { panic!("{error}") };
    assert_eq!(error.code, "inseparable");
    assert!(control.client.leases(true).await.unwrap().is_empty());
    assert!(control.client.compositions().await.unwrap().is_empty());
    let twice = BorrowAllRequest {
        functions: vec!["alpha/nvme0".to_owned(), "alpha/nvme0".to_owned()],
        borrower: "beta".to_owned(),
        placement: Placement::Lender,
        group: None,
        vm: None,
        wait_ms: None,
        priority: 0,
    };
    let error = control.client.borrow_together(&twice, "k").await.unwrap_err();
    let ControlClientError::Refused(error) = error else { panic!("{error}") };
    assert_eq!(error.code, "bad_request");
    // They are noted beside the answer.
    let causes = ["strict isolation", "own PCI tree", "exclude each other", "each once"];
    let told = async {
        loop {
            let refusals = control.events(Some(EventKind::Refusal)).await;
            let is_told = |cause: &str| refusals.iter().any(|it| it.text.contains(cause));
            if causes.into_iter().all(is_told) {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, told).await.expect("a cause is not told");
    let shared = CompositionSpec { isolation: Isolation::Shared, ..spec };
    control.client.save_composition(&shared).await.unwrap();
}

#[tokio::test]
async fn a_borrow_whose_caller_goes_is_given_back() {
    let control = Control::start().await;
    let request = BorrowRequest::new("alpha/nvme0", "beta");
    let body = serde_json::to_string(&request).unwrap();
    let mut caller = UnixStream::connect(control.path("control.sock")).await.unwrap();
    let head = format!(
        "POST /v1/leases HTTP/1.1\r\nhost: rackbus\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    caller.write_all(head.as_bytes()).await.unwrap();
    control.wait_stage(LeaseStage::Arming).await;
    drop(caller);
    let lease = control.wait_stage(LeaseStage::Closing).await;
    assert_eq!(lease.reason.as_deref(), Some("returned"));
}

#[tokio::test]
async fn what_a_node_says_of_itself_is_shown_while_it_is_there() {
    let control = Control::start().await;
    let engine = DeviceReport { trouble: Some("it hangs".into()), parks: 3, ..Default::default() };
    let devices = ["nvme0", "nvme1"].map(|name| (name.to_owned(), engine.clone()));
    let report =
        Some(NodeReport { devices: devices.into(), log_lines_left_out: 5, ..Default::default() });
    let said = NodeMessages { messages: Vec::new(), report };
    control.client.say("alpha", &said).await.unwrap();
    let shown = async || control.client.devices().await.unwrap().remove(0).report;
    assert_eq!(shown().await, None, "its node is not there");
    let listening = control.client.listen("alpha", 0).await.unwrap();
    assert_eq!(shown().await, Some(Box::new(engine)));
    let status = control.client.status().await.unwrap();
    let left_out: Vec<u64> = status.hosts.iter().map(|host| host.log_lines_left_out).collect();
    assert_eq!((left_out, status.log_lines_left_out), (vec![5, 0], 7));
    drop(listening);
}

/// Until its new life has registered, what is known of it is of the life before.
#[tokio::test]
async fn a_node_is_up_when_it_has_registered_since_it_listens() {
    let control = Control::start().await;
    let shown = async || {
        let (status, devices) = (control.client.status().await, control.client.devices().await);
        (status.unwrap().hosts.remove(0).state, devices.unwrap().remove(0).state)
    };
    let first = control.client.listen("alpha", 0).await.unwrap();
    assert_eq!(shown().await, (HostState::Down, DeviceState::Unreachable));
    control.say("alpha", vec![register("alpha", true)]).await.unwrap();
    assert_eq!(shown().await, (HostState::Up, DeviceState::Offered));
    drop(first);
    let _second = control.client.listen("alpha", 0).await.unwrap();
    assert_eq!(shown().await, (HostState::Down, DeviceState::Unreachable));
    // A life that is over does not count.
    let stale = Message::Register {
        incarnation: 0,
        devices: Default::default(),
        newest_lease: 0,
        address: "alpha".to_owned(),
    };
    control.say("alpha", vec![stale]).await.unwrap();
    assert_eq!(shown().await, (HostState::Down, DeviceState::Unreachable));
    let mut changes = control.client.changes().await.unwrap();
    control.say("alpha", vec![register("alpha", true)]).await.unwrap();
    assert_eq!(shown().await, (HostState::Up, DeviceState::Offered));
    // Who follows what changes is told the same.
    let told = async {
        loop {
            if let Change::Device(device) = changes.next().await.unwrap()
                && device.function == "alpha/nvme0"
            {
                return device.state;
            }
        }
    };
    assert_eq!(tokio::time::timeout(PATIENCE, told).await.unwrap(), DeviceState::Offered);
}

/// An older node takes the lease and ignores the VM: it would be said that the function is plugged in.
#[tokio::test]
async fn a_function_for_a_vm_is_refused_where_the_node_does_not_plug_it_in() {
    let control = Control::start().await;
    let _listening = control.client.listen("beta", 0).await.unwrap();
    let vm = Some("db".to_owned());
    let refused = async |plugs_into_vms, function| {
        let report = Some(NodeReport { plugs_into_vms, ..Default::default() });
        let said = NodeMessages { messages: Vec::new(), report };
        control.client.say("beta", &said).await.unwrap();
        let request = BorrowRequest { vm: vm.clone(), ..BorrowRequest::new(function, "beta") };
        let error = control.client.borrow_as(&request).await.unwrap_err();
        let ControlClientError::Refused(error) = error else { panic!("{error}") };
        error
    };
    let error = refused(false, "alpha/nvme0").await;
    assert_eq!(error.code, "version");
    assert!(error.error.contains("does not plug functions into VM db"), "{error:?}");
    assert!(control.client.leases(true).await.unwrap().is_empty());
    assert_eq!(refused(true, "alpha/nvme9").await.code, "unknown_function");
}

#[tokio::test]
async fn a_node_that_takes_nothing_is_cut_off_and_not_queued_for_without_limit() {
    let control = Control::start().await;
    let mut node = UnixStream::connect(control.path("control.sock")).await.unwrap();
    let ask = "GET /v1/hosts/beta/messages HTTP/1.1\r\nhost: rackbus\r\nconnection: close\r\n\r\n";
    node.write_all(ask.as_bytes()).await.unwrap();
    let flood = async {
        // Each of them is answered into the node's queue.
        for _ in 0..100 {
            let said = std::iter::repeat_with(|| register("beta", false)).take(1000).collect();
            control.say("beta", said).await.unwrap();
        }
    };
    tokio::time::timeout(PATIENCE, flood).await.expect("the control plane stalls");
    let mut got = Vec::new();
    let ended = tokio::time::timeout(PATIENCE, node.read_to_end(&mut got)).await;
    ended.expect("all of it was queued").unwrap();
    assert!(got.len() < 4 << 20, "{} bytes were kept for it", got.len());
    let counted = async {
        loop {
            let status = control.client.status().await.unwrap();
            let beta = status.hosts.iter().find(|h| h.host == "beta").unwrap();
            if beta.overruns > 0 {
                return beta.overruns;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let counted = tokio::time::timeout(PATIENCE, counted).await;
    assert_eq!(counted.expect("it is not counted"), 1);
}

/// With one thread for everybody, as on a machine whose other processors are busy.
#[tokio::test]
async fn while_a_decision_is_being_stored_everybody_else_is_answered() {
    let (begun, mut beginning) = tokio::sync::mpsc::unbounded_channel();
    let (failed, failing) = std::sync::mpsc::channel::<()>();
    let failing = std::sync::Mutex::new(failing);
    let judge = Arc::new(move |commit: &Commit| {
        if !commit.records.iter().any(|record| matches!(record, Record::Lease(_))) {
            return Ok(());
        }
        begun.send(()).unwrap();
        // Until the test has looked.
        failing.lock().unwrap().recv().unwrap();
        Err(StoreError::Other("the disk is full".to_owned()))
    });
    let control = Control::start_with(Some(MemoryStore::default().judged_by(judge))).await;
    let client = control.client.clone();
    let borrow = tokio::spawn(async move { client.borrow("alpha/nvme0", "beta").await });
    tokio::time::timeout(PATIENCE, beginning.recv()).await.unwrap().unwrap();
    let status = tokio::time::timeout(PATIENCE, control.client.status()).await;
    let status = status.expect("the status has to wait for the disk").unwrap();
    assert!(!borrow.is_finished());
    assert_eq!(status.live_leases, 0, "what is not stored is not told");
    failed.send(()).unwrap();
    let refused = borrow.await.unwrap().unwrap_err().to_string();
    assert!(refused.contains("could not be stored"), "{refused}");
    check_nothing_was_changed(&control).await;
}

#[tokio::test]
async fn a_database_that_somebody_else_keeps_locked_stores_nothing() {
    let control = Control::start().await;
    let other = rusqlite::Connection::open(control.path("control.db")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let refused = control.client.borrow("alpha/nvme0", "beta").await.unwrap_err().to_string();
    assert!(refused.contains("could not be stored"), "{refused}");
    other.execute_batch("ROLLBACK").unwrap();
    check_nothing_was_changed(&control).await;
}

async fn check_nothing_was_changed(control: &Control) {
    let leases = control.client.leases(true).await.unwrap();
    assert_eq!(leases, []);
    assert_eq!(control.client.status().await.unwrap().store_failures, 1);
}

/// Two may return a lease at once: who runs the VM, and the node that saw it end.
#[tokio::test]
async fn whoever_returns_a_lease_is_answered_when_its_function_is_back() {
    let control = Control::start().await;
    let client = control.client.clone();
    let borrow = tokio::spawn(async move { client.borrow("alpha/nvme0", "beta").await });
    let lease = control.wait_stage(LeaseStage::Arming).await;
    let (number, epoch) = (lease.lease, lease.epoch);
    let device = || "nvme0".to_owned();
    let armed = Message::Armed { incarnation: 1, device: device(), epoch, change: None };
    control.say("alpha", vec![armed]).await.unwrap();
    control.wait_stage(LeaseStage::Opening).await;
    let opened = Message::Opened { lease: number, outcome: Ok("socket".to_owned()) };
    control.say("beta", vec![opened]).await.unwrap();
    borrow.await.unwrap().unwrap();

    let client = control.client.clone();
    let first = tokio::spawn(async move { client.give_back(number).await });
    control.wait_stage(LeaseStage::Closing).await;
    control.say("beta", vec![Message::Closed { lease: number }]).await.unwrap();
    control.wait_stage(LeaseStage::Ended).await;
    let client = control.client.clone();
    let mut second = tokio::spawn(async move { client.give_back(number).await });
    let early = tokio::time::timeout(Duration::from_millis(200), &mut second).await;
    assert!(early.is_err(), "told that it is back, and it is not: {early:?}");
    let revoked = Message::Revoked { incarnation: 1, device: device(), epoch };
    control.say("alpha", vec![revoked]).await.unwrap();
    first.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
    let over = control.client.give_back(number).await.unwrap_err().to_string();
    assert!(over.contains("over") || over.contains("returned"), "{over}");
}

const BORROW: &str = r#"{"function":"alpha/nvme0","borrower":"beta"}"#;

/// A request whose answer was lost, because the control plane died or the connection did.
#[tokio::test]
async fn a_repeated_request_gets_the_answer_to_the_first() {
    let store = MemoryStore::default();
    let control = Control::start_with(Some(store.clone())).await;
    let both = async {
        let first = control.ask("POST", "/v1/leases", "k1", BORROW);
        let second = control.ask("POST", "/v1/leases", "k1", BORROW);
        let (first, second, lease) = tokio::join!(first, second, control.activate());
        assert_eq!(first, second, "both wait for one lease");
        (first, lease)
    };
    let (first, lease) = tokio::time::timeout(PATIENCE, both).await.unwrap();
    assert_eq!(first.0, 200, "{}", first.1);
    assert_eq!(control.client.leases(true).await.unwrap().len(), 1, "another lease was made");

    // Another life of the control plane finds the answer.
    let control = Control::start_with(Some(store.clone())).await;
    assert_eq!(control.ask("POST", "/v1/leases", "k1", BORROW).await, first);
    let path = format!("/v1/leases/{}", lease.lease);
    let (back, ()) = tokio::join!(control.ask("DELETE", &path, "k2", ""), async {
        control.wait_stage(LeaseStage::Closing).await;
        control.take_back(&lease).await;
    });
    assert_eq!(back.0, 200, "{}", back.1);
    let control = Control::start_with(Some(store)).await;
    assert_eq!(control.ask("DELETE", &path, "k2", "").await, back);
    assert_eq!(control.ask("POST", "/v1/leases", "k1", BORROW).await, first, "as it was answered");
    let over = control.ask("DELETE", &path, "k3", "").await;
    assert!(over.0 == 409 && over.1.contains("has ended already"), "{over:?}");
    let other = control.ask("DELETE", &path, "k1", "").await;
    assert!(other.0 == 422 && other.1.contains("another request"), "{other:?}");
    let bad = control.ask("DELETE", &path, "a b", "").await;
    assert!(bad.0 == 400 && bad.1.contains("visible"), "{bad:?}");
    assert_eq!(control.client.leases(true).await.unwrap().len(), 1);
}

/// A decision that is made and not stored: it is not decided twice, and not at all.
#[tokio::test]
async fn a_request_that_could_not_be_stored_may_be_repeated() {
    let full = Arc::new(AtomicBool::new(false));
    let judge = {
        let full = full.clone();
        Arc::new(move |_: &Commit| match full.load(Ordering::SeqCst) {
            true => Err(StoreError::Other("the disk is full".to_owned())),
            false => Ok(()),
        })
    };
    let control = Control::start_with(Some(MemoryStore::default().judged_by(judge))).await;
    full.store(true, Ordering::SeqCst);
    let (status, refused) = control.ask("POST", "/v1/leases", "k", BORROW).await;
    assert!(status == 503 && refused.contains("the disk is full"), "{refused}");
    full.store(false, Ordering::SeqCst);
    let (again, _) =
        tokio::join!(control.ask("POST", "/v1/leases", "k", BORROW), control.activate());
    assert_eq!(again.0, 200, "{}", again.1);
}

/// What nodes report and what was refused is told once: where it cannot be stored then, it is stored later.
#[tokio::test]
async fn what_happens_while_the_store_fails_is_told_when_it_works_again() {
    let full = Arc::new(AtomicBool::new(false));
    let judge = {
        let full = full.clone();
        Arc::new(move |commit: &Commit| match full.load(Ordering::SeqCst) {
            true if !commit.events.is_empty() => {
                Err(StoreError::Other("the disk is full".to_owned()))
            }
            _ => Ok(()),
        })
    };
    let control = Control::start_with(Some(MemoryStore::default().judged_by(judge))).await;
    full.store(true, Ordering::SeqCst);
    let refused = DeviceReport { dma_refused: 3, ..Default::default() };
    let devices = [("nvme0".to_owned(), refused)].into();
    let report = Some(NodeReport { devices, ..Default::default() });
    let said = NodeMessages { messages: Vec::new(), report };
    control.client.say("alpha", &said).await.unwrap_err();
    control.client.borrow("alpha/nvme9", "beta").await.unwrap_err();
    full.store(false, Ordering::SeqCst);
    // Nothing has to happen for that: it is tried again.
    let told = async {
        loop {
            let (faults, refusals) =
                (control.events(Some(EventKind::Fault)), control.events(Some(EventKind::Refusal)));
            let (faults, refusals) = tokio::join!(faults, refusals);
            if let ([fault], [refusal]) = (&faults[..], &refusals[..]) {
                return (fault.text.clone(), refusal.text.clone());
            }
            assert!(faults.len() < 2 && refusals.len() < 2, "{faults:?} {refusals:?}");
            tokio::task::yield_now().await;
        }
    };
    let (fault, refusal) = tokio::time::timeout(PATIENCE, told).await.expect("they are lost");
    assert!(fault.starts_with("3 accesses of alpha/nvme0 were refused"), "{fault}");
    assert!(refusal.contains("no host offers alpha/nvme9"), "{refusal}");
    control.client.borrow("alpha/nvme9", "gamma").await.unwrap_err();
    assert_eq!(control.events(Some(EventKind::Fault)).await.len(), 1, "told twice");
}

/// Who has its answer lost and is gone itself leaves no lease, and may ask again.
#[tokio::test]
async fn a_request_whose_caller_goes_is_decided_anew() {
    let control = Control::start().await;
    let mut caller = UnixStream::connect(control.path("control.sock")).await.unwrap();
    let length = BORROW.len();
    let head = format!(
        "POST /v1/leases HTTP/1.1\r\nhost: rackbus\r\nidempotency-key: k\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{BORROW}"
    );
    caller.write_all(head.as_bytes()).await.unwrap();
    let first = control.wait_stage(LeaseStage::Arming).await;
    drop(caller);
    control.wait_stage(LeaseStage::Closing).await;
    control.take_back(&first).await;
    let (again, next) =
        tokio::join!(control.ask("POST", "/v1/leases", "k", BORROW), control.activate());
    assert_eq!(again.0, 200, "{}", again.1);
    assert_ne!(next.lease, first.lease);
}

/// What is said to a node is stored before.
#[tokio::test]
async fn nothing_is_sent_before_it_is_stored() {
    let (stored, storing) = std::sync::mpsc::channel::<()>();
    let storing = std::sync::Mutex::new(storing);
    let judge = Arc::new(move |commit: &Commit| {
        if commit.records.iter().any(|record| matches!(record, Record::Lease(_))) {
            // Until the test has looked.
            storing.lock().unwrap().recv().unwrap();
        }
        Ok(())
    });
    let control = Control::start_with(Some(MemoryStore::default().judged_by(judge))).await;
    let mut heard = control.client.listen("alpha", 0).await.unwrap();
    let client = control.client.clone();
    let borrow = tokio::spawn(async move { client.borrow("alpha/nvme0", "beta").await });
    let early = tokio::time::timeout(Duration::from_millis(200), next_message(&mut heard)).await;
    assert!(early.is_err(), "sent before it is stored: {early:?}");
    assert_eq!(control.client.leases(true).await.unwrap(), []);
    stored.send(()).unwrap();
    let said = tokio::time::timeout(PATIENCE, next_message(&mut heard)).await.unwrap();
    assert!(matches!(said, Some(Message::Arm { .. })), "{said:?}");
    borrow.abort();
    // What follows is stored as it comes.
    (0..100).for_each(|_| stored.send(()).unwrap_or_default());
}

/// The events of three refusals that are alike: one, and those of the others are only counted for a second. Each tells how
/// many were not said since the one before.
fn check_refusals(events: &[&str], text: &str, within: Duration) {
    assert_eq!(events[0], text);
    if within < Duration::from_secs(1) {
        assert_eq!(events, [text]);
    }
    let count = |event: &&str| {
        let more = event.strip_prefix(text).unwrap();
        let more = more
            .strip_prefix(" (")
            .and_then(|more| more.strip_suffix(" more times since the last)"));
        1 + more.map_or(0, |count| count.parse().unwrap())
    };
    let told: u32 = events.iter().map(count).sum();
    assert!(told <= 3, "{events:?}");
}

#[tokio::test]
async fn events_name_what_happened_and_outlive_the_control_plane() {
    let store = MemoryStore::default();
    let control = Control::start_with(Some(store.clone())).await;
    let mut coming = control.client.events(Some(EventKind::Loss), None, true).await.unwrap();
    let (lent, lease) =
        tokio::join!(control.ask("POST", "/v1/leases", "k", BORROW), control.activate());
    assert_eq!(lent.0, 200, "{}", lent.1);
    let begun = Instant::now();
    for _ in 0..3 {
        assert_eq!(control.ask("POST", "/v1/leases", "other", BORROW).await.0, 409);
    }
    let refused_within = begun.elapsed();
    let report = |dma_refused| {
        let last_refused = Some("DMA to 0x2000+0x1000: no mapping covers it".to_owned());
        let report = DeviceReport { dma_refused, last_refused, ..Default::default() };
        let report =
            NodeReport { devices: [("nvme0".to_owned(), report)].into(), ..Default::default() };
        NodeMessages { messages: Vec::new(), report: Some(report) }
    };
    for count in [0, 4, 4] {
        control.client.say("alpha", &report(count)).await.unwrap();
    }
    let again = Message::Register {
        incarnation: 2,
        devices: [("nvme0".to_owned(), 1)].into(),
        newest_lease: 1,
        address: "alpha".to_owned(),
    };
    control.say("alpha", vec![again]).await.unwrap();
    let lost = tokio::time::timeout(PATIENCE, coming.next()).await.unwrap().unwrap();
    assert_eq!((lost.lease, lost.epoch), (Some(lease.lease), Some(1)));
    assert!(lost.text.contains("its lender's node was restarted"), "{lost:?}");

    let control = Control::start_with(Some(store)).await;
    let events = control.events(None).await;
    let told = |kind| {
        let of_kind = events.iter().filter(move |event| event.kind == kind);
        of_kind.map(|event| event.text.as_str()).collect::<Vec<_>>()
    };
    assert_eq!(
        told(EventKind::Lease),
        [
            "alpha/nvme0 is offered",
            "alpha/nvme0 is being lent to beta",
            "beta can use alpha/nvme0",
            "alpha/nvme0 is offered again",
        ]
    );
    let refusal = "beta was refused: alpha/nvme0 is lent to beta (lease 1)";
    check_refusals(&told(EventKind::Refusal), refusal, refused_within);
    let fault = "4 accesses of alpha/nvme0 were refused; the last: DMA to 0x2000+0x1000: no mapping \
                 covers it";
    assert_eq!(told(EventKind::Fault), [fault]);
    assert_eq!(told(EventKind::Loss), [lost.text.as_str()]);
    let restarts = told(EventKind::Restart);
    let again = "the node of alpha was started again";
    assert!(restarts.contains(&"the node of beta was started") && restarts.contains(&again));
    let started = restarts.iter().filter(|text| text.starts_with("the control plane"));
    assert_eq!(started.count(), 2, "{restarts:?}");
    assert!(events.windows(2).all(|pair| pair[0].id < pair[1].id));
    assert_eq!(control.events(Some(EventKind::Fault)).await.len(), 1);
}

/// A Prometheus asks over the network, and everybody else the API's socket.
#[tokio::test]
async fn what_is_counted_is_served_to_prometheus() {
    let control = Control::start().await;
    let (lent, _) =
        tokio::join!(control.ask("POST", "/v1/leases", "k", BORROW), control.activate());
    assert_eq!(lent.0, 200, "{}", lent.1);
    let report = DeviceReport {
        dma_refused: 3,
        dma_refused_by_cause: [("not mapped".to_owned(), 3)].into(),
        ..DeviceReport::default()
    };
    let report = NodeReport {
        devices: [("nvme0".to_owned(), report)].into(),
        shared_memory: [("segments".to_owned(), 2)].into(),
        shared_bytes: [("segments".to_owned(), 8192)].into(),
        channels: [("transactions".to_owned(), 8), ("bytes".to_owned(), 4096)].into(),
        conversations: [("functions".to_owned(), 1)].into(),
        over_bounds: [("locks".to_owned(), 6)].into(),
        ..Default::default()
    };
    let said = NodeMessages { messages: Vec::new(), report: Some(report) };
    let _listening = control.client.listen("alpha", 0).await.unwrap();
    control.client.say("alpha", &said).await.unwrap();
    control.say("alpha", vec![register("alpha", true)]).await.unwrap();

    let text = control.client.metrics().await.unwrap();
    for line in [
        "rackbus_leases{stage=\"active\"} 1.0",
        "rackbus_functions{state=\"lent\"} 1.0",
        "rackbus_node_up{host=\"alpha\"} 1.0",
        "rackbus_node_up{host=\"beta\"} 0.0",
        "rackbus_function_dma_refused_total{function=\"alpha/nvme0\",host=\"alpha\",role=\"lender\",cause=\"not mapped\"} 3",
        "rackbus_events_total{kind=\"fault\"} 1",
        "rackbus_requests_refused_total{} 0",
        "rackbus_log_lines_left_out_total{} 7",
        "rackbus_shared_memory{host=\"alpha\",what=\"segments\"} 2.0",
        "rackbus_shared_memory_bytes{host=\"alpha\",what=\"segments\"} 8192.0",
        "rackbus_channel_transactions_total{host=\"alpha\"} 8",
        "rackbus_channel_bytes_total{host=\"alpha\"} 4096",
        "rackbus_link_conversations{host=\"alpha\",service=\"functions\"} 1.0",
        "rackbus_over_bounds_total{host=\"alpha\",what=\"locks\"} 6",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    assert!(text.contains("rackbus_store_commit_seconds_bucket{le="), "{text}");

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let source = Arc::new(rackbus_control::metrics::MetricsPage::default);
    tokio::spawn(rackbus_control::metrics::serve_on(source, listener));
    let mut scrape = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = "GET /metrics HTTP/1.1\r\nhost: rack\r\nconnection: close\r\n\r\n";
    scrape.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    scrape.read_to_string(&mut answer).await.unwrap();
    assert!(answer.contains("openmetrics-text") && answer.ends_with("# EOF\n"), "{answer}");
}

/// What a node says of itself is kept of, and not more: the rack's events are others' as well, and records are read as a
/// whole.
#[tokio::test]
async fn a_node_fills_neither_the_events_nor_the_records() {
    let control = Control::start().await;
    let first = control.events(None).await[0].id;
    for post in 0..400_u64 {
        let life = |nth| Message::Register {
            incarnation: 2 + post * 50 + nth,
            devices: Default::default(),
            newest_lease: 0,
            address: "alpha".to_owned(),
        };
        control.say("alpha", (0..50).map(life).collect()).await.unwrap();
    }
    let events = control.events(None).await;
    let restarts = events.iter().filter(|event| event.kind == EventKind::Restart).count();
    assert!((100..=250).contains(&restarts), "{restarts} events of 20,000 lives");
    assert_eq!(events[0].id, first);
    control.say("alpha", vec![register_again("alpha", 1 << 20)]).await.unwrap();
    let client = control.client.clone();
    let borrowing = tokio::spawn(async move { client.borrow("alpha/nvme0", "beta").await });
    let lease = control.wait_stage(LeaseStage::Arming).await;
    let device = || "nvme0".to_owned();
    let change = |number| LevelChange {
        number,
        level: Some("x".repeat(60_000)),
        outcome: Some(Err("y".repeat(3_000))),
    };
    let (incarnation, epoch) = (1 << 20, lease.epoch);
    let armed = Message::Armed { incarnation, device: device(), epoch, change: Some(change(1)) };
    control.say("alpha", vec![armed]).await.unwrap();
    control.wait_stage(LeaseStage::Opening).await;
    let opened = Message::Opened { lease: lease.lease, outcome: Ok("socket".to_owned()) };
    control.say("beta", vec![opened]).await.unwrap();
    borrowing.await.unwrap().unwrap();
    let LevelChange { level, .. } = change(2);
    let set = Message::LevelSet {
        incarnation,
        device: device(),
        epoch,
        number: 2,
        level,
        outcome: Ok(()),
    };
    control.say("alpha", vec![set]).await.unwrap();
    let shown = control.wait_stage(LeaseStage::Active).await.level.unwrap_or_default();
    assert_eq!(shown.len(), LONGEST_LEVEL);
}
