//! Flows that do not go on evenly from beginning to end: traces, bursts, flows that come later and go sooner.

use rackbus_fabric::rack::Rack;
use rackbus_model::timing;
use rackbus_model::workload::{self, Results};

use crate::lab::{flow, rate, run, shared, tried};

const RACK: &str = "name = \"one\"\n[hosts.near]\niommu = false\n[hosts.near.devices.nvme0]\nkind = \"nvme\"\n\
                    size = \"1 GiB\"\n";
const DRIVE: &str = "host = \"near\"\ndevice = \"near/nvme0\"\nservice = \"10 us\"\n";

/// What comes of a flow `app` that plays a trace, with more keys.
fn play(log: &str, more: &str) -> Results {
    let text = format!("[flows.app]\nkind = \"trace\"\nfile = \"app.log\"\n{DRIVE}{more}");
    let read = |name: &str| Ok((name.to_owned(), log.to_owned()));
    let workload = workload::parse_with("w.toml", &text, &read).unwrap();
    let rack = Rack::parse("rack.toml", RACK).unwrap();
    let timing = timing::read_for("rack.toml", RACK, &rack).unwrap();
    workload::run(&rack, &timing, &workload, 100_000_000).unwrap()
}

/// A trace of reads and writes by turns, of 4 and 64 KiB, so far apart.
fn log(count: u64, us: u64) -> String {
    let line = |nth: u64| match nth % 2 {
        0 => format!("{} x read {} 4096\n", nth * us, nth * 4096),
        _ => format!("{} x write {} 65536\n", nth * us, nth * 4096),
    };
    "fio version 3 iolog\n".to_owned() + &(0..count).map(line).collect::<String>()
}

#[test]
fn a_trace_is_played_at_its_times_with_its_sizes() {
    let results = play(&log(200, 50), "");
    let app = flow(&results, "app");
    let bytes = app.bytes_per_second * results.seconds;
    assert_eq!((app.jobs, bytes.round() as u64), (200, 100 * (4096 + 65536)));
    assert_eq!((app.bottleneck.as_str(), &app.doubt), ("demand", &None));
    // Far apart, each job takes as long as a lone one of a flow that does nothing else.
    let lone = |kind: &str, size: &str| {
        let text = format!(
            "warmup = \"0 ns\"\n[flows.lone]\nkind = \"{kind}\"\n{DRIVE}size = \"{size}\"\ncount = 1\n"
        );
        flow(&run(RACK, &text), "lone").latency_ns.mean
    };
    let mean = f64::midpoint(lone("nvme-read", "4 KiB"), lone("nvme-write", "64 KiB"));
    assert!((app.latency_ns.mean - mean).abs() < 1.0, "{} and {mean}", app.latency_ns.mean);
}

#[test]
fn a_trace_is_played_as_fast_as_a_depth_allows() {
    let timed = play(&log(200, 50), "");
    let fast = play(&log(200, 50), "depth = 16\nqueues = 2\n");
    let [timed, fast] = [&timed, &fast].map(|results| flow(results, "app"));
    assert_eq!((timed.jobs, fast.jobs), (200, 200));
    // Several jobs wait for each other's bytes now.
    assert!(fast.latency_ns.p99 > 1.05 * timed.latency_ns.p99);
}

#[test]
fn what_of_a_trace_is_not_played_is_said() {
    let text =
        format!("duration = \"1 ms\"\n[flows.app]\nkind = \"trace\"\nfile = \"app.log\"\n{DRIVE}");
    let read = |name: &str| Ok((name.to_owned(), log(200, 50)));
    let workload = workload::parse_with("w.toml", &text, &read).unwrap();
    let rack = Rack::parse("rack.toml", RACK).unwrap();
    let timing = timing::read_for("rack.toml", RACK, &rack).unwrap();
    let results = workload::run(&rack, &timing, &workload, 100_000_000).unwrap();
    let doubt = flow(&results, "app").doubt.clone().unwrap_or_default();
    assert!(
        doubt.starts_with("the trace lasts 9.950 ms, of which 1.000 ms were played"),
        "{doubt}"
    );
}

#[test]
fn a_flow_is_measured_while_it_is_there() {
    let reads = |more: &str| {
        let text = format!(
            "duration = \"4 ms\"\n[flows.io]\nkind = \"nvme-read\"\n{DRIVE}depth = 8\n{more}"
        );
        let results = run(RACK, &text);
        let flow = flow(&results, "io").clone();
        (flow.bytes_per_second, flow.jobs, flow.doubt)
    };
    let always = reads("");
    // The first tenth is not measured.
    for (more, there) in [
        ("begin = \"2 ms\"\n", 2.0 / 3.6),
        ("end = \"2 ms\"\n", 1.6 / 3.6),
        ("begin = \"1 ms\"\nend = \"3 ms\"\n", 2.0 / 3.6),
    ] {
        let part = reads(more);
        assert!((part.0 / always.0 - 1.0).abs() < 0.02, "{more}{part:?} and {always:?}");
        let share = part.1 as f64 / always.1 as f64;
        assert!((share / there - 1.0).abs() < 0.03, "{more}{share}");
        assert_eq!(part.2, None, "{more}");
    }
}

/// Fair shares are of flows that are there at the same time, and go on.
#[test]
fn the_flow_level_answers_for_no_flow_that_comes_or_goes() {
    let io = format!("[flows.io]\nkind = \"nvme-read\"\n{DRIVE}depth = 8\n");
    let refused = |life: &str| shared(RACK, &(io.clone() + life)).flows[0].refused;
    let known = refused("");
    for (life, expected) in [
        ("begin = \"500 us\"\n", Some("it is not there all the time; simulate it")),
        ("end = \"500 us\"\n", Some("it is not there all the time; simulate it")),
        ("count = 20\n", Some("its jobs come to an end; simulate it")),
        ("begin = \"50 us\"\n", known),
    ] {
        assert_eq!(refused(life), expected, "{life}");
    }
}

/// Such a flow once had a rate that is no number, or 0 without a word.
#[test]
fn a_flow_that_is_not_there_while_measured_is_refused_or_told() {
    let io = format!("[flows.io]\nkind = \"nvme-read\"\n{DRIVE}depth = 8\n");
    for (life, expected) in [
        ("begin = \"2 ms\"\n", "workload.toml:7:9: `begin` is 2.000 ms; it is before"),
        ("begin = \"1 ms\"\n", "workload.toml:7:9: `begin` is 1.000 ms; it is before"),
        ("end = \"50 us\"\n", "workload.toml:7:7: `end` is 50.000 us; it is after"),
        ("end = \"100 us\"\n", "workload.toml:7:7: `end` is 100.000 us; it is after"),
    ] {
        let said = tried(RACK, &(io.clone() + life)).expect_err(life);
        assert!(said.starts_with(expected), "{said}\n{expected}");
    }
    let few = run(RACK, &(io.clone() + "count = 1\n"));
    assert_eq!((flow(&few, "io").jobs, rate(&few, "io")), (0, 0.0));
    let doubt = flow(&few, "io").doubt.clone().unwrap_or_default();
    assert!(doubt.starts_with("all its jobs ended before it was measured"), "{doubt}");
    // What moves no bytes is known by its jobs.
    let waits = run(
        RACK,
        "[flows.waits]\nkind = \"steps\"\nsize = \"4 KiB\"\nsteps = [{ use = \"cpu\", time = \"1 us\" }]\n",
    );
    assert_eq!((flow(&waits, "waits").jobs, &flow(&waits, "waits").doubt), (900, &None));
}

#[test]
fn bursts_have_the_share_of_the_time_and_crowd_in_it() {
    let writes = |arrivals: &str, bursts: &str| {
        let text = format!(
            "duration = \"40 ms\"\n[flows.io]\nkind = \"nvme-write\"\n{DRIVE}units = 4\n{arrivals}{bursts}"
        );
        run(RACK, &text)
    };
    let on = "bursts = { on = \"100 us\", off = \"300 us\" }\n";
    for arrivals in ["rate = \"400 MB/s\"\n", "poisson = \"10 us\"\n"] {
        let (even, burst) = (writes(arrivals, ""), writes(arrivals, on));
        let share = rate(&burst, "io") / rate(&even, "io");
        assert!((share - 0.25).abs() < 0.03, "{arrivals}{share}");
        assert_eq!(flow(&burst, "io").bottleneck, "demand");
    }
    // As many in all, but crowded: they wait for the drive.
    let even = writes("rate = \"500 MB/s\"\n", "");
    let crowd = writes("rate = \"2000 MB/s\"\n", on);
    assert!((rate(&crowd, "io") / rate(&even, "io") - 1.0).abs() < 0.05);
    let [even, crowd] = [&even, &crowd].map(|results| flow(results, "io").latency_ns.p50);
    assert!(crowd > 1.5 * even, "{crowd} and {even}");
    // Of jobs that follow each other, too; and drawn spans are the same each time.
    let drawn =
        "bursts = { on = { exponential = \"50 us\" }, off = { exponential = \"150 us\" } }\n";
    let first = writes("depth = 2\n", drawn);
    assert_eq!(first, writes("depth = 2\n", drawn));
    let share = rate(&first, "io") / rate(&writes("depth = 2\n", ""), "io");
    assert!((0.2..0.35).contains(&share), "{share}");
}
