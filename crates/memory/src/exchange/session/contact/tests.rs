//! When a session whose connection was lost is tried again, and when it is given up.

use super::*;

fn asking(hold: SessionMillis) -> Contact {
    Contact::new(SessionSide::Asks, SessionTiming::asking(hold))
}

/// As long as its first connection, and that may take its time.
#[test]
fn a_session_that_is_not_held_ends_with_its_connection() {
    let mut contact = asking(0);
    assert!(contact.tick(1) && contact.tick(500) && contact.end().is_none());
    assert_eq!(contact.resumed(0, 600, 0), None, "there was none before");
    assert!(contact.tick(700) && contact.end().is_none());
    contact.broke(0, 800);
    contact.expire(900);
    assert!(matches!(contact.end(), Some(SessionEndReason::Silent(_))), "{contact:?}");
}

/// When a session with this salt, whose connection is lost at 0, is tried until `end`, where every attempt fails at once.
fn attempts(salt: u64, end: SessionMillis) -> Vec<SessionMillis> {
    let mut contact = asking(60_000).with_salt(salt);
    contact.resumed(0, 0, 0);
    contact.broke(0, 5_000);
    let mut begun = Vec::new();
    for now in 5_000..5_000 + end {
        if let Some(number) = contact.attempt(now) {
            begun.push(now - 5_000);
            contact.failed(number, now);
        }
    }
    begun
}

#[test]
fn a_peer_that_was_just_lost_is_tried_often_and_then_at_growing_intervals() {
    let SessionTiming { retry, often, .. } = SessionTiming::asking(0);
    for salt in 0..100 {
        let begun = attempts(salt, 30_000);
        assert_eq!(begun[0], 0, "the first begins at once");
        let mut most = retry.0;
        for pair in begun.windows(2) {
            let (from, wait) = (pair[0], pair[1] - pair[0]);
            most = if from < often.0 { most.min(often.1) } else { most.min(retry.1) };
            assert!((most - most / 4..=most).contains(&wait), "{wait} ms at {from} ms");
            most *= 2;
        }
        let last = begun.windows(2).last().unwrap();
        assert!(last[1] - last[0] > retry.1 / 2, "it grows to the most");
    }
}

#[test]
fn sessions_that_were_lost_together_are_tried_at_different_times() {
    let mut most = 0;
    let all: Vec<_> = (0..1_000).map(|salt| attempts(salt, 5_000)).collect();
    for from in (1_000..5_000).step_by(10) {
        let within = |at: &&SessionMillis| (from..from + 10).contains(*at);
        most = most.max(all.iter().flatten().filter(within).count());
    }
    // As many as there are of evenly spread ones, 1000 each 87 ms: 115 in 10 ms.
    assert!(most < 2 * 115, "{most} of 1000 try within 10 ms");
}

#[test]
fn silence_counts_only_while_this_side_looks() {
    let mut contact = asking(60_000);
    contact.resumed(0, 0, 0);
    let mut last = 0;
    for now in (200..=3_000).step_by(200) {
        assert!(contact.tick(now));
        last = now;
    }
    // It stalls for longer than may be silent, and hears what came meanwhile.
    assert!(contact.tick(last + 20_000) && contact.end().is_none());
    let lost = (last + 20_000..).step_by(200).find(|now| !contact.tick(*now));
    assert_eq!(lost, Some(last + 20_000 + 3_200));
}

#[test]
fn a_newer_connection_counts_and_older_ones_do_not() {
    let mut contact = Contact::new(SessionSide::Answers, SessionTiming::answering(1_000));
    contact.resumed(0, 0, 0);
    assert!(contact.connected(3, 10) && !contact.connected(2, 20));
    contact.broke(0, 30);
    assert_eq!(contact.resumed(3, 40, 5), Some(30));
    assert_eq!((contact.counts(), contact.lost_for(50)), ((1, 5, 30), None));
    assert_eq!(contact.attempt(60), None, "it is not the side that connects");
}

#[test]
fn the_asking_side_counts_from_the_last_beat_that_was_answered() {
    let mut contact = asking(1_000);
    contact.resumed(0, 0, 0);
    let beat = contact.beat(200);
    for now in (400..=4_000).step_by(200) {
        contact.heard(0, now);
        contact.echoed(beat);
        assert!(contact.tick(now) && contact.end().is_none(), "{now}");
    }
    contact.tick(4_400);
    assert_eq!(contact.end(), Some(&SessionEndReason::Silent(4_200)));
}

/// A connection that is made again and again and does not last is no network that comes back.
#[test]
fn connections_that_do_not_last_are_tried_less_and_less_often() {
    let mut contact = asking(60_000);
    contact.resumed(0, 0, 0);
    contact.broke(0, 5_000);
    let mut begun = Vec::new();
    for now in 5_000..15_000 {
        let Some(number) = contact.attempt(now) else { continue };
        assert!(contact.connected(number, now));
        contact.resumed(number, now, 0).unwrap();
        contact.broke(number, now);
        begun.push(now);
    }
    let [.., before, last] = begun[..] else { panic!("{begun:?}") };
    assert!((750..=1_000).contains(&(last - before)), "{begun:?}");
}
