//! What is refused at once, what ends with time, and which end is forgotten first.

use super::*;

/// One that waits with others in a queue would keep them out for as long as it waits.
#[test]
fn a_request_for_several_functions_is_refused_for_the_one_that_never_comes() {
    let mut authority = registered(&[("alpha", &["nvme0", "nvme1"]), ("beta", &[])]);
    let lease = lend(&mut authority, 0);
    let named = |names: &[&str]| -> Vec<FunctionId> {
        names.iter().map(|name| format!("alpha/{name}").parse().unwrap()).collect()
    };
    let mut ask = |names: &[&str]| {
        let refused =
            authority.borrow_all(1, &named(names), "beta", &Placement::Lender.into()).unwrap_err();
        (refused, named(names).pop().unwrap())
    };
    let (refused, missing) = ask(&["nvme0", "nvme9"]);
    assert_eq!(refused, BorrowRefused::Unknown(missing));
    let (refused, _) = ask(&["nvme0", "nvme1"]);
    assert!(matches!(refused, BorrowRefused::Held { lease: held, .. } if held == lease));
    // Its node started anew without the second one.
    let devices = [("nvme0".to_owned(), 1)].into();
    let message =
        Message::Register { incarnation: 2, devices, newest_lease: lease, address: "alpha".into() };
    authority.receive(2, "alpha", message);
    let second = FunctionId { host: "alpha".into(), device: "nvme0".into() };
    authority.borrow(2, &second, "beta", Placement::Lender).unwrap();
    let functions = named(&["nvme0", "nvme1"]);
    let refused = authority.borrow_all(2, &functions, "beta", &Placement::Lender.into());
    assert_eq!(refused.unwrap_err(), BorrowRefused::Withdrawn(functions[1].clone()));
}

/// The reason of the end is looked up after that: that of a lease that lasted for long would be gone at once.
#[test]
fn what_has_been_over_for_longest_is_forgotten_first() {
    let mut authority = registered(&[("alpha", &["nvme0", "nvme1"]), ("beta", &[])]);
    let long: FunctionId = "alpha/nvme1".parse().unwrap();
    let (first, _) = authority.borrow(0, &long, "beta", Placement::Lender).unwrap();
    for now in 1..=2000 {
        authority.receive(now, "beta", Message::Renew { lease: first, incarnation: 1, sent: None });
        let lease = lend(&mut authority, now);
        take_back(&mut authority, now, lease);
    }
    authority.give_back(3000, first, None).unwrap();
    authority.receive(3000, "beta", Message::Closed { lease: first });
    let revoked = Message::Revoked { incarnation: 1, device: "nvme1".into(), epoch: 1 };
    authority.receive(3000, "alpha", revoked);
    for now in 3001..3010 {
        let lease = lend(&mut authority, now);
        take_back(&mut authority, now, lease);
    }
    assert!(authority.lease(first).is_some());
    assert!(authority.leases.len() <= REMEMBERED + 1, "{}", authority.leases.len());
    // Those that end together are all there for whoever waits for them.
    let lent: Vec<LeaseId> = [&long, &"alpha/nvme0".parse().unwrap()]
        .map(|function| authority.borrow(3010, function, "beta", Placement::Lender).unwrap().0)
        .into();
    let ended = register_again(&mut authority, 3011);
    assert!(lent.iter().all(|lease| authority.lease(*lease).is_some_and(|it| !it.is_live())));
    let forgets =
        |record: &Record| matches!(record, Record::Forgotten { lease } if lent.contains(lease));
    assert!(!ended.records.iter().any(forgets));
}

/// The lender's node begins a new life.
fn register_again(authority: &mut Authority, now: Millis) -> Decision {
    let devices = [("nvme0".to_owned(), 1), ("nvme1".to_owned(), 1)].into();
    let address = "alpha".to_owned();
    let message = Message::Register { incarnation: 2, devices, newest_lease: 0, address };
    authority.receive(now, "alpha", message)
}

/// Nobody renews before the borrower has heard of the lease, however short its time to live is.
#[test]
fn a_lender_has_some_time_to_let_a_borrower_in() {
    let config = Config { ttl: 100, ..Config::default() };
    let mut authority = Authority::new(config);
    register(&mut authority, 0, "alpha", &["nvme0"]);
    register(&mut authority, 0, "beta", &[]);
    let function: FunctionId = "alpha/nvme0".parse().unwrap();
    let (lease, _) = authority.borrow(0, &function, "beta", Placement::Lender).unwrap();
    pass(&mut authority, 0, 1000);
    let device = "nvme0".to_owned();
    let armed = Message::Armed { incarnation: 1, device, epoch: 1, change: None };
    authority.receive(1000, "alpha", armed);
    pass(&mut authority, 1000, 1200);
    authority.receive(1200, "beta", Message::Opened { lease, outcome: Ok("s".into()) });
    assert!(matches!(authority.lease(lease).unwrap().state, LeaseState::Active { .. }));
}

/// Its lender may be back at an authority that was made anew long before its borrower is.
#[test]
fn a_lender_that_comes_back_first_takes_no_time_from_the_borrower() {
    let config = Config { ttl: 100, ..Config::default() };
    let mut authority = Authority::new(config);
    register(&mut authority, 0, "alpha", &["nvme0"]);
    register(&mut authority, 0, "beta", &[]);
    let function: FunctionId = "alpha/nvme0".parse().unwrap();
    let (lease, _) = authority.borrow(0, &function, "beta", Placement::Lender).unwrap();
    let armed =
        || Message::Armed { incarnation: 1, device: "nvme0".into(), epoch: 1, change: None };
    authority.receive(0, "alpha", armed());
    let records: Vec<Record> = (authority.hosts.values().cloned().map(Record::Host))
        .chain(authority.functions.values().cloned().map(Record::Function))
        .chain(authority.leases.values().cloned().map(Record::Lease))
        .collect();
    let mut returned = Authority::restore(config, 1000, records);
    register(&mut returned, 1000, "alpha", &["nvme0"]);
    returned.receive(1000, "alpha", armed());
    pass(&mut returned, 1000, 3000);
    returned.receive(3000, "beta", Message::Opened { lease, outcome: Ok("s".into()) });
    assert!(matches!(returned.lease(lease).unwrap().state, LeaseState::Active { .. }));
}

/// That a device does not give what was asked for is kept with the lease, and no failure of the device.
#[test]
fn a_lease_that_its_lender_refused_says_so() {
    for refused in [true, false] {
        let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
        let function: FunctionId = "alpha/nvme0".parse().unwrap();
        let (lease, _) = authority.borrow(0, &function, "beta", Placement::Lender).unwrap();
        let device = "nvme0".to_owned();
        let reason = "3 Gbit/s would fit".to_owned();
        let failed = Message::ArmFailed { incarnation: 1, device, epoch: 1, reason, refused };
        let decided = authority.receive(0, "alpha", failed);
        let record = authority.lease(lease).unwrap();
        assert!(matches!(&record.state, LeaseState::Ended { reason: EndReason::LenderFailed(_) }));
        assert_eq!(record.refused, refused);
        assert!(decided.records.contains(&Record::Lease(record.clone())));
    }
}

/// It is not its borrower that was silent.
#[test]
fn a_lender_that_does_not_let_the_borrower_in_is_said_to_have_failed() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
    let function: FunctionId = "alpha/nvme0".parse().unwrap();
    let (lease, _) = authority.borrow(0, &function, "beta", Placement::Lender).unwrap();
    let ttl = authority.config().ttl;
    pass(&mut authority, 0, ttl + 1);
    let state = &authority.lease(lease).unwrap().state;
    assert!(matches!(state, LeaseState::Ended { reason: EndReason::LenderFailed(_) }), "{state:?}");
}
