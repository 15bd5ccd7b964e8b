//! What holds a flow up, by its name.
//!
//! What is used all the time bounds what goes through it: those limits come first, what is nearest to the
//! target before what only waits for it. Then what was waited for most of the time. Where the two do not
//! tell, a flow is bound by the length of its route.

use super::scripts::Run;
use super::{FlowKind, FlowSpec};
use crate::engine::{
    Arrivals, DirectionId, FlowId, PacketClass, PartId, RequesterId, RouteId, Used,
};

/// The directions of a flow's packets, and their classes.
type Packets = [(DirectionId, PacketClass)];

/// From this share of the time on, what is used is full.
const FULL: f64 = 0.95;
/// From this share of the time on, what is waited for holds up.
const AWAITED: f64 = 0.5;
/// From this share on, what is waited for is a part of what holds up.
const PART: f64 = 0.1;

impl Run {
    /// Jobs per second that a flow asks for in the `seconds` that it was measured for, where the ends of jobs do
    /// not decide.
    pub(super) fn asked(&self, spec: &FlowSpec, queues: &[FlowId], seconds: f64) -> Option<f64> {
        let ends = spec.count != u64::MAX || spec.end < self.workload().duration;
        match spec.arrivals {
            Arrivals::Depth(_) => None,
            Arrivals::Every(span) | Arrivals::Poisson(span) if spec.bursts.is_none() && !ends => {
                Some(f64::from(spec.queues) / span.seconds())
            }
            // As they came.
            Arrivals::Every(_) | Arrivals::Poisson(_) | Arrivals::Traced => {
                let begun = queues.iter().map(|queue| self.assembly.world.flow(*queue).begun);
                Some(begun.sum::<u64>() as f64 / seconds)
            }
        }
    }

    pub(super) fn bottleneck(
        &self,
        spec: &FlowSpec,
        of: (&[FlowId], &[RouteId]),
        (rate, asked): (f64, Option<f64>),
    ) -> String {
        let (queues, _) = of;
        if asked.is_some_and(|asked| rate >= 0.95 * asked) {
            return "demand".to_owned();
        }
        // All its queues do the same, on the same way.
        let packets = queues.first().map(|flow| self.assembly.world.packets_of(*flow));
        let packets = packets.unwrap_or_default();
        let directions: Vec<DirectionId> =
            packets.iter().map(|(direction, _)| *direction).collect();
        if let Some(rate) = self.held_by_rate(spec, &directions, AWAITED) {
            return rate;
        }
        let limits = queues.first().map(|queue| self.limits_of(*queue)).unwrap_or_default();
        if let Some((name, ..)) = limits.iter().find(|(.., held)| *held >= AWAITED) {
            return name.clone();
        }
        let full = self.full(spec, of, &directions, limits);
        full.or_else(|| self.awaited(spec, queues, &packets))
            .unwrap_or_else(|| "latency".to_owned())
    }

    fn parts(&self, routes: &[RouteId]) -> Vec<PartId> {
        routes.iter().flat_map(|route| self.assembly.world.parts_of(*route)).collect()
    }

    /// The requesters of a flow's devices that make packets for it, with their names.
    fn requesters<'s>(&self, spec: &'s FlowSpec, queues: &[FlowId]) -> Vec<(&'s str, RequesterId)> {
        let world = &self.assembly.world;
        let used = queues.first().map(|queue| world.used_by(*queue)).unwrap_or_default();
        let ends = spec.kind.ends().into_iter();
        let found = ends.filter_map(|name| {
            let end = self.assembly.end(name).ok()?;
            Some((name, self.assembly.requester(end)?))
        });
        found.filter(|(_, of)| used.contains(&Used::Requester(of.index() as u32))).collect()
    }

    fn link(&self, direction: DirectionId) -> String {
        let (from, to) = self.assembly.world.ends_of(direction);
        format!("{} to {}", self.assembly.name(from), self.assembly.name(to))
    }

    /// What is used all the time: the fullest.
    fn full(
        &self,
        spec: &FlowSpec,
        (queues, routes): (&[FlowId], &[RouteId]),
        directions: &[DirectionId],
        limits: Vec<(String, f64, f64)>,
    ) -> Option<String> {
        let world = &self.assembly.world;
        let used = directions.iter().map(|id| (world.utilization(*id), self.link(*id)));
        let mut found: Vec<(f64, String)> = used.collect();
        let parts = self.parts(routes);
        for part in &parts {
            let name = self.assembly.name(*part);
            found.push((world.peer_share(*part), format!("{name}: peer writes")));
            found.push((world.walked_share(*part), format!("{name}: page walkers")));
        }
        for target in routes.iter().filter_map(|route| world.parts_of(*route).last()) {
            let name = format!("{}: memory bandwidth", self.assembly.name(target));
            found.push((world.served_share(target).iter().sum(), name));
        }
        for (name, requester) in self.requesters(spec, queues) {
            let engine = world.engine_share(requester).unwrap_or(0.0);
            found.push((engine, format!("{name}: engine")));
            found.push((world.paced_share(requester), format!("{name}: packet rate")));
        }
        if let FlowKind::Ring { device, .. } = &spec.kind {
            let medium = self.assembly.end(device).ok().and_then(|end| self.media.get(&end));
            let share = medium.map_or(0.0, |medium| world.taken_share(*medium));
            found.push((share, self.medium_name(device)));
        }
        found.extend(limits.into_iter().map(|(name, used, _)| (used, name)));
        let full = found.into_iter().filter(|(share, _)| *share >= FULL);
        // Of equals the first.
        let most = full.reduce(|one, other| if other.0 > one.0 { other } else { one });
        most.map(|(_, name)| name)
    }

    /// What was waited for most of the time; what makes others wait before those.
    fn awaited(&self, spec: &FlowSpec, queues: &[FlowId], packets: &Packets) -> Option<String> {
        let world = &self.assembly.world;
        // Reads alone take trackers and tags.
        let crossed = queues.first().map(|queue| world.crossed_by(*queue, PacketClass::NonPosted));
        let mut roots = crossed.into_iter().flatten();
        if let Some(root) = roots.find(|part| world.tracked_share(*part) >= AWAITED) {
            return Some(format!("{}: split reads", self.assembly.name(root)));
        }
        let writes = packets.iter().filter(|(_, class)| *class == PacketClass::Posted);
        // What is full makes those before it wait, too.
        for (direction, _) in writes.rev().copied() {
            // Sending or waiting for room all the time: what keeps the receiver's room taken holds it up.
            let blocked = world.share(world.blocked(direction, PacketClass::Posted));
            if blocked >= PART && blocked + world.utilization(direction) >= FULL {
                let walks = world.walk_share(direction) >= AWAITED * blocked;
                return Some(if walks {
                    format!("{}: page walks", self.assembly.name(world.ends_of(direction).1))
                } else {
                    format!("{}: posted credits", self.link(direction))
                });
            }
        }
        let waits =
            |(direction, class): &&_| world.share(world.blocked(*direction, *class)) >= AWAITED;
        if let Some((direction, class)) = packets.iter().find(waits) {
            return Some(format!("{}: {} credits", self.link(*direction), named(*class)));
        }
        if !packets.iter().any(|(_, class)| *class == PacketClass::NonPosted) {
            return None;
        }
        let requesters = self.requesters(spec, queues);
        let tags = requesters.iter().find(|(_, at)| world.starved_share(*at) >= AWAITED);
        tags.map(|(name, _)| format!("{name}: tags"))
    }
}

/// What the credits of a class are called.
fn named(class: PacketClass) -> &'static str {
    match class {
        PacketClass::Posted => "posted",
        PacketClass::NonPosted => "non-posted",
        PacketClass::Completion => "completion",
    }
}
