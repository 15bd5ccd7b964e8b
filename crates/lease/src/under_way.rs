//! What a node was told to do and has not reported as done.

use std::fmt;

use crate::message::LeaseId;

/// A step of a lease that a node is carrying out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UnderWay {
    /// The device is made ready for a borrower.
    Arming(String),
    /// The device is taken back from a borrower.
    Revoking(String),
    /// The service level of the device's borrower is changed.
    Level(String),
    /// The device is taken on, or released.
    Device(String),
    /// The socket of a lease is made.
    Opening(LeaseId),
    /// The socket of a lease is closed, after its user released it.
    Closing(LeaseId),
}

impl fmt::Display for UnderWay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UnderWay::Arming(device) => write!(f, "{device} is being made ready"),
            UnderWay::Revoking(device) => write!(f, "{device} is being taken back"),
            UnderWay::Level(device) => write!(f, "the service level of {device} is being changed"),
            UnderWay::Device(device) => write!(f, "{device} is being offered or withdrawn"),
            UnderWay::Opening(lease) => write!(f, "lease {lease} is being opened"),
            UnderWay::Closing(lease) => write!(f, "lease {lease} is being closed"),
        }
    }
}
