//! A virtio network function and a driver of it, each on a processor of its own: what the driver sends is copied out of
//! its buffers and counted, as DPDK's `testpmd` does behind vhost-user, which is how QEMU leads a guest's frames to
//! a switch in a process (`vhost`).

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rackbus_devices::nic::{Nic, NicCounters, NicOptions};
use rackbus_driver::net::{Net, NetOptions};
use rackbus_memory::{DmaSlice, Event, SharedMemory};
use rackbus_net::port::MAX_FRAME;
use rackbus_net::{Frame, MacAddress, NetworkPort, Offload, SendOutcome};
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::serve_function;
use rackbus_spec::virtio::net::NetHeader;

use super::traffic::PacketResult;
use crate::BenchError;
use crate::machine::{CLIENT_CPU, SERVER_CPU, own_processor_time, pin};

/// Frames that the driver hands over at once, as DPDK's does.
const BATCH: usize = 32;
/// Descriptors of a queue, as DPDK's has by default.
const DESCRIPTORS: u16 = 256;
/// Bytes of a frame in place that the driver writes: the headers of Ethernet, IPv4 and UDP, as DPDK's sender does.
const HEADERS: usize = 42;
/// Frames that the port's memory holds.
const HELD: usize = 256;
/// Bytes for a frame there.
const ROOM: usize = 2048;

/// A port that takes copies of frames and counts them; or, `endless`, has always one.
struct Counting {
    memory: SharedMemory,
    event: Event,
    at: usize,
    count: Arc<AtomicU64>,
    /// Bytes of the frames that come for the driver.
    endless: Option<usize>,
}

impl NetworkPort for Counting {
    fn mac(&self) -> MacAddress {
        MAC
    }

    fn mtu(&self) -> u16 {
        1500
    }

    fn is_up(&self) -> bool {
        true
    }

    fn attend(&mut self, _on: bool) {}

    fn send(&mut self, _offload: Offload, parts: &[DmaSlice<'_>]) -> SendOutcome {
        self.at = (self.at + 1) % HELD;
        let mut place = self.at * ROOM;
        let end = place + ROOM;
        for part in parts {
            let room = self.memory.whole().part(place, end - place).expect("inside");
            place += room.copy_from_slice(*part);
        }
        self.count.store(self.count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        SendOutcome::Done
    }

    fn flush(&mut self) {}

    fn next(&mut self) -> Option<Frame<'_>> {
        let bytes = self.memory.whole().part(self.at * ROOM, self.endless?)?;
        Some(Frame { offload: Offload::default(), bytes })
    }

    fn consume(&mut self) {
        self.at = (self.at + 1) % HELD;
    }

    fn park(&mut self) -> bool {
        self.endless.is_none()
    }

    fn unpark(&mut self) {}

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

const MAC: MacAddress = MacAddress([2, 0x76, 0, 0, 0, 1]);

/// What the driver does with the bytes of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameUse {
    /// It copies them between the buffer and memory of its own, as a program would that has or wants the data.
    Copied,
    /// It leaves them where they lie, and of what it sends writes the headers alone, as DPDK's does.
    InPlace,
}

/// The function with a driver of it.
pub struct Driven {
    net: Net,
    count: Arc<AtomicU64>,
    _served: rackbus_pci::vfio_user::LocalFunction,
}

impl Driven {
    /// One with its socket in `dir`; frames of `arriving` bytes come for it without end, if any.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn start(dir: &Path, arriving: Option<usize>) -> Result<Driven, BenchError> {
        let memory = SharedMemory::create("port", (HELD * ROOM).max(MAX_FRAME) as u64)?;
        for at in 0..HELD {
            memory.whole().write_obj(at * ROOM, &MAC.0);
        }
        let event = Event::new().map_err(BenchError::io("making an event"))?;
        let count = Arc::new(AtomicU64::new(0));
        let port = Counting { memory, event, at: 0, count: count.clone(), endless: arriving };
        let options = NicOptions {
            name: "bench/nic0.vf1".to_owned(),
            pairs: 1,
            mac: MAC,
            rate: None,
            packed_rings: true,
        };
        let nic = Nic::new(&options, Some(Box::new(port)), Arc::new(NicCounters::default()));
        let engine = EngineOptions { cpu: Some(SERVER_CPU), ..EngineOptions::default() };
        let socket = dir.join("nic.sock");
        let served = serve_function(Box::new(nic), &socket, engine);
        let served = served.map_err(BenchError::io("serving a function"))?;
        let options =
            NetOptions { size: DESCRIPTORS, transmit_buffer: ROOM, ..NetOptions::default() };
        let net = Net::open(&socket, Duration::from_secs(5), options);
        let net = net.map_err(|error| BenchError::Peer(error.to_string()))?;
        Ok(Driven { net, count, _served: served })
    }

    /// Frames of so many bytes that the driver sends and the port counts.
    ///
    /// # Errors
    /// When the function fails.
    pub fn sends(
        &mut self,
        bytes: usize,
        usage: FrameUse,
        time: Duration,
    ) -> Result<PacketResult, BenchError> {
        let failed = |error: rackbus_driver::net::NetError| BenchError::Peer(error.to_string());
        pin(CLIENT_CPU);
        let frame = [&[0xff; 6][..], &MAC.0, &[8, 0], &vec![0x5a; bytes - 14]].concat();
        let (begun, before) = (Instant::now(), self.count.load(Ordering::Relaxed));
        let worked = own_processor_time();
        while begun.elapsed() < time {
            for _ in 0..BATCH {
                let (net, header) = (&mut self.net, NetHeader::default());
                let sent = match usage {
                    FrameUse::Copied => net.send(0, &header, &frame),
                    FrameUse::InPlace => net.send_in_place(0, &header, bytes, |room| {
                        room.copy_from(&frame[..HEADERS]);
                    }),
                };
                if !sent.map_err(failed)? {
                    break;
                }
            }
            self.net.flush(0).map_err(failed)?;
        }
        let arrived = self.count.load(Ordering::Relaxed) - before;
        let worked = own_processor_time().saturating_sub(worked);
        Ok(PacketResult::of(arrived, bytes, begun.elapsed(), worked))
    }

    /// Frames that the driver receives, of the length that they come with.
    ///
    /// # Errors
    /// When the function fails.
    pub fn receives(
        &mut self,
        usage: FrameUse,
        time: Duration,
    ) -> Result<PacketResult, BenchError> {
        pin(CLIENT_CPU);
        let worked = own_processor_time();
        let (begun, mut frame, mut count, mut bytes) = (Instant::now(), Vec::new(), 0u64, 0);
        while begun.elapsed() < time {
            for _ in 0..BATCH {
                let mut length = 0;
                let received = match usage {
                    FrameUse::Copied => self.net.receive(0, &mut frame),
                    FrameUse::InPlace => self.net.receive_in_place(0, |part| length += part.len()),
                };
                match received {
                    Ok(Some(_)) => (count, bytes) = (count + 1, length.max(frame.len())),
                    Ok(None) => {}
                    Err(error) => return Err(BenchError::Peer(error.to_string())),
                }
            }
        }
        let worked = own_processor_time().saturating_sub(worked);
        Ok(PacketResult::of(count, bytes, begun.elapsed(), worked))
    }
}
