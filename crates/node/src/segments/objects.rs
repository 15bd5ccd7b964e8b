//! The memory and events that a host's directory of segments speaks of, as descriptors.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use rackbus_memory::doorbell::{DOORBELL_BYTES, count_in};
use rackbus_memory::ring::RingLayout;
use rackbus_memory::{Access, Event, Region, RegionError, SharedMemory};
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
    fd: Arc<OwnedFd>,
    /// The same memory for those who may only load from it.
    read_only: OnceLock<Arc<OwnedFd>>,
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
    fn new(fd: OwnedFd, kind: ObjectKind) -> Arc<Object> {
        let (fd, region) = (Arc::new(fd), OnceLock::new());
        Arc::new(Object { fd, read_only: OnceLock::new(), kind, region })
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
        let size = rustix::fs::fstat(&*self.fd)
            .map_err(|cause| RegionError::System { what: "fstat", cause })?
            .st_size;
        let access = Access::READ | Access::WRITE;
        let size = u64::try_from(size).unwrap_or(0);
        let region = Region::map(self.fd.as_fd(), 0, size, access)?;
        Ok(self.region.get_or_init(|| Arc::new(region)).clone())
    }

    /// The descriptor with all rights.
    pub fn fd(&self) -> &Arc<OwnedFd> {
        &self.fd
    }

    /// A descriptor with the rights that go along with a message.
    fn with(&self, write: bool) -> std::io::Result<Arc<OwnedFd>> {
        if write {
            return Ok(self.fd.clone());
        }
        if let Some(fd) = self.read_only.get() {
            return Ok(fd.clone());
        }
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(self.read_only.get_or_init(|| Arc::new(fd)).clone())
    }
}

/// All of a host's.
#[derive(Debug, Default)]
pub struct ObjectStore {
    objects: HashMap<ObjectId, Arc<Object>>,
    next: u64,
}

impl ObjectStore {
    /// Takes a descriptor in.
    pub fn add(&mut self, fd: OwnedFd) -> ObjectId {
        self.add_as(fd, ObjectKind::Memory)
    }

    fn add_as(&mut self, fd: OwnedFd, kind: ObjectKind) -> ObjectId {
        self.next += 1;
        let id = ObjectId(self.next);
        self.objects.insert(id, Object::new(fd, kind));
        id
    }

    /// The object with this number, as long as it is not forgotten.
    pub fn get(&self, id: ObjectId) -> Option<&Arc<Object>> {
        self.objects.get(&id)
    }

    /// Forgets an object; its descriptor is closed with its last user.
    pub fn forget(&mut self, id: ObjectId) {
        self.objects.remove(&id);
    }

    /// What goes along with a message.
    ///
    /// # Errors
    /// When an object is gone, or the process has no descriptors left.
    pub fn attach(&self, attached: &[AttachedObject]) -> std::io::Result<Vec<Arc<OwnedFd>>> {
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
        Ok(self.add_as(memory, kind))
    }
}

impl Objects for ObjectStore {
    fn memory(&mut self, size: u64) -> Result<ObjectId, String> {
        self.memory_named("rackbus segment", size, ObjectKind::Memory)
    }

    fn event(&mut self) -> Result<ObjectId, String> {
        let event = Event::new().map_err(|error| error.to_string())?;
        let fd = event.as_fd().try_clone_to_owned().map_err(|error| error.to_string())?;
        Ok(self.add_as(fd, ObjectKind::Event))
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
        count_in(&**object.fd(), 0).map_err(|error| error.to_string())
    }
}
