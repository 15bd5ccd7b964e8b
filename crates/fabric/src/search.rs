//! The shortest way between two components, searched from both ends at once.
//!
//! In a rack of ten thousand hosts a search from one end would look at every host before it finds
//! the other. Two searches climb the few switches above their ends and meet there; the cheaper one
//! always continues, so that neither looks at all neighbours of a switch which the other reaches too.
//!
//! Of several shortest ways the answer is what a breadth-first search from the beginning finds
//! first: at the first step where two ways part, the link that was made first decides.

use std::collections::BTreeMap;

use crate::topology::{ComponentId, Topology};

/// The shortest way from `from` to `to`, both included, through components that pass.
pub(crate) fn shortest(
    topology: &Topology,
    from: ComponentId,
    to: ComponentId,
    passes: impl Fn(ComponentId) -> bool,
) -> Option<Vec<ComponentId>> {
    let enters = |id| id == from || id == to || passes(id);
    let (mut near, mut far) = (Side::new(from), Side::new(to));
    loop {
        // All shortest ways cross this edge. It is in the order of the links to it, so what is
        // found first leads there by the first of them.
        if let Some(middle) = near.edge.iter().find(|id| far.reached.contains_key(id)) {
            let mut way = near.back(*middle);
            way.reverse();
            way.extend(far.onward(topology, *middle));
            return Some(way);
        }
        if near.edge.is_empty() || far.edge.is_empty() {
            return None;
        }
        let side = if near.cost(topology) <= far.cost(topology) { &mut near } else { &mut far };
        side.advance(topology, enters);
    }
}

/// The search from one end.
struct Side {
    /// How far from the end each component is, and the one by which it was reached first.
    reached: BTreeMap<ComponentId, (usize, ComponentId)>,
    /// The farthest of them, all at `distance`, in the order in which they were reached.
    edge: Vec<ComponentId>,
    distance: usize,
}

impl Side {
    fn new(end: ComponentId) -> Self {
        Side { reached: BTreeMap::from([(end, (0, end))]), edge: vec![end], distance: 0 }
    }

    /// How many neighbours the next step looks at.
    fn cost(&self, topology: &Topology) -> usize {
        self.edge.iter().map(|id| topology.neighbours(*id).len()).sum()
    }

    /// Goes one link further on all ways.
    fn advance(&mut self, topology: &Topology, enters: impl Fn(ComponentId) -> bool) {
        self.distance += 1;
        let mut edge = Vec::new();
        for here in &self.edge {
            for (next, _) in topology.neighbours(*here) {
                if enters(*next) && !self.reached.contains_key(next) {
                    self.reached.insert(*next, (self.distance, *here));
                    edge.push(*next);
                }
            }
        }
        self.edge = edge;
    }

    /// The way back to the end from `here`, both included.
    fn back(&self, here: ComponentId) -> Vec<ComponentId> {
        let mut way = vec![here];
        let mut last = here;
        while let Some((_, before)) = self.reached.get(&last).filter(|(steps, _)| *steps > 0) {
            way.push(*before);
            last = *before;
        }
        way
    }

    /// What follows `here` on the way to the end: of the neighbours that are nearer to it, always
    /// the one that was joined first.
    fn onward(&self, topology: &Topology, here: ComponentId) -> Vec<ComponentId> {
        let steps = |id: &ComponentId| self.reached.get(id).map(|(steps, _)| *steps);
        let nearer = |last: &ComponentId| {
            let target = steps(last)?.checked_sub(1);
            let mut neighbours = topology.neighbours(*last).iter().map(|(id, _)| *id);
            neighbours.find(|id| target.is_some() && steps(id) == target)
        };
        std::iter::successors(nearer(&here), nearer).collect()
    }
}
