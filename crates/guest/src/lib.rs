#![forbid(unsafe_code)]
//! Segments in virtual machines: a file system device for a guest, whose files are the host's memory.
//!
//! The guest's own virtiofs driver mounts it. A process in the guest opens a session there and says what a
//! process on a host says to its node; the node's answers come with files, and a file that is mapped is
//! mapped by QEMU into the device's memory window. So loads and stores of the guest touch the segment's
//! memory, with no software in between.
//!
//! * [`fuse`]: the guest's requests, and their answers (pure).
//! * [`state`]: which files, sessions and mappings there are, and what is to be done (pure).
//! * [`journal`]: all that happens, so that a second process can go on when the first one dies (pure).
//! * [`service`]: the device at QEMU's vhost-user socket, and the sockets to the node.
//!
//! Nothing that the guest's kernel says is trusted: its root may send any request. What a guest may reach,
//! the node decides, as for every process of the host that the guest is for; this holds only what the node
//! has passed.

pub mod fuse;
pub mod journal;
pub mod service;
pub mod state;

pub use service::{ServeError, ServingEnd, StandbyStart, serve, stand_by};
