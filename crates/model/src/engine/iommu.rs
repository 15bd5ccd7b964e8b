//! An IOMMU: translations are cached (IOTLB); one that is not asks for a walk of the page table,
//! and only so many walks run at a time.

use crate::random::mix;
use crate::time::Time;

/// Translations that share a place in the cache: it is four ways associative.
const WAYS: usize = 4;

/// Whose page it is, and its number.
type Page = (u64, u64);
const NOTHING: Page = (u64::MAX, u64::MAX);

/// What an IOMMU is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IommuParameters {
    /// Translations that its cache holds, rounded up to a power of two of at least four.
    pub entries: u32,
    /// Bytes of a page: a power of two.
    pub page: u64,
    /// How long a translation takes that is in the cache.
    pub hit: Time,
    /// How long a walk takes.
    pub walk: Time,
    /// How many walks run at a time.
    pub walkers: u32,
}

/// An IOMMU: its cache, and the walks under way.
#[derive(Debug)]
pub struct Iommu {
    parameters: IommuParameters,
    /// By set: pages of whom and when their translation is there, the one used last first; [`NOTHING`] is none.
    sets: Vec<[(Page, Time); WAYS]>,
    /// When each walker is free.
    walkers: Vec<Time>,
    /// How long its walkers were at work, all together, while that was measured.
    walked: Time,
}

impl Iommu {
    /// With nothing in its cache.
    pub fn new(parameters: IommuParameters) -> Iommu {
        let sets = (parameters.entries as usize).div_ceil(WAYS).next_power_of_two();
        Iommu {
            parameters,
            sets: vec![[(NOTHING, Time::ZERO); WAYS]; sets],
            walkers: vec![Time::ZERO; parameters.walkers.max(1) as usize],
            walked: Time::ZERO,
        }
    }

    /// When the translation that is asked for at `now` is there; `counted` when its walk is to be measured.
    /// `whose` tells page tables apart: that of each requester, and what it is for.
    pub fn translate(&mut self, now: Time, whose: u64, address: u64, counted: bool) -> Time {
        let tag = (whose, address / self.parameters.page);
        // Each page table begins at a set of its own.
        let hashed = tag.1.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let mixed = hashed.wrapping_add(mix(whose, 0));
        let count = self.sets.len();
        let set = &mut self.sets[mixed as usize & (count - 1)];
        let found = set.iter().position(|(other, _)| *other == tag);
        set[..=found.unwrap_or(WAYS - 1)].rotate_right(1);
        if found.is_some() {
            // It may be that the walk for it is still under way.
            return (now + self.parameters.hit).max(set[0].1);
        }
        let walker = self.walkers.iter_mut().min();
        let Some(walker) = walker else { return now + self.parameters.walk };
        *walker = now.max(*walker) + self.parameters.walk;
        self.walked += if counted { self.parameters.walk } else { Time::ZERO };
        set[0] = (tag, *walker);
        *walker
    }

    /// How long a translation takes that is in the cache.
    pub fn hit(&self) -> Time {
        self.parameters.hit
    }

    /// How long its walkers were at work, all together.
    pub fn walked(&self) -> Time {
        self.walked
    }

    /// How many walkers it has.
    pub fn walkers(&self) -> f64 {
        self.walkers.len() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn iommu(entries: u32, walkers: u32) -> Iommu {
        Iommu::new(IommuParameters {
            entries,
            page: 4096,
            hit: Time::from_ns(2),
            walk: Time::from_ns(200),
            walkers,
        })
    }

    #[test]
    fn a_page_is_walked_once() {
        let mut iommu = iommu(64, 1);
        assert_eq!(iommu.translate(Time::ZERO, 1, 0x1000, true), Time::from_ns(200));
        assert_eq!(iommu.translate(Time::from_us(1), 1, 0x1fff, true), Time::from_ns(1002));
        assert_eq!(iommu.translate(Time::from_us(1), 2, 0x1000, true), Time::from_ns(1200));
        assert_eq!(iommu.walked(), Time::from_ns(400));
    }

    #[test]
    fn requests_during_a_page_walk_wait_for_it() {
        let mut iommu = iommu(64, 1);
        assert_eq!(iommu.translate(Time::ZERO, 1, 0, true), Time::from_ns(200));
        assert_eq!(iommu.translate(Time::from_ns(50), 1, 64, true), Time::from_ns(200));
    }

    #[test]
    fn walks_wait_for_a_walker() {
        let mut iommu = iommu(64, 2);
        let ends = [0, 1, 2].map(|page| iommu.translate(Time::ZERO, 1, page * 4096, true).ns());
        assert_eq!(ends, [200.0, 200.0, 400.0]);
    }

    #[test]
    fn more_pages_than_places_miss() {
        let mut iommu = iommu(64, 1);
        for _ in 0..3 {
            (0..1000).for_each(|page| {
                iommu.translate(Time::ZERO, 1, page * 4096, true);
            });
        }
        assert!(iommu.walked() > Time::from_ns(200) * 2_900, "{}", iommu.walked());
    }
}
