//! Mapped memory: a peer's descriptor ([`Region`]) or one of our own ([`SharedMemory`]).

mod file;
mod lent;
mod shared;

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicBool, Ordering};

use rackbus_fabric::Access;
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, msync};

use crate::guard::{self, Registration};
use crate::handles::HandleRef;
use crate::slice::DmaSlice;
pub(crate) use file::is_memory;
use file::{FileRequirement, PAGE, ask_for_huge_pages, check_memory};
pub use shared::SharedMemory;

/// Why a descriptor could not be mapped.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The range is empty, or its end is beyond the file's or beyond 2^63.
    #[error("range {offset:#x}+{length:#x} is not inside the file of {file_size:#x} bytes")]
    OutOfFile {
        /// First byte asked for.
        offset: u64,
        /// Length that was asked for, in bytes.
        length: u64,
        /// Size of the file in bytes.
        file_size: u64,
    },
    /// The descriptor is not memory (memfd, tmpfs or hugetlbfs).
    #[error("the descriptor is not shared memory; use memory-backend-memfd,share=on")]
    NotMemory,
    /// The descriptor is neither memory nor a file on a disk of this machine.
    #[error(
        "the file is on a file system whose pages may wait for other processes or machines; \
         put it on ext4, XFS, Btrfs, F2FS or tmpfs"
    )]
    NotStored,
    /// Memory of the process cannot be replaced: not all of it is mapped, or may be protected.
    #[error("the memory is not all mapped, or may not be protected, and cannot be replaced: {0}")]
    NotReplaceable(rustix::io::Errno),
    /// The operating system refused what was tried.
    #[error("{what}: {cause}")]
    System {
        /// The call that failed.
        what: &'static str,
        /// The error that the system gave.
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
    /// The file's first byte that is mapped.
    file_offset: u64,
    length: usize,
    access: Access,
    /// Whether the range is somebody's own memory, to be given back as such.
    lent: bool,
    revoked: AtomicBool,
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
    /// For 2 MiB or more the system is asked for huge pages. It gives them where
    /// `/sys/kernel/mm/transparent_hugepage/shmem_enabled` is `advise` (or more generous); then
    /// the first byte that is touched takes 2 MiB of memory, not 4 KiB.
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
        Region::map_at(None, HandleRef::of_descriptor(fd), offset, length, access)
    }

    /// As [`map`](Region::map), also of a regular file on a disk of this machine: who touches a page that is not
    /// in the page cache waits for the disk, and one that the disk has no room for, or cannot read, makes the region
    /// [truncated](Region::truncated).
    ///
    /// # Errors
    /// As [`map`](Region::map); [`RegionError::NotStored`] for any other file.
    pub fn map_stored(
        fd: BorrowedFd<'_>,
        offset: u64,
        length: u64,
        access: Access,
    ) -> Result<Region, RegionError> {
        Region::map_admitted(None, fd, (offset, length), access, FileRequirement::Stored)
    }

    /// As [`map`](Region::map) of what a handle leads to, also at an address of the caller's choice where nothing is
    /// mapped yet.
    ///
    /// # Errors
    /// As [`map`](Region::map), and when something is mapped there.
    pub fn map_at(
        address: Option<usize>,
        memory: HandleRef<'_>,
        offset: u64,
        length: u64,
        access: Access,
    ) -> Result<Region, RegionError> {
        let (fd, range) = (memory.as_descriptor(), (offset, length));
        Region::map_admitted(address, fd, range, access, FileRequirement::Memory)
    }

    /// Maps `length` bytes at `offset` of a device's file, as VFIO gives it: a BAR that is memory. The kernel's driver
    /// knows what there is; when the device goes, the region is [truncated](Region::truncated).
    ///
    /// # Errors
    /// [`RegionError`] when the driver has nothing there to be mapped.
    pub fn map_device(
        file: BorrowedFd<'_>,
        offset: u64,
        length: u64,
        access: Access,
    ) -> Result<Region, RegionError> {
        let out = RegionError::OutOfFile { offset, length, file_size: 0 };
        let aligned = offset.is_multiple_of(PAGE) && length.is_multiple_of(PAGE) && length > 0;
        let mapped = usize::try_from(length).ok().filter(|_| aligned).ok_or(out)?;
        // SAFETY: a fresh mapping at an address the kernel chooses overlaps nothing of ours.
        let base = unsafe {
            let (start, flags) = (std::ptr::null_mut(), MapFlags::SHARED);
            rustix::mm::mmap(start, mapped, protection(access), flags, file, offset)
        }
        .map_err(system("mmap"))?;
        Ok(Region::whole_of(base, mapped, offset, access))
    }

    fn map_admitted(
        address: Option<usize>,
        fd: BorrowedFd<'_>,
        (offset, length): (u64, u64),
        access: Access,
        admitted: FileRequirement,
    ) -> Result<Region, RegionError> {
        crate::copy::pages::calibrate();
        let page = check_memory(fd, offset, length, admitted)?;
        let lead = offset % page;
        let out = || RegionError::OutOfFile { offset, length, file_size: 0 };
        let mapped = match page {
            PAGE => lead.checked_add(length),
            // The system maps and unmaps such a file in whole huge pages only.
            huge => lead.checked_add(length).and_then(|end| end.checked_next_multiple_of(huge)),
        };
        let mapped = mapped.and_then(|mapped| usize::try_from(mapped).ok()).ok_or_else(out)?;
        // Both are at most `mapped`.
        let (lead_bytes, bytes) = (lead as usize, length as usize);
        let (hint, flags) = match address.map(|address| address.checked_sub(lead_bytes)) {
            None => (0, MapFlags::SHARED),
            Some(Some(start)) => (start, MapFlags::SHARED | MapFlags::FIXED_NOREPLACE),
            Some(None) => return Err(out()),
        };
        // SAFETY: a fresh mapping, where the kernel chooses or where nothing is mapped, overlaps
        // nothing of ours.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::without_provenance_mut(hint),
                mapped,
                protection(access),
                flags,
                fd,
                offset - lead,
            )
        }
        .map_err(system("mmap"))?;
        let base = NonNull::new(base.cast::<u8>()).expect("mmap never returns null");
        ask_for_huge_pages(base.as_ptr().cast(), mapped);
        Ok(Region {
            base,
            mapped,
            lead: lead_bytes,
            file_offset: offset - lead,
            length: bytes,
            access,
            lent: false,
            revoked: AtomicBool::new(false),
            registration: Registration::new(base.as_ptr() as usize, mapped),
        })
    }

    /// Room for `length` bytes where memory is [`adopt`](Region::adopt)ed piece by piece; until
    /// then it has private zeroes.
    ///
    /// # Errors
    /// [`RegionError`] when the process has no room.
    pub fn reserve(length: u64, access: Access) -> Result<Region, RegionError> {
        Region::anonymous(length, access, MapFlags::PRIVATE | MapFlags::NORESERVE)
    }

    /// Memory of this process that its forks share: what is under way to it arrives, whoever forks.
    ///
    /// # Errors
    /// As [`reserve`](Region::reserve).
    pub(crate) fn shared_with_forks(length: u64) -> Result<Region, RegionError> {
        Region::anonymous(length, Access::READ | Access::WRITE, MapFlags::SHARED)
    }

    fn anonymous(length: u64, access: Access, flags: MapFlags) -> Result<Region, RegionError> {
        let out = RegionError::OutOfFile { offset: 0, length, file_size: 0 };
        let mapped = usize::try_from(length).ok().filter(|length| *length > 0).ok_or(out)?;
        // SAFETY: a fresh mapping at an address the kernel chooses overlaps nothing of ours.
        let base = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), mapped, protection(access), flags)
        }
        .map_err(system("mmap"))?;
        Ok(Region::whole_of(base, mapped, 0, access))
    }

    /// A new mapping of `mapped` bytes, all of which were asked for; of a file from `file_offset` on.
    fn whole_of(base: *mut c_void, mapped: usize, file_offset: u64, access: Access) -> Region {
        let base = NonNull::new(base.cast::<u8>()).expect("mmap never returns null");
        Region {
            base,
            mapped,
            lead: 0,
            file_offset,
            length: mapped,
            access,
            lent: false,
            revoked: AtomicBool::new(false),
            registration: Registration::new(base.as_ptr() as usize, mapped),
        }
    }

    /// Moves `length` bytes of this process' own memory at `address` into `memory`, which takes their
    /// place, so that others can be given them. Who writes to them meanwhile waits.
    ///
    /// # Safety
    /// The range is whole pages that can be read and written, that the caller owns, and that stay
    /// the caller's: when the region is dropped, it is private memory with the same bytes again.
    ///
    /// # Errors
    /// As [`map`](Region::map); the range is as it was then.
    pub unsafe fn map_over(
        address: usize,
        memory: HandleRef<'_>,
        length: u64,
    ) -> Result<Region, RegionError> {
        let fd = memory.as_descriptor();
        let access = Access::READ | Access::WRITE;
        let file = Region::map(fd, 0, length, access)?;
        let mapped = file.len();
        // SAFETY: writes nothing back at once, and fails where not all of the range is mapped. What freezes it may not.
        unsafe { msync(with_exposed_provenance_mut(address), mapped, MsyncFlags::ASYNC) }
            .map_err(RegionError::NotReplaceable)?;
        let registration = Registration::new(address, mapped);
        if let Err(cause) = registration.freeze(address, mapped) {
            // A part of it may be protected by now. That this could not be either is no news.
            let _ = registration.unfreeze();
            return Err(RegionError::NotReplaceable(cause));
        }
        // SAFETY: the caller owns the range, and nobody writes to it.
        let outcome = unsafe { lent::put_over(address, mapped, fd, &file) };
        registration.unfreeze().map_err(system("mprotect"))?;
        let base = NonNull::new(outcome?.cast::<u8>()).expect("mmap never returns null");
        ask_for_huge_pages(base.as_ptr().cast(), mapped);
        Ok(Region {
            base,
            mapped,
            lead: 0,
            file_offset: 0,
            length: mapped,
            access,
            lent: true,
            revoked: AtomicBool::new(false),
            registration,
        })
    }

    /// Bytes of the asked range.
    #[inline]
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
    #[inline]
    pub fn truncated(&self) -> bool {
        self.registration.truncated()
    }

    /// The region from its first byte to its last.
    #[inline]
    pub fn whole(&self) -> DmaSlice<'_> {
        // SAFETY: `lead + length <= mapped`, and the mapping lives as long as `self`.
        unsafe { DmaSlice::new(self.base.add(self.lead), self.length) }
    }

    /// `length` bytes from `offset`; `None` when they are not inside the region.
    #[inline]
    pub fn slice(&self, offset: usize, length: usize) -> Option<DmaSlice<'_>> {
        self.whole().part(offset, length)
    }

    /// Stops writers of a range of the file (in its bytes): whoever writes to it waits until
    /// [`unfreeze`](Region::unfreeze). Reading continues. Nothing happens where the range is not mapped.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn freeze(&self, offset: u64, length: u64) -> Result<(), RegionError> {
        let Some((start, length, _)) = self.pages(offset, length) else { return Ok(()) };
        if !self.access.contains(Access::WRITE) {
            return Ok(());
        }
        let at = self.base.as_ptr() as usize + start;
        self.registration.freeze(at, length).map_err(system("mprotect"))
    }

    /// Lets whoever accesses the pages that a range of the file is on wait, until [`show`](Region::show): what is
    /// stored to the file meanwhile, by somebody else, is seen as a whole. False when the system cannot do that for
    /// this process, and nobody waits.
    pub fn hide(&self, offset: u64, length: u64) -> bool {
        let Some((start, length)) = self.touched_pages(offset, length) else { return true };
        crate::guard::uffd::hide(self.base.as_ptr() as usize + start, length)
    }

    /// Lets those go on who wait since the range was hidden.
    pub fn show(&self, offset: u64, length: u64) {
        let Some((start, length)) = self.touched_pages(offset, length) else { return };
        crate::guard::uffd::show(self.base.as_ptr() as usize + start, length);
    }

    /// Puts other memory, which has the same bytes, in the place of a range of the file. `from` is
    /// the range's first byte in that memory. Where the region is frozen, writers wait on, until
    /// [`unfreeze`](Region::unfreeze).
    ///
    /// # Errors
    /// When the memory is not what it should be, or the system refuses; the region has private
    /// zeroes then, never the old memory.
    pub fn adopt(
        &self,
        offset: u64,
        length: u64,
        memory: HandleRef<'_>,
        from: u64,
    ) -> Result<(), RegionError> {
        let fd = memory.as_descriptor();
        let Some((start, length, skipped)) = self.pages(offset, length) else { return Ok(()) };
        let access = if self.registration.frozen() { Access::READ } else { self.access };
        let replaced = check_memory(
            fd,
            from + skipped,
            length as u64 - self.tail(start, length),
            FileRequirement::Memory,
        )
        .and_then(|_| {
            // SAFETY: replaces whole pages of our own mapping, which stay mapped.
            let at = unsafe {
                rustix::mm::mmap(
                    self.base.add(start).as_ptr().cast(),
                    length,
                    protection(access),
                    MapFlags::SHARED | MapFlags::FIXED,
                    fd,
                    from + skipped,
                )
            }
            .map_err(system("mmap"))?;
            ask_for_huge_pages(at, length);
            self.registration.refreeze(at as usize, length);
            Ok(())
        });
        let revoked = if replaced.is_err() { self.revoke() } else { Ok(()) };
        revoked.and(replaced)
    }

    /// Lets writers continue, wherever the memory is now.
    ///
    /// # Errors
    /// When the system refuses; writers then wait until the region is dropped.
    pub fn unfreeze(&self) -> Result<(), RegionError> {
        if !self.access.contains(Access::WRITE) {
            return Ok(());
        }
        self.registration.unfreeze().map_err(system("mprotect"))
    }

    /// The pages of this mapping that a range of the file is on, wherever in a page it begins: where they begin here,
    /// and their bytes.
    fn touched_pages(&self, offset: u64, length: u64) -> Option<(usize, usize)> {
        let within = offset % PAGE;
        let (start, length, _) = self.pages(offset - within, length.saturating_add(within))?;
        Some((start, length))
    }

    /// The pages of this mapping that hold a range of the file which begins with a page: where they begin here, their
    /// bytes, and how far into the range they begin.
    fn pages(&self, offset: u64, length: u64) -> Option<(usize, usize, u64)> {
        let end = self.file_offset.saturating_add((self.mapped as u64).next_multiple_of(PAGE));
        let start = offset.max(self.file_offset);
        let end = offset.saturating_add(length).next_multiple_of(PAGE).min(end);
        if start >= end {
            return None;
        }
        let here = usize::try_from(start - self.file_offset).ok()?;
        Some((here, usize::try_from(end - start).ok()?, start - offset))
    }

    /// Bytes of the last page that are beyond the mapping's end.
    fn tail(&self, start: usize, length: usize) -> u64 {
        (start + length).saturating_sub(self.mapped) as u64
    }

    /// Takes the shared memory away for good: whoever still holds a slice of the region reads and
    /// writes private zeroes from now on (invariant I4, whatever the holder does).
    ///
    /// # Errors
    /// When the system refuses, in which case the old mapping is still there.
    pub fn revoke(&self) -> Result<(), RegionError> {
        // First said, then done: who copies while it happens finds out afterwards.
        self.revoked.store(true, Ordering::Release);
        guard::note_replaced();
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
        .map_err(|cause| {
            self.revoked.store(false, Ordering::Release);
            system("mmap")(cause)
        })
    }

    /// Whether it was revoked: what is written here reaches nobody.
    pub fn revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.lent {
            let at = self.base.as_ptr() as usize;
            // Nobody shows any more what is hidden of it, and it is read below.
            guard::uffd::show(at, self.mapped);
            let outcome = self.registration.freeze(at, self.mapped).and_then(|()| {
                // SAFETY: the range is ours until it is given back, and nobody writes to it.
                unsafe { lent::give_back(at, self.mapped) }
            });
            // What is private already may be written to, what stays shared as well.
            if let Err(error) = outcome.and(self.registration.unfreeze()) {
                // They are the program's: better shared than gone.
                tracing::error!(%error, "memory that was registered stays shared");
            }
            return;
        }
        self.registration.retire();
        // SAFETY: the mapping is ours and nobody holds a slice of it any more (lifetimes); a
        // failure to unmap would only leak address space.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped) };
    }
}

fn protection(access: Access) -> ProtFlags {
    let mut protection = ProtFlags::empty();
    if access.contains(Access::READ) {
        protection |= ProtFlags::READ;
    }
    if access.contains(Access::WRITE) {
        // x86 has no write-only pages; reading back is harmless, the domain still denies it.
        protection |= ProtFlags::READ | ProtFlags::WRITE;
    }
    protection
}

#[cfg(test)]
mod tests;
