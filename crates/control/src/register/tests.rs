//! What is decided about certificates and revocations, case by case.

use rackbus_identity::{Person, Role};

use super::*;

const LIFE: u64 = 1000;
const FIRST: AuthorityNumbers = AuthorityNumbers { issuer: 0, newest: 0 };

fn ann() -> Subject {
    Subject::Person(Person { user: "ann".into(), role: Role::Reader })
}

fn beta() -> Subject {
    Subject::Node("beta".into())
}

/// For a key of its own.
pub(super) fn keyed(certified: &Certified) -> KeyedCertificate {
    let key = rackbus_identity::digest(certified.serial.to_string().as_bytes()).into();
    KeyedCertificate { certified: certified.clone(), key }
}

fn issue(register: &mut CertificateRegister, now: u64, subject: Subject) -> Certified {
    let certified = register.draft(now, subject, LIFE);
    register.apply(register.clone().issue(now, &keyed(&certified), FIRST, None).unwrap());
    certified
}

fn revoke(register: &mut CertificateRegister, now: u64, what: Revoked) -> usize {
    let (count, changes) = register.clone().revoke(now, what).unwrap();
    register.apply(changes);
    count
}

/// What is stored makes the same register.
fn stored(register: &CertificateRegister) -> CertificateRegister {
    let issued = register.issued.values().cloned().map(RegisterEntry::Issued);
    let revoked = register.revoked.revoked.iter().cloned().map(RegisterEntry::Revoked);
    let texts = issued.chain(revoked).map(|entry| serde_json::to_string(&entry).unwrap());
    CertificateRegister::of(texts.map(|text| serde_json::from_str(&text).unwrap()).collect())
}

#[test]
fn what_was_given_before_is_revoked_and_what_is_given_after_is_good() {
    let mut register = CertificateRegister::default();
    let (first, second) = (issue(&mut register, 10, ann()), issue(&mut register, 20, ann()));
    let node = issue(&mut register, 20, beta());
    assert_eq!(revoke(&mut register, 20, Revoked::User("ann".into())), 2);
    assert_eq!(register.revoked().version, 1);
    for one in [&first, &second] {
        assert!(register.revoked().find(one).is_some());
    }
    assert!(register.revoked().find(&node).is_none());
    // In the same second, and by a clock that is behind.
    for now in [20, 15] {
        let next = issue(&mut register, now, ann());
        assert!(register.revoked().find(&next).is_none(), "{next:?}");
    }
    assert_eq!(stored(&register).revoked(), register.revoked());
    // And by one that is ahead.
    let ahead = issue(&mut register, 500, ann());
    assert_eq!(revoke(&mut register, 30, Revoked::User("ann".into())), 3);
    assert!(register.revoked().find(&ahead).is_some());
    assert_eq!(register.revoked().revoked.len(), 1, "the last one says it all");
    assert_eq!(register.revoked().version, 2);
}

#[test]
fn what_is_revoked_is_not_renewed() {
    let mut register = CertificateRegister::default();
    let old = issue(&mut register, 10, ann());
    let next = register.draft(20, ann(), LIFE);
    assert!(register.issue(20, &keyed(&next), FIRST, Some(&keyed(&old))).is_ok());
    revoke(&mut register, 20, Revoked::Serial(old.serial.clone()));
    let refused = Err(RegisterRefused::Revoked(ann()));
    assert_eq!(register.issue(20, &keyed(&next), FIRST, Some(&keyed(&old))), refused);
    // Nor what was begun before everything of ann's was revoked.
    let mut register = CertificateRegister::default();
    let next = register.draft(20, ann(), LIFE);
    revoke(&mut register, 20, Revoked::User("ann".into()));
    assert_eq!(register.issue(20, &keyed(&next), FIRST, None), refused);
    assert!(matches!(
        register.revoke(20, Revoked::Serial(Serial::new())),
        Err(RegisterRefused::Unknown(_))
    ));
}

#[test]
fn what_is_over_is_not_renewed() {
    let mut register = CertificateRegister::default();
    let old = issue(&mut register, 10, ann());
    let renew = |now| {
        let next = register.draft(now, ann(), LIFE);
        register.issue(now, &keyed(&next), FIRST, Some(&keyed(&old))).map(drop)
    };
    assert_eq!(renew(10 + LIFE - 1), Ok(()));
    assert_eq!(renew(10 + LIFE), Err(RegisterRefused::Over(ann())));
}

#[test]
fn what_is_given_after_a_clock_that_was_ahead_lives_as_long() {
    let mut register = CertificateRegister::default();
    issue(&mut register, 10 + 2 * LIFE, ann());
    revoke(&mut register, 10, Revoked::User("ann".into()));
    let next = register.draft(10, ann(), LIFE);
    assert_eq!((next.since, next.until), (11 + 2 * LIFE, 11 + 3 * LIFE));
}

#[test]
fn what_is_over_is_forgotten_and_numbers_go_on() {
    let mut register = CertificateRegister::default();
    let old = issue(&mut register, 10, ann());
    revoke(&mut register, 10, Revoked::Serial(old.serial.clone()));
    revoke(&mut register, 10, Revoked::Host("beta".into()));
    let late = 20 + LIFE + LONGEST_LIFE.as_secs();
    issue(&mut register, late, beta());
    issue(&mut register, late, ann());
    assert_eq!(register.issued().count(), 2);
    assert_eq!(register.revoked().revoked.len(), 1, "the newest stays for its number");
    let mut register = stored(&register);
    revoke(&mut register, late, Revoked::Host("gamma".into()));
    assert_eq!(register.revoked().version, 3);
}

#[test]
fn a_host_stays_revoked_until_it_joins_anew() {
    let mut register = CertificateRegister::default();
    revoke(&mut register, 10, Revoked::Host("beta".into()));
    let until = |register: &CertificateRegister| {
        register.revoked().revoked.iter().map(|it| (it.number, it.until)).collect::<Vec<_>>()
    };
    let month = LONGEST_LIFE.as_secs() + 1;
    assert_eq!(until(&register), [(1, 10 + month)]);
    // Others renew theirs meanwhile; early on there is nothing to store for it.
    issue(&mut register, 1000, ann());
    assert_eq!(until(&register), [(1, 10 + month)]);
    for now in [month / 2, month, 5 * month] {
        issue(&mut register, now, ann());
        assert_eq!(until(&register), [(1, now + month)]);
        assert_eq!(stored(&register).revoked(), register.revoked());
    }
    // Revoked once more while it is about to be prolonged.
    revoke(&mut register, 6 * month, Revoked::Host("beta".into()));
    assert_eq!(until(&register), [(2, 7 * month)]);
    let since = issue(&mut register, 6 * month + 1, beta());
    assert!(register.revoked().find(&since).is_none());
    let late = since.until - 1;
    issue(&mut register, late, ann());
    assert_eq!(until(&register), [(2, 7 * month)], "it is a part of the rack");
    issue(&mut register, late + month, ann());
    assert_eq!(until(&register), [(2, late + 2 * month)], "it did not renew its certificate");
}

#[test]
fn hosts_that_are_no_part_of_the_rack_stay_revoked_however_many_they_are() {
    let mut register = CertificateRegister::default();
    let (count, month) = (2 * TIDIED as u64 + 5, LONGEST_LIFE.as_secs() + 1);
    for nth in 0..count {
        issue(&mut register, 10, Subject::Node(format!("host{nth}")));
        issue(&mut register, 10, ann());
        if nth % 32 == 31 {
            revoke(&mut register, 10, Revoked::User("ann".into()));
        }
        revoke(&mut register, 20 + nth, Revoked::Host(format!("host{nth}")));
    }
    // Those that are over first are first, and what is over is forgotten beside.
    let late = 10 + count / 2 + month;
    let first = register.tidied(late);
    assert_eq!(first.len(), 2 * TIDIED);
    let ends: Vec<_> = first.iter().filter_map(RegisterChange::revocation).collect();
    let by_end = |it: &&u64| register.revoked().revoked.iter().find(|r| r.number == **it);
    assert!(ends.iter().map(|it| by_end(&it).unwrap().until).is_sorted());
    assert_eq!(ends.len(), TIDIED);
    let mut steps = 0;
    while let changes @ [_, ..] = &*register.tidied(late) {
        register.apply(changes.to_vec());
        steps += 1;
        assert!(steps < 10, "{changes:?}");
    }
    let hosts = |it: &&Revocation| matches!(it.what, Revoked::Host(_));
    let kept: Vec<_> = register.revoked().revoked.iter().filter(hosts).collect();
    assert_eq!(kept.len() as u64, count);
    assert!(kept.iter().all(|it| it.until == late + month));
    assert_eq!(register.issued().count(), 0);
}

/// It was taken out of the rack's file: nobody has a link to it, and its certificates are over.
#[test]
fn a_host_that_the_rack_file_has_no_more_is_forgotten_when_its_certificates_are_over() {
    let register = CertificateRegister::default().with_hosts(["beta".to_owned()]);
    let mut register = register;
    for nth in 0..100 {
        revoke(&mut register, 10, Revoked::Host(format!("host{nth}")));
    }
    revoke(&mut register, 10, Revoked::Host("beta".into()));
    let late = 11 + LONGEST_LIFE.as_secs();
    for now in [late - 1, late] {
        while let changes @ [_, ..] = &*register.upkeep(now) {
            register.apply(changes.to_vec());
        }
        let count = if now < late { 101 } else { 1 };
        assert_eq!(register.revoked().revoked.len(), count);
    }
    let kept = &register.revoked().revoked[0];
    assert_eq!((&kept.what, kept.number), (&Revoked::Host("beta".into()), 101));
}

#[test]
fn the_certificates_of_one_subject_are_bounded() {
    let mut register = CertificateRegister::default();
    for _ in 0..MOST_OF_ONE {
        issue(&mut register, 10, ann());
    }
    let more = register.draft(10, ann(), LIFE);
    let refused = register.issue(10, &keyed(&more), FIRST, None).unwrap_err();
    assert!(matches!(refused, RegisterRefused::TooMany(MOST_OF_ONE, _)), "{refused}");
    issue(&mut register, 10, beta());
    for _ in 0..MOST_OF_ONE {
        issue(&mut register, 10 + LIFE, ann());
    }
    assert_eq!(register.issued().count(), MOST_OF_ONE, "those before are over, and forgotten");
    revoke(&mut register, 10 + LIFE, Revoked::User("ann".into()));
    issue(&mut register, 10 + LIFE, ann());
}

#[test]
fn twenty_contexts_of_one_person_are_renewed_in_each_round_of_rotations() {
    let mut register = CertificateRegister::default();
    let shown = |register: &mut CertificateRegister, it: &Certified| {
        register.apply(register.clone().shown(&keyed(it)));
    };
    let mut contexts: Vec<Certified> = (0..20).map(|_| issue(&mut register, 10, ann())).collect();
    contexts.iter().for_each(|it| shown(&mut register, it));
    // Those of two rotations.
    for round in 1..=6 {
        for context in &mut contexts {
            let next = register.draft(10 + round, ann(), LIFE);
            let changes =
                register.clone().issue(10 + round, &keyed(&next), FIRST, Some(&keyed(context)));
            register.apply(changes.unwrap_or_else(|error| panic!("round {round}: {error}")));
            shown(&mut register, &next);
            *context = next;
        }
    }
    assert_eq!(register.issued().count(), 7 * 20);
    // Who renews without end is refused, too.
    let mut context = contexts.swap_remove(0);
    let refused = loop {
        let next = register.draft(20, ann(), LIFE);
        match register.clone().issue(20, &keyed(&next), FIRST, Some(&keyed(&context))) {
            Ok(changes) => register.apply(changes),
            Err(refused) => break refused,
        }
        shown(&mut register, &next);
        context = next;
    };
    assert!(matches!(refused, RegisterRefused::TooMany(MOST_WITH_REPLACED, _)), "{refused}");
}

#[test]
fn whichever_of_two_certificates_was_shown_last_is_in_use() {
    let mut register = CertificateRegister::default();
    let old = issue(&mut register, 10, beta());
    let next = register.draft(20, beta(), LIFE);
    register.apply(register.clone().issue(20, &keyed(&next), FIRST, Some(&keyed(&old))).unwrap());
    let mut shows = |it: &Certified| {
        let changes = register.shown(&keyed(it));
        let is_news = register.is_news(&keyed(it));
        assert_eq!(changes.is_empty(), !is_news);
        register.apply(changes);
        assert!(!register.is_news(&keyed(it)), "it is noted once");
        [&old, &next].map(|it| register.issued[&it.serial].replaced)
    };
    assert_eq!(shows(&old), [false, false]);
    assert_eq!(shows(&next), [true, false]);
    // The next one was not saved by the time that its machine was switched off.
    assert_eq!(shows(&old), [false, false]);
    assert_eq!(shows(&next), [true, false]);
    // It is renewed once more, and who has the first one shows that.
    let last = register.draft(30, beta(), LIFE);
    register.apply(register.clone().issue(30, &keyed(&last), FIRST, Some(&keyed(&next))).unwrap());
    let mut shows = |it: &Certified| {
        register.apply(register.shown(&keyed(it)));
        [&old, &next, &last].map(|it| register.issued[&it.serial].replaced)
    };
    assert_eq!(shows(&last), [true, true, false]);
    assert_eq!(shows(&old), [false, true, false]);
    assert_eq!(shows(&last), [true, true, false]);
}
