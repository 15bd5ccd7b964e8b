//! Which connection of a session counts, when it is lost, when another is tried, and when the session has ended.

use serde::{Deserialize, Serialize};

use super::SessionMillis;

/// Which side of a session this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionSide {
    /// It asks, and makes connections: the front's.
    Asks,
    /// It answers, and takes connections: the medium's.
    Answers,
}

/// How long things may take, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionTiming {
    /// Between two signs of life on a connection.
    pub beat: SessionMillis,
    /// A connection on which nothing comes for so long counts as lost.
    pub silence: SessionMillis,
    /// A session in which nothing was heard for so long has ended.
    pub hold: SessionMillis,
    /// Between two attempts to connect, at first and at most.
    pub retry: (SessionMillis, SessionMillis),
    /// For how long after the loss of a connection that lasted the other side is looked for often, and the time between two
    /// attempts then, at most. An attempt that finds nobody is a packet, which costs less than the wait of who has operations
    /// under way.
    pub often: (SessionMillis, SessionMillis),
}

/// Signs of life whose times are known.
const BEATS: usize = 64;

/// Time by which the side that answers keeps a session for longer than the side that asks goes on trying: it hears
/// of a loss later by up to twice the silence, and its clock may be slower or faster.
const MARGIN: SessionMillis = 8_000;

impl SessionTiming {
    /// Of a side that goes on trying for `hold`.
    pub const fn asking(hold: SessionMillis) -> SessionTiming {
        let (retry, often) = ((50, 1_000), (10_000, 100));
        SessionTiming { beat: 200, silence: 3_000, hold, retry, often }
    }

    /// Of the other side, whose peer goes on trying for `hold`.
    pub const fn answering(hold: SessionMillis) -> SessionTiming {
        SessionTiming { hold: hold + hold / 10 + MARGIN, ..SessionTiming::asking(hold) }
    }

    /// How long a side that asks may try at most where the other keeps the session for `kept`.
    pub const fn most(kept: SessionMillis) -> SessionMillis {
        kept.saturating_sub(MARGIN) / 11 * 10
    }
}

/// Why a session has ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SessionEndReason {
    /// This side ended it.
    #[error("it was ended here")]
    Here,
    /// The other side ended it.
    #[error("its node closed the link")]
    There,
    /// The other side does not continue with it, for this reason.
    #[error("its node does not go on with it: {0}")]
    Refused(String),
    /// Nothing was heard for so many milliseconds.
    #[error("its node has been silent for {} s", .0 / 1000)]
    Silent(SessionMillis),
    /// The other side broke the rules.
    #[error("its node violates the link's protocol")]
    Rules,
    /// The memory beside its connections cannot be taken away from what was under way on a lane.
    #[error("its lane could not be closed")]
    Reachable,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// The newest connection is there; how much the other side has it is still to say, since then.
    Joining(SessionMillis),
    /// The newest connection carries the session, since then.
    Up(SessionMillis),
    /// There is none. Whether one is being made.
    Down {
        trying: bool,
    },
    Over(SessionEndReason),
}

/// What this side of a session knows of its connections. The first is number 0.
#[derive(Debug, Clone)]
pub struct Contact {
    side: SessionSide,
    timing: SessionTiming,
    state: State,
    /// Number of the newest connection, or attempt to make one.
    newest: u64,
    /// When the other side was there last for certain: it has heard since what this side said then, or, of the side
    /// that answers, it was heard then.
    heard: SessionMillis,
    /// When the last signs of life were given, and how many in all.
    beats: [SessionMillis; BEATS],
    given: u32,
    /// Since when nothing has come although this side looked.
    quiet: SessionMillis,
    /// When this side looked last.
    looked: SessionMillis,
    /// Since when there is no connection that carries the session; `None` while there is one.
    lost: Option<SessionMillis>,
    /// When the next attempt may begin, and how long after it the one after that.
    next: SessionMillis,
    wait: SessionMillis,
    /// The last connection that was made lasted: a loss of it is worth looking for the other side often.
    lasted: bool,
    /// Differs between sessions, so that those that were lost together are not tried together.
    salt: u64,
    reconnects: u64,
    repeated: u64,
    last_lost: SessionMillis,
}

/// What one side knows of a session's connections, for another process of its host that goes on with it: all of them
/// end with the process before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContactState {
    side: SessionSide,
    hold: SessionMillis,
    newest: u64,
    heard: SessionMillis,
    given: u32,
    lost: SessionMillis,
    reconnects: u64,
    repeated: u64,
    last_lost: SessionMillis,
    /// The session has ended.
    over: bool,
}

impl Contact {
    /// A session that begins, at 0, on a first connection.
    pub fn new(side: SessionSide, timing: SessionTiming) -> Contact {
        Contact {
            side,
            timing,
            state: State::Joining(0),
            newest: 0,
            heard: 0,
            beats: [0; BEATS],
            given: 0,
            quiet: 0,
            looked: 0,
            lost: None,
            next: 0,
            wait: timing.retry.0,
            lasted: true,
            salt: 0,
            reconnects: 0,
            repeated: 0,
            last_lost: 0,
        }
    }

    /// The session as a value.
    pub fn save(&self, now: SessionMillis) -> ContactState {
        ContactState {
            side: self.side,
            hold: self.timing.hold,
            newest: self.newest,
            heard: self.heard,
            given: self.given,
            lost: self.lost.unwrap_or(now),
            reconnects: self.reconnects,
            repeated: self.repeated,
            last_lost: self.last_lost,
            over: self.end().is_some(),
        }
    }

    /// Goes on with a session that was [saved](Contact::save), by the same clock. There is no connection.
    pub fn resume(state: &ContactState, now: SessionMillis) -> Contact {
        let timing = SessionTiming { hold: state.hold, ..SessionTiming::asking(0) };
        let over = State::Over(SessionEndReason::There);
        Contact {
            state: if state.over { over } else { State::Down { trying: false } },
            newest: state.newest,
            heard: state.heard,
            // When the signs of life before were given is not known any more, so an echo of one says nothing.
            given: state.given.wrapping_add(BEATS as u32),
            quiet: now,
            looked: now,
            lost: Some(state.lost),
            next: now,
            reconnects: state.reconnects,
            repeated: state.repeated,
            last_lost: state.last_lost,
            ..Contact::new(state.side, timing)
        }
    }

    /// The same, whose attempts come at other times than those of sessions with another `salt`.
    #[must_use]
    pub fn with_salt(self, salt: u64) -> Contact {
        Contact { salt, ..self }
    }

    /// Which side of the session this is.
    pub fn side(&self) -> SessionSide {
        self.side
    }

    /// Time has passed, for who looks at no connection: one that waits for the next for too long has ended.
    pub fn expire(&mut self, now: SessionMillis) {
        if !matches!(self.state, State::Up(_)) {
            self.expire_any(now);
        }
    }

    /// For how long nothing may be heard: by a connection that is there, also as long as it may be silent.
    fn most_silent(&self) -> SessionMillis {
        let connected = matches!(self.state, State::Joining(_) | State::Up(_));
        self.timing.hold + if connected { self.timing.silence } else { 0 }
    }

    fn expire_any(&mut self, now: SessionMillis) {
        let silent = now.saturating_sub(self.heard);
        if silent > self.most_silent() {
            self.finish(SessionEndReason::Silent(silent));
        }
    }

    /// Time has passed, and this side is about to take what came. False when the newest connection was lost by
    /// that: nothing has come for too long.
    pub fn tick(&mut self, now: SessionMillis) -> bool {
        if now.saturating_sub(self.looked) > 2 * self.timing.beat {
            // This process stalled: what came meanwhile is still to be taken.
            self.quiet = now;
        }
        self.looked = self.looked.max(now);
        // What a connection has brought meanwhile is not looked at any more then.
        self.expire_any(now);
        let quiet = now.saturating_sub(self.quiet);
        let connected = matches!(self.state, State::Joining(_) | State::Up(_));
        if connected && quiet > self.timing.silence {
            self.broke(self.newest, now);
            return false;
        }
        true
    }

    /// Something came on the connection with this number.
    pub fn heard(&mut self, number: u64, now: SessionMillis) {
        if number != self.newest {
            return;
        }
        self.quiet = self.quiet.max(now);
        if self.side == SessionSide::Answers {
            self.heard = self.heard.max(now);
        }
    }

    /// A sign of life is given; its number.
    pub fn beat(&mut self, now: SessionMillis) -> u32 {
        self.given = self.given.wrapping_add(1);
        self.beats[self.given as usize % BEATS] = now;
        self.given
    }

    /// The other side says that this sign of life was the last that it heard. What it says may itself have been on
    /// its way for long; so the side that asks counts from when it gave the sign, and gives up first.
    pub fn echoed(&mut self, beat: u32) {
        let known = self.given.wrapping_sub(beat) < BEATS as u32 && beat != 0;
        if self.side == SessionSide::Asks && known {
            self.heard = self.heard.max(self.beats[beat as usize % BEATS]);
        }
    }

    /// The connection with this number is of no use any more. An older one is of no interest.
    pub fn broke(&mut self, number: u64, now: SessionMillis) {
        if number != self.newest {
            return;
        }
        if !matches!(self.state, State::Joining(_) | State::Up(_)) {
            return;
        }
        self.lost.get_or_insert(now);
        match self.state {
            // One that lasted was no failed attempt: the next begins at once.
            State::Up(since) if now.saturating_sub(since) >= self.timing.retry.1 => {
                self.wait = self.timing.retry.0;
                self.next = now;
                self.lasted = true;
            }
            State::Up(_) => {
                self.lasted = false;
                self.back_off(now);
            }
            _ => self.back_off(now),
        }
        self.state = State::Down { trying: false };
    }

    /// The next attempt waits: for less than a time that grows with each, and for three quarters of it at least.
    fn back_off(&mut self, now: SessionMillis) {
        let (lately, often) = self.timing.often;
        let most = match self.lost_for(now) {
            Some(lost) if self.lasted && lost < lately => often.min(self.timing.retry.1),
            _ => self.timing.retry.1,
        };
        let wait = self.wait.min(most);
        self.next = now + wait - spread(self.salt, self.newest, wait / 4);
        self.wait = (2 * wait).min(self.timing.retry.1);
    }

    /// The number of an attempt to connect that is to begin now. Of the side that asks.
    pub fn attempt(&mut self, now: SessionMillis) -> Option<u64> {
        let waits = self.state == State::Down { trying: false };
        if self.side != SessionSide::Asks || !waits || now < self.next {
            return None;
        }
        self.newest += 1;
        self.state = State::Down { trying: true };
        Some(self.newest)
    }

    /// When to [tick](Contact::tick) or [try](Contact::attempt) next, where no connection is there.
    pub fn due(&self) -> Option<SessionMillis> {
        let over = self.heard + self.most_silent() + 1;
        match self.state {
            State::Over(_) => None,
            State::Down { trying: false } if self.side == SessionSide::Asks => {
                Some(self.next.min(over))
            }
            State::Down { .. } => Some(over),
            State::Joining(_) | State::Up(_) => Some(self.looked + self.timing.silence),
        }
    }

    /// The attempt with this number has failed.
    pub fn failed(&mut self, number: u64, now: SessionMillis) {
        if number == self.newest && self.state == (State::Down { trying: true }) {
            self.back_off(now);
            self.state = State::Down { trying: false };
        }
    }

    /// The connection with this number is there; false when it is not wanted, since a newer one was tried.
    pub fn connected(&mut self, number: u64, now: SessionMillis) -> bool {
        let wanted = match (self.side, &self.state) {
            (_, State::Over(_)) => false,
            (SessionSide::Asks, State::Down { trying: true }) => number == self.newest,
            (SessionSide::Asks, _) => false,
            // The other side knows of a loss before this one does.
            (SessionSide::Answers, _) => number > self.newest,
        };
        if wanted {
            self.newest = number;
            self.lost.get_or_insert(now);
            self.quiet = now;
            self.state = State::Joining(now);
        }
        wanted
    }

    /// On the connection with this number, the other side has said what it has; so many frames are sent again.
    /// Returns for how long there was none, where there was one before.
    pub fn resumed(
        &mut self,
        number: u64,
        now: SessionMillis,
        repeated: u64,
    ) -> Option<SessionMillis> {
        let State::Joining(since) = self.state else { return None };
        if number != self.newest {
            return None;
        }
        self.state = State::Up(now);
        // It answers what was said on this connection.
        self.heard = self.heard.max(since);
        self.heard(number, now);
        let lost = self.lost.take()?;
        self.reconnects += 1;
        self.repeated += repeated;
        self.last_lost = now.saturating_sub(lost);
        Some(self.last_lost)
    }

    /// The session has ended, for this reason, unless it is already.
    pub fn finish(&mut self, end: SessionEndReason) {
        if self.end().is_none() {
            self.state = State::Over(end);
        }
    }

    /// Why it has ended; `None` while it continues.
    pub fn end(&self) -> Option<&SessionEndReason> {
        match &self.state {
            State::Over(end) => Some(end),
            _ => None,
        }
    }

    /// For how long no connection has carried the session; `None` while one does.
    pub fn lost_for(&self, now: SessionMillis) -> Option<SessionMillis> {
        self.lost.map(|since| now.saturating_sub(since))
    }

    /// How long at most the session is held without a connection.
    pub fn timing(&self) -> &SessionTiming {
        &self.timing
    }

    /// How often the session went on on another connection, how many frames this side sent again then, and for how
    /// long there was none the last time.
    pub fn counts(&self) -> (u64, u64, SessionMillis) {
        (self.reconnects, self.repeated, self.last_lost)
    }
}

/// A number of 0 to `most`, which looks like chance, and is the same for the same salt and attempt.
fn spread(salt: u64, attempt: u64, most: SessionMillis) -> SessionMillis {
    // The last steps of SplitMix64.
    let mut mixed = salt ^ attempt.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ (mixed >> 31)) % (most + 1)
}

#[cfg(test)]
mod tests;
