//! VMs without a guest: a program that only waits stands for QEMU, and the test answers at its
//! sockets. What is tested is who has which name, folder and lease.

#[path = "../support/mod.rs"]
mod support;

mod functions;
mod names;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use rackbus_control::api::{BorrowRequest, DeviceState, LeaseStage};
use rackbus_driver::{Drive, DriveOptions};
use rackbus_pci::vfio_user::Client;
use rackbus_spec::vfio_user::irq;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use support::{PATIENCE, Process, Rack, THREE_HOSTS, with_leases_of};

/// What stands for QEMU: asked what it can do, with a machine that does not run, it says nothing.
const PROGRAM: &str = "#!/bin/sh\ncase \" $* \" in *' -S '*) exit 1 ;; esac\nexec sleep 1000\n";

/// A rack, and what stands for QEMU.
struct Lab {
    rack: Rack,
    cache: tempfile::TempDir,
}

impl Lab {
    fn up() -> Lab {
        Lab::with(PROGRAM)
    }

    /// Whose QEMU opens the functions that it is given: this test binary does.
    fn whose_vms_use_what_they_have() -> Lab {
        let program = std::env::current_exe().unwrap();
        let part = "--exact functions::plays_qemu --ignored --nocapture";
        Lab::with(&format!(
            "#!/bin/sh\ncase \" $* \" in *' -S '*) exit 1 ;; esac\n\
             PLAYED_ARGUMENTS=\"$*\" exec {} {part}\n",
            program.display()
        ))
    }

    fn with(program: &str) -> Lab {
        Lab::of(THREE_HOSTS, program)
    }

    fn of(rack: &str, program: &str) -> Lab {
        let cache = tempfile::tempdir().unwrap();
        let folder = cache.path().join("qemu/run");
        std::fs::create_dir_all(&folder).unwrap();
        let qemu = folder.join("qemu-system-x86_64");
        std::fs::write(&qemu, program).unwrap();
        std::fs::set_permissions(&qemu, std::fs::Permissions::from_mode(0o755)).unwrap();
        Lab { rack: Rack::up(rack), cache }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.rack.command(args);
        command.env("RACKBUS_CACHE", self.cache.path()).env("RACKBUS_ACCEL", "tcg");
        command
    }

    /// Begins `vm run` with a drive or without.
    fn run(&self, args: &[&str]) -> Child {
        let common = ["vm", "run", "--host", "beta", "--kernel", "/dev/null"];
        self.begin(&[&common, args].concat())
    }

    /// Begins a command that may be ended by signals.
    fn begin(&self, args: &[&str]) -> Child {
        let run = self.command(args);
        // Who runs the tests may ignore signals, as `nohup` does, and `vm run` heeds that.
        let mut command = Command::new("env");
        command.arg("--default-signal=HUP,INT,TERM").arg(run.get_program()).args(run.get_args());
        let set = run.get_envs().filter_map(|(name, value)| Some((name, value?)));
        command.envs(set).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn folder(&self, name: &str) -> PathBuf {
        self.rack.run_dir().join("beta/vms").join(name)
    }

    /// Waits until a VM of that name is being started, and answers for its QEMU from then on.
    fn answer(&self, name: &str) {
        self.await_start(name, || false);
        self.serve(name).unwrap();
    }

    /// The same, unless the command that starts it ends before: it was told to.
    fn answer_unless_ended(&self, name: &str, run: &mut Child) {
        self.await_start(name, || run.try_wait().unwrap().is_some());
        // Its folder is gone with it.
        let _ = self.serve(name);
    }

    fn await_start(&self, name: &str, mut is_over: impl FnMut() -> bool) {
        let log = self.folder(name).join("qemu.log");
        self.rack.block(async {
            while !log.exists() && !is_over() {
                tokio::task::yield_now().await;
            }
        });
    }

    fn serve(&self, name: &str) -> std::io::Result<()> {
        self.serve_with(name, serve_qmp)
    }

    /// Has each connection to a VM's QMP socket answered so.
    fn serve_with(
        &self,
        name: &str,
        answer: impl Fn(UnixStream) + Send + 'static,
    ) -> std::io::Result<()> {
        let folder = self.folder(name);
        let listener = UnixListener::bind(folder.join("qmp.sock"))?;
        std::thread::spawn(move || listener.incoming().flatten().for_each(answer));
        UnixListener::bind(folder.join("agent.sock")).map(drop)
    }
}

/// Answers as a QEMU that has the drive plugged in, and that is killed when it is to unplug it.
fn ends_when_it_unplugs(mut stream: UnixStream, folder: &Path) {
    let reader = BufReader::new(stream.try_clone().unwrap());
    let _ = stream.write_all(b"{\"QMP\": {}}\n");
    for line in reader.lines().map_while(Result::ok) {
        if line.contains("device_del") {
            return qemu(folder).crash();
        }
        let plugged = json!([{"name": "fn-alpha_nvme0", "type": "child<vfio-user-pci>"}]);
        let devices = if line.contains("qom-list") { plugged } else { json!([]) };
        let _ = writeln!(stream, "{}", json!({"return": devices}));
    }
}

/// Answers as a QEMU whose guest has the drive plugged in and never releases it.
fn never_unplugs(mut stream: UnixStream) {
    let reader = BufReader::new(stream.try_clone().unwrap());
    let _ = stream.write_all(b"{\"QMP\": {}}\n");
    for line in reader.lines().map_while(Result::ok) {
        let plugged = json!([{"name": "fn-alpha_nvme0", "type": "child<vfio-user-pci>"}]);
        let devices = if line.contains("qom-list") { plugged } else { json!([]) };
        let _ = writeln!(stream, "{}", json!({"return": devices}));
    }
}

fn serve_qmp(mut stream: UnixStream) {
    let reader = BufReader::new(stream.try_clone().unwrap());
    let _ = stream.write_all(b"{\"QMP\": {}}\n");
    for _ in reader.lines().map_while(Result::ok) {
        let _ = stream.write_all(b"{\"return\": []}\n");
    }
}

/// The process that stands for the QEMU of the VM in `folder`.
fn qemu(folder: &Path) -> Process {
    let text = std::fs::read(folder.join("vm.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&text).unwrap();
    Process::of(Pid::from_raw(record["pid"].as_i64().unwrap() as i32).unwrap())
}
