//! The writer: one thread that owns the authority and its store, and takes every step.
//!
//! A step is decided, stored, and only then known, sent and answered. The thread waits for the
//! disk; nobody else does. What it is asked comes through a bounded queue, so that whoever asks
//! faster than the disk stores waits for a place in it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rackbus_lease::{
    Authority, BorrowRefused, ChangeRefused, Composition, CompositionRefused, DeviceChange,
    DeviceRefused, FunctionId, FunctionState, LeaseId, Message, Outcome, Place, Priority,
    ReturnRefused, ShareRefused, ShareRequest, Terms,
};
use tokio::sync::{mpsc, oneshot};

use super::turns::is_busy;
use super::{Shared, problem};
use crate::answers::{Answer as Kept, Answers, Found, KeptAnswer, KeyedRequest};
use crate::api::{ApiError, Event};
use crate::events::{Draft, Refusals, lease_span};
use crate::store::{Commit, Store, StoreError};

/// Requests that may wait for the writer.
const BACKLOG: usize = 256;

/// An answer, when what it says is stored.
type Answer<T> = oneshot::Sender<Result<T, ApiError>>;
/// What the writer is asked to do.
#[derive(Debug)]
pub(super) enum Request {
    /// Grants leases on functions, on all or on none, or says why not. An idempotency key goes with one
    /// function only.
    Borrow {
        functions: Vec<FunctionId>,
        borrower: String,
        terms: Terms,
        key: Option<String>,
        asker: Asker,
        answer: Answer<Result<Granted, BorrowRefused>>,
    },
    /// Ends a lease in order.
    GiveBack {
        lease: LeaseId,
        key: Option<String>,
        answer: Answer<Result<Returned, ReturnRefused>>,
    },
    /// Asks a lease's lender for another service level; the answer is which change of it that is.
    ChangeLevel {
        lease: LeaseId,
        level: Option<String>,
        answer: Answer<Result<u64, ChangeRefused>>,
    },
    /// Saves or forgets a composition.
    Compose { change: CompositionChange, answer: Answer<Result<(), CompositionRefused>> },
    /// Somebody takes turns on a function, or does so no more; the answer is the share's number.
    Share { change: ShareChange, answer: Answer<Result<LeaseId, ShareRefused>> },
    /// Offers a device; the answer is the number of the change.
    Offer { change: DeviceChange, answer: Answer<Result<LeaseId, DeviceRefused>> },
    /// Withdraws a device, and ends the leases of its functions where `force` says so; the answer is the number of the
    /// change.
    Withdraw { change: DeviceChange, force: bool, answer: Answer<Result<LeaseId, DeviceRefused>> },
    /// A node said something.
    Heard { host: String, messages: Vec<Message>, events: Vec<Draft>, answer: Answer<()> },
    /// Nodes know of a later term than this one's.
    RaiseTerm { above: u64, answer: Answer<u64> },
    /// Something happened that decides nothing.
    Note { events: Vec<Draft> },
}

/// What becomes of a composition.
#[derive(Debug)]
pub(super) enum CompositionChange {
    /// It is saved.
    Save(Composition),
    /// The one of this name is forgotten.
    Remove(String),
}

/// What becomes of a share.
#[derive(Debug)]
pub(super) enum ShareChange {
    /// There is a new one.
    Join(Box<ShareRequest>),
    /// It takes no more turns.
    Leave(LeaseId),
    /// It gives its turn back early.
    GiveBack(LeaseId),
}

/// How a request for a function stands to those who wait for the same.
#[derive(Debug, Clone, Copy)]
pub(super) enum Asker {
    /// It does not wait.
    Now(Priority),
    /// It waits, and asks again.
    Waits(Place),
}

/// What became of a request for a function.
#[derive(Debug)]
pub(super) enum Granted {
    /// A lease for each function, on its way to its borrower.
    Leases(Vec<Wanted>),
    /// The request was answered before.
    Answered(Box<Kept>),
}

/// What became of a request to end a lease.
#[derive(Debug)]
pub(super) enum Returned {
    /// It ends; its function is on the way back.
    Awaited,
    /// The request was answered before.
    Answered(Box<Kept>),
}

/// A lease that somebody asked for and waits for. Dropped before it is [kept](Wanted::keep), it is
/// given back: its caller went away.
#[derive(Debug)]
pub(super) struct Wanted {
    pub lease: LeaseId,
    interest: Arc<Interest>,
}

impl Wanted {
    /// The caller has it.
    pub fn keep(self) {
        self.interest.kept.store(true, Ordering::Release);
    }
}

/// All who wait for one lease: a request that is asked again waits beside the first.
#[derive(Debug)]
struct Interest {
    lease: LeaseId,
    kept: AtomicBool,
    unwanted: mpsc::UnboundedSender<LeaseId>,
}

impl Drop for Interest {
    fn drop(&mut self) {
        if !self.kept.load(Ordering::Acquire) {
            // A writer that is gone gives nothing back; the process ends with it.
            let _ = self.unwanted.send(self.lease);
        }
    }
}

/// A way to the writer.
#[derive(Debug)]
pub(super) struct Writing {
    requests: mpsc::Sender<Request>,
}

impl Writing {
    /// Starts the writer's thread, which notes `events` first. It ends when the way to it is dropped.
    pub fn start(
        authority: Authority,
        store: Box<dyn Store>,
        answers: Answers,
        shared: Arc<Shared>,
        events: Vec<Draft>,
    ) -> std::io::Result<Writing> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        let (requests, inbox) = mpsc::channel(BACKLOG);
        // Not bounded by itself, but each lease comes once.
        let (unwanted, returns) = mpsc::unbounded_channel();
        let mut writer = Writer {
            authority,
            store,
            answers,
            shared,
            refusals: Refusals::default(),
            unwanted,
            interests: BTreeMap::new(),
            returning: BTreeSet::new(),
            again: Instant::now(),
        };
        let run = move || {
            let work = || {
                writer.note(events);
                runtime.block_on(writer.run(inbox, returns));
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

    /// Asks, and waits for the answer.
    pub async fn ask<T>(&self, request: impl FnOnce(Answer<T>) -> Request) -> Result<T, ApiError> {
        let (answer, answered) = oneshot::channel();
        let gone = || {
            problem("ending", "the control plane ends".to_owned(), "start it again and try again")
        };
        self.requests.send(request(answer)).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }

    /// Has something noted that decides nothing.
    pub async fn note(&self, events: Vec<Draft>) {
        // A writer that is gone notes nothing any more: the process ends.
        let _ = self.requests.send(Request::Note { events }).await;
    }
}

/// What a step comes to, beside the answer to who asked for it.
#[derive(Debug, Default)]
struct Step {
    outcome: Outcome,
    events: Vec<Draft>,
    answers: Vec<KeptAnswer>,
    forgotten_keys: Vec<String>,
}

impl From<Outcome> for Step {
    fn from(outcome: Outcome) -> Step {
        Step { outcome, ..Step::default() }
    }
}

/// A step that gave something its number, or was refused.
fn numbered<E>(decided: Result<(LeaseId, Outcome), E>) -> (Result<LeaseId, E>, Step) {
    match decided {
        Ok((number, outcome)) => (Ok(number), outcome.into()),
        Err(refused) => (Err(refused), Step::default()),
    }
}

struct Writer {
    authority: Authority,
    store: Box<dyn Store>,
    answers: Answers,
    shared: Arc<Shared>,
    refusals: Refusals,
    unwanted: mpsc::UnboundedSender<LeaseId>,
    /// Who waits for which lease.
    interests: BTreeMap<LeaseId, Weak<Interest>>,
    /// Leases to be given back as soon as that can be stored.
    returning: BTreeSet<LeaseId>,
    /// Not before then is tried again what could not be stored.
    again: Instant,
}

impl Writer {
    async fn run(
        &mut self,
        mut requests: mpsc::Receiver<Request>,
        mut returns: mpsc::UnboundedReceiver<LeaseId>,
    ) {
        loop {
            let wait = self.until_tick();
            tokio::select! {
                request = requests.recv() => match request {
                    Some(request) => self.serve(request),
                    None => return,
                },
                Some(lease) = returns.recv() => {
                    self.returning.insert(lease);
                    self.give_back_unwanted();
                }
                () = tokio::time::sleep(wait) => self.tick(),
            }
        }
    }

    fn until_tick(&self) -> Duration {
        let due = self.authority.next_tick().unwrap_or(u64::MAX);
        let due = Duration::from_millis(due.saturating_sub(self.shared.clock.now()));
        due.max(self.again.saturating_duration_since(Instant::now()))
    }

    fn tick(&mut self) {
        let ticked = self.step(|authority, now| ((), authority.tick(now).into()));
        if ticked.is_err() {
            // It is due at once, but the disk needs time.
            self.again = Instant::now() + Duration::from_millis(self.authority.config().resend);
        }
        self.give_back_unwanted();
    }

    fn give_back_unwanted(&mut self) {
        for lease in std::mem::take(&mut self.returning) {
            if self.interests.get(&lease).is_some_and(|interest| interest.strong_count() > 0) {
                // The request was made again meanwhile, and is waited for.
                continue;
            }
            // Nobody has the answer: who asks again with the same key asks for another lease.
            let forgotten_keys = self.answers.borrow_keys(lease);
            let returned = self.step(|authority, now| match authority.give_back(now, lease) {
                Ok(outcome) => (true, Step { forgotten_keys, ..outcome.into() }),
                Err(_) => (false, Step { forgotten_keys, ..Step::default() }),
            });
            match returned {
                Ok(true) => {
                    let _about = lease_span(lease).entered();
                    tracing::info!("given back: who asked for it is gone");
                }
                // It has ended already.
                Ok(false) => {}
                Err(_) => drop(self.returning.insert(lease)),
            }
        }
    }

    fn serve(&mut self, request: Request) {
        match request {
            // Nobody there any more: then the lease is dropped, and so given back.
            Request::Borrow { functions, borrower, terms, key, asker, answer } => {
                let _ = answer.send(self.borrow(&functions, &borrower, terms, key, asker));
            }
            Request::Compose { change, answer } => {
                let _ = answer.send(self.step(|authority, now| {
                    let changed = match change {
                        CompositionChange::Save(composition) => authority.compose(now, composition),
                        CompositionChange::Remove(name) => authority.dissolve(now, &name),
                    };
                    match changed {
                        Ok(outcome) => (Ok(()), outcome.into()),
                        Err(refused) => (Err(refused), Step::default()),
                    }
                }));
            }
            Request::Share { change, answer } => drop(answer.send(self.share(change))),
            Request::Offer { change, answer } => {
                let _ =
                    answer.send(self.step(|authority, now| numbered(authority.offer(now, change))));
            }
            Request::Withdraw { change, force, answer } => {
                let _ = answer.send(
                    self.step(|authority, now| numbered(authority.withdraw(now, change, force))),
                );
            }
            Request::ChangeLevel { lease, level, answer } => {
                let _ = answer.send(self.step(|authority, now| {
                    match authority.change_level(now, lease, level) {
                        Ok(outcome) => {
                            let change = authority.lease(lease).and_then(|it| it.change.as_ref());
                            (Ok(change.map_or(0, |change| change.number)), outcome.into())
                        }
                        Err(refused) => (Err(refused), Step::default()),
                    }
                }));
            }
            Request::GiveBack { lease, key, answer } => {
                let _ = answer.send(self.give_back(lease, key));
            }
            Request::Heard { host, messages, events, answer } => {
                let registers = messages.iter().any(|m| matches!(m, Message::Register { .. }));
                let hear = |authority: &mut Authority, now| {
                    let outcome = authority.receive_all(now, &host, messages);
                    (now, Step { events, ..outcome.into() })
                };
                let heard = self.step(hear).map(|now| self.shared.heard(&host, now, registers));
                let _ = answer.send(heard);
            }
            Request::RaiseTerm { above, answer } => drop(answer.send(self.raise_term(above))),
            Request::Note { events } => self.note(events),
        }
    }

    fn borrow(
        &mut self,
        functions: &[FunctionId],
        borrower: &str,
        terms: Terms,
        key: Option<String>,
        asker: Asker,
    ) -> Result<Result<Granted, BorrowRefused>, ApiError> {
        let Terms { placement, group, level } = terms.clone();
        let (function, host) = (functions[0].to_string(), borrower.to_owned());
        let request = KeyedRequest::Borrow { function, borrower: host, placement, group, level };
        match self.find(key.as_deref(), &request)? {
            Found::New => {}
            Found::Pending(lease) => return Ok(Ok(Granted::Leases(vec![self.want(lease)]))),
            Found::Answered(answer) => return Ok(Ok(Granted::Answered(answer))),
        }
        let turn = functions.iter().try_for_each(|function| self.check_turn(function, asker));
        if let Err(queued) = turn {
            self.refused_borrow(borrower, &queued, asker);
            return Ok(Err(queued));
        }
        let granted = self.step(|authority, at_ms| {
            match authority.borrow_all(at_ms, functions, borrower, &terms) {
                Ok((leases, outcome)) => {
                    let lease = leases[0];
                    let keep = |key| KeptAnswer { key, request, lease, at_ms, answer: None };
                    let answers = key.map(keep).into_iter().collect();
                    (Ok(leases), Step { answers, ..outcome.into() })
                }
                Err(refused) => (Err(refused), Step::default()),
            }
        })?;
        Ok(match granted {
            Ok(leases) => {
                Ok(Granted::Leases(leases.into_iter().map(|lease| self.want(lease)).collect()))
            }
            Err(refused) => {
                self.refused_borrow(borrower, &refused, asker);
                Err(refused)
            }
        })
    }

    /// Whether it is this request's turn, where the function is to be had.
    fn check_turn(&self, function: &FunctionId, asker: Asker) -> Result<(), BorrowRefused> {
        let state = self.authority.function(function).map(|record| &record.state);
        if state != Some(&FunctionState::Offered) {
            return Ok(());
        }
        let queue = self.shared.queue();
        let before = match asker {
            Asker::Now(priority) => queue.before_newcomer(function, priority),
            Asker::Waits(place) => queue.before(function, place),
        };
        match before {
            0 => Ok(()),
            before => Err(BorrowRefused::Queued { function: function.clone(), before }),
        }
    }

    fn refused_borrow(&mut self, borrower: &str, refused: &BorrowRefused, asker: Asker) {
        // Asked again as soon as the nodes have registered, or while it waits.
        let waits = matches!(asker, Asker::Waits(_)) && is_busy(refused);
        if waits || matches!(refused, BorrowRefused::Awaited(_) | BorrowRefused::Joining(_)) {
            return;
        }
        self.shared.known().refused += 1;
        self.refused(Some(borrower), &format!("{borrower} was refused: {refused}"));
    }

    fn give_back(
        &mut self,
        lease: LeaseId,
        key: Option<String>,
    ) -> Result<Result<Returned, ReturnRefused>, ApiError> {
        let request = KeyedRequest::Return { lease };
        match self.find(key.as_deref(), &request)? {
            Found::New => {}
            Found::Pending(_) => return Ok(Ok(Returned::Awaited)),
            Found::Answered(answer) => return Ok(Ok(Returned::Answered(answer))),
        }
        // Somebody else may have returned it, and its function still be on the way back.
        let held = self.shared.known().is_held(lease);
        let returned = self.step(|authority, at_ms| {
            let keep = |key| KeptAnswer { key, request, lease, at_ms, answer: None };
            let answers = key.map(keep).into_iter().collect();
            match authority.give_back(at_ms, lease) {
                Ok(outcome) => (Ok(Returned::Awaited), Step { answers, ..outcome.into() }),
                Err(ReturnRefused::AlreadyEnded { .. }) if held => {
                    (Ok(Returned::Awaited), Step { answers, ..Step::default() })
                }
                Err(refused) => (Err(refused), Step::default()),
            }
        })?;
        if let Err(refused) = &returned {
            self.refused(None, &format!("a return was refused: {refused}"));
        }
        Ok(returned)
    }

    fn share(&mut self, change: ShareChange) -> Result<Result<LeaseId, ShareRefused>, ApiError> {
        if let ShareChange::Join(request) = &change {
            let function = request.function.clone();
            let waiting = self.shared.queue().length(&function);
            if waiting > 0 {
                return Ok(Err(ShareRefused::Waited { function, waiting }));
            }
        }
        self.step(|authority, now| match change {
            ShareChange::Join(request) => numbered(authority.share(now, *request)),
            ShareChange::Leave(share) => {
                numbered(authority.leave(now, share).map(|outcome| (share, outcome)))
            }
            ShareChange::GiveBack(share) => {
                numbered(authority.give_turn_back(now, share).map(|outcome| (share, outcome)))
            }
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

    /// Notes that somebody was refused.
    fn refused(&mut self, host: Option<&str>, text: &str) {
        let now = self.shared.clock.now();
        if let Some(event) = self.refusals.refused(now, host, text) {
            self.note(vec![event]);
        }
    }

    /// Keeps events that no decision belongs to.
    fn note(&mut self, events: Vec<Draft>) {
        let outcome = Outcome::default();
        let (events, first_event) = self.number(self.shared.clock.now(), &outcome, events);
        let commit = Commit { events, first_event, ..Commit::default() };
        match self.commit(&commit) {
            Ok(()) => self.shared.publish(outcome, commit.events, first_event),
            Err(error) => {
                tracing::error!(%error, "an event could not be stored");
                self.shared.known().store_failures += 1;
            }
        }
    }

    fn find(&self, key: Option<&str>, request: &KeyedRequest) -> Result<Found, ApiError> {
        key.map_or(Ok(Found::New), |key| self.answers.find(key, request))
    }

    /// Somebody waits for a lease.
    fn want(&mut self, lease: LeaseId) -> Wanted {
        self.interests.retain(|_, interest| interest.strong_count() > 0);
        if let Some(interest) = self.interests.get(&lease).and_then(Weak::upgrade) {
            return Wanted { lease, interest };
        }
        let unwanted = self.unwanted.clone();
        let interest = Arc::new(Interest { lease, kept: AtomicBool::new(false), unwanted });
        self.interests.insert(lease, Arc::downgrade(&interest));
        Wanted { lease, interest }
    }

    /// One step of the authority: decide, store, then let it be known and send.
    fn step<R>(
        &mut self,
        decide: impl FnOnce(&mut Authority, u64) -> (R, Step),
    ) -> Result<R, ApiError> {
        let now = self.shared.clock.now();
        let (answer, step) = decide(&mut self.authority, now);
        let Step { outcome, events, mut answers, mut forgotten_keys } = step;
        answers.extend(self.answers.settled(&self.authority));
        if !answers.is_empty() {
            forgotten_keys.extend(self.answers.outdated(now, answers.len()));
        }
        let (events, first_event) = self.number(now, &outcome, events);
        let records = outcome.records.clone();
        let commit = Commit { records, answers, forgotten_keys, events, first_event };
        let unchanged = commit.is_empty() && outcome.messages.is_empty();
        if let Err(error) = self.commit(&commit) {
            tracing::error!(%error, "a decision could not be stored and is taken back");
            self.authority.take_back();
            self.shared.known().store_failures += 1;
            return Err(not_stored(&error));
        }
        commit.answers.into_iter().for_each(|kept| self.answers.put(kept));
        commit.forgotten_keys.iter().for_each(|key| self.answers.forget(key));
        // Who waits for something to happen asks again when it has: a refusal is nothing to wait for.
        if !unchanged {
            self.shared.publish(outcome, commit.events, first_event);
        }
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

    /// The events of a step, and the number of the first event that is kept.
    fn number(&self, now: u64, outcome: &Outcome, mut drafts: Vec<Draft>) -> (Vec<Event>, u64) {
        let known = self.shared.known();
        drafts.extend(known.events_of(&outcome.records));
        if drafts.is_empty() {
            return (Vec::new(), 0);
        }
        let events = known.log.number(now, drafts);
        let first = known.log.first_kept(now, events.len());
        (events, first)
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
