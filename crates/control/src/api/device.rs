//! Functions: where each stands, and what it reaches of others.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::DeviceReport;
use crate::shares::Turns;

/// Where a function stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeviceState {
    /// Nobody has it; it can be borrowed.
    Offered,
    /// A lease has it.
    Lent,
    /// On its way back: revoked, reset, scrubbed.
    Returning,
    /// Its host's node is down.
    Unreachable,
    /// Its host's node never offered it, or no longer does.
    Absent,
}

/// A function of the rack file, and who has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Device {
    /// Name of the function, `HOST/DEVICE`: `alpha/nvme0`.
    pub function: String,
    /// What it is: `nvme`.
    pub kind: String,
    /// What can be done with it, whatever its class: `engines` (their throughput is promised by service levels), `blocks` (a
    /// drive, which takes NVMe commands), `port` (a station of the rack's network). Older control planes do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<Vec<String>>,
    /// Its size and where its data lives, for people.
    pub detail: String,
    /// Whether it can be borrowed now.
    pub state: DeviceState,
    /// The host that has it.
    pub holder: Option<String>,
    /// Number of the lease that has it; none when nobody does.
    pub lease: Option<u64>,
    /// The newest epoch given out.
    pub epoch: u64,
    /// Requests that wait for it.
    #[serde(default)]
    pub waiting: usize,
    /// The turns that borrowers take on it; nothing where none do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turns: Option<Turns>,
    /// What its node says of it; nothing while the node is not there.
    pub report: Option<Box<DeviceReport>>,
    /// What the borrower's node says of the front that it runs for the function; nothing where the
    /// lender runs it.
    #[serde(default)]
    pub front: Option<Box<DeviceReport>>,
    /// What it reaches of other functions of the same user, as the borrower's node says; nothing where it
    /// reaches none.
    #[serde(default)]
    pub peers: Option<PeerReport>,
}

/// What a function reaches of others that the same user has borrowed: peer-to-peer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct PeerReport {
    /// Parts of their BARs.
    pub reaches: Vec<PeerWindowReport>,
    /// What it does not reach although it is decoded, and why.
    pub refused: Vec<String>,
}

/// A part of a BAR of another function, within reach of a function's DMA.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PeerWindowReport {
    /// Where the user has programmed it to be: the function's address for it.
    pub address: u64,
    /// Its length in bytes.
    pub length: u64,
    /// Name of the function whose BAR it is, `HOST/DEVICE`.
    pub function: String,
    /// The BAR, 0 to 5.
    pub bar: u8,
    /// Where it begins in the BAR, in bytes.
    pub offset: u64,
}
