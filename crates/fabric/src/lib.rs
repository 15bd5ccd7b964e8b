#![forbid(unsafe_code)]
//! The fabric: address spaces, windows, IOMMU domains and routes, as pure decisions.

pub mod domain;

pub use domain::{Access, Domain, Fault, FaultCause, Hit, MapError, Mapping, UnmapError};
