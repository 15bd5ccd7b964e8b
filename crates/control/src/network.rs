//! What a node [answers](crate::node) about its part in the rack's network.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::api::ApiError;

/// A host's part in the network.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct NetworkStatus {
    /// Name of the host.
    pub host: String,
    /// Whether it has its interface.
    pub up: bool,
    /// The name of the network namespace that the interface is in.
    pub namespace: String,
    /// Bytes of the longest IP packet.
    pub mtu: u16,
    /// The IPv4 network of the rack: `10.77.0.0/16`.
    pub subnet: String,
    /// The IPv6 network of the rack: `fd72:6163:6b62::/64`.
    pub subnet6: String,
    /// Its interfaces that lead outside, by name, and what each does: `active`, `standby` or `down`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub uplinks: BTreeMap<String, String>,
    /// How the frames of these come, by name: `packet socket`, `AF_XDP, zero-copy` or `AF_XDP, copied`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub uplink_ways: BTreeMap<String, String>,
    /// Its ports: the interface first, then those of functions.
    pub ports: Vec<PortStatus>,
}

/// A port of the rack's network on this host: its interface, an uplink, or a function.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PortStatus {
    /// Its name: that of the host, or `HOST/FUNCTION`.
    pub port: String,
    /// Its Ethernet address, six bytes with colons between.
    pub mac: String,
    /// Its IPv4 address in the rack's network.
    pub ipv4: String,
    /// Its IPv6 address in the rack's network.
    pub ipv6: String,
    /// The VLAN that its frames without tags are in, where it is in one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// The VLANs that it takes with tags, where the rack file names them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlans: Option<Vec<u16>>,
    /// Ethernet addresses other than its own that are behind it, as far as this host knows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub learned: Vec<LearnedAddress>,
    /// How many queues it has, each with a thread of its own.
    #[serde(alias = "lanes")]
    pub queues: usize,
    /// Frames for groups that it sent.
    pub groups: u64,
    /// Questions for the station that has an address, which this host's node answered.
    #[serde(default)]
    pub answered: u64,
    /// Frames that it sent and that were dropped before their receiver was known, by cause.
    pub drops: BTreeMap<String, u64>,
    /// Frames that a capture had no room for.
    pub not_captured: u64,
    /// The part of the time that its threads were awake, where they are the network's: 0 to 1.
    pub polling: Option<f64>,
    /// Times that its threads went to sleep.
    pub sleeps: u64,
    /// What it exchanged with others: those with which it did.
    pub peers: Vec<PeerStatus>,
}

/// An Ethernet address behind a port.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LearnedAddress {
    /// The address, six bytes with colons between.
    pub mac: String,
    /// The VLAN that it is in, where it is in one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
}

/// What a port exchanged with another.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PeerStatus {
    /// Name of the other port.
    pub peer: String,
    /// How frames reach it: `memory`, or where it is on another machine `TLS` or `NTB`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub way: String,
    /// Rings that are open to it.
    pub rings: u64,
    /// Times that a ring to it was opened.
    pub opened: u64,
    /// Frames sent to it.
    pub sent: u64,
    /// Bytes of the frames sent to it.
    pub sent_bytes: u64,
    /// Frames that came from it.
    pub received: u64,
    /// Bytes of the frames that came from it.
    pub received_bytes: u64,
    /// Bytes in its rings that it had not taken when something was sent last.
    pub waiting_bytes: u64,
    /// Bytes that its rings hold.
    pub ring_bytes: u64,
    /// Frames between the two that were dropped here, by cause.
    pub drops: BTreeMap<String, u64>,
}

/// What is to be captured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaptureRequest {
    /// Name of the port.
    pub port: String,
    /// The file to write: an absolute path.
    pub file: PathBuf,
    /// After how many frames it ends by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frames: Option<u64>,
    /// After how many milliseconds it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ms: Option<u64>,
}

/// A capture that has ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureDone {
    /// Frames that are in the file.
    pub frames: u64,
    /// Frames that there was no room for.
    pub missed: u64,
}

/// The network's part of a node.
pub trait NodeNetwork: Send + Sync {
    /// How it is now.
    fn status(&self) -> NetworkStatus;

    /// Makes the host's interface, or takes it away.
    ///
    /// # Errors
    /// Why not.
    fn set_up(&self, up: bool) -> Result<NetworkStatus, ApiError>;

    /// Captures the frames of a port into a file until `stop` says so. Waits.
    ///
    /// # Errors
    /// Why not.
    fn capture(
        &self,
        request: &CaptureRequest,
        stop: &dyn Fn() -> bool,
    ) -> Result<CaptureDone, ApiError>;
}
