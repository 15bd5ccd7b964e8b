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

/// Those that do not lead show a certificate of the new authority to the one that does, long before it signs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_authority_that_does_not_sign_keeps_no_control_plane_from_passing_on() {
    let Some(program) = etcd() else { return };
    let mut cluster = Cluster::start(&program, 1, 2, &RACK.replace("[hosts.gamma]\n", ""));
    cluster.leader(None).await;
    for host in ["alpha", "beta"] {
        cluster.node(host).await;
    }
    cluster.up().await;
    // One that is gone holds the next step up.
    cluster.nodes[1].kill();
    let leader = cluster.leader(None).await;
    cluster.controls[leader].client().rotate_authority(false).await.unwrap();
    let begun = Instant::now();
    // Longer than all have to hear of it.
    while begun.elapsed() < Duration::from_secs(6) {
        for control in &cluster.controls {
            let asked = control.client().authority_status().await;
            let status = asked.unwrap_or_else(|error| panic!("{error} {}", logs(&cluster)));
            assert_eq!((status.authorities[0].number, status.authorities.len()), (0, 2));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
