//! Where bytes land that are copied to another machine beside the link, before they take effect there: which piece of the landing
//! memory each copy has, and until when.
//!
//! Landing memory is the owner's node's own, one for each connector's node, and none of a segment's: whoever reaches it reaches
//! nothing else. A copy's bytes are moved to a *slot* of it by remote memory access, and when they are there, the link says which
//! bytes of which batch they are. From then on they are what a message of the link brings: they take effect with their batch, by
//! the rules of [`coherence`](crate::coherence), and no sooner.
//!
//! A slot has the bytes of one copy until these have taken effect, as the owner reads them when it hears of them. Where that is
//! not known (a transfer that did not end, an answer that did not come) bytes may still arrive in the slot, or be read from it: it
//! is never used again, and no other one is, since the lane that does so is lost. Who loses it sends bytes over the link.

use std::ops::Range;

/// Bytes of a slot: a copy, or a part of one, of more bytes goes over the link.
pub const LANDING_SLOT: u32 = 1 << 20;
/// Slots of a landing memory: copies that are on their way at a time, of all processes of a host to one other host.
pub const LANDING_SLOTS: u32 = 4;
/// Bytes of all slots.
pub const LANDING_BYTES: u32 = LANDING_SLOT * LANDING_SLOTS;
/// Copies of fewer bytes go over the link: they are there sooner than a transfer is, and what says so.
pub const LEAST_LANDED: u32 = 32 << 10;

/// The slots as the connector has them.
#[derive(Debug)]
pub struct LandingSlots {
    free: Vec<u32>,
    is_lost: bool,
}

impl Default for LandingSlots {
    fn default() -> LandingSlots {
        LandingSlots { free: (0..LANDING_SLOTS).rev().collect(), is_lost: false }
    }
}

impl LandingSlots {
    /// The place of a slot for so many bytes, which nobody else has until it is [given back](LandingSlots::give_back). `None` where
    /// they go over the link.
    pub fn take(&mut self, length: usize) -> Option<u32> {
        let fits = (LEAST_LANDED as usize..=LANDING_SLOT as usize).contains(&length);
        if self.is_lost || !fits {
            return None;
        }
        self.free.pop().map(|slot| slot * LANDING_SLOT)
    }

    /// The bytes at this place have taken effect: the slot is free.
    pub fn give_back(&mut self, place: u32) {
        self.free.push(place / LANDING_SLOT);
    }

    /// Nothing lands any more.
    pub fn lose(&mut self) {
        self.is_lost = true;
    }

    /// Whether nothing lands any more.
    pub fn is_lost(&self) -> bool {
        self.is_lost
    }
}

/// The bytes of a landing memory that a connector says have landed; `None` where they are none of a slot.
pub fn landed_range(place: u32, length: u32) -> Option<Range<usize>> {
    let is_slot = place.is_multiple_of(LANDING_SLOT) && place < LANDING_BYTES;
    let is_long = (1..=LANDING_SLOT).contains(&length);
    (is_slot && is_long).then(|| place as usize..(place + length) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_has_one_copy_until_it_is_given_back_and_none_when_all_is_lost() {
        let (mut slots, length) = (LandingSlots::default(), LANDING_SLOT as usize);
        let mut taken: Vec<u32> = (0..LANDING_SLOTS).map(|_| slots.take(length).unwrap()).collect();
        assert_eq!(slots.take(length), None, "the link has room");
        for (nth, place) in taken.iter().enumerate() {
            let range = landed_range(*place, LANDING_SLOT).unwrap();
            assert!(range.end <= LANDING_BYTES as usize && !taken[..nth].contains(place));
        }
        let place = taken.pop().unwrap();
        slots.give_back(place);
        for not in [0, LEAST_LANDED as usize - 1, length + 1] {
            assert_eq!(slots.take(not), None, "{not} bytes go over the link");
        }
        assert_eq!(slots.take(LEAST_LANDED as usize), Some(place));
        slots.give_back(place);
        slots.lose();
        assert!(slots.take(length).is_none() && slots.is_lost());
    }

    #[test]
    fn what_is_in_no_slot_has_not_landed() {
        assert_eq!(landed_range(LANDING_SLOT, 5), Some(1 << 20..(1 << 20) + 5));
        for (place, length) in [
            (0, 0),
            (0, LANDING_SLOT + 1),
            (1, 5),
            (LANDING_BYTES, 1),
            (u32::MAX, 1),
            (0, u32::MAX),
            (u32::MAX - LANDING_SLOT + 1, LANDING_SLOT),
        ] {
            assert_eq!(landed_range(place, length), None, "{place} {length}");
        }
    }
}
