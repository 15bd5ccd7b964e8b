//! A queue of a port: its sender and receiver, for one thread. A function's port has one, an interface's one for each
//! queue of the interface.
//!
//! A queue sends into a ring for each station that it has something for (`outgoing`), and receives from a ring
//! for each queue that sends to it (`incoming`). It opens none by itself: it asks its node ([`RingOpener`]), goes
//! on, and finds what came of it in its inbox ([`PortQueueHandle`]). Nothing here waits. Who asks all stations where one is whose
//! address is known hears the answer from the queue itself (`answers`).

mod answers;
mod incoming;
mod leading_out;
mod outgoing;
mod sending;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rackbus_memory::frames::FRAME_HEADER;
use rackbus_memory::{DmaSlice, Event, FrameReceiver, FrameSender, FramesLayout};
use rackbus_qos::bucket::Bucket;
use rustix::event::epoll;
use zerocopy::FromBytes;

use crate::address::MacAddress;
use crate::beginning::Beginning;
use crate::capture::Captured;
use crate::counters::LaneCounters;
use crate::offload::Offload;
use crate::port::{Cause, Frame, MAX_FRAME, NetworkPort, SendOutcome};
use crate::switch::StationSwitch;

use answers::Answers;
use incoming::IncomingRings;
use outgoing::{OpeningPatience, Outgoing};

/// How the ring of a queue lies in memory: room for 15 of the largest frames.
pub const LAYOUT: FramesLayout = FramesLayout { ring_bytes: 1 << 20, longest: MAX_FRAME };

/// A queue of a station.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortQueueId {
    /// Number of the station.
    pub station: usize,
    /// Which of its queues, from 0.
    pub number: u16,
}

/// Whoever opens rings for queues.
pub trait RingOpener: Send + Sync + std::fmt::Debug {
    /// `from` wants to send to a station. The answer comes into its inbox, as [`News::Opened`] or
    /// [`News::Failed`]. Never waits.
    fn open(&self, from: PortQueueId, station: usize);
}

/// What a queue is told.
#[derive(Debug)]
pub enum News {
    /// A ring to a station, as it was asked for.
    Opened(usize, FrameSender),
    /// There is none available now.
    Failed(usize),
    /// The ring to a station is of no more use.
    Lost(usize),
    /// The receiver of a ring to a station is gone, with what is left in the ring.
    Gone(usize),
    /// What is left in a ring to a station, which is [lost](News::Lost), goes nowhere, and neither do so many of its
    /// frames that were on their way.
    Undelivered(usize, FrameReceiver, u64),
    /// A ring from a queue, and its number. What is left in an older one from there comes before it.
    Incoming(PortQueueId, u64, FrameReceiver),
    /// The ring of that number has no sender any more: what is in it is taken out, and nothing else will come.
    Ended(u64),
    /// Copies of all frames go into this ring from now on, or nowhere.
    Capture(Option<FrameSender>),
    /// The network works, or does not.
    Up(bool),
}

/// How a queue is told something; cheap to clone.
#[derive(Debug, Clone)]
pub struct PortQueueHandle(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    news: Mutex<Vec<News>>,
    has_news: AtomicBool,
    event: Event,
    counters: LaneCounters,
}

impl PortQueueHandle {
    /// Puts news into the queue's inbox and wakes its thread.
    pub fn tell(&self, news: News) {
        let mut all = self.lock();
        all.push(news);
        self.0.has_news.store(true, Ordering::Release);
        drop(all);
        self.0.event.ring();
    }

    /// What the queue counts.
    pub fn counters(&self) -> &LaneCounters {
        &self.0.counters
    }

    fn lock(&self) -> MutexGuard<'_, Vec<News>> {
        // Each change of it is whole before anything can fail.
        self.0.news.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A clock in nanoseconds.
pub type NanosecondClock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// The sender and receiver of a port.
pub struct PortQueue {
    id: PortQueueId,
    switch: Arc<StationSwitch>,
    opener: Arc<dyn RingOpener>,
    clock: NanosecondClock,
    handle: PortQueueHandle,
    outgoing: Vec<Outgoing>,
    incoming: IncomingRings,
    answers: Answers,
    /// Stations that something was sent to since the last flush.
    touched: Vec<usize>,
    /// Frames that were sent, to whomever.
    sent: u64,
    /// It waits for a receiver without room. An uplink does not: what comes from outside is for many, and who sends it
    /// is told by nothing but a loss.
    waits: bool,
    patience: OpeningPatience,
    /// Stations that had no room for a frame of a length.
    blocked: Vec<(usize, usize)>,
    capture: Option<FrameSender>,
    /// What may go to more than one station.
    flood: Bucket,
    wake: OwnedFd,
    up: bool,
}

impl std::fmt::Debug for PortQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PortQueue")
            .field("id", &self.id)
            .field("up", &self.up)
            .finish_non_exhaustive()
    }
}

/// What goes to many stations at once, of what may go in a second: one in so many.
const FLOOD_BURST_PARTS: u64 = 10;

/// What the events of a queue's descriptor are for.
const INBOX: u64 = 0;
const ROOM: u64 = 1 << 62;
const FRAMES: u64 = 2 << 62;

impl PortQueue {
    /// A queue of a station of `switch`, without rings yet.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new(
        id: PortQueueId,
        switch: Arc<StationSwitch>,
        opener: Arc<dyn RingOpener>,
        clock: NanosecondClock,
    ) -> std::io::Result<PortQueue> {
        let stations = switch.stations();
        let waits = !switch.uplinks().contains(&id.station);
        let wake = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let event = Event::new()?;
        epoll::add(&wake, &event, epoll::EventData::new_u64(INBOX), epoll::EventFlags::IN)?;
        let rate = switch.flood_limit();
        let flood = Bucket::full(rate, rate / FLOOD_BURST_PARTS, clock());
        let shared = Shared {
            news: Mutex::default(),
            has_news: AtomicBool::new(false),
            event,
            counters: LaneCounters::new(stations),
        };
        Ok(PortQueue {
            id,
            switch,
            opener,
            clock,
            handle: PortQueueHandle(Arc::new(shared)),
            outgoing: (0..stations).map(|_| Outgoing::default()).collect(),
            incoming: IncomingRings::default(),
            answers: Answers::default(),
            touched: Vec::new(),
            sent: 0,
            waits,
            patience: OpeningPatience::new(waits),
            blocked: Vec::new(),
            capture: None,
            flood,
            wake,
            up: true,
        })
    }

    /// How others tell it something.
    pub fn handle(&self) -> &PortQueueHandle {
        &self.handle
    }

    /// What it decides by.
    pub fn switch(&self) -> &StationSwitch {
        &self.switch
    }

    /// Which station's it is.
    pub fn station(&self) -> usize {
        self.id.station
    }

    /// The time on its clock.
    pub fn now_ns(&self) -> u64 {
        (self.clock)()
    }

    /// Does what it was told.
    #[inline]
    fn hear(&mut self) {
        if self.handle.0.has_news.load(Ordering::Relaxed) {
            self.hear_news();
        }
    }

    #[cold]
    fn hear_news(&mut self) {
        let news = {
            let mut all = self.handle.lock();
            self.handle.0.has_news.store(false, Ordering::Release);
            std::mem::take(&mut *all)
        };
        for news in news {
            match news {
                News::Opened(to, sender) => self.opened(to, sender),
                News::Failed(to) if matches!(self.outgoing[to], Outgoing::Opening { .. }) => {
                    self.outgoing[to] = Outgoing::failed((self.clock)());
                }
                News::Failed(_) => {}
                // One that is just being opened is another one than the one that was lost.
                News::Lost(to) if matches!(self.outgoing[to], Outgoing::Open { .. }) => {
                    self.lose(to)
                }
                News::Lost(_) => {}
                News::Gone(to) => self.gone(to),
                News::Undelivered(to, mut left, mut frames) => {
                    while let Ok(Some(_)) = left.peek() {
                        left.consume();
                        frames += 1;
                    }
                    self.handle.counters().peers[to].drops.add(Cause::Down, frames);
                }
                News::Incoming(from, number, receiver) => {
                    let data = epoll::EventData::new_u64(FRAMES | number);
                    if let Err(error) =
                        epoll::add(&self.wake, &receiver, data, epoll::EventFlags::IN)
                    {
                        // Its sender finds it full, and counts what it drops.
                        tracing::error!(%error, "a ring's doorbell cannot be waited for; the ring is not used");
                        continue;
                    }
                    self.incoming.add(from, number, receiver);
                }
                News::Ended(number) => self.incoming.end(number),
                News::Capture(ring) => self.capture = ring,
                News::Up(up) => self.up = up,
            }
        }
    }

    fn opened(&mut self, to: usize, sender: FrameSender) {
        let data = epoll::EventData::new_u64(ROOM | to as u64);
        if let Err(error) = epoll::add(&self.wake, &sender, data, epoll::EventFlags::IN) {
            tracing::error!(%error, "a ring's doorbell cannot be waited for; the ring is not used");
            self.outgoing[to] = Outgoing::failed((self.clock)());
            return;
        }
        self.outgoing[to] = Outgoing::open(sender);
        let counters = &self.handle.counters().peers[to];
        counters.opened.add(1);
        counters.is_open.set(1);
    }

    /// Takes the events that rang back to rest.
    fn disarm(&mut self) {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 64];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        // What is left over rings again at the next sleep.
        let count = epoll::wait(&self.wake, &mut events, Some(&now)).unwrap_or(0);
        for event in &events[..count] {
            // A copy: the structure is packed.
            let data = event.data;
            match data.u64() {
                INBOX => drop(self.handle.0.event.drain()),
                room if room & FRAMES == 0 => {
                    if let Some(Outgoing::Open { sender, .. }) =
                        self.outgoing.get_mut((room & !ROOM) as usize)
                    {
                        sender.unpark();
                    }
                }
                frames => self.incoming.unpark(frames & !FRAMES),
            }
        }
    }
}

impl NetworkPort for PortQueue {
    fn mac(&self) -> MacAddress {
        self.switch.mac(self.id.station)
    }

    fn mtu(&self) -> u16 {
        u16::try_from(self.switch.mtu()).unwrap_or(u16::MAX)
    }

    fn is_up(&self) -> bool {
        self.up
    }

    fn send(&mut self, offload: Offload, parts: &[DmaSlice<'_>]) -> SendOutcome {
        // A guest may change what it sends: what is decided by is what is sent.
        let head = Beginning::of(parts);
        self.send_checked(offload, head.bytes(), parts)
    }

    fn flush(&mut self) {
        for to in std::mem::take(&mut self.touched) {
            if let Outgoing::Open { sender, touched, .. } = &mut self.outgoing[to] {
                sender.flush();
                *touched = false;
                self.handle.counters().peers[to].waiting_bytes.set(sender.used() as u64);
            }
        }
    }

    fn next(&mut self) -> Option<Frame<'_>> {
        self.hear();
        if !self.incoming.has_current()
            && let Some(is_new) = self.answers.begin()
        {
            let frame = self.answers.frame()?;
            if let Some(capture) = self.capture.as_mut().filter(|_| is_new) {
                capture_received(capture, &frame, (self.clock)(), self.handle.counters());
            }
            return Some(frame);
        }
        let (own, clock) = (self.id.station, &*self.clock);
        let counters = self.handle.counters();
        let at = self.incoming.find(own, &self.switch, clock, counters, &self.wake)?;
        if let Some(capture) = self.capture.as_mut().filter(|_| self.incoming.is_new()) {
            capture_received(capture, &self.incoming.frame(at)?, (self.clock)(), counters);
        }
        self.incoming.frame(at)
    }

    fn consume(&mut self) {
        if !self.answers.consume() {
            self.incoming.consume(self.handle.counters());
        }
    }

    fn park(&mut self) -> bool {
        self.hear();
        for (to, length) in std::mem::take(&mut self.blocked) {
            let Outgoing::Open { sender, .. } = &mut self.outgoing[to] else { continue };
            if !sender.park(length) {
                return false;
            }
        }
        self.incoming.park()
            && self.answers.is_empty()
            && !self.handle.0.has_news.load(Ordering::SeqCst)
    }

    fn unpark(&mut self) {
        self.disarm();
        self.hear();
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// Puts a copy of a frame that came at `now_ns` into the ring of a capture.
fn capture_received(
    capture: &mut FrameSender,
    frame: &Frame<'_>,
    now_ns: u64,
    counters: &LaneCounters,
) {
    let header = Captured { sent: false, time_ns: now_ns }.to_header();
    if capture.send(&header, &[], &[frame.bytes]).is_err() {
        counters.not_captured.add(1);
    }
    capture.flush();
}

/// What is left to do to a frame, as it lies in a ring.
fn offload_of(header: &[u8; FRAME_HEADER]) -> Offload {
    Offload::read_from_bytes(header).expect("a header is as long")
}

#[cfg(test)]
mod tests;
