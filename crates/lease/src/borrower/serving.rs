//! Until when a strict lease is served without being renewed: by the borrower's own clock, and for less long than by its
//! lender.
//!
//! A renewal counts from when it was sent, and when it was answered, which is after the lender has heard of it. The
//! lender counts its whole time to live from then, and this host a quarter less: enough for clocks whose speeds differ
//! by less than that, and for what ending it takes. A lease that is being returned is renewed on, as long as its user takes
//! to release the function.

use super::{Borrower, BorrowerAction, State};
use crate::message::{Grant, LeaseId, Message, Millis};

impl Borrower {
    /// A renewal that was sent at `sent` has been heard by the lender.
    pub(super) fn renewed(
        &mut self,
        now: Millis,
        lease: LeaseId,
        sent: Millis,
    ) -> Vec<BorrowerAction> {
        let Some(entry) = self.leases.get_mut(&lease) else { return Vec::new() };
        let Some(until) = entry.serve_until else { return Vec::new() };
        // Of later than now is nothing that this life of the node sent.
        if sent > now || !entry.is_renewed() {
            return Vec::new();
        }
        let renewed = sent.saturating_add(entry.ttl - entry.ttl / 4);
        if let State::Confirming(grant) = &entry.state {
            // Answered too late, it is asked again.
            if renewed <= now {
                return Vec::new();
            }
            let grant = Grant::clone(grant);
            (entry.serve_until, entry.state) = (Some(renewed), State::Opening);
            return vec![BorrowerAction::Open(grant)];
        }
        entry.serve_until = Some(until.max(renewed));
        Vec::new()
    }

    /// Ends what was not renewed in time, whether or not the authority can say so.
    pub(super) fn end_unrenewed(&mut self, now: Millis) -> Vec<BorrowerAction> {
        let mut actions = Vec::new();
        let over = self.leases.iter().filter(|(_, entry)| {
            entry.is_renewed() && entry.serve_until.is_some_and(|until| until <= now)
        });
        for lease in over.map(|(lease, _)| *lease).collect::<Vec<_>>() {
            let Some(entry) = self.leases.get_mut(&lease) else { continue };
            let reason = format!(
                "it could not be renewed within its time to live of {} ms: the control plane or the lender did not hear",
                entry.ttl
            );
            actions.push(BorrowerAction::Send(Message::Lost { lease, reason: reason.clone() }));
            // It is not renewed any more.
            entry.serve_until = None;
            match std::mem::replace(&mut entry.state, State::Closing) {
                State::Confirming(_) => actions.extend(self.closed(lease)),
                before => {
                    let closing = before == State::Closing;
                    actions.push(BorrowerAction::Cut { lease, reason, closing });
                }
            }
        }
        actions
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::grant;
    use super::*;

    fn strict(now: Millis) -> Borrower {
        let mut borrower = Borrower::new(1);
        let grant = Grant { ttl: 4000, strict_ttl: true, ..grant(1) };
        assert_eq!(borrower.receive(now, Message::Granted(grant)), [], "not before it is renewed");
        borrower
    }

    fn renews(borrower: &mut Borrower, now: Millis) -> Option<Millis> {
        borrower.tick(now).into_iter().find_map(|action| match action {
            BorrowerAction::Send(Message::Renew { sent, .. }) => sent,
            _ => None,
        })
    }

    #[test]
    fn a_strict_lease_is_opened_when_its_first_renewal_is_answered_in_time() {
        let mut borrower = strict(1000);
        assert!(!borrower.serves(1));
        assert_eq!(renews(&mut borrower, 1000), Some(1000));
        assert_eq!(borrower.receive(4000, Message::Renewed { lease: 1, sent: 1000 }), [], "late");
        let opened = borrower.receive(3999, Message::Renewed { lease: 1, sent: 1000 });
        assert!(matches!(opened[..], [BorrowerAction::Open(_)]), "{opened:?}");
        assert!(borrower.serves(1));
    }

    #[test]
    fn a_renewal_counts_from_when_it_was_sent_and_not_before_it_is_answered() {
        let mut borrower = strict(0);
        renews(&mut borrower, 0);
        borrower.receive(10, Message::Renewed { lease: 1, sent: 0 });
        borrower.open_done(1, Ok("socket".to_owned()));
        assert_eq!(renews(&mut borrower, 2000), Some(2000));
        borrower.receive(2900, Message::Renewed { lease: 1, sent: 2000 });
        assert!(renews(&mut borrower, 4999).is_some(), "not answered");
        assert!(borrower.serves(1));
        let ended = borrower.tick(5000);
        assert!(
            matches!(
                ended[..],
                [
                    BorrowerAction::Send(Message::Lost { lease: 1, .. }),
                    BorrowerAction::Cut { lease: 1, .. }
                ]
            ),
            "{ended:?}"
        );
        assert!(!borrower.serves(1));
        borrower.receive(5001, Message::Renewed { lease: 1, sent: 4999 });
        assert!(!borrower.serves(1), "it came too late");
        let closed = BorrowerAction::Send(Message::Closed { lease: 1 });
        assert_eq!(borrower.close_done(1), [closed]);
    }

    /// A guest may take longer to release a function than the time to live.
    #[test]
    fn a_strict_lease_is_renewed_while_its_user_releases_it_and_cut_off_where_it_is_not() {
        let mut borrower = strict(0);
        renews(&mut borrower, 0);
        borrower.receive(10, Message::Renewed { lease: 1, sent: 0 });
        borrower.open_done(1, Ok("socket".to_owned()));
        let ended = Message::Ended { lease: 1, reason: "returned".to_owned(), within: None };
        let closing = borrower.receive(1000, ended);
        assert!(matches!(closing[..], [BorrowerAction::Close { .. }]), "{closing:?}");
        assert!(borrower.next_tick().is_some());
        assert_eq!(renews(&mut borrower, 2000), Some(2000));
        borrower.receive(2010, Message::Renewed { lease: 1, sent: 2000 });
        assert!(renews(&mut borrower, 4999).is_some());
        let cut = borrower.tick(5000);
        let [BorrowerAction::Send(Message::Lost { .. }), BorrowerAction::Cut { closing: true, .. }] =
            cut[..]
        else {
            panic!("{cut:?}")
        };
        assert_eq!(borrower.tick(9000), [], "once");
        assert_eq!(borrower.next_tick(), None);
        let closed = BorrowerAction::Send(Message::Closed { lease: 1 });
        assert_eq!(borrower.close_done(1), [closed]);
    }

    #[test]
    fn a_grant_that_is_said_again_is_confirmed_again() {
        let mut borrower = strict(0);
        assert!(renews(&mut borrower, 0).is_some());
        assert_eq!(renews(&mut borrower, 100), None);
        let again = Grant { ttl: 4000, strict_ttl: true, ..grant(1) };
        borrower.receive(200, Message::Granted(again));
        assert_eq!(renews(&mut borrower, 200), Some(200));
    }

    #[test]
    fn a_strict_lease_whose_lender_never_hears_of_it_is_given_up() {
        let mut borrower = strict(0);
        assert!(renews(&mut borrower, 3999).is_some());
        let given_up = borrower.tick(4000);
        assert!(
            matches!(
                given_up[..],
                [
                    BorrowerAction::Send(Message::Lost { .. }),
                    BorrowerAction::Send(Message::Closed { .. })
                ]
            ),
            "{given_up:?}"
        );
    }
}
