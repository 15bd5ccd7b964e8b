//! The library for programs that share memory, its tools, and programs built with it on this machine.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::rack::beside;
use crate::{CheckFailure, RackProcesses, Result, ensure, programs};

/// What installs library, headers and tools.
const INSTALL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/install-sisci");

/// Library, headers and tools, as they are installed on a host, in a folder of the rack's.
///
/// # Errors
/// When they were not built, or cannot be installed.
pub fn install(rack: &RackProcesses) -> Result<PathBuf> {
    install_in(rack.run_dir())
}

/// The same in a folder of this one.
///
/// # Errors
/// As [`install`].
pub fn install_in(dir: &Path) -> Result<PathBuf> {
    // What is installed names its own folder.
    let dir = std::path::absolute(dir)?;
    let folder = dir.join("sisci");
    let library = beside("libsisci.so")?;
    let made = Command::new(INSTALL)
        .arg(&folder)
        .env("SISCI_LIB", library.parent().unwrap_or(&library))
        .env("CARGO_TARGET_DIR", dir.join("sisci-build"))
        .env_remove("DESTDIR")
        .output()?;
    ensure!(made.status.success(), "{INSTALL}: {}", String::from_utf8_lossy(&made.stderr));
    Ok(folder)
}

/// Builds a program of one source file with the library in `folder`, which it finds wherever that goes.
///
/// # Errors
/// When it does not compile: with what the compiler says.
pub fn build(folder: &Path, source: &Path) -> Result<PathBuf> {
    let library = ["-lsisci".into(), "-Wl,-rpath,$ORIGIN/../lib".into()];
    let (include, libraries) = (folder.join("include"), folder.join("lib"));
    let places = ["-I".into(), include.into(), "-L".into(), libraries.into()];
    programs::compile(source, &folder.join("bin"), &[&places[..], &library].concat())
}

/// A host's node id.
///
/// # Errors
/// When the rack has no such host.
pub fn node_id(rack: &RackProcesses, host: &str) -> Result<u64> {
    let ids = rack.json(&["node-id"])?;
    let found = ids.as_array().into_iter().flatten().find(|it| it["host"] == host);
    let id = found.and_then(|it| it["node_id"].as_u64());
    id.ok_or_else(|| CheckFailure(format!("no id of {host} in {ids}")))
}
