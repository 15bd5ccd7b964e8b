//! Random racks, their timing, and flows in them, as plans that shrink; and how a plan is run.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use rackbus_fabric::rack::Rack;
use rackbus_model::assembly::{Assembly, AssemblyError, End};
use rackbus_model::engine::{Addresses, Arrivals, FlowId, JobFlow, RouteId, Step, Stuck, Until};
use rackbus_model::time::Time;
use rackbus_model::timing::{LinkTiming, Timing};

/// A link's speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Speed {
    pub generation: u8,
    /// The lanes' logarithm.
    pub width: u8,
}

/// Where in a host something sits: at the root or a switch, by a link; `None` inside of the root.
pub type Place = Option<(u8, Speed)>;

#[derive(Debug, Clone)]
pub struct HostPlan {
    pub iommu: bool,
    /// Each below the root or an earlier one.
    pub switches: Vec<(u8, Speed)>,
    pub devices: Vec<Place>,
    /// Where its NTBs sit, in turn.
    pub bridges: Vec<Place>,
    /// The outer switch that its NTB is joined to.
    pub port: u8,
    /// Its NTBs' cables: to that switch, or to the hosts after it.
    pub cables: Vec<Speed>,
}

#[derive(Debug, Clone)]
pub struct RackPlan {
    pub hosts: Vec<HostPlan>,
    /// The links between outer switches, one more than these; `None` joins each two hosts directly.
    pub outer: Option<Vec<Speed>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Write(Until),
    Read,
    Copy(Until),
}

#[derive(Debug, Clone, Copy)]
pub struct FlowPlan {
    pub kind: Kind,
    /// Ends, among those that there are.
    pub ends: [u8; 3],
    pub depth: u32,
    pub count: u64,
    pub bytes: u64,
    /// Bytes by which the address lies beyond the beginning of a page.
    pub offset: u64,
    pub begin: u64,
}

#[derive(Debug, Clone)]
pub struct Plan {
    pub rack: RackPlan,
    pub timing: Timing,
    pub flows: Vec<FlowPlan>,
}

pub fn speeds() -> impl Strategy<Value = Speed> {
    (1u8..=6, 0u8..=4).prop_map(|(generation, width)| Speed { generation, width })
}

fn places() -> impl Strategy<Value = Place> {
    option::weighted(0.85, (any::<u8>(), speeds()))
}

fn hosts() -> impl Strategy<Value = HostPlan> {
    let switches = vec((any::<u8>(), speeds()), 0..=3);
    let places = (vec(places(), 1..=4), vec(places(), 3));
    (any::<bool>(), switches, places, any::<u8>(), vec(speeds(), 3)).prop_map(
        |(iommu, switches, (devices, bridges), port, cables)| HostPlan {
            iommu,
            switches,
            devices,
            bridges,
            port,
            cables,
        },
    )
}

pub fn racks() -> impl Strategy<Value = RackPlan> {
    let outer = option::of(vec(speeds(), 0..=1));
    (vec(hosts(), 1..=4), outer).prop_map(|(hosts, outer)| RackPlan { hosts, outer })
}

fn links(mps: u32) -> impl Strategy<Value = LinkTiming> {
    let ns = |most: u64| (0..=most).prop_map(Time::from_ns);
    let room = move || (1u32..=6, 1u32..=6).prop_map(move |(packets, full)| (packets, full * mps));
    (ns(20), ns(300), 0u32..=12, 0u32..=12, room(), 1u32..=6, room()).prop_map(
        |(
            propagation,
            credit_return,
            acknowledge_every,
            update_every,
            posted,
            nonposted,
            completion,
        )| {
            LinkTiming {
                propagation,
                credit_return,
                acknowledge_every,
                update_every,
                posted,
                nonposted,
                completion,
            }
        },
    )
}

/// What a root splits, and combines again.
fn splits() -> impl Strategy<Value = (u32, u32)> {
    let split = prop_oneof![3 => Just(0u32), 4 => Just(64), 1 => Just(128), 1 => Just(256)];
    (split, prop_oneof![Just(0u32), Just(128), Just(256)])
}

/// Timing with few credits, tags and places to wait.
pub fn timings() -> impl Strategy<Value = Timing> {
    let power = |least: u32, most: u32| (least..=most).prop_map(|power| 1u32 << power);
    let latency = vec((0u64..200).prop_map(Time::from_ns), 9);
    let device = (power(7, 9), power(7, 12), 1u32..=16, 1u32..=6, any::<[bool; 5]>());
    let root = (1u32..=8, 1u32..=3, power(2, 4));
    (latency, device, root, vec(splits(), 4)).prop_flat_map(|(latency, device, root, splits)| {
        links(device.0).prop_map(move |link| {
            let mut timing = Timing { link, ..Timing::default() };
            let (mps, mrrs, tags, window, some) = device;
            (timing.device.mps, timing.device.mrrs) = (mps, mrrs);
            (timing.device.tags, timing.device.window) = (tags, window);
            timing.device.alignment = if some[0] { 64 } else { 0 };
            timing.device.turn = if some[1] { 1024 } else { 0 };
            timing.device.engine = if some[2] { 2_000_000_000 } else { 0 };
            timing.host.memory.completion = if some[3] { 64 } else { 0 };
            timing.host.iommu.hit = if some[4] { Time::from_ns(5) } else { Time::ZERO };
            (timing.host.root.trackers, timing.host.iommu.walkers, timing.host.iommu.entries) =
                (root.0, root.1, root.2);
            timing.switch.latency = latency[0];
            timing.ntb.latency = latency[1];
            timing.ntb.translation = latency[2];
            timing.ntb.completion_translation = latency[3];
            timing.host.root.latency = latency[4];
            timing.host.root.completion_latency = latency[5];
            timing.host.memory.latency = latency[6];
            timing.host.memory.partial_write = latency[7];
            timing.device.latency = latency[8];
            for (nth, (split, combine)) in splits.iter().enumerate() {
                let mut host = timing.host.clone();
                (host.root.split, host.root.combine) = (*split, *combine);
                timing.hosts.insert(format!("h{nth}"), host);
            }
            timing
        })
    })
}

pub fn flows(kinds: impl Strategy<Value = Kind>) -> impl Strategy<Value = FlowPlan> {
    let bytes = prop_oneof![1u64..=600, 1u64..=16 << 10];
    let offset = prop_oneof![Just(0u64), 0u64..4096];
    (kinds, any::<[u8; 3]>(), 1u32..=8, 1u64..=6, bytes, offset, 0u64..2000).prop_map(
        |(kind, ends, depth, count, bytes, offset, begin)| FlowPlan {
            kind,
            ends,
            depth,
            count,
            bytes,
            offset,
            begin,
        },
    )
}

pub fn kinds() -> impl Strategy<Value = Kind> {
    let until = prop_oneof![Just(Until::Begun), Just(Until::Issued), Just(Until::Landed)];
    prop_oneof![until.clone().prop_map(Kind::Write), Just(Kind::Read), until.prop_map(Kind::Copy)]
}

pub fn plans() -> impl Strategy<Value = Plan> {
    (racks(), timings(), vec(flows(kinds()), 1..=6)).prop_map(|(rack, timing, flows)| Plan {
        rack,
        timing,
        flows,
    })
}

/// A plan with one flow, whose jobs end when all has come.
pub fn single() -> impl Strategy<Value = Plan> {
    let kinds = prop_oneof![Just(Kind::Write(Until::Landed)), Just(Kind::Read)];
    (racks(), timings(), flows(kinds)).prop_map(|(rack, timing, flow)| Plan {
        rack,
        timing,
        flows: vec![flow],
    })
}

impl RackPlan {
    /// The links: their ends and speeds, always in the same order.
    pub fn links(&mut self) -> Vec<(String, String, &mut Speed)> {
        let mut links = Vec::new();
        let count = self.hosts.len();
        let outer = self.outer.as_ref().map(|links| links.len() + 1);
        for (nth, host) in self.hosts.iter_mut().enumerate() {
            let at = |place: u8, among: usize| match usize::from(place) % among {
                0 => format!("h{nth}"),
                switch => format!("h{nth}-s{}", switch - 1),
            };
            let places = host.switches.len() + 1;
            for (own, (place, speed)) in host.switches.iter_mut().enumerate() {
                links.push((at(*place, own + 1), format!("h{nth}-s{own}"), speed));
            }
            for (own, device) in host.devices.iter_mut().enumerate() {
                if let Some((place, speed)) = device {
                    links.push((at(*place, places), format!("h{nth}/d{own}"), speed));
                }
            }
            for (name, bridge) in bridges(nth, count, outer).into_iter().zip(&mut host.bridges) {
                if let Some((place, speed)) = bridge {
                    links.push((at(*place, places), name, speed));
                }
            }
            match outer {
                None => {
                    for (peer, speed) in (nth + 1..count).zip(&mut host.cables) {
                        let ends = (format!("h{nth}-to{peer}"), format!("h{peer}-to{nth}"));
                        links.push((ends.0, ends.1, speed));
                    }
                }
                Some(outer) => {
                    let switch = format!("outer{}", usize::from(host.port) % outer);
                    links.push((format!("h{nth}-ntb"), switch, &mut host.cables[0]));
                }
            }
        }
        for (nth, speed) in self.outer.iter_mut().flatten().enumerate() {
            links.push((format!("outer{nth}"), format!("outer{}", nth + 1), speed));
        }
        links
    }

    /// As a rack file, with a switch in the link of this number.
    fn text(&self, divided: Option<usize>) -> String {
        let mut text = String::from("name = \"plan\"\n");
        let outer = self.outer.as_ref().map(|links| links.len() + 1);
        let mut parts = String::new();
        for (nth, host) in self.hosts.iter().enumerate() {
            text += &format!("[hosts.h{nth}]\niommu = {}\n", host.iommu);
            for own in 0..host.devices.len() {
                text += &format!("[hosts.h{nth}.devices.d{own}]\nkind = \"gpu\"\n");
            }
            for own in 0..host.switches.len() {
                parts += &format!("[fabric.switches.h{nth}-s{own}]\nhost = \"h{nth}\"\n");
            }
            for name in bridges(nth, self.hosts.len(), outer) {
                parts += &format!("[fabric.adapters.{name}]\nhost = \"h{nth}\"\n");
            }
        }
        for nth in 0..outer.unwrap_or(0) {
            parts += &format!("[fabric.switches.outer{nth}]\n");
        }
        let mut links = String::new();
        let mut link = |a: &str, b: &str, speed: &Speed| {
            let Speed { generation, width } = speed;
            links += &format!("[[fabric.links]]\nends = [\"{a}\", \"{b}\"]\n");
            links += &format!("generation = {generation}\nlanes = {}\n", 1 << width);
        };
        for (nth, (a, b, speed)) in self.clone().links().into_iter().enumerate() {
            if divided != Some(nth) {
                link(&a, &b, speed);
                continue;
            }
            // Parts are named after their host; a link between two hosts is in neither.
            let inside = a.starts_with('h') && a[..2] == b[..2];
            let host = format!("host = \"{}\"\n", &a[..2]);
            parts += "[fabric.switches.extra]\n";
            parts += if inside { &host } else { "" };
            link(&a, "extra", speed);
            link("extra", &b, speed);
        }
        text + &parts + &links
    }
}

/// The names of a host's NTBs: one for each other host, or one to the outer switches.
fn bridges(host: usize, hosts: usize, outer: Option<usize>) -> Vec<String> {
    match outer {
        None => (0..hosts).filter(|p| *p != host).map(|p| format!("h{host}-to{p}")).collect(),
        Some(_) => vec![format!("h{host}-ntb")],
    }
}

/// A flow of a plan, in a rack put together.
#[derive(Debug)]
pub struct Made {
    pub plan: FlowPlan,
    pub id: FlowId,
    /// From where it reads.
    pub from: Option<(End, RouteId)>,
    /// To where it writes.
    pub to: Option<(End, RouteId)>,
    pub source: End,
}

/// A plan, run.
#[derive(Debug)]
pub struct Run {
    pub it: Assembly,
    pub flows: Vec<Made>,
    pub outcome: Result<(), Stuck>,
}

impl Plan {
    pub fn run(&self) -> Run {
        self.run_divided(None)
    }

    /// With one switch more, in the link of this number.
    pub fn run_divided(&self, divided: Option<usize>) -> Run {
        let text = self.rack.text(divided);
        let rack = Rack::parse("plan", &text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let mut it = Assembly::new(&rack, &self.timing, 1).unwrap();
        it.world.keep_trace();
        let flows: Vec<Made> = self.flows.iter().map(|plan| add(&mut it, plan)).collect();
        // Each packet of at least a byte, on each hop; pieces of 64; four events for each are many.
        let packets: u64 = self.flows.iter().map(|flow| flow.count * (flow.bytes / 16 + 4)).sum();
        let outcome = it.world.run(Time::MAX, 10_000 + packets * 400);
        Run { it, flows, outcome }
    }
}

/// The hosts and devices.
fn ends(it: &Assembly) -> Vec<End> {
    let hosts = it.topology().hosts().map(|(id, _)| End::Host(id));
    let devices = it.topology().components().filter_map(|(id, component)| {
        (component.kind == rackbus_fabric::ComponentKind::Device).then_some(End::Device(id))
    });
    hosts.chain(devices).collect()
}

fn add(it: &mut Assembly, plan: &FlowPlan) -> Made {
    let ends = ends(it);
    let source = ends[usize::from(plan.ends[0]) % ends.len()];
    // Anything but itself, except that a processor may use its own memory.
    let targets: Vec<End> =
        ends.into_iter().filter(|end| *end != source || matches!(end, End::Host(_))).collect();
    let mut route = |end: u8| -> Result<(End, RouteId), AssemblyError> {
        let end = targets[usize::from(end) % targets.len()];
        Ok((end, it.route(source, end)?))
    };
    let (one, other) = (route(plan.ends[1]).unwrap(), route(plan.ends[2]).unwrap());
    let stream = it.source(source).unwrap().stream;
    let (bytes, address) = (plan.bytes, plan.offset);
    let (from, to, step) = match plan.kind {
        Kind::Write(until) => {
            (None, Some(one), Step::Write { stream, route: one.1, address, bytes, until })
        }
        Kind::Read => (Some(one), None, Step::Read { stream, route: one.1, address, bytes }),
        Kind::Copy(until) => {
            let (source, target) = (address, address + 7);
            let (from, to) = (one.1, other.1);
            let step = Step::Copy { stream, from, source, to, target, bytes, until };
            (Some(one), Some(other), step)
        }
    };
    let script = it.world.add_script(vec![step]);
    let flow = JobFlow {
        count: plan.count,
        begin: Time::from_ns(plan.begin),
        addresses: Addresses::sequential(0, 1 << 16),
        ..JobFlow::new(script, Arrivals::Depth(plan.depth), bytes)
    };
    let id = it.world.add_flow(flow);
    Made { plan: *plan, id, from, to, source }
}
