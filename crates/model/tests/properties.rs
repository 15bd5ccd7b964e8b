//! Properties of random racks and workloads: nothing deadlocks, nothing is lost, order is kept, and what
//! should be faster is not slower.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

use proptest::prelude::*;
use proptest::test_runner::Config;
use rackbus_fabric::rack::Rack;
use rackbus_model::engine::{PacketClass, Passage};
use rackbus_model::time::Time;
use rackbus_model::timing;
use rackbus_model::workload::{self, Results, Run, Workload};

/// A link: generation and lanes.
type Link = (u8, u8);

/// A host: a chain of switches below its root, and devices and an NTB at places of it.
#[derive(Debug, Clone)]
struct Host {
    iommu: bool,
    switches: Vec<Link>,
    devices: Vec<(usize, Link)>,
    ntb: (usize, Link),
}

/// A flow between two of the rack's ends, by number.
#[derive(Debug, Clone)]
struct FlowSpec {
    kind: u8,
    from: usize,
    to: usize,
    by: usize,
    size: u64,
    depth: u32,
    queues: u32,
}

#[derive(Debug, Clone)]
struct Lab {
    hosts: Vec<Host>,
    /// Switches between hosts, in a row; without, each two hosts' NTBs are joined.
    between: Vec<Link>,
    cable: Link,
    /// Room for writes and completions, in packets, and for requests.
    room: (u32, u32),
    mps: u32,
    mrrs: u32,
    tags: u32,
    window: u32,
    trackers: u32,
    combine: u32,
    flows: Vec<FlowSpec>,
    /// Packets for each DLLP; 0 for none.
    dllp: u32,
    /// Whether each device is behind a switch of its own.
    own_switches: bool,
}

fn link() -> impl Strategy<Value = Link> {
    (1u8..=6, prop::sample::select(vec![1u8, 2, 4, 8]))
}

fn host() -> impl Strategy<Value = Host> {
    let devices = prop::collection::vec((0usize..4, link()), 1..4);
    (any::<bool>(), prop::collection::vec(link(), 0..3), devices, (0usize..4, link()))
        .prop_map(|(iommu, switches, devices, ntb)| Host { iommu, switches, devices, ntb })
}

fn flow() -> impl Strategy<Value = FlowSpec> {
    (0u8..5, any::<[u8; 3]>(), 1u64..=16_384, 1u32..=8, 1u32..=2).prop_map(
        |(kind, ends, size, depth, queues)| FlowSpec {
            kind,
            from: ends[0].into(),
            to: ends[1].into(),
            by: ends[2].into(),
            size,
            depth,
            queues,
        },
    )
}

fn lab(flows: std::ops::Range<usize>) -> impl Strategy<Value = Lab> {
    let sizes = (
        prop::sample::select(vec![128u32, 256, 512]),
        prop::sample::select(vec![128u32, 512, 4096]),
        prop::sample::select(vec![0u32, 128, 256]),
    );
    let limits = (1u32..=64, 1u32..=64, 1u32..=64, 1u32..=4, 1u32..=32);
    let parts = (prop::collection::vec(host(), 1..4), prop::collection::vec(link(), 0..3), link());
    (parts, sizes, limits, prop::collection::vec(flow(), flows)).prop_map(
        |((hosts, between, cable), (mps, mrrs, combine), limits, flows)| Lab {
            hosts,
            between,
            cable,
            room: (limits.0, limits.1),
            mps,
            mrrs,
            tags: limits.2,
            window: limits.3,
            trackers: limits.4,
            combine,
            flows,
            dllp: 2,
            own_switches: false,
        },
    )
}

impl Lab {
    fn rack(&self) -> String {
        let mut text = String::from("name = \"lab\"\n");
        let (mut links, mut switches) = (String::new(), String::new());
        let mut join = |a: &str, b: &str, (generation, lanes): Link| {
            let _ = writeln!(
                links,
                "[[fabric.links]]\nends = [\"{a}\", \"{b}\"]\ngeneration = {generation}\nlanes = {lanes}"
            );
        };
        for (n, host) in self.hosts.iter().enumerate() {
            let _ = writeln!(text, "[hosts.h{n}]\niommu = {}", host.iommu);
            let level = |depth: usize| match depth.min(host.switches.len()) {
                0 => format!("h{n}"),
                depth => format!("s{n}-{depth}"),
            };
            for (d, (depth, link)) in host.devices.iter().enumerate() {
                let _ = writeln!(text, "[hosts.h{n}.devices.d{d}]\nkind = \"accelerator\"");
                let mut above = level(*depth);
                if self.own_switches {
                    let own = format!("e{n}-{d}");
                    join(&above, &own, (6, 16));
                    let _ = writeln!(switches, "[fabric.switches.{own}]\nhost = \"h{n}\"");
                    above = own;
                }
                join(&above, &format!("h{n}/d{d}"), *link);
            }
            for (s, link) in host.switches.iter().enumerate() {
                let _ = writeln!(text, "[fabric.switches.s{n}-{}]\nhost = \"h{n}\"", s + 1);
                join(&level(s), &level(s + 1), *link);
            }
            let _ = writeln!(text, "[fabric.adapters.n{n}]\nhost = \"h{n}\"");
            join(&level(host.ntb.0), &format!("n{n}"), host.ntb.1);
        }
        for (x, link) in self.between.iter().enumerate() {
            let _ = writeln!(text, "[fabric.switches.x{x}]");
            if x > 0 {
                join(&format!("x{}", x - 1), &format!("x{x}"), *link);
            }
        }
        for n in 0..self.hosts.len() {
            match self.between.len() {
                0 => (0..n).for_each(|m| join(&format!("n{m}"), &format!("n{n}"), self.cable)),
                count => join(&format!("n{n}"), &format!("x{}", n % count), self.cable),
            }
        }
        let (room, requests) = self.room;
        let dllp = self.dllp;
        let _ = write!(
            text,
            "{switches}{links}[timing.link]\nacknowledge_every = {dllp}\nupdate_every = {dllp}\nposted_packets = {room}\nposted_bytes = 4096\nnonposted_packets = {requests}\n\
             completion_packets = {room}\ncompletion_bytes = 4096\n[timing.device]\nmps = {}\nmrrs = {}\n\
             tags = {}\nwindow = {}\n[timing.root]\ntrackers = {}\ncombine = {}\n",
            self.mps, self.mrrs, self.tags, self.window, self.trackers, self.combine
        );
        text
    }

    fn ends(&self) -> (Vec<String>, Vec<String>) {
        let hosts = (0..self.hosts.len()).map(|n| format!("h{n}")).collect();
        let devices = self.hosts.iter().enumerate();
        let devices = devices
            .flat_map(|(n, host)| (0..host.devices.len()).map(move |d| format!("h{n}/d{d}")));
        (hosts, devices.collect())
    }

    fn workload(&self, count: u64) -> Workload {
        let (hosts, devices) = self.ends();
        let all: Vec<&String> = hosts.iter().chain(&devices).collect();
        let mut text = String::new();
        for (n, flow) in self.flows.iter().enumerate() {
            let device = &devices[flow.by % devices.len()];
            let source = all[flow.from % all.len()];
            // Nobody writes to itself: the next one is meant.
            let other = |name: &str, nth: usize| {
                let rest: Vec<&&String> = all.iter().filter(|end| end.as_str() != name).collect();
                rest[nth % rest.len()].to_string()
            };
            let (size, depth, queues) = (flow.size, flow.depth, flow.queues);
            let _ = writeln!(
                text,
                "[flows.f{n}]\nsize = {size}\ndepth = {depth}\nqueues = {queues}\ncount = {count}\nspan = 1000000"
            );
            let _ = match flow.kind {
                0 => writeln!(
                    text,
                    "kind = \"write\"\nfrom = \"{source}\"\nto = \"{}\"",
                    other(source, flow.to)
                ),
                1 => writeln!(
                    text,
                    "kind = \"read\"\nfrom = \"{source}\"\nto = \"{}\"",
                    other(source, flow.to)
                ),
                2 => writeln!(
                    text,
                    "kind = \"copy\"\nby = \"{device}\"\nfrom = \"{}\"\nto = \"{}\"",
                    other(device, flow.from),
                    other(device, flow.to)
                ),
                3 => writeln!(
                    text,
                    "kind = \"request\"\nfrom = \"{source}\"\nto = \"{}\"",
                    other(source, flow.to)
                ),
                _ => writeln!(
                    text,
                    "kind = \"ring\"\nhost = \"{}\"\ndevice = \"{device}\"",
                    hosts[flow.to % hosts.len()]
                ),
            };
        }
        let mut workload =
            workload::parse("workload", &text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        (workload.duration, workload.warmup) = (Time::MAX, Time::ZERO);
        workload
    }

    fn begin(&self, count: u64) -> Run {
        let text = self.rack();
        let rack = Rack::parse("rack", &text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let timing = timing::read_for("rack", &text, &rack).unwrap();
        Run::new(&rack, &timing, &self.workload(count)).unwrap_or_else(|e| panic!("{e}\n{text}"))
    }

    /// Runs to its end, and finds everything in its place.
    fn run(&self, count: u64) -> (Run, Results) {
        let mut run = self.begin(count);
        run.go(20_000_000).unwrap();
        assert!(run.assembly.world.is_idle(), "something is left");
        let results = run.results();
        (run, results)
    }

    /// A single flow of reads or writes, and room enough: where links have room for a packet or two, one
    /// more switch is one more buffer, and may well be faster.
    fn plain(&mut self) {
        self.flows[0].kind %= 2;
        self.flows[0].queues = 1;
        self.room = (256, 256);
        self.dllp = 0;
        self.hosts.iter_mut().for_each(|host| host.iommu = false);
    }

    /// When the last job ends.
    fn ends_at(&self, count: u64) -> Time {
        self.run(count).0.assembly.world.now()
    }
}

/// What a change may cost that should cost nothing: jobs one by one, no more than rounding. Where jobs
/// overlap, a faster link lets other packets of theirs meet, and queues served in order of arrival may then
/// end a little later, as jobs on several machines do (Graham, 1969): by 5 % at worst among thousands of
/// racks.
fn slack(lab: &Lab, time: Time) -> Time {
    let overlap = if lab.flows[0].depth > 1 { time / 10 } else { Time::ZERO };
    time + overlap + Time::from_ns(1)
}

fn cases(cases: u32) -> Config {
    Config { cases, ..Config::default() }
}

proptest! {
    #![proptest_config(cases(200))]

    #[test]
    fn all_jobs_are_done_and_nothing_is_left(lab in lab(1..6)) {
        let (run, results) = lab.run(12);
        for (spec, flow) in lab.flows.iter().zip(&results.flows) {
            prop_assert_eq!(flow.jobs, 12 * u64::from(spec.queues), "{}", &flow.name);
        }
        // No direction is busy for longer than there is time.
        for link in &results.links {
            prop_assert!(link.there <= 1.0 + 1e-9 && link.back <= 1.0 + 1e-9, "{:?}", link.ends);
        }
        let (again, same) = lab.run(12);
        prop_assert_eq!(run.assembly.world.happened(), again.assembly.world.happened());
        prop_assert_eq!(results, same);
    }

    #[test]
    fn a_flow_is_held_up_by_links_that_it_uses(lab in lab(2..6)) {
        let (_, results) = lab.run(12);
        for (nth, flow) in results.flows.iter().enumerate() {
            let named = flow.bottleneck.split(": ").next().unwrap_or_default();
            if !named.contains(" to ") {
                continue;
            }
            let (run, _) = Lab { flows: vec![lab.flows[nth].clone()], ..lab.clone() }.run(12);
            let world = &run.assembly.world;
            let uses = world.direction_ids().filter(|id| world.direction(*id).packets > 0).any(|id| {
                let (from, to) = world.ends_of(id);
                named == format!("{} to {}", run.assembly.name(from), run.assembly.name(to))
            });
            prop_assert!(uses, "{}: {}", &flow.name, &flow.bottleneck);
        }
    }

    #[test]
    fn bytes_arrive_as_they_were_sent(mut lab in lab(1..2)) {
        // One flow, so that its bytes can be told on every direction of its route.
        let flow = &mut lab.flows[0];
        flow.kind %= 2;
        let (kind, total) = (flow.kind, flow.size * u64::from(flow.queues) * 12);
        let (run, _) = lab.run(12);
        let mut carried: BTreeMap<usize, u64> = BTreeMap::new();
        for (_, _, _, direction) in run.assembly.links() {
            for direction in [direction, direction.back()] {
                carried.insert(direction.index(), run.assembly.world.direction(direction).payload);
            }
        }
        let used: Vec<u64> = carried.into_values().filter(|bytes| *bytes > 0).collect();
        // A route may lead through a link twice, to the root and back, but then in both directions.
        prop_assert!(!used.is_empty());
        prop_assert!(used.iter().all(|bytes| *bytes == total), "{kind}: {used:?} of {total}");
    }

    #[test]
    fn no_packet_overtakes_a_write_of_its_own_way(lab in lab(2..6)) {
        let mut run = lab.begin(6);
        run.assembly.world.keep_trace();
        run.go(20_000_000).unwrap();
        let mut directions: HashMap<usize, Vec<&Passage>> = HashMap::new();
        for passage in run.assembly.world.trace() {
            directions.entry(passage.direction.index()).or_default().push(passage);
        }
        // By packet: the directions it took, so that what came the same way is known.
        let mut taken: HashMap<u64, Vec<usize>> = HashMap::new();
        for passage in run.assembly.world.trace() {
            taken.entry(passage.packet).or_default().push(passage.direction.index());
        }
        for (direction, passages) in &directions {
            // In the order of queueing: when the last write of each route, and by each direction here, was sent.
            let mut sent: HashMap<usize, Time> = HashMap::new();
            let mut sent_of: HashMap<&Vec<usize>, Time> = HashMap::new();
            for passage in passages {
                let route = &taken[&passage.packet];
                let nth = route.iter().position(|other| other == direction).and_then(|nth| nth.checked_sub(1));
                let came = nth.and_then(|nth| route.get(nth));
                if passage.class == PacketClass::Posted {
                    // Writes keep their order on a route; those of others may have more roots to cross.
                    let before = sent_of.insert(route, passage.begin).unwrap_or(Time::ZERO);
                    prop_assert!(before <= passage.begin, "{passage:?}");
                    if let Some(came) = came {
                        let last = sent.entry(*came).or_default();
                        *last = (*last).max(passage.begin);
                    }
                } else if let Some(last) = came.and_then(|came| sent.get(came)) {
                    prop_assert!(*last <= passage.begin, "{passage:?}");
                }
            }
        }
    }

    #[test]
    fn more_lanes_are_never_slower(mut lab in lab(1..2)) {
        lab.plain();
        let before = lab.ends_at(8);
        // All links alike. One fast link between slow ones may take longer than a slow one: it cannot send
        // on a packet's head before the tail is near, and so ends the cut-through.
        let mut wider = lab.clone();
        let double = |link: &mut Link| link.1 *= 2;
        wider.between.iter_mut().for_each(double);
        double(&mut wider.cable);
        for host in &mut wider.hosts {
            host.switches.iter_mut().for_each(double);
            host.devices.iter_mut().for_each(|device| double(&mut device.1));
            double(&mut host.ntb.1);
        }
        let after = wider.ends_at(8);
        prop_assert!(after <= slack(&lab, before), "{before} became {after}");
    }

    #[test]
    fn a_longer_way_is_never_faster(mut lab in lab(1..2)) {
        lab.plain();
        let before = lab.ends_at(8);
        let mut longer = lab.clone();
        longer.own_switches = true;
        let after = longer.ends_at(8);
        prop_assert!(slack(&lab, after) >= before, "{before} became {after}");
    }

    #[test]
    fn more_room_is_never_slower(mut lab in lab(1..2)) {
        let room = lab.room;
        lab.plain();
        lab.room = room;
        let before = lab.ends_at(8);
        let mut roomy = lab.clone();
        roomy.room = (lab.room.0 * 2, lab.room.1 * 2);
        let after = roomy.ends_at(8);
        prop_assert!(after <= slack(&lab, before), "{before} became {after}");
    }
}
