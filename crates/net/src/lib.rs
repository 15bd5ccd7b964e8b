//! One network over the fabric: Ethernet frames between the hosts of a rack, their guests, and an uplink.
//!
//! * [`address`]: Ethernet addresses.
//! * [`offload`]: what a sender leaves to others to do to a frame.
//! * [`cut`]: what is done to a frame whose receiver takes no offloads.
//! * [`local`]: a switch of one process, for the functions of one network card.
//! * [`port`]: the end of the network that a device model or an interface holds.

#![forbid(unsafe_code)]

pub mod address;
pub mod cut;
pub mod local;
pub mod offload;
pub mod port;

pub use address::MacAddress;
pub use local::LocalNetwork;
pub use offload::Offload;
pub use port::{Cause, Frame, Network, Port, PortOptions, Sent};
