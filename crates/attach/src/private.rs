//! Folders that are this user's alone: what they hold says which processes are signalled, and whose
//! sockets are spoken to.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A folder that is not believed.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", dir.display())]
pub struct NotPrivate {
    /// The folder that was refused.
    pub dir: PathBuf,
    /// Whose it is, or who else may change it.
    pub reason: String,
}

/// Refuses a folder that somebody else owns or can change, or chose by a link. None is none.
///
/// # Errors
/// [`NotPrivate`].
pub fn check_private(dir: &Path) -> Result<(), NotPrivate> {
    let refused = |reason: &str| NotPrivate { dir: dir.to_owned(), reason: reason.to_owned() };
    let found = match fs::symlink_metadata(dir) {
        Ok(found) => found,
        Err(cause) if cause.kind() == ErrorKind::NotFound => return Ok(()),
        Err(cause) => return Err(refused(&cause.to_string())),
    };
    if !found.is_dir() {
        return Err(refused(if found.is_symlink() { "it is a link" } else { "it is no folder" }));
    }
    if found.uid() != rustix::process::getuid().as_raw() {
        return Err(refused("it belongs to another user"));
    }
    if found.mode() & 0o022 != 0 {
        return Err(refused("others may change it"));
    }
    Ok(())
}

/// The folder that holds racks' run directories.
pub fn run_base() -> PathBuf {
    let user = rustix::process::getuid();
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir).join("rackbus"),
        None if user.is_root() => PathBuf::from("/run/rackbus"),
        None => PathBuf::from(format!("/tmp/rackbus-{}", user.as_raw())),
    }
}
