//! A rack of real processes: `rackbus up` and the command line.
//!
//! Everything that is started carries the rack's run directory in its environment, so that what
//! is left over, even after a crash of the test, is found and ended, and nothing else is.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::interrupt::when_interrupted;
use crate::{CheckFailure, Result, ensure};

/// How long hosts may take to come up (again).
const START: Duration = Duration::from_secs(60);

/// A rack whose nodes run as processes on this machine.
#[derive(Debug)]
pub struct RackProcesses {
    rackbus: PathBuf,
    run_dir: PathBuf,
    /// The testbed's folder and the machine of it that commands run on; `None` on this machine, where the rack
    /// was started here and ends with this.
    machine: Option<(PathBuf, String)>,
}

impl RackProcesses {
    /// Starts the rack of `file` with `rackbus up`; its state is kept in `dir/state`.
    ///
    /// # Errors
    /// When the rack does not come up: with what it said.
    pub fn start(file: &Path, dir: &Path) -> Result<RackProcesses> {
        let rackbus = beside("rackbus")?;
        // Sockets need short paths, and a build folder may be deep.
        let run_dir = std::env::temp_dir().join(format!("rackbus-{}", std::process::id()));
        let rack = RackProcesses { rackbus, run_dir, machine: None };
        rack.end_when_interrupted();
        let state = dir.join("state").display().to_string();
        let file = file.display().to_string();
        rack.json(&["up", &file, "--state-dir", &state])?;
        Ok(rack)
    }

    /// Waits until these hosts' nodes are connected.
    ///
    /// # Errors
    /// When they are not within a minute.
    pub fn wait_hosts(&self, hosts: &[&str]) -> Result<()> {
        self.wait("the hosts come up", START, |rack| {
            let status = rack.json(&["status"]).ok()?;
            let up = |host: &&str| {
                let all = status["hosts"].as_array().into_iter().flatten();
                all.filter(|h| h["host"] == **host).any(|h| h["state"] == "up")
            };
            hosts.iter().all(up).then_some(())
        })
    }

    /// Tries until `ready` gives something.
    ///
    /// # Errors
    /// When it does not within `limit`.
    pub fn wait<T>(
        &self,
        what: &str,
        limit: Duration,
        ready: impl Fn(&RackProcesses) -> Option<T>,
    ) -> Result<T> {
        let begun = Instant::now();
        loop {
            if let Some(value) = ready(self) {
                return Ok(value);
            }
            ensure!(begun.elapsed() < limit, "{what}: not within {limit:?}; {}", self.tail());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The run directory, with all sockets.
    #[must_use]
    pub fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// Runs a command of the command line as it is.
    ///
    /// # Errors
    /// When the program cannot be run.
    pub fn output(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = Command::new(&self.rackbus);
        match &self.machine {
            None => command.env("RACKBUS_RUN_DIR", &self.run_dir),
            Some((dir, machine)) => {
                command.args(["testbed", "on", machine, "--dir"]).arg(dir);
                command.arg("--").arg(&self.rackbus)
            }
        };
        Ok(command.args(arguments).stdin(Stdio::null()).output()?)
    }

    /// The rack as it is seen on `machine` of the testbed in `dir`.
    ///
    /// # Errors
    /// When there is no `rackbus` beside this program.
    pub fn on(dir: &Path, machine: &str) -> Result<RackProcesses> {
        let run_dir = dir.join(machine).join("run");
        let machine = Some((dir.to_owned(), machine.to_owned()));
        Ok(RackProcesses { rackbus: beside("rackbus")?, run_dir, machine })
    }

    /// Runs a command with `--json` and gives what it says.
    ///
    /// # Errors
    /// When it fails: with its own words.
    pub fn json(&self, arguments: &[&str]) -> Result<Value> {
        let mut all = vec!["--json"];
        all.extend(arguments);
        let output = self.output(&all)?;
        let said = String::from_utf8_lossy(&output.stderr);
        let command = format!("rackbus {}", arguments.join(" "));
        let value: Value = serde_json::from_slice(&output.stdout)
            .map_err(|e| CheckFailure(format!("{command}: no JSON ({e}): {}", said.trim())))?;
        let error = value["error"].as_str().unwrap_or_default();
        ensure!(output.status.success(), "{command}: {error} {}", said.trim());
        Ok(value)
    }

    /// Runs a command that must be refused, and gives the one line that says why.
    ///
    /// # Errors
    /// When it is not refused with exit code 1 and one line.
    pub fn refused(&self, arguments: &[&str]) -> Result<String> {
        let output = self.output(arguments)?;
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        let code = output.status.code();
        ensure!(code == Some(1), "rackbus {}: exit code {code:?}, not 1", arguments.join(" "));
        ensure!(said.lines().count() == 1, "more than one line of error: {said}");
        Ok(said)
    }

    /// Borrows a function for a host: its lease and its vfio-user socket.
    ///
    /// # Errors
    /// When it is refused.
    pub fn borrow(&self, function: &str, host: &str) -> Result<(u64, PathBuf)> {
        let lease = self.json(&["borrow", function, "--for", host])?;
        let number = lease["lease"].as_u64();
        let socket = lease["socket"].as_str().map(PathBuf::from);
        number.zip(socket).ok_or_else(|| {
            CheckFailure(format!("borrow {function}: no lease and socket in {lease}"))
        })
    }

    /// Restarts nodes in place; their rows. A machine that is busy may keep an engine or a conversation from coming to
    /// rest in the time that a pause may take: then the node goes on as it was, and is asked again.
    ///
    /// # Errors
    /// When one is refused for something else, or too often.
    pub fn restart(&self, hosts: &[&str]) -> Result<Vec<Value>> {
        const ATTEMPTS: usize = 20;
        let one = |host: &str| -> Result<Value> {
            for _ in 0..ATTEMPTS {
                match self.json(&["restart", host]) {
                    Ok(rows) => return Ok(rows[0].clone()),
                    Err(error) if busy(&error.to_string()) => {}
                    Err(error) => return Err(error),
                }
            }
            Err(CheckFailure(format!("{host}: asked for a restart {ATTEMPTS} times")))
        };
        hosts.iter().map(|host| one(host)).collect()
    }

    /// Returns a lease by `rackbus return`.
    ///
    /// # Errors
    /// When it is refused.
    pub fn give_back(&self, lease: u64) -> Result<()> {
        self.json(&["return", &lease.to_string()]).map(drop)
    }

    /// One function, as `rackbus devices` shows it.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn device(&self, function: &str) -> Result<Value> {
        let devices = self.json(&["devices"])?;
        let found = devices.as_array().into_iter().flatten().find(|d| d["function"] == function);
        found.cloned().ok_or_else(|| CheckFailure(format!("no {function} in {devices}")))
    }

    /// The process of a host's node, or of the control plane (`control`).
    ///
    /// # Errors
    /// When there is none.
    pub fn process(&self, role: &str) -> Result<Pid> {
        let file = match role {
            "control" => self.run_dir.join("control.pid"),
            host => self.run_dir.join(host).join("node.pid"),
        };
        let pid = fs::read_to_string(&file)?.trim().parse().ok().and_then(Pid::from_raw);
        let found = pid.filter(|pid| running(*pid));
        found.ok_or_else(|| CheckFailure(format!("{}: no such process runs", file.display())))
    }

    /// Kills a process of the rack, as a crash would, and waits until it is gone.
    ///
    /// # Errors
    /// When there is none.
    pub fn kill(&self, role: &str) -> Result<()> {
        let pid = self.process(role)?;
        kill_process(pid, Signal::KILL)?;
        let gone = |_: &RackProcesses| (!running(pid)).then_some(());
        self.wait("the killed process ends", Duration::from_secs(30), gone)
    }

    /// Kills the process that serves a guest's device, as a crash would, once it has a standby; the
    /// standby's process id.
    ///
    /// # Errors
    /// When there is none, or no standby within a minute.
    pub fn kill_helper(&self, guest: &str) -> Result<Pid> {
        // One that has just begun does not know yet what the other one knows.
        let pair = |rack: &RackProcesses| {
            let (serving, standby) = rack.helpers(guest)?;
            let said = format!("a standby follows standby={}", standby.as_raw_nonzero());
            rack.helper_said(&said).then_some((serving, standby))
        };
        let (serving, standby) = self.wait("the helper has a standby", START, pair)?;
        kill_process(serving, Signal::KILL)?;
        let gone = |_: &RackProcesses| (!running(serving)).then_some(());
        self.wait("the killed process ends", Duration::from_secs(30), gone)?;
        Ok(standby)
    }

    /// The process that serves a guest's device, and its standby: its child.
    #[must_use]
    pub fn helpers(&self, guest: &str) -> Option<(Pid, Pid)> {
        let is_helper = |line: &[u8]| {
            let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
            let has = |wanted: &[&[u8]]| words.windows(wanted.len()).any(|it| it == wanted);
            has(&[b"guest", b"serve"]) && has(&[b"--host", guest.as_bytes()])
        };
        let of_rack = marked(&self.run_dir);
        let helpers: Vec<Pid> = of_rack.into_iter().filter(|pid| is_helper(&words(*pid))).collect();
        let standby = helpers.iter().find_map(|pid| {
            let parent = parent(*pid)?;
            (helpers.contains(&parent) && running(*pid)).then_some((parent, *pid))
        });
        standby.filter(|(serving, _)| running(*serving))
    }

    /// Starts a killed process of the rack again.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn revive(&self, role: &str) -> Result<()> {
        let mut command = Command::new(&self.rackbus);
        match role {
            "control" => command.arg("control"),
            host => command.args(["node", "--host", host]),
        };
        let log = File::options().append(true).open(self.log(role))?;
        command.env("RACKBUS_RUN_DIR", &self.run_dir).stdin(Stdio::null()).stdout(Stdio::null());
        // It is ended with the rack, as those that `up` started.
        drop(command.stderr(log).spawn()?);
        Ok(())
    }

    /// Processor time that a process has used, in clock ticks (10 ms).
    ///
    /// # Errors
    /// When it does not run.
    pub fn ticks(&self, role: &str) -> Result<u64> {
        let pid = self.process(role)?;
        let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid()))?;
        // proc(5): utime and stime are fields 14 and 15; the name, field 2, may hold spaces.
        let fields: Vec<&str> =
            stat.rsplit(')').next().unwrap_or_default().split_ascii_whitespace().collect();
        let field = |at: usize| fields.get(at).and_then(|f| f.parse::<u64>().ok()).unwrap_or(0);
        Ok(field(11) + field(12))
    }

    /// The last lines of the rack's logs.
    #[must_use]
    pub fn tail(&self) -> String {
        let mut text = String::new();
        if let Some((dir, machine)) = &self.machine {
            return fs::read_to_string(dir.join(machine).join("log")).unwrap_or_default();
        }
        let mut logs: Vec<(String, PathBuf)> = ["control", "alpha", "beta", "gamma"]
            .map(|role| (role.to_owned(), self.log(role)))
            .into();
        logs.extend(self.helper_logs().into_iter().map(|path| {
            (path.file_stem().unwrap_or_default().to_string_lossy().into_owned(), path)
        }));
        for (whose, path) in logs {
            let log = fs::read_to_string(path).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(8)..];
            text += &format!("the end of {whose}'s log:\n  {}\n", last.join("\n  "));
        }
        text
    }

    /// Copies the rack's logs and events to `dir`, for people.
    ///
    /// # Errors
    /// When they cannot be read or written.
    pub fn keep_logs(&self, dir: &Path) -> Result<()> {
        for role in ["control", "alpha", "beta", "gamma"] {
            fs::copy(self.log(role), dir.join(format!("{role}.log")))?;
        }
        // It may not answer any more.
        let events = self.output(&["events", "--json"]).map(|output| output.stdout);
        fs::write(dir.join("events.json"), events.unwrap_or_default())?;
        Ok(())
    }

    /// The logs of what serves the fabric of guests.
    fn helper_logs(&self) -> Vec<PathBuf> {
        let folders = ["alpha", "beta", "gamma"].map(|host| self.run_dir.join(host).join("fabric"));
        let entries = folders.into_iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten();
        let files = entries.flatten().map(|entry| entry.path());
        files.filter(|path| path.extension().is_some_and(|it| it == "log")).collect()
    }

    /// Whether a helper has logged a line that ends so.
    fn helper_said(&self, words: &str) -> bool {
        let logs = self.helper_logs().into_iter().filter_map(|path| fs::read_to_string(path).ok());
        logs.into_iter().any(|log| log.lines().any(|line| line.trim_end().ends_with(words)))
    }

    fn log(&self, role: &str) -> PathBuf {
        match role {
            "control" => self.run_dir.join("control.log"),
            host => self.run_dir.join(host).join("node.log"),
        }
    }

    /// An interrupted test leaves no rack behind.
    fn end_when_interrupted(&self) {
        let run_dir = self.run_dir.clone();
        when_interrupted(move || {
            kill_all(&run_dir, |_| true);
            let _ = fs::remove_dir_all(&run_dir);
        });
    }
}

/// Whether a restart in place was refused for what a busy machine takes.
fn busy(said: &str) -> bool {
    said.contains("does not answer") || said.contains("did not come to rest")
}

/// The processes of a rack, those whose environment names its run directory.
fn marked(run_dir: &Path) -> Vec<Pid> {
    let mark = format!("RACKBUS_RUN_DIR={}", run_dir.display());
    let own = std::process::id().to_string();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(pid) = name.parse().ok().and_then(Pid::from_raw) else { continue };
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        let marked = environment.split(|b| *b == 0).any(|v| v == mark.as_bytes());
        if name != own && marked {
            found.push(pid);
        }
    }
    found
}

/// Kills the processes of a rack, as chosen.
fn kill_all(run_dir: &Path, chosen: impl Fn(Pid) -> bool) {
    for pid in marked(run_dir).into_iter().filter(|pid| chosen(*pid)) {
        // It may have ended already.
        let _ = kill_process(pid, Signal::KILL);
    }
}

impl Drop for RackProcesses {
    fn drop(&mut self) {
        if self.machine.is_some() {
            return;
        }
        // VMs first, then the rack in order; what is left over after that is killed.
        kill_all(&self.run_dir, is_vm);
        let _ = self.output(&["down"]);
        kill_all(&self.run_dir, |_| true);
        let _ = fs::remove_dir_all(&self.run_dir);
    }
}

fn is_vm(pid: Pid) -> bool {
    words(pid).windows(6).any(|part| part == b"\0-qmp\0")
}

/// What a process was called with, each word with a zero behind it.
fn words(pid: Pid) -> Vec<u8> {
    fs::read(format!("/proc/{}/cmdline", pid.as_raw_pid())).unwrap_or_default()
}

fn parent(pid: Pid) -> Option<Pid> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).ok()?;
    // proc(5): behind the name, which may hold anything, the state and then the parent.
    let number = stat.rsplit(')').next()?.split_ascii_whitespace().nth(1)?;
    number.parse().ok().and_then(Pid::from_raw)
}

/// Whether a process is there and not a zombie.
fn running(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
}

/// The program of this name that was built together with this one.
///
/// # Errors
/// When it was not.
pub fn beside(program: &str) -> Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name(program);
    ensure!(path.exists(), "no {}: build it (cargo build --release)", path.display());
    Ok(path)
}
