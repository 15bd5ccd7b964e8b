//! Requests that carry an idempotency key, and their answers.
//!
//! Whoever asked and got no answer (the control plane was restarted, the connection broke) asks again
//! with the same key and gets the answer to the first request, instead of a second lease. A key is
//! stored in the same commit as the decision that its request led to, and its answer in the same
//! commit as the state that it tells of. A request that was refused changed nothing, and is decided
//! anew when it comes again; so is one whose lease was given back because its caller went away.

use std::collections::{BTreeMap, BTreeSet};

use rackbus_lease::{Authority, Availability, LeaseId, LeaseRecord, LeaseState, Placement};
use serde::{Deserialize, Serialize};
use sha2::Digest;

use crate::api::{ApiError, Lease};
use crate::service::{not_lent, present, problem};
use crate::shares::ShareSpec;

/// How long an answer is kept: a day, in milliseconds.
pub const KEPT_MS: u64 = 24 * 60 * 60 * 1000;
/// Keys that are kept at most; the oldest are forgotten first.
pub const MOST_KEYS: usize = 10_000;
/// Bytes of the longest idempotency key.
const LONGEST_KEY: usize = 128;

/// In the place of a function's name: whichever accelerator keeps the level. No function has this name, and stores have
/// it: it names no class of devices.
pub const ANY_ACCELERATOR: &str = "accelerator";

/// What is answered to a request.
pub type BorrowAnswer = Result<Lease, ApiError>;

/// What was asked for under a key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum KeyedRequest {
    /// A function for a host, or several together.
    Borrow {
        /// Name of the function, `HOST/DEVICE`; of several, all names with a comma and a space between; of whichever
        /// accelerator keeps a level, [`ANY_ACCELERATOR`].
        function: String,
        /// The host that shall have it.
        borrower: String,
        /// Where the function's front runs.
        #[serde(default)]
        placement: Placement,
        /// The user that it is for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        group: Option<String>,
        /// The service level that was asked for, as its class of devices writes it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        level: Option<String>,
        /// The VM that it is plugged into.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        vm: Option<String>,
    },
    /// Turns on a function; the number that is kept is the share's, and so is the answer.
    Share {
        /// What was asked for.
        spec: Box<ShareSpec>,
    },
    /// The end of a lease; or another [change](KeyedRequest::change), which has a number that no lease has.
    Return {
        /// Number of the lease that the request made.
        lease: LeaseId,
        /// How long its user was to have, in milliseconds, if not as long as the rack gives.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        within: Option<u64>,
    },
}

/// What is added to the digest of a change. A control plane of the previous version that has the lead again reads a change
/// as the end of a lease that there never is: it knows no other requests, and takes no store that has any.
const CHANGE: LeaseId = 1 << 63;

impl KeyedRequest {
    /// A change of this kind, with all that was asked for, which is made once. The number that is kept is the change's, and
    /// the answer is how things stand when it is given.
    pub fn change(kind: &str, asked: &impl Serialize) -> KeyedRequest {
        // What is asked for came as JSON.
        let text = serde_json::to_vec(&(kind, asked)).unwrap_or_default();
        let digest = sha2::Sha256::digest(text);
        let first = digest.first_chunk().copied().map_or(0, u64::from_be_bytes);
        KeyedRequest::Return { lease: first | CHANGE, within: None }
    }

    /// Whether it is answered with how things stand when it is, and never with what is kept.
    fn is_answered_anew(&self) -> bool {
        match self {
            KeyedRequest::Share { .. } => true,
            KeyedRequest::Return { lease, .. } => *lease >= CHANGE,
            KeyedRequest::Borrow { .. } => false,
        }
    }
}

/// A request with its idempotency key.
#[derive(Debug, Clone)]
pub struct KeyedChange {
    /// The key, as the caller chose it.
    pub key: String,
    /// What is asked for under it.
    pub request: KeyedRequest,
}

impl KeyedChange {
    /// A [change](KeyedRequest::change) that has a key.
    pub fn new(key: Option<String>, kind: &str, asked: &impl Serialize) -> Option<KeyedChange> {
        Some(KeyedChange { key: key?, request: KeyedRequest::change(kind, asked) })
    }

    /// What is kept of it: the number that it got, and when.
    pub(crate) fn kept(self, number: LeaseId, at_ms: u64) -> KeptAnswer {
        let KeyedChange { key, request } = self;
        KeptAnswer { key, request, lease: number, at_ms, answer: None }
    }
}

/// Between the names of functions that are asked for together. No name has a blank.
pub(crate) const TOGETHER: &str = ", ";

/// A request with a key, as stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptAnswer {
    /// The key, as the caller chose it.
    pub key: String,
    /// What was asked for.
    pub request: KeyedRequest,
    /// The lease that it is about, of several that were granted together the first; or the number of what was changed.
    pub lease: LeaseId,
    /// When it was decided, milliseconds since 1970.
    pub at_ms: u64,
    /// The answer, when it is known.
    pub answer: Option<BorrowAnswer>,
}

impl KeptAnswer {
    /// The leases that it asked for: what was granted in one step has numbers in a row. None of another request.
    fn leases(&self) -> impl Iterator<Item = LeaseId> + use<> {
        let count = match &self.request {
            KeyedRequest::Borrow { function, .. } => function.split(TOGETHER).count(),
            _ => 0,
        };
        (self.lease..).take(count)
    }
}

/// The result of looking an idempotency key up.
#[derive(Debug, PartialEq, Eq)]
pub enum KeyLookup {
    /// Nothing: it is a new request.
    New,
    /// It was decided, and is not answered yet.
    Pending(LeaseId),
    /// It was answered before, with this, about that lease.
    Answered(LeaseId, Box<BorrowAnswer>),
}

/// All keys that are kept.
#[derive(Debug, Default)]
pub struct KeptAnswers {
    by_key: BTreeMap<String, KeptAnswer>,
    /// Those without an answer.
    pending: BTreeSet<String>,
    /// Keys by the time of their request, the oldest first.
    by_time: BTreeSet<(u64, String)>,
}

impl KeptAnswers {
    /// The keyed answers that the store had.
    pub fn of(kept: impl IntoIterator<Item = KeptAnswer>) -> KeptAnswers {
        let mut answers = KeptAnswers::default();
        answers.keep(kept);
        answers
    }

    /// Looks for what was asked under `key` before.
    ///
    /// # Errors
    /// [`ApiError`] when it was something else than `request`.
    pub fn find(&self, key: &str, request: &KeyedRequest) -> Result<KeyLookup, ApiError> {
        match self.by_key.get(key) {
            None => Ok(KeyLookup::New),
            Some(kept) if kept.request != *request => Err(problem(
                "key_reused",
                format!("the idempotency key {key} belongs to another request"),
                "give each request a key of its own",
            )),
            Some(KeptAnswer { lease, answer: Some(answer), .. }) => {
                Ok(KeyLookup::Answered(*lease, Box::new(answer.clone())))
            }
            Some(kept) => Ok(KeyLookup::Pending(kept.lease)),
        }
    }

    /// The requests that are answered by what `authority` has come to.
    pub fn settled(&self, authority: &Authority) -> Vec<KeptAnswer> {
        let pending = self.pending.iter().filter_map(|key| self.by_key.get(key));
        let answered = pending.filter_map(|kept| {
            let answer = answer(authority, kept)?;
            Some(KeptAnswer { answer: Some(answer), ..kept.clone() })
        });
        answered.collect()
    }

    /// The leases that are asked for by requests that have no answer yet: those of a request that dies with the control
    /// plane are nobody's, or all somebody's.
    pub fn pending_leases(&self) -> impl Iterator<Item = LeaseId> {
        self.pending.iter().filter_map(|key| self.by_key.get(key)).flat_map(KeptAnswer::leases)
    }

    /// The keys under which `lease` was asked for, also beside others.
    pub fn borrow_keys(&self, lease: LeaseId) -> Vec<String> {
        let borrowed = |kept: &&KeptAnswer| kept.leases().any(|of_key| of_key == lease);
        self.by_key.values().filter(borrowed).map(|kept| kept.key.clone()).collect()
    }

    /// The keys that are to be forgotten at `now`, before `new` more are kept: the oldest, but not those of borrows that have
    /// no answer yet, whose leases would be asked for twice. Those are as many as there are leases at most.
    pub fn outdated(&self, now: u64, new: usize) -> Vec<String> {
        let mut excess = (self.by_key.len() + new).saturating_sub(MOST_KEYS);
        let mut outdated = Vec::new();
        let borrows = |kept: &KeptAnswer| matches!(kept.request, KeyedRequest::Borrow { .. });
        for (at, key) in &self.by_time {
            let over = at.saturating_add(KEPT_MS) <= now;
            if !over && excess == 0 {
                break;
            }
            let open = || self.pending.contains(key) && self.by_key.get(key).is_some_and(borrows);
            if over || !open() {
                excess = excess.saturating_sub(1);
                outdated.push(key.clone());
            }
        }
        outdated
    }

    /// Keeps answers, each in the place of the one that its key had.
    pub fn keep(&mut self, kept: impl IntoIterator<Item = KeptAnswer>) {
        kept.into_iter().for_each(|kept| drop(self.put(kept)));
    }

    /// Keeps an answer; the one that the key had is returned.
    pub fn put(&mut self, kept: KeptAnswer) -> Option<KeptAnswer> {
        let before = self.forget(&kept.key);
        if kept.answer.is_none() && !kept.request.is_answered_anew() {
            self.pending.insert(kept.key.clone());
        }
        self.by_time.insert((kept.at_ms, kept.key.clone()));
        self.by_key.insert(kept.key.clone(), kept);
        before
    }

    /// Forgets a key; what it had is returned.
    pub fn forget(&mut self, key: &str) -> Option<KeptAnswer> {
        let kept = self.by_key.remove(key)?;
        self.pending.remove(key);
        self.by_time.remove(&(kept.at_ms, kept.key.clone()));
        Some(kept)
    }
}

/// The answer to a request, as soon as there is one.
fn answer(authority: &Authority, kept: &KeptAnswer) -> Option<BorrowAnswer> {
    let (request, lease) = (&kept.request, kept.lease);
    if let KeyedRequest::Borrow { .. } = request {
        // The first that is refused, or else, when all can be used, the first.
        let answers: Vec<Option<BorrowAnswer>> =
            kept.leases().map(|lease| answer_of(authority, request, lease)).collect();
        let refused = answers.iter().flatten().find(|answer| answer.is_err());
        let all = answers.iter().all(Option::is_some);
        return refused.cloned().or_else(|| answers.into_iter().next().flatten().filter(|_| all));
    }
    answer_of(authority, request, lease)
}

/// The answer as far as one lease decides it.
fn answer_of(
    authority: &Authority,
    request: &KeyedRequest,
    lease: LeaseId,
) -> Option<BorrowAnswer> {
    let Some(record) = authority.lease(lease) else {
        return Some(Err(problem(
            "unknown_lease",
            format!("lease {lease} is not known any more"),
            "`rackbus leases` lists those that are",
        )));
    };
    match (request, &record.state) {
        (KeyedRequest::Borrow { .. }, LeaseState::Active { .. }) => Some(Ok(present(record))),
        (KeyedRequest::Borrow { .. }, LeaseState::Ended { reason }) => {
            Some(Err(not_lent(record, reason)))
        }
        (KeyedRequest::Return { .. }, LeaseState::Ended { .. }) if is_back(authority, record) => {
            Some(Ok(present(record)))
        }
        _ => None,
    }
}

/// Whether the function of a lease that has ended is not held by it any more.
pub fn is_back(authority: &Authority, record: &LeaseRecord) -> bool {
    authority.function(&record.function).is_none_or(|function| match function.state {
        Availability::Lent { lease } | Availability::Revoking { lease } => lease != record.lease,
        Availability::Offered | Availability::Withdrawn => true,
    })
}

/// A key that a request carries.
///
/// # Errors
/// [`ApiError`] when it is none.
pub fn check_key(key: &[u8]) -> Result<String, ApiError> {
    let visible = key.iter().all(u8::is_ascii_graphic);
    match std::str::from_utf8(key) {
        Ok(text) if visible && (1..=LONGEST_KEY).contains(&text.len()) => Ok(text.to_owned()),
        _ => Err(problem(
            "bad_key",
            "the idempotency key is not 1 to 128 visible ASCII characters".to_owned(),
            "use a random key, for example a UUID",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(key: &str, at_ms: u64) -> KeptAnswer {
        let request = KeyedRequest::Return { lease: 1, within: None };
        KeptAnswer { key: key.to_owned(), request, lease: 1, at_ms, answer: None }
    }

    /// One whose request has its answer.
    fn answered(key: &str, at_ms: u64) -> KeptAnswer {
        let answer = Some(Err(problem("over", String::new(), "")));
        KeptAnswer { answer, ..kept(key, at_ms) }
    }

    #[test]
    fn keys_are_kept_for_a_day_and_not_without_limit() {
        let mut answers = KeptAnswers::of([answered("old", 5), answered("young", 6)]);
        assert_eq!(answers.outdated(KEPT_MS, 1), [] as [&str; 0]);
        assert_eq!(answers.outdated(KEPT_MS + 5, 1), ["old"]);
        for number in answers.by_key.len()..MOST_KEYS {
            answers.put(answered(&format!("key {number}"), 7 + number as u64));
        }
        assert_eq!(answers.outdated(10, 0), [] as [&str; 0]);
        assert_eq!(answers.outdated(10, 2), ["old", "young"]);
        // Nobody pushes out a borrow that has no answer yet: its lease would be another one when it is repeated. A return is
        // of the same lease then.
        answers.put(kept("young", 6));
        assert_eq!(answers.outdated(10, 2), ["old", "young"]);
        let borrow = r#"{"request":"borrow","function":"alpha/nvme0","borrower":"beta"}"#;
        let request = serde_json::from_str(borrow).unwrap();
        answers.put(KeptAnswer { request, ..kept("young", 6) });
        assert_eq!(answers.outdated(10, 2), ["old", "key 2"]);
        assert_eq!(answers.outdated(KEPT_MS + 6, 1), ["old", "young"]);
        answers.put(answered("old", 7));
        assert_eq!((answers.by_key.len(), answers.by_time.len()), (MOST_KEYS, MOST_KEYS));
    }

    #[test]
    fn a_key_belongs_to_one_request() {
        let answers = KeptAnswers::of([kept("a", 5)]);
        let same = KeyedRequest::Return { lease: 1, within: None };
        assert_eq!(answers.find("a", &same).unwrap(), KeyLookup::Pending(1));
        assert_eq!(answers.find("b", &same).unwrap(), KeyLookup::New);
        let refused =
            answers.find("a", &KeyedRequest::Return { lease: 2, within: None }).unwrap_err();
        assert_eq!(refused.code, "key_reused");
        let sooner = KeyedRequest::Return { lease: 1, within: Some(0) };
        assert_eq!(answers.find("a", &sooner).unwrap_err().code, "key_reused");
    }

    #[test]
    fn a_change_is_known_by_all_that_was_asked_for() {
        let change = |kind: &str, asked: &[&str]| KeyedRequest::change(kind, &asked);
        let offered = change("offer", &["a", "b"]);
        assert!(offered.is_answered_anew());
        // As control planes of the previous version read it.
        let KeyedRequest::Return { lease, .. } = offered else { panic!("{offered:?}") };
        assert!(lease >= CHANGE, "{lease} may be a lease");
        assert_eq!(change("offer", &["a", "b"]), KeyedRequest::Return { lease, within: None });
        for other in
            [change("offer", &["ab"]), change("offer", &["a"]), change("take", &["a", "b"])]
        {
            assert_ne!(change("offer", &["a", "b"]), other);
        }
        // It waits for nothing that the authority comes to.
        let keyed = KeyedChange::new(Some("k".to_owned()), "offer", &"a").unwrap();
        let answers = KeptAnswers::of([keyed.clone().kept(7, 5)]);
        assert!(answers.pending.is_empty());
        assert_eq!(answers.find("k", &keyed.request).unwrap(), KeyLookup::Pending(7));
    }

    #[test]
    fn keys_are_short_and_visible() {
        assert_eq!(check_key(b"7c2f-1").unwrap(), "7c2f-1");
        for bad in [&b""[..], b"a b", b"\xff", &[b'a'; 129]] {
            assert_eq!(check_key(bad).unwrap_err().code, "bad_key");
        }
    }
}
