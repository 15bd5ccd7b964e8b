//! A node that an NTB joins with another one is restarted in place: it closes the NTB, the node that goes on opens it anew, and
//! what is lent stays in use. Where the program fails, the node itself opens it again.
//!
//! The program that the node is replaced by is here a task of the same process, while the thread that was to become it waits.

mod common;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use common::links::Cable;
use common::user::Memory;
use common::{HOSTS, Rack, Start, blocking};
use rackbus_control::ControlClient;
use rackbus_control::api::BorrowRequest;
use rackbus_control::node::RestartRequest;
use rackbus_link::Link;
use rackbus_link::ntb::NtbLink;
use rackbus_link::shm::ShmLink;
use rackbus_node::handover::StateVersions;
use rackbus_node::metrics::SOCKET;
use rackbus_node::{HandoverProgram, InheritedNode, NodeOptions};
use tokio::runtime::Handle;
use tokio::sync::Notify;

const RACK: &str = "name = \"test\"\n\
    [hosts.alpha.devices.ram0]\nkind = \"memory\"\nsize = \"4 MiB\"\n[hosts.beta]\n[hosts.gamma]\n";
const LIMIT: Duration = Duration::from_secs(20);

/// alpha's link, or beta's, through the bridge.
fn bridged(cable: &Cable, end: usize, behind: impl Link + 'static) -> Arc<NtbLink> {
    let bridges = [(HOSTS[1 - end].to_owned(), cable.opening(end))];
    Arc::new(NtbLink::new(Arc::new(behind), "test", HOSTS[end], bridges).unwrap())
}

fn is_up(link: &NtbLink) -> bool {
    use rackbus_link::Connect;
    link.bridges()[0].up
}

fn wait_until(what: &str, wanted: impl Fn() -> bool) {
    let begun = Instant::now();
    while !wanted() {
        assert!(begun.elapsed() < LIMIT, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Fails at first, and goes on as the node after that.
struct Program {
    options: Box<dyn Fn() -> NodeOptions + Send + Sync>,
    cable: Cable,
    runtime: Handle,
    fails: AtomicBool,
    /// The link of the node that goes on.
    next: Arc<Mutex<Option<Arc<NtbLink>>>>,
    replaced: Arc<Notify>,
    /// Until the test ends: whoever was replaced does nothing any more.
    ends: Mutex<mpsc::Receiver<()>>,
}

impl HandoverProgram for Program {
    fn carried(&self, _: Option<&str>) -> String {
        String::new()
    }

    fn check(&self, _: &Path, versions: &StateVersions, _: Option<&str>) -> Result<(), String> {
        versions.check()
    }

    fn replace(&self, _: &Path, parcel: OwnedFd) -> std::io::Error {
        if self.fails.swap(false, Ordering::Relaxed) {
            return std::io::Error::other("no program");
        }
        let options = (self.options)();
        let link = bridged(&self.cable, 0, ShmLink::new("test", &options.run_dir, HOSTS));
        *self.next.lock().unwrap() = Some(link.clone());
        let inherited = InheritedNode::receive(parcel).unwrap();
        self.runtime.spawn(rackbus_node::resume(NodeOptions { link, ..options }, inherited));
        self.replaced.notify_one();
        let _ = self.ends.lock().unwrap().recv();
        std::io::Error::other("the test has ended")
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn a_node_with_an_ntb_for_its_link_is_restarted_in_place() {
    let cable = Cable::new();
    let (next, replaced) = (Arc::<Mutex<Option<_>>>::default(), Arc::<Notify>::default());
    let (_end, waits) = mpsc::channel();
    let waits = Mutex::new(Some(waits));
    let program = |Start { host, options }: Start| -> Option<Arc<dyn HandoverProgram>> {
        let ends = (host == "alpha").then(|| waits.lock().unwrap().take())??;
        Some(Arc::new(Program {
            options,
            cable: cable.clone(),
            runtime: Handle::current(),
            fails: AtomicBool::new(true),
            next: next.clone(),
            replaced: replaced.clone(),
            ends: Mutex::new(ends),
        }))
    };
    let (made, nth) = (Mutex::new(Vec::new()), AtomicUsize::new(0));
    let link_of = |behind: ShmLink| -> Arc<dyn Link> {
        // They are made in the order of the hosts.
        match nth.fetch_add(1, Ordering::Relaxed) {
            end @ 0..2 => {
                let link = bridged(&cable, end, behind);
                made.lock().unwrap().push(link.clone());
                link
            }
            _ => Arc::new(behind),
        }
    };
    let rack = Rack::start_programs(RACK, link_of, |_| (), program).await;
    let links = made.into_inner().unwrap();
    wait_until("the NTB is not up", || links.iter().all(|link| is_up(link)));
    let lease = rack.client.borrow_as(&BorrowRequest::new("alpha/ram0", "beta")).await.unwrap();
    let memory = blocking(move || {
        let memory = Memory::open(&lease);
        memory.place(0x4000_0000);
        memory.decode(true);
        memory.store(64, b"content!");
        memory
    })
    .await;

    let node = ControlClient::new(&rack.folder.path().join("alpha").join(SOCKET));
    let request = RestartRequest::of("/proc/self/exe".into());
    let error = node.restart_node(&request).await.unwrap_err().to_string();
    assert!(error.contains("no program"), "{error}");
    wait_until("the node has not opened the NTB again", || links.iter().all(|link| is_up(link)));
    tokio::select! {
        answer = node.restart_node(&request) => panic!("it is not replaced: {answer:?}"),
        () = replaced.notified() => {}
    }
    assert!(!is_up(&links[0]), "the node before has the NTB still");
    let successor = next.lock().unwrap().clone().unwrap();
    wait_until("the node that goes on has no NTB", || is_up(&successor) && is_up(&links[1]));
    blocking(move || assert_eq!(memory.load(64, 8), b"content!")).await;
}
