//! The view of shared memory: what each host's processes share, who is connected to it, and what their copy channels do
//! (pure).

use std::collections::BTreeMap;

use rackbus_fabric::rack::format_size;
use serde::Serialize;

use super::hosts::{HostReports, ReportPair};
use super::view::number;
use crate::output::{Cell, Tone};

/// What a host shares, with what its channels did between two reports of its node.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SharedRow {
    /// Name of the host.
    pub host: String,
    /// Seconds between the two reports; none, and no rates, at the first one.
    pub seconds: Option<f64>,
    /// How many there are of what its processes share, and of connections, by name.
    pub counts: BTreeMap<String, u64>,
    /// Bytes of what its processes share, and that the host exports at most, by name.
    pub bytes: BTreeMap<String, u64>,
    /// Transactions of copy channels that ended each second.
    pub transactions: f64,
    /// Bytes that copy channels copied each second.
    pub copied_bytes: f64,
    /// Transactions that failed or were aborted, of all that the channels did so far.
    pub failed: u64,
}

impl SharedRow {
    /// Whether its host's processes share anything or are attached to it.
    fn is_used(&self) -> bool {
        self.counts.values().any(|count| *count > 0)
    }
}

/// The rows of what the nodes reported: of each host that has a node.
pub fn rows(reports: &HostReports) -> Vec<SharedRow> {
    reports.pairs().map(row).collect()
}

fn row(pair: ReportPair<'_>) -> SharedRow {
    let ReportPair { now, before, seconds } = pair;
    let rate = |what: &str| {
        let of = |channels: &BTreeMap<String, u64>| channels.get(what).copied().unwrap_or_default();
        let more = of(&now.channels).saturating_sub(of(&before.channels));
        seconds.map_or(0.0, |seconds| more as f64 / seconds)
    };
    let total = |what: &str| now.channels.get(what).copied().unwrap_or_default();
    SharedRow {
        host: now.host.clone(),
        seconds,
        counts: now.shared_memory.clone(),
        bytes: now.shared_bytes.clone(),
        transactions: rate("transactions"),
        copied_bytes: rate("bytes"),
        failed: total("failures") + total("aborts"),
    }
}

/// Whether there is anything to show where there is no screen to fill.
pub fn is_used(rows: &[SharedRow]) -> bool {
    rows.iter().any(SharedRow::is_used)
}

/// The columns of [`cells`].
pub const HEAD: [&str; 12] = [
    "host",
    "sessions",
    "segments",
    "groups",
    "pages",
    "of export",
    "interrupts",
    "to others",
    "of others",
    "copies/s",
    "copied B/s",
    "failed",
];

/// A row as it is shown.
pub fn cells(row: &SharedRow) -> Vec<Cell> {
    let count = |what: &str| row.counts.get(what).copied().unwrap_or_default();
    let bytes = |what: &str| row.bytes.get(what).copied().unwrap_or_default();
    let sized = |what: &str| match (count(what), bytes(what)) {
        (0, _) => "-".to_owned(),
        (count, 0) => count.to_string(),
        (count, bytes) => format!("{count}, {}", format_size(bytes)),
    };
    let all: u64 = ["segments", "groups", "page extents"].into_iter().map(bytes).sum();
    let part = match bytes("exported") {
        0 => "-".to_owned(),
        exported => format!("{:.1} %", 100.0 * all as f64 / exported as f64),
    };
    let rate = |value: f64| row.seconds.map(|_| number(value)).unwrap_or_default();
    let tone = if row.failed > 0 { Tone::Bad } else { Tone::Plain };
    vec![
        row.host.clone().into(),
        count("sessions").to_string().into(),
        sized("segments").into(),
        sized("groups").into(),
        sized("page extents").into(),
        part.into(),
        count("interrupts").to_string().into(),
        count("connections to others").to_string().into(),
        count("connections of others").to_string().into(),
        rate(row.transactions).into(),
        rate(row.copied_bytes).into(),
        Cell(row.failed.to_string(), tone),
    ]
}

#[cfg(test)]
pub mod tests {
    use rackbus_control::api::HostStatus;
    use serde_json::json;

    use super::super::hosts::tests::host;
    use super::*;

    /// What alpha's node reports at this time, when its channels have copied so many times 4 KiB.
    pub fn copied(counted_ms: u64, transactions: u64) -> HostStatus {
        let shared = json!({
            "shared_memory": {
                "sessions": 3, "segments": 2, "groups": 0, "connections of others": 5, "moves under way": 0,
            },
            "shared_bytes": { "segments": 6 << 20, "groups": 0, "exported": 60 << 20 },
            "channels": {
                "transactions": transactions, "bytes": transactions * 4096, "failures": 1, "aborts": 2,
            },
        });
        host(counted_ms, shared)
    }

    #[test]
    fn sizes_are_shown_with_counts_and_channels_with_rates() {
        let mut reports = HostReports::default();
        reports.take(&[copied(1000, 500)]);
        let first = rows(&reports);
        assert_eq!((first[0].seconds, first[0].transactions), (None, 0.0));
        reports.take(&[copied(3000, 2500)]);
        let rows = rows(&reports);
        assert!(is_used(&rows));
        let shown: Vec<String> = cells(&rows[0]).into_iter().map(|cell| cell.0).collect();
        assert_eq!(shown[..6], ["alpha", "3", "2, 6 MiB", "-", "-", "10.0 %"]);
        assert_eq!(shown[6..], ["0", "0", "5", "1.00k", "4.10M", "3"]);
    }

    #[test]
    fn an_older_node_shows_counts_alone() {
        let mut reports = HostReports::default();
        reports.take(&[host(1000, json!({ "shared_memory": { "segments": 2 } }))]);
        let shown: Vec<String> = cells(&rows(&reports)[0]).into_iter().map(|cell| cell.0).collect();
        assert_eq!((shown[2].as_str(), shown[5].as_str()), ("2", "-"));
        reports.take(&[host(2000, json!({}))]);
        assert!(!is_used(&rows(&reports)));
    }
}
