//! What another machine's node says over the connections of a carried exchange: frames with messages, data, signs of life,
//! counts and news of a lane, to either side of one, with a lane beside it and without.
//!
//! Beside the end that is driven is what must hold (`model`): it hears the messages that were said, each once and in
//! their order, with their data; it says nothing but frames of the protocol, its own messages in their order from the one
//! that the other side lacks, and counts no message that it cannot have; whoever breaks the rules is disconnected; and when
//! it has ended, the other side reaches none of its memory.

mod lanes;
mod model;
mod socket;

use rackbus_memory::exchange::session::{SessionEndReason, SessionSide, SessionTiming};
use rackbus_memory::exchange::{ExchangeLayout, MESSAGE_BYTES};
use rackbus_memory::{Carried, CarriedSession, Exchange};

use crate::input::Input;
use lanes::InstantLane;
use model::{SaidFrame, Saying, kind};
use socket::FuzzedNode;

const LAYOUT: ExchangeLayout = ExchangeLayout { tags: 4, data_bytes: 5000 };
/// Deeds of one input.
const MOST: usize = 64;
/// Nothing happens by itself while an input is run.
const DAY: u64 = 24 * 60 * 60 * 1000;
const TIMING: SessionTiming =
    SessionTiming { beat: DAY, silence: DAY, hold: DAY, retry: (0, 0), often: (0, 0) };

/// What an end does wrong, for a test that this is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExchangeMistake {
    /// It does everything as it should.
    None,
    /// It hears each message twice.
    HearsTwice,
    /// It says that it has one message more than it has.
    CountsMore,
    /// It goes on with a peer that has broken the rules.
    GoesOn,
    /// The lane's memory stays exposed.
    StaysExposed,
}

/// Runs one input with an end that makes no mistake.
pub fn run(data: &[u8]) {
    run_with(data, ExchangeMistake::None);
}

/// The same with an end that makes this mistake.
///
/// # Panics
/// When something does not hold.
pub fn run_with(data: &[u8], mistake: ExchangeMistake) {
    let mut input = Input::new(data);
    let mut world = World::new(input.u8(), mistake);
    for _ in 0..MOST {
        if input.is_empty() || world.is_over() {
            break;
        }
        world.step(&mut input);
        world.read();
    }
    world.finish();
}

/// An end, its peer, and what must hold between them.
struct World {
    mistake: ExchangeMistake,
    side: SessionSide,
    end: Exchange,
    session: CarriedSession,
    lane: Option<InstantLane>,
    peer: FuzzedNode,
    /// Number of the newest connection.
    number: u64,
    at_once: usize,
    saying: Saying,
}

impl World {
    /// The bits of `choice` say which side the end is on, whether it has a lane, and in which pieces bytes go.
    fn new(choice: u8, mistake: ExchangeMistake) -> World {
        let side = if choice & 1 == 0 { SessionSide::Asks } else { SessionSide::Answers };
        let at_once = if choice & 4 == 0 { 4096 } else { 37 };
        let session = CarriedSession::new("peer", side, TIMING, Box::new(drop));
        let session = session.expect("there are descriptors");
        let beside = (choice & 2 != 0)
            .then(|| InstantLane::new(LAYOUT, mistake == ExchangeMistake::StaysExposed));
        let lane = beside.as_ref().map(|lane| lane.end(side));
        let (peer, carrier) = FuzzedNode::connect(at_once);
        let carried = Carried { carrier, session: session.clone(), side, lane };
        let end = Exchange::carried("exchange", carried, LAYOUT).expect("there is memory");
        let saying = Saying::new(LAYOUT, beside.is_some());
        World { mistake, side, end, session, lane: beside, peer, number: 0, at_once, saying }
    }

    fn is_over(&self) -> bool {
        self.end.is_closed()
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.u8() % 16 {
            0..=5 => {
                let frame = SaidFrame::choose(input, LAYOUT, self.saying.heard_of_end());
                self.say(&frame.bytes());
            }
            6 => self.say(input.short()),
            7 | 8 => self.ask(input),
            9 | 10 => self.hear(),
            11 => {
                self.end.rest();
            }
            12 => self.connect(input.u8() & 1 == 0),
            13 => match &self.lane {
                Some(lane) => lane.choose(input.u8()),
                None => self.hear(),
            },
            14 => {
                self.peer.finish();
                self.hear();
            }
            _ => {
                self.say(&SaidFrame::of(kind::RESUME, self.saying.heard_of_end()).bytes());
                self.hear();
            }
        }
    }

    /// The peer says this.
    fn say(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() && !self.is_over() {
            let taken = self.peer.say(rest);
            if taken == 0 && self.peer.is_over() {
                return;
            }
            self.saying.said(&rest[..taken]);
            rest = &rest[taken..];
            if taken == 0 {
                self.hear();
            }
        }
    }

    /// The end sends a message of its own, as a front or a medium would: by the places in turn.
    fn ask(&mut self, input: &mut Input<'_>) {
        let (length, byte) = (usize::from(input.u8()) % (MESSAGE_BYTES + 1), input.u8());
        let data = usize::try_from(input.number()).unwrap_or(0).min(LAYOUT.data_bytes);
        let tag = self.saying.next_tag();
        let message = vec![byte; length];
        if self.end.send(&message, Some((tag, data))).is_ok() {
            self.saying.sent(message, tag, data);
        }
        self.end.ring();
    }

    /// The end takes all messages that came.
    fn hear(&mut self) {
        let mut message = [0; MESSAGE_BYTES];
        while let Some(length) = self.end.receive(&mut message) {
            let times = if self.mistake == ExchangeMistake::HearsTwice { 2 } else { 1 };
            for _ in 0..times {
                self.saying.heard(&message[..length], |tag, length| {
                    let mut data = vec![0; length];
                    self.end.data(tag, length).expect("it was checked").get().copy_to(&mut data);
                    data
                });
            }
        }
    }

    /// What the end has said.
    fn read(&mut self) {
        let more = u64::from(self.mistake == ExchangeMistake::CountsMore);
        let said = self.peer.read();
        self.saying.end_said(&said, more);
    }

    /// Another connection carries the session. Only the side that answers hears of one while the one before is there.
    fn connect(&mut self, cut: bool) {
        self.hear();
        self.read();
        if cut || self.side == SessionSide::Asks {
            self.peer.cut();
            let mut heard = 0;
            while !self.peer.is_let_go() && !self.is_over() {
                self.hear();
                heard += 1;
                assert!(heard < 10_000, "a connection that was cut is not let go");
            }
        }
        let wanted = match self.side {
            _ if self.is_over() => None,
            SessionSide::Asks => self.session.wait_wanted(),
            SessionSide::Answers => Some(self.number + 1),
        };
        let Some(number) = wanted else { return };
        let (peer, carrier) = FuzzedNode::connect(self.at_once);
        assert!(self.session.connected(number, carrier), "a connection that is wanted is refused");
        (self.number, self.peer) = (number, peer);
        self.saying.reconnected();
        self.hear();
    }

    fn finish(mut self) {
        self.hear();
        self.read();
        let rules = self.session.end_reason() == Some(SessionEndReason::Rules);
        let disconnected = self.is_over() && self.mistake != ExchangeMistake::GoesOn;
        assert!(disconnected || !self.saying.is_wrong(), "who broke the rules goes on");
        assert!(!rules || self.is_over(), "the session has ended, and its end has not");
        drop(self.end);
        assert!(self.session.end_reason().is_some(), "the session goes on without an end");
        if let (SessionSide::Answers, Some(lane)) = (self.side, &self.lane) {
            assert!(!lane.is_exposed(), "memory is exposed after the end");
        }
    }
}

/// Both sides, with a lane and without, and peers that do what they should.
pub fn seeds() -> Vec<Vec<u8>> {
    // Kind, length and byte of the message, data, tag, what the peer has; see `SaidFrame::choose`.
    let frame = |kind: u8, message: u8, data: u8, tag: u8| vec![0, kind, message, 7, data, tag, 0];
    let ask = |data: u8| vec![7, 5, 9, data];
    let right = [15, 9];
    let mut seeds = Vec::new();
    for choice in 0..8u8 {
        let talk = [
            vec![choice],
            right.to_vec(),
            ask(100),
            frame(kind::MESSAGE, 8, 0, 0),
            frame(kind::MESSAGE, 8, 205, 1),
            vec![9],
            frame(kind::BEAT, 0, 0, 0),
            vec![11],
            ask(0),
        ];
        let news = [frame(kind::LANE, 0, 0, 1), vec![9]];
        let left = [vec![7, 5, 9, 0xe8, 0x00, 0x11], frame(kind::LEFT, 4, 205, 2), vec![13, 0, 9]];
        let fetch =
            [frame(kind::FETCH, 0, 205, 0), vec![9], frame(kind::FETCHED, 0, 205, 2), vec![9]];
        let again = [vec![12, choice], right.to_vec(), ask(3), vec![9, 14]];
        seeds.push([&talk[..], &again].concat().concat());
        seeds.push([&talk[..1], &[right.to_vec()], &news, &left, &fetch, &again].concat().concat());
        let down = [vec![13, 2], vec![9], frame(kind::LANE, 0, 0, 2)];
        seeds.push([&talk[..1], &[right.to_vec()], &news, &left, &down, &fetch].concat().concat());
    }
    seeds
}
