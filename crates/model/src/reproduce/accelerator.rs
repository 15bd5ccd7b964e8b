//! Accelerator-as-a-Service: Zhao and others, 2024. Two tenants of a device contend for PCIe.

use crate::engine::{Arrivals, Until};
use crate::time::Time;
use crate::workload::{FlowKind, FlowSpec};

use super::Row;
use super::lab::{Lab, flow, read, wait, write};

pub(super) const NIC: &str = "host/nic";
pub(super) const FPGA: &str = "host/fpga";
/// RDMA reads of a queue pair that are under way at a time.
const OUTSTANDING_READS: u32 = 2;
/// How long each mixture is watched.
pub(super) const SPAN: Time = Time::from_us(400);
/// Shares that count as even.
const FAIR: (f64, f64) = (0.95, 1.05);
/// Message sizes of observations 5 and 6.
pub(super) const SIZES: [u64; 6] = [256, 512, 1024, 2048, 4096, 8192];

pub(super) fn rows() -> Vec<Row> {
    let mut rows = pairs();
    rows.extend(mixtures());
    rows.extend(directions());
    rows.extend(fairness());
    rows.extend(both_ways());
    rows.extend(tiny());
    rows
}

fn gbps(rate: f64) -> f64 {
    rate * 8.0 / 1e9
}

/// A queue pair's message: it moves, and the next follows after what a message costs the device.
fn message(lab: &Lab, bytes: u64, reads: bool) -> FlowSpec {
    let between = lab.timing().parts.get(NIC).and_then(|part| part.message);
    let between = wait(between.unwrap_or(Time::ZERO));
    let (steps, depth) = match reads {
        false => (vec![write(NIC, "host", bytes, Until::Issued), between], 1),
        true => {
            let steps = vec![read(NIC, "host", bytes), between, wait(lab.software("rdma-read"))];
            (steps, OUTSTANDING_READS)
        }
    };
    flow(FlowKind::Steps { steps }, Arrivals::Depth(depth), u64::MAX, bytes)
}

/// Rates in bytes per second of queue pairs beside each other: of each its message's bytes, and whether
/// it reads.
pub(super) fn queue_pairs(pairs: &[(u64, bool)]) -> Vec<f64> {
    let lab = &mut Lab::new("accelerator-connectx6");
    let flows = pairs.iter().map(|(bytes, read)| message(lab, *bytes, *read)).collect();
    lab.rates(flows, SPAN)
}

fn pairs() -> Vec<Row> {
    let rates = queue_pairs(&[(4096, false); 3]);
    let (two, one) = (gbps(rates[0] + rates[1]), gbps(rates[2]));
    vec![
        Row::calibrated(
            ("A4", "sum of both tenants"),
            (78.0, "timing.parts.\"host/nic\".engine"),
            two + one,
            "Gbps",
        ),
        Row::predicted(("A4", "tenant of two queue pairs"), 52.0, two, "Gbps"),
    ]
}

fn mixtures() -> Vec<Row> {
    let ratio = |bytes| {
        let rates = queue_pairs(&[(4096, false), (bytes, false)]);
        rates[0] / rates[1]
    };
    vec![
        Row::calibrated(
            ("A5", "4 KB against 256 B"),
            (10.5, "timing.parts.\"host/nic\".message"),
            ratio(256),
            "ratio",
        ),
        Row::predicted(("A5", "4 KB against 8 KB"), 0.83, ratio(8192), "ratio").note(
            "what a message costs besides its bytes is one number here; 690 ns fit 256 B, 300 ns would fit \
             8 KB",
        ),
    ]
}

fn directions() -> Vec<Row> {
    let ratios = SIZES.map(|bytes| {
        let rates = queue_pairs(&[(bytes, false), (bytes, false), (bytes, true), (bytes, true)]);
        (rates[0] + rates[1]) / (rates[2] + rates[3])
    });
    let most = ratios.iter().copied().fold(0.0, f64::max);
    let least = ratios.iter().copied().fold(f64::MAX, f64::min);
    vec![
        Row::calibrated(
            ("A6", "writes over reads, greatest"),
            (3.39, "timing.software.rdma-read, with two outstanding reads"),
            most,
            "ratio",
        ),
        Row::predicted(("A6", "writes over reads, least"), 1.08, least, "ratio"),
    ]
}

/// Rates in bytes per second of two tenants of the prototype, each with messages to spare: of each its
/// message's bytes, and whether it reads.
pub(super) fn tenants(of: [(u64, bool); 2]) -> [f64; 2] {
    let lab = &mut Lab::new("accelerator-arria10");
    let flows = of.map(|(bytes, reads)| {
        let (from, to) = (FPGA.to_owned(), "host".to_owned());
        let kind = match reads {
            true => FlowKind::Read { from, to },
            false => FlowKind::Write { from, to },
        };
        flow(kind, Arrivals::Depth(64), u64::MAX, bytes)
    });
    let rates = lab.rates(flows.into(), SPAN);
    [rates[0], rates[1]]
}

/// Table 2: which of operations and bytes are shared evenly.
fn fairness() -> Vec<Row> {
    let mut rows = Vec::new();
    for (read, what) in [(true, "reads"), (false, "writes")] {
        // Of reads MRRS is the boundary, 512 bytes; of writes MPS, 256 bytes.
        let (below, above) = if read { (512, 1024) } else { (256, 512) };
        let shares = |one, other| {
            let [a, b] = tenants([(one, read), (other, read)]);
            (a / b, a / one as f64 / (b / other as f64))
        };
        let fair = |ratio: f64| (FAIR.0..=FAIR.1).contains(&ratio);
        let mut add = |case: &str, one, other, bytes_fair, operations_fair| {
            let (bytes, operations) = shares(one, other);
            let (says, besides) = match (bytes_fair, operations_fair) {
                (false, true) => ("IOPS fair, Gbps unfair", !fair(bytes)),
                (true, false) => ("Gbps fair, IOPS unfair", !fair(operations)),
                _ => ("neither", !fair(operations)),
            };
            let (shown, range) = match (operations_fair, bytes_fair) {
                (true, _) => (operations, FAIR),
                (false, true) => (bytes, FAIR),
                (false, false) => (bytes, (0.0, FAIR.0)),
            };
            let case = format!("{what}, {case}: {one} and {other} B");
            rows.push(Row::relation(("A7", &case), says, range, shown).and(besides));
        };
        add("both small", below, 64, false, true);
        add("both large", above, 4096, true, false);
        add("mixed", 64, 4096, false, false);
    }
    rows
}

/// Observation 9: 4 KB reads beside writes of several sizes.
fn both_ways() -> Vec<Row> {
    let spread = |values: &[f64]| {
        let most = values.iter().copied().fold(0.0, f64::max);
        most / values.iter().copied().fold(f64::MAX, f64::min) - 1.0
    };
    let rates: Vec<[f64; 2]> =
        SIZES[..5].iter().map(|bytes| tenants([(4096, true), (*bytes, false)])).collect();
    let reads: Vec<f64> = rates.iter().map(|rates| rates[0]).collect();
    let writes: Vec<f64> = rates.iter().map(|rates| rates[1]).collect();
    let (one, other) = (spread(&reads), spread(&writes));
    let (less, more) = (one.min(other), one.max(other));
    vec![
        Row::relation(("A8", "the steadier direction varies by"), "near zero", (0.0, 0.02), less),
        Row::relation(("A8", "the other varies by"), "within 10 %", (0.0, 0.1), more),
    ]
}

/// Observation 10: 4 KB writes beside tiny ones.
fn tiny() -> Vec<Row> {
    let total = |bytes| gbps(tenants([(4096, false), (bytes, false)]).iter().sum());
    let [whole, half, quarter] = [64, 32, 16].map(total);
    vec![
        Row::predicted(("A9", "with 64 B writes"), 51.0, whole, "Gbps"),
        Row::calibrated(
            ("A9", "with 32 B writes"),
            (51.0 * 0.72, "timing.memory.partial_write"),
            half,
            "Gbps",
        )
        .says("28 % less than 51"),
        Row::predicted(("A9", "with 16 B writes"), 51.0 * 0.15, quarter, "Gbps").says("85 % less than 51").note(
            "a write of less than a line costs the same read of the line, whatever its size; the paper's \
             \"take over PCIe credits within the root complex\" does not say what makes 16 B cost ten times 32 B",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the steps that published rates are held against, where others' bytes do not make a write take longer.
    #[test]
    fn flows_of_writes_have_the_rates_of_their_messages() {
        let sizes: [&[u64]; 3] = [&[4096], &[4096; 3], &[4096, 256]];
        for sizes in sizes {
            let steps = queue_pairs(&sizes.iter().map(|bytes| (*bytes, false)).collect::<Vec<_>>());
            let write = |bytes: &u64| {
                let kind = FlowKind::Write { from: NIC.to_owned(), to: "host".to_owned() };
                flow(kind, Arrivals::Depth(8), u64::MAX, *bytes)
            };
            let flows =
                Lab::new("accelerator-connectx6").rates(sizes.iter().map(write).collect(), SPAN);
            for (steps, flow) in steps.iter().zip(flows) {
                assert!((flow / steps - 1.0).abs() < 0.05, "{sizes:?}: {flow} and {steps}");
            }
        }
    }
}
