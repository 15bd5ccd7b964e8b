//! The links of the hosts of a test, of either kind.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use rackbus_identity::{CertificateAuthority, Subject};
use rackbus_link::Link;
use rackbus_link::ntb::NtbLink;
use rackbus_link::shm::ShmLink;
use rackbus_link::tcp::{SCHEME, TcpLink};

use super::HOSTS;
pub use cable::Cable;

#[path = "../../../link/tests/common/cable.rs"]
mod cable;

/// What joins the hosts of a rack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkKind {
    /// Shared memory, between hosts of one machine.
    Shm,
    /// TLS over TCP, between machines.
    Tcp,
    /// The same, and an NTB between the first two hosts.
    Ntb,
}

/// The links of all hosts, whose nodes have their folders in `run_dir`.
pub fn links(kind: LinkKind, run_dir: &Path) -> BTreeMap<&'static str, Arc<dyn Link>> {
    for host in HOSTS {
        std::fs::create_dir_all(run_dir.join(host)).unwrap();
    }
    if kind == LinkKind::Shm {
        let link = |host| (host, Arc::new(ShmLink::new("test", run_dir, HOSTS)) as Arc<dyn Link>);
        return HOSTS.map(link).into();
    }
    let authority = CertificateAuthority::open(run_dir, "test").unwrap();
    let places = free_places();
    let link = |host: &'static str| -> (&'static str, Arc<dyn Link>) {
        let credentials = authority.issue(&Subject::Node(host.to_owned())).unwrap();
        let (place, credentials) = (&places[host], Arc::new(RwLock::new(credentials)));
        let link = TcpLink::new("test", place, place, credentials);
        let others = places.clone();
        link.locate_by(move |host| Some(format!("{SCHEME}{}", others.get(host)?)));
        (host, Arc::new(link))
    };
    let mut links: BTreeMap<_, _> = HOSTS.map(link).into();
    if kind == LinkKind::Ntb {
        let cable = Cable::new();
        for (end, host) in HOSTS[..2].iter().enumerate() {
            let bridges = [(HOSTS[1 - end].to_owned(), cable.opening(end))];
            let behind = links[host].clone();
            links.insert(host, Arc::new(NtbLink::new(behind, "test", host, bridges).unwrap()));
        }
        while !links.values().all(|link| link.bridges().iter().all(|it| it.up)) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    links
}

/// Where the hosts' nodes listen: on an address of this process and rack alone, so that a port that was free stays free
/// until its node listens there.
fn free_places() -> BTreeMap<&'static str, String> {
    static RACKS: AtomicU32 = AtomicU32::new(1);
    let (process, rack) = (std::process::id(), RACKS.fetch_add(1, Ordering::Relaxed));
    let loopback = format!("127.{}.{}.{rack}", 1 + process / 256 % 250, process % 256);
    // All at once, so that no two hosts get the same one.
    let listeners = HOSTS.map(|_| TcpListener::bind(format!("{loopback}:0")).unwrap());
    let places = listeners.map(|listener| listener.local_addr().unwrap().to_string());
    HOSTS.into_iter().zip(places).collect()
}
