//! The data path of shared memory: interrupts, messages, copies and copy channels, against what the
//! bare machine does.
//!
//! Two threads on two processors play two processes: between the two there is the same memory and
//! the same system call.

mod channel;
mod copy;
mod signal;

use std::time::{Duration, Instant};

use crate::machine::{Regime, RestartCommand, wait_quiet};
use crate::report::Case;
use crate::{BenchError, Report};

/// How long and how often the cases of this area are measured.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Pairs of runs for each case.
    pub runs: usize,
    /// How long each run takes.
    pub time: Duration,
    /// Only cases whose name contains this.
    pub only: String,
    /// How long to wait for the machine to become quiet.
    pub patience: Duration,
    /// How to start the other processes.
    pub again: RestartCommand,
}

/// Runs all cases and adds their rows to `report`.
///
/// # Errors
/// When rackbus itself fails.
pub fn run(settings: &Settings, regime: &Regime, report: &mut Report) -> Result<(), BenchError> {
    let load = wait_quiet(0.5, settings.patience);
    let (name, runs) = (regime.name(), settings.runs);
    report.note(&format!("regime: {name}; load before: {load:.2}; {runs} runs each"));
    // Asked before anything is pinned.
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let mut bench = Bench { settings, report, processors };
    bench.signals()?;
    bench.copies()?;
    bench.channels()
}

/// What the cases share.
struct Bench<'a> {
    settings: &'a Settings,
    report: &'a mut Report,
    /// Processors that this program may use.
    processors: usize,
}

impl Bench<'_> {
    /// Measures two figures in turns and adds the row, unless it is not wanted.
    fn pairs(
        &mut self,
        case: &str,
        peer_name: &str,
        unit: &'static str,
        ours: impl FnMut() -> Result<f64, BenchError>,
        peer: impl FnMut() -> Result<f64, BenchError>,
    ) -> Result<(), BenchError> {
        if !case.contains(&self.settings.only) {
            return Ok(());
        }
        let runs = self.settings.runs;
        let case = Case { area: "datapath", case, peer_name, unit, runs };
        self.report.compare(case, ours, peer, |ours, peer| ours / peer)
    }
}

/// Repeats `step`, which does `count` things, for about `time`, after a warm-up; things per second.
fn rate(time: Duration, count: u64, mut step: impl FnMut()) -> f64 {
    let warm = Instant::now();
    while warm.elapsed() < time / 10 {
        step();
    }
    let (begun, mut done) = (Instant::now(), 0);
    loop {
        step();
        done += count;
        let elapsed = begun.elapsed();
        if elapsed >= time {
            return done as f64 / elapsed.as_secs_f64();
        }
    }
}
