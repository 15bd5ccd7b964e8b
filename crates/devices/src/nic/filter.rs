//! Which frames a driver wants: its receive modes, addresses and VLANs (virtio 1.2, sections 5.1.6.5.1 to 5.1.6.5.3).

use std::collections::BTreeSet;

use rackbus_net::MacAddress;
use serde::{Deserialize, Serialize};

/// Addresses of each kind that are compared; with more, all of that kind are taken.
pub const MOST_ADDRESSES: usize = 64;
/// VLANs that there are.
pub const VLANS: u16 = 4096;

/// The filter as its driver set it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Filter {
    /// Every frame to a station.
    pub promiscuous: bool,
    /// Every frame to a station, as another command says it.
    pub all_unicast: bool,
    /// Every frame to a group.
    pub all_multicast: bool,
    /// No frame to a group but all stations.
    pub no_multicast: bool,
    /// No frame to a station.
    pub no_unicast: bool,
    /// No frame to all stations.
    pub no_broadcast: bool,
    unicast: Table,
    multicast: Table,
    /// VLANs whose frames are wanted; `None` for all.
    vlans: Option<BTreeSet<u16>>,
}

/// Addresses of one kind.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    addresses: BTreeSet<[u8; 6]>,
    /// The driver gave more addresses than fit: all frames of the kind are taken.
    all: bool,
}

impl Table {
    fn set(&mut self, addresses: &[[u8; 6]]) {
        self.all = addresses.len() > MOST_ADDRESSES;
        let kept = addresses.iter().filter(|_| !self.all);
        self.addresses = kept.copied().collect();
    }

    fn has(&self, address: MacAddress) -> bool {
        self.all || self.addresses.contains(&address.0)
    }
}

impl Filter {
    /// As after a reset: frames to its address and to all stations; of all VLANs, unless the driver `filters_vlans`.
    pub fn new(filters_vlans: bool) -> Filter {
        Filter { vlans: filters_vlans.then(BTreeSet::new), ..Filter::default() }
    }

    /// The addresses that are wanted beside the function's own.
    pub fn set_addresses(&mut self, unicast: &[[u8; 6]], multicast: &[[u8; 6]]) {
        self.unicast.set(unicast);
        self.multicast.set(multicast);
    }

    /// Frames of this VLAN are wanted from now on, or not any more. False when there is no such VLAN.
    pub fn set_vlan(&mut self, vlan: u16, wanted: bool) -> bool {
        if vlan >= VLANS {
            return false;
        }
        if let Some(vlans) = &mut self.vlans {
            match wanted {
                true => vlans.insert(vlan),
                false => vlans.remove(&vlan),
            };
        }
        true
    }

    /// Whether a frame that begins so is wanted by a driver that has this address.
    pub fn wants(&self, own: MacAddress, head: &[u8; 16]) -> bool {
        let [a, b, c, d, e, f, ..] = *head;
        let to = MacAddress([a, b, c, d, e, f]);
        // Of whichever VLAN.
        if self.promiscuous {
            return true;
        }
        if let (Some(vlans), [0x81, 0]) = (&self.vlans, &head[12..14])
            && !vlans.contains(&(u16::from_be_bytes([head[14], head[15]]) & 0xfff))
        {
            return false;
        }
        if to == MacAddress::BROADCAST {
            return !self.no_broadcast;
        }
        if to.is_group() {
            return !self.no_multicast && (self.all_multicast || self.multicast.has(to));
        }
        !self.no_unicast && (to == own || self.all_unicast || self.unicast.has(to))
    }

    /// Whether it can have been set so.
    pub fn is_possible(&self) -> bool {
        let tables = [&self.unicast, &self.multicast];
        let bounded = tables.iter().all(|table| table.addresses.len() <= MOST_ADDRESSES);
        bounded && self.vlans.iter().flatten().all(|vlan| *vlan < VLANS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);

    fn head(to: [u8; 6], vlan: Option<u16>) -> [u8; 16] {
        let mut head = [0; 16];
        head[..6].copy_from_slice(&to);
        if let Some(vlan) = vlan {
            head[12] = 0x81;
            head[14..].copy_from_slice(&(vlan | 0xe000).to_be_bytes());
        }
        head
    }

    const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 2];
    const GROUP: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
    const ALL: [u8; 6] = [0xff; 6];

    fn wanted(filter: &Filter) -> [bool; 4] {
        [OWN.0, OTHER, GROUP, ALL].map(|to| filter.wants(OWN, &head(to, None)))
    }

    #[test]
    fn each_mode_lets_its_frames_through() {
        let new = || Filter::new(false);
        assert_eq!(wanted(&new()), [true, false, false, true]);
        assert_eq!(wanted(&Filter { promiscuous: true, ..new() }), [true; 4]);
        assert_eq!(wanted(&Filter { all_unicast: true, ..new() }), [true, true, false, true]);
        assert_eq!(wanted(&Filter { all_multicast: true, ..new() }), [true, false, true, true]);
        assert_eq!(wanted(&Filter { no_unicast: true, ..new() }), [false, false, false, true]);
        assert_eq!(wanted(&Filter { no_broadcast: true, ..new() }), [true, false, false, false]);
        let mut listed = new();
        listed.set_addresses(&[OTHER], &[GROUP]);
        assert_eq!(wanted(&listed), [true; 4]);
        listed.no_multicast = true;
        assert_eq!(wanted(&listed), [true, true, false, true]);
    }

    #[test]
    fn more_addresses_than_are_compared_are_all_addresses() {
        let many: Vec<[u8; 6]> = (0..=MOST_ADDRESSES as u8).map(|n| [4, 0, 0, 0, 0, n]).collect();
        let mut filter = Filter::new(false);
        filter.set_addresses(&[], &many);
        assert_eq!(wanted(&filter), [true, false, true, true]);
        assert!(filter.is_possible());
        filter.set_addresses(&[], &[]);
        assert_eq!(wanted(&filter), [true, false, false, true]);
    }

    #[test]
    fn tagged_frames_need_their_vlan_where_vlans_are_filtered() {
        let mut filter = Filter::new(true);
        let tagged = |filter: &Filter, vlan| filter.wants(OWN, &head(OWN.0, Some(vlan)));
        assert!(filter.wants(OWN, &head(OWN.0, None)) && !tagged(&filter, 7));
        assert!(filter.set_vlan(7, true) && tagged(&filter, 7) && !tagged(&filter, 8));
        assert!(filter.set_vlan(7, false) && !tagged(&filter, 7));
        assert!(!filter.set_vlan(VLANS, true));
        assert!(tagged(&Filter::new(false), 7));
        assert!(tagged(&Filter { promiscuous: true, ..Filter::new(true) }, 7));
        assert!(!tagged(&Filter { all_unicast: true, ..Filter::new(true) }, 7));
    }
}
