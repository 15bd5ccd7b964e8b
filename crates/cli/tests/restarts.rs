//! The control plane killed at every stage of a lease's life: what was decided stays decided, and
//! what was begun is finished by its successor.

mod support;

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rackbus_control::api::{Change, DeviceState, Lease, LeaseStage};
use support::{PATIENCE, Process, Rack, THREE_HOSTS, open, pattern, with_leases_of};

const HOSTS: [&str; 3] = ["alpha", "beta", "gamma"];

/// Runs a command, and kills the control plane when it announces that a lease came to `stage`.
/// The command does not notice: it asks the next control plane, which knows of its request.
fn kill_at(rack: &mut Rack, stage: LeaseStage, args: &[&str]) {
    let control = rack.process(None);
    let client = rack.client();
    let mut command: Option<Child> = None;
    rack.block(async {
        let mut changes = client.changes().await.unwrap();
        let mut begin = rack.command(args);
        command = Some(begin.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
        loop {
            match changes.next().await.expect("the control plane ended by itself") {
                Change::Lease(lease) if lease.stage == stage => return,
                _ => {}
            }
        }
    });
    control.crash();
    rack.restart(None);
    let output = command.unwrap().wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "killed at {stage:?}, the command failed: {said}");
    rack.wait_up(&HOSTS);
}

/// Waits until the only live lease is active.
fn active(rack: &Rack) -> Lease {
    rack.wait(async |client| {
        let leases = client.leases(false).await.ok()?;
        match leases.as_slice() {
            [lease] => (lease.stage == LeaseStage::Active).then(|| lease.clone()),
            other => panic!("one lease was decided, not {other:?}"),
        }
    })
}

#[test]
fn a_borrow_that_was_decided_is_finished() {
    let mut rack = Rack::up(THREE_HOSTS);
    let mut epoch = 0;
    for stage in [LeaseStage::Arming, LeaseStage::Opening, LeaseStage::Active].repeat(3) {
        kill_at(&mut rack, stage, &["borrow", "alpha/nvme1", "--for", "beta"]);
        let lease = active(&rack);
        assert_eq!(lease.borrower, "beta");
        assert!(lease.epoch > epoch, "epochs only grow");
        epoch = lease.epoch;
        let refused = rack.bad(1, &["borrow", "alpha/nvme1", "--for", "gamma"]);
        assert!(refused.contains("lent to beta"), "{refused}");
        open(&lease).write(0, &pattern(epoch, 4096), true).unwrap();
        rack.give_back(&lease);
    }
}

#[test]
fn a_return_that_was_decided_is_finished() {
    let mut rack = Rack::up(THREE_HOSTS);
    for (round, stage) in [LeaseStage::Closing, LeaseStage::Ended].repeat(3).iter().enumerate() {
        let lease = rack.borrow("alpha/nvme1", "beta");
        let mut drive = open(&lease);
        let data = pattern(round as u64, 4096);
        drive.write(0, &data, true).unwrap();
        kill_at(&mut rack, *stage, &["return", &lease.lease.to_string()]);
        rack.wait_device("alpha/nvme1", DeviceState::Offered);
        // What the old borrower kept open is cut off for good.
        assert!(drive.read(0, &mut [0; 512]).is_err(), "round {round}");
        let ended = rack.wait_lease(lease.lease, LeaseStage::Ended);
        assert!(ended.returned, "round {round}: {ended:?}");
        let next = rack.borrow("alpha/nvme1", "gamma");
        assert!(next.epoch > lease.epoch);
        assert!(open(&next).compare(0, &data).unwrap(), "round {round}");
        rack.give_back(&next);
    }
}

/// The nodes live on and know of leases that the control plane does not.
#[test]
fn a_lost_or_restored_database_lends_nothing_that_cannot_be_used() {
    let mut rack = Rack::up(THREE_HOSTS);
    let lease = rack.borrow("alpha/nvme1", "beta");
    let mut old = open(&lease);
    old.write(0, &pattern(1, 4096), true).unwrap();
    let mut newest = lease;
    for restored in [false, true, false] {
        if restored {
            // An older copy: of before the next lease.
            rack.give_back(&newest);
            rack.process(None).crash();
            rack.save_database();
            rack.restart(None);
            rack.wait_up(&HOSTS);
            newest = rack.borrow("alpha/nvme1", "beta");
        }
        rack.process(None).crash();
        rack.lose_database();
        if restored {
            rack.restore_database();
        }
        rack.restart(None);
        rack.wait_up(&HOSTS);
        let next = rack.borrow("alpha/nvme1", "gamma");
        assert!(next.epoch > newest.epoch && next.lease > newest.lease, "{next:?}");
        // It is gamma's, and nobody else's.
        let mut drive = open(&next);
        drive.write(0, &pattern(next.epoch, 4096), true).unwrap();
        assert!(old.read(0, &mut [0; 512]).is_err(), "the old borrower still has it");
        assert!(drive.compare(0, &pattern(next.epoch, 4096)).unwrap());
        old = drive;
        newest = next;
    }
}

/// A disk that is full, as far as the control plane is concerned: its files grow no more.
fn fill_disk(control: &Process, full: bool) {
    let current = full.then_some(0);
    let limit = rustix::process::Rlimit { current, maximum: None };
    rustix::process::prlimit(Some(control.pid), rustix::process::Resource::Fsize, limit).unwrap();
}

/// What cannot be stored does not happen: nobody gets a lease, nobody loses one, and a lease whose
/// borrower died ends as soon as that can be stored.
#[test]
fn a_database_that_cannot_be_written_changes_nothing_and_then_goes_on() {
    let mut rack = Rack::up(&with_leases_of("4 s", THREE_HOSTS));
    rack.process(None).crash();
    rack.restart_on_small_disk();
    rack.wait_up(&HOSTS);
    let kept = rack.borrow("alpha/nvme1", "beta");
    let dead = rack.borrow("alpha/nvme0", "gamma");
    let control = rack.process(None);
    fill_disk(&control, true);

    let before = rack.json(&["leases", "--all"]);
    rack.process(Some("gamma")).crash();
    let refused = rack.bad(1, &["return", &kept.lease.to_string()]);
    assert!(refused.contains("could not be stored"), "{refused}");
    let failures = || rack.json(&["status"])["store_failures"].as_u64().unwrap();
    // The end of gamma's lease is tried again and again, and beta's is renewed meanwhile.
    let seen = failures();
    let begun = Instant::now();
    while failures() < seen + 3 || begun.elapsed() < Duration::from_secs(6) {
        assert!(begun.elapsed() < PATIENCE, "nothing is tried any more");
        let leases = rack.json(&["leases", "--all"]);
        assert_eq!(leases, before, "something happened that is not stored");
    }
    let mut drive = open(&kept);
    drive.write(0, &pattern(1, 4096), true).unwrap();
    assert!(!control.is_gone());

    fill_disk(&control, false);
    rack.wait_lease(dead.lease, LeaseStage::Ended);
    rack.wait_device("alpha/nvme0", DeviceState::Offered);
    assert_eq!(active(&rack).lease, kept.lease);
    assert!(drive.compare(0, &pattern(1, 4096)).unwrap(), "beta's lease went with gamma's");
    assert!(rack.give_back(&kept).returned);
}
