//! Functions that are borrowed together under a key: whole or not at all, and once.

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::Poll;

use rackbus_control::api::LeaseStage;
use rackbus_control::store::MemoryStore;
use rackbus_control::together::BorrowAllRequest;
use rackbus_lease::Placement;

use crate::life::Life;
use crate::{PATIENCE, key};

fn two_functions() -> BorrowAllRequest {
    BorrowAllRequest {
        functions: vec!["alpha/nvme1".to_owned(), "alpha/nvme0".to_owned()],
        borrower: "beta".to_owned(),
        placement: Placement::Lender,
        group: None,
        vm: None,
        wait_ms: None,
        priority: 0,
    }
}

/// Asks for two functions together until the nodes are there.
async fn together(life: &Life, key: &str) -> Vec<u64> {
    let request = two_functions();
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
        life.crash().await;
    });
    ended.await.expect("it ends");
}

/// Whole or not at all: where one has ended, the other is given back, and both are lent anew.
#[tokio::test(flavor = "multi_thread")]
async fn functions_borrowed_together_that_nobody_was_told_of_are_borrowed_whole() {
    let ended = tokio::time::timeout(PATIENCE, async {
        let (store, full) = (MemoryStore::default(), Arc::new(AtomicBool::new(false)));
        let life = Life::start(&store, &full);
        life.service.give_back(together(&life, "first").await[0], None, None).await.unwrap();
        life.service.give_back(life.service.leases(false)[0].lease, None, None).await.unwrap();
        let request = two_functions();
        let active = || {
            let leases = life.service.leases(false);
            let all = leases.iter().filter(|lease| lease.stage == LeaseStage::Active);
            all.map(|lease| lease.lease).collect::<Vec<_>>()
        };
        let mut attempt = 0;
        let (asked, name) = loop {
            attempt += 1;
            let name = format!("move {attempt}");
            let mut asked = Box::pin(life.service.borrow_together(&request, key(&name)));
            match poll_fn(|context| Poll::Ready(asked.as_mut().poll(context))).await {
                Poll::Pending => break (asked, name),
                // On a busy machine all of it may be done meanwhile.
                Poll::Ready(done) => {
                    for lease in done.unwrap() {
                        life.service.give_back(lease.lease, None, None).await.unwrap();
                    }
                }
            }
        };
        while active().len() < 2 {
            tokio::task::yield_now().await;
        }
        let lost = active();
        drop(asked);
        life.service.give_back(lost[1], None, None).await.unwrap();
        let second = together(&life, &name).await;
        assert!(second.iter().all(|lease| !lost.contains(lease)), "{lost:?} {second:?}");
        assert_eq!(active(), second);
        life.crash().await;
    });
    ended.await.expect("it ends");
}

/// One fails before the other is usable, and the caller has gone: its repeated request is refused, and nothing stays lent.
#[tokio::test(flavor = "multi_thread")]
async fn functions_borrowed_together_of_which_one_failed_are_given_back_when_that_is_asked_for_again()
 {
    let ended = tokio::time::timeout(PATIENCE, async {
        let (store, full) = (MemoryStore::default(), Arc::new(AtomicBool::new(false)));
        let life = Life::start(&store, &full);
        let request = two_functions();
        for round in 0..20 {
            let name = format!("round {round}");
            // Both are available then.
            for lease in together(&life, &format!("before {name}")).await {
                life.service.give_back(lease, None, None).await.unwrap();
            }
            let mut asked = Box::pin(life.service.borrow_together(&request, key(&name)));
            let now = poll_fn(|context| Poll::Ready(asked.as_mut().poll(context))).await;
            if let Poll::Ready(done) = now {
                // On a busy machine all of it may be done meanwhile.
                for lease in done.unwrap() {
                    life.service.give_back(lease.lease, None, None).await.unwrap();
                }
                continue;
            }
            let second = loop {
                match life.service.leases(false)[..] {
                    [_, ref second] => break second.lease,
                    _ => tokio::task::yield_now().await,
                }
            };
            drop(asked);
            life.service.give_back(second, None, None).await.unwrap();
            let again = life.service.borrow_together(&request, key(&name)).await;
            // Refused, or, where the first was given back by then, decided anew.
            for lease in again.unwrap_or_default() {
                life.service.give_back(lease.lease, None, None).await.unwrap();
            }
            while !life.service.leases(false).is_empty() {
                tokio::task::yield_now().await;
            }
        }
        life.crash().await;
    });
    ended.await.expect("it ends");
}
