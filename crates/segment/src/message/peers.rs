//! Between the node of a connector, which asks ([`ConnectorMessage`]), and the node of an owner, which tells
//! ([`OwnerMessage`]).

use serde::{Deserialize, Serialize};

use super::{
    ConnectionChange, Handle, InterruptKind, LockReply, LockRequest, Refusal, SegmentId, SessionId,
    TargetKind,
};

/// A connector's node to an owner's node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ConnectorMessage {
    /// A question that wants an answer.
    Question {
        /// Number of the question, which its answer repeats.
        request: u64,
        /// The connection that a positive answer makes, by the connector's node.
        connection: Handle,
        /// The question, which the owner's directory answers.
        what: Question,
    },
    /// A connection has ended in order.
    Disconnect {
        /// The connection that ends.
        connection: Handle,
    },
    /// A connector has stopped to write.
    Frozen {
        /// Number of the move.
        ticket: Handle,
        /// The connection that stopped writing.
        connection: Handle,
    },
    /// A connector uses the new memory.
    Adopted {
        /// Number of the move.
        ticket: Handle,
        /// The connection that uses the new memory.
        connection: Handle,
    },
    /// A connection has ended because its process has died. Only for nodes that speak version 3 of the link: older ones
    /// are told [`Disconnect`](ConnectorMessage::Disconnect).
    Died {
        /// The connection that ends.
        connection: Handle,
    },
}

/// What a node asks another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Question {
    /// To connect to a segment.
    Segment {
        /// Number of the segment on the owner's host.
        id: SegmentId,
        /// A segment, or one that its process shares.
        what: TargetKind,
    },
    /// To become a member of a group, or a sender to it.
    Group {
        /// Number of the segment on the owner's host.
        id: SegmentId,
        /// A member's size; `None` for a sender.
        size: Option<u64>,
    },
    /// To connect to an interrupt.
    Interrupt {
        /// With data or without, shared or not.
        kind: InterruptKind,
        /// Number of the interrupt on the owner's host.
        number: u32,
    },
    /// To reach pages of the host's part of the pool.
    Pages {
        /// Where in the rack's address space.
        address: u64,
        /// How many bytes from there on.
        length: u64,
    },
    /// Whether anybody is there.
    Probe,
    /// Whether a session lives.
    Alive(SessionId),
    /// Something is to be done to a lock or a barrier in memory that a connection leads to.
    Lock {
        /// The connection, which there is already.
        connection: Handle,
        /// The party: a session of the node that asks.
        session: SessionId,
        /// What is to be done with the lock or the barrier.
        request: LockRequest,
    },
}

/// An owner's node to a connector's node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum OwnerMessage {
    /// The answer to a question; what it gives is beside it.
    Answer {
        /// Number of the question that is answered.
        request: u64,
        /// The answer, or why there is none.
        answer: Result<PeerReply, Refusal>,
    },
    /// The far end changed.
    Remote {
        /// The connection that is told.
        connection: Handle,
        /// What happened to its segment.
        change: ConnectionChange,
    },
    /// Asks a connection to stop writing to a range, because it is moved.
    Freeze {
        /// Number of the move.
        ticket: Handle,
        /// The connection that is to stop writing.
        connection: Handle,
        /// Offset of the range in the segment, in bytes.
        offset: u64,
        /// Length of the range in bytes.
        length: u64,
    },
    /// Use the memory beside this, without writing to it yet.
    Adopt {
        /// Number of the move.
        ticket: Handle,
        /// The connection that gets the new memory.
        connection: Handle,
        /// Offset of the range in the segment, in bytes.
        offset: u64,
        /// Length of the range in bytes.
        length: u64,
    },
    /// Write again: the move has ended, and everybody who keeps the memory has it where it is now.
    Unfreeze {
        /// Number of the move.
        ticket: Handle,
        /// The connection that may write again.
        connection: Handle,
        /// Offset of the range in the segment, in bytes.
        offset: u64,
        /// Length of the range in bytes.
        length: u64,
    },
}

/// A positive answer to a [`Question`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeerReply {
    /// Memory of a segment, or an interrupt's line.
    Memory {
        /// Size of the segment in bytes.
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
    /// The host runs and has an owner for what was asked about.
    Here,
    /// Whether a session lives.
    Alive(bool),
    /// What became of a lock or a barrier.
    Lock(LockReply),
}
