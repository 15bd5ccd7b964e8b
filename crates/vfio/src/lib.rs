//! PCI functions of this machine in the hands of a process: Linux' VFIO, and what sysfs says of functions.
//!
//! A function is taken from its driver ([`Binding`]), put into a [`Container`] (an IOMMU domain, which
//! reaches nothing but what is mapped there), and opened ([`VfioDevice`]): its registers, its configuration
//! space, its interrupts by eventfd, its resets.
//!
//! * [`facts`]: functions, their IOMMU groups, drivers, BARs and virtual functions as sysfs has them; reads a
//!   folder that is given.
//! * [`binding`]: takes functions from their drivers and gives them back, also after a crash. [`taker`]: whether who took
//!   one still runs.
//! * [`container`]: IOMMU domains. [`faults`]: what they refused.
//! * [`device`]: functions in use. [`reset`]: how they are reset.
//! * `kernel`: the requests themselves.
//!
//! The container is the kernel's interface of groups and type 1 IOMMUs, which every kernel has that has VFIO.
//! iommufd, which takes its place in newer ones, differs in how a container is made and mapped, and in nothing
//! that [`VfioDevice`] or its users see.
//!
//! Source: Linux, `Documentation/driver-api/vfio.rst` and `include/uapi/linux/vfio.h`.

pub mod binding;
pub mod container;
pub mod device;
mod error;
pub mod facts;
pub mod faults;
mod kernel;
pub mod reset;
pub mod taker;
mod usable;

pub use binding::{Binding, Bindings, TakenFunction};
pub use container::{Container, RangeTarget};
pub use device::{InterruptIndex, PassedOnFunction, RegionFacts, VfioDevice};
pub use error::VfioError;
pub use facts::{Facts, PciAddress, Sysfs};
pub use faults::{FaultLog, IommuFault};
pub use reset::ResetMethod;
pub use taker::TakerProcess;
