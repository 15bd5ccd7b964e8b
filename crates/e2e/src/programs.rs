//! Programs of this build, for guests: a disk with them, and with the libraries and the loader that they were
//! linked with, so that it does not matter which distribution either side is.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use rackbus_vm::metal::programs;

use crate::rack::beside;
use crate::{CheckFailure, RackProcesses, Result, ensure};

/// What `peer` says where other bytes came than were sent, to a function or from one that is there.
pub const OTHER_BYTES: &str = "other bytes came";

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
    disk_with(rack, names, &[])
}

/// The same with others beside, by their files.
///
/// # Errors
/// As [`disk`].
pub fn disk_with(rack: &RackProcesses, names: &[&str], others: &[PathBuf]) -> Result<PathBuf> {
    let (folder, disk) = (rack.run_dir().join("programs"), rack.run_dir().join("programs.img"));
    let own = names.iter().map(|name| beside(name)).collect::<Result<Vec<_>>>()?;
    programs::collect(&folder, &[&own[..], others].concat())?;
    run(Command::new("tar").arg("-cf").arg(&disk).arg("-C").arg(&folder).arg("."))?;
    Ok(disk)
}

/// A disk with the programs of a folder that set-up has made, each with its libraries beside: `/tmp/programs/run/NAME`.
///
/// # Errors
/// When it is not there, or this machine lacks `tar`.
pub fn disk_of(rack: &RackProcesses, folder: &Path) -> Result<PathBuf> {
    let disk = rack.run_dir().join("set-up.img");
    run(Command::new("tar").arg("-cf").arg(&disk).arg("-C").arg(folder).args(["run", "usr"]))?;
    Ok(disk)
}

/// Compiles a C program of one source file into `folder`, with these arguments behind the source.
///
/// # Errors
/// When it does not compile: with what the compiler says.
pub fn compile(source: &Path, folder: &Path, arguments: &[OsString]) -> Result<PathBuf> {
    let program = folder.join(source.file_stem().unwrap_or_default());
    let mut compiler = Command::new("cc");
    compiler.args(["-O2", "-Wall", "-Wextra", "-o"]).arg(&program).arg(source);
    run(compiler.args(arguments))?;
    Ok(program)
}

/// The example of a C program that drives an accelerator, with the library in it, in a folder of the rack's.
///
/// # Errors
/// As [`compile`], and when the library was not built.
pub fn accelerator_example(rack: &RackProcesses) -> Result<PathBuf> {
    let own = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../accel-c"));
    let library = beside("librackbus_accel.a")?;
    // What Rust's own library needs.
    let system = ["-lpthread", "-ldl", "-lm", "-lgcc_s"].map(OsString::from);
    let arguments = ["-I".into(), own.join("include").into(), library.into()];
    let arguments = [&arguments[..], &system].concat();
    compile(&own.join("examples/seal.c"), rack.run_dir(), &arguments)
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
