//! Ends that are carried by sockets.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::super::Exchange;
use super::super::lane::{CarriedLane, Lane, LaneError, LaneTarget, PROOF_BYTES};
use super::super::session::SessionTiming;
use super::connection::HEADER;
use super::*;
use crate::event::Event;
use crate::region::Region;

const LAYOUT: ExchangeLayout = ExchangeLayout { tags: 4, data_bytes: 200_000 };

/// A socket that takes and gives at most so many bytes at once.
#[derive(Debug)]
struct Socket(UnixStream, usize);

fn outcome(result: std::io::Result<usize>) -> Result<usize, StreamError> {
    match result {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        other => other.map_err(|_| StreamError::Closed),
    }
}

impl Carrier for Socket {
    fn send(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        let count = bytes.len().min(self.1);
        outcome(self.0.write(&bytes[..count]))
    }

    fn flush(&mut self) -> Result<bool, StreamError> {
        Ok(true)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, StreamError> {
        let count = buffer.len().min(self.1);
        match self.0.read(&mut buffer[..count]) {
            Ok(0) => Err(StreamError::Closed),
            other => outcome(other),
        }
    }

    fn socket(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn shut_down(&self) {
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }
}

fn carrier(socket: UnixStream, at_once: usize) -> Box<dyn Carrier> {
    socket.set_nonblocking(true).unwrap();
    Box::new(Socket(socket, at_once))
}

/// An end of an exchange that lasts as long as its connection.
fn end(socket: UnixStream, at_once: usize, side: SessionSide) -> Exchange {
    end_with(socket, at_once, side, None)
}

/// The same, with what moves data beside it.
fn end_with(
    socket: UnixStream,
    at_once: usize,
    side: SessionSide,
    lane: Option<CarriedLane>,
) -> Exchange {
    let session = CarriedSession::of_one_connection(side).unwrap();
    let carried = Carried { carrier: carrier(socket, at_once), session, side, lane };
    Exchange::carried("exchange", carried, LAYOUT).unwrap()
}

/// Both ends, the first of the side that asks, which know of each other.
fn both(at_once: usize) -> (Exchange, Exchange) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (mut one, mut other) =
        (end(ours, at_once, SessionSide::Asks), end(theirs, at_once, SessionSide::Answers));
    meet(&mut one, &mut other);
    (one, other)
}

/// Has both say what they have received.
fn meet(one: &mut Exchange, other: &mut Exchange) {
    let mut message = [0; MESSAGE_BYTES];
    for _ in 0..2 * HEADER {
        assert!(one.receive(&mut message).is_none() && other.receive(&mut message).is_none());
    }
}

/// What the side that asks says first.
fn resume() -> FrameHeader {
    FrameHeader { kind: kind::RESUME, ..FrameHeader::default() }
}

/// Receives a message, while the other side goes on sending.
fn receive(to: &mut Exchange, from: &mut Exchange, out: &mut [u8; MESSAGE_BYTES]) -> usize {
    loop {
        match to.receive(out) {
            Some(length) => return length,
            None => from.ring(),
        }
        assert!(!to.is_closed() && !from.is_closed());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Whatever the pieces in which bytes go, all messages and data arrive, in order.
    #[test]
    fn messages_and_their_data_arrive_in_order(
        at_once in prop_oneof![1usize..100, 1000usize..100_000],
        messages in prop::collection::vec((0usize..=MESSAGE_BYTES, 0usize..3000), 1..40),
        large in 0usize..=LAYOUT.data_bytes,
    ) {
        let (mut one, mut other) = both(at_once);
        let large = if at_once < 100 { large / 50 } else { large };
        let sent = messages.iter().copied().chain([(5, large)]).enumerate();
        let mut message = [0; MESSAGE_BYTES];
        for (number, (length, data)) in sent {
            let (tag, byte) = (number as u32 % LAYOUT.tags, number as u8);
            one.data(tag, data).unwrap().get().fill(byte);
            one.send(&vec![byte; length], Some((tag, data))).unwrap();
            one.ring();
            prop_assert_eq!(receive(&mut other, &mut one, &mut message), length);
            prop_assert!(message[..length].iter().all(|it| *it == byte));
            let mut read = vec![!byte; data];
            other.data(tag, data).unwrap().get().copy_to(&mut read);
            prop_assert!(read.iter().all(|it| *it == byte));
            // What is never answered is never known to have arrived.
            other.send(&[], None).unwrap();
            other.ring();
            prop_assert_eq!(receive(&mut one, &mut other, &mut message), 0);
        }
    }

    /// Whatever a peer sends, nothing but places of its own tags changes, and nothing panics.
    #[test]
    fn a_hostile_peer_does_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut end = end(ours, 7, SessionSide::Answers);
        theirs.write_all(resume().as_bytes()).unwrap();
        theirs.write_all(&bytes).unwrap();
        let mut message = [0; MESSAGE_BYTES];
        while end.receive(&mut message).is_some() {}
        let _ = end.rest();
        drop(theirs);
        prop_assert!(end.receive(&mut message).is_none() && end.is_closed());
    }
}

#[test]
fn a_peer_that_takes_nothing_is_not_waited_for() {
    let (mut one, mut other) = both(1 << 20);
    for tag in 0..LAYOUT.tags {
        one.send(b"m", Some((tag, LAYOUT.data_bytes))).unwrap();
        one.ring();
    }
    // The socket holds less than that.
    assert!(one.rest(), "there is something to receive");
    let mut message = [0; MESSAGE_BYTES];
    for _ in 0..LAYOUT.tags {
        assert_eq!(receive(&mut other, &mut one, &mut message), 1);
    }
    assert!(Event::wait_any(&[one.as_fd()], Some(0)) || one.rest());
}

#[test]
fn what_comes_while_it_rests_makes_it_readable() {
    let (mut one, mut other) = both(1 << 20);
    assert!(other.rest() && !Event::wait_any(&[other.as_fd()], Some(0)));
    one.send(b"hello", None).unwrap();
    one.ring();
    assert!(Event::wait_any(&[other.as_fd()], Some(1_000_000_000)));
    assert!(!other.rest(), "there is a message");
    let mut message = [0; MESSAGE_BYTES];
    assert_eq!(other.receive(&mut message), Some(5));
    assert!(other.rest());
    drop(one);
    assert!(Event::wait_any(&[other.as_fd()], Some(1_000_000_000)));
    assert!(!other.rest() && other.is_closed());
}

#[test]
fn a_tag_that_there_is_not_ends_it() {
    for (message, data, tag) in [(1, 1, 4), (61, 0, 0), (1, 200_001, 0), (u16::MAX, u32::MAX, 0)] {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut end = end(ours, 99, SessionSide::Answers);
        let (message, data, tag) = (message.into(), data.into(), tag.into());
        let head = FrameHeader { message, data, tag, ..FrameHeader::default() };
        theirs.write_all(resume().as_bytes()).unwrap();
        theirs.write_all(head.as_bytes()).unwrap();
        theirs.write_all(&[0; 100]).unwrap();
        assert_eq!(end.receive(&mut [0; MESSAGE_BYTES]), None);
        assert!(end.is_closed(), "{message} {data} {tag}");
    }
}

/// Memory that cannot be exposed, and taken away after that or not.
#[derive(Debug)]
struct Unexposed(bool);

impl LaneTarget for Unexposed {
    fn provider(&self) -> &str {
        "none"
    }

    fn expose(&self, _region: &Arc<Region>, _proof: usize) -> Result<(), LaneError> {
        Err(LaneError("there is no room to register it".to_owned()))
    }

    fn failure(&self) -> Option<LaneError> {
        None
    }

    fn close(&self) -> bool {
        self.0
    }
}

#[test]
fn an_end_without_a_lane_hears_that_the_other_side_lost_its_own() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut one = end(ours, 99, SessionSide::Asks);
    let lane = Some(CarriedLane::Answers(Arc::new(Unexposed(true))));
    let mut other = end_with(theirs, 99, SessionSide::Answers, lane);
    meet(&mut one, &mut other);
    one.send(b"hello", None).unwrap();
    one.ring();
    let mut message = [0; MESSAGE_BYTES];
    assert_eq!(receive(&mut other, &mut one, &mut message), 5);
    other.send(b"answer", None).unwrap();
    other.ring();
    assert_eq!(receive(&mut one, &mut other, &mut message), 6);
    assert!(!one.is_closed() && !other.is_closed());
}

#[test]
fn a_lane_that_cannot_be_closed_ends_the_session() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let lane = Some(CarriedLane::Answers(Arc::new(Unexposed(false))));
    let mut end = end_with(ours, 99, SessionSide::Answers, lane);
    assert!(!end.rest() && end.is_closed());
}

/// A borrower asks again and again for data, and takes none.
#[test]
fn data_that_are_asked_for_without_end_end_the_session() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let lane = Some(CarriedLane::Answers(Arc::new(Unexposed(true))));
    let mut end = end_with(ours, 1 << 20, SessionSide::Answers, lane);
    // Data may have been left before it was given up.
    let down = FrameHeader { tag: LaneNews::Down.number().into(), ..resume() };
    theirs.write_all(down.as_bytes()).unwrap();
    let data = (LAYOUT.data_bytes as u32).into();
    let fetch = FrameHeader { kind: kind::FETCH, data, ..FrameHeader::default() };
    for _ in 0..100 {
        let _ = theirs.write(fetch.as_bytes());
        let _ = end.rest();
        end.ring();
    }
    assert!(end.is_closed());
}

/// A lane on which nothing is under way, whose descriptor is readable until it is polled.
#[derive(Debug)]
struct Idle(Arc<Event>);

impl Lane for Idle {
    fn provider(&self) -> &str {
        "idle"
    }

    fn register(&mut self, _region: &Arc<Region>) -> Result<(), LaneError> {
        Ok(())
    }

    fn begin(&mut self, _: u64, _: bool, _: usize, _: usize) -> Result<bool, LaneError> {
        Ok(true)
    }

    fn poll(&mut self, ended: &mut Vec<u64>) -> Result<(), LaneError> {
        // The proof, which is as the memory was.
        ended.push(0);
        self.0.drain();
        Ok(())
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }

    fn rest(&mut self) -> bool {
        !Event::wait_any(&[self.0.as_fd()], Some(0))
    }

    fn close(&mut self) -> bool {
        true
    }
}

#[test]
fn an_idle_lane_that_becomes_readable_wakes_its_end_once() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let rung = Arc::new(Event::new().unwrap());
    let lane = CarriedLane::Asks(Box::new(Idle(rung.clone())), [0; PROOF_BYTES]);
    let mut one = end_with(ours, 99, SessionSide::Asks, Some(lane));
    let mut other = end(theirs, 99, SessionSide::Answers);
    meet(&mut one, &mut other);
    rung.ring();
    assert!(Event::wait_any(&[one.as_fd()], Some(1_000_000_000)));
    assert!(one.rest() && !Event::wait_any(&[rung.as_fd()], Some(0)), "it is readable still");
}

/// Both ends of a session whose connections come and go, and the session of each.
struct Sessions {
    ends: [Exchange; 2],
    sessions: [CarriedSession; 2],
}

const SIDES: [SessionSide; 2] = [SessionSide::Asks, SessionSide::Answers];

impl Sessions {
    fn new(at_once: usize) -> (Sessions, [UnixStream; 2]) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let kill = [ours.try_clone().unwrap(), theirs.try_clone().unwrap()];
        let sessions = SIDES.map(|side| {
            CarriedSession::new("peer", side, SessionTiming::asking(60_000), Box::new(drop))
                .unwrap()
        });
        let mut sockets = [Some(ours), Some(theirs)].into_iter();
        let mut made = sessions.iter().zip(SIDES).map(|(session, side)| {
            let socket = sockets.next().flatten().unwrap();
            let carrier: Box<dyn Carrier> =
                Box::new(Breaking(Socket(nonblocking(socket), at_once)));
            let carried = Carried { carrier, session: session.clone(), side, lane: None };
            Exchange::carried("exchange", carried, LAYOUT).unwrap()
        });
        let ends = [made.next().unwrap(), made.next().unwrap()];
        drop(made);
        (Sessions { ends, sessions }, kill)
    }

    /// Makes the next connection.
    fn reconnect(&self, at_once: usize) -> [UnixStream; 2] {
        let number = self.sessions[0].wait_wanted().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let kill = [ours.try_clone().unwrap(), theirs.try_clone().unwrap()];
        for (session, socket) in self.sessions.iter().zip([ours, theirs]) {
            let carrier = Box::new(Breaking(Socket(nonblocking(socket), at_once)));
            assert!(session.connected(number, carrier));
        }
        kill
    }
}

fn nonblocking(socket: UnixStream) -> UnixStream {
    socket.set_nonblocking(true).unwrap();
    socket
}

/// A socket whose end does not mean that the session has ended.
#[derive(Debug)]
struct Breaking(Socket);

fn broken<T>(result: Result<T, StreamError>) -> Result<T, StreamError> {
    result.map_err(|_| StreamError::Socket(rustix::io::Errno::CONNRESET))
}

impl Carrier for Breaking {
    fn send(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        broken(self.0.send(bytes))
    }

    fn flush(&mut self) -> Result<bool, StreamError> {
        broken(self.0.flush())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, StreamError> {
        broken(self.0.receive(buffer))
    }

    fn socket(&self) -> BorrowedFd<'_> {
        self.0.socket()
    }

    fn shut_down(&self) {
        self.0.shut_down();
    }
}

/// Connections end after any number of bytes, again and again; each question is heard once, in order, with its
/// data, and so is each answer.
#[test]
fn what_is_under_way_goes_on_by_the_next_connection() {
    for at_once in [13, 1000, 70_000] {
        let (mut all, mut kill) = Sessions::new(at_once);
        let mut message = [0; MESSAGE_BYTES];
        let (mut asked, mut heard, mut answered) = (0u32, 0u32, 0u32);
        let count = 200;
        let mut polls = 0u32;
        while answered < count {
            while asked < count && asked < answered + LAYOUT.tags {
                let tag = asked % LAYOUT.tags;
                all.ends[0].data(tag, 3000).unwrap().get().fill(asked as u8);
                all.ends[0].send(&asked.to_le_bytes(), Some((tag, 3000))).unwrap();
                asked += 1;
            }
            all.ends[0].ring();
            while let Some(length) = all.ends[1].receive(&mut message) {
                assert_eq!(message[..length], heard.to_le_bytes());
                let place = all.ends[1].data(heard % LAYOUT.tags, 3000).unwrap();
                let mut read = [0; 3000];
                place.get().copy_to(&mut read);
                assert_eq!(read, [heard as u8; 3000], "question {heard}");
                place.get().fill(!(heard as u8));
                let data = Some((heard % LAYOUT.tags, 3000));
                all.ends[1].send(&heard.to_le_bytes(), data).unwrap();
                heard += 1;
            }
            all.ends[1].ring();
            while let Some(length) = all.ends[0].receive(&mut message) {
                assert_eq!(message[..length], answered.to_le_bytes());
                let mut read = [0; 3000];
                all.ends[0].data(answered % LAYOUT.tags, 3000).unwrap().get().copy_to(&mut read);
                assert_eq!(read, [!(answered as u8); 3000], "answer {answered}");
                answered += 1;
            }
            polls += 1;
            if polls.is_multiple_of(37) {
                for socket in &kill {
                    let _ = socket.shutdown(std::net::Shutdown::Both);
                }
                for end in &mut all.ends {
                    end.ring();
                    let _ = end.rest();
                }
                if answered < count && all.sessions[0].status().lost_for.is_some() {
                    kill = all.reconnect(at_once);
                }
            }
        }
        assert!(all.ends.iter().all(|end| !end.is_closed()));
    }
}
