//! The thread of one queue of a host's interface: takes frames from it to the rings of their receivers, and
//! from its own rings to it. It polls while there is work, spins for a while after it, and sleeps
//! (`rackbus_pci::pace`).

use std::io::IoSliceMut;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rackbus_memory::vectored::write_with_head;
use rackbus_memory::{AdaptiveSpin, Event};
use rackbus_net::lane::LaneHandle;
use rackbus_net::offload::OFFLOAD_BYTES;
use rackbus_net::port::MAX_FRAME;
use rackbus_net::{Cause, Lane, News, Offload, Port, Sent};
use rackbus_pci::Work;
use rackbus_pci::pace::{Next, Pace};
use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

/// Frames that are taken from one side before the other is looked at.
const BURST: usize = 16;
/// How long it sleeps at most while a frame waits for room.
const HELD_NS: u64 = 5_000_000;

/// A running worker; it ends when this is dropped.
#[derive(Debug)]
pub struct Worker {
    handle: LaneHandle,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts one for a queue.
    ///
    /// # Errors
    /// When the system has no thread for it.
    pub fn start(name: &str, lane: Lane, queue: OwnedFd) -> std::io::Result<Worker> {
        let (handle, stop) = (lane.handle().clone(), Arc::new(AtomicBool::new(false)));
        let stopped = stop.clone();
        let run = move || Running::new(lane, queue, stopped).run();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run)?;
        Ok(Worker { handle, stop, thread: Some(thread) })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // Wakes it.
        self.handle.tell(News::Up(false));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Running {
    lane: Lane,
    queue: OwnedFd,
    stop: Arc<AtomicBool>,
    /// A frame as it was read, and what is left to do to it.
    buffer: Vec<u8>,
    offload: Offload,
    /// Bytes of a frame that waits for room.
    held: Option<usize>,
    /// Somebody deleted the interface: its descriptor reports an error for ever.
    gone: bool,
}

impl Running {
    fn new(lane: Lane, queue: OwnedFd, stop: Arc<AtomicBool>) -> Running {
        let buffer = vec![0; MAX_FRAME];
        Running { lane, queue, stop, buffer, offload: Offload::default(), held: None, gone: false }
    }

    fn run(mut self) {
        let begun = self.lane.now_ns();
        let handle = self.lane.handle().clone();
        let counters = &handle.counters().pace;
        counters.since_ns.set(begun);
        let mut pace = Pace::new(AdaptiveSpin::default(), begun);
        while !self.stop.load(Ordering::Acquire) {
            let sent = self.send();
            let received = self.receive();
            let work = if sent || received { Work::Done } else { Work::Idle };
            match work {
                Work::Done => counters.busy_polls.add(1),
                _ => {
                    counters.idle_polls.add(1);
                    std::hint::spin_loop();
                }
            }
            match pace.after(work, || self.lane.now_ns()) {
                Next::Poll | Next::Check | Next::Move => {}
                Next::Yield => std::thread::yield_now(),
                Next::Sleep(_) => {
                    let asleep = self.lane.now_ns();
                    if self.sleep() {
                        counters.sleeps.add(1);
                    }
                    let now = self.lane.now_ns();
                    counters.asleep_ns.add(now.saturating_sub(asleep));
                    pace.disturbed(now);
                }
            }
        }
    }

    /// From the interface to the receivers' rings. True when a frame was sent or dropped.
    fn send(&mut self) -> bool {
        let mut done = 0;
        while done < BURST {
            let length = match self.held.take() {
                Some(length) => length,
                None => match self.read() {
                    Some(length) => length,
                    None => break,
                },
            };
            let frame = &self.buffer[..length];
            if self.lane.send_checked(self.offload, frame, &[]) == Sent::Full {
                self.held = Some(length);
                break;
            }
            done += 1;
        }
        if done > 0 {
            self.lane.flush();
        }
        done > 0
    }

    /// Reads the interface's next frame.
    fn read(&mut self) -> Option<usize> {
        if self.gone {
            return None;
        }
        let mut header = [0; OFFLOAD_BYTES];
        let mut parts = [IoSliceMut::new(&mut header), IoSliceMut::new(&mut self.buffer)];
        match rustix::io::readv(&self.queue, &mut parts) {
            Ok(read) => {
                self.offload = Offload::read_from_bytes(&header).expect("as many bytes");
                read.checked_sub(OFFLOAD_BYTES)
            }
            Err(Errno::AGAIN | Errno::INTR) => None,
            Err(cause) => {
                tracing::warn!(%cause, "the interface was deleted; `rackbus net down` and `net up` make it anew");
                self.gone = true;
                None
            }
        }
    }

    /// From the lane's rings to the interface. True when there was a frame.
    fn receive(&mut self) -> bool {
        let mut done = 0;
        while done < BURST {
            let Some(frame) = self.lane.next() else { break };
            let outcome =
                write_with_head(self.queue.as_fd(), frame.offload.as_bytes(), frame.bytes);
            if let Err(cause) = outcome {
                let cause = if cause == Errno::INVAL { Cause::Offload } else { Cause::Down };
                self.lane.handle().counters().drops.count(cause);
            }
            self.lane.consume();
            done += 1;
        }
        done > 0
    }

    /// Sleeps until there is something to do; false when there is already.
    fn sleep(&mut self) -> bool {
        let parks = self.lane.park();
        if parks {
            let timeout = self.held.map(|_| HELD_NS);
            let both = [self.lane.wake_fd(), self.queue.as_fd()];
            // What came from the interface waits while a frame before it does.
            let deaf = self.held.is_some() || self.gone;
            Event::wait_any(if deaf { &both[..1] } else { &both }, timeout);
        }
        self.lane.unpark();
        parks
    }
}
