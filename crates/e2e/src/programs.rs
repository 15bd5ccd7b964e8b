//! Programs of this build, for guests: a disk with them, and with the libraries and the loader that they were
//! linked with, so that it does not matter which distribution either side is.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::rack::beside;
use crate::{Failure, Rack, Result, ensure};

/// What makes the programs of the disk in the drive's file `drive` ready in a guest: `/tmp/programs/run NAME`.
#[must_use]
pub fn unpack(drive: &str) -> String {
    format!("mkdir -p /tmp/programs && tar -xf {drive} -C /tmp/programs")
}

/// How a guest runs one: by the loader and the libraries that came with it.
const RUN: &str = "#!/bin/sh\nname=$1\nshift\nat=$(dirname \"$(readlink -f \"$0\")\")\n\
                   exec \"$at/loader\" --library-path \"$at\" \"$at/$name\" \"$@\"\n";

/// A disk with these programs, which were built together with this one.
///
/// # Errors
/// When one was not, or this machine lacks a tool (`ldd`, `strip`, `tar`).
pub fn disk(rack: &Rack, names: &[&str]) -> Result<PathBuf> {
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
    fs::create_dir_all(folder)?;
    for name in names {
        let program = beside(name)?;
        run(Command::new("strip").arg("-o").arg(folder.join(name)).arg(&program))?;
        for library in libraries(&program)? {
            let name = library.file_name().unwrap_or_default();
            let loader = name.to_string_lossy().starts_with("ld-linux");
            fs::copy(
                &library,
                folder.join(if loader { Path::new("loader") } else { name.as_ref() }),
            )?;
        }
    }
    fs::write(folder.join("run"), RUN)?;
    run(Command::new("chmod").arg("-R").arg("+x").arg(folder))
}

/// What `program` is linked with, and its loader.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output()?;
    ensure!(output.status.success(), "ldd {}: {output:?}", program.display());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // "libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x...)", "/lib64/ld-linux-x86-64.so.2 (0x...)".
    let path =
        |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from);
    Ok(text.lines().filter_map(path).collect())
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().map_err(|error| Failure(format!("{command:?}: {error}")))?;
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
