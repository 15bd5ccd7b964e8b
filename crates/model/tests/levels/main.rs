//! The two levels of the model against each other: fair shares against the simulation, in a hundred
//! random racks.

mod caches;
mod rates;
mod units;

use std::collections::BTreeSet;

use rackbus_fabric::rack::{Adapter, Cable, PhysicalFabric, Rack, Switch};
use rackbus_model::engine::Arrivals;
use rackbus_model::flow::rack::{FlowLevel, shares};
use rackbus_model::random::RandomSequence;
use rackbus_model::reproduce::median;
use rackbus_model::time::Time;
use rackbus_model::timing::{DeviceTiming, HostTiming, MemoryTiming, RootTiming, Timing, read_for};
use rackbus_model::workload::{Failed, FlowKind, FlowSpec, Results, Workload, parse, run};

/// Makes random racks and workloads.
struct Maker(RandomSequence);

impl Maker {
    fn below(&mut self, end: usize) -> usize {
        self.0.below(end as u64) as usize
    }

    fn cable(&mut self, a: &str, b: &str) -> Cable {
        let lanes = [4, 8, 16][self.below(3)];
        let generation = 1 + self.below(4) as u8;
        Cable { ends: [a.to_owned(), b.to_owned()], generation, lanes, length: None }
    }

    /// Hosts of one or two devices below a tree of switches. In some, devices and adapter are below
    /// a switch of the host; some have an IOMMU.
    fn rack(&mut self) -> (Rack, Vec<String>) {
        let mut text = "name = \"random\"\n".to_owned();
        let mut physical = PhysicalFabric::default();
        let mut devices = Vec::new();
        let switches = 1 + self.below(3);
        for nth in 0..switches {
            physical.switches.push(Switch { name: format!("s{nth}"), host: None, cxl: false });
            if nth > 0 {
                let above = self.below(nth);
                physical.links.push(self.cable(&format!("s{nth}"), &format!("s{above}")));
            }
        }
        for nth in 0..2 + self.below(5) {
            let host = format!("h{nth}");
            let switched = self.below(2) == 0;
            // Detours by the root over the switch's one link could block each other in a circle.
            let iommu = !switched && self.below(2) == 0;
            text += &format!("[hosts.{host}]\niommu = {iommu}\n");
            let adapter = format!("{host}/ntb");
            physical.adapters.push(Adapter { name: adapter.clone(), host: host.clone() });
            let above = if switched {
                let name = format!("{host}/switch");
                physical.switches.push(Switch {
                    name: name.clone(),
                    host: Some(host.clone()),
                    cxl: false,
                });
                physical.links.push(self.cable(&host, &name));
                name
            } else {
                host.clone()
            };
            for nth in 0..1 + self.below(2) {
                text += &format!("[hosts.{host}.devices.d{nth}]\nkind = \"gpu\"\n");
                let device = format!("{host}/d{nth}");
                physical.links.push(self.cable(&above, &device));
                devices.push(device);
            }
            let switch = format!("s{}", self.below(switches));
            physical.links.push(self.cable(&above, &adapter));
            physical.links.push(self.cable(&adapter, &switch));
        }
        let mut rack = Rack::parse("random", &text).unwrap();
        rack.fabric = Some(physical);
        (rack, devices)
    }

    /// Reads and writes of devices, to memory or other devices, as many as the links let through.
    fn workload(&mut self, devices: &[String]) -> Workload {
        let flows = (0..2 + self.below(9)).map(|nth| {
            let from = self.below(devices.len());
            let other = (from + 1 + self.below(devices.len() - 1)) % devices.len();
            let to = match devices[other].split_once('/') {
                Some((host, _)) if self.below(4) > 0 => host,
                _ => &devices[other],
            };
            let (from, to) = (devices[from].clone(), to.to_owned());
            let kind = match self.below(2) {
                0 => FlowKind::Write { from, to },
                _ => FlowKind::Read { from, to },
            };
            let size = 4096 << self.below(3);
            let flow = FlowSpec::new(&format!("f{nth}"), kind, Arrivals::Depth(64), size);
            FlowSpec { span: 1 << 20, ..flow }
        });
        let flows = flows.collect();
        Workload {
            seed: 1,
            duration: Time::from_us(1600),
            warmup: Time::from_us(400),
            units: Default::default(),
            shaping: Vec::new(),
            levels: Vec::new(),
            flows,
            notes: Vec::new(),
        }
    }
}

/// Both levels' answers.
fn both(rack: &Rack, timing: &Timing, workload: &Workload) -> (FlowLevel, Results) {
    let level = shares(rack, timing, workload).unwrap();
    (level, run(rack, timing, workload, u64::MAX).unwrap())
}

/// How far the simulation is from the shares, as parts of these: all flows together, and each.
fn apart(rack: &Rack, timing: &Timing, workload: &Workload) -> (f64, Vec<f64>) {
    let (level, results) = both(rack, timing, workload);
    let level: Vec<f64> = level.flows.iter().map(|flow| flow.fair_bytes_per_second).collect();
    let results: Vec<f64> = results.flows.iter().map(|flow| flow.bytes_per_second).collect();
    let total = results.iter().sum::<f64>() / level.iter().sum::<f64>() - 1.0;
    (total, results.iter().zip(&level).map(|(simulated, share)| simulated / share - 1.0).collect())
}

/// The same for all racks, with workloads that `change` makes of the random ones.
fn all_apart(what: &str, timing: &Timing, change: impl Fn(&Rack, &mut Workload)) -> [Sizes; 2] {
    let (mut totals, mut each) = (Vec::new(), Vec::new());
    for seed in 0..100 {
        let mut maker = Maker(RandomSequence::new(seed));
        let (rack, devices) = maker.rack();
        let mut workload = maker.workload(&devices);
        change(&rack, &mut workload);
        let (total, flows) = apart(&rack, timing, &workload);
        totals.push(total);
        each.extend(flows);
    }
    [Sizes::of(&format!("{what}, in all"), totals), Sizes::of(&format!("{what}, each"), each)]
}

/// How large differences are, in percent.
struct Sizes {
    median: f64,
    /// What 90 % of them do not exceed.
    most: f64,
    worst: f64,
}

impl Sizes {
    fn of(what: &str, mut all: Vec<f64>) -> Sizes {
        all.iter_mut().for_each(|one| *one = one.abs() * 100.0);
        all.sort_by(f64::total_cmp);
        let [most, worst] = [0.9, 1.0].map(|part| all[((all.len() - 1) as f64 * part) as usize]);
        let median = median(&all);
        println!("{what}: median {median:.2} %, 90 % below {most:.1} %, worst {worst:.1} %");
        Sizes { median, most, worst }
    }
}

#[test]
fn a_flow_alone_gets_what_is_computed() {
    let first = |_: &Rack, workload: &mut Workload| workload.flows.truncate(1);
    let [_, each] = all_apart("alone", &Timing::default(), first);
    assert!(each.median < 0.3 && each.worst < 3.0);
    let root = RootTiming { combine: 256, ..RootTiming::default() };
    let timing = Timing { host: HostTiming { root, ..HostTiming::default() }, ..Timing::default() };
    let [_, each] = all_apart("alone, roots combine completions", &timing, first);
    assert!(each.median < 0.3 && each.worst < 3.0);
    let device = DeviceTiming { tags: 32, ..DeviceTiming::default() };
    let [_, each] = all_apart("alone, 32 tags", &Timing { device, ..Timing::default() }, first);
    assert!(each.median < 0.3 && each.worst < 3.0);
}

/// Trackers are free once completions are back at the root; what that takes to pass them on was counted too once, and
/// what was answered was 14 % too little.
#[test]
fn reads_that_a_root_splits_get_what_is_computed() {
    for profile in ["desktop", "xeon-e5-v4", "ice-lake", "sapphire-rapids", "genoa"] {
        for iommu in [false, true] {
            let link = |a, b| {
                format!("[[fabric.links]]\nends = [\"{a}\", \"{b}\"]\ngeneration = 4\nlanes = 8\n")
            };
            let hosts = ["near", "far"].map(|host| {
                format!("[hosts.{host}]\niommu = {iommu}\nprofile = \"{profile}\"\n[fabric.adapters.{host}-ntb]\nhost = \"{host}\"\n")
            });
            let text = format!(
                "name = \"two\"\n{}[hosts.near.devices.gpu0]\nkind = \"gpu\"\n",
                hosts.concat()
            ) + &link("near", "near-ntb")
                + &link("near-ntb", "far-ntb");
            let rack = Rack::parse("rack.toml", &text).unwrap();
            let timing = read_for("rack.toml", &text, &rack).unwrap();
            let read = "[flows.a]\nkind = \"read\"\nfrom = \"near/gpu0\"\nto = \"far\"\nsize = \"4 KiB\"\ndepth = 32\n";
            let workload = parse("workload.toml", read).unwrap();
            let (_, each) = apart(&rack, &timing, &workload);
            println!("{profile}, iommu {iommu}: {:.1} %", each[0] * 100.0);
            assert!(each[0].abs() < 0.03, "{profile}, iommu {iommu}: {}", each[0]);
        }
    }
}

#[test]
fn the_fabric_carries_the_shares_of_flows_that_ask_for_a_little_less() {
    let [total, each] = all_apart("at 80 % of its share", &Timing::default(), |rack, workload| {
        let level = shares(rack, &Timing::default(), workload).unwrap();
        for (spec, share) in workload.flows.iter_mut().zip(level.flows) {
            let seconds = spec.size as f64 / (share.fair_bytes_per_second * 0.8);
            spec.arrivals = Arrivals::Every(Time::from_ps((seconds * 1e12) as u64));
        }
    });
    assert!(total.median < 1.0 && total.most < 10.0);
    assert!(each.median < 1.0 && each.most < 10.0);
}

#[test]
fn writes_of_one_flow_for_each_device_share_fairly() {
    let [total, each] =
        all_apart("writes, one for each device", &Timing::default(), |_, workload| {
            let mut devices = BTreeSet::new();
            workload.flows.retain(|spec| devices.insert(spec.kind.ends()[0].to_owned()));
            for spec in &mut workload.flows {
                let [from, to] = [0, 1].map(|end| spec.kind.ends()[end].to_owned());
                spec.kind = FlowKind::Write { from, to };
            }
        });
    assert!(total.median < 1.0 && each.median < 1.0);
}

/// What is answered is near, whatever is asked for: alone, a little less than the limits, all that can be had.
/// What is not, is refused, and that is not everything.
#[test]
fn what_is_answered_is_near_what_is_simulated() {
    type Change = fn(&Rack, &mut Workload);
    let below: Change = |rack, workload| {
        let level = shares(rack, &Timing::default(), workload).unwrap();
        for (spec, share) in workload.flows.iter_mut().zip(level.flows) {
            let seconds = spec.size as f64 / (share.fair_bytes_per_second * 0.8);
            spec.arrivals = Arrivals::Every(Time::from_ps((seconds * 1e12) as u64));
        }
    };
    let few: Change = |_, workload| workload.flows.truncate(2);
    let all: Change = |_, _| {};
    for (what, change, least) in
        [("all", all, 0.01), ("two", few, 0.1), ("four fifths", below, 0.4)]
    {
        let (mut errors, mut count) = (Vec::new(), 0);
        for seed in 0..100 {
            let mut maker = Maker(RandomSequence::new(seed));
            let (rack, devices) = maker.rack();
            let mut workload = maker.workload(&devices);
            change(&rack, &mut workload);
            let (level, results) = both(&rack, &Timing::default(), &workload);
            count += level.flows.len();
            let pairs = level.flows.iter().zip(&results.flows);
            let answered = pairs.filter_map(|(one, other)| Some((one.bytes_per_second?, other)));
            errors.extend(answered.map(|(rate, other)| other.bytes_per_second / rate - 1.0));
        }
        let share = errors.len() as f64 / count as f64;
        println!("{what}: {:.1} % answered", share * 100.0);
        assert!(share >= least, "{what}: {share} answered");
        let sizes = Sizes::of(what, errors);
        assert!(sizes.median <= 15.0 && sizes.worst <= 40.0, "{what}");
    }
}

/// What saturates a fabric without flow control for each flow does not share it fairly.
#[test]
fn random_flows_that_ask_for_all_do_not_share_fairly() {
    let [total, each] = all_apart("reads and writes at random", &Timing::default(), |_, _| {});
    assert!(total.median < 20.0 && total.worst < 100.0);
    assert!(each.median < 70.0);
}

const RACK: &str = r#"
name = "two"
[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "1 GiB"
[hosts.alpha.devices.gpu0]
kind = "gpu"
[hosts.beta]
[fabric.adapters.a]
host = "alpha"
[fabric.adapters.b]
host = "beta"
[[fabric.links]]
ends = ["alpha", "alpha/nvme0"]
generation = 3
lanes = 4
[[fabric.links]]
ends = ["alpha", "alpha/gpu0"]
generation = 3
lanes = 16
[[fabric.links]]
ends = ["alpha", "a"]
generation = 3
lanes = 8
[[fabric.links]]
ends = ["a", "b"]
generation = 3
lanes = 8
"#;

#[test]
fn every_kind_of_flow_takes_what_is_computed() {
    let rack = Rack::parse("rack.toml", RACK).unwrap();
    let device = "host = \"beta\"\ndevice = \"alpha/nvme0\"";
    let fast = "host = \"beta\"\ndevice = \"alpha/nvme0\"\nservice = { lognormal = \"10 us\", sigma = 0.15 }";
    let ends = "from = \"beta\"\nto = \"alpha/gpu0\"";
    let copy = "by = \"alpha/gpu0\"\nfrom = \"alpha\"\nto = \"beta\"\nsize = \"64 KiB\"";
    // Each with what percentage it may differ: jobs of several steps that wait for the same link go
    // in step, which leaves it idle in between.
    let kinds = [
        ("write", ends, 0.1_f64),
        ("read", ends, 5.0),
        ("copy", copy, 5.0),
        ("request", "from = \"beta\"\nto = \"alpha\"\nsize = \"64 B\"", 0.1),
        ("ring", &format!("{device}\nservice = \"5 us\"\nunits = 4"), 30.0),
        ("nvme-read", fast, 45.0),
        ("nvme-write", fast, 25.0),
    ];
    for (kind, keys, allowed) in kinds {
        for (depth, queues) in [(1, 1), (8, 1), (64, 1), (8, 4)] {
            let text = format!(
                "[flows.it]\nkind = \"{kind}\"\n{keys}\ndepth = {depth}\nqueues = {queues}\n"
            );
            let workload = parse("workload.toml", &text).unwrap();
            let (level, results) = both(&rack, &Timing::default(), &workload);
            let (level, result) = (&level.flows[0], &results.flows[0]);
            let off = (level.fair_bytes_per_second / result.bytes_per_second - 1.0) * 100.0;
            let allowed = if depth * queues == 1 { allowed.min(5.0) } else { allowed };
            assert!(off.abs() < allowed, "{kind}, {depth} by {queues}: {off:.2} % off");
            assert_eq!(level.hops, result.hops);
        }
    }
}

#[test]
fn bottlenecks_are_named() {
    let rack = Rack::parse("rack.toml", RACK).unwrap();
    let timing = Timing {
        host: HostTiming {
            memory: MemoryTiming { bandwidth: 2_000_000_000, ..MemoryTiming::default() },
            ..HostTiming::default()
        },
        device: DeviceTiming { engine: 3_000_000_000, ..DeviceTiming::default() },
        ..Timing::default()
    };
    let flow = |name: &str, to: &str, how: &str| {
        format!("[flows.{name}]\nkind = \"write\"\nfrom = \"alpha/nvme0\"\nto = \"{to}\"\n{how}\n")
    };
    let text = flow("a", "beta", "depth = 64")
        + &flow("b", "alpha/gpu0", "rate = \"0.1 GB/s\"")
        + &flow("c", "alpha/gpu0", "depth = 64")
        + &flow("d", "alpha/gpu0", "size = \"64 B\"");
    let mut workload = parse("workload.toml", &text).unwrap();
    let of = |level: &FlowLevel| -> Vec<(String, f64)> {
        let flows = level.flows.iter();
        flows.map(|flow| (flow.bottleneck.clone(), flow.fair_bytes_per_second / 1e9)).collect()
    };
    let level = of(&shares(&rack, &timing, &workload).unwrap());
    let names: Vec<&str> = level.iter().map(|(name, _)| &name[..]).collect();
    let engine = "alpha/nvme0: engine";
    assert_eq!(names, [engine, "demand", engine, "latency"], "{level:?}");
    assert!((level.iter().map(|(_, rate)| rate).sum::<f64>() - 3.0).abs() < 1e-6);
    workload.flows.truncate(1);
    assert_eq!(
        of(&shares(&rack, &timing, &workload).unwrap()),
        [("beta/memory: memory bandwidth".to_owned(), 2.0)]
    );
    let level = shares(&rack, &Timing::default(), &workload).unwrap();
    assert_eq!(level.flows[0].bottleneck, "alpha/nvme0 to alpha/root");
    let full = level.links.iter().find(|link| link.ends[1] == "alpha/nvme0").unwrap();
    assert!(full.back > 0.999 && full.there < 0.1, "{full:?}");
}

#[test]
fn what_does_not_fit_is_refused_with_its_place() {
    let rack = Rack::parse("rack.toml", RACK).unwrap();
    let text = "[flows.a]\nkind = \"write\"\nfrom = \"alpha/nvme0\"\nto = \"gamma\"\n";
    let workload = parse("workload.toml", text).unwrap();
    let refused = shares(&rack, &Timing::default(), &workload).unwrap_err();
    assert_eq!(refused, run(&rack, &Timing::default(), &workload, 1).unwrap_err());
    let Failed::Wrong(problem) = refused else { panic!("{refused}") };
    assert_eq!(&text[problem.span], "\"gamma\"");
}
