//! Virtualized SISCI: a processor's stores into a remote segment, as scibench2 and scipp measure them.

use crate::engine::Until;

use super::Row;
use super::lab::{Lab, store, wait, write};

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
    // From 2 KB on one computation gives them all: the wire's rate. It is printed once.
    let mut rows = bandwidths("S1", "sisci-ixh610", &IXH610, &[1, 1024]);
    // So it is with the processor's rate from 64 KB on; 8 MB is beyond the processor's cache.
    rows.extend(bandwidths("S2", "sisci-pxh830", &PXH830, &[1, 2, 4, 8, 32, 1024, 8192]));
    rows.extend(latencies());
    rows
}

/// Bytes per second of a loop that copies `bytes` into a remote segment and flushes.
fn bandwidth(testbed: &str, bytes: u64) -> f64 {
    let lab = &mut Lab::new(testbed);
    let call = lab.timing().host.cpu.copy_call;
    let script = vec![wait(call), write("client", "server", bytes, Until::Issued)];
    lab.rate(script, 1, (4 << 20) / bytes + 2, bytes)
}

fn bandwidths(id: &'static str, testbed: &str, published: &[f64; 11], shown: &[u64]) -> Vec<Row> {
    let row = |(kib, of): (&u64, &f64)| {
        let modelled = bandwidth(testbed, kib << 10) / 1e6;
        let case = if *kib < 1024 { format!("{kib} KB") } else { format!("{} MB", kib >> 10) };
        let parameter = match (id, kib) {
            ("S2", 1) => Some("timing.cpu.copy_call"),
            ("S2", 1024) => Some("timing.cpu.fill"),
            _ => None,
        };
        match parameter {
            Some(parameter) => Row::calibrated((id, &case), (*of, parameter), modelled, "MB/s"),
            None => Row::predicted((id, &case), *of, modelled, "MB/s"),
        }
    };
    let all = SIZES.iter().zip(published);
    all.filter(|(kib, _)| shown.contains(kib)).map(row).collect()
}

fn latencies() -> Vec<Row> {
    let row = |(nth, of): (usize, &f64)| {
        let bytes = 4 << nth;
        let lab = &mut Lab::new("sisci-ixh610");
        let script = vec![store("client", "server", bytes), store("server", "client", bytes)];
        let half = lab.time(script).us() / 2.0;
        let case = format!("{bytes} B");
        match nth {
            0 => Row::calibrated(("S5", &case), (*of, "timing.ntb.latency"), half, "us"),
            _ => Row::predicted(("S5", &case), *of, half, "us"),
        }
    };
    LATENCY.iter().enumerate().map(row).collect()
}
