//! Limits in bytes and operations a second, at a front and at a medium whose front is elsewhere.

use rackbus_pci::Work;
use rackbus_spec::nvme::AdminOpcode;
use rackbus_spec::nvme::command::RwCdw12;

use super::super::limits::{LimitDelays, Limits};
use super::super::medium;
use super::*;
use crate::lost::Lost;

const MS: u64 = 1_000_000;

fn limited(limits: Limits, delays: &LimitDelays) -> TestHost {
    let config = NvmeConfig { limits, delays: delays.clone(), ..NvmeConfig::memory(1 << 20, "L1") };
    let mut host = TestHost::plain(&config);
    host.enable();
    host
}

/// Polls until nothing can be done any more now; returns until when.
fn settle(host: &mut TestHost) -> Option<u64> {
    for _ in 0..10_000 {
        match host.endpoint.poll(host.now) {
            Work::Done => {}
            Work::Idle | Work::Watch(_) => return None,
            Work::Asleep(until) => return until,
        }
    }
    panic!("it never comes to rest");
}

fn completed(host: &mut TestHost, qid: u16) -> u64 {
    let mut count = 0;
    while let Some(cqe) = host.take_completion(qid) {
        assert!(cqe.status().is_success());
        count += 1;
    }
    host.give_back(qid);
    count
}

#[test]
fn operations_come_at_their_rate_and_queues_share_it() {
    let delays = LimitDelays::default();
    let mut host = limited(Limits { bytes: None, operations: Some(1000) }, &delays);
    for qid in [1, 2] {
        host.create_pair(qid, ENTRIES);
    }
    host.configure_shadow();
    let buffer = host.scratch();
    let (mut done, mut waits) = ([0u64; 2], 0);
    let begun = host.now;
    while host.now - begun < 1000 * MS {
        for (qid, done) in [1, 2].into_iter().zip(&mut done) {
            // The first queue is always full, the other has one command at a time.
            let depth = if qid == 1 { ENTRIES - 1 } else { 1 };
            while host.waiting(qid) < depth {
                host.enqueue(qid, transfer(IoOpcode::Read, 0, 512, buffer));
            }
            host.ring(qid);
            *done += completed(&mut host, qid);
        }
        match settle(&mut host) {
            Some(until) => {
                assert!(until > host.now, "it wants to be looked at in the past");
                assert!(host.endpoint.park(), "it does not sleep though nothing can be done");
                (host.now, waits) = (until, waits + 1);
            }
            None => host.now += 1000,
        }
    }
    let all: u64 = done.iter().sum();
    assert!((1000..=1060).contains(&all), "{done:?}");
    assert!(done[1] * 3 > all, "the shallow queue got too little: {done:?}");
    assert!(delays.count() > 0 && delays.count() <= waits, "{} of {waits}", delays.count());
}

/// Who opens the drive again and again has no more of it than who keeps it open.
#[test]
fn a_limit_holds_over_the_next_opening() {
    let delays = LimitDelays::default();
    let mut host = limited(Limits { bytes: None, operations: Some(1000) }, &delays);
    let mut done = 0;
    let begun = host.now;
    for _ in 0..20 {
        host.create_pair(1, ENTRIES);
        let buffer = host.scratch();
        for _ in 0..ENTRIES - 1 {
            host.enqueue(1, transfer(IoOpcode::Read, 0, 512, buffer));
        }
        host.ring(1);
        settle(&mut host);
        done += completed(&mut host, 1);
        host.endpoint.scrub();
        host.map_ram();
        host.command_register(0b110);
        host.enable();
    }
    let came = (host.now - begun) * 1000 / (1000 * MS);
    assert!(done <= came + 1000 / 20 + 1, "{done}, and {came} had come");
}

#[test]
fn bytes_come_at_their_rate_and_administration_does_not_wait() {
    let delays = LimitDelays::default();
    let mut host = limited(Limits { bytes: Some(1 << 20), operations: None }, &delays);
    host.create_pair(1, ENTRIES);
    let buffer = host.scratch();
    let begun = host.now;
    let mut done = 0;
    while host.now - begun < 1000 * MS {
        while host.waiting(1) < 8 {
            host.enqueue(1, transfer(IoOpcode::Write, 0, 8192, buffer));
        }
        host.ring(1);
        let until = settle(&mut host);
        let cid = host.submit(0, admin(AdminOpcode::GetFeatures));
        settle(&mut host);
        assert_eq!(host.completion(0).map(|cqe| cqe.cid), Some(cid), "administration waited");
        done += completed(&mut host, 1);
        host.now = until.unwrap_or(host.now + 1000).max(host.now);
    }
    let bytes = done * 8192;
    assert!((1 << 20..=(1 << 20) * 21 / 20 + 3 * 8192).contains(&bytes), "{bytes}");
}

/// How many of ten commands that make the whole drive zeroes are answered at once, and how often one waited; with the
/// front beside the blocks, or elsewhere.
fn zeroed_at_once(deallocate: bool, elsewhere: bool) -> (u64, u64) {
    let (limits, delays) =
        (Limits { bytes: Some(1 << 20), operations: None }, LimitDelays::default());
    let config = NvmeConfig { limits, delays: delays.clone(), ..NvmeConfig::memory(1 << 20, "L1") };
    let mut lender = Endpoint::new(Box::new(Nvme::new(&config).unwrap()));
    let mut host = match elsewhere {
        true => {
            let offer = lender.serve_medium(None).unwrap();
            let front = medium::front(&offer.description, offer.handles, Lost::new(|| {})).unwrap();
            TestHost::around(front)
        }
        false => TestHost::plain(&config),
    };
    host.enable();
    host.create_pair(1, ENTRIES);
    let mut zeroes = transfer(IoOpcode::WriteZeroes, 0, 1 << 20, 0);
    zeroes.cdw12 = RwCdw12::from(zeroes.cdw12).with_deac(deallocate).into();
    for _ in 0..10 {
        host.submit(1, zeroes);
    }
    for _ in 0..1000 {
        host.poll();
        lender.poll(host.now);
    }
    (completed(&mut host, 1), delays.count())
}

#[test]
fn giving_space_back_counts_as_no_bytes_wherever_the_front_is() {
    for elsewhere in [false, true] {
        assert_eq!(zeroed_at_once(true, elsewhere), (10, 0), "elsewhere: {elsewhere}");
        let (done, waits) = zeroed_at_once(false, elsewhere);
        assert!(done < 10 && waits > 0, "elsewhere: {elsewhere}, {done} and {waits}");
    }
}
