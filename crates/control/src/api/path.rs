//! The way from one place of the rack to another.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One component on a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Hop {
    /// What it is: `root complex`, `switch`, `ntb`, …
    pub kind: String,
    /// Name of the component in the topology.
    pub name: String,
    /// By which link it is entered: `Gen3 x8`, or `internal`; nothing for the first.
    pub link: Option<String>,
}

/// The way from one place to another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Path)]
pub struct AccessPath {
    /// The host or function whose accesses go this way.
    pub from: String,
    /// The host or function that they are for.
    pub to: String,
    /// All components in order, both ends included.
    pub components: Vec<Hop>,
    /// How many components are between the ends.
    pub hops: usize,
    /// How many of those are root complexes.
    pub roots: usize,
    /// How it goes on from one machine to another, where both ends are on different ones: nobody's memory is mapped
    /// there then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub between: Option<Crossing>,
}

/// What carries accesses from one machine to another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Crossing {
    /// What carries questions and answers, and data where there is no lane: `TLS over TCP`.
    pub link: String,
    /// What moves data beside it now, by remote memory access (RDMA), as libfabric names it: `verbs;ofi_rxm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<String>,
    /// What copies data on their way, in order, beginning where the borrower or the writer is.
    pub copies: Vec<String>,
}
