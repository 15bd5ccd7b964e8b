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
use crate::events::{Draft, RefusalLimiter, ReportLimiter};
use crate::service::news::{DecidedRecords, events_of};
use crate::store::Commit;

/// Requests that are decided together at most.
pub(super) const MOST_REQUESTS: usize = 64;
/// Records, and messages of one node, beyond which nothing more joins: a store takes a commit of bounded size only.
const MOST_RECORDS: usize = 256;

/// What became of a group.
struct Stored {
    outcome: Result<(), ApiError>,
    /// Nothing else was in it.
    alone: bool,
}

/// What is done when a group is stored, or could not be.
type Afterwards = Box<dyn FnOnce(&mut Writer, Stored) + Send>;

/// An event of a group.
struct GroupEvent {
    draft: Draft,
    /// It is told also where the group is not stored.
    holds: bool,
}

/// What is decided and not stored yet.
#[derive(Default)]
pub(super) struct StepGroup {
    decision: Decision,
    /// What becomes of each key; nothing where it is forgotten.
    answers: BTreeMap<String, Option<KeptAnswer>>,
    /// In the order in which they happened.
    events: Vec<GroupEvent>,
    /// There is something that is to be stored before anybody is told.
    decides: bool,
    decided: DecidedRecords,
    afterwards: Vec<Afterwards>,
    /// The keys that it changed, as they were before, oldest first.
    answers_before: Vec<(String, Option<KeptAnswer>)>,
    /// As they were before the first life of a node in it, and before the first refusal.
    reports_before: Option<ReportLimiter>,
    /// What hosts said since then, and when: it stays said when the life is taken back.
    said_since: Vec<(u64, String, Vec<Draft>)>,
    refusals_before: Option<RefusalLimiter>,
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
            R::GiveBackAll { .. } | R::ChangeLevel { .. } | R::Compose { .. } => false,
            R::Share { .. } | R::Offer { .. } | R::Withdraw { .. } | R::FollowFile { .. } => false,
            R::Register { .. } | R::RaiseTerm { .. } => false,
        }
    }

    /// Whether another request may join.
    pub fn has_room(&self) -> bool {
        self.decision.records.len() < MOST_RECORDS
    }
}

impl Writer {
    /// Decides what is asked, and answers when it is stored. What could not be stored together with others is decided again by
    /// itself: it may be somebody else's that the store does not take.
    pub(super) fn answer_when_stored<T: Send + 'static>(
        &mut self,
        mut decide: impl FnMut(&mut Writer) -> Result<T, ApiError> + Send + 'static,
        answer: impl FnOnce(&mut Writer, Result<T, ApiError>) + Send + 'static,
    ) {
        let by = self.by.clone();
        let decided = decide(self);
        self.group.afterwards.push(Box::new(move |writer, stored| {
            let outcome = match stored.outcome {
                Err(_) if !stored.alone => {
                    let by = std::mem::replace(&mut writer.by, by);
                    let decided = decide(writer);
                    let outcome = writer.store_group().and(decided);
                    writer.by = by;
                    outcome
                }
                outcome => outcome.and(decided),
            };
            answer(writer, outcome);
        }));
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
        let told = events_of(&self.shared.known(), &mut self.group.decided, &outcome.records);
        self.group.decides |=
            !(outcome.records.is_empty() && answers.is_empty() && events.is_empty());
        self.group.decides |= !forgotten_keys.is_empty();
        let said = events.into_iter().map(|draft| self.own(draft)).collect::<Vec<_>>();
        self.keep_events(now, said, true);
        let told = self.drafts(now, told);
        self.keep_events(now, told, false);
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

    /// Those of the events of a host's report that are kept.
    pub(super) fn kept_of_report(&mut self, host: &str, events: Vec<Draft>) -> Vec<Draft> {
        let now = self.shared.clock.now();
        if self.group.reports_before.is_some() && !events.is_empty() {
            self.group.said_since.push((now, host.to_owned(), events.clone()));
        }
        self.reports.kept(now, host, events)
    }

    /// The events that the records of a step tell, as they may be stored.
    pub(super) fn drafts(&mut self, now: u64, told: Vec<Draft>) -> Vec<Draft> {
        let mut drafts = Vec::new();
        for draft in told {
            match draft.restarted().map(str::to_owned) {
                // A node begins as many lives as it likes.
                Some(host) => drafts.extend(self.reports.kept(now, &host, vec![draft])),
                None => drafts.push(draft),
            }
        }
        drafts.into_iter().map(|draft| self.own(draft)).collect()
    }

    fn keep_events(&mut self, now: u64, drafts: Vec<Draft>, holds: bool) {
        let events = drafts.into_iter().map(|draft| GroupEvent { draft: draft.at(now), holds });
        self.group.events.extend(events);
    }

    /// Keeps events that no decision belongs to, to be stored next.
    pub(super) fn note(&mut self, events: Vec<Draft>) {
        let drafts = events.into_iter().map(|event| self.own(event)).collect();
        self.keep_events(self.shared.clock.now(), drafts, true);
    }

    /// Notes that somebody was refused; where that was decided by what is not stored yet, it `holds` only with that.
    pub(super) fn note_refusal(&mut self, alike: &str, refusal: Draft, holds: bool) {
        let now = self.shared.clock.now();
        if self.group.refusals_before.is_none() && !holds {
            self.group.refusals_before = Some(self.refusals.clone());
        }
        if let Some(event) = self.refusals.refused(now, alike, refusal) {
            let event = self.own(event);
            self.keep_events(now, vec![event], holds);
        }
    }

    /// Stores what is decided, has it known and sent, and answers then.
    ///
    /// # Errors
    /// When it could not be stored: it is taken back.
    pub(super) fn store_group(&mut self) -> Result<(), ApiError> {
        let mut group = std::mem::take(&mut self.group);
        let afterwards = std::mem::take(&mut group.afterwards);
        let outcome = if group.decides { self.store(group) } else { self.tell(group) };
        let alone = afterwards.len() == 1;
        for work in afterwards {
            work(self, Stored { outcome: outcome.clone(), alone });
        }
        outcome
    }

    /// Steps that change nothing that is stored: what they say is sent, if this still leads. Their events are stored if the
    /// store takes them.
    fn tell(&mut self, group: StepGroup) -> Result<(), ApiError> {
        let StepGroup { decision, events, .. } = group;
        let is_noted = !events.is_empty();
        events.into_iter().for_each(|event| self.unstored.keep(event.draft));
        let mut told = Ok(());
        if !decision.messages.is_empty() {
            match self.commit(&Commit::default()) {
                Ok(()) => self.shared.publish(decision, Vec::new(), 0),
                Err(error) => {
                    self.authority.take_back();
                    told = Err(not_stored(&error));
                }
            }
        }
        self.authority.settle();
        if is_noted {
            self.store_notes();
        }
        told
    }

    fn store(&mut self, group: StepGroup) -> Result<(), ApiError> {
        let now = self.shared.clock.now();
        let StepGroup { decision, answers, events, answers_before, .. } = group;
        let drafts = self.unstored.next().chain(events.iter().map(|event| &event.draft));
        let (kept, forgotten): (Vec<_>, Vec<_>) =
            answers.into_iter().partition(|(_, kept)| kept.is_some());
        let commit = Commit {
            records: decision.records.clone(),
            answers: kept.into_iter().filter_map(|(_, kept)| kept).collect(),
            forgotten_keys: forgotten.into_iter().map(|(key, _)| key).collect(),
            ..self.numbered(now, drafts.cloned().collect())
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
        if let Some(before) = group.reports_before {
            self.reports = before;
            for (now, host, events) in group.said_since {
                drop(self.reports.kept(now, &host, events));
            }
        }
        if let Some(before) = group.refusals_before {
            self.refusals = before;
        }
        let held = events.into_iter().filter(|event| event.holds);
        held.for_each(|event| self.unstored.keep(event.draft));
        self.shared.known().store_failures += 1;
        Err(not_stored(&error))
    }

    /// Stores events that are kept, as far as the store takes them.
    pub(super) fn store_notes(&mut self) {
        loop {
            let now = self.shared.clock.now();
            let drafts: Vec<Draft> = self.unstored.next().cloned().collect();
            if drafts.is_empty() {
                return;
            }
            let commit = self.numbered(now, drafts);
            if let Err(error) = self.commit(&commit) {
                tracing::error!(%error, "events could not be stored; that is tried again");
                self.shared.known().store_failures += 1;
                return;
            }
            self.unstored.stored();
            self.shared.publish(Decision::default(), commit.events, commit.first_event);
        }
    }
}
