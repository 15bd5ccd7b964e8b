//! What a function may say of itself: the IP addresses that it sends from and answers for.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::StationSwitch;
use crate::address::MacAddress;
use crate::ipv6;
use crate::neighbours::{NEIGHBOUR_ADVERTISEMENT, NEIGHBOUR_SOLICITATION};

/// Neighbour discovery: router solicitation to redirect.
const DISCOVERY: std::ops::RangeInclusive<u8> = 133..=137;
const ROUTER_ADVERTISEMENT: u8 = 134;
const REDIRECT: u8 = 137;

impl StationSwitch {
    /// Whether a function may use the IPv6 address at `at`: its own, none yet, or a link-local one. Which of
    /// those it makes up is its own affair, if it is not the one that another station makes of its address.
    pub(super) fn is_own_ipv6(&self, from: usize, packet: &[u8], at: usize, own: Ipv6Addr) -> bool {
        let Some(address) = ipv6_at(packet, at) else { return false };
        if address == own || address.is_unspecified() {
            return true;
        }
        address.is_unicast_link_local()
            && self
                .members
                .iter()
                .enumerate()
                .all(|(nth, it)| nth == from || eui64(it.mac) != address)
    }

    /// Whether what a function says by neighbour discovery is about itself.
    pub(super) fn is_honest_icmp(&self, from: usize, packet: &[u8], own: Ipv6Addr) -> bool {
        let at = match ipv6::upper(packet) {
            Some(upper) if is_icmp(&upper) => upper.at,
            Some(_) => return true,
            None => return false,
        };
        let direct = at == ipv6::HEADER;
        let Some(kind) = packet.get(at).copied() else { return false };
        if !DISCOVERY.contains(&kind) {
            return true;
        }
        // Nobody sends these behind other headers (RFC 6980); a function is no router.
        if !direct || kind == ROUTER_ADVERTISEMENT || kind == REDIRECT {
            return false;
        }
        let about = kind != NEIGHBOUR_ADVERTISEMENT || self.is_own_ipv6(from, packet, at + 8, own);
        let options = if kind >= NEIGHBOUR_SOLICITATION { at + 24 } else { at + 8 };
        about && options_are_of(packet.get(options..).unwrap_or_default(), self.members[from].mac)
    }
}

/// Whether an ICMPv6 message is behind the headers of a packet, or the beginning of one.
pub(super) fn is_icmp(upper: &ipv6::Upper) -> bool {
    upper.protocol == ipv6::ICMPV6 && upper.fragment.is_none_or(|offset| offset == 0)
}

/// Whether each link-layer address in the options of neighbour discovery is `mac`.
fn options_are_of(mut options: &[u8], mac: MacAddress) -> bool {
    while let [kind, units, ..] = *options {
        let Some((option, rest)) = options.split_at_checked(8 * usize::from(units)) else {
            return false;
        };
        if units == 0 || (matches!(kind, 1 | 2) && option.get(2..8) != Some(&mac.0)) {
            return false;
        }
        options = rest;
    }
    true
}

pub(super) fn own_ipv4(packet: &[u8], at: usize, own: Ipv4Addr) -> bool {
    let found = packet.get(at..at + 4);
    found == Some(&own.octets()) || found == Some(&[0; 4])
}

fn ipv6_at(packet: &[u8], at: usize) -> Option<Ipv6Addr> {
    let bytes: [u8; 16] = packet.get(at..at + 16)?.try_into().ok()?;
    Some(bytes.into())
}

/// The link-local address that a station makes of its Ethernet address (RFC 4291, appendix A).
pub(super) fn eui64(mac: MacAddress) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac.0;
    let half = u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f]);
    Ipv6Addr::from_bits(0xfe80 << 112 | u128::from(half))
}
