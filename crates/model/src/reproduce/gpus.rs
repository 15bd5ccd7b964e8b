//! Copies between GPUs of today: RTX PRO 6000 at Gen5 x16 in one socket's machines, as their owners measured them
//! (github.com/voipmonitor/rtx6kpro, folder `hardware`; the files are named at the rows). What was known while the
//! testbed was written is *measured*, the rest *blind* (`docs/book/src/validation.md` says which).

use crate::engine::Arrivals;
use crate::time::Time;
use crate::workload::{FlowKind, FlowSpec};

use super::lab::{Lab, flow};
use super::{Kind, Row};

const SIZE: u64 = 16 << 20;
const DEPTH: u32 = 4;
const SPAN: Time = Time::from_us(2_000);

type Pair = (u32, u32);

/// GB/s of all writes, or reads, of pairs at once.
fn together(reads: bool, pairs: &[Pair]) -> f64 {
    let copy = |(from, to): &Pair| -> FlowSpec {
        let [from, to] = [from, to].map(|nth| format!("host/gpu{nth}"));
        let kind = if reads { FlowKind::Read { from, to } } else { FlowKind::Write { from, to } };
        flow(kind, Arrivals::Depth(DEPTH), u64::MAX, SIZE)
    };
    let rates = Lab::new("gen5-gpus").rates(pairs.iter().map(copy).collect(), SPAN);
    rates.iter().sum::<f64>() / 1e9
}

/// Each of four GPUs to all others of them.
fn all_to_all(first: u32) -> Vec<Pair> {
    let four = first..first + 4;
    four.clone()
        .flat_map(|from| four.clone().map(move |to| (from, to)))
        .filter(|(from, to)| from != to)
        .collect()
}

pub(super) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    let mut add = |kind, case: &str, published, modelled| {
        let id = if kind == Kind::Blind { "G2" } else { "G1" };
        rows.push(Row::new((id, case), kind, published, modelled, "GB/s"));
    };
    let [write, read] = [false, true].map(|reads| move |pairs: &[Pair]| together(reads, pairs));
    // `pcie-bandwidth.md`, and what the other files tell beyond the cases that were fixed before.
    let known = Kind::Measured;
    add(known, "two EPYC 9374F, two GPUs at the root", 54.0, write(&[(0, 1)]));
    add(known, "two EPYC 9374F, both ways", 103.0, write(&[(0, 1), (1, 0)]));
    add(known, "luke's switch, two GPUs below it", 54.4, write(&[(4, 5)]));
    add(known, "luke's switch, four GPUs, each to all others", 138.3, write(&all_to_all(4)));
    let to_one = [(4, 8), (5, 8)];
    add(known, "EPYC 9575F, two GPUs to one below another switch", 56.4, write(&to_one));
    add(
        known,
        "EPYC 9575F, four GPUs below a switch, each reads all others",
        67.4,
        read(&all_to_all(4)),
    );
    // `epyc9124-direct-attach.md`, then `asrockrack-genoad24-epyc-cpayne-16gpu.md`.
    let blind = Kind::Blind;
    add(blind, "EPYC 9124, two GPUs at the root", 57.2, write(&[(0, 1)]));
    add(blind, "EPYC 9124, both ways", 112.3, write(&[(0, 1), (1, 0)]));
    add(blind, "EPYC 9575F, two GPUs below a switch", 56.3, write(&[(4, 5)]));
    add(blind, "EPYC 9575F, two GPUs below different switches", 56.3, write(&[(4, 8)]));
    add(
        blind,
        "EPYC 9575F, four GPUs below a switch, each to all others",
        163.6,
        write(&all_to_all(4)),
    );
    rows.extend(other_machines(|pairs| together(false, pairs)));
    for row in &mut rows {
        row.note = row.case.contains("all others").then_some(CONTENTION);
    }
    rows
}

/// The second blind set: GB/s below one switch one way and both ways, below different switches, and of four GPUs that
/// all send to all others, by file.
const OTHERS: [(&str, [Option<f64>; 5]); 4] = [
    // `asus-esc8000a-e13p-broadcom-switches.md`
    ("PEX890xx", [Some(53.4), Some(103.0), Some(53.6), Some(103.0), Some(153.0)]),
    // `wrx90-cpayne-2switch-flat.md`
    ("WRX90, two switches", [Some(53.4), Some(101.0), Some(53.1), Some(101.0), Some(148.9)]),
    // `wrx90-cpayne-8gpu-2vs-per-chip.md`
    ("WRX90, four virtual switches", [Some(56.3), Some(109.4), Some(56.3), None, None]),
    // `wrx90-cpayne-microchip-switches.md`
    ("WRX90, three switches", [Some(53.9), Some(104.0), Some(54.2), Some(104.0), Some(126.0)]),
];

fn other_machines(write: impl Fn(&[Pair]) -> f64) -> Vec<Row> {
    let cases = [
        ("two GPUs below a switch", write(&[(4, 5)])),
        ("two GPUs below a switch, both ways", write(&[(4, 5), (5, 4)])),
        ("two GPUs below different switches", write(&[(4, 8)])),
        ("two GPUs below different switches, both ways", write(&[(4, 8), (8, 4)])),
        ("four GPUs below a switch, each to all others", write(&all_to_all(4))),
    ];
    let mut rows = Vec::new();
    for (machine, published) in OTHERS {
        for ((case, modelled), published) in cases.into_iter().zip(published) {
            let Some(published) = published else { continue };
            let case = format!("{machine}, {case}");
            rows.push(Row::new(("G3", &case), Kind::Blind, published, modelled, "GB/s"));
        }
    }
    rows
}

const CONTENTION: &str = "real switches lose throughput where all ports send to all others, and one chip not as another; \
                          what of it is arbitration and what the GPUs' copy engines nobody published";
