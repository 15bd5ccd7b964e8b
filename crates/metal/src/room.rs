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
    /// The places that loans of this process have, BARs by the offset of their control areas: another one goes on with them by
    /// themselves.
    #[serde(skip)]
    lent: BTreeMap<u64, Vec<u64>>,
}

impl LentRoom {
    /// Nothing of `room` is lent.
    pub fn new(room: WindowRoom) -> LentRoom {
        LentRoom { room, retired: BTreeMap::new(), downs: 0, lent: BTreeMap::new() }
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
        self.lent.insert(control, bars.clone());
        Some(LoanPlace { control, bars, downs: self.downs })
    }

    /// As another process begins with it, which has no loan yet.
    pub fn passed_on(self) -> LentRoom {
        LentRoom { lent: BTreeMap::new(), ..self }
    }

    /// Goes on with a loan of another process at its place; false where another loan has a part of it.
    #[must_use]
    pub fn go_on(&mut self, place: &LoanPlace) -> bool {
        let is_free =
            !self.is_lent(place.control) && !place.bars.iter().any(|at| self.is_lent(*at));
        if is_free {
            self.lent.insert(place.control, place.bars.clone());
        }
        is_free
    }

    /// A loan does not go on after all: its place is as all that [nobody goes on with](LentRoom::retire_others).
    pub fn abandon(&mut self, place: &LoanPlace) {
        self.lent.remove(&place.control);
    }

    /// Whether a loan of this process has this offset, which is that of a BAR or in a control area.
    pub fn is_lent(&self, offset: u64) -> bool {
        let area = |control: u64| (control..control + AREA as u64).contains(&offset);
        self.lent.iter().any(|(control, bars)| area(*control) || bars.contains(&offset))
    }

    /// Whether the link has gone down since a place was taken.
    pub fn went_down_since(&self, place: &LoanPlace) -> bool {
        place.downs != self.downs
    }

    /// Gives a place back that nobody accesses any more.
    pub fn give_back(&mut self, place: &LoanPlace) {
        self.lent.remove(&place.control);
        self.room.give_back(place.control, &place.bars);
    }

    /// Gives a place back that its borrower has not released: at once when the link has gone down since it was taken,
    /// else when it does.
    pub fn retire(&mut self, place: &LoanPlace) {
        if self.went_down_since(place) {
            return self.give_back(place);
        }
        self.lent.remove(&place.control);
        self.retired.insert(place.control, place.bars.clone());
    }

    /// Keeps what is taken for no loan of this process from others until the link goes down: another process lent it, and
    /// nobody goes on with that.
    pub fn retire_others(&mut self) {
        for at in self.room.taken() {
            let retired =
                self.retired.iter().any(|(control, bars)| *control == at || bars.contains(&at));
            if !self.is_lent(at) && !retired {
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
        let mut before = LentRoom::new(WindowRoom::new(3 * BAR));
        let (kept, lost) = (before.take(&[BAR]).unwrap(), before.take(&[BAR]).unwrap());
        let mut room = before.passed_on();
        assert!(room.go_on(&kept) && room.go_on(&lost));
        assert!(!room.go_on(&kept), "twice");
        let overlapping = LoanPlace { control: lost.bars[0], ..lost.clone() };
        assert!(!room.go_on(&overlapping), "a part of another one's");
        room.abandon(&lost);
        room.retire_others();
        assert_eq!(room.take(&[BAR]), None);
        room.link_went_down();
        assert!(room.take(&[BAR]).is_some());
        assert!(room.is_possible(3 * BAR, &[kept]));
    }

    /// It may end at any moment, also before all others go on: its place is its own until then, and given back once.
    #[test]
    fn the_place_of_a_loan_that_fails_as_it_goes_on_is_given_back_once() {
        let mut before = room();
        let place = before.take(&[BAR]).unwrap();
        let mut room = before.passed_on();
        assert!(room.go_on(&place));
        room.retire_others();
        room.give_back(&place);
        let next = room.take(&[BAR]).unwrap();
        room.link_went_down();
        assert_eq!(room.take(&[BAR]), None, "the next loan has it");
        assert!(room.went_down_since(&next));
    }

    /// It is lent to a host that has started anew, and knows nothing of it.
    #[test]
    fn a_loan_that_goes_on_after_the_link_went_down_is_told_apart() {
        let mut before = room();
        let place = before.take(&[BAR]).unwrap();
        let mut room = before.passed_on();
        assert!(!room.went_down_since(&place));
        room.link_went_down();
        assert!(room.go_on(&place) && room.went_down_since(&place));
        room.retire(&place);
        let place = room.take(&[BAR]).unwrap();
        assert!(!room.went_down_since(&place));
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
