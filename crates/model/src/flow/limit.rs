//! What bounds flows in a rack: each thing that only so much fits through, and how much that is.

use rackbus_qos::Metered;

use crate::engine::{DirectionId, MeterId, PartId, RequesterId, ResourceId, World};
use crate::wire;

/// Picoseconds of a second.
pub(super) const SECOND: f64 = 1e12;

/// Something that only so much fits through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Limit {
    /// Bytes on a wire.
    Direction(DirectionId),
    /// Bytes that a target serves.
    Service(PartId),
    /// Picoseconds of a root's trackers.
    Trackers(PartId),
    /// Picoseconds of an IOMMU's walkers.
    Walkers(PartId),
    /// Bytes of writes that a root passes on from link to link.
    Peers(PartId),
    /// Picoseconds of a requester's tags.
    Tags(RequesterId),
    /// Bytes that a requester's engine moves.
    Engine(RequesterId),
    /// Picoseconds of a requester that makes its packets with gaps.
    Gap(RequesterId),
    /// Picoseconds of a requester's places for packets that wait for the first link.
    Window(RequesterId),
    /// Picoseconds of the units of what jobs use or hold, of which only so many can at a time.
    Units(ResourceId),
    /// Picoseconds in which what jobs take of a function's limit comes again.
    Rate(MeterId, Metered),
}

impl Limit {
    /// What fits through in a second.
    pub(super) fn capacity(self, world: &World) -> f64 {
        match self {
            Limit::Direction(id) => {
                world.direction_parameters(id).wire.map_or(1.0, wire::Wire::rate)
            }
            Limit::Service(id) => 1024.0 * SECOND / world.part(id).service_per_byte.max(1) as f64,
            Limit::Peers(id) => 1024.0 * SECOND / world.part(id).peer_per_byte.max(1) as f64,
            Limit::Trackers(id) => f64::from(world.part(id).trackers) * SECOND,
            Limit::Walkers(id) => {
                f64::from(world.part(id).iommu.map_or(1, |iommu| iommu.walkers.max(1))) * SECOND
            }
            Limit::Tags(id) => f64::from(world.requester(id).0.tags) * SECOND,
            Limit::Engine(id) => world.requester(id).0.engine.unwrap_or(1) as f64,
            Limit::Gap(_) | Limit::Rate(..) => SECOND,
            Limit::Window(id) => f64::from(world.requester(id).0.window) * SECOND,
            Limit::Units(id) => f64::from(world.units(id)) * SECOND,
        }
    }

    /// Whether each queue of a flow may have one for itself.
    pub(super) fn may_be_own(self) -> bool {
        match self {
            Limit::Tags(_)
            | Limit::Engine(_)
            | Limit::Gap(_)
            | Limit::Window(_)
            | Limit::Units(_) => true,
            Limit::Direction(_)
            | Limit::Service(_)
            | Limit::Trackers(_)
            | Limit::Walkers(_)
            | Limit::Peers(_)
            | Limit::Rate(..) => false,
        }
    }
}
