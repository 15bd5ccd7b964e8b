//! The service level of a lease is changed while it is used. Its lender decides; what it answered last is in the
//! lease's record, and until it has answered the record says what is asked for.

use crate::change::{ChangeRefused, LevelChange};
use crate::message::{LeaseId, Message, Millis};

use super::nodes::LOST_AT_MOST;
use super::{Authority, Decision, LeaseRecord, LeaseState};

/// The number of the change after that one, which is never 0.
fn next_number(number: u64) -> u64 {
    number.saturating_add(1)
}

impl Authority {
    /// Asks the lender of `lease` for another service level. To ask for what it has, or again for what is under way,
    /// changes nothing.
    ///
    /// # Errors
    /// [`ChangeRefused`]; nothing changes then.
    pub fn change_level(
        &mut self,
        now: Millis,
        lease: LeaseId,
        level: Option<String>,
    ) -> Result<Decision, ChangeRefused> {
        self.enter(now);
        let record = self.leases.get(&lease).ok_or(ChangeRefused::Unknown(lease))?;
        match &record.state {
            LeaseState::Active { .. } => {}
            LeaseState::Ended { reason } => {
                return Err(ChangeRefused::Ended { lease, reason: reason.clone() });
            }
            _ => return Err(ChangeRefused::NotActive(lease)),
        }
        match record.asked_level() {
            Some(asked) if asked.level == level => return Ok(self.take()),
            Some(_) => return Err(ChangeRefused::UnderWay(lease)),
            None if record.level == level => return Ok(self.take()),
            None => {}
        }
        let number = next_number(record.change.as_ref().map_or(0, |change| change.number));
        self.ask_level(record.clone(), LevelChange { number, level, outcome: None });
        Ok(self.take())
    }

    /// The lender of `lease` has `answered`. Where it knows of a change that the records do not (they are an older
    /// copy), its level is in force anyway, and what is asked for is asked after that.
    pub(super) fn level_set(&mut self, lease: LeaseId, answered: LevelChange) {
        let Some(record) = self.leases.get(&lease).cloned() else { return };
        let known = record.change.as_ref().map_or(0, |change| change.number);
        let asked = record.asked_level().cloned();
        let is_answer = asked.as_ref().is_some_and(|asked| {
            (asked.number, &asked.level) == (answered.number, &answered.level)
        });
        // Nothing follows the greatest number.
        let is_plausible = answered.number <= known.saturating_add(LOST_AT_MOST);
        let is_other =
            answered.number > known && is_plausible || answered.number == known && asked.is_some();
        if !is_answer && !is_other {
            return;
        }
        let level = match &answered.outcome {
            Some(Ok(())) => answered.level.clone(),
            _ => record.level.clone(),
        };
        let number = answered.number;
        let record = LeaseRecord { level, change: Some(answered), ..record };
        match asked.filter(|_| !is_answer) {
            Some(asked) => {
                self.ask_level(record, LevelChange { number: next_number(number), ..asked })
            }
            None => self.put_lease(record),
        }
    }

    fn ask_level(&mut self, record: LeaseRecord, change: LevelChange) {
        let lease = record.lease;
        self.put_lease(LeaseRecord { change: Some(change), ..record });
        self.say(lease);
    }

    /// Says what is asked of the lender of a lease that is in use.
    pub(super) fn say_level(&mut self, record: &LeaseRecord) {
        let Some(lender) = self.hosts.get(&record.function.host) else { return };
        let Some(LevelChange { number, level, .. }) = record.asked_level().cloned() else { return };
        let (incarnation, device) = (lender.incarnation, record.function.device.clone());
        let (host, epoch) = (lender.host.clone(), record.epoch);
        let message = Message::SetLevel { incarnation, device, epoch, number, level };
        self.send(&host, message);
    }
}
