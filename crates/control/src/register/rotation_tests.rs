//! What a rotation promises, by holders that do whatever they like: none that renews is ever cut off by a step that was not
//! forced, at every moment those that are good accept each other, and it comes to its end.

use std::collections::BTreeMap;

use proptest::prelude::*;
use rackbus_identity::{
    CertificateAuthority, Certified, Person, Revoked, Role, Subject, fingerprint_of,
};

use super::tests::keyed;
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
        let (given, old) = (keyed(&certified), old.map(keyed));
        let Ok(changes) = self.register.issue(self.now, &given, under, old.as_ref()) else {
            return;
        };
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
                    let changes = self.register.shown(&keyed(certified));
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
    fn holders_of_good_certificates_accept_each_other(all in prop::collection::vec(happens(), 1..80)) {
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
    let stale = rack.register.issue(rack.now, &keyed(&stale), AuthorityNumbers::default(), None);
    assert_eq!(stale, Err(RegisterRefused::OtherAuthorities));
    let in_use = refused(rack.register.retire(rack.now, false));
    assert!(in_use.ends_with("are in use by host0.node"), "{in_use}");
    assert!(refused(rack.register.rotate(rack.now, &first(), next(2), true)).contains("before"));
    rack.happens(Happens::Renews(0, true), &mut false);
    rack.happens(Happens::Shows(0), &mut false);
    rack.happens(Happens::Retire(false), &mut false);
    assert_eq!((rack.set().signing.number, rack.set().last), (1, None));
    let shown = format!("{:?}", rack.register);
    assert!(!["key 0", "key 1"].iter().any(|it| shown.contains(it)), "keys are not shown");
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
    let copied = KeyedCertificate { key: [7; 32].into(), ..keyed(&held) };
    let forged = [keyed(&unknown), keyed(&other), keyed(&longer), copied];
    let renew = |rack: &Rack, old: &KeyedCertificate| {
        let next = rack.register.draft(rack.now, old.certified.subject.clone(), LIFE);
        let under = rack.register.authority_numbers();
        rack.register.issue(rack.now, &keyed(&next), under, Some(old)).map(drop)
    };
    let refused = |rack: &Rack, forged: &[KeyedCertificate]| {
        for it in forged {
            let error = rack.register.check_issued(it).unwrap_err();
            assert_eq!(renew(rack, it), Err(RegisterRefused::NotIssued(error)));
        }
        assert_eq!(renew(rack, &keyed(&rack.held[&0].0)), Ok(()));
    };
    // A version that kept no register may have given it out; of what is in it, all is known.
    assert_eq!(renew(&rack, &forged[0]), Ok(()));
    refused(&rack, &forged[1..]);
    rack.happens(Happens::Rotate(false), &mut false);
    refused(&rack, &forged);
    rack.happens(Happens::Rotate(true), &mut false);
    refused(&rack, &forged);
    rack.happens(Happens::Renews(0, true), &mut false);
    rack.happens(Happens::Shows(0), &mut false);
    rack.happens(Happens::Retire(false), &mut false);
    refused(&rack, &forged);
    rack.happens(Happens::Time(1), &mut false);
    assert_eq!(rack.set().last, None);
}

/// As a version stored it that kept no keys.
fn without_keys(rack: &mut Rack) {
    let all: Vec<IssuedCertificate> = rack.register.issued.values().cloned().collect();
    for it in all {
        let it = RegisterEntry::Issued(IssuedCertificate { key: None, ..it });
        assert!(!serde_json::to_string(&it).unwrap().contains("key"));
        rack.register.apply(vec![RegisterChange::Put(it)]);
    }
}

#[test]
fn keys_are_learnt_until_a_rotation_begins_and_demanded_from_then_on() {
    let mut rack = Rack { now: 100, ..Rack::default() };
    for holder in 0..3 {
        rack.issue(holder, None, true);
        rack.happens(Happens::Shows(holder), &mut false);
    }
    without_keys(&mut rack);
    let held = |rack: &Rack, holder: usize| keyed(&rack.held[&holder].0);
    let copy = |of: &KeyedCertificate| KeyedCertificate { key: [7; 32].into(), ..of.clone() };
    // Whoever shows one that says something else is not believed.
    let other = Certified { subject: subject(1), ..held(&rack, 0).certified };
    assert!(!rack.register.is_news(&keyed(&other)));
    rack.happens(Happens::Shows(0), &mut false);
    assert!(rack.register.check_issued(&copy(&held(&rack, 0))).is_err());
    assert_eq!(rack.register.check_issued(&held(&rack, 0)), Ok(()));
    // One is gone, and another one shows its certificate too late.
    let (lost, late) = (held(&rack, 1), held(&rack, 2));
    let refused = rack.register.rotate(100, &first(), next(1), false).unwrap_err();
    let both = [subject(1), subject(2)].into();
    assert_eq!(refused, RotationRefused::KeysUnknown(both).into());
    rack.happens(Happens::Shows(2), &mut false);
    let (step, changes) = rack.register.rotate(100, &first(), next(1), true).unwrap();
    assert_eq!(step, RotationStep::Introduced([subject(1)].into()));
    rack.step(changes);
    assert!(rack.register.shown(&lost).is_empty() && rack.register.shown(&copy(&lost)).is_empty());
    for (shown, is_good) in [(&lost, false), (&late, true), (&copy(&late), false)] {
        assert_eq!(rack.register.check_issued(shown).is_ok(), is_good, "{shown:?}");
    }
    let cause = rack.register.check_issued(&lost).unwrap_err().cause;
    assert_eq!(cause, NotIssuedCause::KeyNotKept);
    // Whoever was cut off holds nothing up.
    for holder in [0, 2] {
        rack.happens(Happens::Renews(holder, true), &mut false);
        rack.happens(Happens::Shows(holder), &mut false);
    }
    rack.happens(Happens::Time(10), &mut false);
    assert_eq!(rack.set().signing.number, 1);
}

/// A version that kept no keys had replaced the authority before.
#[test]
fn a_rack_that_replaced_its_authority_before_keys_were_kept_goes_on_and_learns_them() {
    let mut rack = Rack { now: 100, ..Rack::default() };
    rack.issue(0, None, true);
    rack.happens(Happens::Shows(0), &mut false);
    rack.happens(Happens::Rotate(false), &mut false);
    let set = AuthoritySet { keys_demanded: false, ..rack.set() };
    rack.step(vec![RegisterChange::Put(RegisterEntry::Authorities(Box::new(set)))]);
    without_keys(&mut rack);
    let held = keyed(&rack.held[&0].0);
    assert_eq!(rack.register.check_issued(&held), Ok(()));
    rack.happens(Happens::Shows(0), &mut false);
    let copied = KeyedCertificate { key: [7; 32].into(), ..held };
    let error = rack.register.check_issued(&copied).unwrap_err();
    assert_eq!(error.cause, NotIssuedCause::OtherKey);
    for _ in 0..2 {
        rack.happens(Happens::Renews(0, true), &mut false);
        rack.happens(Happens::Shows(0), &mut false);
        rack.happens(Happens::Time(10), &mut false);
        rack.happens(Happens::Retire(false), &mut false);
    }
    assert_eq!(
        (rack.set().signing.number, rack.set().last, rack.set().keys_demanded),
        (1, None, false)
    );
    rack.happens(Happens::Rotate(false), &mut false);
    assert!(rack.set().keys_demanded);
}

#[test]
fn control_planes_are_of_the_newest_authority_once_all_of_them_know_it() {
    let authorities = [(); 2].map(|()| CertificateAuthority::generate("lab").unwrap());
    let [old, new] = authorities.each_ref().map(|it| fingerprint_of(it.pem().0).unwrap());
    let (certificate, key) = authorities[0].pem();
    let first = AuthoritySet::first(certificate, key);
    let (certificate, key) = authorities[1].pem();
    let next = AuthorityRecord { number: 0, certificate: certificate.to_owned(), key };
    let mut rack = Rack { now: 100, ..Rack::default() };
    let taken = |rack: &Rack, now| {
        [&old, &new, &String::new()].map(|it| rack.register.check_control_plane(it, now).is_ok())
    };
    // It has its first one alone, whose certificate the register has not.
    assert_eq!(taken(&rack, 100), [true; 3]);
    let (_, changes) = rack.register.rotate(100, &first, next, false).unwrap();
    rack.step(changes);
    assert_eq!(taken(&rack, 102), [true, true, false]);
    assert_eq!(taken(&rack, 103), [false, true, false]);
    assert_eq!(taken(&rack, 90), [false, true, false], "the clock went back");
    // Some may be of a version that has no other before the new one signs.
    let set = rack.set();
    let before = AuthoritySet { keys_demanded: false, ..set.clone() };
    rack.step(vec![RegisterChange::Put(RegisterEntry::Authorities(Box::new(before)))]);
    assert_eq!(taken(&rack, 110), [true, true, false]);
    rack.step(vec![RegisterChange::Put(RegisterEntry::Authorities(Box::new(set)))]);
    rack.happens(Happens::Time(10), &mut false);
    assert!(rack.set().last.is_some());
    assert_eq!(taken(&rack, 110), [false, true, false]);
    rack.happens(Happens::Retire(false), &mut false);
    assert_eq!(taken(&rack, 110), [false, true, false]);
}

#[test]
fn an_authority_is_ended_by_force_however_many_have_certificates_of_it() {
    let mut rack = Rack { now: 100, ..Rack::default() };
    let host = |nth: usize| Subject::Node(format!("host{nth}"));
    let all: Vec<Certified> = (0..MOST_REVOKED + 5)
        .map(|nth| {
            let certified = rack.register.draft(100, host(nth), LIFE);
            let given = RegisterEntry::Issued(IssuedCertificate::new(
                keyed(&certified),
                AuthorityNumbers::default(),
                None,
            ));
            rack.register.put(given);
            certified
        })
        .collect();
    // What is over waits: who begins to lead does not.
    let over = rack.register.draft(10, host(0), 20);
    let under = AuthorityNumbers::default();
    rack.register.put(RegisterEntry::Issued(IssuedCertificate::new(keyed(&over), under, None)));
    rack.happens(Happens::Rotate(false), &mut false);
    rack.happens(Happens::Rotate(true), &mut false);
    let (step, changes) = rack.register.retire(100, true).unwrap();
    assert_eq!(step.cut_off().len(), all.len());
    assert_eq!(changes.len(), TIDIED + 1, "a store takes them as a whole");
    rack.step(changes);
    let mut steps = 0;
    while let changes @ [_, ..] = &*rack.register.upkeep(100) {
        assert!(changes.len() <= TIDIED);
        let is_last = rack.register.revoked().revoked.len() == MOST_STRANDED;
        assert_eq!(changes.iter().all(|change| change.revocation().is_none()), is_last);
        rack.register.apply(changes.to_vec());
        steps += 1;
    }
    assert_eq!(steps, MOST_STRANDED.div_ceil(TIDIED));
    assert_eq!(rack.register.revoked().revoked.len(), MOST_STRANDED, "there is room for others");
    // None of them holds up the next one, and a store that is read goes on.
    assert_eq!(rack.register.behind(100).count(), 0);
    rack.happens(Happens::Rotate(false), &mut false);
    rack.happens(Happens::Time(10), &mut false);
    assert_eq!(rack.set().signing.number, 2);
}
