//! The certificates that the rack has given out, and which of them are revoked: what is decided about them.
//!
//! No clock and no store: the writer says what time it is, and stores the [changes](RegisterChange) before they count. What is
//! over is forgotten, so the register is as large as there are certificates that are good, of which each subject has only so
//! many, and hosts of the rack file that were revoked and have not joined anew.

mod issued;
mod rotation;
#[cfg(test)]
mod rotation_tests;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use rackbus_identity::{
    Certified, KeyedCertificate, LONGEST_LIFE, MOST_REVOKED, Revocation, RevocationList, Revoked,
    Serial, Subject,
};
use serde::{Deserialize, Serialize};

pub use issued::{AuthorityNumbers, IssuedCertificate};
pub use rotation::{
    AuthorityRecord, AuthoritySet, NextAuthority, NoControlPlane, RetiringAuthority,
    RotationRefused, RotationStep,
};
pub(crate) use rotation::{all_names, short_name};

/// Certificates of one subject that may be good and in use at a time.
const MOST_OF_ONE: usize = 64;
/// The same with those that another one was shown in the place of: a rotation replaces three of each holder.
const MOST_WITH_REPLACED: usize = 8 * MOST_OF_ONE;
/// Certificates that may be good at a time.
const MOST: usize = 20_000;
/// Revocations up to which certificates of a retired authority are revoked, which nobody trusts: there is room left for others.
const MOST_STRANDED: usize = MOST_REVOKED / 2;
/// Entries that are forgotten in one step, which a store takes as a whole, and as many that are prolonged.
const TIDIED: usize = 32;
/// A revocation is prolonged when it is of use for less than this, in seconds: the register is tidied each day, so that is long
/// before it is over.
const PROLONGED: u64 = LONGEST_LIFE.as_secs() / 6 * 5;

/// The key that the authorities are kept under.
pub const AUTHORITIES: &str = "authorities";

/// What is kept of the register, each under a key of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RegisterEntry {
    /// A certificate was given out.
    Issued(IssuedCertificate),
    /// Certificates were revoked: of a subject up to a time, or one by its serial number.
    Revoked(Revocation),
    /// The certificate authorities of a rack that has replaced its first one, or is about to.
    Authorities(Box<AuthoritySet>),
}

impl RegisterEntry {
    /// The key that it is kept under.
    pub fn key(&self) -> String {
        match self {
            RegisterEntry::Issued(issued) => format!("issued/{}", issued.certified.serial),
            RegisterEntry::Revoked(revocation) => format!("revoked/{:020}", revocation.number),
            RegisterEntry::Authorities(_) => AUTHORITIES.to_owned(),
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisterOutcome {
    /// How many certificates it is about: of a revocation, those that were good.
    pub certificates: usize,
    /// The number of the revocation, or of the last one before.
    pub version: u64,
    /// The step of a rotation that was taken; `None` also where it had been taken before, under the same key.
    pub step: Option<RotationStep>,
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
    /// What it is to be renewed by was not given out by this rack's control plane.
    #[error("{0}")]
    NotIssued(#[from] CertificateNotIssued),
    /// No certificate has this number.
    #[error("no certificate that is good has the number {0}")]
    Unknown(Serial),
    /// There are too many revocations.
    #[error("{MOST_REVOKED} revocations are in force already")]
    Full,
    /// It was made by authorities that are not those of the rack any more: it is to be made again.
    #[error("the rack's certificate authority was replaced meanwhile")]
    OtherAuthorities,
    /// The rack's certificate authority is not replaced, or not yet.
    #[error(transparent)]
    Rotation(#[from] RotationRefused),
}

/// A certificate that an authority of the rack has signed, and that its register does not have: whoever has the key of an
/// authority can make one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the certificate {serial}, of {subject}, {cause}")]
pub struct CertificateNotIssued {
    /// The number of the certificate.
    pub serial: Serial,
    /// Of whom it is.
    pub subject: Subject,
    /// What it is instead.
    pub cause: NotIssuedCause,
}

/// What a certificate is that was not given out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotIssuedCause {
    /// No certificate with its number, or one that says something else.
    #[error("is none that the control plane knows to have given out")]
    Unknown,
    /// One that says the same was given out.
    #[error("is for another key than the one that was given out")]
    OtherKey,
    /// One that says the same was given out, by a version that kept no keys.
    #[error("was given out by a version of rackbus that did not keep for which key it is")]
    KeyNotKept,
}

/// The certificates that were given out and are not over, and the revocations.
#[derive(Debug, Clone, Default)]
pub struct CertificateRegister {
    issued: BTreeMap<Serial, IssuedCertificate>,
    revoked: RevocationList,
    /// Nothing where the rack has its first authority alone.
    authorities: Option<AuthoritySet>,
    /// The hosts of the rack file; nothing where these are not known.
    hosts: Option<BTreeSet<String>>,
}

impl CertificateRegister {
    /// The register of a store that has these entries.
    pub fn of(entries: Vec<RegisterEntry>) -> CertificateRegister {
        let mut register = CertificateRegister::default();
        entries.into_iter().for_each(|entry| register.put(entry));
        register
    }

    /// The same of a rack whose file has these hosts: revocations of others are not kept for longer than their certificates.
    #[must_use]
    pub fn with_hosts(self, hosts: impl IntoIterator<Item = String>) -> CertificateRegister {
        CertificateRegister { hosts: Some(hosts.into_iter().collect()), ..self }
    }

    fn put(&mut self, entry: RegisterEntry) {
        match entry {
            RegisterEntry::Issued(issued) => {
                self.issued.insert(issued.certified.serial.clone(), issued);
            }
            RegisterEntry::Authorities(authorities) => self.authorities = Some(*authorities),
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
                RegisterChange::Forget(RegisterEntry::Issued(issued)) => {
                    self.issued.remove(&issued.certified.serial);
                }
                RegisterChange::Forget(RegisterEntry::Authorities(_)) => self.authorities = None,
                RegisterChange::Forget(RegisterEntry::Revoked(gone)) => {
                    self.revoked.revoked.retain(|it| it.number != gone.number);
                }
            }
        }
    }

    /// The certificates that are not forgotten, each with the revocation that it is covered by.
    pub fn issued(&self) -> impl Iterator<Item = (&Certified, Option<&Revocation>)> {
        self.issued.values().map(|it| (&it.certified, self.revoked.find(&it.certified)))
    }

    /// Whether the host has a certificate that is not forgotten, also where it is no part of the rack file any more.
    pub(crate) fn has_host(&self, host: &str) -> bool {
        let is_its = |it: &IssuedCertificate| matches!(&it.certified.subject, Subject::Node(of) if of == host);
        self.issued.values().any(is_its)
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

    /// Refuses a certificate that was not given out. One that the register does not have is refused of a rack that has begun to
    /// replace its authority, since that one's key may be known to others: before, a version that kept no register may have given
    /// it out. In the same way one is refused whose key is not known, by a rotation that a version has begun which keeps keys.
    ///
    /// # Errors
    /// [`CertificateNotIssued`].
    pub fn check_issued(&self, shown: &KeyedCertificate) -> Result<(), CertificateNotIssued> {
        let KeyedCertificate { certified, key } = shown;
        let cause = match self.issued.get(&certified.serial) {
            None if self.authorities.is_none() => return Ok(()),
            None => NotIssuedCause::Unknown,
            Some(issued) if issued.certified != *certified => NotIssuedCause::Unknown,
            Some(issued) => match issued.key {
                Some(known) if known == *key => return Ok(()),
                Some(_) => NotIssuedCause::OtherKey,
                None if !self.demands_keys() => return Ok(()),
                None => NotIssuedCause::KeyNotKept,
            },
        };
        let Certified { serial, subject, .. } = certified.clone();
        Err(CertificateNotIssued { serial, subject, cause })
    }

    /// Whether a certificate is refused whose key is not known.
    fn demands_keys(&self) -> bool {
        self.authorities.as_ref().is_some_and(|set| set.keys_demanded)
    }

    /// Gives out a certificate at `now`, which the authorities `under` made; one that is renewed by `old` not if that is over or
    /// revoked, or [was not given out](CertificateRegister::check_issued).
    ///
    /// # Errors
    /// [`RegisterRefused`].
    pub fn issue(
        &self,
        now: u64,
        given: &KeyedCertificate,
        under: AuthorityNumbers,
        old: Option<&KeyedCertificate>,
    ) -> Result<Vec<RegisterChange>, RegisterRefused> {
        if under != self.authority_numbers() {
            return Err(RegisterRefused::OtherAuthorities);
        }
        let subject = &given.certified.subject;
        for one in [Some(given), old].into_iter().flatten() {
            if self.revoked.find(&one.certified).is_some() {
                return Err(RegisterRefused::Revoked(subject.clone()));
            }
        }
        if old.is_some_and(|old| old.certified.is_over(now)) {
            return Err(RegisterRefused::Over(subject.clone()));
        }
        old.map_or(Ok(()), |old| self.check_issued(old))?;
        let own = self.issued.values().filter(|it| it.certified.subject == *subject);
        let good = own
            .filter(|it| !it.certified.is_over(now) && self.revoked.find(&it.certified).is_none());
        let (all, used) =
            good.fold((0, 0), |(all, used), it| (all + 1, used + usize::from(!it.replaced)));
        if used >= MOST_OF_ONE || all >= MOST_WITH_REPLACED {
            return Err(RegisterRefused::TooMany(all, subject.to_string()));
        }
        let mut changes = self.tidied(now);
        let gone = changes
            .iter()
            .filter(|it| matches!(it, RegisterChange::Forget(RegisterEntry::Issued(_))));
        if self.issued.len() - gone.count() >= MOST {
            return Err(RegisterRefused::TooMany(MOST, "this rack".to_owned()));
        }
        let old = old.map(|old| &old.certified);
        let issued = IssuedCertificate::new(given.clone(), under, old);
        changes.push(RegisterChange::Put(RegisterEntry::Issued(issued)));
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
        let all = self.issued.values().map(|it| &it.certified);
        let about: Vec<&Certified> = all.filter(|it| what.is_about(it)).collect();
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

    /// Revokes certificates that are good at `now`, each by its number: a step of them, as far as there is room.
    fn revoke_step<'a>(
        &self,
        now: u64,
        all: impl Iterator<Item = &'a Certified>,
    ) -> Vec<RegisterChange> {
        let room = MOST_STRANDED.saturating_sub(self.revoked.revoked.len()).min(TIDIED);
        let numbered = all.take(room).zip(self.revoked.version.saturating_add(1)..);
        let revoked = numbered.map(|(it, number)| {
            let Certified { serial, since, until, .. } = it.clone();
            let what = Revoked::Serial(serial);
            let revocation = Revocation { number, what, at: since.max(now), until };
            RegisterChange::Put(RegisterEntry::Revoked(revocation))
        });
        revoked.collect()
    }

    /// What is to be done at `now` beside all requests: revocations are [prolonged](CertificateRegister::tidied), then certificates
    /// revoked of an authority that is trusted no more, and last is forgotten what is over. Nothing
    /// is left to do where it is empty.
    pub fn upkeep(&self, now: u64) -> Vec<RegisterChange> {
        let tidied = self.tidied(now);
        if tidied.iter().any(|change| change.revocation().is_some()) {
            return tidied;
        }
        let revoked = self.revoke_step(now, self.stranded(now));
        if revoked.is_empty() { tidied } else { revoked }
    }

    /// The numbers of the certificates that are revoked alone.
    fn revoked_serials(&self) -> BTreeSet<&Serial> {
        let alone = self.revoked.revoked.iter().filter_map(|it| match &it.what {
            Revoked::Serial(serial) => Some(serial),
            _ => None,
        });
        alone.collect()
    }

    /// The revocations of hosts that have no certificate that was given out since and is good at `now`: their machines are no part
    /// of the rack any more. Where no certificate is asked for, only their revocations say so. A host that the rack file has no more is
    /// nobody's peer.
    fn expelled(&self, now: u64) -> impl Iterator<Item = &Revocation> {
        let alone = self.revoked_serials();
        // When the newest certificate of each host was given out that is good but for a revocation of the host.
        let mut newest = BTreeMap::<&str, u64>::new();
        let good = |it: &&Certified| !it.is_over(now) && !alone.contains(&it.serial);
        for certified in self.issued.values().map(|it| &it.certified).filter(good) {
            if let Subject::Node(host) = &certified.subject {
                let since = newest.entry(host).or_default();
                *since = certified.since.max(*since);
            }
        }
        self.revoked.revoked.iter().filter(move |it| match &it.what {
            Revoked::Host(host) => {
                let is_named = self.hosts.as_ref().is_none_or(|hosts| hosts.contains(host));
                is_named && newest.get(&**host).is_none_or(|since| *since <= it.at)
            }
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

        let issued = self.issued.values().filter(|it| it.certified.is_over(now)).cloned();
        let over = |it: &&Revocation| {
            it.until <= now && it.number != self.revoked.version && !expelled.contains(&it.number)
        };
        let over = self.revoked.revoked.iter().filter(over).cloned().map(RegisterEntry::Revoked);
        let gone = over.chain(issued.map(RegisterEntry::Issued)).map(RegisterChange::Forget);
        kept.chain(gone.take(TIDIED)).collect()
    }
}
