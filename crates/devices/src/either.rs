//! Waiting for one of several descriptors as for one.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::event::epoll;

/// A descriptor that is readable when one of `others` is. They must outlive it, or be of no more use.
///
/// # Errors
/// When the process has no descriptors left.
pub(crate) fn either_of(others: [Option<BorrowedFd<'_>>; 2]) -> rustix::io::Result<OwnedFd> {
    let either = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for fd in others.into_iter().flatten() {
        let data = epoll::EventData::new_u64(0);
        epoll::add(&either, fd, data, epoll::EventFlags::IN)?;
    }
    Ok(either)
}
