//! What changes, and what happened.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Device, HostStatus, Lease};
use crate::access::RequestOrigin;

/// What changed, as `/v1/changes` streams it: a line of JSON each, with the whole new state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "change", rename_all = "snake_case")]
pub enum Change {
    /// A lease is new or moved on.
    Lease(Lease),
    /// A function's state changed.
    Device(Box<Device>),
    /// A host's node came or went.
    Host(HostStatus),
}

/// What an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// A function was offered, lent, or returned in order, or its data move by an RDMA lane from now on.
    Lease,
    /// A lease ended otherwise than by its return, a function is no longer offered, or a link or lane was lost.
    Loss,
    /// A request was refused, or a borrower was not let in.
    Refusal,
    /// Something does not work: an access to memory that no mapping covers, a device that hangs.
    Fault,
    /// The control plane or a node was started.
    Restart,
    /// Somebody was let in, or let out: a token was made, a machine joined, a person logged in.
    Access,
}

/// Something that happened, as it is kept: up to 10,000 of them, for up to 30 days.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Event)]
pub struct EventRecord {
    /// Its number; later ones are greater.
    pub id: u64,
    /// When it was decided or heard of, milliseconds since 1970.
    pub at_ms: u64,
    /// What it is about.
    pub kind: EventKind,
    /// The host concerned: a lease's borrower, the node that reports or was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Name of the function concerned, `HOST/DEVICE`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub function: Option<String>,
    /// Number of the lease concerned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<u64>,
    /// Fencing epoch of the lease concerned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
    /// Who asked for it, where somebody did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<RequestOrigin>,
    /// What happened, with its cause.
    pub text: String,
}
