//! Fronts at the borrower: whether one may begin, and what waits for its end. The node asks here before a front runs,
//! and says when that has released all memory of its user.
//!
//! One front of a function runs at a time, whatever its lease: the lender has the function back as soon as the
//! conversation with it ends, before the front here has released its memory, and may lend it to this host again. And
//! no lease is answered as closed while a front of it runs.

use super::{BorrowedLease, Borrower, BorrowerAction, State};
use crate::message::{Epoch, FunctionId, LeaseId};

/// Why a front does not begin.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrontRefused {
    /// It was not granted here, or is over.
    #[error("lease {0} is not served here (any more)")]
    NotServed(LeaseId),
    /// The host has borrowed the function anew: nothing of an older epoch begins.
    #[error("lease {lease} is over: this host has {function} under epoch {newer}")]
    Superseded {
        /// The lease that is over.
        lease: LeaseId,
        /// The function that both leases lend.
        function: FunctionId,
        /// The epoch of the newer lease.
        newer: Epoch,
    },
    /// A former front of the function has not released all memory yet.
    #[error("a former front of {function} (lease {lease}) is still ending")]
    StillEnding {
        /// The function of both.
        function: FunctionId,
        /// The lease of the former one.
        lease: LeaseId,
    },
}

impl FrontRefused {
    /// Whether the front may begin later: after [`Borrower::front_ended`].
    pub fn is_for_now(&self) -> bool {
        matches!(self, FrontRefused::StillEnding { .. })
    }
}

impl Borrower {
    /// Whether a lease is served here: its users may attach to its lender.
    pub fn serves(&self, lease: LeaseId) -> bool {
        self.leases.get(&lease).is_some_and(BorrowedLease::is_served)
    }

    /// Whether anything of a lease is here: it is opened, served or closed.
    pub fn has(&self, lease: LeaseId) -> bool {
        self.leases.contains_key(&lease)
    }

    /// Lets a front of `lease` begin, or continue that another process of this node saved. It runs until
    /// [`front_ended`](Borrower::front_ended).
    ///
    /// # Errors
    /// [`FrontRefused`]; nothing changes then.
    pub fn begin_front(&mut self, lease: LeaseId) -> Result<(), FrontRefused> {
        let entry = self.leases.get(&lease).filter(|entry| entry.is_served());
        let entry = entry.ok_or(FrontRefused::NotServed(lease))?;
        let function = || entry.function.clone();
        let same = || self.leases.iter().filter(|(_, other)| other.function == entry.function);
        if let Some(newer) = same().map(|(_, other)| other.epoch).find(|it| *it > entry.epoch) {
            return Err(FrontRefused::Superseded { lease, function: function(), newer });
        }
        if let Some((former, _)) = same().find(|(_, other)| other.front) {
            return Err(FrontRefused::StillEnding { function: function(), lease: *former });
        }
        if let Some(entry) = self.leases.get_mut(&lease) {
            entry.front = true;
        }
        Ok(())
    }

    /// The front of `lease` has ended and reaches no memory of its user any more.
    pub fn front_ended(&mut self, lease: LeaseId) -> Vec<BorrowerAction> {
        let Some(entry) = self.leases.get_mut(&lease) else { return Vec::new() };
        entry.front = false;
        match entry.state {
            State::Ending => self.closed(lease),
            State::Confirming(_) | State::Opening | State::Open(_) | State::Closing => Vec::new(),
        }
    }
}
