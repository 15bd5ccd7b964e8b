//! Which station has an IP address, for those who ask by address resolution (ARP) or neighbour discovery: the answer of the
//! sender's node, in the place of the questions that all stations would hear (pure).
//!
//! A question is answered that asks for an address which the rack file gives a station. What else is sent to many
//! stays for many: who looks whether an address is free, or announces one of its own, is to be heard.
//!
//! Sources: RFC 826 (ARP), RFC 5227 (probes and announcements); RFC 4861, sections 4.3, 4.4 and 7 (neighbour discovery),
//! and RFC 4291, section 2.7.1 (the groups that it asks).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::address::MacAddress;
use crate::addressing::Station;
use crate::cut::{fold, sum};
use crate::ethernet::{ARP, EthernetHeader, IPV6, TAG, TAGGED};
use crate::ipv6;

/// Bytes of the longest answer, without a VLAN tag.
pub(crate) const LONGEST_ANSWER: usize = 14 + ipv6::HEADER + ADVERTISEMENT;

/// The beginning of an ARP message about Ethernet and IPv4, before its operation.
const ARP_KINDS: [u8; 6] = [0, 1, 8, 0, 6, 4];
const ARP_REQUEST: [u8; 2] = [0, 1];
const ARP_REPLY: [u8; 2] = [0, 2];

/// Kinds of ICMPv6 messages: the question, and the answer.
pub(crate) const NEIGHBOUR_SOLICITATION: u8 = 135;
pub(crate) const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// Bytes of a solicitation without options.
const SOLICITATION_BYTES: usize = 24;
/// Bytes of an advertisement with the option for its sender's Ethernet address.
const ADVERTISEMENT: usize = 24 + 8;
/// The answer was asked for, and is in the place of what was known before.
const SOLICITED_AND_OVERRIDES: u8 = 0x60;
/// The option with the Ethernet address that is asked for, and its length in units of 8 bytes.
const TARGET_ADDRESS: [u8; 2] = [2, 1];
/// What nobody can have forwarded.
const UNFORWARDED: u8 = 255;

/// Whose the IP addresses are that the rack file gives its stations. Interfaces of hosts know all of them from the beginning,
/// and go by the same.
#[derive(Debug, Default)]
pub struct KnownAddresses(Vec<(IpAddr, usize)>);

impl KnownAddresses {
    /// Those of stations, by number.
    pub fn of(stations: &[Station]) -> KnownAddresses {
        let of = |(nth, it): (usize, &Station)| {
            let own = it.address().into_iter();
            own.flat_map(move |(ipv4, ipv6)| [(IpAddr::from(ipv4), nth), (IpAddr::from(ipv6), nth)])
        };
        let all = stations.iter().enumerate().flat_map(of);
        let mut all: Vec<(IpAddr, usize)> = all.filter(|(it, _)| !it.is_unspecified()).collect();
        all.sort_unstable();
        KnownAddresses(all)
    }

    /// The station that has an address.
    pub fn owner(&self, address: IpAddr) -> Option<usize> {
        let place = self.0.binary_search_by_key(&address, |(address, _)| *address).ok()?;
        Some(self.0[place].1)
    }
}

/// A question for the Ethernet address of an IP address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeighbourQuestion {
    /// Who asks, by the Ethernet address that it sends from.
    asker: MacAddress,
    /// The IP addresses that is asked from and for.
    ends: Ends,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ends {
    V4 { from: Ipv4Addr, about: Ipv4Addr },
    V6 { from: Ipv6Addr, about: Ipv6Addr },
}

impl NeighbourQuestion {
    /// The question that a frame asks which begins with `head`; `None` where that is none, or is one that everybody is to
    /// hear.
    pub fn read(head: &[u8]) -> Option<NeighbourQuestion> {
        let header = EthernetHeader::read(head)?;
        // Behind a service tag is the network of somebody else, and so behind two tags.
        let one_tag = header.length == 14 + TAG && head[12..14] == TAGGED[0].to_be_bytes();
        if !header.to.is_group() || header.length != 14 && !one_tag {
            return None;
        }
        let packet = &head[header.length..];
        let ends = match header.kind {
            ARP => arp_request(packet, header.from),
            IPV6 => solicitation(packet),
            _ => None,
        }?;
        Some(NeighbourQuestion { asker: header.from, ends })
    }

    /// The address whose owner is asked for.
    pub fn about(&self) -> IpAddr {
        match self.ends {
            Ends::V4 { about, .. } => about.into(),
            Ends::V6 { about, .. } => about.into(),
        }
    }

    /// The answer: a frame without a tag from `owner`, which has the address.
    pub fn answer(&self, owner: MacAddress) -> Vec<u8> {
        let mut frame = Vec::with_capacity(LONGEST_ANSWER);
        frame.extend(self.asker.0);
        frame.extend(owner.0);
        match self.ends {
            Ends::V4 { from, about } => {
                frame.extend(ARP.to_be_bytes());
                frame.extend(ARP_KINDS);
                frame.extend(ARP_REPLY);
                frame.extend(owner.0);
                frame.extend(about.octets());
                frame.extend(self.asker.0);
                frame.extend(from.octets());
            }
            Ends::V6 { from, about } => {
                frame.extend(IPV6.to_be_bytes());
                frame.extend([0x60, 0, 0, 0, 0, ADVERTISEMENT as u8, ipv6::ICMPV6, UNFORWARDED]);
                frame.extend(about.octets());
                frame.extend(from.octets());
                let message = frame.len();
                frame.extend([NEIGHBOUR_ADVERTISEMENT, 0, 0, 0, SOLICITED_AND_OVERRIDES, 0, 0, 0]);
                frame.extend(about.octets());
                frame.extend(TARGET_ADDRESS);
                frame.extend(owner.0);
                let checksum = checksum(&frame[14..message], &frame[message..]);
                frame[message + 2..message + 4].copy_from_slice(&checksum.to_be_bytes());
            }
        }
        frame
    }
}

fn arp_request(packet: &[u8], asker: MacAddress) -> Option<Ends> {
    let address =
        |at: usize| Some(Ipv4Addr::from(<[u8; 4]>::try_from(packet.get(at..at + 4)?).ok()?));
    let (from, about) = (address(14)?, address(24)?);
    let asks = packet.starts_with(&ARP_KINDS)
        && packet[6..8] == ARP_REQUEST
        && packet[8..14] == asker.0
        && !from.is_unspecified()
        && from != about;
    asks.then_some(Ends::V4 { from, about })
}

fn solicitation(packet: &[u8]) -> Option<Ends> {
    let address =
        |at: usize| Some(Ipv6Addr::from(<[u8; 16]>::try_from(packet.get(at..at + 16)?).ok()?));
    let (from, to) = (address(8)?, address(24)?);
    let bytes = usize::from(u16::from_be_bytes([packet[4], packet[5]]));
    let message = packet.get(ipv6::HEADER..ipv6::HEADER + bytes)?;
    let about = address(ipv6::HEADER + 8)?;
    let asks = packet[0] >> 4 == 6
        && packet[6] == ipv6::ICMPV6
        && packet[7] == UNFORWARDED
        && bytes >= SOLICITATION_BYTES
        && message[..2] == [NEIGHBOUR_SOLICITATION, 0]
        && !from.is_unspecified()
        && !from.is_multicast()
        && from != about
        && to == group_of(about)
        && checksum(&packet[..ipv6::HEADER], message) == 0;
    asks.then_some(Ends::V6 { from, about })
}

/// The group that is asked for an address.
fn group_of(about: Ipv6Addr) -> Ipv6Addr {
    let group = 0xff02_0000_0000_0000_0000_0001_ff00_0000_u128;
    Ipv6Addr::from_bits(group | about.to_bits() & 0xff_ffff)
}

/// The checksum of an ICMPv6 message behind this header; 0 where the message has the right one.
fn checksum(header: &[u8], message: &[u8]) -> u16 {
    let protocol = u64::from(ipv6::ICMPV6);
    fold(sum(&header[8..ipv6::HEADER]) + message.len() as u64 + protocol + sum(message))
}

#[cfg(test)]
mod tests;
