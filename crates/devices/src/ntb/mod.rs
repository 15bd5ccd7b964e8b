//! A non-transparent bridge (NTB) in software: two PCI functions, one in each of two machines, that reach each
//! other's memory.
//!
//! Both ends have the register model of Intel's adapters of the third generation (8086:201c), as Linux'
//! `ntb_hw_intel` drives them: doorbells, scratchpads, link state, and two windows through which one machine
//! accesses the other's bus addresses.
//!
//! * [`map`]: the registers' places. [`registers`]: what they do, of both ends, without any I/O.
//! * [`counters`]: what went through.
//! * [`end`]: one end as a vfio-user device. [`bridge`]: both with their sockets.

pub mod bridge;
mod config;
pub mod counters;
pub mod end;
pub mod map;
mod register;
pub mod registers;

#[cfg(test)]
mod tests;

pub use bridge::{Bridge, BridgeConfig, BridgeError, EndConfig};
pub use counters::{BridgeCounters, BridgeCounts};
pub use registers::{BridgeEffects, BridgeRegisters, BridgeSide, BridgeWindows, Miss};
