//! Network cards: virtual functions that any guest's own virtio-net drives, each at a port of its lender's network.
//!
//! * [`class`]: what the rack file says of one.
//! * [`function`]: a virtual function: registers, polling, sleeping. `transmit`, `receive`: frames between its queues
//!   and its port; `commands`: its control queue. `counters`: what it counts. `saved`: all of it as a value.
//! * [`medium`]: the two ends where the front runs elsewhere than the port.
//! * [`features`]: what is offered to drivers, and what they may accept together.
//! * [`control`]: the control queue's commands. [`filter`]: which frames a driver wants. [`steering`]: which queue a
//!   frame goes to. All of them pure.
//!
//! A frame is copied once on each side: from the driver's buffers to the port's ring, and from there to the buffers of
//! the receiver's driver. Between two polls nothing is under way.

pub mod class;
mod commands;
pub mod control;
mod counters;
pub mod features;
pub mod filter;
pub mod function;
pub mod medium;
mod port;
mod receive;
mod saved;
mod shaper;
pub mod steering;
mod transmit;

#[cfg(test)]
mod tests;

pub use class::NicClass;
pub use counters::NicCounters;
pub use function::{Nic, NicOptions};

/// The name of the class.
pub const CLASS: &str = "nic";
/// Pairs of queues at most.
pub const MOST_PAIRS: u16 = 16;
