//! Fair shares in a large rack.

use std::time::Instant;

use rackbus_fabric::rack::{Adapter, Cable, PhysicalFabric, Rack, Switch};
use rackbus_model::engine::Arrivals;
use rackbus_model::flow::rack::shares;
use rackbus_model::random::RandomSequence;
use rackbus_model::time::Time;
use rackbus_model::timing::Timing;
use rackbus_model::workload::{Divided, FlowKind, FlowSpec, Workload, run};

use super::{Bench, refused};
use crate::BenchError;
use crate::machine::{CLIENT_CPU, pin, unpin};

const HOSTS: u64 = 10_000;
const FLOWS: u64 = 100_000;
/// Seconds that it may take.
const LIMIT: f64 = 10.0;
/// Links below a switch.
const PORTS: usize = 31;

/// Hosts with a drive and an NTB each, below a tree of switches; every other one has an IOMMU.
fn rack(hosts: u64) -> Result<Rack, BenchError> {
    let mut text = "name = \"large\"\n".to_owned();
    let mut physical = PhysicalFabric::default();
    let cable = |a: &str, b: &str, generation, lanes| Cable {
        ends: [a.to_owned(), b.to_owned()],
        generation,
        lanes,
        length: None,
    };
    let mut level = Vec::new();
    for nth in 0..hosts {
        let host = format!("h{nth}");
        let (drive, ntb) = (format!("{host}/nvme0"), format!("{host}/ntb"));
        text += &format!("[hosts.{host}]\niommu = {}\n", nth % 2 == 0);
        text += &format!("[hosts.{host}.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 GiB\"\n");
        physical.links.extend([cable(&host, &drive, 3, 4), cable(&host, &ntb, 3, 16)]);
        physical.adapters.push(Adapter { name: ntb.clone(), host });
        level.push(ntb);
    }
    while level.len() > 1 {
        let mut above = Vec::new();
        for below in level.chunks(PORTS) {
            let name = format!("s{}", physical.switches.len());
            physical.links.extend(below.iter().map(|part| cable(part, &name, 4, 16)));
            physical.switches.push(Switch { name: name.clone(), host: None, cxl: false });
            above.push(name);
        }
        level = above;
    }
    let mut rack = Rack::parse("rack", &text).map_err(refused)?;
    rack.fabric = Some(physical);
    Ok(rack)
}

/// Reads and writes of random drives, to the memory of random hosts: all of them, or of those below the drive's switch.
fn workload(hosts: u64, flows: u64, within: bool) -> Workload {
    let mut random = RandomSequence::new(1);
    let flow = |nth: u64| {
        let from = random.below(hosts);
        let to = match (within, PORTS as u64) {
            (false, _) => random.below(hosts),
            (true, ports) => {
                let first = from / ports * ports;
                first + random.below(ports.min(hosts - first))
            }
        };
        let (from, to) = (format!("h{from}/nvme0"), format!("h{to}"));
        let kind = match nth % 2 {
            0 => FlowKind::Read { from, to },
            _ => FlowKind::Write { from, to },
        };
        FlowSpec::new(&format!("f{nth}"), kind, Arrivals::Depth(32), 4096)
    };
    let flows = (0..flows).map(flow).collect();
    Workload {
        seed: 1,
        duration: Time::from_us(1_000),
        warmup: Time::ZERO,
        units: Default::default(),
        shaping: Vec::new(),
        levels: Vec::new(),
        flows,
        notes: Vec::new(),
    }
}

impl Bench<'_> {
    /// A millisecond of a rack of 100 hosts, packet by packet.
    pub(super) fn packets(&mut self) -> Result<(), BenchError> {
        let case = "1 ms of 100 hosts, 400 flows, packets";
        if !self.wanted(case) {
            return Ok(());
        }
        let (rack, timing) = (rack(100)?, Timing::default());
        let workload = workload(100, 400, false);
        let took = || {
            let start = Instant::now();
            let results = run(&rack, &timing, &workload, u64::MAX).map_err(refused)?;
            let took = start.elapsed().as_secs_f64();
            match results.flows.iter().any(|flow| flow.jobs > 0) {
                true => Ok(took),
                false => Err(BenchError::Peer("nothing was done".to_owned())),
            }
        };
        self.rates(case, "the limit: less is better", "s", took, || Ok(LIMIT))
    }

    /// The same where flows stay below their switches: four parts that have nothing in common.
    pub(super) fn parts(&mut self) -> Result<(), BenchError> {
        let case = "1 ms of 100 hosts, 400 flows below four switches, all processors";
        if !self.wanted(case) {
            return Ok(());
        }
        let (rack, timing) = (rack(100)?, Timing::default());
        let workload = workload(100, 400, true);
        unpin();
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let speed = |threads: usize| {
            let start = Instant::now();
            let mut divided = Divided::new(&rack, &timing, &workload).map_err(refused)?;
            let spawned = |work: &(dyn Fn() + Sync)| {
                std::thread::scope(|scope| (0..threads).for_each(|_| _ = scope.spawn(work)));
            };
            divided.go(u64::MAX, &spawned).map_err(refused)?;
            match divided.len() {
                4 => Ok(1.0 / start.elapsed().as_secs_f64()),
                parts => Err(BenchError::Peer(format!("there are {parts} parts"))),
            }
        };
        let done = self.rates(case, "one processor", "ms/s", || speed(processors), || speed(1));
        pin(CLIENT_CPU);
        done
    }

    /// From rack and workload to the shares, ways included.
    pub(super) fn large(&mut self) -> Result<(), BenchError> {
        let case = "flow level, 10,000 hosts, 100,000 flows";
        if !self.wanted(case) {
            return Ok(());
        }
        let (rack, timing) = (rack(HOSTS)?, Timing::default());
        let workload = workload(HOSTS, FLOWS, false);
        let took = || {
            let start = Instant::now();
            let level = shares(&rack, &timing, &workload).map_err(refused)?;
            let took = start.elapsed().as_secs_f64();
            match level.flows.iter().all(|flow| flow.fair_bytes_per_second > 0.0) {
                true => Ok(took),
                false => Err(BenchError::Peer("a flow has no share".to_owned())),
            }
        };
        self.rates(case, "the limit: less is better", "s", took, || Ok(LIMIT))
    }
}
