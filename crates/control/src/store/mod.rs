//! What the control plane remembers, behind a trait: the records of the lending protocol, the answers
//! to requests that carry an idempotency key, and the events of the rack.
//!
//! A change is stored before anybody is told of it, all of a step in one [`Commit`]. A control plane
//! that is killed at any point finds, when it returns, a state that it has been in. The writer's
//! thread owns the store and may wait for it; nobody else does.
//!
//! [`Sqlite`] is the file of a single control plane. [`Etcd`] is shared by several, of which one leads. [`MemoryStore`]
//! keeps nothing, for tests. [`snapshot`]: a state as a whole, for backups and moves.

mod etcd;
mod memory;
mod shared_snapshot;
pub mod snapshot;
mod sqlite;

use std::path::PathBuf;

use rackbus_lease::Record;

pub(crate) use etcd::FIRST_ETCD_LAYOUT;
pub use etcd::{ETCD_LAYOUT, Etcd, Keys};
pub use memory::MemoryStore;
pub use shared_snapshot::LeaderKeyHold;
pub use sqlite::{LAYOUT, Sqlite};

use crate::answers::KeptAnswer;
use crate::api::EventRecord;
use crate::register;

/// Why the state could not be read or stored.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file, as SQLite sees it.
    #[error("{path}: {cause}")]
    Sqlite {
        /// The state file that was opened.
        path: PathBuf,
        /// The reason that SQLite or the system gave.
        cause: rusqlite::Error,
    },
    /// The file cannot be made, or cannot be its owner's alone.
    #[error(
        "{path} cannot be made its owner's alone, and has private keys: {cause}; see that the user that runs this owns it and its folder"
    )]
    NotPrivate {
        /// The state file that was opened, or one that SQLite keeps beside it.
        path: PathBuf,
        /// The reason that the system gave.
        cause: std::io::Error,
    },
    /// A newer version wrote the file.
    #[error(
        "{path} was written by a newer version of rackbus (layout {found}, this one knows up to \
         {LAYOUT}); run that version, or give this one a state directory of its own"
    )]
    Newer {
        /// The state file that was opened.
        path: PathBuf,
        /// The layout that the file has.
        found: i64,
    },
    /// The file belongs to another rack.
    #[error("{path} is the state of rack {found}; give this rack a state directory of its own")]
    OtherRack {
        /// The state file that was opened.
        path: PathBuf,
        /// The rack whose state the file has.
        found: String,
    },
    /// Something that was stored makes no sense.
    #[error("{path}: {key} cannot be read: {cause}")]
    Value {
        /// The state file that was opened.
        path: PathBuf,
        /// Key of the record in the store.
        key: String,
        /// The reason that its decoding gave.
        cause: serde_json::Error,
    },
    /// etcd cannot be read, or does not take what is to be stored.
    #[error("{0}")]
    Etcd(String),
    /// Whoever stores leads no more; nothing is stored, unless another read it since.
    #[error("this control plane is no longer the leader")]
    NotLeading,
    /// The state was moved to another store.
    #[error(
        "the state that was in {place} has moved to {to}; start with that, or move it back with `rackbus control migrate`"
    )]
    Moved {
        /// The store that was left.
        place: String,
        /// The store that has the state now.
        to: String,
    },
    /// The store fails, for another reason.
    #[error("{0}")]
    Other(String),
}

impl StoreError {
    /// Whether there is something that this program cannot read: what is damaged, or of a newer version. A file that
    /// somebody else is writing to is none of that.
    pub(crate) fn is_unreadable(&self) -> bool {
        use rusqlite::ErrorCode::{DatabaseBusy, DatabaseLocked};
        match self {
            StoreError::Sqlite { cause, .. } => {
                !matches!(cause.sqlite_error_code(), Some(DatabaseBusy | DatabaseLocked))
            }
            StoreError::Newer { .. } | StoreError::Value { .. } => true,
            _ => false,
        }
    }
}

/// What one step changes: stored as a whole or not at all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Commit {
    /// Records of the lending protocol; a later one of the same key takes an earlier one's place.
    pub records: Vec<Record>,
    /// Requests with an idempotency key, begun or answered; a later one of the same key takes an
    /// earlier one's place.
    pub answers: Vec<KeptAnswer>,
    /// Keys whose requests are forgotten.
    pub forgotten_keys: Vec<String>,
    /// What is done with certificates and revocations; of the same key a later one counts.
    pub certificates: Vec<register::RegisterChange>,
    /// Events, each with a greater number than all before.
    pub events: Vec<EventRecord>,
    /// Events with a smaller number are forgotten; 0 for none.
    pub first_event: u64,
    /// The numbers of earlier events that are forgotten, too.
    pub forgotten_events: Vec<u64>,
}

impl Commit {
    /// Whether there is nothing to store.
    pub fn is_empty(&self) -> bool {
        *self == Commit::default()
    }
}

/// Everything that was stored.
#[derive(Debug, Default)]
pub struct StoredState {
    /// The newest term of a leader; 0 when there was none.
    pub term: u64,
    /// Records of the lending protocol.
    pub records: Vec<Record>,
    /// Requests with an idempotency key.
    pub answers: Vec<KeptAnswer>,
    /// Certificates that were given out, and revocations, each under its key.
    pub certificates: Vec<register::RegisterEntry>,
    /// What happened, in the order of the numbers; at most so many as are kept.
    pub events: Vec<EventRecord>,
}

/// Where the control plane's state is kept.
pub trait Store: Send + std::fmt::Debug {
    /// Everything that was stored.
    ///
    /// # Errors
    /// [`StoreError`].
    fn load(&mut self) -> Result<StoredState, StoreError>;

    /// Begins the term of who stores from now on: a greater one than all before.
    ///
    /// # Errors
    /// [`StoreError`].
    fn begin(&mut self) -> Result<u64, StoreError>;

    /// Goes on in a term greater than `above`, of which somebody knows: the state is an older copy.
    ///
    /// # Errors
    /// [`StoreError`]; the term is as before then.
    fn raise_term(&mut self, above: u64) -> Result<u64, StoreError>;

    /// Stores all of it or nothing; on return it is safe from a crash of this process and, where
    /// the store outlives the machine's crash, from that too.
    ///
    /// # Errors
    /// [`StoreError`]; nothing is stored then.
    fn commit(&mut self, commit: &Commit) -> Result<(), StoreError>;
}

#[cfg(test)]
mod tests {
    use rackbus_identity::{Revocation, Revoked};
    use rackbus_lease::{HostRecord, LeaseId};

    use super::*;
    use crate::answers::{BorrowAnswer, KeyedRequest};
    use crate::api::EventKind;
    use crate::register::RegisterChange::{Forget, Put};
    use crate::register::RegisterEntry;

    fn host(incarnation: u64) -> Record {
        let (host, address) = ("alpha".to_owned(), "here".to_owned());
        Record::Host(HostRecord { host, incarnation, address })
    }

    fn answer(key: &str, lease: LeaseId, answer: Option<BorrowAnswer>) -> KeptAnswer {
        let request = KeyedRequest::Return { lease, within: None };
        KeptAnswer { key: key.to_owned(), request, lease, at_ms: 1, answer }
    }

    fn event(id: u64) -> EventRecord {
        let (kind, text) = (EventKind::Fault, format!("number {id}"));
        EventRecord {
            id,
            at_ms: 5,
            kind,
            host: None,
            function: None,
            lease: None,
            epoch: None,
            by: None,
            text,
        }
    }

    fn revocation(number: u64) -> RegisterEntry {
        let what = Revoked::Host(format!("host{number}"));
        RegisterEntry::Revoked(Revocation { number, what, at: 5, until: 9 })
    }

    /// What every store does, whatever keeps it.
    fn keeps_what_is_committed(store: &mut dyn Store, again: impl FnOnce() -> Option<Sqlite>) {
        let state = store.load().unwrap();
        assert!(state.records.is_empty() && state.answers.is_empty() && state.events.is_empty());
        assert!(state.certificates.is_empty());
        let lease = Record::NextLease { lease: 4 };
        let first = Commit {
            records: vec![host(1), lease.clone()],
            answers: vec![answer("a", 1, None), answer("b", 2, None)],
            certificates: [1, 2, 3].map(|number| Put(revocation(number))).into(),
            events: vec![event(0), event(1), event(2), event(3)],
            ..Commit::default()
        };
        store.commit(&first).unwrap();
        let refused = crate::service::problem("over", "it has ended".to_owned(), "leave it");
        let second = Commit {
            records: vec![host(2)],
            answers: vec![answer("a", 1, Some(Err(refused.clone())))],
            forgotten_keys: vec!["b".to_owned()],
            certificates: vec![Forget(revocation(2)), Put(revocation(4))],
            events: vec![event(4)],
            first_event: 1,
            forgotten_events: vec![2],
        };
        store.commit(&second).unwrap();
        let mut opened = again();
        let store = opened.as_mut().map_or(store, |opened| opened);
        let state = store.load().unwrap();
        assert_eq!(state.records, [host(2), lease]);
        assert_eq!(state.answers, [answer("a", 1, Some(Err(refused)))]);
        assert_eq!(state.events, [event(1), event(3), event(4)]);
        assert_eq!(state.certificates, [1, 3, 4].map(revocation));
        let term = store.begin().unwrap();
        assert!(term > state.term && store.begin().unwrap() > term);
        assert_eq!(store.raise_term(70).unwrap(), 71);
        assert_eq!(store.load().unwrap().term, 71);
        store.commit(&Commit::default()).unwrap();
        let forget = Commit { records: vec![Record::Forgotten { lease: 9 }], ..Commit::default() };
        store.commit(&forget).unwrap();
    }

    #[test]
    fn both_stores_keep_what_is_committed() {
        keeps_what_is_committed(&mut MemoryStore::default(), || None);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.db");
        let open = || Sqlite::open(&path, "demo").unwrap();
        keeps_what_is_committed(&mut open(), || Some(open()));
    }
}
