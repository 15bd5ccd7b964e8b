//! One network over the fabric: Ethernet frames between the hosts of a rack, their guests, and an uplink.
//!
//! * [`address`]: Ethernet addresses.
//! * [`announce`]: a station tells where it is.
//! * [`ethernet`]: headers of frames. [`mtu`]: what is too large for a network, and who is told.
//! * [`offload`]: what a sender leaves to others to do to a frame.
//! * [`port`]: the end of the network that a device model or an interface holds.

#![forbid(unsafe_code)]

pub mod address;
pub mod announce;
pub mod ethernet;
pub mod mtu;
pub mod offload;
pub mod port;

pub use address::MacAddress;
pub use offload::Offload;
pub use port::{Cause, Frame, Network, Port, Sent};
