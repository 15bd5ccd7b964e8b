//! The view of the rack's network: rates, made of two reports of each host's node (pure).

use rackbus_control::api::PeerTraffic;
use serde::Serialize;

use super::hosts::{HostReports, ReportPair};
use super::view::number;
use crate::output::{Cell, Tone};

/// What a port exchanged with another between two reports.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NetworkRow {
    /// Name of the port.
    pub port: String,
    /// Name of the other one.
    pub peer: String,
    /// Seconds between the two reports; none, and no rates, at the first one.
    pub seconds: Option<f64>,
    /// Frames sent a second.
    pub sent: f64,
    /// Bytes sent a second.
    pub sent_bytes: f64,
    /// Frames received a second.
    pub received: f64,
    /// Bytes received a second.
    pub received_bytes: f64,
    /// Frames dropped a second.
    pub dropped: f64,
    /// Bytes in the rings to the other port, and how many they hold.
    pub waiting_bytes: u64,
    /// Bytes that these rings hold.
    pub ring_bytes: u64,
    /// The part of the time that the port's threads were awake, since they were started.
    pub polling: Option<f64>,
}

/// The rows of what the nodes reported.
pub fn rows(reports: &HostReports) -> Vec<NetworkRow> {
    let mut rows = Vec::new();
    for pair in reports.pairs() {
        for (port, traffic) in &pair.now.network {
            let polling = traffic.awake_permille.map(|permille| f64::from(permille) / 1e3);
            for (peer, now) in &traffic.peers {
                let before = pair.before.network.get(port).and_then(|port| port.peers.get(peer));
                rows.push(row(&pair, [port, peer], polling, now, before));
            }
        }
    }
    rows
}

fn row(
    pair: &ReportPair<'_>,
    [port, peer]: [&String; 2],
    polling: Option<f64>,
    now: &PeerTraffic,
    before: Option<&PeerTraffic>,
) -> NetworkRow {
    // What was not reported before is new, or not among what moves most any more. An interface that was made anew counts
    // from nothing.
    let before = before.filter(|before| before.sent <= now.sent && before.received <= now.received);
    let seconds = pair.seconds.filter(|_| before.is_some());
    let rate = |of: fn(&PeerTraffic) -> u64| match (before, seconds) {
        (Some(before), Some(seconds)) => of(now).saturating_sub(of(before)) as f64 / seconds,
        _ => 0.0,
    };
    NetworkRow {
        port: port.clone(),
        peer: peer.clone(),
        seconds,
        sent: rate(|it| it.sent),
        sent_bytes: rate(|it| it.sent_bytes),
        received: rate(|it| it.received),
        received_bytes: rate(|it| it.received_bytes),
        dropped: rate(|it| it.dropped),
        waiting_bytes: now.waiting_bytes,
        ring_bytes: now.ring_bytes,
        polling,
    }
}

/// The columns of [`cells`].
pub const HEAD: [&str; 9] = [
    "port",
    "peer",
    "sent/s",
    "sent B/s",
    "received/s",
    "received B/s",
    "dropped/s",
    "ring",
    "polling",
];

/// A row as it is shown.
pub fn cells(row: &NetworkRow) -> Vec<Cell> {
    let rate = |value: f64| row.seconds.map(|_| number(value)).unwrap_or_default();
    let dropped = if row.dropped > 0.0 { Tone::Bad } else { Tone::Plain };
    let ring = match row.ring_bytes {
        0 => "-".to_owned(),
        bytes => format!("{:.0} %", 100.0 * row.waiting_bytes as f64 / bytes as f64),
    };
    vec![
        row.port.clone().into(),
        row.peer.clone().into(),
        rate(row.sent).into(),
        rate(row.sent_bytes).into(),
        rate(row.received).into(),
        rate(row.received_bytes).into(),
        Cell(rate(row.dropped), dropped),
        ring.into(),
        row.polling.map_or("-".to_owned(), |part| format!("{:.1} %", 100.0 * part)).into(),
    ]
}

#[cfg(test)]
pub mod tests {
    use rackbus_control::api::HostStatus;
    use serde_json::json;

    use super::super::hosts::tests::host;
    use super::*;

    /// What alpha's node reports at this time when alpha has sent so many frames of 1000 bytes to beta.
    pub fn sent(counted_ms: u64, frames: u64) -> HostStatus {
        let beta = json!({ "sent": frames, "sent_bytes": frames * 1000, "dropped": frames / 10 });
        let alpha = json!({ "awake_permille": 250, "peers": { "beta": beta } });
        host(counted_ms, json!({ "network": { "alpha": alpha } }))
    }

    #[test]
    fn rates_are_of_two_reports_and_begin_anew_with_the_interface() {
        let mut reports = HostReports::default();
        let mut row = |counted_ms, frames| {
            reports.take(&[sent(counted_ms, frames)]);
            rows(&reports).remove(0)
        };
        assert_eq!(row(1000, 100).seconds, None);
        let second = row(3000, 300);
        assert_eq!((second.seconds, second.sent, second.sent_bytes), (Some(2.0), 100.0, 100_000.0));
        assert_eq!((second.dropped, second.polling), (10.0, Some(0.25)));
        assert_eq!(row(4000, 7).seconds, None);
        assert_eq!(row(5000, 8).sent, 1.0);
    }
}
