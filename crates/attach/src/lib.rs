#![deny(unsafe_code)]
//! A process on a host of the rack: its segments, those of others, interrupts, pages of the rack's
//! address space, and copies between them.
//!
//! ```no_run
//! use rackbus_attach::{Location, SegmentOptions, Session};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // On one host:
//! let session = Session::open(&Location::from_environment()?)?;
//! let segment = session.create_segment(&SegmentOptions::shared(4711, 1 << 20))?;
//! segment.set_available()?;
//!
//! // On another:
//! # let other = session.clone();
//! let remote = other.connect(4, 4711, 1_000)?;
//! let mapping = remote.map(0, 1 << 20)?;
//! mapping.whole().copy_from(b"seen by everybody who has it mapped");
//! # Ok(())
//! # }
//! ```
//!
//! What is mapped is memory: loads, stores and copies touch it with no software in between. The
//! node is asked only to make, connect and end things. When a host, a node or a process dies,
//! mappings stay where they are, with what they hold; who was connected is told ([`SegmentEvent`]).

mod carrying;
mod cmmc;
pub mod devices;
mod events;
mod guest;
mod interrupts;
mod line;
mod location;
mod locks;
mod memory;
mod pages;
pub mod private;
mod registry;
mod segments;
mod session;

pub use carrying::{CarriedCopy, CopySource};
pub use cmmc::{
    AreaKey, Copier, CopyError, ExportedArea, RemoteArea, Signal, SubmittedWrite, WriteNotice,
};
pub use events::{Callback, SegmentEvent, Watch};
pub use guest::WindowError;
pub use interrupts::{
    DataInterrupt, Interrupt, InterruptError, RemoteDataInterrupt, RemoteInterrupt,
};
pub use location::{Location, LocationError, NodeAddress};
pub use locks::{LOCK_BYTES, RackBarrier, RackMutex, RackMutexGuard};
pub use memory::Mapping;
pub use pages::{Extent, RemotePages};
pub use rackbus_memory::lock::{LockError, Locked};
pub use rackbus_segment::message::{
    BROADCAST_NODE, ConnectionChange, DeviceEntry, LockHolder, MAX_DATA, NodeId, Refusal,
    SegmentAccess, SegmentEntry, SegmentId, SegmentKind, Withdrawal,
};
pub use segments::{LocalSegment, RemoteSegment, SegmentOptions};
pub use session::{AttachError, Session};
