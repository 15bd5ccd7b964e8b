//! One at a time takes functions or gives them back, on the whole machine: a node that starts and the command, or two nodes.
//! What is noted of a function says then how it was before, and not how another one was just leaving it.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use rackbus_memory::file_lock::lock_file;
use rustix::io::Errno;

use crate::error::{VfioError, file};

/// How long somebody else may take: the kernel waits for drivers that release functions.
const PATIENCE: Duration = Duration::from_secs(10);

/// Nobody else takes a function, or gives one back, while this is there.
#[derive(Debug)]
pub(super) struct NotesLock {
    _file: File,
}

impl NotesLock {
    /// Waits until nobody else changes what the notes in `folder` are about. The lock is a file beside it, which its
    /// owner alone can open: whoever could open it could keep all others waiting.
    ///
    /// # Errors
    /// When somebody does for longer than ten seconds, or the file cannot be made or locked.
    pub(super) fn take(folder: &Path) -> Result<NotesLock, VfioError> {
        let path = folder.with_extension("lock");
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let opened = options.open(&path).map_err(file(&path))?;
        match lock_file(&opened, PATIENCE) {
            Ok(()) => Ok(NotesLock { _file: opened }),
            Err(Errno::WOULDBLOCK) => Err(VfioError::Locked { lock: path }),
            Err(cause) => Err(file(path)(cause.into())),
        }
    }
}
