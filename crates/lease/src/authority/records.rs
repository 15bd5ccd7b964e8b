//! What the authority stores, and why it refuses: data without decisions.

use serde::{Deserialize, Serialize};

use crate::change::LevelChange;
use crate::composition::CompositionRecord;
use crate::device::DeviceChange;
use crate::message::{Epoch, FunctionId, Incarnation, LeaseId, Millis, Placement};
use crate::share::{LeaveReason, ShareRecord, TurnOf};

/// Why a lease ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "why", content = "detail", rename_all = "snake_case")]
pub enum EndReason {
    /// Its borrower gave it back, in order.
    Returned,
    /// Its device was taken out of the rack.
    Withdrawn,
    /// Its borrower's turn was over, and others wanted the function.
    TurnOver,
    /// Its borrower did not need all of its turn.
    TurnGivenBack,
    /// Its borrower was silent for longer than its time to live.
    Expired,
    /// Its borrower's node started anew, without it.
    BorrowerRestarted,
    /// Its lender's node is gone, as the borrower noticed.
    LenderLost(String),
    /// Its lender's node started anew; what the function was doing is lost.
    LenderRestarted,
    /// The lender could not run the device.
    LenderFailed(String),
    /// The control plane's records were lost, or older ones restored.
    RecordsLost,
    /// The borrower could not serve the function.
    BorrowerFailed(String),
}

impl std::fmt::Display for EndReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            EndReason::Returned => f.write_str("returned"),
            EndReason::Withdrawn => f.write_str("its device was withdrawn"),
            EndReason::TurnOver => f.write_str("its turn is over, and others want the function"),
            EndReason::TurnGivenBack => f.write_str("its turn was given back early"),
            EndReason::Expired => f.write_str("expired: its borrower was silent too long"),
            EndReason::BorrowerRestarted => f.write_str("its borrower's node was restarted"),
            EndReason::LenderLost(how) => write!(f, "its lender was lost: {how}"),
            EndReason::LenderRestarted => f.write_str("its lender's node was restarted"),
            EndReason::RecordsLost => f.write_str("the control plane's records of it were lost"),
            EndReason::LenderFailed(how) => write!(f, "its lender could not lend it: {how}"),
            EndReason::BorrowerFailed(how) => write!(f, "its borrower could not open it: {how}"),
        }
    }
}

/// Where a lease stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum LeaseState {
    /// The lender is being told to let the borrower in.
    Arming,
    /// The borrower is being told to open its end.
    Opening,
    /// The function can be used.
    Active {
        /// Where the borrower serves it.
        socket: String,
    },
    /// The borrower is being told to release the function.
    Closing {
        /// What ended the lease: users and events are told.
        reason: EndReason,
        /// How long its user has, in milliseconds, where whoever returned it said so.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        within: Option<Millis>,
    },
    /// It is over. The function may still be on its way back.
    Ended {
        /// What ended the lease: users and events are told.
        reason: EndReason,
    },
}

/// A lease, as stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRecord {
    /// The lease's number, which no other lease ever gets.
    pub lease: LeaseId,
    /// The function, by its lender and its name there.
    pub function: FunctionId,
    /// The lease's fencing epoch; a lender lets in the newest that it was armed for.
    pub epoch: Epoch,
    /// The borrowing host's name in the rack file.
    pub borrower: String,
    /// Where the function's front runs.
    #[serde(default)]
    pub placement: Placement,
    /// The user that it is for, among those of its borrower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The service level that the lender promised, as its class of devices writes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<String>,
    /// The newest change of that level.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<LevelChange>,
    /// When it was asked for.
    pub since: Millis,
    /// When it ended, on the authority's clock; none while it has not.
    pub until: Option<Millis>,
    /// The share whose turn it is; none where it is lent until it is returned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<TurnOf>,
    /// The VM of its borrower that it is plugged into, where that was asked for; a turn's is said by its `turn`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// The process of its borrower that starts what will use it, as that host's node reads it: the lease ends with it, if
    /// nobody has used the function by then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub starter: Option<String>,
    /// Its lender refused what was asked for, and nothing is broken: then that is why it ended.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub refused: bool,
    /// How far lender and borrower have been told.
    pub state: LeaseState,
}

impl LeaseRecord {
    /// A change of its service level that its lender has not answered.
    pub fn asked_level(&self) -> Option<&LevelChange> {
        self.change.as_ref().filter(|change| change.outcome.is_none())
    }

    /// Whether it is not over.
    pub fn is_live(&self) -> bool {
        !matches!(self.state, LeaseState::Ended { .. })
    }
}

/// Where a function stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Availability {
    /// Nobody has it, and its lender has it reset and scrubbed.
    Offered,
    /// Taken by a lease.
    Lent {
        /// The lease that has it.
        lease: LeaseId,
    },
    /// The lender is being told to take it back, reset and scrub it.
    Revoking {
        /// The number of the lease by which it is had.
        lease: LeaseId,
    },
    /// Its host no longer offers it.
    Withdrawn,
}

/// A function, as stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionRecord {
    /// The function, by its lender and its name there.
    pub function: FunctionId,
    /// The newest epoch given out.
    pub epoch: Epoch,
    /// Whether it can be borrowed, or who has it.
    pub state: Availability,
}

/// A host's node, as stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRecord {
    /// The host's name in the rack file.
    pub host: String,
    /// The newest start of its node that has registered; what earlier ones say is stale.
    pub incarnation: Incarnation,
    /// Where its link listens.
    pub address: String,
}

/// One thing to store, by its key, before anything is sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
pub enum Record {
    /// What is known of a host's node; key `host/NAME`.
    Host(HostRecord),
    /// A host that left the rack: to be removed.
    HostRemoved {
        /// Name of the host.
        host: String,
    },
    /// Who has a function; key `function/HOST/DEVICE`.
    Function(FunctionRecord),
    /// How far a lease has come; key `lease/NUMBER`.
    Lease(LeaseRecord),
    /// The number of the next lease.
    NextLease {
        /// The number, above those of all leases there were.
        lease: LeaseId,
    },
    /// Functions that are borrowed together; key `composition/NAME`.
    Composition(CompositionRecord),
    /// A composition that is to be removed.
    Dissolved {
        /// Name of the composition that is removed.
        name: String,
    },
    /// A device that differs from what the rack file lists; key `device/HOST/NAME`.
    Device(DeviceChange),
    /// A device that does not differ any more: to be removed.
    DeviceRemoved {
        /// The host that had it.
        host: String,
        /// The device's name at its host.
        device: String,
    },
    /// Who takes turns on a function; key `share/NUMBER`.
    Share(Box<ShareRecord>),
    /// A share that takes no more turns: to be removed.
    ShareRemoved {
        /// Number of the share that is removed.
        share: LeaseId,
        /// Why it takes no more turns.
        reason: LeaveReason,
    },
    /// A lease that is over for long: to be removed.
    Forgotten {
        /// The lease to remove from the store.
        lease: LeaseId,
    },
}

impl Record {
    /// What it is stored under: a later record of the same key takes its place.
    pub fn key(&self) -> String {
        match self {
            Record::Host(host) => format!("host/{}", host.host),
            Record::HostRemoved { host } => format!("host/{host}"),
            Record::Function(function) => format!("function/{}", function.function),
            Record::Lease(lease) => format!("lease/{}", lease.lease),
            Record::NextLease { .. } => "next-lease".to_owned(),
            Record::Forgotten { lease } => format!("lease/{lease}"),
            Record::Composition(composition) => format!("composition/{}", composition.name),
            Record::Dissolved { name } => format!("composition/{name}"),
            Record::Share(share) => format!("share/{}", share.share),
            Record::ShareRemoved { share, .. } => format!("share/{share}"),
            Record::Device(change) => format!("device/{}", change.name()),
            Record::DeviceRemoved { host, device } => format!("device/{host}/{device}"),
        }
    }

    /// Whether what is stored under its key is removed, instead of replaced.
    pub fn removes(&self) -> bool {
        matches!(
            self,
            Record::Forgotten { .. }
                | Record::HostRemoved { .. }
                | Record::Dissolved { .. }
                | Record::DeviceRemoved { .. }
                | Record::ShareRemoved { .. }
        )
    }
}

/// Why a function cannot be borrowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BorrowRefused {
    /// Nobody offers such a function.
    #[error("no host offers {0}")]
    Unknown(FunctionId),
    /// Its host's node no longer offers it.
    #[error("{0} is no longer offered by its host")]
    Withdrawn(FunctionId),
    /// A lease that has not ended has it.
    #[error("{function} is lent to {borrower} (lease {lease})")]
    Held {
        /// The function, by its lender and its name there.
        function: FunctionId,
        /// The borrowing host's name in the rack file.
        borrower: String,
        /// The number of the lease by which it is had.
        lease: LeaseId,
        /// When it was asked for, on the authority's clock.
        since: Millis,
    },
    /// It is on its way back from somebody.
    #[error("{function} is being taken back from {borrower} (lease {lease})")]
    Returning {
        /// The function, by its lender and its name there.
        function: FunctionId,
        /// The borrowing host's name in the rack file.
        borrower: String,
        /// The number of the lease by which it is had.
        lease: LeaseId,
    },
    /// It is free, and others wait for it.
    #[error("{before} requests wait for {function} and come first")]
    Queued {
        /// The function, by its lender and its name there.
        function: FunctionId,
        /// How many come before this request.
        before: usize,
    },
    /// Others take turns on it.
    #[error("{function} is lent in turns to {shares} who share it")]
    Shared {
        /// The function, by its lender and its name there.
        function: FunctionId,
        /// How many take turns.
        shares: usize,
    },
    /// There is no such host.
    #[error("no host {0} has registered")]
    NoHost(String),
    /// A node that is needed has not registered since the authority started.
    #[error("the node of {0} has not registered yet since the control plane started")]
    Awaited(String),
    /// Its host's node has not taken its device on yet.
    #[error("the node of {host} has not taken {function} on yet", host = .0.host, function = .0)]
    Joining(FunctionId),
    /// A node that is needed is silent.
    #[error("the node of {host} has not been heard from for {silent_ms} ms")]
    Silent {
        /// The host's name in the rack file.
        host: String,
        /// Milliseconds since its node was heard.
        silent_ms: Millis,
    },
}

/// Why a lease cannot be returned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReturnRefused {
    /// There is no such lease.
    #[error("there is no lease {0}")]
    Unknown(LeaseId),
    /// It has ended already.
    #[error("lease {lease} has ended already: {reason}")]
    AlreadyEnded {
        /// The lease that was to be returned.
        lease: LeaseId,
        /// What ended the lease: users and events are told.
        reason: EndReason,
    },
}
