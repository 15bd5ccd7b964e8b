//! A bridge in software between two machines: the process `rackbus ntb`, and the files that are the machines' memory.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::error::io;
use crate::metal::MachineSpec;
use crate::{GuestRelease, Result, VmError};

/// The memory files of machines that bridges join. They are in shared memory, so that bridges can map them, and are
/// removed when this is dropped.
#[derive(Debug)]
pub struct MemoryFiles(PathBuf);

impl MemoryFiles {
    /// A folder for them.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new() -> Result<Arc<MemoryFiles>> {
        static FOLDERS: AtomicU32 = AtomicU32::new(0);
        let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
        let folder =
            PathBuf::from(format!("/dev/shm/rackbus-metal-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).map_err(io("make", &folder))?;
        Ok(Arc::new(MemoryFiles(folder)))
    }

    fn of(&self, machine: &str) -> PathBuf {
        self.0.join(machine)
    }
}

impl Drop for MemoryFiles {
    fn drop(&mut self) {
        // What cannot be removed stays visible in /dev/shm; there is nobody to report it to here.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A `rackbus ntb` that runs; it ends when this is dropped.
#[derive(Debug)]
pub struct BridgeProcess {
    program: PathBuf,
    child: Child,
    dir: PathBuf,
    ends: [String; 2],
    memory: Arc<MemoryFiles>,
}

impl BridgeProcess {
    /// Starts the bridge between the machines named `ends`, whose memory is in `memory`; its sockets and its log are
    /// in `dir`. `program` is the `rackbus` to run, `options` are more options of `rackbus ntb`.
    ///
    /// # Errors
    /// When it does not start: with what it wrote.
    pub fn start(
        program: &Path,
        ends: [&str; 2],
        memory: &Arc<MemoryFiles>,
        dir: &Path,
        options: &[&str],
    ) -> Result<BridgeProcess> {
        std::fs::create_dir_all(dir).map_err(io("make", dir))?;
        let ends = ends.map(str::to_owned);
        let mut command = Command::new(program);
        command.arg("ntb");
        for (port, end) in ["a", "b"].iter().zip(&ends) {
            command.arg(format!("--{port}-socket")).arg(file(dir, &ends, end));
            command.arg(format!("--{port}-memory")).arg(memory.of(end));
        }
        command.arg("--counters").arg(file(dir, &ends, "counters")).args(options);
        let log = file(dir, &ends, "log");
        let log_file = File::create(&log).map_err(io("create", &log))?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log_file);
        let child = command.spawn().map_err(io("start", program))?;
        let (dir, memory) = (dir.to_owned(), memory.clone());
        // However this ends, the process does not outlive what is returned.
        let mut bridge = BridgeProcess { program: program.to_owned(), child, dir, ends, memory };
        let mut said = String::new();
        if let Some(out) = bridge.child.stdout.take() {
            BufReader::new(out).read_line(&mut said).map_err(io("read from", program))?;
        }
        if !said.starts_with("ready:") {
            drop(bridge);
            let errors = std::fs::read_to_string(&log).map_err(io("read", &log))?;
            let error = format!("'rackbus ntb' does not start: {}", errors.trim());
            return Err(VmError::Invalid(error));
        }
        Ok(bridge)
    }

    /// The machine of an end: its memory is the end's, and the end is its first function.
    #[must_use]
    pub fn machine(&self, end: &str, guest: GuestRelease) -> MachineSpec {
        let mut spec = MachineSpec::new(end, guest);
        spec.memory_file = Some(self.memory.of(end));
        self.plug(&mut spec);
        spec
    }

    /// Gives a machine of another bridge this one's end as well.
    pub fn plug(&self, machine: &mut MachineSpec) {
        machine.functions.push(file(&self.dir, &self.ends, &machine.name));
    }

    /// The folder of its sockets.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What went through it, as `rackbus ntb show --json` prints it.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn counters(&self) -> Result<Value> {
        let mut command = Command::new(&self.program);
        command.args(["--json", "ntb", "show"]).arg(file(&self.dir, &self.ends, "counters"));
        let output = command.stdin(Stdio::null()).output().map_err(io("run", &self.program))?;
        let protocol = |detail: String| VmError::Protocol { peer: "'rackbus ntb show'", detail };
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            return Err(protocol(format!("{}: {}", output.status, errors.trim())));
        }
        serde_json::from_slice(&output.stdout).map_err(|error| protocol(error.to_string()))
    }
}

impl Drop for BridgeProcess {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(i32::try_from(self.child.id()).unwrap_or(0)) {
            // It fails only where the process has ended.
            let _ = kill_process(pid, Signal::TERM);
        }
        let _ = self.child.wait();
    }
}

/// A file of the bridge between two machines, a socket for example.
fn file(dir: &Path, [a, b]: &[String; 2], name: &str) -> PathBuf {
    dir.join(format!("{a}-{b}.{name}"))
}
