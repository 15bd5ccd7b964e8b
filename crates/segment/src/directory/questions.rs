//! The questions that are on their way to other nodes: who asks, whom, and until when somebody waits for the answer.
//!
//! A session does not wait for ever: a question *expires*. It stays until its owner's node answers, because what that gives
//! then has to be given back, but it counts for this owner alone. So an owner that stands still keeps nobody from asking
//! others.

use std::collections::{BTreeMap, BTreeSet};

use crate::message::{Handle, NodeId, Refusal, SegmentId, SessionId};

/// Questions that one session may wait for: it waits for each, but its node may take its time.
const MOST_QUESTIONS: u32 = 1024;
/// Questions to the node of one owner that it has not answered, of all sessions. Those of sessions that ended count, too:
/// an answer may still come that has to be taken back.
const MOST_UNANSWERED: u32 = 16 * 1024;

/// A question on its way.
#[derive(Debug)]
pub(super) struct PendingQuestion {
    pub session: SessionId,
    pub owner: NodeId,
    pub connection: Handle,
    pub what: AwaitedAnswer,
    /// When the session is told that nobody answers; `None` when it has been.
    pub deadline: Option<u64>,
}

/// What a session waits for.
#[derive(Debug, Clone, Copy)]
pub(super) enum AwaitedAnswer {
    Connection,
    Member {
        id: SegmentId,
        size: u64,
    },
    Probe,
    Alive,
    /// A lock: of what it takes, the connection, its place and the attempt.
    Lock(Option<(Handle, u64, u64)>),
}

impl AwaitedAnswer {
    /// How many things the session is to have by it, if it is to have something and not only to know: a member of a group
    /// is a connection and a segment.
    pub(super) fn counts(self) -> u32 {
        match self {
            AwaitedAnswer::Connection => 1,
            AwaitedAnswer::Member { .. } => 2,
            AwaitedAnswer::Probe | AwaitedAnswer::Alive | AwaitedAnswer::Lock(_) => 0,
        }
    }

    /// Whether the session is to have something.
    pub(super) fn is_kept(self) -> bool {
        self.counts() > 0
    }
}

/// What the node of an owner has not answered, and how much of it nobody waits for any more.
#[derive(Debug, Default)]
struct Unanswered {
    all: u32,
    expired: u32,
}

/// All of them, by their numbers.
#[derive(Debug, Default)]
pub(super) struct Questions {
    all: BTreeMap<u64, PendingQuestion>,
    /// Those that somebody waits for, in the order in which they expire.
    due: BTreeSet<(u64, u64)>,
    /// How many each session waits for.
    waited_for: BTreeMap<SessionId, u32>,
    of_owner: BTreeMap<NodeId, Unanswered>,
}

impl Questions {
    /// Whether a session may ask an owner something more.
    ///
    /// # Errors
    /// Why it may not: it asks too much at once, or the owner is known to answer nobody.
    pub(super) fn admit(&self, session: SessionId, owner: NodeId) -> Result<(), Refusal> {
        if self.waited_for.get(&session).is_some_and(|count| *count >= MOST_QUESTIONS) {
            return Err(Refusal::TooMany(MOST_QUESTIONS));
        }
        match self.of_owner.get(&owner) {
            Some(Unanswered { all, expired }) if *all >= MOST_UNANSWERED => Err(match expired {
                0 => Refusal::TooMany(MOST_UNANSWERED),
                _ => Refusal::NotResponding,
            }),
            Some(_) | None => Ok(()),
        }
    }

    pub(super) fn insert(&mut self, request: u64, question: PendingQuestion) {
        self.remove(request);
        let unanswered = self.of_owner.entry(question.owner).or_default();
        unanswered.all += 1;
        match question.deadline {
            Some(deadline) => {
                self.due.insert((deadline, request));
                *self.waited_for.entry(question.session).or_default() += 1;
            }
            None => unanswered.expired += 1,
        }
        self.all.insert(request, question);
    }

    pub(super) fn get(&self, request: u64) -> Option<&PendingQuestion> {
        self.all.get(&request)
    }

    /// Takes out a question that is answered.
    pub(super) fn remove(&mut self, request: u64) -> Option<PendingQuestion> {
        let question = self.all.remove(&request)?;
        if let Some(deadline) = question.deadline {
            self.due.remove(&(deadline, request));
            self.waits_no_more(question.session);
        }
        if let Some(unanswered) = self.of_owner.get_mut(&question.owner) {
            unanswered.all -= 1;
            unanswered.expired -= u32::from(question.deadline.is_none());
            if unanswered.all == 0 {
                self.of_owner.remove(&question.owner);
            }
        }
        Some(question)
    }

    fn waits_no_more(&mut self, session: SessionId) {
        if let Some(count) = self.waited_for.get_mut(&session) {
            *count -= 1;
            if *count == 0 {
                self.waited_for.remove(&session);
            }
        }
    }

    /// The numbers of those that an owner has not answered.
    pub(super) fn to_owner(&self, node: NodeId) -> Vec<u64> {
        let to_owner = self.all.iter().filter(|(_, question)| question.owner == node);
        to_owner.map(|(request, _)| *request).collect()
    }

    /// When the next one expires.
    pub(super) fn next_due(&self) -> Option<u64> {
        self.due.first().map(|(deadline, _)| *deadline)
    }

    /// Nobody waits any more for what is due at `now`: who did, and for what.
    pub(super) fn expire(&mut self, now: u64) -> Vec<(SessionId, AwaitedAnswer)> {
        let mut expired = Vec::new();
        while let Some(&(deadline, request)) = self.due.first().filter(|(due, _)| *due <= now) {
            self.due.remove(&(deadline, request));
            let Some(question) = self.all.get_mut(&request) else { continue };
            question.deadline = None;
            let (session, owner, what) = (question.session, question.owner, question.what);
            self.waits_no_more(session);
            self.of_owner.entry(owner).or_default().expired += 1;
            expired.push((session, what));
        }
        expired
    }

    /// Whoever waits for what an owner gives by a connection waits until then at least.
    pub(super) fn prolong(&mut self, owner: NodeId, connection: Handle, until: u64) {
        let is_it = |question: &PendingQuestion| {
            (question.owner, question.connection) == (owner, connection)
        };
        let found = self.due.iter().find(|(_, it)| self.all.get(it).is_some_and(is_it)).copied();
        let Some((deadline, request)) = found.filter(|(deadline, _)| *deadline < until) else {
            return;
        };
        self.due.remove(&(deadline, request));
        self.due.insert((until, request));
        if let Some(question) = self.all.get_mut(&request) {
            question.deadline = Some(until);
        }
    }
}
