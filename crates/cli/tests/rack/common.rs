//! A rack of real processes in folders of its own, stopped when the test ends.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// Three hosts; leases live for a second, so that their end can be awaited.
const RACK: &str = "name = \"test\"
[control]
lease_ttl = \"1s\"
[hosts.alpha.devices.nvme0]
kind = \"nvme\"
size = \"64 MiB\"
[hosts.beta.devices.nvme1]
kind = \"nvme\"
size = \"64 MiB\"
backing = \"memory\"
[hosts.gamma]
";

/// The rack.
pub struct Rack {
    folder: TempDir,
    restarted: RefCell<Vec<Child>>,
}

impl Rack {
    /// Folders, and nothing running.
    pub fn prepared() -> Rack {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("rack.toml"), RACK).unwrap();
        Rack { folder, restarted: RefCell::default() }
    }

    /// Up and running.
    pub fn up() -> Rack {
        let rack = Rack::prepared();
        rack.ok(&["up", rack.path("rack.toml").to_str().unwrap()]);
        rack
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn run_dir(&self) -> PathBuf {
        self.path("run")
    }

    /// Runs a command of `rackbus` on this rack.
    pub fn run(&self, args: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_rackbus"))
            .args(args)
            .env("RACKBUS_RUN_DIR", self.run_dir())
            .env("RACKBUS_STATE_DIR", self.path("state"))
            .output()
            .unwrap()
    }

    /// Runs a command that must succeed; what it printed.
    pub fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// As [`ok`](Rack::ok), as JSON.
    pub fn json(&self, args: &[&str]) -> Value {
        let args: Vec<&str> = args.iter().copied().chain(["--json"]).collect();
        serde_json::from_str(&self.ok(&args)).unwrap()
    }

    /// Runs a command that must fail with this exit code; its one line on stderr.
    pub fn fails(&self, code: i32, args: &[&str]) -> String {
        let output = self.run(args);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {errors}");
        errors
    }

    /// Borrows a function; the lease as JSON.
    pub fn borrow(&self, function: &str, host: &str) -> Value {
        self.json(&["borrow", function, "--for", host])
    }

    pub fn pid(&self, process: &str) -> i32 {
        let path = match process {
            "control" => self.run_dir().join("control.pid"),
            host => self.run_dir().join(host).join("node.pid"),
        };
        std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
    }

    /// `kill -9`; returns when the process is dead.
    pub fn kill(&self, process: &str) {
        let pid = rustix::process::Pid::from_raw(self.pid(process)).unwrap();
        let handle =
            rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        let mut dead = [rustix::event::PollFd::new(&handle, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut dead, None).unwrap();
    }

    /// Starts a process of the rack again, as a supervisor would.
    pub fn start(&self, process: &str) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rackbus"));
        match process {
            "control" => command.arg("control"),
            host => command.args(["node", "--host", host]),
        };
        command.arg("--run-dir").arg(self.run_dir());
        command.stderr(std::fs::File::create(self.path("restarted.log")).unwrap());
        self.restarted.borrow_mut().push(command.spawn().unwrap());
    }

    /// Waits until `ready` answers; it is asked again whenever the rack has changed or 20 ms have
    /// passed.
    pub fn wait<R>(&self, what: &str, ready: impl Fn(&Rack) -> Option<R>) -> R {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(value) = ready(self) {
                return value;
            }
            assert!(Instant::now() < deadline, "waited too long for {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The state of a function, as `devices` tells it; `None` while nobody answers.
    pub fn state_of(&self, function: &str) -> Option<String> {
        let output = self.run(&["devices", "--json"]);
        let devices: Value = serde_json::from_slice(&output.stdout).ok()?;
        let device = devices.as_array()?.iter().find(|d| d["function"] == function)?;
        device["state"].as_str().map(str::to_owned)
    }
}

impl Drop for Rack {
    fn drop(&mut self) {
        self.run(&["down"]);
        for mut child in self.restarted.take() {
            // Ended by `down`, or killed before.
            let _ = child.wait();
        }
    }
}

/// The socket of a lease.
pub fn socket(lease: &Value) -> PathBuf {
    Path::new(lease["socket"].as_str().unwrap()).to_owned()
}
