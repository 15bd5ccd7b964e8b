//! What hosts on different machines give each other, and what a node believes of an owner's node on another machine,
//! which may be of another's making.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rackbus_attach::{CarriedCopy, Mapping, Refusal, SegmentOptions};
use rackbus_memory::SharedMemory;
use rackbus_memory::copy::{
    CopyEngine, CopyEngineOptions, CopyLocation, Transaction, TransactionState,
};
use rackbus_segment::Handle;
use rackbus_segment::message::{
    COPY_BUFFER, ConnectorMessage, PeerReply, Question, Reply, SegmentKind, SessionRequest, StandIn,
};

use crate::common::segments::{ALPHA, BETA, GAMMA, Hosts};
use crate::elsewhere::Elsewhere;
use crate::support::{LIMIT, Stranger, refusal, until};

/// What every host exports.
const EXPORT: u64 = 64 << 30;

/// Of a segment, the size that the answer says, and that of what stands for it.
fn sizes(id: u32) -> (u64, u64) {
    match id {
        1 | 5 => (8192, 8192),
        2 => (EXPORT + 4096, EXPORT + 4096),
        3 => (8192, 100 << 40),
        _ => (8192, 4096),
    }
}

fn answer(what: &Question) -> Option<(PeerReply, Vec<StandIn>)> {
    let Question::Segment { id, .. } = what else { return None };
    let ((told, size), write) = (sizes(*id), true);
    let reply = PeerReply::Memory { size: told, write, address: None };
    Some((reply, vec![StandIn::Memory { size, write }]))
}

#[test]
fn memory_that_an_owner_cannot_have_takes_no_addresses_here() {
    let owner = Elsewhere::new(answer);
    let rack = Hosts::alone(ALPHA, |_| owner.clone());
    let session = rack.session(ALPHA);
    let first = session.connect(BETA, 1, LIMIT).unwrap();
    for id in [2, 3, 4] {
        let refused = refusal(session.connect(BETA, id, LIMIT));
        assert!(matches!(&refused, Refusal::System(why) if why.contains("export")), "{refused:?}");
    }
    // It is told, and what others of its memory are connected to stays.
    let ended = || {
        let over = |ask| match ask {
            ConnectorMessage::Disconnect { connection } => Some(connection),
            _ => None,
        };
        owner.asked().into_iter().filter_map(over).collect::<BTreeSet<_>>()
    };
    until(|| ended().len() == 3);
    session.connect(BETA, 5, LIMIT).unwrap();
    drop(first);
}

/// A copy to another machine's memory takes many messages, and what is stored when it has ended comes behind it, also on a
/// third machine; what lies around it stays.
#[test]
fn a_copy_is_all_there_when_it_has_ended_and_nothing_around_it_is_lost() {
    const SIZE: usize = (9 << 20) + 4096;
    let rack = Hosts::machines();
    let [alpha, beta, gamma] = [ALPHA, BETA, GAMMA].map(|node| rack.session(node));
    let segment = alpha.create_segment(&SegmentOptions::shared(7, SIZE as u64)).unwrap();
    segment.set_available().unwrap();
    let home = segment.map(0, SIZE as u64).unwrap();
    let remote = Arc::new(beta.connect(ALPHA, 7, LIMIT).unwrap());
    let further = gamma.connect(ALPHA, 7, LIMIT).unwrap();
    let (here, third) = (remote.map(0, SIZE as u64).unwrap(), further.map(0, SIZE as u64).unwrap());
    let engine = CopyEngine::start("test", &CopyEngineOptions::default()).unwrap();
    let bytes = |memory: &Mapping| {
        let mut bytes = vec![0; SIZE];
        memory.whole().copy_to(&mut bytes);
        bytes
    };
    // Not from the first byte, nor to the last, nor whole words.
    let (offset, length) = (1021, SIZE - 5000);
    for round in 1..=3_u8 {
        let source = SharedMemory::create("source", SIZE as u64).unwrap();
        let expected: Vec<u8> = (0..length).map(|at| (at / 7) as u8 ^ round).collect();
        source.whole().copy_from(&expected);
        home.whole().store_u64(0, u64::from(round), Ordering::Release);
        here.whole().store_u64(8, u64::from(round), Ordering::Release);
        let copy = Transaction::of(
            CopyLocation::shared(source.region(), 0),
            CopyLocation::shared(here.region(), offset),
            length,
        );
        let carried = CarriedCopy::new(&remote, here.region());
        let ticket = engine.channels()[0].submit(copy.unwrap().between(carried.clone()));
        assert_eq!(ticket.wait(None), TransactionState::Done);
        assert!(carried.is_carried() && carried.take_failure().is_none());
        for (memory, whose) in [(&here, "beta"), (&home, "alpha"), (&third, "gamma")] {
            let all = bytes(memory);
            assert!(all[offset..offset + length] == expected, "{whose} in round {round}");
            assert_eq!(all[8], round, "{whose} has what was stored before");
            assert!(all[offset + length..].iter().all(|byte| *byte == 0));
        }
        until(|| here.whole().load_u64(0, Ordering::Acquire) == Some(u64::from(round)));
        assert_eq!(home.whole().load_u64(0, Ordering::Acquire), Some(u64::from(round)));
    }
}

/// What a process says of its copies is checked before anything is copied.
#[test]
fn copies_that_are_not_inside_or_to_nothing_are_refused() {
    let rack = Hosts::machines();
    let alpha = rack.session(ALPHA);
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 8192)).unwrap();
    segment.set_available().unwrap();
    let process = Stranger::attach(&rack, BETA);
    let connection = process.connect(ALPHA, 7);
    let copy = |connection, offset, from, length| {
        let (follows, more) = (false, false);
        let copy = SessionRequest::Copy { connection, offset, from, length, follows, more };
        process.ask(&copy, &[]).unwrap()
    };
    assert!(
        matches!(copy(connection, 0, 0, 1), Reply::Refused(Refusal::Illegal(_))),
        "from nothing"
    );
    for _ in 0..2 {
        let (reply, mut beside) = process.ask_whole(&SessionRequest::CopyBuffer, &[]).unwrap();
        assert_eq!(reply, Reply::Memory);
        let memory = beside.shared_memory(COPY_BUFFER.into()).unwrap();
        memory.whole().fill(7);
    }
    for (offset, from, length) in [
        (0, COPY_BUFFER, 1),
        (0, COPY_BUFFER - 1, 2),
        (0, u32::MAX, 1),
        (0, 1, u32::MAX),
        (0, 0, 0),
        (8192, 0, 1),
        (u64::MAX, 0, 1),
    ] {
        let reply = copy(connection, offset, from, length);
        assert!(matches!(reply, Reply::Refused(_)), "{offset} {from} {length}: {reply:?}");
    }
    assert!(matches!(copy(Handle(u64::MAX), 0, 0, 1), Reply::Refused(_)));
    // A part goes on where the one before it has ended, if that said so.
    let part = |offset, follows, more| {
        let (from, length) = (0, 8);
        let copy = SessionRequest::Copy { connection, offset, from, length, follows, more };
        process.ask(&copy, &[]).unwrap()
    };
    let refused = |reply: Reply| assert!(matches!(reply, Reply::Refused(Refusal::Illegal(_))));
    refused(part(0, true, true));
    assert_eq!(part(0, false, true), Reply::Done);
    refused(part(16, true, false));
    refused(part(8, true, false));
    assert_eq!([part(0, false, true), part(8, true, false)], [Reply::Done, Reply::Done]);
    refused(part(16, true, false));
    assert_eq!(copy(connection, 8191, 9, 1), Reply::Done);
    let mut last = [0];
    segment.map(8191, 1).unwrap().whole().copy_to(&mut last);
    assert_eq!(last, [7]);
    // A segment of this host is in this host's memory.
    let own = SessionRequest::CreateSegment {
        id: 9,
        choose: false,
        size: 4096,
        kind: SegmentKind::Shared,
    };
    let Some(Reply::Created { segment, .. }) = process.ask(&own, &[]) else { panic!("no segment") };
    assert!(matches!(copy(segment, 0, 0, 1), Reply::Refused(Refusal::Illegal(_))));
}

/// They are open, and no memory is shared by which they could be reached: who asks is told what to use instead, and can.
#[test]
fn pages_of_the_pool_are_refused_to_another_machine() {
    let rack = Hosts::machines();
    let (alpha, beta) = (rack.session(ALPHA), rack.session(BETA));
    let extent = alpha.allocate(4096).unwrap();
    for write in [false, true] {
        extent.open(0, 4096, BETA, write).unwrap();
        let refused = refusal(beta.map_pages(extent.address(), 4096));
        let expected = |why: &str| why.contains("different machines") && why.contains("segment");
        assert!(matches!(&refused, Refusal::Illegal(why) if expected(why)), "{refused:?}");
        extent.close(0, 4096).unwrap();
    }
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 4096)).unwrap();
    segment.set_available().unwrap();
    beta.connect(ALPHA, 7, LIMIT).unwrap();
}
