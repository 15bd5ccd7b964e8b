//! Between a process and its host's node: what it asks ([`SessionRequest`]), what it is answered
//! ([`Reply`]), what it is told unasked ([`SessionEvent`]) and how it answers that ([`Notice`]).

use serde::{Deserialize, Serialize};

use super::{
    BorrowedEntry, ConnectionChange, DeviceEntry, Handle, InterruptKind, LockHolder, LockReply,
    LockRequest, NodeId, Refusal, SegmentAccess, SegmentId, SegmentKind, SessionId, TargetKind,
    Withdrawal,
};

/// A process to its node. The first is [`SessionRequest::Hello`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SessionRequest {
    /// Opens the session; beside it a packet socket on which events are to come, and perhaps the memory that the
    /// process' copy channels count in (`rackbus_memory::copy::published`).
    Hello {
        /// The protocol's [`VERSION`](super::VERSION) that the sender speaks.
        version: u32,
    },
    /// Makes a segment: [`Reply::Created`], its memory beside it.
    CreateSegment {
        /// Its number; where `choose`, the first that is tried.
        id: SegmentId,
        /// Whether the node may choose another number.
        choose: bool,
        /// Size of the segment in bytes.
        size: u64,
        /// Shared, private, without memory yet, or a member of a multicast group.
        kind: SegmentKind,
    },
    /// Asks for the memory of an empty segment: [`Reply::Memory`]. Asked again before others can use the segment, the same
    /// memory: for a process that could not map it.
    GiveMemory {
        /// Handle of the segment.
        segment: Handle,
    },
    /// Lets processes of other hosts connect to a segment.
    SetAvailable {
        /// Handle of the segment.
        segment: Handle,
    },
    /// Lets others no longer connect.
    SetUnavailable {
        /// Handle of the segment.
        segment: Handle,
        /// What happens to those that are connected.
        how: Withdrawal,
    },
    /// Lets other processes of this host attach.
    Share {
        /// Handle of the segment.
        segment: Handle,
    },
    /// Ends a segment. Connectors lose it.
    Remove {
        /// Handle of the segment.
        segment: Handle,
    },
    /// Connects to a segment: [`Reply::Connected`], its memory beside it.
    Connect {
        /// On which host; [`BROADCAST_NODE`](super::BROADCAST_NODE) for a group.
        node: NodeId,
        /// Number of the segment and of its host.
        id: SegmentId,
        /// Milliseconds to wait for the other host's node.
        timeout_ms: u32,
        /// What is connected to.
        what: TargetKind,
    },
    /// Between machines: asks that what was stored to the memory of a segment or a connection before is there
    /// for everybody who is connected: [`Reply::Done`] when it is.
    Flush {
        /// Handle of the segment or the connection.
        keeper: Handle,
    },
    /// Between machines: something is done to a lock or a barrier in memory that a connection leads to, by the host
    /// that has it: [`Reply::Lock`].
    Lock {
        /// Handle of the connection, or of the group's segment.
        keeper: Handle,
        /// What is to be done with the lock or the barrier.
        request: LockRequest,
    },
    /// Ends a connection to a segment or an interrupt.
    Disconnect {
        /// Handle of the connection.
        connection: Handle,
    },
    /// Makes an interrupt: [`Reply::Interrupt`], its line and its event beside it.
    CreateInterrupt {
        /// With data or without, shared or not.
        kind: InterruptKind,
        /// Its number; `None` lets the node choose.
        number: Option<u32>,
        /// Whether others of this host may make the same one, and all of them hear it.
        shared: bool,
    },
    /// Ends an interrupt; those who trigger it learn that it is gone.
    RemoveInterrupt {
        /// Handle of the interrupt.
        interrupt: Handle,
    },
    /// Connects to an interrupt: [`Reply::Connected`]; line, event and, for data, ring beside it.
    ConnectInterrupt {
        /// Number of the owner's host.
        node: NodeId,
        /// With data or without, shared or not.
        kind: InterruptKind,
        /// Number of the interrupt on the owner's host.
        number: u32,
        /// Milliseconds to wait for the other host's node.
        timeout_ms: u32,
    },
    /// Whether a host's node answers: [`Reply::Done`] or a refusal.
    Probe {
        /// Number of the host that is asked about.
        node: NodeId,
    },
    /// Whether a session still lives: [`Reply::Alive`].
    Alive {
        /// The session that is looked for.
        holder: LockHolder,
    },
    /// Changes who may use this host's segments: [`Reply::Done`] when it is in force.
    SetShare {
        /// The first segment that it is for.
        first: SegmentId,
        /// The last segment that it is for.
        last: SegmentId,
        /// The host that it is for; `None` for every one.
        node: Option<NodeId>,
        /// What it may do.
        share: SegmentAccess,
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
        /// Handle of the extent of pages.
        extent: Handle,
    },
    /// Opens pages to one host: [`Reply::Done`] when it can reach them.
    OpenPages {
        /// Handle of the extent of pages.
        extent: Handle,
        /// First byte, on a page's border.
        offset: u64,
        /// Bytes, in whole pages.
        length: u64,
        /// Number of the host that may reach the pages.
        node: NodeId,
        /// Whether it may store, too.
        write: bool,
    },
    /// Closes pages again: [`Reply::Done`] when nobody reaches them any more.
    ClosePages {
        /// Handle of the extent of pages.
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
    /// Every device of the rack that can be borrowed: [`Reply::Devices`].
    ListDevices {
        /// How many to pass over: a reply has room for some.
        skip: u32,
    },
    /// Borrows a device until it is returned, or the session ends: [`Reply::Borrowed`].
    BorrowDevice {
        /// Its fabric device id.
        fdid: u64,
        /// Whether its lender is to get no memory of this host's.
        strict: bool,
    },
    /// Returns a device: [`Reply::Done`] when it is offered again.
    ReturnDevice {
        /// Number of its lease.
        lease: u64,
    },
    /// Between machines: asks for the memory that this session copies from, [`COPY_BUFFER`](super::COPY_BUFFER) bytes:
    /// [`Reply::Memory`]. Asked again, the same memory.
    CopyBuffer,
    /// Between machines: copies from the session's copy buffer to memory that a connection leads to, a part of a copy or all
    /// of it. The part is there when it is answered by [`Reply::Done`], and with the last one all that was stored before as
    /// well, also on further machines. The bytes of a copy have no order among each other.
    Copy {
        /// Handle of the connection.
        connection: Handle,
        /// First byte in the memory that the connection leads to.
        offset: u64,
        /// First byte in the copy buffer.
        from: u32,
        /// Number of bytes, at least one.
        length: u32,
        /// Whether it goes on where the session's last part ended, which said that it would: what was stored since need not
        /// be there before it.
        follows: bool,
        /// Whether a part follows.
        more: bool,
    },
}

/// A process to its node, beside its requests: on the socket of its events, without a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Notice {
    /// A keeper of memory that is being moved has stopped to write to it.
    Frozen {
        /// Number of the move.
        ticket: Handle,
        /// Under which handle it keeps the memory.
        keeper: Handle,
    },
    /// A keeper of moved memory uses the new one.
    Adopted {
        /// Number of the move.
        ticket: Handle,
        /// Under which handle it keeps the memory.
        keeper: Handle,
    },
    /// Nobody accesses what is hidden, as far as the system can see to that.
    Hidden {
        /// Number of the turn.
        turn: u64,
    },
}

/// The node's answer to a [`SessionRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Done, with nothing to tell.
    Done,
    /// The session is open.
    Welcome(Welcome),
    /// A segment is made; its memory is beside it unless it is empty.
    Created {
        /// Handle of the new segment.
        segment: Handle,
        /// Number of the new segment, which others connect to.
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
        /// Handle of the new interrupt.
        interrupt: Handle,
        /// Number of the new interrupt, which others connect to.
        number: u32,
        /// How often it rang before anybody could know that this session hears it.
        rung: u32,
    },
    /// Whether the session lives.
    Alive(bool),
    /// What became of a lock or a barrier.
    Lock(LockReply),
    /// Some of the host's segments.
    Segments {
        /// The host's segments, at most as many as a message holds.
        list: Vec<SegmentEntry>,
        /// Whether there are more.
        more: bool,
    },
    /// Memory in the rack's address space is beside it.
    Extent {
        /// Handle of the new extent.
        extent: Handle,
        /// Address of its first page in the pool.
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
    /// It takes longer: [`SessionEvent::Finished`] tells the end.
    Started {
        /// Number of the move that the answer belongs to.
        ticket: Handle,
    },
    /// The request was refused for this reason.
    Refused(Refusal),
    /// Some of the rack's devices.
    Devices {
        /// The devices, at most as many as a message holds.
        list: Vec<DeviceEntry>,
        /// Whether there are more.
        more: bool,
    },
    /// A device is borrowed.
    Borrowed(BorrowedEntry),
}

impl Reply {
    /// What a session would ask to give back what this reply gives it; `None` where it gives nothing.
    pub fn undo(&self) -> Option<SessionRequest> {
        match *self {
            Reply::Created { segment, .. } => Some(SessionRequest::Remove { segment }),
            Reply::Connected(Connected { connection, .. }) | Reply::Pages { connection, .. } => {
                Some(SessionRequest::Disconnect { connection })
            }
            Reply::Interrupt { interrupt, .. } => {
                Some(SessionRequest::RemoveInterrupt { interrupt })
            }
            Reply::Extent { extent, .. } => Some(SessionRequest::Free { extent }),
            _ => None,
        }
    }
}

/// What a new session is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Number of the new session.
    pub session: SessionId,
    /// Number of the host that the session is on.
    pub node: NodeId,
    /// All hosts of the rack, with their names.
    pub hosts: Vec<(NodeId, String)>,
    /// Whether the hosts are machines, which share no memory: then stores reach others by messages, and
    /// [`SessionRequest::Flush`] says when they have.
    pub machines: bool,
}

/// What a process needs to use a new connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connected {
    /// Handle of the connection.
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
    /// Number of the segment and of its host.
    pub id: SegmentId,
    /// Size of the segment in bytes.
    pub size: u64,
    /// Whether others may connect.
    pub available: bool,
    /// Whether it is a multicast group, whose members and senders the connections are.
    pub group: bool,
    /// The process that made it; a group has none of its own.
    pub session: Option<SessionId>,
    /// The hosts of its connections, one entry for each connection.
    pub connections: Vec<NodeId>,
    /// Its place in the rack's address space, where it has one.
    pub address: Option<u64>,
}

/// What happened, from a node to a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SessionEvent {
    /// Somebody connected to the session's segment.
    Connected {
        /// Handle of the segment.
        segment: Handle,
        /// Number of the host that connected.
        node: NodeId,
    },
    /// Somebody disconnected, or is gone.
    Disconnected {
        /// Handle of the segment.
        segment: Handle,
        /// Number of the host that disconnected.
        node: NodeId,
    },
    /// What the session is connected to changed.
    Remote {
        /// Handle of the connection.
        connection: Handle,
        /// What happened to its segment.
        change: ConnectionChange,
    },
    /// Somebody connected to the session's data interrupt; its ring is beside it.
    Sender {
        /// Handle of the interrupt.
        interrupt: Handle,
        /// A name for the ring.
        ring: Handle,
    },
    /// A sender is gone: what its ring holds is the last of it.
    SenderGone {
        /// Handle of the interrupt.
        interrupt: Handle,
        /// Handle of the new sender's ring.
        ring: Handle,
    },
    /// Stop writing to a range of memory: it is being moved. Answer [`Notice::Frozen`].
    Freeze {
        /// Number of the move.
        ticket: Handle,
        /// The segment, extent or connection.
        keeper: Handle,
        /// Offset of the range in the memory, in bytes.
        offset: u64,
        /// Length of the range in bytes.
        length: u64,
    },
    /// The range is in the memory beside this from now on, which may not be written to before
    /// [`SessionEvent::Unfreeze`]. Answer [`Notice::Adopted`].
    Adopt {
        /// Number of the move.
        ticket: Handle,
        /// The segment, extent or connection.
        keeper: Handle,
        /// Offset of the range in the memory, in bytes.
        offset: u64,
        /// Length of the range in bytes.
        length: u64,
        /// First byte in that memory.
        from: u64,
    },
    /// The range may be written to again: the move has ended. After a move that failed it comes
    /// without an adoption before it, and the range is where it was.
    Unfreeze {
        /// Number of the move.
        ticket: Handle,
        /// The segment, extent or connection.
        keeper: Handle,
        /// Offset of the range in the memory, in bytes.
        offset: u64,
        /// Length of the range in bytes.
        length: u64,
    },
    /// Between machines: nobody is to access a range of a mapped memory until [`SessionEvent::Show`], so that what takes
    /// effect there is seen as a whole. Answered by [`Notice::Hidden`].
    Hide {
        /// Number of the turn.
        turn: u64,
        /// The segment or connection.
        keeper: Handle,
        /// Offset of the range in the memory, in bytes.
        offset: u64,
        /// Length of the range in bytes.
        length: u64,
    },
    /// What was hidden may be accessed again.
    Show {
        /// The segment or connection.
        keeper: Handle,
    },
    /// What was [`Reply::Started`] is done.
    Finished {
        /// Number of the move that has ended.
        ticket: Handle,
        /// Whether the memory was moved, or why not.
        outcome: Result<(), Refusal>,
    },
}
