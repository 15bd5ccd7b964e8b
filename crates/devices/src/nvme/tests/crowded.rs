//! As many commands as may be wait for a medium that stands still: the admin queue is served all the same, since a driver
//! that hears nothing from it resets the controller.

use std::sync::{Arc, Mutex};

use rackbus_pci::Work;
use rackbus_spec::nvme::features as fid;
use rackbus_spec::nvme::identify::CNS_CONTROLLER;

use super::super::jobs::{COMPARISON_WEIGHT, WEIGHT_LIMIT};
use super::background::BackgroundControl;
use super::succession::{finish, slow, succeed};
use super::*;

/// The weight of a comparison is taken as a whole, so that what runs may weigh more than the limit by all but one of it.
const MOST_BEFORE: usize = WEIGHT_LIMIT - 1;

/// A drive with as much under way as may be, and more in its queues; returns how much is under way.
fn crowded() -> (TestHost, Arc<Mutex<BackgroundControl>>, usize) {
    let (mut host, control) = slow();
    host.create_pair(2, 2 * ENTRIES);
    let buffer = host.scratch();
    let compares = MOST_BEFORE / COMPARISON_WEIGHT;
    for _ in 0..compares {
        host.submit(2, transfer(IoOpcode::Compare, 0, 512, buffer));
    }
    while host.poll() == Work::Done {}
    let flushes = MOST_BEFORE % COMPARISON_WEIGHT;
    for _ in 0..flushes {
        host.submit(1, transfer(IoOpcode::Flush, 0, 512, 0));
    }
    while host.poll() == Work::Done {}
    for _ in 0..3 {
        host.submit(2, transfer(IoOpcode::Compare, 0, 512, buffer));
    }
    while host.poll() == Work::Done {}
    let held = control.lock().unwrap().held.len();
    assert_eq!(held, compares + flushes + 1);
    (host, control, held)
}

fn identify(host: &TestHost) -> Sqe {
    admin_data(AdminOpcode::Identify, 0, CNS_CONTROLLER.into(), host.scratch())
}

#[test]
fn admin_commands_are_answered() {
    let (mut host, control, held) = crowded();
    let asked = host.submit(0, admin(AdminOpcode::AsyncEventRequest));
    for sqe in [
        identify(&host),
        Sqe { cdw10: 2 | u32::from(asked) << 16, ..admin(AdminOpcode::Abort) },
        Sqe { cdw10: fid::VOLATILE_WRITE_CACHE.into(), ..admin(AdminOpcode::GetFeatures) },
    ] {
        let cid = host.submit(0, sqe);
        host.poll();
        let answer = host.completion(0).expect("it waits for what other queues wait for");
        assert_eq!((answer.cid, answer.status()), (cid, Status::SUCCESS));
    }
    assert_eq!(control.lock().unwrap().held.len(), held);
}

/// The only admin commands that wait for the medium: turning the write cache off.
#[test]
fn admin_commands_that_wait_for_the_medium_are_few_and_go_on_elsewhere() {
    let (mut host, control, held) = crowded();
    let off = Sqe { cdw10: fid::VOLATILE_WRITE_CACHE.into(), ..admin(AdminOpcode::SetFeatures) };
    let one = host.submit(0, off);
    host.poll();
    assert_eq!((host.completion(0), control.lock().unwrap().held.len()), (None, held + 1));
    assert_eq!(host.run(0, identify(&host)).status(), Status::SUCCESS);
    let others: Vec<u16> = (0..10).map(|_| host.submit(0, off)).collect();
    while host.poll() == Work::Done {}
    let most = control.lock().unwrap().held.len();
    assert!(most > held + 1 && most < held + 11, "{most}, {held} of them of other queues");
    let control = succeed(&mut host, &control);
    assert_eq!(control.lock().unwrap().held.len(), most);
    finish(&mut host, &control);
    for cid in [one].into_iter().chain(others) {
        assert_eq!(host.wait(0, cid).status(), Status::SUCCESS);
    }
    assert!(control.lock().unwrap().held.is_empty());
}
