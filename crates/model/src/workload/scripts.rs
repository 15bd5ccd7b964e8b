//! From a workload to the engine's scripts, and from what that counted to results.

use std::collections::BTreeMap;

use rackbus_fabric::rack::Rack;
use rackbus_fabric::text::Problem;

use super::results::{FlowResult, HostProfile, Latency, LinkResult, Results, tenants};
use super::{FlowKind, FlowSpec, QueuesIn, Workload, limits};
use crate::assembly::{Assembly, AssemblyError, End, Source};
use crate::engine::{
    Addresses, Arrivals, Batches, Class, DistributionId, Flow, FlowId, Histogram, Passage,
    ResourceId, Script, Step, Stuck, Until, WayId, confidence,
};
use crate::random::Distribution;
use crate::time::Time;
use crate::timing::Timing;

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
    /// By device: the jobs that it works on at a time.
    pub(super) media: BTreeMap<End, ResourceId>,
    /// By device: the word of what it is.
    kinds: BTreeMap<String, &'static str>,
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
        let mut run = Run {
            assembly,
            workload: workload.clone(),
            flows: Vec::new(),
            media: BTreeMap::new(),
            kinds: rack
                .functions()
                .map(|(name, device)| (name.to_string(), device.kind.word()))
                .collect(),
        };
        run.add_media()?;
        for (nth, spec) in workload.flows.iter().enumerate() {
            let flow = run.add(nth as u64, spec)?;
            run.flows.push(flow);
        }
        run.assembly.world.measure(workload.warmup, workload.duration);
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

    /// What devices work on at a time: as many jobs as the flow says that says most.
    fn add_media(&mut self) -> Result<(), Failed> {
        let mut most: BTreeMap<End, u32> = BTreeMap::new();
        for spec in &self.workload.flows {
            let FlowKind::Ring { device, units, drive, .. } = &spec.kind else { continue };
            if let Some(word) = self.kinds.get(device).filter(|word| *drive && **word != "nvme") {
                let what = format!("`{device}` is a {word}");
                let span = spec.places.ends.get(1).cloned().unwrap_or(0..0);
                let allowed =
                    "flows of kind nvme-read and nvme-write are for devices of kind nvme".into();
                return Err(Failed::Wrong(Problem { span, what, allowed }));
            }
            if let Ok(end) = self.assembly.end(device) {
                let units = most.get(&end).map_or(*units, |other| *units.max(other));
                most.insert(end, units);
            }
        }
        for (end, units) in most {
            self.media.insert(end, self.assembly.world.add_resource(units));
        }
        Ok(())
    }

    /// What a distribution is drawn from, where it is one.
    fn distribution(&mut self, of: &Distribution) -> Option<DistributionId> {
        let random = !matches!(of, Distribution::Fixed(_));
        random.then(|| self.assembly.world.add_distribution(of.clone()))
    }

    fn add(&mut self, nth: u64, spec: &FlowSpec) -> Result<(Vec<FlowId>, Vec<WayId>), Failed> {
        let ends = self.ends(spec)?;
        let medium = ends.get(1).and_then(|end| self.media.get(end)).copied();
        let think = match &spec.think {
            Distribution::Fixed(Time::ZERO) => None,
            think => Some(self.assembly.world.add_distribution(think.clone())),
        };
        let mut found = (Vec::new(), Vec::new());
        for queue in 0..u64::from(spec.queues) {
            let mut job =
                Writer { run: self, spec, ends: &ends, script: Vec::new(), ways: Vec::new() };
            job.write_script(medium)?;
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
                think,
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
            // Memory is behind a hop that is as wide as it: its own load is what there is to see.
            let [there, back] = match world.lane_parameters(lane).wire {
                Some(_) => [world.utilization(lane), world.utilization(lane.back())],
                None => world.served_share(world.ends_of(lane).1),
            };
            LinkResult {
                ends: [name(a), name(b)],
                link: link.to_string(),
                there,
                back,
                starved: world.lane(lane).starved + world.lane(lane.back()).starved,
            }
        });
        let links = links.collect();
        let hosts = self.assembly.topology().hosts().map(|(_, host)| HostProfile {
            host: host.name.clone(),
            profile: self.assembly.timing().of_host(&host.name).profile.clone(),
        });
        let hosts = hosts.collect();
        Results { hosts, seconds, events: world.happened(), tenants: tenants(&flows), flows, links }
    }

    fn flow(&self, spec: &FlowSpec, queues: &[FlowId], ways: &[WayId], seconds: f64) -> FlowResult {
        let world = &self.assembly.world;
        let mut latency = Histogram::default();
        let (mut jobs, mut bytes) = (0, 0);
        let mut batches = Batches::default();
        for queue in queues {
            let stats = world.flow(*queue);
            jobs += stats.jobs;
            bytes += stats.bytes();
            latency.merge(&stats.latency);
            batches.iter_mut().zip(stats.batches).for_each(|(sum, more)| *sum += more);
        }
        let lanes = ways.iter().map(|way| world.lanes_of(*way));
        let rate = bytes as f64 / seconds;
        let jobs_per_second = rate / spec.size as f64;
        // What has ended by itself is exact.
        let ended = queues.iter().all(|queue| world.jobs_of(*queue) == (spec.count, spec.count));
        let batched = !ended && self.workload.duration != Time::MAX;
        let confidence = batched.then(|| confidence(&batches)).filter(|width| width.is_finite());
        FlowResult {
            name: spec.name.clone(),
            tenant: spec.tenant.clone(),
            ends: spec.kind.ends().into_iter().map(str::to_owned).collect(),
            jobs,
            bytes_per_second: rate,
            jobs_per_second,
            confidence,
            doubt: if batched { doubt(spec, jobs, confidence, jobs_per_second) } else { None },
            latency_ns: Latency::of(&latency),
            bottleneck: self.bottleneck(spec, ways, jobs_per_second),
            hops: lanes.map(|lanes| lanes.len().saturating_sub(1)).max().unwrap_or(0),
            distribution: latency.cumulative(),
        }
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

/// From this share on a rate is not known well enough.
const WIDE: f64 = 0.05;

/// What the measured time is too short to tell of a flow.
fn doubt(spec: &FlowSpec, jobs: u64, confidence: Option<f64>, rate: f64) -> Option<String> {
    let longer = "make `duration` longer";
    let asks = limits::asked(spec);
    let asked = asks.filter(|asked| rate < 0.97 * asked);
    // What gets what it asks for is known, however few its jobs.
    let met = |width| asks.is_some_and(|asked| (rate / asked - 1.0_f64).abs() < width / 2.0);
    match confidence {
        None => Some(format!("nothing moved in the measured time; {longer}")),
        Some(width) if width > WIDE && !met(width) => {
            Some(format!("the rate is known to {:.0} % only; {longer}", width * 100.0))
        }
        _ if jobs == 0 => Some(format!("no job ended, so latencies are not known; {longer}")),
        _ if asked.is_some() => {
            Some("more is asked for than gets through: latencies grow with `duration`".to_owned())
        }
        _ => None,
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
            let issue = self.run.assembly.host_of(self.ends[nth]).cpu.issue;
            self.script.push(Step::Wait(issue));
        }
    }

    /// What a target takes to see what has landed: a processor's poll.
    fn seen(&mut self, nth: usize) {
        if let End::Host(_) = self.ends[nth] {
            let poll = self.run.assembly.host_of(self.ends[nth]).cpu.poll;
            self.script.push(Step::Wait(poll));
        }
    }

    fn write_script(&mut self, medium: Option<ResourceId>) -> Result<(), Failed> {
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
                self.serve(None, service);
                self.issue(1);
                self.write(other, back, size, Until::Landed);
                self.seen(0);
            }
            FlowKind::Ring { .. } => return self.write_ring(medium),
        }
        if let Some(pair) = pair {
            self.script.extend([Step::Wait(message), Step::Give(pair)]);
        }
        Ok(())
    }

    /// Time that passes for a service, on a unit of a resource where there is one.
    fn serve(&mut self, unit: Option<ResourceId>, service: &Distribution) {
        let step = match (unit, self.run.distribution(service)) {
            (None, None) => Step::Wait(service.mean()),
            (None, Some(drawn)) => Step::WaitRandom(drawn),
            (Some(unit), None) => Step::Use(unit, service.mean()),
            (Some(unit), Some(drawn)) => Step::UseRandom(unit, drawn),
        };
        self.script.push(step);
    }

    /// The host in whose memory a device's queues lie, when that is not its driver's.
    fn lender(&self, queues_in: QueuesIn) -> Option<End> {
        let End::Device(id) = self.ends[1] else { return None };
        let lender = End::Host(self.run.assembly.topology().component(id).host?);
        (queues_in == QueuesIn::Lender && lender != self.ends[0]).then_some(lender)
    }

    fn way_to(&mut self, from: usize, to: End) -> Result<WayId, Failed> {
        let way = self.run.assembly.way(self.ends[from], to);
        let way = way.map_err(|error| misfit(self.spec, from, &error))?;
        self.ways.push(way);
        Ok(way)
    }

    fn write_ring(&mut self, medium: Option<ResourceId>) -> Result<(), Failed> {
        let spec = self.spec;
        let FlowKind::Ring { descriptor, input, output, service, interrupt, queues_in, .. } =
            &spec.kind
        else {
            return Ok(());
        };
        let (driver, device) = (self.source(0)?, self.source(1)?);
        let (there, back) = (self.way(0, 1)?, self.way(1, 0)?);
        self.issue(0);
        let mut queues = back;
        if let Some(lender) = self.lender(*queues_in) {
            // The driver writes the descriptor where the queue is; the doorbell goes behind it.
            let way = self.way_to(0, lender)?;
            self.write(driver, way, *descriptor, Until::Begun);
            queues = self.way_to(1, lender)?;
        }
        self.write(driver, there, SIGNAL, Until::Landed);
        self.read(device, queues, *descriptor);
        if *input > 0 {
            self.read(device, back, *input);
        }
        self.serve(medium, service);
        if *output > 0 {
            self.write(device, back, *output, Until::Begun);
        }
        self.write(device, back, COMPLETION, Until::Begun);
        self.write(device, back, SIGNAL, Until::Landed);
        match interrupt {
            true => {
                let interrupt = self.run.assembly.host_of(self.ends[0]).cpu.interrupt;
                self.script.push(Step::Wait(interrupt));
            }
            false => self.seen(0),
        }
        Ok(())
    }
}
