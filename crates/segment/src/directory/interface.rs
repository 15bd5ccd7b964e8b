//! What the directory needs of its node, and what it has the node do.

use std::collections::BTreeMap;

use rackbus_fabric::sharing::Rules;

use crate::message::{
    BarrierPhase, ConnectorMessage, Handle, LockHolder, NodeId, ObjectId, OwnerMessage, Reply,
    SessionEvent, SessionId,
};

/// Makes what the directory needs, at once.
pub trait Objects {
    /// Memory of so many bytes, zeroed, sparse.
    ///
    /// # Errors
    /// What the system says.
    fn memory(&mut self, size: u64) -> Result<ObjectId, String>;

    /// An eventfd, for an interrupt of a process.
    ///
    /// # Errors
    /// What the system says.
    fn event(&mut self) -> Result<ObjectId, String>;

    /// The line of an interrupt, or the ring of a sender to it.
    ///
    /// # Errors
    /// What the system says.
    fn line(&mut self, part: LinePart) -> Result<ObjectId, String>;

    /// How often a doorbell rang so far.
    ///
    /// # Errors
    /// What the system says.
    fn rung(&self, line: ObjectId) -> Result<u32, String>;

    /// Does something to a lock or a barrier at `offset` of a memory, for a party on another machine. `None` when there
    /// cannot be one: it is not inside of the memory, say, or this is memory that nobody sees.
    fn lock(
        &mut self,
        _memory: ObjectId,
        _offset: u64,
        _access: LockAccess<'_>,
    ) -> Option<LockState> {
        None
    }
}

/// What is done in memory to a lock or a barrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockAccess<'a> {
    /// Looks who holds the lock.
    Look,
    /// Takes the lock if it is free.
    Take(LockHolder),
    /// Unlocks it if this one holds it.
    Free(LockHolder),
    /// Unlocks it if this one holds it, and has the next holder told that it died.
    FreeOfDead(LockHolder),
    /// Arrives at a barrier.
    Arrive {
        /// All that the barrier waits for, the one that is meant here among them.
        parties: &'a [LockHolder],
        /// The one that arrives.
        party: LockHolder,
        /// Phases that it has passed; `None` only looks for that.
        passed: Option<u32>,
    },
    /// Has nobody wait for a party of a barrier any more.
    Exclude {
        /// All that the barrier waits for, the one that is meant here among them.
        parties: &'a [LockHolder],
        /// The one that is dead.
        dead: LockHolder,
    },
}

/// How a lock or a barrier is by that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockState {
    /// Taken just now; whether its last holder died.
    Taken {
        /// Its last holder died while it held it.
        died: bool,
    },
    /// It is held by this one, or by nobody.
    Held(Option<LockHolder>),
    /// Of a barrier: phases that the party had passed, and how it stands with the next.
    Arrived(u32, BarrierPhase),
}

/// What memory an interrupt needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinePart {
    /// The doorbell that its senders ring.
    Doorbell,
    /// The ring of messages that one sender writes to.
    Ring,
}

/// An object that goes with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttachedObject {
    /// The memory or event that goes along.
    pub object: ObjectId,
    /// Whether the receiver may store to it.
    pub write: bool,
}

impl AttachedObject {
    /// With loads and stores.
    pub(super) fn whole(object: ObjectId) -> Self {
        AttachedObject { object, write: true }
    }
}

/// Whom a message is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Recipient {
    /// The session that asked.
    Reply(SessionId, Reply),
    /// An event for a session, which did not ask for it.
    Event(SessionId, SessionEvent),
    /// The node of an owner.
    Ask(NodeId, ConnectorMessage),
    /// The node of a connector.
    Tell(NodeId, OwnerMessage),
}

/// What the shell has to do, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DirectoryAction {
    /// Send a message, with these objects beside it.
    Send(Recipient, Vec<AttachedObject>),
    /// Copy memory, then call [`Directory::copied`](super::Directory::copied).
    Copy {
        /// Number of the move that the copy belongs to.
        ticket: Handle,
        /// Object and offset in bytes that are copied from.
        from: (ObjectId, u64),
        /// Object and offset in bytes that are copied to.
        to: (ObjectId, u64),
        /// How many bytes are copied.
        length: u64,
    },
    /// Empty a range of memory: who still maps it reads zeroes from now on.
    Empty {
        /// What to call [`Directory::emptied`](super::Directory::emptied) with when it is done: so much takes its time, and
        /// is not waited for. `None` for little, which is done at once.
        job: Option<Handle>,
        /// The memory to be emptied.
        object: ObjectId,
        /// Offset of the first byte.
        offset: u64,
        /// How many bytes are emptied.
        length: u64,
    },
    /// Release an object that the directory refers to no more.
    Forget(ObjectId),
    /// End a session: it did not answer. [`Directory::closed`](super::Directory::closed) is to be called.
    Cut(SessionId),
}

/// How the conversation with an owner's node ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// The node is dead: nobody listens where it should be, or it closed the conversation. Its
    /// processes are cut off.
    Dead,
    /// It could not be talked to, which says nothing of its processes.
    OutOfReach,
}

/// A host's exported memory in the rack's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostRange {
    /// First address of the host's part of the pool.
    pub base: u64,
    /// Size of the part in bytes.
    pub size: u64,
}

impl HostRange {
    /// The addresses that the part has in the pool.
    pub fn addresses(&self) -> std::ops::Range<u64> {
        self.base..self.base.saturating_add(self.size)
    }
}

/// What the directory knows from the rack file.
#[derive(Debug, Clone)]
pub struct DirectorySettings {
    /// Number of the host whose directory this is.
    pub node: NodeId,
    /// All hosts of the rack, with their names.
    pub hosts: BTreeMap<NodeId, String>,
    /// Where this host's exported memory is in the rack's address space.
    pub range: HostRange,
    /// Each host's exported memory, to find whom an address belongs to.
    pub ranges: Vec<(NodeId, HostRange)>,
    /// Who may use whose segments.
    pub rules: Rules,
    /// Whether the hosts are machines, which share no memory.
    pub machines: bool,
}
