//! What is told of borrowers that take turns on a function.

use rackbus_lease::{EndReason, LeaseRecord, LeaseState, LeaveReason, ShareRecord};

use super::Draft;
use crate::api::EventKind;

/// Whether a share's own events tell how `lease` begins and ends, which may be one of its turns. That its device was
/// withdrawn they do not: a turn that had not begun would end without a word.
pub fn is_told_by_share(lease: &LeaseRecord) -> bool {
    let withdrawn = LeaseState::Ended { reason: EndReason::Withdrawn };
    lease.turn.is_some() && lease.state != withdrawn
}

impl Draft {
    /// Whether it is news of a lease, also where that is a turn: of these, what a share's own events do not tell.
    pub fn is_news(&self, is_turn: impl FnOnce(u64) -> bool) -> bool {
        self.kind != EventKind::Lease || !self.lease.is_some_and(is_turn)
    }

    /// What is new of a share: it joined, its turn began or ended. Nothing where that is not news.
    pub fn of_share(before: Option<&ShareRecord>, share: &ShareRecord) -> Option<Draft> {
        let ShareRecord { share: number, function, borrower, .. } = share;
        let seconds = |ms: u64| ms as f64 / 1e3;
        let of = |lease: Option<u64>, text| Draft {
            lease,
            ..Draft::of_function(EventKind::Lease, borrower, &function.to_string(), text)
        };
        let Some(before) = before else {
            let text = format!(
                "{borrower} takes turns on {function} of {:.1} s (share {number})",
                seconds(share.quantum())
            );
            return Some(of(None, text));
        };
        let begun = |share: &ShareRecord| {
            share.turn.as_ref().and_then(|turn| Some((turn.lease, turn.begun?, turn.allowance)))
        };
        match (begun(before), begun(share)) {
            (None, Some((lease, _, allowance))) => {
                let handed = match share.handovers > before.handovers {
                    true => format!(
                        ", handed over in {} ms in which nobody had it",
                        share.handover - before.handover
                    ),
                    false => String::new(),
                };
                let text = format!(
                    "turn {} of share {number}: {borrower} has {function} for {:.1} s{handed}",
                    share.turns + 1,
                    seconds(allowance)
                );
                Some(of(Some(lease), text))
            }
            (Some((lease, ..)), None) => {
                let credit = match share.credit {
                    0 => String::new(),
                    less @ ..0 => format!(
                        ", {:.1} s longer than its turn, and owes them",
                        seconds(less.unsigned_abs())
                    ),
                    more => {
                        format!(", and has {:.1} s more next time", seconds(more.unsigned_abs()))
                    }
                };
                let text = format!(
                    "turn {} of share {number} is over: {borrower} had {function} for {:.1} s{credit}",
                    share.turns,
                    seconds(share.held - before.held)
                );
                Some(of(Some(lease), text))
            }
            _ => None,
        }
    }

    /// A share takes no more turns.
    pub fn of_leaving(share: &ShareRecord, reason: &LeaveReason) -> Draft {
        let ShareRecord { share: number, function, borrower, turns, held, .. } = share;
        let kind = match reason {
            LeaveReason::Asked | LeaveReason::Withdrawn => EventKind::Lease,
            _ => EventKind::Loss,
        };
        let text = format!(
            "{borrower} takes no more turns on {function} (share {number}, {turns} turns of {:.1} s in all): {reason}",
            *held as f64 / 1e3
        );
        Draft::of_function(kind, borrower, &function.to_string(), text)
    }
}

#[cfg(test)]
mod tests {
    use rackbus_lease::TurnOf;

    use super::*;

    /// Found by a soak: of a turn that was withdrawn before it had begun nothing was told.
    #[test]
    fn that_its_device_was_withdrawn_is_told_of_a_turn_as_well() {
        let ended = |reason: EndReason, turn: Option<TurnOf>| {
            let (function, borrower) = ("gamma/nvme5".parse().unwrap(), "alpha".to_owned());
            let state = LeaseState::Ended { reason };
            let (group, level, change, vm, starter, refused) = Default::default();
            let (since, until, placement) = (1, Some(2), Default::default());
            #[rustfmt::skip]
            let lease = LeaseRecord {
                lease: 168, function, epoch: 58, borrower, placement, group, level, change, since, until, turn, vm, starter,
                refused, state,
            };
            Draft::of_lease(None, &lease)
                .filter(|draft| draft.is_news(|_| is_told_by_share(&lease)))
        };
        let turn = || Some(TurnOf { share: 149, grace: 1, claim: 1, vm: None });
        let told = ended(EndReason::Withdrawn, turn()).unwrap();
        assert_eq!(told.lease, Some(168));
        assert!(ended(EndReason::TurnOver, turn()).is_none());
        assert!(ended(EndReason::TurnOver, None).is_some());
    }

    #[test]
    fn of_turns_only_what_goes_wrong_is_told_beside_the_events_of_shares() {
        let of = |kind, lease| Draft { lease, ..Draft::of_host(kind, None, String::new()) };
        let is_turn = |lease| lease == 2;
        assert!(of(EventKind::Lease, Some(1)).is_news(is_turn));
        assert!(!of(EventKind::Lease, Some(2)).is_news(is_turn));
        assert!(of(EventKind::Loss, Some(2)).is_news(is_turn));
        assert!(of(EventKind::Fault, Some(2)).is_news(is_turn));
        assert!(of(EventKind::Lease, None).is_news(is_turn));
    }
}
