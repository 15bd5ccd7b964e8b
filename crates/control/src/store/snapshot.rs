//! All of a rack's state as one value: for backups, and to take it from one store to another.
//!
//! It has what the stores have: records, answers, events, the term, and, where the rack's hosts are machines, the
//! certificate authority with its key, and open tokens. So a backup is as secret as the rack.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rackbus_identity::{Authority, AuthorityError};
use rackbus_lease::Record;
use serde::{Deserialize, Serialize};

use super::etcd::operations;
use super::{Commit, Keys, Sqlite, Store, StoreError};
use crate::answers::KeptAnswer;
use crate::api::Event;
use crate::etcd::{Compare, Etcd, EtcdLease, KeyValue, KvError, Op, Range, Revision, Txn};
use crate::leadership::election::{self, Member};
use crate::leadership::shared::{SharedError, identity_of, identity_value, rack_of, rack_value};

/// Version of the value.
const FORMAT: u32 = 1;
/// By how much numbers of leases and epochs go on after a restore: what was given out after the backup is not given
/// out again, as long as it was less than this; nodes that are up tell of more.
pub const GAP: u64 = 10_000;
/// How many seconds others are kept from leading by who puts a state into etcd, after it has died.
const TTL: u64 = 30;
/// Values that are put into etcd at a time, and their bytes.
const BATCH: (usize, usize) = (100, 512 << 10);

/// A rack's state.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    format: u32,
    /// Name of the rack.
    pub rack: String,
    /// The newest term.
    pub term: u64,
    records: Vec<Record>,
    answers: Vec<KeptAnswer>,
    events: Vec<Event>,
    /// Certificate and key of the authority.
    #[serde(default)]
    identity: Option<(String, String)>,
    /// As they are kept.
    #[serde(default)]
    tokens: Option<String>,
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
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What several control planes share.
    #[error(transparent)]
    Shared(#[from] SharedError),
    /// The authority's files.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// A file.
    #[error("{path}: {cause}")]
    File {
        /// Its path.
        path: PathBuf,
        /// What the system says.
        cause: io::Error,
    },
    /// It is no backup, or one of a newer version.
    #[error("{0} is no backup that this version of rackbus reads: {1}")]
    Format(PathBuf, String),
    /// There is nothing.
    #[error("there is no state of a rack in {0}")]
    Nothing(String),
    /// There is something already.
    #[error("{0} has a state already")]
    Occupied(String),
    /// It belongs to another rack.
    #[error("{place} is of rack {found}, not of {rack}")]
    OtherRack {
        /// The store.
        place: String,
        /// Whose it is.
        found: String,
        /// Whose state was to be put there.
        rack: String,
    },
    /// A control plane runs there.
    #[error("the control plane at {0} leads; stop all control planes of the rack first")]
    Led(String),
    /// Somebody leads since.
    #[error("a control plane was started meanwhile; stop all of them, and do it again")]
    Interrupted,
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

    /// With numbers of leases and epochs a [`GAP`] further on.
    #[must_use]
    pub fn ahead(mut self) -> Snapshot {
        let mut next = 1;
        for record in &mut self.records {
            match record {
                Record::Function(function) => function.epoch = function.epoch.saturating_add(GAP),
                Record::Lease(lease) => next = next.max(lease.lease.saturating_add(1)),
                Record::NextLease { lease } => next = next.max(*lease),
                _ => {}
            }
        }
        self.records.retain(|record| !matches!(record, Record::NextLease { .. }));
        self.records.push(Record::NextLease { lease: next.saturating_add(GAP) });
        self.term = self.term.saturating_add(1);
        self
    }

    /// Reads a backup.
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
        let mut store = Sqlite::open_any(path, &rack)?;
        if let Some(to) = store.moved()?.filter(|to| Some(to.as_str()) != target) {
            return Err(StoreError::Moved { place: path.display().to_string(), to }.into());
        }
        let state = store.load()?;
        let folder = path.with_file_name("identity");
        let authority = Authority::load(&folder)?;
        let identity = authority.map(|it| (it.pem().0.to_owned(), it.pem().1));
        let tokens = std::fs::read_to_string(folder.join("tokens.json")).ok();
        let super::State { term, records, answers, events } = state;
        Ok(Snapshot { format: FORMAT, rack, term, records, answers, events, identity, tokens })
    }

    /// Puts it into the SQLite file at `path`, and beside it. What is there is replaced where it was moved away, or
    /// where `replace` says so.
    ///
    /// # Errors
    /// [`SnapshotError`]; the file is as before then.
    pub fn put_sqlite(&self, path: &Path, replace: bool) -> Result<(), SnapshotError> {
        let file = |path: &Path| {
            let path = path.to_owned();
            move |cause| SnapshotError::File { path, cause }
        };
        let mut newest = self.term;
        if path.exists() {
            let place = path.display().to_string();
            let found = Sqlite::rack(path)?;
            if found != self.rack {
                return Err(SnapshotError::OtherRack { place, found, rack: self.rack.clone() });
            }
            match Sqlite::open(path, &self.rack) {
                Ok(mut old) if replace || old.is_empty()? => newest = newest.max(old.load()?.term),
                Ok(_) => return Err(SnapshotError::Occupied(place)),
                Err(StoreError::Moved { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let new = path.with_extension("new");
        for name in [new.clone(), wal(&new), wal(path)] {
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
        drop(store);
        if let Some((certificate, key)) = &self.identity {
            let folder = path.with_file_name("identity");
            let mut private = std::fs::DirBuilder::new();
            private.recursive(true).mode(0o700).create(&folder).map_err(file(&folder))?;
            Authority::from_pem(certificate, key)?.save(&folder)?;
            let tokens = folder.join("tokens.json");
            let text = self.tokens.as_deref().unwrap_or("{}");
            rackbus_identity::write_private(&tokens, text).map_err(file(&tokens))?;
        }
        std::fs::rename(&new, path).map_err(file(path))?;
        let folder = path.parent().unwrap_or(Path::new("/"));
        std::fs::File::open(folder).and_then(|it| it.sync_all()).map_err(file(folder))
    }

    fn commit(&self) -> Commit {
        Commit {
            records: self.records.clone(),
            answers: self.answers.clone(),
            events: self.events.clone(),
            ..Commit::default()
        }
    }

    /// The state under `keys`, as it is at one moment; `target` as in [`of_sqlite`](Snapshot::of_sqlite).
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub async fn of_etcd(
        etcd: &mut Etcd,
        keys: &Keys,
        target: Option<&str>,
    ) -> Result<Snapshot, SnapshotError> {
        let (mut range, mut all) = (Range::of(&keys.key("")), Vec::new());
        loop {
            let page = etcd.range(&range).await?;
            range.revision = page.revision.max(range.revision);
            all.extend(page.values);
            match all.last().filter(|_| page.more) {
                Some(KeyValue { key, .. }) => range.from = format!("{key}\0"),
                None => break,
            }
        }
        let named = |name: &str| {
            let key = keys.key(name);
            all.iter().find(|it| it.key == key).map(|it| it.value.clone())
        };
        let place = keys.key("");
        let rack = named("rack").ok_or_else(|| SnapshotError::Nothing(place.clone()))?;
        if let Some(to) = named("moved").filter(|to| Some(to.as_str()) != target) {
            return Err(SharedError::Moved { prefix: place, to }.into());
        }
        if named("incomplete").is_some() {
            return Err(SharedError::Incomplete { prefix: place }.into());
        }
        let identity = named("identity").map(|it| identity_of(&it)).transpose()?;
        Ok(Snapshot {
            format: FORMAT,
            rack: rack_of(&rack)?,
            term: named("term").and_then(|it| it.parse().ok()).unwrap_or(0),
            records: under(&all, &keys.key("record/"))?,
            answers: under(&all, &keys.key("answer/"))?,
            events: under(&all, &keys.key("event/"))?,
            identity: identity.map(|it| (it.pem().0.to_owned(), it.pem().1)),
            tokens: named("tokens"),
        })
    }

    /// Puts it under `keys`, while nobody leads. What is there is replaced where it was moved away, or where `replace`
    /// says so. Whoever is interrupted leaves a mark, with which no control plane begins.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub async fn put_etcd(
        &self,
        etcd: &mut Etcd,
        keys: &Keys,
        replace: bool,
    ) -> Result<(), SnapshotError> {
        let held = Held::take(etcd, keys).await?;
        let put = self.put_held(etcd, keys, replace, &held).await;
        drop(etcd.revoke(held.lease).await);
        put
    }

    async fn put_held(
        &self,
        etcd: &mut Etcd,
        keys: &Keys,
        replace: bool,
        held: &Held,
    ) -> Result<(), SnapshotError> {
        let names = ["rack", "moved", "incomplete", "term"];
        let then = names.iter().map(|name| Op::Get(keys.key(name))).collect();
        let found = etcd.txn(&Txn { then, ..Txn::default() }).await?.found;
        let value = |n: usize| found.get(n).cloned().flatten().map(|it| it.value);
        let place = keys.key("");
        if let Some(found) = value(0).map(|it| rack_of(&it)).transpose()? {
            if found != self.rack {
                return Err(SnapshotError::OtherRack { place, found, rack: self.rack.clone() });
            }
            let gone = value(1).is_some() || value(2).is_some();
            if !replace && !gone && self.occupies(etcd, keys).await? {
                return Err(SnapshotError::Occupied(place));
            }
        }
        let newest = value(3).and_then(|it| it.parse().ok()).unwrap_or(0).max(self.term);
        let folder = |name: &str| {
            let prefix = keys.key(name);
            let end = crate::etcd::after(&prefix);
            Op::DeleteRange(prefix, end)
        };
        held.change(
            etcd,
            vec![
                Op::put(keys.key("incomplete"), "1"),
                Op::put(keys.key("rack"), rack_value(&self.rack)),
                Op::put(keys.key("term"), newest.saturating_add(1).to_string()),
                Op::Delete(keys.key("moved")),
                Op::Delete(keys.key("tokens")),
                folder("record/"),
                folder("answer/"),
                folder("event/"),
            ],
        )
        .await?;
        let mut batch = Vec::new();
        let mut bytes = 0;
        for op in operations(keys, &self.commit())? {
            bytes += op.bytes();
            batch.push(op);
            if batch.len() >= BATCH.0 || bytes >= BATCH.1 {
                held.change(etcd, std::mem::take(&mut batch)).await?;
                bytes = 0;
            }
        }
        held.change(etcd, batch).await?;
        let mut last = vec![Op::Delete(keys.key("incomplete"))];
        if let Some((certificate, key)) = &self.identity {
            let authority = Authority::from_pem(certificate, key)?;
            last.push(Op::put(keys.key("identity"), identity_value(&authority)));
        }
        if let Some(tokens) = &self.tokens {
            last.push(Op::put(keys.key("tokens"), tokens.as_str()));
        }
        held.change(etcd, last).await
    }

    /// Whether something of a rack is there beside its name and its authority.
    async fn occupies(&self, etcd: &mut Etcd, keys: &Keys) -> Result<bool, SnapshotError> {
        let first = Range { limit: 1, ..Range::of(&keys.key("record/")) };
        Ok(!etcd.range(&first).await?.values.is_empty())
    }
}

/// Notes that the state under `keys` has gone to `place`: no control plane begins with it any more.
///
/// # Errors
/// [`SnapshotError`], among them that somebody leads.
pub async fn leave_etcd(etcd: &mut Etcd, keys: &Keys, place: &str) -> Result<(), SnapshotError> {
    let held = Held::take(etcd, keys).await?;
    let left = held.change(etcd, vec![Op::put(keys.key("moved"), place)]).await;
    drop(etcd.revoke(held.lease).await);
    left
}

/// The leader's key, held by who changes a state as a whole.
struct Held {
    leader: String,
    lease: EtcdLease,
    revision: Revision,
}

impl Held {
    async fn take(etcd: &mut Etcd, keys: &Keys) -> Result<Held, SnapshotError> {
        let (seen, leader) = election::seen(&etcd.txn(&election::look(keys)).await?);
        if seen.leader.is_some() {
            let url = leader.map(|it| it.url).unwrap_or_default();
            return Err(SnapshotError::Led(url));
        }
        let (lease, _) = etcd.grant(TTL).await?;
        let pid = std::process::id();
        let (version, url) = (env!("CARGO_PKG_VERSION").to_owned(), "(a restore)".to_owned());
        let own = Member { id: format!("restore-{pid:x}"), url, version, pid };
        let value = serde_json::to_string(&own).unwrap_or_default();
        let leader = keys.key("leader");
        let take = Txn {
            compares: vec![Compare::Created(leader.clone(), 0)],
            then: vec![Op::Put { key: leader.clone(), value, lease: Some(lease) }],
            otherwise: Vec::new(),
        };
        let done = etcd.txn(&take).await?;
        match done.succeeded {
            true => Ok(Held { leader, lease, revision: done.revision }),
            false => Err(SnapshotError::Interrupted),
        }
    }

    async fn change(&self, etcd: &mut Etcd, then: Vec<Op>) -> Result<(), SnapshotError> {
        let compares = vec![Compare::Created(self.leader.clone(), self.revision)];
        match etcd.txn(&Txn { compares, then, ..Txn::default() }).await?.succeeded {
            true => Ok(()),
            false => Err(SnapshotError::Interrupted),
        }
    }
}

/// The values under a prefix.
fn under<T: serde::de::DeserializeOwned>(
    all: &[KeyValue],
    prefix: &str,
) -> Result<Vec<T>, SnapshotError> {
    let found = all.iter().filter(|it| it.key.starts_with(prefix));
    let read = found.map(|it| {
        serde_json::from_str(&it.value)
            .map_err(|cause| SharedError::Value(it.key.clone(), cause).into())
    });
    read.collect()
}

/// What SQLite writes beside a file.
fn wal(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push("-wal");
    name.into()
}

#[cfg(test)]
mod tests {
    use rackbus_lease::{FunctionRecord, FunctionState, HostRecord};

    use super::*;

    fn state() -> Snapshot {
        let function = "alpha/nvme0".parse().unwrap();
        let function = FunctionRecord { function, epoch: 7, state: FunctionState::Offered };
        let (host, address) = ("alpha".to_owned(), "here".to_owned());
        let host = HostRecord { host, incarnation: 3, address };
        let authority = Authority::generate("lab").unwrap();
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
            identity: Some((authority.pem().0.to_owned(), authority.pem().1)),
            tokens: Some("{}".to_owned()),
        }
    }

    #[test]
    fn a_backup_is_its_owners_and_says_the_same_again() {
        use std::os::unix::fs::PermissionsExt;
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

    #[test]
    fn a_file_gets_a_state_once_and_again_where_it_was_moved_away() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.db");
        assert!(matches!(Snapshot::of_sqlite(&path, None), Err(SnapshotError::Nothing(_))));
        state().put_sqlite(&path, false).unwrap();
        let read = Snapshot::of_sqlite(&path, None).unwrap();
        assert_eq!((read.rack.as_str(), read.term, read.records.len()), ("lab", 5, 3));
        assert!(read.identity.is_some() && read.tokens.is_some());
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
