//! States of nodes in files, of this and of earlier versions: a node that takes the place of another one continues from
//! each, with what it lends and borrows in use.
//!
//! The program that a node is replaced by is here a task of the same process, while the thread that was to become it
//! waits.

mod common;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};

use common::user::Memory;
use common::{Rack, Start, blocking};
use rackbus_control::ControlClient;
use rackbus_control::api::{BorrowRequest, Isolation, Lease};
use rackbus_control::node::RestartRequest;
use rackbus_devices::memory::BAR;
use rackbus_memory::packets::{MAX_PACKET, MAX_PACKET_DESCRIPTORS};
use rackbus_memory::{Access, AdaptiveSpin, HandleRef, Packets, SharedMemory, StreamError};
use rackbus_node::handover::StateVersions;
use rackbus_node::metrics::SOCKET;
use rackbus_node::{HandoverProgram, InheritedNode, NodeOptions};
use rackbus_seeds::stored::StoredStates;
use serde_json::Value;
use tokio::runtime::Handle;
use tokio::sync::Notify;

/// Version 1 knew no devices that are offered, and nobody that takes turns; nor did version 2 at first. Their files are
/// those of version 3 without that.
const NEWEST: u32 = 8;
/// The first version with the socket that requests of the host are answered at.
const REQUESTS: u32 = 4;

const RACK: &str = "name = \"test\"\n\
    [hosts.alpha.devices.ram0]\nkind = \"memory\"\nsize = \"4 MiB\"\n\
    [hosts.alpha.devices.ram1]\nkind = \"memory\"\nsize = \"4 MiB\"\n[hosts.beta]\n[hosts.gamma]\n";

/// What is this rack's own in a state: clocks, paths, files, and which life of the node it is.
const OWN: [&str; 8] =
    ["paused_ns", "saved_ns", "begun_ns", "incarnation", "address", "renew_at", "object", "Ok"];

fn stored(name: &'static str) -> StoredStates {
    StoredStates::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/stored"), name, NEWEST)
}

/// Reads what a node passed on: its state and its descriptors.
fn unpack(parcel: OwnedFd) -> (Vec<u8>, Vec<OwnedFd>) {
    let packets = Packets::from_peer(parcel).unwrap();
    let (mut fds, mut buffer) = (Vec::new(), vec![0; MAX_PACKET]);
    loop {
        match packets.receive(&mut buffer, &mut AdaptiveSpin::default(), None) {
            Ok(packet) => fds.extend(packet.whole().unwrap().handles.into_descriptors()),
            Err(StreamError::Closed) => break,
            Err(error) => panic!("{error}"),
        }
    }
    let (mut text, mut bytes) = (File::from(fds.remove(0)), Vec::new());
    text.rewind().unwrap();
    text.read_to_end(&mut bytes).unwrap();
    (bytes, fds)
}

/// The same descriptors with another state.
fn pack(text: &[u8], fds: &[OwnedFd]) -> OwnedFd {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(text).unwrap();
    let (ours, theirs) = Packets::pair().unwrap();
    let all = std::iter::once(file.as_fd()).chain(fds.iter().map(AsFd::as_fd));
    let all: Vec<_> = all.map(HandleRef::of_descriptor).collect();
    for some in all.chunks(MAX_PACKET_DESCRIPTORS) {
        ours.send(&[0], some).unwrap();
    }
    theirs.into()
}

/// Writes at each place what `of` says of it.
fn each_field(value: &mut Value, of: &impl Fn(&str) -> Option<Value>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match of(name) {
                    Some(other) => *value = other,
                    None => each_field(value, of),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| each_field(value, of)),
        _ => {}
    }
}

/// Has `stored` say of what is this rack's own what `here` says.
fn adopt(stored: &mut Value, here: &Value) {
    match (stored, here) {
        (Value::Object(stored), Value::Object(here)) => {
            for (name, value) in stored {
                match here.get(name) {
                    Some(own) if OWN.contains(&&**name) => *value = own.clone(),
                    Some(own) => adopt(value, own),
                    None => {}
                }
            }
        }
        (Value::Array(stored), Value::Array(here)) => {
            stored.iter_mut().zip(here).for_each(|(stored, here)| adopt(stored, here));
        }
        _ => {}
    }
}

/// A program that continues from the file of a version.
struct Stored {
    name: &'static str,
    version: u32,
    options: Box<dyn Fn() -> NodeOptions + Send + Sync>,
    runtime: Handle,
    replaced: Arc<Notify>,
    /// What it listens on beside the node.
    requests: UnixListener,
    /// Until the test ends: whoever was replaced does nothing any more.
    ends: Mutex<mpsc::Receiver<()>>,
}

impl Stored {
    fn inherited(&self, parcel: OwnedFd) -> InheritedNode {
        let (bytes, fds) = unpack(parcel);
        let mut here: Value = serde_json::from_slice(&bytes).unwrap();
        // No more mappings than any machine has.
        each_field(&mut here, &|name| (name == "max_dma_maps").then(|| 512.into()));
        let mut text = here.clone();
        // A file has nothing of the rack that it was written in.
        each_field(&mut text, &|name| match name {
            "address" | "Ok" => Some("".into()),
            _ => None,
        });
        stored(self.name).compare(&serde_json::to_vec(&text).unwrap());
        let mut state = serde_json::from_str(&stored(self.name).read(self.version)).unwrap();
        adopt(&mut state, &here);
        let parcel = pack(&serde_json::to_vec(&state).unwrap(), &fds);
        InheritedNode::receive(parcel)
            .unwrap_or_else(|error| panic!("{} version {}: {error}", self.name, self.version))
    }
}

impl HandoverProgram for Stored {
    fn carried(&self, _: Option<&str>) -> String {
        "what the program passes on".to_owned()
    }

    fn requests(&self) -> Option<BorrowedFd<'_>> {
        Some(self.requests.as_fd())
    }

    fn check(&self, _: &Path, versions: &StateVersions, _: Option<&str>) -> Result<(), String> {
        versions.check()
    }

    fn replace(&self, _: &Path, parcel: OwnedFd) -> std::io::Error {
        let mut inherited = self.inherited(parcel);
        assert_eq!(inherited.carried(), self.carried(None));
        let requests = inherited.take_requests().unwrap().map(UnixListener::from);
        assert_eq!(requests.is_some(), self.version >= REQUESTS);
        let address = |it: UnixListener| it.local_addr().unwrap().as_pathname().unwrap().to_owned();
        if let Some(requests) = requests {
            assert_eq!(address(requests), address(self.requests.try_clone().unwrap()));
        }
        self.runtime.spawn(rackbus_node::resume((self.options)(), inherited));
        self.replaced.notify_one();
        let _ = self.ends.lock().unwrap().recv();
        std::io::Error::other("the test has ended")
    }
}

/// A rack whose lender and borrower continue from the files of a version when they are restarted.
struct Nodes {
    rack: Rack,
    replaced: BTreeMap<&'static str, Arc<Notify>>,
    /// Who was replaced waits until these are dropped.
    _ends: Vec<mpsc::Sender<()>>,
}

impl Nodes {
    async fn start(version: u32) -> Nodes {
        let (replaced, ends) = (Mutex::new(BTreeMap::new()), Mutex::new(Vec::new()));
        let sockets = tempfile::tempdir().unwrap();
        let program = |Start { host, options }| {
            let name = match host {
                "alpha" => "lender",
                "beta" => "borrower",
                _ => return None,
            };
            let (end, waits) = mpsc::channel();
            ends.lock().unwrap().push(end);
            let notified = Arc::<Notify>::default();
            replaced.lock().unwrap().insert(host, notified.clone());
            let (runtime, ends) = (Handle::current(), Mutex::new(waits));
            let requests = UnixListener::bind(sockets.path().join(host)).unwrap();
            let replaced = notified;
            let program = Stored { name, version, options, runtime, replaced, requests, ends };
            Some(Arc::new(program) as Arc<dyn HandoverProgram>)
        };
        let rack = Rack::start_programs(RACK, |link| Arc::new(link), |_| (), program).await;
        let (replaced, _ends) = (replaced.into_inner().unwrap(), ends.into_inner().unwrap());
        Nodes { rack, replaced, _ends }
    }

    /// Has the node of a host replaced. Who asked has no answer then.
    async fn restart(&self, host: &str) {
        let node = ControlClient::new(&self.rack.folder.path().join(host).join(SOCKET));
        let request = RestartRequest::of("/proc/self/exe".into());
        tokio::select! {
            answer = node.restart_node(&request) => panic!("{host} is not replaced: {answer:?}"),
            () = self.replaced[host].notified() => {}
        }
    }
}

async fn borrow(rack: &Rack, function: &str, isolation: Isolation) -> Lease {
    let request = BorrowRequest { isolation, ..BorrowRequest::new(function, "beta") };
    rack.client.borrow_as(&request).await.unwrap()
}

/// Opens the memory of a lease, maps memory of its own for it, and stores something.
fn open(lease: &Lease) -> (Memory, SharedMemory) {
    let memory = Memory::open(lease);
    memory.place(0x4000_0000);
    memory.decode(true);
    let own = SharedMemory::create("own", 1 << 20).unwrap();
    let mapped = memory.user.dma_map(1 << 32, 1 << 20, Access::all(), Some((own.as_fd(), 0)));
    mapped.unwrap();
    memory.store(64, b"content!");
    (memory, own)
}

/// Both ways to the bytes lead to the same ones, `before` and from now on `now`.
fn goes_on(memory: &Memory, before: &[u8; 8], now: &[u8; 8]) {
    let mut data = [0; 8];
    memory.user.read(BAR.into(), 64, &mut data).unwrap();
    assert_eq!((&data, &*memory.load(64, 8)), (before, &before[..]));
    memory.user.write(BAR.into(), 64, now).unwrap();
    assert_eq!(memory.load(64, 8), now);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn lender_and_borrower_continue_from_what_each_version_wrote() {
    for version in 1..=NEWEST {
        let nodes = Nodes::start(version).await;
        let leases = [
            borrow(&nodes.rack, "alpha/ram0", Isolation::Shared).await,
            borrow(&nodes.rack, "alpha/ram1", Isolation::Strict).await,
        ];
        let opened = leases.clone();
        let mut users = blocking(move || opened.each_ref().map(open)).await;
        for (host, before, now) in
            [("alpha", b"content!", b"goes on."), ("beta", b"goes on.", b"as well.")]
        {
            nodes.restart(host).await;
            users = blocking(move || {
                users.iter().for_each(|(memory, _)| goes_on(memory, before, now));
                users
            })
            .await;
        }
        // What was mapped is known, and the leases end as others do.
        blocking(move || {
            for (memory, _) in &users {
                memory.user.dma_unmap(1 << 32, 1 << 20).unwrap();
            }
        })
        .await;
        for lease in leases {
            assert!(nodes.rack.client.give_back(lease.lease).await.unwrap().returned);
        }
    }
}

#[test]
fn a_state_of_a_newer_version_is_refused_whatever_else_it_says() {
    let mut state: Value = serde_json::from_str(&stored("borrower").read(NEWEST)).unwrap();
    state["version"] = 99.into();
    state["more"] = true.into();
    let refused = InheritedNode::receive(pack(state.to_string().as_bytes(), &[])).unwrap_err();
    let expected = format!("the state of a node has version 99, this program knows {NEWEST}");
    assert_eq!(refused.to_string(), expected);
}

/// The question of a program of the first version, and one of a program that knows more than this one.
#[test]
fn versions_are_understood_as_each_version_said_them() {
    let first = r#"{"node":1,"function":1,"classes":{"accelerator":1,"memory":2,"nvme":1}}"#;
    serde_json::from_str::<StateVersions>(first).unwrap().check().unwrap();
    let here = StateVersions::here();
    assert_eq!(here.node, NEWEST);
    here.check().unwrap();
    let mut newer = here;
    newer.classes.insert("nic".to_owned(), 99);
    let refused = newer.check().unwrap_err();
    assert!(refused.contains("a device of kind nic has version 99"), "{refused}");
}
