//! Room for descriptors: each segment and each connection has one, and systems let a process have
//! 1024 unless it asks for more.
//!
//! A process may have as many as its hard limit says, which is far more. Its soft limit is low for
//! programs that use `select`, which knows none above 1023, and for those that close every
//! possible descriptor. So a process of our own raises it at once ([`raise_limit`]), but a library
//! in somebody else's only when descriptors are about to run out ([`keep_room`]).

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Resource, getrlimit, setrlimit};

/// Lets this process have as many descriptors as it may; how many these are.
///
/// # Errors
/// When the system refuses.
pub fn raise_limit() -> std::io::Result<u64> {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        limit.current = limit.maximum;
        setrlimit(Resource::Nofile, limit)?;
    }
    Ok(limit.current.unwrap_or(u64::MAX))
}

/// Raises the limit when a descriptor that has just come is beyond the half of it. To be called
/// with each one that comes; it costs a load.
pub fn keep_room(newest: &OwnedFd) {
    static ROOM: AtomicU64 = AtomicU64::new(0);
    // The system gives the lowest number that is free.
    let number = u64::try_from(newest.as_raw_fd()).unwrap_or(0);
    if number < ROOM.load(Ordering::Relaxed) {
        return;
    }
    let half = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / 2;
    if number < half {
        ROOM.store(half, Ordering::Relaxed);
        return;
    }
    // Whatever comes of it: more is not allowed, so there is no need to look again.
    ROOM.store(u64::MAX, Ordering::Relaxed);
    let _ = raise_limit();
}
