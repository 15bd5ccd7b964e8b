//! What is said: between a process and its host's node ([`Request`], [`Reply`], [`Event`]), and
//! between the node of a connector and the node of an owner ([`Ask`], [`Tell`]).
//!
//! A message is one packet, in `postcard`'s encoding, with the descriptors of memory and interrupts
//! beside it. Nothing in a message is trusted: a handle counts only for the session or peer that
//! it was given to.

use std::borrow::Cow;

use rackbus_fabric::rack::ShareAccess;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Version of all of these messages; both sides must speak the same.
pub const VERSION: u32 = 1;

/// A host, by its SISCI node id.
pub type NodeId = u32;

/// A segment's number on its host; applications choose it.
pub type SegmentId = u32;

/// The node id that means every member of a multicast group.
pub const BROADCAST_NODE: NodeId = 252;

/// Bytes of the longest data interrupt.
pub const MAX_DATA: u32 = 1024;

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

/// Who holds a lock, anywhere in the rack: a session of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Holder {
    /// Its host.
    pub node: NodeId,
    /// Its session there.
    pub session: SessionId,
}

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
    /// No memory yet: the process brings its own ([`Request::GiveMemory`]).
    Empty,
    /// A member of the multicast group of its number: one store reaches every member.
    Group,
}

/// How a segment becomes unavailable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Withdrawal {
    /// For new connections.
    Quiet,
    /// And connectors are told.
    Notify,
    /// And connectors lose it now, whatever they do.
    Force,
}

/// How much of a segment a connector may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Share {
    /// Nothing.
    None,
    /// Loads.
    Read,
    /// Loads and stores.
    Write,
}

impl From<ShareAccess> for Share {
    fn from(access: ShareAccess) -> Self {
        match access {
            ShareAccess::None => Share::None,
            ShareAccess::Read => Share::Read,
            ShareAccess::Write => Share::Write,
        }
    }
}

impl From<Share> for ShareAccess {
    fn from(share: Share) -> Self {
        match share {
            Share::None => ShareAccess::None,
            Share::Read => ShareAccess::Read,
            Share::Write => ShareAccess::Write,
        }
    }
}

/// A process to its node. The first is [`Request::Hello`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Opens the session; beside it a packet socket on which events are to come.
    Hello {
        /// [`VERSION`].
        version: u32,
    },
    /// Makes a segment: [`Reply::Created`], its memory beside it.
    CreateSegment {
        /// Its number; where `choose`, the first that is tried.
        id: SegmentId,
        /// Whether the node may choose another number.
        choose: bool,
        /// Bytes.
        size: u64,
        /// What it is.
        kind: SegmentKind,
    },
    /// Asks for the memory of an empty segment: [`Reply::Memory`].
    GiveMemory {
        /// Which segment.
        segment: Handle,
    },
    /// Lets others connect.
    SetAvailable {
        /// Which segment.
        segment: Handle,
    },
    /// Lets others no longer connect.
    SetUnavailable {
        /// Which segment.
        segment: Handle,
        /// What happens to those that are connected.
        how: Withdrawal,
    },
    /// Lets other processes of this host attach.
    Share {
        /// Which segment.
        segment: Handle,
    },
    /// Ends a segment. Connectors lose it.
    Remove {
        /// Which segment.
        segment: Handle,
    },
    /// Connects to a segment: [`Reply::Connected`], its memory beside it.
    Connect {
        /// On which host; [`BROADCAST_NODE`] for a group.
        node: NodeId,
        /// Which segment.
        id: SegmentId,
        /// Milliseconds to wait for the other host's node.
        timeout_ms: u32,
        /// What is connected to.
        what: Target,
    },
    /// Ends a connection to a segment or an interrupt.
    Disconnect {
        /// Which.
        connection: Handle,
    },
    /// Makes an interrupt: [`Reply::Interrupt`], its line and its event beside it.
    CreateInterrupt {
        /// Which sort.
        kind: InterruptKind,
        /// Its number; `None` lets the node choose.
        number: Option<u32>,
        /// Whether others of this host may make the same one, and all of them hear it.
        shared: bool,
    },
    /// Ends an interrupt.
    RemoveInterrupt {
        /// Which.
        interrupt: Handle,
    },
    /// Connects to an interrupt: [`Reply::Connected`]; line, event and, for data, ring beside it.
    ConnectInterrupt {
        /// On which host.
        node: NodeId,
        /// Which sort.
        kind: InterruptKind,
        /// Its number.
        number: u32,
        /// Milliseconds to wait for the other host's node.
        timeout_ms: u32,
    },
    /// Whether a host's node answers: [`Reply::Done`] or a refusal.
    Probe {
        /// Which host.
        node: NodeId,
    },
    /// Whether a session still lives: [`Reply::Alive`].
    Alive {
        /// Which.
        holder: Holder,
    },
    /// Changes who may use this host's segments: [`Reply::Done`] when it is in force.
    SetShare {
        /// The first segment that it is for.
        first: SegmentId,
        /// The last.
        last: SegmentId,
        /// The host that it is for; `None` for every one.
        node: Option<NodeId>,
        /// What it may do.
        share: Share,
    },
    /// Every segment of this host: [`Reply::Segments`].
    ListSegments {
        /// How many to pass over: a reply has room for some.
        skip: u32,
    },
    /// Memory in the rack's address space: [`Reply::Extent`], the memory beside it.
    Allocate {
        /// Bytes, in whole pages.
        size: u64,
    },
    /// Gives memory of the rack's address space back.
    Free {
        /// Which extent.
        extent: Handle,
    },
    /// Opens pages to one host: [`Reply::Done`] when it can reach them.
    OpenPages {
        /// Which extent.
        extent: Handle,
        /// First byte, on a page's border.
        offset: u64,
        /// Bytes, in whole pages.
        length: u64,
        /// Whom for.
        node: NodeId,
        /// Whether it may store, too.
        write: bool,
    },
    /// Closes pages again: [`Reply::Done`] when nobody reaches them any more.
    ClosePages {
        /// Which extent.
        extent: Handle,
        /// First byte, on a page's border.
        offset: u64,
        /// Bytes, in whole pages.
        length: u64,
    },
    /// Reaches pages that were opened to this host: [`Reply::Pages`], their memory beside it.
    MapPages {
        /// Where in the rack's address space.
        address: u64,
        /// Bytes, in whole pages.
        length: u64,
    },
}

/// A process to its node, beside its requests: on the socket of its events, without a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Notice {
    /// A keeper of memory that is being moved has stopped to write to it.
    Frozen {
        /// Which move.
        ticket: Handle,
        /// Under which handle it keeps the memory.
        keeper: Handle,
    },
    /// A keeper of moved memory uses the new one.
    Adopted {
        /// Which move.
        ticket: Handle,
        /// Under which handle it keeps the memory.
        keeper: Handle,
    },
}

/// What a connection is to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Target {
    /// A segment of another host, or of this one.
    Segment,
    /// A segment of another process of this host, which shares it.
    Attach,
    /// A multicast group.
    Group,
}

/// The node's answer to a [`Request`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Done.
    Done,
    /// The session is open.
    Welcome(Welcome),
    /// A segment is made; its memory is beside it unless it is empty.
    Created {
        /// Its handle.
        segment: Handle,
        /// Its number.
        id: SegmentId,
        /// Its place in the rack's address space, where it has one.
        address: Option<u64>,
    },
    /// Memory is beside it.
    Memory,
    /// A connection is made; what it gives is beside it.
    Connected(Connected),
    /// An interrupt is made; line and event are beside it.
    Interrupt {
        /// Its handle.
        interrupt: Handle,
        /// Its number.
        number: u32,
    },
    /// Whether the session lives.
    Alive(bool),
    /// Some of the host's segments.
    Segments {
        /// Them.
        list: Vec<SegmentEntry>,
        /// Whether there are more.
        more: bool,
    },
    /// Memory in the rack's address space is beside it.
    Extent {
        /// Its handle.
        extent: Handle,
        /// Where.
        address: u64,
    },
    /// Pages of the rack's address space: their memory is beside it, in this order.
    Pages {
        /// The connection that they belong to.
        connection: Handle,
        /// Each piece's bytes, one after the other from the address that was asked for.
        lengths: Vec<u64>,
        /// Whether stores are allowed to all of them.
        write: bool,
    },
    /// It takes longer: [`Event::Finished`] tells the end.
    Started {
        /// Of what.
        ticket: Handle,
    },
    /// It cannot be.
    Refused(Refusal),
}

/// What a new session is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The session.
    pub session: SessionId,
    /// This host.
    pub node: NodeId,
    /// The rack's hosts.
    pub hosts: Vec<(NodeId, String)>,
}

/// A new connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connected {
    /// Its handle.
    pub connection: Handle,
    /// Bytes of the segment; for interrupts 0.
    pub size: u64,
    /// Whether stores are allowed.
    pub write: bool,
    /// Its place in the rack's address space, where it has one.
    pub address: Option<u64>,
}

/// A segment in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentEntry {
    /// Its number.
    pub id: SegmentId,
    /// Bytes.
    pub size: u64,
    /// Whether others may connect.
    pub available: bool,
    /// The process that made it.
    pub session: SessionId,
    /// Connections by host.
    pub connections: Vec<NodeId>,
    /// Its place in the rack's address space, where it has one.
    pub address: Option<u64>,
}

/// Why not.
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
    /// The size is zero or too large.
    #[error("a size is at least one byte and at most 2^62")]
    Size,
    /// The host has no memory left to export.
    #[error("no memory is left to export: {free} bytes of the host's `export` are free")]
    NoSpace {
        /// Bytes left.
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
    /// Somebody else is at it.
    #[error("the memory is being moved; try again")]
    Busy,
    /// The session has as much as one may have.
    #[error("a process may have {0} of these")]
    TooMany(u32),
}

/// What happened, from a node to a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// Somebody connected to the session's segment.
    Connected {
        /// Which segment.
        segment: Handle,
        /// From which host.
        node: NodeId,
    },
    /// Somebody disconnected, or is gone.
    Disconnected {
        /// Which segment.
        segment: Handle,
        /// From which host.
        node: NodeId,
    },
    /// What the session is connected to changed.
    Remote {
        /// Which connection.
        connection: Handle,
        /// How.
        change: Change,
    },
    /// Somebody connected to the session's data interrupt; its ring is beside it.
    Sender {
        /// Which interrupt.
        interrupt: Handle,
        /// A name for the ring.
        ring: Handle,
    },
    /// A sender is gone: what its ring holds is the last of it.
    SenderGone {
        /// Which interrupt.
        interrupt: Handle,
        /// Which ring.
        ring: Handle,
    },
    /// Stop writing to a range of memory: it is being moved. Answer [`Notice::Frozen`].
    Freeze {
        /// Which move.
        ticket: Handle,
        /// The segment, extent or connection.
        keeper: Handle,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// The range is in the memory beside this from now on. Answer [`Notice::Adopted`].
    Adopt {
        /// Which move.
        ticket: Handle,
        /// The segment, extent or connection.
        keeper: Handle,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
        /// First byte in that memory.
        from: u64,
    },
    /// What was [`Reply::Started`] is done.
    Finished {
        /// Of what.
        ticket: Handle,
        /// How it ended.
        outcome: Result<(), Refusal>,
    },
}

/// What happens to the far end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// Its owner asks to disconnect.
    Disconnect,
    /// Its host's node is gone.
    NotOperational,
    /// It is gone for good.
    Lost,
}

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
        answer: Result<Grant, Refusal>,
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
    /// Use the memory beside this.
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
}

/// A positive answer to a [`Question`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Grant {
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

/// A message as bytes.
pub fn encode(message: &impl Serialize) -> Vec<u8> {
    // Serializing to a growing vector cannot fail: every message is plain data.
    postcard::to_allocvec(message).unwrap_or_default()
}

/// A message from bytes; `None` when they are none, or have a tail.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Some(message),
        _ => None,
    }
}
