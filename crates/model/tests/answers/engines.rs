//! Functions that share a device's engines get what their levels promise, as the live device gives it to them.

use rackbus_fabric::rack::TurnTiming;
use rackbus_model::workload::Results;

use crate::lab::{flow, in_turns, rate, tried_in_turns};

const RACK: &str = "name = \"lab\"\n[hosts.near]\n[hosts.near.devices.c]\nkind = \"coprocessor\"\n";
const SLICE_NS: u64 = 50_000;

fn turns(level: Option<&str>, shaped: bool) -> TurnTiming {
    let level = level.map(str::to_owned);
    TurnTiming { slice_ns: SLICE_NS, granule: 4096, shaped, level }
}

/// A flow to a function, of messages whose engine needs 1 ns for each byte: 8 Gbit/s of one engine.
fn messages(function: &str, bytes: u64, more: &str) -> String {
    format!(
        "[flows.{function}]\nkind = \"ring\"\nhost = \"near\"\ndevice = \"near/c.{function}\"\nsize = {bytes}\n\
         service = \"{bytes} ns\"\n{more}\n"
    )
}

/// The results of both functions with such levels, on so many engines.
fn run(workers: u32, levels: [Option<&str>; 2], shaped: bool, flows: [String; 2]) -> Results {
    let [one, other] = levels.map(|level| turns(level, shaped));
    let functions = [("near/c.vf1", one), ("near/c.vf2", other)];
    in_turns(RACK, workers, &functions, &format!("duration = \"40 ms\"\n{}", flows.concat())).0
}

fn gbps(results: &Results, function: &str) -> f64 {
    rate(results, function) * 8e-9
}

/// As they came, the function with more jobs under way would get most.
#[test]
fn functions_without_levels_have_equal_engine_time_whatever_they_send() {
    for workers in [1, 3] {
        for (bytes, depth) in [(65536, 8), (4096, 64), (1 << 17, 8)] {
            let flows = [
                messages("vf1", 65536, "depth = 6"),
                messages("vf2", bytes, &format!("depth = {depth}")),
            ];
            let results = run(workers, [None; 2], true, flows);
            let (one, other) = (gbps(&results, "vf1"), gbps(&results, "vf2"));
            let ratio = one / other;
            assert!(
                (0.97..1.03).contains(&ratio),
                "{workers} engines, {bytes} B: {one} and {other}"
            );
            let all = 8.0 * f64::from(workers);
            assert!((one + other) / all > 0.97, "{workers} engines, {bytes} B: {one} and {other}");
            assert_eq!(flow(&results, "vf1").bottleneck, "near/c: medium");
        }
    }
}

#[test]
fn a_minimum_of_the_rack_file_is_kept_and_what_is_left_goes_by_weight() {
    let flows = || [messages("vf1", 65536, "depth = 4"), messages("vf2", 4096, "depth = 64")];
    let bought = Some("deflate 6 Gbit/s message 64KiB");
    let results = run(1, [bought, None], true, flows());
    let (one, other) = (gbps(&results, "vf1"), gbps(&results, "vf2"));
    assert!((6.9..7.1).contains(&one) && (0.9..1.1).contains(&other), "{one} and {other}");
    // Three parts of the rest against one.
    let weighed = Some("deflate 4 Gbit/s message 64KiB weight 3");
    let results = run(1, [weighed, None], true, flows());
    let (one, other) = (gbps(&results, "vf1"), gbps(&results, "vf2"));
    assert!((6.9..7.1).contains(&one) && (0.9..1.1).contains(&other), "{one} and {other}");
    // What is not asked for is others'.
    let slow = messages("vf1", 65536, "every = \"1 ms\"");
    let results = run(1, [bought, None], true, [slow, messages("vf2", 4096, "depth = 64")]);
    let (one, other) = (gbps(&results, "vf1"), gbps(&results, "vf2"));
    assert!((0.5..0.54).contains(&one) && other > 7.2, "{one} and {other}");
}

/// Of dear messages a function that bought cheap ones gets the time that it paid for.
#[test]
fn a_minimum_is_of_the_messages_that_it_was_bought_for() {
    // 1 ns a byte: 4 Gbit/s of 4 KiB are half of the engine, and so are twice as dear messages of 2 Gbit/s.
    let bought = Some("deflate 100000 op/s message 4KiB");
    let flows = [messages("vf1", 4096, "depth = 16"), messages("vf2", 65536, "depth = 16")];
    let results = run(1, [bought, None], true, flows);
    let operations = flow(&results, "vf1").jobs_per_second;
    assert!(operations > 99_000.0, "{operations}");
}

/// A long message is interrupted for others: they wait for a slice and not for all of it.
#[test]
fn a_lone_message_waits_for_a_slice_of_a_long_one() {
    let flows =
        || [messages("vf1", 4096, "think = \"30 us\""), messages("vf2", 1 << 20, "depth = 4")];
    let p99 = |results: &Results| flow(results, "vf1").latency_ns.p99;
    let alone = in_turns(
        RACK,
        1,
        &[("near/c.vf1", turns(None, true))],
        &format!("duration = \"40 ms\"\n{}", messages("vf1", 4096, "think = \"30 us\"")),
    );
    let (alone, shaped) = (p99(&alone.0), p99(&run(1, [None; 2], true, flows())));
    // A piece may be a granule longer than a slice.
    let slice = (SLICE_NS + 4096) as f64;
    assert!(shaped <= 1.5 * alone + slice, "{shaped} ns beside long messages, {alone} alone");
    let unshaped = p99(&run(1, [None; 2], false, flows()));
    assert!(unshaped > 8.0 * shaped, "{unshaped} ns unshaped, {shaped} shaped");
}

/// Without shaping, queues take turns by message, so that those of long messages get the engine.
#[test]
fn unshaped_engines_are_shared_by_message() {
    let flows = [messages("vf1", 65536, "depth = 8"), messages("vf2", 4096, "depth = 8")];
    let results = run(1, [None; 2], false, flows);
    let [one, other] = ["vf1", "vf2"].map(|name| flow(&results, name).jobs_per_second);
    assert!((0.97..1.03).contains(&(one / other)), "{one} and {other} a second");
}

/// Service times that are drawn are charged as they were.
#[test]
fn random_service_times_are_settled_by_what_they_took() {
    let random = |mean: &str| format!("service = {{ exponential = \"{mean}\" }}");
    let flows = ["vf1", "vf2"].map(|function| {
        let mean = if function == "vf1" { "65536 ns" } else { "4096 ns" };
        let bytes = if function == "vf1" { 65536 } else { 4096 };
        let depth = if function == "vf1" { 8 } else { 64 };
        let fixed = format!("service = \"{bytes} ns\"");
        messages(function, bytes, &format!("depth = {depth}")).replace(&fixed, &random(mean))
    });
    let results = run(1, [None; 2], true, flows);
    let (one, other) = (gbps(&results, "vf1"), gbps(&results, "vf2"));
    assert!((0.94..1.06).contains(&(one / other)), "{one} and {other}");
}

#[test]
fn the_flow_level_does_not_answer_for_functions_that_take_turns() {
    let functions = ["near/c.vf1", "near/c.vf2"].map(|name| (name, turns(None, true)));
    let text = |flows: &str| format!("duration = \"1 ms\"\n{flows}");
    let one = messages("vf1", 65536, "depth = 8");
    let (_, alone) = in_turns(RACK, 1, &functions, &text(&one));
    assert_eq!(alone.flows[0].refused, None);
    let (_, both) =
        in_turns(RACK, 1, &functions, &text(&(one + &messages("vf2", 4096, "depth = 8"))));
    for flow in &both.flows {
        assert_eq!(flow.refused, Some("functions take turns at its device's engines; simulate it"));
    }
}

/// A workload gives levels to functions, as leases do; what there is at most is theirs, too.
#[test]
fn levels_of_the_workload_take_the_place_of_those_of_the_rack_file() {
    let functions = ["near/c.vf1", "near/c.vf2"]
        .map(|name| (name, turns(Some("deflate 1 Gbit/s message 64KiB"), true)));
    let text = |levels: &str| {
        let flows = messages("vf1", 65536, "depth = 4") + &messages("vf2", 65536, "depth = 4");
        format!("duration = \"40 ms\"\n[levels]\n{levels}\n{flows}")
    };
    let of = |levels: &str| in_turns(RACK, 1, &functions, &text(levels)).0;
    let results = of("\"near/c.vf1\" = \"deflate 6 Gbit/s message 64KiB\"");
    let (one, other) = (gbps(&results, "vf1"), gbps(&results, "vf2"));
    assert!((6.4..6.6).contains(&one) && (1.4..1.6).contains(&other), "{one} and {other}");
    assert!(results.notes.is_empty(), "{:?}", results.notes);
    let results = of("\"near/c.vf1\" = \"deflate 1 Gbit/s max 2Gbit/s message 64KiB\"");
    let one = gbps(&results, "vf1");
    assert!((1.9..2.1).contains(&one), "{one}");
    assert_eq!(flow(&results, "vf1").bottleneck, "near/c.vf1: rate of its level");
    // More than there is.
    let results = of("\"near/c.vf1\" = \"deflate 8 Gbit/s message 64KiB\"");
    let [note] = &results.notes[..] else { panic!("{:?}", results.notes) };
    assert!(note.contains("near/c.vf1 and near/c.vf2 needs 1.1"), "{note}");
}

#[test]
fn levels_of_what_has_no_engines_are_refused_at_their_place() {
    let rack = format!("{RACK}[hosts.near.devices.g]\nkind = \"gpu\"\n");
    let refused = |levels: &str, shaped| {
        let functions = [("near/c.vf1", turns(None, shaped))];
        let text = format!("[levels]\n{levels}\n{}", messages("vf1", 64, ""));
        tried_in_turns(&rack, &functions, &text).unwrap_err()
    };
    let level = "deflate 1 Gbit/s";
    for (function, shaped, what) in [
        ("near/c.vf9", true, "the rack has no function `near/c.vf9`"),
        ("near/g", true, "`near/g` has no engines that levels are for"),
        ("near/c.vf1", false, "no level can be kept at `near/c.vf1`"),
    ] {
        let said = refused(&format!("\"{function}\" = \"{level}\""), shaped);
        assert!(said.contains(what), "{said}");
    }
    let said = refused("\"near/c.vf1\" = \"deflate much\"", true);
    assert!(said.contains("a service level is"), "{said}");
    let said = refused("\"near/c.vf1\" = 3", true);
    assert!(said.contains("write [levels] with"), "{said}");
}
