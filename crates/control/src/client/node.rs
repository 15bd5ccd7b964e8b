//! What is asked of a node at its own socket, and what nodes and the control plane say to each other.

use hyper::Method;

use super::lines::Lines;
use super::transport::escape;
use super::{Client, ClientError};
use crate::api::NodeMessages;
use crate::network::{CaptureDone, CaptureRequest, NetworkStatus};
use crate::node::{NodeProcess, RestartRequest};
use crate::reach::ReachedRange;
use crate::said::Said;
use crate::versions::NotUnderstood;

impl Client {
    /// What a function or host reaches now, of a node whose socket is the client's.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn reach(&self, of: &str) -> Result<Vec<ReachedRange>, ClientError> {
        self.get(&format!("/v1/reach?of={}", escape(of))).await
    }

    /// The process of the node whose socket is the client's.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn node_process(&self) -> Result<NodeProcess, ClientError> {
        self.get("/v1/process").await
    }

    /// Asks the node whose socket is the client's to be restarted in place. Where it is done, the
    /// connection breaks off.
    ///
    /// # Errors
    /// [`ClientError`]; always, as it is not answered otherwise.
    pub async fn restart_node(&self, request: &RestartRequest) -> Result<(), ClientError> {
        self.call(Method::POST, "/v1/restart", request).await
    }

    /// A node's part in the rack's network, asked of the node itself.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn network(&self) -> Result<NetworkStatus, ClientError> {
        self.get("/v1/network").await
    }

    /// Has the node make its host's interface, or take it away.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn set_network(&self, up: bool) -> Result<NetworkStatus, ClientError> {
        let path = if up { "/v1/network/up" } else { "/v1/network/down" };
        self.call(Method::POST, path, &()).await
    }

    /// Has the node capture frames; waits until that has ended, and ends it when dropped.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn capture(&self, request: &CaptureRequest) -> Result<CaptureDone, ClientError> {
        self.call(Method::POST, "/v1/network/capture", request).await
    }

    /// A node says something.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn say(&self, host: &str, said: &NodeMessages) -> Result<(), ClientError> {
        let path = format!("/v1/hosts/{host}/messages");
        let unknown: Option<NotUnderstood> = self.call(Method::POST, &path, said).await?;
        if let Some(unknown) = unknown {
            tracing::warn!(?unknown, "the control plane is older, and does not know what is said");
        }
        Ok(())
    }

    /// What the control plane says to a node that knows of no later term than `term`, from now on.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn listen(&self, host: &str, term: u64) -> Result<Lines<Said>, ClientError> {
        let path = format!("/v1/hosts/{host}/messages?term={term}");
        self.stream(&path).await
    }
}
