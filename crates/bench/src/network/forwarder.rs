//! The least that joins two TAP interfaces through shared memory: a ring of 4 MiB in each direction, a thread
//! that reads an interface into it, one that writes it to the other, spinning for a fixed time before they
//! sleep on an event. No switch, no checks, no counters. What the network is measured against; it stays as it is.

use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rackbus_memory::vectored::{read_with_head, write_with_head};
use rackbus_memory::{Event, SharedMemory};
use rackbus_netdev::configure::{InterfaceSettings, configure};
use rackbus_netdev::{namespace, tap};

use super::TrafficEnds;
use crate::BenchError;

const RING: u64 = 4 << 20;
/// The largest frame with its header, and its length in front.
const ROOM: u64 = 66 << 10;
const SPIN: Duration = Duration::from_micros(50);
/// Interfaces of the forwarder in their namespaces.
const NAME: &str = "fwd0";

#[repr(align(128))]
#[derive(Default)]
struct Line(AtomicU64);

/// Forwarding in one direction, on a thread of its own.
struct Direction {
    memory: SharedMemory,
    put: Line,
    taken: Line,
    asleep: AtomicBool,
    event: Event,
}

impl Direction {
    fn new() -> Result<Arc<Direction>, BenchError> {
        let memory = SharedMemory::create("forwarder", RING + ROOM)?;
        let event = Event::new().map_err(BenchError::io("making an event"))?;
        let (put, taken) = (Line::default(), Line::default());
        Ok(Arc::new(Direction { memory, put, taken, asleep: AtomicBool::new(false), event }))
    }

    /// Reads frames from an interface into the ring.
    fn fill(&self, queue: &OwnedFd, stop: &AtomicBool) {
        let mut put = 0;
        while !stop.load(Ordering::Relaxed) {
            if put + ROOM > self.taken.0.load(Ordering::Acquire) + RING {
                std::thread::yield_now();
                continue;
            }
            // A record may reach behind the ring's end, where there is room for one.
            let at = (put % RING) as usize;
            let slot = self.memory.whole().part(at + 8, ROOM as usize - 8).expect("inside");
            let Ok(read) = read_with_head(queue.as_fd(), &mut [], slot) else {
                // Spins no longer than what sleeps does: the interface's descriptor is the event.
                let begun = Instant::now();
                let mut found = false;
                while !found && begun.elapsed() < SPIN {
                    found = Event::wait_any(&[queue.as_fd()], Some(0));
                }
                if !found {
                    Event::wait_any(&[queue.as_fd()], Some(10_000_000));
                }
                continue;
            };
            let length = read as u64;
            self.memory.whole().store_u64(at, length, Ordering::Relaxed).expect("aligned");
            put += (8 + length).next_multiple_of(64);
            self.put.0.store(put, Ordering::Release);
            fence(Ordering::SeqCst);
            if self.asleep.load(Ordering::Relaxed) {
                self.event.ring();
            }
        }
    }

    /// Writes frames from the ring to an interface.
    fn drain(&self, queue: &OwnedFd, stop: &AtomicBool) {
        let mut taken = 0;
        while !stop.load(Ordering::Relaxed) {
            let begun = Instant::now();
            while self.put.0.load(Ordering::Acquire) == taken && begun.elapsed() < SPIN {
                std::hint::spin_loop();
            }
            if self.put.0.load(Ordering::Acquire) == taken {
                self.asleep.store(true, Ordering::Relaxed);
                fence(Ordering::SeqCst);
                if self.put.0.load(Ordering::Acquire) == taken {
                    self.event.wait(Some(10_000_000));
                }
                self.asleep.store(false, Ordering::Relaxed);
                continue;
            }
            let at = (taken % RING) as usize;
            let length = self.memory.whole().load_u64(at, Ordering::Relaxed).expect("aligned");
            let frame = self.memory.whole().part(at + 8, length as usize).expect("inside");
            // What the interface does not take is lost, as on any wire.
            let _ = write_with_head(queue.as_fd(), &[], frame);
            taken += (8 + length).next_multiple_of(64);
            self.taken.0.store(taken, Ordering::Release);
        }
    }
}

/// Two namespaces that are joined by it, for as long as it lives.
pub struct Forwarder {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    names: [String; 2],
    /// The namespaces that it forwards between.
    pub pair: TrafficEnds,
}

impl Forwarder {
    /// Makes both interfaces and starts the four threads.
    ///
    /// # Errors
    /// When the system refuses, which takes root.
    pub fn start() -> Result<Forwarder, BenchError> {
        let names = ["a", "b"].map(|end| format!("rackbus-bench-{}-{end}", std::process::id()));
        let failed = || BenchError::io("making a TAP interface");
        let mut ends = Vec::new();
        for (nth, name) in names.iter().enumerate() {
            let space = namespace::create(name).map_err(failed())?;
            let address = |end: usize| IpAddr::from([10, 78, 0, 1 + end as u8]);
            let mac = |end: usize| [2, 0x78, 0, 0, 0, 1 + end as u8];
            let settings = InterfaceSettings {
                mac: mac(nth),
                mtu: 1500,
                addresses: vec![(address(nth), 24)],
                neighbours: vec![(address(1 - nth), mac(1 - nth))],
            };
            let queue = namespace::within(&space, move || {
                let queue = tap::open(NAME, 1)?.remove(0);
                configure(NAME, &settings)?;
                Ok(Arc::new(queue))
            });
            ends.push((space, queue.map_err(failed())?));
        }
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for (from, to) in [(0, 1), (1, 0)] {
            let way = Direction::new()?;
            let (reads, writes) = (ends[from].1.clone(), ends[to].1.clone());
            let (filling, stopped) = (way.clone(), stop.clone());
            threads.push(std::thread::spawn(move || filling.fill(&reads, &stopped)));
            let stopped = stop.clone();
            threads.push(std::thread::spawn(move || way.drain(&writes, &stopped)));
        }
        let mut spaces = ends.into_iter().map(|(space, _)| space);
        let (a, b) = spaces.next().zip(spaces.next()).expect("two were made");
        let address = IpAddr::from([10, 78, 0, 2]);
        let pair = TrafficEnds { spaces: Some((a, b)), address, carriers: Vec::new() };
        Ok(Forwarder { stop, threads, names, pair })
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        for name in &self.names {
            let _ = namespace::remove(name);
        }
    }
}
