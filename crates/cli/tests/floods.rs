//! Ten thousand connections at once, from as many addresses, that say nothing, and some two thousand more each second: to the
//! control plane and to a node's link.
//! Each is bounded and counted, and those who belong to the rack are let in all the while.

mod support;

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use support::machines::{Machine, Machines, free_port};
use support::{PATIENCE, open};

const RACK: &str = r#"
name = "lab"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"

[hosts.beta]
"#;

/// Connections that are open at a time.
const MANY: u32 = 10_000;

/// From one that is opened beside these to the next.
const PAUSE: std::time::Duration = std::time::Duration::from_micros(500);

/// Held by the test that floods: a process may not have enough sockets for two.
static FLOODING: Mutex<()> = Mutex::new(());

/// Connections from an address each, which say nothing: as many as there may be, and then the first is closed for each that
/// is opened, until this is dropped.
struct Flood {
    stop: Arc<AtomicBool>,
    opened: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    /// Returns when ten thousand are open.
    fn start(to: SocketAddr) -> Flood {
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
        let most = limit.maximum.unwrap_or(u64::MAX);
        assert!(
            most > u64::from(MANY) + 500,
            "this test opens {MANY} sockets, and may open {most}"
        );
        let (stop, opened) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stops, counts) = (stop.clone(), opened.clone());
        let work = move || {
            let mut held = std::collections::VecDeque::new();
            for nth in (0..MANY).cycle() {
                if stops.load(Ordering::Relaxed) {
                    return;
                }
                if held.len() == MANY as usize {
                    held.pop_front();
                    std::thread::sleep(PAUSE);
                }
                held.push_back(connection(nth, to));
                counts.fetch_add(1, Ordering::Relaxed);
            }
        };
        let flood = Flood { stop, opened, thread: Some(std::thread::spawn(work)) };
        let begun = std::time::Instant::now();
        while flood.opened() < MANY as usize {
            assert!(begun.elapsed() < PATIENCE, "{} are open", flood.opened());
            std::thread::yield_now();
        }
        flood
    }

    fn opened(&self) -> usize {
        self.opened.load(Ordering::Relaxed)
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// A connection from an address that no other one has. It is not waited for: who listens may be slow to take it.
fn connection(nth: u32, to: SocketAddr) -> OwnedFd {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
    let address = [127, 1, (nth / 250) as u8, (nth % 250 + 1) as u8];
    bind(&socket, &SocketAddr::from((address, 0))).unwrap();
    let _ = connect(&socket, &to);
    socket
}

/// What a machine's process has counted: the sum of all lines that begin so.
fn counted(machine: &Machine, metrics: &[&str], what: &str) -> f64 {
    let page = String::from_utf8(machine.run(metrics).stdout).unwrap();
    let lines = page.lines().filter(|line| line.starts_with(what));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// Returns when a machine's process has counted some. While the flood goes on it must: how many connections it has taken so
/// far depends on how long the system lets it wait for a processor.
fn await_counted(machine: &Machine, metrics: &[&str], what: &str) {
    let begun = std::time::Instant::now();
    while counted(machine, metrics, what) == 0.0 {
        assert!(begun.elapsed() < PATIENCE, "nothing is counted as {what}");
    }
}

#[test]
fn ten_thousand_silent_connections_to_the_control_plane_keep_nobody_out() {
    let _flooding = FLOODING.lock().unwrap_or_else(PoisonError::into_inner);
    let rack = Machines::start(RACK);
    let _alpha = rack.joined("alpha");
    let flood = Flood::start(rack.url.strip_prefix("https://").unwrap().parse().unwrap());
    // Somebody joins, which takes a connection without a certificate, and borrows.
    let beta = rack.joined("beta");
    let lease = beta.borrow("alpha/nvme0", "beta");
    beta.json(&["return", &lease.lease.to_string()]);
    assert_eq!(rack.state_of("alpha"), "up", "a node that is known stays");
    assert!(flood.opened() >= MANY as usize);
    let what = "rackbus_connections_refused_total{cause=\"too many not known yet\"}";
    await_counted(&rack.control, &["metrics"], what);
    drop(flood);
}

#[test]
fn ten_thousand_silent_connections_to_a_node_keep_nobody_out() {
    let _flooding = FLOODING.lock().unwrap_or_else(PoisonError::into_inner);
    let rack = Machines::start(RACK);
    let listen = format!("127.0.0.1:{}", free_port());
    let mut alpha = rack.machine("alpha");
    rack.node_at(&mut alpha, "alpha", &listen, &[], Some(&rack.token("alpha")));
    let beta = rack.joined("beta");
    let mut before = open(&beta.borrow("alpha/nvme0", "beta"));
    before.write(0, &[7; 512], false).unwrap();
    let flood = Flood::start(listen.parse().unwrap());
    let mut data = [0; 512];
    before.read(0, &mut data).unwrap();
    assert_eq!(data, [7; 512], "a connection that is known stays");
    drop(before);
    // Another one is made.
    let lease = beta.json(&["leases"])[0]["lease"].to_string();
    beta.json(&["return", &lease]);
    let mut again = open(&beta.borrow("alpha/nvme0", "beta"));
    again.write(0, &[8; 512], false).unwrap();
    again.read(0, &mut data).unwrap();
    assert_eq!(data, [8; 512]);
    assert!(flood.opened() >= MANY as usize);
    let refused = "rackbus_link_connections_refused_total";
    await_counted(&alpha, &["metrics", "alpha"], refused);
    drop(flood);
}
