//! Pictures of what came of a workload.

use std::collections::{BTreeMap, VecDeque};

use rackbus_fabric::rack::Rack;
use rackbus_fabric::{ComponentId, ComponentKind, Topology, derive};

use super::follow::TraceStep;
use super::results::Results;
use super::scripts::{Failed, Run};
use super::{FlowKind, FlowSpec, Workload};
use crate::assembly::AssemblyError;
use crate::engine::Arrivals;
use crate::flow::cost;
use crate::picture::chart::{Chart, Series};
use crate::picture::diagram::{Diagram, Edge, Node};
use crate::picture::timeline::{Timeline, TimelinePacket};
use crate::picture::{Axis, Scale, Unit};
use crate::time::Time;
use crate::timing::Timing;

/// Lines that can be told apart in a chart.
pub(crate) const LINES: usize = 12;
/// Sizes of the picture of bandwidth over size: powers of two from 64 B to 1 MiB.
const SIZES: std::ops::RangeInclusive<u32> = 6..=20;
/// How long each of its points is simulated at least, and in the time of a lone job.
const LEAST: Time = Time::from_us(100);
const JOBS: f64 = 32.0;
/// More events than a point takes.
const MOST: u64 = 200_000_000;

/// The distributions of flows' latencies.
pub fn latencies(results: &Results) -> Chart {
    let flows = results.flows.iter().take(LINES);
    let of: Vec<_> = flows.map(|flow| (flow.name.clone(), flow.distribution.clone())).collect();
    let title = format!("Latency of each flow{}", first(results.flows.len()));
    Chart::distributions(&title, &of)
}

/// What to say of flows that are not drawn.
fn first(flows: usize) -> String {
    if flows > LINES { format!(", the first {LINES} of {flows}") } else { String::new() }
}

/// How busy the links are.
///
/// # Errors
/// [`Failed`] when the rack's topology cannot be.
pub fn links(rack: &Rack, results: &Results) -> Result<Diagram, Failed> {
    let topology = derive::topology_with_ntbs(rack).map_err(AssemblyError::from)?;
    let depths = depths(&topology);
    let mut places: BTreeMap<String, usize> = BTreeMap::new();
    let mut nodes = Vec::new();
    // Memory is behind the root, and not worth a box.
    for (id, part) in topology.components().filter(|(_, part)| part.kind != ComponentKind::Memory) {
        places.insert(part.name.clone(), nodes.len());
        nodes.push(Node {
            name: part.name.clone(),
            kind: part.kind.to_string(),
            host: part.host.map(|host| topology.host(host).name.clone()),
            depth: depths.get(&id).copied().unwrap_or(0),
        });
    }
    let edges = results.links.iter().enumerate().filter_map(|(number, link)| {
        let [a, b] = link.ends.each_ref().map(|name| places.get(name).copied());
        let (ends, label) = ([a?, b?], link.link.clone());
        Some(Edge { ends, number, label, there: link.there, back: link.back })
    });
    let busiest = results.links.iter().map(|link| link.there.max(link.back)).fold(0.0, f64::max);
    let title = format!("The busiest link is busy for {:.0} % of the time", busiest * 100.0);
    Ok(Diagram { title, edges: edges.collect(), nodes })
}

/// How many links each part is from its host's root; between hosts, from the nearest NTB.
fn depths(topology: &Topology) -> BTreeMap<ComponentId, usize> {
    let mut depths = BTreeMap::new();
    let mut queue: VecDeque<ComponentId> = topology.hosts().map(|(_, host)| host.root).collect();
    queue.iter().for_each(|root| {
        depths.insert(*root, 0);
    });
    let mut outside = VecDeque::new();
    loop {
        while let Some(id) = queue.pop_front() {
            let here = depths[&id];
            for (next, _) in topology.neighbours(id) {
                let crosses = topology.component(*next).host != topology.component(id).host;
                if depths.contains_key(next) {
                    continue;
                }
                if crosses {
                    outside.push_back(*next);
                } else {
                    depths.insert(*next, here + 1);
                    queue.push_back(*next);
                }
            }
        }
        // Then what is between hosts, from its edge inwards.
        match outside.pop_front() {
            Some(id) => {
                if let std::collections::btree_map::Entry::Vacant(place) = depths.entry(id) {
                    place.insert(0);
                    queue.push_back(id);
                }
            }
            None => return depths,
        }
    }
}

/// Each flow's bandwidth, alone in the rack, over the size of its jobs. Flows of steps are not drawn: their moves have
/// sizes of their own.
///
/// # Errors
/// [`Failed`] as [`run`](super::run) has it.
pub fn bandwidth(rack: &Rack, timing: &Timing, workload: &Workload) -> Result<Chart, Failed> {
    let sized = |spec: &&FlowSpec| !matches!(spec.kind, FlowKind::Steps { .. });
    let flows: Vec<&FlowSpec> = workload.flows.iter().filter(sized).collect();
    let mut series = Vec::new();
    for spec in flows.iter().take(LINES) {
        let mut points = Vec::new();
        for size in SIZES.map(|power| 1 << power) {
            let alone = resized(workload, spec, size);
            points.push((size as f64, lasting(rack, timing, &alone)?));
        }
        series.push(Series::line(spec.name.clone(), points));
    }
    let steps = match flows.len() < workload.flows.len() {
        true => ", without steps, whose moves have sizes of their own",
        false => "",
    };
    Ok(Chart {
        title: "Bandwidth over size".to_owned(),
        subtitle: format!("Each flow alone in the rack{}{steps}", first(flows.len())),
        x: Axis::new("Size of a job", Unit::Bytes, Scale::Log2),
        y: Axis::new("Bandwidth", Unit::BytesPerSecond, Scale::Linear),
        series,
    })
}

/// Bytes per second of the one flow of a workload, simulated for as long as some of its jobs take.
fn lasting(rack: &Rack, timing: &Timing, alone: &Workload) -> Result<f64, Failed> {
    let mut run = Run::new(rack, timing, alone)?;
    let world = &run.assembly.world;
    let took = run.flows().filter_map(|(spec, queues, _)| {
        let queue = *queues.first()?;
        let job = cost::alone(world, *world.addresses(queue), world.steps(queue)).1;
        Some(job + spec.think.mean().ps() as f64)
    });
    let jobs = Time::from_ps((took.fold(0.0, f64::max) * JOBS) as u64);
    run.last(alone.duration.max(jobs));
    run.go(MOST)?;
    Ok(run.results().flows.first().map_or(0.0, |flow| flow.bytes_per_second))
}

/// One flow of a workload, with jobs of another size and without end; one that asks for a rate takes all it can get.
fn resized(workload: &Workload, spec: &FlowSpec, size: u64) -> Workload {
    let mut spec = spec.clone();
    (spec.size, spec.count) = (size, u64::MAX);
    if let FlowKind::Ring { input, output, .. } = &mut spec.kind {
        let change = |bytes: &mut u64| *bytes = if *bytes > 0 { size } else { 0 };
        change(input);
        change(output);
    }
    if !matches!(spec.arrivals, Arrivals::Depth(_)) {
        spec.arrivals = Arrivals::Depth(8);
    }
    (spec.begin, spec.end, spec.bursts, spec.trace) = (Time::ZERO, Time::MAX, None, None);
    // Long enough for some jobs of this size at a gigabyte per second.
    let duration = LEAST.max(Time::from_ns(size * 8));
    Workload { duration, flows: vec![spec], ..workload.clone() }
}

/// A job, hop by hop.
pub fn timeline(flow: &str, steps: &[TraceStep], took: Time) -> Timeline {
    let mut columns: Vec<String> = Vec::new();
    for step in steps {
        for part in [&step.from, &step.to] {
            if !columns.contains(part) {
                columns.push(part.clone());
            }
        }
    }
    let place = |part: &String| columns.iter().position(|column| column == part).unwrap_or(0);
    let passage = |step: &TraceStep| TimelinePacket {
        from: place(&step.from),
        to: place(&step.to),
        begin: step.begin_ns,
        end: step.end_ns,
        label: step.packet.clone(),
        kind: match step.packet.split(' ').next() {
            Some("MRd") => 1,
            Some("CplD") => 2,
            _ => 0,
        },
    };
    let mut passages: Vec<TimelinePacket> = steps.iter().map(passage).collect();
    passages.sort_by(|a, b| a.begin.total_cmp(&b.begin));
    Timeline {
        title: format!("{flow}: one job takes {}", Unit::Nanoseconds.text(took.ns())),
        subtitle: format!(
            "{} passages over links, time downwards: writes blue, read requests red, completions green",
            passages.len()
        ),
        columns,
        passages,
    }
}
