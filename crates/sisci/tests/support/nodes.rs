//! A rack of whole nodes inside of the test's process, with devices and a control plane, for C programs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use rackbus_control::api::{Change, Device, DeviceState, HostState};
use rackbus_control::service::{Inventory, InventoryDevice};
use rackbus_control::{ControlClient, Service, ServiceOptions};
use rackbus_devices::class::parse_rack;
use rackbus_devices::{Folders, RackDevice};
use rackbus_fabric::{Topology, derive};
use rackbus_lease::Config;
use rackbus_link::Link;
use rackbus_link::shm::ShmLink;
use rackbus_node::{NetworkService, NodeOptions, control_socket, lendable};
use rackbus_segment::directory::{DirectorySettings, HostRange};
use tempfile::TempDir;

use super::{Build, HOSTS, Linked, MACHINES, links_of_machines, program_on, programs};

/// The rack; its tasks end with the test's runtime.
pub struct Nodes {
    folder: TempDir,
    machines: bool,
    pub client: ControlClient,
    changes: tokio::sync::broadcast::Receiver<Change>,
}

impl Nodes {
    /// The rack that `file` describes, when all of its hosts are up. They are [`HOSTS`], of one machine.
    pub async fn start(file: &str) -> Nodes {
        Nodes::of(file, false).await
    }

    /// The same, where each host is a machine.
    pub async fn of_machines(file: &str) -> Nodes {
        Nodes::of(file, true).await
    }

    async fn of(file: &str, machines: bool) -> Nodes {
        let folder = tempfile::Builder::new().prefix("rb-").tempdir_in("/tmp").unwrap();
        let (rack, devices) = parse_rack("rack.toml", file).unwrap();
        let service = Service::open(ServiceOptions {
            inventory: inventory(&devices, machines),
            read_rack: None,
            read_file: None,
            config: Config::default(),
            database: folder.path().join("state.db"),
            log_lines_left_out: || 0,
            is_node: Arc::new(|_, _| false),
        })
        .unwrap();
        let socket = control_socket(folder.path());
        let client = ControlClient::new(&socket);
        let mut changes = service.changes();
        tokio::spawn(async move { rackbus_control::serve(service, &socket).await });
        let topology = match machines {
            true => derive::here_of_machines(&rack).unwrap(),
            false => derive::here(&rack).unwrap(),
        };
        let names = HOSTS.map(|(_, name)| name);
        let links: [Arc<dyn Link>; 3] = match machines {
            true => links_of_machines(folder.path()).map(|link| link as Arc<dyn Link>),
            false => names.map(|_| Arc::new(ShmLink::new("test", folder.path(), names)) as _),
        };
        for (host, link) in HOSTS.into_iter().zip(links) {
            let linked = Linked { link, machines };
            let options = node(folder.path(), host, linked, &devices, &topology);
            tokio::spawn(rackbus_node::run(options));
        }
        let mut up = std::collections::BTreeSet::new();
        while up.len() < HOSTS.len() {
            if let Change::Host(host) = changes.recv().await.unwrap()
                && host.state == HostState::Up
            {
                up.insert(host.host);
            }
        }
        Nodes { folder, machines, client, changes }
    }

    /// The rack's run directory.
    pub fn run_dir(&self) -> &Path {
        self.folder.path()
    }

    /// A program of [`programs`], to be run on a host.
    pub fn on(&self, host: &str, program: &Path) -> Command {
        let mut command = program_on(self.folder.path(), host, program, Build::Plain);
        if self.machines {
            command.env(MACHINES, "1");
        }
        command
    }

    /// Waits until nobody has any device.
    pub async fn until_all_are_offered(&mut self) {
        self.until(|device| device.state == DeviceState::Offered).await;
    }

    /// Waits until something holds for every device.
    pub async fn until(&mut self, holds: impl Fn(&Device) -> bool) {
        while !self.client.devices().await.unwrap().iter().all(&holds) {
            // One that was missed among many is no harm: the next look finds it.
            let _ = self.changes.recv().await;
        }
    }
}

fn inventory(devices: &[RackDevice], apart: bool) -> Inventory {
    let offered = devices.iter().map(|device| {
        let config = device.config.as_ref().unwrap();
        InventoryDevice {
            function: device.function.parse().unwrap(),
            kind: device.kind.to_owned(),
            capabilities: rackbus_devices::class::capabilities(device.kind),
            detail: config.detail(),
            separable: if apart { config.is_carried() } else { config.is_separable() },
            windows: Default::default(),
        }
    });
    Inventory {
        sections: Default::default(),
        rack: "test".into(),
        hosts: HOSTS.map(|(_, name)| name.to_owned()).to_vec(),
        devices: offered.collect(),
        apart,
        ..Inventory::default()
    }
}

fn node(
    run_dir: &Path,
    (number, host): (u32, &str),
    Linked { link, machines }: Linked,
    devices: &[RackDevice],
    topology: &Topology,
) -> NodeOptions {
    let folders = Folders::new(run_dir.to_owned(), run_dir.to_owned());
    let alone = rackbus_fabric::rack::Rack::parse("rack.toml", "name = \"test\"\n[hosts.alone]\n");
    let network =
        NetworkService::new(&alone.unwrap(), &Default::default(), host, link.clone(), machines);
    NodeOptions {
        offered: None,
        rack: "test".into(),
        host: host.into(),
        run_dir: run_dir.to_owned(),
        devices: lendable::of_host(host, devices, &folders, &Arc::default()),
        ntbs: Default::default(),
        link,
        topology: topology.clone(),
        segments: settings(number, machines),
        network,
        hold: rackbus_node::sessions::HOLD,
        lanes: rackbus_node::Lanes::default(),
        log_lines_left_out: || 0,
        term: run_dir.join(format!("{host}.term")),
        program: None,
    }
}

/// What the segment service of a host is told, where nothing is forbidden.
fn settings(node: u32, machines: bool) -> DirectorySettings {
    let range = |node: u32| HostRange { base: u64::from(node) << 40, size: 64 << 30 };
    DirectorySettings {
        node,
        hosts: HOSTS.iter().map(|(node, name)| (*node, (*name).to_owned())).collect(),
        range: range(node),
        ranges: HOSTS.iter().map(|(node, _)| (*node, range(*node))).collect(),
        rules: Default::default(),
        machines,
    }
}

/// Where `examples/sisci/nvme.c` is, compiled against the library and headers of this package. Once: a program that
/// runs cannot be written.
pub fn nvme_example() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| compile("nvme"))
}

fn compile(name: &str) -> PathBuf {
    let package = env!("CARGO_MANIFEST_DIR");
    let built = programs(Build::Plain);
    let program = built.join(format!("example-{name}-{}", std::process::id()));
    let test = std::env::current_exe().unwrap();
    let library = test.parent().unwrap();
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O2", "-g"])
        .arg(format!("-I{package}/include"))
        .arg(format!("{package}/../../examples/sisci/{name}.c"))
        .arg("-o")
        .arg(&program)
        .arg(format!("-L{}", library.display()))
        .args(["-lsisci", &format!("-Wl,-rpath,{}", library.display())]);
    let made = gcc.output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    program
}
