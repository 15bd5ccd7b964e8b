//! The authority by itself, and with a faultless rack around it.

use super::*;
use crate::change::{ChangeRefused, LevelChange};
use crate::message::Placement;

mod ends;
mod hosts;

fn registered(hosts: &[(&str, &[&str])]) -> Authority {
    let mut authority = Authority::new(Config::default());
    for (host, devices) in hosts {
        register(&mut authority, 0, host, devices);
    }
    authority.settle();
    authority
}

fn register(authority: &mut Authority, now: Millis, host: &str, devices: &[&str]) -> Decision {
    let devices = devices.iter().map(|d| ((*d).to_owned(), 0)).collect();
    let (newest_lease, address) = (0, host.to_owned());
    let message = Message::Register { incarnation: 1, devices, newest_lease, address };
    authority.receive(now, host, message)
}

/// Time passes as it does for an authority that is awake, without a message.
fn pass(authority: &mut Authority, from: Millis, until: Millis) {
    let mut now = from;
    while now < until {
        now = authority.next_tick().unwrap_or(until).clamp(now + 1, until);
        authority.tick(now);
    }
}

/// Borrows for beta, and carries the messages of a faultless rack.
fn lend(authority: &mut Authority, now: Millis) -> LeaseId {
    let function: FunctionId = "alpha/nvme0".parse().unwrap();
    let (lease, _) = authority.borrow(now, &function, "beta", Placement::Lender).unwrap();
    let epoch = authority.lease(lease).unwrap().epoch;
    let device = "nvme0".to_owned();
    authority.receive(now, "alpha", Message::Armed { incarnation: 1, device, epoch, change: None });
    authority.receive(now, "beta", Message::Opened { lease, outcome: Ok("s".into()) });
    lease
}

fn take_back(authority: &mut Authority, now: Millis, lease: LeaseId) {
    let epoch = authority.lease(lease).unwrap().epoch;
    authority.give_back(now, lease, None).unwrap();
    authority.receive(now, "beta", Message::Closed { lease });
    let device = "nvme0".to_owned();
    authority.receive(now, "alpha", Message::Revoked { incarnation: 1, device, epoch });
}

#[test]
fn a_lease_that_is_not_renewed_expires_and_one_that_is_does_not() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
    let lease = lend(&mut authority, 0);
    let ttl = authority.config().ttl;
    pass(&mut authority, 0, ttl - 1);
    authority.receive(ttl - 1, "beta", Message::Renew { lease, incarnation: 1, sent: None });
    pass(&mut authority, ttl - 1, 2 * ttl - 2);
    assert!(authority.lease(lease).unwrap().is_live());
    let outcome = authority.tick(2 * ttl);
    let state = &authority.lease(lease).unwrap().state;
    assert_eq!(state, &LeaseState::Ended { reason: EndReason::Expired });
    assert!(outcome.messages.iter().any(|(_, m)| matches!(m, Message::Revoke { .. })));
}

#[test]
fn a_returning_authority_gives_every_lease_a_whole_time_to_live() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
    let lease = lend(&mut authority, 0);
    let records: Vec<Record> = (authority.hosts.values().cloned().map(Record::Host))
        .chain(authority.functions.values().cloned().map(Record::Function))
        .chain(authority.leases.values().cloned().map(Record::Lease))
        .collect();
    let ttl = authority.config().ttl;
    let mut returned = Authority::restore(Config::default(), 10 * ttl, records);
    pass(&mut returned, 10 * ttl, 11 * ttl - 1);
    assert!(returned.lease(lease).unwrap().is_live());
    returned.tick(11 * ttl);
    assert!(!returned.lease(lease).unwrap().is_live());
}

#[test]
fn the_refusal_names_the_holder() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[]), ("gamma", &[])]);
    let lease = lend(&mut authority, 5);
    let function: FunctionId = "alpha/nvme0".parse().unwrap();
    let refused = authority.borrow(6, &function, "gamma", Placement::Lender).unwrap_err();
    let borrower = "beta".to_owned();
    assert_eq!(refused, BorrowRefused::Held { function, borrower, lease, since: 5 });
}

#[test]
fn old_leases_are_forgotten_and_their_numbers_stay_used() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
    let mut last = 0;
    for cycle in 0..REMEMBERED as u64 + 10 {
        last = lend(&mut authority, cycle);
        take_back(&mut authority, cycle, last);
    }
    assert!(authority.leases().count() <= REMEMBERED);
    assert!(authority.lease(1).is_none() && authority.lease(last).is_some());
    assert_eq!(lend(&mut authority, 0), last + 1);
}

#[test]
fn time_that_the_authority_did_not_see_counts_against_no_lease() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
    let lease = lend(&mut authority, 0);
    let ttl = authority.config().ttl;
    // Frozen for ten times to live: the nodes renewed, and nobody heard them.
    authority.tick(10 * ttl);
    assert!(authority.lease(lease).unwrap().is_live(), "expired by a freeze");
    authority.receive(10 * ttl + 1, "beta", Message::Renew { lease, incarnation: 1, sent: None });
    pass(&mut authority, 10 * ttl + 1, 11 * ttl);
    assert!(authority.lease(lease).unwrap().is_live());
    // Awake, and without renewal, it expires as usual.
    pass(&mut authority, 11 * ttl, 11 * ttl + 2);
    assert!(!authority.lease(lease).unwrap().is_live());
}

#[test]
fn a_clock_read_out_of_order_changes_nothing() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
    let lease = lend(&mut authority, 0);
    let ttl = authority.config().ttl;
    pass(&mut authority, 0, ttl - 10);
    // Read before somebody else's step, and used after it.
    authority.receive(5, "beta", Message::Renew { lease, incarnation: 1, sent: None });
    pass(&mut authority, ttl - 10, 2 * ttl - 11);
    assert!(authority.lease(lease).unwrap().is_live(), "renewed for an earlier moment");
}

#[test]
fn a_loss_of_a_lease_that_nobody_knows_is_answered() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
    let outcome = authority.receive(1, "beta", Message::Lost { lease: 7, reason: "gone".into() });
    let [(host, Message::Ended { lease: 7, .. })] = &outcome.messages[..] else {
        panic!("its borrower keeps it for ever: {outcome:?}");
    };
    assert_eq!(host, "beta");
}

#[test]
fn a_lease_number_is_not_used_again_after_a_restart() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
    let (mut stored, mut last) = (BTreeMap::new(), 0);
    let function: FunctionId = "alpha/nvme0".parse().unwrap();
    for round in 0..3 {
        let (lease, outcome) =
            authority.borrow(round, &function, "beta", Placement::Lender).unwrap();
        last = lease;
        store(&mut stored, outcome.records);
        let epoch = authority.lease(lease).unwrap().epoch;
        let device = "nvme0".to_owned();
        store(&mut stored, authority.give_back(round, lease, None).unwrap().records);
        store(&mut stored, authority.receive(round, "beta", Message::Closed { lease }).records);
        let revoked = Message::Revoked { incarnation: 1, device, epoch };
        store(&mut stored, authority.receive(round, "alpha", revoked).records);
    }
    // The last one's record is released, as it is when very many others are live.
    store(&mut stored, vec![Record::Forgotten { lease: last }]);
    let records = stored.into_values();
    let mut returned = Authority::restore(Config::default(), 10, records);
    for host in ["alpha", "beta"] {
        register(&mut returned, 10, host, &["nvme0"]);
    }
    assert_eq!(returned.borrow(10, &function, "beta", Placement::Lender).unwrap().0, last + 1);
}

fn store(stored: &mut BTreeMap<String, Record>, records: Vec<Record>) {
    for record in records {
        match &record {
            Record::Forgotten { .. } => stored.remove(&record.key()),
            _ => stored.insert(record.key(), record),
        };
    }
}

#[test]
fn a_step_that_cannot_be_stored_never_happened() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
    let function: FunctionId = "alpha/nvme0".parse().unwrap();
    let (lease, _) = authority.borrow(1, &function, "beta", Placement::Lender).unwrap();
    authority.take_back();
    assert!(authority.lease(lease).is_none());
    assert_eq!(authority.function(&function).unwrap().state, Availability::Offered);
    assert_eq!(lend(&mut authority, 2), lease);
    authority.settle();
    let ttl = authority.config().ttl;
    pass(&mut authority, 2, ttl + 1);
    authority.settle();
    // Its expiry cannot be stored for long: it stays due, and nothing renews it.
    let mut now = ttl + 2;
    for _ in 0..100 {
        let outcome = authority.tick(now);
        assert!(!outcome.records.is_empty());
        authority.take_back();
        assert!(authority.lease(lease).unwrap().is_live());
        now += authority.config().resend;
    }
    authority.tick(now);
    assert!(!authority.lease(lease).unwrap().is_live());
}

#[test]
fn steps_that_are_stored_together_are_taken_back_together() {
    let mut authority = registered(&[("alpha", &["nvme0", "nvme1"]), ("beta", &[])]);
    let lease = lend(&mut authority, 1);
    authority.settle();
    let before = authority.lease(lease).cloned();
    authority.give_back(2, lease, None).unwrap();
    authority.receive(3, "beta", Message::Closed { lease });
    let other: FunctionId = "alpha/nvme1".parse().unwrap();
    let (later, _) = authority.borrow(4, &other, "beta", Placement::Lender).unwrap();
    authority.take_back();
    assert_eq!(authority.lease(lease).cloned(), before);
    assert!(authority.lease(later).is_none());
    assert_eq!(authority.function(&other).unwrap().state, Availability::Offered);
    let (again, _) = authority.borrow(5, &other, "beta", Placement::Lender).unwrap();
    assert_eq!(again, later, "its number was not used");
}

#[test]
fn nodes_that_know_more_than_the_records_are_believed() {
    let mut authority = Authority::new(Config::default());
    let devices = [("nvme0".to_owned(), 7)].into();
    let (newest_lease, address) = (40, "alpha".to_owned());
    let message = Message::Register { incarnation: 1, devices, newest_lease, address };
    authority.receive(0, "alpha", message);
    register(&mut authority, 0, "beta", &[]);
    let function: FunctionId = "alpha/nvme0".parse().unwrap();
    let (lease, _) = authority.borrow(1, &function, "beta", Placement::Lender).unwrap();
    assert_eq!((lease, authority.lease(lease).unwrap().epoch), (41, 8));
}

/// It would leave none for others.
#[test]
fn a_node_cannot_use_up_the_numbers_of_leases() {
    let mut authority = Authority::new(Config::default());
    let devices = [("nvme0".to_owned(), 0)].into();
    let (newest_lease, address) = (u64::MAX, "alpha".to_owned());
    let message = Message::Register { incarnation: 1, devices, newest_lease, address };
    authority.receive(0, "alpha", message);
    register(&mut authority, 0, "beta", &[]);
    let function: FunctionId = "alpha/nvme0".parse().unwrap();
    let (lease, _) = authority.borrow(1, &function, "beta", Placement::Lender).unwrap();
    assert!(lease <= 1_000_002, "{lease}");
}

#[test]
fn a_host_that_has_not_registered_since_a_restart_gets_nothing_yet() {
    let authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
    let records = (authority.hosts.values().cloned().map(Record::Host))
        .chain(authority.functions.values().cloned().map(Record::Function));
    let mut returned = Authority::restore(Config::default(), 5, records);
    let function: FunctionId = "alpha/nvme0".parse().unwrap();
    for host in ["beta", "alpha"] {
        let awaited = BorrowRefused::Awaited(host.to_owned());
        assert_eq!(returned.borrow(5, &function, "beta", Placement::Lender).unwrap_err(), awaited);
        register(&mut returned, 5, host, if host == "alpha" { &["nvme0"] } else { &[] });
    }
    assert!(returned.borrow(5, &function, "beta", Placement::Lender).is_ok());
}

fn records(authority: &Authority) -> Vec<Record> {
    (authority.hosts.values().cloned().map(Record::Host))
        .chain(authority.functions.values().cloned().map(Record::Function))
        .chain(authority.leases.values().cloned().map(Record::Lease))
        .collect()
}

fn level_set(number: u64, level: &str, outcome: Result<(), String>) -> Message {
    let (device, level) = ("nvme0".to_owned(), Some(level.to_owned()));
    Message::LevelSet { incarnation: 1, device, epoch: 1, number, level, outcome }
}

/// The level in force, and the newest change: its number, whether it was answered.
fn levels(authority: &Authority, lease: LeaseId) -> (Option<&str>, Option<(u64, bool)>) {
    let record = authority.lease(lease).unwrap();
    let change = record.change.as_ref();
    (record.level.as_deref(), change.map(|change| (change.number, change.outcome.is_some())))
}

#[test]
fn a_level_is_asked_for_until_its_lender_answers_and_a_refused_one_changes_nothing() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
    assert_eq!(authority.change_level(0, 1, None), Err(ChangeRefused::Unknown(1)));
    let lease = lend(&mut authority, 0);
    let change = |authority: &mut Authority, level: &str| {
        authority.change_level(1, lease, Some(level.to_owned()))
    };
    let asked = |outcome: &Decision| {
        let said = outcome.messages.iter();
        said.filter(|(host, m)| host == "alpha" && matches!(m, Message::SetLevel { .. })).count()
    };
    assert_eq!(asked(&change(&mut authority, "a").unwrap()), 1);
    assert_eq!(asked(&change(&mut authority, "a").unwrap()), 0, "it is under way");
    assert_eq!(change(&mut authority, "b"), Err(ChangeRefused::UnderWay(lease)));
    let resend = authority.next_tick().unwrap();
    assert_eq!(asked(&authority.tick(resend + 1000)), 1, "it is said again");
    authority.receive(2000, "alpha", level_set(1, "a", Ok(())));
    assert_eq!(levels(&authority, lease), (Some("a"), Some((1, true))));
    assert_eq!(change(&mut authority, "a"), Ok(Decision::default()), "it has that");
    change(&mut authority, "b").unwrap();
    authority.receive(2001, "alpha", level_set(1, "a", Ok(())));
    assert_eq!(levels(&authority, lease), (Some("a"), Some((2, false))), "that was the one before");
    authority.receive(2002, "alpha", level_set(2, "b", Err("too much".to_owned())));
    assert_eq!(levels(&authority, lease), (Some("a"), Some((2, true))));
    authority.give_back(2003, lease, None).unwrap();
    assert_eq!(change(&mut authority, "c"), Err(ChangeRefused::NotActive(lease)));
    authority.receive(2004, "beta", Message::Closed { lease });
    assert!(matches!(change(&mut authority, "c"), Err(ChangeRefused::Ended { .. })));
}

/// The records are an older copy: what the lender did since is so, and what is asked for is asked anew.
#[test]
fn a_lender_that_knows_of_a_later_change_of_a_level_is_believed() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
    let lease = lend(&mut authority, 0);
    let mut returned = Authority::restore(Config::default(), 5, records(&authority));
    register(&mut returned, 5, "alpha", &["nvme0"]);
    returned.change_level(6, lease, Some("new".to_owned())).unwrap();
    let change = LevelChange { number: 1, level: Some("lost".to_owned()), outcome: Some(Ok(())) };
    let device = "nvme0".to_owned();
    let armed = Message::Armed { incarnation: 1, device, epoch: 1, change: Some(change) };
    let outcome = returned.receive(7, "alpha", armed);
    assert_eq!(levels(&returned, lease), (Some("lost"), Some((2, false))));
    let last = outcome.messages.last();
    assert!(
        matches!(last, Some((_, Message::SetLevel { number: 2, level: Some(level), .. })) if level == "new"),
        "{last:?}"
    );
    returned.receive(8, "alpha", level_set(2, "new", Ok(())));
    assert_eq!(levels(&returned, lease), (Some("new"), Some((2, true))));
}

/// Nothing would follow it, and the number of the next change would be one that says that there is none.
#[test]
fn a_lender_uses_up_no_numbers_of_changes_of_a_level() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
    let lease = lend(&mut authority, 0);
    for number in [u64::MAX, 1 << 40] {
        authority.receive(1, "alpha", level_set(number, "made up", Ok(())));
        assert_eq!(levels(&authority, lease), (None, None));
    }
    authority.change_level(2, lease, Some("a".to_owned())).unwrap();
    authority.receive(3, "alpha", level_set(u64::MAX, "made up", Ok(())));
    assert_eq!(levels(&authority, lease), (None, Some((1, false))));
    authority.receive(4, "alpha", level_set(1, "a", Ok(())));
    assert_eq!(levels(&authority, lease), (Some("a"), Some((1, true))));
}

/// With a short time to live, what was being lent at a restart once expired before anybody was told of it: it was said at
/// times of its own, and not when hosts came back.
#[test]
fn what_was_being_lent_is_said_to_hosts_that_come_back_to_a_new_authority() {
    let config = Config { ttl: 500, ..Config::default() };
    let mut former = Authority::new(config);
    register(&mut former, 0, "alpha", &["nvme0"]);
    register(&mut former, 0, "beta", &[]);
    let function: FunctionId = "alpha/nvme0".parse().unwrap();
    let (lease, _) = former.borrow(0, &function, "beta", Placement::Lender).unwrap();
    let mut returned = Authority::restore(config, 0, records(&former));
    // Nobody listens yet; time passes as it does.
    pass(&mut returned, 0, 900);
    let said = register(&mut returned, 900, "alpha", &["nvme0"]).messages;
    let arm =
        |message: &Message| matches!(message, Message::Arm { lease: armed, .. } if *armed == lease);
    assert!(said.iter().any(|(host, message)| host == "alpha" && arm(message)), "{said:?}");
    let epoch = returned.lease(lease).unwrap().epoch;
    let armed = Message::Armed { incarnation: 1, device: "nvme0".into(), epoch, change: None };
    returned.receive(901, "alpha", armed);
    pass(&mut returned, 901, 1100);
    let said = register(&mut returned, 1100, "beta", &[]).messages;
    let granted =
        said.iter().any(|(host, message)| host == "beta" && matches!(message, Message::Granted(_)));
    assert!(granted, "{said:?}");
    // Once they are there, they are told no more often than before.
    let again = register(&mut returned, 1101, "alpha", &["nvme0"]).messages;
    assert!(!again.iter().any(|(_, message)| arm(message)), "{again:?}");
    returned.receive(1102, "beta", Message::Opened { lease, outcome: Ok("s".into()) });
    assert!(matches!(returned.lease(lease).unwrap().state, LeaseState::Active { .. }));
}

/// A node that takes its time for two devices, and says each heartbeat which numbers it was told of.
#[test]
fn a_device_that_is_opened_slowly_keeps_the_number_that_its_node_answers_by() {
    let mut authority = registered(&[("alpha", &[])]);
    let numbers = ["nvme0", "nvme1"].map(|device| {
        let change = DeviceChange {
            host: "alpha".to_owned(),
            device: device.to_owned(),
            number: 0,
            functions: vec![device.to_owned()],
            section: Some(String::new()),
            was: None,
            by_node: false,
            listed: true,
            answer: None,
        };
        authority.offer(0, change).unwrap().0
    });
    let newest_lease = *numbers.iter().max().unwrap();
    for now in [3_000, 6_000, 9_000] {
        let (devices, address) = (BTreeMap::new(), "alpha".to_owned());
        let said = Message::Register { incarnation: 1, devices, newest_lease, address };
        let told = authority.receive(now, "alpha", said).messages;
        for (_, message) in told {
            let Message::Offer { number, .. } = message else { continue };
            assert!(numbers.contains(&number), "told as {number} now, and as {numbers:?} before");
        }
    }
}

/// The time that the borrower is told that its user has.
fn told(decision: &Decision) -> Option<Millis> {
    decision.messages.iter().find_map(|(_, message)| match message {
        Message::Ended { within, .. } => *within,
        _ => None,
    })
}

#[test]
fn a_return_gives_the_user_the_time_that_was_asked_for() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
    let (lease, grace) = (lend(&mut authority, 1000), Config::default().close_grace);
    // As long as the rack gives, and the borrower is told.
    let decision = authority.give_back(2000, lease, None).unwrap();
    assert_eq!(told(&decision), Some(grace));
    // Sooner; what was asked for before is not made longer.
    authority.give_back(2000, lease, Some(500)).unwrap();
    authority.give_back(2000, lease, Some(grace * 9)).unwrap();
    // Of a later life of the authority, too.
    let records = authority.leases().map(|lease| Record::Lease(lease.clone())).collect::<Vec<_>>();
    let restored = Authority::restore(Config::default(), 2000, records);
    assert_eq!(restored.deadlines.get(&lease), Some(&2500));
    pass(&mut authority, 2000, 2499);
    assert!(authority.lease(lease).unwrap().is_live());
    pass(&mut authority, 2499, 2500);
    let ended = LeaseState::Ended { reason: EndReason::Returned };
    assert_eq!(authority.lease(lease).unwrap().state, ended);
}

#[test]
fn a_time_to_release_that_was_asked_for_is_that_of_the_next_life_as_well() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
    let (lease, long) = (lend(&mut authority, 1000), Config::default().close_grace * 3);
    let decision = authority.give_back(2000, lease, Some(long)).unwrap();
    assert_eq!(told(&decision), Some(long));
    let records = authority.leases().map(|lease| Record::Lease(lease.clone())).collect::<Vec<_>>();
    let authority = Authority::restore(Config::default(), 3000, records);
    assert_eq!(authority.deadlines.get(&lease), Some(&(3000 + long)));
}
