//! The borrower's side: opens its end of a lease, renews it, closes it, and decides which front of a function runs
//! here. The node keeps no record of its own of either.
//!
//! Losing the control plane changes nothing here: a lease is renewed as often as it takes, and
//! what is open stays open until the authority says that it ended. A lease that is [strict](Grant::strict_ttl) ends
//! here by this node's clock, too, before its lender ends it.

mod fronts;
mod serving;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use fronts::FrontRefused;

use crate::message::{Epoch, FunctionId, Grant, Incarnation, LeaseId, Message, Millis};
use crate::share::TurnUse;
use crate::under_way::UnderWay;

/// What the node must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BorrowerAction {
    /// Serve the function; then call [`Borrower::open_done`].
    Open(Grant),
    /// Stop serving it at once, whatever its user does: it is absent from now on, and is then unplugged. Then call
    /// [`Borrower::close_done`].
    Cut {
        /// The lease's number, which no other lease ever gets.
        lease: LeaseId,
        /// What ended it, for people.
        reason: String,
        /// Its user was asked to release it before: what follows is under way.
        closing: bool,
    },
    /// Stop serving it (unplug it from its user first, if possible); then call
    /// [`Borrower::close_done`].
    Close {
        /// The lease's number, which no other lease ever gets.
        lease: LeaseId,
        /// What prevented or ended it, for people.
        reason: String,
        /// How long a guest has to release it, in milliseconds; none where the node is to choose.
        within: Option<Millis>,
    },
    /// Its turn is over: tell its user, and wait until that has released it, or a program for so many milliseconds; then
    /// stop serving it and call [`Borrower::close_done`].
    Yield {
        /// The lease's number, which no other lease ever gets.
        lease: LeaseId,
        /// How long a program has to release it, in milliseconds.
        grace: Millis,
        /// How long a guest has to release it, in milliseconds; none where the node is to choose.
        within: Option<Millis>,
    },
    /// The user of a lease that is being closed has less time: at most this from now, where it had more.
    Hasten {
        /// The lease's number, which no other lease ever gets.
        lease: LeaseId,
        /// How long a guest has to release it from now, in milliseconds; none where the node is to choose.
        within: Option<Millis>,
        /// How long a program has to release a turn from now, in milliseconds.
        grace: Millis,
    },
    /// Send this to the authority.
    Send(Message),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum State {
    /// It was granted, and is opened when its first renewal is answered: until then it is not known until when its
    /// lender serves it.
    Confirming(Box<Grant>),
    Opening,
    /// Served there, or not for that reason.
    Open(Result<String, String>),
    Closing,
    /// Not served any more; its front has not released all memory yet.
    Ending,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BorrowedLease {
    function: FunctionId,
    epoch: Epoch,
    state: State,
    ttl: Millis,
    renew_at: Millis,
    /// Until when it is served unless it is renewed; none where that has no end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    serve_until: Option<Millis>,
    /// The lender is gone; said until the authority ends the lease.
    lost: Option<String>,
    /// It is a turn that is not needed any more; said until the authority ends the lease.
    #[serde(default)]
    used: Option<TurnUse>,
    /// A front of it runs in this process of the node, or has not released all memory yet. Another process has no
    /// front but those that it continues, for which it asks.
    #[serde(skip)]
    front: bool,
}

impl BorrowedLease {
    /// The authority has ended it, and nothing of it begins any more.
    fn is_over(&self) -> bool {
        matches!(self.state, State::Closing | State::Ending)
    }

    /// Its user may have it.
    fn is_served(&self) -> bool {
        matches!(self.state, State::Opening | State::Open(_))
    }

    /// Its authority is to hear of it from time to time. A strict lease that is being closed is in its user's hands yet.
    fn is_renewed(&self) -> bool {
        !self.is_over() || self.state == State::Closing && self.serve_until.is_some()
    }

    /// How long after a renewal the next one is sent.
    fn renew_after(&self) -> Millis {
        let renewals = if self.serve_until.is_some() { 6 } else { 3 };
        (self.ttl / renewals).max(1)
    }
}

/// The state machine of one borrowing host, for one life of its node. It is a value that another process
/// can go on with, the same life of the node, when nothing is [under way](Borrower::under_way).
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Borrower {
    incarnation: Incarnation,
    leases: BTreeMap<LeaseId, BorrowedLease>,
    /// The newest lease this life has seen end: grants are not repeated out of order beyond it.
    ended: BTreeMap<LeaseId, ()>,
    /// The greatest lease number this life was told of.
    newest: LeaseId,
}

impl BorrowedLease {
    /// The word for how far it is.
    fn word(&self) -> &'static str {
        match &self.state {
            State::Confirming(_) | State::Opening => "opening",
            State::Open(_) if self.lost.is_some() => "lost",
            State::Open(Ok(_)) => "open",
            State::Open(Err(_)) => "failed",
            State::Closing => "closing",
            State::Ending => "ending",
        }
    }
}

/// Ended leases remembered, so that a late grant of one is not opened again.
const REMEMBERED: usize = 64;

impl Borrower {
    /// The borrower of this start of its node: nothing borrowed yet.
    pub fn new(incarnation: Incarnation) -> Self {
        Borrower { incarnation, leases: BTreeMap::new(), ended: BTreeMap::new(), newest: 0 }
    }

    /// The node took a later number for this life, before anything was borrowed in it.
    pub fn set_incarnation(&mut self, incarnation: Incarnation) {
        self.incarnation = incarnation;
    }

    /// What the node is doing now and has not reported as done; as
    /// [`Lender::under_way`](crate::Lender::under_way).
    pub fn under_way(&self) -> Option<UnderWay> {
        self.leases.iter().find_map(|(lease, entry)| match entry.state {
            State::Confirming(_) | State::Opening => Some(UnderWay::Opening(*lease)),
            State::Closing | State::Ending => Some(UnderWay::Closing(*lease)),
            State::Open(_) => None,
        })
    }

    /// How many leases have not ended here, by how far each is. One is lost from when its lender is gone until the
    /// authority ends it.
    pub fn lease_counts(&self) -> [(&'static str, usize); 6] {
        let count =
            |state: &str| self.leases.values().filter(|entry| entry.word() == state).count();
        ["opening", "open", "failed", "lost", "closing", "ending"]
            .map(|state| (state, count(state)))
    }

    /// The greatest lease number this life was told of; 0 when of none.
    pub fn newest_lease(&self) -> LeaseId {
        self.newest
    }

    /// A message from the authority.
    pub fn receive(&mut self, now: Millis, message: Message) -> Vec<BorrowerAction> {
        match message {
            Message::Granted(grant) => self.granted(now, grant),
            Message::Renewed { lease, sent } => self.renewed(now, lease, sent),
            Message::Ended { lease, reason, within } => {
                let hasten = BorrowerAction::Hasten { lease, within, grace: 0 };
                self.end_use(lease, BorrowerAction::Close { lease, reason, within }, hasten)
            }
            Message::TurnOver { lease, grace, within } => {
                let hasten = BorrowerAction::Hasten { lease, within, grace };
                self.end_use(lease, BorrowerAction::Yield { lease, grace, within }, hasten)
            }
            _ => Vec::new(),
        }
    }

    /// The node serves the function at the path, or cannot.
    pub fn open_done(
        &mut self,
        lease: LeaseId,
        outcome: Result<String, String>,
    ) -> Vec<BorrowerAction> {
        match self.leases.get_mut(&lease) {
            Some(entry) if entry.state == State::Opening => {
                entry.state = State::Open(outcome.clone());
                vec![BorrowerAction::Send(Message::Opened { lease, outcome })]
            }
            _ => Vec::new(),
        }
    }

    /// The node no longer serves the lease. While a front of it runs that is not answered.
    pub fn close_done(&mut self, lease: LeaseId) -> Vec<BorrowerAction> {
        match self.leases.get_mut(&lease) {
            Some(entry) if entry.state == State::Closing && entry.front => {
                entry.state = State::Ending;
                Vec::new()
            }
            Some(entry) if entry.state == State::Closing => self.closed(lease),
            _ => Vec::new(),
        }
    }

    /// Nothing of the lease is left here.
    fn closed(&mut self, lease: LeaseId) -> Vec<BorrowerAction> {
        self.leases.remove(&lease);
        self.remember(lease);
        vec![BorrowerAction::Send(Message::Closed { lease })]
    }

    /// The lender of a lease is gone.
    pub fn lender_lost(&mut self, lease: LeaseId, reason: String) -> Vec<BorrowerAction> {
        match self.leases.get_mut(&lease) {
            Some(entry) if entry.lost.is_none() => {
                entry.lost = Some(reason.clone());
                vec![BorrowerAction::Send(Message::Lost { lease, reason })]
            }
            _ => Vec::new(),
        }
    }

    /// Time has passed: says again what needs saying, and ends what was not renewed in time. Call it at
    /// [`next_tick`](Borrower::next_tick).
    pub fn tick(&mut self, now: Millis) -> Vec<BorrowerAction> {
        let incarnation = self.incarnation;
        let mut actions = self.end_unrenewed(now);
        for (lease, entry) in &mut self.leases {
            if now < entry.renew_at || !entry.is_renewed() {
                continue;
            }
            entry.renew_at = now.saturating_add(entry.renew_after());
            let sent = entry.serve_until.map(|_| now);
            let over = entry.is_over();
            let message = match &entry.lost {
                Some(reason) if !over => Message::Lost { lease: *lease, reason: reason.clone() },
                _ => Message::Renew { lease: *lease, incarnation, sent },
            };
            actions.push(BorrowerAction::Send(message));
            if let Some(how) = entry.used.clone().filter(|_| !over) {
                actions.push(BorrowerAction::Send(Message::TurnUsed { lease: *lease, how }));
            }
        }
        actions
    }

    /// What was said last may not have been heard: the node's connection to the authority is new. All
    /// leases are renewed at the next tick.
    pub fn reconnected(&mut self) {
        self.leases.values_mut().for_each(|lease| lease.renew_at = 0);
    }

    /// When something is to be said next.
    pub fn next_tick(&self) -> Option<Millis> {
        let live = self.leases.values().filter(|l| l.is_renewed());
        live.map(|l| l.renew_at.min(l.serve_until.unwrap_or(l.renew_at))).min()
    }

    fn granted(&mut self, now: Millis, grant: Grant) -> Vec<BorrowerAction> {
        let lease = grant.lease;
        self.newest = self.newest.max(lease);
        if self.ended.contains_key(&lease) {
            return vec![BorrowerAction::Send(Message::Closed { lease })];
        }
        if let Some(BorrowedLease { state: State::Confirming(_), renew_at, .. }) =
            self.leases.get_mut(&lease)
        {
            // The authority waits, so what was said of it may not have been heard.
            *renew_at = now;
        }
        let known = self.leases.get(&lease);
        if let Some(other) =
            known.filter(|l| (&l.function, l.epoch) != (&grant.function, grant.epoch))
        {
            let (function, epoch) = (&other.function, other.epoch);
            let outcome = Err(format!("lease {lease} is {function} under epoch {epoch} here"));
            return vec![BorrowerAction::Send(Message::Opened { lease, outcome })];
        }
        match known.map(|entry| &entry.state) {
            None => {
                let mut entry = BorrowedLease {
                    function: grant.function.clone(),
                    epoch: grant.epoch,
                    state: State::Opening,
                    ttl: grant.ttl,
                    renew_at: now,
                    serve_until: None,
                    lost: None,
                    used: None,
                    front: false,
                };
                if grant.strict_ttl {
                    // Renewed at the next tick, which is now.
                    entry.serve_until = Some(now.saturating_add(grant.ttl));
                    entry.state = State::Confirming(Box::new(grant));
                    self.leases.insert(lease, entry);
                    return Vec::new();
                }
                entry.renew_at = now.saturating_add(entry.renew_after());
                self.leases.insert(lease, entry);
                vec![BorrowerAction::Open(grant)]
            }
            Some(State::Open(outcome)) => {
                let outcome = outcome.clone();
                vec![BorrowerAction::Send(Message::Opened { lease, outcome })]
            }
            Some(State::Confirming(_) | State::Opening | State::Closing | State::Ending) => {
                Vec::new()
            }
        }
    }

    /// The turn of a lease is not needed any more, as the node found.
    pub fn turn_used(&mut self, lease: LeaseId, how: TurnUse) -> Vec<BorrowerAction> {
        match self.leases.get_mut(&lease) {
            Some(entry) if !entry.is_over() && entry.used.is_none() => {
                entry.used = Some(how.clone());
                vec![BorrowerAction::Send(Message::TurnUsed { lease, how })]
            }
            // It is over, or ends already.
            _ => Vec::new(),
        }
    }

    /// The authority ends a lease, or says again that it does: its user may have less time by now.
    fn end_use(
        &mut self,
        lease: LeaseId,
        how: BorrowerAction,
        hasten: BorrowerAction,
    ) -> Vec<BorrowerAction> {
        self.newest = self.newest.max(lease);
        match self.leases.get_mut(&lease) {
            None => {
                self.remember(lease);
                vec![BorrowerAction::Send(Message::Closed { lease })]
            }
            Some(entry) if entry.state == State::Closing => vec![hasten],
            Some(entry) if entry.is_over() => Vec::new(),
            Some(BorrowedLease { state: State::Confirming(_), .. }) => self.closed(lease),
            Some(entry) => {
                entry.state = State::Closing;
                vec![how]
            }
        }
    }

    fn remember(&mut self, lease: LeaseId) {
        self.ended.insert(lease, ());
        if self.ended.len() > REMEMBERED {
            self.ended.pop_first();
        }
    }
}
