//! What a rotation promises, by holders that do whatever they like: none that renews is ever cut off by a step that was not
//! forced, at every moment those that are good accept each other, and it comes to its end.

use std::collections::BTreeMap;

use proptest::prelude::*;
use rackbus_identity::{Certified, Person, Revoked, Role, Subject};

use super::*;

const LIFE: u64 = 1000;

fn first() -> AuthoritySet {
    AuthoritySet::first("certificate 0", "key 0".to_owned())
}

fn next(number: u64) -> AuthorityRecord {
    let (certificate, key) = (format!("certificate {number}"), format!("key {number}"));
    AuthorityRecord { number: 0, certificate, key }
}

fn subject(holder: usize) -> Subject {
    match holder % 2 {
        0 => Subject::Node(format!("host{holder}")),
        _ => Subject::Person(Person { user: format!("user{holder}"), role: Role::Reader }),
    }
}

/// What somebody does, or happens to them.
#[derive(Debug, Clone)]
enum Happens {
    /// A certificate for a token.
    Joins(usize),
    /// The answer arrives, or not.
    Renews(usize, bool),
    Shows(usize),
    Revoked(usize),
    Rotate(bool),
    Retire(bool),
    Time(u64),
}

fn happens() -> impl Strategy<Value = Happens> {
    let holder = 0..6usize;
    prop_oneof![
        3 => holder.clone().prop_map(Happens::Joins),
        6 => (holder.clone(), any::<bool>()).prop_map(|(who, arrives)| Happens::Renews(who, arrives)),
        6 => holder.clone().prop_map(Happens::Shows),
        1 => holder.prop_map(Happens::Revoked),
        2 => prop::bool::weighted(0.2).prop_map(Happens::Rotate),
        2 => prop::bool::weighted(0.2).prop_map(Happens::Retire),
        4 => (0..400u64).prop_map(Happens::Time),
    ]
}

/// A rack: what is stored, and what each holder has: a certificate, who made it, and which authorities it trusts.
#[derive(Default)]
struct Rack {
    register: CertificateRegister,
    now: u64,
    held: BTreeMap<usize, (Certified, AuthorityNumbers, Vec<u64>)>,
}

impl Rack {
    fn set(&self) -> AuthoritySet {
        self.register.authorities().cloned().unwrap_or_else(first)
    }

    fn trusted(&self) -> Vec<u64> {
        let set = self.set();
        let others = set.next.iter().map(|it| it.authority.number);
        let others = others.chain(set.last.iter().map(|it| it.number));
        [set.signing.number].into_iter().chain(others).collect()
    }

    fn issue(&mut self, holder: usize, old: Option<&Certified>, arrives: bool) {
        let certified = self.register.draft(self.now, subject(holder), LIFE);
        let under = self.register.authority_numbers();
        let Ok(changes) = self.register.issue(self.now, &certified, under, old) else { return };
        self.register.apply(changes);
        if arrives {
            self.held.insert(holder, (certified, under, self.trusted()));
        }
    }

    fn is_good(&self, certified: &Certified) -> bool {
        !certified.is_over(self.now) && self.register.revoked().find(certified).is_none()
    }

    /// Takes a step, and what is stored of it, read again.
    fn step(&mut self, changes: Vec<RegisterChange>) {
        let text: Vec<String> = changes
            .iter()
            .map(|change| match change {
                RegisterChange::Put(entry) => serde_json::to_string(entry).unwrap(),
                RegisterChange::Forget(_) => String::new(),
            })
            .collect();
        for (change, text) in changes.into_iter().zip(text) {
            let change = match change {
                RegisterChange::Put(_) => RegisterChange::Put(serde_json::from_str(&text).unwrap()),
                forget => forget,
            };
            self.register.apply(vec![change]);
        }
    }

    /// Each that is good accepts each other, and the control plane, which has one of who signs.
    fn check(&self, forced: bool) {
        if forced {
            return;
        }
        let control = (self.set().signing.number, self.trusted());
        let good = self.held.values().filter(|(certified, ..)| self.is_good(certified));
        let good = good.map(|(_, under, trusted)| (under.issuer, trusted.clone()));
        let all: Vec<(u64, Vec<u64>)> = good.chain([control]).collect();
        for (issuer, _) in &all {
            for (_, trusted) in &all {
                assert!(trusted.contains(issuer), "{issuer} is not of {trusted:?}: {all:?}");
            }
        }
    }

    fn happens(&mut self, happens: Happens, forced: &mut bool) {
        match happens {
            // As another machine, in the place of the one before: that is there no more.
            Happens::Joins(holder) => self.issue(holder, None, true),
            Happens::Renews(holder, arrives) => {
                let Some((old, ..)) = self.held.get(&holder).cloned() else { return };
                if self.is_good(&old) {
                    self.issue(holder, Some(&old), arrives);
                }
            }
            Happens::Shows(holder) => {
                let Some((certified, ..)) = self.held.get(&holder) else { return };
                if self.is_good(certified) {
                    let changes = self.register.shown(&certified.serial.clone());
                    self.step(changes);
                }
            }
            Happens::Revoked(holder) => {
                let what = match subject(holder) {
                    Subject::Node(host) => Revoked::Host(host),
                    Subject::Person(person) => Revoked::User(person.user),
                    Subject::Control => return,
                };
                let (_, changes) = self.register.revoke(self.now, what).unwrap();
                self.step(changes);
            }
            Happens::Rotate(force) => {
                let number = self.set().signing.number + 1;
                let rotated = self.register.rotate(self.now, &first(), next(number), force);
                if let Ok((step, changes)) = rotated {
                    *forced |= force && !step.cut_off().is_empty();
                    self.step(changes);
                }
            }
            Happens::Retire(force) => {
                if let Ok((step, changes)) = self.register.retire(self.now, force) {
                    self.step(changes);
                    let revoked = self.held.values().filter(|(certified, under, _)| {
                        under.issuer < self.set().signing.number && !certified.is_over(self.now)
                    });
                    let mut revoked = revoked.map(|(certified, ..)| certified);
                    assert!(revoked.all(|it| !self.is_good(it)), "{step:?}");
                    assert!(force || step.cut_off().is_empty());
                }
            }
            Happens::Time(seconds) => {
                self.now += seconds;
                if let Some((_, changes)) = self.register.advance(self.now) {
                    self.step(changes);
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn whoever_is_good_accepts_everybody_who_is(all in prop::collection::vec(happens(), 1..80)) {
        let (mut rack, mut forced) = (Rack { now: 100_000, ..Rack::default() }, false);
        for it in all {
            rack.happens(it, &mut forced);
            rack.check(forced);
        }
        // Those who are there renew, and it comes to an end.
        for _ in 0..3 {
            for holder in 0..6 {
                rack.happens(Happens::Renews(holder, true), &mut forced);
                rack.happens(Happens::Shows(holder), &mut forced);
            }
            rack.happens(Happens::Time(LIFE / 3), &mut forced);
        }
        for _ in 0..3 {
            for holder in 0..6 {
                rack.happens(Happens::Renews(holder, true), &mut forced);
                rack.happens(Happens::Shows(holder), &mut forced);
            }
            rack.happens(Happens::Time(LIFE / 3), &mut forced);
            rack.happens(Happens::Retire(false), &mut forced);
        }
        let set = rack.set();
        prop_assert!(set.next.is_none() && set.last.is_none(), "{set:?}");
    }
}

#[test]
fn an_authority_is_replaced_step_by_step_and_each_is_refused_before_its_time() {
    let mut rack = Rack { now: 100, ..Rack::default() };
    rack.issue(0, None, true);
    rack.happens(Happens::Shows(0), &mut false);
    let refused = |outcome: Result<_, RegisterRefused>| outcome.map(drop).unwrap_err().to_string();
    let alone = refused(rack.register.retire(100, false));
    assert_eq!(alone, "the rack has one certificate authority, and none to retire");
    rack.happens(Happens::Rotate(false), &mut false);
    assert_eq!(rack.register.authority_numbers(), AuthorityNumbers { issuer: 0, newest: 1 });
    let again = rack.register.rotate(100, &first(), next(1), false);
    assert!(refused(again).ends_with("is not trusted yet by host0.node"));
    rack.happens(Happens::Time(10), &mut false);
    assert_eq!(rack.set().signing.number, 0, "host0 does not trust it");
    // An answer that is lost changes nothing.
    rack.happens(Happens::Renews(0, false), &mut false);
    rack.happens(Happens::Time(10), &mut false);
    assert_eq!(rack.set().signing.number, 0);
    rack.happens(Happens::Renews(0, true), &mut false);
    rack.happens(Happens::Shows(0), &mut false);
    rack.happens(Happens::Time(10), &mut false);
    assert_eq!((rack.set().signing.number, rack.set().last.unwrap().number), (1, 0));
    // What was signed before is to be signed anew.
    let stale = rack.register.draft(rack.now, subject(1), LIFE);
    let stale = rack.register.issue(rack.now, &stale, AuthorityNumbers::default(), None);
    assert_eq!(stale, Err(RegisterRefused::OtherAuthorities));
    let in_use = refused(rack.register.retire(rack.now, false));
    assert!(in_use.ends_with("are in use by host0.node"), "{in_use}");
    assert!(refused(rack.register.rotate(rack.now, &first(), next(2), true)).contains("before"));
    rack.happens(Happens::Renews(0, true), &mut false);
    rack.happens(Happens::Shows(0), &mut false);
    rack.happens(Happens::Retire(false), &mut false);
    assert_eq!((rack.set().signing.number, rack.set().last), (1, None));
    assert!(!format!("{:?}", rack.register).contains("key"), "keys are not shown");
}

#[test]
fn what_is_forced_says_whom_it_cuts_off_and_revokes_that() {
    let mut rack = Rack { now: 100, ..Rack::default() };
    for holder in 0..2 {
        rack.issue(holder, None, true);
        rack.happens(Happens::Shows(holder), &mut false);
    }
    rack.happens(Happens::Rotate(false), &mut false);
    rack.happens(Happens::Renews(0, true), &mut false);
    rack.happens(Happens::Shows(0), &mut false);
    let (step, changes) = rack.register.rotate(200, &first(), next(1), true).unwrap();
    assert_eq!(step, RotationStep::Signs([subject(1)].into()));
    rack.step(changes);
    let (step, changes) = rack.register.retire(200, true).unwrap();
    assert_eq!(step.cut_off().len(), 2);
    rack.step(changes);
    assert!(rack.held.values().all(|(certified, ..)| !rack.is_good(certified)));
    assert_eq!(rack.register.revoked().version, 2);
}

/// Whoever has the old key makes certificates that the control plane never gave out.
#[test]
fn what_was_not_given_out_is_refused_once_the_authority_is_replaced() {
    let mut rack = Rack { now: 100, ..Rack::default() };
    rack.issue(0, None, true);
    rack.happens(Happens::Shows(0), &mut false);
    let (held, ..) = rack.held[&0].clone();
    let unknown = rack.register.draft(100, subject(1), LIFE);
    let other = Certified { subject: subject(1), ..held.clone() };
    let longer = Certified { until: held.until + 1, ..held.clone() };
    let forged = [unknown, other, longer];
    let renew = |rack: &Rack, old: &Certified| {
        let next = rack.register.draft(rack.now, old.subject.clone(), LIFE);
        let under = rack.register.authority_numbers();
        rack.register.issue(rack.now, &next, under, Some(old)).map(drop)
    };
    // A version that kept no register may have given it out.
    assert!(forged.iter().all(|it| renew(&rack, it) == Ok(())));
    let refused = |rack: &Rack| {
        for it in &forged {
            let error = rack.register.check_issued(it).unwrap_err();
            assert_eq!(renew(rack, it), Err(RegisterRefused::NotIssued(error)));
        }
        assert_eq!(renew(rack, &rack.held[&0].0), Ok(()));
    };
    rack.happens(Happens::Rotate(false), &mut false);
    refused(&rack);
    rack.happens(Happens::Rotate(true), &mut false);
    refused(&rack);
    rack.happens(Happens::Renews(0, true), &mut false);
    rack.happens(Happens::Shows(0), &mut false);
    rack.happens(Happens::Retire(false), &mut false);
    refused(&rack);
    rack.happens(Happens::Time(1), &mut false);
    assert_eq!(rack.set().last, None);
}
