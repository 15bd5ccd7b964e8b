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
//!   time, each for a round trip of the empty route, or a walk;
//! * what the rack file lets functions do in a second;
//! * units that steps use or hold, drives' media and message gaps: so many at a time, each for as
//!   long as in the empty rack.
//!
//! A flow asks for what its arrivals say, and for no more than its depth lets through when jobs take
//! as long as in the empty rack. Its weight is its number of queues.
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
//! where it is known (`sure`): in a hundred random racks (`tests/levels`), those are within 0.2 % in the
//! median and 10 % at worst.

use std::collections::BTreeMap;

use rackbus_fabric::rack::Rack;
use serde::Serialize;

use super::caches::Caches;
use super::cost::{self, Pages};
use super::limit::{Limit, SECOND};
use super::sure::{self, JobPattern, Stands};
use super::{Bottleneck, Flow, Shares, Use, fair_shares};
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
    /// The same in jobs.
    pub fair_jobs_per_second: f64,
    /// How long a job takes when no other flow is in the rack's way, in nanoseconds.
    pub unloaded_ns: f64,
    /// What keeps it from going faster: a full link by its ends, a memory or device by its name, a
    /// requester's engine or tags, a root's split reads, a limit of the rack file, a drive's medium, units of steps by their name,
    /// `latency` when what is under way is too little for the route's length, or `demand` when it gets
    /// all it asks for.
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
    let mut caches = Caches::default();
    run.flows().for_each(|(_, queues, _)| caches.add(world, queues));
    for (spec, queues, _) in run.flows() {
        let (flow, note) = limits.flow(world, spec, queues, &caches.all);
        flows.push(flow);
        notes.push(note);
    }
    let Ok(shares) = fair_shares(&limits.capacities, &flows) else {
        unreachable!("limits have capacities, flows have weights and demands");
    };
    let doubts = limits.doubts((&flows, &shares), run.flows().map(|(spec, ..)| spec), &notes);
    let share = |nth: usize, (spec, _, routes): (&FlowSpec, &[FlowId], &[RouteId])| {
        let (share, note) = (&shares.flows[nth], &notes[nth]);
        let shaped = (!workload.shaping.is_empty())
            .then_some("tenants are shaped in this workload; simulate it");
        let cached = caches.doubt(world, nth);
        let in_turns = run
            .shares_engines(spec)
            .then_some("functions take turns at its device's engines; simulate it");
        let doubt = uneven(spec, workload).or(shaped).or(in_turns).or(doubts[nth]).or(cached);
        let directions = routes.iter().map(|route| world.directions_of(*route).len());
        let bytes = if spec.size == 0 { 0.0 } else { share.rate };
        FlowShare {
            name: spec.name.clone(),
            tenant: spec.tenant.clone(),
            ends: spec.kind.ends().into_iter().map(str::to_owned).collect(),
            bytes_per_second: doubt.is_none().then_some(bytes),
            jobs_per_second: doubt.is_none().then_some(share.rate / unit(spec)),
            refused: doubt,
            fair_bytes_per_second: bytes,
            fair_jobs_per_second: share.rate / unit(spec),
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

/// What a job counts for in its flow's share: its bytes, or 1 where it moves none.
fn unit(spec: &FlowSpec) -> f64 {
    spec.size.max(1) as f64
}

/// I/Os of a trace per second, from the first to the last.
fn mean_rate(trace: &BlockTrace) -> f64 {
    trace.ios.len() as f64 / trace.length().seconds()
}

/// Why shares, which are those of flows that go on evenly, tell nothing of a flow.
pub(crate) fn uneven(spec: &FlowSpec, workload: &Workload) -> Option<&'static str> {
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
        Limit::Units(unit) => run.unit_name(unit).unwrap_or_else(|| "latency".to_owned()),
        Limit::Rate(meter, of) => run.limit_name(meter, of),
        Limit::Window(_) => "latency".to_owned(),
    }
}

/// What is remembered of a flow.
struct Note {
    /// Whether its arrivals bound what it asks for, and not its latency.
    asked: bool,
    /// How long a job takes alone, in picoseconds.
    unloaded: f64,
    /// Whether about as many jobs are under way as keep the units busy that they use.
    at_the_knee: bool,
}

/// How far the jobs that are under way may be from keeping units busy, for it to be unknown how long units are idle.
const KNEE: std::ops::Range<f64> = 0.5..1.5;

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

    /// Why flows' rates are not known from their shares.
    fn doubts<'s>(
        &self,
        (flows, shares): (&[Flow], &Shares),
        specs: impl Iterator<Item = &'s FlowSpec>,
        notes: &[Note],
    ) -> Vec<Option<&'static str>> {
        let jobs = specs.zip(notes).map(|(spec, note)| JobPattern {
            several: is_several(&spec.kind),
            closed: matches!(spec.arrivals, Arrivals::Depth(_)),
            at_the_knee: note.at_the_knee,
        });
        let stands = self.all.iter().map(|limit| match limit {
            Limit::Tags(_) | Limit::Window(_) => Some(Stands::Own),
            Limit::Trackers(_) | Limit::Walkers(_) => Some(Stands::Shared),
            Limit::Units(_) => Some(Stands::Units),
            Limit::Rate(..) => Some(Stands::Rate),
            _ => None,
        });
        let (jobs, stands): (Vec<_>, Vec<_>) = (jobs.collect(), stands.collect());
        sure::doubts(flows, shares, &jobs, &stands)
    }

    fn flow(
        &mut self,
        world: &World,
        spec: &FlowSpec,
        queues: &[FlowId],
        pages: &Pages,
    ) -> (Flow, Note) {
        let depth = match spec.arrivals {
            Arrivals::Depth(depth) => depth,
            Arrivals::Every(_) | Arrivals::Poisson(_) | Arrivals::Traced => 1,
        };
        let of = |queue: Option<&FlowId>| {
            queue.map(|queue| cost::of(world, *queue, depth, pages)).unwrap_or_default()
        };
        let cost = of(queues.first());
        // What the last queue does not use, too, each has for itself: a core, a queue pair.
        let last = of(queues.last().filter(|_| queues.len() > 1));
        let last_has = |limit: &Limit| last.uses.iter().any(|(other, _)| other == limit);
        let shared = |limit: &Limit| !limit.may_be_own() || last_has(limit);
        let count = f64::from(spec.queues);
        let mut totals: BTreeMap<usize, f64> = BTreeMap::new();
        for (limit, bytes) in &cost.uses {
            let part = if shared(limit) { 1.0 } else { 1.0 / count };
            *totals.entry(self.place(*limit, world)).or_default() += bytes * part;
        }
        let ppm = |bytes: f64| (bytes / unit(spec) * 1e6).round() as u64;
        let uses = totals.iter().map(|(link, bytes)| Use { link: *link, cost_ppm: ppm(*bytes) });
        let (asked, depth) = match spec.arrivals {
            Arrivals::Every(span) | Arrivals::Poisson(span) => (count / span.seconds(), None),
            Arrivals::Depth(depth) => (f64::INFINITY, Some(f64::from(depth) * count)),
            Arrivals::Traced => (spec.trace.as_ref().map_or(f64::INFINITY, mean_rate), None),
        };
        let most = depth.map_or(f64::INFINITY, |jobs| jobs * SECOND / cost.unloaded);
        let demand = Some((asked.min(most) * unit(spec)) as u64);
        let flow = Flow { uses: uses.collect(), demand, weight: spec.queues.max(1) };
        let at_the_knee = totals.iter().any(|(place, held)| {
            let Limit::Units(unit) = self.all[*place] else { return false };
            // What each queue has for itself, all of them have as often.
            let own = if last_has(&Limit::Units(unit)) { 1.0 } else { count };
            let units = f64::from(world.units(unit)) * own;
            let busy = most * held / Limit::Units(unit).capacity(world);
            depth.is_some_and(|jobs| jobs > units) && KNEE.contains(&busy)
        });
        (flow, Note { asked: asked <= most, unloaded: cost.unloaded, at_the_knee })
    }
}
