//! What jobs use one at a time, a drive's medium or units that steps name, among several flows.

use rackbus_fabric::rack::Rack;
use rackbus_model::flow::rack::FlowLevel;
use rackbus_model::random::RandomSequence;
use rackbus_model::timing::Timing;
use rackbus_model::workload::{Results, parse};

use super::{RACK, Sizes, both};

/// Both levels' answers for a workload in the rack of two hosts and a drive.
fn answers(text: &str) -> (FlowLevel, Results) {
    let rack = Rack::parse("rack.toml", RACK).unwrap();
    let workload = parse("workload.toml", text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    both(&rack, &Timing::default(), &workload)
}

/// Checks that each flow's fair share is `rate`, in jobs per second, as is what is simulated, and that `bottleneck`
/// is what bounds it.
fn each_gets(text: &str, rate: f64, bottleneck: &str) {
    let (level, results) = answers(text);
    for (flow, result) in level.flows.iter().zip(&results.flows) {
        let fair = flow.fair_jobs_per_second;
        assert!((fair / rate - 1.0).abs() < 0.01, "{fair} jobs/s are told, not {rate}: {flow:?}");
        let simulated = result.jobs_per_second;
        assert!((simulated / rate - 1.0).abs() < 0.05, "{simulated} are simulated, not {rate}");
        assert_eq!(flow.bottleneck, bottleneck);
    }
}

#[test]
fn flows_that_read_one_drive_share_its_medium() {
    let flow = |name: &str, units: u32| {
        format!(
            "[flows.{name}]\nkind = \"nvme-read\"\nhost = \"beta\"\ndevice = \"alpha/nvme0\"\n\
             service = \"10 us\"\ndepth = 64\nunits = {units}\n"
        )
    };
    each_gets(&flow("a", 4), 400e3, "alpha/nvme0: medium");
    each_gets(&(flow("a", 4) + &flow("b", 4)), 200e3, "alpha/nvme0: medium");
    each_gets(&(flow("a", 2) + &flow("b", 4)), 200e3, "alpha/nvme0: medium");
}

/// A flow of steps, of which eight are under way.
fn steps(name: &str, steps: &str) -> String {
    format!("[flows.{name}]\nkind = \"steps\"\ndepth = 8\nsteps = [{steps}]\n")
}

#[test]
fn flows_of_steps_share_units() {
    let work = "{ use = \"cpu\", time = \"10 us\" }";
    each_gets(&steps("a", work), 100e3, "cpu");
    each_gets(&(steps("a", work) + &steps("b", work)), 50e3, "cpu");
    let hold = "{ hold = \"cpu\", steps = [{ wait = \"10 us\" }] }";
    each_gets(&(steps("a", work) + &steps("b", hold)), 50e3, "cpu");
    each_gets(&format!("[units]\ncpu = 2\n{}{}", steps("a", work), steps("b", hold)), 100e3, "cpu");
}

#[test]
fn a_job_that_uses_a_unit_twice_takes_it_for_both_times() {
    let work = "{ use = \"cpu\", time = \"10 us\" }";
    each_gets(&steps("a", &format!("{work}, {{ wait = \"1 us\" }}, {work}")), 50e3, "cpu");
    let hold = "{ hold = \"cpu\", steps = [{ wait = \"10 us\" }] }";
    each_gets(&steps("a", &format!("{hold}, {hold}")), 50e3, "cpu");
    each_gets(&steps("a", &format!("{{ each = 4, apart = 64, steps = [{work}] }}")), 25e3, "cpu");
}

/// Flows of a drive and of steps, how many at a time and how often by chance.
fn random(random: &mut RandomSequence) -> String {
    let mut below = |end: u64| random.below(end);
    let mut text =
        format!("duration = \"12 ms\"\nwarmup = \"2 ms\"\n[units]\ncpu = {}\n", 1 + below(4));
    for nth in 0..1 + below(4) {
        let service = 2 + below(20);
        text += &match below(2) {
            0 => {
                let word = ["nvme-read", "nvme-write"][below(2) as usize];
                format!(
                    "[flows.f{nth}]\nkind = \"{word}\"\nhost = \"beta\"\ndevice = \"alpha/nvme0\"\n\
                     units = {}\nservice = {{ lognormal = \"{service} us\", sigma = 0.3 }}\n",
                    1 + below(8)
                )
            }
            _ => format!(
                "[flows.f{nth}]\nkind = \"steps\"\nsteps = [{{ use = \"cpu\", time = {{ exponential = \
                 \"{service} us\" }} }}, {{ wait = \"{} us\" }}, {{ hold = \"lock\", steps = [{{ wait = \
                 \"1 us\" }}, {{ write = \"256 B\", from = \"beta\", to = \"alpha/gpu0\" }}] }}]\n",
                1 + below(20)
            ),
        };
        text += &match below(3) {
            0 => format!("every = \"{} us\"\n", 4 + below(60)),
            1 => format!("poisson = \"{} us\"\n", 4 + below(60)),
            _ => format!("depth = {}\n", 1 + below(6)),
        };
        text += &format!("queues = {}\n", 1 + below(3));
    }
    text
}

/// Checks, for random flows of these seeds, that what is answered is near what is simulated, and that no more is promised
/// to all of them together than there is.
fn answers_are_near(seeds: impl Iterator<Item = u64>) {
    let (mut errors, mut far, mut more, mut count) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for seed in seeds {
        let text = random(&mut RandomSequence::new(seed));
        let (level, results) = answers(&text);
        count += level.flows.len();
        let (mut told, mut simulated) = (0.0, 0.0);
        for (flow, result) in level.flows.iter().zip(&results.flows) {
            // What jobs moved that wait for their drive is no part of those that have ended.
            let jobs = result.jobs as f64;
            told += flow.fair_jobs_per_second;
            simulated += jobs / results.seconds;
            if let Some(rate) = flow.jobs_per_second {
                let off = jobs / results.seconds / rate - 1.0;
                // So much may chance differ by.
                if off.abs() >= 0.1 + 4.0 / jobs.sqrt() {
                    far.push(format!("seed {seed}: {off:.3} off\n{text}\n{flow:?}"));
                }
                errors.push(off);
            }
        }
        more.push(simulated / told - 1.0);
    }
    let answered = errors.len() as f64 / count as f64;
    println!("{:.1} % of {count} flows answered", answered * 100.0);
    let each = Sizes::of("answered, each", errors);
    let sizes = Sizes::of("fair shares, in all", more);
    assert!(far.is_empty(), "{} answers are far off:\n{}", far.len(), far.join("\n"));
    assert!(answered > 0.3, "{answered} answered");
    assert!(each.median < 1.0);
    // Where a unit is full, who asks more often gets more of it, whatever is fair.
    assert!(sizes.median < 2.0 && sizes.most < 15.0);
}

/// Seeds by which the rules of `flow::sure` were made: 7000 to 7099 showed that a flow with a depth is not to be answered
/// where others fill what it uses.
#[test]
fn what_is_answered_of_drives_and_steps_is_near_what_is_simulated() {
    answers_are_near((0..100).chain(7000..7100));
}

/// These seeds were chosen after the rules had been made, and run once: 88 of 233 flows were answered, and all of them
/// held. Half of the answers were less than 0.8 % off, nine of ten less than 5 %, the worst 15.2 %. No flow among them is one
/// that only the rule which 7000 to 7099 led to refuses: they say that answers hold, and nothing of that rule.
/// Of 52000 to 52599, run once too and not kept, as they take a minute, all 646 answers of 1513 flows held, the worst 17.7 %
/// off; without that rule flows of 52298 and 52595 are answered as well, 16.6 % off, which is more than chance.
#[test]
fn the_flow_level_is_near_also_for_flows_that_no_rule_was_fitted_to() {
    answers_are_near(41300..41400);
}
