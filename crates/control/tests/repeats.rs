//! Requests that are repeated with their keys while the control plane dies and its store fails, at
//! random: whoever asks gets one lease for each key, and always the same answer.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use rackbus_control::api::{BorrowRequest, Isolation, Lease, NodeMessages};
use rackbus_control::compositions::{CompositionRequest, CompositionSpec, CompositionState};
use rackbus_control::service::{Inventory, InventoryDevice};
use rackbus_control::shares::ShareSpec;
use rackbus_control::store::{Commit, MemoryStore, StoreError};
use rackbus_control::together::BorrowAllRequest;
use rackbus_control::{Service, ServiceOptions};
use rackbus_lease::{Config, Message, Placement};
use rackbus_seeds::Random;
use tokio::task::JoinSet;

const DEVICES: [&str; 3] = ["nvme0", "nvme1", "nvme2"];
/// After this long a test fails instead of waiting on.
const PATIENCE: Duration = Duration::from_secs(60);

/// The answers to each key so far.
type Answers = Arc<Mutex<BTreeMap<usize, Vec<Lease>>>>;

/// One life of the control plane, with nodes that do at once what they are told.
struct Life {
    service: Arc<Service>,
    /// Nothing that it does is stored any more.
    dead: Arc<AtomicBool>,
    tasks: JoinSet<()>,
}

impl Life {
    fn start(store: &MemoryStore, full: &Arc<AtomicBool>) -> Life {
        let dead = Arc::new(AtomicBool::new(false));
        let judge = {
            let (dead, full) = (dead.clone(), full.clone());
            Arc::new(move |_: &Commit| {
                match dead.load(Ordering::SeqCst) || full.load(Ordering::SeqCst) {
                    true => Err(StoreError::Other("it fails".to_owned())),
                    false => Ok(()),
                }
            })
        };
        let device = |name: &str| InventoryDevice {
            function: format!("alpha/{name}").parse().unwrap(),
            kind: "nvme".to_owned(),
            detail: String::new(),
            separable: true,
            windows: Default::default(),
        };
        let inventory = Inventory {
            sections: Default::default(),
            rack: "lab".to_owned(),
            hosts: vec!["alpha".to_owned(), "beta".to_owned()],
            devices: DEVICES.iter().map(|name| device(name)).collect(),
            ..Inventory::default()
        };
        let options = ServiceOptions {
            inventory,
            read_rack: None,
            config: Config { resend: 5, ..Config::default() },
            database: "not used".into(),
            log_lines_left_out: || 0,
            is_node: Arc::new(|_, _| false),
        };
        let store = store.clone().judged_by(judge);
        let service = Service::open_with(options, Box::new(store)).unwrap();
        let mut tasks = JoinSet::new();
        for host in ["alpha", "beta"] {
            tasks.spawn(node(service.clone(), host));
        }
        Life { service, dead, tasks }
    }

    fn ask(&mut self, key: usize, answers: &Answers) {
        let (service, answers) = (self.service.clone(), answers.clone());
        self.tasks.spawn(async move {
            let request = BorrowRequest::new(&format!("alpha/{}", DEVICES[key]), "beta");
            if let Ok(lease) = service.borrow(&request, Some(format!("key {key}"))).await {
                answers.lock().unwrap().entry(key).or_default().push(lease);
            }
        });
    }

    /// It dies: what it was doing is not done, and who asked gets no answer.
    async fn crash(mut self) {
        self.dead.store(true, Ordering::SeqCst);
        self.tasks.shutdown().await;
    }
}

/// A node: says who it is until that is heard, and does what it is told.
async fn node(service: Arc<Service>, host: &str) {
    let mut told = service.listen(host).unwrap();
    let devices = match host {
        "alpha" => DEVICES.iter().map(|name| ((*name).to_owned(), 0)).collect(),
        _ => BTreeMap::new(),
    };
    let address = host.to_owned();
    let register = Message::Register { incarnation: 1, devices, newest_lease: 0, address };
    let say = async |message: Message| {
        let said = NodeMessages { messages: vec![message], report: None };
        service.receive(host, said).await.is_ok()
    };
    while !say(register.clone()).await {
        tokio::task::yield_now().await;
    }
    while let Some(message) = told.recv().await {
        // What is not heard is asked for again.
        match message {
            Message::Arm { incarnation, device, epoch, .. } => {
                say(Message::Armed { incarnation, device, epoch, change: None }).await;
            }
            Message::Granted(grant) => {
                let outcome = Ok(format!("socket of {}", grant.lease));
                say(Message::Opened { lease: grant.lease, outcome }).await;
            }
            Message::Ended { lease, .. } => {
                say(Message::Closed { lease }).await;
            }
            Message::Revoke { incarnation, device, epoch } => {
                say(Message::Revoked { incarnation, device, epoch }).await;
            }
            _ => {}
        }
    }
}

async fn run(seed: u64) {
    let mut random = Random(seed);
    let (store, full) = (MemoryStore::default(), Arc::new(AtomicBool::new(false)));
    let answers = Answers::default();
    let mut life = Life::start(&store, &full);
    for _ in 0..40 {
        match random.below(10) {
            0..=4 => life.ask(random.below(DEVICES.len()), &answers),
            5 => full.store(random.chance(50), Ordering::SeqCst),
            6 => {
                life.crash().await;
                // What fails now is the beginning of the next life: nobody starts one then.
                full.store(false, Ordering::SeqCst);
                life = Life::start(&store, &full);
            }
            _ => {
                for _ in 0..random.below(20) {
                    tokio::task::yield_now().await;
                }
                tokio::time::sleep(Duration::from_micros(random.next() % 500)).await;
            }
        }
    }
    full.store(false, Ordering::SeqCst);
    for (key, device) in DEVICES.iter().enumerate() {
        let request = BorrowRequest::new(&format!("alpha/{device}"), "beta");
        let lease = loop {
            let answer = life.service.borrow(&request, Some(format!("key {key}"))).await;
            match answer {
                Ok(lease) => break lease,
                // The nodes are still on their way; nothing was changed.
                Err(refused) => {
                    let early = ["not_stored", "silent", "unknown_host", "unknown_function"];
                    assert!(early.contains(&refused.code.as_str()), "seed {seed}: {refused:?}");
                    tokio::task::yield_now().await;
                }
            }
        };
        let all = answers.lock().unwrap().remove(&key).unwrap_or_default();
        for other in all {
            assert_eq!(other, lease, "seed {seed}: two answers to key {key}");
        }
    }
    let leases = life.service.leases(true);
    assert_eq!(leases.len(), DEVICES.len(), "seed {seed}: {leases:?}");
    life.crash().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_has_one_lease_and_one_answer() {
    let seeds = std::env::var("RACKBUS_SEEDS").ok().and_then(|text| text.parse().ok());
    for seed in 0..seeds.unwrap_or(40) {
        let ended = tokio::time::timeout(PATIENCE, run(seed)).await;
        ended.unwrap_or_else(|_| panic!("seed {seed} does not end"));
    }
}

/// Asks for two functions together until the nodes are there.
async fn together(life: &Life, key: &str) -> Vec<u64> {
    let request = BorrowAllRequest {
        functions: vec!["alpha/nvme1".to_owned(), "alpha/nvme0".to_owned()],
        borrower: "beta".to_owned(),
        placement: Placement::Lender,
        group: None,
        wait_ms: None,
        priority: 0,
    };
    loop {
        match life.service.borrow_together(&request, Some(key.to_owned())).await {
            Ok(leases) => return leases.into_iter().map(|lease| lease.lease).collect(),
            Err(refused) => {
                let early = ["silent", "unknown_host", "unknown_function", "failed", "returning"];
                assert!(early.contains(&refused.code.as_str()), "{refused:?}");
                tokio::task::yield_now().await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn functions_borrowed_together_under_a_key_are_borrowed_once() {
    let ended = tokio::time::timeout(PATIENCE, async {
        let (store, full) = (MemoryStore::default(), Arc::new(AtomicBool::new(false)));
        let life = Life::start(&store, &full);
        let first = together(&life, "move").await;
        assert_eq!(together(&life, "move").await, first);
        life.crash().await;
        // The answer may have been lost with that life.
        let life = Life::start(&store, &full);
        assert_eq!(together(&life, "move").await, first);
        let live = life.service.leases(false);
        assert_eq!(live.len(), 2, "{live:?}");
        // Whole or not at all: where one has ended, the other is given back, and both are lent anew.
        life.service.give_back(first[1], None).await.unwrap();
        let second = together(&life, "move").await;
        assert!(second.iter().all(|lease| !first.contains(lease)), "{first:?} {second:?}");
        life.crash().await;
    });
    ended.await.expect("it ends");
}

/// Whoever joins again under the same key, as after an answer that was lost, has one share.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_has_one_share_also_in_the_next_life() {
    let (store, full) = (MemoryStore::default(), Arc::new(AtomicBool::new(false)));
    let life = Life::start(&store, &full);
    let spec = ShareSpec::new("alpha/nvme0", "beta");
    let join = async |life: &Life, spec: &ShareSpec, key: &str| {
        let begun = std::time::Instant::now();
        loop {
            match life.service.join_share(spec, Some(key.to_owned())).await {
                Err(early)
                    if ["silent", "unknown_host", "unknown_function"]
                        .contains(&early.code.as_str()) =>
                {
                    assert!(begun.elapsed() < PATIENCE, "{early:?}");
                    tokio::task::yield_now().await;
                }
                outcome => return outcome.map(|share| share.share),
            }
        }
    };
    let first = join(&life, &spec, "a").await.unwrap();
    assert_eq!(join(&life, &spec, "a").await.unwrap(), first);
    let other = join(&life, &spec, "b").await.unwrap();
    assert_ne!(other, first);
    let reused = join(&life, &ShareSpec { weight: Some(2), ..spec.clone() }, "a").await;
    assert_eq!(reused.unwrap_err().code, "key_reused");
    life.crash().await;
    let life = Life::start(&store, &full);
    assert_eq!(join(&life, &spec, "a").await.unwrap(), first);
    assert_eq!(life.service.shares().len(), 2);
    life.service.leave_share(first).await.unwrap();
    assert_eq!(join(&life, &spec, "a").await.unwrap_err().code, "unknown_share");
    assert_eq!(life.service.shares().len(), 1);
    life.crash().await;
}

/// Whoever asked first goes when all is lent, before it hears so; the next is told that it has it.
#[tokio::test]
async fn a_composition_that_somebody_was_told_of_stays_borrowed() {
    let (store, full) = (MemoryStore::default(), Arc::new(AtomicBool::new(false)));
    let life = Life::start(&store, &full);
    let (service, request) = (&life.service, CompositionRequest::default());
    let spec = CompositionSpec {
        name: "both".to_owned(),
        borrower: "beta".to_owned(),
        functions: vec!["alpha/nvme0".to_owned(), "alpha/nvme1".to_owned()],
        isolation: Isolation::Shared,
    };
    let state = || service.composition("both").unwrap().state;
    let rounds = async {
        service.save_composition(&spec).await.unwrap();
        while service.borrow_composition("both", &request).await.is_err() {
            tokio::task::yield_now().await;
        }
        for round in 0..20 {
            service.return_composition("both").await.unwrap();
            let mut first = Box::pin(service.borrow_composition("both", &request));
            let asked = poll_fn(|context| Poll::Ready(first.as_mut().poll(context))).await;
            assert!(asked.is_pending(), "round {round}: {asked:?}");
            while state() != CompositionState::Borrowed {
                tokio::task::yield_now().await;
            }
            drop(first);
            if service.borrow_composition("both", &request).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(5)).await;
                assert_eq!(state(), CompositionState::Borrowed, "round {round}");
                continue;
            }
            // It was heard before that the first had gone.
            while state() != CompositionState::Free {
                tokio::task::yield_now().await;
            }
            while service.borrow_composition("both", &request).await.is_err() {
                tokio::task::yield_now().await;
            }
        }
    };
    tokio::time::timeout(PATIENCE, rounds).await.expect("it ends");
    life.crash().await;
}
