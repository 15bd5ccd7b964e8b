//! A lane as the side that answers has it: whether data may be left in their places for the other side.

use std::collections::VecDeque;

use super::{LEAST, LaneNews, WrongLane};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The other side has not said that it uses it.
    Offered,
    Up,
    /// It is given up; `said` when the other side knows, or was told on the connection that there is.
    Down {
        said: bool,
    },
}

/// What the side that answers knows of its lane.
#[derive(Debug)]
pub struct AnsweringLane {
    state: State,
    /// The other side has used it: it may have left data of questions, and lack data of answers.
    used: bool,
    /// What the other side asks for again: a tag and a number of bytes.
    fetches: VecDeque<(u32, usize)>,
    tags: usize,
}

impl AnsweringLane {
    /// One that is offered, beside an exchange of so many tags.
    pub fn new(tags: u32) -> AnsweringLane {
        let tags = tags as usize;
        AnsweringLane { state: State::Offered, used: false, fetches: VecDeque::new(), tags }
    }

    /// One that an earlier process of this side gave up when it ended, after the other side had `used` it or not.
    pub fn given_up(tags: u32, used: bool) -> AnsweringLane {
        AnsweringLane { state: State::Down { said: false }, used, ..AnsweringLane::new(tags) }
    }

    /// The other side says how it is with the lane. True when the memory has to be taken away before anything else
    /// is heard.
    #[must_use]
    pub fn told(&mut self, news: LaneNews) -> bool {
        match (news, self.state) {
            (LaneNews::Up, State::Offered) => {
                (self.state, self.used) = (State::Up, true);
                false
            }
            (LaneNews::Up, _) => {
                self.used = true;
                false
            }
            (LaneNews::Down | LaneNews::Refused, state) => {
                self.used |= news == LaneNews::Down;
                self.state = State::Down { said: true };
                state == State::Offered || state == State::Up
            }
            (LaneNews::None, _) => false,
        }
    }

    /// The lane has failed here. False when it was given up before.
    pub fn lose(&mut self) -> bool {
        let lost = !matches!(self.state, State::Down { .. });
        if lost {
            self.state = State::Down { said: false };
        }
        lost
    }

    /// Whether so many bytes that go with an answer are left in their place, for the other side to read.
    pub fn leaves(&self, length: usize) -> bool {
        self.state == State::Up && length >= LEAST
    }

    /// Whether data of a question may be in their place: the other side has said that it uses the lane.
    pub fn may_be_left(&self) -> bool {
        self.used
    }

    /// The other side cannot read what goes with an answer, and asks for it.
    ///
    /// # Errors
    /// [`WrongLane`] when nothing was left for it, or more is asked for than there are places.
    pub fn fetch(&mut self, tag: u32, length: usize) -> Result<(), WrongLane> {
        if !self.used || self.fetches.len() >= self.tags {
            return Err(WrongLane);
        }
        self.fetches.push_back((tag, length));
        Ok(())
    }

    /// What is to be sent next of what was asked for.
    pub fn next_fetch(&mut self) -> Option<(u32, usize)> {
        self.fetches.pop_front()
    }

    /// Whether something is to be said, or was asked for and is not sent.
    pub fn has_unsaid(&self) -> bool {
        !self.fetches.is_empty() || self.state == State::Down { said: false }
    }

    /// What is to be said to the other side, once.
    pub fn news(&mut self) -> Option<LaneNews> {
        match &mut self.state {
            State::Down { said: said @ false } => {
                *said = true;
                Some(LaneNews::Down)
            }
            _ => None,
        }
    }

    /// Another connection is there: the other side asks again for what it lacks, and is told again.
    pub fn reconnected(&mut self) {
        self.fetches.clear();
        if let State::Down { said } = &mut self.state {
            *said = false;
        }
    }
}
