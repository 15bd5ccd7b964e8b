//! Between the node of a connector, which asks ([`Ask`]), and the node of an owner, which tells
//! ([`Tell`]).

use serde::{Deserialize, Serialize};

use super::{Change, Handle, InterruptKind, Refusal, SegmentId, SessionId, Target};

/// A connector's node to an owner's node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// A question that wants an answer.
    Question {
        /// Its number.
        request: u64,
        /// The connection that a positive answer makes, by the connector's node.
        connection: Handle,
        /// It.
        what: Question,
    },
    /// A connection is over.
    Disconnect {
        /// Which.
        connection: Handle,
    },
    /// A connector has stopped to write.
    Frozen {
        /// In which move.
        ticket: Handle,
        /// Which connection.
        connection: Handle,
    },
    /// A connector uses the new memory.
    Adopted {
        /// In which move.
        ticket: Handle,
        /// Which connection.
        connection: Handle,
    },
}

/// What a node asks another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Question {
    /// To connect to a segment.
    Segment {
        /// Which.
        id: SegmentId,
        /// A segment, or one that its process shares.
        what: Target,
    },
    /// To become a member of a group, or a sender to it.
    Group {
        /// Which.
        id: SegmentId,
        /// A member's size; `None` for a sender.
        size: Option<u64>,
    },
    /// To connect to an interrupt.
    Interrupt {
        /// Which sort.
        kind: InterruptKind,
        /// Its number.
        number: u32,
    },
    /// To reach pages.
    Pages {
        /// Where in the rack's address space.
        address: u64,
        /// Bytes.
        length: u64,
    },
    /// Whether anybody is there.
    Probe,
    /// Whether a session lives.
    Alive(SessionId),
}

/// An owner's node to a connector's node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tell {
    /// The answer to a question; what it gives is beside it.
    Answer {
        /// Of which number.
        request: u64,
        /// It.
        answer: Result<PeerReply, Refusal>,
    },
    /// The far end changed.
    Remote {
        /// Which connection.
        connection: Handle,
        /// How.
        change: Change,
    },
    /// Stop writing.
    Freeze {
        /// Which move.
        ticket: Handle,
        /// Which connection.
        connection: Handle,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Use the memory beside this, without writing to it yet.
    Adopt {
        /// Which move.
        ticket: Handle,
        /// Which connection.
        connection: Handle,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Write again: the move is over, and everybody who keeps the memory has it where it is now.
    Unfreeze {
        /// Which move.
        ticket: Handle,
        /// Which connection.
        connection: Handle,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
}

/// A positive answer to a [`Question`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeerReply {
    /// Memory of a segment, or an interrupt's line.
    Memory {
        /// Bytes.
        size: u64,
        /// Whether stores are allowed.
        write: bool,
        /// Its place in the rack's address space, where it has one.
        address: Option<u64>,
    },
    /// Pages, piece by piece.
    Pages {
        /// Bytes of each piece.
        lengths: Vec<u64>,
        /// Whether stores are allowed to all.
        write: bool,
    },
    /// Somebody is there.
    Here,
    /// Whether a session lives.
    Alive(bool),
}
