//! Where a rack's things are: its run directory (sockets, process ids, logs) and its state
//! directory (the control plane's database, drives' files).

use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::Common;
use crate::output::Failure;
use crate::process::living;

/// Overrides the run directory.
pub const RUN_DIR: &str = "RACKBUS_RUN_DIR";
/// Overrides the state directory.
pub const STATE_DIR: &str = "RACKBUS_STATE_DIR";

/// What `up` leaves in the run directory for the other commands: `rack.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Running {
    /// The rack's name.
    pub rack: String,
    /// The rack file.
    pub file: PathBuf,
    /// The state directory.
    pub state_dir: PathBuf,
}

/// The folder that holds racks' run directories.
fn run_base() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir).join("rackbus"),
        None if rustix::process::getuid().is_root() => PathBuf::from("/run/rackbus"),
        None => PathBuf::from(format!("/tmp/rackbus-{}", rustix::process::getuid().as_raw())),
    }
}

/// Makes the run directory of rack `name`, or takes the one there is, and says where it is.
pub fn make_run_dir(common: &Common, name: &str) -> Result<PathBuf, Failure> {
    let dir = match &common.run_dir {
        Some(dir) => absolute(dir)?,
        None => {
            let base = run_base();
            make_private(&base)?;
            base.join(name)
        }
    };
    make_private(&dir)?;
    Ok(dir)
}

/// Paths are passed on to other processes, and shown: they mean the same everywhere.
fn absolute(dir: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(dir)
        .map_err(|cause| Failure::usage(format!("{}: {cause}", dir.display()), "name a folder"))
}

/// The state directory of rack `name`.
pub fn state_dir(given: Option<&Path>, name: &str) -> Result<PathBuf, Failure> {
    let var = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(dir) = given {
        return absolute(dir);
    }
    let base = var("XDG_STATE_HOME")
        .or_else(|| var("HOME").map(|home| home.join(".local/state")))
        .unwrap_or_else(|| PathBuf::from("/var/lib"));
    absolute(&base.join("rackbus").join(name))
}

/// The run directory of the rack that a command means: the one named, or the only one there is.
/// What others can change is not believed: commands signal the processes that it names.
pub fn find_run_dir(common: &Common) -> Result<PathBuf, Failure> {
    if let Some(dir) = &common.run_dir {
        let dir = absolute(dir)?;
        check_private(&dir)?;
        return Ok(dir);
    }
    let base = run_base();
    check_private(&base)?;
    let dir = match &common.rack {
        Some(name) => base.join(name),
        None => only_rack(&base)?,
    };
    check_private(&dir)?;
    Ok(dir)
}

fn only_rack(base: &Path) -> Result<PathBuf, Failure> {
    let entries = fs::read_dir(base).into_iter().flatten().flatten();
    let runs = |dir: &PathBuf| dir.join("rack.json").exists() || !living(dir).is_empty();
    let racks: Vec<PathBuf> = entries.map(|e| e.path()).filter(runs).collect();
    match racks.as_slice() {
        [rack] => Ok(rack.clone()),
        [] => Err(Failure::new("no rack runs on this machine", "start one with `rackbus up`")),
        several => {
            let names: Vec<String> = several
                .iter()
                .filter_map(|p| p.file_name())
                .map(|n| n.to_string_lossy().into_owned())
                .collect();
            let remedy = format!("say which with --rack: {}", names.join(", "));
            Err(Failure::usage("several racks run on this machine", remedy))
        }
    }
}

/// What `up` noted in a run directory.
pub fn running(run_dir: &Path) -> Result<Running, Failure> {
    let path = run_dir.join("rack.json");
    let remedy = "start the rack with `rackbus up`";
    let text = fs::read(&path).map_err(|cause| match cause.kind() {
        std::io::ErrorKind::NotFound => {
            Failure::new(format!("no rack runs in {}", run_dir.display()), remedy)
        }
        _ => Failure::new(format!("{}: {cause}", path.display()), remedy),
    })?;
    serde_json::from_slice(&text)
        .map_err(|cause| Failure::new(format!("{}: {cause}", path.display()), remedy))
}

/// Makes a folder that only this user can enter. One that somebody else can change is refused.
pub fn make_private(dir: &Path) -> Result<(), Failure> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(|cause| refused(dir, &cause.to_string()))?;
    check_private(dir)
}

/// Refuses a folder that somebody else owns or can change, or chose by a link. None is none.
fn check_private(dir: &Path) -> Result<(), Failure> {
    let found = match fs::symlink_metadata(dir) {
        Ok(found) => found,
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(cause) => return Err(refused(dir, &cause.to_string())),
    };
    if !found.is_dir() {
        let what = if found.is_symlink() { "it is a link" } else { "it is no folder" };
        return Err(refused(dir, what));
    }
    if found.uid() != rustix::process::getuid().as_raw() {
        return Err(refused(dir, "it belongs to another user"));
    }
    if found.mode() & 0o022 != 0 {
        return Err(refused(dir, "others may change it"));
    }
    Ok(())
}

fn refused(dir: &Path, cause: &str) -> Failure {
    let remedy = format!(
        "see that it is yours alone (chmod go-w), or choose another folder with {RUN_DIR} or {STATE_DIR}"
    );
    Failure::new(format!("{}: {cause}", dir.display()), remedy)
}
