//! Programs for machines and guests: copies with the libraries and the loader that they were linked with, so that it
//! does not matter which distribution either side runs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::io;
use crate::{Result, VmError};

/// Runs one of a folder's programs by the loader and the libraries beside it.
const RUN: &str = "#!/bin/sh\nname=$1\nshift\nat=$(dirname \"$(readlink -f \"$0\")\")\n\
                   exec \"$at/loader\" --library-path \"$at\" \"$at/$name\" \"$@\"\n";

/// Copies `programs` to `folder`, which is made, without their debug information, and what they were linked with:
/// there, `run NAME` runs one.
///
/// # Errors
/// When one is missing, or this machine lacks a tool (`ldd`, `strip`).
pub fn collect(folder: &Path, programs: &[PathBuf]) -> Result<()> {
    fs::create_dir_all(folder).map_err(io("make", folder))?;
    for program in programs {
        let Some(name) = program.file_name() else {
            return Err(VmError::Invalid(format!("{} names no program", program.display())));
        };
        output(Command::new("strip").arg("-o").arg(folder.join(name)).arg(program))?;
        for library in libraries(program)? {
            let name = library.file_name().unwrap_or_default();
            let is_loader = name.to_string_lossy().starts_with("ld-linux");
            let to = folder.join(if is_loader { Path::new("loader") } else { name.as_ref() });
            fs::copy(&library, &to).map_err(io("copy", &library))?;
        }
    }
    let run = folder.join("run");
    fs::write(&run, RUN).map_err(io("write", &run))?;
    for entry in fs::read_dir(folder).map_err(io("read", folder))?.flatten() {
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(entry.path(), executable).map_err(io("change", &entry.path()))?;
    }
    Ok(())
}

/// What `program` is linked with, and its loader.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let text = output(Command::new("ldd").arg(program))?;
    // "libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x...)", "/lib64/ld-linux-x86-64.so.2 (0x...)".
    let path =
        |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from);
    Ok(text.lines().filter_map(path).collect())
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
