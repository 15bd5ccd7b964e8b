//! The pages of several queues and flows in one IOMMU's cache.

use rackbus_fabric::rack::Rack;
use rackbus_model::timing::Timing;
use rackbus_model::workload::parse;

use super::{RACK, both};

/// Small reads by alpha's GPU of alpha's memory, whose IOMMU is on, in a span for each queue.
fn reads(name: &str, span: &str, queues: u32, how: &str) -> String {
    format!(
        "[flows.{name}]\nkind = \"read\"\nfrom = \"alpha/gpu0\"\nto = \"alpha\"\nsize = \"64 B\"\nspan = \"{span}\"\n\
         queues = {queues}\n{how}\n"
    )
}

/// By flow: the fair share, whether it is answered, and what is simulated, in jobs per second.
fn rates(text: &str) -> Vec<(f64, bool, f64)> {
    let rack = Rack::parse("rack.toml", RACK).unwrap();
    let (level, results) = both(&rack, &Timing::default(), &parse("workload.toml", text).unwrap());
    let pairs = level.flows.iter().zip(&results.flows);
    pairs
        .map(|(flow, result)| {
            let fair = flow.fair_bytes_per_second / 64.0;
            (fair, flow.bytes_per_second.is_some(), result.jobs_per_second)
        })
        .collect()
}

/// Each queue has pages of its own: 32 of them fit in a cache of 64, those of eight queues do not.
#[test]
fn the_pages_of_all_queues_of_a_flow_are_in_one_cache() {
    let random = "random = true\ndepth = 64";
    for (span, queues) in
        [("128 KiB", 1), ("128 KiB", 8), ("64 KiB", 16), ("512 KiB", 4), ("1 MiB", 1)]
    {
        let [(fair, _, simulated)] = rates(&reads("a", span, queues, random))[..] else { panic!() };
        println!("{queues} queues of {span}: {fair} told, {simulated} simulated");
        assert!(
            (fair / simulated - 1.0).abs() < 0.1,
            "{queues} queues of {span}: {fair}, not {simulated}"
        );
    }
}

/// Two flows whose pages fit one by one, but not together: how many are looked up depends on who asks more often.
#[test]
fn what_flows_do_to_each_others_pages_is_not_answered() {
    let slow = "random = true\nevery = \"2 us\"";
    let two = reads("a", "160 KiB", 1, slow) + &reads("b", "160 KiB", 1, slow);
    assert!(rates(&two).iter().all(|(_, answered, _)| !answered));
    let fit = reads("a", "80 KiB", 1, slow) + &reads("b", "80 KiB", 1, slow);
    for (fair, answered, simulated) in rates(&fit) {
        assert!(answered && (fair / simulated - 1.0).abs() < 0.01, "{fair}, not {simulated}");
    }
}
