//! Virtualized SISCI: a processor's stores into a remote segment, as scibench2 and scipp measure them.

use crate::engine::{Step, Until};

use super::lab::Lab;
use super::{Kind, Row};

/// Kibibytes of each write.
const SIZES: [u64; 11] = [1, 2, 4, 8, 32, 64, 256, 1024, 2048, 4096, 8192];
/// Table 5.4, native: MB/s.
const IXH610: [f64; 11] =
    [2831.0, 2875.0, 2880.0, 2888.0, 2894.0, 2886.0, 2890.0, 2892.0, 2893.0, 2892.0, 2878.0];
/// Table 5.5, native: MB/s.
const PXH830: [f64; 11] =
    [4058.0, 5322.0, 5798.0, 6075.0, 6301.0, 5985.0, 6103.0, 6201.0, 6202.0, 6174.0, 5682.0];
/// Table 5.6, native: microseconds, from 4 bytes on, each twice the one before.
const LATENCY: [f64; 12] =
    [0.710, 0.712, 0.715, 0.719, 0.757, 0.780, 0.827, 0.914, 1.075, 1.429, 2.138, 3.572];

pub(super) fn rows() -> Vec<Row> {
    let mut rows = bandwidths("S1", "sisci-ixh610", &IXH610, &[]);
    rows.extend(bandwidths("S2", "sisci-pxh830", &PXH830, &[1, 1024, 2048]));
    rows.extend(latencies());
    rows
}

/// Bytes per second of a loop that copies `bytes` into a remote segment and flushes.
fn bandwidth(testbed: &str, bytes: u64) -> f64 {
    let lab = &mut Lab::new(testbed);
    let source = lab.source("client");
    let way = lab.way("client", "server");
    let call = lab.timing().host.cpu.copy_call;
    let until = Until::Issued;
    let script = vec![
        Step::Wait(call),
        Step::Write { stream: source.stream, way, address: 0, bytes, until },
    ];
    lab.rate(script, 1, (4 << 20) / bytes + 2, bytes)
}

fn bandwidths(
    id: &'static str,
    testbed: &str,
    published: &[f64; 11],
    calibrated: &[u64],
) -> Vec<Row> {
    let row = |(kib, of): (&u64, &f64)| {
        let modelled = bandwidth(testbed, kib << 10) / 1e6;
        let case = if *kib < 1024 { format!("{kib} KB") } else { format!("{} MB", kib >> 10) };
        let kind = if calibrated.contains(kib) { Kind::Calibrated } else { Kind::Predicted };
        Row::new((id, &case), kind, *of, modelled, "MB/s")
    };
    SIZES.iter().zip(published).map(row).collect()
}

fn latencies() -> Vec<Row> {
    let row = |(nth, of): (usize, &f64)| {
        let bytes = 4 << nth;
        let lab = &mut Lab::new("sisci-ixh610");
        let mut script = lab.store("client", "server", bytes);
        script.extend(lab.store("server", "client", bytes));
        let half = lab.time(script).us() / 2.0;
        let kind = if nth == 0 { Kind::Calibrated } else { Kind::Predicted };
        Row::new(("S5", &format!("{bytes} B")), kind, *of, half, "us")
    };
    LATENCY.iter().enumerate().map(row).collect()
}
