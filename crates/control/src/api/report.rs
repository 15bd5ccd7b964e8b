//! What nodes say of themselves and of their functions, and what they say to the control plane.

use rackbus_lease::Message;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{AcceleratorRoom, PeerReport, PortTraffic, bound_traffic};
use crate::usage::LeaseReport;

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
    /// The first of those that the last one followed, each within a second of the one before; older nodes do not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_refused: Option<String>,
    /// The last of them.
    pub last_refused: Option<String>,
    /// Borrowers that were not let in, because no lease or another one has it.
    pub attach_refused: u64,
    /// Why, the last time.
    pub last_attach_refused: Option<String>,
    /// Requests of its users that were refused, as wrong or not possible: vfio-user messages and posted writes.
    pub requests_refused: u64,
    /// Polls of its engine that found work.
    pub busy_polls: u64,
    /// Polls of its engine that found nothing; older nodes do not say.
    pub idle_polls: u64,
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
    /// What it says that it is, where its class does not tell: a function of the machine, and one of another program since
    /// somebody had it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<ReportedIdentity>,
}

/// What a function says in its configuration space that it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct ReportedIdentity {
    /// Who made it: the vendor ID that the PCI-SIG gave out.
    pub vendor_id: u16,
    /// Which of the vendor's devices it is.
    pub device_id: u16,
    /// Class code: base class, sub-class and programming interface, from bit 23 on down.
    pub class: u32,
}

/// The link between a front and its medium on another machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
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
    /// What moves data beside it, where the lender offered that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lane: Option<RdmaLaneReport>,
}

/// What moves data beside a link by remote memory access (RDMA).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct RdmaLaneReport {
    /// The provider, as libfabric names it: `verbs;ofi_rxm`.
    pub provider: String,
    /// Whether data move by it.
    pub up: bool,
    /// Why they do not any more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<String>,
    /// How many times data moved by it.
    pub operations: u64,
    /// Bytes of data that the lane has moved.
    pub bytes: u64,
    /// How many times data that it could have moved went by the link.
    pub fell_back: u64,
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
    /// Lines that its log left out, because too many of one kind came.
    pub log_lines_left_out: u64,
    /// When it was said, in milliseconds since the node was started.
    pub counted_ms: u64,
    /// What its host's processes share, and who is connected to it, by name.
    pub shared_memory: std::collections::BTreeMap<String, u64>,
    /// Bytes of memory that its host's processes share, by what they are of, and that the host exports at most; older nodes
    /// say nothing of that.
    pub shared_bytes: std::collections::BTreeMap<String, u64>,
    /// What the ports of its host exchanged in the rack's network, by name; older nodes say nothing of that.
    pub network: std::collections::BTreeMap<String, PortTraffic>,
    /// What the copy channels of its host's processes did while these were attached, by name: transactions, bytes,
    /// failures, aborts.
    pub channels: std::collections::BTreeMap<String, u64>,
    /// Conversations that other nodes have with it, by what they are for.
    pub conversations: std::collections::BTreeMap<String, u64>,
    /// How often other hosts were refused what they had too much of there, by what it was.
    pub over_bounds: std::collections::BTreeMap<String, u64>,
    /// Who was refused some shared memory last, because of too much, and what it was told.
    pub last_over_bounds: Option<String>,
    /// NTBs that are for its link and lead to somebody else, or fail: why, by the host that each is to lead to.
    pub unused_ntbs: std::collections::BTreeMap<String, String>,
    /// NTBs through which its link goes now: the host that each leads to, whose node is there.
    pub used_ntbs: std::collections::BTreeSet<String>,
    /// How often it was restarted in place since it was started.
    pub restarts_in_place: u64,
    /// How long it answered nobody at the last of these restarts, in microseconds.
    pub restart_pause_us: u64,
    /// Whether it plugs functions into running VMs when they are borrowed for one: older nodes ignore that they are.
    pub plugs_into_vms: bool,
    /// What its accelerators could still promise, by their names there; older nodes say nothing of that.
    pub accelerators: std::collections::BTreeMap<String, AcceleratorRoom>,
}

impl NodeReport {
    /// Leaves out names of counts that are more, or longer, than a node has: they become labels of metrics.
    pub(crate) fn bound_names(&mut self) {
        const MOST: usize = 64;
        bound_traffic(&mut self.network);
        self.unused_ntbs.retain(|host, why| host.len() <= MOST && why.len() <= 4 * MOST);
        while self.unused_ntbs.len() > MOST {
            self.unused_ntbs.pop_last();
        }
        self.used_ntbs.retain(|host| host.len() <= MOST);
        while self.used_ntbs.len() > MOST {
            self.used_ntbs.pop_last();
        }
        let NodeReport { shared_memory, shared_bytes, channels, conversations, .. } = self;
        for counts in [shared_memory, shared_bytes, channels, conversations, &mut self.over_bounds]
        {
            counts.retain(|name, _| name.len() <= MOST);
            while counts.len() > MOST {
                counts.pop_last();
            }
        }
    }
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
