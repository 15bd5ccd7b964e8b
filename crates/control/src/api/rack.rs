//! The rack as a whole, and its hosts.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Lease, PortTraffic};

/// The rack as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RackStatus {
    /// Name of the rack, as its file says.
    pub rack: String,
    /// Version of the control plane.
    pub version: String,
    /// How long this control plane has been running, in milliseconds.
    pub uptime_ms: u64,
    /// Process id of the control plane.
    pub pid: u32,
    /// All hosts of the rack file, in its order.
    pub hosts: Vec<HostStatus>,
    /// Leases that are not over.
    pub live_leases: usize,
    /// Requests refused since the control plane started.
    pub refused: u64,
    /// Decisions that could not be stored, and were taken back, since the control plane started.
    pub store_failures: u64,
    /// Lines that the control plane left out of its log, because too many said the same.
    pub log_lines_left_out: u64,
    /// What went wrong lately, newest first: leases that ended without being returned.
    pub incidents: Vec<Lease>,
}

/// How a host's node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum HostState {
    /// Its node is connected to the control plane.
    Up,
    /// Was there, and is not connected now.
    Down,
    /// Named in the rack file, never seen.
    NeverSeen,
}

/// A host of the rack, and what its node says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostStatus {
    /// Name of the host in the rack file.
    pub host: String,
    /// How its node is.
    pub state: HostState,
    /// When it was last heard from, milliseconds ago.
    pub heard_ms_ago: Option<u64>,
    /// How often its node was cut off because it took nothing of what was said to it.
    pub overruns: u64,
    /// Lines that its node left out of its log, because too many said the same.
    pub log_lines_left_out: u64,
    /// Where its link listens.
    pub address: Option<String>,
    /// How many functions it offers.
    pub offers: usize,
    /// How many leases it holds as borrower.
    pub borrows: usize,
    /// What its processes share, and who is connected to it, by name.
    #[serde(default)]
    pub shared_memory: std::collections::BTreeMap<String, u64>,
    /// Bytes of memory that its processes share, by what they are of (`segments`, `groups`, `page extents`), and that it
    /// exports at most (`exported`).
    #[serde(default)]
    pub shared_bytes: std::collections::BTreeMap<String, u64>,
    /// What its ports exchanged in the rack's network, by name.
    #[serde(default)]
    pub network: std::collections::BTreeMap<String, PortTraffic>,
    /// When its node counted this, in milliseconds since the node was started; 0 where it is not there.
    #[serde(default)]
    pub counted_ms: u64,
    /// What the copy channels of its processes did while these were attached, by name: transactions, bytes, failures,
    /// aborts.
    #[serde(default)]
    pub channels: std::collections::BTreeMap<String, u64>,
    /// Conversations that other nodes have with its node, by what they are for.
    #[serde(default)]
    pub conversations: std::collections::BTreeMap<String, u64>,
}
