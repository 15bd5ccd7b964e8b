//! A workload in a rack by its fair shares: what each flow gets in the long run, without simulating
//! a packet. For racks and numbers of flows that are too large to simulate.
//!
//! The flows are those that would be simulated: the same scripts, on the same routes, by the same
//! requesters ([`Run`]). What a job takes of everything that has a rate becomes a [`Use`]:
//!
//! * each direction of a PCIe link: packets with headers and framing (writes, requests and
//!   completions, as they are cut on the route), and the DLLPs for what comes the other way;
//! * memories and devices as targets, and devices' engines;
//! * tags of requesters, trackers of roots that split reads, and walkers of IOMMUs: so many at a
//!   time, each for a round trip of the empty route, or a walk.
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
//! Shares are what the fabric can carry, and what it does carry for flows that do not press for more. It does
//! not enforce them, because it knows no flows: packets of a class share queues and credits, so what stops one
//! stops all behind it; links that join take turns packet by packet, not byte by byte; full queues make round
//! trips many times as long, and reads have only so many tags and trackers. Flows that ask for all they can get
//! differ from their shares by half in the median, and by several times at worst. So a rate is given only
//! where it is known (`sure`): in a hundred random racks (`tests/levels.rs`), those are within 0.2 % in the
//! median and 10 % at worst.

use std::collections::BTreeMap;

use rackbus_fabric::rack::Rack;
use serde::Serialize;

use super::cost;
use super::limit::{Limit, SECOND};
use super::sure::{self, Trips};
use super::{Bottleneck, Flow, Use, fair_shares};
use crate::engine::{Arrivals, FlowId, RouteId, World};
use crate::timing::Timing;
use crate::workload::{BlockTrace, Failed, FlowKind, FlowSpec, HostProfile, Run, Workload};

/// What a flow gets.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FlowShare {
    /// The flow's name in the workload, unique there.
    pub name: String,
    /// The tenant that the flow counts for, where the workload names one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// The names of its ends, in the order of the keys of its kind.
    pub ends: Vec<String>,
    /// Bytes per second, where shares can tell.
    pub bytes_per_second: Option<f64>,
    /// Jobs per second, where `bytes_per_second` is known.
    pub jobs_per_second: Option<f64>,
    /// Why shares cannot tell the rates, in words that follow the flow's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<&'static str>,
    /// Bytes per second of its fair share: what the fabric has for it if others take no more than theirs.
    pub fair_bytes_per_second: f64,
    /// How long a job takes when no other flow is in the rack's way, in nanoseconds.
    pub unloaded_ns: f64,
    /// What keeps it from going faster: a full link by its ends, a memory or device by its name, a
    /// requester's engine or tags, a root's split reads, `latency` when what is under way is too
    /// little for the route's length, or `demand` when it gets all it asks for.
    pub bottleneck: String,
    /// Components between its ends, on the longest of its routes.
    pub hops: usize,
}

/// What a link is used for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LinkShare {
    /// The names of the two components that it joins, the one added first first.
    pub ends: [String; 2],
    /// What it is: `Gen3 x8`.
    pub link: String,
    /// The part of its rate that is used, from the first end to the second, from 0 to 1.
    pub there: f64,
    /// The part of its rate that is used from the second end to the first, from 0 to 1.
    pub back: f64,
}

/// What all flows of a workload get.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FlowLevel {
    /// What the hosts are taken to be.
    pub hosts: Vec<HostProfile>,
    /// By flow, in the workload's order.
    pub flows: Vec<FlowShare>,
    /// By link, in the order of the rack's parts.
    pub links: Vec<LinkShare>,
    /// What was left out of the workload's files, and which of several ways is taken, in sentences.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// What of the answer was held against no measurement, in sentences.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unvalidated: Vec<String>,
}

/// The fair shares of `workload`'s flows in `rack`.
///
/// # Errors
/// [`Failed`], for the same as a simulation.
pub fn shares(rack: &Rack, timing: &Timing, workload: &Workload) -> Result<FlowLevel, Failed> {
    let run = Run::new(rack, timing, workload)?;
    let world = &run.assembly.world;
    let mut limits = Limits::default();
    // The first places are the directions'.
    for direction in world.direction_ids() {
        limits.place(Limit::Direction(direction), world);
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
    // What is several steps may fall into step with itself.
    let several: Vec<bool> = run.flows().map(|(spec, ..)| is_several(&spec.kind)).collect();
    let trips = limits.all.iter().map(|limit| match limit {
        Limit::Tags(_) | Limit::Window(_) => Some(Trips::Own),
        Limit::Trackers(_) | Limit::Walkers(_) => Some(Trips::Shared),
        _ => None,
    });
    let doubts = sure::doubts(&flows, &shares, &several, &trips.collect::<Vec<_>>());
    let share = |nth: usize, (spec, _, routes): (&FlowSpec, &[FlowId], &[RouteId])| {
        let (share, note) = (&shares.flows[nth], &notes[nth]);
        let shaped = (!workload.shaping.is_empty())
            .then_some("tenants are shaped in this workload; simulate it");
        let doubt = uneven(spec, workload).or(shaped).or(doubts[nth]);
        let directions = routes.iter().map(|route| world.directions_of(*route).len());
        FlowShare {
            name: spec.name.clone(),
            tenant: spec.tenant.clone(),
            ends: spec.kind.ends().into_iter().map(str::to_owned).collect(),
            bytes_per_second: doubt.is_none().then_some(share.rate),
            jobs_per_second: doubt.is_none().then_some(share.rate / spec.size as f64),
            refused: doubt,
            fair_bytes_per_second: share.rate,
            unloaded_ns: note.unloaded / 1e3,
            bottleneck: match share.bottleneck {
                Bottleneck::Demand if note.asked => "demand".to_owned(),
                Bottleneck::Demand => "latency".to_owned(),
                Bottleneck::Link(place) => name(&run, limits.all[place]),
            },
            hops: directions.max().unwrap_or(0).saturating_sub(1),
        }
    };
    let flows = run.flows().enumerate().map(|(nth, flow)| share(nth, flow)).collect();
    let links = run.assembly.links().map(|(a, b, link, direction)| LinkShare {
        ends: [a, b].map(|id| run.assembly.topology().component(id).name.clone()),
        link: link.to_string(),
        there: shares.utilization[direction.index()],
        back: shares.utilization[direction.back().index()],
    });
    let unvalidated = run.untried(&|direction| shares.utilization[direction.index()]).sentences();
    let notes = run.workload().notes.clone();
    Ok(FlowLevel { hosts: run.hosts(), flows, links: links.collect(), notes, unvalidated })
}

/// I/Os of a trace per second, from the first to the last.
fn mean_rate(trace: &BlockTrace) -> f64 {
    trace.ios.len() as f64 / trace.length().seconds()
}

/// Why shares, which are those of flows that go on evenly, tell nothing of a flow.
fn uneven(spec: &FlowSpec, workload: &Workload) -> Option<&'static str> {
    let lasts = spec.begin <= workload.warmup && spec.end >= workload.duration;
    if spec.trace.is_some() {
        Some("its jobs are those of a trace; simulate it")
    } else if spec.bursts.is_some() {
        Some("its jobs come in bursts; simulate it")
    } else if spec.count != u64::MAX {
        Some("its jobs come to an end; simulate it")
    } else {
        (!lasts).then_some("it is not there all the time; simulate it")
    }
}

/// Whether a flow's jobs are several steps that wait for each other.
fn is_several(kind: &FlowKind) -> bool {
    match kind {
        FlowKind::Write { .. } | FlowKind::Read { .. } | FlowKind::Copy { .. } => false,
        FlowKind::Request { .. }
        | FlowKind::Ring { .. }
        | FlowKind::Steps { .. }
        | FlowKind::AllReduce { .. } => true,
    }
}

/// What a bottleneck is called.
fn name(run: &Run, limit: Limit) -> String {
    let world = &run.assembly.world;
    match limit {
        Limit::Direction(direction) => {
            let (from, to) = world.ends_of(direction);
            format!("{} to {}", run.assembly.name(from), run.assembly.name(to))
        }
        Limit::Service(part) => format!("{}: memory bandwidth", run.assembly.name(part)),
        Limit::Engine(requester) => {
            format!("{}: engine", run.assembly.name(world.requester(requester).1))
        }
        Limit::Tags(requester) => {
            format!("{}: tags", run.assembly.name(world.requester(requester).1))
        }
        Limit::Trackers(part) => format!("{}: split reads", run.assembly.name(part)),
        Limit::Walkers(part) => format!("{}: page walkers", run.assembly.name(part)),
        Limit::Peers(part) => format!("{}: peer writes", run.assembly.name(part)),
        Limit::Gap(requester) => {
            format!("{}: packet rate", run.assembly.name(world.requester(requester).1))
        }
        Limit::Window(_) => "latency".to_owned(),
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
            Arrivals::Every(_) | Arrivals::Poisson(_) | Arrivals::Traced => 1,
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
            Arrivals::Traced => (spec.trace.as_ref().map_or(f64::INFINITY, mean_rate), None),
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
