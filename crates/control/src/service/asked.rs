//! Who asked for what: what of the service is about that.

use super::{Service, problem};
use crate::access::{ApiPeer, Forbidden, RequestOrigin};
use crate::api::ApiError;
use crate::events::Draft;

impl Service {
    /// Name of the rack.
    pub(crate) fn rack(&self) -> String {
        self.shared.inventory().rack.clone()
    }

    /// Has something noted that decides nothing about functions.
    pub(crate) async fn note(&self, event: Draft) {
        self.writing.note(vec![event]).await;
    }

    /// How many requests were refused for lack of a right to them.
    pub(crate) fn forbidden(&self) -> &Forbidden {
        &self.forbidden
    }

    /// Notes that somebody was refused; who is so again and again, once a second with how often.
    pub(crate) async fn note_forbidden(&self, asker: RequestOrigin, refused: &ApiError) {
        self.writing.note_forbidden(asker, format!("refused: {}", refused.error)).await;
    }

    /// Lets nobody borrow or return a composition but its borrower, and who operates the rack.
    ///
    /// # Errors
    /// `forbidden`; for who acts for one host, the same of a composition that there is not.
    pub fn check_composition(&self, name: &str, peer: &ApiPeer) -> Result<(), ApiError> {
        let known = self.compositions().into_iter().find(|it| it.name == name);
        match known {
            Some(known) => peer.acts_for(&known.borrower),
            None => Err(problem(
                "unknown_composition",
                format!("there is no composition {name}"),
                "`rackbus composition list` shows which there are",
            )),
        }
    }
}
