//! Device Lending: Markussen and others, Cluster Computing 2019 and SYSTOR 2018.

use crate::engine::{Script, Step, Until};
use crate::time::Time;

use super::lab::Lab;
use super::{Kind, Row};

const LOCAL: &str = "device-lending-local";
const ONE: &str = "device-lending-one-lender";
const TWO: &str = "device-lending-two-lenders";
const CHASSIS: &str = "device-lending-chassis";
const NVME: &str = "device-lending-nvme";

pub(super) fn rows() -> Vec<Row> {
    let mut rows = latencies();
    rows.extend(hops());
    rows.extend(ping_pongs());
    rows.extend(drives());
    rows.extend(bandwidths());
    rows.push(copies());
    rows.extend(training());
    rows
}

/// A testbed with the IOMMU of its lenders on.
fn checked(name: &str) -> Lab {
    Lab::changed(name, |rack, _| {
        rack.hosts.iter_mut().for_each(|host| host.iommu = host.name.starts_with("lender"));
    })
}

/// One with all IOMMUs off.
fn switched(name: &str) -> Lab {
    Lab::changed(name, |rack, _| rack.hosts.iter_mut().for_each(|host| host.iommu = false))
}

/// A store from host to host, till it is seen.
fn ram_to_ram(lab: &mut Lab, from: &str, to: &str) -> Time {
    let script = lab.store(from, to, 4);
    lab.time(script)
}

fn latencies() -> Vec<Row> {
    let whole = ram_to_ram(&mut Lab::new(NVME), "borrower", "lender");
    let mut without = Lab::changed(NVME, |_, timing| timing.ntb.latency = Time::ZERO);
    let ntb = whole - ram_to_ram(&mut without, "borrower", "lender");
    let three = ram_to_ram(&mut Lab::new(TWO), "borrower", "lender-b");
    vec![
        Row::within(("DL1", "NTB, one way"), Kind::Calibrated, (350.0, 370.0), ntb.ns(), "ns"),
        Row::within(("DL2", "RAM to RAM"), Kind::Calibrated, (550.0, 580.0), whole.ns(), "ns"),
        Row::calibrated(("DL3", "RAM to RAM, three hosts"), 700.0, three.ns(), "ns"),
    ]
}

/// Roots and hops between two devices, or through a host's memory: the way to it and the way from it
/// share the root complex that the memory is behind.
fn count(lab: &mut Lab, from: &str, by: Option<&str>, to: &str) -> (usize, usize) {
    match by {
        None => lab.hops(from, to),
        Some(host) => {
            let (one, other) = (lab.hops(from, host), lab.hops(to, host));
            (one.0 + other.0 - 1, one.1 + other.1 - 1)
        }
    }
}

fn hops() -> Vec<Row> {
    let mut rows = Vec::new();
    let mut add = |id, name: &str, lab: &mut Lab, (from, by, to), published: (usize, usize)| {
        let (roots, hops) = count(lab, from, by, to);
        let case = |what| format!("{name} {what}");
        let (published_roots, published_hops) = (published.0 as f64, published.1 as f64);
        let (roots, hops) = (roots as f64, hops as f64);
        rows.push(Row::exact((id, &case("roots")), published_roots, roots, "roots"));
        rows.push(Row::exact((id, &case("hops")), published_hops, hops, "hops"));
    };
    let (gpu0, gpu1, gpu2) = ("local/gpu0", "local/gpu1", "local/gpu2");
    let local = &mut Lab::new(LOCAL);
    add("DL4", "Loc-P2P-SW", local, (gpu0, None, gpu1), (0, 1));
    add("DL4", "Loc-P2P-Root", local, (gpu0, None, gpu2), (1, 3));
    add("DL4", "Loc-RAM-Root", local, (gpu0, Some("local"), gpu2), (1, 3));
    let direct = ("lender/gpu0", None, "lender/gpu1");
    let bounced = ("lender/gpu0", Some("borrower"), "lender/gpu1");
    add("DL4", "1L-P2P-SW", &mut switched(ONE), direct, (0, 1));
    add("DL4", "1L-P2P-IOMMU", &mut checked(ONE), direct, (1, 3));
    let two = ("lender-a/gpu0", None, "lender-b/gpu1");
    let bounced_two = ("lender-a/gpu0", Some("borrower"), "lender-b/gpu1");
    add("DL4", "2L-P2P-SW", &mut switched(TWO), two, (0, 4));
    add("DL4", "2L-P2P-IOMMU", &mut checked(TWO), two, (2, 8));
    add("DL4", "1L-RAM-SW", &mut switched(ONE), bounced, (3, 11));
    add("DL4", "1L-RAM-IOMMU", &mut checked(ONE), bounced, (3, 11));
    add("DL4", "2L-RAM-SW", &mut switched(TWO), bounced_two, (1, 8));
    add("DL4", "2L-RAM-IOMMU", &mut checked(TWO), bounced_two, (3, 11));
    let chassis = &mut Lab::new(CHASSIS);
    for name in ["VMLoc-P2P", "VMRem-P2P", "NatRem-P2P-IOMMU"] {
        add("DL5", name, chassis, direct, (1, 7));
    }
    add("DL5", "VMLoc-RAM", chassis, ("lender/gpu0", Some("lender"), "lender/gpu1"), (1, 7));
    for name in ["VMRem-RAM", "NatRem-RAM-IOMMU"] {
        add("DL5", name, chassis, bounced, (3, 21));
    }
    for row in rows.iter_mut().filter(|row| row.case == "2L-RAM-SW hops") {
        row.note = Some(
            "in a tree the detour past a root adds an even number of hops, yet Table 1 has 8 without and 11 \
             with both roots; 7 and 11 fit each other and every other row",
        );
    }
    rows
}

/// GPU to GPU and back: each writes the other's memory and polls its own.
fn ping_pong(lab: &mut Lab, one: &str, other: &str) -> Time {
    let poll = lab.software("gpu-poll");
    let there = lab.write(one, other, 8, Until::Landed);
    let back = lab.write(other, one, 8, Until::Landed);
    lab.time(vec![there, Step::Wait(poll), back, Step::Wait(poll)])
}

fn ping_pongs() -> Vec<Row> {
    let local = ping_pong(&mut Lab::new(LOCAL), "local/gpu0", "local/gpu1");
    let local_root = ping_pong(&mut Lab::new(LOCAL), "local/gpu0", "local/gpu2");
    let one = ping_pong(&mut switched(ONE), "lender/gpu0", "lender/gpu1");
    let mut lab = checked(ONE);
    // The first write walks the page table; the mean of many does not.
    ping_pong(&mut lab, "lender/gpu0", "lender/gpu1");
    let one_checked = ping_pong(&mut lab, "lender/gpu0", "lender/gpu1");
    let two = ping_pong(&mut switched(TWO), "lender-a/gpu0", "lender-b/gpu1");
    let more = (two - one).ns();
    let equal =
        |case, one: Time, other: Time| Row::predicted(("DL7", case), other.ns(), one.ns(), "ns");
    let row =
        Row::within(("DL6", "2L-P2P-SW minus 1L"), Kind::Calibrated, (700.0, 750.0), more, "ns");
    vec![
        Row { says: Some("a little more than 700".to_owned()), ..row },
        equal("1L-P2P-SW against Loc-P2P-SW", one, local),
        equal("1L-P2P-IOMMU against Loc-P2P-Root", one_checked, local_root),
    ]
}

/// A drive's read, seen from the host that drives it: the queues are in the lender's memory, where the
/// paper's own account puts them ("reach over the NTB once in order to retrieve the I/O commands, and
/// then again in order to post the I/O completion").
fn drive_read(lab: &mut Lab, host: &str, bytes: u64, guest: bool) -> Script {
    let queue = "lender";
    let drive = "lender/nvme0";
    let mut script = Vec::new();
    let (media, issue) = (lab.software("media"), lab.timing().host.cpu.issue);
    let cpu = lab.source(host);
    let doorbell = lab.way(host, drive);
    let until = Until::Landed;
    script.push(Step::Wait(issue));
    if host != queue {
        let way = lab.way(host, queue);
        let until = Until::Begun;
        script.push(Step::Write { stream: cpu.stream, way, address: 0, bytes: 64, until });
    }
    script.push(Step::Write { stream: cpu.stream, way: doorbell, address: 0, bytes: 4, until });
    script.push(lab.read(drive, queue, 64));
    script.push(Step::Wait(media));
    let source = lab.source(drive);
    let way = lab.way(drive, host);
    let data = |bytes, until| Step::Write { stream: source.stream, way, address: 0, bytes, until };
    script.push(data(bytes, Until::Begun));
    script.push(data(16, Until::Begun));
    script.push(data(4, Until::Landed));
    if guest {
        script.push(Step::Wait(lab.software("interrupt-guest")));
    }
    script
}

fn drives() -> Vec<Row> {
    let time = |lab: &mut Lab, host, guest| {
        let script = drive_read(lab, host, 8 * 512, guest);
        lab.time(script).ns()
    };
    let local = time(&mut Lab::new(NVME), "lender", false);
    let borrowed = time(&mut Lab::new(NVME), "borrower", false);
    // A VM's device is checked by the lender's IOMMU; its page walks are long over.
    let mut lab = Lab::changed(NVME, |rack, timing| {
        rack.hosts.iter_mut().for_each(|host| host.iommu = host.name == "lender");
        timing.host.iommu.walk = Time::ZERO;
    });
    let guest = time(&mut lab, "borrower", true);
    let bandwidth = |host| {
        let lab = &mut Lab::new(NVME);
        let script = drive_read(lab, host, 1024 * 512, false);
        lab.rate(script, 4, 200, 1024 * 512)
    };
    let rates = bandwidth("borrower") / bandwidth("lender");
    let more = Row::within(
        ("DL8", "borrowed minus local"),
        Kind::Predicted,
        (700.0, 1000.0),
        borrowed - local,
        "ns",
    );
    vec![
        Row {
            says: Some("700 to 730, a little under 1000 in all".to_owned()),
            ..more.note("with the queues in the lender's memory; in the borrower's, fetching the command alone would cost two more traversals, 700 ns")
        },
        Row::trend(("DL9", "VM against physical borrower"), "slightly more", (1.001, 1.1), guest / borrowed),
        Row::trend(("DL10", "sequential, borrowed against local"), "no visible loss", (0.98, 1.02), rates),
    ]
}

/// Bytes per second of a GPU's DMA, reading from or writing to a host's memory.
fn dma(lab: &mut Lab, gpu: &str, host: &str, read: bool) -> f64 {
    const BYTES: u64 = 4 << 20;
    let step = match read {
        true => lab.read(gpu, host, BYTES),
        false => lab.write(gpu, host, BYTES, Until::Landed),
    };
    lab.rate(vec![step], 1, 3, BYTES)
}

fn bandwidths() -> Vec<Row> {
    let gpu = "lender-b/gpu1";
    let (read, write) = (true, false);
    let lab = &mut checked(TWO);
    let way = lab.way(gpu, "borrower");
    let root = dma(lab, gpu, "borrower", read);
    // Requests that left the GPU, and those that left the root for the adapter.
    let lanes = lab.it.world.lanes_of(way);
    let [first, split] = [lanes[0], lanes[3]].map(|lane| lab.it.world.lane(lane).packets as f64);
    let direct = dma(&mut switched(TWO), gpu, "borrower", read);
    let writes = dma(&mut checked(TWO), gpu, "borrower", write)
        / dma(&mut switched(TWO), gpu, "borrower", write);
    let one = dma(&mut switched(ONE), "lender/gpu1", "borrower", read);
    let latency = |lab: &mut Lab, gpu| {
        let step = lab.read(gpu, "borrower", 256);
        lab.time(vec![step]);
        lab.time(vec![step]).ns()
    };
    let short = latency(&mut switched(ONE), "lender/gpu1");
    let other = latency(&mut checked(TWO), gpu);
    vec![
        Row::exact(("DL11", "requests of 64 B for one of 256 B"), 4.0, split / first, "requests"),
        Row::trend(
            ("DL12", "reads, past the root against switched"),
            "drops drastically",
            (0.0, 0.5),
            root / direct,
        ),
        Row::trend(
            ("DL12", "writes, past the root against switched"),
            "only a little",
            (0.85, 1.0),
            writes,
        ),
        Row {
            says: Some("a little under 6".to_owned()),
            ..Row::predicted(("DL13", "2L-RAM-SW read"), 6.0, direct / 1e9, "GB/s")
        },
        Row::predicted(
            ("DL14", "1L-RAM-SW against 2L-RAM-IOMMU, read"),
            root / 1e9,
            one / 1e9,
            "GB/s",
        ),
        Row::predicted(("DL14", "1L-RAM-SW against 2L-RAM-IOMMU, latency"), other, short, "ns"),
    ]
}

/// A driver's copy from GPU to GPU: it prepares, rings, waits for the end, and looks three registers up
/// on the way, as the paper suspects.
fn copy(lab: &mut Lab, host: &str, (one, other): (&str, &str), bytes: u64) -> f64 {
    let start = lab.software("copy-start");
    let mut script = vec![Step::Wait(start)];
    for _ in 0..3 {
        script.extend(lab.load(host, one, 4));
    }
    let cpu = lab.source(host);
    let doorbell = lab.way(host, one);
    let (stream, address) = (cpu.stream, 0);
    script.push(Step::Write { stream, way: doorbell, address, bytes: 4, until: Until::Landed });
    script.push(lab.write(one, other, bytes, Until::Landed));
    script.push(lab.write(one, host, 4, Until::Landed));
    lab.rate(script, 1, 2, bytes)
}

fn copies() -> Row {
    let ratio = |bytes| {
        let local = copy(&mut Lab::new(LOCAL), "local", ("local/gpu0", "local/gpu1"), bytes);
        copy(&mut switched(ONE), "borrower", ("lender/gpu0", "lender/gpu1"), bytes) / local
    };
    let (small, large) = (ratio(64 << 10), ratio(4 << 20));
    Row::trend(
        ("DL15", "4 MiB, borrowed against local"),
        "equal from 4 MiB on",
        (0.98, 1.02),
        large,
    )
    .and(small < 0.95)
}

/// How much smaller a step is simulated than it is.
const SCALE: u64 = 64;

/// A step of training VGG19 on two GPUs: images to both, half of 574 MB of weights each way between them.
fn step(lab: &mut Lab, host: &str, guest: bool) -> f64 {
    let (images, weights) = ((19 << 20) / SCALE, (574 << 20) / 2 / SCALE);
    let compute = lab.software("compute") / SCALE;
    let drive = "lender/nvme0";
    let (one, other) = ("lender/gpu0", "lender/gpu1");
    let mut script = vec![lab.write(drive, host, 2 * images, Until::Landed)];
    script.push(lab.read(one, host, images));
    script.push(lab.read(other, host, images));
    script.push(Step::Wait(compute));
    script.push(lab.write(one, other, weights, Until::Landed));
    script.push(lab.write(other, one, weights, Until::Landed));
    if guest {
        script.push(Step::Wait(lab.software("vm-step") / SCALE));
    }
    lab.time(script).us()
}

fn training() -> Vec<Row> {
    let native = step(&mut switched(CHASSIS), "lender", false);
    let remote = step(&mut switched(CHASSIS), "borrower", false);
    let root = step(&mut Lab::new(CHASSIS), "borrower", false);
    let guest = step(&mut Lab::new(CHASSIS), "borrower", true);
    vec![
        Row::trend(("DL17", "NatRem-SW against NatLoc"), "equal", (0.97, 1.03), remote / native),
        Row::trend(
            ("DL17", "NatRem-IOMMU against NatRem-SW"),
            "slower",
            (1.01, f64::MAX),
            root / remote,
        ),
        Row::trend(
            ("DL17", "VMRem against NatRem-IOMMU"),
            "slowest",
            (1.001, f64::MAX),
            guest / root,
        ),
    ]
}
