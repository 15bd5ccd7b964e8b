//! Connections to segments of others, and to memory of borrowed devices in their place.

use std::sync::Arc;

use rackbus_segment::Handle;
use rackbus_segment::message::{BROADCAST_NODE, NodeId, SegmentId};

use crate::devices::DeviceSegment;
use crate::events::Watch;
use crate::memory::{FarPlace, MappedMemory, Mapping};
use crate::session::{AttachError, Session};

/// Who keeps the memory that a connection leads to.
#[derive(Debug)]
enum Keeper {
    /// The node, by this handle.
    Node(Handle),
    /// A device that this process has borrowed.
    Device(DeviceSegment),
}

/// A connection to a segment, or to memory of a borrowed device. It ends when it is dropped; mappings stay, but are not moved along
/// any more.
#[derive(Debug)]
pub struct RemoteSegment {
    session: Session,
    keeper: Keeper,
    node: NodeId,
    id: SegmentId,
    size: u64,
    address: Option<u64>,
    memory: Arc<MappedMemory>,
    watch: Arc<Watch>,
}

impl RemoteSegment {
    /// A connection that the node keeps by this handle: to this segment of a host, of so many bytes, which is at this
    /// place of the rack's address space.
    pub(super) fn of_node(
        (session, handle): (&Session, Handle),
        (node, id, size, address): (NodeId, SegmentId, u64, Option<u64>),
        memory: Arc<MappedMemory>,
        watch: Arc<Watch>,
    ) -> RemoteSegment {
        let keeper = Keeper::Node(handle);
        RemoteSegment { session: session.clone(), keeper, node, id, size, address, memory, watch }
    }

    /// The host it is on.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// The segment's number on its owner's host.
    pub fn id(&self) -> SegmentId {
        self.id
    }

    /// Size of the segment in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Its place in the rack's address space; groups have none.
    pub fn address(&self) -> Option<u64> {
        self.address
    }

    /// Whether stores are allowed.
    pub fn writable(&self) -> bool {
        self.memory.writable()
    }

    /// What happens to it.
    #[inline]
    pub fn watch(&self) -> &Arc<Watch> {
        &self.watch
    }

    /// Between machines, waits until what was stored before has taken effect at the segment's owner. On one machine
    /// that is so at once.
    ///
    /// # Errors
    /// [`AttachError`] when the owner's node is gone, or did not answer in time.
    pub fn flush(&self) -> Result<(), AttachError> {
        match self.keeper {
            Keeper::Node(handle) if self.is_far() => self.session.flush(handle),
            Keeper::Node(_) | Keeper::Device(_) => Ok(()),
        }
    }

    /// The session and the handle by which the node copies to the segment, where that is on another machine.
    pub(crate) fn carried_by(&self) -> Option<(&Session, Handle)> {
        let Keeper::Node(handle) = self.keeper else { return None };
        let carries = self.session.is_far(self.owner()) && !self.session.in_guest();
        carries.then_some((&self.session, handle))
    }

    /// The host that has the memory.
    fn owner(&self) -> NodeId {
        if self.node == BROADCAST_NODE { self.session.group_home() } else { self.node }
    }

    /// As [`LocalSegment::flush`](super::LocalSegment::flush), of a segment that another process of this host shares: between machines, waits until what
    /// was stored before has taken effect at everybody who is connected.
    ///
    /// # Errors
    /// [`AttachError`] when somebody did not answer in time.
    pub fn flush_to_all(&self) -> Result<(), AttachError> {
        match self.keeper {
            Keeper::Node(handle) => self.session.flush(handle),
            Keeper::Device(_) => Ok(()),
        }
    }

    /// Whether the segment is on another machine, and what is mapped stands for it.
    pub fn is_far(&self) -> bool {
        let of_node = matches!(self.keeper, Keeper::Node(_));
        of_node && self.session.between_machines() && self.node != self.session.node()
    }

    /// Memory of a device that this process has borrowed from a host, in the place of a segment.
    pub(crate) fn of_device(
        session: &Session,
        (node, id): (NodeId, SegmentId),
        (memory, size): (Arc<MappedMemory>, u64),
        device: DeviceSegment,
    ) -> RemoteSegment {
        let (session, keeper, watch) = (session.clone(), Keeper::Device(device), Watch::new(None));
        RemoteSegment { session, keeper, node, id, size, address: None, memory, watch }
    }

    /// Whether what it leads to is still there.
    pub fn is_there(&self) -> bool {
        match &self.keeper {
            Keeper::Node(_) => !self.watch.lost(),
            Keeper::Device(held) => held.device.identity().is_ok(),
        }
    }

    pub(crate) fn memory(&self) -> &Arc<MappedMemory> {
        &self.memory
    }

    /// The device whose memory it is, if it is one's.
    pub(crate) fn device(&self) -> Option<&DeviceSegment> {
        match &self.keeper {
            Keeper::Node(_) => None,
            Keeper::Device(device) => Some(device),
        }
    }

    /// Ends waiting and callbacks for it, also those of other threads.
    pub fn end_watch(&self) {
        self.watch.end();
    }

    /// Maps `length` bytes from `offset`.
    ///
    /// # Errors
    /// [`AttachError`] when the range is not inside.
    pub fn map(&self, offset: u64, length: u64) -> Result<Mapping, AttachError> {
        self.map_as((offset, length), None, false)
    }

    /// The same at an address where nothing is mapped yet, or to be read only.
    ///
    /// # Errors
    /// As [`map`](RemoteSegment::map).
    pub fn map_as(
        &self,
        range: (u64, u64),
        address: Option<usize>,
        read_only: bool,
    ) -> Result<Mapping, AttachError> {
        let mapping = self.memory.map(range, address, read_only)?;
        let Keeper::Node(keeper) = self.keeper else { return Ok(mapping) };
        Ok(match self.session.is_far(self.owner()) {
            true => mapping.standing_for(FarPlace {
                keeper,
                offset: range.0,
                watch: self.watch.clone(),
            }),
            false => mapping,
        })
    }
}

impl Drop for RemoteSegment {
    fn drop(&mut self) {
        self.watch.end();
        // First, so that the node continues with a move that waits for this process; then those who
        // wait for the move are woken.
        let Keeper::Node(handle) = self.keeper else { return };
        self.session.disconnect(handle);
        self.memory.end();
        self.session.registry().forget(handle);
    }
}
