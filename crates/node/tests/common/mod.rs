//! A rack in one process: the control plane and a node for each host, over their real sockets.
#![allow(dead_code, reason = "each test uses a part of it")]

pub mod links;
pub mod lossy;
pub mod segments;
pub mod user;

use std::path::Path;
use std::sync::Arc;

use rackbus_control::api::{Change, HostState};
use rackbus_control::service::{Inventory, InventoryDevice};
use rackbus_control::{ControlClient, Service, ServiceOptions};
use rackbus_devices::class::parse_rack;
use rackbus_devices::{Folders, RackDevice};
use rackbus_fabric::{Topology, derive};
use rackbus_lease::Config;
use rackbus_link::Link;
use rackbus_link::shm::ShmLink;
use rackbus_node::{HandoverProgram, NetworkService, NodeOptions, control_socket, lendable};
use rackbus_segment::directory::{DirectorySettings, HostRange};
use tempfile::TempDir;

/// The hosts of every rack here.
pub const HOSTS: [&str; 3] = ["alpha", "beta", "gamma"];

/// How the node of a host is started, in the place of the one that runs.
pub struct Start {
    pub host: &'static str,
    pub options: Box<dyn Fn() -> NodeOptions + Send + Sync>,
}

/// The rack's folder and a client of its control plane.
pub struct Rack {
    pub folder: TempDir,
    pub client: ControlClient,
}

impl Rack {
    /// The rack that `file` describes, when all of its hosts are up.
    pub async fn start(file: &str) -> Rack {
        Rack::start_over(file, |link| Arc::new(link)).await
    }

    /// The same, where each host has a link that is made of the one that it would have.
    pub async fn start_over(file: &str, link_of: impl Fn(ShmLink) -> Arc<dyn Link>) -> Rack {
        Rack::start_changed(file, link_of, |_| ()).await
    }

    /// The same, where what the file says of devices is changed first.
    pub async fn start_changed(
        file: &str,
        link_of: impl Fn(ShmLink) -> Arc<dyn Link>,
        change: impl FnOnce(&mut [RackDevice]),
    ) -> Rack {
        Rack::start_programs(file, link_of, change, |_| None).await
    }

    /// The same, where each host has a program that its node may be replaced by, if one is made of how it is started.
    pub async fn start_programs(
        file: &str,
        link_of: impl Fn(ShmLink) -> Arc<dyn Link>,
        change: impl FnOnce(&mut [RackDevice]),
        program_of: impl Fn(Start) -> Option<Arc<dyn HandoverProgram>>,
    ) -> Rack {
        let folder = tempfile::tempdir().unwrap();
        let (rack, mut devices) = parse_rack("rack.toml", file).unwrap();
        change(&mut devices);
        let offered = devices.iter().map(|device| InventoryDevice {
            function: device.function.parse().unwrap(),
            kind: device.kind.to_owned(),
            capabilities: rackbus_devices::class::capabilities(device.kind),
            detail: device.config.as_ref().unwrap().detail(),
            separable: device.config.as_ref().unwrap().is_separable(),
            windows: Default::default(),
        });
        let inventory = Inventory {
            sections: Default::default(),
            rack: "test".into(),
            hosts: HOSTS.map(str::to_owned).to_vec(),
            devices: offered.collect(),
            ..Inventory::default()
        };
        let database = folder.path().join("state.db");
        let service = Service::open(ServiceOptions {
            inventory,
            read_rack: None,
            read_file: None,
            config: Config::default(),
            database,
            log_lines_left_out: || 0,
            is_node: Arc::new(|_, _| false),
        })
        .unwrap();
        let socket = control_socket(folder.path());
        let client = ControlClient::new(&socket);
        let mut changes = service.changes();
        tokio::spawn(async move { rackbus_control::serve(service, &socket).await });
        let topology = derive::here(&rack).unwrap();
        for host in HOSTS {
            let link = link_of(ShmLink::new("test", folder.path(), HOSTS));
            let again = (folder.path().to_owned(), devices.clone(), topology.clone());
            let program = program_of(Start {
                host,
                options: Box::new(move || {
                    let (run_dir, devices, topology) = &again;
                    let link = Arc::new(ShmLink::new("test", run_dir, HOSTS));
                    node(run_dir, host, link, devices, topology)
                }),
            });
            let options = node(folder.path(), host, link, &devices, &topology);
            tokio::spawn(rackbus_node::run(NodeOptions { program, ..options }));
        }
        // Every host says that it is there.
        let mut up = std::collections::BTreeSet::new();
        while up.len() < HOSTS.len() {
            if let Change::Host(host) = changes.recv().await.unwrap()
                && host.state == HostState::Up
            {
                up.insert(host.host);
            }
        }
        Rack { folder, client }
    }
}

fn node(
    run_dir: &Path,
    host: &str,
    link: Arc<dyn Link>,
    devices: &[RackDevice],
    topology: &Topology,
) -> NodeOptions {
    let folders = Folders::new(run_dir.to_owned(), run_dir.to_owned());
    let alone = rackbus_fabric::rack::Rack::parse("rack.toml", "name = \"test\"\n[hosts.alone]\n");
    let network =
        NetworkService::new(&alone.unwrap(), &Default::default(), host, link.clone(), false);
    NodeOptions {
        offered: None,
        rack: "test".into(),
        host: host.into(),
        run_dir: run_dir.to_owned(),
        devices: lendable::of_host(host, devices, &folders, &Arc::default()),
        ntbs: Arc::default(),
        link,
        topology: topology.clone(),
        segments: no_segments(),
        network,
        hold: rackbus_node::sessions::HOLD,
        lanes: rackbus_node::Lanes::default(),
        log_lines_left_out: || 0,
        term: run_dir.join(format!("{host}.term")),
        program: None,
    }
}

/// Nobody shares memory here.
fn no_segments() -> DirectorySettings {
    DirectorySettings {
        node: 4,
        hosts: Default::default(),
        range: HostRange { base: 0, size: 0 },
        ranges: Vec::new(),
        rules: Default::default(),
        machines: false,
    }
}

/// Does what blocks, apart from the rack's own tasks.
pub async fn blocking<R: Send + 'static>(job: impl FnOnce() -> R + Send + 'static) -> R {
    tokio::task::spawn_blocking(job).await.unwrap()
}
