//! What the control plane does with certificates: it gives them out and revokes them, stored before they count.

use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use rackbus_identity::{Certified, RevocationList, Revocations, Revoked, Subject};
use rackbus_lease::Outcome;

use super::writer::{Request, Writer, not_stored};
use super::{Service, Shared, problem};
use crate::api::{ApiError, EventKind};
use crate::events::Draft;
use crate::register::{Register, RegisterRefused};
use crate::store::Commit;

/// What becomes of the register.
#[derive(Debug)]
pub(super) enum RegisterRequest {
    /// A certificate is given out; one that is renewed goes with the one that it is renewed by.
    Issue(Box<Certified>, Option<Box<Certified>>),
    /// Something is revoked.
    Revoke(Revoked),
}

impl Shared {
    fn register(&self) -> MutexGuard<'_, Register> {
        // It is changed in whole steps.
        self.register.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Seconds since 1970.
    fn seconds(&self) -> u64 {
        self.clock.now() / 1000
    }
}

impl Service {
    pub(crate) fn register(&self) -> MutexGuard<'_, Register> {
        self.shared.register()
    }

    /// The certificates that are revoked, and who is to hear of it.
    pub fn revocations(&self) -> &Revocations {
        &self.shared.revocations
    }

    /// What is revoked, when that is another version than `after`, or `wait` is over.
    pub(crate) async fn revocations_after(&self, after: u64, wait: Duration) -> RevocationList {
        let deadline = tokio::time::Instant::now() + wait;
        let list = || self.shared.revocations.list();
        let newer = |_: &_| Some(list()).filter(|list| list.version != after);
        match self.shared.wait(deadline, newer).await {
            Some(list) => list,
            None => list(),
        }
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
        self.change_register(asked).await.map(drop)
    }

    /// Revokes something; of how many certificates that were good that takes.
    ///
    /// # Errors
    /// [`ApiError`]; nothing is revoked then.
    pub async fn revoke(&self, what: Revoked) -> Result<usize, ApiError> {
        self.change_register(RegisterRequest::Revoke(what)).await
    }

    async fn change_register(&self, asked: RegisterRequest) -> Result<usize, ApiError> {
        let ask = |answer| Request::Register { asked, answer };
        self.writing.ask(ask).await?.map_err(|refused| {
            let (code, remedy) = match &refused {
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

impl Writer {
    /// Decides, stores, and then ends the connections of who is revoked.
    pub(super) fn change_register(
        &mut self,
        asked: RegisterRequest,
    ) -> Result<Result<usize, RegisterRefused>, ApiError> {
        let (at_ms, now) = (self.shared.clock.now(), self.shared.seconds());
        let decided = {
            let register = self.shared.register();
            match &asked {
                RegisterRequest::Issue(certified, old) => {
                    register.issue(now, certified, old.as_deref()).map(|changes| (1, changes))
                }
                RegisterRequest::Revoke(what) => register.revoke(now, what.clone()),
            }
        };
        let (count, certificates) = match decided {
            Ok(decided) => decided,
            Err(refused) => return Ok(Err(refused)),
        };
        let event = match &asked {
            RegisterRequest::Issue(..) => None,
            RegisterRequest::Revoke(what) => {
                let host = if let Revoked::Host(host) = what { Some(host.as_str()) } else { None };
                let text = format!("{what} is revoked: {count} certificates that were good");
                Some(Draft::of_host(EventKind::Access, host, text))
            }
        };
        let outcome = Outcome::default();
        let (events, first_event) = self.number(at_ms, &outcome, event.into_iter().collect());
        let commit = Commit { certificates, events, first_event, ..Commit::default() };
        if let Err(error) = self.commit(&commit) {
            tracing::error!(%error, "what becomes of a certificate could not be stored");
            self.shared.known().store_failures += 1;
            return Err(not_stored(&error));
        }
        let list = {
            let mut register = self.shared.register();
            register.apply(commit.certificates);
            register.revoked().clone()
        };
        self.shared.revocations.learn(&list, now);
        self.shared.publish(outcome, commit.events, first_event);
        Ok(Ok(count))
    }
}
