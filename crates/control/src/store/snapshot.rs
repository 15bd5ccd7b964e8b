//! All of a rack's state as one value: for backups, and to take it from one store to another.
//!
//! It has what the stores have: records, answers, events, the term, and, where the rack's hosts are machines, the
//! certificate authority with its key, and open tokens. So a backup is as secret as the rack.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rackbus_identity::{AuthorityError, CertificateAuthority};
use rackbus_lease::Record;
use serde::{Deserialize, Serialize};

use super::sqlite::beside;
use super::{Commit, Sqlite, Store, StoreError};
use crate::answers::KeptAnswer;
use crate::api::EventRecord;
use crate::etcd::KvError;
use crate::leadership::shared::SharedError;
use crate::register::{RegisterChange, RegisterEntry};

/// Version of the value.
pub(super) const FORMAT: u32 = 1;
/// By how much numbers of leases and epochs go on after a restore: what was given out after the backup is not given
/// out again, as long as it was less than this; nodes that are up tell of more.
pub const GAP: u64 = 10_000;

/// The whole state of a rack's control plane, as a value for backups and moves.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    pub(super) format: u32,
    /// Name of the rack.
    pub rack: String,
    /// The newest term that began; a store that takes this over begins later ones.
    pub term: u64,
    pub(super) records: Vec<Record>,
    pub(super) answers: Vec<KeptAnswer>,
    pub(super) events: Vec<EventRecord>,
    /// Certificates that were given out, and revocations.
    #[serde(default)]
    pub(super) certificates: Vec<RegisterEntry>,
    /// Certificate and key of the authority.
    #[serde(default)]
    pub(super) identity: Option<(String, String)>,
    /// As they are kept.
    #[serde(default)]
    pub(super) tokens: Option<String>,
}

/// Without its keys, so that none is ever in a log.
impl std::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Snapshot").field("rack", &self.rack).finish_non_exhaustive()
    }
}

/// Why a state is not read or put somewhere.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The store cannot be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What several control planes share.
    #[error(transparent)]
    Shared(#[from] SharedError),
    /// The files of the certificate authority cannot be read or written.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// A file of the snapshot cannot be read or written.
    #[error("{path}: {cause}")]
    File {
        /// The file that cannot be read or written.
        path: PathBuf,
        /// What the system says.
        cause: io::Error,
    },
    /// It is no backup, or one of a newer version.
    #[error("{0} is no backup that this version of rackbus reads: {1}")]
    Format(PathBuf, String),
    /// There is no state at this place.
    #[error("there is no state of a rack in {0}")]
    Nothing(String),
    /// There is something already.
    #[error("{0} has a state already")]
    Occupied(String),
    /// It belongs to another rack.
    #[error("{place} is of rack {found}, not of {rack}")]
    OtherRack {
        /// Where the store is, for people.
        place: String,
        /// Name of the rack whose state is there.
        found: String,
        /// Whose state was to be put there.
        rack: String,
    },
    /// A control plane runs there.
    #[error("the control plane at {0} leads; stop all control planes of the rack first")]
    HasLeader(String),
    /// A control plane has begun to lead meanwhile.
    #[error("a control plane was started meanwhile; stop all of them, and do it again")]
    Interrupted,
    /// It took longer than others were kept from leading, with a part of the state in its place.
    #[error(
        "etcd answered too late, and only a part of the state is there; no control plane begins with that"
    )]
    Incomplete,
}

impl From<KvError> for SnapshotError {
    fn from(error: KvError) -> SnapshotError {
        SnapshotError::Shared(error.into())
    }
}

impl Snapshot {
    /// How many records, events and leases' numbers there are, for people.
    pub fn summary(&self) -> (usize, usize) {
        (self.records.len(), self.events.len())
    }

    /// With numbers of leases and epochs a [`GAP`] further on, and without tokens to join with.
    #[must_use]
    pub fn ahead(mut self) -> Snapshot {
        let mut next = 1;
        for record in &mut self.records {
            match record {
                Record::Function(function) => function.epoch = function.epoch.saturating_add(GAP),
                Record::Lease(lease) => next = next.max(lease.lease.saturating_add(1)),
                Record::NextLease { lease } => next = next.max(*lease),
                Record::Device(change) => next = next.max(change.number.saturating_add(1)),
                _ => {}
            }
        }
        // They may have been used since.
        self.tokens = None;
        self.records.retain(|record| !matches!(record, Record::NextLease { .. }));
        self.records.push(Record::NextLease { lease: next.saturating_add(GAP) });
        self.term = self.term.saturating_add(1);
        self
    }

    /// Reads a snapshot from the file that a backup wrote.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn read(path: &Path) -> Result<Snapshot, SnapshotError> {
        let file = |cause| SnapshotError::File { path: path.to_owned(), cause };
        let text = std::fs::read(path).map_err(file)?;
        let snapshot: Snapshot = serde_json::from_slice(&text)
            .map_err(|cause| SnapshotError::Format(path.to_owned(), cause.to_string()))?;
        match snapshot.format {
            FORMAT => Ok(snapshot),
            other => Err(SnapshotError::Format(path.to_owned(), format!("it has format {other}"))),
        }
    }

    /// Writes a backup, which only its owner can read.
    ///
    /// # Errors
    /// [`SnapshotError::File`]; a file that was there is as before then.
    pub fn write(&self, path: &Path) -> Result<(), SnapshotError> {
        let file = |cause| SnapshotError::File { path: path.to_owned(), cause };
        let text = serde_json::to_string(self).map_err(|cause| file(cause.into()))?;
        rackbus_identity::write_private(path, &text).map_err(file)
    }

    /// The state in the SQLite file at `path`, and what is beside it in its folder. Where it has gone to `target`, a
    /// move may have been interrupted, and it is read again.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn of_sqlite(path: &Path, target: Option<&str>) -> Result<Snapshot, SnapshotError> {
        if !path.exists() {
            return Err(SnapshotError::Nothing(path.display().to_string()));
        }
        let rack = Sqlite::rack(path)?;
        let mut store = Sqlite::copied(path)?;
        if let Some(to) = store.moved()?.filter(|to| Some(to.as_str()) != target) {
            return Err(StoreError::Moved { place: path.display().to_string(), to }.into());
        }
        let state = store.load()?;
        let folder = path.with_file_name("identity");
        let authority = CertificateAuthority::load(&folder)?;
        let identity = authority.map(|it| (it.pem().0.to_owned(), it.pem().1));
        let tokens = std::fs::read_to_string(folder.join("tokens.json")).ok();
        let super::StoredState { term, records, answers, certificates, events } = state;
        Ok(Snapshot {
            format: FORMAT,
            rack,
            term,
            records,
            answers,
            events,
            certificates,
            identity,
            tokens,
        })
    }

    /// Whether it may be put into the SQLite file at `path`: nothing is there, or what is there was moved away, or
    /// `replace` says so. The newest term that either of the two has.
    ///
    /// # Errors
    /// [`SnapshotError`], which says why not.
    pub fn check_sqlite(&self, path: &Path, replace: bool) -> Result<u64, SnapshotError> {
        if !path.exists() {
            return Ok(self.term);
        }
        let place = path.display().to_string();
        let found = match Sqlite::rack(path) {
            // It is not known whose it is, and to be replaced all the same.
            Err(error) if replace && error.is_unreadable() => return Ok(self.term),
            found => found?,
        };
        if found != self.rack {
            return Err(SnapshotError::OtherRack { place, found, rack: self.rack.clone() });
        }
        let mut old = match Sqlite::open_any(path, &self.rack) {
            // Nodes tell of later terms than the backup's.
            Err(error) if replace && error.is_unreadable() => return Ok(self.term),
            old => old?,
        };
        if !replace && old.moved()?.is_none() && !old.is_empty()? {
            return Err(SnapshotError::Occupied(place));
        }
        match old.load() {
            Err(error) if replace && error.is_unreadable() => Ok(self.term),
            old => Ok(self.term.max(old?.term)),
        }
    }

    /// Puts it into the SQLite file at `path`, and beside it, where that [may be](Snapshot::check_sqlite).
    ///
    /// # Errors
    /// [`SnapshotError`]; the file is as before then.
    pub fn put_sqlite(&self, path: &Path, replace: bool) -> Result<(), SnapshotError> {
        let file = |path: &Path| {
            let path = path.to_owned();
            move |cause| SnapshotError::File { path, cause }
        };
        let newest = self.check_sqlite(path, replace)?;
        let new = path.with_extension("new");
        for name in [new.clone(), beside(&new, "-wal"), beside(path, "-wal")] {
            match std::fs::remove_file(&name) {
                Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
                    return Err(file(&name)(cause));
                }
                _ => {}
            }
        }
        let mut store = Sqlite::open(&new, &self.rack)?;
        store.commit(&self.commit())?;
        store.raise_term(newest)?;
        // All of it is in the file that is renamed, and nothing in the one beside it.
        store.close()?;
        if let Some((certificate, key)) = &self.identity {
            let folder = path.with_file_name("identity");
            let mut private = std::fs::DirBuilder::new();
            private.recursive(true).mode(0o700).create(&folder).map_err(file(&folder))?;
            CertificateAuthority::from_pem(certificate, key)?.save(&folder)?;
            let tokens = folder.join("tokens.json");
            let text = self.tokens.as_deref().unwrap_or("{}");
            rackbus_identity::write_private(&tokens, text).map_err(file(&tokens))?;
        }
        std::fs::rename(&new, path).map_err(file(path))?;
        let folder = path.parent().unwrap_or(Path::new("/"));
        std::fs::File::open(folder).and_then(|it| it.sync_all()).map_err(file(folder))
    }

    pub(super) fn commit(&self) -> Commit {
        Commit {
            records: self.records.clone(),
            answers: self.answers.clone(),
            events: self.events.clone(),
            certificates: self.certificates.iter().cloned().map(RegisterChange::Put).collect(),
            ..Commit::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use rackbus_identity::{Revocation, Revoked};
    use rackbus_lease::{Availability, FunctionRecord, HostRecord};

    use super::*;

    fn revocation() -> RegisterEntry {
        let what = Revoked::User("ann".to_owned());
        RegisterEntry::Revoked(Revocation { number: 3, what, at: 5, until: 9 })
    }

    fn state() -> Snapshot {
        let function = "alpha/nvme0".parse().unwrap();
        let function = FunctionRecord { function, epoch: 7, state: Availability::Offered };
        let (host, address) = ("alpha".to_owned(), "here".to_owned());
        let host = HostRecord { host, incarnation: 3, address };
        let authority = CertificateAuthority::generate("lab").unwrap();
        Snapshot {
            format: FORMAT,
            rack: "lab".to_owned(),
            term: 4,
            records: vec![
                Record::Function(function),
                Record::Host(host),
                Record::NextLease { lease: 12 },
            ],
            answers: Vec::new(),
            events: Vec::new(),
            certificates: vec![revocation()],
            identity: Some((authority.pem().0.to_owned(), authority.pem().1)),
            tokens: Some("{}".to_owned()),
        }
    }

    #[test]
    fn a_backup_is_its_owners_and_says_the_same_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("backup.json");
        state().write(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(Snapshot::read(&path).unwrap().records, state().records);
        assert!(!format!("{:?}", state()).contains("KEY"));
        std::fs::write(&path, "{}").unwrap();
        assert!(matches!(Snapshot::read(&path), Err(SnapshotError::Format(..))));
    }

    #[test]
    fn epochs_numbers_and_terms_only_grow_by_a_restore() {
        let ahead = state().ahead();
        let Record::Function(function) = &ahead.records[0] else { panic!("{ahead:?}") };
        assert_eq!(function.epoch, 7 + GAP);
        assert_eq!(ahead.records.last(), Some(&Record::NextLease { lease: 12 + GAP }));
        assert_eq!(ahead.term, 5);
    }

    /// The layout of the file at `path`.
    fn layout(path: &Path) -> i64 {
        let file = rusqlite::Connection::open(path).unwrap();
        file.query_row("PRAGMA user_version", [], |row| row.get(0)).unwrap()
    }

    #[test]
    fn a_backup_leaves_a_file_of_an_older_version_to_that_version() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.db");
        state().put_sqlite(&path, false).unwrap();
        let file = rusqlite::Connection::open(&path).unwrap();
        file.execute_batch("DROP TABLE certificate; PRAGMA user_version = 5;").unwrap();
        drop(file);
        let read = Snapshot::of_sqlite(&path, None).unwrap();
        assert_eq!((read.rack.as_str(), read.records.len()), ("lab", 3));
        assert_eq!(layout(&path), 5);
    }

    #[test]
    fn a_restore_takes_the_place_of_what_a_newer_version_wrote_and_of_what_nobody_can_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.db");
        state().put_sqlite(&path, false).unwrap();
        let file = rusqlite::Connection::open(&path).unwrap();
        file.execute_batch("PRAGMA user_version = 1000;").unwrap();
        drop(file);
        assert!(state().put_sqlite(&path, false).is_err());
        state().put_sqlite(&path, true).unwrap();
        assert_eq!(Snapshot::of_sqlite(&path, None).unwrap().records.len(), 3);
        let file = rusqlite::Connection::open(&path).unwrap();
        file.execute_batch("UPDATE record SET value = 'nothing'").unwrap();
        drop(file);
        assert!(state().put_sqlite(&path, false).is_err());
        state().put_sqlite(&path, true).unwrap();
        assert_eq!(Snapshot::of_sqlite(&path, None).unwrap().records.len(), 3);
        std::fs::write(&path, [0x5a; 8192]).unwrap();
        assert!(state().put_sqlite(&path, false).is_err());
        assert!(std::fs::read(&path).unwrap() == [0x5a; 8192], "what is refused is left as it is");
        state().put_sqlite(&path, true).unwrap();
        assert_eq!(Snapshot::of_sqlite(&path, None).unwrap().records.len(), 3);
    }

    #[test]
    fn what_is_put_into_a_file_is_in_the_file_itself() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.db");
        state().put_sqlite(&path, false).unwrap();
        // Whatever is beside it.
        let other = folder.path().join("copy.db");
        std::fs::copy(&path, &other).unwrap();
        assert_eq!(Snapshot::of_sqlite(&other, None).unwrap().records.len(), 3);
        assert!(!folder.path().join("control.new-wal").exists());
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "it has private keys");
    }

    #[test]
    fn a_file_gets_a_state_once_and_again_where_it_was_moved_away() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.db");
        assert!(matches!(Snapshot::of_sqlite(&path, None), Err(SnapshotError::Nothing(_))));
        state().put_sqlite(&path, false).unwrap();
        let read = Snapshot::of_sqlite(&path, None).unwrap();
        assert_eq!((read.rack.as_str(), read.term, read.records.len()), ("lab", 5, 3));
        assert!(read.identity.is_some() && read.tokens.is_some());
        assert_eq!(read.certificates, [revocation()]);
        assert!(matches!(state().put_sqlite(&path, false), Err(SnapshotError::Occupied(_))));
        state().put_sqlite(&path, true).unwrap();
        assert_eq!(Snapshot::of_sqlite(&path, None).unwrap().term, 6, "terms only grow");
        Sqlite::open(&path, "lab").unwrap().leave("etcd:https://e1:2379").unwrap();
        let refused = Sqlite::open(&path, "lab").unwrap_err();
        assert!(refused.to_string().contains("etcd:https://e1:2379"), "{refused}");
        assert!(Snapshot::of_sqlite(&path, Some("etcd:https://e2:2379")).is_err());
        // A move that was interrupted is done again.
        assert_eq!(Snapshot::of_sqlite(&path, Some("etcd:https://e1:2379")).unwrap().term, 6);
        state().put_sqlite(&path, false).unwrap();
        Sqlite::open(&path, "lab").unwrap();
        let other = Snapshot { rack: "other".to_owned(), ..state() };
        assert!(matches!(other.put_sqlite(&path, true), Err(SnapshotError::OtherRack { .. })));
    }
}
