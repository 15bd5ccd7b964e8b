//! Leases, compositions and devices: what is asked of the control plane.

use std::time::Duration;

use hyper::Method;

use super::transport::escape;
use super::{ControlClient, ControlClientError};
use crate::api::{BorrowRequest, Lease, RackStatus};
use crate::compositions::{Composition, CompositionRequest, CompositionSpec};
use crate::levels::LevelRequest;
use crate::machines::RackFile;
use crate::offers::{OfferRequest, RackSection};
use crate::together::BorrowAllRequest;

/// What a control plane answers that knows no requests for whichever accelerator keeps a level.
const UNKNOWN_FIELD: &str = "unknown field `accelerator`";
/// The same for people.
const OLDER: &str = "the control plane is older and does not choose among accelerators: name one, HOST/DEVICE, or upgrade \
     rackbus of the control plane";

/// What a control plane answers that takes no word of who starts what will use a function.
const UNKNOWN_STARTER: &str = "unknown field `starter`";

/// Whether a control plane is too old for a request that names such a process: it is asked without then, as before.
fn knows_no_starter<T>(starter: Option<&String>, outcome: &Result<T, ControlClientError>) -> bool {
    let unknown = |error: &ControlClientError| matches!(error, ControlClientError::Answer(said) if said.contains(UNKNOWN_STARTER));
    starter.is_some() && outcome.as_ref().is_err_and(unknown)
}

impl ControlClient {
    /// Borrows a function; answers when it can be used. A control plane that is restarted meanwhile
    /// is asked again; a request that waits does so at the end of its queue.
    ///
    /// # Errors
    /// [`ControlClientError`]; [`ControlClientError::Refused`] names the holder.
    pub async fn borrow(
        &self,
        function: &str,
        borrower: &str,
    ) -> Result<Lease, ControlClientError> {
        self.borrow_as(&BorrowRequest::new(function, borrower)).await
    }

    /// The same, with all that can be asked for.
    ///
    /// # Errors
    /// As [`borrow`](ControlClient::borrow).
    pub async fn borrow_as(&self, request: &BorrowRequest) -> Result<Lease, ControlClientError> {
        self.borrow_under(request, &ControlClient::new_key()).await
    }

    /// As [`borrow_as`](ControlClient::borrow_as) under an idempotency key: who asks again with the same key gets the
    /// same lease.
    ///
    /// # Errors
    /// As [`borrow`](ControlClient::borrow).
    pub async fn borrow_under(
        &self,
        request: &BorrowRequest,
        key: &str,
    ) -> Result<Lease, ControlClientError> {
        let mut lease = self.change_as(Method::POST, "/v1/leases", request, key).await;
        if knows_no_starter(request.starter.as_ref(), &lease) {
            let request = BorrowRequest { starter: None, ..request.clone() };
            lease = self.change_as(Method::POST, "/v1/leases", &request, key).await;
        }
        lease.map_err(|error| match error {
            ControlClientError::Answer(said)
                if request.accelerator.is_some() && said.contains(UNKNOWN_FIELD) =>
            {
                ControlClientError::Version(OLDER.to_owned())
            }
            error => error,
        })
    }

    /// Borrows functions whole or not at all, in one step, under an idempotency key ([`new_key`](ControlClient::new_key)): who
    /// asks again with the same key gets the same leases. A control plane that is restarted meanwhile is asked again;
    /// a request that waits does so at the end of its queue.
    ///
    /// # Errors
    /// [`ControlClientError`]; [`ControlClientError::Refused`] names the holder.
    pub async fn borrow_together(
        &self,
        request: &BorrowAllRequest,
        key: &str,
    ) -> Result<Vec<Lease>, ControlClientError> {
        self.change_as(Method::POST, "/v1/leases/together", request, key).await
    }

    /// Returns a lease; answers when the function is offered again. A control plane that is restarted
    /// meanwhile is asked again.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn give_back(&self, lease: u64) -> Result<Lease, ControlClientError> {
        self.change(Method::DELETE, &format!("/v1/leases/{lease}"), &()).await
    }

    /// Returns a lease as [`give_back`](ControlClient::give_back) does; its user loses the function where it has not
    /// released it within this time, to milliseconds. Of a lease that is being returned already the time becomes shorter.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn give_back_within(
        &self,
        lease: u64,
        within: Duration,
    ) -> Result<Lease, ControlClientError> {
        let path = format!("/v1/leases/{lease}?within_ms={}", within.as_millis());
        self.change(Method::DELETE, &path, &()).await
    }

    /// Changes the service level of a lease; answers when its lender has decided.
    ///
    /// # Errors
    /// [`ControlClientError`]; [`ControlClientError::Refused`] says what would fit.
    pub async fn change_level(
        &self,
        lease: u64,
        level: Option<&str>,
    ) -> Result<Lease, ControlClientError> {
        let request = LevelRequest { level: level.map(str::to_owned) };
        self.change(Method::PUT, &format!("/v1/leases/{lease}/level"), &request).await
    }

    /// The compositions of the rack.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn compositions(&self) -> Result<Vec<Composition>, ControlClientError> {
        self.get("/v1/compositions").await
    }

    /// Saves a composition, to be borrowed by its name.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn save_composition(
        &self,
        spec: &CompositionSpec,
    ) -> Result<Composition, ControlClientError> {
        self.change(Method::POST, "/v1/compositions", spec).await
    }

    /// Forgets a composition; as it was, or without functions where an answer was lost before.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn remove_composition(&self, name: &str) -> Result<Composition, ControlClientError> {
        self.change(Method::DELETE, &format!("/v1/compositions/{}", escape(name)), &()).await
    }

    /// The devices of the rack, each as a whole.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn sections(&self) -> Result<Vec<RackSection>, ControlClientError> {
        self.get("/v1/sections").await
    }

    /// Has a device join the running rack; answers when its functions can be borrowed.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn offer(&self, request: &OfferRequest) -> Result<RackSection, ControlClientError> {
        self.change(Method::POST, "/v1/sections", request).await
    }

    /// Withdraws a device; with `force`, the leases of its functions are ended first.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn withdraw(
        &self,
        host: &str,
        device: &str,
        force: bool,
    ) -> Result<RackSection, ControlClientError> {
        let path = format!("/v1/sections/{}/{}?force={force}", escape(host), escape(device));
        self.change(Method::DELETE, &path, &()).await
    }

    /// Has the running rack be that of a rack file with this text, which lists its devices as they are now.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn follow_file(&self, text: &str) -> Result<RackStatus, ControlClientError> {
        self.change(Method::PUT, "/v1/rack", &RackFile { text: text.to_owned() }).await
    }

    /// Borrows a composition, whole or not at all.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn borrow_composition(
        &self,
        name: &str,
        request: &CompositionRequest,
    ) -> Result<Composition, ControlClientError> {
        let path = format!("/v1/compositions/{}/borrow", escape(name));
        let borrowed = self.change(Method::POST, &path, request).await;
        if knows_no_starter(request.starter.as_ref(), &borrowed) {
            let request = CompositionRequest { starter: None, ..request.clone() };
            return self.change(Method::POST, &path, &request).await;
        }
        borrowed
    }

    /// Returns all that is borrowed of a composition.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn return_composition(&self, name: &str) -> Result<Composition, ControlClientError> {
        let path = format!("/v1/compositions/{}/return", escape(name));
        self.change(Method::POST, &path, &()).await
    }
}
