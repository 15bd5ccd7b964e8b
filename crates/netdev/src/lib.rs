//! Network interfaces of this machine, as Linux has them.
//!
//! * [`tap`]: interfaces whose frames a process takes and gives.
//! * [`unread`]: what these lose when it does not.
//! * [`namespace`]: named network namespaces.
//! * [`packet`]: interfaces whose frames a process takes as a switch does.
//! * [`xdp`]: the same past the kernel's network stack.
//! * [`configure`]: an interface's addresses and neighbours.

mod bpf;
pub mod configure;
mod mapped;
pub mod namespace;
pub mod packet;
pub mod tap;
pub mod unread;
pub mod xdp;
