//! System calls that move bytes between a descriptor and shared memory, with bytes of this process before them:
//! a header that a kernel interface has, and that no peer can change.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

use crate::slice::DmaSlice;

/// Writes `head` and, behind it, `rest` in one call; the bytes that were written.
///
/// # Errors
/// What the system says.
#[inline]
pub fn write_with_head(
    fd: BorrowedFd<'_>,
    head: &[u8],
    rest: DmaSlice<'_>,
) -> rustix::io::Result<usize> {
    let parts = [
        libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() },
        libc::iovec { iov_base: rest.as_ptr().cast(), iov_len: rest.len() },
    ];
    // SAFETY: both parts are readable for their lengths as long as the call lasts; the kernel only reads them.
    let outcome = unsafe { libc::writev(fd.as_raw_fd(), parts.as_ptr(), 2) };
    count(outcome)
}

/// Reads into `head` and, when that is full, into `rest` in one call; the bytes that were read.
///
/// # Errors
/// What the system says.
#[inline]
pub fn read_with_head(
    fd: BorrowedFd<'_>,
    head: &mut [u8],
    rest: DmaSlice<'_>,
) -> rustix::io::Result<usize> {
    let parts = [
        libc::iovec { iov_base: head.as_mut_ptr().cast(), iov_len: head.len() },
        libc::iovec { iov_base: rest.as_ptr().cast(), iov_len: rest.len() },
    ];
    // SAFETY: both parts are writable for their lengths as long as the call lasts, and nobody else of this
    // process has a reference to either.
    let outcome = unsafe { libc::readv(fd.as_raw_fd(), parts.as_ptr(), 2) };
    count(outcome)
}

fn count(outcome: libc::ssize_t) -> rustix::io::Result<usize> {
    usize::try_from(outcome)
        .map_err(|_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::region::SharedMemory;

    #[test]
    fn a_message_is_its_head_and_what_is_in_memory() {
        let (a, b) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let [from, to] = ["from", "to"].map(|name| SharedMemory::create(name, 100).unwrap());
        from.whole().copy_from(b"of the frame");
        let rest = from.whole().part(0, 12).unwrap();
        assert_eq!(write_with_head(a.as_fd(), b"head ", rest), Ok(17));
        let mut head = [0; 7];
        assert_eq!(read_with_head(b.as_fd(), &mut head, to.whole()), Ok(17));
        let mut rest = [0; 10];
        to.whole().copy_to(&mut rest);
        assert_eq!((&head, &rest), (b"head of", b" the frame"));
        drop(b);
        assert!(write_with_head(a.as_fd(), b"head ", from.whole()).is_err());
    }
}
