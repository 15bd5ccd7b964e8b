//! Mapped memory: a peer's descriptor ([`Region`]) or one of our own ([`SharedMemory`]).

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rackbus_fabric::Access;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::guard::Registration;
use crate::slice::DmaSlice;

/// File systems whose pages never wait for anybody: tmpfs (memfd) and hugetlbfs. A file of any
/// other kind could block the thread that touches it for as long as its owner likes.
const TMPFS_MAGIC: i64 = 0x0102_1994;
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// Why a descriptor could not be mapped.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The range is empty, or its end is beyond the file's or beyond 2^63.
    #[error("range {offset:#x}+{length:#x} is not inside the file of {file_size:#x} bytes")]
    OutOfFile {
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        length: u64,
        /// The file's size.
        file_size: u64,
    },
    /// The descriptor is not memory (memfd, tmpfs or hugetlbfs).
    #[error("the descriptor is not shared memory; use memory-backend-memfd,share=on")]
    NotMemory,
    /// The system refused.
    #[error("{what}: {cause}")]
    System {
        /// The call that failed.
        what: &'static str,
        /// Its reason.
        cause: rustix::io::Errno,
    },
}

fn system(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> RegionError {
    move |cause| RegionError::System { what, cause }
}

/// One mapped range of shared memory. The mapping lives as long as the value.
#[derive(Debug)]
pub struct Region {
    /// What `mmap` gave: page aligned, `mapped` bytes.
    base: NonNull<u8>,
    mapped: usize,
    /// Where the asked range begins in it.
    lead: usize,
    length: usize,
    access: Access,
    registration: Registration,
}

// SAFETY: the region is memory shared with other processes to begin with; all access goes
// through raw copies and atomics (`DmaSlice`), which are as sound from several threads as from
// several processes.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `length` bytes of `fd` from `offset`, after checking that they are memory and inside
    /// the file.
    ///
    /// # Errors
    /// [`RegionError`] when the range is not in the file, the file is not memory, or the system
    /// refuses the mapping.
    pub fn map(
        fd: BorrowedFd<'_>,
        offset: u64,
        length: u64,
        access: Access,
    ) -> Result<Region, RegionError> {
        let kind = rustix::fs::fstatfs(fd).map_err(system("fstatfs"))?;
        #[allow(clippy::unnecessary_cast, reason = "f_type differs between architectures")]
        if ![TMPFS_MAGIC, HUGETLBFS_MAGIC].contains(&(kind.f_type as i64)) {
            return Err(RegionError::NotMemory);
        }
        let stat = rustix::fs::fstat(fd).map_err(system("fstat"))?;
        let file_size = u64::try_from(stat.st_size).unwrap_or(0);
        let out = RegionError::OutOfFile { offset, length, file_size };
        match offset.checked_add(length) {
            Some(end) if length > 0 && end <= file_size => {}
            _ => return Err(out),
        }
        let page = u64::try_from(stat.st_blksize).unwrap_or(4096).max(4096).next_power_of_two();
        let lead = offset % page;
        let (Ok(mapped), Ok(lead_bytes), Ok(bytes)) =
            (usize::try_from(lead + length), usize::try_from(lead), usize::try_from(length))
        else {
            return Err(out);
        };
        let mut protection = ProtFlags::empty();
        if access.contains(Access::READ) {
            protection |= ProtFlags::READ;
        }
        if access.contains(Access::WRITE) {
            // x86 has no write-only pages; reading back is harmless, the domain still denies it.
            protection |= ProtFlags::READ | ProtFlags::WRITE;
        }
        // SAFETY: a fresh mapping at an address the kernel chooses overlaps nothing of ours.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                mapped,
                protection,
                MapFlags::SHARED,
                fd,
                offset - lead,
            )
        }
        .map_err(system("mmap"))?;
        let base = NonNull::new(base.cast::<u8>()).expect("mmap never returns null");
        Ok(Region {
            base,
            mapped,
            lead: lead_bytes,
            length: bytes,
            access,
            registration: Registration::new(base.as_ptr() as usize, mapped),
        })
    }

    /// Bytes of the asked range.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Never: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// What the mapping allows.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Whether the owner truncated the file and a page of this region was replaced by zeroes.
    pub fn torn(&self) -> bool {
        self.registration.torn()
    }

    /// The whole region.
    pub fn whole(&self) -> DmaSlice<'_> {
        // SAFETY: `lead + length <= mapped`, and the mapping lives as long as `self`.
        unsafe { DmaSlice::new(self.base.add(self.lead), self.length) }
    }

    /// `length` bytes from `offset`; `None` when they are not inside the region.
    pub fn slice(&self, offset: usize, length: usize) -> Option<DmaSlice<'_>> {
        self.whole().part(offset, length)
    }

    /// Takes the shared memory away for good: whoever still holds a slice of the region reads and
    /// writes private zeroes from now on (invariant I4, whatever the holder does).
    ///
    /// # Errors
    /// When the system refuses, in which case the old mapping is still there.
    pub fn sever(&self) -> Result<(), RegionError> {
        // SAFETY: replaces exactly our own mapping, which stays mapped for its holders.
        unsafe {
            rustix::mm::mmap_anonymous(
                self.base.as_ptr().cast(),
                self.mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::FIXED | MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map(|_| ())
        .map_err(system("mmap"))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nobody holds a slice of it any more (lifetimes); a
        // failure to unmap would only leak address space.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped) };
    }
}

/// Memory of our own that can be handed to other processes: a sealed memfd, mapped.
///
/// It can neither shrink nor grow, so no holder of the descriptor can tear it.
#[derive(Debug, Clone)]
pub struct SharedMemory {
    file: Arc<File>,
    region: Arc<Region>,
}

impl SharedMemory {
    /// `length` bytes of zeroes, named `name` in `/proc` listings.
    ///
    /// # Errors
    /// [`RegionError`] when the system has no memory or descriptors left, or `length` is zero.
    pub fn create(name: &str, length: u64) -> Result<SharedMemory, RegionError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(name, flags).map_err(system("memfd_create"))?;
        rustix::fs::ftruncate(&fd, length).map_err(system("ftruncate"))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals).map_err(system("fcntl(F_ADD_SEALS)"))?;
        let region = Region::map(fd.as_fd(), 0, length, Access::READ | Access::WRITE)?;
        Ok(SharedMemory { file: Arc::new(File::from(fd)), region: Arc::new(region) })
    }

    /// The mapped region.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The whole memory.
    pub fn whole(&self) -> DmaSlice<'_> {
        self.region.whole()
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.region.len()
    }

    /// Never: shared memory has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
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
