//! What authority and nodes say to each other.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::change::LevelChange;
use crate::share::{TurnOf, TurnUse};

/// Milliseconds since any fixed moment.
pub type Millis = u64;
/// A lease's number, never used twice in a rack.
pub type LeaseId = u64;
/// A function's fencing epoch: each lease of the function has a greater one.
pub type Epoch = u64;
/// Which life of a node: each start of its process has a greater one.
pub type Incarnation = u64;

/// A function by its lender and its name there: `alpha/nvme0`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct FunctionId {
    /// The lending host's name in the rack file.
    pub host: String,
    /// The device's name on it.
    pub device: String,
}

impl fmt::Display for FunctionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.host, self.device)
    }
}

/// Not a function's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no function; write HOST/DEVICE, for example alpha/nvme0")]
pub struct BadFunctionId(pub String);

impl FromStr for FunctionId {
    type Err = BadFunctionId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('/') {
            Some((host, device))
                if !host.is_empty() && !device.is_empty() && !device.contains('/') =>
            {
                Ok(FunctionId { host: host.to_owned(), device: device.to_owned() })
            }
            _ => Err(BadFunctionId(text.to_owned())),
        }
    }
}

impl From<FunctionId> for String {
    fn from(id: FunctionId) -> String {
        id.to_string()
    }
}

impl TryFrom<String> for FunctionId {
    type Error = BadFunctionId;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

/// Where the front of a lent function runs: its registers, queues, DMA and interrupts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// In the lender, where the borrower's memory is mapped: nothing lies between the function and
    /// that memory.
    #[default]
    Lender,
    /// In the borrower's node. The link carries the operations of its medium, and the lender never
    /// has memory of the borrower's.
    Borrower,
    /// In the device itself: it appears in the borrower's own PCI tree, through an NTB, and the borrower's kernel
    /// drives it.
    Host,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Placement::Lender => "lender",
            Placement::Borrower => "borrower",
            Placement::Host => "host",
        })
    }
}

/// What is asked for besides a function and who shall have it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Terms {
    /// Where the function's front runs.
    #[serde(default)]
    pub placement: Placement,
    /// The user that it is for, among those of its borrower: functions of one group reach each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The service level, as its class of devices writes it, which the lender promises or refuses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<String>,
    /// The VM of its borrower that it is plugged into; none where it is for a program, or for a VM that is yet to start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// The process of its borrower that starts what will use it, as that host's node reads it: the lease ends with it, if
    /// nobody has used the function by then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub starter: Option<String>,
}

impl From<Placement> for Terms {
    fn from(placement: Placement) -> Terms {
        Terms { placement, ..Terms::default() }
    }
}

/// A lease as its borrower learns it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// The lease's number, which no other lease ever gets.
    pub lease: LeaseId,
    /// The function, by its lender and its name there.
    pub function: FunctionId,
    /// The lease's fencing epoch; a lender lets in the newest that it was armed for.
    pub epoch: Epoch,
    /// Where the lender's link listens.
    pub address: String,
    /// How long the lease lives without being renewed, in milliseconds.
    pub ttl: Millis,
    /// Where the function's front runs.
    #[serde(default)]
    pub placement: Placement,
    /// The user that it is for: functions of one group reach each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The share whose turn it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<TurnOf>,
    /// The VM that it is plugged into before it is [opened](Message::Opened); a turn's is said by its `turn`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// The process of its borrower that starts what will use it, as that host's node reads it: the lease ends with it, if
    /// nobody has used the function by then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub starter: Option<String>,
    /// Whether it ends here by this node's clock when its renewals are not answered: see
    /// [`Config::strict_ttl`](crate::Config::strict_ttl).
    #[serde(default, skip_serializing_if = "is_false")]
    pub strict_ttl: bool,
}

/// Whether a field is left out where it is written.
fn is_false(value: &bool) -> bool {
    !value
}

impl Grant {
    /// Whether `other` is the same lease, reached at the same place. Its time to live may differ: a
    /// control plane that was started anew may have another. So may whose start it waits for, of which an older one does not
    /// know.
    pub fn same_lease(&self, other: &Grant) -> bool {
        let Grant {
            lease,
            function,
            epoch,
            address,
            ttl: _,
            placement,
            group,
            turn,
            vm,
            starter: _,
            strict_ttl: _,
        } = self;
        (lease, function, epoch, address, placement, group, turn, vm)
            == (
                &other.lease,
                &other.function,
                &other.epoch,
                &other.address,
                &other.placement,
                &other.group,
                &other.turn,
                &other.vm,
            )
    }
}

/// A message between the authority and a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Message {
    /// Node: this host is up. Also says that it is still there.
    Register {
        /// Which life of the node.
        incarnation: Incarnation,
        /// The devices it lends, each with the newest epoch that this life was told of.
        devices: BTreeMap<String, Epoch>,
        /// The greatest lease number that this life was told of.
        newest_lease: LeaseId,
        /// Where its link listens.
        address: String,
    },
    /// Authority: the registration holds.
    Registered {
        /// The life it holds for.
        incarnation: Incarnation,
    },
    /// Authority: a later life of this host was seen already (a clock went back); start from it.
    StaleIncarnation {
        /// The life that registered.
        incarnation: Incarnation,
        /// The latest life seen.
        latest: Incarnation,
    },
    /// Authority to lender: let this lease's borrower in.
    Arm {
        /// The lender's life that is meant.
        incarnation: Incarnation,
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The lease's number, which no other lease ever gets.
        lease: LeaseId,
        /// The lease's fencing epoch; a lender lets in the newest that it was armed for.
        epoch: Epoch,
        /// The borrowing host's name in the rack file.
        borrower: String,
        /// Where the function's front runs.
        #[serde(default)]
        placement: Placement,
        /// The service level that is asked for, as the class of the device writes it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        level: Option<String>,
        /// For how long the lender serves it by its own clock without an [`Extend`](Message::Extend), in milliseconds;
        /// none where it serves it until it is told to [`Revoke`](Message::Revoke).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        serve_for: Option<Millis>,
    },
    /// Authority to lender: the borrower renewed this lease, which is armed.
    Extend {
        /// The lender's life that is meant.
        incarnation: Incarnation,
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The lease's fencing epoch.
        epoch: Epoch,
        /// When the borrower sent the renewal, by the borrower's clock.
        sent: Millis,
    },
    /// Lender: it serves the epoch for its time to live from now on.
    Extended {
        /// Which start of the lender's node says so.
        incarnation: Incarnation,
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The lease's fencing epoch.
        epoch: Epoch,
        /// What [`Extend`](Message::Extend) said.
        sent: Millis,
    },
    /// Lender: the epoch is armed.
    Armed {
        /// Which start of the lender's node says so.
        incarnation: Incarnation,
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The lease's fencing epoch; a lender lets in the newest that it was armed for.
        epoch: Epoch,
        /// The newest change of the lease's level that was made or refused, of which whoever asks may not know.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        change: Option<LevelChange>,
    },
    /// Lender: the epoch cannot be armed: the device is broken, or the service level cannot be kept.
    ArmFailed {
        /// Which start of the lender's node says so.
        incarnation: Incarnation,
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The lease's fencing epoch; a lender lets in the newest that it was armed for.
        epoch: Epoch,
        /// What prevented or ended it, for people.
        reason: String,
        /// Nothing is broken: the device does not give what was asked for, such as a level that it cannot keep.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        refused: bool,
    },
    /// Authority to lender: this lease, which is armed, is to have another service level from now on.
    SetLevel {
        /// The lender's life that is meant.
        incarnation: Incarnation,
        /// The device's name at its lender: `accel0.vf1`.
        device: String,
        /// The lease's fencing epoch.
        epoch: Epoch,
        /// Which change of this lease's level it is; later ones have greater numbers.
        number: u64,
        /// The level, as the class of the device writes it; none for what anybody gets.
        level: Option<String>,
    },
    /// Lender: the outcome of the newest change of a lease's service level.
    LevelSet {
        /// Which start of the lender's node says so.
        incarnation: Incarnation,
        /// The device's name at its lender: `accel0.vf1`.
        device: String,
        /// The lease's fencing epoch.
        epoch: Epoch,
        /// Which change of this lease's level it is.
        number: u64,
        /// The level that was asked for.
        level: Option<String>,
        /// It is in force; or why not, for people. Then the level before goes on.
        outcome: Result<(), String>,
    },
    /// Authority to lender: take the function back from this epoch and all older ones.
    Revoke {
        /// The lender's life that is meant.
        incarnation: Incarnation,
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The lease's fencing epoch; a lender lets in the newest that it was armed for.
        epoch: Epoch,
    },
    /// Lender: nothing of this epoch is reachable any more; the function is reset and scrubbed.
    Revoked {
        /// Which start of the lender's node says so.
        incarnation: Incarnation,
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The lease's fencing epoch; a lender lets in the newest that it was armed for.
        epoch: Epoch,
    },
    /// Authority to lender: lend this device too.
    Offer {
        /// The lender's life that is meant.
        incarnation: Incarnation,
        /// The device's name at its lender: `accel0`.
        device: String,
        /// Which change of the rack's devices it is; a later one of this device has a greater number.
        number: LeaseId,
        /// Names of the functions that are lent of it.
        functions: Vec<String>,
        /// What the rack file would say of it.
        section: String,
    },
    /// Lender: the outcome of an offer.
    Offered {
        /// Which start of the lender's node says so.
        incarnation: Incarnation,
        /// The device's name at its lender: `accel0`.
        device: String,
        /// Which change of the rack's devices it is.
        number: LeaseId,
        /// It is lent: its functions, each with the newest epoch that this life was told of. Or why not, for people.
        outcome: Result<BTreeMap<String, Epoch>, String>,
    },
    /// Authority to lender: release this device, which nobody has borrowed.
    Withdraw {
        /// The lender's life that is meant.
        incarnation: Incarnation,
        /// The device's name at its lender: `accel0`.
        device: String,
        /// Which change of the rack's devices it is; a later one of this device has a greater number.
        number: LeaseId,
        /// Names of the functions that were lent of it.
        functions: Vec<String>,
    },
    /// Lender: the device is closed, and lent no more.
    Withdrawn {
        /// Which start of the lender's node says so.
        incarnation: Incarnation,
        /// The device's name at its lender: `accel0`.
        device: String,
        /// Which change of the rack's devices it is.
        number: LeaseId,
    },
    /// Authority to borrower: the function is yours.
    Granted(Grant),
    /// Borrower: its end is open, or cannot be opened.
    Opened {
        /// The lease's number, which no other lease ever gets.
        lease: LeaseId,
        /// Where the function is served, or why it is not.
        outcome: Result<String, String>,
    },
    /// Borrower: the lease is still wanted.
    Renew {
        /// The lease's number, which no other lease ever gets.
        lease: LeaseId,
        /// Which start of the borrower's node says so.
        incarnation: Incarnation,
        /// When it was sent, by the borrower's clock; none where no [`Renewed`](Message::Renewed) is waited for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sent: Option<Millis>,
    },
    /// Authority to borrower: the lease was renewed, and its lender has heard of it.
    Renewed {
        /// The lease's number, which no other lease ever gets.
        lease: LeaseId,
        /// What [`Renew`](Message::Renew) said.
        sent: Millis,
    },
    /// Borrower: the lender is gone.
    Lost {
        /// The lease's number, which no other lease ever gets.
        lease: LeaseId,
        /// How that was noticed.
        reason: String,
    },
    /// Authority to borrower: the lease is over; release the function.
    Ended {
        /// The lease's number, which no other lease ever gets.
        lease: LeaseId,
        /// What prevented or ended it, for people.
        reason: String,
        /// How long a guest has to release it, in milliseconds; none where the lease has ended already.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        within: Option<Millis>,
    },
    /// Authority to borrower: the turn that this lease is, is over. Its user is to be told, and may take so long to
    /// released it; then the lease is over.
    TurnOver {
        /// The lease's number, which no other lease ever gets.
        lease: LeaseId,
        /// How long a program has to release it, in milliseconds.
        grace: Millis,
        /// How long a guest has to release it, in milliseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        within: Option<Millis>,
    },
    /// Borrower: the turn that this lease is, is not needed any more.
    TurnUsed {
        /// The lease's number, which no other lease ever gets.
        lease: LeaseId,
        /// Whether anybody used it.
        how: TurnUse,
    },
    /// Borrower: its end is closed.
    Closed {
        /// The lease's number, which no other lease ever gets.
        lease: LeaseId,
    },
}
