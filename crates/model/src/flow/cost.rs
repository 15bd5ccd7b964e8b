//! What a job takes of a rack, and how long it takes alone: read from the steps of its script, by
//! the rules of the engine, in closed form.
//!
//! Bytes may use several limits at once: an operation's time is that of its first packet, or of
//! its first request and what that asks for, and for the rest that of the slowest limit.

use std::collections::BTreeMap;
use std::ops::Range;

use rackbus_qos::Metered;

use super::limit::{Limit, SECOND};
use crate::engine::{
    Addresses, DirectionId, FlowId, IommuParameters, PacketClass, PartId, RequesterId,
    RequesterParameters, ResourceId, RouteId, Step, StreamId, Until, World,
};
use crate::time::Time;

/// What a job takes.
#[derive(Debug, Clone, Default)]
pub(super) struct Cost {
    /// Of each limit, some of them more than once.
    pub uses: Vec<(Limit, f64)>,
    /// How long it takes alone, in picoseconds.
    pub unloaded: f64,
}

/// By part with an IOMMU: how many pages all flows together ask it for.
pub(super) type Pages = BTreeMap<PartId, u64>;

/// How many pages of that size the jobs of a queue are in.
pub(super) fn pages_of(addresses: &Addresses, page: u64) -> u64 {
    addresses.span.max(addresses.stride).div_ceil(page.max(1)).max(1)
}

/// Where jobs are, how many of them are under way at a time, and what else is asked of IOMMUs.
#[derive(Clone, Copy)]
struct JobAddresses<'a> {
    addresses: Addresses,
    depth: u32,
    pages: &'a Pages,
}

/// What a job of `flow` takes, of which `depth` are under way at a time, where all flows together ask for `pages`.
pub(super) fn of(world: &World, flow: FlowId, depth: u32, pages: &Pages) -> Cost {
    let jobs = JobAddresses { addresses: *world.addresses(flow), depth, pages };
    steps(world, jobs, world.steps(flow), &mut Vec::new())
}

/// How long a job of these steps keeps busy what it uses most, in picoseconds, and how long it takes alone.
pub(crate) fn alone(world: &World, addresses: Addresses, script: &[Step]) -> (f64, f64) {
    let jobs = JobAddresses { addresses, depth: 1, pages: &Pages::new() };
    let cost = steps(world, jobs, script, &mut Vec::new());
    (busiest(world, &cost), cost.unloaded)
}

/// How long a job keeps busy what it uses most, in picoseconds.
fn busiest(world: &World, cost: &Cost) -> f64 {
    let mut used: BTreeMap<Limit, f64> = BTreeMap::new();
    cost.uses.iter().for_each(|(limit, amount)| *used.entry(*limit).or_default() += amount);
    let times = used.iter().map(|(limit, amount)| amount / limit.capacity(world) * SECOND);
    times.fold(0.0, f64::max)
}

/// The course of bytes on a route, of a job whose steps before went the routes `walked`.
fn course<'w>(
    world: &'w World,
    jobs: JobAddresses<'w>,
    (stream, route, bytes): (StreamId, RouteId, u64),
    walked: &mut Vec<RouteId>,
) -> Course<'w> {
    let mut course = Course::new(world, (stream, route), bytes, jobs);
    // A job's steps are in the same pages: the first that goes there has them translated.
    course.walks &= !walked.contains(&route);
    walked.push(route);
    course
}

fn steps(world: &World, of: JobAddresses<'_>, script: &[Step], walked: &mut Vec<RouteId>) -> Cost {
    let mut cost = Cost::default();
    let mut taken: Vec<(ResourceId, f64)> = Vec::new();
    for step in script {
        match *step {
            Step::Wait(span) => cost.unloaded += span.ps() as f64,
            Step::WaitRandom(drawn) => {
                cost.unloaded += world.distribution(drawn).mean().ps() as f64;
            }
            Step::Work(resource, work, _) => {
                let span = work.cost.ps() as f64;
                cost.unloaded += span;
                cost.uses.push((Limit::Units(resource), span));
            }
            Step::UseRandom(resource, drawn) => {
                let span = world.distribution(drawn).mean().ps() as f64;
                cost.unloaded += span;
                cost.uses.push((Limit::Units(resource), span));
            }
            Step::Use(resource, span) => {
                cost.unloaded += span.ps() as f64;
                cost.uses.push((Limit::Units(resource), span.ps() as f64));
            }
            Step::Take(resource) => taken.push((resource, cost.unloaded)),
            Step::Give(resource) => {
                // The one that was taken last.
                let nth = taken.iter().rposition(|(other, _)| *other == resource);
                let since = nth.map_or(cost.unloaded, |nth| taken.remove(nth).1);
                cost.uses.push((Limit::Units(resource), cost.unloaded - since));
            }
            Step::Spend { meter, bytes, operations } => {
                for (of, taken) in [(Metered::Bytes, bytes), (Metered::Operations, operations)] {
                    let rate = world.metered_rate(meter, of);
                    let time = rate.map(|rate| taken as f64 / rate as f64 * SECOND);
                    cost.uses.extend(time.map(|time| (Limit::Rate(meter, of), time)));
                }
            }
            Step::Write { stream, route, bytes, until, .. } => {
                let course = course(world, of, (stream, route, bytes), walked);
                cost.add(&[course.write()], until);
            }
            Step::Read { stream, route, bytes, .. } => {
                let course = course(world, of, (stream, route, bytes), walked);
                cost.add(&[course.read()], Until::Landed);
            }
            Step::Copy { stream, from, to, bytes, until, .. } => {
                let read = course(world, of, (stream, from, bytes), walked);
                let write = course(world, of, (stream, to, bytes), walked);
                cost.add(&[read.read(), write.write()], until);
            }
            Step::Each(script, count, _) => {
                // Side by side, as far as what they use lets them.
                let inner = steps(world, of, world.script(script), walked);
                let count = count as f64;
                cost.unloaded += inner.unloaded + busiest(world, &inner) * (count - 1.0).max(0.0);
                cost.uses.extend(inner.uses.iter().map(|(limit, bytes)| (*limit, bytes * count)));
            }
            Step::All(first, count) => {
                let mut longest = 0.0_f64;
                for script in first.following(count) {
                    let inner = steps(world, of, world.script(script), walked);
                    longest = longest.max(inner.unloaded);
                    cost.uses.extend(inner.uses);
                }
                cost.unloaded += longest;
            }
            // A gate orders what is under way anyway.
            Step::Mark(_) | Step::Enter(..) | Step::Leave(_) => {}
        }
    }
    cost
}

impl Cost {
    /// Adds a step's operations, of which each feeds the next.
    fn add(&mut self, operations: &[Operation], until: Until) {
        let slowest = |of: fn(&LimitUse) -> f64| {
            operations.iter().flat_map(|one| &one.uses).map(of).fold(0.0, f64::max)
        };
        self.unloaded += match until {
            Until::Landed => {
                let waits = operations.iter().map(|one| one.waits).fold(0.0, f64::max);
                let first = operations.iter().map(|one| one.first).sum::<f64>();
                first + slowest(LimitUse::rest).max(waits)
            }
            // What follows on the same route waits behind it.
            Until::Begun | Until::Issued => slowest(|one| one.time),
        };
        let uses = operations.iter().flat_map(|one| &one.uses);
        self.uses.extend(uses.map(|one| (one.limit, one.cost)));
    }
}

/// A use of a limit by an operation.
#[derive(Debug, Clone, Copy)]
struct LimitUse {
    limit: Limit,
    cost: f64,
    /// How long that takes.
    time: f64,
    /// What of it passes while the first packet does: from 0 to 1.
    first: f64,
}

impl LimitUse {
    fn rest(&self) -> f64 {
        self.time * (1.0 - self.first)
    }
}

/// A read or write.
struct Operation {
    uses: Vec<LimitUse>,
    /// How long its first packet takes, or its first request with its completions.
    first: f64,
    /// How long the first packet of a write waits for walks, while the others come after it.
    waits: f64,
}

/// Walks of an IOMMU for a job.
struct Walks {
    nth: usize,
    count: f64,
    time: f64,
}

/// A route, and the bytes that move on it.
struct Course<'a> {
    world: &'a World,
    requester: RequesterId,
    is: &'a RequesterParameters,
    /// What a packet stays where it is made.
    delay: Time,
    directions: Vec<DirectionId>,
    /// By direction, bytes of a request's header, and of a completion's, which comes back there.
    headers: Vec<u32>,
    back_header: u32,
    target: PartId,
    bytes: f64,
    jobs: JobAddresses<'a>,
    /// Whether its pages may have to be looked up.
    walks: bool,
    uses: Vec<LimitUse>,
}

impl<'a> Course<'a> {
    fn new(
        world: &'a World,
        (stream, route): (StreamId, RouteId),
        bytes: u64,
        jobs: JobAddresses<'a>,
    ) -> Self {
        let requester = world.requester_of(stream);
        let (is, part) = world.requester(requester);
        let directions = world.directions_of(route);
        let target = directions.last().map_or(part, |direction| world.ends_of(*direction).1);
        Course {
            world,
            requester,
            is,
            delay: world.part(part).delay[PacketClass::Posted as usize],
            headers: (0..directions.len())
                .map(|nth| world.header(route, nth, PacketClass::Posted))
                .collect(),
            directions,
            back_header: world.header(route, 0, PacketClass::Completion),
            target,
            bytes: bytes as f64,
            jobs,
            walks: true,
            uses: Vec::new(),
        }
    }

    fn limited_by(&mut self, limit: Limit, cost: f64, first: f64) {
        let time = cost / limit.capacity(self.world) * SECOND;
        self.uses.push(LimitUse { limit, cost, time, first: first.min(1.0) });
    }

    /// How many packets its bytes are on average when they are cut at multiples of `most`.
    fn packets(&self, most: u32) -> f64 {
        let (most, bytes) = (u64::from(most.max(1)), self.bytes as u64);
        let Addresses { stride, span, .. } = self.jobs.addresses;
        let (mut offset, mut places, mut packets) = (0, 0, 0);
        while places < (span / stride.max(1)).max(1) && (places == 0 || offset != 0) {
            packets += (offset + bytes).div_ceil(most);
            places += 1;
            offset = (offset + stride) % most;
        }
        packets as f64 / places as f64
    }

    /// Bytes of packets on some of the route's directions each, and the DLLPs that they cause. Completions go back.
    fn packets_on(&mut self, nth: Range<usize>, back: bool, packets: f64, bytes: f64) {
        for nth in nth {
            let direction = &if back { self.directions[nth].back() } else { self.directions[nth] };
            let header = if back { self.back_header } else { self.headers[nth] };
            let Some(wire) = self.world.direction_parameters(*direction).wire else { continue };
            let around = f64::from(wire.packet(header, 0));
            self.limited_by(Limit::Direction(*direction), packets * around + bytes, 1.0 / packets);
            let dllps = self.world.direction_parameters(direction.back()).dllps;
            self.limited_by(Limit::Direction(direction.back()), packets * dllps.bytes(), 1.0);
        }
    }

    /// What the requester adds to each packet, or request for, so many bytes.
    fn issue(&mut self, write: bool, packets: f64) {
        if self.is.engine.is_some() {
            self.limited_by(Limit::Engine(self.requester), self.bytes, 1.0 / packets);
        }
        let [gap, last] = [false, true].map(|last| self.is.gap_after(write, last).ps() as f64);
        if last > 0.0 {
            let gaps = packets * gap + (last - gap);
            self.limited_by(Limit::Gap(self.requester), gaps, 1.0 / packets);
        }
        let delay = self.delay.ps() as f64;
        if delay > 0.0 {
            let room = f64::from(self.is.window) / packets;
            self.limited_by(Limit::Window(self.requester), packets * delay, room);
        }
    }

    /// What the target serves: `extra` picoseconds besides the bytes. Gives how long the first
    /// `bytes` take.
    fn service(&mut self, bytes: f64, extra: f64) -> f64 {
        let part = self.world.part(self.target);
        if part.service_per_byte == 0 {
            return part.access.ps() as f64 + extra;
        }
        let per_byte = part.service_per_byte as f64 / 1024.0;
        self.limited_by(
            Limit::Service(self.target),
            self.bytes + extra / per_byte,
            bytes / self.bytes,
        );
        part.access.ps() as f64 + bytes * per_byte + extra
    }

    /// The IOMMUs on the route: by the direction behind each, how often a job walks there and how long that
    /// takes. Gives how long the first packet waits for them, too: also for those of the jobs beside it,
    /// which go the same route.
    fn walks(&mut self) -> (Vec<Walks>, f64) {
        let (mut all, mut waits) = (Vec::new(), 0.0);
        for nth in 1..self.directions.len() {
            let at = self.world.ends_of(self.directions[nth]).0;
            let Some(iommu) = self.world.part(at).iommu else { continue };
            let (count, time) = (self.misses(at, &iommu), iommu.walk.ps() as f64);
            if count > 0.0 {
                self.limited_by(Limit::Walkers(at), count * time, f64::from(iommu.walkers) / count);
                all.push(Walks { nth, count, time });
            }
            let hit = iommu.hit.ps() as f64;
            waits += hit + (count * f64::from(self.jobs.depth)).min(1.0) * (time - hit);
        }
        (all, waits)
    }

    /// How often a job asks a part's IOMMU for a page that is not in its cache: never when those of all flows fit. Else
    /// for each page that it begins, of which those at random places are there as often as the cache has room for them.
    fn misses(&self, at: PartId, iommu: &IommuParameters) -> f64 {
        let JobAddresses { addresses, pages, .. } = self.jobs;
        let own = pages_of(&addresses, iommu.page);
        let (all, room) = (own.max(pages.get(&at).copied().unwrap_or(0)), u64::from(iommu.entries));
        if !self.walks || all <= room {
            return 0.0;
        }
        let begun = addresses.stride as f64 / iommu.page as f64;
        if addresses.random { begun.ceil() * (1.0 - room as f64 / all as f64) } else { begun }
    }

    fn write(mut self) -> Operation {
        let packets = self.packets(self.is.payload);
        let first = self.bytes.min(f64::from(self.is.payload));
        let directions = self.directions.clone();
        self.packets_on(0..directions.len(), false, packets, self.bytes);
        for nth in 1..directions.len() {
            let at = self.world.ends_of(directions[nth]).0;
            let ports = [directions[nth - 1], directions[nth]];
            let ports = ports
                .iter()
                .all(|direction| self.world.direction_parameters(*direction).wire.is_some());
            if ports && self.world.part(at).peer_per_byte > 0 {
                self.limited_by(Limit::Peers(at), self.bytes, 1.0 / packets);
            }
        }
        self.issue(true, packets);
        let part = self.world.part(self.target);
        let whole = (self.bytes as u64).is_multiple_of(u64::from(part.line.max(1)));
        let partial = if whole { 0.0 } else { part.partial_write.ps() as f64 };
        let waits = self.walks().1;
        let mut time = self.service(first, partial);
        let travel = self.travel(&directions, &self.headers, PacketClass::Posted, first as u32);
        time += (self.delay + travel).ps() as f64;
        Operation { uses: self.uses, first: time, waits }
    }

    fn read(mut self) -> Operation {
        let requests = self.packets(self.is.read);
        let asked = self.bytes.min(f64::from(self.is.read));
        // From the first root on that splits them, requests are shorter.
        let roots = self.tracking();
        let splits = roots.iter().find(|nth| self.tracker(**nth).split != 0);
        let (cut, piece) = splits.map_or((self.directions.len(), self.is.read), |nth| {
            (*nth, self.is.read.min(self.tracker(*nth).split))
        });
        let pieces = self.packets(piece);
        let longest = self.bytes.min(f64::from(piece)) as u32;
        let completion = self.world.part(self.target).completion_of(longest).min(piece);
        // The root that splits them may combine their completions on the way back.
        let combine = splits.map_or(0, |nth| self.tracker(*nth).combine);
        let combined = if combine == 0 { completion } else { combine.min(self.is.read) };
        let directions = self.directions.clone();
        let back: Vec<DirectionId> =
            directions.iter().rev().map(|direction| direction.back()).collect();
        self.packets_on(0..cut, false, requests, 0.0);
        self.packets_on(cut..directions.len(), false, pieces, 0.0);
        for (directions, most) in [(cut..directions.len(), completion), (0..cut, combined)] {
            let completions = self.packets(most);
            self.packets_on(directions, true, completions, self.bytes);
        }
        self.issue(false, requests);
        // The first request, until all that it asks for has come.
        let served = self.service(asked.min(f64::from(piece)), 0.0);
        let carried = asked.min(f64::from(completion));
        let slowest = self.uses.iter().map(|one| one.time).fold(0.0, f64::max);
        let rest = slowest * (asked - carried) / self.bytes;
        let trip = |from: usize| {
            let there =
                self.travel(&directions[from..], &self.headers[from..], PacketClass::NonPosted, 0);
            let back = &back[..directions.len() - from];
            let headers = vec![self.back_header; back.len()];
            let back = self.travel(back, &headers, PacketClass::Completion, carried as u32);
            (there + back).ps() as f64 + served
        };
        let (whole, trips) = (trip(0) + self.delay.ps() as f64 + rest, roots.iter().copied());
        let trips: Vec<(usize, f64)> = trips.map(|nth| (nth, trip(nth))).collect();
        let (walks, waits) = self.walks();
        // What comes after an access that waits for a walk waits with it, but walks overlap.
        let held = |behind: usize, slots: f64, count: f64| -> f64 {
            let walks = walks.iter().filter(|walks| walks.nth > behind);
            walks.map(|walks| walks.time * count.min(walks.count * slots)).sum()
        };
        for (nth, trip) in trips {
            let (at, tracker) = (self.world.ends_of(directions[nth]).0, self.tracker(nth));
            let slots = f64::from(tracker.trackers);
            let count = if nth < cut { requests } else { pieces };
            // A tracker is free once the completion is there; only then does the root pass that on.
            let until_there = trip - tracker.delay[PacketClass::Completion as usize].ps() as f64;
            let cost = count * until_there + held(nth, slots, count);
            self.limited_by(Limit::Trackers(at), cost, slots / count);
        }
        let slots = f64::from(self.is.tags);
        let cost = requests * whole + held(0, slots, requests);
        self.limited_by(Limit::Tags(self.requester), cost, slots / requests);
        // A request's share of each use is in its time.
        for one in &mut self.uses {
            one.first = one.first.max(asked / self.bytes);
        }
        Operation { uses: self.uses, first: whole + waits, waits: 0.0 }
    }

    fn tracker(&self, nth: usize) -> &crate::engine::PartParameters {
        self.world.part(self.world.ends_of(self.directions[nth]).0)
    }

    /// The directions by which requests leave parts that track them.
    fn tracking(&self) -> Vec<usize> {
        let tracks = |nth: &usize| {
            let part = self.tracker(*nth);
            let through = self.world.direction_parameters(self.directions[*nth]).wire.is_some();
            through && (part.split != 0 || part.trackers != u32::MAX)
        };
        (1..self.directions.len()).filter(tracks).collect()
    }

    /// How long an empty route's directions take a packet of so many bytes of payload from its maker to its
    /// end.
    fn travel(
        &self,
        directions: &[DirectionId],
        headers: &[u32],
        class: PacketClass,
        payload: u32,
    ) -> Time {
        let mut at = Time::ZERO;
        for (nth, direction) in directions.iter().enumerate() {
            let (here, header) = (self.world.direction_parameters(*direction), headers[nth]);
            let next = directions
                .get(nth + 1)
                .map(|direction| self.world.direction_parameters(*direction).wire);
            let delay = self.world.part(self.world.ends_of(*direction).1).delay[class as usize];
            at = match (here.wire, next) {
                (None, None) => at,
                (None, Some(_)) => at + delay,
                (Some(wire), next) => {
                    let bytes = wire.packet(header, payload);
                    let begun = at + here.propagation;
                    let (head, tail) = (wire.packet(header, 0), begun + wire.time(bytes));
                    match next {
                        None if class == PacketClass::Completion => tail + delay,
                        None => tail,
                        Some(None) => tail + delay,
                        Some(Some(next)) => {
                            let bytes = next.packet(headers[nth + 1], payload);
                            (begun + wire.time(head)).max(tail.since(next.time(bytes))) + delay
                        }
                    }
                }
            };
        }
        at
    }
}
