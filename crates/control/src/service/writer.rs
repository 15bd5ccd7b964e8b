//! The writer: one thread that owns the authority and its store, and takes every step.
//!
//! A step is decided, stored, and only then known, sent and answered. The thread waits for the
//! disk; nobody else does. What it is asked comes through a bounded queue, so that whoever asks
//! faster than the disk stores waits for a place in it; what has come meanwhile is stored [together](group).

mod certificates;
mod following;
mod group;
mod interests;
mod leases;
mod requests;
mod shares;
mod unstored;

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rackbus_lease::{
    Authority, ChangeRefused, CompositionRefused, Decision, HostRecord, LeaseId, LeaseRecord,
    LeaseState, Message,
};
use tokio::sync::{mpsc, oneshot};

use certificates::TIDIED_EVERY;
pub(super) use certificates::prolong_all;
use group::{MOST_REQUESTS, StepGroup};
use interests::{InterestEnds, Interests};
use requests::Answer;
pub(super) use requests::{
    AwaitedLease, ChosenFunction, CompositionChange, Granted, NewRackFile, QueueStanding,
    RegisterRequest, Returned, ShareChange, WriterRequest,
};

use unstored::Unstored;

use super::{WriterShared, problem};
use crate::access::{self, RequestOrigin as By};
use crate::answers::{KeptAnswer, KeptAnswers, KeyLookup, KeyedChange, KeyedRequest};
use crate::api::{ApiError, EventKind};
use crate::events::{Draft, LastHeard, RefusalLimiter, ReportLimiter, SilentNodes};
use crate::store::{Commit, Store, StoreError};

/// How many times it is looked which nodes are silent in the time after which one is.
const SILENCE_LOOKS: u64 = 5;
/// Requests that may wait for the writer.
const BACKLOG: usize = 256;

/// Whether a lease was on its way to whoever asked for it when the control plane before this one died. That of a turn nobody
/// waits for.
fn is_lost(record: &LeaseRecord) -> bool {
    record.turn.is_none() && matches!(record.state, LeaseState::Arming | LeaseState::Opening)
}

/// A way to the writer.
#[derive(Debug)]
pub(super) struct Writing {
    requests: mpsc::Sender<(Option<By>, WriterRequest)>,
}

impl Writing {
    /// Starts the writer's thread, which notes `events` first. It ends when the way to it is dropped.
    pub fn start(
        authority: Authority,
        store: Box<dyn Store>,
        answers: KeptAnswers,
        shared: Arc<WriterShared>,
        events: Vec<Draft>,
    ) -> std::io::Result<Writing> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        let (requests, inbox) = mpsc::channel(BACKLOG);
        let ends = Arc::<InterestEnds>::default();
        let mut interests = Interests::new(ends.clone());
        let now = shared.clock.now();
        let lost = authority.leases().filter(|lease| is_lost(lease)).map(|lease| lease.lease);
        lost.chain(answers.pending_leases()).for_each(|lease| interests.lost(now, lease));
        let silent = SilentNodes::of(&shared.known().log);
        let mut writer = Writer {
            authority,
            store,
            answers,
            shared,
            refusals: RefusalLimiter::default(),
            reports: ReportLimiter::default(),
            silent,
            unstored: Unstored::default(),
            interests,
            group: StepGroup::default(),
            again: Instant::now(),
            next_silence: Instant::now(),
            next_tidying: Instant::now() + TIDIED_EVERY,
            next_rotation: Instant::now(),
            by: None,
        };
        let run = move || {
            let work = || {
                writer.note(events);
                // What could not be stored is tried again.
                let _ = writer.store_group();
                runtime.block_on(writer.run(inbox, &ends));
            };
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err() {
                // Its successor begins with what is stored, which is whole.
                tracing::error!("the control plane's writer failed; the process ends");
                std::process::abort();
            }
        };
        std::thread::Builder::new().name("writer".into()).spawn(run)?;
        Ok(Writing { requests })
    }

    /// Asks, and waits for the answer. The request is made once there is a place for it: a caller that goes before that has
    /// not asked.
    pub async fn ask<T>(
        &self,
        request: impl FnOnce(Answer<T>) -> WriterRequest,
    ) -> Result<T, ApiError> {
        let (answer, answered) = oneshot::channel();
        let gone = || {
            problem("ending", "the control plane ends".to_owned(), "start it again and try again")
        };
        let place = self.requests.reserve().await.map_err(|_| gone())?;
        place.send((access::asker(), request(answer)));
        answered.await.map_err(|_| gone())?
    }

    /// Has something noted that decides nothing.
    pub async fn note(&self, events: Vec<Draft>) {
        // A writer that is gone notes nothing any more: the process ends.
        let _ = self.requests.send((access::asker(), WriterRequest::Note { events })).await;
    }

    /// Has it noted that something was refused to a host.
    pub async fn note_refused(&self, refusal: Draft) {
        let _ = self.requests.send((access::asker(), WriterRequest::Refused { refusal })).await;
    }

    /// Has it noted that somebody had no right to what was asked for.
    pub async fn note_forbidden(&self, by: By, text: String) {
        let _ = self.requests.send((None, WriterRequest::Forbidden { by, text })).await;
    }
}

/// What a step comes to, beside the answer to who asked for it.
#[derive(Debug, Default)]
struct Step {
    outcome: Decision,
    events: Vec<Draft>,
    answers: Vec<KeptAnswer>,
    forgotten_keys: Vec<String>,
}

impl From<Decision> for Step {
    fn from(outcome: Decision) -> Step {
        Step { outcome, ..Step::default() }
    }
}

struct Writer {
    authority: Authority,
    store: Box<dyn Store>,
    answers: KeptAnswers,
    shared: Arc<WriterShared>,
    refusals: RefusalLimiter,
    reports: ReportLimiter,
    /// Nodes that are not heard from.
    silent: SilentNodes,
    unstored: Unstored,
    /// Who waits for which lease.
    interests: Interests,
    /// What is decided and not stored yet.
    group: StepGroup,
    /// Not before then is tried again what could not be stored.
    again: Instant,
    /// When it is looked again which nodes are silent.
    next_silence: Instant,
    /// When what certificates there are is looked through again.
    next_tidying: Instant,
    /// When it is looked again whether a new certificate authority may sign, where one is to.
    next_rotation: Instant,
    /// Who asked for what is done now.
    by: Option<By>,
}

impl Writer {
    async fn run(
        &mut self,
        mut requests: mpsc::Receiver<(Option<By>, WriterRequest)>,
        ends: &InterestEnds,
    ) {
        loop {
            let wait = self.until_tick();
            tokio::select! {
                request = requests.recv() => match request {
                    Some(first) => self.serve_together(first, &mut requests),
                    None => return,
                },
                end = ends.next() => {
                    self.interests.ended(self.shared.clock.now(), end);
                    self.give_back_unwanted();
                }
                () = tokio::time::sleep(wait) => self.tick(),
            }
        }
    }

    fn until_tick(&self) -> Duration {
        let ticks = self.authority.next_tick().into_iter();
        let due = ticks.chain(self.interests.next_unwanted()).min().unwrap_or(u64::MAX);
        let mut due = Duration::from_millis(due.saturating_sub(self.shared.clock.now()));
        if !self.unstored.is_empty() {
            // They wait also where no node is there, and so nothing is ever due.
            due = due.min(Duration::from_millis(self.authority.config().resend));
        }
        due = due.min(self.next_silence.saturating_duration_since(Instant::now()));
        due = due.min(self.next_tidying.saturating_duration_since(Instant::now()));
        if self.shared.awaits_authority() {
            due = due.min(self.next_rotation.saturating_duration_since(Instant::now()));
        }
        due.max(self.again.saturating_duration_since(Instant::now()))
    }

    fn tick(&mut self) {
        let ticked = self.step(|authority, now| ((), authority.tick(now).into()));
        if ticked.is_err() {
            // It is due at once, but the disk needs time.
            self.again = Instant::now() + Duration::from_millis(self.authority.config().resend);
        } else if !self.unstored.is_empty() {
            self.store_notes();
        }
        if Instant::now() >= self.next_silence {
            self.note_silence();
        }
        if Instant::now() >= self.next_tidying {
            self.tidy_register();
        }
        if Instant::now() >= self.next_rotation {
            self.advance_rotation();
        }
        self.give_back_unwanted();
    }

    /// Notes which nodes are not heard from any more, or again. The authority's times are asked, by which what passed while
    /// this process stood still counts against nobody.
    fn note_silence(&mut self) {
        let longest = self.authority.config().silence;
        self.next_silence = Instant::now() + Duration::from_millis(longest / SILENCE_LOOKS);
        let heard = self.authority.hosts().map(|(HostRecord { host, .. }, at)| {
            let in_this_life = self.authority.is_registered(host);
            (host.as_str(), LastHeard { at, in_this_life })
        });
        let news = self.silent.news(self.shared.clock.now(), longest, heard);
        if news.is_empty() {
            return;
        }
        for (host, event) in news {
            let events = self.kept_of_report(&host, vec![event]);
            self.note(events);
        }
        // Where they cannot be stored now, they are kept until they can.
        let _ = self.store_group();
    }

    /// Serves a request, and those that wait behind it as far as what they come to can be stored together.
    fn serve_together(
        &mut self,
        first: (Option<By>, WriterRequest),
        requests: &mut mpsc::Receiver<(Option<By>, WriterRequest)>,
    ) {
        let (mut next, mut served) = (Some(first), 0);
        while let Some((by, request)) = next {
            let joins = self.group.takes(&request);
            if !joins {
                // Who asked for something of the group is answered with the error.
                let _ = self.store_group();
            }
            // What a node says is not what it asks for.
            let asks = !matches!(request, WriterRequest::Heard { .. });
            self.by = by.filter(|_| asks);
            self.serve(request);
            self.by = None;
            served += 1;
            // Bounded, since time passes and others have something to say.
            let goes_on = joins && served < MOST_REQUESTS && self.group.has_room();
            next = goes_on.then(|| requests.try_recv().ok()).flatten();
        }
        let _ = self.store_group();
    }

    fn serve(&mut self, request: WriterRequest) {
        match request {
            // Nobody there any more: then the lease is dropped, and so given back.
            WriterRequest::Borrow { functions, borrower, terms, key, chosen, asker, answer } => {
                let decide = move |writer: &mut Writer| {
                    writer.borrow(&functions, &borrower, &terms, (key.clone(), chosen), asker)
                };
                self.answer_when_stored(decide, |writer, granted| {
                    let granted = granted.map(|it| it.map(|it| writer.hand_out(it)));
                    let _ = answer.send(granted);
                });
            }
            WriterRequest::Recall { borrower, terms, key, answer } => {
                let decide = move |writer: &mut Writer| writer.recall(&key, &borrower, &terms);
                self.answer_when_stored(decide, |writer, granted| {
                    let granted = granted.map(|it| it.map(|it| writer.hand_out(it)));
                    let _ = answer.send(granted);
                });
            }
            WriterRequest::WasMade { keyed: KeyedChange { key, request }, answer } => {
                let decide = move |writer: &mut Writer| {
                    let found = writer.answers.find(&key, &request);
                    found.map(|found| found != KeyLookup::New)
                };
                self.answer_when_stored(decide, |_, was_made| drop(answer.send(was_made)));
            }
            WriterRequest::Told { leases, answer } => self.told(leases, answer),
            WriterRequest::Compose { change, keyed, answer } => {
                let _ = answer.send(self.compose(change, keyed));
            }
            WriterRequest::FollowFile { file, answer } => drop(answer.send(self.follow_file(file))),
            WriterRequest::Share { change, answer } => drop(answer.send(self.share(change))),
            WriterRequest::Offer { change, keyed, answer } => {
                let _ =
                    answer.send(self.once(keyed, |authority, now| authority.offer(now, change)));
            }
            WriterRequest::Withdraw { change, force, keyed, answer } => {
                let withdraw =
                    |authority: &mut Authority, now| authority.withdraw(now, change, force);
                let _ = answer.send(self.once(keyed, withdraw));
            }
            WriterRequest::ChangeLevel { lease, level, keyed, answer } => {
                let _ = answer.send(self.change_level(lease, level, keyed));
            }
            WriterRequest::GiveBack { lease, within, key, answer } => {
                let decide =
                    move |writer: &mut Writer| writer.give_back(lease, within, key.clone());
                self.answer_when_stored(decide, |_, returned| drop(answer.send(returned)));
            }
            WriterRequest::GiveBackAll { leases, keyed, answer } => {
                let newest = leases.iter().max().copied().unwrap_or(0);
                let returned = self.once(keyed, |authority, now| {
                    Ok::<_, Infallible>((newest, authority.give_back_all(now, &leases)))
                });
                let _ = answer.send(returned.map(|Ok(newest)| newest));
            }
            WriterRequest::Heard { host, messages, events, answer } => {
                self.heard(host, messages, events, answer);
            }
            WriterRequest::RaiseTerm { above, answer } => drop(answer.send(self.raise_term(above))),
            WriterRequest::Register { asked, keyed, answer } => {
                let _ = answer.send(self.change_register(asked, keyed));
            }
            WriterRequest::Note { events } => self.note(events),
            WriterRequest::Refused { refusal } => {
                self.shared.known().refused += 1;
                self.refused(refusal, true);
            }
            WriterRequest::Forbidden { by, text } => {
                let alike = format!("forbidden {by}");
                let refusal = Draft::of_host(EventKind::Refusal, by.host.as_deref(), text);
                self.by = Some(by);
                self.note_refusal(&alike, refusal, true);
            }
        }
    }

    /// A node said something, which is decided with what else there is.
    fn heard(
        &mut self,
        host: String,
        messages: Vec<Message>,
        events: Vec<Draft>,
        answer: Answer<()>,
    ) {
        let mut events = self.kept_of_report(&host, events);
        let registers = messages.iter().any(|m| matches!(m, Message::Register { .. }));
        let from = host.clone();
        let decide = move |writer: &mut Writer| {
            // It may have left the rack since it was asked for.
            writer.shared.check_host(&from)?;
            // What happened is told once, however often it is decided what follows from the messages.
            let (messages, events) = (messages.clone(), std::mem::take(&mut events));
            Ok(writer.stage(|authority, now| {
                let outcome = authority.receive_all(now, &from, messages);
                (now, Step { events, ..outcome.into() })
            }))
        };
        self.answer_when_stored(decide, move |writer, heard| {
            let heard = heard.map(|now| writer.shared.heard(&host, now, registers));
            let _ = answer.send(heard);
        });
    }

    /// Asks a lease's lender for another service level; the answer is which change of it that is.
    fn change_level(
        &mut self,
        lease: LeaseId,
        level: Option<String>,
        keyed: Option<KeyedChange>,
    ) -> Result<Result<LeaseId, ChangeRefused>, ApiError> {
        self.once(keyed, |authority, now| {
            let outcome = authority.change_level(now, lease, level)?;
            let change = authority.lease(lease).and_then(|it| it.change.as_ref());
            Ok((change.map_or(0, |change| change.number), outcome))
        })
    }

    /// Saves or forgets a composition, which has no number.
    fn compose(
        &mut self,
        change: CompositionChange,
        keyed: Option<KeyedChange>,
    ) -> Result<Result<LeaseId, CompositionRefused>, ApiError> {
        if let CompositionChange::Save(composition) = &change {
            // They may have left the rack since it was asked for.
            let lenders = composition.functions.iter().map(|function| &function.host);
            for host in lenders.chain([&composition.borrower]) {
                self.shared.check_host(host)?;
            }
        }
        self.once(keyed, |authority, now| {
            let changed = match change {
                CompositionChange::Save(composition) => authority.compose(now, composition),
                CompositionChange::Remove(name) => authority.dissolve(now, &name),
            };
            changed.map(|outcome| (0, outcome))
        })
    }

    /// Goes on in a later term than `above`, unless that was done meanwhile.
    fn raise_term(&mut self, above: u64) -> Result<u64, ApiError> {
        let term = self.shared.term.load(Ordering::Acquire);
        if above < term {
            return Ok(term);
        }
        let term = self.store.raise_term(above).map_err(|error| not_stored(&error))?;
        tracing::warn!(term, "nodes know of a later term: the records are an older copy");
        self.shared.term.store(term, Ordering::Release);
        Ok(term)
    }

    /// Notes that somebody was refused what was asked for.
    fn refused(&mut self, refusal: Draft, holds: bool) {
        let by = self.by.as_ref().map(By::to_string).unwrap_or_default();
        // The limiter keeps what was said.
        let refusal = refusal.bounded();
        self.note_refusal(&format!("{by}: {}", refusal.text()), refusal, holds);
    }

    fn find(&self, key: Option<&str>, request: &KeyedRequest) -> Result<KeyLookup, ApiError> {
        key.map_or(Ok(KeyLookup::New), |key| self.answers.find(key, request))
    }

    /// The number that a change gave when it was made before under its key; nothing where it was not.
    fn made(&self, keyed: Option<&KeyedChange>) -> Result<Option<LeaseId>, ApiError> {
        let Some(KeyedChange { key, request }) = keyed else { return Ok(None) };
        Ok(match self.answers.find(key, request)? {
            KeyLookup::Pending(number) | KeyLookup::Answered(number, _) => Some(number),
            KeyLookup::New => None,
        })
    }

    /// A step that gives something its number, or is refused. It is taken once where it has a key: of one that was
    /// taken before, the answer is the number that it gave then.
    fn once<E>(
        &mut self,
        keyed: Option<KeyedChange>,
        decide: impl FnOnce(&mut Authority, u64) -> Result<(LeaseId, Decision), E>,
    ) -> Result<Result<LeaseId, E>, ApiError> {
        if let Some(number) = self.made(keyed.as_ref())? {
            return Ok(Ok(number));
        }
        self.step(|authority, at_ms| match decide(authority, at_ms) {
            Ok((number, outcome)) => {
                let answers = keyed.map(|keyed| keyed.kept(number, at_ms)).into_iter().collect();
                (Ok(number), Step { answers, ..outcome.into() })
            }
            Err(refused) => (Err(refused), Step::default()),
        })
    }

    /// One step of the authority by itself: decide, store, then let it be known and send.
    fn step<R>(
        &mut self,
        decide: impl FnOnce(&mut Authority, u64) -> (R, Step),
    ) -> Result<R, ApiError> {
        let answer = self.stage(decide);
        self.store_group()?;
        Ok(answer)
    }

    fn commit(&mut self, commit: &Commit) -> Result<(), StoreError> {
        let begun = Instant::now();
        let outcome = self.store.commit(commit);
        if !commit.is_empty() {
            self.shared.commits.observe(begun.elapsed().as_secs_f64());
        }
        outcome
    }

    /// An event of what is done now, as it may be stored.
    fn own(&self, draft: Draft) -> Draft {
        draft.by(self.by.clone()).bounded()
    }

    /// The same of events of which is known who asked for them.
    fn numbered(&self, now: u64, drafts: Vec<Draft>) -> Commit {
        let known = self.shared.known();
        if drafts.is_empty() {
            return Commit::default();
        }
        let events = known.log.number(now, drafts);
        let first_event = known.log.first_kept(now, events.len());
        let forgotten_events = known.log.forgotten(&events, first_event);
        Commit { events, first_event, forgotten_events, ..Commit::default() }
    }
}

/// A decision was not stored, as far as that is known.
fn not_stored(error: &StoreError) -> ApiError {
    if matches!(error, StoreError::NotLeading) {
        return problem("ending", error.to_string(), "ask again with the same idempotency key");
    }
    problem(
        "not_stored",
        format!("the decision could not be stored: {error}"),
        "nothing was changed; see to the store of the control plane and try again",
    )
}
