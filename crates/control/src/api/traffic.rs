//! What a node reports of its ports in the rack's network: as much as rates are made of.
//!
//! It goes to the control plane with everything else that a node reports, so that whoever asks the control plane sees the
//! network from any machine. The node's own socket [says more](crate::network).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::network::{NetworkStatus, PeerStatus, PortStatus};

/// Ports of a host with which its ports exchange something, at most, that are told of.
const MOST: usize = 64;
/// Bytes of the longest name of a port.
const LONGEST_NAME: usize = 160;

/// What a port of the network did, since its counters began.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct PortTraffic {
    /// Thousandths of the time that the port's threads were awake; absent where they are not the network's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub awake_permille: Option<u32>,
    /// What it exchanged with others, by their names.
    pub peers: BTreeMap<String, PeerTraffic>,
}

/// What a port exchanged with another.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct PeerTraffic {
    /// Frames sent to it.
    pub sent: u64,
    /// Bytes of the frames sent to it.
    pub sent_bytes: u64,
    /// Frames that came from it.
    pub received: u64,
    /// Bytes of the frames that came from it.
    pub received_bytes: u64,
    /// Frames between the two that were dropped at this end, for whatever cause.
    pub dropped: u64,
    /// Bytes in its rings that it had not taken when something was sent last.
    pub waiting_bytes: u64,
    /// Bytes that its rings hold.
    pub ring_bytes: u64,
}

impl PeerTraffic {
    fn of(peer: &PeerStatus) -> PeerTraffic {
        PeerTraffic {
            sent: peer.sent,
            sent_bytes: peer.sent_bytes,
            received: peer.received,
            received_bytes: peer.received_bytes,
            dropped: peer.drops.values().sum(),
            waiting_bytes: peer.waiting_bytes,
            ring_bytes: peer.ring_bytes,
        }
    }
}

/// The ports of a host, by name, with what they exchanged. Where they did so with many others, those that most bytes were
/// exchanged with are told of.
pub fn traffic(status: &NetworkStatus) -> BTreeMap<String, PortTraffic> {
    let mut pairs: Vec<(&PortStatus, &PeerStatus)> =
        status.ports.iter().flat_map(|port| port.peers.iter().map(move |it| (port, it))).collect();
    let bytes = |peer: &PeerStatus| peer.sent_bytes.saturating_add(peer.received_bytes);
    pairs.sort_by_key(|(_, peer)| std::cmp::Reverse(bytes(peer)));
    let mut ports = BTreeMap::<String, PortTraffic>::new();
    for (port, peer) in pairs.into_iter().take(MOST) {
        let traffic = ports.entry(port.port.clone()).or_default();
        traffic.awake_permille = port.polling.map(|part| (part * 1e3).round() as u32);
        traffic.peers.insert(peer.peer.clone(), PeerTraffic::of(peer));
    }
    ports
}

/// Leaves out ports, and others that they exchanged something with, that are more than a node tells of.
pub(crate) fn bound_traffic(ports: &mut BTreeMap<String, PortTraffic>) {
    let mut left = MOST;
    ports.retain(|name, port| {
        port.peers.retain(|name, _| {
            let told = left > 0 && name.len() <= LONGEST_NAME;
            left -= usize::from(told);
            told
        });
        name.len() <= LONGEST_NAME && !port.peers.is_empty()
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host whose port has exchanged so many bytes with each of so many others.
    fn busy(peers: u64) -> NetworkStatus {
        let peer = |nth: u64| PeerStatus {
            peer: format!("h{nth}"),
            sent_bytes: nth * 100,
            drops: [("full".to_owned(), 2), ("link".to_owned(), 1)].into(),
            ..PeerStatus::default()
        };
        let (peers, polling) = ((0..peers).map(peer).collect(), Some(0.1234));
        let port = PortStatus { port: "alpha".into(), polling, peers, ..PortStatus::default() };
        NetworkStatus { ports: vec![port], ..NetworkStatus::default() }
    }

    #[test]
    fn the_busiest_pairs_of_ports_are_reported() {
        let ports = traffic(&busy(100));
        let alpha = &ports["alpha"];
        assert_eq!((alpha.peers.len(), alpha.awake_permille), (MOST, Some(123)));
        assert!(alpha.peers.contains_key("h99") && !alpha.peers.contains_key("h35"));
        let of = &alpha.peers["h99"];
        assert_eq!((of.sent_bytes, of.dropped), (9900, 3));
        assert_eq!(traffic(&NetworkStatus::default()), BTreeMap::new());
    }

    #[test]
    fn a_node_fills_no_records_with_ports() {
        let few = traffic(&busy(3));
        let mut kept = few.clone();
        bound_traffic(&mut kept);
        assert_eq!(kept, few);
        let port = few["alpha"].clone();
        let mut many: BTreeMap<String, PortTraffic> =
            (0..MOST).map(|nth| (format!("p{nth}"), port.clone())).collect();
        many.insert("n".repeat(LONGEST_NAME + 1), port);
        bound_traffic(&mut many);
        assert!(many.values().map(|port| port.peers.len()).sum::<usize>() <= MOST);
        assert!(many.keys().all(|name| name.len() <= LONGEST_NAME));
    }
}
