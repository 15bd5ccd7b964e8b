//! Accelerators that tenants share: each has a virtual function of its own, with rings in its memory,
//! and all of a device's functions lead to one pool of engines behind one shaper.
//!
//! * [`class`]: what the rack file says of one.
//! * [`function`]: a virtual function: registers, doorbells, interrupts. `queue`: a queue pair of it. `polled`: registers
//!   that its driver has as memory.
//!   `request`: what a descriptor asks for, checked. `contexts`: keys and patterns. `waiting`:
//!   descriptors that wait for something. `saved`: all of it as a value.
//! * `medium`: what does a function's operations: engines of the same process, or of the lender's node.
//! * [`pool`]: the engines' threads, and the shaper ([`rackbus_qos`]) that they ask what to do.
//!   `job`: an operation between the two; `outbox`: those that have ended. `at_once`: short ones, which the
//!   function's own thread does. `course`: an operation on its way through its engines; `pipeline`: those, one behind
//!   the other. `clock`: what it took.
//! * [`engines`]: what is computed. [`profile`]: what that costs here, measured. `capacity`: how much of it all engines do
//!   together, measured too.

mod at_once;
mod buffer;
mod capacity;
pub mod class;
mod clock;
mod contexts;
mod course;
pub mod engines;
pub mod function;
mod gather;
mod job;
mod medium;
mod outbox;
mod pipeline;
mod polled;
pub mod pool;
pub mod profile;
mod queue;
mod request;
mod saved;
mod scratch;
mod waiting;

#[cfg(test)]
mod tests;

pub use class::AcceleratorClass;
pub use function::Accelerator;
pub use medium::{LAYOUT as MEDIUM_LAYOUT, front, front_again};
pub use pool::{EnginePool, PoolEngines, PoolOptions};
pub use request::{CheckedDescriptor, check};

/// What is wrong with a medium that is to be gone on with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MediumError(&'static str);

/// The name of the class.
pub const CLASS: &str = "accelerator";
/// Queue pairs of a function.
pub const QUEUES: u16 = 8;
/// Entries of a ring at most.
pub const ENTRIES: u16 = 4096;
/// Contexts of a function at most.
pub const CONTEXTS: u16 = 256;
/// Bytes of a message at most.
pub const LARGEST: u32 = rackbus_qos::level::LARGEST as u32;
