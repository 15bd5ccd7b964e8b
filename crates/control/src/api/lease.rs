//! A lease, as it is shown.

use rackbus_lease::Placement;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Where a lease stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LeaseStage {
    /// The lender is being told.
    Arming,
    /// The borrower is being told.
    Opening,
    /// It can be used.
    Active,
    /// The borrower is releasing the function.
    Closing,
    /// It was returned, or ended otherwise; [`Lease::reason`] says how.
    Ended,
}

/// The right of a host to use a function, for as long as it is renewed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Lease {
    /// Number of the lease, which no other lease ever gets.
    pub lease: u64,
    /// Name of the function, `HOST/DEVICE`.
    pub function: String,
    /// Name of the host that the function is at.
    pub lender: String,
    /// Name of the host that may use it.
    pub borrower: String,
    /// Fencing epoch: of the epochs of a function its lender lets in the newest only.
    pub epoch: u64,
    /// Where the function's front runs: at its lender, or at its borrower.
    #[serde(default)]
    #[schema(value_type = String)]
    pub placement: Placement,
    /// The user that it is for, among those of its borrower; nothing where it was asked for without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The service level that the lender promised, for a function of a class that has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<String>,
    /// Another level, which its lender was asked for and has not answered; `none` for what a lease without a level
    /// has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level_asked: Option<String>,
    /// How far lender and borrower have been told of it.
    pub stage: LeaseStage,
    /// Where the borrower serves the function (a vfio-user socket), while it is active; of placement `host`, the
    /// function's directory in that host's sysfs.
    pub socket: Option<String>,
    /// Why it is closing or ended.
    pub reason: Option<String>,
    /// Whether it was returned in order, or was a turn that was over.
    pub returned: bool,
    /// Number of the share whose turn it is; nothing where it is lent until it is returned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<u64>,
    /// The VM of its borrower that it was to be plugged into; nothing where it was asked for without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// When it was asked for, milliseconds since 1970.
    pub since_ms: u64,
    /// When it ended, milliseconds since 1970.
    pub until_ms: Option<u64>,
}
