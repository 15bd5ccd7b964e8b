//! A workload in a rack by its fair shares: what each flow gets in the long run, without simulating
//! a packet. For racks and numbers of flows that are too large to simulate.
//!
//! The flows are those that would be simulated: the same scripts, on the same ways, by the same
//! requesters ([`Run`]). What a job takes of everything that has a rate becomes a [`Use`]:
//!
//! * each direction of a PCIe link: packets with headers and framing (writes, requests and
//!   completions, as they are cut on the way), and the DLLPs for what comes the other way;
//! * memories and devices as targets, and devices' engines;
//! * tags of requesters, trackers of roots that split reads, and walkers of IOMMUs: so many at a
//!   time, each for a round trip of the empty way, or a walk.
//!
//! A flow asks for what its arrivals say, and for no more than its depth, its message gaps and its
//! service units let through when jobs take as long as in the empty rack. Its weight is its number
//! of queues.
//!
//! What this leaves out: beginnings, ends and counts of flows; credits; the cuts of reads from
//! unaligned addresses; jobs of several steps that fall into step with each other.
//!
//! # How near it is to the simulation
//!
//! In a hundred random racks of 2 to 6 hosts and 2 to 10 flows (`tests/levels.rs`), the simulation
//! differs from the shares by this part of them:
//!
//! | flows | all together | each |
//! | --- | --- | --- |
//! | one alone | median 0.1 %, worst 1.2 % | the same |
//! | reads and writes that ask for 80 % of their shares | median 0.2 %, 90 % below 6 %, worst 43 % | median 0.5 %, 90 % below 4 %, some reads starve |
//! | writes that ask for all, one for each device | median 0.2 %, 90 % below 24 %, worst 55 % | median 0.2 %, 90 % below 48 %, worst 194 % |
//! | reads and writes that ask for all | median 13 %, 90 % below 42 %, worst 78 % | median 56 %, worst 519 % |
//!
//! So the shares are what the fabric can carry, and what it does carry for flows that do not press
//! for more. It does not enforce them, because it knows no flows:
//!
//! * Packets of a class share queues and credits. A write whose way is full further on stops all
//!   behind it, also those that go elsewhere (head-of-line blocking): the flows of one device then
//!   all go as slowly as the slowest, and with IOMMUs, whose detours lead over shared links, so do
//!   neighbours. That is where all flows together get much less than their shares.
//! * Where links join, packets go in the order of coming, and each incoming link has as much room:
//!   each link gets the same number of packets, not each flow the same number of bytes. A flow that
//!   has an incoming link to itself gets several times its share.
//! * Full queues make round trips ten to a hundred times as long. Writes do not mind; reads have
//!   only so many tags and trackers, and lose against writes on the same link.

use std::collections::BTreeMap;

use rackbus_fabric::rack::Rack;
use serde::Serialize;

use super::cost::{self, Limit, SECOND};
use super::{Bottleneck, Flow, Share, Use, fair_shares};
use crate::engine::{Arrivals, FlowId, WayId, World};
use crate::timing::Timing;
use crate::workload::{Failed, FlowSpec, Run, Workload};

/// What a flow gets.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FlowShare {
    /// Its name.
    pub name: String,
    /// Whose it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Its ends.
    pub ends: Vec<String>,
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// Jobs per second.
    pub jobs_per_second: f64,
    /// How long a job takes when no other flow is in the rack's way, in nanoseconds.
    pub unloaded_ns: f64,
    /// What keeps it from going faster: a full link by its ends, a memory or device by its name, a
    /// requester's engine or tags, a root's split reads, `latency` when what is under way is too
    /// little for the way's length, or `demand` when it gets all it asks for.
    pub bottleneck: String,
    /// Components between its ends, on the longest of its ways.
    pub hops: usize,
}

/// What a link is used for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LinkShare {
    /// Its ends.
    pub ends: [String; 2],
    /// What it is: `Gen3 x8`.
    pub link: String,
    /// The part of its rate that is used, from the first end to the second, from 0 to 1.
    pub there: f64,
    /// The other way.
    pub back: f64,
}

/// What all flows of a workload get.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FlowLevel {
    /// By flow, in the workload's order.
    pub flows: Vec<FlowShare>,
    /// By link, in the order of the rack's parts.
    pub links: Vec<LinkShare>,
}

/// The fair shares of `workload`'s flows in `rack`.
///
/// # Errors
/// [`Failed`], for the same as a simulation.
pub fn shares(rack: &Rack, timing: &Timing, workload: &Workload) -> Result<FlowLevel, Failed> {
    let run = Run::new(rack, timing, workload)?;
    let world = &run.assembly.world;
    let mut limits = Limits::default();
    // The first places are the lanes'.
    for lane in world.lane_ids() {
        limits.place(Limit::Lane(lane), world);
    }
    let mut flows = Vec::new();
    let mut notes = Vec::new();
    for (spec, queues, _) in run.flows() {
        let (flow, note) = limits.flow(world, spec, queues);
        flows.push(flow);
        notes.push(note);
    }
    let Ok(shares) = fair_shares(&limits.capacities, &flows) else {
        unreachable!("limits have capacities, flows have weights and demands");
    };
    let share = |((spec, _, ways), (share, note)): ((&FlowSpec, _, &[WayId]), (&Share, &Note))| {
        let lanes = ways.iter().map(|way| world.lanes_of(*way).len());
        FlowShare {
            name: spec.name.clone(),
            tenant: spec.tenant.clone(),
            ends: spec.kind.ends().into_iter().map(str::to_owned).collect(),
            bytes_per_second: share.rate,
            jobs_per_second: share.rate / spec.size as f64,
            unloaded_ns: note.unloaded / 1e3,
            bottleneck: match share.bottleneck {
                Bottleneck::Demand if note.asked => "demand".to_owned(),
                Bottleneck::Demand => "latency".to_owned(),
                Bottleneck::Link(place) => name(&run, limits.all[place]),
            },
            hops: lanes.max().unwrap_or(0).saturating_sub(1),
        }
    };
    let flows = run.flows().zip(shares.flows.iter().zip(&notes)).map(share).collect();
    let links = run.assembly.links().map(|(a, b, link, lane)| LinkShare {
        ends: [a, b].map(|id| run.assembly.topology().component(id).name.clone()),
        link: link.to_string(),
        there: shares.utilization[lane.index()],
        back: shares.utilization[lane.back().index()],
    });
    Ok(FlowLevel { flows, links: links.collect() })
}

/// What a bottleneck is called.
fn name(run: &Run, limit: Limit) -> String {
    let world = &run.assembly.world;
    match limit {
        Limit::Lane(lane) => {
            let (from, to) = world.ends_of(lane);
            format!("{} to {}", run.assembly.name(from), run.assembly.name(to))
        }
        Limit::Service(part) => run.assembly.name(part).to_owned(),
        Limit::Engine(requester) => {
            format!("{}: its engine", run.assembly.name(world.requester(requester).1))
        }
        Limit::Tags(requester) => {
            format!("{}: its tags", run.assembly.name(world.requester(requester).1))
        }
        Limit::Trackers(part) => format!("{}: split reads", run.assembly.name(part)),
        Limit::Walkers(_) | Limit::Gap(_) | Limit::Window(_) => "latency".to_owned(),
    }
}

/// What is remembered of a flow.
struct Note {
    /// Whether its arrivals bound what it asks for, and not its latency.
    asked: bool,
    /// How long a job takes alone, in picoseconds.
    unloaded: f64,
}

/// The limits of a rack that anything uses.
#[derive(Default)]
struct Limits {
    all: Vec<Limit>,
    capacities: Vec<u64>,
    places: BTreeMap<Limit, usize>,
}

impl Limits {
    fn place(&mut self, limit: Limit, world: &World) -> usize {
        *self.places.entry(limit).or_insert_with(|| {
            self.all.push(limit);
            self.capacities.push((limit.capacity(world) as u64).max(1));
            self.all.len() - 1
        })
    }

    fn flow(&mut self, world: &World, spec: &FlowSpec, queues: &[FlowId]) -> (Flow, Note) {
        let depth = match spec.arrivals {
            Arrivals::Depth(depth) => depth,
            Arrivals::Every(_) | Arrivals::Poisson(_) => 1,
        };
        let of = |queue: Option<&FlowId>| {
            queue.map(|queue| cost::of(world, *queue, depth)).unwrap_or_default()
        };
        let cost = of(queues.first());
        // What the last queue does not use, too, each has for itself: a core, a queue pair.
        let last = of(queues.last().filter(|_| queues.len() > 1));
        let shared = |limit: &Limit| {
            limit.requester().is_none() || last.uses.iter().any(|(other, _)| other == limit)
        };
        let count = f64::from(spec.queues);
        let mut totals: BTreeMap<usize, f64> = BTreeMap::new();
        for (limit, bytes) in &cost.uses {
            let part = if shared(limit) { 1.0 } else { 1.0 / count };
            *totals.entry(self.place(*limit, world)).or_default() += bytes * part;
        }
        let ppm = |bytes: f64| (bytes / spec.size as f64 * 1e6).round() as u64;
        let uses = totals.iter().map(|(link, bytes)| Use { link: *link, cost_ppm: ppm(*bytes) });
        let (asked, depth) = match spec.arrivals {
            Arrivals::Every(span) | Arrivals::Poisson(span) => (count / span.seconds(), None),
            Arrivals::Depth(depth) => (f64::INFINITY, Some(f64::from(depth) * count)),
        };
        let held = cost.held.iter().map(|(resource, span)| {
            let shared = last.held.iter().any(|(other, _)| other == resource);
            let units = f64::from(world.units(*resource)) * if shared { 1.0 } else { count };
            units * SECOND / span
        });
        let depth = depth.map(|jobs| jobs * SECOND / cost.unloaded);
        let most = held.chain(depth).fold(f64::INFINITY, f64::min);
        let demand = Some((asked.min(most) * spec.size as f64) as u64);
        let flow = Flow { uses: uses.collect(), demand, weight: spec.queues.max(1) };
        (flow, Note { asked: asked <= most, unloaded: cost.unloaded })
    }
}
