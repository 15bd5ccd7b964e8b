//! Machines that stand for hosts, joined by a bridge in software.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rackbus_vm::{Guest, Machine, MachineSpec};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::rack::beside;
use crate::{Failure, Result, ensure};

/// The memory files of machines that bridges join. They are in shared memory, so that bridges map them, and go when
/// this is dropped.
#[derive(Debug)]
pub struct Memory(PathBuf);

impl Memory {
    /// A folder for them.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new() -> Result<Arc<Memory>> {
        static FOLDERS: AtomicU32 = AtomicU32::new(0);
        let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
        let folder = format!("/dev/shm/rackbus-metal-{}-{number}", std::process::id());
        std::fs::create_dir_all(&folder)?;
        Ok(Arc::new(Memory(folder.into())))
    }

    fn of(&self, machine: &str) -> PathBuf {
        self.0.join(machine)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // What is left is seen in shared memory; nobody can do better here.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A `rackbus ntb` that runs; it ends when this is dropped.
#[derive(Debug)]
pub struct Bridge {
    child: Child,
    dir: PathBuf,
    ends: [String; 2],
    memory: Arc<Memory>,
}

/// The names of the machines of a bridge that is alone.
pub const ENDS: [&str; 2] = ["a", "b"];

impl Bridge {
    /// Starts a bridge whose sockets are in `dir`, between two machines named as [`ENDS`], with more options of
    /// `rackbus ntb`.
    ///
    /// # Errors
    /// When it does not start: with what it said.
    pub fn start(dir: &Path, options: &[&str]) -> Result<Bridge> {
        Bridge::between(ENDS, &Memory::new()?, dir, options)
    }

    /// Starts a bridge between two of several machines with memory in `memory`; a pair has one bridge.
    ///
    /// # Errors
    /// When it does not start: with what it said.
    pub fn between(
        ends: [&str; 2],
        memory: &Arc<Memory>,
        dir: &Path,
        options: &[&str],
    ) -> Result<Bridge> {
        std::fs::create_dir_all(dir)?;
        let ends = ends.map(str::to_owned);
        let mut command = Command::new(beside("rackbus")?);
        command.arg("ntb");
        for (port, end) in ["a", "b"].iter().zip(&ends) {
            command.arg(format!("--{port}-socket")).arg(socket(dir, &ends, end));
            command.arg(format!("--{port}-memory")).arg(memory.of(end));
        }
        command.arg("--counters").arg(socket(dir, &ends, "counters")).args(options);
        let log = socket(dir, &ends, "log");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(File::create(&log)?);
        let mut child = command.spawn()?;
        let mut said = String::new();
        if let Some(out) = child.stdout.take() {
            BufReader::new(out).read_line(&mut said)?;
        }
        if !said.starts_with("ready:") {
            child.wait()?;
            let errors = std::fs::read_to_string(log)?;
            return Err(Failure(format!("rackbus ntb does not start: {}", errors.trim())));
        }
        Ok(Bridge { child, dir: dir.to_owned(), ends, memory: memory.clone() })
    }

    /// The machine of an end: its memory is the end's, and it has the end as its first function.
    #[must_use]
    pub fn machine(&self, end: &str, guest: Guest) -> MachineSpec {
        let mut spec = MachineSpec::new(end, guest);
        spec.memory_file = Some(self.memory.of(end));
        self.plug(&mut spec);
        spec
    }

    /// Gives a machine of another bridge this one's end as well.
    pub fn plug(&self, machine: &mut MachineSpec) {
        machine.functions.push(socket(&self.dir, &self.ends, &machine.name));
    }

    /// Where its machines have their folders.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What went through it, as `rackbus ntb show` says.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn counters(&self) -> Result<Value> {
        let mut command = Command::new(beside("rackbus")?);
        command.args(["--json", "ntb", "show"]).arg(socket(&self.dir, &self.ends, "counters"));
        let output = command.stdin(Stdio::null()).output()?;
        ensure!(output.status.success(), "rackbus ntb show: {}", output.status);
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(i32::try_from(self.child.id()).unwrap_or(0)) {
            // It fails only where the process has ended.
            let _ = kill_process(pid, Signal::TERM);
        }
        let _ = self.child.wait();
    }
}

/// A socket, or a file, of the bridge between two machines.
fn socket(dir: &Path, [a, b]: &[String; 2], what: &str) -> PathBuf {
    dir.join(format!("{a}-{b}.{what}"))
}

/// The PCI address of a machine's bridge.
///
/// # Errors
/// When it has none.
pub fn bridge_address(machine: &mut Machine) -> Result<String> {
    let address = machine.run("lspci -D -d 8086:201c | cut -d' ' -f1")?;
    ensure!(!address.is_empty(), "{}: no function 8086:201c", machine.name());
    Ok(address)
}
