//! The file's `[network]` section: the rack's one Ethernet, and the subnets of its hosts.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use toml::Spanned;
use toml::de::DeValue;

use super::{Host, Network, PortRules, Subnet, Uplink, UplinkMode};
use crate::text::{Parsed, Section, subsection, wrong};

const KEYS: &[&str] = &[
    "subnet",
    "subnet6",
    "mtu",
    "queues",
    "uplinks",
    "uplink_mode",
    "uplink_vlans",
    "flood_limit",
    "host",
];
const HOST_KEYS: &[&str] = &["vlan", "vlans", "learned_addresses"];

/// VLANs that a port may be in: those that IEEE 802.1Q leaves to networks.
const VLANS: (u64, u64) = (1, 4094);
/// Ethernet addresses that may be behind a port, at most.
const MOST_ADDRESSES: u64 = 1024;
/// Frames for many that each queue of a station may send in a second, at most.
const FLOOD_LIMITS: (u64, u64) = (10, 100_000_000);
/// Without `flood_limit`: more than programs send to groups, and less than keeps all receivers busy.
const FLOOD_LIMIT: u64 = 100_000;

const UPLINKS: &str =
    "write a list of HOST/INTERFACE, the one to use first: [\"alpha/eth1\", \"beta/eth1\"]";

/// Bytes of the longest name of an interface in Linux.
const LONGEST_INTERFACE: usize = 15;

const SUBNET: &str = "write an IPv4 network with 4 to 24 bits for its stations: \"10.77.0.0/16\"";
const SUBNET6: &str =
    "write an IPv6 network with 64 bits for its stations: \"fd72:6163:6b62::/64\"";

/// The least MTU is IPv6's. The largest is what a TAP interface of Linux carries: 65,535 bytes with the
/// Ethernet header.
const MTU: std::ops::RangeInclusive<u64> = 1280..=65_521;

impl Default for Network {
    fn default() -> Network {
        let subnet = Subnet { address: Ipv4Addr::new(10, 77, 0, 0), prefix: 16 };
        let address = Ipv6Addr::new(0xfd72, 0x6163, 0x6b62, 0, 0, 0, 0, 0);
        Network {
            subnet,
            subnet6: Subnet { address, prefix: 64 },
            mtu: 1500,
            queues: 1,
            uplinks: Vec::new(),
            uplink_mode: UplinkMode::default(),
            uplink_vlans: None,
            flood_limit: FLOOD_LIMIT,
            hosts: BTreeMap::new(),
        }
    }
}

impl PortRules {
    /// What a section says that has the keys `vlan`, `vlans` and `learned_addresses`; each `None` where it says
    /// nothing.
    ///
    /// # Errors
    /// [`Problem`](crate::text::Problem) for what is no VLAN or number.
    #[allow(clippy::type_complexity)] // the three keys
    pub fn read(section: &Section<'_>) -> Parsed<(Option<u16>, Option<Vec<u16>>, Option<u32>)> {
        let vlan = section.count("vlan", VLANS.0, VLANS.1)?.map(|vlan| vlan as u16);
        let most = section.count("learned_addresses", 0, MOST_ADDRESSES)?;
        Ok((vlan, vlans(section, "vlans")?, most.map(|most| most as u32)))
    }
}

fn vlans(section: &Section<'_>, key: &'static str) -> Parsed<Option<Vec<u16>>> {
    let Some(numbers) = section.counts(key, VLANS.0, VLANS.1)? else { return Ok(None) };
    let vlans: BTreeSet<u16> = numbers.into_iter().map(|vlan| vlan as u16).collect();
    Ok(Some(vlans.into_iter().collect()))
}

fn host_ports(section: &Section<'_>, hosts: &[Host]) -> Parsed<BTreeMap<String, PortRules>> {
    let mut all = BTreeMap::new();
    for entry in section.tables("host")? {
        if !hosts.iter().any(|host| host.name == entry.name) {
            let what = format!("there is no host `{}`", entry.name);
            return wrong(entry.span, what, "write [network.host.NAME] for a host of the file");
        }
        let place = format!("network.host.{}", entry.name);
        let keys = Section::new(entry.table, entry.span.clone(), place, HOST_KEYS)?;
        let (vlan, vlans, most) = PortRules::read(&keys)?;
        let rules = PortRules { vlan, vlans, learned_addresses: most.unwrap_or(0) };
        all.insert(entry.name.to_owned(), rules);
    }
    Ok(all)
}

/// The network that the section describes, or the default one; the hosts have their numbers in it.
pub(super) fn network(value: Option<&Spanned<DeValue<'_>>>, hosts: &[Host]) -> Parsed<Network> {
    let Some(value) = value else { return Ok(Network::default()) };
    let section = subsection(value, "network", KEYS)?;
    let default = Network::default();
    let subnet = match text(&section, "subnet", SUBNET)? {
        Some(Subnet { address: IpAddr::V4(address), prefix }) if (8..=28).contains(&prefix) => {
            Subnet { address, prefix }
        }
        Some(_) => return wrong(section.place("subnet"), "`subnet` is no such network", SUBNET),
        None => default.subnet,
    };
    let subnet6 = match text(&section, "subnet6", SUBNET6)? {
        Some(Subnet { address: IpAddr::V6(address), prefix: 64 }) => Subnet { address, prefix: 64 },
        Some(_) => return wrong(section.place("subnet6"), "`subnet6` is no such network", SUBNET6),
        None => default.subnet6,
    };
    let most = subnet.stations() / 2 - 1;
    if let Some(host) = hosts.iter().find(|host| host.node_id / 4 > most) {
        let what = format!(
            "`subnet` has addresses for the node ids up to {}, and host {} has {}",
            4 * most,
            host.name,
            host.node_id
        );
        return wrong(
            section.place("subnet"),
            what,
            "write a larger network, with a shorter prefix",
        );
    }
    let mtu = section.count("mtu", *MTU.start(), *MTU.end())?;
    Ok(Network {
        subnet,
        subnet6,
        mtu: mtu.and_then(|mtu| u16::try_from(mtu).ok()).unwrap_or(default.mtu),
        queues: section.count("queues", 1, 16)?.map_or(default.queues, |queues| queues as u16),
        uplinks: uplinks(&section, hosts)?,
        uplink_mode: uplink_mode(&section)?,
        uplink_vlans: vlans(&section, "uplink_vlans")?,
        flood_limit: section
            .count("flood_limit", FLOOD_LIMITS.0, FLOOD_LIMITS.1)?
            .unwrap_or(default.flood_limit),
        hosts: host_ports(&section, hosts)?,
    })
}

fn uplink_mode(section: &Section<'_>) -> Parsed<UplinkMode> {
    const ALLOWED: &str = "write \"auto\", \"xdp\" or \"packet\"";
    match section.text("uplink_mode", ALLOWED)? {
        None => Ok(UplinkMode::default()),
        Some(("auto", _)) => Ok(UplinkMode::Auto),
        Some(("xdp", _)) => Ok(UplinkMode::Xdp),
        Some(("packet", _)) => Ok(UplinkMode::Packet),
        Some((text, span)) => wrong(span, format!("there is no uplink mode `{text}`"), ALLOWED),
    }
}

fn uplinks(section: &Section<'_>, hosts: &[Host]) -> Parsed<Vec<Uplink>> {
    let mut all: Vec<Uplink> = Vec::new();
    let Some((texts, span)) = section.texts("uplinks", UPLINKS)? else { return Ok(all) };
    for text in texts {
        let refuse = |what: String| wrong(span.clone(), what, UPLINKS);
        let Some((host, interface)) = text.split_once('/') else {
            return refuse(format!("`{text}` is no interface of a host"));
        };
        let Some(owner) = hosts.iter().find(|it| it.name == host) else {
            return refuse(format!("there is no host `{host}`"));
        };
        let odd = |c: char| c == '/' || c.is_whitespace() || c.is_control();
        if interface.is_empty() || interface.len() > LONGEST_INTERFACE || interface.contains(odd) {
            return refuse(format!("`{interface}` is no name of a network interface"));
        }
        if owner.devices.iter().any(|device| device.name == interface) {
            return refuse(format!("{host} has a device of the name `{interface}`"));
        }
        let uplink = Uplink { host: host.to_owned(), interface: interface.to_owned() };
        if all.contains(&uplink) {
            return refuse(format!("`{text}` is there twice"));
        }
        all.push(uplink);
    }
    Ok(all)
}

/// A network as it is written: an address without bits for stations, and the length of its prefix.
fn text(section: &Section<'_>, key: &'static str, allowed: &str) -> Parsed<Option<Subnet<IpAddr>>> {
    let Some((text, span)) = section.text(key, allowed)? else { return Ok(None) };
    let parts = text.split_once('/').and_then(|(address, prefix)| {
        Some((address.parse::<IpAddr>().ok()?, prefix.parse::<u8>().ok()?))
    });
    let Some((address, prefix)) = parts else {
        return wrong(span, format!("`{text}` is no network"), allowed);
    };
    let (bits, width) = match address {
        IpAddr::V4(address) => (u128::from(address.to_bits()), 32),
        IpAddr::V6(address) => (address.to_bits(), 128),
    };
    if prefix > width {
        return wrong(span, format!("`{text}` has a prefix longer than {width} bits"), allowed);
    }
    let stations = u32::from(width - prefix);
    if stations > 0 && bits & (u128::MAX >> (128 - stations)) != 0 {
        return wrong(span, format!("`{text}` has bits of a station"), allowed);
    }
    Ok(Some(Subnet { address, prefix }))
}
