//! What the rack does: rates, made of two reports of each function and of each host (pure).

use std::collections::BTreeMap;

use rackbus_control::api::{Device, DeviceReport, DeviceState, OperationReport, RackStatus};
use rackbus_control::shares::Turns;
use rackbus_control::usage::all;
use rackbus_fabric::rack::DeviceCapability;
use serde::Serialize;

use super::hosts::HostReports;
use super::network::{self, NetworkRow};
use super::shared::{self, SharedRow};
use crate::commands::capability;

/// What the rack does.
#[derive(Debug, Serialize)]
pub struct Picture {
    /// The rack, with its hosts.
    pub status: RackStatus,
    /// Its functions, in their order.
    pub functions: Vec<RateRow>,
    /// What the ports of its network exchange.
    pub network: Vec<NetworkRow>,
    /// What its hosts' processes share.
    pub shared: Vec<SharedRow>,
}

impl Picture {
    /// Whether there are rates of all functions and hosts whose nodes are there.
    pub fn is_complete(&self) -> bool {
        self.functions.iter().all(|row| row.seconds.is_some() || !row.is_reported)
            && self.shared.iter().all(|row| row.seconds.is_some())
    }
}

/// A function, with what it did between its last two reports.
#[derive(Debug, Clone, Serialize)]
pub struct RateRow {
    /// Name of the function, `HOST/DEVICE`.
    pub function: String,
    /// Class of the function: `nvme`.
    pub kind: String,
    /// Whether it can be borrowed, is lent, or cannot be reached.
    pub state: DeviceState,
    /// The host that has it.
    pub holder: Option<String>,
    /// The turns that borrowers take on it.
    pub turns: Option<Turns>,
    /// What is wrong with it.
    pub trouble: Option<String>,
    /// DMA that was refused to it, since its engine was started.
    pub dma_refused: u64,
    /// Seconds between the two reports; none, and no rates, while there was one only.
    pub seconds: Option<f64>,
    /// Reads a second, those that failed among them.
    pub reads: f64,
    /// Writes a second, those that failed among them.
    pub writes: f64,
    /// Other operations a second, failed ones of all kinds among them.
    pub others: f64,
    /// Operations a second that failed.
    pub failed: f64,
    /// Bytes read a second.
    pub read_bytes: f64,
    /// Bytes written a second.
    pub written_bytes: f64,
    /// Microseconds within which half of the reads and writes ended.
    pub p50_us: Option<f64>,
    /// Microseconds within which 99 % of the reads and writes ended.
    pub p99_us: Option<f64>,
    /// Times a second that its engine went to sleep.
    pub sleeps: f64,
    /// Times a second that somebody woke its engine.
    pub wakeups: f64,
    /// Polls a second that found work.
    pub busy_polls: f64,
    /// What its user was promised, where there is a shaper.
    pub level: Option<String>,
    /// What the shaper counted each second, by name.
    pub shaping: BTreeMap<String, f64>,
    /// The part of its minimum that its user got while it had work waiting, in whole seconds.
    pub kept: Option<f64>,
    /// Seconds in which its user got less than its minimum, since it has the function.
    pub violations: u64,
    /// Whether it has engines that are promised by service levels.
    #[serde(skip)]
    pub has_engines: bool,
    #[serde(skip)]
    is_reported: bool,
}

/// What was reported of each function and host lately.
#[derive(Debug, Default)]
pub struct Rates {
    /// By the nodes that run their fronts.
    fronts: Reports,
    /// By their lenders, which have the shapers.
    lenders: Reports,
    hosts: HostReports,
}

/// The last two reports of each function.
#[derive(Debug, Default)]
struct Reports(BTreeMap<String, [DeviceReport; 2]>);

impl Rates {
    /// What the rack does, as of these.
    pub fn picture(&mut self, devices: Vec<Device>, status: RackStatus) -> Picture {
        let is_there = |name: &String| devices.iter().any(|device| device.function == *name);
        self.fronts.0.retain(|name, _| is_there(name));
        self.lenders.0.retain(|name, _| is_there(name));
        let functions = devices.into_iter().map(|device| self.row(device)).collect();
        self.hosts.take(&status.hosts);
        let (network, shared) = (network::rows(&self.hosts), shared::rows(&self.hosts));
        Picture { status, functions, network, shared }
    }

    fn row(&mut self, device: Device) -> RateRow {
        let has_engines = capability::can(&device, DeviceCapability::Engines);
        // Where the borrower's node runs the front, the driver's operations are that one's.
        let Device { report, front, .. } = device;
        let trouble = [&report, &front].into_iter().flatten().find_map(|r| r.trouble.clone());
        let refused = [&report, &front].into_iter().flatten().map(|r| r.dma_refused).sum();
        let lent = report.as_ref().and_then(|report| self.lenders.since(&device.function, report));
        let level = report.as_ref().and_then(|report| report.level.clone());
        let violations = report.as_ref().and_then(|report| report.lease.as_ref());
        let violations = violations.map_or(0, |lease| lease.shaped("violations"));
        let now = front.or(report);
        let since = now.as_ref().and_then(|now| self.fronts.since(&device.function, now));
        let mut row = RateRow {
            function: device.function,
            kind: device.kind,
            state: device.state,
            holder: device.holder,
            turns: device.turns,
            trouble,
            dma_refused: refused,
            seconds: since.as_ref().map(|(seconds, _)| *seconds),
            reads: 0.0,
            writes: 0.0,
            others: 0.0,
            failed: 0.0,
            read_bytes: 0.0,
            written_bytes: 0.0,
            p50_us: None,
            p99_us: None,
            sleeps: 0.0,
            wakeups: 0.0,
            busy_polls: 0.0,
            level,
            shaping: BTreeMap::new(),
            kept: None,
            violations,
            has_engines,
            is_reported: now.is_some(),
        };
        if let Some((seconds, since)) = since {
            row.fill(seconds, &since);
        }
        if let Some((seconds, lent)) = lent {
            row.fill_shaping(seconds, &lent.shaping);
        }
        row
    }
}

impl Reports {
    /// What was counted between the last two reports, and how many seconds that were.
    fn since(&mut self, function: &str, now: &DeviceReport) -> Option<(f64, DeviceReport)> {
        let Some(pair) = self.0.get_mut(function) else {
            self.0.insert(function.to_owned(), [now.clone(), now.clone()]);
            return None;
        };
        // A node or an engine that was started anew counts from nothing, and so does another front.
        let anew = now.counted_ms < pair[1].counted_ms || is_reset(&pair[1], now);
        if anew {
            *pair = [now.clone(), now.clone()];
        } else if now.counted_ms > pair[1].counted_ms {
            let [_, last] = std::mem::take(pair);
            *pair = [last, now.clone()];
        }
        let [before, now] = &*pair;
        let ms = now.counted_ms - before.counted_ms;
        (ms > 0).then(|| (ms as f64 / 1e3, difference(before, now)))
    }
}

fn is_reset(before: &DeviceReport, now: &DeviceReport) -> bool {
    let fewer = |kind: &String, counts: &OperationReport| {
        now.operations.get(kind).is_none_or(|now| now.done < counts.done)
    };
    now.busy_polls < before.busy_polls
        || before.operations.iter().any(|(kind, counts)| fewer(kind, counts))
}

fn difference(before: &DeviceReport, now: &DeviceReport) -> DeviceReport {
    let operations = now.operations.iter().map(|(kind, counts)| {
        let earlier = before.operations.get(kind).cloned().unwrap_or_default();
        (kind.clone(), counts.since(&earlier))
    });
    let shaping = now.shaping.iter().map(|(name, count)| {
        let earlier = before.shaping.get(name).copied().unwrap_or_default();
        (name.clone(), count.saturating_sub(earlier))
    });
    DeviceReport {
        shaping: shaping.collect(),
        busy_polls: now.busy_polls.saturating_sub(before.busy_polls),
        parks: now.parks.saturating_sub(before.parks),
        wakeups: now.wakeups.saturating_sub(before.wakeups),
        operations: operations.collect(),
        ..DeviceReport::default()
    }
}

impl RateRow {
    fn fill(&mut self, seconds: f64, since: &DeviceReport) {
        let rate = |count: u64| count as f64 / seconds;
        let of = |kind: &str| since.operations.get(kind).cloned().unwrap_or_default();
        let (read, write) = (of("read"), of("write"));
        (self.reads, self.read_bytes) = (rate(read.done), rate(read.bytes));
        (self.writes, self.written_bytes) = (rate(write.done), rate(write.bytes));
        let done: u64 = since.operations.values().map(|counts| counts.done).sum();
        self.others = rate(done.saturating_sub(read.done + write.done));
        self.failed = rate(since.operations.values().map(|counts| counts.failed).sum());
        self.sleeps = rate(since.parks);
        self.wakeups = rate(since.wakeups);
        self.busy_polls = rate(since.busy_polls);
        // A drive's times are those of what was read and written; engines do nothing else.
        let (drive, engine) = (all([&read, &write].into_iter()), all(since.operations.values()));
        let times = if drive.done > 0 { drive } else { engine };
        let us = |part| times.percentile_ns(part).map(|ns: f64| ns / 1e3);
        (self.p50_us, self.p99_us) = (us(0.5), us(0.99));
    }

    /// What the lender's shaper did for its user.
    fn fill_shaping(&mut self, seconds: f64, since: &BTreeMap<String, u64>) {
        let rates = since.iter().map(|(name, count)| (name.clone(), *count as f64 / seconds));
        self.shaping = rates.collect();
        let shaped = |name: &str| since.get(name).copied().unwrap_or_default();
        let promised = shaped("promised");
        self.kept = (promised > 0).then(|| shaped("delivered") as f64 / promised as f64);
    }
}

#[cfg(test)]
pub mod tests {
    use serde_json::json;

    use super::*;

    /// A status with these hosts.
    pub fn status(hosts: serde_json::Value) -> RackStatus {
        serde_json::from_value(json!({
            "rack": "lab", "version": "1", "pid": 1, "uptime_ms": 61_000, "hosts": hosts, "live_leases": 1, "refused": 0,
            "incidents": [], "store_failures": 0, "log_lines_left_out": 0,
        }))
        .unwrap()
    }

    /// A lent drive that has read so many blocks of 4 KiB by this time.
    pub fn drive(counted_ms: u64, reads: u64) -> Device {
        let read = OperationReport {
            done: reads,
            failed: 0,
            bytes: reads * 4096,
            total_ns: 0,
            latency: vec![0, 0, reads],
        };
        Device {
            function: "alpha/nvme0".into(),
            kind: "nvme".into(),
            capabilities: None,
            detail: "1 GiB".into(),
            state: DeviceState::Lent,
            holder: Some("beta".into()),
            lease: Some(1),
            waiting: 0,
            turns: None,
            epoch: 1,
            report: Some(Box::new(DeviceReport {
                counted_ms,
                parks: reads / 10,
                operations: [("read".to_owned(), read)].into(),
                ..DeviceReport::default()
            })),
            front: None,
            peers: None,
        }
    }

    fn reads(rates: &mut Rates, counted_ms: u64, reads: u64) -> (Option<f64>, f64) {
        let picture = rates.picture(vec![drive(counted_ms, reads)], status(json!([])));
        (picture.functions[0].seconds, picture.functions[0].reads)
    }

    #[test]
    fn rates_are_of_the_last_two_reports_however_often_one_looks() {
        let mut rates = Rates::default();
        assert_eq!(reads(&mut rates, 1000, 500), (None, 0.0));
        assert_eq!(reads(&mut rates, 3000, 700), (Some(2.0), 100.0));
        assert_eq!(reads(&mut rates, 3000, 700), (Some(2.0), 100.0));
        assert_eq!(reads(&mut rates, 4000, 700), (Some(1.0), 0.0));
    }

    #[test]
    fn an_engine_that_was_started_anew_has_no_rate_yet() {
        let mut rates = Rates::default();
        reads(&mut rates, 1000, 500);
        assert_eq!(reads(&mut rates, 2000, 3), (None, 0.0));
        assert_eq!(reads(&mut rates, 3000, 5), (Some(1.0), 2.0));
        // So has one whose node was.
        assert_eq!(reads(&mut rates, 500, 9), (None, 0.0));
    }

    #[test]
    fn bytes_times_and_sleeps_are_of_the_same_interval() {
        let mut rates = Rates::default();
        reads(&mut rates, 1000, 1000);
        let picture = rates.picture(vec![drive(2000, 3000)], status(json!([])));
        let row = &picture.functions[0];
        assert_eq!((row.read_bytes, row.sleeps), (2000.0 * 4096.0, 200.0));
        assert!((0.15..=0.2).contains(&row.p99_us.unwrap()), "{row:?}");
        assert!(picture.is_complete());
    }

    #[test]
    fn where_the_borrower_runs_the_front_its_operations_are_shown() {
        let mut rates = Rates::default();
        let with_front = |counted_ms, reads| {
            let mut device = drive(counted_ms, 0);
            device.front = drive(counted_ms + 7, reads).report;
            device
        };
        rates.picture(vec![with_front(0, 10)], status(json!([])));
        let picture = rates.picture(vec![with_front(1000, 30)], status(json!([])));
        assert_eq!(picture.functions[0].reads, 20.0);
    }
    /// With strict isolation an accelerator's shaper is at the lender, and its front at the borrower.
    #[test]
    fn where_the_borrower_runs_the_front_the_lenders_shaper_is_shown() {
        let mut rates = Rates::default();
        let with_front = |counted_ms: u64, bytes: u64| {
            let mut device = drive(0, 0);
            let shaping = [("ingress_bytes", bytes), ("promised", bytes), ("delivered", bytes / 2)];
            device.report = Some(Box::new(DeviceReport {
                counted_ms,
                shaping: shaping.map(|(name, count)| (name.to_owned(), count)).into(),
                level: Some("zstd 1 Gbit/s".into()),
                ..DeviceReport::default()
            }));
            device.front = drive(3 * counted_ms, bytes).report;
            device
        };
        rates.picture(vec![with_front(0, 0)], status(json!([])));
        let picture = rates.picture(vec![with_front(1000, 6000)], status(json!([])));
        let row = &picture.functions[0];
        assert_eq!((row.shaping["ingress_bytes"], row.reads), (6000.0, 2000.0));
        assert_eq!((row.kept, row.level.as_deref()), (Some(0.5), Some("zstd 1 Gbit/s")));
    }
}
