//! Somebody takes turns on a function, or does so no more.

use rackbus_lease::{LeaseId, ShareRefused};

use super::requests::ShareChange;
use super::{Writer, numbered};
use crate::api::ApiError;

impl Writer {
    /// Has a change of a share decided; the answer is its number.
    pub(super) fn share(
        &mut self,
        change: ShareChange,
    ) -> Result<Result<LeaseId, ShareRefused>, ApiError> {
        if let ShareChange::Join(request) = &change {
            let function = request.function.clone();
            let waiting = self.shared.queue().length(&function);
            if waiting > 0 {
                return Ok(Err(ShareRefused::Waited { function, waiting }));
            }
        }
        self.step(|authority, now| match change {
            ShareChange::Join(request) => numbered(authority.share(now, *request)),
            ShareChange::Leave(share) => {
                numbered(authority.leave(now, share).map(|outcome| (share, outcome)))
            }
            ShareChange::GiveBack(share) => {
                numbered(authority.give_turn_back(now, share).map(|outcome| (share, outcome)))
            }
        })
    }
}
