//! A controller at the borrower, over a medium of the lender's that fails to make data durable.

use std::sync::{Arc, Mutex};

use rackbus_spec::nvme::features as fid;

use super::super::backing::MediaError;
use super::super::medium;
use super::background::{BackgroundControl, slow_drive};
use super::*;
use crate::lost::Lost;

mod stored;

/// The lender's end, whose medium waits to be told, and a host that drives the controller elsewhere.
struct Apart {
    lender: Endpoint,
    control: Arc<Mutex<BackgroundControl>>,
    description: String,
    host: TestHost,
}

impl Apart {
    fn new() -> Apart {
        let (nvme, control) = slow_drive();
        let mut lender = Endpoint::new(Box::new(nvme));
        let offer = lender.serve_medium(None).unwrap();
        let front = medium::front(&offer.description, offer.handles, Lost::new(|| {})).unwrap();
        let (description, host) = (offer.description, TestHost::around(front));
        let mut apart = Apart { lender, control, description, host };
        apart.host.enable();
        apart.host.create_pair(1, ENTRIES);
        apart
    }

    fn fail_with(&mut self, error: Option<MediaError>) {
        self.control.lock().unwrap().fail_with = error;
    }

    /// Has one command of queue `qid` done by both ends.
    fn status(&mut self, qid: u16, sqe: Sqe) -> Status {
        let cid = self.host.submit(qid, sqe);
        for _ in 0..1000 {
            self.host.poll();
            self.lender.poll(0);
            let mut control = self.control.lock().unwrap();
            if !control.held.is_empty() {
                control.finish_one();
            }
            drop(control);
            if let Some(answer) = self.host.completion(qid) {
                assert_eq!(answer.cid, cid);
                return answer.status().code();
            }
        }
        panic!("command {cid} is never answered");
    }

    fn write(&mut self) -> Status {
        let buffer = self.host.scratch();
        self.status(1, transfer(IoOpcode::Write, 3, 512, buffer))
    }

    fn flush(&mut self) -> Status {
        self.status(1, transfer(IoOpcode::Flush, 0, 512, 0))
    }
}

#[test]
fn a_flush_that_fails_at_the_lender_fails_at_the_front_and_after_a_reset() {
    let mut apart = Apart::new();
    assert_eq!(apart.write(), Status::SUCCESS);
    apart.fail_with(Some(MediaError::NotDurable));
    assert_eq!(apart.flush(), Status::WRITE_FAULT);
    let trouble = apart.host.endpoint.health().trouble().expect("nobody is told");
    assert!(trouble.contains("durable"), "{trouble}");
    // Nobody knows what of the data is lost, whatever the medium says now and whether or not the driver begins anew.
    apart.fail_with(None);
    for anew in [false, true] {
        if anew {
            apart.host.write4(reg::CC, 0);
            apart.host.restart(RAM);
            apart.host.create_pair(1, ENTRIES);
        }
        let flushes = apart.control.lock().unwrap().flushes;
        assert_eq!(apart.flush(), Status::WRITE_FAULT, "begun anew: {anew}");
        assert_eq!(apart.control.lock().unwrap().flushes, flushes, "begun anew: {anew}");
    }
}

#[test]
fn a_cache_that_cannot_be_flushed_stays_on() {
    let mut apart = Apart::new();
    assert_eq!(apart.write(), Status::SUCCESS);
    apart.fail_with(Some(MediaError::NotDurable));
    let off = Sqe { cdw10: fid::VOLATILE_WRITE_CACHE.into(), ..admin(AdminOpcode::SetFeatures) };
    assert_eq!(apart.status(0, off), Status::WRITE_FAULT);
    let asked = Sqe { cdw10: fid::VOLATILE_WRITE_CACHE.into(), ..admin(AdminOpcode::GetFeatures) };
    assert_eq!(apart.host.run(0, asked).dw0, 1, "what is written is said to be durable");
}
