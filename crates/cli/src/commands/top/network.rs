//! Rates of the rack's network, made of two looks at its nodes (pure).

use std::collections::BTreeMap;

use rackbus_control::network::{NetworkStatus, PeerStatus};
use serde::Serialize;

/// What a port exchanged with another between two looks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NetworkRow {
    /// Name of the port.
    pub port: String,
    /// Name of the other one.
    pub peer: String,
    /// Seconds between the two looks; none, and no rates, at the first one.
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

/// The last look at each pair of ports.
#[derive(Debug, Default)]
pub struct NetworkRates(BTreeMap<(String, String), (u64, PeerStatus)>);

impl NetworkRates {
    /// The rows of what the nodes say at `now_ms`.
    pub fn rows(&mut self, statuses: &[NetworkStatus], now_ms: u64) -> Vec<NetworkRow> {
        let mut seen = BTreeMap::new();
        let mut rows = Vec::new();
        for port in statuses.iter().flat_map(|status| &status.ports) {
            for peer in &port.peers {
                let pair = (port.port.clone(), peer.peer.clone());
                let before = self.0.get(&pair);
                rows.push(row(pair.clone(), port.polling, peer, before, now_ms));
                seen.insert(pair, (now_ms, peer.clone()));
            }
        }
        self.0 = seen;
        rows
    }
}

fn dropped(peer: &PeerStatus) -> u64 {
    peer.drops.values().sum()
}

fn row(
    (port, name): (String, String),
    polling: Option<f64>,
    peer: &PeerStatus,
    before: Option<&(u64, PeerStatus)>,
    now_ms: u64,
) -> NetworkRow {
    // A node that was started anew counts from nothing.
    let before = before.filter(|(at, before)| {
        now_ms > *at && before.sent <= peer.sent && before.received <= peer.received
    });
    let seconds = before.map(|(at, _)| (now_ms - at) as f64 / 1e3);
    let rate = |of: fn(&PeerStatus) -> u64| match (before, seconds) {
        (Some((_, before)), Some(seconds)) => of(peer).saturating_sub(of(before)) as f64 / seconds,
        _ => 0.0,
    };
    NetworkRow {
        port,
        peer: name,
        seconds,
        sent: rate(|it| it.sent),
        sent_bytes: rate(|it| it.sent_bytes),
        received: rate(|it| it.received),
        received_bytes: rate(|it| it.received_bytes),
        dropped: rate(dropped),
        waiting_bytes: peer.waiting_bytes,
        ring_bytes: peer.ring_bytes,
        polling,
    }
}

#[cfg(test)]
pub mod tests {
    use rackbus_control::network::PortStatus;

    use super::*;

    /// What alpha says when it has sent so many frames of 1000 bytes to beta.
    pub fn sent(frames: u64) -> Vec<NetworkStatus> {
        let peer = PeerStatus {
            peer: "beta".into(),
            sent: frames,
            sent_bytes: frames * 1000,
            drops: [("full".to_owned(), frames / 10)].into(),
            ..PeerStatus::default()
        };
        let port = PortStatus { port: "alpha".into(), peers: vec![peer], ..PortStatus::default() };
        vec![NetworkStatus { ports: vec![port], ..NetworkStatus::default() }]
    }

    #[test]
    fn rates_are_of_two_looks_and_begin_anew_with_the_node() {
        let mut rates = NetworkRates::default();
        assert_eq!(rates.rows(&sent(100), 1000)[0].seconds, None);
        let row = rates.rows(&sent(300), 3000).remove(0);
        assert_eq!((row.seconds, row.sent, row.sent_bytes), (Some(2.0), 100.0, 100_000.0));
        assert_eq!(row.dropped, 10.0);
        assert_eq!(rates.rows(&sent(7), 4000)[0].seconds, None);
        assert_eq!(rates.rows(&sent(8), 5000)[0].sent, 1.0);
    }
}
