//! What the API says: the bodies of requests and answers, as programs and the command line see them.

use std::time::Duration;

pub use rackbus_lease::Placement;
use rackbus_lease::{Message, Terms};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::levels::check_level;
use crate::shares::Turns;
use crate::usage::LeaseReport;

/// The rack as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RackStatus {
    /// Name of the rack, as its file says.
    pub rack: String,
    /// Version of the control plane.
    pub version: String,
    /// How long this control plane has been running, in milliseconds.
    pub uptime_ms: u64,
    /// Process id of the control plane.
    pub pid: u32,
    /// All hosts of the rack file, in its order.
    pub hosts: Vec<HostStatus>,
    /// Leases that are not over.
    pub live_leases: usize,
    /// Requests refused since the control plane started.
    pub refused: u64,
    /// Decisions that could not be stored, and were taken back, since the control plane started.
    pub store_failures: u64,
    /// Lines that the control plane left out of its log, because too many said the same.
    pub log_lines_left_out: u64,
    /// What went wrong lately, newest first: leases that ended without being returned.
    pub incidents: Vec<Lease>,
}

/// How a host's node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum HostState {
    /// Its node is connected to the control plane.
    Up,
    /// Was there, and is not connected now.
    Down,
    /// Named in the rack file, never seen.
    NeverSeen,
}

/// A host of the rack, and what its node says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostStatus {
    /// Name of the host in the rack file.
    pub host: String,
    /// How its node is.
    pub state: HostState,
    /// When it was last heard from, milliseconds ago.
    pub heard_ms_ago: Option<u64>,
    /// How often its node was cut off because it took nothing of what was said to it.
    pub overruns: u64,
    /// Lines that its node left out of its log, because too many said the same.
    pub log_lines_left_out: u64,
    /// Where its link listens.
    pub address: Option<String>,
    /// How many functions it offers.
    pub offers: usize,
    /// How many leases it holds as borrower.
    pub borrows: usize,
    /// What its processes share, and who is connected to it, by name.
    #[serde(default)]
    pub shared_memory: std::collections::BTreeMap<String, u64>,
    /// Conversations that other nodes have with its node, by what they are for.
    #[serde(default)]
    pub conversations: std::collections::BTreeMap<String, u64>,
}

/// Where a function stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeviceState {
    /// Nobody has it; it can be borrowed.
    Offered,
    /// A lease has it.
    Lent,
    /// On its way back: revoked, reset, scrubbed.
    Returning,
    /// Its host's node is down.
    Unreachable,
    /// Its host's node never offered it, or no longer does.
    Absent,
}

/// A function of the rack file, and who has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Device {
    /// Name of the function, `HOST/DEVICE`: `alpha/nvme0`.
    pub function: String,
    /// What it is: `nvme`.
    pub kind: String,
    /// Its size and where its data lives, for people.
    pub detail: String,
    /// Whether it can be borrowed now.
    pub state: DeviceState,
    /// The host that has it.
    pub holder: Option<String>,
    /// Number of the lease that has it; none when nobody does.
    pub lease: Option<u64>,
    /// The newest epoch given out.
    pub epoch: u64,
    /// Requests that wait for it.
    #[serde(default)]
    pub waiting: usize,
    /// The turns that borrowers take on it; nothing where none do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turns: Option<Turns>,
    /// What its node says of it; nothing while the node is not there.
    pub report: Option<DeviceReport>,
    /// What the borrower's node says of the front that it runs for the function; nothing where the
    /// lender runs it.
    #[serde(default)]
    pub front: Option<DeviceReport>,
    /// What it reaches of other functions of the same user, as the borrower's node says; nothing where it
    /// reaches none.
    #[serde(default)]
    pub peers: Option<PeerReport>,
}

/// What a function reaches of others that the same user has borrowed: peer-to-peer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct PeerReport {
    /// Parts of their BARs.
    pub reaches: Vec<PeerWindowReport>,
    /// What it does not reach although it is decoded, and why.
    pub refused: Vec<String>,
}

/// A part of a BAR of another function, within reach of a function's DMA.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PeerWindowReport {
    /// Where the user has programmed it to be: the function's address for it.
    pub address: u64,
    /// Its length in bytes.
    pub length: u64,
    /// Name of the function whose BAR it is, `HOST/DEVICE`.
    pub function: String,
    /// The BAR, 0 to 5.
    pub bar: u8,
    /// Where it begins in the BAR, in bytes.
    pub offset: u64,
}

/// What a node says of one of its functions, every few seconds. Counts are since the function's
/// engine was started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct DeviceReport {
    /// What is wrong with it.
    pub trouble: Option<String>,
    /// Bytes that it read by DMA from BARs of other functions.
    pub peer_bytes_read: u64,
    /// Bytes that it wrote by DMA to BARs of other functions.
    pub peer_bytes_written: u64,
    /// Accesses to memory that were refused to it.
    pub dma_refused: u64,
    /// The same, by cause.
    pub dma_refused_by_cause: std::collections::BTreeMap<String, u64>,
    /// The last of them.
    pub last_refused: Option<String>,
    /// Borrowers that were not let in, because no lease or another one has it.
    pub attach_refused: u64,
    /// Why, the last time.
    pub last_attach_refused: Option<String>,
    /// Polls of its engine that found work.
    pub busy_polls: u64,
    /// Times that its engine went to sleep.
    pub parks: u64,
    /// Times that somebody woke it; other sleeps were ended by a timer.
    pub wakeups: u64,
    /// Register accesses, mappings and resets that its engine carried out.
    pub jobs: u64,
    /// Times that its engine went to another processor.
    pub moves: u64,
    /// When this was counted, in milliseconds since its node was started.
    pub counted_ms: u64,
    /// What a shaper did for its user, by name: `engine_ns`, `throttled`. Nothing where there is none.
    pub shaping: std::collections::BTreeMap<String, u64>,
    /// What it has done, by kind of operation (`read`); kinds of which there was none are left out.
    pub operations: std::collections::BTreeMap<String, OperationReport>,
    /// The service level that its user was promised.
    pub level: Option<String>,
    /// What the lease that has it used so far, where there is a shaper.
    pub lease: Option<LeaseReport>,
    /// The same of the lease that ended last.
    pub last_lease: Option<LeaseReport>,
    /// The link to its medium, where its front runs on another machine than that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<MediumLinkReport>,
}

/// The link between a front and its medium on another machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct MediumLinkReport {
    /// For how long it has been lost, in milliseconds; absent while it is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost_ms: Option<u64>,
    /// How often it was lost and resumed.
    pub resumed: u64,
    /// For how long it was lost the last time that it was resumed, in milliseconds.
    pub last_lost_ms: u64,
    /// Operations that were sent again when it was resumed, since their arrival was not known.
    pub repeated: u64,
}

/// Upper bounds, in nanoseconds, of the times that [`OperationReport::latency`] counts by: 100 ns to
/// 10 s, six to a power of ten.
pub const LATENCY_BOUNDS_NS: [u64; 49] = {
    let mut bounds = [0; 49];
    let (mut at, mut decade) = (0, 100);
    while at < bounds.len() {
        // In percent, so that they are whole numbers.
        let step = [100, 150, 200, 300, 500, 700][at % 6];
        bounds[at] = decade * step / 100;
        at += 1;
        if at % 6 == 0 {
            decade *= 10;
        }
    }
    bounds
};

/// Operations of one kind. Counts are since the function's engine was started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct OperationReport {
    /// How many ended, those that failed among them.
    pub done: u64,
    /// How many of them ended with an error.
    pub failed: u64,
    /// Bytes that they moved.
    pub bytes: u64,
    /// Nanoseconds that all took together.
    pub total_ns: u64,
    /// How many took at most the bound in the same place of the bounds 100, 150, 200, 300, 500, 700,
    /// 1000, ... nanoseconds up to 10 s, and longer than the one before. A last number, where there is
    /// one, counts those that took longer. Zeroes at the end are left out.
    pub latency: Vec<u64>,
}

impl OperationReport {
    /// What was done since `earlier`, a report of the same engine.
    #[must_use]
    pub fn since(&self, earlier: &OperationReport) -> OperationReport {
        let before = earlier.latency.iter().copied().chain(std::iter::repeat(0));
        OperationReport {
            done: self.done.saturating_sub(earlier.done),
            failed: self.failed.saturating_sub(earlier.failed),
            bytes: self.bytes.saturating_sub(earlier.bytes),
            total_ns: self.total_ns.saturating_sub(earlier.total_ns),
            latency: self.latency.iter().zip(before).map(|(a, b)| a.saturating_sub(b)).collect(),
        }
    }

    /// The nanoseconds within which this part (0 to 1) of the operations ended, guessed within the
    /// bounds it lies between; none when there were no operations, infinite beyond the last bound.
    pub fn percentile_ns(&self, part: f64) -> Option<f64> {
        let all: u64 = self.latency.iter().sum();
        let wanted = (all as f64 * part).max(f64::MIN_POSITIVE);
        let mut before = 0;
        for (at, count) in self.latency.iter().enumerate() {
            let until = before + count;
            if *count > 0 && until as f64 >= wanted {
                let Some(upper) = LATENCY_BOUNDS_NS.get(at) else { return Some(f64::INFINITY) };
                let lower = at.checked_sub(1).map_or(0, |at| LATENCY_BOUNDS_NS[at]) as f64;
                let within = (wanted - before as f64) / *count as f64;
                return Some(lower + (*upper as f64 - lower) * within);
            }
            before = until;
        }
        None
    }
}

/// What a node says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct NodeReport {
    /// Its functions, by their names there.
    pub devices: std::collections::BTreeMap<String, DeviceReport>,
    /// Functions of others whose fronts run there, by their names in the rack.
    pub fronts: std::collections::BTreeMap<String, DeviceReport>,
    /// What functions that its host has borrowed reach of others of the same user, by their names in the
    /// rack; those that reach none, and are refused none, are left out.
    pub peers: std::collections::BTreeMap<String, PeerReport>,
    /// Lines left out of its log.
    pub log_lines_left_out: u64,
    /// When it was said, in milliseconds since the node was started.
    pub counted_ms: u64,
    /// What its host's processes share, and who is connected to it, by name.
    pub shared_memory: std::collections::BTreeMap<String, u64>,
    /// Conversations that other nodes have with it, by what they are for.
    pub conversations: std::collections::BTreeMap<String, u64>,
    /// How often it was restarted in place since it was started.
    pub restarts_in_place: u64,
    /// How long it answered nobody at the last of these restarts, in microseconds.
    pub restart_pause_us: u64,
}

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
    /// The borrower is letting go.
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
    /// When it was asked for, milliseconds since 1970.
    pub since_ms: u64,
    /// When it ended, milliseconds since 1970.
    pub until_ms: Option<u64>,
}

/// Asks for a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BorrowRequest {
    /// Name of the function that is asked for, `HOST/DEVICE`.
    pub function: String,
    /// The host that shall have it.
    pub borrower: String,
    /// What the lender must not be able to do.
    #[serde(default)]
    pub isolation: Isolation,
    /// Where the function's front shall run, `lender` or `borrower`; nothing lets the isolation
    /// decide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub placement: Option<Placement>,
    /// The user that it is for, among those of the borrower: functions of one group reach each other's
    /// memory by DMA. At most 64 letters, digits, `.`, `_` and `-`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The service level that the lender is to promise: `aes256gcm 4 Gbit/s`. Refused, with what would
    /// fit, where it cannot be kept, and for functions of a class that has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<String>,
    /// How long to wait for the function while others have it, in milliseconds, at most a day; nothing:
    /// not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
    /// Of those who wait, the greatest comes first.
    #[serde(default)]
    pub priority: u8,
}

/// The longest time that a request may wait: a day, in milliseconds.
pub const LONGEST_WAIT_MS: u64 = 24 * 60 * 60 * 1000;

/// The longest service level, in bytes: it is kept with the lease, and said again until it is answered.
pub const LONGEST_LEVEL: usize = 256;

/// How far a borrower trusts its lender.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Isolation {
    /// The lender reaches what the borrower's driver maps for the function.
    #[default]
    Shared,
    /// The lender has no memory of the borrower's.
    Strict,
}

impl BorrowRequest {
    /// A function for a host, with nothing particular asked for.
    pub fn new(function: &str, borrower: &str) -> BorrowRequest {
        let (function, borrower) = (function.to_owned(), borrower.to_owned());
        BorrowRequest {
            function,
            borrower,
            isolation: Isolation::Shared,
            placement: None,
            group: None,
            level: None,
            wait_ms: None,
            priority: 0,
        }
    }

    /// How long to wait for a function that others have.
    ///
    /// # Errors
    /// When that is too long.
    pub fn wait(&self) -> Result<Option<Duration>, ApiError> {
        match self.wait_ms {
            Some(ms) if ms > LONGEST_WAIT_MS => Err(ApiError {
                code: "bad_request".to_owned(),
                error: format!("a request cannot wait for {ms} ms"),
                remedy: "wait for a day at most, and ask again".to_owned(),
                holder: None,
                lease: None,
            }),
            wait => Ok(wait.map(Duration::from_millis)),
        }
    }

    /// On which terms it is asked for.
    ///
    /// # Errors
    /// When what is asked for contradicts itself, or the group has no name.
    pub fn terms(&self) -> Result<Terms, ApiError> {
        let named = |group: &String| {
            let known = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            (1..=64).contains(&group.len()) && group.chars().all(known)
        };
        if let Some(group) = self.group.as_ref().filter(|group| !named(group)) {
            return Err(ApiError {
                code: "bad_name".to_owned(),
                error: format!("`{group}` is no name of a group"),
                remedy: "write up to 64 letters, digits, dots, underscores and hyphens".to_owned(),
                holder: None,
                lease: None,
            });
        }
        check_level(self.level.as_deref())?;
        Ok(Terms {
            placement: self.placed()?,
            group: self.group.clone(),
            level: self.level.clone(),
        })
    }

    /// Where the function's front runs.
    ///
    /// # Errors
    /// When what is asked for contradicts itself.
    pub fn placed(&self) -> Result<Placement, ApiError> {
        match (self.isolation, self.placement) {
            (Isolation::Strict, Some(Placement::Lender)) => Err(ApiError {
                code: "contradiction".to_owned(),
                error: "strict isolation and a front at the lender exclude each other: the lender \
                        would have memory of the borrower's"
                    .to_owned(),
                remedy: "ask for placement `borrower`, or for no placement".to_owned(),
                holder: None,
                lease: None,
            }),
            (Isolation::Strict, Some(Placement::Host)) => Err(ApiError {
                code: "contradiction".to_owned(),
                error: "strict isolation and placement `host` exclude each other: through an NTB's window the \
                        lender's device reaches all of the borrower's memory that the window covers"
                    .to_owned(),
                remedy: "ask for placement `borrower`, or do without strict isolation".to_owned(),
                holder: None,
                lease: None,
            }),
            (Isolation::Strict, _) => Ok(Placement::Borrower),
            (Isolation::Shared, asked) => Ok(asked.unwrap_or_default()),
        }
    }
}

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
}

/// Messages of the lending protocol from a node, and what it says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeMessages {
    /// In the order they were said.
    #[schema(value_type = Vec<Object>)]
    pub messages: Vec<Message>,
    /// How it is; nothing where that is not said now.
    #[serde(default)]
    pub report: Option<NodeReport>,
}

/// What changed, as `/v1/changes` streams it: a line of JSON each, with the whole new state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "change", rename_all = "snake_case")]
pub enum Change {
    /// A lease is new or moved on.
    Lease(Lease),
    /// A function's state changed.
    Device(Box<Device>),
    /// A host's node came or went.
    Host(HostStatus),
}

/// What an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// A function was offered, lent, or returned in order.
    Lease,
    /// A lease ended otherwise than by its return, or a function is no longer offered.
    Loss,
    /// A request was refused, or a borrower was not let in.
    Refusal,
    /// Something does not work: an access to memory that no mapping covers, a device that hangs.
    Fault,
    /// The control plane or a node was started.
    Restart,
}

/// Something that happened, as it is kept: up to 10,000 of them, for up to 30 days.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Its number; later ones are greater.
    pub id: u64,
    /// When it was decided or heard of, milliseconds since 1970.
    pub at_ms: u64,
    /// What it is about.
    pub kind: EventKind,
    /// The host concerned: a lease's borrower, the node that reports or was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Name of the function concerned, `HOST/DEVICE`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub function: Option<String>,
    /// Number of the lease concerned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<u64>,
    /// Fencing epoch of the lease concerned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
    /// What happened, with its cause.
    pub text: String,
}

/// One component on a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Hop {
    /// What it is: `root complex`, `switch`, `ntb`, …
    pub kind: String,
    /// Name of the component in the topology.
    pub name: String,
    /// By which link it is entered: `Gen3 x8`, or `internal`; nothing for the first.
    pub link: Option<String>,
}

/// The way from one place to another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Path {
    /// The host or function whose accesses go this way.
    pub from: String,
    /// The host or function that they are for.
    pub to: String,
    /// All components in order, both ends included.
    pub components: Vec<Hop>,
    /// How many components are between the ends.
    pub hops: usize,
    /// How many of those are root complexes.
    pub roots: usize,
}

#[cfg(test)]
mod tests {
    use super::{LATENCY_BOUNDS_NS, OperationReport};

    #[test]
    fn the_bounds_are_six_to_a_power_of_ten_from_100_ns_to_10_s() {
        assert_eq!(LATENCY_BOUNDS_NS[..7], [100, 150, 200, 300, 500, 700, 1000]);
        assert_eq!(LATENCY_BOUNDS_NS[48], 10_000_000_000);
    }

    #[test]
    fn percentiles_lie_within_their_bounds_and_of_what_was_done_since() {
        let earlier = OperationReport { done: 4, latency: vec![4], ..Default::default() };
        let now = OperationReport { done: 14, latency: vec![4, 9, 0, 1], ..Default::default() };
        let since = now.since(&earlier);
        assert_eq!((since.done, since.latency.as_slice()), (10, [0, 9, 0, 1].as_slice()));
        assert_eq!(since.percentile_ns(0.9), Some(150.0));
        assert_eq!(since.percentile_ns(1.0), Some(300.0));
        assert!((100.0..150.0).contains(&since.percentile_ns(0.1).unwrap()));
        assert_eq!(OperationReport::default().percentile_ns(0.5), None);
        let mut latency = vec![0; LATENCY_BOUNDS_NS.len()];
        latency.push(1);
        let long = OperationReport { latency, ..Default::default() };
        assert_eq!(long.percentile_ns(0.5), Some(f64::INFINITY));
    }
}
