//! IOMMUs' caches, which the pages of all queues and flows are in that an IOMMU translates.

use super::cost::{Pages, pages_of};
use crate::engine::{FlowId, PartId, World};

/// What flows ask the caches of IOMMUs for.
#[derive(Default)]
pub(super) struct Caches {
    /// How many pages all flows ask each for.
    pub all: Pages,
    /// By flow: how many pages it asks each for itself, and whether at random.
    own: Vec<(Pages, bool)>,
}

impl Caches {
    /// Adds a flow of these queues, which all do the same, each in pages of its own.
    pub(super) fn add(&mut self, world: &World, queues: &[FlowId]) {
        let mut own = Pages::new();
        let Some(first) = queues.first() else { return self.own.push((own, false)) };
        let addresses = world.addresses(*first);
        for (part, _) in world.translated_by(*first) {
            let Some(iommu) = world.part(part).iommu else { continue };
            *own.entry(part).or_default() += pages_of(addresses, iommu.page) * queues.len() as u64;
        }
        for (part, pages) in &own {
            *self.all.entry(*part).or_default() += pages;
        }
        self.own.push((own, addresses.random));
    }

    /// Why it is not known how often a flow's pages are in the caches: others', which it takes turns with, decide that.
    pub(super) fn doubt(&self, world: &World, nth: usize) -> Option<&'static str> {
        let (own, random) = &self.own[nth];
        let unknown = |(part, own): (&PartId, &u64)| {
            let room = world.part(*part).iommu.map_or(u64::MAX, |iommu| u64::from(iommu.entries));
            let all = self.all[part];
            *own < all && all > room && (*own <= room || *random && all / 4 < room)
        };
        own.iter().any(unknown).then_some(
            "its pages share an IOMMU's cache with others', which has no room for all; simulate it",
        )
    }
}
