//! Whole exchanges whose data move by libfabric, under load: the lane is lost, or the session is ended, with transfers
//! under way. Without libfabric these tests say so and pass, unless `RACKBUS_LIBFABRIC` names one.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rackbus_memory::exchange::lane::{CarriedLane, LaneTarget};
use rackbus_memory::exchange::session::{SessionSide, SessionTiming};
use rackbus_memory::exchange::{ExchangeLayout, MESSAGE_BYTES};
use rackbus_memory::{Carried, CarriedSession, Carrier, Exchange, Stream, StreamError};
use rackbus_rma::{Initiator, LIBRARY_ENV, Library, RmaTarget};

const LAYOUT: ExchangeLayout = ExchangeLayout { tags: 16, data_bytes: 64 << 10 };
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Socket(UnixStream);

fn outcome(result: std::io::Result<usize>) -> Result<usize, StreamError> {
    match result {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        other => other.map_err(|_| StreamError::Closed),
    }
}

impl Carrier for Socket {
    fn send(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        outcome(self.0.write(bytes))
    }

    fn flush(&mut self) -> Result<bool, StreamError> {
        Ok(true)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, StreamError> {
        match self.0.read(buffer) {
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

struct Both {
    asks: Exchange,
    answers: Exchange,
    sessions: [CarriedSession; 2],
    target: Arc<RmaTarget>,
}

fn both(provider: &str) -> Both {
    let local = Some([127, 0, 0, 1].into());
    let (one, other) = UnixStream::pair().unwrap();
    let end = |socket: UnixStream, side, lane| {
        socket.set_nonblocking(true).unwrap();
        let timing = SessionTiming::asking(20_000);
        let session = CarriedSession::new("peer", side, timing, Box::new(drop)).unwrap();
        let carrier: Box<dyn Carrier> = Box::new(Socket(socket));
        let carried = Carried { carrier, session: session.clone(), side, lane: Some(lane) };
        (Exchange::carried("exchange", carried, LAYOUT).unwrap(), session)
    };
    let target = Arc::new(RmaTarget::open(provider, local).unwrap());
    let exposed = CarriedLane::Answers(target.clone());
    let (answers, lender) = end(other, SessionSide::Answers, exposed);
    let lane = Initiator::open(&target.offer().unwrap(), local).unwrap();
    let proof = lane.proof();
    let (asks, borrower) = end(one, SessionSide::Asks, CarriedLane::Asks(Box::new(lane), proof));
    Both { asks, answers, sessions: [borrower, lender], target }
}

/// Answers questions until the exchange ends: a write must have brought its number in each byte, a read is given that.
fn answer(mut answers: Exchange) -> u32 {
    let mut message = [0; MESSAGE_BYTES];
    let mut done = 0;
    while !answers.is_closed() {
        while let Some(length) = answers.receive(&mut message) {
            let [tag, write, number] = *message.first_chunk().unwrap();
            let place = answers.data(tag.into(), LAYOUT.data_bytes).unwrap();
            let mut bytes = vec![0; LAYOUT.data_bytes];
            if write == 1 {
                place.get().copy_to(&mut bytes);
                assert!(bytes.iter().all(|it| *it == number), "other data than were written");
            } else {
                place.get().fill(number);
            }
            done += 1;
            let data = (write == 0).then_some((tag.into(), LAYOUT.data_bytes));
            if answers.send(&message[..length], data).is_err() {
                return done;
            }
        }
        answers.ring();
        std::thread::yield_now();
    }
    done
}

/// Keeps all tags busy until `count` were answered or the exchange ends; how many were. `midway` is called once, after
/// half of them.
fn ask(asks: &mut Exchange, count: u32, midway: impl FnOnce()) -> u32 {
    let mut free: Vec<u8> = (0..LAYOUT.tags as u8).collect();
    let (mut asked, mut answered, mut midway) = (0u32, 0u32, Some(midway));
    let mut message = [0; MESSAGE_BYTES];
    let begun = Instant::now();
    while answered < count && !asks.is_closed() {
        while asked < count
            && let Some(tag) = free.pop()
        {
            let (write, number) = ((asked % 2) as u8, asked as u8);
            let place = asks.data(tag.into(), LAYOUT.data_bytes).unwrap();
            place.get().fill(if write == 1 { number } else { !number });
            let data = (write == 1).then_some((tag.into(), LAYOUT.data_bytes));
            asks.send(&[tag, write, number], data).unwrap();
            asked += 1;
        }
        asks.ring();
        while let Some(length) = asks.receive(&mut message) {
            let [tag, write, number] = *message.first_chunk().unwrap();
            assert_eq!(length, 3);
            if write == 0 {
                let mut bytes = vec![0; LAYOUT.data_bytes];
                asks.data(tag.into(), LAYOUT.data_bytes).unwrap().get().copy_to(&mut bytes);
                assert!(bytes.iter().all(|it| *it == number), "other data than were read");
            }
            assert!(!free.contains(&tag), "an answer twice");
            free.push(tag);
            answered += 1;
        }
        if answered > 200.min(count / 2)
            && let Some(midway) = midway.take()
        {
            midway();
        }
        assert!(begun.elapsed() < LIMIT, "{answered} of {count} were answered");
        std::thread::yield_now();
    }
    answered
}

fn is_here() -> bool {
    match Library::load() {
        Ok(_) => true,
        Err(error) if std::env::var_os(LIBRARY_ENV).is_some() => panic!("{error}"),
        Err(error) => {
            println!("left out: {error}");
            false
        }
    }
}

/// Waits until the lane is up: both ends are driven.
fn wait_up(both: &mut Both) {
    let begun = Instant::now();
    let mut message = [0; MESSAGE_BYTES];
    while !both.sessions.iter().all(|it| it.lane().is_some_and(|lane| lane.up)) {
        assert!(both.asks.receive(&mut message).is_none());
        assert!(both.answers.receive(&mut message).is_none());
        assert!(begun.elapsed() < LIMIT, "{:?}", both.sessions[0].lane());
    }
}

#[test]
fn a_lane_that_is_lost_under_load_costs_no_operation() {
    if !is_here() {
        return;
    }
    let mut both = both("tcp");
    wait_up(&mut both);
    let Both { mut asks, answers, sessions, target } = both;
    let answering = std::thread::spawn(move || answer(answers));
    let count = 400;
    // The lender's adapter fails, as far as the borrower sees that.
    assert_eq!(ask(&mut asks, count, || assert!(target.close())), count);
    let lane = sessions[0].lane().unwrap();
    assert!(lane.lost.is_some() && lane.moved > 100 && lane.fell_back > 0, "{lane:?}");
    asks.close();
    assert_eq!(answering.join().unwrap(), count);
}

#[test]
fn memory_is_not_exposed_after_the_session_was_ended_from_another_thread() {
    if !is_here() {
        return;
    }
    let mut both = both("tcp");
    wait_up(&mut both);
    let Both { mut asks, answers, sessions, target } = both;
    let over = Arc::new(AtomicBool::new(false));
    let revoking = {
        let (session, target, over) = (sessions[1].clone(), target.clone(), over.clone());
        std::thread::spawn(move || {
            while !over.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            session.shut_down();
            assert!(target.offer().is_none(), "its memory is exposed");
        })
    };
    let answering = std::thread::spawn(move || answer(answers));
    // It is revoked with transfers under way: the rest is never answered.
    let answered = ask(&mut asks, 10_000, || over.store(true, Ordering::Release));
    assert!(answered < 10_000);
    revoking.join().unwrap();
    asks.close();
    answering.join().unwrap();
}
