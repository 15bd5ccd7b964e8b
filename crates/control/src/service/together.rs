//! What the control plane does to have functions borrowed together.

use std::collections::BTreeSet;
use std::time::Duration;

use rackbus_lease::{LeaseId, LeaseState};

use super::Service;
use super::leases::{FunctionsRequest, function_id};
use super::views::{not_lent, present, problem};
use super::writer::Granted;
use crate::answers::BorrowAnswer;
use crate::api::{ApiError, BorrowRequest, Lease};
use crate::together::BorrowAllRequest;

impl Service {
    /// Borrows functions whole or not at all, and waits until all can be used. The caller may go away meanwhile, as
    /// from [`borrow`](Service::borrow); asked again with the same idempotency key, it gets the same leases.
    ///
    /// # Errors
    /// [`ApiError`], which names the holder when there is one.
    pub async fn borrow_together(
        &self,
        request: &BorrowAllRequest,
        key: Option<String>,
    ) -> Result<Vec<Lease>, ApiError> {
        let asked = match self.asked_together(request, key) {
            Ok(asked) => asked,
            Err(refused) => {
                return Err(self.refuse(&request.borrower, &request.functions, refused).await);
            }
        };
        let wait = request.wait_ms.map(Duration::from_millis);
        let borrower = &request.borrower;
        match self.grant(asked, wait, request.priority).await? {
            Granted::Leases(wanted) => {
                self.settle(wanted, &request.functions.join(", "), borrower).await
            }
            Granted::Answered(answer, leases) => self.still_lent(*answer, &leases),
        }
    }

    /// The leases that a repeated request was answered with: as they are now.
    ///
    /// # Errors
    /// [`ApiError`] when the request was refused, or one of them is over; the others stay.
    pub(super) fn still_lent(
        &self,
        answered: BorrowAnswer,
        leases: &[LeaseId],
    ) -> Result<Vec<Lease>, ApiError> {
        answered?;
        let known = self.shared.known();
        let lent = |lease: &LeaseId| {
            let over = || {
                let error = format!("lease {lease} is over");
                problem("failed", error, "ask with another idempotency key")
            };
            let record = known.leases.get(lease).ok_or_else(over)?;
            match &record.state {
                LeaseState::Ended { reason } => Err(not_lent(record, reason)),
                _ => Ok(present(record)),
            }
        };
        leases.iter().map(lent).collect()
    }

    /// What a request asks for, if that can be.
    fn asked_together<'a>(
        &self,
        request: &'a BorrowAllRequest,
        key: Option<String>,
    ) -> Result<FunctionsRequest<'a>, ApiError> {
        let BorrowAllRequest { functions, borrower, placement, group, vm, wait_ms, .. } = request;
        let checked = BorrowRequest {
            placement: Some(*placement),
            group: group.clone(),
            vm: vm.clone(),
            wait_ms: *wait_ms,
            ..BorrowRequest::new("", borrower)
        };
        checked.wait()?;
        let terms = checked.terms()?;
        self.shared.check_host(borrower)?;
        let named = functions.iter().map(|name| function_id(name));
        let named = named.collect::<Result<Vec<_>, _>>()?;
        let once = named.iter().collect::<BTreeSet<_>>().len();
        if named.is_empty() || once < named.len() {
            let error = "functions that are borrowed together are at least one, each once";
            return Err(problem("bad_request", error.to_owned(), "name each of them once"));
        }
        Ok(FunctionsRequest { functions: named, borrower, terms, key, chosen: None })
    }
}
