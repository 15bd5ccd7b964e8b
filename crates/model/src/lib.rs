#![forbid(unsafe_code)]
//! A timing model of the PCIe fabric: what latency and bandwidth a rack's flows will get, over the
//! same topology and routes as the live system.
//!
//! Pure: no clock, no I/O, no threads, no randomness of its own. The same inputs give the same
//! outputs in the same order.
//!
//! * [`time`]: integer picoseconds.
//! * [`wire`]: what bytes cost on a link.
//! * [`queue`]: pending events.
//! * [`timing`]: how long a rack's parts take, with sources.
//! * [`flow`]: the fair shares of many flows at once, without packets.
//! * [`engine`]: the simulation, packet by packet.
//! * [`assembly`]: a rack, put together for it.
//! * [`workload`]: what moves in a rack.
//! * [`picture`]: results as SVG.
//! * [`report`]: results as a page.
//! * [`mod@reproduce`]: the papers' figures, modelled.

pub mod assembly;
mod disjoint;
pub mod engine;
pub mod flow;
pub mod picture;
pub mod queue;
pub mod random;
pub mod report;
pub mod reproduce;
pub mod time;
pub mod timing;
pub mod wire;
pub mod workload;
