//! The headers of an IPv6 packet, one behind the other up to that of its transport (pure).
//!
//! Sources: RFC 8200, section 4; RFC 8754, section 2 (segment routing); RFC 6275, section 6.4 (mobility).

/// Bytes of the first header.
pub(crate) const HEADER: usize = 40;
/// Where that one says which header comes next, and where the destination is.
const NEXT: usize = 6;
const DESTINATION_ADDRESS: usize = 24;

/// Numbers of headers and protocols.
pub(crate) const HOP_BY_HOP: u8 = 0;
pub(crate) const ROUTING: u8 = 43;
pub(crate) const FRAGMENT: u8 = 44;
pub(crate) const ICMPV6: u8 = 58;
pub(crate) const DESTINATION: u8 = 60;

/// Kinds of routing headers whose first address is where the packet ends.
const MOBILE: u8 = 2;
const SEGMENTS: u8 = 4;
/// Bytes of a routing header before its addresses.
const BEFORE_ADDRESSES: usize = 8;

/// What is behind the headers of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Upper {
    /// Number of the transport protocol, such as 6 for TCP.
    pub protocol: u8,
    /// Where it begins, in bytes from the packet's beginning; that may be behind its end.
    pub at: usize,
    /// The packet is a fragment; with `Some(0)` the first, which has the protocol's header.
    pub fragment: Option<u16>,
    /// Where the address is that a checksum counts as the destination; `None` where nobody knows.
    pub destination: Option<usize>,
}

/// Whether other headers come before the transport of a packet that begins so.
pub(crate) fn has_extensions(packet: &[u8]) -> bool {
    packet.get(NEXT).copied().is_some_and(is_extension)
}

fn is_extension(header: u8) -> bool {
    matches!(header, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION)
}

/// What is behind the headers of a packet that begins with `packet`; `None` where they go on behind that.
pub(crate) fn upper(packet: &[u8]) -> Option<Upper> {
    let protocol = *packet.get(NEXT)?;
    let destination = Some(DESTINATION_ADDRESS);
    let mut upper = Upper { protocol, at: HEADER, fragment: None, destination };
    while is_extension(upper.protocol) {
        let at = upper.at;
        let length = match upper.protocol {
            FRAGMENT => {
                let offset = packet.get(at + 2..at + 4)?.try_into().ok()?;
                upper.fragment = Some(u16::from_be_bytes(offset) >> 3);
                8
            }
            header => {
                if header == ROUTING {
                    upper.destination = last_stop(packet, at, upper.destination)?;
                }
                8 * (1 + usize::from(*packet.get(at + 1)?))
            }
        };
        (upper.protocol, upper.at) = (*packet.get(at)?, at + length);
        // Behind the first fragment comes what was cut, and no header.
        if upper.fragment.is_some_and(|offset| offset > 0) {
            break;
        }
    }
    Some(upper)
}

/// Where the last destination is of a packet with a routing header at `at`, before which it was `before`; `None` where the
/// header is not all there.
fn last_stop(packet: &[u8], at: usize, before: Option<usize>) -> Option<Option<usize>> {
    let [kind, left] = packet.get(at + 2..at + 4)?.try_into().ok()?;
    Some(match (kind, left) {
        (_, 0) => before,
        (MOBILE | SEGMENTS, _) => Some(at + BEFORE_ADDRESSES),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A packet with these headers, each of 8 bytes and so many more, before `protocol`.
    fn packet(headers: &[(u8, u8)], protocol: u8) -> Vec<u8> {
        let mut packet = vec![0; HEADER];
        let mut next = NEXT;
        for (header, units) in headers {
            packet[next] = *header;
            next = packet.len();
            packet.extend(vec![0; 8 * (1 + usize::from(*units))]);
            if *header != FRAGMENT {
                packet[next + 1] = *units;
            }
        }
        packet[next] = protocol;
        packet
    }

    proptest! {
        #[test]
        fn the_protocol_is_found_behind_any_headers_if_all_of_them_are_there(
            headers in prop::collection::vec((prop::sample::select(vec![HOP_BY_HOP, DESTINATION, ROUTING]), 0u8..20), 0..9),
            cut in 0usize..2000,
        ) {
            let whole = packet(&headers, 6);
            let found = upper(&whole).unwrap();
            prop_assert_eq!((found.protocol, found.at), (6, whole.len()));
            prop_assert_eq!(found.destination, Some(DESTINATION_ADDRESS));
            prop_assert_eq!(has_extensions(&whole), !headers.is_empty());
            // A part of it says the same, or that it does not know.
            let part = upper(&whole[..cut.min(whole.len())]);
            prop_assert!(part.is_none_or(|part| part == found));
        }

        #[test]
        fn no_bytes_make_it_fail(packet in prop::collection::vec(any::<u8>(), 0..300)) {
            upper(&packet);
        }
    }

    #[test]
    fn behind_the_first_fragment_comes_no_header() {
        let mut whole = packet(&[(DESTINATION, 0), (FRAGMENT, 0)], DESTINATION);
        whole[HEADER + 8 + 3] = 9 << 3;
        let found = upper(&whole).unwrap();
        let expected = (DESTINATION, Some(9), HEADER + 16);
        assert_eq!((found.protocol, found.fragment, found.at), expected);
    }

    #[test]
    fn a_packet_with_stops_before_its_end_is_for_the_last_one() {
        for (kind, left, expected) in [
            (SEGMENTS, 1, Some(HEADER + 8)),
            (MOBILE, 1, Some(HEADER + 8)),
            (SEGMENTS, 0, Some(DESTINATION_ADDRESS)),
            (9, 1, None),
        ] {
            let mut whole = packet(&[(ROUTING, 4)], 6);
            (whole[HEADER + 2], whole[HEADER + 3]) = (kind, left);
            assert_eq!(upper(&whole).unwrap().destination, expected, "kind {kind}");
        }
    }
}
