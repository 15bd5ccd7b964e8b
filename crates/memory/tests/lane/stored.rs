//! Ends of exchanges and their sessions in files, as this version writes them: another process continues from each.
//!
//! An end of another version is refused. A session has the version of the state that it is part of.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use rackbus_memory::exchange::lane::CarriedLane;
use rackbus_memory::exchange::session::{SessionSide, SessionTiming};
use rackbus_memory::exchange::{CarriedSessionState, ExchangeLayout, MESSAGE_BYTES, STATE_VERSION};
use rackbus_memory::{Carried, CarriedSession, Exchange, InheritedEnd};
use rackbus_seeds::Random;
use rackbus_seeds::stored::StoredStates;
use serde_json::Value;

use crate::network::{Between, Closing, Cut, PROOF, SimulatedLane, SimulatedTarget};

const LAYOUT: ExchangeLayout = ExchangeLayout { tags: 4, data_bytes: 16 << 10 };
const LENGTH: usize = 4096;
const SIDES: [SessionSide; 2] = [SessionSide::Asks, SessionSide::Answers];
const ASKS: usize = 0;
const ANSWERS: usize = 1;

fn stored(name: &'static str) -> StoredStates {
    StoredStates::new(
        concat!(env!("CARGO_MANIFEST_DIR"), "/tests/lane/stored"),
        name,
        STATE_VERSION,
    )
}

/// Both ends of an exchange, with a lane beside their connection.
struct World {
    between: Arc<Mutex<Between>>,
    ends: [Exchange; 2],
    sessions: [CarriedSession; 2],
    sockets: [UnixStream; 2],
}

fn sockets() -> ([Cut; 2], [UnixStream; 2]) {
    let (one, other) = UnixStream::pair().unwrap();
    let pair = [one, other];
    for socket in &pair {
        socket.set_nonblocking(true).unwrap();
    }
    let copies = pair.each_ref().map(|socket| socket.try_clone().unwrap());
    (pair.map(|socket| Cut(socket, 1 << 20)), copies)
}

impl World {
    fn new() -> World {
        let between = Between::new(Closing::AtOnce, 4);
        let (carriers, sockets) = sockets();
        let sessions = SIDES.map(|side| {
            let timing = SessionTiming { retry: (0, 0), ..SessionTiming::asking(600_000) };
            CarriedSession::new("peer", side, timing, Box::new(drop)).unwrap()
        });
        let lanes = [
            CarriedLane::Asks(Box::new(SimulatedLane(between.clone())), PROOF),
            CarriedLane::Answers(Arc::new(SimulatedTarget(between.clone(), PROOF))),
        ];
        let mut carriers = carriers.into_iter().zip(lanes);
        let ends = [ASKS, ANSWERS].map(|at| {
            let (carrier, lane) = carriers.next().unwrap();
            let (session, side) = (sessions[at].clone(), SIDES[at]);
            let carried = Carried { carrier: Box::new(carrier), session, side, lane: Some(lane) };
            Exchange::carried("exchange", carried, LAYOUT).unwrap()
        });
        World { between, ends, sessions, sockets }
    }

    /// The next message that a side takes, if any comes.
    fn receive(&mut self, side: usize) -> Option<Vec<u8>> {
        let mut message = [0; MESSAGE_BYTES];
        for _ in 0..100 {
            if let Some(length) = self.ends[side].receive(&mut message) {
                return Some(message[..length].to_vec());
            }
            self.ends[1 - side].ring();
        }
        None
    }

    /// A side sends a message, with data that are its byte.
    fn send(&mut self, side: usize, byte: u8, data: Option<u32>) {
        if let Some(tag) = data {
            self.ends[side].data(tag, LENGTH).unwrap().get().fill(byte);
        }
        self.ends[side].send(&[byte; 4], data.map(|tag| (tag, LENGTH))).unwrap();
        self.ends[side].ring();
    }

    fn has_data(&self, side: usize, tag: u32, byte: u8) -> bool {
        let mut bytes = vec![0; LENGTH];
        self.ends[side].data(tag, LENGTH).unwrap().get().copy_to(&mut bytes);
        bytes.iter().all(|it| *it == byte)
    }

    /// Lets what moves by the lane arrive.
    fn step(&self) {
        for _ in 0..4 {
            self.between.lock().unwrap().step(&mut Random(1));
        }
    }

    /// Connects both sides anew.
    fn reconnect(&mut self) {
        for socket in &self.sockets {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
        let number = self.sessions[ASKS].wait_wanted().unwrap();
        let (carriers, copies) = sockets();
        for (session, carrier) in self.sessions.iter().zip(carriers) {
            assert!(session.connected(number, Box::new(carrier)));
        }
        self.sockets = copies;
    }
}

/// One question was answered, the answer to another has come without its data, and a third is under way with its own.
fn working() -> World {
    let mut world = World::new();
    for _ in 0..100 {
        assert!(world.receive(ASKS).is_none() && world.receive(ANSWERS).is_none());
        world.step();
        if world.sessions[ASKS].lane().is_some_and(|lane| lane.up) {
            break;
        }
    }
    assert!(world.sessions[ASKS].lane().unwrap().up, "{:?}", world.sessions[ASKS].lane());
    world.send(ASKS, 1, Some(0));
    assert!(world.receive(ANSWERS).is_none(), "its data are still moving");
    world.step();
    world.ends[ASKS].ring();
    assert!(world.receive(ASKS).is_none());
    assert_eq!(world.receive(ANSWERS), Some(vec![1; 4]));
    world.send(ANSWERS, 1, None);
    assert_eq!(world.receive(ASKS), Some(vec![1; 4]));
    world.send(ASKS, 2, None);
    assert_eq!(world.receive(ANSWERS), Some(vec![2; 4]));
    world.send(ANSWERS, 2, Some(1));
    assert_eq!(world.receive(ASKS), None, "its data are still to move");
    world.send(ASKS, 3, Some(2));
    world
}

/// What an end was written as; `files` are its memory and that.
fn text(files: &[OwnedFd]) -> Vec<u8> {
    let (mut file, mut text) = (File::from(files[1].try_clone().unwrap()), Vec::new());
    file.rewind().unwrap();
    file.read_to_end(&mut text).unwrap();
    text
}

fn put_text(files: &[OwnedFd], text: &str) {
    let mut file = File::from(files[1].try_clone().unwrap());
    file.set_len(0).unwrap();
    file.rewind().unwrap();
    file.write_all(text.as_bytes()).unwrap();
}

/// The session from the file, by the clock of this host.
fn session(saved: &CarriedSessionState) -> CarriedSession {
    let saved = serde_json::to_value(saved).unwrap();
    stored("session").compare(&serde_json::to_vec(&saved).unwrap());
    let mut state: Value = serde_json::from_str(&stored("session").read(STATE_VERSION)).unwrap();
    state["begun_ns"] = saved["begun_ns"].clone();
    state["contact"]["side"] = saved["contact"]["side"].clone();
    let state = serde_json::from_value(state).unwrap();
    CarriedSession::resume("peer", &state, Box::new(drop)).unwrap()
}

#[test]
fn both_ends_continue_from_what_this_version_wrote() {
    let mut world = working();
    for (side, name) in [(ASKS, "asks"), (ANSWERS, "answers")] {
        let files = world.ends[side].pass_on().unwrap();
        // The memory is that of this end, which did the same as the one that was stored.
        stored(name).compare(&text(&files));
        put_text(&files, &stored(name).read(STATE_VERSION));
        let session = session(&world.sessions[side].save());
        let inherited = InheritedEnd { files, session: Some(session.clone()) };
        world.ends[side] = Exchange::again(SIDES[side], inherited, LAYOUT).unwrap();
        world.sessions[side] = session;
    }
    world.reconnect();
    let mut heard = Vec::new();
    let mut answered = Vec::new();
    for _ in 0..10 {
        while let Some(message) = world.receive(ANSWERS) {
            heard.push(message[0]);
            world.send(ANSWERS, message[0], None);
        }
        while let Some(message) = world.receive(ASKS) {
            answered.push(message[0]);
        }
    }
    assert_eq!((heard, answered), (vec![3], vec![2, 3]), "each once");
    assert!(world.has_data(ASKS, 1, 2), "the data of an answer are lost");
    assert!(world.has_data(ANSWERS, 2, 3), "the data of a question are lost");
}

#[test]
fn an_end_of_another_version_is_refused_whatever_else_it_says() {
    let mut world = working();
    let files = world.ends[ASKS].pass_on().unwrap();
    let text = stored("asks").read(STATE_VERSION);
    let mut state: Value = serde_json::from_str(&text).unwrap();
    state["version"] = 99.into();
    state["more"] = true.into();
    put_text(&files, &state.to_string());
    let session = CarriedSession::resume("peer", &world.sessions[ASKS].save(), Box::new(drop));
    let inherited = InheritedEnd { files, session: Some(session.unwrap()) };
    let refused = Exchange::again(SessionSide::Asks, inherited, LAYOUT).unwrap_err().to_string();
    let expected =
        format!("the state of an exchange has version 99, this program knows {STATE_VERSION}");
    assert!(refused.contains(&expected), "{refused}");
}
