//! Marlin: Tu, Lee and Chiueh, ANCS 2014.

use rackbus_fabric::{Access, Place, Requester};

use crate::engine::Until;
use crate::time::Time;
use crate::workload::{Move, MoveKind, StepSpec};

use super::Row;
use super::lab::{Lab, load, moved, read, store, using, wait};

const MARLIN: &str = "marlin";
/// The raw rate of a Gen3 x4 link as the paper counts it: 4 lanes of 8 Gbps.
const RAW: f64 = 32.0;
/// Requests of the batching measurement, and the bytes of each.
const REQUESTS: u64 = 10_000;
const PAGE: u64 = 4096;
/// Ratios that count as "the same".
const SAME: (f64, f64) = (0.9, 1.1);
/// Channels of a board's DMA engine (Marlin, 2014, section 5.3).
const CHANNELS: u32 = 4;

pub(super) fn rows() -> Vec<Row> {
    let mut rows = transfers();
    rows.push(hops());
    rows.extend(accesses());
    rows.extend(messages());
    rows.extend(networks());
    rows.extend(power());
    rows.extend(pool());
    rows
}

fn gbps(bytes_per_second: f64) -> f64 {
    bytes_per_second * 8.0 / 1e9
}

/// What a DMA transaction consists of.
#[derive(Clone, Copy)]
struct Transaction {
    /// Pieces, each with a descriptor of its own.
    pieces: u64,
    /// How many bytes each piece has.
    bytes: u64,
    /// Added to the source's address.
    offset: u64,
    /// Where it reads and where it writes.
    routes: (&'static str, &'static str),
}

impl Transaction {
    fn of(pieces: u64, bytes: u64) -> Transaction {
        Transaction { pieces, bytes, offset: 0, routes: ("ch1", "ch2") }
    }
}

/// The engine's part of a transaction: the doorbell, for each piece the descriptor, which is fetched
/// while the piece before is copied, and the copy; then the interrupt.
fn dma(transaction: Transaction) -> Vec<StepSpec> {
    let engine = "ch1/dma";
    let Transaction { pieces, bytes, offset, routes } = transaction;
    let piece = |until| {
        let fetch = moved(MoveKind::Read, &[engine, "ch1"], 32, Until::Landed);
        let fetch = StepSpec::Move(Move { channel: "descriptors".to_owned(), ..fetch });
        let copy = moved(MoveKind::Copy, &[engine, routes.0, routes.1], bytes, until);
        let copy = StepSpec::Move(Move { at: offset, ..copy });
        vec![StepSpec::Hold("fetcher".to_owned(), vec![fetch]), copy]
    };
    // The engine does not poll its doorbell: an adapter is no processor's memory.
    let mut script = vec![store("ch1", "ch1-ntb", 4)];
    if pieces > 1 {
        let (count, apart) = (pieces - 1, bytes);
        script.push(StepSpec::Each { count, apart, steps: piece(Until::Begun) });
    }
    // Pieces are written in their order: the last one's end is the transaction's.
    script.extend(piece(Until::Issued));
    script
}

/// The engine's interrupt, which waits behind no other transaction's bytes.
fn interrupt() -> StepSpec {
    let write = moved(MoveKind::Write, &["ch1/dma", "ch1"], 4, Until::Landed);
    StepSpec::Move(Move { channel: "interrupts".to_owned(), ..write })
}

/// A sequence of transactions, as the driver runs them: `deep` at a time.
fn hrdma(transaction: Transaction, count: u64, deep: u32) -> f64 {
    let lab = &mut Lab::new(MARLIN);
    let (prepare, complete) = (lab.software("pre-dma"), lab.software("hrdma-complete"));
    let handler = lab.timing().host.cpu.interrupt;
    let mut script = vec![using("cpu", prepare)];
    script.extend(dma(transaction));
    script.push(interrupt());
    script.push(wait(handler));
    script.push(using("cpu", complete));
    gbps(lab.rate(script, deep, count, transaction.pieces * transaction.bytes))
}

/// Throughput of one transaction of 2,000 pieces of a size; of large ones, of fewer.
fn pieces_of(bytes: u64) -> f64 {
    hrdma(Transaction::of(2_000.min((16 << 20) / bytes), bytes), 1, 1)
}

fn transfers() -> Vec<Row> {
    let total = REQUESTS * PAGE;
    let single = Transaction::of(1, PAGE);
    let baseline = hrdma(single, 1_000, 1);
    let channels = hrdma(single, 1_000, CHANNELS);
    let batched = hrdma(Transaction::of(256, PAGE), total / (256 * PAGE), CHANNELS);
    let combined = hrdma(Transaction::of(8, 32 * PAGE), total / (256 * PAGE), CHANNELS);
    let saturated = pieces_of(4096);
    let (below, above) = (pieces_of(2048) / saturated, pieces_of(65536) / saturated);
    vec![
        Row::calibrated(("M1", "baseline"), (1.54, "timing.cpu.interrupt"), baseline, "Gbps"),
        Row::calibrated(
            ("M1", "multi-channel"),
            (2.88, "timing.software.hrdma-complete"),
            channels,
            "Gbps",
        ),
        Row::predicted(("M1", "batched"), 20.17, batched, "Gbps"),
        Row::predicted(("M1", "combined"), 20.31, combined, "Gbps"),
        Row::predicted(("M2", "pieces of 4 KiB"), 20.3, saturated, "Gbps"),
        Row::relation(
            ("M2", "saturates at 4 KiB"),
            "less below, little more above",
            (0.95, 1.1),
            above,
        )
        .and(below < 0.95),
        // M2 in other units.
        Row::identity(("M3", "of 32 Gbps"), 63.4, saturated / RAW * 100.0, "%")
            .note("M2 in other units"),
    ]
}

/// A transaction of one piece, from memory to memory of hosts so far away, till all has landed.
fn landed(to: &'static str, bytes: u64) -> f64 {
    let lab = &mut Lab::new(MARLIN);
    let mut script = dma_begin(lab);
    let copy = moved(MoveKind::Copy, &["ch1/dma", "ch1", to], bytes, Until::Landed);
    script.push(StepSpec::Move(copy));
    lab.rate(script, 1, 4, bytes)
}

fn dma_begin(lab: &Lab) -> Vec<StepSpec> {
    let prepare = wait(lab.software("pre-dma"));
    vec![prepare, store("ch1", "ch1-ntb", 4), read("ch1/dma", "ch1", 32)]
}

fn hops() -> Row {
    let of = |bytes| ["ch1", "mh", "ch2"].map(|to| landed(to, bytes));
    let [zero, one, two] = of(512 << 10);
    let middle = of(64 << 10);
    let holds = one / zero > 0.9 && middle[2] < middle[1];
    Row::relation(
        ("M4", "two hops against one, 512 KiB"),
        "one like none, two lower",
        (0.0, 0.999),
        two / one,
    )
    .and(holds)
}

fn accesses() -> Vec<Row> {
    let lab = &mut Lab::new(MARLIN);
    let write = lab.time(vec![store("ch1", "ch2", 4)]).us();
    let read = lab.time(vec![load("ch1", "ch2", 4)]).us();
    let local = lab.time(vec![load("ch1", "ch1-ntb", 4)]).us();
    let ntb = &lab.timing().ntb;
    let traversal = (ntb.translation + ntb.completion_translation).us() / 2.0;
    let bridge = lab.timing().switch.latency.ns() / 2.0;
    // A PEX8717 is a switch and an NTB here, of a bridge each; all other parts are two bridges, the
    // hosts' boards among them, of which the route's hops count one.
    let (_, hops) = lab.hops("ch1", "ch2");
    let bridges = 2.0 * (2.0 * (hops + 1) as f64 - 4.0);
    vec![
        Row::calibrated(("M5", "CPU remote write"), (8.5, "timing.ntb.translation"), write, "us"),
        Row::calibrated(
            ("M6", "CPU remote read"),
            (20.18, "timing.ntb.completion_translation"),
            read,
            "us",
        ),
        Row::calibrated(
            ("M7", "CPU read of a local register"),
            (2.48, "timing.cpu.issue"),
            local,
            "us",
        ),
        Row::identity(("M8", "bridge"), 150.0, bridge, "ns")
            .note("Table 2 and the local read both say 100 ns; 56 bridges of 150 ns are 8.4 us, not 5.2 us"),
        Row::identity(("M8", "NTB traversal"), 3.52, traversal, "us"),
        Row::exact(("M8", "bridges there and back"), 56.0, bridges, "bridges")
            .note("the list of footnote 3 adds up to 26 one way, 52 there and back"),
    ]
}

/// A message's DMA stage: from the doorbell to the interrupt's coming.
fn dma_stage(bytes: u64) -> Time {
    let lab = &mut Lab::new(MARLIN);
    let mut script = dma(Transaction::of(1, bytes));
    script.push(interrupt());
    lab.time(script)
}

fn messages() -> Vec<Row> {
    let lab = &mut Lab::new(MARLIN);
    let twice = |name: &str| lab.software(name).us() * 2.0;
    let (prepare, after) = (twice("pre-dma"), twice("post-dma"));
    let (eop, cmmc) = (twice("eop-pre"), twice("cmmc-pre"));
    let (ping, word) = (dma_stage(64).us() * 2.0, dma_stage(4).us() * 2.0);
    vec![
        Row::identity(("M9", "pre-processing"), 2.8, eop, "us"),
        Row::identity(("M9", "pre-DMA"), 11.4, prepare, "us"),
        Row::predicted(("M9", "DMA"), 11.5, ping, "us"),
        Row::identity(("M9", "post-DMA"), 3.0, after, "us"),
        Row::identity(("M9", "EOP 64 B ping"), 28.7, eop + prepare + ping + after, "us")
            .note("the DMA stage, printed above, is a predicted part of it"),
        Row::identity(("M10", "pre-processing"), 1.0, cmmc, "us"),
        Row::predicted(("M10", "HRDMA"), 11.4, word, "us"),
        Row::identity(("M10", "CMMC 4 B write"), 26.9, cmmc + prepare + word + after, "us")
            .note("the HRDMA stage, printed above, is a predicted part of it"),
    ]
}

/// Copies of 4 MiB: a transaction of 32 pieces, as pages that follow each other are combined, and the
/// system call around it.
fn cmmc() -> f64 {
    let lab = &mut Lab::new(MARLIN);
    let stages = ["cmmc-pre", "pre-dma", "post-dma"].map(|name| lab.software(name));
    let mut script: Vec<StepSpec> = stages[..2].iter().map(|stage| wait(*stage)).collect();
    script.extend(dma(Transaction::of(32, 128 << 10)));
    script.push(interrupt());
    script.push(wait(stages[2]));
    gbps(lab.rate(script, 1, 8, 4 << 20))
}

/// Ethernet over PCIe: packets of an MTU, the sender's processor preparing one while others move.
/// `offset` misaligns the source; TCP's acknowledgements take the sender's time too.
fn eop(mtu: u64, offset: u64, acknowledged: bool) -> f64 {
    let lab = &mut Lab::new(MARLIN);
    let stages = ["eop-pre", "pre-dma", "post-dma"].map(|name| lab.software(name));
    let mut script = vec![using("cpu", stages[0] + stages[1])];
    script.extend(dma(Transaction { offset, ..Transaction::of(1, mtu) }));
    script.push(interrupt());
    script.push(using("cpu", stages[2]));
    if acknowledged {
        script.push(using("cpu", stages[2]));
    }
    gbps(lab.rate(script, CHANNELS, 100, mtu))
}

fn networks() -> Vec<Row> {
    const MTU: u64 = 64 << 10;
    let (copy, combined) = (cmmc(), hrdma(Transaction::of(32, 128 << 10), 8, CHANNELS));
    let (tcp, udp) = (eop(MTU, 0, true), eop(MTU, 0, false));
    let vanilla = eop(MTU, 2, true) / tcp;
    // The optimised driver begins at the 64 bytes before: at most 64 more are copied.
    let optimised = eop(MTU + 64, 0, true) * MTU as f64 / (MTU + 64) as f64 / tcp;
    let (host, manager) = (nic("ch1"), nic("mh"));
    let (latency, rate) = (host.0 / manager.0, host.1 / manager.1);
    vec![
        Row::predicted(("M11", "CMMC 4 MB"), 20.11, copy, "Gbps"),
        Row::relation(
            ("M11", "CMMC against HRDMA"),
            "0.98 % under",
            (0.97, 0.999),
            copy / combined,
        ),
        Row::predicted(("M12", "TCP, MTU 64 KB"), 19.6, tcp, "Gbps"),
        Row::predicted(("M12", "UDP, MTU 64 KB"), 19.9, udp, "Gbps"),
        Row::relation(
            ("M13", "unaligned, vanilla driver"),
            "sometimes under half",
            (0.0, 0.5),
            vanilla,
        ),
        Row::relation(("M13", "unaligned, optimised driver"), "within 6 %", (0.94, 1.0), optimised),
        Row::relation(("M14", "shared NIC, latency of compute host"), "the same", SAME, latency)
            .note("each of doorbell, descriptor and data crosses an NTB of 2.6 to 4.3 us (M5, M6)"),
        Row::relation(("M14", "shared NIC, throughput of compute host"), "the same", SAME, rate),
    ]
}

/// Latency in us and throughput in bytes per second of a host that sends by the shared adapter.
fn nic(host: &'static str) -> (f64, f64) {
    let send = |bytes| {
        let nic = "mh/nic";
        vec![store(host, nic, 4), read(nic, host, 16), read(nic, host, bytes)]
    };
    let lab = &mut Lab::new(MARLIN);
    let mut script = send(64);
    script.push(wait(lab.software("network")));
    let latency = lab.time(script).us();
    let lab = &mut Lab::new(MARLIN);
    (latency, lab.rate(send(1500), 64, 4_000, 1500))
}

fn power() -> Vec<Row> {
    const SERVERS: f64 = 24.0;
    let lab = Lab::new(MARLIN);
    let watts = |name: &str| lab.timing().power.get(name).map_or(0.0, |mw| *mw as f64 / 1e3);
    let total =
        |kind: &str| watts(&format!("{kind}-switch")) + SERVERS * watts(&format!("{kind}-adapter"));
    // One shared Ethernet adapter leaves the PCIe rack.
    let totals =
        [total("ethernet"), total("infiniband"), total("pcie") + watts("ethernet-adapter")];
    let rates = [10.0, 20.0, RAW].map(|gbps| gbps * SERVERS);
    let names = ["Ethernet", "InfiniBand", "PCIe"];
    let published = [(308.0, 1.283), (502.0, 1.045), (213.1, 0.277)];
    let mut rows = Vec::new();
    for nth in 0..3 {
        let (watts, each) = published[nth];
        rows.push(Row::identity(("M15", names[nth]), watts, totals[nth], "W"));
        rows.push(Row::identity(("M15", names[nth]), each, totals[nth] / rates[nth], "W/Gbps"));
    }
    rows
}

fn pool() -> Vec<Row> {
    const GIB: u64 = 1 << 30;
    let lab = Lab::new("marlin-pool");
    let fabric = lab.it.fabric();
    let topology = fabric.topology();
    let (mut right, mut seen) = (0, 0);
    let Some(viewer) = topology.host_named("ch7").map(Requester::Cpu) else { return Vec::new() };
    for (id, host) in topology.hosts() {
        let size = host.memory_size;
        let nth = host.name.strip_prefix("ch").and_then(|number| number.parse::<u64>().ok());
        let address = match nth {
            Some(nth) => 64 * GIB + (nth - 1) * 32 * GIB,
            None => 32 * GIB,
        };
        let expected = Place::Memory { host: id, offset: 0 };
        let found = fabric.resolve(viewer, address, size, Access::READ);
        if found.is_ok_and(|found| found.place == expected && found.length == size) {
            right += 1;
            seen += size / GIB;
        }
    }
    vec![
        Row::exact(
            ("M16", "hosts at 64 GiB + (i - 1) * 32 GiB and below"),
            50.0,
            f64::from(right),
            "hosts",
        ),
        Row::exact(("M16", "memory that each host sees"), 1600.0, seen as f64, "GB"),
    ]
}
