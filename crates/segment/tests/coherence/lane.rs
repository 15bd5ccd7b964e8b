//! A lane that moves copies to landing memory of another machine: it ends them, or loses them, and what it lost may still
//! arrive.

use std::collections::{BTreeMap, VecDeque};

use rackbus_seeds::Random;
use rackbus_segment::landing::{LANDING_SLOT, LandingSlots};

use super::{COPY, Policy};

/// By what copies of this end land at the other one.
#[derive(Debug, Default)]
pub struct Lane {
    pub slots: LandingSlots,
    /// The landing memory: what is at each place.
    pub memory: BTreeMap<u32, Vec<u8>>,
    /// Where copies are that are under way, with the numbers of their batches.
    pub under_way: VecDeque<(u64, u32)>,
    /// Where copies to other memory of the same host are.
    pub others: Vec<u32>,
    /// What did not end, and may arrive at any time.
    pub late: Vec<(u32, Vec<u8>)>,
}

impl Lane {
    /// Moves bytes: their place if that ended.
    pub fn land(&mut self, bytes: &[u8], policy: Policy, random: &mut Random) -> Option<u32> {
        let length = if bytes.is_empty() { 0 } else { LANDING_SLOT };
        let place = self.slots.take(length as usize)?;
        if random.below(6) > 0 {
            self.put(place, bytes);
            if policy == Policy::SlotSoonFree {
                self.slots.give_back(place);
            }
            return Some(place);
        }
        self.late.push((place, bytes.to_vec()));
        match policy {
            Policy::LandAfterLoss => self.slots.give_back(place),
            _ => self.slots.lose(),
        }
        None
    }

    /// A batch has taken effect: if it had landed, the slot is another one's.
    pub fn note_effect(&mut self, batch: u64, policy: Policy) {
        if self.under_way.front().is_some_and(|(oldest, _)| *oldest == batch) {
            let freed = match policy {
                Policy::SlotOfLater => self.under_way.pop_back(),
                _ => self.under_way.pop_front(),
            };
            let freed = freed.filter(|_| policy != Policy::SlotSoonFree);
            freed.into_iter().for_each(|(_, place)| self.slots.give_back(place));
        }
    }

    /// Bytes arrive at a place, where others may be.
    pub fn put(&mut self, place: u32, bytes: &[u8]) {
        let slot = self.memory.entry(place).or_insert_with(|| vec![0; COPY]);
        slot[..bytes.len()].copy_from_slice(bytes);
    }

    /// A copy to other memory of the same host lands, or has taken effect.
    pub fn land_other(&mut self, random: &mut Random) {
        if random.below(2) == 0 {
            if let Some(place) = self.slots.take(LANDING_SLOT as usize) {
                self.put(place, &[u8::MAX; COPY]);
                self.others.push(place);
            }
        } else if let Some(place) = self.others.pop() {
            self.slots.give_back(place);
        }
    }

    /// Something arrives that was given up.
    pub fn arrive_late(&mut self, random: &mut Random) {
        if !self.late.is_empty() {
            let (place, bytes) = self.late.swap_remove(random.below(self.late.len()));
            self.put(place, &bytes);
        }
    }
}
