#![forbid(unsafe_code)]
//! Shared memory between hosts, as decisions: who has which segment, who may reach it, and who is
//! told what happened to it.
//!
//! * [`message`]: what processes, nodes and their peers say to each other.
//! * [`directory`]: one host's [`Directory`], the state machine behind its
//!   node's segment service.
//! * [`coherence`]: memory that two machines keep the same by messages.
//! * [`guest`]: how a process in a virtual machine says the same to the node outside of it.
//!
//! Pure: no I/O, no clock, no threads. Memory and interrupts are numbers here ([`ObjectId`]); the
//! shell holds the descriptors behind them and makes new ones when asked ([`directory::Objects`]).

pub mod coherence;
pub mod directory;
pub mod flushing;
pub mod guest;
pub mod landing;
pub mod message;

pub use directory::{Directory, DirectoryAction, Objects, Recipient};
pub use message::{Handle, NodeId, ObjectId, SegmentId, SessionId};
