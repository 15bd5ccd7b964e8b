#![forbid(unsafe_code)]
//! The fabric: address spaces, windows, IOMMU domains and routes, as pure decisions.
//!
//! * [`domain`]: a map from addresses to targets with access rights: an IOMMU domain, or a
//!   host's address space.
//! * [`pool`]: the hosts' exported memory in one address space of the rack.
//! * [`rack`]: the rack file; [`text`]: how files that people write are read.
//! * [`sharing`]: who may use whose segments.
//! * [`topology`]: hosts, what they are made of, what joins them; [`mod@derive`] makes it of a rack.
//! * [`loan`]: what lent functions reach, kept for the live system.
//! * [`system`]: all of it together, and the two questions: what memory is that
//!   ([`Fabric::resolve`]), and which way does it go ([`Fabric::route`])?

pub mod derive;
pub mod domain;
pub mod loan;
mod names;
pub mod pool;
pub mod rack;
mod search;
pub mod sharing;
pub mod system;
pub mod text;
pub mod topology;
mod values;

pub use domain::{Access, Domain, Fault, FaultCause, Hit, MapError, Mapping, UnmapError};
pub use loan::Loan;
pub use system::{AccessError, Fabric, Place, Requester, Resolved, Route, SpaceError, Target};
pub use topology::{ComponentId, HostId, Kind, Link, Path, Topology, TopologyError};
