//! Between a process and its host's node: what it asks ([`Request`]), what it is answered
//! ([`Reply`]), what it is told unasked ([`Event`]) and how it answers that ([`Notice`]).

use serde::{Deserialize, Serialize};

use super::{
    Change, Handle, Holder, InterruptKind, NodeId, Refusal, SegmentId, SegmentKind, SessionId,
    Share, Target, Withdrawal,
};

/// A process to its node. The first is [`Request::Hello`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Opens the session; beside it a packet socket on which events are to come.
    Hello {
        /// [`VERSION`](super::VERSION).
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
        /// On which host; [`BROADCAST_NODE`](super::BROADCAST_NODE) for a group.
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
        /// How often it rang before anybody could know that this session hears it.
        rung: u32,
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
    /// Whether it is a multicast group, whose members and senders the connections are.
    pub group: bool,
    /// The process that made it; a group has none of its own.
    pub session: Option<SessionId>,
    /// Connections by host.
    pub connections: Vec<NodeId>,
    /// Its place in the rack's address space, where it has one.
    pub address: Option<u64>,
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
    /// The range is in the memory beside this from now on, which may not be written to before
    /// [`Event::Unfreeze`]. Answer [`Notice::Adopted`].
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
    /// The range may be written to again: the move is over. After a move that failed it comes
    /// without an adoption before it, and the range is where it was.
    Unfreeze {
        /// Which move.
        ticket: Handle,
        /// The segment, extent or connection.
        keeper: Handle,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// What was [`Reply::Started`] is done.
    Finished {
        /// Of what.
        ticket: Handle,
        /// How it ended.
        outcome: Result<(), Refusal>,
    },
}
