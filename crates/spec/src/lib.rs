#![forbid(unsafe_code)]
//! The standards as types: what is on the wire and in the registers, each item with the section
//! that defines it. No behaviour lives here, and nothing here judges what it holds.

pub mod nvme;
pub mod pcie;
pub mod vfio_user;
