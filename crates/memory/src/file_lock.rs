//! The lock of a file that one process alone may use.
//!
//! It belongs to the open file, and ends when the last descriptor of that is closed. That may be a moment after its
//! user has closed its own: a process that was killed holds its files until the kernel has finished what it had in
//! flight, and a program that another thread starts has all descriptors of its parent until it is executed. So whoever
//! wants the file waits a while before it says that somebody else uses it.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

/// Between two looks whether the file is free.
const AGAIN: Duration = Duration::from_millis(1);

/// Takes the file for this process alone, until its last descriptor is closed. Where another one has it, that may last as long
/// as `patience`.
///
/// # Errors
/// [`Errno::WOULDBLOCK`] when another process keeps it for longer, and the system's.
pub fn lock_file(file: impl AsFd, patience: Duration) -> Result<(), Errno> {
    let start = Instant::now();
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if start.elapsed() < patience => std::thread::sleep(AGAIN),
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_ends_a_moment_later_is_no_refusal_and_one_that_stays_is() {
        let folder = tempfile::tempdir().unwrap();
        let open = || std::fs::File::create(folder.path().join("lock")).unwrap();
        let (former, next, third) = (open(), open(), open());
        lock_file(&former, Duration::ZERO).unwrap();
        // As a child process has it between its fork and its program.
        let inherited = former.try_clone().unwrap();
        drop(former);
        std::thread::scope(|scope| {
            let taken = scope.spawn(|| lock_file(&next, Duration::from_secs(60)));
            std::thread::sleep(Duration::from_millis(50));
            drop(inherited);
            assert_eq!(taken.join().unwrap(), Ok(()));
        });
        assert_eq!(lock_file(&third, Duration::from_millis(50)), Err(Errno::WOULDBLOCK));
    }
}
