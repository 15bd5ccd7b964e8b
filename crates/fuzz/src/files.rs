//! Files that people write: a rack file, and a workload with the timing of the rack it moves in.
//! What is taken is used as the commands use it.

use rackbus_devices::class::parse_rack;
use rackbus_fabric::derive;
use rackbus_fabric::rack::Rack;
use rackbus_fabric::sharing::Rules;
use rackbus_fabric::text::FileError;
use rackbus_model::timing;
use rackbus_model::workload::{self, Run};

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
    let workload = match workload::parse("file", text) {
        Ok(workload) => workload,
        Err(error) => return check(&error, text),
    };
    let Ok(mut run) = Run::new(&rack, &timing, &workload) else { return };
    if run.go(EVENTS).is_ok() {
        run.results();
    }
}

/// Rack files of the examples.
pub fn rack_seeds() -> Vec<Vec<u8>> {
    [DEMO, MODEL_RACK, LENDING, MARLIN].map(|text| text.as_bytes().to_vec()).to_vec()
}

/// Workloads with timings.
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
    seeds
}
