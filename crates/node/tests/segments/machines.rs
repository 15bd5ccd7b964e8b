//! What hosts on different machines give each other, and what a node believes of an owner's node on another machine,
//! which may be of another's making.

use std::collections::BTreeSet;

use rackbus_attach::{Refusal, SegmentOptions};
use rackbus_segment::message::{ConnectorMessage, PeerReply, Question, StandIn};

use crate::common::segments::{ALPHA, BETA, Hosts};
use crate::elsewhere::Elsewhere;
use crate::support::{LIMIT, refusal, until};

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
