//! The machine while it measures: processors, the wake-up regime, what else is running.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::thread::CpuSet;

use crate::BenchError;

/// The processor of the program that asks.
pub const CLIENT_CPU: usize = 0;
/// The processor of the one that answers.
pub const SERVER_CPU: usize = 1;

/// Pins the calling thread to a processor. On a machine with one processor nothing is pinned, and
/// the figures say so by themselves.
pub fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    // Without the right to it the scheduler decides; that costs precision, not correctness.
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// Lets the calling thread, and what it starts, run on all processors again.
pub fn unpin() {
    let mut set = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|cpu| set.set(cpu));
    // The system takes of the set what this process may use.
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// How to start this program again, as one of the processes that a measurement needs.
#[derive(Debug, Clone, Default)]
pub struct RestartCommand {
    /// What comes before the subcommand: nothing, or the command that led here.
    pub prefix: Vec<String>,
}

impl RestartCommand {
    /// The command line up to `subcommand`.
    ///
    /// # Errors
    /// When the program's own file is gone.
    pub fn command(&self, subcommand: &str) -> Result<Command, BenchError> {
        let program = std::env::current_exe().map_err(BenchError::io("finding this program"))?;
        let mut command = Command::new(program);
        command.args(&self.prefix).arg(subcommand);
        Ok(command)
    }
}

/// How deep the processors sleep when they wait, which decides what a wake-up costs.
#[derive(Debug)]
pub struct Regime {
    /// Held open: the request ends with the descriptor.
    _latency: Option<File>,
    name: &'static str,
}

impl Regime {
    /// The machine as it is.
    pub fn default_idle() -> Regime {
        Regime { _latency: None, name: "default idle" }
    }

    /// Asks the kernel for no sleep deeper than polling while this is held.
    ///
    /// # Errors
    /// When `/dev/cpu_dma_latency` cannot be opened: it takes root.
    pub fn low_latency() -> std::io::Result<Regime> {
        let mut file = OpenOptions::new().write(true).open("/dev/cpu_dma_latency")?;
        file.write_all(&0i32.to_ne_bytes())?;
        Ok(Regime { _latency: Some(file), name: "cpu_dma_latency 0" })
    }

    /// What to call it in a report.
    pub fn name(&self) -> &'static str {
        self.name
    }
}

/// Waits until the last minute's load is below `limit`, for at most `patience`; returns the load.
pub fn wait_quiet(limit: f64, patience: Duration) -> f64 {
    let start = Instant::now();
    loop {
        let load = load();
        if load < limit || start.elapsed() > patience {
            return load;
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().and_then(|field| field.parse().ok()).unwrap_or(0.0)
}

/// Processor time that process `pid` has used so far.
pub fn processor_time(pid: u32) -> Duration {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    let mut total = 0;
    for task in tasks.into_iter().flatten().flatten() {
        let text = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        total += text.split_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or(0);
    }
    Duration::from_nanos(total)
}

/// Processor time that this process has used so far, that of threads which have ended included.
pub fn own_processor_time() -> Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let (seconds, nanoseconds) = (used.tv_sec.unsigned_abs(), used.tv_nsec.unsigned_abs());
    Duration::from_secs(seconds) + Duration::from_nanos(nanoseconds)
}
