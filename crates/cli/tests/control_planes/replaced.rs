//! A leader is killed: how soon another one has decided something.

use std::time::{Duration, Instant};

use rackbus_control::api::Lease;
use rackbus_control::{ControlClient, ControlClientError};

use super::processes::{Cluster, etcd};
use super::support::PATIENCE;
use super::{RACK, logs};

/// What the book promises.
const REPLACED: Duration = Duration::from_secs(5);
/// How many leaders die. The middle one of their times counts: what else a machine does makes a single one slow.
const DEATHS: usize = 3;

/// Borrows a function as soon as somebody decides about it and its host's node is known there.
async fn borrowed(client: &ControlClient) -> Lease {
    let begun = Instant::now();
    loop {
        match client.borrow("alpha/nvme0", "beta").await {
            Ok(lease) => return lease,
            Err(ControlClientError::Refused(refused)) if refused.code == "silent" => {}
            Err(error) => panic!("{error}"),
        }
        assert!(begun.elapsed() < PATIENCE, "nobody decides");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_one_decides_within_five_seconds_of_the_leaders_death() {
    let Some(program) = etcd() else { return };
    let mut cluster = Cluster::start(&program, 3, 3, RACK);
    cluster.leader(None).await;
    for host in ["alpha", "beta", "gamma"] {
        cluster.node(host).await;
    }
    cluster.up().await;
    let beta = cluster.nodes[1].client();
    let mut times = Vec::new();
    for _ in 0..DEATHS {
        let leader = cluster.leader(None).await;
        let begun = Instant::now();
        cluster.controls[leader].kill();
        let led = async {
            cluster.leader(Some(leader)).await;
            begun.elapsed()
        };
        let decided = async { (borrowed(&beta).await, begun.elapsed()) };
        let (led, (lease, took)) = tokio::join!(led, decided);
        let dead = &cluster.controls[leader].name;
        println!("from the death of {dead} {led:?} to another leader, {took:?} to a decision");
        times.push(took);
        beta.give_back(lease.lease).await.unwrap();
        cluster.controls[leader].again();
    }
    times.sort();
    assert!(times[DEATHS / 2] <= REPLACED, "it took {times:?}: {}", logs(&cluster));
}
