//! Captures: copies of a port's frames, through rings of their own, into a file.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rackbus_control::network::{CaptureDone, CaptureRequest};
use rackbus_memory::frames::{FrameEvents, FramesLayout};
use rackbus_memory::{Event, FrameReceiver, FrameSender, PeerEvent, SharedMemory};
use rackbus_net::capture::Captured;
use rackbus_net::port_queue::{LAYOUT, PortQueueHandle};
use rackbus_net::{News, capture};

use super::{NetworkError, NetworkService, Shared};

/// A ring that holds the frames of a busy port for a while.
const RING: FramesLayout = FramesLayout { ring_bytes: 16 << 20, longest: LAYOUT.longest };

/// How long it sleeps between two looks at whether it is to end.
const LOOK: Duration = Duration::from_millis(100);

/// Copies that are written before it looks at whether it is to end.
const PORTION: usize = 256;

/// The queues of a port that send copies; they stop when this is dropped.
pub(super) struct Copies<'s> {
    shared: &'s Shared,
    station: usize,
    queues: Vec<PortQueueHandle>,
    rings: Vec<FrameReceiver>,
    /// The ring that is looked at first.
    turn: usize,
    /// By which the port knows that it is captured. Another one that takes its place does not have it.
    mark: Arc<()>,
}

impl Drop for Copies<'_> {
    fn drop(&mut self) {
        self.queues.iter().for_each(|port_queue| port_queue.tell(News::Capture(None)));
    }
}

impl NetworkService {
    /// Writes the frames of a port into a file until `stop` says so.
    pub(super) fn capture_into(
        &self,
        request: &CaptureRequest,
        stop: &dyn Fn() -> bool,
    ) -> Result<CaptureDone, NetworkError> {
        let failed = |cause: std::io::Error| {
            NetworkError::File(format!("{}: {cause}", request.file.display()))
        };
        let mut copies = self.copies(&request.port)?;
        let file = File::create(&request.file).map_err(failed)?;
        let mut file = BufWriter::new(file);
        file.write_all(&capture::begin(&request.port)).map_err(failed)?;
        let begun = Instant::now();
        let limit = request.ms.map(Duration::from_millis);
        let before: u64 = copies.missed();
        let mut done = CaptureDone::default();
        let mut frame = Vec::new();
        let most = request.frames.unwrap_or(u64::MAX);
        // What was copied after this is not wanted any more.
        let mut end_ns = None;
        loop {
            // First: what was copied before it went is written.
            let is_gone = !copies.are_of_port();
            let mut portion = 0;
            while portion < PORTION
                && done.frames < most
                && let Some(captured) = copies.next(&mut frame, end_ns)
            {
                let packet =
                    capture::packet(self.0.wall_ns(captured.time_ns), captured.sent, &frame);
                file.write_all(&packet).map_err(failed)?;
                done.frames += 1;
                portion += 1;
            }
            // Whoever reads it meanwhile sees whole frames.
            file.flush().map_err(failed)?;
            if done.frames >= most || end_ns.is_some() && portion < PORTION {
                break;
            }
            if is_gone && portion < PORTION {
                return Err(NetworkError::PortGone(request.port.clone()));
            }
            // On a busy port there is always more.
            if stop() || limit.is_some_and(|limit| begun.elapsed() >= limit) {
                end_ns.get_or_insert_with(|| (self.0.clock)());
            } else if portion < PORTION {
                copies.sleep(
                    limit.map_or(LOOK, |limit| limit.saturating_sub(begun.elapsed()).min(LOOK)),
                );
            }
        }
        done.missed = copies.missed() - before;
        Ok(done)
    }

    pub(super) fn copies(&self, name: &str) -> Result<Copies<'_>, NetworkError> {
        let shared = &*self.0;
        let no_port = || NetworkError::NoPort(name.to_owned());
        let (station, _) = shared.stations.named(name).ok_or_else(no_port)?;
        let mut state = shared.lock();
        let port = state.ports.get_mut(&station).ok_or_else(no_port)?;
        if port.captured.strong_count() > 0 {
            return Err(NetworkError::Captured(name.to_owned()));
        }
        // All of them before a queue is told: none copies into a ring that nobody reads.
        let rings = port.queues.iter().map(|_| ring()).collect::<std::io::Result<Vec<_>>>();
        let (senders, rings): (Vec<_>, Vec<_>) =
            rings.map_err(NetworkError::of_interface)?.into_iter().unzip();
        for (port_queue, sender) in port.queues.iter().zip(senders) {
            port_queue.tell(News::Capture(Some(sender)));
        }
        let mark = Arc::new(());
        port.captured = Arc::downgrade(&mark);
        let queues = port.queues.clone();
        drop(state);
        Ok(Copies { shared, station, queues, rings, turn: 0, mark })
    }
}

impl Copies<'_> {
    /// The next copy, its bytes in `frame`, of all queues in turn. With `end_ns` none that was made after it.
    fn next(&mut self, frame: &mut Vec<u8>, end_ns: Option<u64>) -> Option<Captured> {
        let count = self.rings.len();
        for nth in 0..count {
            let at = (self.turn + nth) % count;
            let ring = &mut self.rings[at];
            let Ok(Some(found)) = ring.peek() else { continue };
            let captured = Captured::from_header(found.header);
            if end_ns.is_some_and(|end_ns| captured.time_ns > end_ns) {
                continue;
            }
            frame.resize(found.bytes.len(), 0);
            found.bytes.copy_to(frame);
            ring.consume();
            self.turn = at + 1;
            return Some(captured);
        }
        None
    }

    /// Whether the port is there still whose queues send the copies: one that is made anew has others.
    fn are_of_port(&self) -> bool {
        let state = self.shared.lock();
        let port = state.ports.get(&self.station);
        port.is_some_and(|port| std::ptr::eq(port.captured.as_ptr(), Arc::as_ptr(&self.mark)))
    }

    fn missed(&self) -> u64 {
        self.queues.iter().map(|port_queue| port_queue.counters().not_captured.get()).sum()
    }

    fn sleep(&mut self, limit: Duration) {
        if self.rings.iter_mut().all(FrameReceiver::park) {
            let events: Vec<_> = self.rings.iter().map(AsFd::as_fd).collect();
            Event::wait_any(&events, Some(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX)));
        }
        self.rings.iter_mut().for_each(FrameReceiver::unpark);
    }
}

impl Shared {
    /// When it was on the wall's clock, in nanoseconds since 1970, that this node's clock had `at_ns`.
    fn wall_ns(&self, at_ns: u64) -> u64 {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let wall = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        wall.saturating_sub((self.clock)().saturating_sub(at_ns))
    }
}

/// A ring within this process.
fn ring() -> std::io::Result<(FrameSender, FrameReceiver)> {
    let other = |text: &str| std::io::Error::other(text.to_owned());
    let bytes = RING.bytes().ok_or_else(|| other("no such ring"))? as u64;
    let memory = SharedMemory::create("rackbus-capture", bytes).map_err(std::io::Error::other)?;
    let [frames, room] = [Event::new()?, Event::new()?].map(PeerEvent::from);
    let both = || {
        let (frames, room) = (frames.try_clone()?, room.try_clone()?);
        Ok::<_, std::io::Error>(FrameEvents { frames, room })
    };
    let region = memory.region();
    let sender = FrameSender::new(region.clone(), both()?, RING);
    let receiver = FrameReceiver::new(region.clone(), both()?, RING);
    sender.zip(receiver).ok_or_else(|| other("the memory is no ring"))
}
