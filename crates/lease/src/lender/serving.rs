//! For how long an epoch is served without being renewed: by the lender's own clock, whoever is cut off from whom.
//!
//! The borrower counts from when it sent a renewal, and believes in it only when it was answered; it is answered after
//! the lender has heard of it, which counts from then. So the borrower stops first, however long messages take, unless
//! its clock is slower than the lender's by more than [`Borrower`](crate::Borrower) leaves room for.

use serde::{Deserialize, Serialize};

use super::{ArmFailure, ArmedFor, Device, Lender, LenderAction, State};
use crate::message::{Epoch, Message, Millis};

/// Until when an epoch is served unless it is renewed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Serving {
    ttl: Millis,
    until: Millis,
}

impl Serving {
    /// It is armed at `now`.
    pub(super) fn begin(now: Millis, ttl: Millis) -> Self {
        Serving { ttl, until: now.saturating_add(ttl) }
    }

    /// The same arming is said again, perhaps by an authority with another time to live: that renews nothing. The
    /// longer time holds, as its borrower may have been granted either. What had no end has none, and where none
    /// is asked for now the borrower's lease may have none.
    pub(super) fn said_again(known: Option<Serving>, said: Option<Serving>) -> Option<Serving> {
        let (known, said) = (known?, said?);
        let more = said.ttl.saturating_sub(known.ttl);
        Some(Serving { ttl: known.ttl + more, until: known.until.saturating_add(more) })
    }
}

impl Device {
    /// Whom it is armed for, or will be.
    pub(super) fn holder(&self) -> Option<&ArmedFor> {
        match &self.state {
            State::Arming(holder) | State::Armed(holder) => Some(holder),
            State::Free | State::Revoking(_) => None,
        }
    }

    /// Why `epoch` is not served any more, to whom `is_asked` knows.
    pub(super) fn gave_up(
        &self,
        device: &str,
        epoch: Epoch,
        is_asked: impl Fn(&ArmedFor) -> bool,
    ) -> ArmFailure {
        match &self.refused {
            Some((refused, reason)) if is_asked(refused) => {
                ArmFailure { reason: reason.clone(), refused: self.was_refusal }
            }
            _ => ArmFailure::broken(format!("{device} gave up epoch {epoch} already")),
        }
    }

    /// When what it serves ends, if it is not renewed.
    fn ends_at(&self) -> Option<Millis> {
        self.holder().and(self.serving).map(|serving| serving.until)
    }
}

impl Lender {
    /// Time has passed: takes back what was not renewed for its time to live, as a revocation does. The authority hears of
    /// it when it asks for that epoch again. Call it at [`next_tick`](Lender::next_tick).
    pub fn tick(&mut self, now: Millis) -> Vec<LenderAction> {
        let mut actions = Vec::new();
        for (device, entry) in &mut self.devices {
            if entry.ends_at().is_none_or(|until| until > now) {
                continue;
            }
            let (Some(holder), Some(serving)) = (entry.holder().cloned(), entry.serving) else {
                continue;
            };
            let (epoch, lease) = (holder.epoch, Some(holder.lease));
            let reason = format!("it was not renewed for its time to live, {} ms", serving.ttl);
            entry.refused = Some((holder, reason));
            entry.state = State::Revoking(epoch);
            actions.push(LenderAction::Revoke { device: device.clone(), epoch, lease });
        }
        actions
    }

    /// When something ends next, if nothing renews it.
    pub fn next_tick(&self) -> Option<Millis> {
        self.devices.values().filter_map(Device::ends_at).min()
    }

    /// The borrower of `epoch` has renewed its lease.
    pub(super) fn extend(
        &mut self,
        now: Millis,
        device: String,
        epoch: Epoch,
        sent: Millis,
    ) -> Vec<LenderAction> {
        let incarnation = self.incarnation;
        let Some(entry) = self.devices.get_mut(&device) else { return Vec::new() };
        if entry.holder().is_some_and(|holder| holder.epoch == epoch) {
            entry.serving = entry.serving.map(|it| Serving::begin(now, it.ttl));
            let extended = Message::Extended { incarnation, device, epoch, sent };
            return vec![LenderAction::Send(extended)];
        }
        if epoch > entry.newest {
            return Vec::new();
        }
        let failure = entry.gave_up(&device, epoch, |refused| refused.epoch == epoch);
        vec![LenderAction::Send(failure.told(incarnation, device, epoch))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Placement;

    const DEVICE: &str = "nvme0";

    fn arm(epoch: Epoch, serve_for: Option<Millis>) -> Message {
        let (device, borrower) = (DEVICE.to_owned(), "beta".to_owned());
        let (incarnation, lease, placement, level) = (1, epoch, Placement::Lender, None);
        Message::Arm { incarnation, device, lease, epoch, borrower, placement, level, serve_for }
    }

    fn extend(epoch: Epoch) -> Message {
        Message::Extend { incarnation: 1, device: DEVICE.to_owned(), epoch, sent: 7 }
    }

    fn armed(now: Millis, serve_for: Option<Millis>) -> Lender {
        let mut lender = Lender::new(1, [DEVICE.to_owned()]);
        lender.receive(now, arm(1, serve_for));
        lender.arm_done(DEVICE, 1, Ok(()));
        lender
    }

    #[test]
    fn what_is_not_renewed_is_taken_back_and_what_is_renewed_is_not() {
        let mut lender = armed(1000, Some(3000));
        assert_eq!(lender.next_tick(), Some(4000));
        let said = lender.receive(3000, extend(1));
        assert!(matches!(said[..], [LenderAction::Send(Message::Extended { sent: 7, .. })]));
        // Hearing again that it is armed renews nothing.
        lender.receive(5000, arm(1, Some(3000)));
        assert_eq!((lender.tick(5999), lender.next_tick()), (Vec::new(), Some(6000)));
        assert!(matches!(lender.tick(6000)[..], [LenderAction::Revoke { epoch: 1, .. }]));
        assert_eq!((lender.admitted(DEVICE), lender.next_tick()), (None, None));
        lender.revoke_done(DEVICE, 1);
        // Who still counts on it is told why not.
        let said = lender.receive(7000, extend(1));
        assert!(
            matches!(&said[..], [LenderAction::Send(Message::ArmFailed { reason, .. })]
                if reason == "it was not renewed for its time to live, 3000 ms"),
            "{said:?}"
        );
        lender.receive(8000, arm(2, None));
        assert_eq!(lender.next_tick(), None, "the next lease has no end");
    }

    #[test]
    fn an_authority_with_another_time_to_live_shortens_nothing() {
        let said_again = |known, said| {
            let mut lender = armed(0, known);
            lender.receive(1000, arm(1, said));
            lender.next_tick()
        };
        assert_eq!(said_again(Some(3000), Some(5000)), Some(5000));
        assert_eq!(said_again(Some(5000), Some(3000)), Some(5000));
        assert_eq!(said_again(Some(3000), None), None);
        assert_eq!(said_again(None, Some(3000)), None);
    }
}
