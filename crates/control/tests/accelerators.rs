//! Accelerators that are asked for by their service level: which one the control plane chooses, and what it says where
//! none keeps the level. The nodes are played by the test, each with the admission that a device has.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rackbus_control::api::{
    AcceleratorOffer, AcceleratorRoom, ApiError, BorrowRequest, Device, DeviceReport, DeviceState,
    Lease, NodeMessages, NodeReport,
};
use rackbus_control::service::{Inventory, InventoryDevice};
use rackbus_control::store::MemoryStore;
use rackbus_control::{ControlClient, ControlClientError, Service, ServiceOptions, serve};
use rackbus_fabric::rack::DeviceCapability;
use rackbus_lease::{Config, Message};
use rackbus_qos::{Capacity, EngineProfile, LevelAdmission, Point};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc::Receiver;

/// After this long a test fails instead of waiting on.
const PATIENCE: Duration = Duration::from_secs(60);
const LONG: u64 = 60_000;

/// A lender's device `accel0` with two functions, and the leases for which its node was asked: it may hear of one twice.
#[derive(Debug)]
struct Lent {
    admission: LevelAdmission,
    asked: BTreeSet<(String, u64)>,
}

/// A control plane, and hosts whose nodes do at once what they are told.
struct World {
    service: Arc<Service>,
    devices: BTreeMap<&'static str, Arc<Mutex<Lent>>>,
}

fn holder(function: &str) -> u64 {
    function.split_once(".vf").unwrap().1.parse().unwrap()
}

/// A device with so many engines, each of which copies 1 GB/s.
fn device(engines: u32) -> Lent {
    let point = |message| Point { message, ratio: 1000, cost_ns: message as f64 };
    let profile = EngineProfile::new([64, 4096, 65_536].map(point).to_vec()).unwrap();
    let profiles = BTreeMap::from([("copy".to_owned(), profile)]);
    Lent { admission: LevelAdmission::new(Capacity::of(engines), profiles), asked: BTreeSet::new() }
}

impl World {
    /// Lenders with so many engines, and the host `user`.
    async fn new(lenders: &[(&'static str, u32)]) -> World {
        let functions = |(host, _): &(&str, u32)| {
            ["vf1", "vf2"].map(|vf| InventoryDevice {
                function: format!("{host}/accel0.{vf}").parse().unwrap(),
                // No class is named for what it can do.
                kind: "coprocessor".to_owned(),
                capabilities: &[DeviceCapability::Engines],
                detail: String::new(),
                separable: true,
                windows: Default::default(),
            })
        };
        let hosts = lenders.iter().map(|(host, _)| host.to_string());
        let inventory = Inventory {
            rack: "lab".to_owned(),
            hosts: hosts.chain(["user".to_owned()]).collect(),
            devices: lenders.iter().flat_map(functions).collect(),
            ..Inventory::default()
        };
        let options = ServiceOptions {
            inventory,
            read_rack: None,
            read_file: None,
            config: Config { resend: 5, ..Config::default() },
            database: "not used".into(),
            log_lines_left_out: || 0,
            is_node: Arc::new(|_, _| false),
        };
        let service = Service::open_with(options, Box::new(MemoryStore::default())).unwrap();
        let device =
            |(host, engines): &(&'static str, u32)| (*host, Arc::new(Mutex::new(device(*engines))));
        let world = World { service, devices: lenders.iter().map(device).collect() };
        for host in lenders.iter().map(|(host, _)| *host).chain(["user"]) {
            let told = world.service.listen(host).unwrap();
            let devices = if host == "user" { &[][..] } else { &["accel0.vf1", "accel0.vf2"] };
            let devices = devices.iter().map(|name| ((*name).to_owned(), 0)).collect();
            let address = host.to_owned();
            let register = Message::Register { incarnation: 1, devices, newest_lease: 0, address };
            say(&world.service, host, register).await;
            let device = world.devices.get(host).cloned();
            tokio::spawn(node(world.service.clone(), host, device, told));
        }
        world
    }

    /// The nodes of these hosts say what their devices could still promise.
    async fn tell(&self, hosts: &[&'static str]) {
        for host in hosts {
            let admission = self.devices[host].lock().unwrap().admission.clone();
            let level = |vf: u64| admission.level(vf).map(ToString::to_string);
            let report = |vf| DeviceReport { level: level(vf), ..DeviceReport::default() };
            let room = AcceleratorRoom::of(&admission.room());
            let report = NodeReport {
                devices: [1, 2].map(|vf| (format!("accel0.vf{vf}"), report(vf))).into(),
                accelerators: [("accel0".to_owned(), room)].into(),
                ..NodeReport::default()
            };
            let said = NodeMessages { messages: Vec::new(), report: Some(report) };
            self.service.receive(host, said).await.unwrap();
        }
    }

    fn asked(&self, host: &str) -> usize {
        self.devices[host].lock().unwrap().asked.len()
    }

    async fn borrow(&self, level: &str, key: Option<&str>) -> Result<Lease, ApiError> {
        let request = BorrowRequest::of_accelerator(level, "user");
        let borrowed = self.service.borrow(&request, key.map(str::to_owned));
        tokio::time::timeout(PATIENCE, borrowed).await.expect("nobody answers")
    }

    /// Waits until a function can be borrowed: what was refused is on its way back for a moment.
    async fn wait_offered(&self, function: &str) {
        let offered = async {
            let is = |it: &Device| it.function == function && it.state == DeviceState::Offered;
            while !self.service.devices().iter().any(is) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(PATIENCE, offered).await.expect("it does not come back");
    }

    async fn chosen(&self, level: &str) -> String {
        self.borrow(level, None).await.unwrap().function
    }
}

fn offers(refused: &ApiError) -> &[AcceleratorOffer] {
    refused.offers.as_ref().expect("it offers nothing else")
}

async fn say(service: &Service, host: &str, message: Message) {
    let said = NodeMessages { messages: vec![message], report: None };
    service.receive(host, said).await.unwrap();
}

/// A node: a lender's where it has a device.
async fn node(
    service: Arc<Service>,
    host: &'static str,
    own: Option<Arc<Mutex<Lent>>>,
    mut told: Receiver<Message>,
) {
    while let Some(message) = told.recv().await {
        let answer = match message {
            Message::Arm { incarnation, device, epoch, level, .. } => {
                let level = level.unwrap().parse().unwrap();
                let mut own = own.as_ref().unwrap().lock().unwrap();
                own.asked.insert((device.clone(), epoch));
                match own.admission.admit(holder(&device), &level) {
                    Ok(_) => Message::Armed { incarnation, device, epoch, change: None },
                    Err(refused) => {
                        let reason = refused.to_string();
                        Message::ArmFailed { incarnation, device, epoch, reason, refused: true }
                    }
                }
            }
            Message::Granted(grant) => {
                let outcome = Ok(format!("socket of {}", grant.lease));
                Message::Opened { lease: grant.lease, outcome }
            }
            Message::Ended { lease, .. } => Message::Closed { lease },
            Message::Revoke { incarnation, device, epoch } => {
                let own = own.as_ref().unwrap();
                own.lock().unwrap().admission.release(holder(&device));
                Message::Revoked { incarnation, device, epoch }
            }
            _ => continue,
        };
        say(&service, host, answer).await;
    }
}

#[tokio::test]
async fn the_device_with_most_room_is_chosen_and_what_was_promised_since_counts() {
    let world = World::new(&[("alpha", 2), ("beta", 3), ("gamma", 9)]).await;
    // Of gamma nothing is known: an older node says nothing of its devices.
    world.tell(&["alpha", "beta"]).await;
    let level = "copy 10 Gbit/s";
    let lease = world.borrow(level, None).await.unwrap();
    assert_eq!((lease.function.as_str(), lease.level.as_deref()), ("beta/accel0.vf1", Some(level)));
    // Before beta says so itself: more is left at alpha now.
    assert_eq!(world.chosen(level).await, "alpha/accel0.vf1");
    assert_eq!(world.chosen(level).await, "beta/accel0.vf2");
    // Neither keeps a third. The others said so before they were asked.
    assert_eq!(world.chosen(level).await, "gamma/accel0.vf1");
    assert_eq!((world.asked("alpha"), world.asked("beta"), world.asked("gamma")), (1, 2, 1));
    world.tell(&["alpha", "beta", "gamma"]).await;
    world.service.give_back(lease.lease, None, None).await.unwrap();
    // What beta has said counts the level of the function that was returned: another one may have it.
    assert_eq!(world.chosen("copy 12 Gbit/s").await, "gamma/accel0.vf2");
    assert_eq!(world.chosen("copy 12 Gbit/s").await, "beta/accel0.vf1");
}

#[tokio::test]
async fn where_none_keeps_the_level_each_device_says_what_would_fit() {
    let world = World::new(&[("alpha", 1), ("beta", 2), ("gamma", 3)]).await;
    world.tell(&["alpha", "beta"]).await;
    let refused = world.borrow("copy 90 Gbit/s message 64 KiB", None).await.unwrap_err();
    assert_eq!(refused.code, "level_refused");
    let said: Vec<(&str, Option<&str>)> =
        offers(&refused).iter().map(|offer| (&*offer.device, offer.fits.as_deref())).collect();
    let expected = [
        ("gamma/accel0", Some("copy 22.8 Gbit/s message 64 KiB")),
        ("beta/accel0", Some("copy 15.2 Gbit/s message 64 KiB")),
        ("alpha/accel0", Some("copy 7.6 Gbit/s message 64 KiB")),
    ];
    assert_eq!(said, expected);
    assert!(refused.remedy.contains("copy 22.8 Gbit/s message 64 KiB"), "{refused}");
    // What fits is lent.
    world.wait_offered("gamma/accel0.vf1").await;
    assert_eq!(world.chosen(said[0].1.unwrap()).await, "gamma/accel0.vf1");
    // Devices that say that they have no such engine are not asked.
    let asked = world.asked("alpha");
    let refused = world.borrow("lzma 1 Gbit/s", None).await.unwrap_err();
    assert_eq!((refused.code.as_str(), offers(&refused).len()), ("level_refused", 3));
    assert!(refused.error.contains("there is no engine `lzma`"), "{refused}");
    assert_eq!(world.asked("alpha"), asked);
    for (level, remedy) in [("fast", "write it as"), ("copy 1 Gbit/s\n", "write it in")] {
        let refused = world.borrow(level, None).await.unwrap_err();
        assert_eq!(refused.code, "bad_request");
        assert!(refused.remedy.contains(remedy), "{refused}");
    }
    let nobody = BorrowRequest::of_accelerator("copy 1 Gbit/s", "nobody");
    assert_eq!(world.service.borrow(&nobody, None).await.unwrap_err().code, "unknown_host");
}

#[tokio::test]
async fn a_repeated_request_has_the_lease_that_was_chosen_first() {
    let world = World::new(&[("alpha", 1), ("beta", 2)]).await;
    let level = "copy 10 Gbit/s";
    // Both are asked in turn, the first refuses.
    let first = world.borrow(level, Some("k")).await.unwrap();
    assert_eq!((first.function.as_str(), world.asked("alpha")), ("beta/accel0.vf1", 1));
    for function in ["alpha/accel0.vf1", "alpha/accel0.vf2", "beta/accel0.vf2"] {
        let level = Some("copy 1 Mbit/s".to_owned());
        let request = BorrowRequest { level, ..BorrowRequest::new(function, "user") };
        world.service.borrow(&request, None).await.unwrap();
    }
    // Although nothing is free any more.
    assert_eq!(world.borrow(level, Some("k")).await.unwrap(), first);
    assert_eq!(world.borrow(level, None).await.unwrap_err().code, "none_free");
    assert_eq!(world.borrow("copy 1 Gbit/s", Some("k")).await.unwrap_err().code, "key_reused");
    // A refusal changed nothing: it is decided anew.
    assert_eq!(world.borrow(level, Some("again")).await.unwrap_err().code, "none_free");
    world.service.give_back(first.lease, None, None).await.unwrap();
    for _ in 0..2 {
        let refused = world.borrow("copy 90 Gbit/s", Some("n")).await.unwrap_err();
        assert_eq!(refused.code, "level_refused");
        world.wait_offered("beta/accel0.vf1").await;
    }
    let again = world.borrow(level, Some("again")).await.unwrap();
    assert_eq!(again.function, "beta/accel0.vf1");
    assert!(again.lease > first.lease);
}

#[tokio::test]
async fn a_request_that_waits_has_the_first_function_that_is_returned() {
    let world = World::new(&[("alpha", 1)]).await;
    world.tell(&["alpha"]).await;
    let leases =
        [world.borrow("copy 1 Gbit/s", None).await, world.borrow("copy 1 Gbit/s", None).await];
    let request = BorrowRequest {
        wait_ms: Some(50),
        ..BorrowRequest::of_accelerator("copy 1 Gbit/s", "user")
    };
    assert_eq!(world.service.borrow(&request, None).await.unwrap_err().code, "none_free");
    let service = world.service.clone();
    let waits = tokio::spawn(async move {
        let request = BorrowRequest { wait_ms: Some(LONG), ..request };
        service.borrow(&request, Some("k".to_owned())).await
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!waits.is_finished());
    let second = leases[1].as_ref().unwrap();
    world.service.give_back(second.lease, None, None).await.unwrap();
    let lease = tokio::time::timeout(PATIENCE, waits).await.unwrap().unwrap().unwrap();
    assert_eq!(lease.function, second.function);
}

/// As programs ask, over the socket of the control plane.
#[tokio::test]
async fn the_api_takes_a_level_in_place_of_a_function_and_not_beside_one() {
    let world = World::new(&[("alpha", 1), ("beta", 2)]).await;
    world.tell(&["alpha", "beta"]).await;
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("control.sock");
    let client = ControlClient::new(&socket);
    let (service, serving) = (world.service.clone(), socket.clone());
    tokio::spawn(async move { serve(service, &serving).await });
    while client.status().await.is_err() {
        tokio::task::yield_now().await;
    }
    let asked = BorrowRequest::of_accelerator("copy 1 Gbit/s", "user");
    let text = serde_json::to_value(&asked).unwrap();
    assert_eq!(text["accelerator"]["level"], "copy 1 Gbit/s");
    assert!(text.get("function").is_none(), "{text}");
    assert_eq!(client.borrow_as(&asked).await.unwrap().lender, "beta");
    let refused = |outcome: Result<Lease, ControlClientError>| match outcome {
        Err(ControlClientError::Refused(refused)) => refused,
        other => panic!("{other:?}"),
    };
    let more = BorrowRequest::of_accelerator("copy 90 Gbit/s", "user");
    let more = refused(client.borrow_as(&more).await);
    assert_eq!((more.code.as_str(), offers(&more).len()), ("level_refused", 2));
    let level = Some("copy 1 Gbit/s".to_owned());
    for wrong in [
        BorrowRequest { function: "alpha/accel0.vf1".to_owned(), ..asked.clone() },
        BorrowRequest { level, ..asked.clone() },
        BorrowRequest { accelerator: None, ..asked },
    ] {
        let refused = refused(client.borrow_as(&wrong).await);
        assert_eq!(refused.code, "bad_request");
        assert!(refused.remedy.contains("`accelerator`"), "{refused}");
    }
}

/// A control plane of the version before refuses a request with a field that it does not know, which is a level without
/// a function.
#[tokio::test]
async fn an_older_control_plane_is_told_of_as_such() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("control.sock");
    let listener = tokio::net::UnixListener::bind(&socket).unwrap();
    tokio::spawn(async move {
        let (mut caller, _) = listener.accept().await.unwrap();
        let mut heard = Vec::new();
        while !heard.ends_with(b"}") {
            assert!(caller.read_buf(&mut heard).await.unwrap() > 0);
        }
        let said = "Failed to deserialize the JSON body into the target type: accelerator: unknown field \
                    `accelerator`, expected one of `function`, `borrower` at line 1 column 14";
        let head =
            format!("HTTP/1.1 422 Unprocessable Entity\r\ncontent-length: {}\r\n\r\n", said.len());
        caller.write_all(format!("{head}{said}").as_bytes()).await.unwrap();
    });
    let request = BorrowRequest::of_accelerator("copy 1 Gbit/s", "user");
    let error = ControlClient::new(&socket).borrow_as(&request).await.unwrap_err().to_string();
    assert!(error.starts_with("the control plane is older"), "{error}");
}
