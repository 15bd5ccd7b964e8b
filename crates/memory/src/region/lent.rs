//! A program's own memory that is lent to others, and given back: private pages that become a
//! file's, and private again, at the same addresses and with the same bytes.
//!
//! The caller has frozen the range: whoever writes to it waits until it is unfrozen.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{null_mut, with_exposed_provenance_mut};

use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap, mmap_anonymous, mremap_fixed, munmap};

use super::{Region, RegionError, system};

/// Bytes that become private at a time: so much room is enough for any range.
const CHUNK: usize = 8 << 20;

/// Copies a range into `file`, which is `fd` mapped, and maps `fd` in its place.
///
/// # Safety
/// The range is `length` bytes of readable memory of the caller's, in whole pages, and frozen.
pub(super) unsafe fn put_over(
    address: usize,
    length: usize,
    fd: BorrowedFd<'_>,
    file: &Region,
) -> Result<*mut c_void, RegionError> {
    let at: *mut c_void = with_exposed_provenance_mut(address);
    // SAFETY: the caller's memory, which nobody writes to until it is replaced by memory with the
    // same bytes, or unfrozen.
    unsafe {
        file.whole().copy_from(std::slice::from_raw_parts(at.cast::<u8>(), length));
        let (both, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
        mmap(at, length, both, flags, fd, 0).map_err(system("mmap"))
    }
}

/// Makes a lent range private again, with its bytes.
///
/// # Errors
/// When the system has no memory: what is not private yet stays as it was, shared.
///
/// # Safety
/// The range is whole pages of a region that [`put_over`] made, frozen, and nobody holds a slice
/// of it.
pub(super) unsafe fn give_back(address: usize, length: usize) -> rustix::io::Result<()> {
    let at: *mut c_void = with_exposed_provenance_mut(address);
    let mut done = 0;
    while done < length {
        let chunk = CHUNK.min(length - done);
        // SAFETY: each chunk is replaced in one step by a private copy of itself.
        unsafe { make_private(at.byte_add(done), chunk) }?;
        done += chunk;
    }
    Ok(())
}

/// # Safety
/// As [`give_back`].
unsafe fn make_private(at: *mut c_void, length: usize) -> rustix::io::Result<()> {
    // SAFETY: as the caller says; the copy is ours until it takes the range's place.
    unsafe {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let copy = mmap_anonymous(null_mut(), length, access, MapFlags::PRIVATE)?;
        std::ptr::copy_nonoverlapping(at.cast::<u8>(), copy.cast::<u8>(), length);
        mremap_fixed(copy, length, length, MremapFlags::MAYMOVE, at).map(drop).inspect_err(|_| {
            let _ = munmap(copy, length);
        })
    }
}
