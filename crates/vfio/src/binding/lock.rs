//! One at a time takes functions or gives them back, on the whole machine: a node that starts and the command, or two nodes.
//! What is noted of a function says then how it was before, and not how another one was just leaving it.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::error::{VfioError, file};

/// How long somebody else may take: the kernel waits for drivers that release functions.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two looks whether it is free.
const AGAIN: Duration = Duration::from_millis(5);

/// Nobody else takes a function, or gives one back, while this is there.
#[derive(Debug)]
pub(super) struct NotesLock {
    /// The folder of the notes, which is locked: no file is left behind there.
    _folder: File,
}

impl NotesLock {
    /// Waits until nobody else changes what the notes in `folder` are about.
    ///
    /// # Errors
    /// When somebody does for longer than ten seconds, or the folder cannot be made or locked.
    pub(super) fn take(folder: &Path) -> Result<NotesLock, VfioError> {
        fs::create_dir_all(folder).map_err(file(folder))?;
        let opened = File::open(folder).map_err(file(folder))?;
        let begun = Instant::now();
        loop {
            match rustix::fs::flock(&opened, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(NotesLock { _folder: opened }),
                Err(Errno::WOULDBLOCK) if begun.elapsed() < PATIENCE => std::thread::sleep(AGAIN),
                Err(Errno::WOULDBLOCK) => {
                    return Err(VfioError::Locked { notes: folder.to_owned() });
                }
                Err(cause) => return Err(file(folder)(cause.into())),
            }
        }
    }
}
