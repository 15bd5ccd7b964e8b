//! A rack of real processes in folders of its own, for one test.
//!
//! What is waited for is an event (a process ends, the control plane announces a change), never
//! a length of time; [`PATIENCE`] only ends a test that would hang.

#![allow(dead_code, reason = "each test binary uses its part")]

pub mod lab;
pub mod libfabric;
pub mod load;
pub mod machines;
pub mod pcapng;
pub mod programs;
pub mod relay;
pub mod segments;

use std::future::Future;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rackbus_control::ControlClient;
use rackbus_control::api::{Device, DeviceState, HostState, Lease, LeaseStage};
use rackbus_driver::{Drive, DriveError, DriveOptions};
use rackbus_pci::vfio_user::ClientError;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};
use serde_json::Value;

/// After this long a test fails instead of waiting on.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Says that something is left out, and why, also where the output of tests that pass is kept back.
pub fn not_tested(why: &str) {
    let _ = writeln!(std::io::stderr(), "\n*** NOT TESTED: {why} ***\n");
}

/// What the rack files of tests say of leases that are to live on while a busy machine keeps their borrower from renewing them.
const LONG_LEASES: &str = "lease_ttl = \"15 s\"";

/// Three hosts; two drives of 16 MiB, one in memory and one in a file. No test waits until a lease of it expires: those
/// that do say [how long](with_leases_of) leases live there.
pub const THREE_HOSTS: &str = r#"
name = "lab"

[control]
lease_ttl = "15 s"
return_grace = "500 ms"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "memory"

[hosts.alpha.devices.nvme1]
kind = "nvme"
size = "16 MiB"
backing = "file"

[hosts.beta]
[hosts.gamma]
"#;

/// The same rack file, with another time to live of its leases, such as "2 s".
pub fn with_leases_of(ttl: &str, rack: &str) -> String {
    assert!(rack.contains(LONG_LEASES), "{rack}");
    rack.replace(LONG_LEASES, &format!("lease_ttl = \"{ttl}\""))
}

/// A process that is looked at from outside.
#[derive(Debug)]
pub struct Process {
    pub pid: Pid,
    handle: OwnedFd,
}

impl Process {
    /// That of a number.
    pub fn of(pid: Pid) -> Process {
        let handle = rustix::process::pidfd_open(pid, PidfdFlags::empty()).unwrap();
        Process { pid, handle }
    }

    /// Sends it a signal. With one that stops it, returns when each of its threads has stopped: on a busy machine, some
    /// of them run on for a while after the signal was sent.
    pub fn signal(&self, signal: Signal) {
        rustix::process::pidfd_send_signal(&self.handle, signal).unwrap();
        let begun = Instant::now();
        while signal == Signal::STOP && self.runs() {
            assert!(begun.elapsed() < PATIENCE, "{:?} does not stop", self.pid);
            std::thread::yield_now();
        }
    }

    /// Whether a thread of it has neither stopped nor ended.
    fn runs(&self) -> bool {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.pid.as_raw_pid()));
        threads.into_iter().flatten().flatten().any(|thread| {
            let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            // The name before the state may have brackets and blanks of its own.
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            state.is_some_and(|state| !"TtZX".contains(state))
        })
    }

    /// Whether it has ended.
    pub fn is_gone(&self) -> bool {
        self.wait(Duration::ZERO)
    }

    /// Waits until it has ended; false when it takes too long.
    pub fn wait(&self, limit: Duration) -> bool {
        let mut fds = [PollFd::new(&self.handle, PollFlags::IN)];
        let limit = rustix::time::Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&limit)).unwrap() == 1
    }

    /// Whether it has memory of that name mapped, or open.
    pub fn has_memory(&self, name: &str) -> bool {
        let folder = format!("/proc/{}", self.pid.as_raw_nonzero());
        let maps = std::fs::read_to_string(format!("{folder}/maps")).unwrap();
        let files = std::fs::read_dir(format!("{folder}/fd")).unwrap();
        let mut open = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
        let named = format!("memfd:{name} ");
        maps.contains(&named) || open.any(|file| file.to_string_lossy().contains(&named))
    }

    /// Ends it as a crash would; returns when it is gone.
    pub fn crash(self) {
        self.signal(Signal::KILL);
        assert!(self.wait(PATIENCE), "a killed process does not end");
    }
}

/// A rack of this test.
pub struct Rack {
    folder: tempfile::TempDir,
    runtime: tokio::runtime::Runtime,
    restarted: Vec<Child>,
}

impl Rack {
    /// A rack file with folders around it, nothing started.
    pub fn described(text: &str) -> Rack {
        // Socket paths are short, so the folder's must be.
        let folder = tempfile::Builder::new().prefix("rb-").tempdir_in("/tmp").unwrap();
        std::fs::write(folder.path().join("rack.toml"), text).unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        Rack { folder, runtime: runtime.unwrap(), restarted: Vec::new() }
    }

    /// Starts a rack whose file has this text, and waits until all hosts are up.
    pub fn up(text: &str) -> Rack {
        let rack = Rack::described(text);
        rack.good(&["up", &rack.file()]);
        rack
    }

    pub fn file(&self) -> String {
        self.folder.path().join("rack.toml").display().to_string()
    }

    pub fn run_dir(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    /// Removes the database of a control plane that was killed.
    pub fn lose_database(&self) {
        for file in self.database_files() {
            let _ = std::fs::remove_file(file);
        }
    }

    /// Copies the database of a control plane that was killed.
    pub fn save_database(&self) {
        let saved = self.folder.path().join("saved");
        std::fs::create_dir_all(&saved).unwrap();
        for file in self.database_files().iter().filter(|file| file.exists()) {
            std::fs::copy(file, saved.join(file.file_name().unwrap())).unwrap();
        }
    }

    /// Puts the copy in its place.
    pub fn restore_database(&self) {
        for file in self.database_files() {
            let saved = self.folder.path().join("saved").join(file.file_name().unwrap());
            if saved.exists() {
                std::fs::copy(saved, file).unwrap();
            }
        }
    }

    /// The control plane's database: the file, and the log that SQLite keeps beside it.
    fn database_files(&self) -> [PathBuf; 2] {
        ["control.db", "control.db-wal"].map(|name| self.folder.path().join("state").join(name))
    }

    /// `rackbus` with this rack's folders, not started yet.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rackbus"));
        command
            .args(args)
            .env("RACKBUS_RUN_DIR", self.run_dir())
            .env("RACKBUS_STATE_DIR", self.folder.path().join("state"))
            .env("PATH", programs::path())
            .stdin(Stdio::null());
        command
    }

    /// Runs `rackbus` for this rack until it ends, whatever its exit code is.
    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Restarts a node in place; its row.
    pub fn restart_in_place(&self, host: &str) -> Value {
        restarted(|| self.run(&["restart", host, "--json"]), || self.logs())
    }

    /// Asks for a restart of a node in place, which must be refused, and not because the machine is busy; its one line of
    /// error.
    pub fn restart_refused(&self, host: &str) -> String {
        not_for_being_busy(|| self.bad(1, &["restart", host]))
    }

    /// Runs `rackbus`, which must succeed; what it printed.
    pub fn good(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "rackbus {args:?}: {errors}{}", self.logs());
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs `rackbus --json`, which must succeed; what it printed.
    pub fn json(&self, args: &[&str]) -> Value {
        let text = self.good(&[args, &["--json"]].concat());
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("rackbus {args:?}: {e}: {text}"))
    }

    /// Runs `rackbus`, which must fail with `code`; its one line of error.
    pub fn bad(&self, code: i32, args: &[&str]) -> String {
        let output = self.run(args);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "rackbus {args:?}: {errors}");
        let told: Vec<&str> = errors.lines().filter(|l| l.starts_with("rackbus: ")).collect();
        assert_eq!(told.len(), 1, "rackbus {args:?} says not one line: {errors}");
        assert!(told[0].contains("; "), "no remedy: {errors}");
        told[0].to_owned()
    }

    /// Borrows a function for `host`, which must succeed.
    pub fn borrow(&self, function: &str, host: &str) -> Lease {
        serde_json::from_value(self.json(&["borrow", function, "--for", host])).unwrap()
    }

    /// Returns a lease, which must succeed; as it ended.
    pub fn give_back(&self, lease: &Lease) -> Lease {
        serde_json::from_value(self.json(&["return", &lease.lease.to_string()])).unwrap()
    }

    /// The living process of the control plane (`None`) or of a host's node.
    pub fn process(&self, host: Option<&str>) -> Process {
        let file = match host {
            Some(host) => self.run_dir().join(host).join("node.pid"),
            None => self.run_dir().join("control.pid"),
        };
        let text = std::fs::read_to_string(&file).unwrap();
        Process::of(Pid::from_raw(text.trim().parse().unwrap()).unwrap())
    }

    /// The control plane and the nodes of `hosts`, by their process id files.
    pub fn processes(&self, hosts: &[&str]) -> Vec<Process> {
        let nodes = hosts.iter().map(|host| self.process(Some(host)));
        std::iter::once(self.process(None)).chain(nodes).collect()
    }

    /// Starts the control plane (`None`) or a host's node again; waits until every host is up.
    pub fn restart(&mut self, host: Option<&str>) {
        let args = match host {
            Some(host) => vec!["node", "--host", host],
            None => vec!["control"],
        };
        let command = self.command(&args);
        self.begin(command);
    }

    /// Starts the control plane again, such that files that may not grow are an error to it (EFBIG)
    /// and no signal that ends it.
    pub fn restart_on_small_disk(&mut self) {
        let rackbus = self.command(&["control"]);
        let mut command = Command::new("sh");
        command.args(["-c", "trap '' XFSZ; exec \"$0\" control"]).arg(rackbus.get_program());
        command.envs(rackbus.get_envs().filter_map(|(name, value)| Some((name, value?))));
        self.begin(command);
    }

    fn begin(&mut self, mut command: Command) {
        let log = self.folder.path().join("restarted.log");
        let log = std::fs::File::options().create(true).append(true).open(log).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn();
        self.restarted.push(child.unwrap());
    }

    /// Waits until the nodes of `hosts` are connected.
    pub fn wait_up(&self, hosts: &[&str]) {
        let client = self.client();
        self.block(async {
            loop {
                // A control plane that does not listen yet has no events either.
                if let Ok(status) = client.status().await
                    && status
                        .hosts
                        .iter()
                        .filter(|h| hosts.contains(&h.host.as_str()))
                        .all(|h| h.state == HostState::Up)
                {
                    return;
                }
                tokio::task::yield_now().await;
            }
        });
    }

    /// A client of the rack's control plane.
    pub fn client(&self) -> ControlClient {
        ControlClient::new(&self.run_dir().join("control.sock"))
    }

    /// Runs `task` to its end, at most [`PATIENCE`].
    pub fn block<T>(&self, task: impl Future<Output = T>) -> T {
        let outcome = self.runtime.block_on(async { tokio::time::timeout(PATIENCE, task).await });
        outcome.unwrap_or_else(|_| panic!("nothing happens any more{}", self.logs()))
    }

    /// Waits until `ready` gives a value; looked at again at each change that is told by the control plane.
    pub fn wait<T>(&self, ready: impl AsyncFn(&ControlClient) -> Option<T>) -> T {
        let client = self.client();
        self.block(async {
            loop {
                // Listening before looking, so that no change is missed.
                let Ok(mut changes) = client.changes().await else {
                    tokio::task::yield_now().await;
                    continue;
                };
                loop {
                    if let Some(value) = ready(&client).await {
                        return value;
                    }
                    if changes.next().await.is_none() {
                        break;
                    }
                }
            }
        })
    }

    /// Waits until a function stands at `state`.
    pub fn wait_device(&self, function: &str, state: DeviceState) -> Device {
        self.wait(async |client| {
            let devices = client.devices().await.ok()?;
            devices.into_iter().find(|d| d.function == function && d.state == state)
        })
    }

    /// Waits until a lease stands at `stage`.
    pub fn wait_lease(&self, lease: u64, stage: LeaseStage) -> Lease {
        self.wait(async |client| client.lease(lease).await.ok().filter(|l| l.stage == stage))
    }

    /// What the processes logged, for a failing test's message.
    pub fn logs(&self) -> String {
        let run = self.run_dir();
        let mut files = vec![run.join("control.log"), self.folder.path().join("restarted.log")];
        files.extend(["alpha", "beta", "gamma"].map(|host| run.join(host).join("node.log")));
        let mut all = String::new();
        for file in files {
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            all.push_str(&format!("\n--- {}\n{text}", file.display()));
        }
        all
    }
}

impl Drop for Rack {
    fn drop(&mut self) {
        // What a failed test left running; there may be nothing.
        let _ = self.command(&["down"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
        for child in &mut self.restarted {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The socket of an active lease.
pub fn socket(lease: &Lease) -> &Path {
    assert_eq!(lease.stage, LeaseStage::Active, "{lease:?}");
    Path::new(lease.socket.as_deref().unwrap())
}

/// Opens the drive of a lease.
///
/// A connection that this process has closed stays open for a moment longer where another test of it starts a
/// program just then: between fork and exec that has a copy.
pub fn open(lease: &Lease) -> Drive {
    let begun = Instant::now();
    loop {
        match try_open(lease) {
            Err(DriveError::Client(ClientError::Refused(Errno::BUSY)))
                if begun.elapsed() < PATIENCE => {}
            opened => return opened.unwrap(),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Opens the drive of a lease, or says why not.
pub fn try_open(lease: &Lease) -> Result<Drive, DriveError> {
    Drive::open(socket(lease), DriveOptions { depth: 4, data: 1 << 20 })
}

/// Bytes that differ from block to block and from seed to seed.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..length).map(|_| next()).collect()
}

/// How often a restart in place is asked for again that was refused because the machine is busy.
const RESTARTS: usize = 20;

/// Whether a restart in place was refused because the machine is busy: that may keep an engine from answering in the time
/// that a pause may take. The node goes on as it was then.
fn is_busy(said: &str) -> bool {
    // Also of storage, which may take its time for what it was asked for.
    said.contains("does not answer") || said.contains("did not come to rest")
}

/// Asks for a restart in place again and again, until it is refused for another reason than that the machine is busy; what
/// was said.
pub fn not_for_being_busy(ask: impl Fn() -> String) -> String {
    let mut said = std::iter::repeat_with(ask).take(RESTARTS);
    said.find(|said| !is_busy(said)).expect("a machine is always busy")
}

/// Asks for a restart in place, which must be done; its row. Asked again where the machine is busy.
pub fn restarted(ask: impl Fn() -> Output, log: impl Fn() -> String) -> Value {
    for _ in 0..RESTARTS {
        let output = ask();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            let rows: Value = serde_json::from_str(&said).unwrap();
            return rows[0].clone();
        }
        let said = format!("{said}{errors}");
        assert!(is_busy(&said), "{said}{}", log());
    }
    panic!("it was asked for a restart {RESTARTS} times: {}", log());
}
