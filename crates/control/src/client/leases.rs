//! Leases, compositions and devices: what is asked of the control plane.

use hyper::Method;

use super::transport::escape;
use super::{Client, ClientError};
use crate::api::{BorrowRequest, Lease};
use crate::compositions::{Composition, CompositionRequest, CompositionSpec};
use crate::levels::LevelRequest;
use crate::offers::{OfferRequest, RackSection};
use crate::together::BorrowAllRequest;

impl Client {
    /// Borrows a function; answers when it can be used. A control plane that is restarted meanwhile
    /// is asked again; a request that waits does so at the end of its queue.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Refused`] names the holder.
    pub async fn borrow(&self, function: &str, borrower: &str) -> Result<Lease, ClientError> {
        self.borrow_as(&BorrowRequest::new(function, borrower)).await
    }

    /// The same, with all that can be asked for.
    ///
    /// # Errors
    /// As [`borrow`](Client::borrow).
    pub async fn borrow_as(&self, request: &BorrowRequest) -> Result<Lease, ClientError> {
        self.change(Method::POST, "/v1/leases", request).await
    }

    /// Borrows functions whole or not at all, in one step, under an idempotency key ([`new_key`](Client::new_key)): who
    /// asks again with the same key gets the same leases. A control plane that is restarted meanwhile is asked again;
    /// a request that waits does so at the end of its queue.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Refused`] names the holder.
    pub async fn borrow_together(
        &self,
        request: &BorrowAllRequest,
        key: &str,
    ) -> Result<Vec<Lease>, ClientError> {
        self.change_as(Method::POST, "/v1/leases/together", request, key).await
    }

    /// Returns a lease; answers when the function is offered again. A control plane that is restarted
    /// meanwhile is asked again.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn give_back(&self, lease: u64) -> Result<Lease, ClientError> {
        self.change(Method::DELETE, &format!("/v1/leases/{lease}"), &()).await
    }

    /// Changes the service level of a lease; answers when its lender has decided.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Refused`] says what would fit.
    pub async fn change_level(
        &self,
        lease: u64,
        level: Option<&str>,
    ) -> Result<Lease, ClientError> {
        let request = LevelRequest { level: level.map(str::to_owned) };
        self.change(Method::PUT, &format!("/v1/leases/{lease}/level"), &request).await
    }

    /// The compositions of the rack.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn compositions(&self) -> Result<Vec<Composition>, ClientError> {
        self.get("/v1/compositions").await
    }

    /// Saves a composition, to be borrowed by its name.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn save_composition(
        &self,
        spec: &CompositionSpec,
    ) -> Result<Composition, ClientError> {
        self.change(Method::POST, "/v1/compositions", spec).await
    }

    /// Forgets a composition; as it was.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn remove_composition(&self, name: &str) -> Result<Composition, ClientError> {
        self.call(Method::DELETE, &format!("/v1/compositions/{}", escape(name)), &()).await
    }

    /// The devices of the rack, each as a whole.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn sections(&self) -> Result<Vec<RackSection>, ClientError> {
        self.get("/v1/sections").await
    }

    /// Has a device join the running rack; answers when its functions can be borrowed.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn offer(&self, request: &OfferRequest) -> Result<RackSection, ClientError> {
        self.change(Method::POST, "/v1/sections", request).await
    }

    /// Withdraws a device; with `force`, the leases of its functions are ended first.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn withdraw(
        &self,
        host: &str,
        device: &str,
        force: bool,
    ) -> Result<RackSection, ClientError> {
        let path = format!("/v1/sections/{}/{}?force={force}", escape(host), escape(device));
        self.change(Method::DELETE, &path, &()).await
    }

    /// Borrows a composition, whole or not at all.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn borrow_composition(
        &self,
        name: &str,
        request: &CompositionRequest,
    ) -> Result<Composition, ClientError> {
        let path = format!("/v1/compositions/{}/borrow", escape(name));
        self.change(Method::POST, &path, request).await
    }

    /// Returns all that is borrowed of a composition.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn return_composition(&self, name: &str) -> Result<Composition, ClientError> {
        let path = format!("/v1/compositions/{}/return", escape(name));
        self.change(Method::POST, &path, &()).await
    }
}
