//! Network interfaces of this machine, as Linux has them.
//!
//! * [`tap`]: interfaces whose frames a process takes and gives.
//! * [`namespace`]: named network namespaces.
//! * [`configure`]: an interface's addresses and neighbours.

pub mod configure;
pub mod namespace;
pub mod tap;
