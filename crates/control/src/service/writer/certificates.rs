//! Certificates are given out and revoked: stored first, and then the connections of who is revoked are ended. What is over is
//! forgotten, and what is to go on is prolonged, when the control plane begins and once a day.

use std::time::{Duration, Instant};

use rackbus_identity::{Certified, Revoked, Subject};
use rackbus_lease::Decision;

use super::requests::RegisterRequest;
use super::{Writer, not_stored};
use crate::answers::KeyedChange;
use crate::api::{ApiError, EventKind};
use crate::events::{Draft, LONGEST_TEXT, shortened};
use crate::register::{
    AuthorityRecord, CertificateRegister, RegisterChange, RegisterOutcome, RegisterRefused,
    RotationStep, all_names, short_name,
};
use crate::store::{Commit, Store, StoreError};

/// How often it is looked whether the register is to be tidied.
pub(super) const TIDIED_EVERY: Duration = Duration::from_secs(24 * 60 * 60);
/// How soon after a step of that is the next one.
const NEXT_STEP: Duration = Duration::from_secs(1);
/// And how soon after one that could not be stored.
const AFTER_FAILURE: Duration = Duration::from_secs(60);

impl Writer {
    /// Decides, stores, and then ends the connections of who is revoked. A revocation that was made before under its key
    /// is not made again: it is answered with what it covers now.
    pub(super) fn change_register(
        &mut self,
        asked: RegisterRequest,
        keyed: Option<KeyedChange>,
    ) -> Result<Result<RegisterOutcome, RegisterRefused>, ApiError> {
        if let Some(version) = self.made(keyed.as_ref())? {
            let certificates = self.shared.register().covered(version);
            return Ok(Ok(RegisterOutcome { certificates, version, step: None }));
        }
        let (at_ms, now) = (self.shared.clock.now(), self.shared.seconds());
        let decided = decide(&self.shared.register(), &asked, now);
        let RegisterDecision { certificates, changes, event, step } = match decided {
            Ok(decided) => decided,
            Err(refused) => return Ok(Err(refused)),
        };
        let drafts = event.into_iter().map(|event| self.own(event)).collect();
        let numbered = self.numbered(at_ms, drafts);
        let commit = self.keyed_commit(keyed, at_ms, Commit { certificates: changes, ..numbered });
        if let Err(error) = self.commit(&commit) {
            tracing::error!(%error, "a change of certificates could not be stored");
            self.shared.known().store_failures += 1;
            return Err(not_stored(&error));
        }
        let version = self.apply_to_register(commit.certificates, now);
        if matches!(step, Some(RotationStep::Retired(_))) {
            // There may be more to revoke than goes into one step.
            self.next_tidying = Instant::now() + NEXT_STEP;
        }
        self.answers.keep(commit.answers);
        commit.forgotten_keys.iter().for_each(|key| drop(self.answers.forget(key)));
        self.shared.publish(Decision::default(), commit.events, commit.first_event);
        Ok(Ok(RegisterOutcome { certificates, version, step }))
    }

    /// What was stored counts from `now` on (seconds since 1970), and whoever is revoked by it is ended. The number of the newest
    /// revocation.
    fn apply_to_register(&self, changes: Vec<RegisterChange>, now: u64) -> u64 {
        let (list, authorities) = {
            let mut register = self.shared.register();
            register.apply(changes);
            (register.revoked().clone(), register.authorities().cloned())
        };
        self.shared.authorities.send_if_modified(|known| {
            let is_new = *known != authorities;
            *known = authorities;
            is_new
        });
        self.shared.revocations.learn(&list, now);
        self.shared.revoked_version.send_if_modified(|version| {
            let is_new = *version != list.version;
            *version = list.version;
            is_new
        });
        list.version
    }

    /// Forgets what is over, prolongs the revocations of hosts that are no part of the rack, also where nobody asks for a
    /// certificate, and revokes what an authority made that was retired.
    pub(super) fn tidy_register(&mut self) {
        let now = self.shared.seconds();
        let certificates = self.shared.register().upkeep(now);
        if certificates.is_empty() {
            self.next_tidying = Instant::now() + TIDIED_EVERY;
            return;
        }
        let commit = Commit { certificates, ..Commit::default() };
        match self.commit(&commit) {
            Ok(()) => {
                self.apply_to_register(commit.certificates, now);
                // There may be more of it than goes into one step.
                self.next_tidying = Instant::now() + NEXT_STEP;
            }
            Err(error) => {
                self.next_tidying = Instant::now() + AFTER_FAILURE;
                tracing::error!(%error, "revocations could not be prolonged in the store; it is tried again");
                self.shared.known().store_failures += 1;
            }
        }
    }

    /// A new authority signs once everybody trusts it.
    pub(super) fn advance_rotation(&mut self) {
        self.next_rotation = Instant::now() + NEXT_STEP;
        let (at_ms, now) = (self.shared.clock.now(), self.shared.seconds());
        let Some((step, certificates)) = self.shared.register().advance(now) else { return };
        let numbered = self.numbered(at_ms, vec![rotation_event(&step)]);
        let commit = Commit { certificates, ..numbered };
        match self.commit(&commit) {
            Ok(()) => {
                self.apply_to_register(commit.certificates, now);
                self.shared.publish(Decision::default(), commit.events, commit.first_event);
            }
            Err(error) => {
                tracing::error!(%error, "the new certificate authority could not be stored; it is tried again");
                self.shared.known().store_failures += 1;
            }
        }
    }

    /// The commit of a revocation, with the key of its request.
    fn keyed_commit(&self, keyed: Option<KeyedChange>, at_ms: u64, commit: Commit) -> Commit {
        let Some(keyed) = keyed else { return commit };
        let number = commit.certificates.iter().filter_map(RegisterChange::revocation).max();
        let answers = vec![keyed.kept(number.unwrap_or_default(), at_ms)];
        let forgotten_keys = self.answers.outdated(at_ms, answers.len());
        Commit { answers, forgotten_keys, ..commit }
    }
}

/// Prolongs all that is to be prolonged in a register that nobody has yet.
///
/// # Errors
/// [`StoreError`].
pub(in crate::service) fn prolong_all(
    register: &mut CertificateRegister,
    store: &mut dyn Store,
) -> Result<(), StoreError> {
    let now = rackbus_identity::now();
    loop {
        let certificates = register.upkeep(now);
        // What is over can be forgotten later.
        if certificates.iter().all(|change| change.revocation().is_none()) {
            return Ok(());
        }
        let commit = Commit { certificates, ..Commit::default() };
        store.commit(&commit)?;
        register.apply(commit.certificates);
    }
}

/// What a request changes in the register.
struct RegisterDecision {
    /// How many certificates it is about.
    certificates: usize,
    changes: Vec<RegisterChange>,
    /// What is noted of it.
    event: Option<Draft>,
    /// Of a rotation, the step that is taken.
    step: Option<RotationStep>,
}

impl RegisterDecision {
    fn new(certificates: usize, changes: Vec<RegisterChange>, event: Option<Draft>) -> Self {
        RegisterDecision { certificates, changes, event, step: None }
    }

    fn of_rotation((step, changes): (RotationStep, Vec<RegisterChange>)) -> Self {
        let decided = Self::new(step.cut_off().len(), changes, Some(rotation_event(&step)));
        RegisterDecision { step: Some(step), ..decided }
    }
}

/// What is to be changed in the register at `now`.
///
/// # Errors
/// [`RegisterRefused`].
fn decide(
    register: &CertificateRegister,
    asked: &RegisterRequest,
    now: u64,
) -> Result<RegisterDecision, RegisterRefused> {
    Ok(match asked {
        RegisterRequest::Issue(given, under, old) => {
            let changes = register.issue(now, given, *under, old.as_deref())?;
            let before = old.as_ref().and_then(|old| register.issuer(&old.certified.serial));
            let before = before.filter(|before| *before != under.issuer);
            let event = before.map(|before| renewal_event(&given.certified, before, under.issuer));
            RegisterDecision::new(1, changes, event)
        }
        RegisterRequest::Revoke(what) => {
            let (count, changes) = register.revoke(now, what.clone())?;
            RegisterDecision::new(count, changes, Some(revocation_event(what, count)))
        }
        RegisterRequest::Shown(shown) => RegisterDecision::new(1, register.shown(shown), None),
        RegisterRequest::Rotate { first, next, force } => {
            let next = AuthorityRecord::clone(next);
            RegisterDecision::of_rotation(register.rotate(now, first, next, *force)?)
        }
        RegisterRequest::Retire { force } => {
            RegisterDecision::of_rotation(register.retire(now, *force)?)
        }
    })
}

/// What is noted of a revocation.
fn revocation_event(what: &Revoked, count: usize) -> Draft {
    let host = if let Revoked::Host(host) = what { Some(host.as_str()) } else { None };
    let text = format!("{what} is revoked: {count} certificates that were good");
    Draft::of_host(EventKind::Access, host, text)
}

/// What is noted of a certificate of one authority that is renewed by a later one.
fn renewal_event(certified: &Certified, before: u64, issuer: u64) -> Draft {
    let Certified { subject, serial, .. } = certified;
    let host = if let Subject::Node(host) = subject { Some(host.as_str()) } else { None };
    let name = short_name(subject);
    let text = format!(
        "{name} has the certificate {serial} of certificate authority {issuer} in the place of one of {before}"
    );
    Draft::of_host(EventKind::Access, host, text)
}

/// What is noted of a step of a rotation.
fn rotation_event(step: &RotationStep) -> Draft {
    let text = match step {
        RotationStep::Introduced(_) => {
            "there is a new certificate authority; it signs when everybody trusts it".to_owned()
        }
        RotationStep::Signs(_) => "the new certificate authority signs".to_owned(),
        RotationStep::Retired(_) => "the old certificate authority is retired".to_owned(),
    };
    let text = match step.cut_off() {
        none if none.is_empty() => text,
        some => format!("{text}; cut off: {}", all_names(some)),
    };
    Draft::of_host(EventKind::Access, None, shortened(&text, LONGEST_TEXT).to_owned())
}
