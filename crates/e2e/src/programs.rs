//! Programs of this build, for guests: a disk with them, and with the libraries and the loader that they were
//! linked with, so that it does not matter which distribution either side is.

use std::path::{Path, PathBuf};
use std::process::Command;

use rackbus_vm::metal::programs;

use crate::rack::beside;
use crate::{CheckFailure, RackProcesses, Result, ensure};

/// What makes the programs of the disk in the drive's file `drive` ready in a guest: `/tmp/programs/run NAME`.
#[must_use]
pub fn unpack(drive: &str) -> String {
    format!("mkdir -p /tmp/programs && tar -xf {drive} -C /tmp/programs")
}

/// A disk with these programs, which were built together with this one.
///
/// # Errors
/// When one was not, or this machine lacks a tool (`ldd`, `strip`, `tar`).
pub fn disk(rack: &RackProcesses, names: &[&str]) -> Result<PathBuf> {
    let (folder, disk) = (rack.run_dir().join("programs"), rack.run_dir().join("programs.img"));
    collect(&folder, names)?;
    run(Command::new("tar").arg("-cf").arg(&disk).arg("-C").arg(&folder).arg("."))?;
    Ok(disk)
}

/// A folder with these programs, which were built together with this one: `run NAME` runs one.
///
/// # Errors
/// As [`disk`].
pub fn collect(folder: &Path, names: &[&str]) -> Result<()> {
    let programs = names.iter().map(|name| beside(name)).collect::<Result<Vec<_>>>()?;
    Ok(programs::collect(folder, &programs)?)
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().map_err(|error| CheckFailure(format!("{command:?}: {error}")))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// The arguments for QEMU that give a guest the disk, as its second.
#[must_use]
pub fn qemu_arguments(disk: &Path) -> [String; 4] {
    let file = disk.display();
    [
        "-blockdev".to_owned(),
        format!("driver=raw,node-name=programs,read-only=on,file.driver=file,file.filename={file}"),
        "-device".to_owned(),
        // Behind the guest's other disk, which it looks for as the first one.
        "virtio-blk-pci,drive=programs,addr=0x1e".to_owned(),
    ]
}
