//! Remote memory access (RDMA) through libfabric: what moves the data of borrowed drives beside the link.
//!
//! libfabric is a C library that knows network adapters by *providers*: `verbs` for InfiniBand, RoCE and iWARP, `efa`,
//! `cxi`, `opx`, `psm2`; and `tcp` and `shm`, which need no adapter. It is loaded at run time, by its stable interface
//! ([`Library`]); where it is not installed, nothing changes. A lender exposes the places of one session
//! ([`RmaTarget`]), and offers a [`LaneOffer`]; the borrower moves data between these and its own ([`Initiator`]). What moves
//! when is decided by [`rackbus_memory::exchange::lane`].

mod abi;
mod choice;
mod endpoint;
mod initiator;
mod library;
mod target;

use serde::{Deserialize, Serialize};

pub use choice::{ProviderChoice, providers};
pub use initiator::Initiator;
pub use library::{LIBRARY_ENV, Library};
pub use target::RmaTarget;

/// What a borrower needs to reach the memory that a lender exposes. It goes over the link, which is encrypted.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneOffer {
    /// The provider, by libfabric's name.
    pub provider: String,
    /// Address of the lender's endpoint, in hexadecimal digits.
    pub address: String,
    /// Address of the memory, as the provider counts.
    pub base: u64,
    /// The key to it.
    pub key: u64,
    /// What is found in the memory if it is the right one, in hexadecimal digits.
    pub proof: String,
}

impl std::fmt::Debug for LaneOffer {
    /// Without what opens the memory.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let LaneOffer { provider, address, .. } = self;
        let mut shown = f.debug_struct("LaneOffer");
        shown.field("provider", provider).field("address", address).finish_non_exhaustive()
    }
}

/// Why there is no lane.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RmaError {
    /// The library is not there.
    #[error(
        "libfabric cannot be loaded: {0}; install it (Debian: libfabric1), or set `rdma = \"off\"`"
    )]
    Library(String),
    /// The library does not find a provider of that name.
    #[error(
        "libfabric finds no provider `{0}` for remote memory access here; `fi_info` lists those it finds"
    )]
    Provider(String),
    /// A call has failed.
    #[error("libfabric's {call}: {cause}")]
    Call {
        /// The function of the interface.
        call: &'static str,
        /// The library's description of the error.
        cause: String,
    },
    /// The other side's offer is none.
    #[error("the lender's offer of a lane is not valid")]
    Offer,
}

/// Hexadecimal digits of `bytes`.
fn digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes with these hexadecimal digits, if they are such and at most `most`.
fn bytes(digits: &str, most: usize) -> Option<Vec<u8>> {
    if !digits.is_ascii() || !digits.len().is_multiple_of(2) || digits.len() / 2 > most {
        return None;
    }
    let pairs = (0..digits.len()).step_by(2).map(|at| digits.get(at..at + 2));
    pairs.map(|pair| u8::from_str_radix(pair?, 16).ok()).collect()
}
