//! The thread between an interface and a queue: takes frames from the one to the rings of their receivers, and
//! from the queue's rings to the other. It polls while there is work, spins for a while after it, and sleeps
//! (`rackbus_pci::pace`).
//!
//! Who waits for a frame is a program that has to run on some processor, and where all are busy that is this
//! thread's own. So it yields as soon as nothing is left after frames were given to the interface, and where the pace
//! would have it sleep after a few microseconds because others want the processor, it goes on looking and yielding for
//! about as long as a sleep and a wake-up would take: so a stream between two busy processors needs neither.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rackbus_memory::{AdaptiveSpin, Event};
use rackbus_net::offload::OFFLOAD_BYTES;
use rackbus_net::port::MAX_FRAME;
use rackbus_net::port_queue::PortQueueHandle;
use rackbus_net::{Cause, Frame, NetworkPort, News, Offload, PortQueue, SendOutcome};
use rackbus_pci::Work;
use rackbus_pci::pace::{NextStep, Pace};
use rustix::io::Errno;
use zerocopy::FromBytes;

use super::wire::write_frame;

/// Frames that are taken from one side before the other is looked at.
const BURST: usize = 16;
/// Bytes after which frames are handed over: less than a large segment, which its receiver takes while the next one is
/// read.
const HANDED_OVER: usize = 32 << 10;
/// How long it looks for work before it sleeps, at least: about what a wake-up takes, so that this never costs more than
/// as much again.
const LINGER_NS: u64 = 50_000;
/// How long it sleeps at most while a frame waits for room.
const HELD_NS: u64 = 5_000_000;

/// An interface, or a queue of one.
pub trait FrameDevice: Send {
    /// The next frame that came to it, put into `buffer`; what is left to do to it, and its length.
    fn read(&mut self, buffer: &mut [u8]) -> Option<(Offload, usize)>;

    /// Gives a frame to the interface.
    fn write(&mut self, frame: &Frame<'_>) -> WriteOutcome;

    /// Whether a frame that was read may go to its receiver; otherwise it is dropped.
    fn forwards(&mut self) -> bool {
        true
    }

    /// Has the interface send what was given to it since the last call. Called after each burst.
    fn flush(&mut self) {}

    /// Readable when frames have come; none where no more will.
    fn frames(&self) -> Option<BorrowedFd<'_>>;

    /// Readable when there is something to [attend](FrameDevice::attend) to.
    fn others(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    /// How long it may sleep before it is to [attend](FrameDevice::attend) again.
    fn attend_within_ns(&self) -> Option<u64> {
        None
    }

    /// Called between bursts of frames. False ends the thread's work with it.
    fn attend(&mut self, _lane: &mut PortQueue) -> bool {
        true
    }
}

/// What became of a frame for an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The interface took the frame.
    Done,
    /// The frame was dropped for this cause.
    Dropped(Cause),
    /// It was dropped, and its sender is told by this frame.
    Answered(Cause, Vec<u8>),
}

/// A queue of a TAP device.
#[derive(Debug)]
pub struct TapQueue {
    queue: OwnedFd,
    /// Somebody deleted the interface: its descriptor reports an error for ever.
    gone: bool,
}

impl TapQueue {
    /// The queue that has this descriptor.
    pub fn new(queue: OwnedFd) -> TapQueue {
        TapQueue { queue, gone: false }
    }
}

impl FrameDevice for TapQueue {
    fn read(&mut self, buffer: &mut [u8]) -> Option<(Offload, usize)> {
        if self.gone {
            return None;
        }
        let mut header = [0; OFFLOAD_BYTES];
        let mut parts = [IoSliceMut::new(&mut header), IoSliceMut::new(buffer)];
        match rustix::io::readv(&self.queue, &mut parts) {
            Ok(read) => {
                let offload = Offload::read_from_bytes(&header).expect("as many bytes");
                Some((offload, read.checked_sub(OFFLOAD_BYTES)?))
            }
            Err(Errno::AGAIN | Errno::INTR) => None,
            Err(cause) => {
                tracing::warn!(%cause, "the interface was deleted; `rackbus net down` and `rackbus net up` make it again");
                self.gone = true;
                None
            }
        }
    }

    fn write(&mut self, frame: &Frame<'_>) -> WriteOutcome {
        write_frame(self.queue.as_fd(), frame)
            .map_or_else(WriteOutcome::Dropped, |()| WriteOutcome::Done)
    }

    fn frames(&self) -> Option<BorrowedFd<'_>> {
        (!self.gone).then(|| self.queue.as_fd())
    }
}

/// A running worker; it ends when this is dropped.
#[derive(Debug)]
pub struct Worker {
    handle: PortQueueHandle,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts one for a queue.
    ///
    /// # Errors
    /// When the system has no thread for it.
    pub fn start(name: &str, port_queue: PortQueue, queue: TapQueue) -> std::io::Result<Worker> {
        let (handle, stop) = (port_queue.handle().clone(), Arc::new(AtomicBool::new(false)));
        let stopped = stop.clone();
        let run = move || work(port_queue, &mut { queue }, &stopped);
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

/// Carries frames between a queue and a device until `stop` says so, or the device.
pub fn work(port_queue: PortQueue, device: &mut impl FrameDevice, stop: &AtomicBool) {
    let (buffer, offload) = (vec![0; MAX_FRAME], Offload::default());
    Running { port_queue, device, buffer, offload, held: None }.run(stop);
}

struct Running<'a, D> {
    port_queue: PortQueue,
    device: &'a mut D,
    /// A frame as it was read, and what is left to do to it.
    buffer: Vec<u8>,
    offload: Offload,
    /// Bytes of a frame that waits for room.
    held: Option<usize>,
}

impl<D: FrameDevice> Running<'_, D> {
    fn run(mut self, stop: &AtomicBool) {
        let begun = self.port_queue.now_ns();
        let handle = self.port_queue.handle().clone();
        let counters = &handle.counters().pace;
        counters.since_ns.set(begun);
        let mut pace = Pace::new(AdaptiveSpin::default(), begun);
        // Frames went to the interface since it yielded; since when there is nothing to do.
        let (mut delivered, mut idle_since) = (false, None);
        while !stop.load(Ordering::Acquire) && self.device.attend(&mut self.port_queue) {
            let sent = self.send();
            let received = self.receive();
            let work = if sent || received { Work::Done } else { Work::Idle };
            delivered |= received;
            match work {
                Work::Done => {
                    idle_since = None;
                    counters.busy_polls.add(1);
                }
                _ => {
                    idle_since.get_or_insert_with(|| self.port_queue.now_ns());
                    counters.idle_polls.add(1);
                    // Whom frames were for may have been woken on this very processor.
                    match std::mem::take(&mut delivered) {
                        true => std::thread::yield_now(),
                        false => std::hint::spin_loop(),
                    }
                }
            }
            let lingers = |now: u64| idle_since.is_some_and(|since| now < since + LINGER_NS);
            match pace.after(work, || self.port_queue.now_ns()) {
                NextStep::Poll | NextStep::Check | NextStep::Move | NextStep::LookForIdle => {}
                NextStep::Yield => {
                    std::thread::yield_now();
                    pace.returned(self.port_queue.now_ns());
                }
                NextStep::Sleep(_) if lingers(self.port_queue.now_ns()) => {
                    std::thread::yield_now();
                    pace.stayed_awake(self.port_queue.now_ns());
                }
                NextStep::Sleep(_) => {
                    let asleep = self.port_queue.now_ns();
                    // It may sleep for hours, in which others ask how it spends its time.
                    counters.asleep_since.set(asleep);
                    if self.sleep() {
                        counters.sleeps.add(1);
                    }
                    let now = self.port_queue.now_ns();
                    counters.asleep_ns.add(now.saturating_sub(asleep));
                    counters.asleep_since.set(0);
                    pace.disturbed(now);
                }
            }
        }
    }

    /// From the device to the receivers' rings. True when a frame was sent or dropped.
    fn send(&mut self) -> bool {
        let (mut done, mut bytes) = (0, 0);
        while done < BURST {
            let length = match self.held.take() {
                Some(length) => length,
                None => match self.device.read(&mut self.buffer) {
                    Some((offload, length)) => {
                        self.offload = offload;
                        length
                    }
                    None => break,
                },
            };
            if !self.device.forwards() {
                self.port_queue.handle().counters().drops.count(Cause::Down);
                done += 1;
                continue;
            }
            let frame = &self.buffer[..length];
            if self.port_queue.send_checked(self.offload, frame, &[]) == SendOutcome::Full {
                self.held = Some(length);
                break;
            }
            done += 1;
            bytes += length;
            if bytes >= HANDED_OVER {
                self.port_queue.flush();
                bytes = 0;
            }
        }
        if done > 0 {
            self.port_queue.flush();
        }
        done > 0
    }

    /// From the queue's rings to the device. True when there was a frame.
    fn receive(&mut self) -> bool {
        let mut done = 0;
        while done < BURST {
            let Some(frame) = self.port_queue.next() else { break };
            let written = self.device.write(&frame);
            self.port_queue.consume();
            match written {
                WriteOutcome::Done => {}
                WriteOutcome::Dropped(cause) => {
                    self.port_queue.handle().counters().drops.count(cause)
                }
                WriteOutcome::Answered(cause, answer) => {
                    self.port_queue.handle().counters().drops.count(cause);
                    // One that there is no room for now is of no use later.
                    let _ = self.port_queue.send_checked(Offload::default(), &answer, &[]);
                    self.port_queue.flush();
                }
            }
            done += 1;
        }
        if done > 0 {
            self.device.flush();
        }
        done > 0
    }

    /// Sleeps until there is something to do; false when there is already.
    fn sleep(&mut self) -> bool {
        let parks = self.port_queue.park();
        if parks {
            let timeout = self.held.map(|_| HELD_NS).or(self.device.attend_within_ns());
            let mut wakes = self.device.others();
            wakes.push(self.port_queue.wake_fd());
            // What came to the device waits while a frame before it does.
            wakes.extend(self.device.frames().filter(|_| self.held.is_none()));
            Event::wait_any(&wakes, timeout);
        }
        self.port_queue.unpark();
        parks
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use rackbus_memory::SharedMemory;

    use super::*;

    #[test]
    fn frames_for_an_interface_without_room_are_counted_as_such() {
        // What takes datagrams until it has no room stands for the queue of an interface.
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let memory = SharedMemory::create("frame", 4096).unwrap();
        let frame = Frame { offload: Offload::default(), bytes: memory.whole() };
        let mut queue = TapQueue::new(ours.into());
        let refused =
            (0..100_000).map(|_| queue.write(&frame)).find(|it| *it != WriteOutcome::Done);
        assert_eq!(refused, Some(WriteOutcome::Dropped(Cause::Full)));
        drop(theirs);
        assert_eq!(queue.write(&frame), WriteOutcome::Dropped(Cause::Down));
    }
}
