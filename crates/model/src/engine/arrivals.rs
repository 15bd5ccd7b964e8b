//! Flows: when jobs come, one after another or by a clock, in bursts or as a trace has them, from when till
//! when, and where they find their bytes.

use crate::random::RandomSequence;
use crate::time::Time;

use super::job::Job;
use super::stats::{BATCHES, FlowStats};
use super::{DistributionId, Event, FlowId, NONE, ScriptId, World};

/// How a flow's jobs come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrivals {
    /// So many at a time: the next comes when one ends.
    Depth(u32),
    /// One each such span.
    Every(Time),
    /// At random (Poisson), at this mean distance.
    Poisson(Time),
    /// At the times of the flow's trace, counted from the flow's beginning.
    Traced,
}

/// A job of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TracedJob {
    /// When it comes after the flow's beginning; no job of a trace comes before the one listed before it.
    pub at: Time,
    /// The script that the job runs.
    pub script: ScriptId,
    /// Bytes that it counts for.
    pub bytes: u64,
}

/// Jobs come in bursts: only while a flow is on. The first time that it is on begins with the flow; what
/// would come in between comes when it is on again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bursts {
    /// How long it is on.
    pub on: DistributionId,
    /// How long it is off after that.
    pub off: DistributionId,
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobFlow {
    /// The steps of each job that `trace` does not tell, shared by all of them.
    pub script: ScriptId,
    /// When a job begins: as others end, or by the clock.
    pub arrivals: Arrivals,
    /// How many there are at most.
    pub count: u64,
    /// Bytes that each counts for.
    pub bytes: u64,
    /// When the first comes.
    pub begin: Time,
    /// From when on no job begins; those that have begun continue. [`Time::MAX`] for none.
    pub end: Time,
    /// Where they find their bytes.
    pub addresses: Addresses,
    /// What passes between the end of a job and the beginning of the next that waited for it.
    pub think: Option<DistributionId>,
    /// When its jobs pause; `None` when they never do.
    pub bursts: Option<Bursts>,
    /// Its jobs one by one, where they differ; `count` is no more than their number.
    pub trace: Vec<TracedJob>,
    /// Which of the seed's sequences of random numbers is its own; `None` for that of its number in this world.
    /// So it draws the same whatever else is there.
    pub sequence: Option<u64>,
    /// Whose it is, for parts that shape by tenant.
    pub tenant: u32,
}

#[derive(Debug)]
pub(super) struct JobSource {
    pub(super) flow: JobFlow,
    pub(super) random: RandomSequence,
    pub(super) begun: u64,
    pub(super) ended: u64,
    /// From when and till when it is on, of flows whose jobs come in bursts.
    on: (Time, Time),
    /// From when on what it moves counts, when the batch that it is in ends, and how long each is.
    pub(super) measured_from: Time,
    pub(super) batch: usize,
    pub(super) batch_ends: Time,
    pub(super) batch_length: Time,
    /// When bytes came last.
    moved_at: Time,
    pub(super) stats: FlowStats,
}

impl JobSource {
    /// Whether another job may begin at `at`.
    fn has_more(&self, at: Time) -> bool {
        self.begun < self.flow.count && at < self.flow.end
    }

    /// Counts what moves between `from` and `until`, as far as the flow is there then, by batches.
    pub(super) fn measure(&mut self, from: Time, until: Time) {
        self.measured_from = from.max(self.flow.begin);
        let until = until.min(self.flow.end);
        self.batch_length = until.since(self.measured_from) / BATCHES as u64;
        self.batch_ends = self.measured_from + self.batch_length;
    }
}

impl JobFlow {
    /// Jobs of one script without end, one after the other in a window of 1 GiB.
    pub fn new(script: ScriptId, arrivals: Arrivals, bytes: u64) -> JobFlow {
        JobFlow {
            script,
            arrivals,
            count: u64::MAX,
            bytes,
            begin: Time::ZERO,
            end: Time::MAX,
            addresses: Addresses::sequential(0, bytes),
            think: None,
            bursts: None,
            trace: Vec::new(),
            sequence: None,
            tenant: 0,
        }
    }
}

impl World {
    /// Bytes of a flow's step came where they should.
    pub(super) fn moved(&mut self, flow: u32, bytes: u64) {
        let now = self.now;
        let source = &mut self.flows[flow as usize];
        if now < source.measured_from {
            return;
        }
        source.moved_at = now;
        source.stats.moved += bytes;
        // Batches are as long as each other: what comes behind the last is in none.
        if now >= source.flow.end {
            return;
        }
        while now >= source.batch_ends && source.batch + 1 < BATCHES {
            source.batch += 1;
            source.batch_ends += source.batch_length;
        }
        source.stats.batches[source.batch] += bytes;
    }

    /// When bytes of a flow came last in the measured time; zero where none did.
    pub fn moved_at(&self, flow: FlowId) -> Time {
        self.flows[flow.index()].moved_at
    }

    /// Whether a flow has ended by itself: no job of it is under way, and none will begin.
    pub fn is_over(&self, flow: FlowId) -> bool {
        let source = &self.flows[flow.index()];
        source.begun == source.ended && !source.has_more(self.now)
    }

    /// Adds a flow. Its jobs begin when the world runs.
    pub fn add_flow(&mut self, flow: JobFlow) -> FlowId {
        let id = self.flows.len() as u32;
        let of_job = match &flow.trace[..] {
            [] => (flow.bytes, self.bytes_of(flow.script)),
            _ => (0, 0),
        };
        let stats = FlowStats { of_job, ..FlowStats::default() };
        let mut random = RandomSequence::of(self.seed, flow.sequence.unwrap_or(id.into()));
        let first = match flow.arrivals {
            Arrivals::Poisson(mean) => random.exponential(mean),
            Arrivals::Traced => flow.trace.first().map_or(Time::ZERO, |job| job.at),
            Arrivals::Every(_) | Arrivals::Depth(_) => Time::ZERO,
        };
        let begin = flow.begin.max(self.now);
        let on = match flow.bursts {
            Some(bursts) => {
                (begin, begin + self.distributions[bursts.on.index()].draw(&mut random))
            }
            None => (begin, Time::MAX),
        };
        let source = JobSource {
            begun: 0,
            ended: 0,
            on,
            measured_from: self.measured_from.max(flow.begin),
            batch: 0,
            batch_ends: Time::MAX,
            batch_length: Time::MAX,
            moved_at: Time::ZERO,
            stats,
            random,
            flow,
        };
        let has_jobs = source.flow.count > 0;
        self.flows.push(source);
        if has_jobs {
            let at = self.turned_on(id, begin + first);
            self.events.schedule(at, Event::Arrival(id));
        }
        FlowId(id)
    }

    /// When a job comes that would come at `at`, of a flow whose jobs may come in bursts.
    fn turned_on(&mut self, flow: u32, at: Time) -> Time {
        let source = &self.flows[flow as usize];
        let (Some(bursts), (mut from, mut until)) = (source.flow.bursts, source.on) else {
            return at;
        };
        while at >= until {
            from = until + self.draw(flow, bursts.off);
            until = from + self.draw(flow, bursts.on).max(Time::from_ps(1));
        }
        self.flows[flow as usize].on = (from, until);
        at.max(from)
    }

    /// Where a flow's jobs find their bytes.
    pub fn addresses(&self, flow: FlowId) -> &Addresses {
        &self.flows[flow.index()].flow.addresses
    }

    pub(super) fn arrival(&mut self, flow: u32) {
        let source = &self.flows[flow as usize];
        if !source.has_more(self.now) {
            return;
        }
        match source.flow.arrivals {
            Arrivals::Depth(depth) => {
                for _ in 0..u64::from(depth).min(source.flow.count) {
                    // Jobs that end at once have been followed by others already.
                    if self.flows[flow as usize].has_more(self.now) {
                        self.start(flow, false);
                    }
                }
            }
            Arrivals::Every(span) => self.arrive_and_again(flow, self.now + span),
            Arrivals::Poisson(mean) => {
                let span = self.flows[flow as usize].random.exponential(mean);
                self.arrive_and_again(flow, self.now + span);
            }
            Arrivals::Traced => {
                let next = source.flow.trace.get(source.begun as usize + 1);
                let at = next.map_or(Time::MAX, |job| source.flow.begin + job.at);
                self.arrive_and_again(flow, at);
            }
        }
    }

    /// A thought, or a pause between bursts, has ended: the next job begins, unless others have used the
    /// flow's count up.
    pub(super) fn next_job(&mut self, flow: u32) {
        self.follow(flow, false);
    }

    /// Begins the job that follows one that ended, now or when the flow is on again.
    pub(super) fn follow(&mut self, flow: u32, later: bool) {
        let at = self.turned_on(flow, self.now);
        if !self.flows[flow as usize].has_more(at) {
            return;
        }
        if at > self.now {
            self.events.schedule(at, Event::Next(flow));
        } else {
            self.start(flow, later);
        }
    }

    fn arrive_and_again(&mut self, flow: u32, next: Time) {
        self.start(flow, false);
        let source = &self.flows[flow as usize];
        if source.begun < source.flow.count {
            let at = self.turned_on(flow, next);
            self.events.schedule(at, Event::Arrival(flow));
        }
    }

    /// Whether so many more jobs may be under way. If not, none of them begins, and the run ends.
    pub(super) fn has_room(&mut self, count: u64) -> bool {
        let left = self.most_jobs.saturating_sub(self.jobs.used());
        let has = count <= left as u64;
        self.crowded |= !has;
        has
    }

    /// Counts a job that begins. What those of a trace move is of those that began in the measured time, and of the ones
    /// before as long as none did.
    fn count_begun(&mut self, flow: u32, traced: Option<TracedJob>) {
        let moves = traced.map(|job| (job.bytes, self.bytes_of(job.script)));
        let source = &mut self.flows[flow as usize];
        let (measured, stats) = (self.now >= source.measured_from, &mut source.stats);
        if let Some((bytes, all)) = moves {
            let before = if measured && stats.begun == 0 { (0, 0) } else { stats.of_job };
            stats.of_job = (before.0.saturating_add(bytes), before.1.saturating_add(all));
        }
        stats.begun += u64::from(measured);
    }

    /// Starts a flow's next job; `later`, with an event of its own.
    fn start(&mut self, flow: u32, later: bool) {
        if !self.has_room(1) {
            return;
        }
        let source = &mut self.flows[flow as usize];
        let Addresses { base, stride, span, random } = source.flow.addresses;
        let places = (span / stride.max(1)).max(1);
        let place = match random {
            true => source.random.below(places),
            false => source.begun % places,
        };
        let traced = source.flow.trace.get(source.begun as usize).copied();
        let script = traced.map_or(source.flow.script, |job| job.script).0;
        source.begun += 1;
        self.count_begun(flow, traced);
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
}
