//! Hosts leave, and others of their names join.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn named(hosts: &[&str]) -> BTreeSet<String> {
    hosts.iter().map(|host| (*host).to_owned()).collect()
}

fn nvme0() -> FunctionId {
    "alpha/nvme0".parse().unwrap()
}

/// Has the node of a host register as its life of this number.
fn begin(authority: &mut Authority, incarnation: u64, host: &str, devices: &[&str]) {
    let devices = devices.iter().map(|it| ((*it).to_owned(), 0)).collect();
    let (newest_lease, address) = (0, host.to_owned());
    let message = Message::Register { incarnation, devices, newest_lease, address };
    authority.receive(0, host, message);
}

#[test]
fn neither_lender_nor_borrower_leaves_while_a_lease_is_not_back() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[]), ("gamma", &[])]);
    let lease = lend(&mut authority, 0);
    let lends = HostInUse::Lends { function: nvme0(), borrower: "beta".into(), lease };
    let borrows = HostInUse::Borrows { host: "beta".into(), function: nvme0(), lease };
    let refused = |authority: &mut Authority| {
        for (host, expected) in [("alpha", &lends), ("beta", &borrows)] {
            let refused = authority.remove_hosts(1, &named(&["gamma", host])).unwrap_err();
            assert_eq!(&refused, expected);
        }
        assert_eq!(authority.hosts().count(), 3, "something changed");
    };
    refused(&mut authority);
    authority.give_back(1, lease, None).unwrap();
    refused(&mut authority);
    // It is over, and its lender has still to take the function back.
    authority.receive(1, "beta", Message::Closed { lease });
    refused(&mut authority);
    let device = "nvme0".to_owned();
    authority.receive(1, "alpha", Message::Revoked { incarnation: 1, device, epoch: 1 });
    authority.remove_hosts(1, &named(&["alpha", "beta"])).unwrap();
    assert_eq!(authority.hosts().map(|(it, _)| it.host.as_str()).collect::<Vec<_>>(), ["gamma"]);
}

#[test]
fn hosts_that_take_turns_or_are_in_a_saved_composition_stay() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
    let composition = CompositionRecord {
        name: "db".into(),
        borrower: "beta".into(),
        functions: vec![nvme0()],
        placement: Placement::Lender,
    };
    authority.compose(1, composition).unwrap();
    for host in ["alpha", "beta"] {
        let refused = authority.remove_hosts(1, &named(&[host])).unwrap_err();
        let composition = "db".to_owned();
        assert_eq!(refused, HostInUse::Composed { composition, host: host.to_owned() });
    }
    authority.dissolve(1, "db").unwrap();
    authority.remove_hosts(1, &named(&["beta", "never-there"])).unwrap();
}

#[test]
fn nobody_borrows_of_or_for_a_host_that_left_and_one_that_is_back_is_a_new_one() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[]), ("gamma", &[])]);
    let lease = lend(&mut authority, 0);
    take_back(&mut authority, 1, lease);
    authority.settle();
    let removed = authority.remove_hosts(2, &named(&["alpha", "gamma"])).unwrap();
    let gone = |host: &str| Record::HostRemoved { host: host.to_owned() };
    assert!(removed.records.contains(&gone("alpha")) && removed.records.contains(&gone("gamma")));
    // Once more, where it was not stored.
    authority.take_back();
    assert_eq!(authority.hosts().count(), 3);
    assert_eq!(authority.remove_hosts(2, &named(&["alpha", "gamma"])).unwrap(), removed);
    authority.settle();
    let refused = authority.borrow(3, &nvme0(), "beta", Placement::Lender).unwrap_err();
    assert_eq!(refused, BorrowRefused::Withdrawn(nvme0()));
    begin(&mut authority, 2, "alpha", &["nvme0"]);
    let refused = authority.borrow(3, &nvme0(), "gamma", Placement::Lender).unwrap_err();
    assert_eq!(refused, BorrowRefused::NoHost("gamma".into()));
    let (again, _) = authority.borrow(3, &nvme0(), "beta", Placement::Lender).unwrap();
    assert_eq!(authority.lease(again).unwrap().epoch, 2, "epochs only grow");
}

#[test]
fn hosts_that_a_new_file_has_no_more_leave_when_it_is_read_unless_they_are_in_use() {
    let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[]), ("gamma", &["nvme1"])]);
    let lease = lend(&mut authority, 0);
    authority.keep_hosts(1, &named(&["beta"]));
    let left = |authority: &Authority| {
        authority.hosts().map(|(it, _)| it.host.clone()).collect::<Vec<_>>()
    };
    assert_eq!(left(&authority), ["alpha", "beta"], "gamma has left");
    let gamma: FunctionId = "gamma/nvme1".parse().unwrap();
    assert_eq!(authority.function(&gamma).unwrap().state, Availability::Withdrawn);
    take_back(&mut authority, 1, lease);
    let removed = authority.keep_hosts(2, &named(&["beta"]));
    assert!(removed.records.contains(&Record::HostRemoved { host: "alpha".into() }));
    assert_eq!(left(&authority), ["beta"]);
    assert_eq!(authority.keep_hosts(2, &named(&["beta"])), Decision::default());
}

/// What is done to a rack of three hosts, each of which has a function.
#[derive(Debug, Clone)]
enum Step {
    Join(usize),
    Leave(usize),
    Borrow(usize, usize),
    Return(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..3usize).prop_map(Step::Join),
        (0..3usize).prop_map(Step::Leave),
        (0..3usize, 0..3usize).prop_map(|(of, by)| Step::Borrow(of, by)),
        (0..3usize).prop_map(Step::Return),
    ]
}

proptest! {
    /// Whatever is stored of it, too: an authority that is made anew of that is the same.
    #[test]
    fn no_lease_is_of_a_host_that_left_and_epochs_only_grow(
        steps in prop::collection::vec(step(), 1..60),
    ) {
        const HOSTS: [&str; 3] = ["alpha", "beta", "gamma"];
        let function = |of: usize| FunctionId { host: HOSTS[of].into(), device: "d".into() };
        let mut authority = Authority::new(Config::default());
        let (mut stored, mut newest) = (BTreeMap::new(), [0; 3]);
        for (life, step) in (1..).zip(steps) {
            let outcome = match step {
                Step::Join(host) => {
                    let (devices, newest_lease) = ([("d".to_owned(), 0)].into(), 0);
                    let address = HOSTS[host].to_owned();
                    let message = Message::Register { incarnation: life, devices, newest_lease, address };
                    authority.receive(0, HOSTS[host], message)
                }
                Step::Leave(host) => {
                    let left = authority.remove_hosts(0, &named(&[HOSTS[host]]));
                    let is_there = authority.hosts().any(|(it, _)| it.host == HOSTS[host]);
                    prop_assert_eq!(is_there, left.is_err());
                    left.unwrap_or_default()
                }
                Step::Borrow(of, by) => {
                    match authority.borrow(0, &function(of), HOSTS[by], Placement::Lender) {
                        Ok((lease, outcome)) => {
                            let epoch = authority.lease(lease).unwrap().epoch;
                            prop_assert!(epoch > newest[of]);
                            newest[of] = epoch;
                            outcome
                        }
                        Err(_) => Decision::default(),
                    }
                }
                Step::Return(of) => {
                    let lease = authority.leases().find(|it| it.is_live() && it.function == function(of));
                    let Some((lease, epoch)) = lease.map(|it| (it.lease, it.epoch)) else { continue };
                    let borrower = authority.lease(lease).unwrap().borrower.clone();
                    let mut outcome = authority.give_back(0, lease, None).unwrap();
                    outcome.append(authority.receive(0, &borrower, Message::Closed { lease }));
                    let incarnation = authority.hosts[HOSTS[of]].incarnation;
                    let revoked = Message::Revoked { incarnation, device: "d".into(), epoch };
                    outcome.append(authority.receive(0, HOSTS[of], revoked));
                    outcome
                }
            };
            for record in outcome.records {
                match record.removes() {
                    true => stored.remove(&record.key()),
                    false => stored.insert(record.key(), record),
                };
            }
            for lease in authority.leases().filter(|it| it.is_live()) {
                for host in [&lease.borrower, &lease.function.host] {
                    prop_assert!(authority.hosts.contains_key(host), "{} is of {}", lease.lease, host);
                }
            }
            let again = Authority::restore(Config::default(), 0, stored.values().cloned());
            prop_assert_eq!(&again.hosts, &authority.hosts);
        }
    }
}
