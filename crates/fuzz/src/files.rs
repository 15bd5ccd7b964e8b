//! Files that people write: a rack file, and a workload with the timing of the rack it moves in; and what tools
//! write, which the model takes: traces of block I/O, and measurements.
//! What is taken is used as the commands use it.

use rackbus_devices::class::parse_rack;
use rackbus_fabric::derive;
use rackbus_fabric::rack::Rack;
use rackbus_fabric::sharing::Rules;
use rackbus_fabric::text::FileError;
use rackbus_model::timing::{self, measured};
use rackbus_model::workload::{self, Run, blocks};

/// Words of rack files, timing and workloads.
pub const WORDS: &[&str] = &[
    "[hosts.",
    "[[share]]",
    "[fabric",
    "[timing.",
    "[flows.",
    "devices",
    "kind = ",
    "nvme",
    "gpu",
    "nic",
    "dma",
    "accelerator",
    "size = ",
    "GiB",
    "KiB",
    "\" ns\"",
    "us",
    "ms",
    "node_id = ",
    "memory = ",
    "export = ",
    "iommu = true",
    "block_size",
    "segments",
    "access",
    "from",
    "to",
    "depth",
    "every",
    "poisson",
    "rate",
    "queues",
    "count",
    "begin",
    "random",
    "span",
    "request",
    "ring",
    "nvme-read",
    "nvme-write",
    "copy",
    "write",
    "read",
    "seed",
    "duration",
    "warmup",
    "trace",
    "file",
    "bursts",
    "[shaping.",
    "weight",
    "burst",
    "operations",
    "members",
    "together",
];

/// What parts the workload from the timing in an input of [`model`].
const BORDER: &str = "\n###\n";
const DEMO: &str = include_str!("../../../examples/demo/rack.toml");
const MODEL_RACK: &str = include_str!("../../../examples/model/rack.toml");
const WORKLOAD: &str = include_str!("../../../examples/model/workload.toml");
const LENDING: &str = include_str!("../../../examples/testbeds/device-lending-two-lenders.toml");
const MARLIN: &str = include_str!("../../../examples/testbeds/marlin-pool.toml");
/// Events that a simulation may take: enough for every kind of step.
const EVENTS: u64 = 3_000;

/// An error names a place that is in the text.
fn check(error: &FileError, text: &str) {
    let said = error.to_string();
    assert!(said.starts_with("file"), "{said}");
    let lines: Vec<&str> = text.split('\n').collect();
    let line = lines.get(error.line.wrapping_sub(1));
    let line = line.unwrap_or_else(|| panic!("there is no line {}: {said}", error.line));
    assert!((1..=line.chars().count() + 1).contains(&error.column), "no such column: {said}");
}

/// Reads a rack file and puts together what it describes.
pub fn rack(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let rack = match parse_rack("file", text) {
        Ok((rack, devices)) => {
            assert_eq!(devices.len(), rack.functions().count());
            rack
        }
        Err(error) => return check(&error, text),
    };
    assert!(!rack.hosts.is_empty());
    if let Err(error) = timing::read_for("file", text, &rack) {
        check(&error, text);
    }
    let rules = Rules::of(&rack);
    for (function, _) in rack.functions() {
        assert!(rack.host(function.host.as_str()).is_some(), "{function:?} has no host");
    }
    for host in &rack.hosts {
        assert!(host.export <= host.memory && host.export.is_multiple_of(4096), "{host:?}");
        rules.allowed(&host.name, 1, &rack.hosts[0].name);
    }
    let _ = derive::here(&rack);
    if let Ok(topology) = derive::topology(&rack) {
        let _ = derive::fabric(&rack, topology);
    }
}

/// Reads a workload, and the timing of a rack behind `BORDER`, and simulates the first steps.
pub fn model(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let (text, times) = text.split_once(BORDER).unwrap_or((text, ""));
    let rack = Rack::parse("file", MODEL_RACK).expect("the example is right");
    let timing = match timing::read_for("file", times, &rack) {
        Ok(timing) => timing,
        Err(error) => return check(&error, times),
    };
    let trace = |_: &str| Ok(("trace".to_owned(), TRACE.to_owned()));
    let workload = match workload::parse_with("file", text, &trace) {
        Ok(workload) => workload,
        Err(error) => return check(&error, text),
    };
    let Ok(mut run) = Run::new(&rack, &timing, &workload) else { return };
    if run.go(EVENTS).is_ok() {
        run.results();
    }
}

/// Reads a trace of block I/O, and what tools measured, in every format.
pub fn tools(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let formats = [blocks::Format::FioIolog, blocks::Format::FioLog, blocks::Format::Blkparse];
    for format in [None].into_iter().chain(formats.map(Some)) {
        match blocks::parse("file", format, text) {
            Ok(trace) => {
                assert!(trace.ios.is_sorted_by_key(|io| io.at) && trace.mean_bytes() > 0);
                assert!(trace.ios.iter().all(|io| (1..=1 << 30).contains(&io.bytes)));
            }
            Err(error) => check(&error, text),
        }
    }
    let files = [("file".to_owned(), text.to_owned())];
    match measured::profile("mine", "genoa", &files).expect("there is such a profile") {
        Ok(profile) => {
            // Whatever tools say, a rack file takes what is made of it.
            let rack = format!("name = \"r\"\n[hosts.a]\nprofile = \"mine\"\n{}", profile.text());
            let parsed =
                Rack::parse("made", &rack).unwrap_or_else(|error| panic!("{error}\n{rack}"));
            let read = timing::read_for("made", &rack, &parsed);
            assert!(read.is_ok(), "{read:?}\n{rack}");
        }
        Err(error) => check(&error, text),
    }
}

/// A trace for flows that name one.
const TRACE: &str = "fio version 3 iolog\n0 x read 0 4096\n3 x write 4096 512\n";

/// A file of each tool.
pub fn tools_seeds() -> Vec<Vec<u8>> {
    let texts = [
        TRACE,
        "fio version 2 iolog\nx read 0 4096\nx wait 10\nx write 0 512\n",
        "1, 2, 0, 4096, 0\n1, 2, 1, 512, 0\n",
        "8,0 1 1 0.000001 7 Q R 0 + 8 [x]\n8,0 1 2 0.5 7 D WS 8 + 8 [x]\nCPU0 (8,0):\n",
        "Intel(R) Memory Latency Checker\nMeasuring idle latencies (in ns)...\nNuma node 0 1\n 0 96.5 163.2\n\
         ALL Reads : 251833.4\n",
        "Function    Best Rate MB/s\nCopy: 181234.5 0.1\n",
        "\"stride=128\n512.0 104.2\n",
        "LAT_DMA_RD Seq HWarm 0 0 8KB 64 9 8 7 6 5 4 3 790.8 598.9 600 546\n\
         BW_DMA_RD Rand Cold 0 0 256KB 64 1 1ms 512MB 8 27.5 5\nBW_DMA_RD Rand Cold 0 0 4MB 64 1 1ms 1 8 9.5 5\n",
        "{\"fio version\": \"3\", \"jobs\": [{\"read\": {\"clat_ns\": {\"mean\": 12400.5}}}, {\"job options\": \
         {\"hipri\": \"1\"}, \"read\": {\"clat_ns\": {\"mean\": 10100.5}}}]}",
    ];
    texts.map(|text| text.as_bytes().to_vec()).to_vec()
}

/// Rack files of the examples.
pub fn rack_seeds() -> Vec<Vec<u8>> {
    [DEMO, MODEL_RACK, LENDING, MARLIN].map(|text| text.as_bytes().to_vec()).to_vec()
}

/// Workload files, with and without timings of their own.
pub fn model_seeds() -> Vec<Vec<u8>> {
    let flow = |kind: &str, rest: &str| {
        format!("duration = \"10 us\"\n[flows.a]\nkind = \"{kind}\"\n{rest}size = \"4 KiB\"\n")
    };
    let ends = "from = \"alpha\"\nto = \"beta\"\n";
    let timing = "[timing.link]\nlatency = \"1 ns\"\n[timing.switch]\nlatency = \"115 ns\"\n";
    let mut seeds =
        vec![WORKLOAD.as_bytes().to_vec(), format!("{WORKLOAD}{BORDER}{timing}").into()];
    for kind in ["write", "read", "copy", "request", "ring"] {
        seeds.push(flow(kind, ends).into_bytes());
    }
    for kind in ["nvme-read", "nvme-write"] {
        seeds.push(flow(kind, "host = \"alpha\"\ndevice = \"lender/nvme0\"\ndepth = 4\n").into());
    }
    seeds.push(flow("all-reduce", "members = [\"lender/gpu0\", \"lender/nvme0\"]\n").into());
    let bursts = "bursts = { on = \"2 us\", off = { exponential = \"1 us\" } }\nend = \"9 us\"\n";
    seeds.push(flow("write", &format!("{ends}{bursts}")).into());
    let drive =
        "[flows.a]\nkind = \"trace\"\nhost = \"alpha\"\ndevice = \"lender/nvme0\"\nfile = \"x\"\n";
    seeds.push(drive.into());
    seeds
}
