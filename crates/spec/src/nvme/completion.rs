//! Completion queue entries (section 4.6).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::status::Status;

/// Size of a completion queue entry in bytes (section 4.6).
pub const CQE_SIZE: usize = 16;

/// A completion queue entry (section 4.6).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Cqe {
    /// Dword 0: command specific.
    pub dw0: u32,
    /// Dword 1: reserved in revision 1.4.
    pub dw1: u32,
    /// SQ Head Pointer: entries before it may be written again.
    pub sq_head: u16,
    /// SQ Identifier: the queue that the command came by.
    pub sq_id: u16,
    /// Command Identifier, as the command has it.
    pub cid: u16,
    /// Bit 0 is the Phase Tag, bits 15:1 are the Status Field.
    pub status_phase: u16,
}
const _: () = assert!(size_of::<Cqe>() == CQE_SIZE);

impl Cqe {
    /// The Phase Tag (section 4.6).
    pub const fn phase(&self) -> bool {
        self.status_phase & 1 != 0
    }

    /// The Status Field (section 4.6.1).
    pub const fn status(&self) -> Status {
        Status(self.status_phase >> 1)
    }
}
