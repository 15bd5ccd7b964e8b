//! Memory that hosts share: what segments, interrupts and the copy engine cost over the bare thing.
//!
//! Two hosts of a real rack, their nodes processes of their own. The programs on them are two
//! threads of this one, pinned to a processor each, with sessions and mappings of their own; the
//! bare thing runs in the same threads. Each module has the cases of one way to reach another host;
//! the bare side is in `plain` and `system`, other systems are in `networks`.

mod connect;
mod copies;
mod hosts;
mod messages;
pub(crate) mod networks;
mod pingpong;
mod pio;
mod plain;
mod signals;
mod system;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use hosts::HostPair;

use crate::machine::{CLIENT_CPU, Regime, pin, wait_quiet};
use crate::report::{Case, median};
use crate::{BenchError, Report};

/// How long and how often the cases of this area are measured.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Pairs of runs for each case.
    pub runs: usize,
    /// How long each run takes.
    pub time: Duration,
    /// Where the rack's sockets and state go.
    pub dir: PathBuf,
    /// Only cases whose name contains this.
    pub only: String,
    /// How long to wait for the machine to become quiet.
    pub patience: Duration,
}

/// Runs all cases and adds their rows to `report`.
///
/// # Errors
/// When rackbus itself fails; a peer that is missing is only left out.
pub fn run(settings: &Settings, regime: &Regime, report: &mut Report) -> Result<(), BenchError> {
    std::fs::create_dir_all(&settings.dir).map_err(BenchError::io("making the work directory"))?;
    let load = wait_quiet(0.5, settings.patience);
    let (name, runs) = (regime.name(), settings.runs);
    report.note(&format!("regime: {name}; load before: {load:.2}; {runs} runs each"));
    let Some(hosts) = HostPair::start(&settings.dir)? else {
        report.left_out("memory", "there is no rackbus beside this program");
        return Ok(());
    };
    pin(CLIENT_CPU);
    let mut bench = Bench { settings, report, hosts };
    bench.pio()?;
    bench.signals()?;
    bench.messages()?;
    bench.copies()?;
    bench.areas()?;
    bench.connecting()?;
    bench.networks()
}

/// What the cases share.
struct Bench<'a> {
    settings: &'a Settings,
    report: &'a mut Report,
    hosts: HostPair,
}

/// What is compared, as [`Case`] has it: what is done, who the other one is, the unit of both.
type CaseLabel<'a> = (&'a str, &'a str, &'static str);

impl Bench<'_> {
    fn wanted(&self, case: &str) -> bool {
        case.contains(&self.settings.only)
    }

    /// Measures both in turns and adds the row: its ratio is ours to the other one's.
    fn pairs(
        &mut self,
        what: CaseLabel<'_>,
        ours: impl FnMut() -> Result<f64, BenchError>,
        peer: impl FnMut() -> Result<f64, BenchError>,
    ) -> Result<(), BenchError> {
        self.related(what, ours, peer, |ours, peer| ours / peer)
    }

    /// The same, with another way to compare.
    fn related(
        &mut self,
        (case, peer_name, unit): CaseLabel<'_>,
        ours: impl FnMut() -> Result<f64, BenchError>,
        peer: impl FnMut() -> Result<f64, BenchError>,
        relate: fn(f64, f64) -> f64,
    ) -> Result<(), BenchError> {
        if !self.wanted(case) {
            return Ok(());
        }
        let case = Case { area: "memory", case, peer_name, unit, runs: self.settings.runs };
        self.report.compare(case, ours, peer, relate)
    }
}

/// Seconds of a `step`: the median over rounds of `batch` steps, for about `time`. Rounds in which
/// the system took the processor away do not count so.
fn typical(
    time: Duration,
    batch: u64,
    mut step: impl FnMut() -> Result<(), BenchError>,
) -> Result<f64, BenchError> {
    let (begun, mut rounds) = (Instant::now(), Vec::new());
    let mut last = begun;
    loop {
        for _ in 0..batch {
            step()?;
        }
        let now = Instant::now();
        if now - begun >= time / 10 {
            rounds.push((now - last).as_secs_f64() / batch as f64);
        }
        last = now;
        if now - begun >= time {
            return Ok(median(&rounds));
        }
    }
}

/// Bytes as cases are named: `64 KiB`.
fn size(bytes: usize) -> String {
    rackbus_fabric::rack::format_size(bytes as u64)
}
