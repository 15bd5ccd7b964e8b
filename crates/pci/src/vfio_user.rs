//! The vfio-user protocol: how QEMU, cloud-hypervisor or a userspace driver uses a function that
//! another process runs.
//!
//! The protocol's messages pass memory and interrupts as descriptors, as its specification says, so this module and its
//! callers do, too: over the conversations beneath they are handles ([`wire`] turns the ones into the others).
//!
//! * [`wire`]: messages with their descriptors over a UNIX stream.
//! * [`device`]: [`ServedDevice`], what a server serves; an [`EngineHandle`](crate::EngineHandle) is one.
//! * [`server`]: one connection's conversation. [`socket`]: a listener that gives each its own thread.
//! * [`bars`]: what the user has of a function's BARs as memory, as loans.
//! * [`requests`]: what a device asks of its user: DMA by messages.
//! * [`session`]: a conversation as a value, for another process to go on with.
//! * [`passthrough`]: the same of a function that no engine here runs.
//! * [`shown`]: the kind of interrupts that a function is shown with.
//! * [`client`]: the other side, used by borrowers, drivers and tests.

pub mod bars;
pub mod client;
pub mod device;
pub mod local;
pub mod passthrough;
pub mod requests;
pub mod server;
pub mod session;
pub mod shown;
pub mod socket;
pub mod wire;

pub use bars::SharedBars;
pub use client::{Client, ClientError};
pub use device::{
    DeviceShape, EngineDevice, RegionShape, RequestRefused, ServedDevice, SharedPart,
};
pub use local::{LocalFunction, serve_function};

pub use passthrough::{PassthroughSession, UserMapping, UserResources};
pub use requests::{RequestError, Requests};
pub use server::serve;
pub use session::{
    Ended, RestingConversation, SavedSession, SessionState, serve_until, serve_within,
};
pub use shown::{ShownInterrupts, ShownWith};
pub use socket::{Opener, RestingClient, ResumedClient, Server};
