//! A lane as the side that asks has it: transfers under way, and answers that wait for their data.

use std::collections::{BTreeMap, VecDeque};

use super::{LEAST, LaneError, LaneNews, Moves, PATIENCE, PROOF_BYTES, Transfer, WrongLane};
use crate::exchange::session::SessionMillis;

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// It is not known yet whether it leads to the other side's memory.
    Proving,
    Up,
    /// Whether it was up before.
    Down(LaneError, bool),
}

/// Where the data of an answer are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Data {
    Here,
    /// This transfer brings them.
    Moving(u64),
    /// The lane is lost; they were asked for on the connection, or are still to be.
    Fetched {
        tag: u32,
        length: usize,
        asked: bool,
    },
}

/// What a transfer's end means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finished {
    /// The proof is there, and is to be [looked at](AskingLane::proved).
    Proof,
    /// Data of an answer are there.
    Read,
    /// Data of the question with this transfer are at the other side.
    Write(u64),
}

/// What the side that asks knows of its lane. `M` is an answer.
#[derive(Debug)]
pub struct AskingLane<M> {
    state: State,
    /// The other side is still to be told how it is with the lane.
    unsaid: bool,
    next: u64,
    /// Transfers that have begun, and when by [`counted`](AskingLane::counted).
    under_way: BTreeMap<u64, (Transfer, SessionMillis)>,
    /// Those that are still to begin, in their order, and since when.
    waiting: VecDeque<(Transfer, SessionMillis)>,
    /// Answers that are not received yet, in their order.
    answers: VecDeque<(M, Data)>,
    tags: usize,
    looked: SessionMillis,
    /// Time that has passed while this side looked.
    counted: SessionMillis,
    /// When a transfer has ended last, by that.
    ended: SessionMillis,
}

impl<M> AskingLane<M> {
    /// One that is still to be proved, beside an exchange of so many tags.
    pub fn new(tags: u32, now: SessionMillis) -> AskingLane<M> {
        let mut lane = AskingLane {
            state: State::Proving,
            unsaid: false,
            next: 0,
            under_way: BTreeMap::new(),
            waiting: VecDeque::new(),
            answers: VecDeque::new(),
            tags: tags as usize,
            looked: now,
            counted: 0,
            ended: 0,
        };
        lane.add(Moves::Proof, 0, PROOF_BYTES);
        lane
    }

    /// One that an earlier process of this side gave up when it ended, for this reason, after it `was_up` or not; with the
    /// answers that were not received, each with the tag and length of data that are to be asked for.
    pub fn given_up(
        tags: u32,
        now: SessionMillis,
        why: LaneError,
        was_up: bool,
        answers: impl IntoIterator<Item = (M, Option<(u32, usize)>)>,
    ) -> AskingLane<M> {
        let lacks = |(answer, left): (M, Option<(u32, usize)>)| {
            let fetched = |(tag, length)| Data::Fetched { tag, length, asked: false };
            (answer, left.map_or(Data::Here, fetched))
        };
        let mut lane = AskingLane::new(tags, now);
        lane.waiting.clear();
        lane.state = State::Down(why, was_up);
        lane.answers = answers.into_iter().map(lacks).collect();
        lane
    }

    /// The answers that are not received yet, of a lane that is given up: each with the tag and length of data that are
    /// still to come.
    pub fn answers(&self) -> impl Iterator<Item = (&M, Option<(u32, usize)>)> {
        self.answers.iter().map(|(answer, data)| match data {
            Data::Fetched { tag, length, .. } => (answer, Some((*tag, *length))),
            Data::Here | Data::Moving(_) => (answer, None),
        })
    }

    fn add(&mut self, moves: Moves, tag: u32, length: usize) -> u64 {
        let id = self.next;
        self.next += 1;
        self.waiting.push_back((Transfer { id, moves, tag, length }, self.counted));
        id
    }

    /// The transfer that is to begin next.
    pub fn to_begin(&self) -> Option<Transfer> {
        self.waiting.front().map(|(transfer, _)| *transfer)
    }

    /// The [next](AskingLane::to_begin) transfer has begun.
    pub fn begun(&mut self) {
        if let Some((transfer, _)) = self.waiting.pop_front() {
            self.under_way.insert(transfer.id, (transfer, self.counted));
        }
    }

    /// Whether a transfer is under way, or waits to begin.
    pub fn is_busy(&self) -> bool {
        !self.under_way.is_empty() || !self.waiting.is_empty()
    }

    /// A transfer has ended. `None` when none with this number is under way: it is of an operation that was given up.
    pub fn ended(&mut self, id: u64) -> Option<Finished> {
        let (transfer, _) = self.under_way.remove(&id)?;
        self.ended = self.counted;
        match transfer.moves {
            Moves::Proof => Some(Finished::Proof),
            Moves::Write => Some(Finished::Write(id)),
            Moves::Read => {
                let waits = |(_, data): &&mut (M, Data)| *data == Data::Moving(id);
                let answer = self.answers.iter_mut().find(waits);
                answer.map(|(_, data)| *data = Data::Here)?;
                Some(Finished::Read)
            }
        }
    }

    /// The proof is the one that the other side gave, or is another one.
    pub fn proved(&mut self, right: bool) {
        if self.state != State::Proving {
            return;
        }
        if right {
            (self.state, self.unsaid) = (State::Up, true);
        } else {
            self.lose(LaneError("it leads to other memory than the lender's".to_owned()));
        }
    }

    /// Has so many bytes that go with a question moved. `None` when they go over the connection; otherwise the
    /// question is sent when the transfer with this number has [ended](AskingLane::ended).
    pub fn write(&mut self, tag: u32, length: usize) -> Option<u64> {
        (self.state == State::Up && length >= LEAST).then(|| self.add(Moves::Write, tag, length))
    }

    /// An answer came; where the other side `left` data in their place, with their tag and length.
    ///
    /// # Errors
    /// [`WrongLane`] when nothing can have been left, or there are more answers than questions.
    pub fn answered(&mut self, answer: M, left: Option<(u32, usize)>) -> Result<(), WrongLane> {
        if self.answers.len() >= self.tags {
            return Err(WrongLane);
        }
        let data = match (left, &self.state) {
            (None, _) => Data::Here,
            (Some(_), State::Proving) => return Err(WrongLane),
            (Some((tag, length)), State::Up) => Data::Moving(self.add(Moves::Read, tag, length)),
            (Some((tag, length)), State::Down(..)) => Data::Fetched { tag, length, asked: false },
        };
        self.answers.push_back((answer, data));
        Ok(())
    }

    /// Takes the next answer, when its data are there.
    pub fn receive(&mut self) -> Option<M> {
        let ready = self.answers.front().is_some_and(|(_, data)| *data == Data::Here);
        ready.then(|| self.answers.pop_front())?.map(|(answer, _)| answer)
    }

    /// Whether [`receive`](AskingLane::receive) has something.
    pub fn has_answer(&self) -> bool {
        self.answers.front().is_some_and(|(_, data)| *data == Data::Here)
    }

    /// The lane is of no more use: nothing moves any more from here on. False when that was known.
    pub fn lose(&mut self, why: LaneError) -> bool {
        if matches!(self.state, State::Down(..)) {
            return false;
        }
        (self.state, self.unsaid) = (State::Down(why, self.state == State::Up), true);
        let transfers = self.under_way.values().chain(&self.waiting);
        let reads: BTreeMap<u64, Transfer> = transfers.map(|(it, _)| (it.id, *it)).collect();
        for (_, data) in &mut self.answers {
            let Data::Moving(id) = *data else { continue };
            let Some(Transfer { tag, length, .. }) = reads.get(&id).copied() else { continue };
            *data = Data::Fetched { tag, length, asked: false };
        }
        self.under_way.clear();
        self.waiting.clear();
        true
    }

    /// Time passes, by this side's clock. False when the lane is lost by that: what is under way never ends, or what waits
    /// never begins.
    pub fn look(&mut self, now: SessionMillis) -> bool {
        // While this process stalled, it looked for nothing.
        self.counted += now.saturating_sub(self.looked).min(PATIENCE / 4);
        self.looked = self.looked.max(now);
        let late = |since: SessionMillis| self.counted - since > PATIENCE;
        // One that waits while others end has only to wait for its turn.
        let waits = self.waiting.front().is_some_and(|(_, since)| late(self.ended.max(*since)));
        if !waits && !self.under_way.values().any(|(_, since)| late(*since)) {
            return true;
        }
        self.lose(LaneError(format!("nothing has moved for {} s", PATIENCE / 1000)));
        false
    }

    /// What is to be said to the other side, once, before any message.
    pub fn news(&mut self) -> Option<LaneNews> {
        std::mem::take(&mut self.unsaid).then(|| self.known())
    }

    /// How it is with the lane.
    pub fn known(&self) -> LaneNews {
        match self.state {
            State::Proving => LaneNews::None,
            State::Up => LaneNews::Up,
            State::Down(_, true) => LaneNews::Down,
            State::Down(_, false) => LaneNews::Refused,
        }
    }

    /// Why it is of no more use; `None` while it is, or may be.
    pub fn failure(&self) -> Option<&LaneError> {
        match &self.state {
            State::Down(why, _) => Some(why),
            _ => None,
        }
    }

    /// Data that are to be asked for on the connection, once: their tag and length.
    pub fn next_fetch(&mut self) -> Option<(u32, usize)> {
        self.answers.iter_mut().find_map(|(_, data)| match data {
            Data::Fetched { tag, length, asked: asked @ false } => {
                *asked = true;
                Some((*tag, *length))
            }
            _ => None,
        })
    }

    /// Whether something is still to be said or asked for on the connection.
    pub fn has_unsaid(&self) -> bool {
        let unasked = |(_, data): &(M, Data)| matches!(data, Data::Fetched { asked: false, .. });
        self.unsaid || self.answers.iter().any(unasked)
    }

    /// Whether the data of this tag, so many bytes, were asked for.
    pub fn expects(&self, tag: u32, length: usize) -> bool {
        self.answers.iter().any(|(_, data)| *data == Data::Fetched { tag, length, asked: true })
    }

    /// Data that were asked for are in their place.
    ///
    /// # Errors
    /// [`WrongLane`] when they were not asked for.
    pub fn fetched(&mut self, tag: u32, length: usize) -> Result<(), WrongLane> {
        let fetched = Data::Fetched { tag, length, asked: true };
        let answer = self.answers.iter_mut().find(|(_, data)| *data == fetched);
        answer.map(|(_, data)| *data = Data::Here).ok_or(WrongLane)
    }

    /// Another connection is there: what was asked for on the one before is asked for again.
    pub fn reconnected(&mut self) {
        for (_, data) in &mut self.answers {
            if let Data::Fetched { asked, .. } = data {
                *asked = false;
            }
        }
        // The first frame on a connection says how it is.
        self.unsaid = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One that is up, with nothing under way.
    fn up() -> AskingLane<u32> {
        let mut lane = AskingLane::new(2, 0);
        let proof = lane.to_begin().unwrap();
        lane.begun();
        assert_eq!(lane.ended(proof.id), Some(Finished::Proof));
        lane.proved(true);
        assert_eq!(lane.news(), Some(LaneNews::Up));
        lane
    }

    #[test]
    fn answers_are_received_in_their_order_whatever_order_their_data_come_in() {
        let mut lane = up();
        lane.answered(1, Some((0, 4096))).unwrap();
        lane.answered(2, Some((1, 4096))).unwrap();
        assert_eq!(lane.answered(3, None), Err(WrongLane), "there are two tags");
        let ids: Vec<u64> = std::iter::from_fn(|| {
            let transfer = lane.to_begin()?;
            lane.begun();
            Some(transfer.id)
        })
        .collect();
        assert_eq!(lane.ended(ids[1]), Some(Finished::Read));
        assert_eq!(lane.receive(), None);
        assert_eq!(lane.ended(ids[0]), Some(Finished::Read));
        assert_eq!(lane.ended(ids[0]), None, "it has ended");
        assert_eq!((lane.receive(), lane.receive(), lane.receive()), (Some(1), Some(2), None));
    }

    #[test]
    fn a_transfer_that_never_ends_ends_the_lane_unless_nobody_looked() {
        let mut lane = up();
        let id = lane.write(0, 4096).unwrap();
        lane.answered(1, Some((1, 8192))).unwrap();
        lane.begun();
        lane.begun();
        // The process stalled: what has ended meanwhile is still to be taken in.
        assert!(lane.look(3 * PATIENCE) && lane.failure().is_none());
        let mut now = 3 * PATIENCE;
        while lane.look(now) {
            now += 200;
        }
        assert!(now > 3 * PATIENCE + PATIENCE / 2 && now < 5 * PATIENCE, "{now}");
        assert_eq!((lane.ended(id), lane.is_busy()), (None, false));
        assert_eq!(lane.news(), Some(LaneNews::Down));
        assert_eq!((lane.next_fetch(), lane.next_fetch()), (Some((1, 8192)), None));
        assert_eq!(lane.write(0, 4096), None);
        // Another connection: it is asked for again.
        lane.reconnected();
        assert_eq!(lane.fetched(1, 8192), Err(WrongLane), "it was not asked for there");
        assert_eq!(lane.next_fetch(), Some((1, 8192)));
        assert_eq!(lane.fetched(1, 4096), Err(WrongLane));
        assert_eq!((lane.fetched(1, 8192), lane.receive()), (Ok(()), Some(1)));
    }

    #[test]
    fn a_transfer_that_never_begins_ends_the_lane_unless_others_end() {
        let mut lane = up();
        let mut now = 0;
        for _ in 0..10 {
            // There is room for one at a time, which ends in time.
            let id = lane.write(0, 4096).unwrap();
            lane.write(1, 4096).unwrap();
            lane.begun();
            for _ in 0..7 {
                now += PATIENCE / 10;
                assert!(lane.look(now), "{now}");
            }
            assert!(lane.ended(id).is_some());
            let second = lane.to_begin().unwrap();
            lane.begun();
            assert_eq!(lane.ended(second.id), Some(Finished::Write(second.id)));
        }
        lane.answered(1, Some((1, 8192))).unwrap();
        let since = now;
        while lane.look(now) {
            now += PATIENCE / 10;
            assert!(now < since + 2 * PATIENCE, "it waits for ever");
        }
        assert_eq!((lane.news(), lane.next_fetch()), (Some(LaneNews::Down), Some((1, 8192))));
    }
}
