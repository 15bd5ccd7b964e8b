//! Memory whose front runs on another machine: each access is a question to the node that has the bytes.
//!
//! The front's BAR has no memory to be mapped, so every load and store of its user comes to the [`RemoteMemory`], which asks
//! and waits for the answer. So accesses take effect once and in the order in which they were made, a load gives what is there
//! at that moment, and a store is in the lender's memory when it is over. Between two turns of an engine nothing is under way, at
//! neither end.

mod port;
mod remote;
#[cfg(test)]
mod tests;

pub(super) use port::MemoryPort;
pub(super) use remote::RemoteMemory;

use rackbus_memory::ExchangeLayout;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// One question at a time, with as many bytes as users usually ask for at once.
pub const LAYOUT: ExchangeLayout = ExchangeLayout { tags: 1, data_bytes: 64 << 10 };
/// The tag of every question: there is one under way at a time.
const TAG: u32 = 0;

/// What an [`Ask`] asks for.
mod kind {
    /// The lender puts the bytes of the range into the place.
    pub const READ: u8 = 1;
    /// The lender writes the bytes in the place to the range.
    pub const WRITE: u8 = 2;
}

/// What the front sends for one access of its user's to the memory.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Ask {
    offset: U64,
    length: U32,
    kind: u8,
    spare: [u8; 3],
}

/// What the lender sends back when the access was made or refused.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Answer {
    /// 1 where it was done.
    done: U32,
}
