//! The lender by itself: what it lets in, and what it answers to which message.

use super::*;
use crate::message::Placement;

fn arm(epoch: Epoch) -> Message {
    let (device, borrower) = ("nvme0".to_owned(), "beta".to_owned());
    Message::Arm {
        incarnation: 1,
        device,
        lease: epoch,
        epoch,
        borrower,
        placement: Placement::Lender,
        level: None,
        serve_for: None,
    }
}

fn revoke(epoch: Epoch) -> Message {
    Message::Revoke { incarnation: 1, device: "nvme0".into(), epoch }
}

fn lender() -> Lender {
    Lender::new(1, ["nvme0".to_owned()])
}

#[test]
fn arms_once_and_answers_again() {
    let mut lender = lender();
    assert!(matches!(lender.receive(0, arm(1))[..], [LenderAction::Arm { epoch: 1, .. }]));
    assert!(lender.admitted("nvme0").is_none(), "not before the node did it");
    assert_eq!(lender.arm_done("nvme0", 1, Ok(())).len(), 1);
    assert_eq!(lender.admitted("nvme0").map(|h| h.epoch), Some(1));
    assert!(matches!(lender.receive(0, arm(1))[..], [LenderAction::Send(Message::Armed { .. })]));
}

#[test]
fn leases_are_counted_by_how_far_they_are() {
    let mut lender = lender();
    let counts = |lender: &Lender| lender.lease_counts().map(|(_, count)| count);
    assert_eq!(lender.lease_counts().map(|(state, _)| state), ["arming", "armed", "revoking"]);
    assert_eq!(counts(&lender), [0, 0, 0]);
    lender.receive(0, arm(1));
    assert_eq!(counts(&lender), [1, 0, 0]);
    lender.arm_done("nvme0", 1, Ok(()));
    assert_eq!(counts(&lender), [0, 1, 0]);
    lender.receive(0, revoke(1));
    assert_eq!(counts(&lender), [0, 0, 1]);
    lender.revoke_done("nvme0", 1);
    assert_eq!(counts(&lender), [0, 0, 0]);
}

/// The node hears the arming again between its failure and the sending of the failure, or what it sent is
/// lost: the authority is told the cause anyway.
#[test]
fn an_arming_that_failed_fails_again_for_the_same_reason() {
    let mut lender = lender();
    lender.receive(0, arm(1));
    let failed =
        lender.arm_done("nvme0", 1, Err(ArmFailure::refusal("0.9 Gbit/s would fit".to_owned())));
    assert!(matches!(
        &failed[..],
        [LenderAction::Send(Message::ArmFailed { epoch: 1, reason, refused: true, .. })]
            if reason == "0.9 Gbit/s would fit"
    ));
    assert_eq!(lender.receive(0, arm(1)), failed);
    // Also in the process that goes on for it.
    let saved = serde_json::to_string(&lender).unwrap();
    let mut lender: Lender = serde_json::from_str(&saved).unwrap();
    assert_eq!(lender.receive(0, arm(1)), failed);
    // Another lease of that epoch, and one that was let in since, have other reasons.
    let mut other = arm(1);
    if let Message::Arm { lease, .. } = &mut other {
        *lease = 7;
    }
    assert_ne!(lender.receive(0, other), failed);
    lender.receive(0, arm(2));
    lender.arm_done("nvme0", 2, Ok(()));
    assert_ne!(lender.receive(0, arm(1)), failed);
}

#[test]
fn a_late_arm_after_its_revocation_fails() {
    let mut lender = lender();
    assert!(matches!(
        lender.receive(0, revoke(1))[..],
        [LenderAction::Send(Message::Revoked { epoch: 1, .. })]
    ));
    assert!(matches!(
        lender.receive(0, arm(1))[..],
        [LenderAction::Send(Message::ArmFailed { epoch: 1, .. })]
    ));
    assert!(lender.admitted("nvme0").is_none());
}

#[test]
fn nothing_is_armed_while_a_revocation_is_under_way() {
    let mut lender = lender();
    lender.receive(0, arm(1));
    lender.arm_done("nvme0", 1, Ok(()));
    assert!(matches!(lender.receive(0, revoke(1))[..], [LenderAction::Revoke { epoch: 1, .. }]));
    assert!(lender.admitted("nvme0").is_none());
    assert!(lender.receive(0, arm(2)).is_empty());
    assert_eq!(lender.revoke_done("nvme0", 1).len(), 1);
    assert_eq!(lender.receive(0, arm(2)).len(), 1);
}

fn holder(epoch: Epoch) -> ArmedFor {
    let (borrower, placement) = ("beta".to_owned(), Placement::Lender);
    ArmedFor { lease: epoch, epoch, borrower, placement }
}

fn armed(epoch: Epoch) -> Lender {
    let mut lender = lender();
    lender.receive(0, arm(epoch));
    lender.arm_done("nvme0", epoch, Ok(()));
    lender
}

#[test]
fn only_the_armed_lease_of_the_armed_borrower_is_admitted() {
    let lender = armed(2);
    assert_eq!(lender.admits("nvme0", &holder(2)), Ok(()));
    let stranger = ArmedFor { borrower: "gamma".to_owned(), ..holder(2) };
    let other_lease = ArmedFor { lease: 7, ..holder(2) };
    for wanted in [holder(1), holder(3), stranger, other_lease] {
        let refused = lender.admits("nvme0", &wanted).unwrap_err();
        assert!(matches!(refused, NotAdmitted::Held { .. }), "{wanted:?}: {refused}");
    }
    let placed = ArmedFor { placement: Placement::Borrower, ..holder(2) };
    let refused = lender.admits("nvme0", &placed).unwrap_err();
    assert!(matches!(refused, NotAdmitted::Placed { placement: Placement::Lender, .. }));
    let nowhere = NotAdmitted::NoDevice("nvme9".to_owned());
    assert_eq!(lender.admits("nvme9", &holder(2)), Err(nowhere));
}

#[test]
fn one_conversation_at_a_time_is_let_in() {
    let mut lender = armed(1);
    lender.attach("nvme0", &holder(1)).unwrap();
    let refused = lender.attach("nvme0", &holder(1)).unwrap_err();
    assert!(matches!(refused, NotAdmitted::InUse { epoch: 1, .. }), "{refused}");
    lender.detached("nvme0");
    lender.attach("nvme0", &holder(1)).unwrap();
}

#[test]
fn only_who_is_attached_goes_on_and_not_beyond_a_revocation() {
    let mut lender = armed(1);
    let refused = lender.resumes("nvme0", &holder(1)).unwrap_err();
    assert!(matches!(refused, NotAdmitted::NotInUse { epoch: 1, .. }), "{refused}");
    lender.attach("nvme0", &holder(1)).unwrap();
    lender.resumes("nvme0", &holder(1)).unwrap();
    for other in [holder(2), ArmedFor { borrower: "gamma".to_owned(), ..holder(1) }] {
        assert!(lender.resumes("nvme0", &other).is_err());
    }
    lender.receive(0, revoke(1));
    assert!(lender.resumes("nvme0", &holder(1)).is_err(), "it is attached, and revoked");
}

#[test]
fn a_revocation_refuses_at_once_and_is_answered_when_nobody_is_attached() {
    let mut lender = armed(1);
    lender.attach("nvme0", &holder(1)).unwrap();
    lender.receive(0, revoke(1));
    let refused = lender.admits("nvme0", &holder(1)).unwrap_err();
    assert!(matches!(refused, NotAdmitted::Busy { .. }), "{refused}");
    assert!(lender.attached_up_to("nvme0", 1) && !lender.attached_up_to("nvme0", 0));
    assert_eq!(lender.revoke_done("nvme0", 1), [], "somebody is still attached");
    lender.detached("nvme0");
    assert_eq!(lender.revoke_done("nvme0", 1).len(), 1);
    let refused = lender.admits("nvme0", &holder(1)).unwrap_err();
    assert!(matches!(refused, NotAdmitted::NotLent { .. }), "{refused}");
}

#[test]
fn messages_for_another_incarnation_are_ignored() {
    let mut lender = Lender::new(2, ["nvme0".to_owned()]);
    assert!(lender.receive(0, arm(1)).is_empty() && lender.receive(0, revoke(1)).is_empty());
}

/// The authority's records were lost: it numbers anew, and knows nothing of who has what.
#[test]
fn a_borrower_with_the_epoch_of_another_is_not_let_in() {
    let mut lender = lender();
    lender.receive(0, arm(3));
    lender.arm_done("nvme0", 3, Ok(()));
    let (device, borrower) = ("nvme0".to_owned(), "gamma".to_owned());
    let other = Message::Arm {
        incarnation: 1,
        device,
        lease: 1,
        epoch: 3,
        borrower,
        placement: Placement::Lender,
        level: None,
        serve_for: None,
    };
    let said = lender.receive(0, other);
    assert!(
        matches!(said[..], [LenderAction::Send(Message::ArmFailed { epoch: 3, .. })]),
        "{said:?}"
    );
    assert_eq!((lender.newest_epochs()["nvme0"], lender.newest_lease()), (3, 3));
    // A newer one gets it, when the older one's accesses are gone.
    assert!(matches!(lender.receive(0, arm(4))[..], [LenderAction::Revoke { epoch: 3, .. }]));
    assert!(lender.receive(0, arm(4)).is_empty());
    lender.revoke_done("nvme0", 3);
    assert!(matches!(lender.receive(0, arm(4))[..], [LenderAction::Arm { epoch: 4, .. }]));
}
