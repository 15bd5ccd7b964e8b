use std::collections::BTreeMap;

use proptest::prelude::*;
use rackbus_fabric::rack::Rack;

use super::claims::eui64;
use super::*;
use crate::addressing::Stations;
use crate::beginning::looked_at;
use crate::ipv6::{DESTINATION, FRAGMENT, HOP_BY_HOP, ICMPV6};
use crate::offload::{GSO_ECN, GSO_TCPV4, GSO_TCPV6, GSO_UDP, GSO_UDP_L4, NEEDS_CSUM};

const ALPHA: usize = 0;
const BETA: usize = 1;
const FUNCTION: usize = 2;
const OTHER: usize = 3;

fn stations() -> Stations {
    let text = "name = \"lab\"\n[hosts.alpha.devices.nic0]\nkind = \"nic\"\n\
                [hosts.beta.devices.nic0]\nkind = \"nic\"\n";
    crate::addressing::tests::with_ports(text)
}

fn switch() -> StationSwitch {
    StationSwitch::new(stations().all(), 1500, 100_000)
}

fn mac(station: usize) -> MacAddress {
    stations().all()[station].mac
}

fn frame(to: MacAddress, from: MacAddress, kind: u16, packet: &[u8]) -> Vec<u8> {
    [&to.0[..], &from.0, &kind.to_be_bytes(), packet].concat()
}

fn decided(from: usize, frame: &[u8]) -> Result<FrameTarget, Cause> {
    let head = &frame[..looked_at(frame, frame.len())];
    switch().decide(from, &Offload::default(), head, frame.len(), || 0).map(|(to, _)| to)
}

fn ipv4(from: Ipv4Addr) -> Vec<u8> {
    [&[0x45; 12][..], &from.octets(), &[10, 77, 0, 1]].concat()
}

fn ipv6(next: u8, from: Ipv6Addr, payload: &[u8]) -> Vec<u8> {
    [&[0x60, 0, 0, 0, 0, 0, next, 64][..], &from.octets(), &[0; 16], payload].concat()
}

#[test]
fn a_frame_goes_to_whose_address_it_has_to_all_or_to_nobody() {
    let to = |to| decided(ALPHA, &frame(to, mac(ALPHA), 0x88b5, &[0; 46]));
    assert_eq!(to(mac(BETA)), Ok(FrameTarget::Station(BETA)));
    assert_eq!(to(mac(FUNCTION)), Ok(FrameTarget::Station(FUNCTION)));
    assert_eq!(to(MacAddress::BROADCAST), Ok(FrameTarget::All));
    assert_eq!(to(MacAddress([0x33, 0x33, 0, 0, 0, 1])), Ok(FrameTarget::All));
    assert_eq!(to(MacAddress([0x01, 0x80, 0xc2, 0, 0, 0x0e])), Err(Cause::Unknown));
    assert_eq!(to(MacAddress([0x52, 0x54, 0, 0, 0, 1])), Err(Cause::Unknown));
    assert_eq!(to(mac(ALPHA)), Err(Cause::Unknown));
}

#[test]
fn frames_for_no_station_go_to_an_uplink_which_sends_as_no_station() {
    let text = "name = \"lab\"\n[network]\nuplinks = [\"beta/eth1\", \"alpha/eth0\"]\n[hosts.alpha]\n\
                [hosts.beta]\n";
    let stations = Stations::of(&Rack::parse("rack.toml", text).unwrap(), &BTreeMap::new());
    let switch = StationSwitch::new(stations.all(), 1500, 100_000);
    let [beta, alpha] = [2, 3];
    assert_eq!(switch.uplinks(), [beta, alpha]);
    let mac = |station: usize| stations.all()[station].mac;
    let outside = MacAddress([0x52, 0x54, 0, 0, 0, 1]);
    let decide = |station, from, to| {
        let frame = frame(to, from, 0x88b5, &[0; 46]);
        switch.decide(station, &Offload::default(), &frame, frame.len(), || 0).map(|(to, _)| to)
    };
    assert_eq!(decide(ALPHA, mac(ALPHA), outside), Ok(FrameTarget::Outside));
    assert_eq!(decide(ALPHA, mac(ALPHA), mac(beta)), Ok(FrameTarget::Station(beta)));
    for uplink in [beta, alpha] {
        assert_eq!(decide(uplink, outside, mac(ALPHA)), Ok(FrameTarget::Station(ALPHA)));
        assert_eq!(decide(uplink, mac(uplink), mac(ALPHA)), Ok(FrameTarget::Station(ALPHA)));
        assert_eq!(decide(uplink, mac(BETA), mac(ALPHA)), Err(Cause::Spoofed));
        assert_eq!(decide(uplink, outside, outside), Err(Cause::Unknown));
    }
    assert_eq!(decide(ALPHA, outside, mac(BETA)), Err(Cause::Spoofed));
    let heard = |from| switch.heard_as(beta, from, &FrameVlan::untagged(0)).is_some();
    assert!(heard(ALPHA) && !heard(alpha));
}

#[test]
fn functions_use_their_own_addresses_only_and_hosts_any_ip_address() {
    let own = stations().all()[FUNCTION].clone();
    let other = stations().all()[OTHER].clone();
    let sends = |station: usize, kind, packet: &[u8]| {
        decided(station, &frame(mac(ALPHA), mac(station), kind, packet)).map(drop)
    };
    for (address, expected) in
        [(own.ipv4, Ok(())), (Ipv4Addr::UNSPECIFIED, Ok(())), (other.ipv4, Err(Cause::Spoofed))]
    {
        assert_eq!(sends(FUNCTION, IPV4, &ipv4(address)), expected);
        let arp = |mac: MacAddress| {
            [&[0, 1, 8, 0, 6, 4, 0, 2][..], &mac.0, &address.octets(), &[0; 10]].concat()
        };
        assert_eq!(sends(FUNCTION, ARP, &arp(own.mac)), expected);
        assert_eq!(sends(FUNCTION, ARP, &arp(other.mac)), Err(Cause::Spoofed));
        assert_eq!(sends(BETA, IPV4, &ipv4(address)), Ok(()));
    }
    let (mine, others) = (eui64(own.mac), eui64(other.mac));
    for (address, expected) in [
        (own.ipv6, Ok(())),
        (mine, Ok(())),
        ("fe80::abcd".parse().unwrap(), Ok(())),
        (other.ipv6, Err(Cause::Spoofed)),
        (others, Err(Cause::Spoofed)),
    ] {
        assert_eq!(sends(FUNCTION, IPV6, &ipv6(17, address, &[0; 8])), expected, "{address}");
        // The same in what it advertises, with the option that names its Ethernet address.
        let advertises = |mac: MacAddress| {
            let options = [&[2, 1][..], &mac.0].concat();
            let message = [&[136, 0, 0, 0, 0, 0, 0, 0][..], &address.octets(), &options].concat();
            sends(FUNCTION, IPV6, &ipv6(ICMPV6, mine, &message))
        };
        assert_eq!(advertises(own.mac), expected, "{address}");
        assert_eq!(advertises(other.mac), Err(Cause::Spoofed));
    }
}

#[test]
fn neighbour_discovery_hides_behind_no_header_and_a_fragment_of_data_is_none() {
    let own = stations().all()[FUNCTION].clone();
    let sends = |next, payload: &[u8]| {
        let packet = ipv6(next, own.ipv6, payload);
        decided(FUNCTION, &frame(mac(ALPHA), own.mac, IPV6, &packet)).map(drop)
    };
    let router = [134, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(sends(ICMPV6, &router), Err(Cause::Spoofed));
    let behind = |header: [u8; 8]| [&header[..], &router].concat();
    assert_eq!(sends(HOP_BY_HOP, &behind([ICMPV6, 0, 5, 2, 0, 0, 1, 0])), Err(Cause::Spoofed));
    assert_eq!(sends(FRAGMENT, &behind([ICMPV6, 0, 0, 1, 0, 0, 0, 7])), Err(Cause::Spoofed));
    assert_eq!(sends(FRAGMENT, &behind([ICMPV6, 0, 5, 0xa9, 0, 0, 0, 7])), Ok(()));
    // Behind as many headers as there is room for in what is looked at of other frames, or more.
    let nine = [
        &[DESTINATION, 0, 1, 4, 0, 0, 0, 0].repeat(7)[..],
        &[ICMPV6, 0, 1, 4, 0, 0, 0, 0],
        &router,
    ];
    assert_eq!(sends(DESTINATION, &nine.concat()), Err(Cause::Spoofed));
    let long = [&[DESTINATION, 9][..], &[0; 78], &[ICMPV6, 0, 1, 4, 0, 0, 0, 0], &router].concat();
    assert_eq!(sends(DESTINATION, &long), Err(Cause::Spoofed));
    assert_eq!(
        sends(DESTINATION, &long[..87]),
        Err(Cause::Spoofed),
        "it ends before its headers do"
    );
    let echo = [&long[..88], &[128, 0, 0, 0, 0, 0, 0, 0]].concat();
    assert_eq!(sends(DESTINATION, &echo), Ok(()));
    // A report of group membership, and an echo.
    let report = [&[ICMPV6, 0, 5, 2, 0, 0, 1, 0][..], &[143; 8]].concat();
    assert_eq!(sends(HOP_BY_HOP, &report), Ok(()));
    assert_eq!(sends(ICMPV6, &[128, 0, 0, 0, 0, 0, 0, 0]), Ok(()));
}

#[test]
fn tags_are_for_hosts() {
    let tagged = |from: usize, to: MacAddress| {
        let packet = [&[0, 7, 0x88, 0xb5][..], &[0; 46]].concat();
        let frame = frame(to, mac(from), VLAN[0], &packet);
        switch().decide(from, &Offload::default(), &frame, frame.len(), || 0)
    };
    let target = |from, to| tagged(from, to).map(|(target, _)| target);
    assert_eq!(target(ALPHA, mac(BETA)), Ok(FrameTarget::Station(BETA)));
    assert_eq!(target(ALPHA, mac(FUNCTION)), Err(Cause::Vlan));
    assert_eq!(target(FUNCTION, mac(ALPHA)), Err(Cause::Vlan));
    assert_eq!(target(ALPHA, MacAddress::BROADCAST), Ok(FrameTarget::All));
    let hear = |vlan: &FrameVlan| {
        (0..4).filter(|to| switch().heard_as(*to, ALPHA, vlan).is_some()).collect::<Vec<_>>()
    };
    let (_, seven) = tagged(ALPHA, MacAddress::BROADCAST).unwrap();
    assert_eq!(hear(&seven), [BETA]);
    assert_eq!(hear(&FrameVlan::untagged(0)), [BETA, FUNCTION, OTHER]);
}

/// Two hosts, of which beta is a bridge in VLAN 7 and may have two addresses behind it, and an uplink with VLAN 7.
fn bridged() -> (Stations, StationSwitch) {
    let text = "name = \"lab\"\n[network]\nuplinks = [\"alpha/eth0\"]\nuplink_vlans = [7]\n\
                [network.host.beta]\nvlan = 7\nlearned_addresses = 2\n\
                [network.host.gamma]\nvlan = 7\n[hosts.alpha]\n[hosts.beta]\n[hosts.gamma]\n";
    let stations = Stations::of(&Rack::parse("rack.toml", text).unwrap(), &BTreeMap::new());
    let switch = StationSwitch::new(stations.all(), 1500, 100_000);
    (stations, switch)
}

#[test]
fn addresses_behind_a_station_are_learned_and_nobody_else_uses_them() {
    const GAMMA: usize = 2;
    const UPLINK: usize = 3;
    let (stations, switch) = bridged();
    let mac = |station: usize| stations.all()[station].mac;
    let other = |number| MacAddress([2, 0, 0, 0, 0, number]);
    let decide = |station: usize, from, to, tag: &[u8]| {
        let frame = [&to, &from].map(|it: &MacAddress| it.0).concat();
        let frame = [&frame[..], tag, &[0x88, 0xb5], &[0; 46]].concat();
        let decided = switch.decide(station, &Offload::default(), &frame, frame.len(), || 1);
        decided.map(|(to, vlan)| (to, vlan.id()))
    };
    let seven: &[u8] = &[0x81, 0, 0, 7];
    // Nobody knows the address yet, and beta may be asked for it; outside is asked as well.
    assert_eq!(decide(GAMMA, mac(GAMMA), other(1), &[]), Ok((FrameTarget::Flood, 7)));
    assert_eq!(decide(BETA, other(1), mac(GAMMA), &[]), Ok((FrameTarget::Station(GAMMA), 7)));
    assert_eq!(decide(GAMMA, mac(GAMMA), other(1), &[]), Ok((FrameTarget::Station(BETA), 7)));
    assert_eq!(decide(UPLINK, other(9), other(1), seven), Ok((FrameTarget::Station(BETA), 7)));
    assert_eq!(decide(GAMMA, mac(GAMMA), other(9), &[]), Ok((FrameTarget::Outside, 7)));
    // Another VLAN is another network, where nothing of this is known.
    assert_eq!(decide(ALPHA, mac(ALPHA), other(1), &[]), Ok((FrameTarget::Flood, 0)));
    assert_eq!(decide(ALPHA, mac(ALPHA), mac(BETA), &[]), Err(Cause::Vlan));
    assert_eq!(decide(ALPHA, mac(ALPHA), mac(BETA), seven), Err(Cause::Vlan));
    for (station, from, tag) in [
        (GAMMA, other(1), &[][..]),
        (GAMMA, other(5), &[]),
        (UPLINK, other(1), seven),
        (BETA, mac(GAMMA), &[]),
        (BETA, other(9), &[]),
    ] {
        assert_eq!(decide(station, from, MacAddress::BROADCAST, tag), Err(Cause::Spoofed));
    }
    assert_eq!(decide(BETA, other(2), mac(GAMMA), &[]), Ok((FrameTarget::Station(GAMMA), 7)));
    assert_eq!(decide(BETA, other(3), mac(GAMMA), &[]), Err(Cause::Spoofed), "too many");
    assert_eq!(switch.behind(BETA, 1), [(7, other(1)), (7, other(2))]);
    let seen: Vec<MacAddress> =
        switch.seen_outside(UPLINK, 1).into_iter().map(|(mac, _)| mac).collect();
    assert_eq!(seen, [mac(ALPHA), mac(BETA), other(1), other(2), mac(GAMMA)]);
    // Not one outside, of which a copy came, nor one that nobody knows.
    let is_inside = |to: MacAddress| {
        let frame = [&to.0[..], &other(8).0, seven, &[8, 0]].concat();
        switch.is_known_inside(UPLINK, &frame, 1)
    };
    let places = [other(1), mac(BETA), other(9), other(7), MacAddress::BROADCAST];
    assert_eq!(places.map(is_inside), [true, true, false, false, false]);
}

#[test]
fn what_arrives_is_in_a_vlan_of_both_and_from_who_may_send_it() {
    const GAMMA: usize = 2;
    const UPLINK: usize = 3;
    let (stations, switch) = bridged();
    let arrives = |from: usize, to, source: MacAddress, tag: &[u8]| {
        let frame = [&[2; 6][..], &source.0, tag, &[0x88, 0xb5]].concat();
        switch.check_arrival((from, to), &frame, || 1)
    };
    let mac = |station: usize| stations.all()[station].mac;
    let seven: &[u8] = &[0x81, 0, 0, 7];
    assert_eq!(arrives(BETA, GAMMA, mac(BETA), &[]), Ok(()));
    assert_eq!(arrives(BETA, GAMMA, mac(BETA), seven), Err(Cause::Vlan));
    assert_eq!(arrives(BETA, GAMMA, MacAddress([2; 6]), &[]), Ok(()));
    assert_eq!(arrives(UPLINK, GAMMA, MacAddress([2; 6]), &[]), Err(Cause::Spoofed));
    assert_eq!(arrives(ALPHA, GAMMA, mac(ALPHA), &[]), Err(Cause::Vlan));
    assert_eq!(arrives(BETA, UPLINK, mac(BETA), seven), Ok(()));
    assert_eq!(arrives(BETA, UPLINK, mac(BETA), &[]), Err(Cause::Vlan));
    assert_eq!(arrives(ALPHA, UPLINK, mac(ALPHA), &[0x81, 0, 0, 8]), Err(Cause::Vlan));
    assert!(switch.may_meet(BETA, GAMMA) && !switch.may_meet(ALPHA, GAMMA));
    assert!(switch.may_meet(ALPHA, UPLINK) && switch.may_meet(GAMMA, UPLINK));
}

#[test]
fn what_is_longer_than_the_network_takes_is_to_be_cut() {
    let frame = frame(mac(BETA), mac(ALPHA), 0x88b5, &[0; 50]);
    let decide =
        |offload: Offload, length| switch().decide(ALPHA, &offload, &frame, length, || 0).map(drop);
    let whole = Offload::default();
    assert_eq!(decide(whole, 1514), Ok(()));
    assert_eq!(decide(whole, 1515), Err(Cause::Length));
    let cut = |size: u16| Offload {
        flags: NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        gso_size: size.into(),
        csum_start: 34.into(),
        csum_offset: 16.into(),
        ..Offload::default()
    };
    assert_eq!(decide(cut(1448), MAX_FRAME + 1), Err(Cause::Length));
    assert_eq!(decide(Offload { gso_type: 9, ..whole }, 64), Err(Cause::Offload));
    // Nobody knows how to cut what is no segment.
    assert_eq!(decide(cut(1448), 65_000), Err(Cause::Offload));
    assert_eq!(decide(cut(1448), 1514), Ok(()));
}

/// Pieces have headers, too, of as many bytes as the sender's.
#[test]
fn what_is_to_be_cut_has_pieces_that_the_network_takes() {
    let switch = switch();
    let decide = |kind: u16, packet: &[u8], (gso_type, size): (u8, u16)| {
        let frame = frame(mac(BETA), mac(ALPHA), kind, packet);
        let offload = Offload { gso_type, gso_size: size.into(), ..Offload::default() };
        let head = &frame[..looked_at(&frame, 65_000).min(frame.len())];
        switch.decide(ALPHA, &offload, head, 65_000, || 0).map(drop)
    };
    let v4 = |protocol: u8, transport: &[u8]| {
        let mut packet = [ipv4(Ipv4Addr::UNSPECIFIED), transport.to_vec()].concat();
        (packet[0], packet[9]) = (0x45, protocol);
        packet
    };
    let own = eui64(mac(ALPHA));
    let mut tcp = [0; 32];
    tcp[12] = 8 << 4;
    // A header of eight bytes with options for the destination, before that of TCP.
    let mut options = [0; 40];
    (options[0], options[20]) = (6, 8 << 4);
    // The same with so many of them that the transport's is behind what is looked at of other frames.
    let mut long = [0; 232];
    (long[0], long[1], long[212]) = (6, 24, 8 << 4);
    let cases = [
        (IPV4, v4(6, &tcp), GSO_TCPV4, 20 + 32),
        (IPV6, ipv6(6, own, &tcp), GSO_TCPV6, 40 + 32),
        (IPV6, ipv6(DESTINATION, own, &options), GSO_TCPV6, 40 + 8 + 32),
        (IPV6, ipv6(DESTINATION, own, &long), GSO_TCPV6, 40 + 200 + 32),
        (IPV4, v4(17, &[0; 8]), GSO_UDP_L4, 20 + 8),
        (IPV6, ipv6(17, own, &[0; 8]), GSO_UDP_L4, 40 + 8),
        // Fragments.
        (IPV4, v4(17, &[0; 8]), GSO_UDP, 20),
        (IPV6, ipv6(17, own, &[0; 8]), GSO_UDP, 40 + 8),
    ];
    for (kind, packet, gso_type, headers) in cases {
        for gso_type in [gso_type, gso_type | GSO_ECN] {
            assert_eq!(decide(kind, &packet, (gso_type, 1500 - headers)), Ok(()), "{gso_type}");
            let large = decide(kind, &packet, (gso_type, 1501 - headers));
            assert_eq!(large, Err(Cause::Offload), "{gso_type}");
        }
    }
    for (protocol, gso_type) in [(1, GSO_TCPV4), (17, GSO_TCPV4), (1, GSO_UDP), (6, GSO_UDP_L4)] {
        let whole = decide(IPV4, &v4(protocol, &tcp), (gso_type, 1000));
        assert_eq!(whole, Err(Cause::Offload), "{protocol} is not cut as {gso_type}");
    }
}

proptest! {
    /// What the receiver's side writes as a checksum, whose value and place the sender chooses, changes nothing that was
    /// decided by: the frame that comes out is one that its sender might have sent, to the same receiver.
    #[test]
    fn a_checksum_that_is_still_to_be_written_changes_no_decision(
        template in 0usize..6,
        start in prop_oneof![0u16..90, Just(34u16), Just(54u16)],
        offset in prop_oneof![0u16..40, Just(2u16), Just(6u16), Just(16u16)],
        filler in proptest::collection::vec(any::<u8>(), 40),
        first in 0usize..3,
    ) {
        let own = stations().all()[FUNCTION].clone();
        // A header that says which one comes next, as a checksum could make it.
        let destination = [&[59, 0, 1, 4, 0, 0, 0, 0][..], &filler].concat();
        let advertised = [&[136, 0, 0, 0, 0, 0, 0, 0][..], &own.ipv6.octets(), &[2, 1], &own.mac.0].concat();
        let next = [17, 6, ICMPV6][first];
        let (kind, packet) = match template {
            0 => (IPV4, [ipv4(own.ipv4), filler.clone()].concat()),
            1 => (IPV6, ipv6(next, own.ipv6, &filler)),
            2 => (IPV6, ipv6(DESTINATION, own.ipv6, &destination)),
            3 => (IPV6, ipv6(ICMPV6, own.ipv6, &advertised)),
            4 => (ARP, [&[0, 1, 8, 0, 6, 4, 0, 2][..], &own.mac.0, &own.ipv4.octets(), &[0; 10]].concat()),
            _ => (0x88b5, filler.clone()),
        };
        let sent = frame(mac(ALPHA), own.mac, kind, &packet);
        let offload = Offload {
            flags: NEEDS_CSUM,
            csum_start: start.into(),
            csum_offset: offset.into(),
            ..Offload::default()
        };
        let decide = |offload: &Offload, frame: &[u8]| {
            let head = &frame[..frame.len().min(HEAD)];
            switch().decide(FUNCTION, offload, head, frame.len(), || 0).map(|(to, _)| to)
        };
        if let Ok(target) = decide(&offload, &sent) {
            let mut written = sent.clone();
            crate::cut::complete_checksum(&mut written, &offload);
            prop_assert_eq!(decide(&Offload::default(), &written), Ok(target));
        }
    }

    /// Nobody gets a frame in somebody else's name, or one that claims what its sender may not.
    #[test]
    fn whatever_is_sent_only_its_sender_is_named(
        bytes in prop::collection::vec(any::<u8>(), 0..HEAD), from in 0usize..4, honest in any::<bool>(),
    ) {
        let mut bytes = bytes;
        if honest && bytes.len() >= 12 {
            bytes[6..12].copy_from_slice(&mac(from).0);
        }
        if let Ok(to) = decided(from, &bytes) {
            prop_assert_eq!(&bytes[6..12], &mac(from).0);
            prop_assert!(to != FrameTarget::Station(from));
        }
    }
}
