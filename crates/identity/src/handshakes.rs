//! Peers that are not known yet: how many may be under way with their handshake, of all and from one address.
//!
//! Of each of them memory is taken before it is known who it is. Who opens connections and says nothing has a few
//! places, and those of others stay free. Those who have said nothing have places of their own: however many of them come, they
//! take none from those who have said something, as a handshake of an honest one begins with what it says. Where somebody has
//! enough addresses to take all places, whoever comes next takes the place of the one that began first among those of
//! the address that has most: an honest handshake takes milliseconds, so it is over before its turn to be ended comes. In the same
//! way whoever comes from an address, or a network, that has all places it may have takes that of one there who says nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::net::RecvFlags;

/// Peers from one address, or one network of IPv6, that may be under way at a time.
const OF_ONE: usize = 64;

/// Ends a peer's handshake, so that its place is given back soon.
type End = Box<dyn FnOnce() + Send>;

/// The peers that are under way.
#[derive(Debug, Clone)]
pub struct Handshakes {
    most: usize,
    of_one: usize,
    places: Arc<Mutex<HandshakePlaces>>,
}

#[derive(Default)]
struct HandshakePlaces {
    next: u64,
    silent: Peers,
    heard: Peers,
    /// How many were told to end and have not.
    ending: usize,
    /// And how many of them each address has.
    ending_of: BTreeMap<IpAddr, usize>,
}

/// Peers that were not told to end.
#[derive(Default)]
struct Peers {
    /// In the order in which they began.
    begun: BTreeMap<u64, (IpAddr, End)>,
    /// How many of these each address has.
    of_address: BTreeMap<IpAddr, usize>,
}

impl fmt::Debug for HandshakePlaces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (silent, heard) = (&self.silent.of_address, &self.heard.of_address);
        f.debug_struct("HandshakePlaces")
            .field("silent", silent)
            .field("heard", heard)
            .finish_non_exhaustive()
    }
}

impl HandshakePlaces {
    fn of(&self, address: &IpAddr) -> usize {
        let of = |peers: &Peers| peers.of_address.get(address).copied().unwrap_or_default();
        of(&self.silent) + of(&self.heard)
    }

    /// One that has this address was told to end.
    fn note_ending(&mut self, address: IpAddr) {
        self.ending += 1;
        *self.ending_of.entry(address).or_default() += 1;
    }

    fn note_ended(&mut self, address: &IpAddr) {
        self.ending -= 1;
        if let Some(own) = self.ending_of.get_mut(address) {
            *own -= 1;
            if *own == 0 {
                self.ending_of.remove(address);
            }
        }
    }

    /// Takes the first one of an address out that has said nothing, unless as many of its were told to end already and
    /// have not.
    fn give_up_silent(&mut self, address: &IpAddr, most: usize) -> Option<End> {
        let ending = self.ending_of.get(address).copied().unwrap_or_default();
        let mut silent = self.silent.begun.iter();
        let (first, _) = silent.find(|(_, (of, _))| of == address).filter(|_| ending < most)?;
        let (_, end) = self.silent.take(*first)?;
        self.note_ending(*address);
        Some(end)
    }
}

impl Peers {
    /// Of the address that has most, the first; of several such addresses, the first of all.
    fn first_of_most(&self) -> Option<u64> {
        let most = self.of_address.values().max()?;
        let of_most = |address: &IpAddr| self.of_address.get(address) == Some(most);
        self.begun.iter().find(|(_, (address, _))| of_most(address)).map(|(number, _)| *number)
    }

    /// Takes out the one that is to end where somebody else needs its place: where it is, and what ends it.
    fn give_up(&mut self) -> Option<(IpAddr, End)> {
        let first = self.first_of_most()?;
        self.take(first)
    }

    fn add(&mut self, number: u64, address: IpAddr, end: End) {
        self.begun.insert(number, (address, end));
        *self.of_address.entry(address).or_default() += 1;
    }

    /// Takes one out: where it is, and what ends it.
    fn take(&mut self, number: u64) -> Option<(IpAddr, End)> {
        let (address, end) = self.begun.remove(&number)?;
        if let Some(own) = self.of_address.get_mut(&address) {
            *own -= 1;
            if *own == 0 {
                self.of_address.remove(&address);
            }
        }
        Some((address, end))
    }
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

    fn places(&self) -> MutexGuard<'_, HandshakePlaces> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for somebody at `address`, who has `spoken` or said nothing yet, until it is dropped; `None` where its address
    /// has as many as it may, who all have spoken. Where all are taken, somebody else's is given up: `end` is how this one is told, from any
    /// thread, that it is to end. `None` as well where as many as there are places were told to end and have not yet; who
    /// has spoken gets one until those are twice as many, so that silent peers that are slow to end keep nobody else out.
    pub fn begin(
        &self,
        address: IpAddr,
        spoken: bool,
        end: impl FnOnce() + Send + 'static,
    ) -> Option<Handshake> {
        let network = network(address);
        let mut places = self.places();
        // Of those, too, memory is taken.
        let most_ending = self.most * if spoken { 2 } else { 1 };
        if places.ending >= most_ending {
            return None;
        }
        let silent = match places.of(&network) >= self.of_one {
            true => Some(places.give_up_silent(&network, self.of_one)?),
            false => None,
        };
        let number = places.next;
        places.next += 1;
        let given_up = self.enter(&mut places, (number, network), spoken, Box::new(end));
        drop(places);
        silent.into_iter().chain(given_up).for_each(|end| end());
        Some(Handshake { of: self.clone(), number, network })
    }

    /// Takes a place among those who have spoken, or have not; what ends the one whose place it was.
    fn enter(
        &self,
        places: &mut HandshakePlaces,
        (number, network): (u64, IpAddr),
        spoken: bool,
        end: End,
    ) -> Option<End> {
        let peers = if spoken { &mut places.heard } else { &mut places.silent };
        let given_up = if peers.begun.len() >= self.most { peers.give_up() } else { None };
        peers.add(number, network, end);
        given_up.map(|(address, end)| {
            places.note_ending(address);
            end
        })
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
    number: u64,
    network: IpAddr,
}

impl Handshake {
    /// Notes that the peer has said something: it has a place among those from now on.
    pub fn note_heard(&self) {
        let mut places = self.of.places();
        let Some((network, end)) = places.silent.take(self.number) else { return };
        let given_up = self.of.enter(&mut places, (self.number, network), true, end);
        drop(places);
        if let Some(end) = given_up {
            end();
        }
    }
}

/// Whether the peer of a connection has said anything that is still to be received.
pub fn has_spoken(socket: impl AsFd) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    matches!(rustix::net::recv(socket, &mut [0], flags), Ok((1.., _)))
}

impl Drop for Handshake {
    fn drop(&mut self) {
        let mut places = self.of.places();
        if places.silent.take(self.number).or_else(|| places.heard.take(self.number)).is_none() {
            places.note_ended(&self.network);
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
        let begin = |address: &str| handshakes.begin(at(address), true, || {});
        let mut held: Vec<Handshake> = (0..OF_ONE).map(|_| begin("10.0.0.1").unwrap()).collect();
        assert!(begin("10.0.0.1").is_none() && begin("::ffff:10.0.0.1").is_none());
        held.push(begin("10.0.0.2").unwrap());
        held.extend((0..OF_ONE).map(|n| begin(&format!("fd00::{n}")).unwrap()));
        assert!(begin("fd00::ffff:1:2:3").is_none(), "the same network");
        held.extend((held.len()..200).map(|n| begin(&format!("10.1.0.{n}")).unwrap()));
        let few = Handshakes::with(3, 1);
        let _one = few.begin(at("10.0.0.1"), true, || {}).unwrap();
        assert!(few.begin(at("10.0.0.1"), true, || {}).is_none());
        assert!(few.begin(at("10.0.0.2"), true, || {}).is_some());
        drop(held.remove(0));
        drop(begin("10.0.0.1").unwrap());
        held.clear();
        let places = handshakes.places();
        assert_eq!(places.ending, 0);
        assert!(places.silent.of_address.is_empty() && places.heard.of_address.is_empty());
    }

    #[test]
    fn a_silent_connection_keeps_no_other_of_its_network_out() {
        let handshakes = Handshakes::with(200, 4);
        let ended: Arc<Mutex<Vec<u32>>> = Arc::default();
        let begin = |address: &str, name: u32, spoken: bool| {
            let ended = ended.clone();
            handshakes.begin(at(address), spoken, move || ended.lock().unwrap().push(name))
        };
        let take_ended = || std::mem::take(&mut *ended.lock().unwrap());
        let mut held: Vec<_> =
            (0..4).map(|name| begin("fd00::1", name, false).unwrap()).map(Some).collect();
        for name in 4..8 {
            held.push(begin("fd00::2", name, name % 2 == 0));
            assert_eq!(take_ended(), [name - 4]);
        }
        assert!(held.iter().all(Option::is_some));
        // As many were told to end and have not.
        assert!(begin("fd00::2", 8, true).is_none());
        held[0] = None;
        held.push(begin("fd00::2", 8, true));
        assert_eq!(take_ended(), [5], "the first who said nothing");
        held.drain(..4).for_each(drop);
        held.push(begin("fd00::2", 9, true));
        assert_eq!(take_ended(), [7]);
        assert!(begin("fd00::3", 10, true).is_none(), "all have spoken");
        held.clear();
        let places = handshakes.places();
        assert!(places.ending == 0 && places.ending_of.is_empty());
    }

    #[test]
    fn a_new_connection_takes_the_oldest_place_of_the_busiest_address() {
        let handshakes = Handshakes::with(4, 3);
        let ended: Arc<Mutex<Vec<u32>>> = Arc::default();
        let begin = |address: &str, name: u32| {
            let ended = ended.clone();
            handshakes.begin(at(address), false, move || ended.lock().unwrap().push(name))
        };
        let take_ended = || std::mem::take(&mut *ended.lock().unwrap());
        let mut held: Vec<_> = [("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.2", 3), ("10.0.0.3", 4)]
            .map(|(address, name)| begin(address, name).unwrap())
            .into();
        assert!(take_ended().is_empty());
        held.push(begin("10.0.0.4", 5).unwrap());
        assert_eq!(take_ended(), [2], "its address has two");
        held.push(begin("10.0.0.5", 6).unwrap());
        assert_eq!(take_ended(), [1], "all have one, and it began first");
        held.push(begin("10.0.0.6", 7).unwrap());
        held.push(begin("10.0.0.7", 8).unwrap());
        assert_eq!(take_ended(), [3, 4]);
        // As many as there are places were told to end and have not: of them, too, memory is taken.
        assert!(begin("10.0.0.8", 9).is_none());
        held.remove(0);
        held.push(begin("10.0.0.8", 9).unwrap());
        assert_eq!(take_ended(), [5]);
        held.clear();
        let places = handshakes.places();
        assert_eq!(places.ending, 0);
        assert!(places.silent.of_address.is_empty() && places.heard.of_address.is_empty());
    }

    #[test]
    fn identified_connections_keep_their_place_beside_silent_ones() {
        let handshakes = Handshakes::with(4, 64);
        let ended: Arc<Mutex<Vec<u32>>> = Arc::default();
        let begin = |address: u8, name: u32, spoken: bool| {
            let ended = ended.clone();
            let address = IpAddr::from([10, 0, 0, address]);
            handshakes.begin(address, spoken, move || ended.lock().unwrap().push(name))
        };
        let take_ended = || std::mem::take(&mut *ended.lock().unwrap());
        let speaks = begin(1, 1, false).unwrap();
        speaks.note_heard();
        // However many come who say nothing, and though none of them ends.
        let silent: Vec<_> = (5..100).map(|name| begin(2, name, false)).collect();
        assert_eq!(silent.iter().flatten().count(), 8, "four, and four that are to end");
        assert_eq!(take_ended(), [5, 6, 7, 8]);
        let spoken = begin(1, 200, true).unwrap();
        assert!(take_ended().is_empty());
        // Those who have said something take places of each other's: of the address that has most.
        let many: Vec<_> = (0..3).map(|name| begin(3, 300 + name, true).unwrap()).collect();
        assert_eq!(take_ended(), [1], "both have two, and it began first");
        let _one = begin(4, 400, true).unwrap();
        assert_eq!(take_ended(), [300]);
        // And leave those alone who are about to.
        assert_eq!(handshakes.places().silent.begun.len(), 4);
        // Those who are told to end and do not are bounded, too.
        let more: Vec<_> = (500..520).map(|name| begin(5, name, true)).collect();
        assert_eq!(more.iter().flatten().count(), 2, "eight were told to end");
        // Who was told to end has no place to keep.
        speaks.note_heard();
        drop(more);
        drop((speaks, silent, spoken, many, _one));
        let places = handshakes.places();
        assert!(places.silent.begun.is_empty() && places.heard.begun.is_empty());
        assert_eq!(places.ending, 0);
    }
}
