//! Certificates are given out and revoked: stored first, and then the connections of who is revoked are ended.

use rackbus_identity::Revoked;
use rackbus_lease::Decision;

use super::requests::RegisterRequest;
use super::{Writer, not_stored};
use crate::api::{ApiError, EventKind};
use crate::events::Draft;
use crate::register::RegisterRefused;
use crate::store::Commit;

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
        let outcome = Decision::default();
        let numbered = self.number(at_ms, &outcome, event.into_iter().collect());
        let commit = Commit { certificates, ..numbered };
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
        self.shared.revocations.learn(&list, now);
        self.shared.revoked_version.send_if_modified(|version| {
            let is_new = *version != list.version;
            *version = list.version;
            is_new
        });
        self.shared.publish(outcome, commit.events, commit.first_event);
        Ok(Ok(count))
    }
}
