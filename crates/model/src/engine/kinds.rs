//! What parts are like, and what a world tells of its parts.

use super::iommu::IommuParameters;
use super::{DirectionId, PacketClass, PartId, World};
use crate::time::Time;

/// What a part is like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartParameters {
    /// How long a packet stays that is passed on, by [`PacketClass`]: from its head's coming to its going.
    pub delay: [Time; 3],
    /// As a target: from a packet's service to the write's being seen, or its completions' going.
    pub access: Time,
    /// As a target: picoseconds of service per byte, times 1024. 0 serves any number at a time.
    pub service_per_byte: u64,
    /// As a target: added to the service of a write that does not fill whole lines of `line` bytes.
    pub partial_write: Time,
    /// Bytes of a cache line.
    pub line: u32,
    /// As a target: the most bytes of a completion; they end at multiples of it.
    pub completion: u32,
    /// As a target: reads of more bytes than this have completions of [`PartParameters::long_completion`]; 0: none
    /// has.
    pub long_read: u32,
    /// As a target: the most bytes of a completion of a long read.
    pub long_completion: u32,
    /// What translates the requests that it passes on.
    pub iommu: Option<IommuParameters>,
    /// The most bytes of a read request that it passes on from one link to another; 0 passes them on
    /// as they are. Device Lending (2019, section 7.1): Xeon roots make four of 64 bytes of one of 256.
    pub split: u32,
    /// Read requests that it passes on from link to link at a time. Those that have other parts with
    /// trackers before them have as many of their own: were they the same, requests of both ways could
    /// wait for each other for ever.
    pub trackers: u32,
    /// Whether it turns packets round: passes them from one link down to another. Those that have such parts
    /// before them wait apart from those that have not.
    pub turns: bool,
    /// Picoseconds per byte, times 1024, of writes that it passes on from link to link; 0 passes any number.
    pub peer_per_byte: u64,
    /// Completions of a request that it has split are held until they are so many bytes, a power of two,
    /// or all of the request; 0 passes each on as it comes.
    pub combine: u32,
}

impl Default for PartParameters {
    fn default() -> Self {
        PartParameters {
            delay: [Time::ZERO; 3],
            access: Time::ZERO,
            service_per_byte: 0,
            partial_write: Time::ZERO,
            line: 64,
            completion: 256,
            long_read: 0,
            long_completion: 0,
            iommu: None,
            split: 0,
            trackers: u32::MAX,
            turns: false,
            peer_per_byte: 0,
            combine: 0,
        }
    }
}

impl PartParameters {
    /// The most bytes of a completion of a read of `bytes`.
    pub fn completion_of(&self, bytes: u32) -> u32 {
        let long = self.long_read != 0 && bytes > self.long_read;
        if long { self.long_completion } else { self.completion }.max(1)
    }
}

impl World {
    /// The share of the measured time in which reads waited for a tracker of a part.
    pub fn tracked_share(&self, part: PartId) -> f64 {
        let here = &self.parts[part.index()];
        self.share(here.full + self.now.since(here.full_since.max(self.measured_from)))
    }

    /// The share of the measured time for which a part served writes, and reads.
    pub fn served_share(&self, part: PartId) -> [f64; 2] {
        self.parts[part.index()].served.map(|span| self.share(span))
    }

    /// The share of the measured time for which a part passed on writes from link to link.
    pub fn peer_share(&self, part: PartId) -> f64 {
        self.share(self.parts[part.index()].peers)
    }

    /// The share of the measured time for which a part's page walkers were at work.
    pub fn walked_share(&self, part: PartId) -> f64 {
        let here = &self.parts[part.index()];
        here.iommu.as_ref().map_or(0.0, |iommu| self.share(iommu.walked()) / iommu.walkers())
    }

    /// The share of the measured time in which what came by a direction waited for page walks where that leads to.
    pub fn walk_share(&self, direction: DirectionId) -> f64 {
        let there = &self.parts[self.ends_of(direction).1.index()];
        let own = there.walked.iter().find(|(by, _)| *by == direction.0);
        own.map_or(0.0, |(_, waited)| self.share(*waited))
    }

    /// The parts of a route, from its beginning on.
    pub fn parts_of(&self, route: super::RouteId) -> impl Iterator<Item = PartId> {
        self.hops[self.routes[route.index()].hops()].iter().map(|hop| PartId(hop.part))
    }

    /// What a part is like.
    pub fn part(&self, part: PartId) -> &PartParameters {
        &self.parts[part.index()].parameters
    }

    /// All parts, in the order in which they were added.
    pub fn part_ids(&self) -> impl ExactSizeIterator<Item = PartId> {
        (0..self.parts.len() as u32).map(PartId)
    }

    /// The parts that a direction leads from and to.
    pub fn ends_of(&self, direction: DirectionId) -> (PartId, PartId) {
        let direction = &self.directions[direction.index()];
        (PartId(direction.from), PartId(direction.to))
    }

    /// The directions of a route.
    pub fn directions_of(&self, route: super::RouteId) -> Vec<DirectionId> {
        let hops = &self.hops[self.routes[route.index()].hops()];
        hops.iter().filter_map(|hop| hop.next(false)).map(DirectionId).collect()
    }

    /// All directions, both of each link after one another.
    pub fn direction_ids(&self) -> impl ExactSizeIterator<Item = DirectionId> {
        (0..self.directions.len() as u32).map(DirectionId)
    }

    /// Whether a direction is one of a link, and not inside of a chip.
    pub(super) fn is_link(&self, direction: u32) -> bool {
        self.directions[direction as usize].wire.is_some()
    }

    /// How long packets of a class waited for credits of a direction, since measuring began.
    pub fn blocked(&self, direction: DirectionId, class: PacketClass) -> Time {
        let here = &self.directions[direction.index()];
        let since = here.blocked_since[class as usize].max(self.measured_from);
        here.stats.blocked[class as usize] + self.now.since(since)
    }
}
