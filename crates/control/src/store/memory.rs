//! A store that forgets with its process: for tests, which also make it fail.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use rackbus_lease::Record;

use super::{Commit, Store, StoreError, StoredState};
use crate::answers::KeptAnswer;
use crate::api::EventRecord;
use crate::register::{RegisterChange, RegisterEntry};

/// Decides whether a commit may be stored; may wait.
pub type Judge = Arc<dyn Fn(&Commit) -> Result<(), StoreError> + Send + Sync>;

/// A store in memory. Its clones share what is stored: so another control plane can find it.
#[derive(Clone, Default)]
pub struct MemoryStore {
    kept: Arc<Mutex<StoreContent>>,
    judge: Option<Judge>,
}

#[derive(Default)]
struct StoreContent {
    term: u64,
    records: BTreeMap<String, Record>,
    answers: BTreeMap<String, KeptAnswer>,
    certificates: BTreeMap<String, RegisterEntry>,
    events: BTreeMap<u64, EventRecord>,
}

impl MemoryStore {
    /// The same store, which asks `judge` before each commit.
    #[must_use]
    pub fn judged_by(self, judge: Judge) -> MemoryStore {
        MemoryStore { judge: Some(judge), ..self }
    }
}

impl std::fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}

impl Store for MemoryStore {
    fn load(&mut self) -> Result<StoredState, StoreError> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(StoredState {
            term: kept.term,
            records: kept.records.values().cloned().collect(),
            answers: kept.answers.values().cloned().collect(),
            certificates: kept.certificates.values().cloned().collect(),
            events: kept.events.values().cloned().collect(),
        })
    }

    fn begin(&mut self) -> Result<u64, StoreError> {
        self.raise_term(0)
    }

    fn raise_term(&mut self, above: u64) -> Result<u64, StoreError> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.term = kept.term.max(above).saturating_add(1);
        Ok(kept.term)
    }

    fn commit(&mut self, commit: &Commit) -> Result<(), StoreError> {
        if let Some(judge) = &self.judge {
            judge(commit)?;
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        for record in &commit.records {
            match record.removes() {
                true => drop(kept.records.remove(&record.key())),
                false => drop(kept.records.insert(record.key(), record.clone())),
            }
        }
        for answer in &commit.answers {
            kept.answers.insert(answer.key.clone(), answer.clone());
        }
        for key in &commit.forgotten_keys {
            kept.answers.remove(key);
        }
        for change in &commit.certificates {
            match change {
                RegisterChange::Put(entry) => {
                    drop(kept.certificates.insert(entry.key(), entry.clone()))
                }
                RegisterChange::Forget(entry) => drop(kept.certificates.remove(&entry.key())),
            }
        }
        kept.events.extend(commit.events.iter().map(|event| (event.id, event.clone())));
        kept.events
            .retain(|id, _| *id >= commit.first_event && !commit.forgotten_events.contains(id));
        Ok(())
    }
}
