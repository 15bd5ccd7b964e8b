//! Nobody who waits keeps the runtime's threads from others, and what waits is bounded. The runtime of these tests has one
//! thread: what holds that holds everything.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use rackbus_control::access::ApiPeer;
use rackbus_control::api::{ApiError, NodeMessages};
use rackbus_control::metrics::{MetricsPage, serve_on};
use rackbus_control::network::{CaptureDone, CaptureRequest, NetworkStatus, NodeNetwork};
use rackbus_control::node::{NodeProcess, NodeSources, RestartRequest, listen, serve_node};
use rackbus_control::offers::{OfferRequest, SectionState};
use rackbus_control::service::{DescribedDevice, Inventory, IsNode, OfferedDevice, ReadRack};
use rackbus_control::store::MemoryStore;
use rackbus_control::{ControlClient, Service, ServiceOptions};
use rackbus_fabric::{Fabric, FabricHandle, Topology};
use rackbus_lease::{Config, Message};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

/// After this long a test fails instead of waiting on.
const PATIENCE: Duration = Duration::from_secs(60);

/// Something that takes until somebody else on the same runtime lets it go on.
struct Slow(Mutex<Receiver<()>>);

impl Slow {
    fn new() -> (Sender<()>, Slow) {
        let (go_on, may) = channel();
        (go_on, Slow(Mutex::new(may)))
    }

    fn wait(&self) {
        let waited = self.0.lock().unwrap().recv_timeout(PATIENCE);
        waited.expect("the others wait for this");
    }
}

/// Lets it go on when it was asked, as far as that can be.
async fn let_go(go_on: Sender<()>) {
    tokio::time::sleep(Duration::from_millis(20)).await;
    // One that has failed does not hear it.
    let _ = go_on.send(());
}

fn inventory() -> Inventory {
    let hosts = vec!["alpha".to_owned(), "beta".to_owned()];
    Inventory { rack: "lab".to_owned(), hosts, ..Inventory::default() }
}

fn service(is_node: IsNode, read_rack: Option<ReadRack>) -> Arc<Service> {
    let options = ServiceOptions {
        inventory: inventory(),
        read_rack,
        read_file: None,
        config: Config::default(),
        database: "not used".into(),
        log_lines_left_out: || 0,
        is_node,
    };
    Service::open_with(options, Box::new(MemoryStore::default())).unwrap()
}

#[tokio::test]
async fn a_page_of_metrics_that_takes_its_time_holds_up_nobody_else() {
    let (go_on, slow) = Slow::new();
    let source = Arc::new(move || {
        slow.wait();
        MetricsPage::default()
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve_on(source, listener));
    let asked = async {
        let mut socket = TcpStream::connect(address).await.unwrap();
        let request = b"GET /metrics HTTP/1.1\r\nhost: node\r\nconnection: close\r\n\r\n";
        socket.write_all(request).await.unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).await.unwrap();
        answer
    };
    let (answer, ()) = tokio::join!(asked, let_go(go_on));
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn looking_at_who_holds_a_hosts_file_holds_up_nobody_else() {
    let (go_on, slow) = Slow::new();
    let is_node: IsNode = Arc::new(move |host, process| {
        slow.wait();
        (host, process) == ("alpha", 1)
    });
    let service = service(is_node, None);
    let peer = ApiPeer::Local(Some(1));
    let (checked, ()) = tokio::join!(service.check_node("alpha", &peer), let_go(go_on.clone()));
    checked.unwrap();
    let (checked, ()) =
        tokio::join!(service.check_device_of("alpha", &peer), let_go(go_on.clone()));
    checked.unwrap();
    let (refused, ()) = tokio::join!(service.check_node("beta", &peer), let_go(go_on));
    assert_eq!(refused.unwrap_err().code, "not_the_node");
}

#[tokio::test]
async fn reading_what_is_offered_holds_up_nobody_else() {
    let (go_on, slow) = Slow::new();
    let read: ReadRack = Arc::new(move |offered| {
        if offered.is_empty() {
            return Ok(inventory());
        }
        slow.wait();
        Err("it is no device".to_owned())
    });
    let service = service(Arc::new(|_, _| false), Some(read));
    let request = OfferRequest {
        device: "alpha/nvme0".to_owned(),
        section: Some("kind = \"no\"".to_owned()),
        by_node: false,
    };
    let peer = ApiPeer::Local(None);
    let (refused, ()) = tokio::join!(service.offer(&request, &peer, None), let_go(go_on));
    assert_eq!(refused.unwrap_err().error, "it is no device");
}

/// The node of alpha, which can take on nothing.
async fn node_without_room(service: Arc<Service>) {
    let mut told = service.listen("alpha").unwrap();
    let say = async |message: Message| {
        let said = NodeMessages { messages: vec![message], report: None };
        service.receive("alpha", said).await.unwrap();
    };
    let (devices, address) = (BTreeMap::new(), "alpha".to_owned());
    say(Message::Register { incarnation: 1, devices, newest_lease: 0, address }).await;
    while let Some(message) = told.recv().await {
        match message {
            Message::Offer { incarnation, device, number, .. } => {
                let outcome = Err("no room".to_owned());
                say(Message::Offered { incarnation, device, number, outcome }).await;
            }
            Message::Withdraw { incarnation, device, number, .. } => {
                say(Message::Withdrawn { incarnation, device, number }).await;
            }
            _ => {}
        }
    }
}

/// The inventory is read anew between two of its states, which takes long: who looks then sees the one or the other.
#[tokio::test]
async fn a_device_that_could_not_be_taken_on_is_never_shown_as_offered() {
    let looks: Arc<OnceLock<Weak<Service>>> = Arc::default();
    let seen: Arc<Mutex<Vec<SectionState>>> = Arc::default();
    let read: ReadRack = {
        let (looks, seen) = (looks.clone(), seen.clone());
        Arc::new(move |offered| {
            if let Some(service) = looks.get().and_then(Weak::upgrade) {
                let states = service.sections().into_iter().map(|section| section.state);
                seen.lock().unwrap().extend(states);
            }
            let section = |it: &OfferedDevice| {
                let (text, functions) = (it.section.clone(), vec![it.device.clone()]);
                let described = DescribedDevice { text, functions, listed: false };
                ((it.host.clone(), it.device.clone()), described)
            };
            let sections = offered.iter().map(section).collect();
            Ok(Inventory { sections, ..inventory() })
        })
    };
    let service = service(Arc::new(|_, _| false), Some(read));
    looks.set(Arc::downgrade(&service)).unwrap();
    let node = tokio::spawn(node_without_room(service.clone()));
    let request = OfferRequest {
        device: "alpha/nvme0".to_owned(),
        section: Some("kind = \"nvme\"".to_owned()),
        by_node: false,
    };
    let refused = async {
        loop {
            match service.offer(&request, &ApiPeer::Local(None), None).await {
                // Its node is not there yet.
                Err(error) if error.code == "silent" => tokio::task::yield_now().await,
                answer => break answer.unwrap_err(),
            }
        }
    };
    let refused = tokio::time::timeout(PATIENCE, refused).await.unwrap();
    assert!(refused.error.ends_with("no room"), "{refused}");
    let there = service.sections();
    assert!(there.is_empty(), "answered before it is gone: {there:?}");
    let seen = seen.lock().unwrap();
    assert!(seen.contains(&SectionState::Leaving), "{seen:?}");
    assert!(!seen.contains(&SectionState::Offered), "{seen:?}");
    node.abort();
}

struct NoNetwork;

impl NodeNetwork for NoNetwork {
    fn status(&self) -> NetworkStatus {
        unreachable!("nobody asks")
    }

    fn set_up(&self, _up: bool) -> Result<NetworkStatus, ApiError> {
        unreachable!("nobody asks")
    }

    fn capture(
        &self,
        _request: &CaptureRequest,
        _stop: &dyn Fn() -> bool,
    ) -> Result<CaptureDone, ApiError> {
        unreachable!("nobody asks")
    }
}

/// Callers come and go while a restart is looked at.
#[tokio::test]
async fn requests_for_a_restart_wait_with_their_callers() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("node.sock");
    let (restarts, mut asked) = mpsc::channel(1);
    let room = restarts.clone();
    let sources = NodeSources {
        metrics: Arc::new(MetricsPage::default),
        fabric: FabricHandle::new(Fabric::new(Topology::default())),
        network: Arc::new(NoNetwork),
        process: NodeProcess::default(),
        restarts,
    };
    tokio::spawn(serve_node(sources, listen(&socket).unwrap()));
    // A connection is a task as long as its caller is there, or was there when somebody looked last.
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let with_nobody = tasks();
    let client = ControlClient::new(&socket);
    let request = |nth: usize| RestartRequest::of(Path::new("/").join(nth.to_string()));
    // The first one stays until it is the one that is looked at, and there is no room for another one.
    let first = request(0);
    let is_taken = async {
        while room.capacity() > 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        answer = client.restart_node(&first) => panic!("{answer:?}"),
        taken = tokio::time::timeout(PATIENCE, is_taken) => taken.unwrap(),
    }
    for nth in 1..20 {
        let request = request(nth);
        let gone = client.restart_node(&request);
        let gone = tokio::time::timeout(Duration::from_millis(20), gone).await;
        assert!(gone.is_err(), "{gone:?}");
    }
    let have_gone = async {
        while tasks() > with_nobody {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, have_gone).await.unwrap();
    let last = request(20);
    let (refused, programs) = tokio::join!(client.restart_node(&last), async {
        let mut programs = Vec::new();
        while let Some(restart) = asked.recv().await {
            let is_last = restart.request == last;
            programs.push(restart.request.program);
            if is_last {
                break;
            }
        }
        programs
    });
    refused.unwrap_err();
    assert_eq!(programs[0], first.program);
    assert_eq!(programs[1..], [last.program], "those in between have gone");
}
