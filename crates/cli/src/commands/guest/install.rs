//! `rackbus guest install`: library, headers, tools and the mount, in a guest.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rackbus_segment::guest::TAG;
use rackbus_vm::{Vm, VmError, VmRecord, registry};
use serde_json::json;

use super::ssh::Ssh;
use crate::Common;
use crate::output::{Failure, Output};
use crate::paths::find_run_dir;
use crate::shell::quote;

/// Where it goes, as where `scripts/install-sisci` puts it on a host.
const PREFIX: &str = "/opt/DIS";
/// Where it goes in a prepared guest, whose root cannot be written to.
const PREPARED: &str = "/var/DIS";
/// Name of the library's file beside the program and in the guest.
const LIBRARY: &str = "libsisci.so";
/// Where the rack's file system is mounted.
const MOUNT: &str = "/run/rackbus";

/// How long the guest may take for a step.
const LIMIT: Duration = Duration::from_secs(60);

/// Put the library into a running guest.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The VM, by the name that `rackbus vm list` shows
    #[arg(required_unless_present_any = ["print", "destination"], conflicts_with = "destination")]
    vm: Option<String>,
    #[command(flatten)]
    ssh: Ssh,
    /// The library [default: libsisci.so beside this program]
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// A folder that `scripts/install-sisci` has filled, to go into the guest as a whole
    #[arg(long, value_name = "DIR", conflicts_with = "library")]
    from: Option<PathBuf>,
    /// Where in the guest [default: /opt/DIS; /var/DIS in a prepared guest]
    #[arg(long, value_name = "DIR")]
    prefix: Option<String>,
    /// Print what to do in a guest that is reached in neither way
    #[arg(long, conflicts_with_all = ["vm", "destination"])]
    print: bool,
}

impl Args {
    pub fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        if self.print {
            let script = by_hand(self.prefix.as_deref().unwrap_or(PREFIX));
            output.result(&json!({"script": script}), |o| o.line(script.trim_end()));
            return Ok(());
        }
        let (guest, prefix) = match (&self.vm, &self.ssh.destination) {
            (Some(name), _) => (name, self.by_agent(find(&find_run_dir(common)?, name)?)?),
            (None, Some(destination)) => (destination, self.by_ssh(destination, output)?),
            (None, None) => return Err(Failure::usage("no guest is named", "name a VM")),
        };
        output.result(&json!({"vm": guest, "prefix": prefix, "mount": MOUNT}), |o| {
            o.line(&format!(
                "the library is in {prefix}/lib of {guest}, and the rack is at {MOUNT}"
            ));
        });
        Ok(())
    }

    /// By the agent that runs commands in a VM of rackbus'. Gives where the files went.
    fn by_agent(&self, record: VmRecord) -> Result<&str, Failure> {
        if !record.fabric {
            let error =
                format!("VM {} was started without the device that shares memory", record.name);
            return Err(Failure::new(
                error,
                "it cannot be plugged into a guest that runs; stop the VM and run it with --fabric",
            ));
        }
        let prepared = record.boot.starts_with("guest ");
        let default = if prepared { PREPARED } else { PREFIX };
        let prefix = self.prefix.as_deref().unwrap_or(default);
        let archive = self.archive()?;
        let mut vm = Vm::attach(record);
        match vm.exec("true", LIMIT) {
            Err(error @ VmError::TimedOut { .. }) => {
                return Err(Failure::new(
                    format!("nobody in the guest runs commands for rackbus: {error}"),
                    "wait until it has booted; a guest without rackbus' agent takes the library by SSH (--ssh root@GUEST), \
                     or by hand (--print)",
                ));
            }
            outcome => drop(outcome?),
        }
        // The guest may still show the disk of one that was interrupted.
        let serial = format!("rackbus-{}", std::process::id());
        let script = unpack(prefix, &serial);
        let unpacked = vm.with_disk(archive.path(), &serial, |vm| vm.exec(&script, LIMIT))?;
        succeeded(&unpacked)?;
        succeeded(&vm.exec(&set_up(prefix), LIMIT)?)?;
        Ok(prefix)
    }

    /// By SSH, where the files are what the script reads. Gives where they went.
    fn by_ssh(&self, destination: &str, output: &Output) -> Result<&str, Failure> {
        let prefix = self.prefix.as_deref().unwrap_or(PREFIX);
        let archive = self.archive()?;
        let to = quote(prefix);
        // The mount first: without the device nothing is left in the guest.
        let script =
            format!("{}mkdir -p {to}\ntar -xf - -C {to}\n{}", mount(), at_each_boot(prefix));
        output.progress(&format!("copying to {destination} by SSH"));
        self.ssh.run(destination, &script, archive.path())?;
        Ok(prefix)
    }

    /// What goes into the guest, as a tar file.
    fn archive(&self) -> Result<Archive, Failure> {
        let archive = Archive::new()?;
        let mut tar = Command::new("tar");
        tar.arg("--create").arg("--file").arg(archive.path()).args(["--owner=0", "--group=0"]);
        if let Some(from) = &self.from {
            tar.arg("--directory").arg(from).arg(".");
        } else {
            let library = match &self.library {
                Some(library) => library.clone(),
                None => std::env::current_exe()
                    .map(|program| program.with_file_name(LIBRARY))
                    .map_err(|cause| Failure::new(cause.to_string(), "name it with --library"))?,
            };
            if !library.is_file() {
                let error = format!("{} is not there", library.display());
                return Err(Failure::new(error, "build it, or name it with --library"));
            }
            // Under its own name, wherever it lies and whatever it is called there.
            tar.args(["--absolute-names", "--dereference", "--transform"]);
            tar.arg(format!("s|.*|lib/{LIBRARY}|")).arg(library);
        }
        let made = tar
            .output()
            .map_err(|cause| Failure::new(format!("tar: {cause}"), "install tar on this host"))?;
        match made.status.success() {
            true => Ok(archive),
            false => {
                let said = String::from_utf8_lossy(&made.stderr).trim().replace('\n', "; ");
                Err(Failure::new(format!("tar: {said}"), "name files that can be read"))
            }
        }
    }
}

/// A file without a name, which is gone when this is dropped, or with this process.
struct Archive {
    path: PathBuf,
    _file: File,
}

impl Archive {
    fn new() -> Result<Archive, Failure> {
        let dir = std::env::temp_dir();
        let failed = |cause: std::io::Error| {
            Failure::new(format!("{}: {cause}", dir.display()), "make room there, or set TMPDIR")
        };
        let name = dir.join(format!("rackbus-install-{}.tar", std::process::id()));
        let options = File::options().read(true).write(true).create_new(true).open(&name);
        let file = options.map_err(failed)?;
        std::fs::remove_file(&name).map_err(failed)?;
        // By which other processes open it: tar, and QEMU.
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        Ok(Archive { path: path.into(), _file: file })
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

fn find(run_dir: &Path, name: &str) -> Result<VmRecord, Failure> {
    let hosts = std::fs::read_dir(run_dir).into_iter().flatten().flatten();
    for host in hosts.filter(|host| host.path().join("vms").is_dir()) {
        let found = registry::list(run_dir, &host.file_name().to_string_lossy())?;
        if let Some(record) = found.into_iter().find(|vm| vm.name == name) {
            return Ok(record);
        }
    }
    Err(Failure::new(format!("no VM named '{name}' runs"), "see `rackbus vm list`"))
}

/// Unpacks the disk, which may take a moment to appear.
fn unpack(prefix: &str, serial: &str) -> String {
    let prefix = quote(prefix);
    format!(
        "for try in $(seq 200); do for disk in /sys/block/vd*; do\n\
         [ \"$(cat $disk/serial 2>/dev/null)\" = {serial} ] || continue\n\
         mkdir -p {prefix} && tar -xf /dev/$(basename $disk) -C {prefix}; exit $?\n\
         done; sleep 0.1; done; echo 'no disk with the files appears' >&2; exit 1\n"
    )
}

fn succeeded(output: &rackbus_vm::CommandOutput) -> Result<(), Failure> {
    if output.ok() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
    Err(Failure::new(format!("the guest refuses: {said}"), "see to the cause in the guest"))
}

/// Mounts the rack now, and where systemd runs at each boot; and tells the guest's loader.
fn set_up(prefix: &str) -> String {
    format!("{}{}", mount(), at_each_boot(prefix))
}

/// Mounts the rack, where that is not done. Ends with an error where it cannot be.
fn mount() -> String {
    format!(
        "set -e\n\
         modprobe virtiofs 2>/dev/null || true\n\
         mkdir -p {MOUNT}\n\
         mountpoint -q {MOUNT} || mount -t virtiofs {TAG} {MOUNT} || {{ rmdir {MOUNT}\n\
         echo 'no device that shares memory; start the VM with --fabric' >&2; exit 1; }}\n\
         [ -e {MOUNT}/session ] || {{ echo 'something else is mounted at {MOUNT}' >&2; exit 1; }}\n"
    )
}

/// What makes the mount appear at each boot, and the guest's loader find the library.
fn at_each_boot(prefix: &str) -> String {
    let lib = quote(&format!("{prefix}/lib"));
    format!(
        "{}if [ -d /etc/ld.so.conf.d ] && [ -w /etc ]; then echo {lib} >/etc/ld.so.conf.d/rackbus.conf; ldconfig; fi\n",
        unit(),
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
        for wanted in
            ["mount -t virtiofs rackbus /run/rackbus", "/opt/DIS/lib", "run-rackbus.mount"]
        {
            assert!(script.contains(wanted), "{script}");
        }
    }
}
