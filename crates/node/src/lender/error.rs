//! Why the lender refused.

use std::time::Duration;

use rackbus_fabric::UnknownPart;
use rackbus_lease::NotAdmitted;

/// Why the lender refused.
#[derive(Debug, thiserror::Error)]
pub enum LendError {
    /// The host has no such device.
    #[error("{host} has no device {device}; it has {available}")]
    NoDevice {
        /// Name of the node's host.
        host: String,
        /// What was asked for.
        device: String,
        /// Names of the devices that the host has, separated by commas.
        available: String,
    },
    /// The rack has no such function or borrower.
    #[error(transparent)]
    Unknown(#[from] UnknownPart),
    /// The lease does not let this borrower in now.
    #[error(transparent)]
    NotAdmitted(#[from] NotAdmitted),
    /// The device cannot be run.
    #[error("{device} cannot be run: {cause}")]
    Device {
        /// Name of the device on its host.
        device: String,
        /// The error that it failed with.
        cause: std::io::Error,
    },
    /// The service level cannot be kept, or there are none for such a function.
    #[error("{0}")]
    Level(String),
    /// Its engine hangs. Nothing of the old borrower's can be reached.
    #[error(
        "{device} does not answer for {limit:?}, most likely its storage hangs; what its borrower \
         had lent it is taken away, and it is offered again when it answers"
    )]
    Hangs {
        /// Name of the device on its host.
        device: String,
        /// How long was waited.
        limit: Duration,
    },
}
