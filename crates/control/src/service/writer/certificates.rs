//! Certificates are given out and revoked: stored first, and then the connections of who is revoked are ended.

use rackbus_identity::Revoked;
use rackbus_lease::Decision;

use super::requests::RegisterRequest;
use super::{Writer, not_stored};
use crate::answers::KeyedChange;
use crate::api::{ApiError, EventKind};
use crate::events::Draft;
use crate::register::{RegisterChange, RegisterOutcome, RegisterRefused};
use crate::store::Commit;

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
            return Ok(Ok(RegisterOutcome { certificates, version }));
        }
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
        let (count, changes) = match decided {
            Ok(decided) => decided,
            Err(refused) => return Ok(Err(refused)),
        };
        let event = revocation_event(&asked, count);
        let drafts = event.into_iter().map(|event| self.own(event)).collect();
        let numbered = self.numbered(at_ms, drafts);
        let commit = self.keyed_commit(keyed, at_ms, Commit { certificates: changes, ..numbered });
        if let Err(error) = self.commit(&commit) {
            tracing::error!(%error, "a change of certificates could not be stored");
            self.shared.known().store_failures += 1;
            return Err(not_stored(&error));
        }
        let list = {
            let mut register = self.shared.register();
            register.apply(commit.certificates);
            register.revoked().clone()
        };
        self.answers.keep(commit.answers);
        commit.forgotten_keys.iter().for_each(|key| drop(self.answers.forget(key)));
        let version = list.version;
        self.shared.revocations.learn(&list, now);
        self.shared.revoked_version.send_if_modified(|version| {
            let is_new = *version != list.version;
            *version = list.version;
            is_new
        });
        self.shared.publish(Decision::default(), commit.events, commit.first_event);
        Ok(Ok(RegisterOutcome { certificates: count, version }))
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

/// What is noted of a change of the register.
fn revocation_event(asked: &RegisterRequest, count: usize) -> Option<Draft> {
    let RegisterRequest::Revoke(what) = asked else { return None };
    let host = if let Revoked::Host(host) = what { Some(host.as_str()) } else { None };
    let text = format!("{what} is revoked: {count} certificates that were good");
    Some(Draft::of_host(EventKind::Access, host, text))
}
