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

/// Where the services of the system have theirs.
const SYSTEM: &str = "/run/rackbus";

/// The folder that holds racks' run directories, for whoever looks for one that it `has`: root's is looked for among
/// those of the system's services, too, where its own folder, which a login session gives, has it not.
pub fn run_base_with(has: impl Fn(&Path) -> bool) -> PathBuf {
    base_with(run_base(), Path::new(SYSTEM), rustix::process::getuid().is_root(), has)
}

fn base_with(own: PathBuf, system: &Path, is_root: bool, has: impl Fn(&Path) -> bool) -> PathBuf {
    match is_root && !has(&own) && has(system) {
        true => system.to_owned(),
        false => own,
    }
}

/// The folder that holds racks' run directories, as far as this process makes them.
pub fn run_base() -> PathBuf {
    let user = rustix::process::getuid();
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir).join("rackbus"),
        None if user.is_root() => PathBuf::from(SYSTEM),
        None => PathBuf::from(format!("/tmp/rackbus-{}", user.as_raw())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_also_finds_what_the_services_of_the_system_have() {
        let (own, system) = (Path::new("/run/user/0/rackbus"), Path::new(SYSTEM));
        let found = |is_root, with: &[&Path]| {
            base_with(own.to_owned(), system, is_root, |base| with.contains(&base))
        };
        assert_eq!(found(true, &[system]), system);
        assert_eq!(found(true, &[own, system]), own);
        assert_eq!(found(true, &[]), own);
        assert_eq!(found(false, &[system]), own);
    }
}
