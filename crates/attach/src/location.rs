//! Which host this process is on, and where its node is.

use std::path::{Path, PathBuf};

/// The rack's run directory.
pub const RUN_DIR: &str = "RACKBUS_RUN_DIR";
/// The host's name.
pub const HOST: &str = "RACKBUS_HOST";

/// A host of a rack, as seen from a process on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// The rack's run directory.
    pub run_dir: PathBuf,
    /// The host's name.
    pub host: String,
}

/// Why it is not known where the process is.
#[derive(Debug, thiserror::Error)]
pub enum LocationError {
    /// No rack runs on this machine.
    #[error("no rack runs on this machine (looked in {}); start one with `rackbus up`", .0.display())]
    NoRack(PathBuf),
    /// Several hosts or racks run here, and nobody said which is meant.
    #[error(
        "{what} run on this machine: {names}; start the program with `rackbus on HOST -- …`, or set {var}"
    )]
    Several {
        /// `several hosts`, `several racks`.
        what: &'static str,
        /// Them.
        names: String,
        /// The variable to set.
        var: &'static str,
    },
}

impl Location {
    /// What the environment says (`RACKBUS_RUN_DIR`, `RACKBUS_HOST`); what it leaves out is looked for: the one
    /// rack, the one host that runs on this machine.
    ///
    /// # Errors
    /// [`LocationError`] when there is none, or more than one.
    pub fn from_environment() -> Result<Location, LocationError> {
        let var = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let run_dir = match var(RUN_DIR) {
            Some(dir) => PathBuf::from(dir),
            None => only(&base(), "rack.json", "several racks", RUN_DIR)?,
        };
        let host = match var(HOST) {
            Some(host) => host.to_string_lossy().into_owned(),
            None => {
                let folder = only(&run_dir, "segments.sock", "several hosts", HOST)?;
                folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
            }
        };
        Ok(Location { run_dir, host })
    }

    /// The socket of the host's node.
    pub fn socket(&self) -> PathBuf {
        self.run_dir.join(&self.host).join("segments.sock")
    }
}

/// The folder that holds racks' run directories.
fn base() -> PathBuf {
    let user = rustix::process::getuid();
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir).join("rackbus"),
        None if user.is_root() => PathBuf::from("/run/rackbus"),
        None => PathBuf::from(format!("/tmp/rackbus-{}", user.as_raw())),
    }
}

/// The only folder in `dir` that has a file `mark`.
fn only(
    dir: &Path,
    mark: &str,
    what: &'static str,
    var: &'static str,
) -> Result<PathBuf, LocationError> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> =
        entries.map(|entry| entry.path()).filter(|path| path.join(mark).exists()).collect();
    found.sort();
    match found.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(LocationError::NoRack(dir.to_owned())),
        several => {
            let names: Vec<_> = several
                .iter()
                .filter_map(|path| path.file_name())
                .map(|name| name.to_string_lossy())
                .collect();
            Err(LocationError::Several { what, names: names.join(", "), var })
        }
    }
}
