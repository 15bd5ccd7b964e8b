//! The certificates that the rack has given out, and which of them are revoked: what is decided about them.
//!
//! No clock and no store: the writer says what time it is, and stores the [changes](RegisterChange) before they count. What is
//! over is forgotten, so the register is as large as there are certificates that are good, of which each subject has only so
//! many, and hosts that were revoked and have not joined anew.

use std::collections::{BTreeMap, BTreeSet};

use rackbus_identity::{
    Certified, LONGEST_LIFE, MOST_REVOKED, Revocation, RevocationList, Revoked, Serial, Subject,
};
use serde::{Deserialize, Serialize};

/// Certificates of one subject that may be good at a time.
const MOST_OF_ONE: usize = 64;
/// Certificates that may be good at a time.
const MOST: usize = 20_000;
/// Entries that are forgotten in one step, which a store takes as a whole, and as many that are prolonged.
const TIDIED: usize = 32;
/// A revocation is prolonged when it is of use for less than this, in seconds: the register is tidied each day, so that is long
/// before it is over.
const PROLONGED: u64 = LONGEST_LIFE.as_secs() / 6 * 5;

/// What is kept of the register, each under a key of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RegisterEntry {
    /// A certificate was given out.
    Issued(Certified),
    /// Certificates were revoked: of a subject up to a time, or one by its serial number.
    Revoked(Revocation),
}

impl RegisterEntry {
    /// The key that it is kept under.
    pub fn key(&self) -> String {
        match self {
            RegisterEntry::Issued(certified) => format!("issued/{}", certified.serial),
            RegisterEntry::Revoked(revocation) => format!("revoked/{:020}", revocation.number),
        }
    }
}

/// What is done with an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RegisterChange {
    /// The store keeps this entry from now on, in the place of one with its key.
    Put(RegisterEntry),
    /// The store forgets this entry.
    Forget(RegisterEntry),
}

impl RegisterChange {
    /// The number of the revocation that is kept by it, where it is one.
    pub(crate) fn revocation(&self) -> Option<u64> {
        match self {
            RegisterChange::Put(RegisterEntry::Revoked(revocation)) => Some(revocation.number),
            _ => None,
        }
    }

    /// What is revoked by the revocation that it is about, where it is about one.
    fn revoked(&self) -> Option<&Revoked> {
        match self {
            RegisterChange::Put(RegisterEntry::Revoked(it))
            | RegisterChange::Forget(RegisterEntry::Revoked(it)) => Some(&it.what),
            _ => None,
        }
    }
}

/// The outcome of a change of the register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegisterOutcome {
    /// How many certificates it is about: of a revocation, those that were good.
    pub certificates: usize,
    /// The number of the revocation, or of the last one before.
    pub version: u64,
}

/// Why something is not done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegisterRefused {
    /// A subject has too many certificates, or the rack has.
    #[error("{0} certificates of {1} are good already")]
    TooMany(usize, String),
    /// What it is to be renewed by is over.
    #[error("the certificate of {0} has expired")]
    Over(Subject),
    /// What it is to be renewed by, or it itself, is revoked.
    #[error("the certificate of {0} was revoked")]
    Revoked(Subject),
    /// No certificate has this number.
    #[error("no certificate that is good has the number {0}")]
    Unknown(Serial),
    /// There are too many revocations.
    #[error("{MOST_REVOKED} revocations are in force already")]
    Full,
}

/// The certificates that were given out and are not over, and the revocations.
#[derive(Debug, Clone, Default)]
pub struct CertificateRegister {
    issued: BTreeMap<Serial, Certified>,
    revoked: RevocationList,
}

impl CertificateRegister {
    /// The register of a store that has these entries.
    pub fn of(entries: Vec<RegisterEntry>) -> CertificateRegister {
        let mut register = CertificateRegister::default();
        entries.into_iter().for_each(|entry| register.put(entry));
        register
    }

    fn put(&mut self, entry: RegisterEntry) {
        match entry {
            RegisterEntry::Issued(certified) => {
                self.issued.insert(certified.serial.clone(), certified);
            }
            RegisterEntry::Revoked(revocation) => {
                self.revoked.version = self.revoked.version.max(revocation.number);
                self.revoked.revoked.retain(|it| it.number != revocation.number);
                self.revoked.revoked.push(revocation);
                self.revoked.revoked.sort_by_key(|it| it.number);
            }
        }
    }

    /// Does what was decided, when it is stored.
    pub fn apply(&mut self, changes: Vec<RegisterChange>) {
        for change in changes {
            match change {
                RegisterChange::Put(entry) => self.put(entry),
                RegisterChange::Forget(RegisterEntry::Issued(certified)) => {
                    self.issued.remove(&certified.serial);
                }
                RegisterChange::Forget(RegisterEntry::Revoked(gone)) => {
                    self.revoked.revoked.retain(|it| it.number != gone.number);
                }
            }
        }
    }

    /// The certificates that are not forgotten, each with the revocation that it is covered by.
    pub fn issued(&self) -> impl Iterator<Item = (&Certified, Option<&Revocation>)> {
        self.issued.values().map(|certified| (certified, self.revoked.find(certified)))
    }

    /// How many of the certificates that are not forgotten the revocation of this number covers.
    pub(crate) fn covered(&self, number: u64) -> usize {
        let its =
            |revocation: Option<&Revocation>| revocation.is_some_and(|it| it.number == number);
        self.issued().filter(|(_, revocation)| its(*revocation)).count()
    }

    /// All revocations that are in force, as nodes are told them.
    pub fn revoked(&self) -> &RevocationList {
        &self.revoked
    }

    /// A certificate for `subject` as it would be made at `now` (seconds since 1970): later than all revocations of
    /// the subject, also where the clock of whoever revoked was ahead.
    pub fn draft(&self, now: u64, subject: Subject, life: u64) -> Certified {
        let (since, serial) = (now, Serial::new());
        let mut certified = Certified { subject, serial, since, until: now.saturating_add(life) };
        let about = self.revoked.revoked.iter().filter(|it| it.what.is_about(&certified));
        let newest = about.map(|it| it.at).max();
        certified.since = newest.map_or(since, |newest| since.max(newest.saturating_add(1)));
        certified.until = certified.since.saturating_add(life);
        certified
    }

    /// Gives out a certificate at `now`; one that is renewed by `old` not if that is over or revoked.
    ///
    /// # Errors
    /// [`RegisterRefused`].
    pub fn issue(
        &self,
        now: u64,
        certified: &Certified,
        old: Option<&Certified>,
    ) -> Result<Vec<RegisterChange>, RegisterRefused> {
        let subject = &certified.subject;
        for one in [Some(certified), old].into_iter().flatten() {
            if self.revoked.find(one).is_some() {
                return Err(RegisterRefused::Revoked(subject.clone()));
            }
        }
        if old.is_some_and(|old| old.is_over(now)) {
            return Err(RegisterRefused::Over(subject.clone()));
        }
        let good = |it: &&Certified| !it.is_over(now) && self.revoked.find(it).is_none();
        let own = self.issued.values().filter(|it| it.subject == *subject).filter(good).count();
        if own >= MOST_OF_ONE {
            return Err(RegisterRefused::TooMany(own, subject.to_string()));
        }
        let mut changes = self.tidied(now);
        let gone = changes
            .iter()
            .filter(|it| matches!(it, RegisterChange::Forget(RegisterEntry::Issued(_))));
        if self.issued.len() - gone.count() >= MOST {
            return Err(RegisterRefused::TooMany(MOST, "this rack".to_owned()));
        }
        changes.push(RegisterChange::Put(RegisterEntry::Issued(certified.clone())));
        Ok(changes)
    }

    /// Revokes something at `now`. How many certificates that are good it is about is said, too.
    ///
    /// # Errors
    /// [`RegisterRefused`].
    pub fn revoke(
        &self,
        now: u64,
        what: Revoked,
    ) -> Result<(usize, Vec<RegisterChange>), RegisterRefused> {
        let about: Vec<&Certified> = self.issued.values().filter(|it| what.is_about(it)).collect();
        let good = about.iter().filter(|it| !it.is_over(now) && self.revoked.find(it).is_none());
        let count = good.count();
        // All that was given out, also by another clock than this one's.
        let at = about.iter().map(|it| it.since).max().unwrap_or(now).max(now);
        let until = match (&what, about.first()) {
            (Revoked::Serial(serial), None) => {
                return Err(RegisterRefused::Unknown(serial.clone()));
            }
            (Revoked::Serial(_), Some(certified)) => certified.until,
            // Also what is not in the register, since an older version gave it out.
            (Revoked::Host(_) | Revoked::User(_), _) => {
                at.saturating_add(LONGEST_LIFE.as_secs()).saturating_add(1)
            }
        };
        let mut changes = self.tidied(now);
        changes.retain(|change| change.revoked() != Some(&what));
        let number = self.revoked.version.saturating_add(1);
        // Of the same host or person the last one says it all.
        let before = self.revoked.revoked.iter().filter(|it| it.what == what);
        changes.extend(before.map(|it| RegisterChange::Forget(RegisterEntry::Revoked(it.clone()))));
        let gone = changes
            .iter()
            .filter(|it| matches!(it, RegisterChange::Forget(RegisterEntry::Revoked(_))));
        if self.revoked.revoked.len().saturating_sub(gone.count()) >= MOST_REVOKED {
            return Err(RegisterRefused::Full);
        }
        changes.push(RegisterChange::Put(RegisterEntry::Revoked(Revocation {
            number,
            what,
            at,
            until,
        })));
        Ok((count, changes))
    }

    /// The revocations of hosts that have no certificate that was given out since and is good at `now`: their machines are no part
    /// of the rack any more. Where no certificate is asked for, only their revocations say so.
    fn expelled(&self, now: u64) -> impl Iterator<Item = &Revocation> {
        let alone = self.revoked.revoked.iter().filter_map(|it| match &it.what {
            Revoked::Serial(serial) => Some(serial),
            _ => None,
        });
        let alone: BTreeSet<&Serial> = alone.collect();
        // When the newest certificate of each host was given out that is good but for a revocation of the host.
        let mut newest = BTreeMap::<&str, u64>::new();
        let good = |it: &&Certified| !it.is_over(now) && !alone.contains(&it.serial);
        for certified in self.issued.values().filter(good) {
            if let Subject::Node(host) = &certified.subject {
                let since = newest.entry(host).or_default();
                *since = certified.since.max(*since);
            }
        }
        self.revoked.revoked.iter().filter(move |it| match &it.what {
            Revoked::Host(host) => newest.get(&**host).is_none_or(|since| *since <= it.at),
            _ => false,
        })
    }

    /// What is over by `now` is forgotten, and the revocations of hosts that are no part of the rack are prolonged, those first
    /// that are over first. Nothing is left to do where it is empty. The newest revocation stays: later ones are numbered after it.
    pub fn tidied(&self, now: u64) -> Vec<RegisterChange> {
        let until = now.saturating_add(LONGEST_LIFE.as_secs()).saturating_add(1);
        let mut ending: Vec<&Revocation> = self.expelled(now).collect();
        let expelled: BTreeSet<u64> = ending.iter().map(|it| it.number).collect();
        ending.retain(|it| it.until < now.saturating_add(PROLONGED));
        ending.sort_by_key(|it| it.until);
        let prolonged = ending.into_iter().take(TIDIED);
        let prolonged = prolonged.map(|it| Revocation { until, ..it.clone() });
        let kept = prolonged.map(|it| RegisterChange::Put(RegisterEntry::Revoked(it)));

        let issued = self.issued.values().filter(|it| it.is_over(now)).cloned();
        let over = |it: &&Revocation| {
            it.until <= now && it.number != self.revoked.version && !expelled.contains(&it.number)
        };
        let over = self.revoked.revoked.iter().filter(over).cloned().map(RegisterEntry::Revoked);
        let gone = over.chain(issued.map(RegisterEntry::Issued)).map(RegisterChange::Forget);
        kept.chain(gone.take(TIDIED)).collect()
    }
}

#[cfg(test)]
mod tests {
    use rackbus_identity::{Person, Role};

    use super::*;

    const LIFE: u64 = 1000;

    fn ann() -> Subject {
        Subject::Person(Person { user: "ann".into(), role: Role::Reader })
    }

    fn beta() -> Subject {
        Subject::Node("beta".into())
    }

    fn issue(register: &mut CertificateRegister, now: u64, subject: Subject) -> Certified {
        let certified = register.draft(now, subject, LIFE);
        register.apply(register.clone().issue(now, &certified, None).unwrap());
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
        assert!(register.issue(20, &next, Some(&old)).is_ok());
        revoke(&mut register, 20, Revoked::Serial(old.serial.clone()));
        let refused = Err(RegisterRefused::Revoked(ann()));
        assert_eq!(register.issue(20, &next, Some(&old)), refused);
        // Nor what was begun before everything of ann's was revoked.
        let mut register = CertificateRegister::default();
        let next = register.draft(20, ann(), LIFE);
        revoke(&mut register, 20, Revoked::User("ann".into()));
        assert_eq!(register.issue(20, &next, None), refused);
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
            register.issue(now, &next, Some(&old)).map(drop)
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

    #[test]
    fn one_cannot_have_certificates_without_end() {
        let mut register = CertificateRegister::default();
        for _ in 0..MOST_OF_ONE {
            issue(&mut register, 10, ann());
        }
        let more = register.draft(10, ann(), LIFE);
        let refused = register.issue(10, &more, None).unwrap_err();
        assert!(matches!(refused, RegisterRefused::TooMany(MOST_OF_ONE, _)), "{refused}");
        issue(&mut register, 10, beta());
        for _ in 0..MOST_OF_ONE {
            issue(&mut register, 10 + LIFE, ann());
        }
        assert_eq!(register.issued().count(), MOST_OF_ONE, "those before are over, and forgotten");
        revoke(&mut register, 10 + LIFE, Revoked::User("ann".into()));
        issue(&mut register, 10 + LIFE, ann());
    }
}
