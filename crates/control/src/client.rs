//! The API's client: what the command line and the nodes use.

mod leases;
mod lines;
mod machines;
mod node;
mod shares;
mod transport;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use http_body_util::BodyExt;
use hyper::Method;
use rackbus_identity::rustls::ClientConfig;
use serde::de::DeserializeOwned;

pub use lines::JsonLines;
pub(crate) use transport::{REPEATED, speak};
use transport::{checked, escape};

use crate::api::{ApiError, Change, Device, EventKind, EventRecord, Lease, RackStatus};
use crate::leaders::Leaders;
use crate::leadership::serving::ControlStatus;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlClientError {
    /// No process listens at the socket, or it is gone.
    #[error("the control plane does not answer at {}: {cause}", .place.display())]
    Unreachable {
        /// Where it should be: a socket's path, or an address.
        place: PathBuf,
        /// What the system says.
        cause: std::io::Error,
    },
    /// The control plane refused.
    #[error(transparent)]
    Refused(#[from] ApiError),
    /// The conversation broke off.
    #[error("the conversation with the control plane broke off: {0}")]
    Broken(#[from] hyper::Error),
    /// It was asked, and its process stands still: what was asked may have been done, or be done later.
    #[error("the control plane at {} stands still", .place.display())]
    Silent {
        /// The address at which it takes no connection any more.
        place: PathBuf,
    },
    /// It speaks no version of the API that is spoken here.
    #[error("{0}")]
    Version(String),
    /// The answer makes no sense.
    #[error("the control plane's answer cannot be understood: {0}")]
    Answer(String),
}

impl ControlClientError {
    /// Whether the request may have been carried out all the same: its answer was lost.
    pub fn is_lost(&self) -> bool {
        matches!(self, ControlClientError::Broken(_) | ControlClientError::Silent { .. })
    }
}

/// A way to the control plane. Each request makes its own connection, so that a control plane
/// which was restarted is found again.
#[derive(Debug, Clone)]
pub struct ControlClient {
    to: To,
}

/// Where the control plane is.
#[derive(Debug, Clone)]
enum To {
    /// It listens at this socket.
    Socket(PathBuf),
    /// It is one of several on whatever machines.
    Machines(Arc<Leaders>),
}

impl ControlClient {
    /// A client of the control plane that listens at `socket`.
    pub fn new(socket: &Path) -> Self {
        ControlClient { to: To::Socket(socket.to_owned()) }
    }

    /// A client of the control plane at `addresses` (each `HOST:PORT`), on whatever machines: of the one that leads.
    pub fn with_tls(addresses: &[String], tls: Arc<ClientConfig>) -> Self {
        let tls = Arc::new(move || tls.clone());
        ControlClient::of(Arc::new(Leaders::new(addresses.iter().cloned(), tls)))
    }

    /// A client of whoever leads.
    pub fn of(leaders: Arc<Leaders>) -> Self {
        ControlClient { to: To::Machines(leaders) }
    }

    /// The control plane itself: its processes, which of them leads, and its store.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn control(&self) -> Result<ControlStatus, ControlClientError> {
        self.get("/v1/control").await
    }

    /// The rack as a whole.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn status(&self) -> Result<RackStatus, ControlClientError> {
        self.get("/v1/status").await
    }

    /// All functions of the rack, and who has each.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn devices(&self) -> Result<Vec<Device>, ControlClientError> {
        self.get("/v1/devices").await
    }

    /// The leases that are not over; with `all`, those that are, too.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn leases(&self, all: bool) -> Result<Vec<Lease>, ControlClientError> {
        self.get(if all { "/v1/leases?all=true" } else { "/v1/leases" }).await
    }

    /// The lease of this number, also one that is over.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn lease(&self, lease: u64) -> Result<Lease, ControlClientError> {
        self.get(&format!("/v1/leases/{lease}")).await
    }

    /// The way from a host or function to another.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn path(
        &self,
        from: &str,
        to: &str,
    ) -> Result<crate::api::AccessPath, ControlClientError> {
        self.get(&format!("/v1/path?from={}&to={}", escape(from), escape(to))).await
    }

    /// The OpenAPI document of the control plane that is asked.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn openapi(&self) -> Result<serde_json::Value, ControlClientError> {
        self.get("/openapi.json").await
    }

    /// The metrics of the process that listens at the client's socket: the control plane's, or a
    /// node's.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn metrics(&self) -> Result<String, ControlClientError> {
        let response = checked(self.request(Method::GET, "/metrics", &(), None).await?).await?;
        let bytes = response.into_body().collect().await?.to_bytes();
        String::from_utf8(bytes.into())
            .map_err(|cause| ControlClientError::Answer(cause.to_string()))
    }

    /// A `GET` of any path whose answer is JSON.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ControlClientError> {
        self.repeat(Method::GET, path, &(), None).await
    }

    /// What changes in the rack, from now on.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn changes(&self) -> Result<JsonLines<Change>, ControlClientError> {
        self.stream("/v1/changes").await
    }

    /// What happened, of one kind or of all; of these the last `most`, and with `follow` also what is
    /// still to happen.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn events(
        &self,
        kind: Option<EventKind>,
        most: Option<usize>,
        follow: bool,
    ) -> Result<JsonLines<EventRecord>, ControlClientError> {
        let mut path = format!("/v1/events?follow={follow}");
        if let Some(kind) = kind {
            let word = serde_json::to_value(kind).unwrap_or_default();
            path += &format!("&kind={}", word.as_str().unwrap_or_default());
        }
        if let Some(most) = most {
            path += &format!("&most={most}");
        }
        self.stream(&path).await
    }
}
