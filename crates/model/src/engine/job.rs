//! Jobs: what workloads consist of. A job runs a script, a few steps one after the other: a register
//! write, a wait, a DMA read of a descriptor, a copy, an interrupt.

use std::collections::VecDeque;

use crate::random::Distribution;
use crate::time::Time;

use super::shared::SharedUnits;
use super::{
    Admitted, Arrivals, DistributionId, Event, FlowId, GateId, MeterId, NONE, ResourceId, RouteId,
    ScriptId, StreamId, World,
};

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
    /// A unit of a shared resource works on what its policy is told, for as long as that says or as is drawn.
    Work(ResourceId, Admitted, Option<DistributionId>),
    /// A unit of a resource is taken.
    Take(ResourceId),
    /// It is given back.
    Give(ResourceId),
    /// A gate lets the job through, in its turn.
    Enter(GateId, Admitted),
    /// What it was let through for is over.
    Leave(GateId),
    /// Something is taken of limits as soon as they have a token, in the order in which jobs come.
    Spend {
        /// The limits of the function that does the job.
        meter: MeterId,
        /// Bytes that it moves.
        bytes: u64,
        /// How many operations it is.
        operations: u64,
    },
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
    /// So many scripts, of which this is the first that was added, are run side by side; it goes on when all
    /// have ended.
    All(ScriptId, u32),
    /// The time since the job began is added to this mark of its flow.
    Mark(u8),
}

impl ScriptId {
    /// It and those that were added after it, so many in all.
    pub fn following(self, count: u32) -> impl Iterator<Item = ScriptId> {
        (self.0..self.0 + count).map(ScriptId)
    }
}

/// Steps, one after the other.
pub type Script = Vec<Step>;

#[derive(Debug)]
pub(super) struct JobResource {
    units: u32,
    pub(super) free: u32,
    waiting: VecDeque<u32>,
    /// Since when so many are free, and the picoseconds for which units were taken before, all together.
    since: Time,
    taken: u64,
    /// What gives its units out, where jobs have no others than by turns of it.
    pub(super) shared: Option<Box<SharedUnits>>,
}

impl JobResource {
    /// Counts what was taken till now; what was before `from` does not count.
    pub(super) fn count(&mut self, now: Time, from: Time) {
        let span = now.since(self.since.max(from)).ps();
        self.taken += span * u64::from(self.units - self.free);
        self.since = now;
    }

    pub(super) fn is_whole(&self) -> bool {
        let shared = self.shared.as_ref().is_none_or(|shared| shared.is_whole());
        self.free == self.units && self.waiting.is_empty() && shared
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Job {
    pub(super) script: u32,
    pub(super) step: u32,
    /// Whether the step at hand has begun, and only its end is awaited.
    pub(super) begun: bool,
    pub(super) flow: u32,
    /// The job that waits for it, or [`NONE`].
    pub(super) parent: u32,
    /// Jobs that it waits for.
    pub(super) children: u32,
    pub(super) address: u64,
    pub(super) started: Time,
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
        let shared = None;
        self.resources.push(JobResource { units, free: units, waiting, since, taken, shared });
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

    /// A span for a job of a flow.
    pub(super) fn draw(&mut self, flow: u32, id: DistributionId) -> Time {
        self.distributions[id.index()].draw(&mut self.flows[flow as usize].random)
    }

    /// The share of the measured time for which units of a resource were taken.
    pub fn taken_share(&self, resource: ResourceId) -> f64 {
        let here = &self.resources[resource.index()];
        let span = self.now.since(here.since.max(self.measured_from)).ps();
        let taken = here.taken + span * u64::from(here.units - here.free);
        self.share(Time::from_ps(taken / u64::from(here.units.max(1))))
    }

    /// Bytes that the steps of a script move; where a number has no room for more, that many.
    pub(super) fn bytes_of(&self, script: ScriptId) -> u64 {
        let of = |step: &Step| match step {
            Step::Write { bytes, .. } | Step::Read { bytes, .. } => *bytes,
            Step::Copy { bytes, .. } => bytes.saturating_mul(2),
            Step::Each(script, count, _) => count.saturating_mul(self.bytes_of(*script)),
            Step::All(first, count) => {
                first.following(*count).map(|of| self.bytes_of(of)).fold(0, u64::saturating_add)
            }
            _ => 0,
        };
        self.scripts[script.index()].iter().map(of).fold(0, u64::saturating_add)
    }

    /// The steps of a flow's jobs.
    pub fn steps(&self, flow: FlowId) -> &[Step] {
        &self.scripts[self.flows[flow.index()].flow.script.index()]
    }

    /// The steps of a script.
    pub fn script(&self, script: ScriptId) -> &[Step] {
        &self.scripts[script.index()]
    }

    /// How many units a resource has.
    pub fn units(&self, resource: ResourceId) -> u32 {
        self.resources[resource.index()].units
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
                    Some(Step::UseRandom(_, distribution)) => {
                        self.draw(self.jobs[job].flow, distribution)
                    }
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

    pub(super) fn run_job(&mut self, id: u32) {
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
                let span = self.draw(flow, distribution);
                self.events.schedule(now + span, Event::Job(id));
                false
            }
            Step::UseRandom(resource, distribution) => {
                if self.take(resource, id) {
                    let span = self.draw(flow, distribution);
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
            Step::Work(resource, work, drawn) => self.work(resource, id, work, drawn),
            Step::Take(resource) => self.take(resource, id),
            Step::Give(resource) => {
                self.give(resource);
                true
            }
            Step::Enter(gate, admitted) => {
                self.enter(gate, id, admitted);
                false
            }
            Step::Leave(gate) => {
                self.leave(gate, id);
                true
            }
            Step::Spend { meter, bytes, operations } => self.spend(meter, id, [bytes, operations]),
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
            Step::Each(_, count, _) if !self.has_room(count) => false,
            Step::All(_, count) if !self.has_room(count.into()) => false,
            Step::Each(script, count, stride) => {
                self.jobs[id].children = count as u32;
                (0..count).for_each(|nth| self.child(id, script, base + nth * stride));
                count == 0
            }
            Step::All(first, count) => {
                self.jobs[id].children = count;
                first.following(count).for_each(|script| self.child(id, script, base));
                count == 0
            }
            Step::Mark(mark) => {
                self.mark(id, mark);
                true
            }
        }
    }

    /// Adds the time since the job was started to what its flow has under `mark`.
    fn mark(&mut self, id: u32, mark: u8) {
        let span = self.now.since(self.jobs[id].started);
        if self.measuring() {
            let marks = &mut self.flows[self.jobs[id].flow as usize].stats.marks;
            marks.resize(marks.len().max(usize::from(mark) + 1), Time::ZERO);
            marks[usize::from(mark)] += span;
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
                let at = now + self.draw(job.flow, think);
                return self.events.schedule(at, Event::Next(job.flow));
            }
            // Jobs that take no time must not follow each other without end.
            self.follow(job.flow, job.started == now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{JobFlow, Stuck};
    use super::*;

    fn run(world: &mut World, script: ScriptId) -> Result<(), Stuck> {
        world.add_flow(JobFlow { count: 1, ..JobFlow::new(script, Arrivals::Depth(1), 64) });
        world.run(Time::MAX, 1_000_000)
    }

    /// None of them is made where there would be too many.
    #[test]
    fn jobs_that_others_wait_for_are_refused_before_there_are_too_many() {
        for (outer, inner, fits) in [(9, 10, true), (9, 11, false), (99, 1, false), (100, 0, false)]
        {
            for listed in [false, true] {
                let mut world = World::new(1);
                world.most_jobs = 100;
                let wait = vec![Step::Wait(Time::from_ns(1))];
                let first = world.add_script(wait.clone());
                for _ in 1..inner {
                    world.add_script(wait.clone());
                }
                let step = match listed {
                    true => Step::All(first, inner),
                    false => Step::Each(first, inner.into(), 0),
                };
                let wide = world.add_script(vec![step]);
                let all = world.add_script(vec![Step::Each(wide, outer, 0)]);
                let end = run(&mut world, all);
                let refused = matches!(end, Err(Stuck::Crowd { jobs: ..=100, .. }));
                assert!(if fits { end.is_ok() } else { refused }, "{outer} of {inner}: {end:?}");
                assert!(world.jobs.items.len() <= 100);
            }
        }
    }

    #[test]
    fn numbers_of_jobs_and_bytes_beyond_all_bounds_are_refused_as_too_many() {
        let (stream, route, until) = (StreamId(0), RouteId(0), Until::Landed);
        let bytes = u64::MAX / 2;
        let mut world = World::new(1);
        world.most_jobs = 100;
        let write = Step::Write { stream, route, address: 0, bytes, until };
        let mut inner = world.add_script(vec![write; 3]);
        for _ in 0..4 {
            inner = world.add_script(vec![Step::Each(inner, 1 << 20, 0); 2]);
        }
        let (from, to) = (route, route);
        let copy = Step::Copy { stream, from, source: 0, to, target: 0, bytes, until };
        let all = world.add_script(vec![Step::All(inner, 1), Step::Each(inner, 1, 0), copy]);
        assert!(matches!(run(&mut world, all), Err(Stuck::Crowd { .. })));
    }
}
