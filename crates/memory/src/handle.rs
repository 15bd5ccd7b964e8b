//! What leads to memory of another process: as the link between hosts carries it.
//!
//! On one machine it is a descriptor and where the memory begins in its file. Nobody above the link
//! looks into it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rackbus_fabric::{LentMemory, ObjectKey};

/// Memory that somebody lends; cheap to clone.
#[derive(Debug, Clone)]
pub struct MemoryHandle {
    file: Arc<OwnedFd>,
    object: ObjectKey,
    offset: u64,
    /// It is the memory of a device that this process holds, and no file of anybody's.
    device: bool,
}

impl MemoryHandle {
    /// The memory in `file` from `offset` on. Whether it is memory at all is found out when it is mapped.
    ///
    /// # Errors
    /// When the system does not tell which file it is.
    pub fn new(file: impl Into<OwnedFd>, offset: u64) -> io::Result<MemoryHandle> {
        MemoryHandle::shared(Arc::new(file.into()), offset)
    }

    /// The same of a file that others have as well.
    ///
    /// # Errors
    /// As [`new`](MemoryHandle::new).
    pub fn shared(file: Arc<OwnedFd>, offset: u64) -> io::Result<MemoryHandle> {
        let object = object(file.as_fd())?;
        Ok(MemoryHandle { file, object, offset, device: false })
    }

    /// The memory that a device of this machine gives from `offset` of its `file` on: a BAR, as VFIO has it, whose
    /// pages the kernel answers for. `number` tells the device from others of its kind. A handle of this kind is
    /// made by whoever holds the device, and never comes from a peer.
    pub fn of_device(file: impl Into<OwnedFd>, number: u64, offset: u64) -> MemoryHandle {
        // No file system has this number.
        let object = ObjectKey(u64::MAX, number);
        MemoryHandle { file: Arc::new(file.into()), object, offset, device: true }
    }

    /// Whether it is the memory of a device.
    pub(crate) fn is_of_device(&self) -> bool {
        self.device
    }

    /// The file, and where the memory begins in it.
    pub fn parts(&self) -> (BorrowedFd<'_>, u64) {
        (self.file.as_fd(), self.offset)
    }

    pub(crate) fn file(&self) -> &Arc<OwnedFd> {
        &self.file
    }
}

impl LentMemory for MemoryHandle {
    fn object(&self) -> ObjectKey {
        self.object
    }

    fn offset(&self) -> u64 {
        self.offset
    }
}

fn object(file: BorrowedFd<'_>) -> io::Result<ObjectKey> {
    let stat = rustix::fs::fstat(file)?;
    Ok(ObjectKey(stat.st_dev, stat.st_ino))
}
