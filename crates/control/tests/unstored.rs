//! Events that are stored later than they happened, or are too long to be stored. The nodes are played by the test.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use rackbus_control::api::{
    BorrowRequest, DeviceReport, EventKind, EventRecord, NodeMessages, NodeReport,
};
use rackbus_control::service::{Inventory, InventoryDevice};
use rackbus_control::store::{Commit, MemoryStore, StoreError};
use rackbus_control::{Service, ServiceOptions};
use rackbus_fabric::rack::DeviceCapability;
use rackbus_lease::{Config, Message};

/// After this long a test fails instead of waiting on.
const PATIENCE: Duration = Duration::from_secs(60);

/// A control plane of two hosts, of which none was heard.
fn open(store: MemoryStore) -> Arc<Service> {
    let device = InventoryDevice {
        function: "alpha/nvme0".parse().unwrap(),
        kind: "nvme".to_owned(),
        capabilities: &[DeviceCapability::Blocks],
        detail: String::new(),
        separable: true,
        windows: Default::default(),
    };
    let inventory = Inventory {
        rack: "lab".to_owned(),
        hosts: vec!["alpha".to_owned(), "beta".to_owned()],
        devices: vec![device].into(),
        ..Inventory::default()
    };
    let options = ServiceOptions {
        inventory,
        read_rack: None,
        read_file: None,
        config: Config::default(),
        database: "".into(),
        log_lines_left_out: || 0,
        is_node: Arc::new(|_, _| false),
    };
    Service::open_with(options, Box::new(store)).unwrap()
}

/// What the node of a host says whose function had so many accesses refused.
fn refused(count: u64, last: &str) -> NodeMessages {
    let last_refused = Some(last.to_owned());
    let report = DeviceReport { dma_refused: count, last_refused, ..Default::default() };
    let report =
        NodeReport { devices: [("nvme0".to_owned(), report)].into(), ..Default::default() };
    NodeMessages { messages: Vec::new(), report: Some(report) }
}

/// Waits for so many events of a kind.
async fn told(service: &Service, kind: EventKind, count: usize) -> Vec<EventRecord> {
    let told = async {
        loop {
            let (events, _) = service.events(0, Some(kind), usize::MAX);
            if events.len() >= count {
                return events;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, told).await.expect("they are lost")
}

/// A store takes so much at once; what is longer would be tried for ever, and all that is behind it wait.
#[tokio::test]
async fn what_somebody_says_at_length_keeps_no_other_event_from_the_store() {
    let judge = Arc::new(|commit: &Commit| {
        let bytes =
            |event: &EventRecord| event.text.len() + event.host.as_ref().map_or(0, String::len);
        match commit.events.iter().map(bytes).sum::<usize>() < 200 << 10 {
            true => Ok(()),
            false => Err(StoreError::Other("the step is too large".to_owned())),
        }
    });
    let service = open(MemoryStore::default().judged_by(judge));
    let long = "\u{e4}".repeat(512 << 10);
    service.receive("alpha", refused(1, &long)).await.unwrap();
    service.borrow(&BorrowRequest::new("alpha/nvme0", &long), None).await.unwrap_err();
    service.borrow(&BorrowRequest::new("nonsense", "beta"), None).await.unwrap_err();
    service.receive("alpha", refused(2, "a stray access")).await.unwrap();
    let faults = told(&service, EventKind::Fault, 2).await;
    assert!(faults[0].text.starts_with("1 accesses") && faults[0].text.len() <= 2000);
    assert!(faults[1].text.ends_with("a stray access"), "{faults:?}");
    assert_eq!(told(&service, EventKind::Refusal, 2).await.len(), 2);
}

/// A store that fails, or takes its time, as long as a test says so.
#[derive(Default)]
struct Switch {
    on: Mutex<bool>,
    changed: Condvar,
}

impl Switch {
    fn set(&self, on: bool) {
        *self.on.lock().unwrap() = on;
        self.changed.notify_all();
    }

    fn is_on(&self) -> bool {
        *self.on.lock().unwrap()
    }

    fn wait_off(&self) {
        drop(self.changed.wait_while(self.on.lock().unwrap(), |on| *on).unwrap());
    }
}

/// Nobody has a lease and no node is there, so no time comes at which something is to be done.
#[tokio::test]
async fn events_are_stored_later_where_nothing_else_is_due() {
    let full = Arc::new(Switch::default());
    let judge = {
        let full = full.clone();
        Arc::new(move |_: &Commit| match full.is_on() {
            true => Err(StoreError::Other("the disk is full".to_owned())),
            false => Ok(()),
        })
    };
    let service = open(MemoryStore::default().judged_by(judge));
    told(&service, EventKind::Restart, 1).await;
    full.set(true);
    service.borrow(&BorrowRequest::new("nonsense", "beta"), None).await.unwrap_err();
    while service.metrics().text().contains("rackbus_store_failures_total{} 0") {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    full.set(false);
    told(&service, EventKind::Refusal, 1).await;
}

/// The store takes so long that all places before it are taken, and the node's patience ends: it says the same again.
#[tokio::test]
async fn what_a_node_gave_up_saying_is_new_when_it_is_said_again() {
    let slow = Arc::new(Switch::default());
    let judge = {
        let slow = slow.clone();
        Arc::new(move |_: &Commit| {
            slow.wait_off();
            Ok(())
        })
    };
    let service = open(MemoryStore::default().judged_by(judge));
    told(&service, EventKind::Restart, 1).await;
    slow.set(true);
    for _ in 0..600 {
        let service = service.clone();
        let refused = BorrowRequest::new("nonsense", "beta");
        tokio::spawn(async move { service.borrow(&refused, None).await.unwrap_err() });
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    let said = service.receive("alpha", refused(3, "a stray access"));
    let heard = tokio::time::timeout(Duration::from_millis(50), said).await;
    assert!(heard.is_err(), "there was a place left");
    slow.set(false);
    service.receive("alpha", refused(3, "a stray access")).await.unwrap();
    let faults = told(&service, EventKind::Fault, 1).await;
    assert!(faults[0].text.starts_with("3 accesses of alpha/nvme0"), "{faults:?}");
}

#[tokio::test]
async fn what_hosts_had_too_much_of_is_not_told_again_after_a_restart() {
    let said = |locks: u64| {
        let report = NodeReport {
            over_bounds: [("locks".to_owned(), locks)].into(),
            ..NodeReport::default()
        };
        NodeMessages { messages: Vec::new(), report: Some(report) }
    };
    let store = MemoryStore::default();
    let first = open(store.clone());
    first.receive("alpha", said(4)).await.unwrap();
    told(&first, EventKind::Refusal, 1).await;
    drop(first);
    let next = open(store);
    next.receive("alpha", said(4)).await.unwrap();
    assert_eq!(told(&next, EventKind::Refusal, 1).await.len(), 1);
    next.receive("beta", said(4)).await.unwrap();
    next.receive("alpha", said(8)).await.unwrap();
    assert_eq!(told(&next, EventKind::Refusal, 3).await.len(), 3);
}

/// What a host said beside the beginning of a node's life, which the store refuses, is counted once and for all.
#[tokio::test]
async fn a_host_has_its_allowance_of_events_once_where_the_life_of_a_node_is_not_stored() {
    let (slow, refusing) = (Arc::new(Switch::default()), Arc::new(Switch::default()));
    let judge = {
        let (slow, refusing) = (slow.clone(), refusing.clone());
        Arc::new(move |commit: &Commit| {
            slow.wait_off();
            match commit.records.is_empty() || !refusing.is_on() {
                true => Ok(()),
                false => Err(StoreError::Other("the disk is full".to_owned())),
            }
        })
    };
    let service = open(MemoryStore::default().judged_by(judge));
    told(&service, EventKind::Restart, 1).await;
    let said = |why: u32| {
        let unused_ntbs = [("alpha".to_owned(), format!("its node speaks version {why}"))].into();
        let report = NodeReport { unused_ntbs, ..NodeReport::default() };
        NodeMessages { messages: Vec::new(), report: Some(report) }
    };
    refusing.set(true);
    slow.set(true);
    let queue = |host: &'static str, messages: NodeMessages| {
        let service = service.clone();
        tokio::spawn(async move { service.receive(host, messages).await })
    };
    // While the store is busy with this, all behind it is decided together.
    let first = queue("beta", refused(1, "a stray access"));
    let address = "alpha".to_owned();
    let life =
        Message::Register { incarnation: 1, devices: BTreeMap::new(), newest_lease: 0, address };
    let life = queue("alpha", NodeMessages { messages: vec![life], report: None });
    let reports: Vec<_> = (0..20).map(|why| queue("beta", said(why))).collect();
    tokio::time::sleep(Duration::from_millis(50)).await;
    slow.set(false);
    for queued in [first].into_iter().chain(reports) {
        queued.await.unwrap().unwrap();
    }
    assert!(life.await.unwrap().is_err());
    for why in 20..40 {
        service.receive("beta", said(why)).await.unwrap();
    }
    // It is stored behind all of them.
    service.borrow(&BorrowRequest::new("nonsense", "beta"), None).await.unwrap_err();
    told(&service, EventKind::Refusal, 1).await;
    let (faults, _) = service.events(0, Some(EventKind::Fault), usize::MAX);
    let of_ntbs = faults.iter().filter(|it| it.text.contains("speaks version")).count();
    assert_eq!(of_ntbs, 12, "{faults:?}");
}
