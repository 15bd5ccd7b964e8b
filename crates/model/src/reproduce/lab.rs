//! A testbed to measure in: its rack file, put together anew for each measurement.

use std::collections::BTreeMap;

use crate::assembly::{Assembly, End};
use crate::engine::{Arrivals, Decides, FlowStats, Until};
use crate::random::Distribution;
use crate::time::Time;
use crate::timing::{self, Timing};
use crate::workload::{FlowKind, FlowSpec, HostProfile, Move, MoveKind, Run, StepSpec, Workload};
use rackbus_fabric::rack::{Host, Rack};
use rackbus_fabric::text::FileError;

macro_rules! testbeds {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../../../examples/testbeds/", $name, ".toml")))),*]
    };
}

/// The rack files of the testbeds in `examples/testbeds`, by name.
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
    "pcie-bench-nfp",
    "gen5-gpus",
    "drives-direct",
];

/// More events than any measurement takes.
const MOST: u64 = 2_000_000_000;

/// A testbed, and flows of the kinds that workloads have.
pub(super) struct Lab {
    rack: Rack,
    timing: Timing,
    pub(super) it: Assembly,
    /// What was run last.
    pub(super) last: Option<Run>,
}

/// A flow's name, for errors.
const NAME: &str = "it";

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
        Lab { rack, timing, it, last: None }
    }

    fn end(&self, name: &str) -> End {
        self.it.end(name).unwrap_or_else(|error| panic!("{}: {error}", self.rack.name))
    }

    /// Roots and hops from one end to another.
    pub(super) fn hops(&mut self, from: &str, to: &str) -> (usize, usize) {
        let ends = (self.end(from), self.end(to));
        let components = self.it.components(ends.0, ends.1);
        let components = components.unwrap_or_else(|error| panic!("{}: {error}", self.rack.name));
        let topology = self.it.topology();
        let hops = &components[1..components.len() - 1];
        let is_root =
            |id: &&_| topology.component(**id).kind == rackbus_fabric::ComponentKind::RootComplex;
        (hops.iter().filter(is_root).count(), hops.len())
    }

    pub(super) fn software(&self, name: &str) -> Time {
        self.timing.software(name)
    }

    pub(super) fn timing(&self) -> &Timing {
        &self.timing
    }

    /// How long a job takes, on its own.
    pub(super) fn time(&mut self, steps: Vec<StepSpec>) -> Time {
        let flow = flow(FlowKind::Steps { steps }, Arrivals::Depth(1), 1, 1);
        self.run(flow).latency.mean()
    }

    /// How long a job takes after one that has had pages translated.
    pub(super) fn time_again(&mut self, steps: Vec<StepSpec>) -> Time {
        let once =
            FlowSpec { span: 1, ..flow(FlowKind::Steps { steps }, Arrivals::Depth(1), 2, 1) };
        self.run(once).latency.least()
    }

    /// Bytes per second of so many jobs, so many at a time, from the first's beginning to the last's
    /// end.
    pub(super) fn rate(&mut self, steps: Vec<StepSpec>, depth: u32, count: u64, bytes: u64) -> f64 {
        self.rate_of(FlowKind::Steps { steps }, depth, count, bytes)
    }

    /// The same of a flow of any kind.
    pub(super) fn rate_of(&mut self, kind: FlowKind, depth: u32, count: u64, bytes: u64) -> f64 {
        let stats = self.run(flow(kind, Arrivals::Depth(depth), count, bytes));
        stats.bytes() as f64 / stats.ended.seconds()
    }

    /// What a flow got done, alone and to its end.
    pub(super) fn run(&mut self, flow: FlowSpec) -> FlowStats {
        let run = self.simulate(vec![flow], Time::ZERO, Time::MAX);
        let queues = run.flows().next().map(|(_, queues, _)| queues[0]);
        queues.map(|queue| run.assembly.world.flow(queue).clone()).unwrap_or_default()
    }

    /// Rates in bytes per second of jobs that run beside each other for a time, after a tenth of it.
    pub(super) fn rates(&mut self, flows: Vec<FlowSpec>, span: Time) -> Vec<f64> {
        let run = self.simulate(flows, span / 10, span);
        run.results().flows.iter().map(|flow| flow.bytes_per_second).collect()
    }

    /// The same, where jobs come to gates at which these policies decide, with so many turns under way.
    pub(super) fn rates_through(
        &mut self,
        gates: Vec<(&str, usize, Box<dyn Decides>)>,
        flows: Vec<FlowSpec>,
        span: Time,
    ) -> Vec<f64> {
        let run = self.simulate_through(gates, flows, span / 10, span);
        run.results().flows.iter().map(|flow| flow.bytes_per_second).collect()
    }

    fn simulate(&mut self, flows: Vec<FlowSpec>, warmup: Time, duration: Time) -> &Run {
        self.simulate_through(Vec::new(), flows, warmup, duration)
    }

    fn simulate_through(
        &mut self,
        gates: Vec<(&str, usize, Box<dyn Decides>)>,
        flows: Vec<FlowSpec>,
        warmup: Time,
        duration: Time,
    ) -> &Run {
        let workload = Workload {
            seed: 1,
            duration,
            warmup,
            units: BTreeMap::new(),
            shaping: Vec::new(),
            levels: Vec::new(),
            flows,
            notes: Vec::new(),
        };
        let run = Run::new(&self.rack, &self.timing, &workload);
        let mut run = run.unwrap_or_else(|error| panic!("{}: {error}", self.rack.name));
        for (gate, units, policy) in gates {
            run.set_policy(gate, units, policy);
        }
        if let Err(stuck) = run.go(MOST) {
            panic!("{}: {stuck}", self.rack.name);
        }
        self.last.insert(run)
    }
}

/// The profiles of a testbed's hosts.
pub(super) fn hosts(name: &str, text: &str) -> Result<Vec<HostProfile>, FileError> {
    let file = format!("{name}.toml");
    let rack = Rack::parse(&file, text)?;
    let timing = timing::read_for(&file, text, &rack)?;
    let of = |host: &Host| HostProfile {
        host: host.name.clone(),
        profile: timing.of_host(&host.name).profile.clone(),
    };
    Ok(rack.hosts.iter().map(of).collect())
}

/// A flow of jobs, so many at a time.
pub(super) fn flow(kind: FlowKind, arrivals: Arrivals, count: u64, size: u64) -> FlowSpec {
    FlowSpec { count, span: 1 << 30, ..FlowSpec::new(NAME, kind, arrivals, size) }
}

/// A step in which a time passes.
pub(super) fn wait(span: Time) -> StepSpec {
    StepSpec::Wait(Distribution::Fixed(span))
}

/// A unit that is used for a time.
pub(super) fn using(unit: &str, span: Time) -> StepSpec {
    StepSpec::Use(unit.to_owned(), Distribution::Fixed(span))
}

pub(super) fn moved(how: MoveKind, ends: &[&str], bytes: u64, until: Until) -> Move {
    let ends = ends.iter().map(|end| (*end).to_owned()).collect();
    Move { how, ends, bytes, at: 0, channel: String::new(), until }
}

fn step(how: MoveKind, ends: &[&str], bytes: u64, until: Until) -> StepSpec {
    StepSpec::Move(moved(how, ends, bytes, until))
}

/// A processor's store into a window, till it is seen by one that polls it there.
pub(super) fn store(from: &str, to: &str, bytes: u64) -> StepSpec {
    step(MoveKind::Store, &[from, to], bytes, Until::Landed)
}

/// A processor's uncached load from a window.
pub(super) fn load(from: &str, to: &str, bytes: u64) -> StepSpec {
    step(MoveKind::Load, &[from, to], bytes, Until::Landed)
}

/// A write without what a processor takes for it.
pub(super) fn write(from: &str, to: &str, bytes: u64, until: Until) -> StepSpec {
    step(MoveKind::Write, &[from, to], bytes, until)
}

/// A device's DMA read.
pub(super) fn read(from: &str, to: &str, bytes: u64) -> StepSpec {
    step(MoveKind::Read, &[from, to], bytes, Until::Landed)
}
