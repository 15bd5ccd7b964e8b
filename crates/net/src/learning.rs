//! Addresses behind ports that are no stations' own: those of a bridge in a guest, of containers, of what is outside
//! (pure).
//!
//! An address belongs to the port that used it first, for as long as that goes on using it: whoever else sends
//! from it is refused until nothing came from it for [`AGE_NS`]. So a port takes no address away from another one. How
//! many addresses a port may have is the rack file's to say, so the table is bounded.

use std::collections::{BTreeMap, BTreeSet};

use crate::address::MacAddress;

/// For how long an address that nobody sends from is kept: the usual time of bridges (IEEE 802.1D, table 7-5).
pub const AGE_NS: u64 = 300_000_000_000;
/// How exactly it is known when an address was used last.
const GRAIN_NS: u64 = 1_000_000_000;

/// How many addresses a port may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AddressLimit {
    /// So many at the same time.
    pub most: usize,
    /// With more, the one that was used longest ago makes room. Else the new one is refused.
    pub replaces: bool,
}

/// An address in a VLAN.
type Key = (u16, MacAddress);

#[derive(Debug, Default)]
struct PortAddresses {
    limit: AddressLimit,
    /// By when they were used last.
    by_age: BTreeSet<(u64, Key)>,
}

/// Which addresses are behind which ports.
#[derive(Debug)]
pub struct LearningTable {
    ports: Vec<PortAddresses>,
    /// The port of each, and when it was used last.
    all: BTreeMap<Key, (usize, u64)>,
}

/// The address may not be used by this port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressRefused;

impl LearningTable {
    /// An empty one, for ports with these limits.
    pub fn new(limits: impl IntoIterator<Item = AddressLimit>) -> LearningTable {
        let port = |limit| PortAddresses { limit, by_age: BTreeSet::new() };
        LearningTable { ports: limits.into_iter().map(port).collect(), all: BTreeMap::new() }
    }

    /// A port sends from an address at `now_ns`.
    ///
    /// # Errors
    /// [`AddressRefused`] where the address is another port's, or the port has as many as it may.
    pub fn learn(
        &mut self,
        now_ns: u64,
        key: (u16, MacAddress),
        port: usize,
    ) -> Result<(), AddressRefused> {
        if let Some((owner, seen)) = self.all.get(&key).copied() {
            let passed = now_ns.saturating_sub(seen);
            if owner != port && passed < AGE_NS {
                return Err(AddressRefused);
            }
            if owner == port && passed < GRAIN_NS {
                return Ok(());
            }
            if owner == port {
                self.remove(key);
                self.insert(now_ns, key, port);
                return Ok(());
            }
        }
        let own = self.ports.get(port).ok_or(AddressRefused)?;
        if own.by_age.len() >= own.limit.most {
            let oldest = own.by_age.first().copied().ok_or(AddressRefused)?;
            if !own.limit.replaces && now_ns.saturating_sub(oldest.0) < AGE_NS {
                return Err(AddressRefused);
            }
            self.remove(oldest.1);
        }
        self.remove(key);
        self.insert(now_ns, key, port);
        Ok(())
    }

    /// The port that an address is behind at `now_ns`.
    pub fn find(&self, now_ns: u64, key: (u16, MacAddress)) -> Option<usize> {
        let (port, seen) = self.all.get(&key)?;
        (now_ns.saturating_sub(*seen) < AGE_NS).then_some(*port)
    }

    /// The addresses behind a port, with their VLANs.
    pub fn behind(&self, now_ns: u64, port: usize) -> Vec<(u16, MacAddress)> {
        let own = self.ports.get(port).into_iter().flat_map(|it| &it.by_age);
        own.filter(|(seen, _)| now_ns.saturating_sub(*seen) < AGE_NS).map(|(_, key)| *key).collect()
    }

    /// Nothing is behind a port any more.
    pub fn forget(&mut self, port: usize) {
        let Some(own) = self.ports.get_mut(port) else { return };
        for (_, key) in std::mem::take(&mut own.by_age) {
            self.all.remove(&key);
        }
    }

    fn insert(&mut self, now_ns: u64, key: Key, port: usize) {
        self.all.insert(key, (port, now_ns));
        self.ports[port].by_age.insert((now_ns, key));
    }

    fn remove(&mut self, key: Key) {
        if let Some((port, seen)) = self.all.remove(&key) {
            self.ports[port].by_age.remove(&(seen, key));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn mac(number: u8) -> MacAddress {
        MacAddress([2, 0, 0, 0, 0, number])
    }

    fn table() -> LearningTable {
        let some = AddressLimit { most: 2, replaces: false };
        LearningTable::new([
            some,
            some,
            AddressLimit { most: 2, replaces: true },
            AddressLimit::default(),
        ])
    }

    #[test]
    fn an_address_belongs_to_who_used_it_first_until_nobody_does() {
        let mut table = table();
        assert_eq!(table.learn(0, (0, mac(1)), 0), Ok(()));
        assert_eq!(table.learn(1, (0, mac(1)), 1), Err(AddressRefused));
        assert_eq!(table.learn(1, (7, mac(1)), 1), Ok(()), "another VLAN is another network");
        assert_eq!(table.learn(AGE_NS - 1, (0, mac(1)), 0), Ok(()));
        assert_eq!(table.learn(AGE_NS + 1, (0, mac(1)), 1), Err(AddressRefused));
        assert_eq!(table.find(AGE_NS + 1, (0, mac(1))), Some(0));
        let later = 2 * AGE_NS - 1;
        assert_eq!(table.find(later, (0, mac(1))), None);
        assert_eq!(table.learn(later, (0, mac(1)), 1), Ok(()));
        assert_eq!(table.find(later, (0, mac(1))), Some(1));
        table.forget(1);
        assert_eq!((table.find(later, (0, mac(1))), table.behind(later, 1)), (None, vec![]));
    }

    #[test]
    fn a_port_has_as_many_addresses_as_it_may() {
        let mut table = table();
        let second = GRAIN_NS;
        for (nth, expected) in [(1, Ok(())), (2, Ok(())), (3, Err(AddressRefused))] {
            assert_eq!(table.learn(u64::from(nth) * second, (0, mac(nth)), 0), expected);
        }
        // One that nobody uses any more makes room.
        assert_eq!(table.learn(second + AGE_NS, (0, mac(3)), 0), Ok(()));
        assert_eq!(table.behind(second + AGE_NS, 0), [(0, mac(2)), (0, mac(3))]);
        // Outside, the one that was used longest ago does.
        for nth in 11..14 {
            assert_eq!(table.learn(u64::from(nth) * second, (0, mac(nth)), 2), Ok(()));
        }
        assert_eq!(table.behind(13 * second, 2), [(0, mac(12)), (0, mac(13))]);
        assert_eq!(table.learn(0, (0, mac(20)), 3), Err(AddressRefused));
    }

    proptest! {
        /// The table against what must hold: no port takes a fresh address of another, and none has too many.
        #[test]
        fn no_port_takes_anothers_address(
            steps in prop::collection::vec((0usize..4, 1u8..6, 0u16..2, 0u64..AGE_NS), 1..200),
        ) {
            let mut table = table();
            let mut owners: BTreeMap<Key, (usize, u64)> = BTreeMap::new();
            let mut now = 0;
            for (port, number, vlan, passed) in steps {
                now += passed / 20;
                let key = (vlan, mac(number));
                let before = owners.get(&key).copied();
                if table.learn(now, key, port) == Ok(()) {
                    if let Some((owner, seen)) = before && owner != port {
                        prop_assert!(now - seen >= AGE_NS - GRAIN_NS, "taken from {owner}");
                    }
                    prop_assert_eq!(table.find(now, key), Some(port));
                    owners.insert(key, (port, now));
                    // What was replaced is anybody's.
                    owners.retain(|key, (owner, _)| table.find(now, *key) == Some(*owner));
                }
                for nth in 0..4 {
                    prop_assert!(table.ports[nth].by_age.len() <= table.ports[nth].limit.most);
                }
                prop_assert_eq!(table.all.len(), table.ports.iter().map(|it| it.by_age.len()).sum::<usize>());
            }
        }
    }
}
