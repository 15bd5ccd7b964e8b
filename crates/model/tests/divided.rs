//! A rack's independent parts, simulated apart from each other: the same comes out, bit for bit, as of all of them at
//! once, on however many threads.

use rackbus_fabric::rack::Rack;
use rackbus_model::random::RandomSequence;
use rackbus_model::timing::{self, Timing};
use rackbus_model::workload::{Divided, Results, Run, Workload, parse};

/// Hosts with two devices each, some of them joined by twos, and flows of many kinds.
fn random(seed: u64) -> (Rack, Timing, Workload) {
    let mut random = RandomSequence::new(seed);
    let mut below = |end: u64| random.below(end);
    let hosts = 2 + below(6);
    let mut rack = "name = \"parts\"\n".to_owned();
    let mut links = String::new();
    for nth in 0..hosts {
        let iommu = below(2) == 0;
        rack += &format!(
            "[hosts.h{nth}]\niommu = {iommu}\n[hosts.h{nth}.devices.gpu0]\nkind = \"gpu\"\n\
             [hosts.h{nth}.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 GiB\"\n[fabric.adapters.n{nth}]\nhost = \"h{nth}\"\n"
        );
        let switched = below(2) == 0;
        if nth % 2 == 1 {
            let other = nth - 1;
            match switched {
                false => {
                    links += &format!(
                        "[[fabric.links]]\nends = [\"n{nth}\", \"n{other}\"]\ngeneration = 4\nlanes = 4\n"
                    );
                }
                // All pairs below one switch have their own ports.
                true => {
                    for end in [nth, other] {
                        links += &format!(
                            "[[fabric.links]]\nends = [\"n{end}\", \"top\"]\ngeneration = 3\nlanes = 8\n"
                        );
                    }
                }
            }
        }
    }
    rack += "[fabric.switches.top]\n";
    rack += &links;
    let mut text = "duration = \"120 us\"\nseed = 7\n".to_owned();
    for nth in 0..3 + below(8) {
        let host = below(hosts);
        let other = if below(2) == 0 || host ^ 1 >= hosts { host } else { host ^ 1 };
        let more = [
            "depth = 5",
            "poisson = \"3 us\"",
            "depth = 2\nrandom = true\nthink = { exponential = \"1 us\" }",
        ][below(3) as usize];
        text += &match below(4) {
            0 => format!(
                "[flows.f{nth}]\nkind = \"write\"\nfrom = \"h{host}/gpu0\"\nto = \"h{other}\"\n{more}\n"
            ),
            1 => format!(
                "[flows.f{nth}]\nkind = \"read\"\nfrom = \"h{host}/gpu0\"\nto = \"h{other}\"\nqueues = 2\n{more}\n"
            ),
            2 => format!(
                "[flows.f{nth}]\nkind = \"nvme-read\"\nhost = \"h{other}\"\ndevice = \"h{host}/nvme0\"\n{more}\n"
            ),
            _ => format!(
                "[flows.f{nth}]\nkind = \"steps\"\nsteps = [{{ use = \"cpu{}\", time = {{ exponential = \"2 us\" }} }}, \
                 {{ store = \"8 B\", from = \"h{host}\", to = \"h{host}/gpu0\" }}]\n{more}\n",
                below(3)
            ),
        };
    }
    let parsed = Rack::parse("rack.toml", &rack).unwrap();
    let timing = timing::read_for("rack.toml", &rack, &parsed).unwrap();
    (parsed, timing, parse("workload.toml", &text).unwrap())
}

fn whole(rack: &Rack, timing: &Timing, workload: &Workload) -> Results {
    let mut run = Run::new(rack, timing, workload).unwrap();
    run.go(u64::MAX).unwrap();
    run.results()
}

fn divided(of: &(Rack, Timing, Workload), threads: usize) -> (Results, usize) {
    let mut divided = Divided::new(&of.0, &of.1, &of.2).unwrap();
    let on = |work: &(dyn Fn() + Sync)| {
        std::thread::scope(|scope| (0..threads).for_each(|_| _ = scope.spawn(work)));
    };
    divided.go(u64::MAX, &on).unwrap();
    (divided.results(), divided.len())
}

#[test]
fn parts_give_what_the_whole_gives() {
    let mut most = 0;
    for seed in 0..60 {
        let of = random(seed);
        let all = whole(&of.0, &of.1, &of.2);
        for threads in [1, 3] {
            let (parts, count) = divided(&of, threads);
            most = most.max(count);
            assert_eq!(parts, all, "seed {seed}");
            // Distributions, too, which equality of results leaves out of what is printed.
            let distributions = |results: &Results| -> Vec<_> {
                results.flows.iter().map(|flow| flow.distribution.clone()).collect()
            };
            assert_eq!(distributions(&parts), distributions(&all));
        }
    }
    assert!(most >= 4, "{most} parts at most");
}

#[test]
fn flows_that_meet_are_in_one_part() {
    let rack = "name = \"two\"\n[hosts.a.devices.gpu0]\nkind = \"gpu\"\n[hosts.a.devices.gpu1]\nkind = \"gpu\"\n\
                [hosts.b.devices.gpu0]\nkind = \"gpu\"\n";
    let parsed = Rack::parse("rack.toml", rack).unwrap();
    let timing = timing::read_for("rack.toml", rack, &parsed).unwrap();
    let flow = |name: &str, from: &str, to: &str| {
        format!("[flows.{name}]\nkind = \"write\"\nfrom = \"{from}\"\nto = \"{to}\"\n")
    };
    let parts =
        |text: &str| Divided::new(&parsed, &timing, &parse("w.toml", text).unwrap()).unwrap().len();
    let apart = flow("x", "a/gpu0", "a") + &flow("y", "b/gpu0", "b");
    assert_eq!(parts(&apart), 2);
    // One memory.
    assert_eq!(parts(&(flow("x", "a/gpu0", "a") + &flow("y", "a/gpu1", "a"))), 1);
    let units = |name: &str, host: &str| {
        format!(
            "[flows.{name}]\nkind = \"steps\"\nsteps = [{{ use = \"cpu\", time = \"1 us\" }}, {{ write = \"64 B\", \
             from = \"{host}/gpu0\", to = \"{host}\" }}]\n"
        )
    };
    assert_eq!(parts(&(units("x", "a") + &units("y", "b"))), 1);
}
