//! Ethernet addresses (IEEE 802-2014, section 8).

use std::fmt;
use std::str::FromStr;

/// A 48-bit Ethernet address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// The address of all stations.
    pub const BROADCAST: MacAddress = MacAddress([0xff; 6]);

    /// An address for the function or host of this name, administered locally (section 8.4): the same each time,
    /// and another one for others, as far as 46 bits tell them apart (FNV-1a).
    pub fn derived(name: &str) -> MacAddress {
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let [a, b, c, d, e, f, ..] = (hash ^ hash >> 48).to_le_bytes();
        MacAddress([a & 0xfc | 2, b, c, d, e, f])
    }

    /// Whether it names a group of stations.
    pub fn is_group(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Whether a station may have it: neither a group's nor zero.
    pub fn is_station(self) -> bool {
        !self.is_group() && self.0 != [0; 6]
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// The text is no Ethernet address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no Ethernet address; write six pairs of hexadecimal digits, 52:54:00:12:34:56")]
pub struct NotAnAddress(String);

impl FromStr for MacAddress {
    type Err = NotAnAddress;

    fn from_str(text: &str) -> Result<MacAddress, NotAnAddress> {
        let wrong = || NotAnAddress(text.to_owned());
        let mut bytes = [0; 6];
        let mut pairs = text.split(':');
        for byte in &mut bytes {
            let pair = pairs.next().ok_or_else(wrong)?;
            if pair.len() != 2 || !pair.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(wrong());
            }
            *byte = u8::from_str_radix(pair, 16).map_err(|_| wrong())?;
        }
        if pairs.next().is_some() { Err(wrong()) } else { Ok(MacAddress(bytes)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_as_it_is_written_and_nothing_else_is_read() {
        let address = MacAddress([0x52, 0x54, 0, 0x12, 0xab, 0xff]);
        assert_eq!(address.to_string(), "52:54:00:12:ab:ff");
        assert_eq!("52:54:00:12:AB:ff".parse(), Ok(address));
        for wrong in [
            "",
            "52:54:00:12:ab",
            "52:54:00:12:ab:ff:00",
            "52:54:00:12:ab:+f",
            "525400:12:ab:ff:1:2",
        ] {
            assert_eq!(wrong.parse::<MacAddress>(), Err(NotAnAddress(wrong.to_owned())));
        }
    }

    #[test]
    fn groups_and_zero_are_no_stations() {
        assert!(MacAddress([0x52, 0, 0, 0, 0, 1]).is_station());
        assert!(!MacAddress::BROADCAST.is_station());
        assert!(!MacAddress([0x33, 0x33, 0, 0, 0, 1]).is_station());
        assert!(!MacAddress::default().is_station());
    }
}
