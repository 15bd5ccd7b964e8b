#![forbid(unsafe_code)]
//! The standards as types, and the accelerator's interface beside them: what is on the wire and in the registers,
//! each item with the section that defines it. No behaviour lives here, and nothing here judges what it holds.

pub mod accel;
pub mod nvme;
pub mod pcie;
pub mod vfio_user;
pub mod virtio;
