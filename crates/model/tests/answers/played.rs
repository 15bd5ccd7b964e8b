//! Traces of which only a part is played: what is said of that part is of its own jobs.

use rackbus_fabric::rack::Rack;
use rackbus_model::timing;
use rackbus_model::workload::{self, FlowResult};

const RACK: &str = "name = \"one\"\n[hosts.near]\niommu = false\n[hosts.near.devices.nvme0]\nkind = \"nvme\"\n\
                    size = \"1 GiB\"\n";
const DRIVE: &str =
    "kind = \"trace\"\nfile = \"app.log\"\nhost = \"near\"\ndevice = \"near/nvme0\"\n";

/// What comes of a trace: a hundred reads of 4 KiB, then a hundred of 64 KiB, 20 us apart.
fn play(top: &str, own: &str) -> FlowResult {
    let line =
        |nth: u64| format!("{} x read 0 {}\n", nth * 20, if nth < 100 { 4096 } else { 65536 });
    let log = "fio version 3 iolog\n".to_owned() + &(0..200).map(line).collect::<String>();
    let read = |name: &str| Ok((name.to_owned(), log.clone()));
    let service = if own.contains("service") { "" } else { "service = \"5 us\"\n" };
    let text = format!("{top}[flows.app]\n{DRIVE}{service}{own}");
    let workload = workload::parse_with("w.toml", &text, &read).unwrap();
    let rack = Rack::parse("rack.toml", RACK).unwrap();
    let timing = timing::read_for("rack.toml", RACK, &rack).unwrap();
    workload::run(&rack, &timing, &workload, 100_000_000).unwrap().flows.remove(0)
}

#[test]
fn a_part_of_a_trace_counts_its_own_jobs_and_bytes() {
    for (top, own, seconds) in [
        ("duration = \"2 ms\"\n", "", 2e-3),
        ("duration = \"5 ms\"\n", "end = \"2 ms\"\n", 2e-3),
        ("duration = \"5 ms\"\n", "count = 100\n", 5e-3),
    ] {
        let app = play(&(top.to_owned() + "warmup = \"0 ns\"\n"), own);
        assert_eq!(app.jobs, 100, "{top}{own}");
        let jobs = 100.0 / seconds;
        assert!((app.jobs_per_second / jobs - 1.0).abs() < 1e-9, "{}", app.jobs_per_second);
        let bytes = 100.0 * 4096.0 / seconds;
        assert!((app.bytes_per_second / bytes - 1.0).abs() < 1e-6, "{}", app.bytes_per_second);
        assert_eq!(app.bottleneck, "demand", "{top}{own}");
    }
}

/// What begins before is not measured, and does not change what is.
#[test]
fn the_end_of_a_trace_counts_its_own_jobs_and_bytes() {
    let app = play("duration = \"5 ms\"\nwarmup = \"2 ms\"\n", "");
    assert_eq!(app.jobs, 100);
    assert!((app.jobs_per_second / (100.0 / 3e-3) - 1.0).abs() < 1e-9);
    assert!((app.bytes_per_second / (100.0 * 65536.0 / 3e-3) - 1.0).abs() < 1e-6);
    assert_eq!(app.bottleneck, "demand");
}

#[test]
fn a_trace_that_a_drive_is_too_slow_for_does_not_get_what_it_asks_for() {
    let app = play("duration = \"2 ms\"\nwarmup = \"0 ns\"\n", "units = 1\nservice = \"50 us\"\n");
    assert_eq!(app.bottleneck, "near/nvme0: medium");
}
