//! What the lender tells its node to do.

#[cfg(doc)]
use super::Lender;
use crate::message::{Epoch, LeaseId, Message};

/// What the node must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LenderAction {
    /// Let the borrower of this epoch attach from now on; then call [`Lender::arm_done`](super::Lender::arm_done).
    Arm {
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The lease's number, which no other lease ever gets.
        lease: LeaseId,
        /// The lease's fencing epoch; a lender lets in the newest that it was armed for.
        epoch: Epoch,
        /// The borrowing host's name in the rack file.
        borrower: String,
        /// The service level that it is to have.
        level: Option<String>,
    },
    /// Give the borrower of this epoch, which is armed, another service level; then call
    /// [`Lender::level_done`](super::Lender::level_done).
    SetLevel {
        /// The device's name at its lender: `accel0.vf1`.
        device: String,
        /// The lease whose level changes.
        lease: LeaseId,
        /// The lease's fencing epoch.
        epoch: Epoch,
        /// Which change of this lease's level it is.
        number: u64,
        /// The level; none for what anybody gets.
        level: Option<String>,
    },
    /// Nobody of this epoch or an older one may attach any more. End the conversation of who
    /// [is attached](super::Lender::attached_up_to), take away what it has mapped, reset and scrub the
    /// function; then call [`Lender::revoke_done`](super::Lender::revoke_done).
    Revoke {
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The lease's fencing epoch; a lender lets in the newest that it was armed for.
        epoch: Epoch,
        /// The lease that has it, as far as this is known here.
        lease: Option<LeaseId>,
    },
    /// Have this device ready to be lent; then call [`Lender::offer_done`](super::Lender::offer_done).
    Offer {
        /// The device's name at its lender: `accel0`.
        device: String,
        /// Which change of the rack's devices it is.
        number: LeaseId,
        /// What the rack file would say of it.
        section: String,
    },
    /// Release this device, whose functions nobody has or gets any more; then call [`Lender::withdraw_done`](super::Lender::withdraw_done).
    Withdraw {
        /// The device's name at its lender: `accel0`.
        device: String,
        /// Which change of the rack's devices it is.
        number: LeaseId,
        /// Names of its functions.
        functions: Vec<String>,
    },
    /// Send this to the authority.
    Send(Message),
}
