//! The devices that a host can lend, one folder each. A device is a [`Function`]: a state machine
//! that is polled, with memory, interrupts and time handed in.
//!
//! [`Function`]: rackbus_pci::Function
//!
//! * [`class`]: what a class of devices is, and which there are.
//! * [`place`]: where a device's data is. [`lost`]: whether a front's medium is. `either`: waiting for
//!   one of two descriptors.
//! * [`nvme`]: NVMe drives. [`memory`]: memory in a BAR. [`accel`]: accelerators that tenants share.
//! * [`nic`]: network cards. [`virtio`]: what every virtio function has.
//! * [`upstream`]: what other programs serve. [`vfio`]: functions of the machine itself.
//! * [`ntb`]: a bridge between two machines, which is no class: nobody lends it.

pub mod accel;
pub mod class;
mod either;
mod front_exchange;
pub mod lost;
pub mod memory;
pub mod nic;
pub mod ntb;
pub mod nvme;
pub mod place;
pub mod upstream;
pub mod vfio;
pub mod virtio;

pub use class::{Class, DeviceConfig, FrontError, RackDevice};
pub use lost::Lost;
pub use place::{DataLocation, Folders};
