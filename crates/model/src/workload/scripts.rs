//! From a workload to the engine's scripts, and from what that counted to results.

use std::collections::{BTreeMap, BTreeSet};

use rackbus_fabric::rack::Rack;
use rackbus_fabric::text::Problem;
use rackbus_qos::MessageRoundRobin;

use super::doubts::{doubt, over};
use super::meters::FunctionMeters;
use super::results::{FlowResult, HostProfile, Latency, LinkResult, Results, Slice, tenants};
use super::shaping::ShapedDevice;
use super::untried::Untried;
use super::writer::{Writer, misfit};
use super::{FlowSpec, Workload};
use crate::assembly::{Assembly, AssemblyError, End};
use crate::engine::{
    Addresses, Arrivals, Batches, Bursts, Decides, DirectionId, DistributionId, FlowId, GateId,
    Histogram, JobFlow, MeterId, ResourceId, RouteId, Stuck, confidence,
};
use crate::random::Distribution;
use crate::time::Time;
use crate::timing::Timing;

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
    /// The rack, with the flows' scripts in its simulation.
    pub assembly: Assembly,
    workload: Workload,
    /// By flow: its number in the workload, its queues, and the routes that its jobs use.
    flows: Vec<(usize, Vec<FlowId>, Vec<RouteId>)>,
    /// By device: the jobs that it works on at a time.
    pub(super) media: BTreeMap<End, ResourceId>,
    /// By function whose device's engines are shared in turns: its number among those.
    pub(super) engine_tenants: BTreeMap<End, u32>,
    /// By name: units that steps use.
    pub(super) units: BTreeMap<String, ResourceId>,
    /// By name: gates that steps go through.
    gates: BTreeMap<String, GateId>,
    /// By function whose jobs a medium works on: the function, or its device where all functions of that have one medium.
    pub(super) devices: BTreeMap<String, String>,
    /// By function that the rack file bounds: what counts what it does.
    pub(super) meters: BTreeMap<End, FunctionMeters>,
    /// By meter: the function that it is of.
    pub(super) metered_ends: BTreeMap<MeterId, End>,
    /// By name: the number of a tenant, from 1 on in the order of names.
    pub(super) tenants: BTreeMap<String, u32>,
    /// By flow of the workload: how many queues those before it have.
    queues_before: Vec<u32>,
    /// By device: how it shapes.
    pub(super) shaped: BTreeMap<End, ShapedDevice>,
}

/// The names of flows that do not fit the rack: their ends are not there, or no way leads from one to the other.
///
/// # Errors
/// [`Failed`] when the rack cannot be, or what devices do does not fit it.
pub fn stranded(rack: &Rack, timing: &Timing, workload: &Workload) -> Result<Vec<String>, Failed> {
    let mut run = Run::part(rack, timing, workload, &[])?;
    let mut found = Vec::new();
    for (nth, spec) in workload.flows.iter().enumerate() {
        if let Err(Failed::Wrong(_)) = run.add(nth as u64, spec) {
            found.push(spec.name.clone());
        }
    }
    Ok(found)
}

/// As [`run`](super::run), watched in `slices` equal parts of the measured time.
///
/// # Errors
/// [`Failed`].
pub fn watch(
    rack: &Rack,
    timing: &Timing,
    workload: &Workload,
    most: u64,
    slices: usize,
) -> Result<(Results, Vec<Slice>), Failed> {
    let mut run = Run::new(rack, timing, workload)?;
    let Workload { warmup, duration, .. } = *workload;
    let mut found: Vec<Slice> = Vec::new();
    let mut before = run.counts();
    for nth in 1..=slices as u64 {
        let until = match nth == slices as u64 {
            true => duration,
            false => warmup + duration.since(warmup) / slices as u64 * nth,
        };
        let left = most.saturating_sub(run.assembly.world.happened());
        run.assembly.world.run(until, left).map_err(|stuck| match stuck {
            // Of all slices.
            Stuck::TooLong { .. } => Stuck::TooLong { events: run.assembly.world.happened() },
            other => other,
        })?;
        let now = run.counts();
        let since = found.last().map_or(warmup, |slice| slice.until);
        let seconds = until.since(since).seconds();
        // What a trace's flow counts may become a job's descriptors less, as another job begins.
        let per_second = |(now, before): (f64, f64)| (now - before).max(0.0) / seconds;
        let loads = now.0.iter().zip(&before.0);
        let loads = loads.map(|(now, before)| [0, 1].map(|of| per_second((now[of], before[of]))));
        let rates = now.1.iter().zip(&before.1).map(|(now, before)| per_second((*now, *before)));
        found.push(Slice { until, loads: loads.collect(), rates: rates.collect() });
        before = now;
    }
    Ok((run.results(), found))
}

impl Run {
    /// Puts `rack` together and `workload` into it.
    ///
    /// # Errors
    /// [`Failed`] when they do not fit.
    pub fn new(rack: &Rack, timing: &Timing, workload: &Workload) -> Result<Run, Failed> {
        let all: Vec<usize> = (0..workload.flows.len()).collect();
        Run::part(rack, timing, workload, &all)
    }

    /// The same with some of the workload's flows only, by number in their order, which are what they are among all.
    pub(super) fn part(
        rack: &Rack,
        timing: &Timing,
        workload: &Workload,
        numbers: &[usize],
    ) -> Result<Run, Failed> {
        let assembly = Assembly::new(rack, timing, workload.seed)?;
        let tenants: BTreeSet<&str> =
            workload.flows.iter().filter_map(|flow| flow.tenant.as_deref()).collect();
        let queues_before = workload.flows.iter().scan(0_u32, |before, flow| {
            Some(std::mem::replace(before, before.wrapping_add(flow.queues)))
        });
        let mut workload_here = workload.clone();
        workload_here.notes.extend(super::ways::notes(rack));
        let mut run = Run {
            assembly,
            workload: workload_here,
            flows: Vec::new(),
            media: BTreeMap::new(),
            engine_tenants: BTreeMap::new(),
            units: BTreeMap::new(),
            gates: BTreeMap::new(),
            devices: BTreeMap::new(),
            meters: BTreeMap::new(),
            metered_ends: BTreeMap::new(),
            tenants: tenants.into_iter().map(str::to_owned).zip(1..).collect(),
            queues_before: queues_before.collect(),
            shaped: BTreeMap::new(),
        };
        run.check_levels(rack)?;
        run.add_media(rack)?;
        run.add_meters(rack)?;
        run.add_shaping()?;
        for nth in numbers {
            let (queues, routes) = run.add(*nth as u64, &workload.flows[*nth])?;
            run.flows.push((*nth, queues, routes));
        }
        run.use_up_meters();
        run.set_shares();
        run.assembly.world.measure(workload.warmup, workload.duration);
        Ok(run)
    }

    /// The workload's flows: their queues, and the routes that their jobs use.
    pub fn flows(&self) -> impl Iterator<Item = (&FlowSpec, &[FlowId], &[RouteId])> {
        let flows = self.flows.iter();
        flows.map(|(nth, queues, routes)| (&self.workload.flows[*nth], &queues[..], &routes[..]))
    }

    /// What moves, with the flows that are no part of this.
    pub(crate) fn workload(&self) -> &Workload {
        &self.workload
    }

    /// Tells a sentence beside what comes of the workload.
    pub(super) fn tell(&mut self, sentence: String) {
        self.workload.notes.push(sentence);
    }

    /// Lets what has not begun last so long, of which the last three quarters are measured.
    pub(super) fn last(&mut self, duration: Time) {
        (self.workload.duration, self.workload.warmup) = (duration, duration / 4);
        self.assembly.world.measure(duration / 4, duration);
    }

    /// Simulates up to the workload's duration, in at most `most` events.
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

    /// The units of that name.
    pub(super) fn unit(&mut self, name: &str) -> ResourceId {
        if let Some(unit) = self.units.get(name) {
            return *unit;
        }
        let count = self.workload.units.get(name).copied().unwrap_or(1);
        let unit = self.assembly.world.add_resource(count);
        self.units.insert(name.to_owned(), unit);
        unit
    }

    /// The gate of that name; one that nothing was said of takes turns among queues, a message at a time.
    pub(super) fn gate(&mut self, name: &str) -> GateId {
        if let Some(gate) = self.gates.get(name) {
            return *gate;
        }
        let gate = self.assembly.world.add_gate(1, Box::new(MessageRoundRobin::default()));
        self.gates.insert(name.to_owned(), gate);
        gate
    }

    /// Who decides at the gate of that name, and how many turns are under way there at a time.
    pub fn set_policy(&mut self, gate: &str, units: usize, policy: Box<dyn Decides>) {
        let gate = self.gate(gate);
        self.assembly.world.set_policy(gate, units, policy);
    }

    /// What a distribution is drawn from, where it is one.
    pub(super) fn distribution(&mut self, of: &Distribution) -> Option<DistributionId> {
        let random = !matches!(of, Distribution::Fixed(_));
        random.then(|| self.assembly.world.add_distribution(of.clone()))
    }

    fn add(&mut self, nth: u64, spec: &FlowSpec) -> Result<(Vec<FlowId>, Vec<RouteId>), Failed> {
        let ends = self.ends(spec)?;
        let medium = ends.get(1).and_then(|end| self.media.get(end)).copied();
        let think = match &spec.think {
            Distribution::Fixed(Time::ZERO) => None,
            think => Some(self.assembly.world.add_distribution(think.clone())),
        };
        let mut found = (Vec::new(), Vec::new());
        let shaping = self.shaping_device(spec, &ends)?;
        let tenant = self.tenant(spec.tenant.as_deref());
        let before = self.queues_before[nth as usize];
        let bursts = spec.bursts.as_ref().map(|[on, off]| {
            let world = &mut self.assembly.world;
            let [on, off] = [on, off].map(|span| world.add_distribution(span.clone()));
            Bursts { on, off }
        });
        for queue in 0..spec.queues {
            let mut job = Writer {
                run: self,
                sources: BTreeMap::new(),
                spec,
                ends: &ends,
                script: Vec::new(),
                routes: Vec::new(),
                shaping,
                // Queues that are told apart at a device are far fewer than that.
                queue: before.wrapping_add(queue) as u16,
            };
            let trace = job.write_trace(medium, queue)?;
            job.write_script(medium)?;
            let (script, routes) = (job.script, job.routes);
            let script = self.assembly.world.add_script(script);
            let largest = trace.iter().map(|job| job.bytes).fold(spec.size, u64::max);
            let stride = largest.next_multiple_of(64);
            let base = (nth << 48) + u64::from(queue) * APART;
            let addresses =
                Addresses { base, stride, span: spec.span.max(stride), random: spec.random };
            let count = match spec.trace {
                Some(_) => spec.count.min(trace.len() as u64),
                None => spec.count,
            };
            found.0.push(self.assembly.world.add_flow(JobFlow {
                script,
                arrivals: spec.arrivals,
                count,
                bytes: spec.size,
                begin: spec.begin,
                end: spec.end,
                addresses,
                think,
                bursts,
                trace,
                sequence: Some((nth << 16) + u64::from(queue)),
                tenant,
            }));
            found.1 = routes;
        }
        Ok(found)
    }

    /// Since measuring began: for how many seconds each link was sending, there and back, and the bytes of
    /// each flow.
    fn counts(&self) -> (Vec<[f64; 2]>, Vec<f64>) {
        let world = &self.assembly.world;
        let measured = world.now().since(self.workload.warmup).seconds();
        let links =
            self.assembly.links().map(|(.., there)| self.load(there).map(|of| of * measured));
        let bytes =
            |queues: &[FlowId]| queues.iter().map(|queue| world.flow(*queue).bytes()).sum::<u64>();
        let flows = self.flows.iter().map(|(_, queues, _)| bytes(queues) as f64);
        (links.collect(), flows.collect())
    }

    /// The shares of the measured time for which a link was sending, there and back.
    fn load(&self, there: DirectionId) -> [f64; 2] {
        let world = &self.assembly.world;
        // Memory is behind a hop that is as wide as it: its own load is what there is to see.
        match world.direction_parameters(there).wire {
            Some(_) => [world.utilization(there), world.utilization(there.back())],
            None => world.served_share(world.ends_of(there).1),
        }
    }

    /// What the hosts are taken to be, in the order of the rack file.
    pub fn hosts(&self) -> Vec<HostProfile> {
        let all = self.assembly.topology().hosts().map(|(_, host)| HostProfile {
            host: host.name.clone(),
            profile: self.assembly.timing().of_host(&host.name).profile.clone(),
        });
        all.collect()
    }

    /// What has come of it.
    pub fn results(&self) -> Results {
        let world = &self.assembly.world;
        let seconds = world.now().since(self.workload.warmup).seconds();
        let flows: Vec<FlowResult> = self
            .flows()
            .map(|(spec, queues, routes)| self.flow(spec, queues, routes, seconds))
            .collect();
        let links = self.assembly.links().map(|(a, b, link, direction)| {
            let name = |id| self.assembly.topology().component(id).name.clone();
            let [there, back] = self.load(direction);
            LinkResult {
                ends: [name(a), name(b)],
                link: link.to_string(),
                there,
                back,
                starved: world.direction(direction).starved
                    + world.direction(direction.back()).starved,
            }
        });
        let links = links.collect();
        Results {
            hosts: self.hosts(),
            seconds,
            events: world.happened(),
            tenants: tenants(&flows),
            flows,
            links,
            notes: self.workload.notes.clone(),
            unvalidated: self.untried_as_loaded().sentences(),
        }
    }

    fn flow(
        &self,
        spec: &FlowSpec,
        queues: &[FlowId],
        routes: &[RouteId],
        seconds: f64,
    ) -> FlowResult {
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
        let directions = routes.iter().map(|route| world.directions_of(*route));
        let seconds = self.measured(spec, queues).unwrap_or(seconds);
        // A flow of which nothing is measured may be there for no time.
        let rate = if bytes == 0 { 0.0 } else { bytes as f64 / seconds };
        // Of a trace jobs are of several sizes, and of none where nothing moves.
        let counted = spec.trace.is_some() || spec.size == 0;
        let jobs_per_second = match (counted, jobs) {
            (false, _) => rate / spec.size as f64,
            (true, 0) => 0.0,
            (true, jobs) => jobs as f64 / seconds,
        };
        // What has ended by itself is exact.
        let ended = queues.iter().all(|queue| world.is_over(*queue));
        let asked = self.asked(spec, queues, seconds);
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
            doubt: self.unplayed(spec).or_else(|| over(ended, jobs)).or_else(|| {
                let random = matches!(spec.arrivals, Arrivals::Poisson(_));
                let vary = latency.least() < latency.greatest();
                batched
                    .then(|| doubt((jobs, random, vary), confidence, (jobs_per_second, asked)))
                    .flatten()
            }),
            latency_ns: Latency::of(&latency),
            bottleneck: self.bottleneck(spec, (queues, routes), (jobs_per_second, asked)),
            hops: directions
                .map(|directions| directions.len().saturating_sub(1))
                .max()
                .unwrap_or(0),
            distribution: latency.cumulative(),
        }
    }

    /// What was held against no measurement, by the loads that were simulated.
    pub(super) fn untried_as_loaded(&self) -> Untried {
        self.untried(&|direction| self.assembly.world.utilization(direction))
    }

    /// For how many seconds a flow was measured that is not there all the time.
    fn measured(&self, spec: &FlowSpec, queues: &[FlowId]) -> Option<f64> {
        if spec.begin <= self.workload.warmup && spec.end >= self.workload.duration {
            return None;
        }
        let world = &self.assembly.world;
        // Its last jobs may end after its end, and bytes come after the jobs that did not wait for them.
        let last = |queue: &FlowId| match world.is_over(*queue) {
            true => world.flow(*queue).ended.max(world.moved_at(*queue)),
            false => world.now(),
        };
        let last = queues.iter().map(last).max().unwrap_or_default();
        let until = spec.end.max(last).min(world.now());
        Some(until.since(spec.begin.max(self.workload.warmup)).seconds())
    }
}
