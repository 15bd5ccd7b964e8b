//! Verify of more than is moved at once: a part at a time, in the background.

use std::sync::{Arc, Mutex};

use rackbus_pci::Work;

use super::super::backing::{MediaError, MediumRequest};
use super::background::{BackgroundControl, slow_drive_of};
use super::*;

const MIB: u64 = 1 << 20;

/// A drive of 4 MiB whose medium waits to be told, which verifies its last 3.5 MiB.
fn verifying() -> (TestHost, Arc<Mutex<BackgroundControl>>, u16) {
    let (nvme, control) = slow_drive_of(4 << 20);
    let mut host = TestHost::around(nvme);
    host.enable();
    host.create_pair(1, ENTRIES);
    let cid = host.submit(1, Sqe { cdw12: 7167, ..transfer(IoOpcode::Verify, 1024, 512, 0) });
    host.poll();
    (host, control, cid)
}

/// The one range that the medium is asked for.
fn asked(control: &Mutex<BackgroundControl>) -> (u64, u64) {
    let control = control.lock().unwrap();
    assert_eq!(control.held.len(), 1);
    match &control.held[0].1 {
        MediumRequest::Read { offset, into } => {
            (*offset, into.iter().map(|slice| slice.get().len() as u64).sum())
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn its_parts_are_read_one_after_the_other() {
    let (mut host, control, cid) = verifying();
    for at in [MIB / 2, 3 * MIB / 2, 5 * MIB / 2, 7 * MIB / 2] {
        assert_eq!(asked(&control), (at, MIB.min(4 * MIB - at)));
        assert_eq!(host.completion(1), None);
        control.lock().unwrap().finish_one();
        host.poll();
    }
    assert_eq!(host.wait(1, cid).status(), Status::SUCCESS);
}

#[test]
fn one_bad_block_beyond_the_first_part_is_enough() {
    let (mut host, control, cid) = verifying();
    control.lock().unwrap().finish_one();
    host.poll();
    control.lock().unwrap().fail_with = Some(MediaError::Read);
    control.lock().unwrap().finish_one();
    assert_eq!(host.wait(1, cid).status().code(), Status::UNRECOVERED_READ);
    assert!(control.lock().unwrap().held.is_empty(), "the rest is read for nobody");
}

/// Whoever takes memory away, as a return of the drive does, waits for one part.
#[test]
fn memory_is_unmapped_between_two_parts() {
    let (mut host, control, cid) = verifying();
    host.endpoint.unmap(RAM, RAM_SIZE).unwrap();
    assert!(control.lock().unwrap().held.is_empty(), "it goes on with the next part");
    assert!(!host.endpoint.park(), "nobody would wake the drive for the next part");
    host.map_ram();
    host.poll();
    for _ in 0..3 {
        let (at, _) = asked(&control);
        assert!(at > MIB, "the first part is read again");
        control.lock().unwrap().finish_one();
        host.poll();
    }
    assert_eq!(host.wait(1, cid).status(), Status::SUCCESS);
}

#[test]
fn a_reset_drops_the_part_that_waits() {
    let (mut host, control, _) = verifying();
    host.endpoint.unmap(RAM, RAM_SIZE).unwrap();
    host.write4(reg::CC, 0);
    host.map_ram();
    host.enable();
    host.create_pair(1, ENTRIES);
    let cid = host.submit(1, transfer(IoOpcode::Verify, 0, 512, 0));
    host.poll();
    assert_eq!(asked(&control), (0, 512));
    control.lock().unwrap().finish_one();
    assert_eq!(host.wait(1, cid).status(), Status::SUCCESS);
}

/// However many there are: what else the drive has to do waits for a few parts.
#[test]
fn a_poll_starts_a_few_parts() {
    let (mut host, control, _) = verifying();
    for _ in 0..9 {
        host.submit(1, Sqe { cdw12: 8191, ..transfer(IoOpcode::Verify, 0, 512, 0) });
    }
    while host.poll() == Work::Done {}
    let held = |control: &Mutex<BackgroundControl>| control.lock().unwrap().held.len();
    assert_eq!(held(&control), 10);
    (0..10).for_each(|_| control.lock().unwrap().finish_one());
    for started in [4, 8, 10] {
        assert_eq!(host.poll(), Work::Done);
        assert_eq!(held(&control), started);
    }
    let mut answered = 0;
    while answered < 10 {
        control.lock().unwrap().finish_one();
        host.poll();
        while let Some(answer) = host.completion(1) {
            assert_eq!(answer.status(), Status::SUCCESS);
            answered += 1;
        }
    }
}
