//! What leads to memory of another process: as the link between hosts carries it.
//!
//! On one machine it is a descriptor and where the memory begins in its file. Nobody above the link
//! looks into it.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rackbus_fabric::{Access, BarPlace, LentMemory, ObjectKey};

use crate::region::{Region, RegionError, is_memory};

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
    /// The memory in `file` from `offset` on, which a peer may have passed. Whether it is memory at all is found out when
    /// it is mapped; until then, nobody who serves a file that is none is asked for anything.
    ///
    /// # Errors
    /// When the system does not tell which file it is.
    pub fn new(file: impl Into<OwnedFd>, offset: u64) -> io::Result<MemoryHandle> {
        let file = Arc::new(file.into());
        if is_memory(file.as_fd()) {
            return MemoryHandle::shared(file, offset);
        }
        // No file system has this number.
        Ok(MemoryHandle { file, object: ObjectKey(u64::MAX - 2, 0), offset, device: false })
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
        let object = ObjectKey(DEVICES, number);
        MemoryHandle { file: Arc::new(file.into()), object, offset, device: true }
    }

    /// The memory in `file` from `offset` on, which a peer says is behind `place`. A file by which VFIO gives a function
    /// of this machine is that function's BARs. The kernel does not tell two such files apart, so `place` does.
    ///
    /// # Errors
    /// As [`new`](MemoryHandle::new).
    pub fn of_bar(file: Arc<OwnedFd>, offset: u64, place: &BarPlace) -> io::Result<MemoryHandle> {
        if !is_of_vfio(file.as_fd())? {
            return MemoryHandle::shared(file, offset);
        }
        let mut number = DefaultHasher::new();
        place.function.hash(&mut number);
        // As above, and not among the numbers of devices that this process holds.
        let object = ObjectKey(u64::MAX - 1, number.finish());
        Ok(MemoryHandle { file, object, offset, device: true })
    }

    /// The same memory from `bytes` further on.
    #[must_use]
    pub fn further(&self, bytes: u64) -> MemoryHandle {
        // One that is beyond all there is leads to nothing that could be mapped.
        MemoryHandle { offset: self.offset.saturating_add(bytes), ..self.clone() }
    }

    /// Whether it is the memory of a device.
    pub fn is_of_device(&self) -> bool {
        self.device
    }

    /// Maps `length` bytes of it. What a function's BAR has behind it may be a file on a disk of this machine, or a device's
    /// memory; memory of users may not.
    ///
    /// # Errors
    /// As [`Region::map`], [`Region::map_stored`] and [`Region::map_device`].
    pub fn map(&self, length: u64, access: Access, is_bar: bool) -> Result<Region, RegionError> {
        let (file, offset) = self.as_descriptor();
        match is_bar {
            _ if self.device => Region::map_device(file, offset, length, access),
            // That of a persistent memory region.
            true => Region::map_stored(file, offset, length, access),
            false => Region::map(file, offset, length, access),
        }
    }

    /// The file, and where the memory begins in it.
    pub fn as_descriptor(&self) -> (BorrowedFd<'_>, u64) {
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

/// In the place of a file system's number, which no file system has: devices that this process holds.
const DEVICES: u64 = u64::MAX;

/// Whether an object is the memory of a [device](MemoryHandle::of_device) that this process holds.
pub(crate) fn is_of_device(object: ObjectKey) -> bool {
    object.0 == DEVICES
}

/// Whether VFIO gives a function by this file. The kernel names it; a file of anybody else has a path, which begins with a
/// slash, or another of the kernel's names. Nothing is asked of the file itself: whoever serves one need not answer.
fn is_of_vfio(file: BorrowedFd<'_>) -> io::Result<bool> {
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(std::fs::read_link(link)?.as_os_str() == "anon_inode:[vfio-device]")
}

fn object(file: BorrowedFd<'_>) -> io::Result<ObjectKey> {
    let stat = rustix::fs::fstat(file)?;
    Ok(ObjectKey(stat.st_dev, stat.st_ino))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_memory_is_of_the_same_memory_and_never_before_it() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let whole = MemoryHandle::of_device(file, 7, 4096);
        let part = whole.further(8192);
        assert_eq!((part.object(), part.offset()), (whole.object(), 4096 + 8192));
        assert!(part.is_of_device());
        assert_eq!(part.further(u64::MAX).offset(), u64::MAX);
    }

    #[test]
    fn a_file_of_a_peer_is_a_devices_only_where_the_kernel_says_so() {
        let place = BarPlace { function: "alpha/gpu0".to_owned(), bar: 2, offset: 0 };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("anon_inode:[vfio-device]");
        let named = std::fs::File::create(path).unwrap();
        let memory = rustix::fs::memfd_create("vfio-device", rustix::fs::MemfdFlags::empty());
        let event = crate::Event::new().unwrap();
        let event = event.as_fd().try_clone_to_owned().unwrap();
        for file in [OwnedFd::from(named), memory.unwrap(), event] {
            let handle = MemoryHandle::of_bar(Arc::new(file), 0, &place).unwrap();
            assert!(!handle.is_of_device());
        }
    }
}
