//! Several drives at one memory: ten Samsung 980 PRO in a workstation (Tanel Poder, "Achieving 11M IOPS and 66 GB/s
//! IO on a single ThreadRipper workstation", 2021). What a drive does at most is what its data sheet says, so the rows
//! ask whether links, root and memory take the sum of them.

use rackbus_fabric::rack::{FunctionLimit, LimitCounts};

use crate::engine::Arrivals;
use crate::random::Distribution;
use crate::time::Time;
use crate::workload::{FlowKind, FlowSpec, QueuesIn};

use super::lab::{Lab, flow};
use super::{Kind, Row};

/// Bytes and commands of a drive each second, as its data sheet has them.
const BYTES: u64 = 7_000_000_000;
const COMMANDS: u64 = 1_000_000;
/// A drive's limits save up this part of a second.
const BURST: u64 = 20;
const DRIVES: u32 = 10;
const SPAN: Time = Time::from_us(5_000);

/// Bytes per second of all drives together, each with so many reads of so many bytes under way.
fn all_read(bytes: u64, depth: u32) -> f64 {
    let mut lab = Lab::changed("drives-direct", |rack, _| {
        let limits = [(LimitCounts::Bytes, BYTES), (LimitCounts::Operations, COMMANDS)];
        let limits =
            limits.map(|(counts, rate)| FunctionLimit { counts, rate, burst: rate / BURST });
        for device in rack.hosts.iter_mut().flat_map(|host| &mut host.devices) {
            device.timing.limits = limits.to_vec();
        }
    });
    let read = |nth: u32| -> FlowSpec {
        let kind = FlowKind::Ring {
            host: "host".to_owned(),
            device: format!("host/nvme{nth}"),
            descriptor: 64,
            input: 0,
            output: bytes,
            service: Distribution::Fixed(Time::from_us(70)),
            units: Some(depth),
            drive: true,
            queues_in: QueuesIn::Host,
            interrupt: true,
        };
        flow(kind, Arrivals::Depth(depth), u64::MAX, bytes)
    };
    lab.rates((0..DRIVES).map(read).collect(), SPAN).iter().sum()
}

pub(super) fn rows() -> Vec<Row> {
    let row = |case, published, modelled, unit| {
        Row::new(("D1", case), Kind::Measured, published, modelled, unit)
    };
    vec![
        row("ten drives, reads of 128 KiB", 66.0, all_read(128 << 10, 32) / 1e9, "GB/s"),
        row(
            "ten drives, reads of 4 KiB",
            11.0,
            all_read(4 << 10, 256) / f64::from(4 << 10) / 1e6,
            "M/s",
        ),
    ]
}
