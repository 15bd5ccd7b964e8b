//! Why the lender refused.

use std::time::Duration;

use rackbus_fabric::UnknownPart;
use rackbus_lease::{ArmFailure, NotAdmitted};

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

impl From<LendError> for ArmFailure {
    fn from(error: LendError) -> ArmFailure {
        match error {
            LendError::Level(reason) => ArmFailure::refusal(reason),
            other => ArmFailure::broken(other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_that_cannot_be_kept_is_refused_and_a_device_that_cannot_be_run_fails() {
        let level = LendError::Level("3 Gbit/s would fit".to_owned());
        assert_eq!(ArmFailure::from(level), ArmFailure::refusal("3 Gbit/s would fit".to_owned()));
        let device = "accel0".to_owned();
        let broken = LendError::Device { device, cause: std::io::Error::other("no memory") };
        let told = "accel0 cannot be run: no memory".to_owned();
        assert_eq!(ArmFailure::from(broken), ArmFailure::broken(told));
    }
}
