#![forbid(unsafe_code)]
//! A timing model of the PCIe fabric: what latency and bandwidth a rack's flows will get, over the
//! same topology and routes as the live system.
//!
//! Pure: no clock, no I/O, no threads, no randomness of its own. The same inputs give the same
//! outputs in the same order.
//!
//! * [`time`]: integer picoseconds, and rates.

pub mod time;
