//! Which pair of queues a frame goes to: all frames of a flow to the same, so that they stay in order.
//!
//! A flow of TCP is told by addresses and ports. All else is told by addresses alone: datagrams of UDP may come in
//! fragments, of which only the first has ports, and those of a flow that come whole are to stay among them.

use rackbus_net::cut::Headers;

/// Bytes at the beginning of a frame that are looked at.
pub const LOOKED_AT: usize = 96;

const TCP: u8 = 6;

/// A number for the flow of a frame that begins so, the same in both directions; 0 for what is no IP.
pub fn flow(head: &[u8]) -> u32 {
    let Some(headers) = Headers::of(head) else { return 0 };
    let Some(addresses) = headers.addresses(head) else { return 0 };
    let (source, destination) = addresses.split_at(addresses.len() / 2);
    let mut hash = mix(source) ^ mix(destination);
    if !headers.is_fragment
        && headers.protocol == TCP
        && let Some(ports) = head.get(headers.transport..headers.transport + 4)
    {
        hash ^= mix(&ports[..2]) ^ mix(&ports[2..]);
    }
    hash ^= hash >> 16;
    hash.wrapping_mul(0x9e37_79b1)
}

/// The pair, of `pairs`, that a flow goes to.
pub fn pair(flow: u32, pairs: u16) -> u16 {
    ((u64::from(flow) * u64::from(pairs)) >> 32) as u16
}

/// A hash of the bytes (FNV-1a), by which flows are spread over queues.
fn mix(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;

    const UDP: u8 = 17;

    fn packet(protocol: u8, from: ([u8; 4], u16), to: ([u8; 4], u16)) -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend([8, 0, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, protocol, 0, 0]);
        frame.extend(from.0.iter().chain(&to.0));
        frame.extend(from.1.to_be_bytes().iter().chain(&to.1.to_be_bytes()));
        frame
    }

    #[test]
    fn a_flow_has_one_pair_in_both_directions_and_flows_have_all_pairs() {
        let (a, b) = ([10, 0, 0, 1], [10, 0, 0, 2]);
        let mut found = [0; 4];
        for port in 1000..2000 {
            let there = flow(&packet(TCP, (a, port), (b, 80)));
            assert_eq!(there, flow(&packet(TCP, (b, 80), (a, port))));
            found[usize::from(pair(there, 4))] += 1;
        }
        assert!(found.iter().all(|count| (150..400).contains(count)), "{found:?}");
    }

    #[test]
    fn fragments_go_where_the_first_one_and_the_whole_datagrams_of_their_flow_go() {
        for port in 7..50 {
            let mut frame = packet(UDP, ([10, 0, 0, 1], port), ([10, 0, 0, 2], 8));
            let whole = flow(&frame);
            frame[14 + 6] = 0x20;
            assert_eq!(flow(&frame), whole);
            frame[14 + 7] = 9;
            frame[34..].fill(0x55);
            assert_eq!(flow(&frame), whole);
        }
    }

    #[test]
    fn what_is_no_ip_is_one_flow() {
        for frame in [&[][..], &[0; 13], &[1; 60]] {
            assert_eq!(pair(flow(frame), 8), 0);
        }
    }
}
