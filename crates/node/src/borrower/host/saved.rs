//! Functions in this host's own PCI tree go on in another process of the node: the module keeps them, and the conversations
//! with their lenders are passed on.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rackbus_lease::Grant;
use rackbus_link::MediumSession;
use rackbus_memory::CarriedSession;
use rackbus_memory::exchange::CarriedSessionState;
use rackbus_metal::borrower::{BorrowedState, Module};
use rackbus_vfio::PciAddress;
use serde::{Deserialize, Serialize};

use super::{HostFunction, HostFunctions, KnownFunction, WindowConversation, folder_of};
use crate::borrower::fence::FrontSlot;
use crate::handover::HandOverError;
use crate::handover::parcel::Parcel;
use crate::remote::OnLost;

/// A function in this host's own PCI tree.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedInHost {
    /// The lease by which it is here.
    pub grant: Grant,
    /// By which the module knows it, and where it was borrowed.
    handle: u32,
    ntb: PciAddress,
    offset: u64,
    epoch: u64,
    /// The conversation with the lender, on the same machine.
    pub conversation: Option<u32>,
    /// In its place the session with a lender on another machine.
    pub session: Option<(MediumSession, CarriedSessionState)>,
}

impl HostFunctions {
    /// Whether all that is here can be gone on with in another process, as far as this is known before it is tried.
    ///
    /// # Errors
    /// What cannot, and why.
    pub(in crate::borrower) fn can_be_saved(&self) -> Result<(), HandOverError> {
        for (function, _) in self.all().values() {
            let name = || function.grant.function.to_string();
            let WindowConversation { stream, session } = &function.conversation;
            match session {
                Some((_, session)) if session.timing().hold == 0 => {
                    return Err(HandOverError::NotHeld { function: name() });
                }
                None if stream.handle().is_none() => return Err(HandOverError::InHost(name())),
                _ => {}
            }
        }
        Ok(())
    }

    /// All of them, with the descriptors of their conversations in `parcel`, and the sessions, of which no connection is asked
    /// for any more until they are taken back.
    ///
    /// # Errors
    /// [`HandOverError`].
    pub(in crate::borrower) fn save(
        &self,
        parcel: &mut Parcel,
    ) -> Result<(Vec<SavedInHost>, Vec<CarriedSession>), HandOverError> {
        let (mut states, mut sessions) = (Vec::new(), Vec::new());
        for (function, _) in self.all().values() {
            let HostFunction { grant, known, conversation, .. } = &**function;
            let (ntb, offset, epoch) = known.place;
            let session = conversation.session.as_ref();
            sessions.extend(session.map(|(_, session)| session.clone()));
            let session = session.map(|(offered, session)| (offered.clone(), session.save()));
            let stream = session.is_none().then_some(&conversation.stream);
            let handle = stream.map(|stream| stream.handle().ok_or(HandOverError::Link));
            let conversation = match handle.transpose()? {
                Some(handle) => Some(parcel.put_handle(handle)?),
                None => None,
            };
            let (grant, handle) = (grant.clone(), known.handle);
            states.push(SavedInHost { grant, handle, ntb, offset, epoch, conversation, session });
        }
        Ok((states, sessions))
    }

    /// Goes on with a function of another process, which is here as long as `conversation` is open. What the module does not
    /// have any more is lost, and what it has for another lease is none of this one's.
    ///
    /// # Errors
    /// Why not; it is returned with what else [is left](HostFunctions::return_left).
    pub(in crate::borrower) fn resume(
        &self,
        saved: SavedInHost,
        conversation: WindowConversation,
        slot: FrontSlot,
        lost: OnLost,
    ) -> Result<(), String> {
        let SavedInHost { grant, handle, ntb, offset, epoch, .. } = saved;
        if self.ntbs.get(&grant.function.host) != Some(&ntb) || epoch != grant.epoch {
            return Err(format!(
                "it was borrowed through {ntb}, which does not lead to its lender"
            ));
        }
        let module = Module::open().map_err(|error| error.to_string())?;
        let status = module.status(handle).map_err(|error| error.to_string())?;
        let known = KnownFunction { handle, place: (ntb, offset, epoch) };
        if (status.ntb, status.offset, status.epoch) != known.place {
            return Err("the module was loaded anew".to_owned());
        }
        if status.state != BorrowedState::Borrowed {
            return Err(status.reason.unwrap_or("it was returned by hand").to_owned());
        }
        let (path, ended) = (folder_of(status.domain), AtomicBool::new(false));
        let function = HostFunction { grant, known, path, conversation, ended };
        let kept = self.keep(Arc::new(function), slot, lost);
        kept.map(drop).map_err(|error| error.to_string())
    }
}
