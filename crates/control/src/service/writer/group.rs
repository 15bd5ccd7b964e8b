//! Steps that are stored together.
//!
//! A store takes one commit at a time, and each waits for a disk or a cluster. So what has come while one was stored is
//! decided at once, one after the other, and stored in the next: all of it or nothing. Nobody is told of a step before
//! that, and where it fails none of them has happened.

use std::collections::BTreeMap;

use rackbus_lease::{Authority, Decision, Record};

use super::{Step, Writer, WriterRequest, not_stored};
use crate::answers::KeptAnswer;
use crate::api::ApiError;
use crate::events::{Draft, ReportLimiter};
use crate::service::news::{DecidedRecords, events_of};
use crate::store::Commit;

/// Requests that are decided together at most.
const MOST_REQUESTS: usize = 64;
/// Records, and messages of one node, beyond which nothing more joins: a store takes a commit of bounded size only.
const MOST_RECORDS: usize = 256;

/// What became of a group.
pub(super) struct Stored {
    outcome: Result<(), ApiError>,
    /// Nothing else was in it.
    pub alone: bool,
}

impl Stored {
    /// The answer to a request of the group; an error where it was not stored.
    pub fn and<T>(self, answer: Result<T, ApiError>) -> Result<T, ApiError> {
        self.outcome.and(answer)
    }

    /// Whether it is stored.
    pub fn is_ok(&self) -> bool {
        self.outcome.is_ok()
    }
}

/// What is done when a group is stored, or could not be.
type Afterwards = Box<dyn FnOnce(&mut Writer, Stored) + Send>;

/// What is decided and not stored yet.
#[derive(Default)]
pub(super) struct StepGroup {
    decision: Decision,
    /// What becomes of each key; nothing where it is forgotten.
    answers: BTreeMap<String, Option<KeptAnswer>>,
    events: Vec<Draft>,
    /// Those of them that nobody tells again.
    said_once: Vec<Draft>,
    decided: DecidedRecords,
    afterwards: Vec<Afterwards>,
    /// Events are kept that nothing waits for, and are to be stored.
    notes: bool,
    /// The keys that it changed, as they were before, oldest first.
    answers_before: Vec<(String, Option<KeptAnswer>)>,
    /// As it was before the first life of a node in it.
    reports_before: Option<ReportLimiter>,
}

impl StepGroup {
    /// Whether a request may join those that are decided; one that may not is decided when they are stored.
    pub fn takes(&self, request: &WriterRequest) -> bool {
        use WriterRequest as R;
        match request {
            R::Heard { messages, .. } => {
                messages.len() < MOST_RECORDS || self.afterwards.is_empty()
            }
            R::Borrow { .. } | R::Recall { .. } | R::GiveBack { .. } | R::Told { .. } => true,
            R::WasMade { .. } | R::Note { .. } | R::Refused { .. } | R::Forbidden { .. } => true,
            R::GiveBackAll { .. } | R::ChangeLevel { .. } | R::Compose { .. } | R::Share { .. } => {
                false
            }
            R::Offer { .. } | R::Withdraw { .. } | R::Register { .. } | R::RaiseTerm { .. } => {
                false
            }
        }
    }

    /// Whether another request may join.
    pub fn has_room(&self) -> bool {
        self.afterwards.len() < MOST_REQUESTS && self.decision.records.len() < MOST_RECORDS
    }

    /// Whether it comes to something that is to be stored before anybody is told.
    fn decides(&self) -> bool {
        !(self.decision.records.is_empty() && self.answers.is_empty() && self.said_once.is_empty())
    }
}

impl Writer {
    /// Has something done when all that is decided is stored, or could not be.
    pub(super) fn afterwards(&mut self, work: impl FnOnce(&mut Writer, Stored) + Send + 'static) {
        self.group.afterwards.push(Box::new(work));
    }

    /// Decides a step, which is stored with the others of its group.
    pub(super) fn stage<R>(&mut self, decide: impl FnOnce(&mut Authority, u64) -> (R, Step)) -> R {
        let now = self.shared.clock.now();
        let (answer, step) = decide(&mut self.authority, now);
        let Step { outcome, events, mut answers, mut forgotten_keys } = step;
        answers.extend(self.answers.settled(&self.authority));
        if !answers.is_empty() {
            forgotten_keys.extend(self.answers.outdated(now, answers.len()));
        }
        let is_life = |record: &Record| matches!(record, Record::Host(_));
        if self.group.reports_before.is_none() && outcome.records.iter().any(is_life) {
            self.group.reports_before = Some(self.reports.clone());
        }
        let said_once = events.iter().map(|draft| self.own(draft.clone()).at(now));
        self.group.said_once.extend(said_once.collect::<Vec<_>>());
        let told = events_of(&self.shared.known(), &mut self.group.decided, &outcome.records);
        let drafts = self.drafts(now, events, told);
        self.group.events.extend(drafts.into_iter().map(|draft| draft.at(now)));
        for kept in answers {
            let key = kept.key.clone();
            let before = self.answers.put(kept.clone());
            self.group.answers_before.push((key.clone(), before));
            self.group.answers.insert(key, Some(kept));
        }
        for key in forgotten_keys {
            let before = self.answers.forget(&key);
            self.group.answers_before.push((key.clone(), before));
            self.group.answers.insert(key, None);
        }
        self.group.decision.append(outcome);
        answer
    }

    /// The events that belong to a step, and those that its records tell.
    pub(super) fn drafts(&mut self, now: u64, own: Vec<Draft>, told: Vec<Draft>) -> Vec<Draft> {
        let mut drafts = own;
        for draft in told {
            match draft.restarted().map(str::to_owned) {
                // A node begins as many lives as it likes.
                Some(host) => drafts.extend(self.reports.kept(now, &host, vec![draft])),
                None => drafts.push(draft),
            }
        }
        drafts.into_iter().map(|draft| self.own(draft)).collect()
    }

    /// Keeps events that no decision belongs to, to be stored next.
    pub(super) fn note(&mut self, events: Vec<Draft>) {
        let now = self.shared.clock.now();
        for event in events {
            let event = self.own(event).at(now);
            self.unstored.keep(event);
        }
        self.group.notes = true;
    }

    /// Stores what is decided, has it known and sent, and does what was to be done then.
    ///
    /// # Errors
    /// When it could not be stored: it is taken back.
    pub(super) fn store_group(&mut self) -> Result<(), ApiError> {
        let mut group = std::mem::take(&mut self.group);
        let (afterwards, notes) = (std::mem::take(&mut group.afterwards), group.notes);
        let outcome = match group.decides() {
            true => self.store(group),
            false => self.tell(group.decision),
        };
        let alone = afterwards.len() == 1;
        for work in afterwards {
            work(self, Stored { outcome: outcome.clone(), alone });
        }
        if notes {
            self.store_notes();
        }
        outcome
    }

    /// Steps that change nothing that is stored: what they say is sent, if this still leads.
    fn tell(&mut self, decision: Decision) -> Result<(), ApiError> {
        if !decision.messages.is_empty() {
            if let Err(error) = self.commit(&Commit::default()) {
                self.authority.take_back();
                return Err(not_stored(&error));
            }
            self.shared.publish(decision, Vec::new(), 0);
        }
        self.authority.settle();
        Ok(())
    }

    fn store(&mut self, group: StepGroup) -> Result<(), ApiError> {
        let now = self.shared.clock.now();
        let StepGroup {
            decision, answers, events, said_once, answers_before, reports_before, ..
        } = group;
        let drafts = self.unstored.next().cloned().chain(events).collect();
        let (kept, forgotten): (Vec<_>, Vec<_>) =
            answers.into_iter().partition(|(_, kept)| kept.is_some());
        let commit = Commit {
            records: decision.records.clone(),
            answers: kept.into_iter().filter_map(|(_, kept)| kept).collect(),
            forgotten_keys: forgotten.into_iter().map(|(key, _)| key).collect(),
            ..self.numbered(now, drafts)
        };
        let Err(error) = self.commit(&commit) else {
            self.authority.settle();
            self.unstored.stored();
            self.shared.publish(decision, commit.events, commit.first_event);
            return Ok(());
        };
        tracing::error!(%error, "what was decided could not be stored and is taken back");
        self.authority.take_back();
        for (key, before) in answers_before.into_iter().rev() {
            match before {
                Some(before) => self.answers.put(before),
                None => self.answers.forget(&key),
            };
        }
        // A node says again that it has begun a life, and what was left out is to be told then.
        if let Some(before) = reports_before {
            self.reports = before;
        }
        said_once.into_iter().for_each(|event| self.unstored.keep(event));
        self.shared.known().store_failures += 1;
        Err(not_stored(&error))
    }

    /// Stores events that are kept; where that fails they stay.
    pub(super) fn store_notes(&mut self) {
        let now = self.shared.clock.now();
        let drafts: Vec<Draft> = self.unstored.next().cloned().collect();
        if drafts.is_empty() {
            return;
        }
        let commit = self.numbered(now, drafts);
        match self.commit(&commit) {
            Ok(()) => {
                self.unstored.stored();
                self.shared.publish(Decision::default(), commit.events, commit.first_event);
            }
            Err(error) => {
                tracing::error!(%error, "events could not be stored; that is tried again");
                self.shared.known().store_failures += 1;
            }
        }
    }
}
