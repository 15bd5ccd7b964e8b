//! What is said: between a process and its host's node ([`SessionRequest`], [`Reply`], [`SessionEvent`]), and
//! between the node of a connector and the node of an owner ([`ConnectorMessage`], [`OwnerMessage`]).
//!
//! A message is one packet, in `postcard`'s encoding, with the descriptors of memory and interrupts
//! beside it. Nothing in a message is trusted: a handle counts only for the session or peer that
//! it was given to.

mod carried;
mod devices;
mod locks;
mod peers;
mod session;

use std::borrow::Cow;

use rackbus_fabric::rack::ShareAccess;
use serde::{Deserialize, Serialize};

pub use carried::{CarriedMessage, StandIn};
pub use devices::{BorrowedEntry, DeviceEntry, MOST_BORROWED, fabric_device_id};
pub use locks::{
    BarrierPhase, LockHolder, LockOperation, LockReply, LockRequest, MOST_FAR_LOCKS,
    MOST_FAR_PARTIES,
};
pub use peers::{ConnectorMessage, OwnerMessage, PeerReply, Question};
pub use session::{Connected, Notice, Reply, SegmentEntry, SessionEvent, SessionRequest, Welcome};

/// Version of these messages that is spoken here, and by a node also with the library of the version before. Since version 5
/// the node copies to memory of other machines ([`SessionRequest::Copy`]).
pub const VERSION: u32 = 5;
/// The oldest version that a node knows: what came since was only added.
pub const OLDEST_VERSION: u32 = 4;

/// A host, by its SISCI node id.
pub type NodeId = u32;

/// A segment's number on its host; applications choose it.
pub type SegmentId = u32;

/// The node id that means every member of a multicast group.
pub const BROADCAST_NODE: NodeId = 252;

/// Bytes of the longest data interrupt.
pub const MAX_DATA: u32 = 1024;

/// Bytes of a session's copy buffer ([`SessionRequest::CopyBuffer`]).
pub const COPY_BUFFER: u32 = 2 << 20;

/// Messages that a data interrupt's ring holds for each of its senders.
pub const DATA_SLOTS: u32 = 64;

/// The first number that is tried for a segment or an interrupt whose number is left to the node.
pub const FIRST_FREE_ID: u32 = 1024;

/// A process, or a part of one, that talks to its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SessionId(pub u64);

/// Memory or an interrupt's descriptor, held by the shell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ObjectId(pub u64);

/// A segment, connection or interrupt, as the node that made it calls it. Never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Handle(pub u64);

/// The two sorts of interrupt; each has numbers of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum InterruptKind {
    /// Only that it was triggered.
    Plain,
    /// With up to [`MAX_DATA`] bytes, in order.
    Data,
}

/// What a new segment is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SegmentKind {
    /// Memory that other hosts may be given.
    Shared,
    /// Memory that never leaves the process.
    Private,
    /// No memory yet: the process brings its own ([`SessionRequest::GiveMemory`]).
    Empty,
    /// A member of the multicast group of its number: one store reaches every member.
    Group,
}

/// How a segment becomes unavailable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Withdrawal {
    /// New connections are refused; the others are told nothing.
    Quiet,
    /// The same, and connectors are told.
    Notify,
    /// The same, and connectors lose it now, whatever they do.
    Force,
}

/// How much of a segment a connector may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum SegmentAccess {
    /// The host may not connect.
    None,
    /// The host may load.
    Read,
    /// The host may load and store.
    Write,
}

impl From<ShareAccess> for SegmentAccess {
    fn from(access: ShareAccess) -> Self {
        match access {
            ShareAccess::None => SegmentAccess::None,
            ShareAccess::Read => SegmentAccess::Read,
            ShareAccess::Write => SegmentAccess::Write,
        }
    }
}

impl From<SegmentAccess> for ShareAccess {
    fn from(share: SegmentAccess) -> Self {
        match share {
            SegmentAccess::None => ShareAccess::None,
            SegmentAccess::Read => ShareAccess::Read,
            SegmentAccess::Write => ShareAccess::Write,
        }
    }
}

/// What happens to the far end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ConnectionChange {
    /// Its owner asks to disconnect.
    Disconnect,
    /// Its owner has ended it in order: what is mapped keeps what it held last.
    Removed,
    /// The right to it was taken away: what is mapped leads nowhere.
    Revoked,
    /// Its host's node is gone.
    NotOperational,
    /// Its owner has died.
    Lost,
}

impl ConnectionChange {
    /// Whether the far end is gone for good.
    pub fn is_final(self) -> bool {
        matches!(
            self,
            ConnectionChange::Removed | ConnectionChange::Revoked | ConnectionChange::Lost
        )
    }
}

/// What a connection is to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TargetKind {
    /// A segment of another host, or of this one.
    Segment,
    /// A segment of another process of this host, which shares it.
    Attach,
    /// A multicast group: one memory that all members write to and read.
    Group,
}

/// Why a request is not done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// The first message was no hello, or another version's.
    #[error("this node speaks version {VERSION} of the segment protocol; use its own library")]
    Version,
    /// No segment of that number is available there.
    #[error("there is no such segment, or it is not available")]
    NoSuchSegment,
    /// No interrupt has that number there.
    #[error("there is no such interrupt")]
    NoSuchInterrupt,
    /// The number is taken on this host.
    #[error("the number is in use on this host; remove its owner first or choose another")]
    InUse,
    /// A group's members have one size.
    #[error("the group's other members have {size} bytes; all members have the same size")]
    OtherSize {
        /// The size that the other members have, in bytes.
        size: u64,
    },
    /// The size is zero or too large.
    #[error("a size is at least one byte and at most 2^62")]
    Size,
    /// The host has no memory left to export, or the connections of one machine lead to as much of it as they may.
    #[error(
        "no memory is left to export: {free} bytes are free, of the host's `export` or of what the connections of one \
         machine may lead to"
    )]
    NoSpace {
        /// Bytes that are left.
        free: u64,
    },
    /// The system has no memory or descriptors left.
    #[error("the node has no memory or descriptors left: {0}")]
    System(String),
    /// A handle that is not the session's.
    #[error("the handle is not valid (any more)")]
    Stale,
    /// The rack's rules do not allow it.
    #[error("the rules of the rack do not allow it; see [[share]] in the rack file")]
    Denied,
    /// There is no such host.
    #[error("the rack has no host of that node id")]
    NoSuchNode,
    /// The host's node is not there.
    #[error("the host's node does not answer; is it up?")]
    NotResponding,
    /// What the segment or extent is does not allow it.
    #[error("{0}")]
    Illegal(Cow<'static, str>),
    /// The memory is being moved for somebody else.
    #[error("the memory is being moved; try again")]
    Busy,
    /// The session, or all of one machine together on another, has as much as may be.
    #[error(
        "a process may have {0} of these, and the processes of one machine together no more on another"
    )]
    TooMany(u32),
    /// No function of the rack has that fabric device id.
    #[error("the rack has no device of that id")]
    NoSuchDevice,
    /// Somebody else has the function.
    #[error("{0}")]
    DeviceInUse(String),
    /// The function is not available.
    #[error("{0}")]
    NotLent(String),
}

/// A message as bytes.
pub fn encode(message: &impl Serialize) -> Vec<u8> {
    // Serializing to a growing vector cannot fail: every message is plain data.
    postcard::to_allocvec(message).unwrap_or_default()
}

/// A message from bytes, which it may borrow from; `None` when they are none, or have a tail.
pub fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Option<T> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Some(message),
        _ => None,
    }
}
