//! The simulation: a drive that reads its host's memory.

use rackbus_fabric::rack::Rack;
use rackbus_model::engine::Arrivals;
use rackbus_model::time::Time;
use rackbus_model::timing::Timing;
use rackbus_model::workload::{self, Run, Workload};

use super::events::{bare_heap, rate};
use super::{Bench, refused};
use crate::BenchError;

/// A drive on a root port.
const RACK: &str = r#"
name = "drive"
[hosts.alpha]
iommu = false
[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "1 GiB"
[[fabric.links]]
ends = ["alpha", "alpha/nvme0"]
generation = 3
lanes = 4
"#;
const READS: &str = r#"
[flows.reads]
kind = "read"
from = "alpha/nvme0"
to = "alpha"
size = "4 KiB"
depth = 32
"#;
/// Events of the bare heap that a read may cost: its packets are 8 requests and 16 completions.
const EVENTS: f64 = 60.0;
/// Bytes of a read request.
const REQUEST: u64 = 512;

/// The rack in which `workload` has been simulated.
fn simulate(workload: &Workload, timing: &Timing) -> Result<Run, BenchError> {
    let rack = Rack::parse("rack", RACK).map_err(refused)?;
    let mut run = Run::new(&rack, timing, workload).map_err(refused)?;
    run.go(u64::MAX).map_err(refused)?;
    Ok(run)
}

/// Bytes in memory for each of so many read requests under way at once.
fn memory(count: u32) -> Result<f64, BenchError> {
    let mut workload = workload::parse("workload", READS).map_err(refused)?;
    // A request takes 6 ns of the link: all are sent by then, and one in twenty has ended.
    (workload.warmup, workload.duration) = (Time::ZERO, Time::from_ns(8 * u64::from(count)));
    workload.flows[0].size = REQUEST;
    workload.flows[0].arrivals = Arrivals::Depth(count);
    let mut timing = Timing::default();
    timing.device.tags = count;
    timing.link.nonposted = count;
    let run = simulate(&workload, &timing)?;
    Ok(run.assembly.world.memory() as f64 / f64::from(count))
}

impl Bench<'_> {
    /// How fast it simulates, and what it needs.
    pub(super) fn reads(&mut self) -> Result<(), BenchError> {
        let time = self.settings.time;
        let case = "4 KiB DMA reads";
        if self.wanted(case) {
            let mut workload = workload::parse("workload", READS).map_err(refused)?;
            (workload.warmup, workload.duration) = (Time::ZERO, Time::from_us(10_000));
            let timing = Timing::default();
            let batch = || {
                let results = simulate(&workload, &timing)?.results();
                Ok(results.flows.iter().map(|flow| flow.jobs).sum())
            };
            self.rates(
                case,
                "bare BinaryHeap, k=1024, 60 events each",
                "k reads/s",
                || Ok(rate(time, batch)? / 1e3),
                || Ok(bare_heap(1024, time) / EVENTS / 1e3),
            )?;
        }
        let case = "memory of a read under way, of 1 Mi";
        if self.wanted(case) {
            let (peer, unit) = ("the same of 64 Ki: linear", "B");
            self.rates(case, peer, unit, || memory(1 << 20), || memory(1 << 16))?;
        }
        Ok(())
    }
}
