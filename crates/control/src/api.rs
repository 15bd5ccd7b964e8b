//! What the API says: the bodies of requests and answers, as programs and the command line see them.

mod accelerator;
mod borrow;
mod device;
mod event;
mod lease;
mod path;
mod rack;
mod report;
mod traffic;

pub use accelerator::{
    AcceleratorChoice, AcceleratorOffer, AcceleratorRoom, EngineCost, device_of,
};
pub use borrow::{BorrowRequest, Isolation, LONGEST_LEVEL, LONGEST_WAIT_MS};
pub use device::{Device, DeviceState, PeerReport, PeerWindowReport};
pub use event::{Change, EventKind, EventRecord};
pub use lease::{Lease, LeaseStage};
pub use path::{AccessPath, Crossing, Hop};
pub use rack::{HostState, HostStatus, RackStatus};
pub use rackbus_lease::Placement;
pub use report::{
    DeviceReport, LATENCY_BOUNDS_NS, MediumLinkReport, NodeMessages, NodeReport, OperationReport,
    RdmaLaneReport, ReportedIdentity,
};
use serde::{Deserialize, Serialize};
pub(crate) use traffic::bound_traffic;
pub use traffic::{PeerTraffic, PortTraffic, traffic};
use utoipa::ToSchema;

/// Something went wrong, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema, thiserror::Error)]
#[error("{error}; {remedy}")]
pub struct ApiError {
    /// A word for programs: `held`, `unknown_function`, …
    pub code: String,
    /// What went wrong, in one line for people.
    pub error: String,
    /// What the user can do about it, in one line.
    pub remedy: String,
    /// Who has the function, when that is the cause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
    /// Number of the lease that has the function, where one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<u64>,
    /// Of an accelerator that was asked for by its level: what each one that has a function free would keep, the largest
    /// offer first; nothing with other errors.
    // In a box, as errors are passed on often, and these seldom.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<AcceleratorOffer>>)]
    pub offers: Option<Box<Vec<AcceleratorOffer>>>,
}

impl ApiError {
    /// An error with its word for programs and its remedy.
    pub fn new(code: &str, error: String, remedy: &str) -> ApiError {
        ApiError {
            code: code.to_owned(),
            error,
            remedy: remedy.to_owned(),
            holder: None,
            lease: None,
            offers: None,
        }
    }
}
