#![forbid(unsafe_code)]
//! Virtual machines as borrowers: stock QEMU, stock kernels, borrowed functions.
//!
//! rackbus changes neither the VM monitor nor the guest. What it knows of a VM is here: the QEMU
//! arguments that let a function be seen and hot-plugged ([`spec`]), QEMU's own control protocol
//! ([`qmp`]), the guests that set-up prepares and the commands they run for the host ([`assets`],
//! [`agent`]), what nodes are told of functions and of who borrows them ([`interrupts`], [`lasting`],
//! [`process`]), where the VMs of a host are to be found ([`registry`]), and a VM's life ([`machine`]), with memory that comes and goes ([`memory`]); and machines that stand for hosts, for
//! tests of what runs on bare metal ([`metal`]).

pub mod agent;
pub mod assets;
pub mod interrupts;
pub mod lasting;
pub mod machine;
pub mod memory;
pub mod metal;
pub mod process;
pub mod qmp;
pub mod registry;
pub mod spec;

mod error;

pub use agent::{CommandOutput, GuestAgent};
pub use assets::{Acceleration, Assets, GuestRelease};
pub use error::VmError;
pub use interrupts::InterruptChoice;
pub use machine::{UNPLUG, Vm};
pub use memory::PluggedMemory;
pub use metal::{BareMetalMachine, MachineSpec, NetworkCable, SharedNetwork};
pub use process::ProcessName;
pub use qmp::Qmp;
pub use registry::{Plugged, VmRecord};
pub use spec::{Boot, Console, FunctionSpec, VmIommu, VmSpec};

/// An outcome with this crate's [`VmError`].
pub type Result<T> = std::result::Result<T, VmError>;
