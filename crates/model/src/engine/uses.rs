//! What a flow's jobs use of a world: flows that have nothing of it in common never make each other wait.

use std::collections::BTreeSet;

use super::{DirectionId, FlowId, MeterId, PacketClass, PartId, RouteId, Step, StreamId, World};

/// Something that makes flows wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Used {
    /// A link, both ways: what goes one way has data-link packets go the other. The number of its first direction,
    /// halved.
    Link(u32),
    /// A part that serves what comes, translates, or has only so many trackers.
    Part(u32),
    /// Something that makes requests, by its number.
    Requester(u32),
    /// Units that jobs take.
    Resource(u32),
    /// Where jobs wait to be let through.
    Gate(u32),
    /// Limits that jobs count against.
    Meter(MeterId),
}

impl World {
    /// All that the jobs of a flow use.
    pub fn used_by(&self, flow: FlowId) -> BTreeSet<Used> {
        let mut found = BTreeSet::new();
        self.each_step(flow, &mut |step| match *step {
            Step::Use(resource, _)
            | Step::UseRandom(resource, _)
            | Step::Work(resource, ..)
            | Step::Take(resource)
            | Step::Give(resource) => {
                found.insert(Used::Resource(resource.0));
            }
            Step::Enter(gate, _) | Step::Leave(gate) => {
                found.insert(Used::Gate(gate.0));
            }
            Step::Spend { meter, .. } => {
                found.insert(Used::Meter(meter));
            }
            Step::Write { stream, route, .. } | Step::Read { stream, route, .. } => {
                self.used_on(stream, route, &mut found);
            }
            Step::Copy { stream, from, to, .. } => {
                self.used_on(stream, from, &mut found);
                self.used_on(stream, to, &mut found);
            }
            _ => {}
        });
        found
    }

    /// The directions by which packets of a flow's jobs go, and their classes, along each route; completions come back.
    pub fn packets_of(&self, flow: FlowId) -> Vec<(DirectionId, PacketClass)> {
        let writes = |found: &mut Vec<_>, route: RouteId| {
            let directions = self.directions_of(route).into_iter();
            found.extend(directions.map(|direction| (direction, PacketClass::Posted)));
        };
        let reads = |found: &mut Vec<_>, route: RouteId| {
            found.extend(self.directions_of(route).into_iter().flat_map(|direction| {
                let completions = (direction.back(), PacketClass::Completion);
                [(direction, PacketClass::NonPosted), completions]
            }));
        };
        let mut found = Vec::new();
        self.each_step(flow, &mut |step| match *step {
            Step::Write { route, .. } => writes(&mut found, route),
            Step::Read { route, .. } => reads(&mut found, route),
            Step::Copy { from, to, .. } => {
                reads(&mut found, from);
                writes(&mut found, to);
            }
            _ => {}
        });
        found
    }

    /// The parts that requests of a class, of a flow's jobs, pass from link to link, in the order of their ways.
    pub fn crossed_by(&self, flow: FlowId, class: PacketClass) -> Vec<PartId> {
        let mut found = Vec::new();
        self.each_step(flow, &mut |step| {
            let route = match (*step, class) {
                (Step::Write { route, .. }, PacketClass::Posted)
                | (Step::Read { route, .. }, PacketClass::NonPosted) => route,
                (Step::Copy { to, .. }, PacketClass::Posted) => to,
                (Step::Copy { from, .. }, PacketClass::NonPosted) => from,
                _ => return,
            };
            let hops = self.hops[self.routes[route.0 as usize].hops()].iter();
            found.extend(hops.filter(|hop| hop.from_link_to_link).map(|hop| PartId(hop.part)));
        });
        found
    }

    /// The parts whose IOMMUs translate the addresses of a flow's jobs, each with the page tables where it looks them up.
    pub fn translated_by(&self, flow: FlowId) -> BTreeSet<(PartId, u64)> {
        let mut routes = BTreeSet::new();
        self.each_step(flow, &mut |step| match step {
            Step::Write { route, .. } | Step::Read { route, .. } => routes.extend([route.0]),
            Step::Copy { from, to, .. } => routes.extend([from.0, to.0]),
            _ => {}
        });
        let of = |route: u32| {
            // What begins at a part is its own, and what ends there is not passed on.
            let hops = &self.hops[self.routes[route as usize].hops()];
            let pages = self.routes[route as usize].pages;
            let inner = hops.iter().skip(1).filter(|hop| hop.next(false).is_some());
            let parts = inner.map(|hop| PartId(hop.part));
            parts.filter(|part| self.part(*part).iommu.is_some()).map(move |part| (part, pages))
        };
        routes.into_iter().flat_map(of).collect()
    }

    /// Calls `each` with every step of a flow's jobs, those of scripts within scripts too.
    fn each_step(&self, flow: FlowId, each: &mut impl FnMut(&Step)) {
        let of = &self.flows[flow.index()].flow;
        let scripts: BTreeSet<u32> =
            of.trace.iter().map(|job| job.script.0).chain([of.script.0]).collect();
        for script in scripts {
            self.each_step_in(&self.scripts[script as usize], each);
        }
    }

    fn each_step_in(&self, script: &[Step], each: &mut impl FnMut(&Step)) {
        for step in script {
            each(step);
            match *step {
                Step::Each(script, ..) => self.each_step_in(self.script(script), each),
                Step::All(first, count) => first
                    .following(count)
                    .for_each(|script| self.each_step_in(self.script(script), each)),
                _ => {}
            }
        }
    }

    fn used_on(&self, stream: StreamId, route: RouteId, found: &mut BTreeSet<Used>) {
        found.insert(Used::Requester(self.requester_of(stream).0));
        found.extend(self.directions_of(route).iter().map(|direction| Used::Link(direction.0 / 2)));
        // What only passes packets on, each port for itself, keeps nothing of them.
        let stateful = |part: &PartId| {
            let part = &self.parts[part.index()];
            part.checks || part.tracks()
        };
        let parts = self.parts_of(route).filter(stateful);
        found.extend(parts.chain(self.parts_of(route).last()).map(|part| Used::Part(part.0)));
    }
}
