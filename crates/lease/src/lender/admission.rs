//! Who may attach to a function, and who is attached: asked before anybody is let in, so that a lease is enforced in
//! one place.

use serde::{Deserialize, Serialize};

use super::{Lender, State};
use crate::message::{Epoch, LeaseId, Placement};

/// Whom a function is armed for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArmedFor {
    /// The lease's number, which no other lease ever gets.
    pub lease: LeaseId,
    /// The lease's fencing epoch; a lender lets in the newest that it was armed for.
    pub epoch: Epoch,
    /// The borrowing host's name in the rack file.
    pub borrower: String,
    /// Where the function's front runs: who attaches says which half of the function it wants.
    pub placement: Placement,
}

/// Why a borrower is not let in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotAdmitted {
    /// This lender has no such device.
    #[error("there is no device {0}")]
    NoDevice(String),
    /// Another lease has the function.
    #[error(
        "epoch {epoch} of {device} is not valid here (lease {} of {} has it under epoch {})",
        .holder.lease, .holder.borrower, .holder.epoch
    )]
    Held {
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The epoch that was presented.
        epoch: Epoch,
        /// Who may attach instead.
        holder: ArmedFor,
    },
    /// The function is being made ready, or taken back.
    #[error("epoch {epoch} of {device} is not valid here (its function is being {doing})")]
    Busy {
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The epoch that was presented.
        epoch: Epoch,
        /// What is being done with the function.
        doing: &'static str,
    },
    /// It is armed for nobody.
    #[error("epoch {epoch} of {device} is not valid here (it is not lent to anybody)")]
    NotLent {
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The epoch that was presented.
        epoch: Epoch,
    },
    /// The borrower may attach, to the other half of the function.
    #[error("the front of {device} runs at its {} under epoch {epoch}", .placement)]
    Placed {
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The lease's fencing epoch; a lender lets in the newest that it was armed for.
        epoch: Epoch,
        /// Where the front runs.
        placement: Placement,
    },
    /// The borrower may attach, and has not: there is nothing to go on with.
    #[error("nobody uses {device} under epoch {epoch}")]
    NotInUse {
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The epoch that was presented.
        epoch: Epoch,
    },
    /// The borrower may attach, and is attached already.
    #[error("{device} is in use under epoch {epoch}")]
    InUse {
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The epoch that is attached.
        epoch: Epoch,
    },
}

impl Lender {
    /// Who may attach to `device` now, or as soon as it is ready.
    pub fn holder(&self, device: &str) -> Option<&ArmedFor> {
        self.devices.get(device)?.holder()
    }

    /// Who may attach to `device` now.
    pub fn admitted(&self, device: &str) -> Option<&ArmedFor> {
        match &self.devices.get(device)?.state {
            State::Armed(holder) => Some(holder),
            _ => None,
        }
    }

    /// Whether `wanted` may attach to `device` now, and nobody is attached.
    ///
    /// # Errors
    /// [`NotAdmitted`] says why not.
    pub fn admits(&self, device: &str, wanted: &ArmedFor) -> Result<(), NotAdmitted> {
        let Some(entry) = self.devices.get(device) else {
            return Err(NotAdmitted::NoDevice(device.to_owned()));
        };
        let (device, epoch) = (device.to_owned(), wanted.epoch);
        match (&entry.state, entry.attached) {
            (State::Armed(holder), None) if holder == wanted => Ok(()),
            (State::Armed(holder), Some(epoch)) if holder == wanted => {
                Err(NotAdmitted::InUse { device, epoch })
            }
            (State::Armed(holder), _)
                if *holder == (ArmedFor { placement: holder.placement, ..wanted.clone() }) =>
            {
                Err(NotAdmitted::Placed { device, epoch, placement: holder.placement })
            }
            (State::Armed(holder), _) => {
                Err(NotAdmitted::Held { device, epoch, holder: holder.clone() })
            }
            (State::Arming(_), _) => Err(NotAdmitted::Busy { device, epoch, doing: "made ready" }),
            (State::Revoking(_), _) => {
                Err(NotAdmitted::Busy { device, epoch, doing: "taken back" })
            }
            (State::Free, _) => Err(NotAdmitted::NotLent { device, epoch }),
        }
    }

    /// Whether `wanted` is attached to `device`, and may continue.
    ///
    /// # Errors
    /// [`NotAdmitted`] says why not.
    pub fn resumes(&self, device: &str, wanted: &ArmedFor) -> Result<(), NotAdmitted> {
        match self.admits(device, wanted) {
            Err(NotAdmitted::InUse { epoch, .. }) if epoch == wanted.epoch => Ok(()),
            Err(refused) => Err(refused),
            Ok(()) => Err(NotAdmitted::NotInUse { device: device.to_owned(), epoch: wanted.epoch }),
        }
    }

    /// Lets `wanted` attach to `device`, until [`detached`](Lender::detached).
    ///
    /// # Errors
    /// [`NotAdmitted`]; nothing changes then.
    pub fn attach(&mut self, device: &str, wanted: &ArmedFor) -> Result<(), NotAdmitted> {
        self.admits(device, wanted)?;
        if let Some(entry) = self.devices.get_mut(device) {
            entry.attached = Some(wanted.epoch);
        }
        Ok(())
    }

    /// The conversation of whoever was attached to `device` has ended, nothing of its is mapped any
    /// more, and the function is scrubbed.
    pub fn detached(&mut self, device: &str) {
        if let Some(entry) = self.devices.get_mut(device) {
            entry.attached = None;
        }
    }

    /// Whether a borrower of `epoch` or an older one is still attached to `device`. A revocation of
    /// that epoch ends its conversation.
    pub fn attached_up_to(&self, device: &str, epoch: Epoch) -> bool {
        self.devices.get(device).is_some_and(|entry| entry.attached.is_some_and(|e| e <= epoch))
    }
}
