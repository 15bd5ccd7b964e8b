//! The state of a rack whose control plane is several: in etcd, each value under a key of its own.
//!
//! Every commit is one transaction that compares the leader's key with the revision by which this leader made it, so
//! that a commit of who has lost the leadership fails as a whole. It also names the commit before it and itself: when
//! its answer is lost, asking again finds out whether it was carried out, and never does it twice. A commit about
//! which this cannot be found out before the leadership's own time is over ends the leadership: the next leader reads
//! what there is.
//!
//! Under the rack's prefix are `rack` (whose it is), `leader`, `term`, `members/…`, `commit`, `record/…`, `answer/…`,
//! `certificate/…`, `event/…` (numbered with leading zeros), `identity`, `tokens`, and `moved` where the state has gone elsewhere.

use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Commit, Store, StoreError, StoredState};
use crate::etcd::{Compare, EtcdOperation, Kv, KvError, Revision, Txn, read_all};
use crate::leadership::Tenure;
use crate::leadership::shared::rack_value;
use crate::register::{RegisterChange, RegisterEntry};

/// Version of the layout of the keys of a rack that begins.
pub(crate) const FIRST_ETCD_LAYOUT: u64 = 1;
/// The newest version that is known: of a rack that has begun to replace its certificate authority, and refuses certificates whose
/// keys it does not know. It is noted when that is stored, and not when a control plane begins, since those beside it may be
/// older. Version 2 knows no keys, and would write entries anew without them.
pub const ETCD_LAYOUT: u64 = 3;

/// Where a rack's keys are, and its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys {
    prefix: String,
    rack: String,
}

impl Keys {
    /// Those of the rack of this name, or under a prefix of the user's.
    pub fn of(rack: &str, prefix: Option<&str>) -> Keys {
        let prefix = match prefix {
            Some(prefix) => prefix.trim_end_matches('/').to_owned(),
            None => format!("/rackbus/{rack}"),
        };
        Keys { prefix, rack: rack.to_owned() }
    }

    /// A key by its name under the prefix.
    pub fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.prefix)
    }

    pub(crate) fn event(&self, id: u64) -> String {
        self.key(&format!("event/{id:020}"))
    }
}

/// The store of a leader.
#[derive(Debug)]
pub struct Etcd {
    kv: Box<dyn Kv>,
    keys: Keys,
    tenure: Arc<Tenure>,
    /// The revision of the commit before; 0 when there was none.
    committed: Revision,
    /// How many commits this leader has made.
    made: u64,
}

impl Etcd {
    /// The store of who leads by `tenure`.
    pub fn new(kv: Box<dyn Kv>, keys: Keys, tenure: Arc<Tenure>) -> Etcd {
        Etcd { kv, keys, tenure, committed: 0, made: 0 }
    }

    fn failed(error: KvError) -> StoreError {
        StoreError::Etcd(error.to_string())
    }

    /// The leadership is over: nothing more is stored through this.
    fn lost(&mut self) -> StoreError {
        self.tenure.end();
        StoreError::NotLeading
    }

    fn read<T: DeserializeOwned>(
        &mut self,
        folder: &str,
        at: Revision,
    ) -> Result<(Vec<T>, Revision), StoreError> {
        let prefix = self.keys.key(folder);
        let (values, at) = read_all(self.kv.as_mut(), &prefix, at).map_err(Etcd::failed)?;
        let read = values.iter().map(|found| {
            serde_json::from_str(&found.value).map_err(|cause| StoreError::Value {
                path: "etcd".into(),
                key: found.key.clone(),
                cause,
            })
        });
        Ok((read.collect::<Result<_, _>>()?, at))
    }

    /// Carries out `ops` if this leads, exactly once.
    fn change(&mut self, mut ops: Vec<EtcdOperation>) -> Result<(), StoreError> {
        let name = format!("{}.{}", self.tenure.revision, self.made + 1);
        let (leader, commit) = (self.keys.key("leader"), self.keys.key("commit"));
        ops.push(EtcdOperation::put(commit.as_str(), name.as_str()));
        let txn = Txn {
            compares: vec![
                Compare::Created(leader.clone(), self.tenure.revision),
                Compare::Modified(commit.clone(), self.committed),
            ],
            then: ops,
            otherwise: vec![EtcdOperation::Get(leader), EtcdOperation::Get(commit)],
        };
        txn.check_size()
            .map_err(|error| StoreError::Etcd(format!("the step is too large: {error}")))?;
        let mut unsure = false;
        loop {
            if self.tenure.is_over() {
                return Err(self.lost());
            }
            match self.kv.txn(&txn) {
                Ok(done) if done.succeeded => {
                    (self.committed, self.made) = (done.revision, self.made + 1);
                    return Ok(());
                }
                Ok(done) => {
                    let [leader, commit] = &done.found[..] else { return Err(self.lost()) };
                    let leads = leader.as_ref().map(|it| it.created) == Some(self.tenure.revision);
                    return match commit.as_ref().filter(|it| leads && it.value == name) {
                        Some(own) => {
                            (self.committed, self.made) = (own.modified, self.made + 1);
                            Ok(())
                        }
                        None => Err(self.lost()),
                    };
                }
                Err(error @ (KvError::Refused(_) | KvError::Gone(_))) if !unsure => {
                    return Err(Etcd::failed(error));
                }
                Err(error) => {
                    tracing::warn!(%error, "a commit is tried again");
                    unsure |= !matches!(error, KvError::Unreachable(_) | KvError::NotTrusted(_));
                    self.kv.pause();
                }
            }
        }
    }
}

impl Store for Etcd {
    fn load(&mut self) -> Result<StoredState, StoreError> {
        let (records, at) = self.read("record/", 0)?;
        let (answers, _) = self.read("answer/", at)?;
        let (certificates, _) = self.read("certificate/", at)?;
        let (events, _) = self.read("event/", at)?;
        let commit = self.keys.key("commit");
        let (found, _) = read_all(self.kv.as_mut(), &commit, at).map_err(Etcd::failed)?;
        self.committed = found.first().map_or(0, |it| it.modified);
        Ok(StoredState { term: self.tenure.term(), records, answers, certificates, events })
    }

    fn begin(&mut self) -> Result<u64, StoreError> {
        // It was stored when the leadership was won.
        Ok(self.tenure.term())
    }

    fn raise_term(&mut self, above: u64) -> Result<u64, StoreError> {
        let term = self.tenure.term().max(above).saturating_add(1);
        self.change(vec![EtcdOperation::put(self.keys.key("term"), term.to_string())])?;
        self.tenure.set_term(term);
        Ok(term)
    }

    fn commit(&mut self, commit: &Commit) -> Result<(), StoreError> {
        // Also where nothing is stored something is said, which only a leader may.
        if self.tenure.is_over() {
            return Err(self.lost());
        }
        match commit.is_empty() {
            true => Ok(()),
            false => self.change(operations(&self.keys, commit)?),
        }
    }
}

/// What a commit changes, each key once: of several changes of a key, the last.
pub(crate) fn operations(keys: &Keys, commit: &Commit) -> Result<Vec<EtcdOperation>, StoreError> {
    let mut changes = std::collections::BTreeMap::new();
    for record in &commit.records {
        let key = keys.key(&format!("record/{}", record.key()));
        let value = (!record.removes()).then(|| text(&key, record)).transpose()?;
        changes.insert(key, value);
    }
    for answer in &commit.answers {
        let key = keys.key(&format!("answer/{}", answer.key));
        let value = text(&key, answer)?;
        changes.insert(key, Some(value));
    }
    for forgotten in &commit.forgotten_keys {
        changes.insert(keys.key(&format!("answer/{forgotten}")), None);
    }
    for change in &commit.certificates {
        if let RegisterChange::Put(RegisterEntry::Authorities(_)) = change {
            // One that knows nothing of it would let in whom it must not.
            changes.insert(keys.key("rack"), Some(rack_value(&keys.rack, ETCD_LAYOUT)));
        }
        let (entry, is_kept) = match change {
            RegisterChange::Put(entry) => (entry, true),
            RegisterChange::Forget(entry) => (entry, false),
        };
        let key = keys.key(&format!("certificate/{}", entry.key()));
        let value = is_kept.then(|| text(&key, entry)).transpose()?;
        changes.insert(key, value);
    }
    for id in &commit.forgotten_events {
        changes.insert(keys.event(*id), None);
    }
    for event in commit.events.iter().filter(|event| event.id >= commit.first_event) {
        let key = keys.event(event.id);
        let value = text(&key, event)?;
        changes.insert(key, Some(value));
    }
    let mut ops: Vec<EtcdOperation> = changes
        .into_iter()
        .map(|(key, value)| match value {
            Some(value) => EtcdOperation::put(key, value),
            None => EtcdOperation::Delete(key),
        })
        .collect();
    if commit.first_event > 0 {
        ops.push(EtcdOperation::DeleteRange(keys.event(0), keys.event(commit.first_event)));
    }
    Ok(ops)
}

fn text(key: &str, value: &impl Serialize) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|cause| StoreError::Value {
        path: "etcd".into(),
        key: key.to_owned(),
        cause,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leadership::shared::rack_of;
    use crate::register::AuthoritySet;

    #[test]
    fn the_layout_is_newer_from_the_first_rotation_on() {
        let keys = Keys::of("lab", Some("/racks/one"));
        let rack = |entries: Vec<RegisterEntry>| {
            let certificates = entries.into_iter().map(RegisterChange::Put).collect();
            let commit = Commit { certificates, ..Commit::default() };
            operations(&keys, &commit).unwrap().into_iter().find_map(|it| match it {
                EtcdOperation::Put { key, value, .. } if key == "/racks/one/rack" => Some(value),
                _ => None,
            })
        };
        assert_eq!(rack(Vec::new()), None);
        let set = AuthoritySet::first("certificate", "key".to_owned());
        let value = rack(vec![RegisterEntry::Authorities(Box::new(set))]).unwrap();
        assert_eq!(value, rack_value("lab", 3), "a version that knows up to 2 refuses it");
        assert_eq!(rack_of(&value).unwrap(), "lab");
    }
}
