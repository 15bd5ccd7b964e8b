//! The control plane's process by itself: callers that go, nodes that do not listen, a store that
//! makes it wait. The nodes are played by the tests.

mod nodes;
mod requests;
mod storing;
mod telling;

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

/// A request for a function, as its body.
const BORROW: &str = r#"{"function":"alpha/nvme0","borrower":"beta"}"#;

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
        Control::start_as(store, Config::default()).await
    }

    /// The same with these time limits.
    async fn start_as(store: Option<MemoryStore>, config: Config) -> Control {
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
            config,
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

async fn check_nothing_was_changed(control: &Control) {
    let leases = control.client.leases(true).await.unwrap();
    assert_eq!(leases, []);
    assert_eq!(control.client.status().await.unwrap().store_failures, 1);
}
