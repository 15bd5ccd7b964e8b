//! Requests that wait for a function which somebody has: who gets it, and who does not.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rackbus_control::api::{BorrowRequest, EventKind, Lease, LeaseStage, NodeMessages};
use rackbus_control::service::{Inventory, InventoryDevice};
use rackbus_control::store::MemoryStore;
use rackbus_control::together::BorrowAllRequest;
use rackbus_control::{Service, ServiceOptions};
use rackbus_fabric::rack::DeviceCapability;
use rackbus_lease::{Config, Message};
use tokio::task::JoinHandle;

const FUNCTION: &str = "alpha/nvme0";
const OTHER: &str = "alpha/nvme1";
const LONG: u64 = 60_000;

/// A control plane with nodes that do at once what they are told.
async fn service() -> Arc<Service> {
    let service = Service::open_with(options(), Box::new(MemoryStore::default())).unwrap();
    for host in ["alpha", "beta"] {
        register(&service, host).await;
    }
    service
}

fn options() -> ServiceOptions {
    let drive = |function: &str| InventoryDevice {
        function: function.parse().unwrap(),
        kind: "nvme".to_owned(),
        capabilities: &[DeviceCapability::Blocks],
        detail: String::new(),
        separable: true,
        windows: Default::default(),
    };
    let inventory = Inventory {
        sections: Default::default(),
        rack: "lab".to_owned(),
        hosts: vec!["alpha".to_owned(), "beta".to_owned()],
        devices: vec![drive(FUNCTION), drive(OTHER)].into(),
        ..Inventory::default()
    };
    ServiceOptions {
        inventory,
        read_rack: None,
        read_file: None,
        config: Config { resend: 5, ..Config::default() },
        database: "not used".into(),
        log_lines_left_out: || 0,
        is_node: Arc::new(|_, _| false),
    }
}

async fn register(service: &Arc<Service>, host: &'static str) {
    let told = service.listen(host).unwrap();
    let devices: &[&str] = if host == "alpha" { &["nvme0", "nvme1"] } else { &[] };
    let devices = devices.iter().map(|device| ((*device).to_owned(), 0)).collect();
    let address = host.to_owned();
    let register = Message::Register { incarnation: 1, devices, newest_lease: 0, address };
    say(service, host, register).await;
    tokio::spawn(node(service.clone(), host, told));
}

async fn say(service: &Service, host: &str, message: Message) {
    let said = NodeMessages { messages: vec![message], report: None };
    service.receive(host, said).await.unwrap();
}

async fn node(
    service: Arc<Service>,
    host: &'static str,
    mut told: tokio::sync::mpsc::Receiver<Message>,
) {
    while let Some(message) = told.recv().await {
        let answer = match message {
            Message::Arm { incarnation, device, epoch, .. } => {
                Message::Armed { incarnation, device, epoch, change: None }
            }
            Message::Granted(grant) => {
                let outcome = Ok(format!("socket of {}", grant.lease));
                Message::Opened { lease: grant.lease, outcome }
            }
            Message::Ended { lease, .. } => Message::Closed { lease },
            Message::Revoke { incarnation, device, epoch } => {
                Message::Revoked { incarnation, device, epoch }
            }
            _ => continue,
        };
        say(&service, host, answer).await;
    }
}

fn request(wait_ms: Option<u64>, priority: u8) -> BorrowRequest {
    BorrowRequest { wait_ms, priority, ..BorrowRequest::new(FUNCTION, "beta") }
}

/// A request that waits, when it has its place.
async fn wait(service: &Arc<Service>, priority: u8) -> JoinHandle<Lease> {
    let before = waiting(service);
    let waits = tokio::spawn({
        let service = service.clone();
        async move { service.borrow(&request(Some(LONG), priority), None).await.unwrap() }
    });
    while waiting(service) == before {
        tokio::task::yield_now().await;
    }
    waits
}

fn waiting(service: &Service) -> usize {
    service.devices()[0].waiting
}

#[tokio::test]
async fn waiting_borrowers_get_the_function_in_turn_and_nobody_overtakes() {
    let service = service().await;
    let held = service.borrow(&request(None, 0), None).await.unwrap();
    let mut waits = Vec::new();
    for priority in [1, 1, 7, 0] {
        waits.push(Some(wait(&service, priority).await));
    }
    let refused = service.borrow(&request(None, 0), None).await.unwrap_err();
    assert_eq!(refused.code, "held");
    let mut last = held.lease;
    for (nth, next) in [2, 0, 1, 3].into_iter().enumerate() {
        service.give_back(last, None, None).await.unwrap();
        let lease = waits[next].take().unwrap().await.unwrap();
        assert_eq!((lease.stage, waiting(&service)), (LeaseStage::Active, 3 - nth));
        assert!(waits.iter().flatten().all(|other| !other.is_finished()), "two have it");
        last = lease.lease;
    }
    service.give_back(last, None, None).await.unwrap();
    // Nobody waits any more.
    service.borrow(&request(None, 0), None).await.unwrap();
}

/// The function is free for a moment, with requests on their way that do not wait.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_returned_is_not_snatched_from_who_waits_but_by_who_is_more_urgent() {
    let service = service().await;
    let mut snatched = [0; 2];
    let begun = Instant::now();
    // Which newcomer comes in the moment in which the function is free is up to the scheduler.
    for round in 0.. {
        if round >= 60 && (snatched[1] > 0 || begun.elapsed() > Duration::from_secs(60)) {
            break;
        }
        let urgency = 3 + round as u8 % 2;
        let held = service.borrow(&request(None, 0), None).await.unwrap();
        let waits = wait(&service, 3).await;
        let newcomers: Vec<_> = (0..8)
            .map(|_| {
                let service = service.clone();
                tokio::spawn(async move {
                    loop {
                        match service.borrow(&request(None, urgency), None).await {
                            Ok(lease) => return Some(lease),
                            Err(refused) if refused.lease == Some(held.lease) => {}
                            Err(_) => return None,
                        }
                    }
                })
            })
            .collect();
        service.give_back(held.lease, None, None).await.unwrap();
        let mut got = Vec::new();
        for newcomer in newcomers {
            got.extend(newcomer.await.unwrap());
        }
        snatched[round % 2] += got.len();
        for lease in got {
            service.give_back(lease.lease, None, None).await.unwrap();
        }
        let lease = waits.await.unwrap().lease;
        service.give_back(lease, None, None).await.unwrap();
    }
    assert!(snatched[0] == 0 && snatched[1] > 0, "{snatched:?}");
}

#[tokio::test]
async fn a_request_that_timed_out_or_was_dropped_leaves_the_queue() {
    let service = service().await;
    let held = service.borrow(&request(None, 0), None).await.unwrap();
    let refused = service.borrow(&request(Some(20), 9), None).await.unwrap_err();
    assert_eq!((refused.code.as_str(), refused.lease), ("held", Some(held.lease)));
    let gone = wait(&service, 9).await;
    let stays = wait(&service, 1).await;
    gone.abort();
    assert!(gone.await.unwrap_err().is_cancelled());
    assert_eq!(waiting(&service), 1);
    service.give_back(held.lease, None, None).await.unwrap();
    stays.await.unwrap();
    let (events, _) = service.events(0, Some(EventKind::Refusal), 10);
    let texts: Vec<&str> = events.iter().map(|event| event.text.as_str()).collect();
    assert!(
        texts.len() == 1 && texts[0].contains("beta was refused alpha/nvme0 after "),
        "{texts:?}"
    );
    let refused = service.borrow(&request(Some(u64::MAX), 0), None).await.unwrap_err();
    assert_eq!(refused.code, "bad_request");
}

/// Who went away just when it was its turn does not keep the others waiting.
#[tokio::test]
async fn a_turn_that_is_not_taken_is_the_next_ones() {
    let service = service().await;
    for yields in 0..40 {
        let held = service.borrow(&request(None, 0), None).await.unwrap();
        let first = wait(&service, 9).await;
        let second = wait(&service, 1).await;
        let back = tokio::spawn({
            let service = service.clone();
            async move { service.give_back(held.lease, None, None).await }
        });
        for _ in 0..yields {
            tokio::task::yield_now().await;
        }
        first.abort();
        let lease = match first.await {
            // It was faster.
            Ok(lease) => {
                service.give_back(lease.lease, None, None).await.unwrap();
                second
            }
            Err(_) => second,
        };
        let lease = tokio::time::timeout(Duration::from_secs(60), lease).await;
        let lease = lease.expect("nobody gets the function").unwrap();
        back.await.unwrap().unwrap();
        service.give_back(lease.lease, None, None).await.unwrap();
    }
}

/// After a restart of the control plane, a request of a host that is not back yet.
#[tokio::test]
async fn a_request_that_waits_for_a_node_is_decided_again_after_a_change_only() {
    let store = MemoryStore::default();
    let first = Service::open_with(options(), Box::new(store.clone())).unwrap();
    for host in ["alpha", "beta"] {
        register(&first, host).await;
    }
    let asked = Arc::new(AtomicU64::new(0));
    let counts = asked.clone();
    let store = store.judged_by(Arc::new(move |_| {
        counts.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }));
    let service = Service::open_with(options(), Box::new(store)).unwrap();
    let borrow = tokio::spawn({
        let service = service.clone();
        async move { service.borrow(&request(Some(LONG), 0), None).await }
    });
    while waiting(&service) == 0 {
        tokio::task::yield_now().await;
    }
    register(&service, "alpha").await;
    // Until nothing is asked for longer than a thousand questions take.
    let mut before = None;
    while before != Some(asked.load(Ordering::Relaxed)) {
        before = Some(asked.load(Ordering::Relaxed));
        assert!(before < Some(20), "the writer was asked {before:?} times");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    register(&service, "beta").await;
    borrow.await.unwrap().unwrap();
}

/// A request for several functions, which waits.
fn together(functions: &[&str]) -> BorrowAllRequest {
    let functions: Vec<String> = functions.iter().map(|name| (*name).to_owned()).collect();
    let request = serde_json::json!({
        "functions": functions, "borrower": "beta", "wait_ms": LONG, "priority": 255,
    });
    serde_json::from_value(request).unwrap()
}

/// Whoever waits keeps its place before others, who would not get what is free either.
#[tokio::test]
async fn nobody_waits_for_a_function_that_is_not_there() {
    let service = service().await;
    let held = service.borrow(&request(None, 0), None).await.unwrap();
    let refused = service.borrow_together(&together(&[FUNCTION, "alpha/nvme9"]), None).await;
    assert_eq!(refused.unwrap_err().code, "unknown_function");
    assert_eq!(waiting(&service), 0);
    service.give_back(held.lease, None, None).await.unwrap();
    // Nor for its turn with another one, which is kept for who came first.
    service.borrow(&BorrowRequest::new(OTHER, "beta"), None).await.unwrap();
    let first = tokio::spawn({
        let service = service.clone();
        async move { service.borrow_together(&together(&[FUNCTION, OTHER]), None).await }
    });
    while waiting(&service) == 0 {
        tokio::task::yield_now().await;
    }
    let refused = service.borrow_together(&together(&[FUNCTION, "alpha/nvme9"]), None).await;
    assert_eq!(refused.unwrap_err().code, "unknown_function");
    first.abort();
}

/// The same where it goes while somebody waits for it.
#[tokio::test]
async fn borrowers_that_wait_for_a_withdrawn_function_are_refused() {
    let service = service().await;
    service.borrow(&request(None, 0), None).await.unwrap();
    let waits = tokio::spawn({
        let service = service.clone();
        async move { service.borrow_together(&together(&[FUNCTION]), None).await }
    });
    while waiting(&service) == 0 {
        tokio::task::yield_now().await;
    }
    // The lender's node begins anew without the device.
    let address = "alpha".to_owned();
    let devices = BTreeMap::new();
    say(&service, "alpha", Message::Register { incarnation: 2, devices, newest_lease: 1, address })
        .await;
    assert_eq!(waits.await.unwrap().unwrap_err().code, "withdrawn");
    assert_eq!(waiting(&service), 0);
}
