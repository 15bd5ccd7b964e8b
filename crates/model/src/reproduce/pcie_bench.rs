//! pcie-bench: what a device's DMA gets of a host, by size. Neugebauer and others, SIGCOMM 2018; the numbers are
//! the medians and rates of the raw data that they published (github.com/pcie-bench/data, directories
//! `nfp6000-1.2GHz_hsw-Xeon-E5-2637v3_supermicro` and `nfp6000-1.2GHz_bdw-Xeon-E5-2630v4-dell-t430-s0-s0-s0`,
//! files `bw_dma_sz_sweep.txt` and `lat_dma_sizes.txt`, warm cache, buffers of 8 KB).

use crate::engine::Arrivals;
use crate::timing::{HostTiming, profiles};
use crate::workload::{FlowKind, FlowSpec};

use super::lab::{Lab, flow};
use super::{Kind, Row};

pub(super) const NFP: &str = "host/nfp";
/// Bytes of a transaction.
pub(super) const HOSTS_SIZES: [u64; 6] = [64, 128, 256, 512, 1024, 2048];
/// A value for each of [`HOSTS_SIZES`].
pub(super) type Values = [f64; 6];
/// By host: its name there, its profile, Gbps of reads and of writes, and nanoseconds of a read.
const HOSTS: [(&str, &str, Values, Values, Values); 2] = [
    (
        "E5-2637 v3",
        "xeon-e5-v3",
        [28.650, 42.962, 46.892, 55.110, 49.103, 55.248],
        WRITES_V3,
        [600.0, 626.0, 666.0, 746.0, 906.0, 1173.0],
    ),
    (
        "E5-2630 v4",
        "xeon-e5-v4",
        [31.906, 43.766, 47.670, 55.034, 55.413, 55.579],
        WRITES_V4,
        [546.0, 573.0, 626.0, 706.0, 853.0, 1133.0],
    ),
];
const WRITES_V3: Values = [24.269, 42.402, 50.545, 54.443, 54.444, 54.444];
const WRITES_V4: Values = [24.269, 42.355, 50.488, 53.013, 53.013, 53.013];
/// Windows in KiB, and Gbps of 64 B reads in them with the E5-2630 v4's IOMMU on and pages of 4 KiB
/// (directory of that host, `-iommu-nosp`, file `bw_dma_win_sweep_rd_rnd_64.txt`, cold cache).
const WINDOWS: [(u64, f64); 4] = [(256, 27.580), (1024, 14.330), (4096, 10.653), (65536, 9.843)];
/// Jobs at a time that keep a device's DMA engine at work.
const DEEP: u32 = 64;
pub(super) const SIZE_OF_BUFFERS: u64 = 8 << 10;

pub(super) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for (host, profile, reads, writes, latencies) in HOSTS {
        for (nth, bytes) in HOSTS_SIZES.into_iter().enumerate() {
            let mut add = |what: &str, published, modelled, unit| {
                let case = format!("{host}, {what} of {bytes} B");
                rows.push(Row::new(("P1", &case), Kind::Measured, published, modelled, unit));
            };
            let of = ("pcie-bench-nfp", profiles::all()[profile].clone());
            let [read, write] = [true, false].map(|reads| rate_of(&of, reads, bytes));
            add("reads", reads[nth], read, "Gbps");
            add("writes", writes[nth], write, "Gbps");
            add("a read", latencies[nth], latency(&of, bytes), "ns");
        }
    }
    for row in &mut rows {
        if let Some(parameter) = set_by(&row.case) {
            let (case, published, modelled) = (row.case.clone(), row.published, row.modelled);
            *row = Row::calibrated(("P1", &case), (published, parameter), modelled, row.unit);
        }
    }
    for (window, published) in WINDOWS {
        let modelled = window_rate(&profiles::all()["xeon-e5-v4"], (true, 64), window);
        let case = format!("E5-2630 v4, IOMMU, reads of 64 B in {window} KiB");
        let parameter = "timing.iommu.entries and walk, which are of the paper's text";
        rows.push(Row::calibrated(("P2", &case), (published, parameter), modelled, "Gbps"));
    }
    for row in &mut rows {
        row.note = if row.case.ends_with("writes of 128 B") {
            Some(SHORT_WRITES)
        } else if row.case.ends_with("writes of 256 B") {
            Some(TWO_PACKETS)
        } else if row.case == "E5-2637 v3, reads of 1024 B" {
            Some(TWO_WAYS)
        } else if row.case.contains("reads of") && row.kind == Kind::Calibrated && row.id == "P1" {
            Some(LONGER)
        } else if row.case.ends_with("a read of 64 B") {
            Some(FIRMWARE)
        } else {
            why(row).filter(|_| row.id == "P2")
        };
    }
    rows
}

/// What was set by this row, or by rows of the same host that are so near to it that it proves nothing.
fn set_by(case: &str) -> Option<&'static str> {
    let is = |sizes: &[u32]| sizes.iter().any(|size| case.ends_with(&format!(" {size} B")));
    if case == "E5-2637 v3, a read of 64 B" {
        // The profile's root has the paper's half microsecond for such a read.
        return Some(
            "timing.root.latency of the profile, set by the paper's 0.5 us without the device",
        );
    }
    if case.contains("writes") && is(&[64]) {
        return Some("timing.device.write_gap and write_setup of the testbed");
    }
    if case.contains("writes") && is(&[256, 512, 1024, 2048]) {
        return Some(
            "timing.device.payload and write_gap of the testbed, set by writes of 129 to 513 B",
        );
    }
    let long = is(&[512, 1024, 2048]);
    if long && case.contains("reads") {
        return Some("timing.memory.long_completion of the profiles, set by reads of 257 to 384 B");
    }
    (long && case.starts_with("E5-2630 v4, a read of"))
        .then_some("timing.software.dma-per-kib of the testbed, set by reads of 768 and 1520 B")
}

const SHORT_WRITES: &str = "the card makes 41 million writes of 127 or 128 B a second, and 47 of 65; why fewer, the data does not tell";
const TWO_PACKETS: &str = "the card takes 40.5 ns for a write of 256 B, where two packets take it 38 ns by writes of 129 to 192 B; why, the data does not tell";
const TWO_WAYS: &str =
    "this host answers reads of 257 to 1024 B in two ways, 10 % apart; why, nobody published";
const LONGER: &str = "more than completions of 128 B carry by this link: some of these are longer, and which, the rates do not tell";
const FIRMWARE: &str = "two servers of one family differ by 54 ns here; the profile has the paper's round half microsecond";

/// A testbed, and what its host is taken to be.
pub(super) type Machine = (&'static str, HostTiming);

/// How long each is watched.
pub(super) const SPAN: crate::time::Time = crate::time::Time::from_us(500);

pub(super) fn gbps(rate: f64) -> f64 {
    rate * 8.0 / 1e9
}

fn lab((testbed, host): &Machine) -> Lab {
    Lab::changed(testbed, |_, timing| timing.host = host.clone())
}

/// Reads or writes at random places of the buffer, as many as the engine can do.
pub(super) fn transactions(reads: bool, bytes: u64) -> FlowSpec {
    let (from, to) = (NFP.to_owned(), "host".to_owned());
    let kind = if reads { FlowKind::Read { from, to } } else { FlowKind::Write { from, to } };
    let random = flow(kind, Arrivals::Depth(DEEP), u64::MAX, bytes);
    FlowSpec { random: true, span: SIZE_OF_BUFFERS, ..random }
}

/// Gbps of reads or writes of that size.
pub(super) fn rate_of(of: &Machine, reads: bool, bytes: u64) -> f64 {
    gbps(lab(of).rates(vec![transactions(reads, bytes)], SPAN)[0])
}

/// Gbps of reads or writes of a size in a window of so many KiB, with the IOMMU on.
pub(super) fn window_rate(host: &HostTiming, (reads, bytes): (bool, u64), window: u64) -> f64 {
    let mut lab = Lab::changed("pcie-bench", |rack, timing| {
        rack.hosts.iter_mut().for_each(|host| host.iommu = true);
        timing.host = host.clone();
    });
    let spec = FlowSpec { span: window << 10, ..transactions(reads, bytes) };
    gbps(lab.rates(vec![spec], SPAN)[0])
}

/// Nanoseconds of a read of that size.
pub(super) fn latency(of: &Machine, bytes: u64) -> f64 {
    let mut lab = lab(of);
    let once = FlowSpec { arrivals: Arrivals::Depth(1), count: 1, ..transactions(true, bytes) };
    let engine = lab.software("dma-engine").ns();
    let stored = lab.software("dma-per-kib").ns() * bytes as f64 / 1024.0;
    lab.run(once).latency.mean().ns() + engine + stored
}

/// What is known of rows that are far off.
pub(super) fn why(row: &Row) -> Option<&'static str> {
    let case = row.case.as_str();
    if case.contains("IOMMU") {
        return Some(
            "the paper's text gives 64 entries and 330 ns; its data says a few more, and less",
        );
    }
    if case.contains("a read of") {
        return Some(
            "the device's own DMA engine is in what was measured, and the testbed gives it no time",
        );
    }
    let small = case.ends_with(" 64 B") || case.ends_with(" 128 B");
    if case.contains("writes") && small {
        return Some(
            "the NFP makes at most 47.5 million transactions a second in the same data, writes of 16 B; the testbed gives it no packet rate",
        );
    }
    let large = case.ends_with(" 512 B") || case.ends_with(" 1024 B") || case.ends_with(" 2048 B");
    (case.contains("reads") && large).then_some(
        "these roots answer reads of more than 256 B with longer completions than the profile had when this was committed",
    )
}
