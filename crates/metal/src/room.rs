//! Which parts of a borrower's window are free (pure).
//!
//! A borrower that did not release a function may still access the place where it was. So the place is kept from
//! others until the borrower's link has gone down, which ends all who accessed anything through it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::plan::WindowRoom;
use crate::window::AREA;

/// A part of the window that was taken for one loan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoanPlace {
    /// Offset of the control area.
    pub control: u64,
    /// Offsets of the BARs.
    pub bars: Vec<u64>,
    /// How often the link had gone down by then.
    downs: u64,
}

impl LoanPlace {
    /// Whether it is one of its own offsets, or the second part of the control area.
    pub fn contains(&self, offset: u64) -> bool {
        let area = self.control..self.control + AREA as u64;
        area.contains(&offset) || self.bars.contains(&offset)
    }
}

/// The room of a window, and what nobody may have before the link goes down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LentRoom {
    room: WindowRoom,
    /// BARs by the offset of their control areas.
    retired: BTreeMap<u64, Vec<u64>>,
    downs: u64,
}

impl LentRoom {
    /// Nothing of `room` is lent.
    pub fn new(room: WindowRoom) -> LentRoom {
        LentRoom { room, retired: BTreeMap::new(), downs: 0 }
    }

    /// Whether it can be the room of a window of `size` bytes, as another process says, with a loan at each of these places.
    pub fn is_possible(&self, size: u64, places: &[LoanPlace]) -> bool {
        let taken = self.room.taken();
        let has =
            |control: u64, bars: &[u64]| bars.iter().chain([&control]).all(|at| taken.contains(at));
        self.room.is_possible(size)
            && self.retired.iter().all(|(control, bars)| has(*control, bars))
            && places.iter().all(|it| has(it.control, &it.bars) && it.downs <= self.downs)
    }

    /// Takes room for a control area and for BARs of these sizes, each a power of two, if there is enough.
    pub fn take(&mut self, bars: &[u64]) -> Option<LoanPlace> {
        let (control, bars) = self.room.take(bars)?;
        Some(LoanPlace { control, bars, downs: self.downs })
    }

    /// Gives a place back that nobody accesses any more.
    pub fn give_back(&mut self, place: &LoanPlace) {
        self.room.give_back(place.control, &place.bars);
    }

    /// Gives a place back that its borrower has not released: at once when the link has gone down since it was taken,
    /// else when it does.
    pub fn retire(&mut self, place: &LoanPlace) {
        match place.downs == self.downs {
            true => drop(self.retired.insert(place.control, place.bars.clone())),
            false => self.give_back(place),
        }
    }

    /// Keeps what is taken for nothing at these offsets from others until the link goes down: another process lent it, and
    /// nobody goes on with that.
    pub fn retire_others(&mut self, kept: &[u64]) {
        for at in self.room.taken() {
            let of_loan = kept.contains(&at);
            let retired =
                self.retired.iter().any(|(control, bars)| *control == at || bars.contains(&at));
            if !of_loan && !retired {
                self.retired.insert(at, Vec::new());
            }
        }
    }

    /// The link has gone down, and with it who accessed what was lent until now.
    pub fn link_went_down(&mut self) {
        self.downs += 1;
        for (control, bars) in std::mem::take(&mut self.retired) {
            self.room.give_back(control, &bars);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BAR: u64 = 64 << 10;

    /// With room for one loan.
    fn room() -> LentRoom {
        LentRoom::new(WindowRoom::new(2 * BAR))
    }

    #[test]
    fn a_place_that_is_not_released_is_free_when_the_link_has_gone_down_before_or_after_its_loan_ends()
     {
        for down_first in [false, true] {
            let mut room = room();
            let place = room.take(&[BAR]).unwrap();
            assert_eq!(room.take(&[BAR]), None);
            if down_first {
                room.link_went_down();
                assert_eq!(room.take(&[BAR]), None, "the loan has it still");
                room.retire(&place);
            } else {
                room.retire(&place);
                assert_eq!(room.take(&[BAR]), None, "its borrower may access it");
                room.link_went_down();
            }
            assert!(room.take(&[BAR]).is_some(), "down_first: {down_first}");
        }
    }

    #[test]
    fn what_nobody_goes_on_with_is_free_when_the_link_has_gone_down() {
        let mut room = LentRoom::new(WindowRoom::new(3 * BAR));
        let (kept, _lost) = (room.take(&[BAR]).unwrap(), room.take(&[BAR]).unwrap());
        room.retire_others(&[&[kept.control], &kept.bars[..]].concat());
        assert_eq!(room.take(&[BAR]), None);
        room.link_went_down();
        assert!(room.take(&[BAR]).is_some());
        assert!(room.is_possible(3 * BAR, &[kept]));
    }

    #[test]
    fn a_place_taken_after_the_link_went_down_waits_for_the_next_time() {
        let mut room = room();
        room.link_went_down();
        let place = room.take(&[BAR]).unwrap();
        room.retire(&place);
        assert_eq!(room.take(&[BAR]), None);
        room.link_went_down();
        let place = room.take(&[BAR]).unwrap();
        room.give_back(&place);
        assert!(room.take(&[BAR]).is_some());
    }
}
