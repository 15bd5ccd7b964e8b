//! A leader's process stands still, and takes what is asked, but answers nothing.

use std::time::Duration;

use rackbus_control::api::BorrowRequest;
use rustix::process::Signal;

use super::RACK;
use super::processes::{Cluster, etcd};
use super::support::PATIENCE;

/// A request that waits there for a function to become available is done by the next leader.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_at_a_leader_that_stands_still_is_done_by_the_next() {
    let Some(program) = etcd() else { return };
    let mut cluster = Cluster::start(&program, 1, 2, RACK);
    let first = cluster.leader(None).await;
    for host in ["alpha", "beta", "gamma"] {
        cluster.node(host).await;
    }
    cluster.up().await;
    let lender = cluster.nodes[0].client();
    let held = lender.borrow("alpha/nvme0", "alpha").await.unwrap();
    let wait_ms = u64::try_from(PATIENCE.as_millis()).unwrap();
    let request =
        BorrowRequest { wait_ms: Some(wait_ms), ..BorrowRequest::new("alpha/nvme0", "beta") };
    let borrower = cluster.nodes[1].client();
    let waiting = tokio::spawn(async move { borrower.borrow_as(&request).await });
    // It is under way, and nothing tells of that.
    tokio::time::sleep(Duration::from_millis(500)).await;
    cluster.controls[first].signal(Signal::STOP);
    cluster.leader(Some(first)).await;
    lender.give_back(held.lease).await.unwrap();
    let lease = tokio::time::timeout(PATIENCE, waiting).await;
    cluster.controls[first].signal(Signal::CONT);
    let lease = lease.expect("it waits for what stands still").unwrap().unwrap();
    assert_eq!((lease.function.as_str(), lease.borrower.as_str()), ("alpha/nvme0", "beta"));
}
