//! A network of one process, for devices that no node lends: those of tests and of fuzzing.
//!
//! Who receives what is decided by the rack's own [`StationSwitch`]. Each port has a ring of its own memory, into which
//! senders copy under its lock, so frames of one sender stay in order. A port that is full keeps its senders waiting for
//! some milliseconds; after that, frames for it are dropped until it has taken one: so a receiver that stands
//! still holds nobody up.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rackbus_memory::{DmaSlice, Event, SharedMemory};

use crate::address::MacAddress;
use crate::addressing::{Station, StationKind};
use crate::beginning::Beginning;
use crate::offload::Offload;
use crate::port::{Cause, Frame, NetworkPort, PortOptions, PortSource, SendOutcome};
use crate::switch::{FrameTarget, StationSwitch};
use crate::vlan::Rewrite;

/// Bytes of a port's ring.
const RING: usize = 1 << 20;
/// For how long a full port keeps a sender waiting.
const PATIENCE: Duration = Duration::from_millis(5);
/// Bytes of the longest packet that a port takes.
const MTU: u16 = 65_535;
/// Frames begin at multiples of this.
const LINE: usize = 64;

/// The ports of one process, all in one network.
#[derive(Debug)]
pub struct LocalNetwork {
    options: BTreeMap<String, PortOptions>,
    members: Arc<Members>,
}

impl LocalNetwork {
    /// Ports of these functions, each as the rack file describes it; of others, without any options.
    pub fn new(ports: impl IntoIterator<Item = (String, PortOptions)>) -> LocalNetwork {
        LocalNetwork { options: ports.into_iter().collect(), members: Arc::default() }
    }
}

impl PortSource for LocalNetwork {
    fn port(&self, function: &str) -> std::io::Result<Box<dyn NetworkPort>> {
        let options = self.options.get(function).cloned().unwrap_or_default();
        self.members.join(function, options).map(|port| Box::new(port) as Box<dyn NetworkPort>)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is behind it is whole between any two statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Who is joined, and the switch of these stations.
#[derive(Debug)]
struct Joined {
    ports: Vec<(Station, Arc<Inbox>)>,
    switch: StationSwitch,
}

#[derive(Debug)]
struct Members {
    joined: Mutex<Joined>,
    begun: Instant,
}

impl Default for Members {
    fn default() -> Members {
        let switch = StationSwitch::new(&[], MTU, u64::MAX);
        let joined = Mutex::new(Joined { ports: Vec::new(), switch });
        Members { joined, begun: Instant::now() }
    }
}

impl Joined {
    /// Makes the switch anew, of those who are joined now.
    fn changed(&mut self) {
        let stations: Vec<Station> =
            self.ports.iter().map(|(station, _)| station.clone()).collect();
        self.switch = StationSwitch::new(&stations, MTU, u64::MAX);
    }
}

impl Members {
    fn join(
        self: &Arc<Members>,
        function: &str,
        options: PortOptions,
    ) -> std::io::Result<LocalPort> {
        let mut joined = lock(&self.joined);
        if joined.ports.iter().any(|(station, _)| station.name == function) {
            let text = format!("the port of {function} is held already");
            return Err(std::io::Error::new(std::io::ErrorKind::AddrInUse, text));
        }
        let memory = SharedMemory::create("port", RING as u64).map_err(std::io::Error::other)?;
        let mac = options.mac.unwrap_or_else(|| MacAddress::derived(function));
        let inbox = Arc::new(Inbox {
            mac,
            memory,
            ring: Mutex::default(),
            parked: AtomicBool::new(false),
            room: AtomicBool::new(false),
            event: Event::new()?,
        });
        let station = Station {
            name: function.to_owned(),
            host: String::new(),
            mac,
            // Nobody here uses IP addresses but the drivers at the ports, which choose their own.
            ipv4: Ipv4Addr::UNSPECIFIED,
            ipv6: Ipv6Addr::UNSPECIFIED,
            kind: StationKind::Function,
            vlan: options.rules.vlan,
            vlans: options.rules.vlans,
            learned_addresses: options.rules.learned_addresses as usize,
            anti_spoofing: options.anti_spoofing,
        };
        joined.ports.push((station, inbox.clone()));
        joined.changed();
        Ok(LocalPort { members: self.clone(), inbox, told: Vec::new(), mtu: MTU })
    }

    /// The inboxes of those whom a frame of `length` bytes, which begins with `head`, is for.
    fn receivers(
        &self,
        sender: &Arc<Inbox>,
        offload: &Offload,
        head: &[u8],
        length: usize,
    ) -> Result<(FrameTarget, Vec<Receiver>), Cause> {
        let joined = lock(&self.joined);
        let of = |inbox: &Arc<Inbox>| Arc::ptr_eq(inbox, sender);
        let from = joined.ports.iter().position(|(_, inbox)| of(inbox)).ok_or(Cause::Down)?;
        let now_ns = || u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let switch = &joined.switch;
        let (to, vlan) = switch.decide(from, offload, head, length, now_ns)?;
        let receives = |nth: usize| match to {
            FrameTarget::Station(station) if nth == station => switch.rewrite(nth, &vlan),
            FrameTarget::All => switch.heard_as(nth, from, &vlan),
            FrameTarget::Flood if switch.has_others(nth) => switch.heard_as(nth, from, &vlan),
            _ => None,
        };
        let all = joined.ports.iter().enumerate();
        let receivers = all.filter_map(|(nth, (_, inbox))| Some((inbox.clone(), receives(nth)?)));
        Ok((to, receivers.collect()))
    }
}

/// Who receives a frame, and what it becomes there.
type Receiver = (Arc<Inbox>, Rewrite);

/// What came for a port.
#[derive(Debug)]
struct Inbox {
    mac: MacAddress,
    memory: SharedMemory,
    ring: Mutex<RingState>,
    parked: AtomicBool,
    /// A port that was full has room again.
    room: AtomicBool,
    event: Event,
}

/// Frames in the ring's memory, each a place, a length and what is left to do.
#[derive(Debug, Default)]
struct RingState {
    attended: bool,
    frames: std::collections::VecDeque<(usize, usize, Offload)>,
    /// Where the next frame goes.
    head: usize,
    /// Ports that found it full, to be rung when there is room.
    waiting: Vec<Weak<Inbox>>,
    /// Since when nothing was taken although it was full.
    full_since: Option<Instant>,
}

impl RingState {
    /// Room for `length` bytes in one piece.
    fn place(&self, length: usize) -> Option<usize> {
        let length = length.next_multiple_of(LINE);
        match self.frames.front() {
            None => Some(0),
            Some((tail, ..)) if self.head > *tail => {
                let behind = self.head + length <= RING;
                // Never up to the tail itself: that would look as if the ring were empty.
                behind.then_some(self.head).or((length < *tail).then_some(0))
            }
            Some((tail, ..)) => (self.head + length < *tail).then_some(self.head),
        }
    }
}

impl Inbox {
    fn wake(&self) {
        // The receiver says that it sleeps and then looks at its ring; here it is the other way round.
        fence(Ordering::SeqCst);
        if self.parked.load(Ordering::Relaxed) {
            self.event.ring();
        }
    }

    fn put(
        &self,
        from: &Arc<Inbox>,
        offload: Offload,
        (begin, rest): (&[u8], &[u8]),
        (parts, mut skip): (&[DmaSlice<'_>], usize),
    ) -> SendOutcome {
        let all = parts.iter().map(DmaSlice::len).sum::<usize>();
        let length = begin.len() + rest.len() + all.saturating_sub(skip);
        let mut ring = lock(&self.ring);
        if !ring.attended {
            return SendOutcome::Dropped(Cause::Down);
        }
        let Some(at) = ring.place(length) else {
            let since = *ring.full_since.get_or_insert_with(Instant::now);
            if since.elapsed() > PATIENCE {
                return SendOutcome::Dropped(Cause::Full);
            }
            let from = Arc::downgrade(from);
            if !ring.waiting.iter().any(|waiting| waiting.ptr_eq(&from)) {
                ring.waiting.push(from);
            }
            return SendOutcome::Full;
        };
        let mut place = at;
        for bytes in [begin, rest] {
            if let Some(room) = self.memory.whole().part(place, bytes.len()) {
                place += room.copy_from(bytes);
            }
        }
        for part in parts {
            let skipped = skip.min(part.len());
            skip -= skipped;
            let left = part.part(skipped, part.len() - skipped);
            if let (Some(left), Some(room)) =
                (left, self.memory.whole().part(place, part.len() - skipped))
            {
                place += room.copy_from_slice(left);
            }
        }
        ring.frames.push_back((at, length, offload));
        ring.head = (at + length).next_multiple_of(LINE);
        SendOutcome::Done
    }
}

/// A port of the network.
#[derive(Debug)]
struct LocalPort {
    members: Arc<Members>,
    inbox: Arc<Inbox>,
    /// Receivers of what was sent since the last flush.
    told: Vec<Arc<Inbox>>,
    mtu: u16,
}

impl Drop for LocalPort {
    fn drop(&mut self) {
        self.attend(false);
        let mut joined = lock(&self.members.joined);
        joined.ports.retain(|(_, inbox)| !Arc::ptr_eq(inbox, &self.inbox));
        joined.changed();
    }
}

impl NetworkPort for LocalPort {
    fn mac(&self) -> MacAddress {
        self.inbox.mac
    }

    fn mtu(&self) -> u16 {
        self.mtu
    }

    fn is_up(&self) -> bool {
        true
    }

    fn attend(&mut self, on: bool) {
        let mut ring = lock(&self.inbox.ring);
        ring.attended = on;
        if !on {
            ring.frames.clear();
            (ring.head, ring.full_since) = (0, None);
        }
    }

    fn send(&mut self, offload: Offload, parts: &[DmaSlice<'_>]) -> SendOutcome {
        let length: usize = parts.iter().map(DmaSlice::len).sum();
        // Its owner may change the frame at any time: what is decided by is read once.
        let head = Beginning::of(parts);
        let head = head.bytes();
        let found = self.members.receivers(&self.inbox, &offload, head, length);
        let (to, receivers) = match found {
            Ok(found) => found,
            Err(cause) => return SendOutcome::Dropped(cause),
        };
        let mut sent = SendOutcome::Done;
        for (receiver, rewrite) in receivers {
            let rewritten = rewrite.apply(head).filter(|_| !rewrite.is_none());
            let (begin, rest) = match &rewritten {
                Some((begin, length, rest)) => (&begin[..*length], *rest),
                None => (head, &[][..]),
            };
            let offload = rewrite.offload(&offload);
            let put = receiver.put(&self.inbox, offload, (begin, rest), (parts, head.len()));
            if let FrameTarget::Station(_) = to {
                sent = put;
            }
            if !self.told.iter().any(|known| Arc::ptr_eq(known, &receiver)) {
                self.told.push(receiver);
            }
        }
        sent
    }

    fn flush(&mut self) {
        self.told.drain(..).for_each(|receiver| receiver.wake());
    }

    fn next(&mut self) -> Option<Frame<'_>> {
        let (at, length, offload) = *lock(&self.inbox.ring).frames.front()?;
        let bytes = self.inbox.memory.whole().part(at, length)?;
        Some(Frame { offload, bytes })
    }

    fn consume(&mut self) {
        let mut ring = lock(&self.inbox.ring);
        ring.frames.pop_front();
        ring.full_since = None;
        let waiting = std::mem::take(&mut ring.waiting);
        drop(ring);
        for sender in waiting.iter().filter_map(Weak::upgrade) {
            sender.room.store(true, Ordering::Relaxed);
            sender.wake();
        }
    }

    fn park(&mut self) -> bool {
        self.inbox.parked.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let room = self.inbox.room.swap(false, Ordering::Relaxed);
        !room && lock(&self.inbox.ring).frames.is_empty()
    }

    fn unpark(&mut self) {
        self.inbox.parked.store(false, Ordering::Relaxed);
        self.inbox.event.drain();
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.inbox.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rackbus_fabric::rack::PortRules;

    use super::*;

    /// Bytes of the longest frame without a tag.
    const LONGEST: usize = 14 + MTU as usize;

    fn port(network: &LocalNetwork, function: &str) -> Box<dyn NetworkPort> {
        let mut port = network.port(function).unwrap();
        port.attend(true);
        port
    }

    /// A frame from an address to another.
    fn frame(
        memory: &SharedMemory,
        (from, to): (MacAddress, MacAddress),
        number: u32,
        length: usize,
    ) -> DmaSlice<'_> {
        memory.whole().write_obj(0, &to.0);
        memory.whole().write_obj(6, &from.0);
        memory.whole().write_obj(14, &number);
        memory.whole().part(0, length).unwrap()
    }

    fn number(port: &mut Box<dyn NetworkPort>) -> Option<u32> {
        let number = port.next()?.bytes.read_obj(14);
        port.consume();
        number
    }

    #[test]
    fn frames_of_any_length_come_in_order_however_often_the_ring_goes_round() {
        let network = LocalNetwork::new([]);
        let (mut a, mut b) = (port(&network, "h/nic0.vf1"), port(&network, "h/nic0.vf2"));
        let memory = SharedMemory::create("frames", 1 << 17).unwrap();
        let (to, mut sent, mut came) = (b.mac(), 0u32, 0);
        for round in 0..2000usize {
            let length = 18 + (round * 7919) % (LONGEST - 18);
            if a.send(Offload::default(), &[frame(&memory, (a.mac(), to), sent, length)])
                == SendOutcome::Done
            {
                sent += 1;
            }
            // The ring is mostly nearly full, and sometimes empty.
            let keep = if round % 100 == 99 { 0 } else { 12 };
            while sent - came > keep {
                assert_eq!(number(&mut b), Some(came));
                came += 1;
            }
        }
        assert!(sent > 1900, "{sent}");
        while let Some(next) = number(&mut b) {
            assert_eq!(next, came);
            came += 1;
        }
        assert_eq!(came, sent);
    }

    #[test]
    fn a_full_port_keeps_its_sender_waiting_and_wakes_it() {
        let network = LocalNetwork::new([]);
        let (mut a, mut b) = (port(&network, "h/nic0.vf1"), port(&network, "h/nic0.vf2"));
        let memory = SharedMemory::create("frames", 1 << 17).unwrap();
        let to = b.mac();
        let whole = frame(&memory, (a.mac(), to), 0, LONGEST);
        while a.send(Offload::default(), &[whole]) == SendOutcome::Done {}
        assert!(a.park(), "nothing came");
        assert!(!Event::wait_any(&[a.wake_fd()], Some(0)));
        b.consume();
        assert!(Event::wait_any(&[a.wake_fd()], Some(0)), "there is room");
        // In two pieces, of which none is large enough yet.
        b.consume();
        a.unpark();
        assert!(!a.park(), "which it hears of, whether it sleeps or is about to");
        a.unpark();
        assert_eq!(a.send(Offload::default(), &[whole]), SendOutcome::Done);
        // One that stalls costs its senders a bounded time.
        let begun = Instant::now();
        while a.send(Offload::default(), &[whole]) == SendOutcome::Full {
            assert!(begun.elapsed() < Duration::from_secs(20));
        }
        assert_eq!(a.send(Offload::default(), &[whole]), SendOutcome::Dropped(Cause::Full));
        // And the others nothing.
        let mut c = port(&network, "h/nic0.vf3");
        let other = frame(&memory, (a.mac(), c.mac()), 7, 100);
        assert_eq!(a.send(Offload::default(), &[other]), SendOutcome::Done);
        assert_eq!(number(&mut c), Some(7));
    }

    #[test]
    fn each_frame_goes_to_its_receiver() {
        let rules = || PortRules { vlan: Some(7), ..PortRules::default() };
        let options = || PortOptions { rules: rules(), ..PortOptions::default() };
        let network = LocalNetwork::new([
            ("h/nic0.vf2".to_owned(), options()),
            ("h/nic0.vf3".to_owned(), options()),
        ]);
        let names = ["h/nic0.vf1", "h/nic0.vf2", "h/nic0.vf3", "h/nic0.vf4", "h/nic1.vf1"];
        let mut ports = names.map(|name| port(&network, name));
        let macs = [0, 1, 2, 3, 4].map(|at: usize| ports[at].mac());
        let memory = SharedMemory::create("frames", 4096).unwrap();
        let mut send = |from: usize, to, sender: MacAddress, kind: [u8; 2]| {
            let frame = frame(&memory, (sender, to), 1, 60);
            memory.whole().write_obj(12, &kind);
            let sent = ports[from].send(Offload::default(), &[frame]);
            let reached: Vec<usize> =
                (0..5).filter(|at| number(&mut ports[*at]).is_some()).collect();
            (sent, reached)
        };
        let (all, ip, tag) = (MacAddress::BROADCAST, [8, 0], [0x81, 0]);
        assert_eq!(send(0, all, macs[0], ip), (SendOutcome::Done, vec![3, 4]));
        assert_eq!(send(0, macs[3], macs[0], ip), (SendOutcome::Done, vec![3]));
        assert_eq!(send(0, macs[4], macs[0], ip), (SendOutcome::Done, vec![4]));
        assert_eq!(send(1, all, macs[1], ip), (SendOutcome::Done, vec![2]));
        assert_eq!(send(1, macs[2], macs[1], ip), (SendOutcome::Done, vec![2]));
        let refused = [
            (send(0, macs[0], macs[0], ip), Cause::Unknown),
            (send(0, MacAddress([2; 6]), macs[0], ip), Cause::Unknown),
            (send(0, macs[1], macs[0], ip), Cause::Vlan),
            (send(0, macs[3], macs[0], tag), Cause::Vlan),
            (send(1, macs[2], macs[0], ip), Cause::Spoofed),
        ];
        for (sent, cause) in refused {
            assert_eq!(sent, (SendOutcome::Dropped(cause), vec![]));
        }
    }

    #[test]
    fn a_port_belongs_to_one_owner_who_takes_frames_or_does_not() {
        let network = LocalNetwork::new([]);
        let mut a = port(&network, "h/nic0.vf1");
        let mut b = network.port("h/nic0.vf2").unwrap();
        let memory = SharedMemory::create("frames", 4096).unwrap();
        let to = b.mac();
        let frame = frame(&memory, (a.mac(), to), 1, 60);
        assert_eq!(a.send(Offload::default(), &[frame]), SendOutcome::Dropped(Cause::Down));
        assert!(network.port("h/nic0.vf2").is_err(), "somebody holds it");
        b.attend(true);
        assert_eq!(a.send(Offload::default(), &[frame]), SendOutcome::Done);
        b.attend(false);
        assert!(b.next().is_none());
        drop(b);
        assert_eq!(a.send(Offload::default(), &[frame]), SendOutcome::Dropped(Cause::Unknown));
        network.port("h/nic0.vf2").unwrap();
    }
}
