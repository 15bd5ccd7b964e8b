//! Which addresses the stations of a rack have: each host's interface and each network function.
//!
//! They follow from the rack file alone, so every node knows all of them and nobody has to ask. A host's number
//! is its node id divided by four; the network functions of the rack are numbered in the order of the file. With
//! `10.77.0.0/16` the first host is `10.77.0.1` and the first function `10.77.128.1`; the IPv6 addresses end in
//! the same 32 bits' number, and so do the Ethernet addresses (`02:72:62:…`).

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};

use rackbus_fabric::rack::{DeclaredFunction, DeviceCapability, Network, PortRules, Rack};

use crate::address::MacAddress;
use crate::port::PortOptions;
use crate::vlan::VlanMembership;

/// The first bytes of every station's Ethernet address: locally administered.
const PREFIX: [u8; 3] = [0x02, 0x72, 0x62];
/// Added to a function's number in its Ethernet address.
const FUNCTIONS: u32 = 1 << 23;

/// A station of the rack: who may send and receive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Station {
    /// Its name: that of the host, or `HOST/FUNCTION`.
    pub name: String,
    /// The host whose node has its port.
    pub host: String,
    /// Its Ethernet address, made from its place in the rack file.
    pub mac: MacAddress,
    /// Its IPv4 address in the rack's network.
    pub ipv4: Ipv4Addr,
    /// Its IPv6 address in the rack's network.
    pub ipv6: Ipv6Addr,
    /// Whether it is a host's interface, a network function or an uplink.
    pub kind: StationKind,
    /// The VLAN that its frames without tags are in.
    pub vlan: Option<u16>,
    /// The VLANs that it takes with tags, where the rack file says.
    pub vlans: Option<Vec<u16>>,
    /// How many Ethernet addresses other than its own may be behind it.
    pub learned_addresses: usize,
    /// It sends from its own IP addresses only.
    pub anti_spoofing: bool,
}

/// What a station is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StationKind {
    /// A host's interface, which the rack's own software sends from.
    Host,
    /// A function, whose sender is anybody.
    Function,
    /// The way outside. It has no IP addresses.
    Uplink,
}

impl Station {
    /// Its IP addresses, if it has any.
    pub fn address(&self) -> Option<(Ipv4Addr, Ipv6Addr)> {
        (self.kind != StationKind::Uplink).then_some((self.ipv4, self.ipv6))
    }

    /// The VLANs that it is in: hosts and uplinks that name none pass on those that the rack file names nowhere.
    pub fn membership(&self) -> VlanMembership {
        VlanMembership::new(self.vlan, self.vlans.as_deref(), self.kind != StationKind::Function)
    }

    fn with(self, rules: &PortRules) -> Station {
        Station {
            vlan: rules.vlan,
            vlans: rules.vlans.clone(),
            learned_addresses: rules.learned_addresses as usize,
            ..self
        }
    }
}

/// The stations of a rack, by number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stations {
    network: Network,
    all: Vec<Station>,
    by_name: BTreeMap<String, usize>,
}

impl Stations {
    /// Those of a rack, whose functions have these `ports`, by name. Functions for which the network has no
    /// address left are none.
    pub fn of(rack: &Rack, ports: &BTreeMap<String, PortOptions>) -> Stations {
        let network = rack.network.clone();
        let hosts = rack.hosts.iter().map(|host| {
            let number = host.node_id / 4;
            let ends = (number, number);
            let own = station(&network, host.name.clone(), &host.name, ends, StationKind::Host);
            own.with(network.hosts.get(&host.name).unwrap_or(&PortRules::default()))
        });
        let half = network.subnet.stations() / 2;
        let has_port = |device: &DeclaredFunction| device.can(DeviceCapability::Port) == Some(true);
        let functions = rack.functions().filter(|(_, device)| has_port(device));
        // Up to the broadcast address.
        let numbers = (1..half - 1).take_while(|number| *number < FUNCTIONS);
        let functions = functions.zip(numbers).map(|((name, _), number)| {
            let ends = (half + number, FUNCTIONS + number);
            let name = name.to_string();
            let host = name.split('/').next().unwrap_or(&name).to_owned();
            let station = station(&network, name, &host, ends, StationKind::Function);
            match ports.get(&station.name) {
                None => station,
                Some(port) => Station {
                    mac: port.mac.unwrap_or(station.mac),
                    anti_spoofing: port.anti_spoofing,
                    ..station.with(&port.rules)
                },
            }
        });
        let uplinks = (1..).zip(&network.uplinks).map(|(number, uplink): (u8, _)| Station {
            name: format!("{}/{}", uplink.host, uplink.interface),
            host: uplink.host.clone(),
            mac: MacAddress([PREFIX[0], PREFIX[1], PREFIX[2] + 1, 0, 0, number]),
            ipv4: Ipv4Addr::UNSPECIFIED,
            ipv6: Ipv6Addr::UNSPECIFIED,
            kind: StationKind::Uplink,
            vlan: None,
            vlans: network.uplink_vlans.clone(),
            learned_addresses: 0,
            anti_spoofing: false,
        });
        let all: Vec<Station> = hosts.chain(functions).chain(uplinks).collect();
        let by_name = all.iter().enumerate().map(|(nth, it)| (it.name.clone(), nth)).collect();
        Stations { network, all, by_name }
    }

    /// The network that they are in.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// All of them: hosts, functions, uplinks, each in the order of the file.
    pub fn all(&self) -> &[Station] {
        &self.all
    }

    /// Two with the same Ethernet address, if there are such: the network would find one of them only.
    pub fn with_one_address(&self) -> Option<(&Station, &Station)> {
        let mut seen = BTreeMap::new();
        self.all.iter().find_map(|it| seen.insert(it.mac, it).map(|former| (former, it)))
    }

    /// The station of that name, and its number.
    pub fn named(&self, name: &str) -> Option<(usize, &Station)> {
        let nth = *self.by_name.get(name)?;
        Some((nth, &self.all[nth]))
    }
}

/// A station whose address ends in the first of `ends` in IP and the second in Ethernet.
fn station(
    network: &Network,
    name: String,
    host: &str,
    (ip, ethernet): (u32, u32),
    kind: StationKind,
) -> Station {
    let [_, high, middle, low] = ethernet.to_be_bytes();
    let [a, b, c] = PREFIX;
    Station {
        name,
        host: host.to_owned(),
        mac: MacAddress([a, b, c, high, middle, low]),
        ipv4: Ipv4Addr::from_bits(network.subnet.address.to_bits() | ip),
        ipv6: Ipv6Addr::from_bits(network.subnet6.address.to_bits() | u128::from(ethernet)),
        kind,
        vlan: None,
        vlans: None,
        learned_addresses: 0,
        anti_spoofing: kind == StationKind::Function,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use rackbus_fabric::rack::DeviceFacts;

    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// The stations of a rack each of whose devices has a port.
    pub(crate) fn with_ports(text: &str) -> Stations {
        let capabilities = &[DeviceCapability::Port];
        let facts = DeviceFacts { capabilities, ..DeviceFacts::default() };
        let rack = Rack::parse_with("rack.toml", text, |_| Ok(facts.clone())).unwrap();
        Stations::of(&rack, &BTreeMap::new())
    }

    fn stations(subnet: &str, hosts: usize, functions: usize) -> Stations {
        let mut text = format!("name = \"lab\"\n[network]\nsubnet = \"{subnet}\"\n");
        for host in 0..hosts {
            text += &format!("[hosts.h{host}]\n");
        }
        for function in 0..functions {
            let host = function % hosts;
            text += &format!("[hosts.h{host}.devices.nic{function}]\nkind = \"nic\"\n");
        }
        with_ports(&text)
    }

    #[test]
    fn the_first_stations_have_the_addresses_that_the_book_says() {
        let stations = stations("10.77.0.0/16", 2, 2);
        let said = |name| {
            let (_, it) = stations.named(name).unwrap();
            format!("{} {} {}", it.mac, it.ipv4, it.ipv6)
        };
        assert_eq!(said("h0"), "02:72:62:00:00:01 10.77.0.1 fd72:6163:6b62::1");
        assert_eq!(said("h1"), "02:72:62:00:00:02 10.77.0.2 fd72:6163:6b62::2");
        assert_eq!(said("h1/nic1"), "02:72:62:80:00:02 10.77.128.2 fd72:6163:6b62::80:2");
        assert!(stations.named("h0/nvme0").is_none());
    }

    proptest! {
        #[test]
        fn no_two_stations_have_the_same_address_and_all_are_inside(
            hosts in 1usize..7, functions in 0usize..20, prefix in 20u8..=28,
        ) {
            let stations = stations(&format!("10.0.0.0/{prefix}"), hosts, functions);
            let all = stations.all();
            let macs: BTreeSet<_> = all.iter().map(|it| it.mac).collect();
            let ipv4: BTreeSet<_> = all.iter().map(|it| it.ipv4).collect();
            let ipv6: BTreeSet<_> = all.iter().map(|it| it.ipv6).collect();
            prop_assert!([macs.len(), ipv4.len(), ipv6.len()] == [all.len(); 3]);
            let last = Ipv4Addr::new(10, 0, 0, 0).to_bits() + stations.network().subnet.stations() - 1;
            for it in all {
                prop_assert!(it.mac.is_station() && it.ipv4.to_bits() < last && it.ipv4.octets()[0] == 10);
            }
        }
    }
}
