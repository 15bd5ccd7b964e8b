//! The network between hosts: streams and round trips of stock sockets against other ways between two network
//! namespaces, and its rings alone.

mod ends;
mod forwarder;
mod memif;
mod ring;
mod traffic;

use std::path::PathBuf;
use std::time::Duration;

use ends::{Joined, Veth};
pub use forwarder::Forwarder;
pub use traffic::Pair;

use crate::machine::{Regime, wait_quiet};
use crate::report::Case;
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
/// When rackbus itself fails; what cannot be had here is only left out.
pub fn run(settings: &Settings, regime: &Regime, report: &mut Report) -> Result<(), BenchError> {
    std::fs::create_dir_all(&settings.dir).map_err(BenchError::io("making the work directory"))?;
    let load = wait_quiet(0.5, settings.patience);
    let (name, runs) = (regime.name(), settings.runs);
    report.note(&format!("regime: {name}; load before: {load:.2}; {runs} runs each"));
    let mut bench = Bench { settings, report };
    // Before the threads that measure the rings are bound to processors.
    bench.joined()?;
    bench.rings()
}

struct Bench<'a> {
    settings: &'a Settings,
    report: &'a mut Report,
}

impl Bench<'_> {
    fn pairs(
        &mut self,
        (case, peer_name, unit): (&str, &str, &'static str),
        ours: impl FnMut() -> Result<f64, BenchError>,
        peer: impl FnMut() -> Result<f64, BenchError>,
    ) -> Result<(), BenchError> {
        let named = format!("{case}, against {peer_name}");
        if !named.contains(&self.settings.only) {
            return Ok(());
        }
        let case = Case { area: "net", case: &named, peer_name, unit, runs: self.settings.runs };
        self.report.compare(case, ours, peer, |ours, peer| ours / peer)
    }

    /// Streams and round trips of sockets.
    fn joined(&mut self) -> Result<(), BenchError> {
        if !rustix::process::geteuid().is_root() {
            self.report.left_out("sockets", "making network interfaces takes root");
            return Ok(());
        }
        let Some(ours) = Joined::start(&self.settings.dir, 1500)? else {
            self.report.left_out("sockets", "there is no rackbus beside this program");
            return Ok(());
        };
        let (forwarder, veth) = (Forwarder::start()?, Veth::make(1500)?);
        let loopback = Pair { spaces: None, address: [127, 0, 0, 1].into() };
        let peers = [
            ("a minimal forwarder of TAPs", &forwarder.pair),
            ("a veth pair", &veth.pair),
            ("loopback", &loopback),
        ];
        let time = self.settings.time;
        for (name, peer) in peers {
            for (case, count) in [("TCP, 1 stream", 1), ("TCP, 2 streams", 2)] {
                let what = (case, name, "Gbit/s");
                self.pairs(what, || ours.pair.streams(count, time), || peer.streams(count, time))?;
            }
            let what = ("TCP, 64 B there and back", name, "us");
            self.pairs(what, || ours.pair.round_trips(time), || peer.round_trips(time))?;
        }
        Ok(())
    }

    /// The rings by themselves.
    fn rings(&mut self) -> Result<(), BenchError> {
        let time = self.settings.time;
        for (case, bytes) in [("ring, 64 B", 64), ("ring, 1500 B", 1500), ("ring, 64 KiB", 65_535)]
        {
            let what = (case, "a raw ring of slots", "M/s");
            self.pairs(what, || ring::frames(bytes, time), || ring::raw(bytes, time))?;
        }
        if !memif::is_there() {
            self.report
                .left_out("memif", "dpdk-testpmd does not run here; see scripts/setup bench");
            return Ok(());
        }
        let dir = &self.settings.dir;
        for (case, bytes) in [("ring, 64 B", 64), ("ring, 1500 B", 1500)] {
            let what = (case, "DPDK memif", "M/s");
            self.pairs(what, || ring::frames(bytes, time), || memif::packets(dir, bytes, time))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_compared_joins_two_ends() {
        let loopback = Pair { spaces: None, address: [127, 0, 0, 1].into() };
        assert!(loopback.round_trips(Duration::from_millis(5)).unwrap() > 0.0);
        assert!(loopback.streams(2, Duration::from_millis(5)).unwrap() > 0.0);
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: making network interfaces takes root");
            return;
        }
        let veth = Veth::make(1500).unwrap();
        assert!(veth.pair.round_trips(Duration::from_millis(5)).unwrap() > 0.0);
        let forwarder = Forwarder::start().unwrap();
        assert!(forwarder.pair.round_trips(Duration::from_millis(5)).unwrap() > 0.0);
        assert!(forwarder.pair.streams(1, Duration::from_millis(5)).unwrap() > 0.0);
    }

    #[test]
    fn rings_pass_frames_of_all_sizes() {
        for bytes in [64, 1500, 65_535] {
            let time = Duration::from_millis(5);
            assert!(ring::frames(bytes, time).unwrap() > 0.0);
            assert!(ring::raw(bytes, time).unwrap() > 0.0);
        }
    }
}
