//! A host's interface as its programs see it: its addresses, and its neighbours, all of which are known.

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;

use rackbus_net::{Station, StationKind, Stations};
use rackbus_netdev::configure::{InterfaceSettings, configure};
use rackbus_netdev::unread::UnreadFrames;
use rackbus_netdev::{namespace, tap};

/// What the interface is called in its host's namespace.
pub const NAME: &str = "rackbus0";

/// An interface that was made.
pub struct MadeInterface {
    /// The TAP device's queues, of which each carries frames in both directions.
    pub queues: Vec<OwnedFd>,
    /// What it had no room for, where the kernel says it.
    pub unread: Option<UnreadFrames>,
}

/// Makes the interface of `station` in a namespace.
///
/// # Errors
/// What the system says.
pub fn create(
    namespace: &File,
    stations: &Stations,
    station: &Station,
    queues: u16,
) -> io::Result<MadeInterface> {
    let settings = settings(stations, station);
    namespace::within(namespace, move || {
        let mut queues = tap::open(NAME, queues)?;
        if let [first, _, ..] = queues.as_slice()
            && let Err(error) = tap::steer(first)
        {
            tracing::warn!(%error, "the interface has one queue: the kernel does not let flows be kept to one of several");
            queues.truncate(1);
        }
        configure(NAME, &settings)?;
        let unread = UnreadFrames::open(NAME).inspect_err(|error| {
            tracing::warn!(%error, "frames that the interface has no room for are not counted: /proc is not there");
        });
        Ok(MadeInterface { queues, unread: unread.ok() })
    })
}

fn settings(stations: &Stations, own: &Station) -> InterfaceSettings {
    let network = stations.network();
    let is_other = |it: &&Station| it.name != own.name && it.kind != StationKind::Uplink;
    let others = stations.all().iter().filter(is_other);
    InterfaceSettings {
        mac: own.mac.0,
        mtu: network.mtu,
        addresses: vec![
            (own.ipv4.into(), network.subnet.prefix),
            (own.ipv6.into(), network.subnet6.prefix),
        ],
        neighbours: others
            .flat_map(|it| [(IpAddr::from(it.ipv4), it.mac.0), (it.ipv6.into(), it.mac.0)])
            .collect(),
    }
}
