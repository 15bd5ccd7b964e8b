//! What is asked of a file before it is mapped, and of the system afterwards.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;

use super::{RegionError, system};
use crate::window;

/// File systems whose pages never wait for anybody: tmpfs (memfd) and hugetlbfs. A file of any
/// other kind could block the thread that touches it for as long as its owner likes.
const TMPFS_MAGIC: i64 = 0x0102_1994;
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// File systems on disks of this machine: what a page waits for is the disk, not somebody's process or another
/// machine. ext2 to ext4, XFS, Btrfs and F2FS.
const DISK_MAGICS: [i64; 4] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010];

/// The kinds of files that may be mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileRequirement {
    /// Files of tmpfs and hugetlbfs: what users give for DMA.
    Memory,
    /// Memory, or a regular file on a disk of this machine.
    Stored,
}

/// Bytes of a page of any file but one on hugetlbfs.
pub(super) const PAGE: u64 = 4096;

/// Bytes of a huge page. Where a processor has larger ones, asking for them early does no harm.
const HUGE_PAGE: usize = 2 << 20;

/// Checks that a range of a file is there, and what is `admitted`; the size of its pages, of which it is mapped
/// in whole ones.
pub(super) fn check_memory(
    fd: BorrowedFd<'_>,
    offset: u64,
    length: u64,
    admitted: FileRequirement,
) -> Result<u64, RegionError> {
    // What a peer says is memory may be on a file system that does not answer: nothing else is asked of that.
    if admitted == FileRequirement::Memory && !is_memory(fd) {
        return Err(RegionError::NotMemory);
    }
    let stat = rustix::fs::fstat(fd).map_err(system("fstat"))?;
    let kind = match window::is_admitted(stat.st_dev) {
        // Known already; a window's kernel would ask outside of its machine.
        true => TMPFS_MAGIC,
        false => kind_of(fd)?,
    };
    let is_memory = [TMPFS_MAGIC, HUGETLBFS_MAGIC].contains(&kind);
    let is_file = || rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
    match admitted {
        FileRequirement::Memory if !is_memory => return Err(RegionError::NotMemory),
        FileRequirement::Stored if !(is_memory || DISK_MAGICS.contains(&kind) && is_file()) => {
            return Err(RegionError::NotStored);
        }
        FileRequirement::Memory | FileRequirement::Stored => {}
    }
    let file_size = u64::try_from(stat.st_size).unwrap_or(0);
    match offset.checked_add(length) {
        Some(end) if length > 0 && end <= file_size => {}
        _ => return Err(RegionError::OutOfFile { offset, length, file_size }),
    }
    // A tmpfs that likes huge pages says theirs, and yet takes any.
    let page =
        if kind == HUGETLBFS_MAGIC { u64::try_from(stat.st_blksize).unwrap_or(0) } else { PAGE };
    Ok(page.max(PAGE).next_power_of_two())
}

/// Whether memory of this process' own is in huge pages that were put aside.
pub(in crate::region) fn in_huge_pages(fd: BorrowedFd<'_>) -> bool {
    kind_of(fd).is_ok_and(|kind| kind == HUGETLBFS_MAGIC)
}

/// Whether `fd` may be memory: a file that the kernel keeps in memory, on tmpfs or hugetlbfs, which alone have seals, or
/// one of a window. Whoever serves the file is not asked.
pub(crate) fn is_memory(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_get_seals(fd).is_ok() || window::has(fd)
}

/// The kind of file system that a file is on.
fn kind_of(fd: BorrowedFd<'_>) -> Result<i64, RegionError> {
    let kind = rustix::fs::fstatfs(fd).map_err(system("fstatfs"))?;
    #[allow(clippy::unnecessary_cast, reason = "f_type differs between architectures")]
    Ok(kind.f_type as i64)
}

/// Says that huge pages are welcome in a mapping of ours that has room for one.
pub(super) fn ask_for_huge_pages(start: *mut c_void, length: usize) {
    if length >= HUGE_PAGE {
        let advice = rustix::mm::Advice::LinuxHugepage;
        // SAFETY: whatever is there, its bytes and what may be done with them stay the same. A
        // system that does not know huge pages refuses, and continues with small ones.
        let _ = unsafe { rustix::mm::madvise(start, length, advice) };
    }
}
