//! IPv4 packets cut into fragments, as a router does whose next network has a smaller MTU (RFC 791, section 3.2;
//! RFC 1812, section 4.2.2.7). Pure.

use crate::cut::{fold, sum};
use crate::ethernet::{EthernetHeader, IPV4};

/// Bytes of a header without options.
const HEADER: usize = 20;
/// A packet that is not to be cut, and one that more fragments follow, in the word of flags and offset.
const DONT_FRAGMENT: u16 = 1 << 14;
const MORE: u16 = 1 << 13;
/// Fragments begin at multiples of so many bytes.
const UNIT: usize = 8;
/// The bit of an option's type by which each fragment has it.
const COPIED: u8 = 0x80;

/// Frames with the fragments of the packet in `frame`, each of at most `mtu` bytes behind the Ethernet header. `None` where
/// it is no IPv4 packet that may be cut, or its header is wrong.
pub fn fragments(frame: &[u8], mtu: u16) -> Option<Vec<Vec<u8>>> {
    let ethernet = EthernetHeader::read(frame).filter(|header| header.kind == IPV4)?;
    let (begin, packet) = frame.split_at(ethernet.length);
    let word = |at: usize| Some(u16::from_be_bytes([*packet.get(at)?, *packet.get(at + 1)?]));
    let (total, place) = (usize::from(word(2)?), word(6)?);
    let length = usize::from(*packet.first()? & 0xf) * 4;
    if packet[0] >> 4 != 4 || length < HEADER || place & DONT_FRAGMENT != 0 {
        return None;
    }
    let (header, payload) = (packet.get(..length)?, packet.get(length..total)?);
    // A header that came damaged is not to leave with a checksum that is right.
    if fold(sum(header)) != 0 {
        return None;
    }
    let first = usize::from(place & (MORE - 1)) * UNIT;
    if first + payload.len() > usize::from(u16::MAX) {
        return None;
    }
    let (mut fragments, mut at) = (Vec::new(), 0);
    let mut header = header.to_vec();
    loop {
        let room = usize::from(mtu).checked_sub(header.len())?;
        let left = payload.len() - at;
        let (count, more) = match left <= room {
            true => (left, place & MORE),
            false => (room / UNIT * UNIT, MORE),
        };
        if count == 0 && left > 0 {
            return None;
        }
        let offset = ((first + at) / UNIT) as u16;
        let total = (header.len() + count) as u16;
        header[2..4].copy_from_slice(&total.to_be_bytes());
        header[6..8].copy_from_slice(&(more | offset).to_be_bytes());
        header[10..12].fill(0);
        let checksum = fold(sum(&header));
        header[10..12].copy_from_slice(&checksum.to_be_bytes());
        fragments.push([begin, &header, &payload[at..at + count]].concat());
        at += count;
        if at == payload.len() {
            return Some(fragments);
        }
        if fragments.len() == 1 {
            header = header_of_others(&header)?;
        }
    }
}

/// The header of fragments behind the first one, which have only some of its options.
fn header_of_others(header: &[u8]) -> Option<Vec<u8>> {
    let (fixed, mut options) = header.split_at(HEADER);
    let mut others = fixed.to_vec();
    while let Some(kind) = options.first() {
        let length = match kind {
            0 => break,
            1 => 1,
            _ => usize::from(*options.get(1)?).max(2),
        };
        let option = options.get(..length)?;
        if kind & COPIED != 0 {
            others.extend_from_slice(option);
        }
        options = &options[length..];
    }
    others.resize(others.len().next_multiple_of(4), 0);
    others[0] = 0x40 | (others.len() / 4) as u8;
    Some(others)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A frame with a packet with these options, `place` and payload.
    fn frame(options: &[u8], place: u16, payload: &[u8]) -> Vec<u8> {
        let length = HEADER + options.len();
        let mut header = vec![0; HEADER];
        header[0] = 0x40 | (length / 4) as u8;
        header[2..4].copy_from_slice(&((length + payload.len()) as u16).to_be_bytes());
        header[4..6].copy_from_slice(&[0x12, 0x34]);
        header[6..8].copy_from_slice(&place.to_be_bytes());
        (header[8], header[9]) = (64, 17);
        header.extend_from_slice(options);
        let checksum = fold(sum(&header));
        header[10..12].copy_from_slice(&checksum.to_be_bytes());
        [&[2; 12][..], &[8, 0], &header, payload].concat()
    }

    /// Where a fragment's payload is in the packet, the payload, and whether more follows.
    fn parts(fragment: &[u8]) -> (usize, &[u8], bool) {
        let packet = &fragment[14..];
        let length = usize::from(packet[0] & 0xf) * 4;
        assert_eq!(fold(sum(&packet[..length])), 0, "the header's checksum");
        assert_eq!(usize::from(u16::from_be_bytes([packet[2], packet[3]])), packet.len());
        assert_eq!(
            (&fragment[..14], &packet[4..6]),
            (&[&[2; 12][..], &[8, 0]].concat()[..], &[0x12, 0x34][..])
        );
        let place = u16::from_be_bytes([packet[6], packet[7]]);
        (usize::from(place & 0x1fff) * UNIT, &packet[length..], place & MORE != 0)
    }

    proptest! {
        #[test]
        fn fragments_fit_and_are_the_packet_together(
            mtu in 68u16..2000, length in 1usize..9000, words in 0usize..10, first in 0u16..100, more: bool,
        ) {
            // Options of one byte.
            let options = vec![1; 4 * words];
            let payload: Vec<u8> = (0..length).map(|at| (at * 7) as u8).collect();
            let place = first | if more { MORE } else { 0 };
            let frame = frame(&options, place, &payload);
            let (mut together, mut goes_on) = (Vec::new(), true);
            for fragment in fragments(&frame, mtu).unwrap() {
                prop_assert!(fragment.len() - 14 <= usize::from(mtu) && goes_on);
                let (at, part, follows) = parts(&fragment);
                prop_assert_eq!(at, usize::from(first) * UNIT + together.len());
                together.extend_from_slice(part);
                goes_on = follows;
            }
            prop_assert!(together == payload && goes_on == more);
        }

        #[test]
        fn any_bytes_are_cut_or_refused(
            bytes in prop::collection::vec(any::<u8>(), 0..300), words in 0usize..16, lost in 0usize..300,
            mtu in any::<u16>(),
        ) {
            let mut packet = [&[0x40 | words as u8][..], &bytes].concat();
            let total = packet.len().saturating_sub(lost / 8) as u16;
            if let (Some(place), header) = (packet.get_mut(2..4), 4 * words) {
                place.copy_from_slice(&total.to_be_bytes());
                if let Some(header) = packet.get_mut(..header).filter(|it| it.len() >= HEADER) {
                    header[10..12].fill(0);
                    let checksum = fold(sum(header));
                    header[10..12].copy_from_slice(&checksum.to_be_bytes());
                }
            }
            let frame = [&[2; 12][..], &[8, 0], &packet].concat();
            for fragment in fragments(&frame, mtu).unwrap_or_default() {
                prop_assert!(fragment.len() <= 14 + usize::from(mtu));
            }
        }
    }

    #[test]
    fn options_are_in_the_first_fragment_and_those_to_be_copied_in_all() {
        // A record of the route, which is not copied; a source route, which is.
        let options = [7, 3, 4, 0x83, 7, 4, 9, 9, 9, 9, 1, 0];
        let all = fragments(&frame(&options, 0, &[5; 100]), 68).unwrap();
        let options_of = |fragment: &[u8]| {
            fragment[14 + HEADER..14 + usize::from(fragment[14] & 0xf) * 4].to_vec()
        };
        assert_eq!(options_of(&all[0]), options);
        assert!(all[1..].iter().all(|it| options_of(it) == [0x83, 7, 4, 9, 9, 9, 9, 0]), "{all:?}");
    }

    #[test]
    fn what_is_not_to_be_cut_is_refused() {
        assert_eq!(fragments(&frame(&[], DONT_FRAGMENT, &[1; 100]), 68), None);
        let mut damaged = frame(&[], 0, &[1; 100]);
        damaged[14 + 8] -= 1;
        assert_eq!(fragments(&damaged, 68), None);
        let mut other = frame(&[], 0, &[1; 100]);
        other[13] = 6;
        assert_eq!(fragments(&other, 68), None);
        // Its end would be behind the longest packet's.
        assert_eq!(fragments(&frame(&[], 0x1fff, &[1; 100]), 68), None);
    }
}
