//! Peers that are not known yet: how many may be under way with their handshake, of all and from one address.
//!
//! Of each of them memory is taken before it is known who it is. Who opens connections and says nothing has a few
//! places, and those of others stay free.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Peers from one address, or one network of IPv6, that may be under way at a time.
const OF_ONE: usize = 64;

/// The peers that are under way.
#[derive(Debug, Clone)]
pub struct Handshakes {
    most: usize,
    of_one: usize,
    places: Arc<Mutex<BTreeMap<IpAddr, usize>>>,
}

impl Handshakes {
    /// Nobody yet; `most` at a time.
    pub fn new(most: usize) -> Handshakes {
        Handshakes::with(most, OF_ONE)
    }

    /// Nobody yet; `most` at a time, of these `of_one` from one address.
    pub fn with(most: usize, of_one: usize) -> Handshakes {
        Handshakes { most, of_one, places: Arc::default() }
    }

    fn places(&self) -> MutexGuard<'_, BTreeMap<IpAddr, usize>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for somebody at `address`, until it is dropped; `None` where all are taken.
    pub fn begin(&self, address: IpAddr) -> Option<Handshake> {
        let network = network(address);
        let mut places = self.places();
        if places.values().sum::<usize>() >= self.most {
            return None;
        }
        let own = places.get(&network).copied().unwrap_or_default();
        if own >= self.of_one {
            return None;
        }
        places.insert(network, own + 1);
        Some(Handshake { of: self.clone(), network })
    }
}

/// Whom an address belongs to: of IPv6, machines have networks of 64 bits.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into()
        }
        address => address,
    }
}

/// A place among those that handshakes may take, given back when this is dropped.
#[derive(Debug)]
pub struct Handshake {
    of: Handshakes,
    network: IpAddr,
}

impl Drop for Handshake {
    fn drop(&mut self) {
        let mut places = self.of.places();
        if let Some(own) = places.get_mut(&self.network) {
            *own -= 1;
            if *own == 0 {
                places.remove(&self.network);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: &str) -> IpAddr {
        address.parse().unwrap()
    }

    #[test]
    fn one_address_does_not_take_the_places_of_others() {
        let handshakes = Handshakes::new(200);
        let begin = |address: &str| handshakes.begin(at(address));
        let mut held: Vec<Handshake> = (0..OF_ONE).map(|_| begin("10.0.0.1").unwrap()).collect();
        assert!(begin("10.0.0.1").is_none() && begin("::ffff:10.0.0.1").is_none());
        held.push(begin("10.0.0.2").unwrap());
        held.extend((0..OF_ONE).map(|n| begin(&format!("fd00::{n}")).unwrap()));
        assert!(begin("fd00::ffff:1:2:3").is_none(), "the same network");
        held.extend((held.len()..200).map(|n| begin(&format!("10.1.0.{n}")).unwrap()));
        assert!(begin("10.0.0.9").is_none(), "there are as many as there may be");
        let few = Handshakes::with(3, 1);
        let _one = few.begin(at("10.0.0.1")).unwrap();
        assert!(few.begin(at("10.0.0.1")).is_none() && few.begin(at("10.0.0.2")).is_some());
        drop(held.remove(0));
        drop(begin("10.0.0.1").unwrap());
        held.clear();
        assert!(handshakes.places().is_empty());
    }
}
