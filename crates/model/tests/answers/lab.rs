//! Racks and workloads as text, and what comes of them.

use rackbus_fabric::rack::{
    DeviceCapability, DeviceFacts, FunctionLimit, FunctionTiming, Rack, TurnTiming,
};
use rackbus_model::flow::rack::{FlowLevel, shares};
use rackbus_model::timing;
use rackbus_model::workload::{self, FlowResult, Results};

/// What comes of a workload in a rack.
pub fn run(rack: &str, workload: &str) -> Results {
    tried(rack, workload).unwrap_or_else(|error| panic!("{error}"))
}

/// The same, or what is said against it.
pub fn tried(rack: &str, workload: &str) -> Result<Results, String> {
    run_in(rack, &parsed(rack)?, workload)
}

/// The same in a rack whose functions are limited, and move 64 KiB by one operation at most.
pub fn limited(rack: &str, limits: &[(&str, &[FunctionLimit])], workload: &str) -> Results {
    run_in(rack, &limited_rack(rack, limits), workload).unwrap_or_else(|error| panic!("{error}"))
}

/// A rack whose functions are limited so.
pub fn limited_rack(rack: &str, limits: &[(&str, &[FunctionLimit])]) -> Rack {
    let mut parsed = parsed(rack).unwrap();
    for (name, limits) in limits {
        let devices = parsed.hosts.iter_mut().flat_map(|host| {
            let host_name = host.name.clone();
            host.devices.iter_mut().map(move |device| (host_name.clone(), device))
        });
        let mut named =
            devices.filter(|(host, device)| format!("{host}/{}", device.function()) == **name);
        let timing = &mut named.next().unwrap().1.timing;
        let (limits, longest) = (limits.to_vec(), Some(64 << 10));
        *timing = FunctionTiming { limits, longest, ..FunctionTiming::default() };
    }
    parsed
}

/// What comes of a workload in a rack whose functions take turns at `workers` engines of each device.
pub fn in_turns(
    rack: &str,
    workers: u32,
    functions: &[(&str, TurnTiming)],
    workload: &str,
) -> (Results, FlowLevel) {
    let parsed = rack_in_turns(rack, workers, functions);
    let results = run_in(rack, &parsed, workload).unwrap_or_else(|error| panic!("{error}"));
    let timing = timing::read_for("rack.toml", rack, &parsed).unwrap();
    let flows = workload::parse("workload.toml", workload).unwrap();
    (results, shares(&parsed, &timing, &flows).unwrap())
}

/// What is said against a workload in such a rack, of one engine in each device.
pub fn tried_in_turns(
    rack: &str,
    functions: &[(&str, TurnTiming)],
    workload: &str,
) -> Result<Results, String> {
    run_in(rack, &rack_in_turns(rack, 1, functions), workload)
}

fn rack_in_turns(rack: &str, workers: u32, functions: &[(&str, TurnTiming)]) -> Rack {
    let mut parsed = parsed(rack).unwrap();
    for host in &mut parsed.hosts {
        for device in &mut host.devices {
            let name = format!("{}/{}", host.name, device.function());
            let Some((_, turns)) = functions.iter().find(|(other, _)| *other == name) else {
                continue;
            };
            device.timing.jobs = Some(workers);
            device.timing.turns = Some(turns.clone());
        }
    }
    parsed
}

fn run_in(text: &str, rack: &Rack, workload: &str) -> Result<Results, String> {
    let timing = timing::read_for("rack.toml", text, rack).map_err(|error| error.to_string())?;
    let flows = workload::parse("workload.toml", workload).map_err(|error| error.to_string())?;
    workload::run(rack, &timing, &flows, 400_000_000).map_err(|error| error.to_string())
}

fn parsed(rack: &str) -> Result<Rack, String> {
    let parsed = Rack::parse_with("rack.toml", rack, |section| {
        Ok(match section.kind("a class")?.0 {
            "nvme" => {
                DeviceFacts { capabilities: &[DeviceCapability::Blocks], ..DeviceFacts::default() }
            }
            "coprocessor" => {
                let timing = FunctionTiming { jobs: Some(4), ..FunctionTiming::default() };
                DeviceFacts {
                    virtual_functions: 2,
                    timing: vec![timing; 2],
                    ..DeviceFacts::default()
                }
            }
            _ => DeviceFacts::default(),
        })
    });
    parsed.map_err(|error| error.to_string())
}

/// What the flow level says of it.
pub fn shared(rack: &str, workload: &str) -> FlowLevel {
    let parsed = Rack::parse("rack.toml", rack).unwrap();
    let timing = timing::read_for("rack.toml", rack, &parsed).unwrap();
    let flows = workload::parse("workload.toml", workload).unwrap();
    shares(&parsed, &timing, &flows).unwrap()
}

pub fn flow<'a>(results: &'a Results, name: &str) -> &'a FlowResult {
    results.flows.iter().find(|flow| flow.name == name).unwrap()
}

/// Bytes per second of a flow.
pub fn rate(results: &Results, name: &str) -> f64 {
    flow(results, name).bytes_per_second
}

/// A link of a rack file.
pub fn link(a: &str, b: &str, generation: u8, lanes: u8) -> String {
    format!(
        "[[fabric.links]]\nends = [\"{a}\", \"{b}\"]\ngeneration = {generation}\nlanes = {lanes}\n"
    )
}

/// A host `near` with a GPU and another host `far`, joined by NTBs over Gen4 x8.
pub fn two_hosts(iommu: bool) -> String {
    let mut text = format!(
        "name = \"two\"\n[hosts.near]\niommu = {iommu}\n[hosts.near.devices.gpu0]\nkind = \"gpu\"\n\
         [hosts.far]\niommu = {iommu}\n\
         [fabric.adapters.near-ntb]\nhost = \"near\"\n[fabric.adapters.far-ntb]\nhost = \"far\"\n"
    );
    text += &link("near", "near-ntb", 4, 8);
    text += &link("near-ntb", "far-ntb", 4, 8);
    text + &link("far", "far-ntb", 4, 8)
}
