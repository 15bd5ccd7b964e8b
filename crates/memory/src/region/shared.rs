//! Memory of our own, for others to map.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rackbus_fabric::Access;
use rustix::fs::{MemfdFlags, SealFlags};

use super::{Region, RegionError, system};
use crate::handle::MemoryHandle;
use crate::slice::DmaSlice;

/// Bytes of the huge pages that memory is made of on request.
const HUGE_PAGE: u64 = 2 << 20;

/// Memory of our own that can be handed to other processes: a sealed memfd, mapped.
///
/// It can neither shrink nor grow, so no holder of the descriptor can tear it.
#[derive(Debug, Clone)]
pub struct SharedMemory {
    file: Arc<OwnedFd>,
    region: Arc<Region>,
}

impl SharedMemory {
    /// `length` bytes of zeroes, named `name` in `/proc` listings.
    ///
    /// # Errors
    /// [`RegionError`] when the system has no memory or descriptors left, or `length` is zero.
    pub fn create(name: &str, length: u64) -> Result<SharedMemory, RegionError> {
        let fd = SharedMemory::reserve(name, length)?;
        let region = Region::map(fd.as_fd(), 0, length, Access::READ | Access::WRITE)?;
        Ok(SharedMemory { file: Arc::new(fd), region: Arc::new(region) })
    }

    /// The same in huge pages of 2 MiB, each of which lies in one piece and is not moved: `length` is
    /// rounded up to them. The system must have put such pages aside (`vm.nr_hugepages`).
    ///
    /// # Errors
    /// As [`create`](SharedMemory::create); also when there are too few huge pages.
    pub fn create_huge(name: &str, length: u64) -> Result<SharedMemory, RegionError> {
        let out = || RegionError::OutOfFile { offset: 0, length, file_size: 0 };
        let length = length.checked_next_multiple_of(HUGE_PAGE).ok_or_else(out)?;
        let fd = SharedMemory::sealed(name, length, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)?;
        let region = Region::map(fd.as_fd(), 0, length, Access::READ | Access::WRITE)?;
        Ok(SharedMemory { file: Arc::new(fd), region: Arc::new(region) })
    }

    /// Memory as [`create`](SharedMemory::create) gives it, not mapped: what is handed out by somebody who
    /// does not look into it.
    ///
    /// # Errors
    /// As [`create`](SharedMemory::create).
    pub fn reserve(name: &str, length: u64) -> Result<OwnedFd, RegionError> {
        SharedMemory::sealed(name, length, MemfdFlags::empty())
    }

    fn sealed(name: &str, length: u64, pages: MemfdFlags) -> Result<OwnedFd, RegionError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | pages;
        let fd = rustix::fs::memfd_create(name, flags).map_err(system("memfd_create"))?;
        rustix::fs::ftruncate(&fd, length).map_err(system("ftruncate"))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals).map_err(system("fcntl(F_ADD_SEALS)"))?;
        Ok(fd)
    }

    /// Memory that another process [created](SharedMemory::create) and passed on.
    ///
    /// # Errors
    /// [`RegionError`] when it is shorter than `length`, or was not made so: somebody could truncate it.
    pub fn adopt(fd: OwnedFd, length: u64) -> Result<SharedMemory, RegionError> {
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|_| RegionError::NotMemory)?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(RegionError::NotMemory);
        }
        let region = Region::map(fd.as_fd(), 0, length, Access::READ | Access::WRITE)?;
        Ok(SharedMemory { file: Arc::new(fd), region: Arc::new(region) })
    }

    /// The region that the memory is mapped as.
    #[inline]
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The memory from its first byte to its last.
    #[inline]
    pub fn whole(&self) -> DmaSlice<'_> {
        self.region.whole()
    }

    /// Whether it is in [huge pages](SharedMemory::create_huge), which the system does not move.
    pub fn in_huge_pages(&self) -> bool {
        super::file::in_huge_pages(self.file.as_fd())
    }

    /// Length of the memory in bytes.
    pub fn len(&self) -> usize {
        self.region.len()
    }

    /// Never: shared memory has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// What leads to it from `offset` on.
    ///
    /// # Panics
    /// When the system does not know the file, which it does for as long as this lives.
    pub fn handle(&self, offset: u64) -> MemoryHandle {
        MemoryHandle::shared(self.file.clone(), offset).expect("the file is open")
    }

    /// A descriptor to hand to another process.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn descriptor(&self) -> std::io::Result<OwnedFd> {
        self.file.as_fd().try_clone_to_owned()
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
