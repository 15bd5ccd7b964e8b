//! A rack in one process: control plane and three nodes over their real sockets, a userspace NVMe
//! driver as the user. Lending from beginning to end, and what is refused.

use std::path::Path;
use std::time::Instant;

use rackbus_control::api::{DeviceState, LeaseStage};
use rackbus_control::service::{Inventory, InventoryDevice};
use rackbus_control::{Client, ClientError, Options, Service};
use rackbus_devices::nvme::NvmeConfig;
use rackbus_driver::{Drive, DriveError, Options as DriveOptions};
use rackbus_lease::Config;
use rackbus_node::{DeviceKind, NodeOptions, control_socket};
use rackbus_pci::engine::EngineOptions;
use rackbus_segment::directory::{HostRange, Settings};
use tempfile::TempDir;

const HOSTS: [&str; 3] = ["alpha", "beta", "gamma"];
const RACK: &str = "name = \"test\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"64 MiB\"\n\
                    [hosts.beta]\n[hosts.gamma]\n";

/// The rack's folder and a client of its control plane.
struct Rack {
    folder: TempDir,
    client: Client,
}

async fn rack() -> Rack {
    let folder = tempfile::tempdir().unwrap();
    let nvme0 = InventoryDevice {
        function: "alpha/nvme0".parse().unwrap(),
        kind: "nvme".into(),
        detail: "64 MiB".into(),
    };
    let inventory = Inventory {
        rack: "test".into(),
        hosts: HOSTS.map(str::to_owned).to_vec(),
        devices: vec![nvme0],
        ..Inventory::default()
    };
    let database = folder.path().join("state.db");
    let service = Service::open(Options {
        inventory,
        config: Config::default(),
        database,
        log_lines_left_out: || 0,
        is_node: std::sync::Arc::new(|_, _| false),
    })
    .unwrap();
    let socket = control_socket(folder.path());
    let client = Client::new(&socket);
    let mut changes = service.changes();
    tokio::spawn(async move { rackbus_control::serve(service, &socket).await });
    for host in HOSTS {
        tokio::spawn(rackbus_node::run(node(folder.path(), host)));
    }
    // Every host says that it is there.
    let mut up = std::collections::BTreeSet::new();
    while up.len() < HOSTS.len() {
        if let rackbus_control::api::Change::Host(host) = changes.recv().await.unwrap()
            && host.state == rackbus_control::api::HostState::Up
        {
            up.insert(host.host);
        }
    }
    Rack { folder, client }
}

fn node(run_dir: &Path, host: &str) -> NodeOptions {
    let devices = match host {
        "alpha" => {
            vec![("nvme0".to_owned(), DeviceKind::Nvme(NvmeConfig::memory(64 << 20, "T1")))]
        }
        _ => Vec::new(),
    };
    NodeOptions {
        rack: "test".into(),
        host: host.into(),
        run_dir: run_dir.to_owned(),
        devices,
        engine: EngineOptions::default(),
        topology: topology(),
        segments: no_segments(),
        log_lines_left_out: || 0,
    }
}

/// Nobody shares memory here.
fn no_segments() -> Settings {
    Settings {
        node: 4,
        hosts: Default::default(),
        range: HostRange { base: 0, size: 0 },
        ranges: Vec::new(),
        rules: Default::default(),
    }
}

fn topology() -> rackbus_fabric::Topology {
    let rack = rackbus_fabric::rack::Rack::parse("test", RACK).unwrap();
    rackbus_fabric::derive::here(&rack).unwrap()
}

fn open(socket: &str) -> Result<Drive, DriveError> {
    Drive::open(Path::new(socket), DriveOptions::default())
}

async fn blocking<R: Send + 'static>(job: impl FnOnce() -> R + Send + 'static) -> R {
    tokio::task::spawn_blocking(job).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn data_written_by_one_borrower_is_found_by_the_next() {
    let rack = rack().await;
    let begun = Instant::now();
    let lease = rack.client.borrow("alpha/nvme0", "beta").await.unwrap();
    assert_eq!(lease.stage, LeaseStage::Active);
    let socket = lease.socket.clone().unwrap();
    let drive = blocking(move || {
        let mut drive = open(&socket).unwrap();
        let mut block = vec![0; 4096];
        drive.read(0, &mut block).unwrap();
        println!("borrowed to first read: {:?}", begun.elapsed());
        block.fill(0x5a);
        drive.write(8, &block, true).unwrap();
        drive
    })
    .await;

    let refused = rack.client.borrow("alpha/nvme0", "gamma").await.unwrap_err();
    let ClientError::Refused(refused) = refused else { panic!("{refused}") };
    assert_eq!((refused.code.as_str(), refused.holder.as_deref()), ("held", Some("beta")));
    assert_eq!(refused.lease, Some(lease.lease));

    let begun = Instant::now();
    let back = rack.client.give_back(lease.lease).await.unwrap();
    println!("returned and offered again: {:?}", begun.elapsed());
    assert!(back.returned && back.stage == LeaseStage::Ended);
    assert_eq!(rack.client.devices().await.unwrap()[0].state, DeviceState::Offered);
    // The old user's connection is of no more use.
    let mut drive = drive;
    blocking(move || assert!(drive.flush().is_err())).await;

    let lease = rack.client.borrow("alpha/nvme0", "gamma").await.unwrap();
    assert_eq!(lease.epoch, 2);
    blocking(move || {
        let mut drive = open(&lease.socket.unwrap()).unwrap();
        let mut block = vec![0; 4096];
        drive.read(8, &mut block).unwrap();
        assert!(block.iter().all(|byte| *byte == 0x5a));
    })
    .await;
    drop(rack.folder);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_is_refused_with_a_remedy() {
    let rack = rack().await;
    for (function, borrower, code) in [
        ("alpha/nvme9", "beta", "unknown_function"),
        ("nvme0", "beta", "bad_name"),
        ("alpha/nvme0", "delta", "unknown_host"),
    ] {
        let error = rack.client.borrow(function, borrower).await.unwrap_err();
        let ClientError::Refused(error) = error else { panic!("{error}") };
        assert_eq!(error.code, code);
        assert!(!error.remedy.is_empty());
    }
    let error = rack.client.give_back(77).await.unwrap_err();
    assert!(error.to_string().contains("no lease 77"), "{error}");
}

/// The link itself lets in only the epoch that was armed.
#[tokio::test(flavor = "multi_thread")]
async fn a_forged_epoch_is_not_let_in() {
    use rackbus_link::{Hello, Link, Service as Wanted, VERSION, shm::ShmLink};
    let rack = rack().await;
    let lease = rack.client.borrow("alpha/nvme0", "beta").await.unwrap();
    let address = rack.folder.path().join("alpha/link.sock").display().to_string();
    let attempt = |from: &str, lease: u64, epoch: u64| {
        let service = Wanted::Function { device: "nvme0".into(), lease, epoch };
        let (rack, to) = ("test".to_owned(), "alpha".to_owned());
        let hello = Hello { version: VERSION, rack, from: from.to_owned(), to, service };
        ShmLink.connect(&address, &hello).map(drop)
    };
    for (from, id, epoch) in [
        ("gamma", lease.lease, lease.epoch),
        ("beta", lease.lease + 1, lease.epoch),
        ("beta", lease.lease, lease.epoch + 1),
        ("beta", lease.lease, lease.epoch - 1),
    ] {
        let refused = attempt(from, id, epoch).unwrap_err().to_string();
        assert!(refused.contains("is not valid here"), "{refused}");
    }
    attempt("beta", lease.lease, lease.epoch).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_cycles_lose_no_data_and_leave_nothing() {
    let rack = rack().await;
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mut before = 0;
    for cycle in 0..100u64 {
        let host = HOSTS[(cycle % 3) as usize];
        let lease = rack.client.borrow("alpha/nvme0", host).await.unwrap();
        assert_eq!(lease.epoch, cycle + 1);
        let other = HOSTS[((cycle + 1) % 3) as usize];
        assert!(rack.client.borrow("alpha/nvme0", other).await.is_err());
        let socket = lease.socket.unwrap();
        blocking(move || {
            let mut drive = open(&socket).unwrap();
            let mut block = vec![0; 512];
            if cycle > 0 {
                drive.read(cycle - 1, &mut block).unwrap();
                assert_eq!(block, vec![cycle as u8 - 1; 512]);
            }
            block.fill(cycle as u8);
            drive.write(cycle, &block, false).unwrap();
        })
        .await;
        rack.client.give_back(lease.lease).await.unwrap();
        if cycle == 10 {
            before = descriptors();
        }
    }
    // Threads of ended conversations may still be closing theirs.
    assert!(descriptors() <= before + 20, "{} descriptors after {before}", descriptors());
}

/// A user that stays keeps the socket's conversation, not its name.
#[tokio::test(flavor = "multi_thread")]
async fn a_function_is_borrowed_again_while_its_last_user_is_still_there() {
    let rack = rack().await;
    let first = rack.client.borrow("alpha/nvme0", "beta").await.unwrap();
    let socket = first.socket.clone().unwrap();
    let kept = blocking(move || open(&socket).unwrap()).await;
    rack.client.give_back(first.lease).await.unwrap();
    let second = rack.client.borrow("alpha/nvme0", "beta").await.unwrap();
    assert_ne!(first.socket, second.socket, "what ends with the first would take the second along");
    let socket = second.socket.clone().unwrap();
    let mut drive = blocking(move || open(&socket).unwrap()).await;
    drop(kept);
    blocking(move || drive.read(0, &mut vec![0; 512]).unwrap()).await;
    assert!(Path::new(&second.socket.unwrap()).exists());
    assert!(!Path::new(&first.socket.unwrap()).exists());
}
