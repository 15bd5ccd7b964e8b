//! What a client asks about turns on functions: who takes them, joining, leaving, and giving one back early.

use hyper::Method;

use super::{ControlClient, ControlClientError, JsonLines};
use crate::shares::{Share, ShareSpec};

impl ControlClient {
    /// Those who take turns on functions.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn shares(&self) -> Result<Vec<Share>, ControlClientError> {
        self.get("/v1/shares").await
    }

    /// Takes turns on a function from now on. A control plane that is restarted meanwhile is asked again, under the same
    /// idempotency key.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn join_share(&self, spec: &ShareSpec) -> Result<Share, ControlClientError> {
        self.change_as(Method::POST, "/v1/shares", spec, &ControlClient::new_key()).await
    }

    /// Takes no more turns; as it was. A control plane that is restarted meanwhile is asked again, under the same
    /// idempotency key.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn leave_share(&self, share: u64) -> Result<Share, ControlClientError> {
        let before = self.shares().await?.into_iter().find(|it| it.share == share);
        let path = format!("/v1/shares/{share}");
        let outcome = self.change::<Share>(Method::DELETE, &path, &()).await;
        let is_gone = match &outcome {
            Ok(left) => left.function.is_empty(),
            // An older control plane knows no keys here. No other share has its number: one that was there has left.
            Err(ControlClientError::Refused(refused)) => refused.code == "unknown_share",
            Err(_) => false,
        };
        match before {
            Some(before) if is_gone => Ok(before),
            _ => outcome,
        }
    }

    /// Gives a share's turn back early, once: a control plane that is restarted meanwhile is asked again, under the
    /// same idempotency key.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn give_turn_back(&self, share: u64) -> Result<Share, ControlClientError> {
        self.change(Method::POST, &format!("/v1/shares/{share}/yield"), &()).await
    }

    /// How a share stands, now and whenever that changes, until it is left.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn turns(&self, share: u64) -> Result<JsonLines<Share>, ControlClientError> {
        self.stream(&format!("/v1/shares/{share}/turns")).await
    }
}
