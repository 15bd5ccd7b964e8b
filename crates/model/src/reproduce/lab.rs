//! A testbed to measure in: its rack file, put together anew for each measurement.

use rackbus_fabric::rack::Rack;

use crate::assembly::{Assembly, End, Source};
use crate::engine::{Addresses, Arrivals, Flow, FlowStats, Script, Step, Until, WayId, World};
use crate::time::Time;
use crate::timing::{self, Timing};

macro_rules! testbeds {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../../../examples/testbeds/", $name, ".toml")))),*]
    };
}

/// The testbeds.
pub(super) const TESTBEDS: &[(&str, &str)] = testbeds![
    "device-lending-nvme",
    "device-lending-local",
    "device-lending-one-lender",
    "device-lending-two-lenders",
    "device-lending-chassis",
    "marlin",
    "marlin-pool",
    "sisci-ixh610",
    "sisci-pxh830",
    "accelerator-connectx6",
    "accelerator-arria10",
    "pcie-bench",
];

/// More events than any measurement takes.
const MOST: u64 = 2_000_000_000;

/// A testbed.
pub(super) struct Lab {
    rack: Rack,
    timing: Timing,
    pub(super) it: Assembly,
}

impl Lab {
    /// The testbed of that name.
    pub(super) fn new(name: &str) -> Lab {
        Lab::changed(name, |_, _| {})
    }

    /// The testbed of that name, with changes: another host's IOMMU on, say.
    ///
    /// # Panics
    /// When a testbed's file is wrong: they are part of the crate, and tested.
    pub(super) fn changed(name: &str, change: impl FnOnce(&mut Rack, &mut Timing)) -> Lab {
        let file = TESTBEDS.iter().find(|(other, _)| *other == name);
        let text = file.map_or("", |(_, text)| text);
        let mut rack = Rack::parse(name, text).unwrap_or_else(|error| panic!("{error}"));
        let mut timing =
            timing::read_for(name, text, &rack).unwrap_or_else(|error| panic!("{error}"));
        change(&mut rack, &mut timing);
        let it = Assembly::new(&rack, &timing, 1).unwrap_or_else(|error| panic!("{name}: {error}"));
        Lab { rack, timing, it }
    }

    pub(super) fn world(&mut self) -> &mut World {
        &mut self.it.world
    }

    pub(super) fn end(&self, name: &str) -> End {
        self.it.end(name).unwrap_or_else(|error| panic!("{}: {error}", self.rack.name))
    }

    pub(super) fn source(&mut self, name: &str) -> Source {
        let end = self.end(name);
        self.it.source(end).unwrap_or_else(|error| panic!("{}: {error}", self.rack.name))
    }

    pub(super) fn way(&mut self, from: &str, to: &str) -> WayId {
        let ends = (self.end(from), self.end(to));
        self.it.way(ends.0, ends.1).unwrap_or_else(|error| panic!("{}: {error}", self.rack.name))
    }

    /// Roots and hops from one end to another.
    pub(super) fn hops(&mut self, from: &str, to: &str) -> (usize, usize) {
        let ends = (self.end(from), self.end(to));
        let components = self.it.components(ends.0, ends.1);
        let components = components.unwrap_or_else(|error| panic!("{}: {error}", self.rack.name));
        let topology = self.it.topology();
        let hops = &components[1..components.len() - 1];
        let is_root = |id: &&_| topology.component(**id).kind == rackbus_fabric::Kind::RootComplex;
        (hops.iter().filter(is_root).count(), hops.len())
    }

    pub(super) fn software(&self, name: &str) -> Time {
        self.timing.software(name)
    }

    pub(super) fn timing(&self) -> &Timing {
        &self.timing
    }

    /// A processor's store into a window, till it is seen by one that polls it there.
    pub(super) fn store(&mut self, from: &str, to: &str, bytes: u64) -> Script {
        let source = self.source(from);
        let way = self.way(from, to);
        let (issue, poll) = (self.timing.host.cpu.issue, self.timing.host.cpu.poll);
        let until = Until::Landed;
        vec![
            Step::Wait(issue),
            Step::Write { stream: source.stream, way, address: 0, bytes, until },
            Step::Wait(poll),
        ]
    }

    /// A processor's uncached load from a window.
    pub(super) fn load(&mut self, from: &str, to: &str, bytes: u64) -> Script {
        let source = self.source(from);
        let way = self.way(from, to);
        vec![
            Step::Wait(self.timing.host.cpu.issue),
            Step::Read { stream: source.stream, way, address: 0, bytes },
            Step::Wait(self.timing.host.cpu.issue),
        ]
    }

    /// A device's DMA write.
    pub(super) fn write(&mut self, from: &str, to: &str, bytes: u64, until: Until) -> Step {
        let source = self.source(from);
        let way = self.way(from, to);
        Step::Write { stream: source.stream, way, address: 0, bytes, until }
    }

    /// A device's DMA read.
    pub(super) fn read(&mut self, from: &str, to: &str, bytes: u64) -> Step {
        let source = self.source(from);
        let way = self.way(from, to);
        Step::Read { stream: source.stream, way, address: 0, bytes }
    }

    /// How long a job takes, on its own.
    pub(super) fn time(&mut self, script: Script) -> Time {
        self.run(script, Arrivals::Depth(1), 1, 1).latency.mean()
    }

    /// Bytes per second of so many jobs, so many at a time, from the first's beginning to the last's
    /// end.
    pub(super) fn rate(&mut self, script: Script, depth: u32, count: u64, bytes: u64) -> f64 {
        let stats = self.run(script, Arrivals::Depth(depth), count, bytes);
        stats.bytes() as f64 / stats.ended.seconds()
    }

    pub(super) fn run(
        &mut self,
        script: Script,
        arrivals: Arrivals,
        count: u64,
        bytes: u64,
    ) -> FlowStats {
        let script = self.world().add_script(script);
        let addresses = Addresses::sequential(0, bytes.next_multiple_of(4096));
        let begin = Time::ZERO;
        let flow = Flow { script, arrivals, count, bytes, begin, addresses, think: None };
        let flow = self.world().add_flow(flow);
        if let Err(stuck) = self.world().run(Time::MAX, MOST) {
            panic!("{}: {stuck}", self.rack.name);
        }
        self.it.world.flow(flow).clone()
    }

    /// Rates in bytes per second of jobs that run beside each other for a time, after a tenth of it.
    pub(super) fn rates(&mut self, flows: &[(Script, u32, u64)], span: Time) -> Vec<f64> {
        let mut ids = Vec::new();
        for (nth, (script, depth, bytes)) in flows.iter().enumerate() {
            let script = self.world().add_script(script.clone());
            let base = (nth as u64) << 32;
            let addresses = Addresses::sequential(base, bytes.next_multiple_of(64));
            let flow = Flow {
                script,
                arrivals: Arrivals::Depth(*depth),
                count: u64::MAX,
                bytes: *bytes,
                begin: Time::ZERO,
                addresses,
                think: None,
            };
            ids.push(self.world().add_flow(flow));
        }
        let begin = span / 10;
        self.world().measure_from(begin);
        if let Err(stuck) = self.world().run(span, MOST) {
            panic!("{}: {stuck}", self.rack.name);
        }
        let measured = (span - begin).seconds();
        ids.iter().map(|id| self.it.world.flow(*id).bytes() as f64 / measured).collect()
    }
}
