//! Devices that join and leave a running rack, as stored.
//!
//! What the rack file lists is lent from the start of its node. What differs from that is a [`DeviceChange`]: a device
//! that was offered since, or one of the file's that was withdrawn. The authority says it to the device's host until the
//! node has answered, and again to each new life of the node, which knows the rack file only.

use serde::{Deserialize, Serialize};

use crate::authority::BorrowRefused;
use crate::message::{FunctionId, Incarnation, LeaseId};

/// A device that differs from what the rack file lists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceChange {
    /// The host that has it.
    pub host: String,
    /// Its name there: `accel0`.
    pub device: String,
    /// Which change it is: taken from the numbers of leases, so a later one of the same device has a greater number.
    pub number: LeaseId,
    /// Names of the functions that are lent of it: `accel0.vf1`, or the device's own.
    pub functions: Vec<String>,
    /// What the rack file would say of it; none where it is withdrawn.
    pub section: Option<String>,
    /// What it said of a device that is withdrawn: its functions are known until its node has released it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub was: Option<String>,
    /// The rack file lists it: a new life of its node lends it unless told otherwise.
    #[serde(default)]
    pub listed: bool,
    /// Its host's node has it from a file of its own, and withdraws it when that does not name it any more.
    #[serde(default)]
    pub by_node: bool,
    /// What the node answered, in which life.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<DeviceAnswer>,
}

/// What a node did about a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceAnswer {
    /// The life of the node that answered.
    pub incarnation: Incarnation,
    /// It is done; or why it cannot be, for people.
    pub outcome: Result<(), String>,
}

impl DeviceChange {
    /// Whether `device` of `host` is meant, or a function of it.
    pub fn has(&self, function: &FunctionId) -> bool {
        self.host == function.host && self.functions.contains(&function.device)
    }

    /// Whether it withdraws the device of a function.
    pub fn withdraws(&self, function: &FunctionId) -> bool {
        self.section.is_none() && self.has(function)
    }

    /// Its functions in the rack.
    pub fn function_ids(&self) -> impl Iterator<Item = FunctionId> {
        let id = |device: &String| FunctionId { host: self.host.clone(), device: device.clone() };
        self.functions.iter().map(id)
    }

    /// What the node answered in this life of it; an earlier life's answer holds no more.
    pub fn answer_in(&self, life: Option<Incarnation>) -> Option<&Result<(), String>> {
        let answer = self.answer.as_ref().filter(|answer| Some(answer.incarnation) == life)?;
        Some(&answer.outcome)
    }

    /// Why its node could not do it.
    pub fn failure(&self) -> Option<&str> {
        self.answer.as_ref()?.outcome.as_ref().err().map(String::as_str)
    }

    /// Its name in the rack: `alpha/accel0`.
    pub fn name(&self) -> String {
        format!("{}/{}", self.host, self.device)
    }
}

/// Why a device cannot be offered or withdrawn now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceRefused {
    /// There is another device of that name.
    #[error("there is a device {0} already")]
    Exists(String),
    /// It is being withdrawn.
    #[error("{0} is being withdrawn")]
    Leaving(String),
    /// A function of it is in use.
    #[error("{function} is lent to {borrower} (lease {lease})")]
    Held {
        /// The function, by its lender and its name there.
        function: FunctionId,
        /// The host that borrowed it.
        borrower: String,
        /// The lease by which it did.
        lease: LeaseId,
    },
    /// Borrowers take turns on a function of it.
    #[error("{function} is lent in turns to {shares} who share it")]
    Shared {
        /// The function, by its lender and its name there.
        function: FunctionId,
        /// How many take turns.
        shares: usize,
    },
    /// Its host's node cannot be asked.
    #[error(transparent)]
    Host(#[from] BorrowRefused),
}
