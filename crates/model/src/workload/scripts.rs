//! From a workload to the engine's scripts, and from what that counted to results.

use rackbus_fabric::rack::Rack;
use rackbus_fabric::text::Problem;

use super::results::{FlowResult, Latency, LinkResult, Results, tenants};
use super::{FlowKind, FlowSpec, Workload};
use crate::assembly::{Assembly, AssemblyError, End, Source};
use crate::engine::{
    Addresses, Arrivals, Class, Flow, FlowId, Histogram, LaneId, Passage, Script, Step, Stuck,
    Until, WayId,
};
use crate::time::Time;
use crate::timing::Timing;

/// From this on a link is full.
const FULL: f64 = 0.95;
/// Bytes of a doorbell or interrupt, and of a completion queue's entry.
const SIGNAL: u64 = 4;
const COMPLETION: u64 = 16;
/// Each queue has addresses of its own, so far from the next queue's.
const APART: u64 = 1 << 36;

/// Why a workload did not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failed {
    /// The workload and the rack do not fit. The place is one in the workload's text.
    #[error("{}; {}", .0.what, .0.allowed)]
    Wrong(Problem),
    /// The rack cannot be.
    #[error(transparent)]
    Rack(#[from] AssemblyError),
    /// The simulation did not end.
    #[error(transparent)]
    Stuck(#[from] Stuck),
}

/// A workload in a rack, ready to run.
#[derive(Debug)]
pub struct Run {
    /// The rack.
    pub assembly: Assembly,
    workload: Workload,
    /// By flow: its queues, and the ways that its jobs use.
    flows: Vec<(Vec<FlowId>, Vec<WayId>)>,
}

/// Simulates `workload` in `rack`, at most `most` events of it.
///
/// # Errors
/// [`Failed`].
pub fn run(
    rack: &Rack,
    timing: &Timing,
    workload: &Workload,
    most: u64,
) -> Result<Results, Failed> {
    let mut run = Run::new(rack, timing, workload)?;
    run.go(most)?;
    Ok(run.results())
}

/// A packet's passage in a trace.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct TraceStep {
    /// From which part.
    pub from: String,
    /// To which part.
    pub to: String,
    /// What it is: `MRd 512 B`.
    pub packet: String,
    /// The packet's number.
    pub number: u64,
    /// When it was ready to go, its first bit went and its last bit came, in nanoseconds.
    pub ready_ns: f64,
    /// As above.
    pub begin_ns: f64,
    /// As above.
    pub end_ns: f64,
}

/// The first job of the flow of that name, alone in the rack, hop by hop; and how long it took.
///
/// # Errors
/// [`Failed`].
pub fn trace(
    rack: &Rack,
    timing: &Timing,
    workload: &Workload,
    flow: &str,
) -> Result<(Vec<TraceStep>, Time), Failed> {
    let mut alone = workload.clone();
    alone.flows.retain(|spec| spec.name == flow);
    for spec in &mut alone.flows {
        (spec.arrivals, spec.queues, spec.count) = (Arrivals::Depth(1), 1, 1);
    }
    (alone.warmup, alone.duration) = (Time::ZERO, Time::MAX);
    let mut run = Run::new(rack, timing, &alone)?;
    run.assembly.world.keep_trace();
    run.go(100_000_000)?;
    let took = run.flows.first().and_then(|(queues, _)| queues.first());
    let took = took.map_or(Time::ZERO, |id| run.assembly.world.flow(*id).latency.mean());
    let steps = run.assembly.world.trace().iter().map(|passage| run.step(passage)).collect();
    Ok((steps, took))
}

impl Run {
    /// Puts `rack` together and `workload` into it.
    ///
    /// # Errors
    /// [`Failed`] when they do not fit.
    pub fn new(rack: &Rack, timing: &Timing, workload: &Workload) -> Result<Run, Failed> {
        let assembly = Assembly::new(rack, timing, workload.seed)?;
        let mut run = Run { assembly, workload: workload.clone(), flows: Vec::new() };
        for (nth, spec) in workload.flows.iter().enumerate() {
            let flow = run.add(nth as u64, spec)?;
            run.flows.push(flow);
        }
        run.assembly.world.measure_from(workload.warmup);
        Ok(run)
    }

    /// The workload's flows: their queues, and the ways that their jobs use.
    pub fn flows(&self) -> impl Iterator<Item = (&FlowSpec, &[FlowId], &[WayId])> {
        let flows = self.workload.flows.iter().zip(&self.flows);
        flows.map(|(spec, (queues, ways))| (spec, &queues[..], &ways[..]))
    }

    /// Simulates it.
    ///
    /// # Errors
    /// [`Stuck`].
    pub fn go(&mut self, most: u64) -> Result<(), Stuck> {
        self.assembly.world.run(self.workload.duration, most)
    }

    /// The ends of a flow; what is wrong with one is told with its place.
    fn ends(&self, spec: &FlowSpec) -> Result<Vec<End>, Failed> {
        let names = spec.kind.ends().into_iter().enumerate();
        names
            .map(|(nth, name)| self.assembly.end(name).map_err(|e| misfit(spec, nth, &e)))
            .collect()
    }

    fn add(&mut self, nth: u64, spec: &FlowSpec) -> Result<(Vec<FlowId>, Vec<WayId>), Failed> {
        let ends = self.ends(spec)?;
        let units = match &spec.kind {
            FlowKind::Ring { units, .. } => *units,
            _ => 1,
        };
        let engine = self.assembly.world.add_resource(units);
        let mut found = (Vec::new(), Vec::new());
        for queue in 0..u64::from(spec.queues) {
            let mut job =
                Writer { run: self, spec, ends: &ends, script: Vec::new(), ways: Vec::new() };
            job.write_script(engine)?;
            let (script, ways) = (job.script, job.ways);
            let script = self.assembly.world.add_script(script);
            let stride = spec.size.next_multiple_of(64);
            let base = (nth << 48) + queue * APART;
            let addresses =
                Addresses { base, stride, span: spec.span.max(stride), random: spec.random };
            found.0.push(self.assembly.world.add_flow(Flow {
                script,
                arrivals: spec.arrivals,
                count: spec.count,
                bytes: spec.size,
                begin: spec.begin,
                addresses,
            }));
            found.1 = ways;
        }
        Ok(found)
    }

    /// What has come of it.
    pub fn results(&self) -> Results {
        let world = &self.assembly.world;
        let seconds = world.now().since(self.workload.warmup).seconds();
        let flows = self.workload.flows.iter().zip(&self.flows);
        let flows: Vec<FlowResult> =
            flows.map(|(spec, (queues, ways))| self.flow(spec, queues, ways, seconds)).collect();
        let links = self.assembly.links().map(|(a, b, link, lane)| {
            let name = |id| self.assembly.topology().component(id).name.clone();
            LinkResult {
                ends: [name(a), name(b)],
                link: link.to_string(),
                there: world.utilization(lane),
                back: world.utilization(lane.back()),
                starved: world.lane(lane).starved + world.lane(lane.back()).starved,
            }
        });
        let links = links.collect();
        Results { seconds, events: world.happened(), tenants: tenants(&flows), flows, links }
    }

    fn flow(&self, spec: &FlowSpec, queues: &[FlowId], ways: &[WayId], seconds: f64) -> FlowResult {
        let world = &self.assembly.world;
        let mut latency = Histogram::default();
        let (mut jobs, mut bytes) = (0, 0);
        for queue in queues {
            let stats = world.flow(*queue);
            jobs += stats.jobs;
            bytes += stats.bytes;
            latency.merge(&stats.latency);
        }
        let lanes = ways.iter().map(|way| world.lanes_of(*way));
        FlowResult {
            name: spec.name.clone(),
            tenant: spec.tenant.clone(),
            ends: spec.kind.ends().into_iter().map(str::to_owned).collect(),
            jobs,
            bytes_per_second: bytes as f64 / seconds,
            jobs_per_second: jobs as f64 / seconds,
            latency_ns: Latency::of(&latency),
            bottleneck: self.bottleneck(spec, ways, jobs as f64 / seconds),
            hops: lanes.map(|lanes| lanes.len().saturating_sub(1)).max().unwrap_or(0),
            distribution: latency.cumulative(),
        }
    }

    fn bottleneck(&self, spec: &FlowSpec, ways: &[WayId], rate: f64) -> String {
        let world = &self.assembly.world;
        let both = |lane: LaneId| [lane, lane.back()];
        let lanes = ways.iter().flat_map(|way| world.lanes_of(*way)).flat_map(both);
        let busiest = lanes
            .map(|lane| (world.utilization(lane), lane))
            .max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
        match busiest {
            Some((share, lane)) if share >= FULL => {
                let (from, to) = world.ends_of(lane);
                format!("{} to {}", self.assembly.name(from), self.assembly.name(to))
            }
            _ => match spec.arrivals {
                Arrivals::Every(span) | Arrivals::Poisson(span)
                    if rate >= 0.9 * f64::from(spec.queues) / span.seconds() =>
                {
                    "demand".to_owned()
                }
                _ => self.limit(spec, ways).unwrap_or_else(|| "latency".to_owned()),
            },
        }
    }

    /// What holds a flow up where no link is full: an engine, a root's reads under way, or a device's.
    fn limit(&self, spec: &FlowSpec, ways: &[WayId]) -> Option<String> {
        let world = &self.assembly.world;
        let ends = spec.kind.ends();
        let devices = ends.iter().filter_map(|name| {
            let end = self.assembly.end(name).ok()?;
            Some((*name, self.assembly.requester(end)?))
        });
        let devices: Vec<_> = devices.collect();
        let full = |share: Option<f64>| share.is_some_and(|share| share >= FULL);
        if let Some((name, _)) = devices.iter().find(|(_, at)| full(world.engine_share(*at))) {
            return Some(format!("{name}: its engine"));
        }
        let mut parts = ways.iter().flat_map(|way| world.parts_of(*way));
        if let Some(root) = parts.find(|part| world.waited_for_trackers(*part) > 0) {
            return Some(format!("{}: split reads", self.assembly.name(root)));
        }
        let waits = devices.iter().find(|(_, at)| world.waited_for_tags(*at) > 0);
        waits.map(|(name, _)| format!("{name}: its tags"))
    }

    fn step(&self, passage: &Passage) -> TraceStep {
        let (from, to) = self.assembly.world.ends_of(passage.lane);
        let kind = match passage.class {
            Class::Posted => "MWr",
            Class::NonPosted => "MRd",
            Class::Completion => "CplD",
        };
        TraceStep {
            from: self.assembly.name(from).to_owned(),
            to: self.assembly.name(to).to_owned(),
            packet: format!("{kind} {} B", passage.bytes),
            number: passage.packet,
            ready_ns: passage.ready.ns(),
            begin_ns: passage.begin.ns(),
            end_ns: passage.end.ns(),
        }
    }
}

/// An end that does not fit the rack, with its place in the workload.
fn misfit(spec: &FlowSpec, nth: usize, error: &AssemblyError) -> Failed {
    let span = spec.places.ends.get(nth).cloned().unwrap_or(0..0);
    let text = error.to_string();
    let (what, allowed) = text.split_once("; ").unwrap_or((&text, "see the rack file"));
    Failed::Wrong(Problem { span, what: what.to_owned(), allowed: allowed.to_owned() })
}

/// Writes the script of one queue of a flow.
struct Writer<'a> {
    run: &'a mut Run,
    spec: &'a FlowSpec,
    ends: &'a [End],
    script: Script,
    ways: Vec<WayId>,
}

impl Writer<'_> {
    /// The source of requests at an end.
    fn source(&mut self, nth: usize) -> Result<Source, Failed> {
        self.run.assembly.source(self.ends[nth]).map_err(|e| misfit(self.spec, nth, &e))
    }

    fn way(&mut self, from: usize, to: usize) -> Result<WayId, Failed> {
        let way = self.run.assembly.way(self.ends[from], self.ends[to]);
        let way = way.map_err(|error| misfit(self.spec, to, &error))?;
        self.ways.push(way);
        Ok(way)
    }

    /// Bytes that an end writes to another.
    fn write(&mut self, source: Source, way: WayId, bytes: u64, until: Until) {
        self.script.push(Step::Write { stream: source.stream, way, address: 0, bytes, until });
    }

    fn read(&mut self, source: Source, way: WayId, bytes: u64) {
        self.script.push(Step::Read { stream: source.stream, way, address: 0, bytes });
    }

    /// What an end takes before its request leaves: a processor's issue.
    fn issue(&mut self, nth: usize) {
        if let End::Host(_) = self.ends[nth] {
            let issue = self.run.assembly.timing().cpu.issue;
            self.script.push(Step::Wait(issue));
        }
    }

    /// What a target takes to see what has landed: a processor's poll.
    fn seen(&mut self, nth: usize) {
        if let End::Host(_) = self.ends[nth] {
            let poll = self.run.assembly.timing().cpu.poll;
            self.script.push(Step::Wait(poll));
        }
    }

    fn write_script(&mut self, engine: crate::engine::ResourceId) -> Result<(), Failed> {
        let size = self.spec.size;
        // A queue pair's messages follow each other after what one costs the device.
        let message = match self.ends.first() {
            Some(End::Device(id)) => self.run.assembly.message(*id),
            _ => Time::ZERO,
        };
        let pair = (message > Time::ZERO).then(|| self.run.assembly.world.add_resource(1));
        let spec = self.spec;
        match &spec.kind {
            FlowKind::Write { .. } => {
                let (source, way) = (self.source(0)?, self.way(0, 1)?);
                self.script.extend(pair.map(Step::Take));
                self.issue(0);
                // A job's bytes count when they are seen; the pair goes on when they are sent.
                let until = if pair.is_some() { Until::Issued } else { Until::Landed };
                self.write(source, way, size, until);
            }
            FlowKind::Read { .. } => {
                let (source, way) = (self.source(0)?, self.way(0, 1)?);
                self.script.extend(pair.map(Step::Take));
                self.issue(0);
                self.read(source, way, size);
            }
            FlowKind::Copy { .. } => {
                let source = self.source(0)?;
                let (from, to) = (self.way(0, 1)?, self.way(0, 2)?);
                self.script.extend(pair.map(Step::Take));
                let (stream, bytes, until) = (source.stream, size, Until::Landed);
                self.script.push(Step::Copy {
                    stream,
                    from,
                    source: 0,
                    to,
                    target: 0,
                    bytes,
                    until,
                });
            }
            FlowKind::Request { request, service, .. } => {
                let (one, other) = (self.source(0)?, self.source(1)?);
                let (there, back) = (self.way(0, 1)?, self.way(1, 0)?);
                self.issue(0);
                self.write(one, there, *request, Until::Landed);
                self.seen(1);
                self.script.push(Step::Wait(*service));
                self.issue(1);
                self.write(other, back, size, Until::Landed);
                self.seen(0);
            }
            FlowKind::Ring { descriptor, input, output, service, interrupt, .. } => {
                let (driver, device) = (self.source(0)?, self.source(1)?);
                let (there, back) = (self.way(0, 1)?, self.way(1, 0)?);
                self.issue(0);
                self.write(driver, there, SIGNAL, Until::Landed);
                self.read(device, back, *descriptor);
                if *input > 0 {
                    self.read(device, back, *input);
                }
                self.script.push(Step::Use(engine, *service));
                if *output > 0 {
                    self.write(device, back, *output, Until::Begun);
                }
                self.write(device, back, COMPLETION, Until::Begun);
                if *interrupt {
                    self.write(device, back, SIGNAL, Until::Landed);
                    let interrupt = self.run.assembly.timing().cpu.interrupt;
                    self.script.push(Step::Wait(interrupt));
                } else {
                    self.write(device, back, SIGNAL, Until::Landed);
                    self.seen(0);
                }
                return Ok(());
            }
        }
        if let Some(pair) = pair {
            self.script.extend([Step::Wait(message), Step::Give(pair)]);
        }
        Ok(())
    }
}
