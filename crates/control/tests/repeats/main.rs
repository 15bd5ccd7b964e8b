//! Requests that are repeated with their keys while the control plane dies and its store fails, at
//! random: whoever asks gets one lease for each key, and always the same answer.

mod life;
mod revocations;
mod together;

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use life::{Answers, DEVICES, Life};
use rackbus_control::access::ApiPeer;
use rackbus_control::api::{ApiError, BorrowRequest, Isolation, LeaseStage};
use rackbus_control::compositions::{CompositionRequest, CompositionSpec, CompositionState};
use rackbus_control::levels::LevelRequest;
use rackbus_control::offers::{OfferRequest, RackSection, SectionState};
use rackbus_control::shares::ShareSpec;
use rackbus_control::store::MemoryStore;
use rackbus_control::together::BorrowAllRequest;
use rackbus_lease::Placement;
use rackbus_seeds::Random;

/// After this long a test fails instead of waiting on.
const PATIENCE: Duration = Duration::from_secs(60);

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
    life.service.leave_share(first, &ApiPeer::Local(None), None).await.unwrap();
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
        service.save_composition(&spec, None).await.unwrap();
        while service.borrow_composition("both", &request, None).await.is_err() {
            tokio::task::yield_now().await;
        }
        for round in 0..20 {
            service
                .return_composition("both", None, &ApiPeer::Control(String::new()))
                .await
                .unwrap();
            let mut first = Box::pin(service.borrow_composition("both", &request, None));
            let asked = poll_fn(|context| Poll::Ready(first.as_mut().poll(context))).await;
            assert!(asked.is_pending(), "round {round}: {asked:?}");
            while state() != CompositionState::Borrowed {
                tokio::task::yield_now().await;
            }
            drop(first);
            if service.borrow_composition("both", &request, None).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(5)).await;
                assert_eq!(state(), CompositionState::Borrowed, "round {round}");
                continue;
            }
            // It was heard before that the first had gone.
            while state() != CompositionState::Free {
                tokio::task::yield_now().await;
            }
            while service.borrow_composition("both", &request, None).await.is_err() {
                tokio::task::yield_now().await;
            }
        }
    };
    tokio::time::timeout(PATIENCE, rounds).await.expect("it ends");
    life.crash().await;
}

/// Asks again while the nodes are on their way, or what was lent is on its way back.
async fn settled<T>(mut ask: impl AsyncFnMut() -> Result<T, ApiError>) -> T {
    let asking = async {
        loop {
            match ask().await {
                Ok(answer) => return answer,
                Err(refused) => {
                    let early = [
                        "silent",
                        "unknown_host",
                        "unknown_function",
                        "returning",
                        "level_refused",
                    ];
                    assert!(early.contains(&refused.code.as_str()), "{refused:?}");
                    tokio::task::yield_now().await;
                }
            }
        }
    };
    tokio::time::timeout(PATIENCE, asking).await.expect("it ends")
}

fn composition(name: &str) -> CompositionSpec {
    CompositionSpec {
        name: name.to_owned(),
        borrower: "beta".to_owned(),
        functions: vec!["alpha/nvme0".to_owned(), "alpha/nvme1".to_owned()],
        isolation: Isolation::Shared,
    }
}

fn key(text: &str) -> Option<String> {
    Some(text.to_owned())
}

/// The connection breaks before the answer, and the request comes again with its key.
#[tokio::test(flavor = "multi_thread")]
async fn a_composition_that_is_borrowed_again_under_its_key_is_borrowed_once() {
    let (store, full) = (MemoryStore::default(), Arc::new(AtomicBool::new(false)));
    let mut life = Life::start(&store, &full);
    let request = CompositionRequest::default();
    settled(async || life.service.save_composition(&composition("both"), None).await).await;
    let borrow = async |life: &Life, name: &str| {
        life.service.borrow_composition("both", &request, key(name)).await
    };
    settled(async || borrow(&life, "first").await).await;
    life.service.return_composition("both", None, &ApiPeer::Control(String::new())).await.unwrap();
    for round in 0..20 {
        let name = format!("round {round}");
        let before = life.service.leases(true).len();
        {
            let mut first = Box::pin(borrow(&life, &name));
            let asked = poll_fn(|context| Poll::Ready(first.as_mut().poll(context))).await;
            // On a busy machine all of it may be done meanwhile; the answer is lost in any case.
            assert!(!matches!(asked, Poll::Ready(Err(_))), "round {round}: {asked:?}");
        }
        if round % 2 == 0 {
            life.crash().await;
            life = Life::start(&store, &full);
        }
        let borrowed = settled(async || borrow(&life, &name).await).await;
        assert_eq!(borrowed.state, CompositionState::Borrowed, "round {round}");
        assert_eq!(settled(async || borrow(&life, &name).await).await, borrowed);
        let leases = life.service.leases(true).len();
        assert_eq!(leases, before + 2, "round {round}: it was borrowed more than once");
        life.service
            .return_composition("both", None, &ApiPeer::Control(String::new()))
            .await
            .unwrap();
    }
    life.crash().await;
}

/// Of one function as of several: an answer of before does not say that it is borrowed now.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_returned_is_not_borrowed_by_the_key_of_before() {
    let (store, full) = (MemoryStore::default(), Arc::new(AtomicBool::new(false)));
    let life = Life::start(&store, &full);
    let request = CompositionRequest::default();
    let one = CompositionSpec { functions: vec!["alpha/nvme0".to_owned()], ..composition("one") };
    settled(async || life.service.save_composition(&one, None).await).await;
    settled(async || life.service.save_composition(&composition("both"), None).await).await;
    for name in ["one", "both"] {
        let borrow = async || life.service.borrow_composition(name, &request, key(name)).await;
        settled(borrow).await;
        life.service
            .return_composition(name, None, &ApiPeer::Control(String::new()))
            .await
            .unwrap();
        let refused = borrow().await.unwrap_err();
        assert_eq!(refused.code, "failed", "{name}: {refused:?}");
        assert_eq!(life.service.composition(name).unwrap().state, CompositionState::Free);
    }
    let one = BorrowAllRequest {
        functions: one.functions,
        borrower: "beta".to_owned(),
        placement: Placement::Lender,
        group: None,
        vm: None,
        wait_ms: None,
        priority: 0,
    };
    let borrow = async || life.service.borrow_together(&one, key("together")).await;
    let leases = settled(borrow).await;
    assert_eq!(borrow().await.unwrap(), leases, "its answer while it lasts");
    life.service.give_back(leases[0].lease, None, None).await.unwrap();
    assert_eq!(borrow().await.unwrap_err().code, "failed");
    life.crash().await;
}

/// The caller has both since the first answer: to ask again takes neither away.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_stays_when_its_request_is_repeated_after_another_one_of_it_has_ended() {
    let (store, full) = (MemoryStore::default(), Arc::new(AtomicBool::new(false)));
    let mut life = Life::start(&store, &full);
    let request = CompositionRequest::default();
    settled(async || life.service.save_composition(&composition("both"), None).await).await;
    settled(async || life.service.borrow_composition("both", &request, key("both")).await).await;
    let leases: Vec<u64> = life.service.leases(false).iter().map(|lease| lease.lease).collect();
    life.service.give_back(leases[1], None, None).await.unwrap();
    for round in ["as it is", "after a restart"] {
        let repeated = life.service.borrow_composition("both", &request, key("both")).await;
        let refused = repeated.unwrap_err();
        assert_eq!(refused.code, "failed", "{round}: {refused:?}");
        // What the writer does next, it does after what the refusal led to.
        let other = CompositionSpec { name: round.replace(' ', "-"), ..composition("") };
        settled(async || life.service.save_composition(&other, None).await).await;
        let left = life.service.leases(false);
        assert_eq!(
            left.iter().map(|lease| lease.lease).collect::<Vec<_>>(),
            [leases[0]],
            "{round}"
        );
        assert_eq!(left[0].stage, LeaseStage::Active, "{round}");
        if round == "as it is" {
            life.crash().await;
            life = Life::start(&store, &full);
        }
    }
    life.crash().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_borrowed_or_saved_since_is_not_undone_by_a_repeated_request() {
    let (store, full) = (MemoryStore::default(), Arc::new(AtomicBool::new(false)));
    let life = Life::start(&store, &full);
    let (service, request, spec) =
        (&life.service, CompositionRequest::default(), composition("both"));
    let state = || service.composition("both").unwrap().state;
    settled(async || service.save_composition(&spec, key("save")).await).await;
    settled(async || service.borrow_composition("both", &request, None).await).await;
    let returned = service
        .return_composition("both", key("return"), &ApiPeer::Control(String::new()))
        .await
        .unwrap();
    assert_eq!((returned.state, returned.leases), (CompositionState::Free, vec![]));
    settled(async || service.borrow_composition("both", &request, None).await).await;
    let repeated = service
        .return_composition("both", key("return"), &ApiPeer::Control(String::new()))
        .await
        .unwrap();
    assert_eq!((repeated.state, state()), (CompositionState::Borrowed, CompositionState::Borrowed));
    let reused = service.save_composition(&composition("other"), key("return")).await;
    assert_eq!(reused.unwrap_err().code, "key_reused");
    service
        .return_composition("both", key("return 2"), &ApiPeer::Control(String::new()))
        .await
        .unwrap();
    assert_eq!(state(), CompositionState::Free);

    service.remove_composition("both", key("remove")).await.unwrap();
    let repeated = service.save_composition(&spec, key("save")).await.unwrap_err();
    assert_eq!(repeated.code, "unknown_composition", "it is saved again");
    let removed = service.remove_composition("both", key("remove")).await.unwrap();
    assert_eq!((removed.name.as_str(), removed.functions.len()), ("both", 0));
    let unknown = service.remove_composition("both", key("remove 2")).await.unwrap_err();
    assert_eq!(unknown.code, "unknown_composition");
    service.save_composition(&spec, key("save 2")).await.unwrap();
    service.remove_composition("both", key("remove")).await.unwrap();
    assert_eq!(state(), CompositionState::Free, "it is removed again");
    life.crash().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_came_since_is_not_given_back_by_a_repeated_request() {
    let (store, full) = (MemoryStore::default(), Arc::new(AtomicBool::new(false)));
    let mut life = Life::start(&store, &full);
    let spec = ShareSpec::new("alpha/nvme0", "beta");
    let share = settled(async || life.service.join_share(&spec, None).await).await.share;
    let turn = async |life: &Life, after: Option<u64>| {
        let turns = async {
            loop {
                let share = life.service.find_share(share).unwrap();
                match share.lease.filter(|lease| Some(*lease) != after) {
                    Some(lease) if share.socket.is_some() => return lease,
                    _ => tokio::task::yield_now().await,
                }
            }
        };
        tokio::time::timeout(PATIENCE, turns).await.expect("it has a turn")
    };
    let first = turn(&life, None).await;
    life.service.give_turn_back(share, key("yield")).await.unwrap();
    let second = turn(&life, Some(first)).await;
    let repeated = life.service.give_turn_back(share, key("yield")).await.unwrap();
    assert_eq!((repeated.lease, turn(&life, None).await), (Some(second), second));
    life.service.give_turn_back(share, key("yield 2")).await.unwrap();
    let third = turn(&life, Some(second)).await;
    // The next life knows the keys, too.
    life.crash().await;
    life = Life::start(&store, &full);
    for name in ["yield", "yield 2"] {
        let repeated = life.service.give_turn_back(share, key(name)).await.unwrap();
        assert_eq!((repeated.lease, turn(&life, None).await), (Some(third), third));
    }
    life.crash().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_share_that_was_left_is_left_also_when_that_is_asked_for_again() {
    let (store, full) = (MemoryStore::default(), Arc::new(AtomicBool::new(false)));
    let mut life = Life::start(&store, &full);
    let spec = ShareSpec::new("alpha/nvme0", "beta");
    let share = settled(async || life.service.join_share(&spec, None).await).await.share;
    let leave = async |life: &Life, name: &str| {
        life.service.leave_share(share, &ApiPeer::Local(None), key(name)).await
    };
    assert_eq!(leave(&life, "leave").await.unwrap().function, "alpha/nvme0");
    for _ in 0..2 {
        let repeated = leave(&life, "leave").await.unwrap();
        assert_eq!((repeated.share, repeated.function.as_str()), (share, ""));
        assert_eq!(leave(&life, "another").await.unwrap_err().code, "unknown_share");
        // The next life knows the keys, too.
        life.crash().await;
        life = Life::start(&store, &full);
    }
    let gamma = ApiPeer::Node("gamma".to_owned(), None);
    let other = settled(async || life.service.join_share(&spec, None).await).await.share;
    let refused = life.service.leave_share(other, &gamma, key("gamma")).await.unwrap_err();
    assert_eq!((refused.code.as_str(), life.service.shares().len()), ("forbidden", 1));
    life.crash().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_level_that_was_asked_for_since_is_not_changed_by_a_repeated_request() {
    let (store, full) = (MemoryStore::default(), Arc::new(AtomicBool::new(false)));
    let life = Life::start(&store, &full);
    let request = BorrowRequest::new("alpha/nvme0", "beta");
    let lease = settled(async || life.service.borrow(&request, None).await).await.lease;
    let level = async |text: &str, name: &str| {
        let request = LevelRequest { level: Some(text.to_owned()) };
        let changed = async || life.service.change_level(lease, &request, key(name)).await;
        settled(changed).await.level.unwrap()
    };
    assert_eq!(level("low", "a").await, "low");
    assert_eq!(level("high", "b").await, "high");
    assert_eq!(level("low", "a").await, "high");
    assert_eq!(level("low", "c").await, "low");
    life.crash().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_stays_offered_or_withdrawn_when_an_earlier_request_is_repeated() {
    let (store, full) = (MemoryStore::default(), Arc::new(AtomicBool::new(false)));
    let life = Life::start(&store, &full);
    let request = OfferRequest {
        device: "alpha/nvme7".to_owned(),
        section: Some("kind = \"nvme\"".to_owned()),
        by_node: false,
    };
    let service = &life.service;
    let offer = async |name: &str| service.offer(&request, &ApiPeer::Local(None), key(name)).await;
    let withdraw = async |name: &str| service.withdraw("alpha", "nvme7", true, key(name)).await;
    let states = || service.sections().iter().map(|it: &RackSection| it.state).collect::<Vec<_>>();
    settled(async || offer("offer").await).await;
    assert_eq!(states(), [SectionState::Offered]);
    withdraw("withdraw").await.unwrap();
    let repeated = offer("offer").await.unwrap_err();
    assert_eq!(repeated.error, "alpha/nvme7 cannot be offered: it was withdrawn");
    assert_eq!(states(), []);
    assert_eq!(withdraw("withdraw").await.unwrap().state, SectionState::Withdrawn);
    assert_eq!(withdraw("another").await.unwrap_err().code, "unknown_function");
    settled(async || offer("offer 2").await).await;
    let borrowed = BorrowRequest::new("alpha/nvme7", "beta");
    settled(async || service.borrow(&borrowed, None).await).await;
    withdraw("withdraw").await.unwrap();
    assert_eq!((states(), service.leases(false).len()), (vec![SectionState::Offered], 1));
    withdraw("withdraw 2").await.unwrap();
    assert_eq!((states(), service.leases(false).len()), (vec![], 0));
    life.crash().await;
}
