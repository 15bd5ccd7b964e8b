//! Somebody takes turns on a function, or does so no more.

use rackbus_lease::{LeaseId, ShareRefused, ShareRequest};

use super::Writer;
use super::requests::ShareChange;
use crate::answers::{KeyLookup, KeyedChange, KeyedRequest};
use crate::api::ApiError;
use crate::shares::ShareSpec;

impl Writer {
    /// Has a change of a share decided; the answer is its number.
    pub(super) fn share(
        &mut self,
        change: ShareChange,
    ) -> Result<Result<LeaseId, ShareRefused>, ApiError> {
        match change {
            ShareChange::Join(request, spec, key) => self.join(*request, spec, key),
            ShareChange::Leave(share, keyed) => self.once(keyed, |authority, now| {
                authority.leave(now, share).map(|outcome| (share, outcome))
            }),
            ShareChange::GiveBack(share, keyed) => self.once(keyed, |authority, now| {
                authority.give_turn_back(now, share).map(|outcome| (share, outcome))
            }),
        }
    }

    /// A new share, or the one that was made under this key.
    fn join(
        &mut self,
        request: ShareRequest,
        spec: Box<ShareSpec>,
        key: Option<String>,
    ) -> Result<Result<LeaseId, ShareRefused>, ApiError> {
        let asked = KeyedRequest::Share { spec };
        if let KeyLookup::Pending(share) | KeyLookup::Answered(share, _) =
            self.find(key.as_deref(), &asked)?
        {
            return Ok(Ok(share));
        }
        let function = request.function.clone();
        let waiting = self.shared.queue().length(&function);
        if waiting > 0 {
            return Ok(Err(ShareRefused::Waited { function, waiting }));
        }
        let keyed = key.map(|key| KeyedChange { key, request: asked });
        self.once(keyed, |authority, now| authority.share(now, request))
    }
}
