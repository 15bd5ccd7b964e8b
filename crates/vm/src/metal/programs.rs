//! Programs for machines and guests: copies with the libraries and the loader that they were linked with, so that it
//! does not matter which distribution either side runs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::io;
use crate::{Assets, Result, VmError};

/// Runs one of a folder's programs by the loader and the libraries beside it.
const RUN: &str = "#!/bin/sh\nname=$1\nshift\nat=$(dirname \"$(readlink -f \"$0\")\")\n\
                   exec \"$at/loader\" --library-path \"$at\" \"$at/$name\" \"$@\"\n";

/// The firmware of a PC, and what QEMU has it run where a kernel is named.
const PC_FIRMWARE: [&str; 3] = ["bios-256k.bin", "kvmvapic.bin", "linuxboot_dma.bin"];

/// Copies `programs` to `folder`, which is made, without their debug information, and what they were linked with:
/// there, `run NAME` runs one.
///
/// # Errors
/// When one is missing, or this machine lacks a tool (`ldd`, `strip`).
pub fn collect(folder: &Path, programs: &[PathBuf]) -> Result<()> {
    fs::create_dir_all(folder).map_err(io("make", folder))?;
    for program in programs {
        copy(folder, program, &mut Command::new("ldd"))?;
    }
    finish(folder)
}

/// Copies the QEMU that set-up chose to `folder`, in the same way, with what a VM of a PC needs: there,
/// `run qemu-system-x86_64 -L .` runs it.
///
/// # Errors
/// When set-up has not been run; as [`collect`].
pub fn collect_qemu(assets: &Assets, folder: &Path) -> Result<()> {
    let chosen = assets.qemu()?;
    fs::create_dir_all(folder).map_err(io("make", folder))?;
    // One that set-up has extracted has its own loader and libraries, and a script that runs it by them.
    let extracted = assets.cache().join("qemu/usr");
    let program = extracted.join("bin/qemu-system-x86_64");
    if program.exists() {
        let own = extracted.join("lib/x86_64-linux-gnu");
        let mut loader = Command::new(own.join("ld-linux-x86-64.so.2"));
        copy(folder, &program, loader.arg("--library-path").arg(&own).arg("--list"))?;
    } else {
        let program = fs::canonicalize(&chosen).map_err(io("find", &chosen))?;
        copy(folder, &program, &mut Command::new("ldd"))?;
    }
    let folders = output(Command::new(&chosen).args(["-L", "help"]))?;
    for name in PC_FIRMWARE {
        let found = folders.lines().map(|it| Path::new(it).join(name)).find(|file| file.exists());
        let file = found.ok_or_else(|| VmError::Invalid(format!("QEMU has no {name}")))?;
        fs::copy(&file, folder.join(name)).map_err(io("copy", &file))?;
    }
    finish(folder)
}

/// Copies a program, and what it is linked with as this command lists it.
fn copy(folder: &Path, program: &Path, lists: &mut Command) -> Result<()> {
    let Some(name) = program.file_name() else {
        return Err(VmError::Invalid(format!("{} names no program", program.display())));
    };
    output(Command::new("strip").arg("-o").arg(folder.join(name)).arg(program))?;
    for library in libraries(&output(lists.arg(program))?) {
        let name = library.file_name().unwrap_or_default();
        let is_loader = name.to_string_lossy().starts_with("ld-linux");
        let to = folder.join(if is_loader { Path::new("loader") } else { name.as_ref() });
        fs::copy(&library, &to).map_err(io("copy", &library))?;
    }
    Ok(())
}

/// Puts `run` there, and makes all of it executable.
fn finish(folder: &Path) -> Result<()> {
    let run = folder.join("run");
    fs::write(&run, RUN).map_err(io("write", &run))?;
    for entry in fs::read_dir(folder).map_err(io("read", folder))?.flatten() {
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(entry.path(), executable).map_err(io("change", &entry.path()))?;
    }
    Ok(())
}

/// What a program is linked with, and its loader, of what `ldd` or a loader lists.
fn libraries(listed: &str) -> Vec<PathBuf> {
    // "libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x...)", "/lib64/ld-linux-x86-64.so.2 (0x...)", and for a loader other
    // than the system's "/lib64/ld-linux-x86-64.so.2 => /.../ld-linux-x86-64.so.2 (0x...)".
    let path = |line: &str| {
        let found = line.split_once("=>").map_or(line, |(_, found)| found);
        found.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from)
    };
    listed.lines().filter_map(path).collect()
}

/// What a program writes, which must succeed.
fn output(command: &mut Command) -> Result<String> {
    let program = PathBuf::from(command.get_program());
    let output = command.stdin(Stdio::null()).output().map_err(io("run", &program))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(VmError::Invalid(format!("{command:?}: {}", errors.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_those_that_are_found() {
        let listed = "\tlinux-vdso.so.1 (0x00007ff104f5e000)\n\
                      \tlibc.so.6 => /lib/libc.so.6 (0x00007fc0eb3b4000)\n\
                      \t/lib64/ld-linux-x86-64.so.2 (0x00007fc0eb597000)\n";
        assert_eq!(
            libraries(listed),
            ["/lib/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from)
        );
    }

    #[test]
    fn the_loader_is_the_one_that_listed() {
        let listed =
            "\t/lib64/ld-linux-x86-64.so.2 => /own/ld-linux-x86-64.so.2 (0x00007fee3cf48000)\n";
        assert_eq!(libraries(listed), [PathBuf::from("/own/ld-linux-x86-64.so.2")]);
    }
}
