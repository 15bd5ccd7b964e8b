//! A lease's service level is changed while it is used: what is stored of that, and why it is refused.

use serde::{Deserialize, Serialize};

use crate::authority::EndReason;
use crate::message::LeaseId;

/// The newest change of a lease's service level that was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LevelChange {
    /// Which change of this lease's level it is, from 1 on.
    pub number: u64,
    /// The level that is asked for, as its class of devices writes it; none for what anybody gets.
    pub level: Option<String>,
    /// What the lender said: that it is in force, or why not. None while it has not answered.
    pub outcome: Option<Result<(), String>>,
}

/// Why a lease's service level is not changed. What its lender refuses is in
/// [`LevelChange::outcome`] instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeRefused {
    /// There is no such lease.
    #[error("there is no lease {0}")]
    Unknown(LeaseId),
    /// The lease has ended, and with it its level.
    #[error("lease {lease} has ended: {reason}")]
    Ended {
        /// The lease whose level was to be changed.
        lease: LeaseId,
        /// Why the lease ended.
        reason: EndReason,
    },
    /// It is on its way to its borrower, or back.
    #[error("lease {0} is not in use now: it is being opened or closed")]
    NotActive(LeaseId),
    /// Another change was asked for, and its lender has not answered.
    #[error("another change of the level of lease {0} is under way")]
    UnderWay(LeaseId),
}
