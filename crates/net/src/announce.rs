//! A station tells a network where it is: frames by which switches outside learn the way to it again.

use crate::address::MacAddress;
use crate::ethernet::{HEADER, RARP};

/// Bytes of an announcement: the shortest frame of an Ethernet, without its check sequence.
pub const BYTES: usize = 60;

/// A reverse ARP request from `station` (RFC 903), which nobody has to answer: it says where the station is without
/// saying which IP addresses it has. Hypervisors send it after a migration.
pub fn announcement(station: MacAddress) -> [u8; BYTES] {
    let mut frame = [0; BYTES];
    frame[..6].copy_from_slice(&MacAddress::BROADCAST.0);
    frame[6..12].copy_from_slice(&station.0);
    frame[12..HEADER].copy_from_slice(&RARP.to_be_bytes());
    // Ethernet and IPv4, with addresses of 6 and 4 bytes; operation 3, "request reverse".
    frame[14..22].copy_from_slice(&[0, 1, 8, 0, 6, 4, 0, 3]);
    frame[22..28].copy_from_slice(&station.0);
    frame[32..38].copy_from_slice(&station.0);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ethernet::EthernetHeader;

    #[test]
    fn an_announcement_goes_to_all_from_the_station() {
        let station = MacAddress([2, 0, 0, 0, 0, 5]);
        let frame = announcement(station);
        let header = EthernetHeader::read(&frame).unwrap();
        let expected = (MacAddress::BROADCAST, station, RARP);
        assert_eq!((header.to, header.from, header.kind), expected);
        assert_eq!(frame[14..28], [0, 1, 8, 0, 6, 4, 0, 3, 2, 0, 0, 0, 0, 5]);
    }
}
