//! What the control plane does with certificates: it gives them out and revokes them.

use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use rackbus_identity::{
    Certified, KeyedCertificate, RevocationList, Revocations, Revoked, Subject,
};
use tokio::sync::watch;

use super::writer::{RegisterRequest, WriterRequest};
use super::{Service, WriterShared, problem};
use crate::answers::KeyedChange;
use crate::api::ApiError;
use crate::register::{
    AuthorityNumbers, AuthorityRecord, AuthoritySet, CertificateNotIssued, CertificateRegister,
    RegisterOutcome, RegisterRefused, RotationRefused,
};

/// The code of a refusal where the authorities changed while a certificate was made.
pub(crate) const OTHER_AUTHORITIES: &str = "other_authorities";

/// What is done about a certificate of `subject` that was not given out.
pub(crate) fn anew(subject: &Subject) -> &'static str {
    match subject {
        Subject::Person(_) => "log in anew with a new token: `rackbus login`",
        Subject::Node(_) | Subject::Control => {
            "join anew with a new token: `rackbus token HOST`, and remove identity.pem from the node's state directory"
        }
    }
}

impl WriterShared {
    pub(super) fn register(&self) -> MutexGuard<'_, CertificateRegister> {
        // It is changed in whole steps.
        self.register.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a new certificate authority is to sign once everybody trusts it.
    pub(super) fn awaits_authority(&self) -> bool {
        self.authorities.borrow().as_ref().is_some_and(|it| it.next.is_some())
    }

    /// What certificates are dated by and compared with, in seconds since 1970: as whoever is shown one does, by the machine's
    /// clock as it is set now.
    pub(super) fn seconds(&self) -> u64 {
        rackbus_identity::now()
    }
}

impl Service {
    pub(crate) fn register(&self) -> MutexGuard<'_, CertificateRegister> {
        self.shared.register()
    }

    /// The certificates that are revoked, and who is to hear of it.
    pub fn revocations(&self) -> &Revocations {
        &self.shared.revocations
    }

    /// The certificate authorities of a rack that replaces its first one, and when they change.
    pub fn authorities(&self) -> watch::Receiver<Option<AuthoritySet>> {
        self.shared.authorities.subscribe()
    }

    /// What is revoked, when that is another version than `after`, the authorities are others than those that are known, as
    /// `are_known` says, or `wait` is over.
    pub(crate) async fn revocations_after(
        &self,
        after: u64,
        are_known: impl Fn(Option<&AuthoritySet>) -> bool,
        wait: Duration,
    ) -> RevocationList {
        let mut version = self.shared.revoked_version.subscribe();
        let mut authorities = self.authorities();
        // What there is is answered in any case.
        tokio::select! {
            _ = version.wait_for(|version| *version != after) => {}
            _ = authorities.wait_for(|set| !are_known(set.as_ref())) => {}
            () = tokio::time::sleep(wait) => {}
        }
        self.shared.revocations.list()
    }

    /// A certificate as it would be given out now.
    pub(crate) fn draft_certificate(&self, subject: Subject, life: Duration) -> Certified {
        self.shared.register().draft(self.shared.seconds(), subject, life.as_secs())
    }

    /// Gives out a certificate, which the authorities `under` made; one that is renewed goes with the one that it is renewed
    /// by.
    ///
    /// # Errors
    /// [`ApiError`]; nothing is given out then. Its code is [`OTHER_AUTHORITIES`] where it is to be made again.
    pub(crate) async fn issue_certificate(
        &self,
        given: KeyedCertificate,
        under: AuthorityNumbers,
        old: Option<KeyedCertificate>,
    ) -> Result<(), ApiError> {
        let asked = RegisterRequest::Issue(Box::new(given), under, old.map(Box::new));
        self.change_register(asked, None).await.map(drop)
    }

    /// Notes that somebody has shown this certificate, where that is new.
    pub(crate) async fn note_shown(&self, shown: &KeyedCertificate) {
        if !self.register().is_news(shown) {
            return;
        }
        // It is shown again, where that is not stored.
        drop(self.change_register(RegisterRequest::Shown(Box::new(shown.clone())), None).await);
    }

    /// Begins to replace the rack's certificate authority, or has the new one sign.
    ///
    /// # Errors
    /// [`ApiError`]; nothing is changed then.
    pub(crate) async fn rotate(
        &self,
        first: AuthoritySet,
        next: AuthorityRecord,
        force: bool,
        keyed: Option<KeyedChange>,
    ) -> Result<RegisterOutcome, ApiError> {
        let (first, next) = (Box::new(first), Box::new(next));
        let asked = RegisterRequest::Rotate { first, next, force };
        self.change_register(asked, keyed).await
    }

    /// Ends the certificate authority that was replaced.
    ///
    /// # Errors
    /// [`ApiError`]; nothing is changed then.
    pub(crate) async fn retire(
        &self,
        force: bool,
        keyed: Option<KeyedChange>,
    ) -> Result<RegisterOutcome, ApiError> {
        self.change_register(RegisterRequest::Retire { force }, keyed).await
    }

    /// Revokes something. Asked again with the same idempotency key, certificates that were given out since stay good.
    ///
    /// # Errors
    /// [`ApiError`]; nothing is revoked then.
    pub(crate) async fn revoke(
        &self,
        what: Revoked,
        keyed: Option<KeyedChange>,
    ) -> Result<RegisterOutcome, ApiError> {
        self.change_register(RegisterRequest::Revoke(what), keyed).await
    }

    async fn change_register(
        &self,
        asked: RegisterRequest,
        keyed: Option<KeyedChange>,
    ) -> Result<RegisterOutcome, ApiError> {
        let ask = |answer| WriterRequest::Register { asked, keyed, answer };
        self.writing.ask(ask).await?.map_err(|refused| {
            let (code, remedy) = match &refused {
                RegisterRefused::Over(_) => ("forbidden", "join or log in again with a new token"),
                RegisterRefused::NotIssued(CertificateNotIssued { subject, .. }) => {
                    ("forbidden", anew(subject))
                }
                RegisterRefused::Revoked(_) => {
                    ("forbidden", "ask an administrator for a new token")
                }
                RegisterRefused::TooMany(..) => {
                    ("too_many", "revoke those that nobody uses: `rackbus certificates`")
                }
                RegisterRefused::Unknown(_) => {
                    ("unknown_certificate", "`rackbus certificates` lists them")
                }
                RegisterRefused::Full => ("too_many", "wait until some of them are over"),
                RegisterRefused::OtherAuthorities => (OTHER_AUTHORITIES, "ask again"),
                RegisterRefused::Rotation(RotationRefused::Introduced(_)) => (
                    "rotation",
                    "`rackbus control ca status` lists them: wait, revoke who is gone, or go on without them by \
                     `rackbus control ca rotate --force`",
                ),
                RegisterRefused::Rotation(RotationRefused::InUse(_)) => (
                    "rotation",
                    "`rackbus control ca status` lists them: wait, revoke who is gone, or end theirs by --force",
                ),
                RegisterRefused::Rotation(RotationRefused::KeysUnknown(_)) => (
                    "rotation",
                    "`rackbus control ca status` lists them: wait until they have asked for something, revoke who is gone, or cut \
                     them off by --force",
                ),
                RegisterRefused::Rotation(RotationRefused::NotRetired) => {
                    ("rotation", "end it first: `rackbus control ca retire`")
                }
                RegisterRefused::Rotation(RotationRefused::Alone) => {
                    ("rotation", "replace it first: `rackbus control ca rotate`")
                }
            };
            problem(code, refused.to_string(), remedy)
        })
    }
}
