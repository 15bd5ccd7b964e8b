#![forbid(unsafe_code)]
//! One host's node: it lends the host's functions and borrows others'.
//!
//! * [`lender`]: lends this host's functions to those that the lending protocol admits.
//! * [`lendable`]: what can be lent.
//! * [`borrower`]: serves each borrowed function as a vfio-user socket on this host.
//! * [`front`]: the front of a borrowed function that runs here, with its medium at the lender.
//! * [`sessions`]: what lets a front and its medium on another machine outlive a connection.
//! * [`remote`]: a function of another host, as the borrower's socket serves it.
//! * [`peers`]: functions of one user that reach each other's BARs.
//! * [`unplug`]: takes a function out of the VM that uses it.
//! * [`turns`]: the turns that this host has on functions that it shares.
//! * [`users`]: ends leases with the VM that used them.
//! * [`segments`]: shared memory between hosts: segments, interrupts, pages.
//! * [`network`]: the host's part in the rack's network: its ports, rings and interface.
//! * [`metrics`]: what is counted, for Prometheus.
//! * [`handover`]: restarts the node in place: another process goes on with all of it.
//! * [`agent`]: the node's side of the lending protocol.
//! * [`host`]: all of it together, as a process.

pub mod agent;
pub mod borrower;
pub mod front;
pub mod handover;
pub mod host;
pub mod lanes;
pub mod lendable;
pub mod lender;
pub mod lent_out;
mod mappings;
pub mod metrics;
pub mod network;
pub mod peers;
mod programs;
mod release;
pub mod remote;
mod report;
pub mod segments;
mod sequencer;
pub mod sessions;
mod term;
pub mod turns;
pub mod unplug;
pub mod upstream;
pub mod users;
pub mod vfio;
mod wired;

pub use borrower::{BorrowError, BorrowedFunctions};
pub use handover::{HandOverError, HandoverProgram, InheritedNode};
pub use host::{NodeError, NodeOptions, control_socket, resume, run};
pub use lanes::Lanes;
pub use lendable::{Lendable, Modelled};
pub use lender::{LendError, LentFunctions};
pub use network::NetworkService;
pub use remote::RemoteDevice;
