//! The control plane's process by itself: callers that go, nodes that do not listen, a store that
//! makes it wait. The nodes are played by the test.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rackbus_control::api::{
    BorrowRequest, DeviceReport, Lease, LeaseStage, NodeMessages, NodeReport,
};
use rackbus_control::service::{Inventory, InventoryDevice};
use rackbus_control::{Client, ClientError, Options, Service, serve};
use rackbus_lease::{Config, Message};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// After this long a test fails instead of waiting on.
const PATIENCE: Duration = Duration::from_secs(20);

struct Control {
    folder: tempfile::TempDir,
    client: Client,
}

impl Control {
    /// A control plane with two hosts that have registered.
    async fn start() -> Control {
        let folder = tempfile::tempdir().unwrap();
        let device = InventoryDevice {
            function: "alpha/nvme0".parse().unwrap(),
            kind: "nvme".to_owned(),
            detail: String::new(),
        };
        let inventory = Inventory {
            rack: "lab".to_owned(),
            hosts: vec!["alpha".to_owned(), "beta".to_owned()],
            devices: vec![device],
            ..Inventory::default()
        };
        let database = folder.path().join("control.db");
        let options = Options {
            inventory,
            config: Config::default(),
            database,
            log_lines_left_out: || 7,
            is_node: Arc::new(|_, _| false),
        };
        let service = Service::open(options).unwrap();
        let socket = folder.path().join("control.sock");
        let client = Client::new(&socket);
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

    async fn say(&self, host: &str, messages: Vec<Message>) -> Result<(), ClientError> {
        self.client.say(host, &NodeMessages { messages, report: None }).await
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

/// The test runs itself as another process of the same user.
#[tokio::test]
async fn nobody_else_speaks_for_a_host() {
    const STRANGER: &str = "RACKBUS_CONTROL_STRANGER";
    if let Some(socket) = std::env::var_os(STRANGER) {
        let client = Client::new(Path::new(&socket));
        let said = NodeMessages { messages: vec![register("alpha", false)], report: None };
        let spoken = client.say("alpha", &said).await;
        let heard = client.listen("alpha").await.map(drop);
        for refused in [spoken, heard] {
            let Err(ClientError::Refused(refused)) = refused else {
                panic!("a stranger is heard: {refused:?}")
            };
            assert_eq!(refused.code, "not_the_node");
        }
        client.status().await.expect("it may ask like everybody");
        return;
    }
    let control = Control::start().await;
    let mut stranger = tokio::process::Command::new(std::env::current_exe().unwrap());
    stranger.args(["--exact", "nobody_else_speaks_for_a_host"]);
    stranger.env(STRANGER, control.path("control.sock"));
    assert!(stranger.status().await.unwrap().success());
}

#[tokio::test]
async fn a_borrow_whose_caller_goes_is_given_back() {
    let control = Control::start().await;
    let request = BorrowRequest { function: "alpha/nvme0".into(), borrower: "beta".into() };
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
    let report = Some(NodeReport { devices: devices.into(), log_lines_left_out: 5 });
    let said = NodeMessages { messages: Vec::new(), report };
    control.client.say("alpha", &said).await.unwrap();
    let shown = async || control.client.devices().await.unwrap().remove(0).report;
    assert_eq!(shown().await, None, "its node is not there");
    let listening = control.client.listen("alpha").await.unwrap();
    assert_eq!(shown().await, Some(engine));
    let status = control.client.status().await.unwrap();
    let left_out: Vec<u64> = status.hosts.iter().map(|host| host.log_lines_left_out).collect();
    assert_eq!((left_out, status.log_lines_left_out), (vec![5, 0], 7));
    drop(listening);
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
    tokio::time::timeout(PATIENCE, flood).await.expect("the control plane stands still");
    let mut got = Vec::new();
    let ended = tokio::time::timeout(PATIENCE, node.read_to_end(&mut got)).await;
    ended.expect("all of it was queued").unwrap();
    assert!(got.len() < 4 << 20, "{} bytes were kept for it", got.len());
    let status = control.client.status().await.unwrap();
    let beta = status.hosts.iter().find(|h| h.host == "beta").unwrap();
    assert_eq!(beta.overruns, 1);
}

/// With one thread for everybody, as on a machine whose other processors are busy.
#[tokio::test]
async fn while_a_decision_is_being_stored_everybody_else_is_answered() {
    let control = Control::start().await;
    let other = rusqlite::Connection::open(control.path("control.db")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let client = control.client.clone();
    let borrow = tokio::spawn(async move { client.borrow("alpha/nvme0", "beta").await });
    // Begun by now: the runtime has nothing else to do.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let status = control.client.status().await.unwrap();
    assert!(!borrow.is_finished(), "the status had to wait for the disk");
    assert_eq!(status.live_leases, 0, "what is not stored is not told");
    let refused = borrow.await.unwrap().unwrap_err().to_string();
    assert!(refused.contains("could not be stored"), "{refused}");
    other.execute_batch("ROLLBACK").unwrap();
    let leases = control.client.leases(true).await.unwrap();
    assert_eq!(leases, [], "nothing was changed");
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
    let armed = Message::Armed { incarnation: 1, device: device(), epoch };
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
