//! Jobs: what workloads consist of. A job runs a script, a few steps one after the other: a register
//! write, a wait, a DMA read of a descriptor, a copy, an interrupt. Flows start jobs, so many at a
//! time or at so many a second, and count what comes of them.

use std::collections::VecDeque;

use crate::time::Time;

use super::stats::{BATCHES, FlowStats};
use crate::random::Distribution;

use super::{DistributionId, Event, FlowId, NONE, ResourceId, RouteId, ScriptId, StreamId, World};

/// When a step that moves bytes is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// At once: what follows goes on beside it.
    Begun,
    /// When all its packets are made: a processor's store, as far as the processor sees it.
    Issued,
    /// When it is seen at the target; for a read, when all has come.
    Landed,
}

/// A step of a script. Addresses are added to the job's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The job waits for so long; nothing else is used meanwhile.
    Wait(Time),
    /// Time passes, as long as is drawn.
    WaitRandom(DistributionId),
    /// A unit of a resource is taken for this long, when there is one.
    Use(ResourceId, Time),
    /// The same, for as long as is drawn.
    UseRandom(ResourceId, DistributionId),
    /// A unit of a resource is taken.
    Take(ResourceId),
    /// It is given back.
    Give(ResourceId),
    /// Bytes are written, in packets of the requester's MPS at most.
    Write {
        /// The queue pair or core whose requester makes the packets.
        stream: StreamId,
        /// The route to the memory or device that is written to or read from.
        route: RouteId,
        /// Bytes from the job's own address to where the write begins.
        address: u64,
        /// Bytes in all, of any number of packets.
        bytes: u64,
        /// What the job's next step waits for.
        until: Until,
    },
    /// Bytes are read, in requests of the requester's MRRS at most; over when all have come.
    Read {
        /// The queue pair or core whose requester makes the packets.
        stream: StreamId,
        /// The route to the memory or device that is written to or read from.
        route: RouteId,
        /// Bytes from the job's own address to where the read begins.
        address: u64,
        /// Bytes in all, of any number of packets.
        bytes: u64,
    },
    /// Bytes are read and, as they come, written elsewhere.
    Copy {
        /// The queue pair or core whose requester makes the packets.
        stream: StreamId,
        /// The route to what is read from; completions come back by it.
        from: RouteId,
        /// Bytes from the job's own address to where the read begins.
        source: u64,
        /// The route to what is written to.
        to: RouteId,
        /// Bytes from the job's own address to where the write begins.
        target: u64,
        /// Bytes in all, of any number of packets.
        bytes: u64,
        /// What the job's next step waits for.
        until: Until,
    },
    /// A script is run so many times, side by side; it goes on when all have ended. The addresses of
    /// each are this many bytes behind those of the one before.
    Each(ScriptId, u64, u64),
    /// The time since the job began is added to this mark of its flow.
    Mark(u8),
}

/// Steps, one after the other.
pub type Script = Vec<Step>;

/// How a flow's jobs come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrivals {
    /// So many at a time: the next comes when one ends.
    Depth(u32),
    /// One each such span.
    Every(Time),
    /// At random (Poisson), at this mean distance.
    Poisson(Time),
}

/// Where a flow's jobs find their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// The lowest address of all jobs.
    pub base: u64,
    /// From one job to the next.
    pub stride: u64,
    /// How far they go before they begin again; for random ones, within what.
    pub span: u64,
    /// Whether they are random multiples of the stride.
    pub random: bool,
}

impl Addresses {
    /// One after the other in a window of 1 GiB.
    pub fn sequential(base: u64, stride: u64) -> Addresses {
        Addresses { base, stride, span: 1 << 30, random: false }
    }
}

/// A source of jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flow {
    /// The steps of each job, shared by all of them.
    pub script: ScriptId,
    /// When a job begins: as others end, or by the clock.
    pub arrivals: Arrivals,
    /// How many there are at most.
    pub count: u64,
    /// Bytes that each counts for.
    pub bytes: u64,
    /// When the first comes.
    pub begin: Time,
    /// Where they find their bytes.
    pub addresses: Addresses,
    /// What passes between the end of a job and the beginning of the next that waited for it.
    pub think: Option<DistributionId>,
}

#[derive(Debug)]
pub(super) struct Source {
    flow: Flow,
    begun: u64,
    ended: u64,
    pub(super) stats: FlowStats,
}

#[derive(Debug)]
pub(super) struct Resource {
    units: u32,
    free: u32,
    waiting: VecDeque<u32>,
    /// Since when so many are free, and the picoseconds for which units were taken before, all together.
    since: Time,
    taken: u64,
}

impl Resource {
    /// Counts what was taken till now; what was before `from` does not count.
    fn count(&mut self, now: Time, from: Time) {
        let span = now.since(self.since.max(from)).ps();
        self.taken += span * u64::from(self.units - self.free);
        self.since = now;
    }

    pub(super) fn is_whole(&self) -> bool {
        self.free == self.units && self.waiting.is_empty()
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Job {
    script: u32,
    step: u32,
    /// Whether the step at hand has begun, and only its end is awaited.
    begun: bool,
    flow: u32,
    /// The job that waits for it, or [`NONE`].
    parent: u32,
    /// Jobs that it waits for.
    children: u32,
    address: u64,
    started: Time,
}

impl World {
    /// Adds a script, which flows and [`Step::Each`] refer to by the id that it gets.
    pub fn add_script(&mut self, script: Script) -> ScriptId {
        self.scripts.push(script);
        ScriptId((self.scripts.len() - 1) as u32)
    }

    /// Adds a resource of so many units.
    pub fn add_resource(&mut self, units: u32) -> ResourceId {
        let (since, taken, waiting) = (Time::ZERO, 0, VecDeque::new());
        self.resources.push(Resource { units, free: units, waiting, since, taken });
        ResourceId((self.resources.len() - 1) as u32)
    }

    /// Adds what spans are drawn from.
    pub fn add_distribution(&mut self, distribution: Distribution) -> DistributionId {
        self.distributions.push(distribution);
        DistributionId((self.distributions.len() - 1) as u32)
    }

    /// What spans are drawn from.
    pub fn distribution(&self, id: DistributionId) -> &Distribution {
        &self.distributions[id.index()]
    }

    fn draw(&mut self, id: DistributionId) -> Time {
        self.distributions[id.index()].draw(&mut self.random)
    }

    /// The share of the measured time for which units of a resource were taken.
    pub fn taken_share(&self, resource: ResourceId) -> f64 {
        let here = &self.resources[resource.index()];
        let span = self.now.since(here.since.max(self.measured_from)).ps();
        let taken = here.taken + span * u64::from(here.units - here.free);
        self.share(Time::from_ps(taken / u64::from(here.units.max(1))))
    }

    /// Bytes that the steps of a script move.
    fn bytes_of(&self, script: ScriptId) -> u64 {
        let of = |step: &Step| match step {
            Step::Write { bytes, .. } | Step::Read { bytes, .. } => *bytes,
            Step::Copy { bytes, .. } => 2 * bytes,
            Step::Each(script, count, _) => count * self.bytes_of(*script),
            _ => 0,
        };
        self.scripts[script.index()].iter().map(of).sum()
    }

    /// Bytes of a flow's step came where they should.
    pub(super) fn moved(&mut self, flow: u32, bytes: u64) {
        if self.now < self.measured_from {
            return;
        }
        while self.now >= self.batch_ends && self.batch + 1 < BATCHES {
            self.batch += 1;
            self.batch_ends += self.batch_length;
        }
        let stats = &mut self.flows[flow as usize].stats;
        stats.moved += bytes;
        stats.batches[self.batch] += bytes;
    }

    /// Jobs of a flow that have begun, and those that have ended, since the beginning.
    pub fn jobs_of(&self, flow: FlowId) -> (u64, u64) {
        let source = &self.flows[flow.index()];
        (source.begun, source.ended)
    }

    /// Adds a flow. Its jobs begin when the world runs.
    pub fn add_flow(&mut self, flow: Flow) -> FlowId {
        let id = self.flows.len() as u32;
        let of_job = (flow.bytes, self.bytes_of(flow.script));
        let stats = FlowStats { of_job, ..FlowStats::default() };
        self.flows.push(Source { flow, begun: 0, ended: 0, stats });
        if flow.count > 0 {
            let first = match flow.arrivals {
                Arrivals::Poisson(mean) => self.random.exponential(mean),
                Arrivals::Every(_) | Arrivals::Depth(_) => Time::ZERO,
            };
            let at = flow.begin.max(self.now) + first;
            self.events.schedule(at, Event::Arrival(id));
        }
        FlowId(id)
    }

    /// The steps of a flow's jobs.
    pub fn steps(&self, flow: FlowId) -> &[Step] {
        &self.scripts[self.flows[flow.index()].flow.script.index()]
    }

    /// The steps of a script.
    pub fn script(&self, script: ScriptId) -> &[Step] {
        &self.scripts[script.index()]
    }

    /// Where a flow's jobs find their bytes.
    pub fn addresses(&self, flow: FlowId) -> &Addresses {
        &self.flows[flow.index()].flow.addresses
    }

    /// How many units a resource has.
    pub fn units(&self, resource: ResourceId) -> u32 {
        self.resources[resource.index()].units
    }

    pub(super) fn arrival(&mut self, flow: u32) {
        let source = &self.flows[flow as usize];
        match source.flow.arrivals {
            Arrivals::Depth(depth) => {
                for _ in 0..u64::from(depth).min(source.flow.count) {
                    // Jobs that end at once have been followed by others already.
                    let source = &self.flows[flow as usize];
                    if source.begun < source.flow.count {
                        self.start(flow, false);
                    }
                }
            }
            Arrivals::Every(span) => self.arrive_and_again(flow, span),
            Arrivals::Poisson(mean) => {
                let span = self.random.exponential(mean);
                self.arrive_and_again(flow, span);
            }
        }
    }

    /// A thought has ended: the next job begins, unless others have used the flow's count up.
    pub(super) fn next_job(&mut self, flow: u32) {
        let source = &self.flows[flow as usize];
        if source.begun < source.flow.count {
            self.start(flow, false);
        }
    }

    fn arrive_and_again(&mut self, flow: u32, span: Time) {
        self.start(flow, false);
        let source = &self.flows[flow as usize];
        if source.begun < source.flow.count {
            let at = self.now + span;
            self.events.schedule(at, Event::Arrival(flow));
        }
    }

    /// Starts a flow's next job; `later`, with an event of its own.
    fn start(&mut self, flow: u32, later: bool) {
        let source = &mut self.flows[flow as usize];
        let Addresses { base, stride, span, random } = source.flow.addresses;
        let places = (span / stride.max(1)).max(1);
        let place = match random {
            true => self.random.below(places),
            false => source.begun % places,
        };
        source.begun += 1;
        let script = source.flow.script.0;
        let job = self.jobs.put(Job {
            script,
            step: 0,
            begun: false,
            flow,
            parent: NONE,
            children: 0,
            address: base + place * stride,
            started: self.now,
        });
        if later {
            self.wake_job(job);
        } else {
            self.run_job(job);
        }
    }

    /// What a job waited for has come.
    pub(super) fn go_on(&mut self, id: u32) {
        if self.jobs[id].begun {
            let step = self.next_step(id);
            let job = &mut self.jobs[id];
            job.begun = false;
            job.step += 1;
            // A unit that was used for a time is given back.
            if let Some(Step::Use(resource, _) | Step::UseRandom(resource, _)) = step {
                self.give(resource);
            }
        }
        self.run_job(id);
    }

    /// Lets a job go on with its next event, at the same time.
    pub(super) fn wake_job(&mut self, id: u32) {
        let now = self.now;
        self.events.schedule(now, Event::Job(id));
    }

    fn give(&mut self, resource: ResourceId) {
        let (now, from) = (self.now, self.measured_from);
        let here = &mut self.resources[resource.index()];
        match here.waiting.pop_front() {
            None => {
                here.count(now, from);
                here.free += 1;
            }
            // The unit goes from hand to hand.
            Some(job) => {
                let span = match self.next_step(job) {
                    Some(Step::Use(_, span)) => span,
                    Some(Step::UseRandom(_, distribution)) => self.draw(distribution),
                    _ => Time::ZERO,
                };
                self.events.schedule(now + span, Event::Job(job));
            }
        }
    }

    fn next_step(&self, id: u32) -> Option<Step> {
        let job = &self.jobs[id];
        self.scripts[job.script as usize].get(job.step as usize).copied()
    }

    fn run_job(&mut self, id: u32) {
        while let Some(step) = self.next_step(id) {
            if !self.do_step(id, step) {
                self.jobs[id].begun = true;
                return;
            }
            self.jobs[id].step += 1;
        }
        self.end(id);
    }

    /// Does a step; `false` when its end is still to come.
    fn do_step(&mut self, id: u32, step: Step) -> bool {
        let now = self.now;
        let (base, flow) = (self.jobs[id].address, self.jobs[id].flow);
        match step {
            Step::Wait(span) => {
                self.events.schedule(now + span, Event::Job(id));
                false
            }
            Step::WaitRandom(distribution) => {
                let span = self.draw(distribution);
                self.events.schedule(now + span, Event::Job(id));
                false
            }
            Step::UseRandom(resource, distribution) => {
                if self.take(resource, id) {
                    let span = self.draw(distribution);
                    self.events.schedule(now + span, Event::Job(id));
                }
                false
            }
            Step::Use(resource, span) => {
                if self.take(resource, id) {
                    self.events.schedule(now + span, Event::Job(id));
                }
                false
            }
            Step::Take(resource) => self.take(resource, id),
            Step::Give(resource) => {
                self.give(resource);
                true
            }
            Step::Write { stream, route, address, bytes, until } => {
                let waits = until != Until::Begun;
                let job = if waits { id } else { NONE };
                self.begin((stream, route), true, base + address, bytes, (flow, job, until));
                !waits
            }
            Step::Read { stream, route, address, bytes } => {
                self.begin(
                    (stream, route),
                    false,
                    base + address,
                    bytes,
                    (flow, id, Until::Landed),
                );
                false
            }
            Step::Copy { stream, from, source, to, target, bytes, until } => {
                let waits = until != Until::Begun;
                let job = if waits { id } else { NONE };
                let addresses = (base + source, base + target);
                self.begin_copy(stream, (from, to), addresses, bytes, (flow, job, until));
                !waits
            }
            Step::Each(script, count, stride) => {
                self.jobs[id].children = count as u32;
                (0..count).for_each(|nth| self.child(id, script, base + nth * stride));
                count == 0
            }
            Step::Mark(mark) => {
                let span = now.since(self.jobs[id].started);
                if self.measuring() {
                    let marks = &mut self.flows[flow as usize].stats.marks;
                    marks.resize(marks.len().max(usize::from(mark) + 1), Time::ZERO);
                    marks[usize::from(mark)] += span;
                }
                true
            }
        }
    }

    fn take(&mut self, resource: ResourceId, id: u32) -> bool {
        let (now, from) = (self.now, self.measured_from);
        let here = &mut self.resources[resource.index()];
        if here.free == 0 {
            here.waiting.push_back(id);
            return false;
        }
        here.count(now, from);
        here.free -= 1;
        true
    }

    fn child(&mut self, parent: u32, script: ScriptId, address: u64) {
        let flow = self.jobs[parent].flow;
        let started = self.now;
        let job = Job {
            script: script.0,
            step: 0,
            begun: false,
            flow,
            parent,
            children: 0,
            address,
            started,
        };
        let id = self.jobs.put(job);
        // From an event of its own: a child that ends at once must not find its parent half done.
        self.wake_job(id);
    }

    fn end(&mut self, id: u32) {
        let job = self.jobs[id];
        self.jobs.remove(id);
        if job.parent != NONE {
            let parent = &mut self.jobs[job.parent];
            parent.children -= 1;
            if parent.children == 0 {
                self.go_on(job.parent);
            }
            return;
        }
        let now = self.now;
        let measuring = self.measuring();
        let source = &mut self.flows[job.flow as usize];
        source.ended += 1;
        if measuring {
            let stats = &mut source.stats;
            stats.jobs += 1;
            stats.latency.add(now.since(job.started));
            stats.ended = now;
        }
        if matches!(source.flow.arrivals, Arrivals::Depth(_)) && source.begun < source.flow.count {
            if let Some(think) = source.flow.think {
                let at = now + self.draw(think);
                return self.events.schedule(at, Event::Next(job.flow));
            }
            // Jobs that take no time must not follow each other without end.
            self.start(job.flow, job.started == now);
        }
    }
}
