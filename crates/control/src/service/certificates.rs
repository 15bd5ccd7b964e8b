//! What the control plane does with certificates: it gives them out and revokes them.

use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use rackbus_identity::{Certified, RevocationList, Revocations, Revoked, Subject};

use super::writer::{RegisterRequest, WriterRequest};
use super::{Service, WriterShared, problem};
use crate::answers::KeyedChange;
use crate::api::ApiError;
use crate::register::{CertificateRegister, RegisterOutcome, RegisterRefused};

impl WriterShared {
    pub(super) fn register(&self) -> MutexGuard<'_, CertificateRegister> {
        // It is changed in whole steps.
        self.register.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// What is revoked, when that is another version than `after`, or `wait` is over.
    pub(crate) async fn revocations_after(&self, after: u64, wait: Duration) -> RevocationList {
        let mut version = self.shared.revoked_version.subscribe();
        // What there is is answered in any case.
        let _ = tokio::time::timeout(wait, version.wait_for(|version| *version != after)).await;
        self.shared.revocations.list()
    }

    /// A certificate as it would be given out now.
    pub(crate) fn draft_certificate(&self, subject: Subject, life: Duration) -> Certified {
        self.shared.register().draft(self.shared.seconds(), subject, life.as_secs())
    }

    /// Gives out a certificate; one that is renewed goes with the one that it is renewed by.
    ///
    /// # Errors
    /// [`ApiError`]; nothing is given out then.
    pub(crate) async fn issue_certificate(
        &self,
        certified: &Certified,
        old: Option<Certified>,
    ) -> Result<(), ApiError> {
        let asked = RegisterRequest::Issue(Box::new(certified.clone()), old.map(Box::new));
        self.change_register(asked, None).await.map(drop)
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
            };
            problem(code, refused.to_string(), remedy)
        })
    }
}
