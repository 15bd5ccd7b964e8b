//! The state of a rack goes from SQLite to etcd and back, is backed up and restored, while a drive is in use.

use std::time::Instant;

use rackbus_control::api::Lease;
use rackbus_driver::Drive;

use super::RACK;
use super::processes::{Cluster, Part, etcd};
use super::support::machines::free_port;
use super::support::{PATIENCE, open};

/// The drive has what was written to it, and takes more.
fn used(drive: &mut Drive, round: u8) {
    let mut block = vec![round; 4096];
    drive.write(8, &block, false).unwrap();
    block.fill(0);
    drive.read(8, &mut block).unwrap();
    assert!(block.iter().all(|byte| *byte == round), "round {round}");
}

/// Borrows and returns; the lease.
async fn borrowed_again(node: &Part) -> Lease {
    let client = node.client();
    let lease = client.borrow("alpha/nvme1", "beta").await.unwrap();
    client.give_back(lease.lease).await.unwrap();
    lease
}

/// Waits until the control plane answers, and has both nodes back.
async fn answers(control: &Part) {
    let begun = Instant::now();
    loop {
        let status = control.client().status().await;
        let up = rackbus_control::api::HostState::Up;
        if status.is_ok_and(|it| it.hosts.iter().filter(|host| host.state == up).count() == 2) {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "{}", control.log());
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_state_moves_and_is_restored_under_a_drive_in_use() {
    let Some(program) = etcd() else { return };
    let mut cluster = Cluster::start(&program, 1, 0, RACK);
    let root = cluster.root.path().to_owned();
    let file = root.join("rack.toml");
    let listen = format!("127.0.0.1:{}", free_port());
    let one = ["control", file.to_str().unwrap(), "--listen", &listen];
    let store = cluster.store.clone();
    let several = [&one[..], &["--store", "etcd", "--etcd", &store]].concat();
    cluster.join_at(&format!("https://{listen}"));
    cluster.controls.push(Part::rackbus(&root, "c0", &one));
    for host in ["alpha", "beta"] {
        cluster.node(host).await;
    }
    let Cluster { controls, nodes, .. } = &mut cluster;
    let (control, beta) = (&mut controls[0], &nodes[1]);
    answers(control).await;
    let held = beta.client().borrow("alpha/nvme0", "beta").await.unwrap();
    let mut drive = open(&held);
    used(&mut drive, 1);
    let first = borrowed_again(beta).await;

    let sqlite = format!("sqlite:{}", control.state().join("control.db").display());
    let etcd = format!("etcd:{store}");
    let migrate = ["control", "migrate", "--from", &sqlite, "--to", &etcd];
    let refused = control.run(&migrate).unwrap_err();
    assert!(refused.contains("in use by process"), "{refused}");
    control.end();
    control.run(&migrate).unwrap();
    let refused = control.run(&one).unwrap_err();
    assert!(refused.contains("has moved to etcd:"), "{refused}");
    let refused = control.run(&migrate).unwrap_err();
    assert!(refused.contains("has a state already"), "it was done: {refused}");

    *control = Part::rackbus(&root, "c0", &several);
    answers(control).await;
    let status = control.client().control().await.unwrap();
    assert!(status.leads && status.store == "etcd" && status.term > Some(1), "{status:?}");
    let shown = control.run(&["control", "status"]).unwrap();
    assert!(shown.contains("leader") && shown.contains("healthy"), "{shown}");
    let kept = beta.client().lease(held.lease).await.unwrap();
    assert_eq!((kept.epoch, kept.reason), (held.epoch, None));
    used(&mut drive, 2);
    let second = borrowed_again(beta).await;
    assert!(second.lease > first.lease && second.epoch > first.epoch);

    let backup = root.join("backup");
    let backup = backup.to_str().unwrap();
    control.run(&["--rack", "lab", "control", "backup", backup, "--from", &etcd]).unwrap();
    let third = borrowed_again(beta).await;
    let restore = ["control", "restore", backup, "--to", &etcd];
    let refused = control.run(&restore).unwrap_err();
    assert!(refused.contains("leads; stop all control planes"), "{refused}");
    control.end();
    control.run(&restore).unwrap();
    control.again();
    answers(control).await;
    used(&mut drive, 3);
    let fourth = borrowed_again(beta).await;
    assert!(fourth.lease > third.lease && fourth.epoch > third.epoch, "{third:?} {fourth:?}");

    control.end();
    let back = ["--rack", "lab", "control", "migrate", "--from", &etcd, "--to", &sqlite];
    control.run(&back).unwrap();
    let refused = control.run(&several).unwrap_err();
    assert!(refused.contains("has moved to sqlite:"), "{refused}");
    *control = Part::rackbus(&root, "c0", &one);
    answers(control).await;
    used(&mut drive, 4);
    let fifth = borrowed_again(beta).await;
    assert!(fifth.lease > fourth.lease && fifth.epoch > fourth.epoch);
    drop(drive);
    beta.client().give_back(held.lease).await.unwrap();
}
