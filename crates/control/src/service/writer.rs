//! The writer: one thread that owns the authority and its store, and takes every step.
//!
//! A step is decided, stored, and only then known, sent and answered. The thread waits for the
//! disk; nobody else does. What it is asked comes through a bounded queue, so that whoever asks
//! faster than the disk stores waits for a place in it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rackbus_lease::{
    Authority, BorrowRefused, FunctionId, LeaseId, Message, Outcome, Placement, ReturnRefused,
};
use tokio::sync::{mpsc, oneshot};

use super::{Shared, problem};
use crate::api::ApiError;
use crate::store::Store;

/// Requests that may wait for the writer.
const BACKLOG: usize = 256;

/// An answer, when what it says is stored.
type Answer<T> = oneshot::Sender<Result<T, ApiError>>;

/// What the writer is asked to do.
#[derive(Debug)]
pub(super) enum Request {
    /// Lend a function.
    Borrow { function: FunctionId, borrower: String, answer: Answer<Result<Wanted, BorrowRefused>> },
    /// End a lease.
    GiveBack { lease: LeaseId, answer: Answer<Result<(), ReturnRefused>> },
    /// A node said something.
    Heard { host: String, messages: Vec<Message>, answer: Answer<()> },
}

/// A lease that somebody asked for and waits for. Dropped before it is [kept](Wanted::keep), it is
/// given back: its caller went away.
#[derive(Debug)]
pub(super) struct Wanted {
    pub lease: LeaseId,
    unwanted: Option<mpsc::UnboundedSender<LeaseId>>,
}

impl Wanted {
    /// The caller has it.
    pub fn keep(mut self) {
        self.unwanted = None;
    }
}

impl Drop for Wanted {
    fn drop(&mut self) {
        if let Some(unwanted) = self.unwanted.take() {
            // A writer that is gone gives nothing back; the process ends with it.
            let _ = unwanted.send(self.lease);
        }
    }
}

/// A way to the writer.
#[derive(Debug)]
pub(super) struct Writing {
    requests: mpsc::Sender<Request>,
}

impl Writing {
    /// Starts the writer's thread. It ends when the way to it is dropped.
    pub fn start(
        authority: Authority,
        store: Store,
        shared: Arc<Shared>,
    ) -> std::io::Result<Writing> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        let (requests, inbox) = mpsc::channel(BACKLOG);
        // Not bounded by itself, but each lease comes once.
        let (unwanted, returns) = mpsc::unbounded_channel();
        let returning = BTreeSet::new();
        let again = Instant::now();
        let mut writer = Writer { authority, store, shared, unwanted, returning, again };
        let run = move || {
            let work = || runtime.block_on(writer.run(inbox, returns));
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
}

struct Writer {
    authority: Authority,
    store: Store,
    shared: Arc<Shared>,
    unwanted: mpsc::UnboundedSender<LeaseId>,
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
        let ticked = self.step(|authority, now| ((), authority.tick(now)));
        if ticked.is_err() {
            // It is due at once, but the disk needs time.
            self.again = Instant::now() + Duration::from_millis(self.authority.config().resend);
        }
        self.give_back_unwanted();
    }

    fn give_back_unwanted(&mut self) {
        for lease in std::mem::take(&mut self.returning) {
            let returned = self.step(|authority, now| match authority.give_back(now, lease) {
                Ok(outcome) => (true, outcome),
                Err(_) => (false, Outcome::default()),
            });
            match returned {
                Ok(true) => tracing::info!(lease, "given back: who asked for it is gone"),
                // It has ended already.
                Ok(false) => {}
                Err(_) => drop(self.returning.insert(lease)),
            }
        }
    }

    fn serve(&mut self, request: Request) {
        match request {
            Request::Borrow { function, borrower, answer } => {
                let unwanted = self.unwanted.clone();
                let granted = self.step(|authority, now| {
                    match authority.borrow(now, &function, &borrower, Placement::Lender) {
                        Ok((lease, outcome)) => (Ok(lease), outcome),
                        Err(refused) => (Err(refused), Outcome::default()),
                    }
                });
                let wanted = |lease| Wanted { lease, unwanted: Some(unwanted) };
                // Nobody there any more: then the lease is dropped, and so given back.
                let _ = answer.send(granted.map(|granted| granted.map(wanted)));
            }
            Request::GiveBack { lease, answer } => {
                let outcome = self.step(|authority, now| match authority.give_back(now, lease) {
                    Ok(outcome) => (Ok(()), outcome),
                    Err(refused) => (Err(refused), Outcome::default()),
                });
                let _ = answer.send(outcome);
            }
            Request::Heard { host, messages, answer } => {
                let registers = messages.iter().any(|m| matches!(m, Message::Register { .. }));
                let heard = self
                    .step(|authority, now| (now, authority.receive_all(now, &host, messages)))
                    .map(|now| self.shared.heard(&host, now, registers));
                let _ = answer.send(heard);
            }
        }
    }

    /// One step of the authority: decide, store, then let it be known and send.
    fn step<R>(
        &mut self,
        decide: impl FnOnce(&mut Authority, u64) -> (R, Outcome),
    ) -> Result<R, ApiError> {
        let now = self.shared.clock.now();
        let (answer, outcome) = decide(&mut self.authority, now);
        if let Err(error) = self.store.save(&outcome.records) {
            tracing::error!(%error, "a decision could not be stored and is taken back");
            self.authority.take_back();
            self.shared.known().store_failures += 1;
            return Err(problem(
                "not_stored",
                format!("the decision could not be stored: {error}"),
                "nothing was changed; see to the disk of the control plane and try again",
            ));
        }
        self.shared.publish(outcome);
        Ok(answer)
    }
}
