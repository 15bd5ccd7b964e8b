//! What a message costs a device: so far apart are those of a queue pair, and nothing else of them changes.

use crate::lab::{flow, link, run, shared};

fn rack(message: &str) -> String {
    let rack = format!(
        "name = \"one\"\n[hosts.near]\niommu = false\nmemory = \"64 GiB\"\n[hosts.near.devices.gpu0]\nkind = \"gpu\"\n\
         [timing.device]\n{message}"
    );
    rack + &link("near", "near/gpu0", 3, 8)
}

fn moves(kind: &str, size: &str, depth: u32, queues: u32) -> String {
    let ends = match kind {
        "copy" => "by = \"near/gpu0\"\nfrom = \"near\"\nto = \"near\"\n",
        _ => "from = \"near/gpu0\"\nto = \"near\"\n",
    };
    format!(
        "[flows.it]\nkind = \"{kind}\"\n{ends}size = \"{size}\"\ndepth = {depth}\nqueues = {queues}\n"
    )
}

/// Once reads and copies came one at a time, and writes were over before they had landed.
#[test]
fn a_message_that_costs_next_to_nothing_changes_next_to_nothing() {
    for kind in ["write", "read", "copy"] {
        for (size, depth, queues) in [("64 B", 1, 1), ("4 KiB", 8, 1), ("512 B", 4, 3)] {
            let text = moves(kind, size, depth, queues);
            let [none, tiny] = ["", "message = \"1 ps\"\n"].map(|message| {
                let results = run(&rack(message), &text);
                let it = flow(&results, "it");
                [it.bytes_per_second, it.latency_ns.mean, it.jobs as f64]
            });
            for (none, tiny) in none.into_iter().zip(tiny) {
                assert!((tiny / none - 1.0).abs() < 0.01, "{text}{tiny} and {none}");
            }
        }
    }
}

#[test]
fn messages_of_a_queue_pair_are_as_far_apart_as_one_costs() {
    for kind in ["write", "read", "copy"] {
        for queues in [1, 2] {
            let results = run(&rack("message = \"2 us\"\n"), &moves(kind, "64 B", 16, queues));
            let rate = flow(&results, "it").jobs_per_second / f64::from(queues);
            assert!((470e3..=500.5e3).contains(&rate), "{kind}: {rate}");
        }
    }
}

#[test]
fn the_flow_level_knows_what_messages_cost() {
    for kind in ["write", "read", "copy"] {
        for (size, depth) in [("64 B", 1), ("64 B", 16), ("16 KiB", 16)] {
            let (rack, text) = (rack("message = \"2 us\"\n"), moves(kind, size, depth, 2));
            let share = shared(&rack, &text).flows[0].fair_bytes_per_second;
            let rate = flow(&run(&rack, &text), "it").bytes_per_second;
            assert!((share / rate - 1.0).abs() < 0.1, "{text}{share} and {rate}");
        }
    }
}
