//! The authority by itself, and with a faultless rack around it.

use super::*;

fn registered(hosts: &[(&str, &[&str])]) -> Authority {
    let mut authority = Authority::new(Config::default());
    for (host, devices) in hosts {
        let devices = devices.iter().map(|d| (*d).to_owned()).collect();
        let address = (*host).to_owned();
        let message = Message::Register { incarnation: 1, devices, address };
        authority.receive(0, host, message);
    }
    authority
}

/// Borrows for beta, and carries the messages of a faultless rack.
fn lend(authority: &mut Authority, now: Millis) -> LeaseId {
    let function: FunctionId = "alpha/nvme0".parse().unwrap();
    let (lease, _) = authority.borrow(now, &function, "beta").unwrap();
    let epoch = authority.lease(lease).unwrap().epoch;
    let device = "nvme0".to_owned();
    authority.receive(now, "alpha", Message::Armed { incarnation: 1, device, epoch });
    authority.receive(now, "beta", Message::Opened { lease, outcome: Ok("s".into()) });
    lease
}

fn take_back(authority: &mut Authority, now: Millis, lease: LeaseId) {
    let epoch = authority.lease(lease).unwrap().epoch;
    authority.give_back(now, lease).unwrap();
    authority.receive(now, "beta", Message::Closed { lease });
    let device = "nvme0".to_owned();
    authority.receive(now, "alpha", Message::Revoked { incarnation: 1, device, epoch });
}

#[test]
fn a_lease_that_is_not_renewed_expires_and_one_that_is_does_not() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
    let lease = lend(&mut authority, 0);
    let ttl = authority.config().ttl;
    authority.receive(ttl - 1, "beta", Message::Renew { lease, incarnation: 1 });
    authority.tick(ttl + 1);
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
    returned.tick(11 * ttl - 1);
    assert!(returned.lease(lease).unwrap().is_live());
    returned.tick(11 * ttl);
    assert!(!returned.lease(lease).unwrap().is_live());
}

#[test]
fn the_refusal_names_the_holder() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[]), ("gamma", &[])]);
    let lease = lend(&mut authority, 5);
    let function: FunctionId = "alpha/nvme0".parse().unwrap();
    let refused = authority.borrow(6, &function, "gamma").unwrap_err();
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
