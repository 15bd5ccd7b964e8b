//! Blind sets: measurements whose inputs were committed before the measured values were looked up
//! (`docs/book/src/validation.md` says which, and from which lines of which files they are). Nothing here is
//! removed or changed: what was learnt later from rows that are so near to these that it is no news here is left out
//! of their hosts' profiles ([`committed`]).

use crate::timing::{HostTiming, MemoryTiming, profiles};

use super::pcie_bench::{HOSTS_SIZES, Values, latency, rate_of, why, window_rate};
use super::{Kind, Row};

/// By host: its name, its profile, Gbps of reads and of writes, and nanoseconds of a read, by size.
const HOSTS: [(&str, &str, Values, Values, Values); 2] = [
    (
        "E5-2620 v3",
        "xeon-e5-v3",
        [32.019, 43.730, 47.778, 55.040, 49.830, 55.276],
        [24.269, 42.355, 50.488, 53.013, 53.013, 53.013],
        [546.0, 573.0, 626.0, 706.0, 853.0, 1133.0],
    ),
    (
        "E3-1226 v3",
        "desktop",
        [22.990, 42.408, 29.043, 51.299, 51.991, 51.464],
        [10.713, 18.026, 34.081, 35.265, 31.832, 40.158],
        [1226.0, 1226.0, 1240.0, 1306.0, 2000.0, 1733.0],
    ),
];

/// Windows in KiB, and by host Gbps of 64 B reads in them with the IOMMU on.
const WINDOWS: [u64; 4] = [256, 1024, 4096, 65536];
const IOMMUS: [(&str, &str, [f64; 4]); 2] = [
    ("E5-2637 v3", "xeon-e5-v3", [26.233, 14.365, 10.696, 9.840]),
    ("E5-2620 v3", "xeon-e5-v3", [28.172, 15.156, 10.999, 10.053]),
];

/// A profile as it was when P3 and P4 were committed. What long reads are answered with was learnt after they had been run,
/// from other sizes of reads of two of their hosts.
fn committed(profile: &str) -> HostTiming {
    let host = profiles::all()[profile].clone();
    HostTiming { memory: MemoryTiming { long_read: 0, ..host.memory.clone() }, ..host }
}

pub(super) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    let mut add = |case: String, published, modelled, unit| {
        let row = Row::new(("P3", &case), Kind::Blind, published, modelled, unit);
        let note = if case.starts_with("E3") { Some(DESKTOP) } else { why(&row) };
        rows.push(Row { note, ..row });
    };
    for (host, profile, reads, writes, latencies) in HOSTS {
        let of = ("pcie-bench", committed(profile));
        for (nth, bytes) in HOSTS_SIZES.into_iter().enumerate() {
            let case = |what| format!("{host}, {what} of {bytes} B");
            add(case("reads"), reads[nth], rate_of(&of, true, bytes), "Gbps");
            add(case("writes"), writes[nth], rate_of(&of, false, bytes), "Gbps");
            add(case("a read"), latencies[nth], latency(&of, bytes), "ns");
        }
    }
    for (host, profile, published) in IOMMUS {
        let of = committed(profile);
        for (window, published) in WINDOWS.into_iter().zip(published) {
            let case = format!("{host}, IOMMU, reads of 64 B in {window} KiB");
            add(case, published, window_rate(&of, (true, 64), window), "Gbps");
        }
    }
    rows.extend(more_windows());
    rows.extend(earlier_families());
    rows
}

/// The second set: other sizes, and writes.
fn more_windows() -> Vec<Row> {
    let mut rows = Vec::new();
    for (host, profile, published) in MORE {
        let of = committed(profile);
        for (nth, published) in published.into_iter().enumerate() {
            let (reads, bytes) = (nth < 3, SIZES[nth % 3]);
            let what = if reads { "reads" } else { "writes" };
            for (window, published) in WINDOWS.into_iter().zip(published) {
                let case = format!("{host}, IOMMU, {what} of {bytes} B in {window} KiB");
                let modelled = window_rate(&of, (reads, bytes), window);
                let row = Row::new(("P4", &case), Kind::Blind, published, modelled, "Gbps");
                let note = if reads { READS } else { WRITES };
                rows.push(row.note(note));
            }
        }
    }
    rows
}

/// The third set: servers of earlier families, with what is known of the card.
fn earlier_families() -> Vec<Row> {
    let of = ("pcie-bench-nfp", profiles::all()["xeon-e5-v3"].clone());
    let mut rows = Vec::new();
    let mut add = |case: String, published, modelled, unit| {
        let note = if case.contains("a read of") { FAMILIES } else { RUNS };
        rows.push(Row::new(("P5", &case), Kind::Blind, published, modelled, unit).note(note));
    };
    for (host, reads, writes, latencies) in EARLIER {
        for (nth, bytes) in EARLIER_SIZES.into_iter().enumerate() {
            let case = |what| format!("{host}, {what} of {bytes} B");
            add(case("reads"), reads[nth], rate_of(&of, true, bytes), "Gbps");
            add(case("writes"), writes[nth], rate_of(&of, false, bytes), "Gbps");
        }
        for (bytes, published) in EARLIER_LATENCIES.into_iter().zip(latencies) {
            add(format!("{host}, a read of {bytes} B"), published, latency(&of, bytes), "ns");
        }
    }
    for (bytes, published) in EARLIER_WINDOWS {
        for (window, published) in WINDOWS.into_iter().zip(published) {
            let case = format!("E5-2620 v2, IOMMU, reads of {bytes} B in {window} KiB");
            add(case, published, window_rate(&of.1, (true, bytes), window), "Gbps");
        }
    }
    rows
}

/// Bytes of transactions of the third set, of which Gbps are compared, and of which latencies are.
const EARLIER_SIZES: [u64; 6] = [64, 256, 512, 768, 1024, 1536];
const EARLIER_LATENCIES: [u64; 4] = [64, 256, 1024, 2048];
/// By host: Gbps of reads and of writes, and nanoseconds of a read.
const EARLIER: [(&str, Values, Values, [f64; 4]); 2] = [
    (
        "E5-2630",
        [32.094, 47.801, 55.724, 48.703, 50.055, 55.461],
        [24.269, 50.547, 54.445, 53.092, 54.445, 54.445],
        [560.0, 626.0, 853.0, 1133.0],
    ),
    (
        "E5-2620 v2",
        [31.928, 47.491, 55.355, 48.432, 49.751, 55.364],
        [24.269, 50.548, 54.446, 53.093, 54.446, 54.446],
        [560.0, 626.0, 853.0, 1146.0],
    ),
];
/// By bytes of a read: Gbps in each of [`WINDOWS`] with the E5-2620 v2's IOMMU on.
const EARLIER_WINDOWS: [(u64, [f64; 4]); 3] = [
    (64, [27.743, 14.477, 10.144, 9.207]),
    (256, [46.407, 41.898, 35.952, 31.664]),
    (512, [55.340, 54.885, 53.328, 51.487]),
];
const FAMILIES: &str =
    "the profile is that of a later family, and has the paper's round half microsecond";
const RUNS: &str = "the card and the paper's IOMMU are what the other sets have of them";

/// Bytes of transactions of the second set.
const SIZES: [u64; 3] = [128, 256, 512];
/// By host and window: Gbps of reads of each size, then of writes, with the IOMMU on.
const MORE: [(&str, &str, [[f64; 4]; 6]); 2] = [
    (
        "E5-2630 v4",
        "xeon-e5-v4",
        [
            [41.947, 27.646, 21.027, 19.484],
            [46.434, 40.890, 35.954, 33.533],
            [55.024, 54.763, 54.396, 53.647],
            [42.355, 40.645, 25.423, 23.070],
            [50.488, 50.488, 49.840, 45.289],
            [54.438, 54.382, 54.413, 54.428],
        ],
    ),
    (
        "E5-2637 v3",
        "xeon-e5-v3",
        [
            [41.885, 27.663, 20.926, 19.101],
            [46.071, 40.950, 35.998, 33.749],
            [55.097, 54.853, 54.735, 54.570],
            [42.401, 41.362, 25.751, 23.374],
            [50.545, 50.545, 50.290, 46.243],
            [54.435, 54.475, 54.530, 54.441],
        ],
    ),
];
const READS: &str = "as P2's and P3's: entries and walks are of the paper's text, and completions of 64 B of these profiles";
const WRITES: &str = "the NFP makes fewer packets than the link carries; its writes find more of their translations than reads do";

/// Why the rows of the E3 are far off.
const DESKTOP: &str = "the board takes 1.2 us for a read of 64 B, three times what the profile of a desktop with the \
                       same core has, and 10.7 Gbps of such writes; what delays it nobody published";
