//! The set P6: what pcie-bench measured of reads and writes at once, large pages, and memory beyond caches. What goes into
//! it was committed before the measured values were looked up (`docs/book/src/validation.md`). The rows of reads and writes
//! at once showed an error, by which the model was changed: they are *measured* since, the others are *blind*.

use crate::engine::{Arrivals, Until};
use crate::timing::profiles;
use crate::workload::{FlowKind, FlowSpec, Move, MoveKind, StepSpec};

use super::lab::{Lab, flow};
use super::pcie_bench::{HOSTS_SIZES, NFP, SIZE_OF_BUFFERS, SPAN, Values, gbps, transactions};
use super::{Kind, Row, Verdict};

/// Jobs at a time, each a read and a write.
const PAIRS: u32 = 64;

/// The testbed in a host of a profile; where its IOMMU has large pages, addresses are below 4 GiB.
fn lab(profile: &str, large_pages: bool) -> Lab {
    Lab::changed("pcie-bench-nfp", |rack, timing| {
        timing.host = profiles::all()[profile].clone();
        if large_pages {
            timing.host.iommu.page = 2 << 20;
            rack.hosts.iter_mut().for_each(|host| {
                (host.iommu, host.memory) = (true, 2 << 30);
            });
        }
    })
}

/// Gbps of one direction, of reads and writes in turns.
fn mixed(profile: &str, bytes: u64) -> f64 {
    let [read, write] = [MoveKind::Read, MoveKind::Write].map(|how| {
        let ends = vec![NFP.to_owned(), "host".to_owned()];
        let (channel, until) = (String::new(), Until::Landed);
        StepSpec::Move(Move { how, ends, bytes, at: 0, channel, until })
    });
    let kind = FlowKind::Steps { steps: vec![read, write] };
    let pairs = flow(kind, Arrivals::Depth(PAIRS), u64::MAX, bytes);
    let pairs = FlowSpec { random: true, span: SIZE_OF_BUFFERS, ..pairs };
    gbps(lab(profile, false).rates(vec![pairs], SPAN)[0])
}

/// Gbps of reads or writes in a window of so many MiB.
fn windowed(profile: &str, large_pages: bool, (reads, bytes): (bool, u64), window: u64) -> f64 {
    let spec = FlowSpec { span: window << 20, ..transactions(reads, bytes) };
    gbps(lab(profile, large_pages).rates(vec![spec], SPAN)[0])
}

/// By host: its profile, and Gbps of one direction by size, of reads and writes in turns.
const MIXED: [(&str, &str, Values); 5] = [
    ("E5-2637 v3", "xeon-e5-v3", [22.950, 33.823, 42.078, 42.672, 43.841, 49.169]),
    ("E5-2630 v4", "xeon-e5-v4", [23.084, 33.856, 42.087, 42.678, 43.556, 52.000]),
    ("E5-2620 v3", "xeon-e5-v3", [22.985, 33.736, 42.161, 42.671, 43.831, 49.142]),
    ("E5-2620 v2", "xeon-e5-v3", [22.910, 33.723, 42.069, 42.669, 43.834, 49.131]),
    ("E5-2630", "xeon-e5-v3", [23.046, 33.879, 42.049, 42.676, 43.842, 48.959]),
];

/// Whether reads or writes, and of how many bytes.
type Transaction = (bool, u64);

/// By host: Gbps in 1 and in 64 MiB with the IOMMU on, of each of these.
const LARGE: [Transaction; 4] = [(true, 64), (true, 256), (false, 64), (false, 256)];
const LARGE_PAGES: [(&str, [[f64; 2]; 4]); 3] = [
    ("E5-2620 v3", [[28.060, 28.673], [46.681, 46.815], [24.267, 24.268], [50.488, 50.488]]),
    ("E5-2620 v2", [[27.420, 27.944], [46.310, 46.345], [24.267, 24.268], [50.546, 50.547]]),
    ("E5-2630", [[3.905, 8.474], [14.003, 29.787], [4.005, 9.504], [16.342, 38.858]]),
];

/// By host: its profile, and Gbps in 64 MiB, of each of these.
const FAR: [Transaction; 4] = [(true, 64), (true, 512), (false, 64), (false, 512)];
const BEYOND_CACHES: [(&str, &str, [f64; 4]); 4] = [
    ("E5-2630 v4", "xeon-e5-v4", [28.116, 55.015, 24.269, 53.232]),
    ("E5-2620 v3", "xeon-e5-v3", [28.588, 55.038, 24.269, 53.234]),
    ("E5-2620 v2", "xeon-e5-v3", [28.025, 55.354, 24.269, 54.446]),
    ("E5-2630", "xeon-e5-v3", [28.154, 55.723, 24.269, 54.449]),
];

pub(super) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    let mut add = |kind, case: String, published, modelled| {
        rows.push(Row::new(("P6", &case), kind, published, modelled, "Gbps"));
    };
    let what = |(reads, bytes): Transaction| {
        format!("{} of {bytes} B", if reads { "reads" } else { "writes" })
    };
    for (host, profile, published) in MIXED {
        for (bytes, published) in HOSTS_SIZES.into_iter().zip(published) {
            let case = format!("{host}, reads and writes of {bytes} B");
            add(Kind::Measured, case, published, mixed(profile, bytes));
        }
    }
    for (host, published) in LARGE_PAGES {
        for (of, published) in LARGE.into_iter().zip(published) {
            for (mib, published) in [1, 64].into_iter().zip(published) {
                let case = format!("{host}, large pages, {} in {mib} MiB", what(of));
                add(Kind::Blind, case, published, windowed("xeon-e5-v3", true, of, mib));
            }
        }
    }
    for (host, profile, published) in BEYOND_CACHES {
        for (of, published) in FAR.into_iter().zip(published) {
            let case = format!("{host}, {} in 64 MiB", what(of));
            add(Kind::Blind, case, published, windowed(profile, false, of, 64));
        }
    }
    for row in &mut rows {
        row.note = why(row);
    }
    rows
}

/// What is known of rows that are far off, and why some are blind no more.
fn why(row: &Row) -> Option<&'static str> {
    let case = &row.case;
    if row.kind == Kind::Measured {
        return Some(if row.verdict == Verdict::Miss { SHORT_PAIRS } else { KNOWN });
    }
    if case.starts_with("E5-2630,") && case.contains("large pages") {
        return Some(SMALL_PAGES);
    }
    case.contains("reads of 64 B").then_some(COLD)
}

const KNOWN: &str =
    "blind when it was first run; the model was changed by what these rows showed, see the book";
const SHORT_PAIRS: &str = "the card takes more time for a read beside a write than its link does, in all hosts alike; the testbed knows its \
                           writes' alone. Blind when it was first run; the model was changed by what these rows showed, see the book";
const SMALL_PAGES: &str = "this host's rates are those of pages of 4 KiB or worse: it has no large ones, and the raw data does not tell why";
const COLD: &str = "the root's half microsecond is of reads that find their lines in the processor's cache, which is not modelled";
