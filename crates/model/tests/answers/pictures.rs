//! The picture of bandwidth over size: each flow alone, as fast as it can be.

use rackbus_fabric::rack::Rack;
use rackbus_model::picture::chart::Chart;
use rackbus_model::timing;
use rackbus_model::workload::{parse, pictures};

use crate::lab::{link, rate, run};

fn rack() -> String {
    let rack = "name = \"one\"\n[hosts.near]\niommu = false\nmemory = \"64 GiB\"\n\
                [hosts.near.devices.gpu0]\nkind = \"gpu\"\n[hosts.near.devices.nvme0]\nkind = \"nvme\"\n\
                size = \"1 TiB\"\n";
    rack.to_owned() + &link("near", "near/gpu0", 3, 8)
}

fn drawn(workload: &str) -> Chart {
    let parsed = Rack::parse("rack.toml", &rack()).unwrap();
    let timing = timing::read_for("rack.toml", &rack(), &parsed).unwrap();
    pictures::bandwidth(&parsed, &timing, &parse("w.toml", workload).unwrap()).unwrap()
}

const WRITE: &str =
    "[flows.write]\nkind = \"write\"\nfrom = \"near/gpu0\"\nto = \"near\"\ndepth = 4\n";

/// Their moves have sizes of their own: a line over the size that jobs count for would tell nothing.
#[test]
fn flows_of_steps_are_left_out_and_that_is_said() {
    let steps = "[flows.steps]\nkind = \"steps\"\nsize = \"4 KiB\"\nsteps = [{ write = \"4 KiB\", from = \
                 \"near/gpu0\", to = \"near\" }]\n";
    let both = drawn(&(WRITE.to_owned() + steps));
    let names = |chart: &Chart| chart.series.iter().map(|one| one.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&both), ["write"]);
    assert!(
        both.subtitle.ends_with("without steps, whose moves have sizes of their own"),
        "{}",
        both.subtitle
    );
    let none = drawn(steps);
    assert!(names(&none).is_empty() && none.svg().contains("no data"));
    assert_eq!(drawn(WRITE).subtitle, "Each flow alone in the rack");
}

/// Once 0 B/s, as ten small jobs were over before the picture's measuring began.
#[test]
fn a_flow_of_few_jobs_is_drawn_as_if_it_went_on() {
    let (few, all) = (drawn(&(WRITE.to_owned() + "count = 10\n")), drawn(WRITE));
    assert_eq!(few.series, all.series);
    assert!(all.series[0].line.iter().all(|(_, rate)| *rate > 0.0));
}

/// Once about nothing: the points were shorter than a job.
#[test]
fn slow_services_are_drawn_for_as_long_as_they_take() {
    for service in ["1 ms", "10 ms"] {
        let reads = format!(
            "duration = \"300 ms\"\n[flows.io]\nkind = \"nvme-read\"\nhost = \"near\"\ndevice = \"near/nvme0\"\n\
             service = \"{service}\"\n"
        );
        let chart = drawn(&reads);
        for (size, drawn) in &chart.series[0].line {
            if ![64.0, 4096.0, 1048576.0].contains(size) {
                continue;
            }
            let long = rate(&run(&rack(), &format!("{reads}size = {size}\n")), "io");
            assert!((drawn / long - 1.0).abs() < 0.1, "{service}, {size} B: {drawn} and {long}");
        }
    }
}
