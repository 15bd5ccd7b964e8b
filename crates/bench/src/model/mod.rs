//! The timing model: how fast it simulates, against the bare machine and other simulators.
//!
//! Each module has the cases of one layer, the peers' sides beside them. Everything runs on one
//! processor, but for a rack whose parts have nothing in common.

mod events;
mod large;
#[cfg(feature = "peers")]
mod nexosim_peer;
mod reads;
mod simpy_peer;

use std::time::Duration;

use crate::machine::{CLIENT_CPU, Regime, pin, wait_quiet};
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
}

/// Runs all cases and adds their rows to `report`.
///
/// # Errors
/// When a peer that is there fails; one that is missing is only left out.
pub fn run(settings: &Settings, regime: &Regime, report: &mut Report) -> Result<(), BenchError> {
    let load = wait_quiet(0.5, settings.patience);
    let (name, runs) = (regime.name(), settings.runs);
    report.note(&format!("regime: {name}; load before: {load:.2}; {runs} runs each"));
    pin(CLIENT_CPU);
    let mut bench = Bench { settings, report };
    bench.events()?;
    bench.reads()?;
    bench.packets()?;
    bench.parts()?;
    bench.large()
}

/// What a case's rack or workload, which is part of it, is refused with.
fn refused(error: impl ToString) -> BenchError {
    BenchError::Peer(error.to_string())
}

/// What the cases share.
struct Bench<'a> {
    settings: &'a Settings,
    report: &'a mut Report,
}

impl Bench<'_> {
    fn wanted(&self, case: &str) -> bool {
        case.contains(&self.settings.only)
    }

    /// Measures two rates in turns, of which more is better, and adds the row.
    fn rates(
        &mut self,
        case: &str,
        peer_name: &str,
        unit: &'static str,
        ours: impl FnMut() -> Result<f64, BenchError>,
        peer: impl FnMut() -> Result<f64, BenchError>,
    ) -> Result<(), BenchError> {
        let runs = self.settings.runs;
        let case = Case { area: "model", case, peer_name, unit, runs };
        self.report.compare(case, ours, peer, |ours, peer| ours / peer)
    }
}
