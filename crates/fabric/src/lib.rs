#![forbid(unsafe_code)]
//! The fabric: address spaces, windows, IOMMU domains and routes, as pure decisions.
//!
//! * [`domain`]: a map from addresses to targets with access rights: an IOMMU domain, or a
//!   host's address space.
//! * [`pool`]: the hosts' exported memory in one address space of the rack.
//! * [`rack`]: the rack file; [`text`]: how files that people write are read.
//! * [`sharing`]: who may use whose segments.
//! * [`topology`]: hosts, what they are made of, what joins them; [`mod@derive`] makes it of a rack.
//! * [`loan`]: who reaches what of others, at this moment, in the live system.
//! * [`peer`]: which functions of one user reach each other's BARs.
//! * [`demand`]: the way of an access whose target is mapped when it is asked for.
//! * [`system`]: all of it together, and the two questions: what memory is that
//!   ([`Fabric::resolve`]), and which way does it go ([`Fabric::route`])?

mod coverage;
pub mod demand;
pub mod derive;
pub mod domain;
pub mod loan;
mod names;
pub mod peer;
pub mod pool;
pub mod rack;
mod search;
pub mod sharing;
pub mod system;
pub mod text;
pub mod topology;
mod values;

pub use demand::{DemandMapped, Destination, WayError};
pub use domain::{
    Access, Domain, DomainMapError, DomainMapping, Fault, FaultCause, Hit, UnmapError,
};
pub use loan::{
    BarPlace, CountedBytes, FabricHandle, Lending, LentMemory, Loan, LoanEnd, LoanError, Reached,
    UnknownPart,
};
pub use system::{
    AccessError, AddressTarget, Fabric, FunctionInterrupt, ObjectKey, Place, Requester, Resolved,
    Route, SpaceError,
};
pub use topology::{
    ComponentId, ComponentKind, FabricPath, HostId, Topology, TopologyError, TopologyLink,
};
