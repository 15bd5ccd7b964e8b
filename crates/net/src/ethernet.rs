//! The headers before a packet: Ethernet II with up to two VLAN tags (IEEE 802.3, 802.1Q).

use crate::address::MacAddress;

/// Bytes of a header without tags.
pub const HEADER: usize = 14;
/// Bytes of a VLAN tag.
pub const TAG: usize = 4;
/// EtherType of an IPv4 packet.
pub const IPV4: u16 = 0x0800;
/// EtherType of an IPv6 packet.
pub const IPV6: u16 = 0x86dd;
/// EtherType of an address resolution message (ARP).
pub const ARP: u16 = 0x0806;
/// EtherType of a reverse ARP message, as moved machines announce themselves with.
pub const RARP: u16 = 0x8035;
/// A VLAN tag follows (802.1Q), or two (802.1ad).
pub const TAGGED: [u16; 2] = [0x8100, 0x88a8];

/// The fields of a frame's Ethernet header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EthernetHeader {
    /// Whom it is for.
    pub to: MacAddress,
    /// Whom it says that it is from.
    pub from: MacAddress,
    /// The identifier of the outer VLAN, 0 to 4095; 0 is none but a priority.
    pub vlan: Option<u16>,
    /// What follows the header and all tags.
    pub kind: u16,
    /// Bytes of the header with its tags.
    pub length: usize,
}

impl EthernetHeader {
    /// The header at the beginning of `frame`. `None` where it is cut off, or has more than two tags.
    pub fn read(frame: &[u8]) -> Option<EthernetHeader> {
        let address = |at: usize| Some(MacAddress(frame.get(at..at + 6)?.try_into().ok()?));
        let word = |at: usize| Some(u16::from_be_bytes(frame.get(at..at + 2)?.try_into().ok()?));
        let (to, from) = (address(0)?, address(6)?);
        let (mut at, mut vlan) = (12, None);
        for _ in 0..=2 {
            let kind = word(at)?;
            if !TAGGED.contains(&kind) {
                return Some(EthernetHeader { to, from, vlan, kind, length: at + 2 });
            }
            vlan = vlan.or(Some(word(at + 2)? & 0xfff));
            at += TAG;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: [u8; 14] = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1, 0x08, 0x06];

    #[test]
    fn tags_are_counted_and_the_outer_one_names_the_vlan() {
        let plain = EthernetHeader::read(&FRAME).unwrap();
        assert_eq!((plain.to, plain.from), (MacAddress::BROADCAST, MacAddress([2, 0, 0, 0, 0, 1])));
        assert_eq!((plain.vlan, plain.kind, plain.length), (None, ARP, 14));
        let mut frame = FRAME.to_vec();
        frame.splice(12..12, [0x88, 0xa8, 0x20, 0x07, 0x81, 0x00, 0x00, 0x09]);
        let tagged = EthernetHeader::read(&frame).unwrap();
        assert_eq!((tagged.vlan, tagged.kind, tagged.length), (Some(7), ARP, 22));
        frame.splice(12..12, [0x81, 0x00, 0, 1]);
        assert_eq!(EthernetHeader::read(&frame), None);
        for length in 0..FRAME.len() {
            assert_eq!(EthernetHeader::read(&FRAME[..length]), None);
        }
    }
}
