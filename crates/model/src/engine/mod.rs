//! The event-driven simulation: packets (TLPs) on their way through links and parts, and the jobs
//! that cause them.
//!
//! * `direction`: one direction of a link: queues, credits, ordering, the wire.
//! * `packet`: packets, requests and routes.
//! * `kinds`: what parts are like.
//! * `part`: what happens to a packet in a switch, bridge, root complex, memory or device.
//! * `iommu`: translation with a cache and page walks.
//! * `passages`: which packet went where when, for a trace.
//! * `requester`: what makes requests of reads and writes: DMA engines, processors.
//! * `job`: the scripts that workloads are made of.
//! * `meter`: what functions may do in a second.
//! * `arrivals`: when jobs come.
//! * `shaper`: what a switch sends by tenants.
//! * `shared`: units that a policy gives out.
//! * `stats`: what is counted.
//! * `uses`: what flows have in common.
//!
//! A packet costs one event for each hop, and one more where it had to wait. Switches and bridges cut
//! through: they send on a packet's head before its tail has come, when the next link is no faster.

mod arrivals;
mod direction;
mod gate;
mod iommu;
mod job;
mod kinds;
mod meter;
mod packet;
mod part;
mod passages;
mod requester;
mod shaper;
mod shared;
mod stats;
mod turns;
mod uses;

use std::collections::BTreeMap;
use std::fmt;

use crate::queue::EventQueue;
use crate::random::Distribution;
use crate::time::Time;

pub use arrivals::{Addresses, Arrivals, Bursts, JobFlow, TracedJob};
pub use direction::{Credits, DirectionParameters, DirectionStats};
pub use gate::{Admitted, Decides};
pub use iommu::{Iommu, IommuParameters};
pub use job::{Script, Step, Until};
pub use kinds::PartParameters;
pub use passages::Passage;
pub use requester::RequesterParameters;
pub use shaper::PacketShare;
pub use stats::{BATCHES, Batches, FlowStats, Histogram, confidence};
pub use uses::Used;

use direction::Direction;
use gate::DeviceGate;
use job::{Job, JobResource};
use meter::DeviceMeter;
use packet::{PacketHop, PacketRoute, Request, Room, Slab, Tlp};
use part::Part;
use requester::{Op, PacketRequester};
use shared::UnitTurn;

/// In place of an index: no part, direction, request or job.
const NONE: u32 = u32::MAX;

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub(super) u32);

        impl $name {
            /// Its number, from 0 in the order of adding.
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }
    )*};
}

ids! {
    /// A part: a component of the fabric.
    PartId;
    /// One direction of a link.
    DirectionId;
    /// A route from a requester to a target.
    RouteId;
    /// What makes requests: a DMA engine or a processor's core.
    RequesterId;
    /// A queue pair or channel of a requester: requesters take turns among theirs.
    StreamId;
    /// Something that only so many jobs can have at a time.
    ResourceId;
    /// Where a policy decides whose job is next.
    GateId;
    /// What bounds what is done in a second.
    MeterId;
    /// What spans are drawn from.
    DistributionId;
    /// What a job does, step by step.
    ScriptId;
    /// A source of jobs.
    FlowId;
}

impl DirectionId {
    /// The same link's other direction.
    pub fn back(self) -> DirectionId {
        DirectionId(self.0 ^ 1)
    }
}

/// A packet's kind, as flow control and ordering tell them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PacketClass {
    /// A memory write, or an interrupt.
    Posted,
    /// A memory read's request.
    NonPosted,
    /// A completion, with data.
    Completion,
}

/// What happens at a time.
#[derive(Debug, Clone, Copy)]
enum Event {
    /// A packet's delay at its part has ended.
    Ready(u32),
    /// A direction may send again.
    Free(u32),
    /// A target has served a packet.
    Served(u32),
    /// A read of a level that the part at a direction's end tracks has been answered.
    Answered(u8, u32),
    /// A requester may make its next packet.
    Pump(u32),
    /// A job goes on with its next step.
    Job(u32),
    /// A flow's next job comes.
    Arrival(u32),
    /// A flow's next job comes after a thought.
    Next(u32),
    /// A gate looks whether somebody may continue.
    Gate(u32),
    /// Something may be taken of limits again.
    Meter(u32),
    /// A unit that a policy gives out has finished a turn.
    Turn(u32),
    /// What gives out units looks whether somebody may continue.
    Units(u32),
}

/// Why a simulation cannot continue.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Stuck {
    /// Nothing will happen any more, and yet there are jobs or packets.
    #[error(
        "at {at} nothing moves any more while {jobs} jobs and {packets} packets wait; give the links more \
         credits, or the resources more units"
    )]
    Deadlock {
        /// The time of the last event.
        at: Time,
        /// Jobs that are not done.
        jobs: usize,
        /// Packets on their way.
        packets: usize,
    },
    /// Jobs come faster than they end, or there are too many from the beginning.
    #[error("at {at} {jobs} jobs are under way; ask for less at a time, or measure a shorter time")]
    Crowd {
        /// The time of the last event.
        at: Time,
        /// Jobs that are not done.
        jobs: usize,
    },
    /// It takes too long.
    #[error("{events} events did not end it; measure a shorter time, or fewer jobs")]
    TooLong {
        /// How many events there were.
        events: u64,
    },
}

/// A fabric, and what continues in it.
pub struct World {
    now: Time,
    events: EventQueue<Event>,
    happened: u64,
    parts: Vec<Part>,
    directions: Vec<Direction>,
    routes: Vec<PacketRoute>,
    /// Those of all routes.
    hops: Vec<PacketHop>,
    requesters: Vec<PacketRequester>,
    /// By stream: its requester, and its number there.
    streams: Vec<(u32, u32)>,
    tlps: Slab<Tlp>,
    requests: Slab<Request>,
    ops: Slab<Op>,
    jobs: Slab<Job>,
    scripts: Vec<Script>,
    resources: Vec<JobResource>,
    unit_turns: Slab<Option<UnitTurn>>,
    gates: Vec<DeviceGate>,
    meters: Vec<DeviceMeter>,
    flows: Vec<arrivals::JobSource>,
    /// Requesters that may have something to send, after the event at hand.
    pumps: Vec<u32>,
    measured_from: Time,
    distributions: Vec<Distribution>,
    seed: u64,
    trace: Option<Vec<Passage>>,
    /// By packet slot: its number, and that of the packet of which it is a piece, while there is a
    /// trace.
    numbers: Vec<(u64, u64)>,
    /// For the same trace, by request: the last of its completions that was held where the request was split.
    held_last: BTreeMap<u32, u64>,
    made: u64,
    /// Jobs under way at a time, at most, as each takes memory; and whether more were to begin.
    most_jobs: usize,
    crowded: bool,
}

/// Jobs under way at a time: some 1 GB of them, with what they move.
const MOST_JOBS: usize = 1 << 23;

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World")
            .field("now", &self.now)
            .field("parts", &self.parts.len())
            .field("directions", &self.directions.len())
            .field("packets", &self.tlps.used())
            .finish_non_exhaustive()
    }
}

impl World {
    /// An empty fabric; `seed` is that of its random numbers.
    pub fn new(seed: u64) -> World {
        World {
            now: Time::ZERO,
            events: EventQueue::new(),
            happened: 0,
            parts: Vec::new(),
            directions: Vec::new(),
            routes: Vec::new(),
            hops: Vec::new(),
            requesters: Vec::new(),
            streams: Vec::new(),
            tlps: Slab::new(),
            requests: Slab::new(),
            ops: Slab::new(),
            jobs: Slab::new(),
            scripts: Vec::new(),
            resources: Vec::new(),
            unit_turns: Slab::new(),
            gates: Vec::new(),
            meters: Vec::new(),
            flows: Vec::new(),
            pumps: Vec::new(),
            measured_from: Time::ZERO,
            distributions: Vec::new(),
            seed,
            trace: None,
            numbers: Vec::new(),
            held_last: BTreeMap::new(),
            made: 0,
            most_jobs: MOST_JOBS,
            crowded: false,
        }
    }

    /// The simulated time: that of the last event, or of the end of the run.
    pub fn now(&self) -> Time {
        self.now
    }

    /// How many events there were.
    pub fn happened(&self) -> u64 {
        self.happened
    }

    /// Adds a part that no link leads to yet.
    pub fn add_part(&mut self, parameters: PartParameters) -> PartId {
        self.parts.push(Part::new(parameters));
        PartId((self.parts.len() - 1) as u32)
    }

    /// Joins two parts; gives the direction from `a` to `b`, the other way's has the next number. `there`
    /// is what the direction to `b` is like, `back` the one to `a`.
    pub fn add_link(
        &mut self,
        (a, b): (PartId, PartId),
        there: DirectionParameters,
        back: DirectionParameters,
    ) -> DirectionId {
        let id = DirectionId(self.directions.len() as u32);
        self.directions.push(Direction::new(a.0, b.0, &there));
        self.directions.push(Direction::new(b.0, a.0, &back));
        id
    }

    /// Adds a route along `directions`, each of which begins where the one before ends. One without directions is
    /// from a part to itself.
    ///
    /// # Panics
    /// When the directions do not join, which is the caller's mistake.
    pub fn add_route(&mut self, from: PartId, directions: &[DirectionId]) -> RouteId {
        let mut parts = vec![from.0];
        for direction in directions {
            let direction = &self.directions[direction.index()];
            assert_eq!(parts.last(), Some(&direction.from), "a route's directions join");
            parts.push(direction.to);
        }
        let outer = |direction: DirectionId| self.is_link(direction.0);
        let mut levels = vec![0; parts.len()];
        for nth in (1..directions.len()).rev() {
            let turns = self.parts[parts[nth] as usize].turns() && outer(directions[nth]);
            levels[nth - 1] = (levels[nth] + u8::from(turns)).min(direction::LEVELS as u8 - 1);
        }
        let hop = |(nth, part): (usize, &u32)| {
            let there = directions.get(nth).copied();
            let by = nth.checked_sub(1).map(|before| directions[before]);
            PacketHop {
                route: self.routes.len() as u32,
                part: *part,
                next: [there, by.map(DirectionId::back)]
                    .map(|next| next.map_or(NONE, |next| next.0)),
                headers: [0; 3],
                level: levels[nth],
                from_link_to_link: [by, there].iter().all(|way| way.is_some_and(outer)),
            }
        };
        let hops: Vec<PacketHop> = parts.iter().enumerate().map(hop).collect();
        let (first, last) = (parts[0], parts[parts.len() - 1]);
        self.routes.push(PacketRoute {
            first: self.hops.len() as u32,
            last: (self.hops.len() + hops.len() - 1) as u32,
            pages: u64::from(first) << 32 | u64::from(last),
            low: (0, [false; 2]),
            slots: false,
        });
        self.hops.extend(hops);
        let route = RouteId((self.routes.len() - 1) as u32);
        self.set_headers(route);
        route
    }

    /// Tells the hops of a route the headers of its packets.
    fn set_headers(&mut self, route: RouteId) {
        let route = &self.routes[route.index()];
        for (nth, hop) in self.hops[route.hops()].iter_mut().enumerate() {
            hop.headers = route.headers(nth);
        }
    }

    /// Says where a route's addresses are below 4 GiB, whose requests have shorter headers: before the part
    /// `turn` of the route, which translates them, and from there on.
    pub fn set_low(&mut self, route: RouteId, turn: usize, low: [bool; 2]) {
        self.routes[route.index()].low = (turn, low);
        self.set_headers(route);
    }

    /// Says that a route is one of CXL.mem.
    pub fn set_slots(&mut self, route: RouteId) {
        self.routes[route.index()].slots = true;
        self.set_headers(route);
    }

    /// Bytes of the header of a packet of a class on direction `nth` of a route, counted from its beginning.
    pub fn header(&self, route: RouteId, nth: usize, class: PacketClass) -> u32 {
        u32::from(self.hops[self.routes[route.index()].hops()][nth].headers[class as usize])
    }

    /// From when on flows and directions count what they do, and till when: what flows move is then counted in
    /// parts of that time, too; of a flow that is there for less, in parts of that.
    pub fn measure(&mut self, from: Time, until: Time) {
        self.measured_from = from;
        self.flows.iter_mut().for_each(|flow| flow.measure(from, until));
    }

    /// A span as a share of the measured time.
    pub fn share(&self, span: Time) -> f64 {
        let whole = self.now.since(self.measured_from).seconds();
        if whole == 0.0 { 0.0 } else { span.seconds() / whole }
    }

    /// What a direction counted since measuring began.
    pub fn direction(&self, direction: DirectionId) -> &DirectionStats {
        &self.directions[direction.index()].stats
    }

    /// The share of the measured time for which a direction was sending, from 0 to 1.
    pub fn utilization(&self, direction: DirectionId) -> f64 {
        self.share(self.direction(direction).busy)
    }

    /// What a flow counted since measuring began.
    pub fn flow(&self, flow: FlowId) -> &FlowStats {
        &self.flows[flow.index()].stats
    }

    /// Bytes of memory for what is under way: packets, requests, operations, jobs, queues and events.
    pub fn memory(&self) -> usize {
        let slabs =
            [self.tlps.memory(), self.requests.memory(), self.ops.memory(), self.jobs.memory()];
        let queues = self.directions.iter().map(Direction::memory).sum::<usize>()
            + self.requesters.iter().map(PacketRequester::memory).sum::<usize>();
        slabs.iter().sum::<usize>() + queues + self.events.memory()
    }

    /// Whether everything is where it was before the first packet: no packet, request, operation or
    /// job is left, and every credit and tag is back.
    pub fn is_idle(&mut self) -> bool {
        // Credits that are on their way back are not lost.
        let now = self.now + Time::from_us(1_000);
        let empty = self.tlps.used() + self.requests.used() + self.ops.used() + self.jobs.used();
        empty == 0
            && self.directions.iter_mut().all(|direction| direction.is_whole(now))
            && self.requesters.iter().all(PacketRequester::is_whole)
            && self.parts.iter().all(Part::is_whole)
            && self.resources.iter().all(JobResource::is_whole)
            && self.gates.iter().all(DeviceGate::is_whole)
            && self.meters.iter().all(DeviceMeter::is_whole)
    }

    /// Lets everything happen before `until`, or until nothing is left to happen; at most `most`
    /// events.
    ///
    /// # Errors
    /// [`Stuck`] when jobs wait for what never comes, or there were too many events, or jobs at a time.
    pub fn run(&mut self, until: Time, most: u64) -> Result<(), Stuck> {
        let end = self.happened.saturating_add(most);
        while self.happened < end && !self.crowded {
            let Some((at, event)) = self.events.pop_before(until) else { break };
            self.happen(at, event);
        }
        if self.crowded {
            return Err(Stuck::Crowd { at: self.now, jobs: self.jobs.used() });
        }
        if let Some(at) = self.events.peek_time() {
            if at < until {
                return Err(Stuck::TooLong { events: most });
            }
            self.now = until;
            return Ok(());
        }
        // Packets whose jobs do not wait for them can be stuck too.
        if self.jobs.used() + self.tlps.used() > 0 {
            let (jobs, packets) = (self.jobs.used(), self.tlps.used());
            return Err(Stuck::Deadlock { at: self.now, jobs, packets });
        }
        if until != Time::MAX {
            self.now = until;
        }
        Ok(())
    }

    fn happen(&mut self, at: Time, event: Event) {
        self.now = at;
        self.happened += 1;
        match event {
            Event::Ready(tlp) => self.ready(tlp),
            Event::Free(direction) => self.direction_free(direction),
            Event::Served(tlp) => self.served(tlp),
            Event::Answered(level, direction) => self.untrack(direction, usize::from(level)),
            Event::Pump(requester) => self.pump_timer(requester),
            Event::Job(job) => self.go_on(job),
            Event::Arrival(flow) => self.arrival(flow),
            Event::Next(flow) => self.next_job(flow),
            Event::Gate(gate) => self.gate_timer(gate),
            Event::Meter(meter) => self.meter_timer(meter),
            Event::Turn(number) => self.turn_ended(number),
            Event::Units(resource) => self.look_at_units(resource),
        }
        while let Some(requester) = self.pumps.pop() {
            self.pump(requester);
        }
    }

    #[inline(always)]
    fn make(&mut self, tlp: Tlp) -> u32 {
        let id = self.tlps.put(tlp);
        if self.trace.is_some() {
            self.number(id);
        }
        self.made += 1;
        id
    }

    fn measuring(&self) -> bool {
        self.now >= self.measured_from
    }
}

#[cfg(test)]
mod tests;
