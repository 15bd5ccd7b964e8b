//! A borrowed function, from the grant of its lease to its end.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rackbus_lease::{FrontRefused, Grant};
use rackbus_memory::CarriedSession;
use rackbus_pci::vfio_user::Server;

use super::{BorrowerFence, FrontSlot};
use crate::front::MediumConversation;
use crate::lent_out::LentOut;
use crate::peers::PeerMembership;
use crate::remote::LenderConversation;
use crate::turns::LeaseUse;
use crate::users::VmUser;

/// A borrowed function, from the grant of its lease to its end.
pub(super) struct Open {
    pub(super) grant: Grant,
    pub(super) path: PathBuf,
    pub(super) server: Mutex<Option<Server>>,
    /// What the function is lent, where it runs at its lender.
    pub(super) lent_out: LentOut,
    /// The conversation with the lender, since a user had the socket open.
    pub(super) attachment: Mutex<Option<Attachment>>,
    /// Bytes of configuration space that its user is shown instead of the function's.
    pub(super) fixed: Mutex<Vec<(u64, u8)>>,
    /// Says whether the lease has ended: who is being attached releases the lender at once.
    pub(super) fence: BorrowerFence,
    /// Among the functions of its user, while that has it open.
    pub(super) membership: Mutex<Option<Arc<PeerMembership>>>,
    /// The VM that uses it, or the last user if that was one: when it has ended, the lease is returned.
    pub(super) user: Mutex<Option<VmUser>>,
    /// Whether somebody has attached since the lease began.
    pub(super) was_used: AtomicBool,
}

/// The conversation with a lender.
pub(super) enum Attachment {
    /// The conversation carries register accesses and mappings: the front is at the lender.
    Function(LenderConversation),
    /// About its medium; the front runs here. Beside it the session, where that is on another machine.
    Medium(MediumConversation, Option<CarriedSession>),
}

impl Attachment {
    /// Lets the lender go: what was attached answers as an absent device from then on.
    pub(super) fn end(&self) {
        match self {
            Attachment::Function(conversation) => conversation.end(),
            Attachment::Medium(conversation, _) => conversation.end(),
        }
    }
}

impl Open {
    pub(super) fn server(&self) -> MutexGuard<'_, Option<Server>> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The process that uses it now.
    pub(super) fn process(&self) -> Option<u32> {
        self.server().as_ref().and_then(Server::client_pid)
    }

    /// Whether the lease has ended: its socket is gone, though its last user may have it open still.
    pub(super) fn has_ended(&self) -> bool {
        self.server().as_ref().is_some_and(|server| server.listener().is_none())
    }

    pub(super) fn user(&self) -> MutexGuard<'_, Option<VmUser>> {
        self.user.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn fixed(&self) -> MutexGuard<'_, Vec<(u64, u8)>> {
        self.fixed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn attachment(&self) -> MutexGuard<'_, Option<Attachment>> {
        self.attachment.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether users may attach: the lease has not ended.
    pub(super) fn is_served(&self) -> bool {
        self.fence.serves(self.grant.lease)
    }

    /// Has a front of it begin, as [`BorrowerFence::begin_front`].
    pub(super) fn begin_front(&self, limit: Duration) -> Result<FrontSlot, FrontRefused> {
        self.fence.begin_front(self.grant.lease, limit)
    }

    /// A user has attached.
    pub(super) fn attached(&self, attachment: Attachment) {
        let mut current = self.attachment();
        if !self.is_served() {
            attachment.end();
        }
        *current = Some(attachment);
    }

    /// The lease has ended: releases the lender. A user that is attaching now finds it ended.
    pub(super) fn close(&self) {
        self.leave_peers();
        if let Some(attachment) = &*self.attachment() {
            attachment.end();
        }
    }

    /// Whether somebody has it open, or had it.
    pub(super) fn use_of(&self) -> LeaseUse {
        // Who attaches after the first look is a process at the second one, unless it has released it again.
        let was_used = self.was_used.load(Ordering::Acquire);
        match (was_used, self.process()) {
            (_, Some(_)) => LeaseUse::InUse,
            (true, None) => LeaseUse::Released,
            (false, None) => LeaseUse::Unused,
        }
    }

    /// The windows that it has, each an address and a length.
    pub(super) fn windows(&self) -> Vec<(u64, u64)> {
        let membership = self.membership.lock().unwrap_or_else(PoisonError::into_inner);
        membership.as_ref().map(|membership| membership.windows()).unwrap_or_default()
    }

    /// No other function of its user reaches it from now on, nor it any.
    pub(super) fn leave_peers(&self) {
        let membership = self.membership.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(membership) = membership {
            membership.leave();
        }
    }
}
