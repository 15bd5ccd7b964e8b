//! What the network says of itself: to the node's users, and for Prometheus.

use std::collections::BTreeMap;

use rackbus_control::api::ApiError;
use rackbus_control::metrics::{Labels, MetricsPage};
use rackbus_control::network::{
    CaptureDone, CaptureRequest, LearnedAddress, NetworkStatus, NodeNetwork, PeerStatus, PortStatus,
};
use rackbus_net::Cause;
use rackbus_net::counters::{Count, Drops, PeerCounters};
use rackbus_net::port_queue::LAYOUT;
use rackbus_net::vlan::NO_VLAN;
use rackbus_netdev::unread::UnreadFrames;

use super::{LocalPort, NetworkError, NetworkService, Shared};

impl NetworkError {
    fn problem(&self) -> ApiError {
        let code = match self {
            NetworkError::Rights(_) => "no_rights",
            _ => "network",
        };
        ApiError::new(code, self.to_string(), self.remedy())
    }
}

impl NodeNetwork for NetworkService {
    fn status(&self) -> NetworkStatus {
        let shared = &*self.0;
        let network = shared.stations.network();
        let state = shared.lock();
        let own = shared.stations.named(&shared.host).map(|(station, _)| station);
        NetworkStatus {
            host: shared.host.clone(),
            up: own.is_some_and(|station| state.ports.contains_key(&station)),
            namespace: shared.namespace(),
            mtu: network.mtu,
            subnet: format!("{}/{}", network.subnet.address, network.subnet.prefix),
            subnet6: format!("{}/{}", network.subnet6.address, network.subnet6.prefix),
            uplinks: (state.uplinks.iter())
                .map(|uplink| {
                    let (station, state) = uplink.state();
                    (shared.stations.all()[station].name.clone(), state.word().to_owned())
                })
                .collect(),
            uplink_ways: (state.uplinks.iter())
                .filter_map(|uplink| {
                    let name = &shared.stations.all()[uplink.state().0].name;
                    Some((name.clone(), uplink.way()?.to_owned()))
                })
                .collect(),
            ports: state
                .ports
                .iter()
                .map(|(station, port)| shared.port_status(*station, port))
                .collect(),
        }
    }

    fn set_up(&self, up: bool) -> Result<NetworkStatus, ApiError> {
        let done = if up { self.up() } else { self.down() };
        done.map_err(|error| error.problem())?;
        Ok(self.status())
    }

    fn capture(
        &self,
        request: &CaptureRequest,
        stop: &dyn Fn() -> bool,
    ) -> Result<CaptureDone, ApiError> {
        self.capture_into(request, stop).map_err(|error| error.problem())
    }
}

impl Shared {
    fn port_status(&self, station: usize, port: &LocalPort) -> PortStatus {
        let own = &self.stations.all()[station];
        let counters: Vec<_> = port.queues.iter().map(|port_queue| port_queue.counters()).collect();
        let sum = |of: fn(&rackbus_net::counters::LaneCounters) -> &Count| {
            counters.iter().map(|it| of(it).get()).sum::<u64>()
        };
        let mut drops = counters.iter().fold(BTreeMap::new(), |all, it| added(all, &it.drops));
        let unread = port.unread.as_ref().and_then(UnreadFrames::count).filter(|it| *it > 0);
        drops.extend(unread.map(|frames| (Cause::Unread.word().to_owned(), frames)));
        let mut bridges = self.link.bridges();
        bridges.retain(|bridge| !bridge.revoked);
        let peers = self.stations.all().iter().enumerate().filter_map(|(nth, peer)| {
            let of_peer: Vec<_> = counters.iter().map(|it| &it.peers[nth]).collect();
            let status = peer_status(&peer.name, &of_peer);
            let quiet = PeerStatus { peer: peer.name.clone(), ..PeerStatus::default() };
            let way = match self.apart && peer.host != self.host {
                true if bridges.iter().any(|bridge| bridge.host == peer.host) => "NTB",
                true => "TLS",
                false => "memory",
            };
            (status != quiet).then(|| PeerStatus { way: way.to_owned(), ..status })
        });
        // Of all queues together.
        let since = counters.iter().map(|it| it.pace.since_ns.get());
        let now = (self.clock)();
        let passed: u64 =
            since.filter(|since| *since > 0).map(|since| now.saturating_sub(since)).sum();
        let asleep: u64 = counters.iter().map(|it| it.pace.asleep_by(now)).sum();
        PortStatus {
            port: own.name.clone(),
            mac: own.mac.to_string(),
            ipv4: own.address().map(|(ipv4, _)| ipv4.to_string()).unwrap_or_default(),
            ipv6: own.address().map(|(_, ipv6)| ipv6.to_string()).unwrap_or_default(),
            vlan: own.vlan,
            vlans: own.vlans.clone(),
            learned: (self.switch.behind(station, (self.clock)()).into_iter())
                .map(|(vlan, mac)| LearnedAddress {
                    mac: mac.to_string(),
                    vlan: (vlan != NO_VLAN).then_some(vlan),
                })
                .collect(),
            queues: port.queues.len(),
            groups: sum(|it| &it.groups),
            answered: sum(|it| &it.answered),
            drops,
            not_captured: sum(|it| &it.not_captured),
            polling: (passed > 0).then(|| 1.0 - (asleep as f64 / passed as f64).min(1.0)),
            sleeps: sum(|it| &it.pace.sleeps),
            peers: peers.collect(),
        }
    }
}

fn peer_status(name: &str, queues: &[&PeerCounters]) -> PeerStatus {
    let sum = |of: fn(&PeerCounters) -> &Count| queues.iter().map(|it| of(it).get()).sum::<u64>();
    let rings = sum(|it| &it.is_open);
    PeerStatus {
        peer: name.to_owned(),
        way: String::new(),
        rings,
        opened: sum(|it| &it.opened),
        sent: sum(|it| &it.sent),
        sent_bytes: sum(|it| &it.sent_bytes),
        received: sum(|it| &it.received),
        received_bytes: sum(|it| &it.received_bytes),
        waiting_bytes: sum(|it| &it.waiting_bytes),
        ring_bytes: rings * LAYOUT.ring_bytes as u64,
        drops: queues.iter().fold(BTreeMap::new(), |all, it| added(all, &it.drops)),
    }
}

/// Those that there were.
fn added(mut all: BTreeMap<String, u64>, drops: &Drops) -> BTreeMap<String, u64> {
    for (cause, count) in drops.all().filter(|(_, count)| *count > 0) {
        *all.entry(cause.word().to_owned()).or_default() += count;
    }
    all
}

/// The network's part of a node's page of metrics.
pub fn page(status: &NetworkStatus, page: &mut MetricsPage) {
    let up = [(Labels::new(), f64::from(u8::from(status.up)))];
    page.gauge("network_up", "Whether the host has its interface", up);
    let of = |port: &PortStatus, peer: &PeerStatus| {
        vec![("port", port.port.clone()), ("peer", peer.peer.clone())]
    };
    let pairs = || status.ports.iter().flat_map(|port| port.peers.iter().map(move |it| (port, it)));
    let mut count = |name, help, of_peer: fn(&PeerStatus) -> u64| {
        page.counter(name, help, pairs().map(|(port, peer)| (of(port, peer), of_peer(peer))));
    };
    count("network_sent_frames", "Frames that a port sent", |it| it.sent);
    count("network_sent_bytes", "Bytes of these frames", |it| it.sent_bytes);
    count("network_received_frames", "Frames that a port received", |it| it.received);
    count("network_received_bytes", "Bytes of these frames", |it| it.received_bytes);
    let waiting = pairs().map(|(port, peer)| (of(port, peer), peer.waiting_bytes as f64));
    let help = "Bytes that a port's receiver had not taken when something was sent last";
    page.gauge("network_ring_bytes", help, waiting);
    let with_cause = |mut labels: Labels, cause: &String| {
        labels.push(("cause", cause.clone()));
        labels
    };
    let between = pairs().flat_map(|(port, peer)| {
        let labels = of(port, peer);
        peer.drops.iter().map(move |(cause, count)| (with_cause(labels.clone(), cause), *count))
    });
    let undecided = status.ports.iter().flat_map(|port| {
        let labels = vec![("port", port.port.clone()), ("peer", String::new())];
        port.drops.iter().map(move |(cause, count)| (with_cause(labels.clone(), cause), *count))
    });
    let help = "Frames that were dropped, by cause";
    page.counter("network_dropped_frames", help, between.chain(undecided));
    let polling = status
        .ports
        .iter()
        .filter_map(|port| Some((vec![("port", port.port.clone())], port.polling?)));
    let help = "The part of the time that a port's threads were awake";
    page.gauge("network_polling", help, polling);
}
