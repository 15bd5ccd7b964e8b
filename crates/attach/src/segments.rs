//! Segments: this process' own, and how it connects to others' ([`RemoteSegment`]).

mod remote;

use std::sync::Arc;

use rackbus_memory::{AsHandle, Region, ResourceHandle};
use rackbus_segment::Handle;
use rackbus_segment::guest::ReadOnly;
use rackbus_segment::message::{
    BROADCAST_NODE, Connected, NodeId, Reply, SegmentId, SegmentKind, SessionRequest, TargetKind,
    Withdrawal,
};

use crate::events::{Callback, SegmentEvent, Watch};
use crate::memory::{FarPlace, MappedMemory, Mapping};
use crate::registry::Watched;
use crate::session::{AttachError, Session};

pub use remote::RemoteSegment;

/// What a new segment is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentOptions {
    /// Its number on this host; for a group, the group's.
    pub id: SegmentId,
    /// Whether the node may choose another number, from `id` upwards.
    pub choose: bool,
    /// Bytes; any number from 1.
    pub size: u64,
    /// Shared, private, without memory yet, or a member of a multicast group.
    pub kind: SegmentKind,
}

impl SegmentOptions {
    /// A segment for others, with this number and size in bytes.
    pub fn shared(id: SegmentId, size: u64) -> SegmentOptions {
        SegmentOptions { id, choose: false, size, kind: SegmentKind::Shared }
    }
}

/// A segment of this process. It ends when it is dropped; those that are connected lose it.
#[derive(Debug)]
pub struct LocalSegment {
    session: Session,
    handle: Handle,
    id: SegmentId,
    size: u64,
    kind: SegmentKind,
    address: Option<u64>,
    memory: Arc<MappedMemory>,
    watch: Arc<Watch>,
    removed: std::sync::atomic::AtomicBool,
}

impl Session {
    /// Makes a segment of this host's memory, which others can connect to once it is [available](LocalSegment::set_available).
    ///
    /// # Errors
    /// [`AttachError::Refused`]: the number is in use, the size is 0, or nothing is left of the
    /// host's export.
    pub fn create_segment(&self, options: &SegmentOptions) -> Result<LocalSegment, AttachError> {
        self.create_segment_watched(options, None)
    }

    /// The same, with somebody who is called for what happens to it.
    ///
    /// # Errors
    /// As [`create_segment`](Session::create_segment).
    pub fn create_segment_watched(
        &self,
        options: &SegmentOptions,
        callback: Option<Callback>,
    ) -> Result<LocalSegment, AttachError> {
        let SegmentOptions { id, choose, size, kind } = *options;
        let (reply, mut handles) =
            self.call(&SessionRequest::CreateSegment { id, choose, size, kind })?;
        let Reply::Created { segment: handle, id, address } = reply else {
            return Err(AttachError::Protocol);
        };
        let memory = MappedMemory::new(handles.resource().ok(), true, size);
        let watch = Watch::new(callback);
        let watched = Watched {
            watch: Arc::downgrade(&watch),
            memory: Arc::downgrade(&memory),
            size,
            ..Watched::default()
        };
        self.registry().watch(handle, watched, self);
        let (session, removed) = (self.clone(), false.into());
        Ok(LocalSegment { session, handle, id, size, kind, address, memory, watch, removed })
    }

    /// Connects to a segment of a host, which has `timeout_ms` milliseconds to answer (at least 500, at most 3000); memory of
    /// another machine may take up to twelve seconds in all until its contents are here. Other requests of this session wait
    /// meanwhile. [`BROADCAST_NODE`] connects to a multicast group.
    ///
    /// # Errors
    /// [`AttachError::Refused`]: there is no such segment or host, or it may not be used.
    pub fn connect(
        &self,
        node: NodeId,
        id: SegmentId,
        timeout_ms: u32,
    ) -> Result<RemoteSegment, AttachError> {
        self.connect_watched(node, id, timeout_ms, None)
    }

    /// The same, with somebody who is called for what happens to it.
    ///
    /// # Errors
    /// As [`connect`](Session::connect).
    pub fn connect_watched(
        &self,
        node: NodeId,
        id: SegmentId,
        timeout_ms: u32,
        callback: Option<Callback>,
    ) -> Result<RemoteSegment, AttachError> {
        let watch = Watch::new(callback);
        self.connect_to((node, id), timeout_ms, target_kind(node), (&watch, &|| {}))
    }

    /// Attaches to a segment that another process of this host shares.
    ///
    /// # Errors
    /// [`AttachError::Refused`] when there is none.
    pub fn attach(
        &self,
        id: SegmentId,
        callback: Option<Callback>,
    ) -> Result<RemoteSegment, AttachError> {
        let watch = Watch::new(callback);
        self.connect_to((self.node(), id), u32::MAX, TargetKind::Attach, (&watch, &|| {}))
    }

    /// As [`connect_watched`](Session::connect_watched), with a callback that is told when the attempt has ended, well or not, and
    /// before anything that happens to the segment: [`SegmentEvent::Attempted`]. What comes of it is given to `keep`, which may
    /// be a moment later than that call begins.
    pub fn connect_attempt(
        &self,
        node: NodeId,
        id: SegmentId,
        timeout_ms: u32,
        callback: Callback,
        keep: impl FnOnce(Result<RemoteSegment, AttachError>),
    ) {
        let watch = Watch::new(Some(callback));
        let tell = || watch.deliver(SegmentEvent::Attempted, &self.registry().calls);
        // Told before the node's events of it are let in.
        let made = self.connect_to((node, id), timeout_ms, target_kind(node), (&watch, &tell));
        let failed = made.is_err();
        keep(made);
        if failed {
            tell();
        }
    }

    /// Connects; `first` is called when nothing can go wrong any more, and before the first event.
    fn connect_to(
        &self,
        (node, id): (NodeId, SegmentId),
        timeout_ms: u32,
        what: TargetKind,
        (watch, first): (&Arc<Watch>, &dyn Fn()),
    ) -> Result<RemoteSegment, AttachError> {
        let request = SessionRequest::Connect { node, id, timeout_ms, what };
        let (made, reply, mut handles) = self.make(&request)?;
        let Reply::Connected(connected) = reply else { return Err(AttachError::Protocol) };
        let file = handles.resource()?;
        let Connected { connection: handle, size, write, address } = connected;
        if !write && self.in_guest() {
            return Err(ReadOnly { node, segment: id }.into());
        }
        let memory = MappedMemory::new(Some(file), write, size);
        let watched = Watched {
            watch: Arc::downgrade(watch),
            memory: Arc::downgrade(&memory),
            size,
            ..Watched::default()
        };
        first();
        self.registry().watch(handle, watched, self);
        made.claim();
        let places = (node, id, size, address);
        Ok(RemoteSegment::of_node((self, handle), places, memory, watch.clone()))
    }
}

/// What connecting to a number of a node means.
fn target_kind(node: NodeId) -> TargetKind {
    if node == BROADCAST_NODE { TargetKind::Group } else { TargetKind::Segment }
}

impl LocalSegment {
    /// The segment's number on this host.
    pub fn id(&self) -> SegmentId {
        self.id
    }

    /// Size of the segment in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Its place in the rack's address space; members of groups have none.
    pub fn address(&self) -> Option<u64> {
        self.address
    }

    /// What happens to it.
    #[inline]
    pub fn watch(&self) -> &Arc<Watch> {
        &self.watch
    }

    /// Makes the segment available: from now on, other processes may connect to it.
    ///
    /// # Errors
    /// [`AttachError::Refused`] for private segments, [`AttachError::NoMemory`] for empty ones without memory.
    pub fn set_available(&self) -> Result<(), AttachError> {
        self.check_memory()?;
        self.session.done(&SessionRequest::SetAvailable { segment: self.handle })
    }

    /// Lets nobody connect any more. With [`Withdrawal::Force`] those that are connected lose it:
    /// when this returns, they read and write nothing of it, even where they keep it mapped.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn set_unavailable(&self, how: Withdrawal) -> Result<(), AttachError> {
        self.session.done(&SessionRequest::SetUnavailable { segment: self.handle, how })
    }

    /// Between machines, waits until what was stored before has taken effect at everybody who is connected. On one
    /// machine that is so at once.
    ///
    /// # Errors
    /// [`AttachError`] when somebody did not answer in time.
    pub fn flush(&self) -> Result<(), AttachError> {
        self.session.flush(self.handle)
    }

    /// Lets other processes of this host attach.
    ///
    /// # Errors
    /// [`AttachError::NoMemory`] for empty segments without memory.
    pub fn share(&self) -> Result<(), AttachError> {
        self.check_memory()?;
        self.session.done(&SessionRequest::Share { segment: self.handle })
    }

    /// Fails for an empty segment whose memory this process has not got. Its node may have made it: then nobody here could
    /// see what others store there.
    fn check_memory(&self) -> Result<(), AttachError> {
        match self.kind == SegmentKind::Empty && !self.has_memory() {
            true => Err(AttachError::NoMemory),
            false => Ok(()),
        }
    }

    /// Maps `length` bytes from `offset`.
    ///
    /// # Errors
    /// [`AttachError`] when the range is not inside, or there is no memory yet.
    pub fn map(&self, offset: u64, length: u64) -> Result<Mapping, AttachError> {
        self.map_as((offset, length), None, false)
    }

    /// The same at an address where nothing is mapped yet, or to be read only.
    ///
    /// # Errors
    /// As [`map`](LocalSegment::map).
    pub fn map_as(
        &self,
        range: (u64, u64),
        address: Option<usize>,
        read_only: bool,
    ) -> Result<Mapping, AttachError> {
        let mapping = self.memory.map(range, address, read_only)?;
        let far = self.kind == SegmentKind::Group && self.session.is_far(self.session.group_home());
        Ok(match far {
            true => {
                let (keeper, watch) = (self.handle, self.watch.clone());
                mapping.standing_for(FarPlace { keeper, offset: range.0, watch })
            }
            false => mapping,
        })
    }

    /// Gives an empty segment memory of its own.
    ///
    /// # Errors
    /// [`AttachError::Refused`] when it has some, or was not made empty.
    pub fn give_memory(&self) -> Result<(), AttachError> {
        let file = self.ask_memory()?;
        self.memory.set_file(file);
        Ok(())
    }

    fn ask_memory(&self) -> Result<ResourceHandle, AttachError> {
        match self.session.call(&SessionRequest::GiveMemory { segment: self.handle })? {
            (Reply::Memory, mut handles) => Ok(handles.resource()?),
            _ => Err(AttachError::Protocol),
        }
    }

    /// Makes memory of this process the memory of an empty segment: what is written there is
    /// seen by all that are connected, and the other way round. When the mapping that this returns
    /// is dropped, the memory is private again, with its bytes. Who writes to it while it changes
    /// waits; a system call that does so fails with `EFAULT`.
    ///
    /// # Safety
    /// `address` and the segment's size are whole pages of readable and writable memory of this
    /// process, which is not unmapped or mapped anew before the mapping is dropped.
    ///
    /// # Errors
    /// [`AttachError`] when the segment is not empty, or the memory cannot be replaced: then other memory may be registered.
    #[allow(unsafe_code)]
    pub unsafe fn register(&self, address: usize) -> Result<Mapping, AttachError> {
        let file = self.ask_memory()?;
        // SAFETY: as the caller says.
        let region = unsafe { Region::map_over(address, file.as_handle(), self.size) }?;
        let region = Arc::new(region);
        self.memory.keep(&region);
        self.memory.set_file(file);
        Ok(Mapping::new(region))
    }

    pub(crate) fn memory(&self) -> &Arc<MappedMemory> {
        &self.memory
    }

    /// Whether it has memory.
    pub fn has_memory(&self) -> bool {
        self.memory.has_file()
    }

    /// What it was made as.
    pub fn kind(&self) -> SegmentKind {
        self.kind
    }

    /// Ends it now. Mappings stay, with what they hold.
    ///
    /// # Errors
    /// [`AttachError`] when the node is gone, in which case it is ended anyway.
    pub fn remove(&self) -> Result<(), AttachError> {
        if self.removed.swap(true, std::sync::atomic::Ordering::AcqRel) {
            return Ok(());
        }
        self.watch.end();
        let request = SessionRequest::Remove { segment: self.handle };
        self.session.give_back(self.handle, &self.memory, &request)
    }
}

impl Drop for LocalSegment {
    fn drop(&mut self) {
        // A node that is gone has ended it already.
        let _ = self.remove();
    }
}
