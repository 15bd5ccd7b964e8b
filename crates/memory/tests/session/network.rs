//! The network: connections with frames on their way, and attempts to make them.

use std::collections::VecDeque;

use rackbus_seeds::Random;

use crate::model::{Answer, Ask};

/// Real time in milliseconds.
pub type Time = u64;

/// For how long a kernel leaves what was sent unacknowledged.
const UNACKNOWLEDGED: Time = 750;

#[derive(Debug, Clone, Copy)]
pub enum Message {
    Ask(Ask),
    Answer(Answer),
}

/// A frame, with the number of messages that its sender has received.
#[derive(Debug, Clone, Copy)]
pub enum Frame {
    Resume(u64),
    Beat { seen: u64, number: u32, echo: u32 },
    Message(u64, Message),
}

#[derive(Debug)]
struct OnItsWay {
    sent: Time,
    arrives: Time,
    frame: Frame,
}

/// A connection; its sides are 0, which asks, and 1.
#[derive(Debug)]
pub struct Connection {
    pub number: u64,
    /// Frames to each side.
    queues: [VecDeque<OnItsWay>; 2],
    /// When each side learns that it is broken.
    broken: [Option<Time>; 2],
}

/// An attempt to connect that is on its way.
#[derive(Debug)]
pub struct Attempt {
    pub number: u64,
    /// When it is at the side that answers, and when that one's welcome is back.
    pub arrives: Time,
    pub back: Time,
    /// The place of its connection, once it arrived.
    pub connection: Option<usize>,
    pub refused: bool,
}

#[derive(Debug)]
pub struct Network {
    pub connections: Vec<Connection>,
    pub attempts: Vec<Attempt>,
    /// Until when nothing arrives at each side.
    blocked: [Time; 2],
    random: Random,
}

impl Network {
    pub fn new(random: Random) -> Network {
        let (connections, attempts) = Default::default();
        let mut network = Network { connections, attempts, blocked: [0; 2], random };
        network.connect(0);
        network
    }

    /// A new connection; its place.
    pub fn connect(&mut self, number: u64) -> usize {
        let (queues, broken) = Default::default();
        self.connections.push(Connection { number, queues, broken });
        self.connections.len() - 1
    }

    /// Something happens to it.
    pub fn trouble(&mut self, now: Time) {
        let long = [50, 500, 3_000][self.random.below(3)];
        let until = now + 1 + self.random.below(long) as Time;
        match self.random.below(5) {
            0 => self.blocked = [until; 2],
            1 => self.blocked[self.random.below(2)] = until,
            // A link that flaps: all connections are reset, and each side hears of it when it does.
            _ => {
                for at in 0..self.connections.len() {
                    let heard = [0, 1].map(|_| now + self.random.below(200) as Time);
                    self.break_at(at, heard);
                }
            }
        }
    }

    /// Nothing passes any more, ever.
    pub fn cut(&mut self, side: Option<usize>) {
        match side {
            Some(side) => self.blocked[side] = Time::MAX,
            None => self.blocked = [Time::MAX; 2],
        }
    }

    /// All passes from now on.
    pub fn heal(&mut self) {
        self.blocked = [0; 2];
    }

    fn break_at(&mut self, at: usize, heard: [Time; 2]) {
        let connection = &mut self.connections[at];
        for (side, heard) in heard.into_iter().enumerate() {
            connection.broken[side].get_or_insert(heard);
            // What is on its way is lost, from some frame on.
            let kept = self.random.below(connection.queues[side].len() + 1);
            connection.queues[side].truncate(kept);
        }
    }

    /// One side closes it.
    pub fn close(&mut self, at: usize, now: Time) {
        let heard = now + self.random.below(100) as Time;
        self.break_at(at, [heard; 2]);
    }

    pub fn send(&mut self, at: usize, to: usize, now: Time, frame: Frame) {
        let most = if self.random.chance(5) { 300 } else { 15 };
        let delay = self.random.below(most) as Time;
        let connection = &mut self.connections[at];
        if connection.broken[1 - to].is_none() && connection.broken[to].is_none() {
            let queue = &mut connection.queues[to];
            let before = queue.back().map_or(0, |last| last.arrives);
            queue.push_back(OnItsWay { sent: now, arrives: before.max(now + delay), frame });
        }
    }

    /// The next frame that has arrived at a side.
    pub fn receive(&mut self, at: usize, side: usize, now: Time) -> Option<Frame> {
        if now < self.blocked[side] {
            return None;
        }
        let queue = &mut self.connections[at].queues[side];
        queue.pop_front_if(|first| first.arrives <= now).map(|first| first.frame)
    }

    /// Whether a side knows by now that the connection is broken.
    pub fn is_broken(&mut self, at: usize, side: usize, now: Time) -> bool {
        // Its acknowledgements do not come, or what it sent does not arrive.
        let late = |it: &OnItsWay| now.saturating_sub(it.sent.max(it.arrives)) > UNACKNOWLEDGED;
        let unanswered = self.connections[at].queues[1 - side].front().is_some_and(late);
        let blocked = now < self.blocked[side] || now < self.blocked[1 - side];
        if unanswered && blocked {
            self.connections[at].broken[side].get_or_insert(now);
        }
        self.connections[at].broken[side].is_some_and(|heard| heard <= now)
    }

    /// Somebody begins to connect.
    pub fn attempt(&mut self, number: u64, now: Time) {
        let slow = if self.random.chance(10) { 4_000 } else { 30 };
        let arrives = now + 1 + self.random.below(slow) as Time;
        let back = arrives + 1 + self.random.below(slow) as Time;
        let (connection, refused) = (None, false);
        self.attempts.push(Attempt { number, arrives, back, connection, refused });
    }

    /// Whether anything arrives at a side.
    pub fn passes(&self, side: usize, now: Time) -> bool {
        now >= self.blocked[side]
    }
}
