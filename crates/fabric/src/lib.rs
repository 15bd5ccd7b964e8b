#![forbid(unsafe_code)]
//! The fabric: address spaces, windows, IOMMU domains and routes, as pure decisions.
//!
//! * [`domain`]: an IOMMU domain, a map from addresses to targets with access rights.
//! * [`rack`]: the rack file.

pub mod domain;
pub mod rack;

pub use domain::{Access, Domain, Fault, FaultCause, Hit, MapError, Mapping, UnmapError};
