//! Copies between a GPU and its host's memory, as NVIDIA's `bandwidthTest` and `nvbandwidth` print them in public
//! repositories. Of the hosts nothing is known; the GPUs' links are those of their data sheets
//! (`docs/book/src/validation.md` says how the outputs were found, and when the inputs were committed).

use crate::engine::Arrivals;
use crate::time::Time;
use crate::workload::{FlowKind, FlowSpec};

use super::lab::{Lab, flow};
use super::{Kind, Row};

const SIZE: u64 = 16 << 20;
const DEPTH: u32 = 4;
const SPAN: Time = Time::from_us(20_000);
const GPU: &str = "host/gpu0";

/// The generation and the lanes of a GPU's link.
type Link = (u8, u8);

/// By GPU: its link, GB/s from its host's memory and GB/s to it.
const TESTED: [(&str, Link, f64, f64); 7] = [
    ("Tesla K20c", (2, 16), 6.0387, 6.5535),
    ("GTX 780 Ti", (3, 16), 11.6183, 12.9099),
    ("GTX 1650 SUPER", (3, 16), 12.4, 12.7),
    ("Tesla K80", (3, 16), 7.7651, 7.7596),
    ("Tesla T4", (3, 16), 6.3, 6.6),
    ("V100-SXM2", (3, 16), 67.1, 65.8),
    ("A100-SXM4", (4, 16), 26.1, 25.6),
];

/// The laptop's link, and GB/s from memory, to it, and each way beside the other.
const LAPTOP: (Link, [f64; 4]) = ((4, 8), [12.98, 13.17, 12.66, 11.06]);

/// A GPU's copies from its host's memory, or to it.
fn copy(from_memory: bool) -> FlowSpec {
    let (from, to) = (GPU.to_owned(), "host".to_owned());
    let kind = if from_memory { FlowKind::Read { from, to } } else { FlowKind::Write { from, to } };
    flow(kind, Arrivals::Depth(DEPTH), u64::MAX, SIZE)
}

/// GB/s of each of these flows beside the others, with this link.
fn rates((generation, lanes): Link, flows: Vec<FlowSpec>) -> Vec<f64> {
    let mut lab = Lab::changed("gen5-gpus", |rack, _| {
        let links = rack.fabric.iter_mut().flat_map(|fabric| &mut fabric.links);
        for link in links.filter(|link| link.ends.iter().any(|end| end == GPU)) {
            (link.generation, link.lanes) = (generation, lanes);
        }
    });
    lab.rates(flows, SPAN).into_iter().map(|rate| rate / 1e9).collect()
}

pub(super) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    let mut add = |kind, case: &str, published, modelled, note| {
        let row = Row::new(("H1", case), kind, published, modelled, "GB/s");
        rows.push(Row { note, ..row });
    };
    for (gpu, link, down, up) in TESTED {
        let note = match gpu {
            "Tesla K80" => Some(NARROW),
            "Tesla T4" => Some(CLOUD),
            "V100-SXM2" => Some(NVLINK),
            _ => Some(PAYLOAD),
        };
        let modelled = [true, false].map(|from_memory| rates(link, vec![copy(from_memory)])[0]);
        add(Kind::Blind, &format!("{gpu}, from memory"), down, modelled[0], note);
        add(Kind::Blind, &format!("{gpu}, to memory"), up, modelled[1], note);
    }
    let (link, [down, up, down_beside, up_beside]) = LAPTOP;
    let both = rates(link, vec![copy(true), copy(false)]);
    let known = Kind::Measured;
    add(known, "RTX 3050 laptop, from memory", down, rates(link, vec![copy(true)])[0], None);
    add(known, "RTX 3050 laptop, to memory", up, rates(link, vec![copy(false)])[0], None);
    add(known, "RTX 3050 laptop, from memory beside the other way", down_beside, both[0], None);
    add(
        known,
        "RTX 3050 laptop, to memory beside the other way",
        up_beside,
        both[1],
        Some(PAYLOAD),
    );
    rows
}

const PAYLOAD: &str = "nothing is known of the hosts; a maximum payload of 128 B, which many firmwares set, leaves 92 % of what one of 256 B \
                       does";
const NARROW: &str = "its rate is that of a Gen3 link of fewer lanes than the card has; nothing was said of the slot";
const CLOUD: &str =
    "a machine of a cloud, whose slots nobody publishes; the rate is that of eight lanes";
const NVLINK: &str = "in this machine (Marconi100, IBM AC922) the GPU is joined to the processor by NVLink, not by PCIe; \
                      it was in the set before that was known";
