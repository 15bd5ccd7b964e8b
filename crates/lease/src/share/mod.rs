//! Time-sharing: borrowers that take turns on one function, as stored, and what a turn does to a share's account.
//!
//! A [`ShareRecord`] is a standing request for turns. The shares of one function are its *ring*. Who has the function keeps
//! it as long as nobody else of the ring wants it. Otherwise its turn is over after its *allowance*: its *slice* times
//! its *weight*, plus its *credit*. It is asked to release the function then (the notice), and goes to the tail of the ring.
//!
//! This is deficit round robin over time held. From the notice until the function is released, the time is the holder's:
//! what it holds longer than its allowance is a debt, which shortens its next turn, or has it miss turns. A debt is at
//! most [`MOST_DEBT`] slices, so nobody is kept out for ever. What is left of a turn that the rack cut short (its
//! lender was lost) is added to the next one; what is left of a turn that was given back early is not. A borrower that
//! was alone owes nothing for that time. Handing over costs time that is nobody's: it is counted, and charged to no
//! share.
//!
//! Where all others that want the function owe their next turn, and so its holder would be the next again, it keeps the
//! function, and its next turn begins at once.
//!
//! A share whose turn nobody uses [`MOST_UNUSED`] times in a row leaves the ring, as does one whose lender refuses it, or whose
//! borrower cannot open its end, [`MOST_FAILED`] times in a row, and one whose host is silent for long.

mod ring;

use serde::{Deserialize, Serialize};

pub use ring::{next_turn, tail};

use crate::message::{FunctionId, LeaseId, Millis, Terms};

/// Slices that a share can owe; what it held beyond is forgiven.
pub const MOST_DEBT: i64 = 8;
/// Turns in a row that nobody used, after which a share leaves the ring.
pub const MOST_UNUSED: u32 = 3;
/// Turns in a row that could not begin, after which a share leaves the ring.
pub const MOST_FAILED: u32 = 5;
/// How long a share whose turn could not begin waits for its next one, at first and at most.
const AGAIN: [Millis; 2] = [250, 30_000];

/// The slice where nobody says another one.
pub const DEFAULT_SLICE: Millis = 30_000;
/// The time to release a function where nobody says another one.
pub const DEFAULT_GRACE: Millis = 5_000;
/// The slices that can be asked for.
pub const SLICES: std::ops::RangeInclusive<Millis> = 100..=24 * 60 * 60 * 1000;
/// The longest time that may be asked for to release a function.
pub const LONGEST_GRACE: Millis = 60_000;
/// How long nobody may use a turn until it is given back, at most.
const LONGEST_CLAIM: Millis = 10_000;
/// The greatest weight of a share: a turn of so many slices.
pub const GREATEST_WEIGHT: u32 = 100;
/// Shares that a function can have.
pub const MOST_SHARES: usize = 64;

/// What somebody who wants turns on a function asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareRequest {
    /// The function that is used in turns.
    pub function: FunctionId,
    /// The host that shall have it in turns.
    pub borrower: String,
    /// On which terms it is lent in each turn, and plugged into a VM.
    pub terms: Terms,
    /// How long a turn of weight 1 is; none for what the ring has, or [`DEFAULT_SLICE`].
    pub slice: Option<Millis>,
    /// How long a program has to release the function when it is asked to.
    pub grace: Millis,
    /// How many slices a turn has.
    pub weight: u32,
}

/// What a lease is a turn of, as lender and borrower need to know it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnOf {
    /// Number of the share that the lease is a turn of.
    pub share: LeaseId,
    /// How long a program has to release the function when it is asked to, in milliseconds.
    pub grace: Millis,
    /// How long nobody may use it, in milliseconds, until it is given back.
    pub claim: Millis,
    /// The VM into which the function is plugged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
}

/// A turn under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareTurn {
    /// The lease by which the function is had.
    pub lease: LeaseId,
    /// How long a turn may last while others want the function, in milliseconds.
    pub allowance: Millis,
    /// Since when the function can be used; none while that is arranged.
    pub begun: Option<Millis>,
    /// When its borrower was asked to release the function.
    pub asked: Option<Millis>,
}

/// A share, as stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareRecord {
    /// Its number, from those of leases.
    pub share: LeaseId,
    /// The function that is had in turns.
    pub function: FunctionId,
    /// The host that has it in turns.
    pub borrower: String,
    /// On which terms it is lent in each turn.
    pub terms: Terms,
    /// The VM into which it is plugged; none where it is for a program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// How long a turn of weight 1 is, in milliseconds; the same for all of a ring.
    pub slice: Millis,
    /// How long a program has to release the function when it is asked to, in milliseconds.
    pub grace: Millis,
    /// How many slices a turn has.
    pub weight: u32,
    /// When it joined, on the authority's clock.
    pub since: Millis,
    /// Its place in the ring: of those who want the function, the least is next.
    pub place: u64,
    /// Milliseconds by which its next turn is longer than its quantum, or shorter where negative.
    pub credit: i64,
    /// Its turn, while it has the function.
    pub turn: Option<ShareTurn>,
    /// Turns that ended after the function could be used.
    pub turns: u64,
    /// For how long it had the function in these turns, in milliseconds.
    pub held: Millis,
    /// How often the function was handed over to it from another share.
    pub handovers: u64,
    /// For how long nobody had the function at these, in milliseconds.
    pub handover: Millis,
    /// When it released the function, where the next one's hand-over began with that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub let_go: Option<Millis>,
    /// Turns in a row that nobody used.
    pub unused: u32,
    /// Turns in a row that could not begin.
    pub failed: u32,
    /// It gets no turn before then: its last one could not begin.
    pub not_before: Millis,
}

/// How a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShareTurnEnd {
    /// The borrower was asked to release the function, and did, or the function was taken from it then.
    Over,
    /// The borrower gave it back early.
    GivenBack,
    /// The lender or the way to it was lost, or records were.
    CutShort,
    /// The function could not be lent, or its borrower could not open its end.
    Failed,
}

impl ShareRecord {
    /// A share at `place`, which has had no turn.
    pub fn new(
        number: LeaseId,
        request: ShareRequest,
        slice: Millis,
        place: u64,
        now: Millis,
    ) -> ShareRecord {
        let ShareRequest { function, borrower, mut terms, slice: _, grace, weight } = request;
        let vm = terms.vm.take();
        ShareRecord {
            share: number,
            function,
            borrower,
            terms,
            vm,
            slice,
            grace,
            weight,
            since: now,
            place,
            credit: 0,
            turn: None,
            turns: 0,
            held: 0,
            handovers: 0,
            handover: 0,
            let_go: None,
            unused: 0,
            failed: 0,
            not_before: 0,
        }
    }

    /// What it gets each time round, in milliseconds.
    pub fn quantum(&self) -> Millis {
        self.slice.saturating_mul(self.weight.into())
    }

    /// The same as a difference.
    fn quantum_signed(&self) -> i64 {
        i64::try_from(self.quantum()).unwrap_or(i64::MAX)
    }

    /// How long its next turn would be; less than a half of its quantum is no turn.
    pub fn next_allowance(&self) -> i64 {
        self.credit.saturating_add(self.quantum_signed())
    }

    /// What its node is told of its turns.
    pub fn turn_of(&self) -> TurnOf {
        let claim = (self.slice / 2).min(LONGEST_CLAIM);
        TurnOf { share: self.share, grace: self.grace, claim, vm: self.vm.clone() }
    }

    /// When its turn is over, if others want the function then; none where it has none that can be used, or was asked.
    pub fn ends_at(&self) -> Option<Millis> {
        let turn = self.turn.as_ref().filter(|turn| turn.asked.is_none())?;
        Some(turn.begun?.saturating_add(turn.allowance))
    }

    /// It gets the function by `lease`.
    pub fn begin(&mut self, lease: LeaseId) {
        let allowance = Millis::try_from(self.next_allowance()).unwrap_or(0);
        self.turn = Some(ShareTurn { lease, allowance, begun: None, asked: None });
    }

    /// The function can be used; another share released it at `let_go`.
    pub fn usable(&mut self, now: Millis, let_go: Option<Millis>) {
        let Some(turn) = self.turn.as_mut().filter(|turn| turn.begun.is_none()) else { return };
        turn.begun = Some(now);
        self.failed = 0;
        if let Some(let_go) = let_go {
            self.handovers += 1;
            self.handover = self.handover.saturating_add(now.saturating_sub(let_go));
        }
    }

    /// Of times that were noted by a clock that was ahead: they are `now`, and a wait is the longest from now.
    pub fn not_after(&mut self, now: Millis) {
        let [_, longest] = AGAIN;
        self.not_before = self.not_before.min(now.saturating_add(longest));
        self.since = self.since.min(now);
        self.let_go = self.let_go.map(|at| at.min(now));
        if let Some(turn) = &mut self.turn {
            turn.begun = turn.begun.map(|at| at.min(now));
            turn.asked = turn.asked.map(|at| at.min(now));
        }
    }

    /// Its turn ended, and it goes to `place`.
    pub fn end(&mut self, now: Millis, how: ShareTurnEnd, place: u64) {
        let Some(turn) = self.turn.take() else { return };
        self.place = place;
        let Some(begun) = turn.begun else {
            // Its credit stays as it was. Whoever's fault it is: it is not tried again at once.
            if how == ShareTurnEnd::Failed {
                self.failed = self.failed.saturating_add(1);
                let [first, most] = AGAIN;
                let wait = first.saturating_mul(1 << self.failed.min(16)).min(most);
                self.not_before = now.saturating_add(wait);
            }
            return;
        };
        self.turns += 1;
        let held = now.saturating_sub(begun);
        self.held = self.held.saturating_add(held);
        let allowance = turn.allowance;
        // Until it was asked, it is charged what it was allowed at most: nobody else wanted the function.
        let charged = match turn.asked {
            Some(asked) => {
                let before = asked.saturating_sub(begun).min(allowance);
                before.saturating_add(now.saturating_sub(asked))
            }
            None => held.min(allowance),
        };
        let [allowance, charged] =
            [allowance, charged].map(|it| i64::try_from(it).unwrap_or(i64::MAX));
        let left = allowance - charged;
        let quantum = self.quantum_signed();
        self.credit = match how {
            ShareTurnEnd::Over | ShareTurnEnd::GivenBack => left.min(0),
            ShareTurnEnd::CutShort | ShareTurnEnd::Failed => left.min(quantum),
        };
        let least = self.slice.saturating_mul(MOST_DEBT.unsigned_abs());
        self.credit = self.credit.max(-i64::try_from(least).unwrap_or(i64::MAX));
        self.let_go = (how == ShareTurnEnd::Over).then_some(now);
    }
}

/// Why a share leaves its ring.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "why", content = "detail", rename_all = "snake_case")]
pub enum LeaveReason {
    /// Somebody asked for that.
    Asked,
    /// Nobody used its last turns.
    Unused,
    /// Its lender could not lend the function, or its borrower not open its end, the last times.
    Failed(String),
    /// What it was for is no more.
    Gone(String),
    /// The node of its host is silent for so many milliseconds.
    Silent(Millis),
    /// The function is no longer in the rack.
    Withdrawn,
}

impl std::fmt::Display for LeaveReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LeaveReason::Asked => f.write_str("as was asked for"),
            LeaveReason::Unused => write!(f, "nobody used its last {MOST_UNUSED} turns"),
            LeaveReason::Failed(why) => write!(f, "{MOST_FAILED} turns could not begin: {why}"),
            LeaveReason::Gone(why) => f.write_str(why),
            LeaveReason::Silent(ms) => {
                write!(f, "the node of its host is silent for {} s", ms / 1000)
            }
            LeaveReason::Withdrawn => f.write_str("the function was withdrawn"),
        }
    }
}

/// What a node says of a turn that ends before the function is asked back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "how", content = "detail", rename_all = "snake_case")]
pub enum TurnUse {
    /// Its user has released it.
    Used,
    /// Nobody used it before it was claimed back.
    Unused,
    /// There will be no user any more, for this reason.
    Gone(String),
}

/// Why a function cannot be shared, or a share not be changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShareRefused {
    /// There is no such function.
    #[error("no host offers {0}")]
    Unknown(FunctionId),
    /// It is no longer in the rack.
    #[error("{0} is no longer offered by its host")]
    Withdrawn(FunctionId),
    /// There is no such host.
    #[error("no host {0} has registered")]
    NoHost(String),
    /// The ring has another slice.
    #[error("the turns on {function} are of {slice} ms already")]
    OtherSlice {
        /// The function whose ring has another slice.
        function: FunctionId,
        /// The slice of its ring, in milliseconds.
        slice: Millis,
    },
    /// It has as many as there can be.
    #[error("{0} has {MOST_SHARES} shares already")]
    Full(FunctionId),
    /// Others wait for it who asked earlier.
    #[error("{waiting} requests wait for {function} and come first")]
    Waited {
        /// The function that others wait for.
        function: FunctionId,
        /// How many requests wait.
        waiting: usize,
    },
    /// There is no such share.
    #[error("there is no share {0}")]
    NoShare(LeaseId),
    /// It has no turn now.
    #[error("share {0} has no turn now")]
    NoTurn(LeaseId),
}

#[cfg(test)]
mod tests;
