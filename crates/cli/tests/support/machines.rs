//! A rack whose hosts are machines, as far as one machine can play them: each has a run directory and a state
//! directory of its own, and reaches the others by TCP alone.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use rackbus_control::api::Lease;
use serde_json::Value;

use super::{PATIENCE, programs};

/// A port that nobody listens at, another one each time: below those that the system gives to connections by itself,
/// so that none of them takes it before it is listened at.
pub fn free_port() -> u16 {
    const FIRST: u32 = 12_000;
    const COUNT: u32 = 20_000;
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    let begin = std::process::id() * 61;
    let next = || FIRST + (begin + GIVEN.fetch_add(1, Ordering::Relaxed)) % COUNT;
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    std::iter::repeat_with(|| next() as u16)
        .take(COUNT as usize)
        .find(is_free)
        .expect("a free port")
}

/// One machine: the control plane's, or a host's.
pub struct Machine {
    folder: PathBuf,
    process: Option<Child>,
    is_desk: bool,
    /// The `rackbus` that is installed there.
    pub program: PathBuf,
}

impl Machine {
    fn new(folder: PathBuf) -> Machine {
        std::fs::create_dir_all(&folder).unwrap();
        let program = env!("CARGO_BIN_EXE_rackbus").into();
        Machine { folder, process: None, is_desk: false, program }
    }

    /// The machine's run directory.
    pub fn run_dir(&self) -> PathBuf {
        self.folder.join("run")
    }

    /// The machine's state directory.
    pub fn state_dir(&self) -> PathBuf {
        self.folder.join("state")
    }

    /// `rackbus` on this machine, not started yet.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(args)
            .env("RACKBUS_RUN_DIR", self.folder.join("run"))
            .env("RACKBUS_STATE_DIR", self.folder.join("state"))
            .env("XDG_CONFIG_HOME", self.folder.join("config"))
            .env_remove("RACKBUS_CONTEXT")
            .env("PATH", programs::path())
            .stdin(Stdio::null());
        if self.is_desk {
            // No rack of its own is named: what runs there is looked for as usual.
            command.env_remove("RACKBUS_RUN_DIR").env("XDG_RUNTIME_DIR", self.folder.join("run"));
        }
        command
    }

    /// Runs `rackbus` on this machine.
    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Runs `rackbus --json` on this machine, which must succeed; what it printed.
    pub fn json(&self, args: &[&str]) -> Value {
        let output = self.run(&[args, &["--json"]].concat());
        let said = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
        assert!(output.status.success(), "rackbus {args:?}: {said}{}", self.log());
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Restarts the node of this machine in place; its row.
    pub fn restart_in_place(&self, host: &str) -> Value {
        super::restarted(|| self.run(&["restart", host, "--json"]), || self.log())
    }

    /// Asks for a restart of its node in place, which must be refused, and not because the machine is busy; what it said.
    pub fn restart_refused(&self, host: &str) -> String {
        super::not_for_being_busy(|| self.bad(&["restart", host]))
    }

    /// Runs `rackbus` on this machine, which must fail; what it said.
    pub fn bad(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(!output.status.success(), "rackbus {args:?} succeeded");
        String::from_utf8(output.stderr).unwrap()
    }

    /// What its process has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    fn start(&mut self, args: &[&str]) {
        let log = self.folder.join("log");
        let log = std::fs::File::options().create(true).append(true).open(log).unwrap();
        self.process = Some(self.command(args).stderr(log).spawn().unwrap());
    }

    /// Its process, which was started here.
    pub fn process(&mut self) -> &mut Child {
        self.process.as_mut().unwrap()
    }

    /// Ends its process as a crash would.
    pub fn crash(&mut self) {
        let mut process = self.process.take().unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// Borrows a function for a host from here.
    pub fn borrow(&self, function: &str, host: &str) -> Lease {
        serde_json::from_value(self.json(&["borrow", function, "--for", host])).unwrap()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// The machines of a rack.
pub struct Machines {
    folder: tempfile::TempDir,
    /// The machine that the control plane runs on.
    pub control: Machine,
    /// Where it is reached.
    pub url: String,
}

impl Machines {
    /// The rack that `text` describes, with its control plane running.
    pub fn start(text: &str) -> Machines {
        Machines::start_with(text, Path::new(env!("CARGO_BIN_EXE_rackbus")))
    }

    /// The same, where the control plane's machine has another version of `rackbus`.
    pub fn start_with(text: &str, program: &Path) -> Machines {
        let folder = tempfile::Builder::new().prefix("rb-").tempdir_in("/tmp").unwrap();
        let file = folder.path().join("rack.toml");
        std::fs::write(&file, text).unwrap();
        let listen = format!("127.0.0.1:{}", free_port());
        let mut control = Machine::new(folder.path().join("c"));
        control.program = program.to_owned();
        let mut machines = Machines { folder, control, url: format!("https://{listen}") };
        machines.begin_control();
        machines
    }

    /// Starts the control plane; returns when it answers.
    pub fn begin_control(&mut self) {
        let file = self.folder.path().join("rack.toml");
        let listen = self.url.strip_prefix("https://").unwrap();
        self.control.start(&["control", file.to_str().unwrap(), "--listen", listen]);
        self.wait(|machines| machines.control.run(&["status"]).status.success());
    }

    /// Kills the control plane and starts it again.
    pub fn restart_control(&mut self) {
        self.control.crash();
        self.begin_control();
    }

    /// A file with a new token for a host.
    pub fn token(&self, host: &str) -> PathBuf {
        let token = self.control.json(&["token", host])["token"].as_str().unwrap().to_owned();
        let path = self.folder.path().join(format!("{host}.token"));
        std::fs::write(&path, token).unwrap();
        path
    }

    /// A machine for a host, with nothing running on it.
    pub fn machine(&self, host: &str) -> Machine {
        Machine::new(self.folder.path().join(host))
    }

    /// A machine where somebody works and no part of the rack runs.
    pub fn desk(&self, user: &str) -> Machine {
        let folder = self.folder.path().join(format!("desk-{user}"));
        let mut machine = Machine::new(folder);
        machine.is_desk = true;
        machine
    }

    /// Starts a host's node on its machine, with a token if it has one; returns when the rack has it up.
    pub fn node(&self, machine: &mut Machine, host: &str, token: Option<&Path>) {
        self.begin_node(machine, host, token, &[]);
        self.wait(|machines| machines.state_of(host) == "up");
    }

    /// Starts a host's node on its machine, with a token if it has one, and with these arguments.
    pub fn begin_node(
        &self,
        machine: &mut Machine,
        host: &str,
        token: Option<&Path>,
        more: &[&str],
    ) {
        let listen = format!("127.0.0.1:{}", free_port());
        self.begin_node_at(machine, host, &listen, more, token);
    }

    /// The same, which listens at `listen`.
    pub fn begin_node_at(
        &self,
        machine: &mut Machine,
        host: &str,
        listen: &str,
        more: &[&str],
        token: Option<&Path>,
    ) {
        let mut args = vec!["node", "--host", host, "--join", &self.url, "--listen", listen];
        args.extend(more);
        args.extend(token.iter().flat_map(|token| ["--token-file", token.to_str().unwrap()]));
        machine.start(&args);
    }

    /// Starts a host's node, which listens at `listen`, with these arguments; returns when the rack has it up.
    pub fn node_at(
        &self,
        machine: &mut Machine,
        host: &str,
        listen: &str,
        more: &[&str],
        token: Option<&Path>,
    ) {
        self.begin_node_at(machine, host, listen, more, token);
        self.wait(|machines| machines.state_of(host) == "up");
    }

    /// A machine whose host's node has joined and is up.
    pub fn joined(&self, host: &str) -> Machine {
        let (mut machine, token) = (self.machine(host), self.token(host));
        self.node(&mut machine, host, Some(&token));
        machine
    }

    /// How a host is, as the control plane knows it.
    pub fn state_of(&self, host: &str) -> String {
        let status = self.control.json(&["status"]);
        let hosts = status["hosts"].as_array().unwrap();
        let found = hosts.iter().find(|it| it["host"] == host).unwrap();
        found["state"].as_str().unwrap().to_owned()
    }

    /// How a function is.
    pub fn function(&self, function: &str) -> Value {
        let devices = self.control.json(&["devices"]);
        let devices = devices.as_array().unwrap();
        devices.iter().find(|it| it["function"] == function).unwrap().clone()
    }

    /// Waits until something holds.
    pub fn wait(&self, holds: impl Fn(&Machines) -> bool) {
        let begun = Instant::now();
        while !holds(self) {
            assert!(begun.elapsed() < PATIENCE, "timed out: {}", self.control.log());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}
