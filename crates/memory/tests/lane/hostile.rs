//! A peer that says whatever it likes, to an end with a lane.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use proptest::prelude::*;
use rackbus_memory::exchange::lane::{CarriedLane, LaneTarget};
use rackbus_memory::exchange::session::{SessionSide, SessionTiming};
use rackbus_memory::exchange::{ExchangeLayout, MESSAGE_BYTES};
use rackbus_memory::{Carried, CarriedSession, Exchange, SharedMemory};
use rackbus_seeds::Random;

use crate::network::{Between, Closing, Cut, PROOF, SimulatedLane, SimulatedTarget};

const LAYOUT: ExchangeLayout = ExchangeLayout { tags: 4, data_bytes: 8192 };

/// What a frame says of itself.
#[derive(Debug, Clone)]
struct Frame {
    kind: u8,
    message: u16,
    data: u32,
    tag: u32,
    seen: u64,
    follows: usize,
}

impl Frame {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.message.to_le_bytes().to_vec();
        bytes.extend([self.kind, 0]);
        bytes.extend(self.data.to_le_bytes());
        bytes.extend(self.tag.to_le_bytes());
        bytes.extend(self.seen.to_le_bytes());
        bytes.resize(bytes.len() + self.follows, 7);
        bytes
    }
}

fn frames() -> impl Strategy<Value = Vec<Frame>> {
    let message = prop_oneof![6 => Just(0u16), 3 => Just(4u16), 1 => any::<u16>()];
    let data = prop_oneof![Just(0u32), Just(4096), Just(8192), 8190u32..8200, any::<u32>()];
    let tag = prop_oneof![8 => 0u32..4, 1 => any::<u32>()];
    let seen = prop_oneof![8 => Just(0u64), 2 => 0u64..4, 1 => any::<u64>()];
    let follows = prop_oneof![4 => Just(0usize), 2 => Just(4), 1 => Just(8192), 1 => 0usize..9000];
    let frame = (0u8..9, message, data, tag, seen, follows).prop_map(
        |(kind, message, data, tag, seen, follows)| Frame {
            kind,
            message,
            data,
            tag,
            seen,
            follows,
        },
    );
    prop::collection::vec(frame, 0..40)
}

/// An end with a lane, which hears `frames` after a right beginning, while it asks or answers.
fn hear(side: SessionSide, frames: &[Frame], seed: u64) {
    let mut random = Random(seed);
    let between = Between::new(Closing::AtOnce, 3);
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    theirs.set_nonblocking(true).unwrap();
    let session =
        CarriedSession::new("peer", side, SessionTiming::asking(60_000), Box::new(drop)).unwrap();
    let lane = match side {
        SessionSide::Asks => {
            // A lane that works: it is the peer that does what it likes.
            let places = LAYOUT.data_bytes * LAYOUT.tags as usize;
            let memory = SharedMemory::create("exposed", places as u64 + 4096).unwrap();
            SimulatedTarget(between.clone(), PROOF).expose(memory.region(), places).unwrap();
            CarriedLane::Asks(Box::new(SimulatedLane(between.clone())), PROOF)
        }
        SessionSide::Answers => {
            CarriedLane::Answers(Arc::new(SimulatedTarget(between.clone(), PROOF)))
        }
    };
    let carrier = Box::new(Cut(ours, 5000));
    let carried = Carried { carrier, session: session.clone(), side, lane: Some(lane) };
    let mut end = Exchange::carried("exchange", carried, LAYOUT).unwrap();
    let beginning = Frame { kind: 1, message: 0, data: 0, tag: 0, seen: 0, follows: 0 };
    theirs.write_all(&beginning.bytes()).unwrap();
    let mut message = [0; MESSAGE_BYTES];
    for (at, frame) in frames.iter().enumerate() {
        // One that does not hear is not waited for: what does not fit is lost.
        let _ = theirs.write(&frame.bytes());
        let tag = at as u32 % LAYOUT.tags;
        let _ = end.send(b"ask", Some((tag, 8192)));
        end.ring();
        between.lock().unwrap().step(&mut random);
        while end.receive(&mut message).is_some() {}
        let _ = end.rest();
        let _ = theirs.read(&mut [0; 70_000]);
    }
    drop(end);
    assert!(session.end_reason().is_some());
    let reachable = between.lock().unwrap().is_reachable();
    assert!(side == SessionSide::Asks || !reachable, "memory is exposed after the end");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_peer_with_a_lane_does_no_harm(frames in frames(), seed: u64) {
        hear(SessionSide::Asks, &frames, seed);
        hear(SessionSide::Answers, &frames, seed);
    }
}
