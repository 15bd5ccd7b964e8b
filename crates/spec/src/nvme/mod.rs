//! NVM Express, base specification 1.4 (with its NVM command set), as types.
//!
//! Layouts and constants only. Each item names the section it comes from; section numbers are
//! those of "NVM Express Base Specification, Revision 1.4". All multi-byte fields are little
//! endian on the wire, which is the byte order of every host that rackbus runs on; the check
//! below keeps that assumption honest.

pub mod command;
pub mod completion;
pub mod data;
pub mod features;
pub mod identify;
pub mod log;
pub mod registers;
pub mod status;

pub use command::{AdminOpcode, IoOpcode, Sqe};
pub use completion::Cqe;
pub use status::Status;

const _: () = assert!(cfg!(target_endian = "little"));

/// The NSID that addresses every namespace attached to the controller (section 6.1.2).
pub const NSID_ALL: u32 = 0xffff_ffff;

/// PCI class code of an I/O controller that speaks NVMe: base 01h, sub-class 08h, interface 02h
/// (section 2.1.5).
pub const CLASS_CODE: u32 = 0x01_08_02;

/// The version number of revision 1.4 as register VS and the Identify data carry it
/// (section 3.1.2).
pub const VERSION_1_4: u32 = 0x0001_0400;
