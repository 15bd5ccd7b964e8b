//! Hosts leave the rack while somebody asks for something of them: the control plane by itself.

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use rackbus_control::api::Isolation;
use rackbus_control::compositions::CompositionSpec;
use rackbus_control::service::{Inventory, InventoryDevice, ReadFile, ReadRack};
use rackbus_control::store::{Commit, MemoryStore, Store};
use rackbus_control::{Service, ServiceOptions};
use rackbus_fabric::rack::DeviceCapability;
use rackbus_lease::{Config, HostRecord, Record};

/// After this long a test fails instead of waiting on.
const PATIENCE: Duration = Duration::from_secs(60);

/// A rack of these hosts, of which `alpha` has a drive.
fn rack(hosts: &str) -> Inventory {
    let device = InventoryDevice {
        function: "alpha/nvme0".parse().unwrap(),
        kind: "nvme".to_owned(),
        capabilities: &[DeviceCapability::Blocks],
        detail: String::new(),
        separable: true,
        windows: Default::default(),
    };
    Inventory {
        rack: "lab".to_owned(),
        hosts: hosts.split(' ').map(str::to_owned).collect(),
        devices: vec![device].into(),
        ..Inventory::default()
    }
}

fn reader(hosts: &str) -> ReadRack {
    let hosts = hosts.to_owned();
    Arc::new(move |_| Ok(rack(&hosts)))
}

/// A control plane of these hosts. A rack file is the names of its hosts.
fn open(store: impl Store + 'static, hosts: &str) -> Arc<Service> {
    let read_file: ReadFile = Arc::new(|text| reader(text));
    let options = ServiceOptions {
        inventory: rack(hosts),
        read_rack: Some(reader(hosts)),
        read_file: Some(read_file),
        config: Config::default(),
        database: "".into(),
        log_lines_left_out: || 0,
        is_node: Arc::new(|_, _| false),
    };
    Service::open_with(options, Box::new(store)).unwrap()
}

/// The composition was asked for before the host left, and its turn comes when that is stored.
#[tokio::test]
async fn no_composition_is_saved_for_a_host_that_has_left_meanwhile() {
    let (stores, stored) = mpsc::channel();
    let (goes_on, wait) = mpsc::channel::<()>();
    let wait = Mutex::new(wait);
    let judge = Arc::new(move |commit: &Commit| {
        if commit.events.iter().any(|event| event.text == "host beta left the rack") {
            stores.send(()).unwrap();
            wait.lock().unwrap().recv_timeout(PATIENCE).unwrap();
        }
        Ok(())
    });
    let service = open(MemoryStore::default().judged_by(judge), "alpha beta");
    let following = service.clone();
    let followed = tokio::spawn(async move { following.follow_file("alpha".to_owned()).await });
    let stored = tokio::task::spawn_blocking(move || stored.recv_timeout(PATIENCE));
    stored.await.unwrap().unwrap();
    let spec = CompositionSpec {
        name: "db".to_owned(),
        borrower: "beta".to_owned(),
        functions: vec!["alpha/nvme0".to_owned()],
        isolation: Isolation::default(),
    };
    let mut saved = pin!(service.save_composition(&spec, None));
    // The writer has the request, and something else to do.
    let first = saved.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(first, Poll::Pending), "{first:?}");
    goes_on.send(()).unwrap();
    followed.await.unwrap().unwrap();
    let refused = saved.await.unwrap_err();
    assert_eq!(refused.code, "unknown_host");
    assert!(service.compositions().is_empty());
    service.follow_file("alpha beta".to_owned()).await.unwrap();
}

/// It was killed after the new file was noted, and before the host had left.
#[tokio::test]
async fn a_control_plane_that_reads_a_file_without_a_host_has_it_leave() {
    let store = MemoryStore::default();
    let host = |host: &str| {
        let (host, address) = (host.to_owned(), host.to_owned());
        Record::Host(HostRecord { host, incarnation: 1, address })
    };
    let records = vec![host("alpha"), host("beta")];
    store.clone().commit(&Commit { records: records.clone(), ..Commit::default() }).unwrap();
    let (tells, told) = mpsc::channel();
    let judge = Arc::new(move |commit: &Commit| {
        commit.events.iter().for_each(|event| drop(tells.send(event.text.clone())));
        Ok(())
    });
    let _service = open(store.clone().judged_by(judge), "alpha");
    assert_eq!(store.clone().load().unwrap().records, records[..1]);
    while told.recv_timeout(PATIENCE).unwrap() != "host beta left the rack" {}
}
