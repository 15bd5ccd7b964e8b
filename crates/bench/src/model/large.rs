//! Fair shares in a large rack.

use std::time::Instant;

use rackbus_fabric::rack::{Adapter, Cable, Physical, Rack, Switch};
use rackbus_model::engine::Arrivals;
use rackbus_model::flow::rack::shares;
use rackbus_model::random::Random;
use rackbus_model::time::Time;
use rackbus_model::timing::Timing;
use rackbus_model::workload::{FlowKind, FlowSpec, Workload, run};

use super::{Bench, refused};
use crate::BenchError;

const HOSTS: u64 = 10_000;
const FLOWS: u64 = 100_000;
/// Seconds that it may take.
const LIMIT: f64 = 10.0;
/// Links below a switch.
const PORTS: usize = 31;

/// Hosts with a drive and an NTB each, below a tree of switches; every other one has an IOMMU.
fn rack(hosts: u64) -> Result<Rack, BenchError> {
    let mut text = "name = \"large\"\n".to_owned();
    let mut physical = Physical::default();
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

/// Reads and writes of random drives, to random hosts' memory.
fn workload(hosts: u64, flows: u64) -> Workload {
    let mut random = Random::new(1);
    let flow = |nth: u64| {
        let [from, to] = [(); 2].map(|()| format!("h{}", random.below(hosts)));
        let from = format!("{from}/nvme0");
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
        let (rack, workload, timing) = (rack(100)?, workload(100, 400), Timing::default());
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

    /// From rack and workload to the shares, ways included.
    pub(super) fn large(&mut self) -> Result<(), BenchError> {
        let case = "flow level, 10,000 hosts, 100,000 flows";
        if !self.wanted(case) {
            return Ok(());
        }
        let (rack, workload, timing) = (rack(HOSTS)?, workload(HOSTS, FLOWS), Timing::default());
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
