//! The ring of frames alone: one thread puts frames in, another takes them out and reads their bytes. The raw
//! ring beside it has slots of one size and two indices, the least that two threads pass bytes with.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rackbus_memory::copy::{
    CopyEngine, CopyEngineOptions, CopyLocation, Ticket, Transaction, TransactionState,
};
use rackbus_memory::frames::{FRAME_HEADER, FrameEvents, FramesLayout};
use rackbus_memory::{Event, FrameReceiver, FrameSender, PeerEvent, SharedMemory};

use super::traffic::{PacketResult, StreamResult};
use crate::BenchError;
use crate::machine::{CLIENT_CPU, SERVER_CPU, own_processor_time, pin};

const LINE: usize = 64;
/// Bytes of both rings.
const RING: usize = 1 << 20;
/// Frames that are handed over at once, and between two looks at the clock.
const BATCH: usize = 32;
/// Copies that are submitted while one is waited for.
const AHEAD: usize = 4;

/// Frames of so many bytes through the ring of frames, from memory that begins `off` bytes behind
/// a line.
///
/// # Errors
/// When the system has no memory or descriptors.
pub fn frames(bytes: usize, off: usize, time: Duration) -> Result<PacketResult, BenchError> {
    let layout = FramesLayout { ring_bytes: RING, longest: 66 << 10 };
    let length = layout.bytes().expect("it is a ring that can be");
    let memory = SharedMemory::create("frames", length as u64)?;
    let failed = || BenchError::io("making the ring's events");
    let event = || Event::new().map(OwnedFd::from).map_err(failed());
    let (frames, room) = (event()?, event()?);
    let copy = |fd: &OwnedFd| fd.try_clone().and_then(PeerEvent::new).map_err(failed());
    let events = || Ok::<_, BenchError>(FrameEvents { frames: copy(&frames)?, room: copy(&room)? });
    let region = memory.region();
    let sender = FrameSender::new(region.clone(), events()?, layout);
    let receiver = FrameReceiver::new(region.clone(), events()?, layout);
    let (mut sender, mut receiver) = sender.zip(receiver).expect("the memory is as long");
    let data = vec![7; bytes + 2 * LINE];
    let from = data.as_ptr().align_offset(LINE) + off;
    let mut out = vec![0; bytes];
    let mut sent = 0usize;
    let sends = move || {
        match sender.send(&[0; FRAME_HEADER], &data[from..from + bytes], &[]) {
            Ok(()) => sent += 1,
            Err(_) => return std::hint::spin_loop(),
        }
        // As a node's worker does, and DPDK's.
        if sent.is_multiple_of(BATCH) {
            sender.flush();
        }
    };
    let receives = move || match receiver.peek() {
        Ok(Some(frame)) => {
            frame.bytes.copy_to(&mut out);
            receiver.consume();
            1
        }
        _ => 0,
    };
    Ok(passed(bytes, time, sends, receives))
}

/// The same through the raw ring.
///
/// # Errors
/// When the system has no memory.
pub fn raw(bytes: usize, time: Duration) -> Result<PacketResult, BenchError> {
    #[repr(align(128))]
    #[derive(Default)]
    struct Index(AtomicU64);
    let stride = bytes.next_multiple_of(64);
    let slots = (RING / stride).max(1) as u64;
    let memory = SharedMemory::create("raw", stride as u64 * slots)?;
    let indices = Arc::new([Index::default(), Index::default()]);
    let (mut put, mut taken_seen, ours) = (0, 0, (memory.clone(), indices.clone()));
    let data = vec![7; bytes];
    let sends = move || {
        if put - taken_seen == slots {
            taken_seen = ours.1[1].0.load(Ordering::Acquire);
            if put - taken_seen == slots {
                return std::hint::spin_loop();
            }
        }
        let slot = ours.0.whole().part((put % slots) as usize * stride, bytes);
        slot.expect("inside").copy_from(&data);
        put += 1;
        ours.1[0].0.store(put, Ordering::Release);
    };
    let (mut taken, mut put_seen, mut out) = (0, 0, vec![0; bytes]);
    let receives = move || {
        if put_seen == taken {
            put_seen = indices[0].0.load(Ordering::Acquire);
            if put_seen == taken {
                return 0;
            }
        }
        let slot = memory.whole().part((taken % slots) as usize * stride, bytes);
        slot.expect("inside").copy_to(&mut out);
        taken += 1;
        indices[1].0.store(taken, Ordering::Release);
        1
    };
    Ok(passed(bytes, time, sends, receives))
}

/// Copies of 64 KiB by a channel of the copy engine, a few of which are always submitted.
///
/// # Errors
/// When the engine does not start.
pub fn copies(time: Duration) -> Result<StreamResult, BenchError> {
    const BYTES: usize = 64 << 10;
    let options = CopyEngineOptions { channels: 1, ..CopyEngineOptions::default() };
    let engine = CopyEngine::start("bench-copy", &options);
    let engine = engine.map_err(BenchError::io("starting the copy engine"))?;
    let memory = ["from", "to"].map(|name| SharedMemory::create(name, RING as u64));
    let [from, to] = memory;
    let (from, to) = (from?, to?);
    let (mut under_way, mut done) = (VecDeque::new(), 0u64);
    let (before, begun) = (own_processor_time(), Instant::now());
    while begun.elapsed() < time {
        let at = (done as usize * BYTES) % RING;
        let (source, destination) =
            (CopyLocation::shared(from.region(), at), CopyLocation::shared(to.region(), at));
        let copy = Transaction::of(source, destination, BYTES).expect("inside");
        under_way.push_back(engine.channels()[0].submit(copy));
        done += 1;
        if under_way.len() > AHEAD
            && let Some(ticket) = under_way.pop_front()
        {
            wait(&ticket);
        }
    }
    under_way.iter().for_each(wait);
    let bytes = done * BYTES as u64;
    Ok(StreamResult::of(bytes, begun.elapsed(), own_processor_time().saturating_sub(before)))
}

fn wait(ticket: &Ticket) {
    while ticket.poll() == TransactionState::Posted {
        std::hint::spin_loop();
    }
}

/// What comes out, of frames of so many bytes.
fn passed(
    bytes: usize,
    time: Duration,
    mut sends: impl FnMut() + Send + 'static,
    mut receives: impl FnMut() -> u64 + Send + 'static,
) -> PacketResult {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let sender = std::thread::spawn(move || {
        pin(SERVER_CPU);
        while !stopped.load(Ordering::Relaxed) {
            (0..BATCH).for_each(|_| sends());
        }
    });
    pin(CLIENT_CPU);
    let (before, begun, mut count) = (own_processor_time(), Instant::now(), 0);
    while begun.elapsed() < time || count == 0 {
        count += (0..BATCH).map(|_| receives()).sum::<u64>();
    }
    let (took, worked) = (begun.elapsed(), own_processor_time().saturating_sub(before));
    stop.store(true, Ordering::Relaxed);
    let _ = sender.join();
    PacketResult::of(count, bytes, took, worked)
}
