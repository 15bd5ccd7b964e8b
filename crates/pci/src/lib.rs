//! A PCI function: what every function has in common, and how others reach one.
//!
//! * [`function`]: the [`Function`] trait, which is all a device model implements.
//! * [`config`]: its configuration space, driven by a table of fields.
//! * [`interrupts`]: MSI-X and INTx as eventfds.
//! * [`endpoint`]: the three above together with its DMA space: one whole function.
//! * `shared`: when an engine that shares its processor leaves it for an idle one.
//! * [`state`]: a function as a value, to continue with in another process.
//! * [`operations`]: what a function has done, and how long it took.
//! * [`machine`]: functions of this machine, for drivers in user space.
//! * [`pace`]: when an engine polls, spins and sleeps.
//! * [`engine`]: the thread that runs an endpoint, and the handle others talk to it through.
//! * [`polled`]: registers as plain memory, which the engine looks at.
//! * [`programmed`]: where a function decodes its BARs, read from its configuration space.
//! * [`user`]: whether a function's user is still there.
//! * [`vfio_user`]: the protocol by which QEMU and userspace drivers use a function.

pub mod config;
pub mod endpoint;
pub mod engine;
pub mod function;
pub mod interrupts;
pub mod machine;
pub mod operations;
pub mod pace;
pub mod polled;
pub mod programmed;
mod shared;
pub mod state;
pub mod user;
pub mod vfio_user;

pub use endpoint::Endpoint;
pub use engine::{Engine, EngineHandle};
pub use function::{
    Bar, BarMemory, Bus, Function, FunctionInfo, Health, Mappable, MediumAccess, MediumOffer,
    MediumRefused, ResetKind, VendorCapability, Work,
};
pub use interrupts::{Interrupts, Mode};
pub use operations::Operations;
pub use polled::{NotPolled, PolledRegisters, WatchedRegisters, WatchedState};
pub use state::{FunctionState, ModelState, RestoreError, SaveError, Saved};
