use super::*;
use crate::message::Placement;

const FUNCTION: &str = "alpha/nvme0";

pub(super) fn grant(lease: LeaseId) -> Grant {
    Grant {
        lease,
        function: FUNCTION.parse().unwrap(),
        epoch: lease,
        address: "alpha".to_owned(),
        ttl: 3000,
        placement: Placement::Borrower,
        group: None,
        turn: None,
        vm: None,
        starter: None,
        strict_ttl: false,
    }
}

/// A borrower that serves these leases of one function, each of a later epoch.
fn serving(leases: impl IntoIterator<Item = LeaseId>) -> Borrower {
    let mut borrower = Borrower::new(1);
    for lease in leases {
        borrower.receive(0, Message::Granted(grant(lease)));
        borrower.open_done(lease, Ok("socket".to_owned()));
    }
    borrower
}

fn end(borrower: &mut Borrower, lease: LeaseId) {
    let said =
        borrower.receive(1, Message::Ended { lease, reason: "returned".to_owned(), within: None });
    assert!(matches!(&said[..], [BorrowerAction::Close { .. }]), "{said:?}");
}

fn said_closed(lease: LeaseId) -> Vec<BorrowerAction> {
    vec![BorrowerAction::Send(Message::Closed { lease })]
}

fn still_ending(lease: LeaseId) -> Result<(), FrontRefused> {
    Err(FrontRefused::StillEnding { function: FUNCTION.parse().unwrap(), lease })
}

#[test]
fn one_front_of_a_function_runs_at_a_time_whatever_its_lease() {
    let mut borrower = serving([1]);
    assert_eq!(borrower.begin_front(1), Ok(()));
    assert_eq!(borrower.begin_front(1), still_ending(1));
    borrower.receive(0, Message::Granted(grant(2)));
    assert_eq!(borrower.begin_front(2), still_ending(1), "in the next epoch");
    borrower.front_ended(1);
    assert_eq!(borrower.begin_front(2), Ok(()), "its socket is there before that is said");
}

#[test]
fn a_lease_is_answered_as_closed_when_its_front_has_ended() {
    let mut borrower = serving([1]);
    borrower.begin_front(1).unwrap();
    end(&mut borrower, 1);
    assert_eq!(borrower.close_done(1), [], "its front runs");
    assert!(!borrower.serves(1));
    assert_eq!(borrower.under_way(), Some(UnderWay::Closing(1)));
    // Said again meanwhile, it is answered no sooner.
    let again = Message::Ended { lease: 1, reason: "returned".to_owned(), within: None };
    assert_eq!(borrower.receive(2, again), []);
    assert_eq!(borrower.receive(2, Message::Granted(grant(1))), []);
    assert_eq!(borrower.next_tick(), None);
    assert_eq!(borrower.front_ended(1), said_closed(1));
    assert_eq!(borrower.under_way(), None);
}

#[test]
fn a_node_that_waits_for_a_user_hears_that_there_is_less_time() {
    let ended = |within| Message::Ended { lease: 1, reason: "returned".to_owned(), within };
    let hasten = |within, grace| vec![BorrowerAction::Hasten { lease: 1, within, grace }];
    let mut borrower = serving([1]);
    end(&mut borrower, 1);
    assert_eq!(borrower.receive(2, ended(Some(500))), hasten(Some(500), 0));
    let over = Message::TurnOver { lease: 1, grace: 100, within: Some(200) };
    assert_eq!(borrower.receive(3, over), hasten(Some(200), 100));
    borrower.begin_front(1).unwrap_err();
    assert_eq!(borrower.close_done(1), said_closed(1));
    assert_eq!(
        borrower.receive(4, ended(Some(0))),
        said_closed(1),
        "nobody is waited for any more"
    );
}

#[test]
fn a_front_may_end_before_its_lease_is_closed() {
    let mut borrower = serving([1]);
    borrower.begin_front(1).unwrap();
    end(&mut borrower, 1);
    assert_eq!(borrower.front_ended(1), []);
    assert_eq!(borrower.close_done(1), said_closed(1));
}

#[test]
fn nothing_of_a_lease_begins_that_is_over() {
    let mut borrower = serving([1, 2]);
    let refused = borrower.begin_front(1).unwrap_err();
    let function = FUNCTION.parse().unwrap();
    assert_eq!(refused, FrontRefused::Superseded { lease: 1, function, newer: 2 });
    assert!(!refused.is_for_now());
    end(&mut borrower, 2);
    assert_eq!(borrower.begin_front(2), Err(FrontRefused::NotServed(2)), "it is being closed");
    borrower.close_done(2);
    assert_eq!(borrower.begin_front(2), Err(FrontRefused::NotServed(2)));
    assert_eq!(borrower.begin_front(3), Err(FrontRefused::NotServed(3)), "it was not granted");
}

#[test]
fn another_process_has_the_fronts_that_it_asks_for() {
    let mut borrower = serving([1, 2]);
    borrower.begin_front(2).unwrap();
    let written = serde_json::to_string(&borrower).unwrap();
    let mut borrower: Borrower = serde_json::from_str(&written).unwrap();
    assert_eq!(borrower.begin_front(2), Ok(()), "those of the other process are over");
    assert_eq!(borrower.begin_front(2), still_ending(2));
}

#[test]
fn leases_are_counted_by_how_far_they_are() {
    let mut borrower = Borrower::new(1);
    for lease in 1..=6 {
        let function = format!("alpha/nvme{lease}").parse().unwrap();
        borrower.receive(0, Message::Granted(Grant { function, ..grant(lease) }));
    }
    for lease in [1, 2, 3, 4] {
        borrower.open_done(lease, Ok("socket".to_owned()));
    }
    borrower.open_done(5, Err("no link".to_owned()));
    borrower.lender_lost(2, "it is gone".to_owned());
    end(&mut borrower, 3);
    borrower.begin_front(4).unwrap();
    end(&mut borrower, 4);
    borrower.close_done(4);
    let each = ["opening", "open", "failed", "lost", "closing", "ending"].map(|state| (state, 1));
    assert_eq!(borrower.lease_counts(), each);
    borrower.close_done(3);
    assert_eq!(borrower.lease_counts()[4], ("closing", 0));
}
