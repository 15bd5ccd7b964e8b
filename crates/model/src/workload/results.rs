//! What came of a workload.

use serde::Serialize;

use crate::engine::Histogram;
use crate::time::Time;

/// How long a flow's jobs took, in nanoseconds; all 0 when none ended.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Latency {
    /// The mean over all jobs, exact.
    pub mean: f64,
    /// The least of them, exact.
    pub least: f64,
    /// What half of them do not exceed.
    pub p50: f64,
    /// What 90 % do not exceed.
    pub p90: f64,
    /// What 99 % do not exceed.
    pub p99: f64,
    /// What 99.9 % do not exceed.
    pub p999: f64,
    /// The greatest of them, exact.
    pub greatest: f64,
}

impl Latency {
    pub(super) fn of(histogram: &Histogram) -> Latency {
        let quantile = |share| histogram.quantile(share).ns();
        Latency {
            mean: histogram.mean().ns(),
            least: histogram.least().ns(),
            p50: quantile(0.5),
            p90: quantile(0.9),
            p99: quantile(0.99),
            p999: quantile(0.999),
            greatest: histogram.greatest().ns(),
        }
    }
}

/// What came of a flow.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FlowResult {
    /// Its name in the workload's file.
    pub name: String,
    /// The tenant that it counts for, where the workload names one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// The names of its ends, in the order of the keys of its kind.
    pub ends: Vec<String>,
    /// Jobs that ended in the measured time.
    pub jobs: u64,
    /// Bytes per second, as they moved.
    pub bytes_per_second: f64,
    /// The same in jobs.
    pub jobs_per_second: f64,
    /// How far the rate may be from what a longer run would say, as a share of it: the half width of its
    /// interval of 95 % confidence, from the means of twenty parts of the measured time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub confidence: Option<f64>,
    /// What the measured time is too short to tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub doubt: Option<String>,
    /// How long jobs took, in nanoseconds.
    pub latency_ns: Latency,
    /// What keeps it from going faster, by its name: the wire of a link, a memory, a device's engine, packet
    /// rate, medium or tags, a limit of the rack file, a root's split reads, peer writes or page walkers, the credits of a class on a
    /// link; `latency` when what is under way is too little for the route's length, or `demand` when it gets
    /// all it asks for.
    pub bottleneck: String,
    /// Components between its ends, on the longest of its routes.
    pub hops: usize,
    /// The distribution of latencies: nanoseconds, and the share that does not exceed them.
    #[serde(skip)]
    pub distribution: Vec<(Time, f64)>,
}

/// What came of a tenant's flows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TenantResult {
    /// Its name in the workload's file.
    pub name: String,
    /// Bytes per second of all its flows.
    pub bytes_per_second: f64,
    /// Jobs per second of all its flows.
    pub jobs_per_second: f64,
    /// Its part of all bytes, from 0 to 1.
    pub share: f64,
}

/// What a link was used for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LinkResult {
    /// The names of the components that it joins.
    pub ends: [String; 2],
    /// What it is: `Gen3 x8`.
    pub link: String,
    /// The share of the time for which it was sending, from the first end to the second.
    pub there: f64,
    /// The same from the second end to the first.
    pub back: f64,
    /// How often packets waited for credits, both ways.
    pub starved: u64,
}

/// What happened in a part of the measured time.
#[derive(Debug, Clone, PartialEq)]
pub struct Slice {
    /// When it ended; it began when the one before ended, or with the measured time.
    pub until: Time,
    /// By link as in [`Results::links`]: the share of the slice for which it was sending, there and back.
    pub loads: Vec<[f64; 2]>,
    /// By flow: bytes per second.
    pub rates: Vec<f64>,
}

/// A host, and the profile that its processor's values are of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HostProfile {
    /// The host's name in the rack file.
    pub host: String,
    /// The name of the profile: a built-in one, or one that the rack file makes.
    pub profile: String,
}

/// What came of a workload.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Results {
    /// What the hosts are taken to be.
    pub hosts: Vec<HostProfile>,
    /// The measured time in seconds.
    pub seconds: f64,
    /// Events that the simulation took.
    pub events: u64,
    /// By flow, in the workload's order.
    pub flows: Vec<FlowResult>,
    /// By tenant, where flows have any.
    pub tenants: Vec<TenantResult>,
    /// By link, in the order of the rack's parts.
    pub links: Vec<LinkResult>,
    /// What was left out of the workload's files, in sentences.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// What of the answer was held against no measurement, in sentences.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unvalidated: Vec<String>,
}

pub(super) fn tenants(flows: &[FlowResult]) -> Vec<TenantResult> {
    let mut names: Vec<&String> = flows.iter().filter_map(|flow| flow.tenant.as_ref()).collect();
    names.sort();
    names.dedup();
    let all: f64 = flows.iter().map(|flow| flow.bytes_per_second).sum();
    let of = |name: &String| {
        let own = || flows.iter().filter(move |flow| flow.tenant.as_ref() == Some(name));
        let bytes_per_second: f64 = own().map(|flow| flow.bytes_per_second).sum();
        TenantResult {
            name: name.clone(),
            bytes_per_second,
            jobs_per_second: own().map(|flow| flow.jobs_per_second).sum(),
            share: if all > 0.0 { bytes_per_second / all } else { 0.0 },
        }
    };
    names.into_iter().map(of).collect()
}
