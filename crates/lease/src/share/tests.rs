//! The account of a share, and the order of turns.

use proptest::prelude::*;

use super::ring::tail;
use super::*;
use crate::message::Placement;

fn share(number: LeaseId, weight: u32) -> ShareRecord {
    let request = ShareRequest {
        function: "alpha/nvme0".parse().unwrap(),
        borrower: "beta".to_owned(),
        terms: Placement::Lender.into(),
        slice: None,
        grace: 0,
        weight,
    };
    ShareRecord::new(number, request, 1000, number, 0)
}

/// A turn from 0 whose holder is asked at its end and releases it `late` milliseconds later.
fn turn(share: &mut ShareRecord, late: Millis) -> Millis {
    share.begin(1);
    share.usable(0, None);
    let over = share.ends_at().unwrap();
    share.turn.as_mut().unwrap().asked = Some(over);
    share.end(over + late, ShareTurnEnd::Over, share.place + 1);
    over
}

#[test]
fn a_late_release_makes_the_next_turn_shorter() {
    let mut share = share(1, 2);
    assert_eq!(turn(&mut share, 300), 2000);
    assert_eq!((share.held, share.credit), (2300, -300));
    assert_eq!(turn(&mut share, 0), 1700);
    assert_eq!((share.held, share.turns, share.credit), (4000, 2, 0));
}

#[test]
fn a_debt_is_bounded() {
    let mut share = share(1, 1);
    turn(&mut share, 1_000_000);
    assert_eq!(share.credit, -MOST_DEBT * 1000);
}

#[test]
fn time_without_others_is_not_owed() {
    let mut share = share(1, 1);
    share.begin(1);
    share.usable(0, None);
    share.turn.as_mut().unwrap().asked = Some(500_000);
    share.end(500_010, ShareTurnEnd::Over, 1);
    assert_eq!(share.credit, -10);
    assert_eq!(share.held, 500_010);
}

#[test]
fn what_the_rack_cut_short_is_given_next_time_and_what_was_given_back_is_not() {
    for (how, next) in [(ShareTurnEnd::CutShort, 1700), (ShareTurnEnd::GivenBack, 1000)] {
        let mut share = share(1, 1);
        share.begin(1);
        share.usable(0, None);
        share.end(300, how, 1);
        assert_eq!(share.next_allowance(), next, "{how:?}");
    }
}

#[test]
fn a_turn_that_could_not_begin_is_tried_again_later_and_later() {
    let mut share = share(1, 1);
    let mut waits = Vec::new();
    for _ in 0..12 {
        share.begin(1);
        share.end(100, ShareTurnEnd::Failed, 1);
        waits.push(share.not_before - 100);
    }
    assert!(waits.is_sorted() && waits[0] == 500 && waits[11] == 30_000, "{waits:?}");
    assert_eq!((share.turns, share.failed), (0, 12));
    share.begin(1);
    share.usable(200, Some(150));
    assert_eq!((share.failed, share.handovers, share.handover), (0, 1, 50));
}

#[test]
fn without_a_share_that_is_ready_there_is_no_turn() {
    assert_eq!(next_turn(&mut [share(1, 1), share(2, 1)], |_| false), None);
    assert_eq!(next_turn(&mut [], |_| true), None);
}

proptest! {
    /// Whatever holders do, nobody waits for more than the debts of the others allow, and in the long run each has the
    /// function for as long as its weight says.
    #[test]
    fn time_held_follows_weights_and_nobody_starves(
        weights in prop::collection::vec(1u32..4, 2..6),
        late in prop::collection::vec(0u64..3000, 400),
    ) {
        let numbered = weights.iter().zip(1..);
        let mut ring: Vec<ShareRecord> = numbered.map(|(weight, number)| share(number, *weight)).collect();
        let mut now = 0;
        let mut waited = vec![0u32; ring.len()];
        let mut last = ring.iter().map(|share| (share.held, share.weight)).collect::<Vec<_>>();
        for late in late {
            let number = next_turn(&mut ring, |share| share.turn.is_none()).unwrap();
            let at = ring.iter().position(|share| share.share == number).unwrap();
            waited.iter_mut().for_each(|turns| *turns += 1);
            waited[at] = 0;
            // A debt is at most so many slices, each of the others has at most two turns meanwhile for each of them.
            prop_assert!(waited.iter().all(|turns| *turns < 64), "{waited:?}");
            let end = tail(&ring);
            let share = &mut ring[at];
            share.begin(1);
            share.usable(now, None);
            let over = share.ends_at().unwrap();
            share.turn.as_mut().unwrap().asked = Some(over);
            now = over + late;
            share.end(now, ShareTurnEnd::Over, end);
            last[at] = (share.held, share.weight);
        }
        let per_weight: Vec<f64> = last.iter().map(|(held, weight)| *held as f64 / f64::from(*weight)).collect();
        let jain = jain(&per_weight);
        prop_assert!(jain > 0.98, "{jain} {last:?}");
    }
}

fn jain(values: &[f64]) -> f64 {
    let sum: f64 = values.iter().sum();
    let squares: f64 = values.iter().map(|value| value * value).sum();
    sum * sum / (values.len() as f64 * squares)
}
