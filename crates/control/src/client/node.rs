//! What is asked of a node at its own socket, and what nodes and the control plane say to each other.

use hyper::Method;

use super::lines::JsonLines;
use super::transport::escape;
use super::{ControlClient, ControlClientError};
use crate::api::NodeMessages;
use crate::network::{CaptureDone, CaptureRequest, NetworkStatus};
use crate::node::{NodeProcess, RestartRequest};
use crate::reach::ReachedRange;
use crate::said::NodeLine;
use crate::versions::NotUnderstood;

impl ControlClient {
    /// What a function or host reaches now, of a node whose socket is the client's.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn reach(&self, of: &str) -> Result<Vec<ReachedRange>, ControlClientError> {
        self.get(&format!("/v1/reach?of={}", escape(of))).await
    }

    /// The process of the node whose socket is the client's.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn node_process(&self) -> Result<NodeProcess, ControlClientError> {
        self.get("/v1/process").await
    }

    /// Asks the node whose socket is the client's to be restarted in place, or whether it can be. Where it is done, the
    /// connection breaks off.
    ///
    /// # Errors
    /// [`ControlClientError`]; always where it is to be done, as it is not answered otherwise.
    pub async fn restart_node(&self, request: &RestartRequest) -> Result<(), ControlClientError> {
        self.call(Method::POST, "/v1/restart", request).await
    }

    /// A node's part in the rack's network, asked of the node itself.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn network(&self) -> Result<NetworkStatus, ControlClientError> {
        self.get("/v1/network").await
    }

    /// Has the node make its host's interface, or take it away.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn set_network(&self, up: bool) -> Result<NetworkStatus, ControlClientError> {
        let path = if up { "/v1/network/up" } else { "/v1/network/down" };
        self.call(Method::POST, path, &()).await
    }

    /// Has the node capture frames; waits until that has ended, and ends it when dropped.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn capture(
        &self,
        request: &CaptureRequest,
    ) -> Result<CaptureDone, ControlClientError> {
        self.call(Method::POST, "/v1/network/capture", request).await
    }

    /// A node says something.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn say(&self, host: &str, said: &NodeMessages) -> Result<(), ControlClientError> {
        let path = format!("/v1/hosts/{host}/messages");
        let unknown: Option<NotUnderstood> = self.call(Method::POST, &path, said).await?;
        if let Some(unknown) = unknown {
            tracing::warn!(?unknown, "the control plane is older and does not know this message");
        }
        Ok(())
    }

    /// What the control plane says to a node that knows of no later term than `term`, from now on.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn listen(
        &self,
        host: &str,
        term: u64,
    ) -> Result<JsonLines<NodeLine>, ControlClientError> {
        let path = format!("/v1/hosts/{host}/messages?term={term}");
        self.stream(&path).await
    }
}
