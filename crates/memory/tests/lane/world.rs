//! Both sides, and what each operation has come to.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use rackbus_memory::exchange::lane::CarriedLane;
use rackbus_memory::exchange::session::{SessionSide, SessionTiming};
use rackbus_memory::exchange::{ExchangeLayout, MESSAGE_BYTES};
use rackbus_memory::{Carried, CarriedSession, Carrier, Exchange, InheritedEnd, Stream};
use rackbus_seeds::Random;

use crate::network::{Between, Closing, Cut, PROOF, SimulatedLane, SimulatedTarget};

const LAYOUT: ExchangeLayout = ExchangeLayout { tags: 4, data_bytes: 16 << 10 };
const OPERATIONS: u32 = 80;
const LENGTHS: [usize; 4] = [512, 4096, 5000, 16 << 10];

/// An operation: what it writes or reads is its number, in each byte.
#[derive(Debug, Clone, Copy)]
struct Operation {
    write: bool,
    tag: u32,
    length: usize,
}

/// What a run came across.
#[derive(Debug, Default)]
pub struct Reached {
    pub moved: u64,
    pub lost: u64,
    pub fell_back: u64,
    pub late: u64,
    pub resumed: u64,
    pub revoked: u64,
    /// How often a side went on in another process.
    pub moved_on: u64,
}

pub struct World {
    random: Random,
    traced: bool,
    between: Arc<Mutex<Between>>,
    asks: Exchange,
    answers: Exchange,
    sessions: [CarriedSession; 2],
    sockets: [UnixStream; 2],
    /// Bytes that a socket takes at once.
    at_once: usize,
    free: Vec<u32>,
    asked: BTreeMap<u32, Operation>,
    next: u32,
    /// What the side that answers has heard and not done, in any order.
    heard: Vec<u32>,
    done: Vec<u32>,
    answered: u32,
    proves: bool,
    /// A connection is there that does not carry the session yet.
    joining: bool,
}

fn sockets() -> ([UnixStream; 2], [UnixStream; 2]) {
    let (one, other) = UnixStream::pair().unwrap();
    one.set_nonblocking(true).unwrap();
    other.set_nonblocking(true).unwrap();
    let copies = [one.try_clone().unwrap(), other.try_clone().unwrap()];
    ([one, other], copies)
}

impl World {
    pub fn new(seed: u64, closing: Closing, traced: bool) -> World {
        let mut random = Random(seed);
        let at_once = [700, 9_000, 1 << 20][random.below(3)];
        let between = Between::new(closing, 1 + random.below(5));
        // Now and then the lane leads elsewhere.
        let proves = !random.chance(5);
        let proof = if proves { PROOF } else { [7; PROOF.len()] };
        let ([one, other], sockets) = sockets();
        let sides = [SessionSide::Asks, SessionSide::Answers];
        let sessions = sides.map(|side| {
            let timing = SessionTiming { retry: (0, 0), ..SessionTiming::asking(600_000) };
            CarriedSession::new("peer", side, timing, Box::new(drop)).unwrap()
        });
        let end = |socket, side, session: &CarriedSession, lane| {
            let carrier: Box<dyn Carrier> = Box::new(Cut(socket, at_once));
            let carried = Carried { carrier, session: session.clone(), side, lane: Some(lane) };
            Exchange::carried("exchange", carried, LAYOUT).unwrap()
        };
        let target = CarriedLane::Answers(Arc::new(SimulatedTarget(between.clone(), proof)));
        let answers = end(other, sides[1], &sessions[1], target);
        let lane = CarriedLane::Asks(Box::new(SimulatedLane(between.clone())), PROOF);
        let asks = end(one, sides[0], &sessions[0], lane);
        World {
            random,
            traced,
            between,
            asks,
            answers,
            sessions,
            sockets,
            at_once,
            free: (0..LAYOUT.tags).collect(),
            asked: BTreeMap::new(),
            next: 1,
            heard: Vec::new(),
            done: Vec::new(),
            answered: 0,
            proves,
            joining: false,
        }
    }

    pub fn run(mut self) -> Result<Reached, String> {
        let mut reached = Reached::default();
        let (fails, cuts, revokes) =
            (self.random.chance(75), self.random.chance(50), self.random.chance(40));
        let restarts = self.random.chance(50);
        for _ in 0..40_000 {
            match self.random.below(100) {
                0..20 => self.ask(),
                20..40 => self.hear()?,
                40..55 => self.do_one()?,
                55..75 => self.receive()?,
                75..95 => self.between.lock().unwrap().step(&mut self.random),
                95 if fails && self.random.chance(10) => {
                    self.trace("the lane fails");
                    self.between.lock().unwrap().failed = true;
                }
                96 if cuts && self.random.chance(20) => self.cut(),
                98 if restarts && self.random.chance(10) => {
                    self.go_on_elsewhere();
                    reached.moved_on += 1;
                }
                97 if revokes && self.random.chance(2) => {
                    self.trace("revoked");
                    self.sessions[1].shut_down();
                    if self.between.lock().unwrap().is_reachable() {
                        return Err("memory is exposed after the session has ended".to_owned());
                    }
                    reached.revoked = 1;
                    break;
                }
                _ => self.ring(),
            }
            self.reconnect();
            if self.answered == OPERATIONS {
                break;
            }
        }
        if reached.revoked == 0 && self.answered < OPERATIONS {
            let left = OPERATIONS - self.answered;
            let ends = self.sessions.each_ref().map(CarriedSession::end_reason);
            return Err(format!("{left} operations were never answered: {ends:?}"));
        }
        let status = self.sessions[0].lane().ok_or("there was no lane")?;
        if !self.proves && status.moved > 0 {
            return Err("data moved by a lane that leads elsewhere".to_owned());
        }
        let between = self.between.lock().unwrap();
        reached.moved = status.moved;
        reached.fell_back = status.fell_back;
        reached.lost = between.closed;
        reached.late = between.late;
        reached.resumed = self.sessions[0].status().reconnects;
        Ok(reached)
    }

    fn trace(&self, what: &str) {
        if self.traced {
            println!("{what}");
        }
    }

    fn ask(&mut self) {
        if self.next > OPERATIONS || self.free.is_empty() {
            return;
        }
        let tag = self.free.swap_remove(self.random.below(self.free.len()));
        let length = LENGTHS[self.random.below(LENGTHS.len())];
        let operation = Operation { write: self.random.chance(50), tag, length };
        let number = self.next;
        self.next += 1;
        self.trace(&format!("{number} asks: {operation:?}"));
        let data = operation.write.then_some((tag, length));
        self.asks.data(tag, length).unwrap().get().fill(if operation.write {
            number as u8
        } else {
            0
        });
        self.asks.send(&number.to_le_bytes(), data).unwrap();
        self.asked.insert(number, operation);
        self.asks.ring();
    }

    fn hear(&mut self) -> Result<(), String> {
        let mut message = [0; MESSAGE_BYTES];
        while let Some(length) = self.answers.receive(&mut message) {
            let number = number(&message[..length])?;
            self.trace(&format!("{number} is heard"));
            if self.heard.contains(&number) || self.done.contains(&number) {
                return Err(format!("{number} is heard twice"));
            }
            self.heard.push(number);
        }
        Ok(())
    }

    /// Does one of the operations that were heard, and answers.
    fn do_one(&mut self) -> Result<(), String> {
        if self.heard.is_empty() {
            return Ok(());
        }
        let number = self.heard.swap_remove(self.random.below(self.heard.len()));
        let Operation { write, tag, length } = self.asked[&number];
        let place = self.answers.data(tag, length).unwrap();
        if write {
            let mut bytes = vec![0; length];
            place.get().copy_to(&mut bytes);
            if let Some(other) = bytes.iter().find(|byte| **byte != number as u8) {
                return Err(format!("{number} is done with other data: those of {other}"));
            }
        } else {
            place.get().fill(number as u8);
        }
        self.trace(&format!("{number} is done"));
        self.done.push(number);
        let data = (!write).then_some((tag, length));
        if self.answers.send(&number.to_le_bytes(), data).is_err() {
            return Err("there is no room for an answer".to_owned());
        }
        self.answers.ring();
        Ok(())
    }

    fn receive(&mut self) -> Result<(), String> {
        let mut message = [0; MESSAGE_BYTES];
        while let Some(length) = self.asks.receive(&mut message) {
            let number = number(&message[..length])?;
            self.trace(&format!("{number} is answered"));
            let operation = self.asked.remove(&number);
            let Operation { write, tag, length } =
                operation.ok_or_else(|| format!("{number} is answered twice"))?;
            let mut bytes = vec![0; length];
            self.asks.data(tag, length).unwrap().get().copy_to(&mut bytes);
            if !write && bytes.iter().any(|byte| *byte != number as u8) {
                return Err(format!("{number} is answered with other data"));
            }
            self.free.push(tag);
            self.answered += 1;
        }
        Ok(())
    }

    fn cut(&mut self) {
        if self.sessions[0].status().lost_for.is_some() {
            return;
        }
        self.trace("the connection is cut");
        for socket in &self.sockets {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
        let _ = self.asks.rest();
        let _ = self.answers.rest();
    }

    /// A side's process is replaced by another one, which goes on with what was written down.
    fn go_on_elsewhere(&mut self) {
        let side = self.random.below(2);
        self.trace(&format!("{side} goes on in another process"));
        let (end, which) = match side {
            0 => (&mut self.asks, SessionSide::Asks),
            _ => (&mut self.answers, SessionSide::Answers),
        };
        let files = end.pass_on().unwrap();
        let state = self.sessions[side].save();
        let session = CarriedSession::resume("peer", &state, Box::new(drop)).unwrap();
        let inherited = InheritedEnd { files, session: Some(session.clone()) };
        *end = Exchange::again(which, inherited, LAYOUT).unwrap();
        self.sessions[side] = session;
        self.joining = false;
        for socket in &self.sockets {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
        let _ = self.asks.rest();
        let _ = self.answers.rest();
    }

    fn ring(&mut self) {
        self.asks.ring();
        self.answers.ring();
    }

    fn reconnect(&mut self) {
        self.joining &= self.sessions[0].status().lost_for.is_some();
        if self.joining || self.sessions[0].status().lost_for.is_none() {
            return;
        }
        let _ = self.answers.rest();
        let Some(number) = self.sessions[0].wait_wanted() else { return };
        let ([one, other], copies) = sockets();
        (self.sockets, self.joining) = (copies, true);
        for (session, socket) in self.sessions.iter().zip([one, other]) {
            session.connected(number, Box::new(Cut(socket, self.at_once)));
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.between.lock().unwrap().end();
    }
}

fn number(message: &[u8]) -> Result<u32, String> {
    let bytes = message.try_into().map_err(|_| "a message of another length".to_owned())?;
    Ok(u32::from_le_bytes(bytes))
}
