//! Hosts with nothing but their segment services.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use rackbus_attach::{Location, Session};
use rackbus_fabric::FabricHandle;
use rackbus_link::shm::ShmLink;
use rackbus_link::{Connect, Link};
use rackbus_node::segments::Segments;
use rackbus_segment::directory::{DirectorySettings, HostRange};
use tempfile::TempDir;

use super::links::{LinkKind, links};

pub const ALPHA: u32 = 4;
pub const BETA: u32 = 8;
pub const GAMMA: u32 = 12;

/// The hosts of a test: nodes whose sockets are in one temporary folder.
pub struct Hosts(TempDir);

impl Hosts {
    /// All three, where each has a link that is made of the one that it would have.
    pub fn start(link_of: impl Fn(ShmLink) -> Arc<dyn Link>) -> Hosts {
        let hosts = Hosts(tempfile::tempdir().unwrap());
        for node in [ALPHA, BETA, GAMMA] {
            let link = link_of(shm(hosts.folder()));
            start(hosts.folder(), node, link.clone(), &*link, false);
        }
        hosts
    }

    /// All three, each on a machine of its own.
    pub fn machines() -> Hosts {
        let folder = tempfile::tempdir().unwrap();
        let links = links(LinkKind::Tcp, folder.path());
        Hosts::joined_by(folder, &links)
    }

    /// The same, by links that were made for this folder.
    pub fn joined_by(folder: TempDir, links: &BTreeMap<&'static str, Arc<dyn Link>>) -> Hosts {
        let hosts = Hosts(folder);
        for node in [ALPHA, BETA, GAMMA] {
            let link = &links[name(node)];
            start(hosts.folder(), node, link.clone(), &**link, true);
        }
        hosts
    }

    /// One host alone, whose way to the others is this.
    pub fn alone(node: u32, link: impl FnOnce(&Path) -> Arc<dyn Connect>) -> Hosts {
        let hosts = Hosts(tempfile::tempdir().unwrap());
        start(hosts.folder(), node, link(hosts.folder()), &shm(hosts.folder()), false);
        hosts
    }

    pub fn folder(&self) -> &Path {
        self.0.path()
    }

    pub fn session(&self, node: u32) -> Session {
        let location = Location { run_dir: self.folder().to_owned(), host: name(node).to_owned() };
        Session::open(&location).unwrap()
    }
}

pub fn name(node: u32) -> &'static str {
    match node {
        ALPHA => "alpha",
        BETA => "beta",
        _ => "gamma",
    }
}

pub fn shm(run_dir: &Path) -> ShmLink {
    ShmLink::new("test", run_dir, ["alpha", "beta", "gamma"])
}

fn start(run_dir: &Path, node: u32, link: Arc<dyn Connect>, doors: &dyn Link, machines: bool) {
    let folder = run_dir.join(name(node));
    std::fs::create_dir_all(&folder).unwrap();
    let range = |node: u32| HostRange { base: u64::from(node) << 40, size: 64 << 30 };
    let nodes = [ALPHA, BETA, GAMMA];
    let settings = DirectorySettings {
        node,
        hosts: nodes.iter().map(|node| (*node, name(*node).to_owned())).collect::<BTreeMap<_, _>>(),
        range: range(node),
        ranges: nodes.iter().map(|node| (*node, range(*node))).collect(),
        rules: Default::default(),
        machines,
    };
    let fabric = FabricHandle::of_hosts(settings.hosts.values().map(String::as_str)).unwrap();
    let service = Segments::new("test", name(node), link, settings, fabric);
    service.start(&folder).unwrap();
    let listener = doors.listen(name(node)).unwrap();
    std::thread::spawn(move || {
        while let Ok(caller) = listener.accept() {
            let service = service.clone();
            std::thread::spawn(move || {
                if let Some(incoming) = caller.hear() {
                    service.attend(incoming);
                }
            });
        }
    });
}
