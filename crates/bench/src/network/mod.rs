//! The network between hosts: streams and round trips of stock sockets against other ways between two network
//! namespaces, and its rings alone.

mod dpdk;
mod ends;
mod forwarder;
mod outside;
mod ring;
mod traffic;
mod virtio;

use std::path::{Path, PathBuf};
use std::time::Duration;

use dpdk::DpdkLink;
use ends::{NetworkRack, Veth};
pub use forwarder::Forwarder;
use outside::Outside;
pub use traffic::{PacketResult, StreamResult, TrafficEnds};
use virtio::{Driven, FrameUse};

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
/// When rackbus itself fails; what cannot be obtained here is only left out.
pub fn run(settings: &Settings, regime: &Regime, report: &mut Report) -> Result<(), BenchError> {
    std::fs::create_dir_all(&settings.dir).map_err(BenchError::io("making the work directory"))?;
    let load = wait_quiet(0.5, settings.patience);
    let (name, runs) = (regime.name(), settings.runs);
    report.note(&format!("regime: {name}; load before: {load:.2}; {runs} runs each"));
    let mut bench = Bench { settings, report };
    // Before the threads that measure the rings are bound to processors.
    if rustix::process::geteuid().is_root() {
        bench.joined()?;
        bench.large_packets()?;
        bench.outside()?;
    } else {
        bench.report.left_out("sockets", "making network interfaces takes root");
    }
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

    /// Two figures, the first in `unit` and the second the processor time for each gigabyte.
    fn with_cost(
        &mut self,
        (case, peer_name, unit): (&str, &str, &'static str),
        ours: impl FnMut() -> Result<[f64; 2], BenchError>,
        peer: impl FnMut() -> Result<[f64; 2], BenchError>,
    ) -> Result<(), BenchError> {
        let named = [
            format!("{case}, against {peer_name}"),
            format!("{case}, processor time, against {peer_name}"),
        ];
        if !named[0].contains(&self.settings.only) {
            return Ok(());
        }
        let case = |nth: usize, unit| Case {
            area: "net",
            case: &named[nth],
            peer_name,
            unit,
            runs: self.settings.runs,
        };
        let cases = [case(0, unit), case(1, "s/GB")];
        self.report.compare_all(cases, ours, peer, |ours, peer| ours / peer)
    }

    /// What flows, and the processor time that it takes.
    fn flows(
        &mut self,
        (case, peer_name): (&str, &str),
        mut ours: impl FnMut() -> Result<StreamResult, BenchError>,
        mut peer: impl FnMut() -> Result<StreamResult, BenchError>,
    ) -> Result<(), BenchError> {
        let figures = |flow: StreamResult| [flow.rate, flow.cost];
        let what = (case, peer_name, "Gbit/s");
        self.with_cost(what, || ours().map(figures), || peer().map(figures))
    }

    /// How many packets come out, and the processor time that it takes.
    fn packets(
        &mut self,
        (case, peer_name): (&str, &str),
        mut ours: impl FnMut() -> Result<PacketResult, BenchError>,
        mut peer: impl FnMut() -> Result<PacketResult, BenchError>,
    ) -> Result<(), BenchError> {
        let figures = |found: PacketResult| [found.rate, found.cost];
        let what = (case, peer_name, "M/s");
        self.with_cost(what, || ours().map(figures), || peer().map(figures))
    }

    /// Streams and round trips of sockets.
    fn joined(&mut self) -> Result<(), BenchError> {
        let Some(ours) = NetworkRack::start(&self.settings.dir, 1500)? else {
            self.report.left_out("sockets", "there is no rackbus beside this program");
            return Ok(());
        };
        let (forwarder, veth) = (Forwarder::start()?, Veth::make(1500)?);
        let loopback = loopback();
        let peers = [
            ("a minimal forwarder of TAPs", &forwarder.pair),
            ("a veth pair", &veth.pair),
            ("loopback", &loopback),
        ];
        let time = self.settings.time;
        for (name, peer) in peers {
            for (case, count) in [("TCP, 1 stream", 1), ("TCP, 2 streams", 2)] {
                let ours = || ours.pair.streams(count, time);
                self.flows((case, name), ours, || peer.streams(count, time))?;
            }
            let what = ("TCP, 64 B there and back", name, "us");
            self.pairs(what, || ours.pair.round_trips(time), || peer.round_trips(time))?;
        }
        Ok(())
    }

    /// Marlin's figures (2014, 5.5): sockets with packets of 64 KiB against the copies that carry them.
    fn large_packets(&mut self) -> Result<(), BenchError> {
        if !self.wants(&LARGE.map(|(case, _)| format!("{case}, against {COPIES}"))) {
            return Ok(());
        }
        let Some(ours) = NetworkRack::start(&self.settings.dir, 65_521)? else { return Ok(()) };
        let time = self.settings.time;
        for (case, datagrams) in LARGE {
            let flow = || match datagrams {
                true => ours.pair.datagrams(65_000, time),
                false => ours.pair.streams(1, time),
            };
            self.flows((case, COPIES), flow, || ring::copies(time))?;
        }
        Ok(())
    }

    /// A third machine, from a host that has borrowed a virtual function and from its owner (Marlin 2014, 5.4): with the
    /// front at the lender, where both are in one node and only the lease is another host's, and with the front at the
    /// borrower, from which frames go to the lender's node.
    fn outside(&mut self) -> Result<(), BenchError> {
        const CASES: [[&str; 2]; 2] = [
            [
                "outside, front at the lender, 64 B there and back",
                "outside, front at the lender, 1500 B frames",
            ],
            [
                "outside, front at the borrower, 64 B there and back",
                "outside, front at the borrower, 1500 B frames",
            ],
        ];
        const PEER: &str = "the function's owner";
        let named = |case: &&str| format!("{case}, against {PEER}");
        if !self.wants(&CASES.as_flattened().iter().map(named).collect::<Vec<_>>()) {
            return Ok(());
        }
        let Some(mut all) = Outside::start(&self.settings.dir)? else { return Ok(()) };
        let (time, Outside { owner, borrower, apart, .. }) = (self.settings.time, &mut all);
        for (cases, ours) in CASES.iter().zip([borrower, apart]) {
            let trips = (cases[0], PEER, "us");
            self.pairs(trips, || ours.round_trips(time), || owner.round_trips(time))?;
            let rate = (cases[1], PEER, "Gbit/s");
            self.pairs(rate, || ours.rate(time), || owner.rate(time))?;
        }
        Ok(())
    }

    /// The rings by themselves.
    fn rings(&mut self) -> Result<(), BenchError> {
        let time = self.settings.time;
        let sizes = [("ring, 64 B", 64), ("ring, 1500 B", 1500), ("ring, 64 KiB", 65_535)];
        for (case, bytes) in sizes {
            let what = (case, "a raw ring of slots");
            self.packets(what, || ring::frames(bytes, 0, time), || ring::raw(bytes, time))?;
        }
        for (case, bytes) in sizes {
            let what = (case, "an aligned source");
            self.packets(what, || ring::frames(bytes, 2, time), || ring::frames(bytes, 0, time))?;
        }
        if !dpdk::is_there() {
            self.report.left_out("DPDK", "dpdk-testpmd does not run here; see scripts/setup bench");
            return Ok(());
        }
        let dir = self.settings.dir.clone();
        for (case, bytes) in sizes {
            let peer = || dpdk::packets(&dir, DpdkLink::Memif, bytes, time);
            self.packets((case, "DPDK memif"), || ring::frames(bytes, 0, time), peer)?;
        }
        for usage in [FrameUse::Copied, FrameUse::InPlace] {
            self.virtio(&dir, usage)?;
        }
        Ok(())
    }

    /// The virtio function. DPDK's driver leaves the data of a packet in place, so that only the device moves it: there is
    /// a row for a driver of ours that does the same.
    fn virtio(&mut self, dir: &Path, usage: FrameUse) -> Result<(), BenchError> {
        let time = self.settings.time;
        let place = match usage {
            FrameUse::Copied => "",
            FrameUse::InPlace => ", in place",
        };
        for (case, bytes) in [("virtio, 64 B", 64), ("virtio, 1500 B", 1500)] {
            let named =
                ["from", "to"].map(|direction| format!("{case} {direction} the driver{place}"));
            let what = |nth: usize| (&*named[nth], "DPDK vhost-user");
            let ours = || Driven::start(dir, None)?.sends(bytes, usage, time);
            self.packets(what(0), ours, || dpdk::packets(dir, DpdkLink::FromDriver, bytes, time))?;
            let ours = || Driven::start(dir, Some(bytes))?.receives(usage, time);
            self.packets(what(1), ours, || dpdk::packets(dir, DpdkLink::ToDriver, bytes, time))?;
        }
        Ok(())
    }

    /// Whether one of these cases is asked for.
    fn wants(&self, cases: &[String]) -> bool {
        cases.iter().any(|case| case.contains(&self.settings.only))
    }
}

/// What Marlin's figures are measured against, and the cases; the ones with datagrams instead of a stream are marked.
const COPIES: &str = "copies of 64 KiB by the copy engine";
const LARGE: [(&str, bool); 2] =
    [("TCP, MTU 65521", false), ("UDP, MTU 65521, datagrams of 65000 B", true)];

/// Two ends without a network between them.
fn loopback() -> TrafficEnds {
    TrafficEnds { spaces: None, address: [127, 0, 0, 1].into(), carriers: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A case measures something, if not in a few milliseconds, in which a busy machine may let nobody else run, then in
    /// more.
    fn measures(mut case: impl FnMut(Duration) -> f64) {
        let times = (0..12).map(|doubled| Duration::from_millis(5 << doubled));
        assert!(times.into_iter().any(|time| case(time) > 0.0), "nothing in ten seconds");
    }

    #[test]
    fn what_is_compared_joins_two_ends() {
        let loopback = loopback();
        measures(|time| loopback.round_trips(time).unwrap());
        measures(|time| loopback.streams(2, time).map(|flow| flow.rate.min(flow.cost)).unwrap());
        measures(|time| loopback.datagrams(1000, time).unwrap().rate);
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: making network interfaces takes root");
            return;
        }
        let veth = Veth::make(1500).unwrap();
        measures(|time| veth.pair.round_trips(time).unwrap());
        let forwarder = Forwarder::start().unwrap();
        measures(|time| forwarder.pair.round_trips(time).unwrap());
        measures(|time| forwarder.pair.streams(1, time).unwrap().rate);
    }

    #[test]
    fn rings_pass_frames_of_all_sizes() {
        for bytes in [64, 1500, 65_535] {
            measures(|time| ring::frames(bytes, 0, time).map(|it| it.rate.min(it.cost)).unwrap());
            measures(|time| ring::raw(bytes, time).map(|it| it.rate.min(it.cost)).unwrap());
        }
        measures(|time| ring::copies(time).map(|it| it.rate.min(it.cost)).unwrap());
    }

    #[test]
    fn a_driver_of_a_network_function_sends_and_receives() {
        let dir = tempfile::tempdir().unwrap();
        for usage in [FrameUse::Copied, FrameUse::InPlace] {
            let mut sends = Driven::start(dir.path(), None).unwrap();
            measures(|time| sends.sends(64, usage, time).unwrap().rate);
            drop(sends);
            let mut receives = Driven::start(dir.path(), Some(1500)).unwrap();
            measures(|time| receives.receives(usage, time).unwrap().rate);
        }
    }
}
