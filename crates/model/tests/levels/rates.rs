//! What the rack file lets functions do in a second, by the shares and by the simulation.

use rackbus_fabric::rack::{FunctionLimit, LimitCounts, Rack};
use rackbus_model::flow::rack::{FlowLevel, shares};
use rackbus_model::random::RandomSequence;
use rackbus_model::timing::Timing;
use rackbus_model::workload::{Results, Workload, parse};

use super::{RACK, Sizes, both};

/// The rack of two hosts and a drive, whose devices are limited so.
fn limited(limits: [Vec<FunctionLimit>; 2]) -> Rack {
    let mut rack = Rack::parse("rack.toml", RACK).unwrap();
    let devices = &mut rack.hosts[0].devices;
    assert_eq!([&devices[0].name, &devices[1].name], ["nvme0", "gpu0"]);
    for (device, limits) in devices.iter_mut().zip(limits) {
        device.timing.limits = limits;
    }
    rack
}

fn read(text: &str) -> Workload {
    parse("workload.toml", text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// Both levels' answers for a workload in that rack.
fn answers(limits: [Vec<FunctionLimit>; 2], text: &str) -> (FlowLevel, Results) {
    both(&limited(limits), &Timing::default(), &read(text))
}

fn limit(counts: LimitCounts, rate: u64) -> FunctionLimit {
    FunctionLimit { counts, rate, burst: rate / 20 }
}

#[test]
fn a_limit_bounds_its_only_flow_at_both_levels_by_the_same_name() {
    let drive =
        vec![limit(LimitCounts::Bytes, 200_000_000), limit(LimitCounts::Operations, 20_000)];
    for (size, expected, key) in [("4 KiB", 81.92e6, "operations"), ("64 KiB", 200e6, "rate")] {
        for kind in ["nvme-read", "nvme-write"] {
            let text = format!(
                "duration = \"20 ms\"\n[flows.a]\nkind = \"{kind}\"\nhost = \"beta\"\n\
                 device = \"alpha/nvme0\"\ndepth = 32\nsize = \"{size}\"\n"
            );
            let (level, results) = answers([drive.clone(), Vec::new()], &text);
            let rate = level.flows[0].bytes_per_second.unwrap();
            let simulated = results.flows[0].bytes_per_second;
            assert!((rate / expected - 1.0).abs() < 1e-3, "{kind}, {size}: {rate}");
            assert!((simulated / expected - 1.0).abs() < 0.02, "{kind}, {size}: {simulated}");
            let name = format!("alpha/nvme0: {key} in the rack file");
            assert_eq!([&level.flows[0].bottleneck, &results.flows[0].bottleneck], [&name; 2]);
        }
    }
}

/// However few operations a byte is a part of.
#[test]
fn operations_of_jobs_of_any_size_are_counted_exactly() {
    for size in [512, 65_536, 716_800, 4 << 20] {
        let text = format!(
            "[flows.a]\nkind = \"nvme-read\"\nhost = \"beta\"\ndevice = \"alpha/nvme0\"\ndepth = 64\n\
             size = {size}\n"
        );
        let rack = limited([vec![limit(LimitCounts::Operations, 200)], Vec::new()]);
        let level = shares(&rack, &Timing::default(), &read(&text)).unwrap();
        let jobs = level.flows[0].jobs_per_second.unwrap();
        assert!((jobs / 200.0 - 1.0).abs() < 1e-4, "{jobs} of {size} bytes");
    }
}

/// One or two flows of a drive and a GPU, and what limits these, by chance.
fn random(random: &mut RandomSequence) -> ([Vec<FunctionLimit>; 2], String) {
    let mut below = |end: u64| random.below(end);
    let mut text = "duration = \"10 ms\"\nwarmup = \"2 ms\"\n".to_owned();
    for nth in 0..1 + below(2) {
        text += &match below(3) {
            0 => {
                let word = ["nvme-read", "nvme-write"][below(2) as usize];
                let us = 2 + below(20);
                format!(
                    "[flows.f{nth}]\nkind = \"{word}\"\nhost = \"beta\"\ndevice = \"alpha/nvme0\"\n\
                     service = {{ lognormal = \"{us} us\", sigma = 0.3 }}\n"
                )
            }
            _ => {
                let word = ["write", "read"][below(2) as usize];
                format!("[flows.f{nth}]\nkind = \"{word}\"\nfrom = \"alpha/gpu0\"\nto = \"beta\"\n")
            }
        };
        text += &match below(3) {
            0 => format!("every = \"{} us\"\n", 4 + below(60)),
            1 => format!("poisson = \"{} us\"\n", 4 + below(60)),
            _ => format!("depth = {}\n", 1 + below(16)),
        };
    }
    let mut limits = |all: &[LimitCounts]| -> Vec<FunctionLimit> {
        let some = all.iter().filter_map(|counts| {
            let rate = match counts {
                LimitCounts::Operations => 2_000 + below(200_000),
                _ => (10 + below(1_000)) * 1_000_000,
            };
            (below(4) > 0).then(|| limit(*counts, rate))
        });
        some.collect()
    };
    let drive = limits(&[LimitCounts::Bytes, LimitCounts::Operations]);
    let gpu = limits(&[LimitCounts::BytesRead, LimitCounts::BytesWritten]);
    ([drive, gpu], text)
}

/// What is answered is near what is simulated, whatever the rack file lets functions do; and no more is promised than that.
#[test]
fn what_is_answered_of_limited_functions_is_near_what_is_simulated() {
    let (mut errors, mut held, mut count) = (Vec::new(), 0, 0);
    for seed in 0..100 {
        let (limits, text) = random(&mut RandomSequence::new(seed));
        let (level, results) = answers(limits.clone(), &text);
        count += level.flows.len();
        let free = limited([Vec::new(), Vec::new()]);
        let free = shares(&free, &Timing::default(), &read(&text)).unwrap();
        let flows = level.flows.iter().zip(&results.flows).zip(&free.flows);
        for ((flow, result), free) in flows {
            let Some(rate) = flow.jobs_per_second else { continue };
            let simulated = result.bytes_per_second / 4096.0;
            let off = simulated / rate - 1.0;
            // So much may chance differ by.
            let most = 0.1 + 4.0 / (simulated * results.seconds).sqrt();
            assert!(
                off.abs() < most,
                "seed {seed}: {off:.3} off\n{limits:?}\n{text}\n{flow:?}\n{result:?}"
            );
            errors.push(off);
            // Where it would get more but for the limit, by far.
            let held_up = flow.bottleneck.ends_with("in the rack file");
            if held_up && free.fair_bytes_per_second > 1.1 * flow.fair_bytes_per_second {
                held += 1;
                assert_eq!(flow.bottleneck, result.bottleneck, "seed {seed}\n{limits:?}\n{text}");
            }
        }
    }
    let (answered, held) = (errors.len() as f64 / count as f64, f64::from(held) / count as f64);
    println!("{:.1} % answered, {:.1} % held up by limits", answered * 100.0, held * 100.0);
    assert!(answered > 0.5, "{answered} answered");
    assert!(held > 0.12, "{held} held up by limits");
    assert!(Sizes::of("answered, each", errors).median < 1.0);
}
