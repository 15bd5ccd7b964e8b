//! Turns on functions.

use hyper::Method;

use super::{Client, ClientError, Lines};
use crate::shares::{Share, ShareSpec};

impl Client {
    /// Those who take turns on functions.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn shares(&self) -> Result<Vec<Share>, ClientError> {
        self.get("/v1/shares").await
    }

    /// Takes turns on a function from now on. It is asked for once only: each time is another share.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn join_share(&self, spec: &ShareSpec) -> Result<Share, ClientError> {
        self.call(Method::POST, "/v1/shares", spec).await
    }

    /// Takes no more turns; as it was.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn leave_share(&self, share: u64) -> Result<Share, ClientError> {
        self.call(Method::DELETE, &format!("/v1/shares/{share}"), &()).await
    }

    /// Gives a share's turn back early.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn give_turn_back(&self, share: u64) -> Result<Share, ClientError> {
        self.call(Method::POST, &format!("/v1/shares/{share}/yield"), &()).await
    }

    /// How a share stands, now and whenever that changes, until it is left.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn turns(&self, share: u64) -> Result<Lines<Share>, ClientError> {
        self.stream(&format!("/v1/shares/{share}/turns")).await
    }
}
