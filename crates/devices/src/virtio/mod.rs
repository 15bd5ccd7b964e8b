//! What every virtio function has: registers, feature negotiation, and virtqueues, for whatever device is behind
//! them.
//!
//! * [`transport`]: the registers in BAR 0 and what they mean; interrupts. [`layout`]: where they are, and the
//!   capabilities that say so. [`saved`]: all of it as a value.
//! * [`ring`]: a virtqueue as a device uses it, split or packed. [`chain`]: the buffers of one request.
//!
//! Everything in memory is its driver's, who may change it at any time: each field is read once, and what it says is
//! checked before it is used. What no driver may do makes the function [need a reset](DriverFault); no other function
//! notices.

pub mod chain;
pub mod layout;
mod packed;
pub mod ring;
pub mod saved;
mod split;
pub mod transport;

#[cfg(test)]
mod tests;

pub use chain::{Buffer, BufferChain};
pub use ring::{QueueError, UsedRequest, VirtioRing};
pub use transport::{RegisterWrite, Transport};

/// What a driver did that none may do: the device needs a reset then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DriverFault {
    /// The available index moved by more than the queue has.
    #[error("the available index is further ahead than the queue is long")]
    Index,
    /// A descriptor that the queue does not have.
    #[error("a descriptor outside of its table")]
    Outside,
    /// A chain goes in a circle, or is longer than the queue.
    #[error("a chain that is longer than its queue or table")]
    Chain,
    /// A table in a table, or one that continues.
    #[error("a table of descriptors in a table, or in the middle of a chain")]
    Nested,
    /// The length of a table is no number of descriptors.
    #[error("a table of descriptors of a wrong length")]
    Table,
    /// What the device reads is behind what it writes.
    #[error("a buffer to be read behind one to be written")]
    Order,
    /// There is no room for what every buffer of the queue has.
    #[error("a buffer without room for its header")]
    Header,
    /// A queue was enabled with a size or addresses that it cannot have.
    #[error("a queue that was enabled with a wrong size or place")]
    Queue,
    /// The queue's memory could not be reached for too long.
    #[error("a queue or buffer in memory that the function does not reach")]
    Unreachable,
}
