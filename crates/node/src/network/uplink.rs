//! The way outside: an interface of the node's machine, as one more station of the rack's network.
//!
//! It is a station while its interface is up, and nobody finds it when it is not: then the next uplink of the rack
//! file is used. One of them at a time takes what comes from outside, and sends what is for all: the first that
//! works (`rackbus_net::uplink`). Who begins to be that tells the network outside where the rack's stations are.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rackbus_fabric::rack::UplinkMode;
use rackbus_memory::Event;
use rackbus_net::announce::announcement;
use rackbus_net::ethernet::EthernetHeader;
use rackbus_net::mtu::{Fit, LOOK, fit};
use rackbus_net::port_queue::NanosecondClock;
use rackbus_net::uplink::{UplinkSeat, UplinkSteadiness};
use rackbus_net::{
    Cause, Frame, MacAddress, Offload, PortQueue, Station, StationKind, StationSwitch,
};
use rackbus_netdev::packet::LinkMonitor;
use rackbus_qos::bucket::Bucket;

use super::wire::UplinkWire;
use super::worker::{FrameDevice, WriteOutcome, work};
use super::{LocalPort, Shared};

/// Senders of packets that are too large are told so often in a second, at most.
const ANSWERS: u64 = 100;
/// Frames that are for nobody here and are taken from the interface at once, at most.
const UNWANTED: usize = 64;
/// After this long an interface that could not be used is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// After this long what an interface has not sent yet is sent again.
const UNSENT_NS: u64 = 1_000_000;
/// How often a busy uplink looks whether its interface has changed, and what that had no room for.
const LOOK_NS: u64 = 10_000_000;

/// What an uplink does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UplinkState {
    /// Its interface is not up.
    Down = 0,
    /// Another one of the rack is used.
    Standby = 1,
    /// Frames for outside go out here.
    Active = 2,
    /// Its host stood still too often; another one is used for a while.
    Resting = 3,
}

impl UplinkState {
    fn of(stored: &AtomicU8) -> UplinkState {
        match stored.load(Ordering::Relaxed) {
            1 => UplinkState::Standby,
            2 => UplinkState::Active,
            3 => UplinkState::Resting,
            _ => UplinkState::Down,
        }
    }

    /// The state in one word, as commands print it.
    pub fn word(self) -> &'static str {
        match self {
            UplinkState::Down => "down",
            UplinkState::Standby => "standby",
            UplinkState::Active => "active",
            UplinkState::Resting => "resting",
        }
    }
}

/// A running uplink; it ends when this is dropped.
#[derive(Debug)]
pub struct RunningUplink {
    station: usize,
    state: Arc<AtomicU8>,
    way: Arc<Mutex<Option<&'static str>>>,
    stop: Arc<AtomicBool>,
    event: Arc<Event>,
    thread: Option<JoinHandle<()>>,
}

impl RunningUplink {
    /// Starts the uplink `station` of the host over its interface.
    ///
    /// # Errors
    /// When the interface cannot be used, or there are no descriptors or threads left.
    pub(super) fn start(shared: &Arc<Shared>, station: usize) -> std::io::Result<RunningUplink> {
        let outside = Outside::of(shared, station)?;
        // What is wrong for good is told now.
        let wire = outside.open()?;
        outside.spawn(Some(wire))
    }

    /// The same of one that was used before: where its interface cannot be used now, it is tried again and again.
    ///
    /// # Errors
    /// When there are no descriptors or threads left.
    pub(super) fn resume(shared: &Arc<Shared>, station: usize) -> std::io::Result<RunningUplink> {
        Outside::of(shared, station)?.spawn(None)
    }

    /// How its frames come, since its interface was up last.
    pub fn way(&self) -> Option<&'static str> {
        *self.way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its station, and what it does now.
    pub fn state(&self) -> (usize, UplinkState) {
        (self.station, UplinkState::of(&self.state))
    }
}

impl Drop for RunningUplink {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.event.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What the thread of an uplink has all along.
struct Outside {
    shared: std::sync::Weak<Shared>,
    station: usize,
    interface: String,
    mode: UplinkMode,
    /// The rack has VLANs outside.
    needs_tags: bool,
    monitor: Arc<LinkMonitor>,
    stop: Arc<AtomicBool>,
    event: Arc<Event>,
    state: Arc<AtomicU8>,
    way: Arc<Mutex<Option<&'static str>>>,
}

impl Outside {
    fn of(shared: &Arc<Shared>, station: usize) -> std::io::Result<Outside> {
        let name = &shared.stations.all()[station].name;
        Ok(Outside {
            shared: Arc::downgrade(shared),
            station,
            interface: name.rsplit('/').next().unwrap_or(name).to_owned(),
            mode: shared.stations.network().uplink_mode,
            needs_tags: shared.stations.network().uplink_vlans.is_some(),
            monitor: Arc::new(LinkMonitor::open()?),
            stop: Arc::new(AtomicBool::new(false)),
            event: Arc::new(Event::new()?),
            state: Arc::new(AtomicU8::new(UplinkState::Down as u8)),
            way: Arc::new(Mutex::new(None)),
        })
    }

    fn open(&self) -> std::io::Result<UplinkWire> {
        let wire = UplinkWire::open(&self.interface, self.mode).map_err(std::io::Error::other)?;
        if self.needs_tags && wire.loses_tags() {
            let text = "AF_XDP does not see the VLAN tags of a virtual interface's frames: write uplink_mode = \"packet\"";
            return Err(std::io::Error::other(text));
        }
        Ok(wire)
    }

    fn spawn(self, wire: Option<UplinkWire>) -> std::io::Result<RunningUplink> {
        let (station, state, way) = (self.station, self.state.clone(), self.way.clone());
        let (stop, event) = (self.stop.clone(), self.event.clone());
        let thread =
            std::thread::Builder::new().name("uplink".into()).spawn(move || self.run(wire))?;
        Ok(RunningUplink { station, state, way, stop, event, thread: Some(thread) })
    }

    /// Serves the interface while it is up. One that is down is kept: to open it anew may take its carrier away for a
    /// while, where drivers start again for that.
    fn run(self, mut kept: Option<UplinkWire>) {
        let mut steadiness = UplinkSteadiness::default();
        let mut complaint = None;
        while !self.stop.load(Ordering::Acquire) {
            // First, so that no change after the look is missed.
            self.monitor.has_changed();
            let wire = match kept.take().filter(|wire| wire.mtu().is_ok()) {
                Some(wire) => Ok(wire),
                None => self.open(),
            };
            let mut again = None;
            let outcome = match wire {
                Ok(wire) if wire.is_up() => {
                    // What has changed meanwhile was heard while it was served.
                    again = Some(AGAIN);
                    self.serve(wire, &mut steadiness)
                }
                Ok(wire) => {
                    kept = Some(wire);
                    Ok(None)
                }
                Err(error) => Err(error),
            };
            match outcome {
                Ok(Some(rest_ns)) => {
                    self.rest(rest_ns);
                    continue;
                }
                Ok(None) => complaint = None,
                Err(error) => {
                    let text = error.to_string();
                    // Each cause once, however often it is tried.
                    if complaint.as_ref() != Some(&text) {
                        tracing::warn!(interface = self.interface, %error, "an uplink cannot be used");
                    }
                    complaint = Some(text);
                    // It may work later though nothing changes at the interface.
                    again = Some(AGAIN);
                }
            }
            if !self.stop.load(Ordering::Acquire) {
                self.monitor.wait(self.event.as_fd(), again);
            }
        }
    }

    /// Is no station for a while.
    fn rest(&self, rest_ns: u64) {
        self.state.store(UplinkState::Resting as u8, Ordering::Relaxed);
        let seconds = rest_ns / 1_000_000_000;
        tracing::warn!(
            interface = self.interface,
            seconds,
            "the host stood still too often; another uplink is used for a while"
        );
        // The event is rung when this ends.
        Event::wait_any(&[self.event.as_fd()], Some(rest_ns));
        self.state.store(UplinkState::Down as u8, Ordering::Relaxed);
    }

    /// Is a station while the interface is up. Says how long to rest when it ends for its host, which stands still too often.
    ///
    /// # Errors
    /// When there is no descriptor for its queue.
    fn serve(
        &self,
        wire: UplinkWire,
        steadiness: &mut UplinkSteadiness,
    ) -> std::io::Result<Option<u64>> {
        let Some(shared) = self.shared.upgrade() else { return Ok(None) };
        let port_queue = shared.port_queue(self.station, 0)?;
        let port = LocalPort::new(vec![port_queue.handle().clone()], None);
        shared.lock().ports.insert(self.station, port);
        let stations = shared.stations.all();
        let is_uplink = |it: &&Station| it.kind == StationKind::Uplink;
        let own = stations.iter().filter(|it| !is_uplink(it)).map(|it| it.mac);
        let uplinks = stations.iter().filter(is_uplink).map(|it| it.mac);
        steadiness.begin_seat();
        let mut device = Interface {
            mtu: wire.mtu().unwrap_or(1500),
            own: own.collect(),
            uplinks: uplinks.collect(),
            steadiness,
            rest_ns: None,
            switch: shared.switch.clone(),
            station: self.station,
            monitor: self.monitor.clone(),
            stop: self.event.clone(),
            seat: UplinkSeat::new(&shared.switch, self.station, port_queue.now_ns()),
            clock: shared.clock.clone(),
            answers: Bucket::full(ANSWERS, ANSWERS, port_queue.now_ns()),
            now_ns: port_queue.now_ns(),
            look_at_ns: 0,
            state: self.state.clone(),
            largest: port_queue.switch().mtu() as u16,
            wire,
        };
        *self.way.lock().unwrap_or_else(PoisonError::into_inner) = Some(device.wire.way());
        self.state.store(UplinkState::Standby as u8, Ordering::Relaxed);
        work(port_queue, &mut device, &self.stop);
        let rest_ns = device.rest_ns;
        self.state.store(UplinkState::Down as u8, Ordering::Relaxed);
        tracing::info!(interface = self.interface, "uplink down");
        shared.close_port(self.station);
        Ok(rest_ns)
    }
}

/// The interface of an uplink while it is up.
struct Interface<'a> {
    wire: UplinkWire,
    /// Bytes of the longest IP packet outside, and in the rack.
    mtu: u16,
    largest: u16,
    /// Addresses of the rack's stations that send and take frames, and of its uplinks, which none outside has.
    own: HashSet<MacAddress>,
    uplinks: HashSet<MacAddress>,
    switch: Arc<StationSwitch>,
    station: usize,
    monitor: Arc<LinkMonitor>,
    stop: Arc<Event>,
    seat: UplinkSeat,
    steadiness: &'a mut UplinkSteadiness,
    /// How long to rest, when it ends for that.
    rest_ns: Option<u64>,
    clock: NanosecondClock,
    answers: Bucket,
    now_ns: u64,
    /// When to look next whether the interface has changed.
    look_at_ns: u64,
    state: Arc<AtomicU8>,
}

impl Interface<'_> {
    /// Whether it is for the rack what came from outside, or what to do otherwise.
    fn is_wanted(&self, header: &EthernetHeader) -> bool {
        // Uplinks have theirs for what they say to each other.
        if [header.from, header.to].iter().any(|it| self.uplinks.contains(it)) {
            return false;
        }
        // Where addresses are learned, the switch knows which are in the rack.
        let for_rack =
            header.to.is_group() || self.switch.learns() || self.own.contains(&header.to);
        // What the rack sent comes back where its uplinks lead to the same network.
        for_rack && !self.own.contains(&header.from)
    }

    fn announce(&mut self) {
        for (address, rewrite) in self.switch.seen_outside(self.station, self.now_ns) {
            let frame = announcement(address);
            if let Some((begin, length, rest)) = rewrite.apply(&frame) {
                self.wire.put(&[&begin[..length], rest].concat());
            }
        }
    }

    /// Whether another uplink may be active, since its host stood still.
    fn is_fenced(&mut self) -> bool {
        let clock = &self.clock;
        self.seat.is_fenced(|| clock())
    }

    /// An answer, if not too many were given lately.
    fn answer(&mut self, frame: Vec<u8>) -> Option<Vec<u8>> {
        let ready = self.answers.ready(self.now_ns);
        if ready {
            self.answers.spend(1);
        }
        ready.then_some(frame)
    }
}

impl FrameDevice for Interface<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> Option<(Offload, usize)> {
        for _ in 0..UNWANTED {
            let (offload, length) = self.wire.read(buffer)?;
            let start = &buffer[..length.min(LOOK)];
            let wanted = EthernetHeader::read(start).is_some_and(|header| self.is_wanted(&header));
            if !wanted || self.is_fenced() || !self.seat.is_active() {
                continue;
            }
            // What is too long for the rack continues, to be counted as that. Where addresses are learned, it may be for
            // another host outside, which would then be sent shorter packets.
            if let Fit::Answer(answer) = fit(start, length, &offload, self.largest)
                && self.switch.is_known_inside(self.station, start, self.now_ns)
                && let Some(answer) = self.answer(answer)
            {
                self.wire.put(&answer);
            }
            return Some((offload, length));
        }
        // More of them are read after a look at everything else.
        None
    }

    fn write(&mut self, frame: &Frame<'_>) -> WriteOutcome {
        let mut start = [0; LOOK];
        let length = frame.bytes.copy_to(&mut start);
        let start = &start[..length];
        if self.seat.hear(&self.switch, start) {
            return WriteOutcome::Done;
        }
        if self.is_fenced() {
            return WriteOutcome::Dropped(Cause::Down);
        }
        let is_group = start.first().is_some_and(|first| first & 1 != 0);
        if !self.seat.is_active() && is_group {
            return WriteOutcome::Done;
        }
        match fit(start, frame.bytes.len(), &frame.offload, self.mtu) {
            Fit::Fits => {}
            Fit::Cut => {
                return match self.wire.write_fragments(frame, self.mtu) {
                    Ok(()) => WriteOutcome::Done,
                    Err(cause) => WriteOutcome::Dropped(cause),
                };
            }
            Fit::Drop => return WriteOutcome::Dropped(Cause::Length),
            Fit::Answer(answer) => {
                return match self.answer(answer) {
                    Some(answer) => WriteOutcome::Answered(Cause::Length, answer),
                    None => WriteOutcome::Dropped(Cause::Length),
                };
            }
        }
        match self.wire.write(frame) {
            Ok(()) => WriteOutcome::Done,
            Err(cause) => WriteOutcome::Dropped(cause),
        }
    }

    fn forwards(&mut self) -> bool {
        !self.is_fenced()
    }

    fn flush(&mut self) {
        self.wire.flush();
    }

    fn frames(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wire.as_fd())
    }

    fn others(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.monitor.as_fd(), self.stop.as_fd()]
    }

    fn attend_within_ns(&self) -> Option<u64> {
        let unsent = self.wire.has_unsent().then_some(UNSENT_NS);
        self.seat.look_within_ns().into_iter().chain(unsent).min()
    }

    fn attend(&mut self, port_queue: &mut PortQueue) -> bool {
        self.now_ns = port_queue.now_ns();
        let was_active = UplinkState::of(&self.state) == UplinkState::Active;
        self.seat.look(port_queue);
        let active = self.seat.is_active();
        if active && !was_active {
            self.announce();
        }
        if active != was_active {
            let state = if active { UplinkState::Active } else { UplinkState::Standby };
            self.state.store(state as u8, Ordering::Relaxed);
            tracing::info!(interface = self.wire.name(), ?state, "the uplink's state changed");
        }
        self.rest_ns = self.steadiness.rest_ns(self.seat.stops(), self.now_ns);
        if self.rest_ns.is_some() {
            return false;
        }
        self.wire.flush_rest();
        if self.now_ns < self.look_at_ns {
            return true;
        }
        self.look_at_ns = self.now_ns + LOOK_NS;
        let missed = self.wire.missed();
        if active {
            port_queue.handle().counters().drops.add(Cause::Full, missed);
        }
        if self.monitor.has_changed() {
            self.mtu = self.wire.mtu().unwrap_or(self.mtu);
            return self.wire.is_up();
        }
        true
    }
}
