//! What the rack file lets functions do in a second.

use proptest::prelude::*;
use rackbus_fabric::rack::{FunctionLimit, LimitCounts};

use rackbus_model::timing::Timing;
use rackbus_model::workload;

use crate::lab::{flow, limited, limited_rack, link, rate};

const BYTES: LimitCounts = LimitCounts::Bytes;
const OPERATIONS: LimitCounts = LimitCounts::Operations;

/// A host with two GPUs and a drive, each at a link of its own of Gen4 x8.
fn rack() -> String {
    let devices = ["gpu0", "gpu1", "nvme0"];
    let kind = |device: &str| match device {
        "nvme0" => "\"nvme\"\nsize = \"1 TiB\"",
        _ => "\"gpu\"",
    };
    let sections = devices
        .map(|device| format!("[hosts.near.devices.{device}]\nkind = {}\n", kind(device)))
        .concat();
    let links = devices.map(|device| link("near", &format!("near/{device}"), 4, 8)).concat();
    format!("name = \"one\"\n[hosts.near]\niommu = false\n{sections}{links}")
}

/// A bucket of what comes in 50 ms.
fn limit(counts: LimitCounts, rate: u64) -> FunctionLimit {
    FunctionLimit { counts, rate, burst: rate / 20 }
}

/// Flows of these names and keys, for 4 ms.
fn flows<'a>(all: impl IntoIterator<Item = (&'a str, String)>) -> String {
    let flows = all.into_iter().map(|(name, keys)| format!("[flows.{name}]\n{keys}\n"));
    "duration = \"4 ms\"\n".to_owned() + &flows.collect::<String>()
}

fn near(found: f64, expected: f64) -> bool {
    (found / expected - 1.0).abs() < 0.02
}

const DRIVE: &str = "host = \"near\"\ndevice = \"near/nvme0\"\ndepth = 64\nrandom = true\n";

/// The rate and the bottleneck of the only flow, with the drive so limited.
fn alone(limits: &[FunctionLimit], keys: &str) -> (f64, String) {
    let results = limited(&rack(), &[("near/nvme0", limits)], &flows([("a", keys.to_owned())]));
    (rate(&results, "a"), flow(&results, "a").bottleneck.clone())
}

#[test]
fn a_drive_moves_no_more_bytes_than_the_rack_file_lets_it() {
    for (kind, keys) in [
        ("nvme-read", DRIVE),
        ("nvme-write", DRIVE),
        ("ring", DRIVE),
        ("write", "from = \"near/nvme0\"\nto = \"near\"\ndepth = 64\n"),
        ("read", "from = \"near/nvme0\"\nto = \"near\"\ndepth = 64\n"),
        ("request", "from = \"near\"\nto = \"near/nvme0\"\ndepth = 64\n"),
        ("copy", "by = \"near/nvme0\"\nfrom = \"near/gpu0\"\nto = \"near\"\ndepth = 64\n"),
        (
            "steps",
            "steps = [{ write = \"4 KiB\", from = \"near/nvme0\", to = \"near\" }]\ndepth = 64\n",
        ),
    ] {
        let keys = format!("kind = \"{kind}\"\n{keys}");
        let (free, _) = alone(&[], &keys);
        assert!(free > 520e6, "{kind}: {free}");
        let (rate, bottleneck) = alone(&[limit(BYTES, 500_000_000)], &keys);
        // What is read and written counts for both.
        let expected = if matches!(kind, "copy" | "ring") { 250e6 } else { 500e6 };
        assert!(near(rate, expected), "{kind}: {rate}");
        assert_eq!(bottleneck, "near/nvme0: rate in the rack file", "{kind}");
    }
}

#[test]
fn a_drive_does_no_more_operations_than_the_rack_file_lets_it() {
    let keys = format!("kind = \"nvme-read\"\n{DRIVE}");
    let both = [limit(BYTES, 500_000_000), limit(OPERATIONS, 20_000)];
    let (rate, bottleneck) = alone(&both, &keys);
    assert!(near(rate, 20_000.0 * 4096.0), "{rate}");
    assert_eq!(bottleneck, "near/nvme0: operations in the rack file");
    let (rate, bottleneck) = alone(&both, &format!("{keys}size = \"64 KiB\"\n"));
    assert!(near(rate, 500e6), "{rate}");
    assert_eq!(bottleneck, "near/nvme0: rate in the rack file");
    // What is longer than one operation moves is several.
    let (rate, _) = alone(&[limit(OPERATIONS, 60_000)], &format!("{keys}size = \"256 KiB\"\n"));
    assert!(near(rate, 60_000.0 * 65536.0), "{rate}");
}

/// What is asked for and what the rack file lets pass both bound.
#[test]
fn the_lesser_of_what_is_asked_for_and_what_is_let_through_counts() {
    let keys = |rate: &str| {
        format!("kind = \"write\"\nfrom = \"near/nvme0\"\nto = \"near\"\nrate = \"{rate}\"\n")
    };
    let (rate, bottleneck) = alone(&[limit(BYTES, 500_000_000)], &keys("400 MB/s"));
    assert!(near(rate, 400e6), "{rate}");
    assert_eq!(bottleneck, "demand");
    let (rate, bottleneck) = alone(&[limit(BYTES, 500_000_000)], &keys("600 MB/s"));
    assert!(near(rate, 500e6), "{rate}");
    assert_eq!(bottleneck, "near/nvme0: rate in the rack file");
}

/// What such a limit saves in the long run is enough for jobs that come at random.
#[test]
fn a_limit_above_what_is_asked_for_delays_nothing() {
    let keys = "kind = \"write\"\nfrom = \"near/nvme0\"\nto = \"near\"\npoisson = \"9102 ns\"\n";
    let latency = |limits: &[FunctionLimit]| {
        let all = flows([("a", keys.to_owned())]);
        let results = limited(&rack(), &[("near/nvme0", limits)], &all);
        flow(&results, "a").latency_ns.greatest
    };
    assert_eq!(latency(&[limit(BYTES, 500_000_000)]), latency(&[]));
}

/// Nothing is saved while nobody asks for anything.
#[test]
fn a_limit_holds_from_when_its_first_flow_begins() {
    let keys =
        "kind = \"write\"\nfrom = \"near/nvme0\"\nto = \"near\"\ndepth = 32\nbegin = \"2 ms\"\n";
    let all = "warmup = \"2 ms\"\n".to_owned() + &flows([("a", keys.to_owned())]);
    let results = limited(&rack(), &[("near/nvme0", &[limit(BYTES, 500_000_000)])], &all);
    assert!(near(rate(&results, "a"), 500e6), "{}", rate(&results, "a"));
}

/// One that has always just as many jobs under way as come to the rate is told to be held up by it, though none waits long.
#[test]
fn a_rate_that_is_used_up_is_named_where_little_is_waited_for_it() {
    let one =
        "kind = \"write\"\nfrom = \"near/nvme0\"\nto = \"near\"\ndepth = 1\nsize = \"64 KiB\"\n";
    let (free, _) = alone(&[], one);
    let (rate, bottleneck) = alone(&[limit(BYTES, (free * 0.97) as u64)], one);
    assert!(near(rate, free * 0.97), "{rate} of {free}");
    assert_eq!(bottleneck, "near/nvme0: rate in the rack file");
}

#[test]
fn flows_of_one_function_have_its_rate_in_common_and_others_do_not() {
    let write = |device: &str| {
        format!("kind = \"write\"\nfrom = \"near/{device}\"\nto = \"near\"\ndepth = 32\n")
    };
    let all = flows([("a", write("gpu0")), ("b", write("gpu0")), ("c", write("gpu1"))]);
    let results = limited(&rack(), &[("near/gpu0", &[limit(BYTES, 1_000_000_000)])], &all);
    let [a, b, c] = ["a", "b", "c"].map(|name| rate(&results, name));
    assert!(near(a, 500e6) && near(b, 500e6), "{a} {b}");
    assert!(c > 10e9, "{c}");
}

/// As a network function has one for what it sends, and one for what it receives.
#[test]
fn a_limit_of_one_direction_leaves_the_other_alone() {
    let flow = |kind: &str| {
        format!("kind = \"{kind}\"\nfrom = \"near/gpu0\"\nto = \"near\"\ndepth = 32\n")
    };
    let both = flows([("sent", flow("read")), ("received", flow("write"))]);
    let read = limit(LimitCounts::BytesRead, 1_000_000_000);
    let written = limit(LimitCounts::BytesWritten, 2_000_000_000);
    let rates = |limits: &[FunctionLimit]| {
        let results = limited(&rack(), &[("near/gpu0", limits)], &both);
        ["sent", "received"].map(|name| rate(&results, name))
    };
    let [sent, received] = rates(&[read, written]);
    assert!(near(sent, 1e9) && near(received, 2e9), "{sent} {received}");
    let [sent, received] = rates(&[written]);
    assert!(sent > 4e9 && near(received, 2e9), "{sent} {received}");
}

/// A flow that comes to an end finds the bucket full, as after a time when nothing was done.
#[test]
fn what_comes_in_a_burst_finds_what_was_saved() {
    let keys =
        "kind = \"write\"\nfrom = \"near/nvme0\"\nto = \"near\"\ndepth = 8\nsize = \"64 KiB\"\n";
    let took = |limits: &[FunctionLimit], count: u64| {
        let keys = format!("{keys}count = {count}\n");
        let all = "warmup = \"0 ns\"\n".to_owned() + &flows([("a", keys)]);
        let results = limited(&rack(), &[("near/nvme0", limits)], &all);
        (flow(&results, "a").jobs, flow(&results, "a").latency_ns.greatest)
    };
    let burst = 64 * (64 << 10);
    let limits = [FunctionLimit { counts: BYTES, rate: 500_000_000, burst }];
    assert_eq!(took(&limits, 64), took(&[], 64));
    let (jobs, greatest) = took(&limits, 88);
    assert_eq!(jobs, 88);
    // Eight wait for 64 KiB each.
    assert!(near(greatest, 8.0 * 65536.0 / 0.5), "{greatest}");
}

#[test]
fn each_io_of_a_trace_counts_with_its_own_length() {
    let line = |nth: u64| format!("{} x read 0 {}\n", nth * 20, [4096, 65536][nth as usize % 2]);
    let log = "fio version 3 iolog\n".to_owned() + &(0..200).map(line).collect::<String>();
    let text =
        "[flows.a]\nkind = \"trace\"\nfile = \"a.log\"\nhost = \"near\"\ndevice = \"near/nvme0\"\n";
    let read = |name: &str| Ok((name.to_owned(), log.clone()));
    let workload = workload::parse_with("w.toml", text, &read).unwrap();
    let limits = [FunctionLimit { counts: BYTES, rate: 500_000_000, burst: 4096 }];
    let rack = limited_rack(&rack(), &[("near/nvme0", &limits)]);
    let results = workload::run(&rack, &Timing::default(), &workload, 10_000_000).unwrap();
    assert!(near(rate(&results, "a"), 500e6), "{}", rate(&results, "a"));
    assert_eq!(flow(&results, "a").bottleneck, "near/nvme0: rate in the rack file");
}

#[test]
fn members_of_an_all_reduce_count_what_they_send() {
    let keys = "kind = \"all-reduce\"\nmembers = [\"near/gpu0\", \"near/gpu1\"]\nsize = \"64 KiB\"\ndepth = 8\n";
    let all = flows([("a", keys.to_owned())]);
    let results = limited(&rack(), &[("near/gpu0", &[limit(BYTES, 1_000_000_000)])], &all);
    // Each member sends both chunks once, which is as much as is added up.
    assert!(near(rate(&results, "a"), 1e9), "{}", rate(&results, "a"));
    assert_eq!(flow(&results, "a").bottleneck, "near/gpu0: rate in the rack file");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// In any run no more passes than the bucket holds, what comes, and one job of each; and of a flow that lasts, no less than
    /// the limit that binds lets through.
    #[test]
    fn limits_hold_and_are_used_up(
        bytes in 20u64..2_000,
        operations in 2_000u64..200_000,
        size in 512u64..100_000,
        lasts in any::<bool>(),
        kind in prop::sample::select(vec!["nvme-read", "nvme-write"]),
    ) {
        let limits = [limit(BYTES, bytes * 1_000_000), limit(OPERATIONS, operations)];
        let keys = format!("kind = \"{kind}\"\n{DRIVE}size = {size}\nservice = \"1 us\"\n");
        let keys = if lasts { keys } else { format!("{keys}bursts = {{ on = \"500 us\", off = \"100 us\" }}\n") };
        let text = "warmup = \"0 ns\"\n".to_owned() + &flows([("a", keys)]);
        let results = limited(&rack(), &[("near/nvme0", &limits)], &text);
        let found = &results.flows[0];
        let (jobs, moved) = (found.jobs as f64, found.jobs as f64 * size as f64);
        let came = |limit: &FunctionLimit| limit.rate as f64 * results.seconds;
        let saved = |limit: &FunctionLimit| if lasts { 1.0 } else { limit.burst as f64 };
        prop_assert!(moved <= came(&limits[0]) + saved(&limits[0]) + size as f64, "{moved} bytes");
        prop_assert!(jobs <= came(&limits[1]) + saved(&limits[1]) + 1.0, "{jobs} jobs");
        // As many as may be under way have not ended.
        let (alone, _) = alone(&[], &format!("kind = \"{kind}\"\n{DRIVE}size = {size}\nservice = \"1 us\"\n"));
        let least = (came(&limits[0]) / size as f64).min(came(&limits[1])).min(0.9 * alone * results.seconds / size as f64);
        prop_assert!(!lasts || jobs + 65.0 >= least, "{jobs} jobs, not {least}");
    }
}
