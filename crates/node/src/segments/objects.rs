//! The memory and events that a host's directory of segments speaks of, as handles. What is asked of the system about
//! them is asked here.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, OnceLock};

use rackbus_memory::doorbell::{DOORBELL_BYTES, count_in};
use rackbus_memory::ring::RingLayout;
use rackbus_memory::{Access, Event, PeerEvent, Region, RegionError, ResourceHandle, SharedMemory};
use rackbus_segment::directory::{AttachedObject, LinePart, LockAccess, LockState};
use rackbus_segment::message::{DATA_SLOTS, MAX_DATA};
use rackbus_segment::{ObjectId, Objects};
use rustix::fs::{Mode, OFlags};

use super::locks;

/// Bytes of a page.
const PAGE: u64 = 4096;

/// A piece of memory or an event.
#[derive(Debug)]
pub struct Object {
    handle: ResourceHandle,
    /// The same memory for those who may only load from it.
    read_only: OnceLock<ResourceHandle>,
    kind: ObjectKind,
    /// The memory, mapped here, once that was needed.
    region: OnceLock<Arc<Region>>,
}

/// What an object is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectKind {
    /// A memory file, which may be mapped.
    Memory,
    /// An eventfd, by which somebody who sleeps is woken.
    Event,
    /// An interrupt's doorbell, or the ring of a sender to it.
    Line(LinePart),
}

impl Object {
    fn new(handle: ResourceHandle, kind: ObjectKind) -> Arc<Object> {
        let (read_only, region) = (OnceLock::new(), OnceLock::new());
        Arc::new(Object { handle, read_only, kind, region })
    }

    pub fn kind(&self) -> ObjectKind {
        self.kind
    }

    /// The memory, mapped in this process.
    ///
    /// # Errors
    /// When it is no memory, or cannot be mapped.
    pub fn region(&self) -> Result<Arc<Region>, RegionError> {
        if let Some(region) = self.region.get() {
            return Ok(region.clone());
        }
        let size = rustix::fs::fstat(self.handle.as_descriptor())
            .map_err(|cause| RegionError::System { what: "fstat", cause })?
            .st_size;
        let access = Access::READ | Access::WRITE;
        let size = u64::try_from(size).unwrap_or(0);
        let region = Region::map(self.handle.as_descriptor(), 0, size, access)?;
        Ok(self.region.get_or_init(|| Arc::new(region)).clone())
    }

    /// The event that it is.
    ///
    /// # Errors
    /// When it is none, or the process has no descriptors left.
    pub fn event(&self) -> std::io::Result<PeerEvent> {
        self.handle.event()
    }

    /// What leads to it, with the rights that go along with a message.
    fn with(&self, write: bool) -> std::io::Result<ResourceHandle> {
        if write {
            return Ok(self.handle.clone());
        }
        if let Some(handle) = self.read_only.get() {
            return Ok(handle.clone());
        }
        let path = format!("/proc/self/fd/{}", self.handle.as_descriptor().as_raw_fd());
        let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(self.read_only.get_or_init(|| ResourceHandle::of_descriptor(fd)).clone())
    }
}

/// For what the system is asked about its memory: where there are data, what they are.
impl AsFd for Object {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.as_descriptor()
    }
}

/// All of a host's.
#[derive(Debug, Default)]
pub struct ObjectStore {
    objects: HashMap<ObjectId, Arc<Object>>,
    next: u64,
}

impl ObjectStore {
    /// Takes in what a peer passed.
    pub fn add(&mut self, handle: ResourceHandle) -> ObjectId {
        self.add_as(handle, ObjectKind::Memory)
    }

    fn add_as(&mut self, handle: ResourceHandle, kind: ObjectKind) -> ObjectId {
        self.next += 1;
        let id = ObjectId(self.next);
        self.objects.insert(id, Object::new(handle, kind));
        id
    }

    /// The object with this number, as long as it is not forgotten.
    pub fn get(&self, id: ObjectId) -> Option<&Arc<Object>> {
        self.objects.get(&id)
    }

    /// Forgets an object; what leads to it is closed with its last user.
    pub fn forget(&mut self, id: ObjectId) {
        self.objects.remove(&id);
    }

    /// What goes along with a message.
    ///
    /// # Errors
    /// When an object is gone, or the process has no descriptors left.
    pub fn attach(&self, attached: &[AttachedObject]) -> std::io::Result<Vec<ResourceHandle>> {
        let one = |it: &AttachedObject| match self.objects.get(&it.object) {
            Some(object) => object.with(it.write),
            None => Err(std::io::Error::other("the object is gone")),
        };
        attached.iter().map(one).collect()
    }

    fn memory_named(
        &mut self,
        name: &str,
        size: u64,
        kind: ObjectKind,
    ) -> Result<ObjectId, String> {
        // Whole pages: QEMU maps no others into a virtual machine.
        let pages = size.checked_next_multiple_of(PAGE).ok_or("memory that cannot be")?;
        let memory = SharedMemory::reserve(name, pages).map_err(|error| error.to_string())?;
        // Whoever has another user's rights gets at it by descriptor only.
        rustix::fs::fchmod(&memory, Mode::RUSR | Mode::WUSR).map_err(|error| error.to_string())?;
        Ok(self.add_as(ResourceHandle::of_descriptor(memory), kind))
    }
}

impl Objects for ObjectStore {
    fn memory(&mut self, size: u64) -> Result<ObjectId, String> {
        self.memory_named("rackbus segment", size, ObjectKind::Memory)
    }

    fn event(&mut self) -> Result<ObjectId, String> {
        let event = Event::new().map_err(|error| error.to_string())?;
        Ok(self.add_as(ResourceHandle::of_descriptor(event.into()), ObjectKind::Event))
    }

    fn line(&mut self, part: LinePart) -> Result<ObjectId, String> {
        let kind = ObjectKind::Line(part);
        match part {
            LinePart::Doorbell => {
                self.memory_named("rackbus interrupt", DOORBELL_BYTES as u64, kind)
            }
            LinePart::Ring => {
                let layout = RingLayout { slots: DATA_SLOTS, slot_bytes: MAX_DATA };
                let bytes = layout.bytes().ok_or("a ring that cannot be")?;
                self.memory_named("rackbus messages", bytes as u64, kind)
            }
        }
    }

    fn lock(&mut self, memory: ObjectId, offset: u64, access: LockAccess<'_>) -> Option<LockState> {
        let region = self.get(memory)?.region().ok()?;
        locks::access(region, usize::try_from(offset).ok()?, access)
    }

    fn rung(&self, line: ObjectId) -> Result<u32, String> {
        let object = self.get(line).ok_or("the line is gone")?;
        count_in(&**object, 0).map_err(|error| error.to_string())
    }
}
