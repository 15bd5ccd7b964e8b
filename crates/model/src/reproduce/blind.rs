//! Blind sets: measurements whose inputs were committed before the measured values were looked up
//! (`docs/book/src/validation.md` says which, and from which lines of which files they are). Nothing here is
//! removed or changed.

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

pub(super) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    let mut add = |case: String, published, modelled, unit| {
        let row = Row::new(("P3", &case), Kind::Blind, published, modelled, unit);
        let note = if case.starts_with("E3") { Some(DESKTOP) } else { why(&row) };
        rows.push(Row { note, ..row });
    };
    for (host, profile, reads, writes, latencies) in HOSTS {
        for (nth, bytes) in HOSTS_SIZES.into_iter().enumerate() {
            let case = |what| format!("{host}, {what} of {bytes} B");
            add(case("reads"), reads[nth], rate_of(profile, true, bytes), "Gbps");
            add(case("writes"), writes[nth], rate_of(profile, false, bytes), "Gbps");
            add(case("a read"), latencies[nth], latency(profile, bytes), "ns");
        }
    }
    for (host, profile, published) in IOMMUS {
        for (window, published) in WINDOWS.into_iter().zip(published) {
            let case = format!("{host}, IOMMU, reads of 64 B in {window} KiB");
            add(case, published, window_rate(profile, window), "Gbps");
        }
    }
    rows
}

/// Why the rows of the E3 are far off.
const DESKTOP: &str = "the board takes 1.2 us for a read of 64 B, three times what the profile of a desktop with the \
                       same core has, and 10.7 Gbps of such writes; what delays it nobody published";
