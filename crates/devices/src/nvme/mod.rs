//! An NVMe drive: a controller to the NVM Express base specification 1.4 and its NVM command set.
//!
//! * [`config`]: what a drive is made of. `class`: what the rack file says of one.
//! * `controller`: the state machine of the controller. `service`: the loop over its queues.
//! * `registers`, `polled`, `shadow`, `queue`: what the host and the controller share.
//! * `admin`, `io`: the commands. `transfer`: their data pointers. `jobs`: those in the background.
//! * `identify`, `features`, `logs`, `events`: what the host may ask, set and hear.
//! * `arbitration`: which queue has its turn. [`limits`]: what may be done in a second. `interrupts`: when to interrupt the host.
//! * `buffer`, `persistent`: the controller's own memory, behind BARs; the second outlives it.
//! * `saved`: all of that as a value, to continue with in another process.
//! * [`backing`]: where the data lives. `parts`: who has which part of a drive with several functions.

mod admin;
mod arbitration;
pub mod backing;
mod buffer;
mod class;
pub mod config;
mod controller;
mod events;
mod features;
mod identify;
mod interrupts;
mod io;
mod jobs;
pub mod limits;
mod logs;
pub mod medium;
mod operations;
mod parts;
mod persistent;
mod polled;
mod queue;
mod registers;
mod saved;
mod service;
mod shadow;
mod state;
mod transfer;

#[cfg(test)]
mod tests;

pub use class::DriveClass;
pub use config::{BackingConfig, NvmeConfig, NvmeError};
pub use controller::Nvme;
pub use identify::VENDOR_ID;
pub use shadow::need_event;
