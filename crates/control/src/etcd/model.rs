//! A cluster in memory, for simulations: keys with revisions, leases that end by a clock that is set, transactions.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{
    Compare, EtcdLease, EtcdOperation, KeyPage, KeyRange, KeyValue, Kv, KvError, Revision,
    TransactionResult, Txn,
};

/// Revisions that can be read after others.
const KEPT: usize = 500;

/// A cluster. Its clones are the same one.
#[derive(Debug, Clone, Default)]
pub struct ModelCluster {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    now: u64,
    revision: Revision,
    keys: BTreeMap<String, KeyValue>,
    /// The keys as they were, for some revisions.
    past: BTreeMap<Revision, BTreeMap<String, KeyValue>>,
    /// Time to live, and when it ends.
    leases: BTreeMap<EtcdLease, (u64, u64)>,
    granted: EtcdLease,
}

impl ModelCluster {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It is `now` on the cluster's clock, in milliseconds: leases that are over end, and their keys go.
    pub fn pass(&self, now: u64) {
        let mut state = self.state();
        state.now = now;
        let over = |(_, until): &(u64, u64)| *until <= now;
        let over: Vec<EtcdLease> =
            state.leases.iter().filter(|(_, it)| over(it)).map(|(lease, _)| *lease).collect();
        over.into_iter().for_each(|lease| state.end(lease));
    }

    /// Grants a lease of so many milliseconds.
    pub fn grant(&self, ttl: u64) -> EtcdLease {
        let mut state = self.state();
        state.granted += 1;
        let (lease, until) = (state.granted, state.now + ttl);
        state.leases.insert(lease, (ttl, until));
        lease
    }

    /// Renews a lease; its time to live in milliseconds. `None`: it has ended.
    pub fn renew(&self, lease: EtcdLease) -> Option<u64> {
        let mut state = self.state();
        let now = state.now;
        let (ttl, until) = state.leases.get_mut(&lease)?;
        *until = now + *ttl;
        Some(*ttl)
    }

    /// Ends a lease of etcd's: the keys that are attached to it go.
    pub fn revoke(&self, lease: EtcdLease) {
        self.state().end(lease);
    }
}

impl State {
    /// Begins the next revision; the keys of this one are kept for a while.
    fn next(&mut self) {
        self.past.insert(self.revision, self.keys.clone());
        if self.past.len() > KEPT {
            self.past.pop_first();
        }
        self.revision += 1;
    }

    fn end(&mut self, lease: EtcdLease) {
        if self.leases.remove(&lease).is_some() {
            self.next();
            self.keys.retain(|_, it| it.lease != lease);
        }
    }

    fn holds(&self, compare: &Compare) -> bool {
        match compare {
            Compare::Created(key, at) => self.keys.get(key).map_or(0, |it| it.created) == *at,
            Compare::Modified(key, at) => self.keys.get(key).map_or(0, |it| it.modified) == *at,
        }
    }

    fn carry_out(&mut self, op: &EtcdOperation, found: &mut Vec<Option<KeyValue>>) {
        let at = self.revision;
        match op {
            EtcdOperation::Put { key, value, lease } => {
                let created = self.keys.get(key).map_or(at, |it| it.created);
                let (key, value, lease) = (key.clone(), value.clone(), lease.unwrap_or(0));
                let put = KeyValue { key: key.clone(), value, created, modified: at, lease };
                self.keys.insert(key, put);
            }
            EtcdOperation::Delete(key) => drop(self.keys.remove(key)),
            EtcdOperation::DeleteRange(from, to) => {
                self.keys.retain(|key, _| key < from || key >= to)
            }
            EtcdOperation::Get(key) => found.push(self.keys.get(key).cloned()),
        }
    }
}

impl Kv for ModelCluster {
    fn txn(&mut self, txn: &Txn) -> Result<TransactionResult, KvError> {
        txn.check_size().map_err(KvError::Refused)?;
        let mut state = self.state();
        let succeeded = txn.compares.iter().all(|compare| state.holds(compare));
        let ops = if succeeded { &txn.then } else { &txn.otherwise };
        let ended = |op: &&EtcdOperation| matches!(op, EtcdOperation::Put { lease: Some(it), .. } if !state.leases.contains_key(it));
        if ops.iter().any(|op| ended(&op)) {
            return Err(KvError::Gone("requested lease not found".to_owned()));
        }
        if ops.iter().any(|op| !matches!(op, EtcdOperation::Get(_))) {
            state.next();
        }
        let mut found = Vec::new();
        ops.iter().for_each(|op| state.carry_out(op, &mut found));
        Ok(TransactionResult { succeeded, revision: state.revision, found })
    }

    fn range(&mut self, range: &KeyRange) -> Result<KeyPage, KvError> {
        let state = self.state();
        let keys = match range.revision {
            0 => &state.keys,
            now if now == state.revision => &state.keys,
            then => state.past.get(&then).ok_or(KvError::Refused("it was compacted".to_owned()))?,
        };
        let found = keys.range(range.from.clone()..range.to.clone());
        let mut values: Vec<KeyValue> = found.map(|(_, it)| it.clone()).collect();
        let more = values.len() > range.limit;
        values.truncate(range.limit);
        Ok(KeyPage { values, revision: state.revision, more })
    }

    fn pause(&mut self) {}
}
