//! One network over the fabric: Ethernet frames between the hosts of a rack, their guests, and an uplink.
//!
//! * [`address`]: Ethernet addresses. [`addressing`]: which ones the stations of a rack have.
//! * [`announce`]: a station tells where it is.
//! * [`ethernet`]: headers of frames. [`mtu`]: what is too large for a network, and who is told.
//! * [`offload`]: what a sender leaves to others to do to a frame.
//! * [`cut`]: what is done to a frame whose receiver takes no offloads.
//! * [`local`]: a switch of one process, for devices that no node lends.
//! * [`port`]: the end of the network that a device model or an interface holds.
//! * [`switch`]: who receives a frame, and who may send it (pure). [`vlan`]: the VLANs that a port is in.
//! * [`neighbours`]: who asks where a station is gets the answer from its own node (pure).
//! * [`learning`]: addresses behind ports that are no stations' own (pure).
//! * [`pressure`]: for how long a sender waits for a receiver (pure). [`liveness`]: whether that is frozen (pure).
//! * [`uplink`]: which of the uplinks is used.
//! * [`port_queue`]: a port over rings in shared memory. [`counters`]: what it counts.
//! * [`capture`]: frames as a file for Wireshark.

#![forbid(unsafe_code)]

pub mod address;
pub mod addressing;
pub mod announce;
mod beginning;
pub mod capture;
pub mod counters;
pub mod cut;
pub mod ethernet;
pub mod fragment;
mod ipv6;
pub mod learning;
pub mod liveness;
pub mod local;
pub mod mtu;
pub mod neighbours;
pub mod offload;
pub mod port;
pub mod port_queue;
pub mod pressure;
pub mod switch;
pub mod uplink;
pub mod vlan;

pub use address::MacAddress;
pub use addressing::{Station, StationKind, Stations};
pub use local::LocalNetwork;
pub use offload::Offload;
pub use port::{Cause, Frame, NetworkPort, PortOptions, PortSource, SendOutcome};
pub use port_queue::{News, PortQueue, PortQueueHandle, PortQueueId, RingOpener};
pub use rackbus_fabric::rack::PortRules;
pub use switch::StationSwitch;
