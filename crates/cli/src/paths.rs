//! Where a rack's things are: its run directory (sockets, process ids, logs) and its state
//! directory (the control plane's database, drives' files).

use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::Common;
use crate::output::Failure;

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

/// The run directory of rack `name`.
pub fn run_dir(common: &Common, name: &str) -> PathBuf {
    common.run_dir.clone().unwrap_or_else(|| run_base().join(name))
}

/// The state directory of rack `name`.
pub fn state_dir(given: Option<&Path>, name: &str) -> PathBuf {
    let var = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(dir) = given {
        return dir.to_owned();
    }
    let base = var("XDG_STATE_HOME")
        .or_else(|| var("HOME").map(|home| home.join(".local/state")))
        .unwrap_or_else(|| PathBuf::from("/var/lib"));
    base.join("rackbus").join(name)
}

/// The run directory of the rack that a command means: the one named, or the only one there is.
pub fn find_run_dir(common: &Common) -> Result<PathBuf, Failure> {
    if let Some(dir) = &common.run_dir {
        return Ok(dir.clone());
    }
    let base = run_base();
    if let Some(name) = &common.rack {
        return Ok(base.join(name));
    }
    let entries = fs::read_dir(&base).into_iter().flatten().flatten();
    let racks: Vec<PathBuf> =
        entries.map(|e| e.path()).filter(|p| p.join("rack.json").exists()).collect();
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

/// Makes a folder that only this user can enter. One that somebody else owns is refused.
pub fn make_private(dir: &Path) -> Result<(), Failure> {
    let failed = |cause: std::io::Error| {
        let remedy = format!("choose another folder with {RUN_DIR} or --run-dir");
        Failure::new(format!("{}: {cause}", dir.display()), remedy)
    };
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
    let owner = fs::metadata(dir).map_err(failed)?.uid();
    if owner != rustix::process::getuid().as_raw() {
        return Err(failed(std::io::Error::other("it belongs to another user")));
    }
    Ok(())
}
