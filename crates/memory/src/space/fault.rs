//! Why a DMA is refused, and what refusals are counted by.

use rackbus_fabric::{Fault, FaultCause};

/// A DMA that was refused, as a completer abort would be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DmaFault {
    /// No mapping covers the range, or not with this access.
    #[error("{0}")]
    Domain(#[from] Fault),
    /// The range is mapped, but its owner gave no descriptor for it, so there is no memory to reach.
    #[error("DMA to {address:#x}+{length:#x}: the mapping has no memory behind it")]
    NoMemory {
        /// First address of the access.
        address: u64,
        /// Its length in bytes.
        length: u64,
    },
    /// The function may not master the bus (its command register says no).
    #[error("DMA to {address:#x}+{length:#x}: bus mastering is off")]
    NotMaster {
        /// First address of the access.
        address: u64,
        /// Its length in bytes.
        length: u64,
    },
    /// The owner of the memory truncated it; what was there is gone.
    #[error("DMA to {address:#x}+{length:#x}: the memory's owner truncated its file")]
    Truncated {
        /// First address of the access.
        address: u64,
        /// Its length in bytes.
        length: u64,
    },
}

impl DmaFault {
    /// What refusals are counted by.
    pub(crate) const CAUSES: [&str; 7] = [
        "not mapped",
        "denied",
        "past the address space",
        "empty",
        "no memory",
        "bus mastering is off",
        "truncated",
    ];

    /// Its place in [`CAUSES`](DmaFault::CAUSES).
    pub(crate) fn cause(&self) -> usize {
        match self {
            DmaFault::Domain(fault) => match fault.cause {
                FaultCause::NotMapped => 0,
                FaultCause::Denied => 1,
                FaultCause::Wraps => 2,
                FaultCause::Empty => 3,
            },
            DmaFault::NoMemory { .. } => 4,
            DmaFault::NotMaster { .. } => 5,
            DmaFault::Truncated { .. } => 6,
        }
    }
}
