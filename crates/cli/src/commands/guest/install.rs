//! `rackbus guest install`: library, headers, tools and the mount, in a guest.

use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rackbus_segment::guest::TAG;
use rackbus_vm::{Record, Vm, registry};
use serde_json::json;

use crate::Common;
use crate::output::{Failure, Output};
use crate::paths::find_run_dir;

/// Where it goes, as where `scripts/install-sisci` puts it on a host.
const PREFIX: &str = "/opt/DIS";
/// Where it goes in a prepared guest, whose root cannot be written to.
const PREPARED: &str = "/var/DIS";
/// Where the rack's file system is mounted.
const MOUNT: &str = "/run/rackbus";

/// Bytes of a file that go into the guest at a time.
const PIECE: usize = 256 << 10;
/// How long the guest may take for each.
const LIMIT: Duration = Duration::from_secs(60);

/// Put the library into a running guest.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The VM's name
    #[arg(required_unless_present = "print")]
    vm: Option<String>,
    /// The library [default: libsisci.so beside this program]
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// A folder that `scripts/install-sisci` has filled, to go into the guest as a whole
    #[arg(long, value_name = "DIR", conflicts_with = "library")]
    from: Option<PathBuf>,
    /// Where in the guest [default: /opt/DIS; /var/DIS in a prepared guest]
    #[arg(long, value_name = "DIR")]
    prefix: Option<String>,
    /// Print what to do in a guest that rackbus cannot run commands in
    #[arg(long, conflicts_with = "vm")]
    print: bool,
}

/// A file for the guest.
struct Piece {
    from: PathBuf,
    to: String,
    kind: Kind,
}

enum Kind {
    Program,
    Data,
    /// A link, and what it says.
    Link(String),
}

impl Args {
    pub fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let Some(name) = self.vm.as_deref().filter(|_| !self.print) else {
            let prefix = self.prefix.as_deref().unwrap_or(PREFIX);
            let script = by_hand(prefix);
            output.result(&json!({"script": script}), |o| o.line(script.trim_end()));
            return Ok(());
        };
        let record = find(&find_run_dir(common)?, name)?;
        if !record.fabric {
            let error = format!("VM {name} was started without the device that shares memory");
            return Err(Failure::new(
                error,
                "it cannot be plugged into a guest that runs; stop the VM and run it with --fabric",
            ));
        }
        let prepared = record.boot.starts_with("guest ");
        let default = if prepared { PREPARED } else { PREFIX };
        let prefix = self.prefix.as_deref().unwrap_or(default);
        let files = self.files(prefix)?;
        let mut vm = Vm::attach(record);
        let folders = "mkdir -p \"$1/lib\"; cd /";
        run(&mut vm, &format!("set -- {}; {folders}", quoted(prefix)))?;
        for file in &files {
            output.progress(&format!("{} to {}", file.from.display(), file.to));
            put(&mut vm, file)?;
        }
        run(&mut vm, &set_up(prefix))?;
        let value = json!({"vm": name, "prefix": prefix, "mount": MOUNT, "files": files.len()});
        output.result(&value, |o| {
            o.line(&format!(
                "{} files are in {prefix} of VM {name}, and the rack is mounted at {MOUNT}",
                files.len()
            ));
        });
        Ok(())
    }

    /// What goes into the guest.
    fn files(&self, prefix: &str) -> Result<Vec<Piece>, Failure> {
        if let Some(from) = &self.from {
            let mut files = Vec::new();
            collect(from, prefix, &mut files)?;
            return Ok(files);
        }
        let library = match &self.library {
            Some(library) => library.clone(),
            None => std::env::current_exe()
                .map(|program| program.with_file_name("libsisci.so"))
                .map_err(|cause| Failure::new(cause.to_string(), "name it with --library"))?,
        };
        if !library.exists() {
            let error = format!("{} is not there", library.display());
            return Err(Failure::new(error, "build it, or name it with --library"));
        }
        let to = format!("{prefix}/lib/libsisci.so");
        Ok(vec![Piece { from: library, to, kind: Kind::Program }])
    }
}

/// All files of a folder and of those in it.
fn collect(from: &Path, to: &str, files: &mut Vec<Piece>) -> Result<(), Failure> {
    use std::os::unix::fs::PermissionsExt;
    let failed = |cause: std::io::Error| {
        Failure::new(format!("{}: {cause}", from.display()), "name a folder that can be read")
    };
    for entry in std::fs::read_dir(from).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let to = format!("{to}/{name}");
        let about = std::fs::symlink_metadata(&path).map_err(failed)?;
        if about.is_dir() {
            collect(&path, &to, files)?;
            continue;
        }
        let kind = if about.is_symlink() {
            Kind::Link(std::fs::read_link(&path).map_err(failed)?.to_string_lossy().into_owned())
        } else if about.permissions().mode() & 0o100 != 0 {
            Kind::Program
        } else {
            Kind::Data
        };
        files.push(Piece { from: path, to, kind });
    }
    Ok(())
}

fn find(run_dir: &Path, name: &str) -> Result<Record, Failure> {
    let hosts = std::fs::read_dir(run_dir).into_iter().flatten().flatten();
    for host in hosts.filter(|host| host.path().join("vms").is_dir()) {
        let found = registry::list(run_dir, &host.file_name().to_string_lossy())?;
        if let Some(record) = found.into_iter().find(|vm| vm.name == name) {
            return Ok(record);
        }
    }
    Err(Failure::new(format!("no VM named '{name}' runs"), "see `rackbus vm list`"))
}

/// Puts a file into the guest, piece by piece, and then under its name.
fn put(vm: &mut Vm, file: &Piece) -> Result<(), Failure> {
    let to = quoted(&file.to);
    let mode = match &file.kind {
        Kind::Link(target) => {
            let target = quoted(target);
            return run(vm, &format!("mkdir -p \"$(dirname {to})\" && ln -sf {target} {to}"));
        }
        Kind::Program => "755",
        Kind::Data => "644",
    };
    let bytes = std::fs::read(&file.from).map_err(|cause| {
        Failure::new(format!("{}: {cause}", file.from.display()), "name a file that can be read")
    })?;
    run(vm, &format!("mkdir -p \"$(dirname {to})\" && : >{to}.new"))?;
    for piece in bytes.chunks(PIECE) {
        let text = BASE64.encode(piece);
        run(vm, &format!("base64 -d >>{to}.new <<'END'\n{text}\nEND\n"))?;
    }
    run(vm, &format!("chmod {mode} {to}.new && mv {to}.new {to}"))
}

fn run(vm: &mut Vm, script: &str) -> Result<(), Failure> {
    let output = vm.exec(script, LIMIT)?;
    if output.ok() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
    Err(Failure::new(format!("the guest refuses: {said}"), "see to the cause in the guest"))
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Mounts the rack now, and where systemd runs at each boot; and tells the guest's loader.
fn set_up(prefix: &str) -> String {
    let lib = quoted(&format!("{prefix}/lib"));
    format!(
        "{}{unit}\
         if [ -d /etc/ld.so.conf.d ] && [ -w /etc ]; then echo {lib} >/etc/ld.so.conf.d/rackbus.conf; ldconfig; fi\n",
        mount(),
        unit = unit(),
    )
}

fn mount() -> String {
    format!(
        "set -e\n\
         modprobe virtiofs 2>/dev/null || true\n\
         mkdir -p {MOUNT}\n\
         mountpoint -q {MOUNT} || mount -t virtiofs {TAG} {MOUNT}\n\
         [ -e {MOUNT}/session ]\n"
    )
}

/// The mount at each boot, before programs run.
fn unit() -> String {
    format!(
        "if [ -d /run/systemd/system ]; then\n\
         cat >/etc/systemd/system/run-rackbus.mount <<'END'\n\
         [Unit]\n\
         Description=Memory that is shared with the rack\n\
         [Mount]\n\
         What={TAG}\n\
         Where={MOUNT}\n\
         Type=virtiofs\n\
         [Install]\n\
         WantedBy=local-fs.target\n\
         END\n\
         systemctl daemon-reload\n\
         systemctl enable --quiet run-rackbus.mount\n\
         fi\n"
    )
}

/// For a guest that has no agent of rackbus': what its root does.
fn by_hand(prefix: &str) -> String {
    format!(
        "# In the guest, as root; first copy libsisci.so to {prefix}/lib (scp, or an image).\n{}",
        set_up(prefix)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_to_be_done_by_hand_names_the_mount_and_the_library() {
        let script = by_hand("/opt/DIS");
        for wanted in ["mount -t virtiofs rackbus /run/rackbus", "/opt/DIS/lib", "run-rackbus.mount"] {
            assert!(script.contains(wanted), "{script}");
        }
        assert_eq!(quoted("it's"), "'it'\\''s'");
    }
}
