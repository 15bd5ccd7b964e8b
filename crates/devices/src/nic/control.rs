//! The control queue's commands (virtio 1.2, section 5.1.6.5), and what they set.

use rackbus_net::MacAddress;
use rackbus_spec::virtio::net::{control as command, feature};
use serde::{Deserialize, Serialize};

use super::filter::Filter;

/// Bytes of a command at most.
pub const LONGEST: usize = 16 << 10;

/// What a driver has set by commands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NicSettings {
    /// Which frames it wants.
    pub filter: Filter,
    /// The function's Ethernet address.
    pub mac: [u8; 6],
    /// Pairs of queues in use.
    pub pairs: u16,
    /// What it takes (`GUEST_*`).
    pub offloads: u64,
    /// It is asked to announce itself.
    pub announce: bool,
}

impl NicSettings {
    /// As its driver begins, which accepted these features, at this address.
    pub fn new(features: u64, mac: MacAddress) -> NicSettings {
        let mut filter = Filter::new(features & feature::CTRL_VLAN != 0);
        if features & feature::CTRL_RX == 0 {
            // Its driver has no words for what it wants: it gets all that comes to its port. IPv6 needs groups.
            (filter.all_unicast, filter.all_multicast) = (true, true);
        }
        NicSettings {
            filter,
            mac: mac.0,
            pairs: 1,
            offloads: features & feature::GUEST_OFFLOADS,
            announce: false,
        }
    }

    /// The function's Ethernet address.
    pub fn mac(&self) -> MacAddress {
        MacAddress(self.mac)
    }

    /// Carries a command out, which is its class, its number, and what it is about. False when it is refused: then
    /// nothing changes. An address is accepted when it is the one that the function has: its port keeps it.
    pub fn execute(&mut self, features: u64, most_pairs: u16, said: &[u8]) -> bool {
        let [class, number, data @ ..] = said else { return false };
        let has = |feature: u64| features & feature != 0;
        match (*class, *number) {
            mode @ ((0, 0) | (0, 1)) if has(feature::CTRL_RX) => self.mode(mode, data),
            mode @ (0, 2..=5) if has(feature::CTRL_RX_EXTRA) => self.mode(mode, data),
            command::MAC_TABLE_SET if has(feature::CTRL_RX) => {
                let Some((unicast, data)) = table(data) else { return false };
                let Some((multicast, [])) = table(data) else { return false };
                self.filter.set_addresses(unicast, multicast);
                true
            }
            command::MAC_SET if has(feature::CTRL_MAC_ADDR) => data == self.mac,
            it @ (command::VLAN_ADD | command::VLAN_DELETE) if has(feature::CTRL_VLAN) => {
                let &[low, high] = data else { return false };
                self.filter.set_vlan(u16::from_le_bytes([low, high]), it == command::VLAN_ADD)
            }
            command::ANNOUNCE_ACK if has(feature::GUEST_ANNOUNCE) && data.is_empty() => {
                self.announce = false;
                true
            }
            command::PAIRS_SET if has(feature::MQ) => {
                let &[low, high] = data else { return false };
                let pairs = u16::from_le_bytes([low, high]);
                let possible = (1..=most_pairs).contains(&pairs);
                if possible {
                    self.pairs = pairs;
                }
                possible
            }
            command::GUEST_OFFLOADS_SET if has(feature::CTRL_GUEST_OFFLOADS) => {
                let Ok(bytes) = <[u8; 8]>::try_from(data) else { return false };
                let offloads = u64::from_le_bytes(bytes);
                let possible = offloads & !(features & feature::GUEST_OFFLOADS) == 0;
                if possible {
                    self.offloads = offloads;
                }
                possible
            }
            _ => false,
        }
    }

    fn mode(&mut self, mode: (u8, u8), data: &[u8]) -> bool {
        let &[on @ (0 | 1)] = data else { return false };
        let filter = &mut self.filter;
        let field = match mode {
            command::PROMISCUOUS => &mut filter.promiscuous,
            command::ALL_MULTICAST => &mut filter.all_multicast,
            command::ALL_UNICAST => &mut filter.all_unicast,
            command::NO_MULTICAST => &mut filter.no_multicast,
            command::NO_UNICAST => &mut filter.no_unicast,
            command::NO_BROADCAST => &mut filter.no_broadcast,
            _ => return false,
        };
        *field = on == 1;
        true
    }
}

/// A table of addresses: how many, and they; and what is behind it.
fn table(data: &[u8]) -> Option<(&[[u8; 6]], &[u8])> {
    let (count, data) = data.split_first_chunk::<4>()?;
    let length = usize::try_from(u32::from_le_bytes(*count)).ok()?.checked_mul(6)?;
    let (addresses, rest) = data.split_at_checked(length)?;
    Some((addresses.as_chunks::<6>().0, rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::nic::features::OFFERED;

    const OWN: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);
    const ALL: u64 = OFFERED | feature::MQ;

    #[test]
    fn commands_set_what_they_are_about_or_nothing() {
        let new = || NicSettings::new(ALL, OWN);
        let mac = [2, 9, 9, 9, 9, 9];
        let mut promiscuous = Filter::new(true);
        promiscuous.promiscuous = true;
        let offloads = feature::GUEST_CSUM.to_le_bytes();
        let good: [(&[u8], NicSettings); 5] = [
            (&[4, 0, 4, 0], NicSettings { pairs: 4, ..new() }),
            (&[&[1, 1][..], &OWN.0].concat(), new()),
            (
                &[&[5, 0][..], &offloads].concat(),
                NicSettings { offloads: feature::GUEST_CSUM, ..new() },
            ),
            (&[0, 0, 1], NicSettings { filter: promiscuous, ..new() }),
            (&[3, 0], new()),
        ];
        for (said, expected) in good {
            let mut settings = new();
            assert!(settings.execute(ALL, 4, said), "{said:?}");
            assert_eq!(settings, expected, "{said:?}");
            let mut without = NicSettings::new(0, OWN);
            assert!(!without.execute(0, 4, said), "{said:?} without its feature");
        }
        let bad: [&[u8]; 12] = [
            &[],
            &[0],
            &[0, 0],
            &[0, 0, 2],
            &[0, 9, 1],
            &[1, 0, 1, 0, 0, 0],
            &[1, 1, 1, 0, 0, 0, 0, 1],
            &[2, 0, 0, 16],
            &[4, 0, 0, 0],
            &[4, 0, 5, 0],
            &[5, 0, 0, 0, 0, 0, 0, 0, 0, 1],
            &[9, 9],
        ];
        for said in bad {
            let mut settings = new();
            assert!(!settings.execute(ALL, 4, said), "{said:?}");
            assert_eq!(settings, new());
        }
        let another = [&[1, 1][..], &mac].concat();
        assert!(!new().execute(ALL, 4, &another));
    }

    proptest! {
        #[test]
        fn after_any_commands_the_settings_are_valid(
            said in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20),
        ) {
            let mut settings = NicSettings::new(ALL, OWN);
            for mut said in said {
                if let Some(class) = said.first_mut() {
                    *class %= 6;
                }
                settings.execute(ALL, 4, &said);
                prop_assert!(settings.filter.is_possible() && (1..=4).contains(&settings.pairs));
                prop_assert!(settings.mac().is_station());
            }
        }
    }
}
