//! Both sides of a session, and the schedule.

use rackbus_memory::exchange::session::{
    Contact, FrameOutbox, SessionEndReason, SessionSide, SessionTiming,
};
use rackbus_seeds::Random;

use crate::model::{Answer, Ask, Model, Policy};
use crate::network::{Frame, Message, Network, Time};

/// How long the side that asks waits for a connection, by its own clock.
const CONNECT_LIMIT: Time = 1_000;
/// How long the side that asks goes on trying.
const HOLD: Time = 20_000;

/// One side, as its end of the exchange has it.
struct OneEnd {
    contact: Contact,
    outbox: FrameOutbox<Message>,
    received: u64,
    /// The connection that it uses, by its place, and whether the other side has said what it has.
    current: Option<usize>,
    joined: bool,
    /// A connection that it has not taken yet.
    arrived: Option<usize>,
    heard: bool,
    beat_at: Time,
    beat_heard: u32,
    /// Thousandths by which its clock is fast.
    rate: u64,
    /// Until when its process stalls.
    stopped: Time,
    over_at: Option<Time>,
    /// How often it went on in another process.
    moved: u64,
}

impl OneEnd {
    fn new(side: SessionSide, timing: SessionTiming, rate: u64, room: usize) -> OneEnd {
        OneEnd {
            contact: Contact::new(side, timing),
            outbox: FrameOutbox::new(room),
            received: 0,
            current: Some(0),
            joined: false,
            arrived: None,
            heard: false,
            beat_at: 0,
            beat_heard: 0,
            rate,
            stopped: 0,
            over_at: None,
            moved: 0,
        }
    }

    /// Another process goes on with it: with what was written down, and no connection. Its first signs of life may have the
    /// numbers of earlier ones, and nothing is known of when those were given.
    fn go_on(&mut self, clock: Time, room: usize) -> Result<(), String> {
        let written = (self.contact.save(clock), self.outbox.save(|message| *message));
        self.contact = Contact::resume(&written.0, clock);
        self.outbox = FrameOutbox::again(room, written.1).map_err(|_| "its counts are wrong")?;
        (self.current, self.joined, self.arrived) = (None, false, None);
        (self.heard, self.beat_at) = (false, 0);
        self.moved += 1;
        Ok(())
    }

    fn clock(&self, now: Time) -> Time {
        now * self.rate / 1000
    }

    fn number(&self, network: &Network) -> Option<u64> {
        self.current.map(|at| network.connections[at].number)
    }
}

/// What a schedule came to.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reached {
    /// How often the session was resumed.
    pub resumed: u64,
    /// Messages that each side sent again.
    pub repeated: [u64; 2],
    pub answered: u64,
    /// How often each side went on in another process.
    pub moved: [u64; 2],
}

pub struct World {
    now: Time,
    random: Random,
    policy: Policy,
    traced: bool,
    network: Network,
    ends: [OneEnd; 2],
    model: Model,
    /// What the drive does, and until when.
    doing: Vec<(Time, Ask)>,
    /// Asks that were answered, in the order in which they came, for a policy that looks at these.
    in_order: Vec<(u64, bool)>,
    crashed: bool,
}

impl World {
    pub fn new(seed: u64, policy: Policy, traced: bool) -> World {
        let mut random = Random(seed);
        let mut rate = || 970 + random.below(61) as u64;
        let rates = [rate(), rate()];
        let network = Network::new(random.fork());
        let ends = [
            OneEnd::new(SessionSide::Asks, SessionTiming::asking(HOLD), rates[0], policy.room()),
            OneEnd::new(
                SessionSide::Answers,
                SessionTiming::answering(HOLD),
                rates[1],
                policy.room(),
            ),
        ];
        let (model, doing, in_order, crashed) = Default::default();
        World { now: 0, random, policy, traced, network, ends, model, doing, in_order, crashed }
    }

    /// A time of trouble, and then a network that is whole again, or is cut for ever.
    pub fn run(mut self) -> Result<Reached, String> {
        let troubles = self.random.below(10_000) as Time;
        self.network_send(0, Frame::Resume(0));
        while self.now < troubles {
            self.step(40)?;
            match self.random.below(100) {
                0..=5 => self.network.trouble(self.now),
                6 => {
                    let long = [300, 5_000][self.random.below(2)];
                    let side = self.random.below(2);
                    self.ends[side].stopped = self.now + self.random.below(long) as Time;
                }
                7 if self.random.chance(10) => self.crash(),
                8..=9 => self.go_on_elsewhere()?,
                _ => {}
            }
        }
        let fate = self.random.below(4);
        match fate {
            0 => self.network.cut(None),
            1 => self.network.cut(Some(self.random.below(2))),
            _ => self.network.heal(),
        }
        self.trace(&format!("the end begins: fate {fate}"));
        // Both clocks, both times: the longest that a side may wait.
        let limit = self.now + 5_000 + 3 * HOLD;
        let healed = self.now + 1_000;
        while self.now < limit {
            self.step(200)?;
            let goes_on =
                self.ends[0].over_at.is_none() && self.ends[0].contact.lost_for(0).is_none();
            if fate > 1 && self.now > healed && goes_on && self.model.open().is_none() {
                return Ok(self.reached());
            }
            if self.ends.iter().all(|end| end.over_at.is_some()) {
                break;
            }
        }
        self.check_end(fate)
    }

    fn check_end(&self, fate: usize) -> Result<Reached, String> {
        let [asks, answers] = [0, 1].map(|side| self.ends[side].over_at);
        let Some(asks) = asks else {
            let said = match self.model.open() {
                Some(ask) => format!("{ask:?} was never answered"),
                None => "the session has no end".to_owned(),
            };
            return Err(format!("{said} (fate {fate})"));
        };
        let silent = matches!(self.ends[1].contact.end(), Some(SessionEndReason::Silent(_)));
        match answers {
            Some(answers) if silent && answers < asks && !self.crashed => {
                Err(format!("it is over at its lender at {answers}, at its borrower at {asks}"))
            }
            None if !self.crashed => Err("the session has no end at its lender".to_owned()),
            _ => Ok(self.reached()),
        }
    }

    fn reached(&self) -> Reached {
        let (resumed, repeated, _) = self.ends[0].contact.counts();
        let lender = self.ends[1].contact.counts().1;
        let answered = self.model.answered;
        let moved = [self.ends[0].moved, self.ends[1].moved];
        Reached { resumed, repeated: [repeated, lender], answered, moved }
    }

    fn step(&mut self, most: usize) -> Result<(), String> {
        self.now += 1 + self.random.below(most) as Time;
        self.connect();
        for side in [0, 1] {
            if self.now >= self.ends[side].stopped {
                self.turn(side)?;
            }
            let end = &mut self.ends[side];
            if end.contact.end().is_some() && end.over_at.is_none() {
                end.over_at = Some(self.now);
                let said = format!("over at {side}: {:?}", end.contact.end());
                self.trace(&said);
            }
        }
        Ok(())
    }

    fn trace(&self, what: &str) {
        if self.traced {
            println!("{:>6} {what}", self.now);
        }
    }

    /// The lender's process dies, and another one is there at once.
    fn crash(&mut self) {
        self.trace("the lender restarts");
        self.model.crash();
        self.doing.clear();
        self.in_order.clear();
        for at in 0..self.network.connections.len() {
            self.network.close(at, self.now);
        }
        let rate = self.ends[1].rate;
        let timing = SessionTiming::answering(HOLD);
        self.ends[1] = OneEnd::new(SessionSide::Answers, timing, rate, self.policy.room());
        self.ends[1].current = None;
        self.crashed = true;
    }

    /// A side's process is replaced by another one, which goes on; what the drive was doing is done again by it.
    fn go_on_elsewhere(&mut self) -> Result<(), String> {
        let side = self.random.below(2);
        if self.now < self.ends[side].stopped {
            return Ok(());
        }
        self.trace(&format!("{side} goes on in another process"));
        if let Some(at) = self.ends[side].current {
            self.network.close(at, self.now);
        }
        if let Some(at) = self.ends[side].arrived {
            self.network.close(at, self.now);
        }
        let clock = self.ends[side].clock(self.now);
        self.ends[side].go_on(clock, self.policy.room())?;
        if side == 1 {
            for (until, _) in &mut self.doing {
                *until = self.now + self.random.below(50) as Time;
            }
            if self.policy == Policy::ForgetTaken {
                self.doing.clear();
            }
        }
        if self.policy == Policy::KeepNothingSent && side == 0 {
            let end = &mut self.ends[0];
            end.outbox = FrameOutbox::new(self.policy.room());
        }
        self.ends[side].stopped = self.now + self.random.below(200) as Time;
        Ok(())
    }

    /// Attempts to connect continue.
    fn connect(&mut self) {
        let now = self.now;
        let clock = self.ends[0].clock(now);
        if now >= self.ends[0].stopped {
            self.ends[0].contact.expire(clock);
            if let Some(number) = self.ends[0].contact.attempt(clock) {
                self.trace(&format!("attempt {number}"));
                self.network.attempt(number, now);
            }
        }
        if now >= self.ends[1].stopped {
            let clock = self.ends[1].clock(now);
            self.ends[1].contact.expire(clock);
        }
        for mut attempt in std::mem::take(&mut self.network.attempts) {
            let arrives = now >= attempt.arrives && self.network.passes(1, now);
            if attempt.connection.is_none() && !attempt.refused && arrives {
                self.arrive(&mut attempt);
            }
            let back = now >= attempt.back && self.network.passes(0, now);
            let done = attempt.connection.is_some() || attempt.refused;
            let late = now > attempt.back.max(attempt.arrives) + CONNECT_LIMIT;
            if now < self.ends[0].stopped {
                self.network.attempts.push(attempt);
            } else if back && done {
                self.welcome(&attempt);
            } else if late {
                // What is still on its way arrives anyway.
                self.ends[0].contact.failed(attempt.number, clock);
                if !done {
                    attempt.back = Time::MAX - CONNECT_LIMIT;
                    self.network.attempts.push(attempt);
                }
            } else {
                self.network.attempts.push(attempt);
            }
        }
    }

    fn arrive(&mut self, attempt: &mut crate::network::Attempt) {
        let clock = self.ends[1].clock(self.now);
        let lender = &mut self.ends[1];
        let restarted = self.crashed && self.policy != Policy::ResumeRestarted;
        if restarted || lender.contact.end().is_some() {
            attempt.refused = true;
        } else if lender.contact.connected(attempt.number, clock) {
            let at = self.network.connect(attempt.number);
            (attempt.connection, self.ends[1].arrived) = (Some(at), Some(at));
        } else {
            // It is of no more use; who made it has given it up, or is another process by now.
            attempt.arrives = Time::MAX - CONNECT_LIMIT;
        }
    }

    fn welcome(&mut self, attempt: &crate::network::Attempt) {
        let clock = self.ends[0].clock(self.now);
        let contact = &mut self.ends[0].contact;
        match attempt.connection {
            Some(at) if contact.connected(attempt.number, clock) => {
                self.ends[0].arrived = Some(at);
            }
            Some(at) => self.network.close(at, self.now),
            None => contact.finish(SessionEndReason::Refused("it is another life".to_owned())),
        }
    }

    fn network_send(&mut self, from: usize, frame: Frame) {
        if let Some(at) = self.ends[from].current {
            self.network.send(at, 1 - from, self.now, frame);
        }
    }

    /// How much a side says that it has received.
    fn seen(&self, side: usize) -> u64 {
        let answered = self.in_order.iter().take_while(|(_, answered)| *answered).count() as u64;
        match self.policy {
            Policy::RepeatUnanswered if side == 1 => answered,
            _ => self.ends[side].received,
        }
    }

    /// An end has its turn, as an engine gives it.
    fn turn(&mut self, side: usize) -> Result<(), String> {
        let clock = self.ends[side].clock(self.now);
        if let Some(at) = self.ends[side].arrived.take() {
            if let Some(before) = self.ends[side].current.replace(at) {
                self.network.close(before, self.now);
            }
            self.ends[side].joined = false;
            if side == 0 {
                let seen = self.seen(0);
                self.network_send(0, Frame::Resume(seen));
            }
        }
        self.look(side, clock);
        if self.ends[side].contact.end().is_some() {
            if let Some(at) = self.ends[side].current.take() {
                self.network.close(at, self.now);
            }
            return Ok(());
        }
        while let Some(at) = self.ends[side].current {
            let Some(frame) = self.network.receive(at, side, self.now) else { break };
            self.ends[side].heard = true;
            self.take(side, frame)?;
        }
        if let Some(at) = self.ends[side].current
            && self.network.is_broken(at, side, self.now)
        {
            let number = self.network.connections[at].number;
            self.ends[side].contact.broke(number, clock);
            self.ends[side].current = None;
        }
        if side == 0 {
            self.ask()?
        } else {
            self.execute()?
        }
        self.send(side);
        match self.ends[side].outbox.len() <= self.policy.room() {
            true => Ok(()),
            false => Err("more is kept than is under way".to_owned()),
        }
    }

    fn look(&mut self, side: usize, clock: Time) {
        if clock < self.ends[side].beat_at {
            return;
        }
        let number = self.ends[side].number(&self.network);
        let end = &mut self.ends[side];
        end.beat_at = clock + end.contact.timing().beat;
        if let Some(number) = number.filter(|_| std::mem::take(&mut end.heard)) {
            end.contact.heard(number, clock);
        }
        if !end.contact.tick(clock) {
            end.arrived = None;
            if let Some(at) = end.current.take() {
                self.network.close(at, self.now);
            }
        }
        if self.ends[side].joined {
            let seen = self.seen(side);
            let number = self.ends[side].contact.beat(clock);
            let echo = self.ends[side].beat_heard;
            self.network_send(side, Frame::Beat { seen, number, echo });
        }
    }

    fn take(&mut self, side: usize, frame: Frame) -> Result<(), String> {
        let clock = self.ends[side].clock(self.now);
        let number = self.ends[side].number(&self.network).unwrap_or_default();
        let end = &mut self.ends[side];
        let wrong = |what| format!("{what} of side {} breaks the rules", 1 - side);
        match frame {
            Frame::Resume(seen) => {
                let repeated = end.outbox.resume(seen).map_err(|_| wrong("the count"))?;
                end.joined = true;
                end.contact.resumed(number, clock, repeated);
                if side == 1 {
                    if self.policy == Policy::ForgetAnswers {
                        (0..repeated).for_each(|_| end.outbox.advance());
                    }
                    let seen = self.seen(1);
                    self.network_send(1, Frame::Resume(seen));
                }
                self.trace(&format!("{side} resumes on {number}, {repeated} repeated"));
            }
            Frame::Beat { seen, number, echo } => {
                end.outbox.acknowledge(seen).map_err(|_| wrong("a beat"))?;
                end.beat_heard = number;
                end.contact.echoed(echo);
            }
            Frame::Message(seen, message) => {
                end.outbox.acknowledge(seen).map_err(|_| wrong("a message"))?;
                end.received += 1;
                match message {
                    Message::Ask(ask) => {
                        let long = if self.random.chance(10) { 500 } else { 10 };
                        let until = self.now + self.random.below(long) as Time;
                        self.doing.push((until, ask));
                        self.in_order.push((ask.id, false));
                    }
                    Message::Answer(answer) => self.model.answer(&answer)?,
                }
            }
        }
        Ok(())
    }

    /// The user asks for more.
    fn ask(&mut self) -> Result<(), String> {
        while self.random.chance(50)
            && let Some(ask) = self.model.ask(self.random.next())
        {
            let put = self.ends[0].outbox.push(Message::Ask(ask));
            put.map_err(|_| "there is no room for an operation".to_owned())?;
        }
        Ok(())
    }

    /// The drive does what it has, in any order.
    fn execute(&mut self) -> Result<(), String> {
        let (done, left) = self.doing.drain(..).partition(|(until, _)| *until <= self.now);
        self.doing = left;
        let mut done: Vec<(Time, Ask)> = done;
        done.sort_by_key(|(until, _)| *until);
        for (_, ask) in done {
            let answer: Answer = self.model.execute(&ask)?;
            let put = self.ends[1].outbox.push(Message::Answer(answer));
            put.map_err(|_| "there is no room for an answer".to_owned())?;
            self.in_order.iter_mut().filter(|it| it.0 == ask.id).for_each(|it| it.1 = true);
        }
        Ok(())
    }

    fn send(&mut self, side: usize) {
        if !self.ends[side].joined || self.ends[side].current.is_none() {
            return;
        }
        let seen = self.seen(side);
        while let Some(message) = self.ends[side].outbox.next_unsent().copied() {
            self.ends[side].outbox.advance();
            self.network_send(side, Frame::Message(seen, message));
        }
    }
}
