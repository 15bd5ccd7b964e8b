//! How a rack's certificate authority is replaced, decided: which authorities there are, who still needs which, and the steps.
//!
//! A new authority is *introduced*: everybody gets a new certificate of the old one, and trusts both from then on. When nobody
//! is left who does not, the new one *signs*, and everybody gets a certificate of it. When nobody is left who has one of the
//! old, that is *retired*: nobody trusts it any more. Between two steps, all whose certificates are good accept each other.
//! Who has got a new certificate is known when it is shown: an answer may be lost.

use std::collections::BTreeSet;
use std::fmt;

use rackbus_identity::{Certified, KeyDigest, KeyedCertificate, Serial, Subject, fingerprint_of};
use serde::{Deserialize, Serialize};

use super::issued::{AuthorityNumbers, IssuedCertificate};
use super::{
    CertificateRegister, MOST_WITH_REPLACED, RegisterChange, RegisterEntry, RegisterRefused,
};

/// How long an authority is known before it signs, in seconds: control planes that do not lead read it from the store
/// [once a second](crate::leadership::authorities).
const KNOWN_BEFORE: u64 = 3;
/// Names in an error, of many.
const NAMED: usize = 8;

/// An authority that can sign. Its key is as secret as the rack.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuthorityRecord {
    /// The rack's first one has 0, and each later one the next number.
    pub number: u64,
    /// Its certificate, in PEM.
    pub certificate: String,
    /// Its private key, in PEM.
    pub key: String,
}

impl fmt::Debug for AuthorityRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuthorityRecord").field("number", &self.number).finish_non_exhaustive()
    }
}

/// An authority that is to sign when everybody trusts it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NextAuthority {
    /// Its certificate and its key.
    pub authority: AuthorityRecord,
    /// Since when it is there, in seconds since 1970.
    pub since: u64,
}

impl NextAuthority {
    /// Whether all control planes know of it at `now`; also where the clock went back.
    fn is_known(&self, now: u64) -> bool {
        now < self.since || now - self.since >= KNOWN_BEFORE
    }
}

/// An authority that signs no more, and is trusted until it is retired. It is kept without its key, which backups of before have
/// still, and the place of a rack's first authority.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetiringAuthority {
    /// As [`AuthorityRecord::number`].
    pub number: u64,
    /// Its certificate, in PEM.
    pub certificate: String,
}

/// The authorities of a rack: one that signs, and one beside it at most.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuthoritySet {
    /// The one that makes certificates.
    pub signing: AuthorityRecord,
    /// The one that is to, once everybody trusts it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<NextAuthority>,
    /// The one that did, while somebody has a certificate of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<RetiringAuthority>,
    /// Whether a certificate is refused whose key is not known: since the first rotation that was begun by a version which keeps keys.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keys_demanded: bool,
}

impl AuthoritySet {
    /// A rack that has its first authority alone, with this certificate and key (PEM).
    pub fn first(certificate: &str, key: String) -> AuthoritySet {
        let signing = AuthorityRecord { number: 0, certificate: certificate.to_owned(), key };
        AuthoritySet { signing, next: None, last: None, keys_demanded: false }
    }

    /// Who signs, and the newest one that is trusted.
    pub fn numbers(&self) -> AuthorityNumbers {
        let issuer = self.signing.number;
        let newest = self.next.as_ref().map_or(issuer, |next| next.authority.number);
        AuthorityNumbers { issuer, newest }
    }

    /// The certificates (PEM) of those that are trusted beside the one that signs.
    pub fn others(&self) -> Vec<&str> {
        let next = self.next.iter().map(|it| it.authority.certificate.as_str());
        next.chain(self.last.iter().map(|it| it.certificate.as_str())).collect()
    }

    /// Whether certificates of the authority with this number are trusted.
    fn trusts(&self, number: u64) -> bool {
        let next = self.next.as_ref().map(|it| it.authority.number);
        let last = self.last.as_ref().map(|it| it.number);
        [Some(self.signing.number), next, last].contains(&Some(number))
    }

    /// The certificate (PEM) of the newest authority, by which control planes are known to each other; and, where that is so new at
    /// `now` that some of them have not heard of it, that of the one before as well. In a rotation that a version without keys has
    /// begun some may still be of that version, which shows the newest one only when it signs.
    fn of_control_planes(&self, now: u64) -> impl Iterator<Item = &str> {
        let newest = self.next.as_ref().map_or(&self.signing, |next| &next.authority);
        let is_new =
            self.next.as_ref().is_some_and(|next| !self.keys_demanded || !next.is_known(now));
        let before = is_new.then_some(self.signing.certificate.as_str());
        [newest.certificate.as_str()].into_iter().chain(before)
    }

    /// How far a rack with these has come: later steps are greater. A rack without any has its first one alone.
    pub fn step_of(set: Option<&AuthoritySet>) -> (u64, u64, bool) {
        set.map_or((0, 0, true), |set| {
            let numbers = set.numbers();
            (numbers.issuer, numbers.newest, set.last.is_none())
        })
    }

    /// The same with the next one signing.
    fn turned(&self) -> Option<AuthoritySet> {
        let signing = self.next.as_ref()?.authority.clone();
        let AuthorityRecord { number, certificate, .. } = self.signing.clone();
        Some(AuthoritySet {
            signing,
            next: None,
            last: Some(RetiringAuthority { number, certificate }),
            keys_demanded: self.keys_demanded,
        })
    }
}

/// A step of a rotation that was decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RotationStep {
    /// There is a new authority, which everybody is to trust. Of these it is not known for which keys their certificates are.
    Introduced(BTreeSet<Subject>),
    /// The new one makes certificates from now on. These do not trust it.
    Signs(BTreeSet<Subject>),
    /// The old one is trusted no more, and these have certificates of it.
    Retired(BTreeSet<Subject>),
}

impl RotationStep {
    /// Whom it cuts off.
    pub fn cut_off(&self) -> &BTreeSet<Subject> {
        match self {
            RotationStep::Introduced(cut_off)
            | RotationStep::Signs(cut_off)
            | RotationStep::Retired(cut_off) => cut_off,
        }
    }
}

/// Why a step of a rotation is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RotationRefused {
    /// The new authority does not sign yet.
    #[error("a new certificate authority is there, and is not trusted yet by {}", names(.0))]
    Introduced(BTreeSet<Subject>),
    /// The old one is not retired.
    #[error("the certificate authority before is not retired yet")]
    NotRetired,
    /// There is none to retire.
    #[error("the rack has one certificate authority, and none to retire")]
    Alone,
    /// Some would be cut off.
    #[error("certificates of the old certificate authority are in use by {}", names(.0))]
    InUse(BTreeSet<Subject>),
    /// Some would be cut off, since they have not shown their certificates to a version that notes for which keys these are.
    #[error("it is not known for which keys the certificates are of {}", names(.0))]
    KeysUnknown(BTreeSet<Subject>),
}

/// A certificate of a control plane is none of the newest authority.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "your certificate of a control plane is not of the newest certificate authority of the rack"
)]
pub struct NoControlPlane;

/// A few names, for an error.
fn names(subjects: &BTreeSet<Subject>) -> String {
    let mut named: Vec<String> = subjects.iter().take(NAMED).map(short_name).collect();
    match subjects.len().checked_sub(NAMED).filter(|more| *more > 0) {
        Some(more) => named.push(format!("{more} more")),
        None if named.is_empty() => {
            named.push("control planes that read it in a moment".to_owned())
        }
        None => {}
    }
    named.join(", ")
}

/// `beta.node`, as `rackbus certificates` has it.
pub(crate) fn short_name(subject: &Subject) -> String {
    subject.to_string().trim_end_matches(".rackbus").to_owned()
}

/// All these names, for an event.
pub(crate) fn all_names(subjects: &BTreeSet<Subject>) -> String {
    subjects.iter().map(short_name).collect::<Vec<_>>().join(", ")
}

impl CertificateRegister {
    /// The authorities of a rack that has replaced its first one, or is about to.
    pub fn authorities(&self) -> Option<&AuthoritySet> {
        self.authorities.as_ref()
    }

    /// The authorities by which certificates are made now.
    pub fn authority_numbers(&self) -> AuthorityNumbers {
        self.authorities.as_ref().map(AuthoritySet::numbers).unwrap_or_default()
    }

    /// The certificates at `now` whose holders the next step would cut off: those that do not trust the authority that is
    /// to sign, have a certificate of the one that is to be retired, or, before a rotation begins, one whose key is not known.
    pub fn behind(&self, now: u64) -> impl Iterator<Item = &IssuedCertificate> {
        let (numbers, demanded) = (self.authority_numbers(), self.demands_keys());
        let set = self.authorities.as_ref();
        let is_rotating = set.is_some_and(|set| set.next.is_some() || set.last.is_some());
        self.issued.values().filter(move |it| {
            let is_behind = match is_rotating {
                true => it.under.newest < numbers.newest || it.under.issuer < numbers.issuer,
                false => it.key.is_none(),
            };
            let is_cut_off = (demanded && it.key.is_none()) || !self.trusts(it.under.issuer);
            let is_used = !it.replaced && !it.certified.is_over(now);
            is_behind && !is_cut_off && is_used && self.revoked.find(&it.certified).is_none()
        })
    }

    fn trusts(&self, issuer: u64) -> bool {
        self.authorities.as_ref().map_or(issuer == 0, |set| set.trusts(issuer))
    }

    /// The certificates that are good at `now` but for their authority, which is trusted no more: they were in use when that was
    /// retired, and there may be more of them than are revoked in one step.
    pub(super) fn stranded(&self, now: u64) -> impl Iterator<Item = &Certified> {
        let alone = self.revoked_serials();
        let all = self.issued.values().filter(move |it| {
            let is_used = !it.replaced && !it.certified.is_over(now);
            !self.trusts(it.under.issuer) && is_used && !alone.contains(&it.certified.serial)
        });
        all.map(|it| &it.certified).filter(|it| self.revoked.find(it).is_none())
    }

    /// Refuses a control plane whose certificate is of the authority with the fingerprint `issuer`, where that is not the newest: who
    /// has an older one's key can make such a certificate, and control planes have a newer one from the moment on that they know of it.
    ///
    /// # Errors
    /// [`NoControlPlane`].
    pub fn check_control_plane(&self, issuer: &str, now: u64) -> Result<(), NoControlPlane> {
        let Some(set) = &self.authorities else { return Ok(()) };
        let is_its = |it: &str| fingerprint_of(it).is_ok_and(|it| it == issuer);
        match set.of_control_planes(now).any(is_its) {
            true => Ok(()),
            false => Err(NoControlPlane),
        }
    }

    fn behind_subjects(&self, now: u64) -> BTreeSet<Subject> {
        self.behind(now).map(|it| it.certified.subject.clone()).collect()
    }

    /// Begins to replace the authority at `now`, of a rack that has `first` alone otherwise: `next` takes its place, by the next
    /// number, and certificates are refused from now on whose keys are not known; with `force` also where some are in use. With
    /// `force`, one that is there signs from now on, whoever does not trust it yet.
    ///
    /// # Errors
    /// [`RegisterRefused::Rotation`].
    pub fn rotate(
        &self,
        now: u64,
        first: &AuthoritySet,
        next: AuthorityRecord,
        force: bool,
    ) -> Result<(RotationStep, Vec<RegisterChange>), RegisterRefused> {
        let set = self.authorities.as_ref().unwrap_or(first);
        if set.last.is_some() {
            return Err(RotationRefused::NotRetired.into());
        }
        let behind = || self.behind_subjects(now);
        if let Some(turned) = set.turned() {
            return match force {
                true => Ok((RotationStep::Signs(behind()), vec![kept(turned)])),
                false => Err(RotationRefused::Introduced(behind()).into()),
            };
        }
        let number = set.signing.number.saturating_add(1);
        let authority = AuthorityRecord { number, ..next };
        let next = Some(NextAuthority { authority, since: now });
        let behind = behind();
        if !behind.is_empty() && !force {
            return Err(RotationRefused::KeysUnknown(behind).into());
        }
        let set = AuthoritySet { next, keys_demanded: true, ..set.clone() };
        Ok((RotationStep::Introduced(behind), vec![kept(set)]))
    }

    /// Has an authority sign that everybody trusts by `now`.
    pub fn advance(&self, now: u64) -> Option<(RotationStep, Vec<RegisterChange>)> {
        let set = self.authorities.as_ref()?;
        let is_known = set.next.as_ref()?.is_known(now);
        let turned = set.turned().filter(|_| is_known && self.behind(now).next().is_none())?;
        Some((RotationStep::Signs(BTreeSet::new()), vec![kept(turned)]))
    }

    /// Ends the authority before at `now`. With `force`, the certificates of it that are in use are revoked, the first of them with
    /// this and others by [`upkeep`](CertificateRegister::upkeep).
    ///
    /// # Errors
    /// [`RegisterRefused`].
    pub fn retire(
        &self,
        now: u64,
        force: bool,
    ) -> Result<(RotationStep, Vec<RegisterChange>), RegisterRefused> {
        let behind = self.behind_subjects(now);
        let Some(set) = &self.authorities else { return Err(RotationRefused::Alone.into()) };
        if set.next.is_some() {
            return Err(RotationRefused::Introduced(behind).into());
        }
        if set.last.is_none() {
            return Err(RotationRefused::Alone.into());
        }
        if !behind.is_empty() && !force {
            return Err(RotationRefused::InUse(behind).into());
        }
        let mut changes = self.revoke_step(now, self.behind(now).map(|it| &it.certified));
        changes.push(kept(AuthoritySet { last: None, ..set.clone() }));
        Ok((RotationStep::Retired(behind), changes))
    }

    /// The authority that made a certificate which is known.
    pub fn issuer(&self, serial: &Serial) -> Option<u64> {
        self.issued.get(serial).map(|it| it.under.issuer)
    }

    /// What a certificate was made in the place of, and what that was, and so on, as far as it is not forgotten.
    fn renewed_from<'a>(
        &'a self,
        it: &'a IssuedCertificate,
    ) -> impl Iterator<Item = &'a IssuedCertificate> {
        let before = |it: &IssuedCertificate| it.renews.as_ref().and_then(|it| self.issued.get(it));
        std::iter::successors(before(it), move |it| before(it)).take(MOST_WITH_REPLACED)
    }

    /// Whether it changes something that this certificate is shown: nobody has shown it yet, of it and those that it was made in the
    /// place of, another one was shown last, or it is learnt for which key it is.
    pub fn is_news(&self, shown: &KeyedCertificate) -> bool {
        self.issued.get(&shown.certified.serial).is_some_and(|it| {
            it.unshown
                || it.replaced
                || self.learnt(it, shown) != it.key
                || self.renewed_from(it).any(|before| !before.replaced)
        })
    }

    /// For which key `it` is when `shown` was shown as this. Whoever shows it first is believed where it is not known, as a version
    /// that keeps no keys believes whoever shows it; not any more where keys are demanded.
    fn learnt(&self, it: &IssuedCertificate, shown: &KeyedCertificate) -> Option<KeyDigest> {
        let is_it = !self.demands_keys() && it.certified == shown.certified;
        it.key.or_else(|| is_it.then_some(shown.key))
    }

    /// Somebody has shown a certificate: those that it was made in the place of are not used any more. Of a host these are all
    /// that were made before, as one machine is the host. One that was replaced is in use again: the one in its place was lost.
    pub fn shown(&self, certificate: &KeyedCertificate) -> Vec<RegisterChange> {
        let serial = &certificate.certified.serial;
        let Some(shown) = self.issued.get(serial).filter(|_| self.is_news(certificate)) else {
            return Vec::new();
        };
        let put = |it: IssuedCertificate| RegisterChange::Put(RegisterEntry::Issued(it));
        let key = self.learnt(shown, certificate);
        let in_use = IssuedCertificate { key, unshown: false, replaced: false, ..shown.clone() };
        let mut changes = vec![put(in_use)];
        let before = self.renewed_from(shown).map(|it| it.certified.serial.clone());
        let mut before: BTreeSet<Serial> = before.filter(|it| it != serial).collect();
        // Those whose answers were lost.
        let is_lost = |it: &&IssuedCertificate| {
            it.unshown && it.renews.as_ref().is_some_and(|old| before.contains(old))
        };
        let lost: Vec<Serial> =
            self.issued.values().filter(is_lost).map(|it| it.certified.serial.clone()).collect();
        before.extend(lost.into_iter().filter(|it| it != serial));
        if let subject @ Subject::Node(_) = &shown.certified.subject {
            let earlier = self.issued.values().filter(|it| {
                it.certified.subject == *subject && it.certified.since < shown.certified.since
            });
            before.extend(earlier.map(|it| it.certified.serial.clone()));
        }
        let replaced = before.iter().filter_map(|it| self.issued.get(it)).filter(|it| !it.replaced);
        changes.extend(replaced.map(|it| put(IssuedCertificate { replaced: true, ..it.clone() })));
        changes
    }
}

fn kept(set: AuthoritySet) -> RegisterChange {
    RegisterChange::Put(RegisterEntry::Authorities(Box::new(set)))
}
