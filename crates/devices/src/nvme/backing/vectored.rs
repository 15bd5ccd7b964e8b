//! Reads and writes of a file straight from and to memory that a host shares with us.
#![allow(unsafe_code)] // raw buffers: no Rust slice of memory that others change may exist

use std::os::fd::{AsRawFd, BorrowedFd};

use rackbus_memory::DmaSlice;
use rustix::io::Errno;

/// Most buffers that one call takes (`UIO_MAXIOV`).
pub const MAX_BUFFERS: usize = 1024;

/// The buffer that `slice` is, as system calls take it.
pub fn iovec(slice: DmaSlice<'_>) -> libc::iovec {
    libc::iovec { iov_base: slice.as_ptr().cast(), iov_len: slice.len() }
}

/// Whether a transfer reads the backing file or writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileAccess {
    /// From the file to the buffers.
    Read,
    /// From the buffers to the file.
    Write,
}

/// `preadv2` or `pwritev2` with `flags` (`RWF_*`); returns the bytes moved.
///
/// # Errors
/// The system's; `INVAL` for more than [`MAX_BUFFERS`] buffers.
pub fn transfer(
    file: BorrowedFd<'_>,
    access: FileAccess,
    offset: u64,
    slices: &[DmaSlice<'_>],
    flags: i32,
) -> Result<usize, Errno> {
    let at = libc::off_t::try_from(offset).map_err(|_| Errno::INVAL)?;
    let one;
    let many: Vec<libc::iovec>;
    let buffers: &[libc::iovec] = match slices {
        [slice] => {
            one = [iovec(*slice)];
            &one
        }
        _ => {
            many = slices.iter().map(|slice| iovec(*slice)).collect();
            &many
        }
    };
    let count = libc::c_int::try_from(buffers.len()).map_err(|_| Errno::INVAL)?;
    let (fd, list) = (file.as_raw_fd(), buffers.as_ptr());
    // SAFETY: `list` holds `count` buffers, each of them mapped for the lifetime of its slice,
    // which outlives the call; the kernel treats them as memory that may change.
    let moved = unsafe {
        match access {
            FileAccess::Read => libc::preadv2(fd, list, count, at, flags),
            FileAccess::Write => libc::pwritev2(fd, list, count, at, flags),
        }
    };
    usize::try_from(moved).map_err(|_| {
        let error = std::io::Error::last_os_error();
        Errno::from_io_error(&error).unwrap_or(Errno::IO)
    })
}
