//! Functions are borrowed and returned: what is asked of the writer, and how long is waited until it is done.

use std::fmt::Display;
use std::time::{Duration, Instant};

use rackbus_lease::{
    BorrowRefused, FunctionId, LeaseRecord, LeaseState, Priority, ReturnRefused, Terms,
};

use super::Service;
use super::known::RackState;
use super::turns::{Turn, is_busy};
use super::views::{not_lent, present, problem};
use super::writer::{
    AwaitedLease, ChosenFunction, Granted, QueueStanding, Returned, WriterRequest,
};
use crate::api::{ApiError, BorrowRequest, Lease};
use crate::events::Draft;

/// How long a request waits for nodes to do what it asks for.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// How long a return waits beyond what a user has to release a device: until it is reset, scrubbed and offered again.
pub(super) const RETURN_PATIENCE: Duration = Duration::from_secs(20);

/// The longest that a user may have to release a function, in milliseconds, as in the rack file.
const LONGEST_GRACE_MS: u64 = 600_000;

/// Functions that are asked for together.
pub(super) struct FunctionsRequest<'a> {
    pub(super) functions: Vec<FunctionId>,
    pub(super) borrower: &'a str,
    pub(super) terms: Terms,
    /// The idempotency key of the request.
    pub(super) key: Option<String>,
    /// That the request names no function, and this one was chosen for it.
    pub(super) chosen: Option<ChosenFunction>,
}

pub(super) fn function_id(name: &str) -> Result<FunctionId, ApiError> {
    name.parse().map_err(|cause: rackbus_lease::BadFunctionId| {
        problem("bad_name", cause.to_string(), "`rackbus devices` lists the functions")
    })
}

impl Service {
    /// Borrows a function and waits until it can be used, and where the request says so, until others
    /// have returned it. When the caller does not wait so long (the future is dropped), it loses its
    /// place in the queue, and the lease is given back. Asked again with the same idempotency key,
    /// the answer is that to the first request.
    ///
    /// # Errors
    /// [`ApiError`], which names the holder when there is one.
    pub async fn borrow(
        &self,
        request: &BorrowRequest,
        key: Option<String>,
    ) -> Result<Lease, ApiError> {
        if let Some(wanted) = &request.accelerator {
            return self.borrow_accelerator(request, wanted, key).await;
        }
        let asked = match self.asked(request, key) {
            Ok(asked) => asked,
            Err(refused) => {
                return Err(self.refuse(&request.borrower, &[&request.function], refused).await);
            }
        };
        let wait = request.wait_ms.map(Duration::from_millis);
        match self.grant(asked, wait, request.priority).await? {
            Granted::Answered(answer, _) => *answer,
            Granted::Leases(wanted) => {
                let mut leases = self.settle(wanted, &request.function, &request.borrower).await?;
                Ok(leases.remove(0))
            }
        }
    }

    /// What a request asks for, if that can be.
    fn asked<'a>(
        &self,
        request: &'a BorrowRequest,
        key: Option<String>,
    ) -> Result<FunctionsRequest<'a>, ApiError> {
        request.check_target()?;
        let id = function_id(&request.function)?;
        request.wait()?;
        self.shared.check_apart(request.placement, &request.function)?;
        let (functions, terms) = (vec![id], request.terms()?);
        Ok(FunctionsRequest { functions, borrower: &request.borrower, terms, key, chosen: None })
    }

    /// Notes that `borrower` is refused the functions that it `wanted`, or an accelerator, before anything is decided.
    pub(super) async fn refuse<F: Display>(
        &self,
        borrower: &str,
        wanted: &[F],
        refused: ApiError,
    ) -> ApiError {
        let refusal = Draft::of_refused_borrow(borrower, wanted, None, &refused.error);
        self.writing.note_refused(refusal).await;
        refused
    }

    /// Has leases granted on functions, on all or on none, as soon as they are available.
    pub(super) async fn grant(
        &self,
        asked: FunctionsRequest<'_>,
        wait: Option<Duration>,
        priority: Priority,
    ) -> Result<Granted, ApiError> {
        let FunctionsRequest { functions, borrower, mut terms, key, chosen } = asked;
        terms.placement = self.shared.placed(terms.placement);
        let checked = self
            .shared
            .check_placement(&functions, terms.placement, borrower)
            .and_then(|()| self.shared.check_plugs(terms.vm.as_deref(), borrower));
        if let Err(refused) = checked {
            return Err(self.refuse(borrower, &functions, refused).await);
        }
        let (begun, now) = (Instant::now(), tokio::time::Instant::now());
        let wait_until = wait.map(|wait| now + wait);
        let patience = now + PATIENCE;
        let turn = wait.map(|_| Turn::enter(&self.shared, &functions, priority));
        let asker = turn.as_ref().map_or(QueueStanding::Now(priority), Turn::asker);
        let mut steps = self.shared.steps.subscribe();
        let granted = loop {
            let (functions, borrower) = (functions.clone(), borrower.to_owned());
            let (terms, key) = (terms.clone(), key.clone());
            let ask = |answer| WriterRequest::Borrow {
                functions,
                borrower,
                terms,
                key,
                chosen,
                asker,
                answer,
            };
            let refused = match self.writing.ask(ask).await? {
                Err(refused) => refused,
                granted => break granted,
            };
            let again = match &refused {
                // Just after a restart: the nodes are on their way.
                BorrowRefused::Awaited(_) | BorrowRefused::Joining(_) => {
                    let until = wait_until.map_or(patience, |until| until.max(patience));
                    tokio::time::timeout_at(until, steps.changed()).await.is_ok()
                }
                busy if is_busy(busy) => match (&turn, wait_until) {
                    (Some(turn), Some(until)) => turn.come(until).await,
                    _ => false,
                },
                _ => false,
            };
            if !again {
                break Err(refused);
            }
        };
        drop(turn);
        if let Err(refused) = &granted
            && (matches!(refused, BorrowRefused::Awaited(_) | BorrowRefused::Joining(_))
                || wait.is_some() && is_busy(refused))
        {
            self.shared.known().refused += 1;
            let waited = wait.map(|_| begun.elapsed());
            let cause = refused.to_string();
            let refusal = Draft::of_refused_borrow(borrower, &functions, waited, &cause);
            self.writing.note(vec![refusal]).await;
        }
        granted.map_err(|refused| self.shared.explain(refused))
    }

    /// Waits until all that was granted can be used. If one cannot, all are given back.
    pub(super) async fn settle(
        &self,
        wanted: Vec<AwaitedLease>,
        what: &str,
        borrower: &str,
    ) -> Result<Vec<Lease>, ApiError> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        let settled = |known: &RackState| {
            let record = |wanted: &AwaitedLease| known.leases.get(&wanted.lease).cloned();
            let records: Vec<LeaseRecord> = wanted.iter().filter_map(record).collect();
            let ended = |record: &LeaseRecord| matches!(record.state, LeaseState::Ended { .. });
            let open = |record: &LeaseRecord| matches!(record.state, LeaseState::Active { .. });
            let all_open = records.len() == wanted.len() && records.iter().all(open);
            (records.iter().any(ended) || all_open).then_some(records)
        };
        let Some(records) = self.shared.wait(deadline, settled).await else {
            wanted.into_iter().for_each(AwaitedLease::refuse);
            return Err(problem(
                "timeout",
                format!("{what} could not be lent to {borrower} in {PATIENCE:?}"),
                "the lease is taken back; `rackbus status` tells how the nodes are",
            ));
        };
        for record in &records {
            if let LeaseState::Ended { reason } = &record.state {
                wanted.into_iter().for_each(AwaitedLease::refuse);
                return Err(not_lent(record, reason));
            }
        }
        wanted.into_iter().for_each(AwaitedLease::keep);
        Ok(records.iter().map(present).collect())
    }

    /// Returns a lease and waits until the function is offered again. `within`: after so many milliseconds it is taken
    /// from a user that has not released it, instead of after the rack's `return_grace`. Asked again with the same
    /// idempotency key, the answer is that to the first request.
    ///
    /// # Errors
    /// [`ApiError`].
    pub async fn give_back(
        &self,
        lease: u64,
        within: Option<u64>,
        key: Option<String>,
    ) -> Result<Lease, ApiError> {
        if within.is_some_and(|within| within > LONGEST_GRACE_MS) {
            return Err(problem(
                "bad_time",
                format!("a user cannot have more than {LONGEST_GRACE_MS} ms to release a function"),
                "give a shorter time, or none for the rack's `return_grace`",
            ));
        }
        let ask = |answer| WriterRequest::GiveBack { lease, within, key, answer };
        match self.writing.ask(ask).await? {
            Ok(Returned::Awaited) => {}
            Ok(Returned::Answered(answer)) => return *answer,
            Err(refused @ ReturnRefused::Unknown(_)) => {
                let help = "`rackbus leases` lists them";
                return Err(problem("unknown_lease", refused.to_string(), help));
            }
            Err(refused @ ReturnRefused::AlreadyEnded { .. }) => {
                let help = "there is nothing left to return";
                return Err(problem("over", refused.to_string(), help));
            }
        }
        self.wait_back(lease).await
    }

    /// How long a function may take to be back: what its user has to release it, and what its lender takes to make it
    /// usable again.
    pub(super) fn return_patience(&self, lease: Option<u64>) -> Duration {
        let known = self.shared.known();
        let record = lease.and_then(|lease| known.leases.get(&lease));
        let turn = record.and_then(|record| record.turn.as_ref()).map_or(0, |turn| turn.grace);
        let given = match record.map(|record| &record.state) {
            Some(LeaseState::Closing { within: Some(within), .. }) => *within,
            _ => self.return_grace.saturating_add(turn),
        };
        RETURN_PATIENCE.saturating_add(Duration::from_millis(given))
    }

    /// Waits until the function of a lease that ends is offered again.
    ///
    /// # Errors
    /// [`ApiError`] when it takes too long.
    pub(super) async fn wait_back(&self, lease: u64) -> Result<Lease, ApiError> {
        let patience = self.return_patience(Some(lease));
        let deadline = tokio::time::Instant::now() + patience;
        let back = self
            .shared
            .wait(deadline, |known| {
                let record = known.leases.get(&lease)?;
                (!record.is_live() && !known.is_held(lease)).then(|| present(record))
            })
            .await;
        back.ok_or_else(|| {
            let function = self.shared.known().leases.get(&lease).map(|l| l.function.clone());
            let trouble = function.and_then(|function| self.shared.trouble(&function));
            let cause = trouble.map(|trouble| format!(": {trouble}")).unwrap_or_default();
            problem(
                "timeout",
                format!("lease {lease} is ending, but its function is not back after {patience:?}{cause}"),
                "the control plane goes on asking; `rackbus status` tells how the nodes are",
            )
        })
    }
}
