//! What a receiver that takes no offloads is spared: checksums are completed, large segments cut (pure).
//!
//! Within a rack a large segment is one message from end to end. Where its receiver cannot take it so, whoever hands it
//! over cuts it, as the sender's own network card would have.
//!
//! Sources: RFC 1071 (the checksum), RFC 9293 (TCP), RFC 791 and RFC 8200 (IP); virtio 1.2, section 5.1.6.2.

use crate::ipv6;
use crate::offload::{GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, NEEDS_CSUM, Offload};

const ETHERNET: usize = 14;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const VLAN: [u16; 2] = [0x8100, 0x88a8];
const TCP: u8 = 6;
const UDP: u8 = 17;
const FIN_PSH: u8 = 0x09;
const CWR: u8 = 0x80;

/// The frame is not what its offload says, or it is to be cut in a way that is not known here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the frame cannot be cut as its sender says")]
pub struct NotCut;

/// The sum of 16-bit words, which may be folded later.
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    let (words, last) = bytes.as_chunks::<2>();
    let words = words.iter().map(|word| u64::from(u16::from_be_bytes(*word)));
    words.sum::<u64>() + last.first().map_or(0, |byte| u64::from(*byte) << 8)
}

pub(crate) fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

fn put(frame: &mut [u8], at: usize, value: u16) {
    if let Some(place) = frame.get_mut(at..at + 2) {
        place.copy_from_slice(&value.to_be_bytes());
    }
}

fn get(frame: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*frame.get(at)?, *frame.get(at + 1)?]))
}

/// Completes the checksum of a frame that is not to be cut. Its field has the sum of the pseudo header.
pub fn complete_checksum(frame: &mut [u8], offload: &Offload) {
    let start = usize::from(offload.csum_start.get());
    let field = start + usize::from(offload.csum_offset.get());
    if offload.flags & NEEDS_CSUM == 0 || field + 2 > frame.len() {
        return;
    }
    // A checksum that is zero would say that there is none (RFC 768); of TCP both are the same.
    let value = match fold(sum(&frame[start..])) {
        0 => 0xffff,
        value => value,
    };
    put(frame, field, value);
}

/// The protocol of what is behind headers that are not all there: none (RFC 8200, section 4.7).
const NONE: u8 = 59;

/// Where the headers of a frame are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Headers {
    /// Where the internet header begins, in bytes.
    pub network: usize,
    /// Whether that is of version 6.
    pub is_v6: bool,
    /// The transport header: behind it and those that IPv6 has between.
    pub transport: usize,
    /// The transport protocol's number: 6 for TCP, 17 for UDP; 59, which is none, where headers before it are missing.
    pub protocol: u8,
    /// Where the address is that a checksum counts as the destination, if that is known.
    destination: Option<usize>,
    /// A fragment has no transport header, but the first.
    pub is_fragment: bool,
}

impl Headers {
    /// Those of a frame; `None` where it is no IP, or its beginning is not all there.
    pub fn of(frame: &[u8]) -> Option<Headers> {
        let mut network = ETHERNET;
        let mut kind = get(frame, 12)?;
        for _ in 0..2 {
            if VLAN.contains(&kind) {
                kind = get(frame, network + 2)?;
                network += 4;
            }
        }
        match kind {
            IPV4 => {
                let length = usize::from(frame.get(network)? & 0xf) * 4;
                let fragment = get(frame, network + 6)? & 0x3fff;
                let protocol = *frame.get(network + 9)?;
                (length >= 20).then_some(Headers {
                    network,
                    is_v6: false,
                    transport: network + length,
                    protocol,
                    destination: Some(network + 16),
                    is_fragment: fragment != 0,
                })
            }
            IPV6 => {
                let packet = frame.get(network..).filter(|packet| packet.len() >= ipv6::HEADER)?;
                let upper = ipv6::upper(packet);
                Some(Headers {
                    network,
                    is_v6: true,
                    transport: upper.map_or(frame.len(), |upper| network + upper.at),
                    protocol: upper.map_or(NONE, |upper| upper.protocol),
                    destination: upper.and_then(|upper| upper.destination).map(|at| network + at),
                    is_fragment: upper.is_some_and(|upper| upper.fragment.is_some()),
                })
            }
            _ => None,
        }
    }

    /// Source and destination address.
    pub fn addresses<'f>(&self, frame: &'f [u8]) -> Option<&'f [u8]> {
        match self.is_v6 {
            false => frame.get(self.network + 12..self.network + 20),
            true => frame.get(self.network + 8..self.network + 40),
        }
    }

    /// The sum of the addresses that a checksum counts; `None` where they are not known.
    fn counted_addresses(&self, frame: &[u8]) -> Option<u64> {
        let addresses = self.addresses(frame)?;
        let to = frame.get(self.destination?..)?.get(..addresses.len() / 2)?;
        Some(sum(&addresses[..addresses.len() / 2]) + sum(to))
    }
}

/// What is left to do to a frame that comes without word of it: a checksum of TCP or UDP that is the sum of the pseudo
/// header and nothing else is one that its sender left to others. One in 65,536 of whole ones is the same number; what is
/// said of these is then that they need no check, as it is of all that are left to others.
pub fn missing_checksum(frame: &[u8]) -> Offload {
    let whole = Offload::default();
    let Some(headers) = Headers::of(frame).filter(|it| !it.is_fragment) else { return whole };
    let offset = match headers.protocol {
        TCP => 16,
        UDP => 6,
        _ => return whole,
    };
    let length = match headers.is_v6 {
        true => get(frame, headers.network + 4).and_then(|it| {
            let between = headers.transport.checked_sub(headers.network + ipv6::HEADER)?;
            usize::from(it).checked_sub(between)
        }),
        false => get(frame, headers.network + 2)
            .and_then(|it| usize::from(it).checked_sub(headers.transport - headers.network)),
    };
    let (Some(length), Some(found), Some(addresses)) =
        (length, get(frame, headers.transport + offset), headers.counted_addresses(frame))
    else {
        return whole;
    };
    let pseudo = addresses + u64::from(headers.protocol) + length as u64;
    if found == 0 || found != !fold(pseudo) {
        return whole;
    }
    Offload {
        flags: NEEDS_CSUM,
        csum_start: (headers.transport as u16).into(),
        csum_offset: (offset as u16).into(),
        ..whole
    }
}

/// A frame that is being cut.
#[derive(Debug, Clone)]
pub struct Cut {
    frame: Vec<u8>,
    headers: Headers,
    /// Bytes of all headers.
    head: usize,
    /// Payload bytes of each piece.
    size: usize,
    /// Payload bytes that were cut off.
    done: usize,
    pieces: u16,
}

/// Bytes of headers that the pieces of a frame have together, at most. The shortest pieces of ordinary frames have less.
const MOST_HEADERS: usize = 4 << 16;

impl Cut {
    /// Begins to cut `frame`.
    ///
    /// # Errors
    /// [`NotCut`].
    pub fn new(frame: Vec<u8>, offload: &Offload) -> Result<Cut, NotCut> {
        let kind = offload.gso_type & !GSO_ECN;
        let headers = Headers::of(&frame).ok_or(NotCut)?;
        let size = usize::from(offload.gso_size.get());
        let fits = match kind {
            GSO_NONE => false,
            GSO_TCPV4 => headers.protocol == TCP && !headers.is_v6,
            GSO_TCPV6 => headers.protocol == TCP && headers.is_v6,
            GSO_UDP_L4 => headers.protocol == UDP,
            _ => false,
        };
        let counted = headers.counted_addresses(&frame).is_some();
        if !fits || headers.is_fragment || size == 0 || !counted {
            return Err(NotCut);
        }
        let length = match headers.protocol {
            TCP => usize::from(frame.get(headers.transport + 12).ok_or(NotCut)? >> 4) * 4,
            _ => 8,
        };
        let head = headers.transport + length;
        let least = if headers.protocol == TCP { 20 } else { 8 };
        if length < least || head >= frame.len() {
            return Err(NotCut);
        }
        // Each piece has the headers once more, which may be long.
        let pieces = (frame.len() - head).div_ceil(size);
        if pieces * head > MOST_HEADERS {
            return Err(NotCut);
        }
        Ok(Cut { frame, headers, head, size, done: 0, pieces: 0 })
    }

    /// Puts the next piece, a whole frame with its checksums, in place of what `out` holds. False when there is none.
    pub fn next(&mut self, out: &mut Vec<u8>) -> bool {
        let payload = &self.frame[self.head..];
        let Some(rest) = payload.get(self.done..).filter(|rest| !rest.is_empty()) else {
            return false;
        };
        let count = rest.len().min(self.size);
        out.clear();
        out.extend_from_slice(&self.frame[..self.head]);
        out.extend_from_slice(&rest[..count]);
        let (first, last) = (self.done == 0, count == rest.len());
        self.network_header(out);
        self.transport_header(out, first, last);
        self.done += count;
        self.pieces = self.pieces.wrapping_add(1);
        true
    }

    fn network_header(&self, piece: &mut [u8]) {
        let at = self.headers.network;
        let length = piece.len() - at;
        if self.headers.is_v6 {
            return put(piece, at + 4, (length - ipv6::HEADER) as u16);
        }
        put(piece, at + 2, length as u16);
        let id = get(piece, at + 4).unwrap_or(0).wrapping_add(self.pieces);
        put(piece, at + 4, id);
        put(piece, at + 10, 0);
        let value = fold(sum(&piece[at..self.headers.transport]));
        put(piece, at + 10, value);
    }

    fn transport_header(&self, piece: &mut [u8], first: bool, last: bool) {
        let at = self.headers.transport;
        let length = piece.len() - at;
        let field = match self.headers.protocol {
            TCP => {
                let mut number = [0; 4];
                number.copy_from_slice(&piece[at + 4..at + 8]);
                let number = u32::from_be_bytes(number).wrapping_add(self.done as u32);
                piece[at + 4..at + 8].copy_from_slice(&number.to_be_bytes());
                if !first {
                    piece[at + 13] &= !CWR;
                }
                if !last {
                    piece[at + 13] &= !FIN_PSH;
                }
                at + 16
            }
            _ => {
                put(piece, at + 4, length as u16);
                at + 6
            }
        };
        put(piece, field, 0);
        let pseudo = self.headers.counted_addresses(piece).unwrap_or(0)
            + u64::from(self.headers.protocol)
            + length as u64;
        let value = match fold(pseudo + sum(&piece[at..])) {
            0 => 0xffff,
            value => value,
        };
        put(piece, field, value);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A frame of TCP or UDP with this payload, as a sender that leaves its checksum to others has it.
    fn frame(v6: bool, protocol: u8, payload: &[u8], tagged: bool) -> (Vec<u8>, usize) {
        frame_behind(&[], v6, protocol, payload, tagged)
    }

    /// One with these headers of IPv6 before that of its transport: the number of each, and its bytes behind the first
    /// two.
    fn frame_behind(
        headers: &[(u8, Vec<u8>)],
        v6: bool,
        protocol: u8,
        payload: &[u8],
        tagged: bool,
    ) -> (Vec<u8>, usize) {
        let mut frame = vec![2; 12];
        if tagged {
            frame.extend([0x81, 0, 0, 7]);
        }
        let transport = if protocol == TCP { 20 } else { 8 };
        let length = transport + payload.len();
        if v6 {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            let between: usize = headers.iter().map(|(_, rest)| rest.len() + 2).sum();
            frame.extend(((between + length) as u16).to_be_bytes());
            frame.extend([headers.first().map_or(protocol, |(number, _)| *number), 64]);
            frame.extend((0..32).map(|n| n * 3));
            for (nth, (_, rest)) in headers.iter().enumerate() {
                let next = headers.get(nth + 1).map_or(protocol, |(number, _)| *number);
                frame.extend([next, (rest.len() / 8) as u8]);
                frame.extend(rest);
            }
        } else {
            frame.extend([8, 0, 0x45, 0]);
            frame.extend((length as u16 + 20).to_be_bytes());
            frame.extend([0x12, 0x34, 0x40, 0, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        }
        let start = frame.len();
        let mut head = vec![0; transport];
        head[..4].copy_from_slice(&[0x30, 0x39, 0, 80]);
        if protocol == TCP {
            head[4..8].copy_from_slice(&0xffff_fff0_u32.to_be_bytes());
            head[12] = 0x50;
            head[13] = 0x18 | CWR | 1;
        } else {
            head[4..6].copy_from_slice(&(length as u16).to_be_bytes());
        }
        frame.extend(head);
        frame.extend(payload);
        (frame, start)
    }

    /// Long headers are not repeated in thousands of pieces: that would be some hundred times the frame.
    #[test]
    fn the_headers_of_all_pieces_are_bounded() {
        let options = vec![(60, vec![0; 8 * 200 - 2])];
        let (long, _) = frame_behind(&options, true, TCP, &[7; 40_000], false);
        let (short, _) = frame(true, TCP, &[7; 40_000], false);
        let offload = |size: u16| Offload {
            gso_type: GSO_TCPV6,
            gso_size: size.into(),
            ..Offload::default()
        };
        assert!(Cut::new(long.clone(), &offload(32)).is_err());
        assert!(Cut::new(long, &offload(1000)).is_ok());
        assert!(Cut::new(short, &offload(32)).is_ok());
    }

    fn checks(piece: &[u8]) -> Headers {
        let headers = Headers::of(piece).unwrap();
        let segment = &piece[headers.transport..];
        let pseudo = headers.counted_addresses(piece).unwrap();
        let all = pseudo + u64::from(headers.protocol) + segment.len() as u64 + sum(segment);
        assert_eq!(fold(all), 0, "the transport checksum");
        if !headers.is_v6 {
            assert_eq!(fold(sum(&piece[headers.network..headers.transport])), 0);
        }
        headers
    }

    #[test]
    fn a_checksum_that_its_sender_left_out_is_found() {
        for (v6, protocol, tagged) in
            [(false, TCP, false), (true, TCP, true), (false, UDP, true), (true, UDP, false)]
        {
            let (mut frame, transport) = frame(v6, protocol, b"some bytes", tagged);
            let offset = if protocol == TCP { 16 } else { 6 };
            let pseudo = sum(Headers::of(&frame).unwrap().addresses(&frame).unwrap())
                + u64::from(protocol)
                + (frame.len() - transport) as u64;
            put(&mut frame, transport + usize::from(offset), !fold(pseudo));
            let found = missing_checksum(&frame);
            let expected = (NEEDS_CSUM, transport as u16, offset);
            assert_eq!((found.flags, found.csum_start.get(), found.csum_offset.get()), expected);
            let mut whole = frame.clone();
            complete_checksum(&mut whole, &found);
            assert_eq!(missing_checksum(&whole), Offload::default());
            for length in 0..frame.len() {
                missing_checksum(&frame[..length]);
            }
        }
    }

    proptest! {
        #[test]
        fn pieces_are_whole_frames_and_together_what_was_cut(
            v6: bool, tcp: bool, tagged: bool, size in 1u16..3000,
            payload in prop::collection::vec(any::<u8>(), 1..9000),
        ) {
            let protocol = if tcp { TCP } else { UDP };
            let (whole, start) = frame(v6, protocol, &payload, tagged);
            let gso_type = match (tcp, v6) {
                (true, false) => GSO_TCPV4,
                (true, true) => GSO_TCPV6,
                _ => GSO_UDP_L4,
            };
            let offload = Offload {
                flags: NEEDS_CSUM,
                gso_type,
                gso_size: size.into(),
                csum_start: (start as u16).into(),
                csum_offset: if tcp { 16 } else { 6 }.into(),
                ..Offload::default()
            };
            let mut cut = Cut::new(whole, &offload).unwrap();
            let (mut piece, mut found, mut count) = (Vec::new(), Vec::new(), 0u16);
            while cut.next(&mut piece) {
                let headers = checks(&piece);
                let head = headers.transport + if tcp { 20 } else { 8 };
                prop_assert!(piece.len() - head <= usize::from(size));
                if tcp {
                    let number = &piece[headers.transport + 4..headers.transport + 8];
                    let number = u32::from_be_bytes(number.try_into().unwrap());
                    prop_assert_eq!(number, 0xffff_fff0_u32.wrapping_add(found.len() as u32));
                    let flags = piece[headers.transport + 13];
                    prop_assert_eq!(flags & CWR != 0, count == 0);
                    let last = found.len() + piece.len() - head == payload.len();
                    prop_assert_eq!(flags & FIN_PSH != 0, last);
                }
                if !v6 {
                    let id = get(&piece, headers.network + 4).unwrap();
                    prop_assert_eq!(id, 0x1234_u16.wrapping_add(count));
                }
                found.extend_from_slice(&piece[head..]);
                count += 1;
            }
            prop_assert_eq!(found, payload);
        }

        #[test]
        fn no_bytes_make_it_fail(
            frame in prop::collection::vec(any::<u8>(), 0..200), kind: u8, size: u16, start: u16, offset: u16,
        ) {
            let offload = Offload {
                flags: NEEDS_CSUM,
                gso_type: kind,
                gso_size: size.into(),
                csum_start: start.into(),
                csum_offset: offset.into(),
                ..Offload::default()
            };
            complete_checksum(&mut frame.clone(), &offload);
            if let Ok(mut cut) = Cut::new(frame, &offload) {
                let mut piece = Vec::new();
                while cut.next(&mut piece) {}
            }
        }
    }

    #[test]
    fn pieces_have_all_headers_before_that_of_the_transport() {
        const SEGMENTS: u8 = 4;
        // Options, and one more stop on the way, whose address the header before has.
        let options = vec![(0, vec![0; 6]), (60, vec![0; 30])];
        let mut stops = vec![SEGMENTS, 1, 1, 0, 0, 0];
        stops.extend(0..32);
        let routed = vec![(43, stops.clone()), (60, vec![0; 206])];
        for (protocol, gso_type) in [(TCP, GSO_TCPV6), (UDP, GSO_UDP_L4)] {
            for headers in [&options, &routed] {
                let (whole, start) = frame_behind(headers, true, protocol, &[5; 4000], false);
                let cut = Offload { gso_type, gso_size: 900.into(), ..Offload::default() };
                let mut cut = Cut::new(whole.clone(), &cut).unwrap();
                let (mut piece, mut count) = (Vec::new(), 0);
                while cut.next(&mut piece) {
                    let found = checks(&piece);
                    assert_eq!(found.transport, start);
                    assert_eq!(piece[ETHERNET + 40..start], whole[ETHERNET + 40..start]);
                    let length = get(&piece, ETHERNET + 4).unwrap();
                    assert_eq!(usize::from(length), piece.len() - ETHERNET - 40);
                    count += 1;
                }
                assert_eq!(count, 5);
            }
        }
        // Nobody knows for whom a header of another kind has it.
        stops[0] = 9;
        let (whole, _) = frame_behind(&[(43, stops)], true, TCP, &[5; 4000], false);
        let cut = Offload { gso_type: GSO_TCPV6, gso_size: 900.into(), ..Offload::default() };
        assert_eq!(Cut::new(whole, &cut).unwrap_err(), NotCut);
    }

    #[test]
    fn a_checksum_is_completed_from_the_sum_of_the_pseudo_header() {
        for protocol in [TCP, UDP] {
            let (mut whole, start) = frame(false, protocol, b"hello", false);
            let offset = if protocol == TCP { 16 } else { 6 };
            let headers = Headers::of(&whole).unwrap();
            let length = (whole.len() - start) as u64;
            let pseudo = sum(headers.addresses(&whole).unwrap()) + u64::from(protocol) + length;
            put(&mut whole, start + offset, !fold(pseudo));
            let offload = Offload {
                flags: NEEDS_CSUM,
                csum_start: (start as u16).into(),
                csum_offset: (offset as u16).into(),
                ..Offload::default()
            };
            complete_checksum(&mut whole, &offload);
            let ip = headers.network + 10;
            put(&mut whole, ip, 0);
            let value = fold(sum(&whole[headers.network..start]));
            put(&mut whole, ip, value);
            checks(&whole);
        }
    }
}
