//! What holds a flow up, by its name.
//!
//! What is used all the time bounds what goes through it: those limits come first, what is nearest to the
//! target before what only waits for it. Then what was waited for most of the time. Where the two do not
//! tell, a flow is bound by the length of its way.

use super::scripts::Run;
use super::{FlowKind, FlowSpec};
use crate::engine::{Arrivals, Class, LaneId, PartId, RequesterId, WayId};

/// From this share of the time on, what is used is full.
const FULL: f64 = 0.95;
/// From this share of the time on, what is waited for holds up.
const AWAITED: f64 = 0.5;

const CLASSES: [(Class, &str); 3] = [
    (Class::Posted, "posted"),
    (Class::NonPosted, "non-posted"),
    (Class::Completion, "completion"),
];

/// Jobs per second that a flow asks for, where its arrivals say.
pub(super) fn asked(spec: &FlowSpec) -> Option<f64> {
    match spec.arrivals {
        Arrivals::Every(span) | Arrivals::Poisson(span) => {
            Some(f64::from(spec.queues) / span.seconds())
        }
        Arrivals::Depth(_) => None,
    }
}

impl Run {
    pub(super) fn bottleneck(&self, spec: &FlowSpec, ways: &[WayId], rate: f64) -> String {
        if asked(spec).is_some_and(|asked| rate >= 0.95 * asked) {
            return "demand".to_owned();
        }
        let full = self.full(spec, ways);
        full.or_else(|| self.awaited(spec, ways)).unwrap_or_else(|| "latency".to_owned())
    }

    /// The lanes that a flow's packets go by, completions too.
    fn lanes(&self, ways: &[WayId]) -> Vec<LaneId> {
        let both = |lane: LaneId| [lane, lane.back()];
        ways.iter().flat_map(|way| self.assembly.world.lanes_of(*way)).flat_map(both).collect()
    }

    fn parts(&self, ways: &[WayId]) -> Vec<PartId> {
        ways.iter().flat_map(|way| self.assembly.world.parts_of(*way)).collect()
    }

    /// The requesters of a flow's devices, with their names.
    fn requesters<'s>(&self, spec: &'s FlowSpec) -> Vec<(&'s str, RequesterId)> {
        let ends = spec.kind.ends().into_iter();
        let found = ends.filter_map(|name| {
            let end = self.assembly.end(name).ok()?;
            Some((name, self.assembly.requester(end)?))
        });
        found.collect()
    }

    fn link(&self, lane: LaneId) -> String {
        let (from, to) = self.assembly.world.ends_of(lane);
        format!("{} to {}", self.assembly.name(from), self.assembly.name(to))
    }

    /// What is used all the time: the fullest.
    fn full(&self, spec: &FlowSpec, ways: &[WayId]) -> Option<String> {
        let world = &self.assembly.world;
        let mut found: Vec<(f64, String)> = Vec::new();
        for lane in self.lanes(ways) {
            found.push((world.utilization(lane), self.link(lane)));
        }
        let parts = self.parts(ways);
        for part in &parts {
            let name = self.assembly.name(*part);
            found.push((world.peer_share(*part), format!("{name}: peer writes")));
            found.push((world.walked_share(*part), format!("{name}: page walkers")));
        }
        for target in ways.iter().filter_map(|way| world.parts_of(*way).last()) {
            let name = format!("{}: memory bandwidth", self.assembly.name(target));
            found.push((world.served_share(target).iter().sum(), name));
        }
        for (name, requester) in self.requesters(spec) {
            let engine = world.engine_share(requester).unwrap_or(0.0);
            found.push((engine, format!("{name}: engine")));
            found.push((world.paced_share(requester), format!("{name}: packet rate")));
        }
        if let FlowKind::Ring { device, .. } = &spec.kind {
            let medium = self.assembly.end(device).ok().and_then(|end| self.media.get(&end));
            let share = medium.map_or(0.0, |medium| world.taken_share(*medium));
            found.push((share, format!("{device}: medium")));
        }
        let full = found.into_iter().filter(|(share, _)| *share >= FULL);
        // Of equals the first.
        let most = full.reduce(|one, other| if other.0 > one.0 { other } else { one });
        most.map(|(_, name)| name)
    }

    /// What was waited for most of the time; what makes others wait before those.
    fn awaited(&self, spec: &FlowSpec, ways: &[WayId]) -> Option<String> {
        let world = &self.assembly.world;
        let mut parts = self.parts(ways).into_iter();
        if let Some(root) = parts.find(|part| world.tracked_share(*part) >= AWAITED) {
            return Some(format!("{}: split reads", self.assembly.name(root)));
        }
        for lane in self.lanes(ways) {
            for (class, name) in CLASSES {
                if world.share(world.blocked(lane, class)) >= AWAITED {
                    return Some(format!("{}: {name} credits", self.link(lane)));
                }
            }
        }
        let requesters = self.requesters(spec);
        let tags = requesters.iter().find(|(_, at)| world.starved_share(*at) >= AWAITED);
        tags.map(|(name, _)| format!("{name}: tags"))
    }
}
