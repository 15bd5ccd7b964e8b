//! The service level of a borrower is changed while it has the function. Of the changes that were asked for the
//! newest counts, and is answered as often as it is asked for.

use serde::{Deserialize, Serialize};

use crate::change::LevelChange;
use crate::message::{Epoch, Incarnation, Message};

use super::{Device, Lender, LenderAction, State};

/// A change of a service level.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LenderChange {
    /// The epoch of the lease whose level changes.
    pub epoch: Epoch,
    /// Which of this epoch's.
    pub number: u64,
    pub level: Option<String>,
    /// None while the node is working on it.
    pub outcome: Option<Result<(), String>>,
}

impl Device {
    /// Whether the node is changing the level of who is armed.
    pub(super) fn changes(&self) -> bool {
        let armed = |change: &&LenderChange| matches!(&self.state, State::Armed(holder) if holder.epoch == change.epoch);
        self.change.as_ref().filter(armed).is_some_and(|change| change.outcome.is_none())
    }

    /// The newest change of the level of who is armed, if it was made or refused.
    pub(super) fn answered_change(&self) -> Option<LevelChange> {
        let State::Armed(holder) = &self.state else { return None };
        let LenderChange { epoch, number, level, outcome } = self.change.clone()?;
        let change = LevelChange { number, level, outcome: Some(outcome?) };
        (epoch == holder.epoch).then_some(change)
    }

    /// The outcome of that change.
    pub(super) fn level_set(&self, incarnation: Incarnation, device: &str) -> Option<Message> {
        let State::Armed(holder) = &self.state else { return None };
        let (epoch, device) = (holder.epoch, device.to_owned());
        let LevelChange { number, level, outcome } = self.answered_change()?;
        let outcome = outcome?;
        Some(Message::LevelSet { incarnation, device, epoch, number, level, outcome })
    }
}

impl Lender {
    /// The service level of the borrower of `epoch` was changed, or why not.
    pub fn level_done(
        &mut self,
        device: &str,
        epoch: Epoch,
        number: u64,
        outcome: Result<(), String>,
    ) -> Vec<LenderAction> {
        let incarnation = self.incarnation;
        let Some(entry) = self.devices.get_mut(device).filter(|entry| entry.changes()) else {
            return Vec::new();
        };
        match &mut entry.change {
            Some(change) if (change.epoch, change.number) == (epoch, number) => {
                change.outcome = Some(outcome);
            }
            _ => return Vec::new(),
        }
        entry.level_set(incarnation, device).map(LenderAction::Send).into_iter().collect()
    }

    pub(super) fn set_level(&mut self, device: String, wanted: LenderChange) -> Vec<LenderAction> {
        let incarnation = self.incarnation;
        // Whose lease is ending, or was never armed, learns that otherwise.
        let Some(entry) = self.devices.get_mut(&device) else { return Vec::new() };
        let State::Armed(holder) = &entry.state else { return Vec::new() };
        if holder.epoch != wanted.epoch {
            return Vec::new();
        }
        let lease = holder.lease;
        let newest = entry.change.as_ref().filter(|change| change.epoch == wanted.epoch);
        if newest.is_some_and(|newest| newest.number >= wanted.number || newest.outcome.is_none()) {
            let answer = entry.level_set(incarnation, &device);
            return answer.map(LenderAction::Send).into_iter().collect();
        }
        entry.change = Some(wanted.clone());
        let LenderChange { epoch, number, level, outcome: _ } = wanted;
        vec![LenderAction::SetLevel { device, lease, epoch, number, level }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Placement;
    use crate::under_way::UnderWay;

    const DEVICE: &str = "accel0.vf1";

    fn armed(epoch: Epoch) -> Lender {
        let mut lender = Lender::new(1, [DEVICE.to_owned()]);
        lender.receive(0, arm(epoch));
        lender.arm_done(DEVICE, epoch, Ok(()));
        lender
    }

    fn arm(epoch: Epoch) -> Message {
        let (device, borrower) = (DEVICE.to_owned(), "beta".to_owned());
        let placement = Placement::Lender;
        let (incarnation, lease, level, serve_for) = (1, 7, None, None);
        Message::Arm { incarnation, device, lease, epoch, borrower, placement, level, serve_for }
    }

    fn set(epoch: Epoch, number: u64, level: &str) -> Message {
        let (device, level) = (DEVICE.to_owned(), Some(level.to_owned()));
        Message::SetLevel { incarnation: 1, device, epoch, number, level }
    }

    fn answer(actions: &[LenderAction]) -> (u64, Result<(), String>) {
        match actions {
            [LenderAction::Send(Message::LevelSet { number, outcome, .. })] => {
                (*number, outcome.clone())
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_change_is_made_once_and_answered_as_often_as_it_is_asked_for() {
        let mut lender = armed(3);
        let actions = lender.receive(0, set(3, 1, "a"));
        assert!(matches!(actions[..], [LenderAction::SetLevel { lease: 7, number: 1, .. }]));
        assert_eq!(lender.under_way(), Some(UnderWay::Level(DEVICE.to_owned())));
        assert_eq!(lender.receive(0, set(3, 1, "a")), [], "it is under way");
        assert_eq!(lender.receive(0, set(3, 2, "b")), [], "one at a time");
        assert_eq!(
            lender.receive(0, arm(3)),
            [],
            "what is armed is not answered before the change is"
        );
        let refused = Err("0.9 would fit".to_owned());
        assert_eq!(answer(&lender.level_done(DEVICE, 3, 1, refused.clone())), (1, refused.clone()));
        assert_eq!(answer(&lender.receive(0, set(3, 1, "a"))), (1, refused));
        assert_eq!(lender.receive(0, set(3, 2, "b")).len(), 1);
        assert_eq!(lender.level_done(DEVICE, 3, 1, Ok(())), [], "that was answered before");
        assert_eq!(answer(&lender.level_done(DEVICE, 3, 2, Ok(()))), (2, Ok(())));
        // An older one that comes late gets the answer to the newest.
        assert_eq!(answer(&lender.receive(0, set(3, 1, "a"))), (2, Ok(())));
        // So does an authority that asks whether the epoch is armed: its records may be older.
        let said = lender.receive(0, arm(3));
        let [LenderAction::Send(Message::Armed { change: Some(change), .. })] = &said[..] else {
            panic!("{said:?}")
        };
        assert_eq!((change.number, change.level.as_deref()), (2, Some("b")));
    }

    #[test]
    fn only_the_level_of_who_is_armed_is_changed() {
        let mut lender = armed(3);
        assert_eq!(lender.receive(0, set(2, 1, "a")), []);
        assert_eq!(lender.receive(0, set(4, 1, "a")), []);
        assert_eq!(lender.receive(0, set(3, 1, "a")).len(), 1);
        lender.receive(0, Message::Revoke { incarnation: 1, device: DEVICE.into(), epoch: 3 });
        assert_eq!(lender.level_done(DEVICE, 3, 1, Ok(())), []);
        lender.revoke_done(DEVICE, 3);
        assert_eq!((lender.receive(0, set(3, 2, "a")), lender.under_way()), (Vec::new(), None));
        lender.receive(0, arm(4));
        lender.arm_done(DEVICE, 4, Ok(()));
        assert_eq!(lender.receive(0, arm(4)).len(), 1, "the next lease begins without changes");
    }
}
