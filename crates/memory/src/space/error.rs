//! Why memory cannot be mapped for a function.

use rackbus_fabric::{LoanError, SpaceError};

use crate::region::RegionError;

/// Why a range could not be mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The domain refuses the range (empty, wrapping, overlapping).
    #[error(transparent)]
    Domain(#[from] rackbus_fabric::DomainMapError),
    /// The fabric does not lend it.
    #[error(transparent)]
    Lend(LoanError),
    /// The descriptor cannot be mapped.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The function has as many mappings as it may.
    #[error("the function already has {0} mappings, the most it may have")]
    TooMany(usize),
    /// All functions of the process together have as many mappings as the system allows.
    #[error("the functions of this host have {0} mappings together, the most there may be")]
    Exhausted(usize),
    /// The function's mappings, or those of all functions of the process together, take as many addresses as they may.
    #[error(
        "the mappings would take more than {0} bytes of the addresses of this host's process, the most there may be"
    )]
    TooManyBytes(u64),
    /// The user's memory was taken away; nothing of it comes back.
    #[error("the function's memory was taken away from it")]
    Revoked,
}

impl From<LoanError> for MapError {
    fn from(error: LoanError) -> MapError {
        match error {
            LoanError::Space(SpaceError::Range(range)) => MapError::Domain(range),
            other => MapError::Lend(other),
        }
    }
}
