//! What to answer when a packet is too large for the network that it is to go to (pure).
//!
//! Within a rack packets have up to 65,535 bytes; outside they have 1500. An uplink is no router, but it is where the
//! sizes meet, so it says what a router would: ICMP's "fragmentation needed" (RFC 792, RFC 1191) and ICMPv6's "packet
//! too big" (RFC 4443, section 3.2). They come from the address that the packet was for; senders look at the packet
//! inside.

use crate::ethernet::{EthernetHeader, IPV4, IPV6};
use crate::ipv6;
use crate::offload::{GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP, GSO_UDP_L4, Offload};

/// Bytes of a frame that are enough to decide about it.
pub const LOOK: usize = 22 + 1280;

/// Bytes of an IPv4 header without options.
const IPV4_HEADER: usize = 20;
/// Bytes of an IPv6 header.
const IPV6_HEADER: usize = 40;
/// Bytes of the header that makes an IPv6 packet a fragment.
const FRAGMENT_HEADER: usize = 8;
/// Bytes of a UDP header.
const UDP_HEADER: usize = 8;
/// Bytes of an ICMP error before the packet that it is about.
const ICMP_HEADER: usize = 8;
/// Bytes of an ICMPv4 error at most (RFC 1812, section 4.3.2.3), and of an ICMPv6 error (RFC 4443, section 2.4).
const MOST: [usize; 2] = [576, 1280];

const PROTOCOL_ICMP: u8 = 1;
const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_UDP: u8 = 17;
const PROTOCOL_ICMPV6: u8 = 58;

/// What becomes of a packet at a network with a smaller MTU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fit {
    /// It fits, or is no IP packet, or the kernel cuts it as its sender asked.
    Fits,
    /// It is dropped, and its sender told by this frame.
    Answer(Vec<u8>),
    /// It is to be cut into [fragments](crate::fragment::fragments), each of its pieces where it is a segment, if its
    /// header is right.
    Cut,
    /// It is dropped, and nobody is told: it is itself an error, from nobody, or nobody can cut it.
    Drop,
}

/// Whether the frame that begins with `start` (all of it, or [`LOOK`] bytes) and has `length` bytes goes through a
/// network of `mtu` bytes.
pub fn fit(start: &[u8], length: usize, offload: &Offload, mtu: u16) -> Fit {
    let Some(header) = EthernetHeader::read(start) else { return Fit::Drop };
    let packet = &start[header.length..];
    let Some(bytes) = length.checked_sub(header.length) else { return Fit::Drop };
    if longest_packet(header.kind, packet, bytes, offload) <= usize::from(mtu) {
        return Fit::Fits;
    }
    if header.kind == IPV4 && offload.gso_type & !GSO_ECN != GSO_UDP && may_be_cut(packet) {
        return Fit::Cut;
    }
    let answer = match header.kind {
        IPV4 => answer_v4(packet, mtu),
        IPV6 => answer_v6(packet, mtu),
        _ => None,
    };
    match answer {
        Some(packet) => {
            let mut frame = Vec::with_capacity(header.length + packet.len());
            frame.extend_from_slice(&header.from.0);
            frame.extend_from_slice(&header.to.0);
            frame.extend_from_slice(&start[12..header.length]);
            frame.extend_from_slice(&packet);
            Fit::Answer(frame)
        }
        None => Fit::Drop,
    }
}

/// Bytes of the longest packet on a wire of one of `bytes` bytes that begins with `packet`, behind an Ethernet header that
/// says `kind`: of its longest piece where it is to be cut. What nobody can cut as its sender asks stays as long as it is.
pub fn longest_packet(kind: u16, packet: &[u8], bytes: usize, offload: &Offload) -> usize {
    if offload.gso_type == GSO_NONE {
        return bytes;
    }
    match headers_of_pieces(kind, packet, offload) {
        Some(headers) => (headers + usize::from(offload.gso_size.get())).min(bytes),
        None => bytes,
    }
}

/// Bytes of the network and transport headers that each piece of a cut packet has.
fn headers_of_pieces(kind: u16, packet: &[u8], offload: &Offload) -> Option<usize> {
    let (network, protocol) = match kind {
        IPV4 => (usize::from(*packet.first()? & 0xf) * 4, *packet.get(9)?),
        // A fragment is cut already.
        IPV6 => {
            let upper = ipv6::upper(packet).filter(|it| it.fragment.is_none())?;
            (upper.at, upper.protocol)
        }
        _ => return None,
    };
    match (offload.gso_type & !GSO_ECN, protocol) {
        (GSO_TCPV4 | GSO_TCPV6, PROTOCOL_TCP) => {
            Some(network + usize::from(*packet.get(network + 12)? >> 4) * 4)
        }
        (GSO_UDP_L4, PROTOCOL_UDP) => Some(network + UDP_HEADER),
        // The first fragment has the header of UDP among its payload.
        (GSO_UDP, PROTOCOL_UDP) if kind == IPV6 => Some(network + FRAGMENT_HEADER),
        (GSO_UDP, PROTOCOL_UDP) => Some(network),
        _ => None,
    }
}

/// Whether an IPv4 packet's sender lets it be cut.
fn may_be_cut(packet: &[u8]) -> bool {
    packet.get(6).is_some_and(|flags| flags >> 5 & 2 == 0)
}

fn answer_v4(packet: &[u8], mtu: u16) -> Option<Vec<u8>> {
    let header = packet.get(..IPV4_HEADER)?;
    let length = usize::from(header[0] & 0xf) * 4;
    let (flags, fragment) = (header[6] >> 5, u16::from_be_bytes([header[6] & 0x1f, header[7]]));
    let (from, to) = (&header[12..16], &header[16..20]);
    let nobody = from[0] >= 224 || from[0] == 0 || from[0] == 127;
    let group = to[0] >= 224;
    let is_error =
        header[9] == PROTOCOL_ICMP && packet.get(length).is_none_or(|kind| is_error_v4(*kind));
    // Without "don't fragment" it is cut.
    if header[0] >> 4 != 4
        || length < IPV4_HEADER
        || flags & 2 == 0
        || fragment != 0
        || nobody
        || group
        || is_error
    {
        return None;
    }
    let quoted = &packet[..packet.len().min(MOST[0] - IPV4_HEADER - ICMP_HEADER)];
    let total = IPV4_HEADER + ICMP_HEADER + quoted.len();
    let mut answer = vec![0; IPV4_HEADER + ICMP_HEADER];
    answer[0] = 0x45;
    answer[1] = 0xc0;
    answer[2..4].copy_from_slice(&(total as u16).to_be_bytes());
    (answer[8], answer[9]) = (64, PROTOCOL_ICMP);
    answer[12..16].copy_from_slice(to);
    answer[16..20].copy_from_slice(from);
    let sum = checksum(&[&answer[..IPV4_HEADER]]);
    answer[10..12].copy_from_slice(&sum.to_be_bytes());
    // Destination unreachable: fragmentation needed and "don't fragment" set.
    (answer[20], answer[21]) = (3, 4);
    answer[26..28].copy_from_slice(&mtu.to_be_bytes());
    answer.extend_from_slice(quoted);
    let sum = checksum(&[&answer[IPV4_HEADER..]]);
    answer[22..24].copy_from_slice(&sum.to_be_bytes());
    Some(answer)
}

/// ICMP messages that report errors, which are never answered by an error (RFC 1122, section 3.2.2).
fn is_error_v4(kind: u8) -> bool {
    matches!(kind, 3 | 4 | 5 | 11 | 12)
}

fn answer_v6(packet: &[u8], mtu: u16) -> Option<Vec<u8>> {
    let header = packet.get(..IPV6_HEADER)?;
    let (from, to) = (&header[8..24], &header[24..40]);
    let nobody = from[0] == 0xff || from[..15].iter().all(|byte| *byte == 0);
    let is_error =
        header[6] == PROTOCOL_ICMPV6 && packet.get(IPV6_HEADER).is_none_or(|kind| *kind < 128);
    // A group's address cannot be the source of the answer.
    if header[0] >> 4 != 6 || nobody || to[0] == 0xff || is_error {
        return None;
    }
    let quoted = &packet[..packet.len().min(MOST[1] - IPV6_HEADER - ICMP_HEADER)];
    let length = (ICMP_HEADER + quoted.len()) as u16;
    let mut answer = vec![0; IPV6_HEADER + ICMP_HEADER];
    answer[0] = 0x60;
    answer[4..6].copy_from_slice(&length.to_be_bytes());
    (answer[6], answer[7]) = (PROTOCOL_ICMPV6, 64);
    answer[8..24].copy_from_slice(to);
    answer[24..40].copy_from_slice(from);
    // Packet too big.
    answer[40] = 2;
    answer[44..48].copy_from_slice(&u32::from(mtu).to_be_bytes());
    answer.extend_from_slice(quoted);
    let pseudo = [&u32::from(length).to_be_bytes()[..], &[0, 0, 0, PROTOCOL_ICMPV6]].concat();
    let sum = checksum(&[&answer[8..40], &pseudo, &answer[IPV6_HEADER..]]);
    answer[42..44].copy_from_slice(&sum.to_be_bytes());
    Some(answer)
}

/// The Internet checksum of the parts in order (RFC 1071); all but the last have an even number of bytes.
fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let word = |pair: &[u8]| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low));
    let mut sum: u32 = words.map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TO: [u8; 6] = [2, 0, 0, 0, 0, 9];
    const FROM: [u8; 6] = [2, 0, 0, 0, 0, 1];

    fn frame(kind: u16, packet: &[u8]) -> Vec<u8> {
        [&TO[..], &FROM, &kind.to_be_bytes(), packet].concat()
    }

    fn v4(length: usize, flags: u8, protocol: u8) -> Vec<u8> {
        let mut packet = vec![0; length];
        packet[0] = 0x45;
        packet[2..4].copy_from_slice(&(length as u16).to_be_bytes());
        (packet[6], packet[8], packet[9]) = (flags << 5, 64, protocol);
        packet[12..16].copy_from_slice(&[10, 0, 0, 1]);
        packet[16..20].copy_from_slice(&[192, 0, 2, 7]);
        frame(IPV4, &packet)
    }

    fn v6(length: usize, next: u8) -> Vec<u8> {
        let mut packet = vec![0; length];
        packet[0] = 0x60;
        packet[4..6].copy_from_slice(&((length - 40) as u16).to_be_bytes());
        packet[6] = next;
        packet[8..24].copy_from_slice(&[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        packet[24..40].copy_from_slice(&[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
        frame(IPV6, &packet)
    }

    fn plain(frame: &[u8], mtu: u16) -> Fit {
        fit(&frame[..frame.len().min(LOOK)], frame.len(), &Offload::default(), mtu)
    }

    #[test]
    fn a_large_packet_is_answered_to_its_sender_with_the_size_that_fits() {
        assert_eq!(plain(&v4(1500, 2, 17), 1500), Fit::Fits);
        let Fit::Answer(answer) = plain(&v4(9000, 2, 17), 1500) else { panic!("no answer") };
        assert_eq!((&answer[..6], &answer[6..12]), (&FROM[..], &TO[..]));
        let packet = &answer[14..];
        assert_eq!(packet.len(), 576);
        assert_eq!((&packet[12..16], &packet[16..20]), (&[192, 0, 2, 7][..], &[10, 0, 0, 1][..]));
        assert_eq!((packet[20], packet[21], &packet[26..28]), (3, 4, &1500u16.to_be_bytes()[..]));
        assert_eq!(checksum(&[&packet[..20]]), 0);
        assert_eq!(checksum(&[&packet[20..]]), 0);
        let Fit::Answer(answer) = plain(&v6(9000, 17), 1500) else { panic!("no answer") };
        let packet = &answer[14..];
        assert_eq!((packet.len(), packet[40], &packet[44..48]), (1280, 2, &[0, 0, 5, 220][..]));
        let length = u32::from(u16::from_be_bytes([packet[4], packet[5]]));
        let pseudo = [&length.to_be_bytes()[..], &[0, 0, 0, 58]].concat();
        assert_eq!(checksum(&[&packet[8..40], &pseudo, &packet[40..]]), 0);
    }

    #[test]
    fn what_may_be_cut_is() {
        assert_eq!(plain(&v4(9000, 0, 17), 1500), Fit::Cut);
        assert_eq!(plain(&v4(9000, 1, 17), 1500), Fit::Cut, "a fragment");
        assert_eq!(plain(&v4(1500, 0, 17), 1500), Fit::Fits);
        let offload = Offload { gso_type: GSO_UDP_L4, gso_size: 3000.into(), ..Offload::default() };
        let frame = v4(9000, 0, 17);
        assert_eq!(fit(&frame[..LOOK], frame.len(), &offload, 1500), Fit::Cut, "datagrams");
        let legacy = Offload { gso_type: GSO_UDP, gso_size: 3000.into(), ..Offload::default() };
        assert_eq!(fit(&frame[..LOOK], frame.len(), &legacy, 1500), Fit::Drop);
    }

    #[test]
    fn errors_and_groups_are_not_answered() {
        let mut error = v4(9000, 2, 1);
        error[14 + 20] = 11;
        assert_eq!(plain(&error, 1500), Fit::Drop);
        error[14 + 20] = 8;
        assert!(matches!(plain(&error, 1500), Fit::Answer(_)), "an echo request is no error");
        let mut group = v4(9000, 2, 17);
        group[14 + 16] = 224;
        assert_eq!(plain(&group, 1500), Fit::Drop);
        let error = v6(9000, 58);
        assert_eq!(plain(&error, 1500), Fit::Drop);
        assert_eq!(plain(&frame(0x88b5, &[0; 2000]), 1500), Fit::Drop);
        assert_eq!(plain(&frame(0x88b5, &[0; 1500]), 1500), Fit::Fits);
    }

    #[test]
    fn a_segment_that_is_to_be_cut_fits_when_its_pieces_do() {
        let mut segment = v4(60_000, 2, 6);
        segment[14 + 20 + 12] = 8 << 4;
        let cut = |size: u16| Offload {
            gso_type: GSO_TCPV4,
            gso_size: size.into(),
            ..Offload::default()
        };
        let fits = |size: u16| fit(&segment[..LOOK], segment.len(), &cut(size), 1500);
        assert_eq!(fits(1448), Fit::Fits);
        assert!(matches!(fits(1449), Fit::Answer(_)));
        let mut segment = v6(60_000, 6);
        segment[14 + 40 + 12] = 5 << 4;
        let cut = Offload { gso_type: GSO_TCPV6, gso_size: 1440.into(), ..Offload::default() };
        assert_eq!(fit(&segment[..LOOK], segment.len(), &cut, 1500), Fit::Fits);
    }

    proptest! {
        /// Whatever comes, answers fit and go to the sender.
        #[test]
        fn any_bytes_are_decided_about(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            kind in prop::sample::select(vec![IPV4, IPV6, 0x8100, 7]),
            length in 0usize..70_000, gso in 0u8..6, size in any::<u16>(), mtu in 1280u16..,
        ) {
            let start = frame(kind, &bytes);
            let offload = Offload { gso_type: gso, gso_size: size.into(), ..Offload::default() };
            if let Fit::Answer(answer) = fit(&start, length, &offload, mtu) {
                prop_assert!(answer.len() <= 22 + 1280);
                prop_assert_eq!(&answer[..6], &FROM[..]);
                prop_assert!(length > usize::from(mtu));
            }
        }
    }
}
