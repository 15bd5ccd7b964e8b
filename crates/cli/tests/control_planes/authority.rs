//! The rack's certificate authority is replaced while leaders are killed between the steps.

use std::time::{Duration, Instant};

use rackbus_control::authorities::{AuthorityPart, AuthorityStatus};

use super::processes::{Cluster, etcd};
use super::support::{PATIENCE, open};
use super::{RACK, logs};

/// Waits until whoever leads says so of the authorities.
async fn until(cluster: &Cluster, what: &str, is: impl Fn(&AuthorityStatus) -> bool) {
    let begun = Instant::now();
    loop {
        let leader = cluster.leader(None).await;
        let asked = cluster.controls[leader].client();
        let asked = tokio::time::timeout(PATIENCE, asked.authority_status()).await.unwrap();
        if asked.as_ref().is_ok_and(&is) {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "{what}: {asked:?} {}", logs(cluster));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Kills the leader, waits for another one, and starts it again.
async fn another_leads(cluster: &mut Cluster) {
    let old = cluster.leader(None).await;
    cluster.controls[old].kill();
    cluster.leader(Some(old)).await;
    cluster.controls[old].again();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_authority_is_replaced_whoever_leads() {
    let Some(program) = etcd() else { return };
    let mut cluster = Cluster::start(&program, 1, 3, &RACK.replace("[hosts.gamma]\n", ""));
    cluster.leader(None).await;
    for host in ["alpha", "beta"] {
        cluster.node(host).await;
    }
    cluster.up().await;
    let beta = cluster.nodes[1].client();
    let lease = beta.borrow("alpha/nvme0", "beta").await.unwrap();
    let mut drive = open(&lease);
    drive.write(0, &[7; 4096], false).unwrap();

    let leader = cluster.leader(None).await;
    cluster.controls[leader].client().rotate_authority(false).await.unwrap();
    another_leads(&mut cluster).await;
    until(&cluster, "the new authority signs", |it| {
        it.authorities[0].number == 1 && it.authorities.len() == 2
    })
    .await;
    another_leads(&mut cluster).await;
    until(&cluster, "everybody has one of it", |it| {
        let new = Some(&it.authorities[0].fingerprint);
        let planes = it.control_planes.iter().filter(|it| it.authority.as_ref() == new);
        it.behind.is_empty() && planes.count() == 3
    })
    .await;
    let leader = cluster.leader(None).await;
    cluster.controls[leader].client().retire_authority(false).await.unwrap();
    another_leads(&mut cluster).await;
    until(&cluster, "the old one is retired", |it| {
        it.authorities.len() == 1
            && it.authorities[0].part == AuthorityPart::Signs
            && it.control_planes.iter().filter(|it| it.authority.is_some()).count() == 3
    })
    .await;

    // The nodes are of the new one alone, and reach each other and all of the control plane.
    cluster.up().await;
    drive.write(0, &[8; 4096], false).unwrap();
    let another = beta.borrow("alpha/nvme1", "beta").await.unwrap();
    open(&another).read(0, &mut [0; 4096]).unwrap();
    for lease in [lease.lease, another.lease] {
        beta.give_back(lease).await.unwrap();
    }
}
