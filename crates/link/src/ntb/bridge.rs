//! The thread that moves the conversations of one NTB between its arenas and sockets of this process.
//!
//! It looks as long as something moves, and for a bounded, adaptive time after that; then it says to its peer that it sleeps, and
//! waits for a doorbell, for its own sockets, and for the next beat.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rackbus_memory::{AdaptiveSpin, Stream};
use rustix::event::{PollFd, PollFlags};

use super::conversation::{TIME_LIMIT, receive_some, send_some};
use super::end::{Incoming, LinkEnd};
use super::layout::ArenaLayout;
use super::peer::PeerMismatch;
use super::protocol::{ArenaEvent, ArenaProtocol, Arenas};

/// Bytes that are moved of one conversation before the others have a turn, and the beat.
const PIECE: usize = 4096;
/// How long after it said that it sleeps a bridge looks once more: a store that was under way then rings nothing.
const ONCE_MORE: Duration = Duration::from_millis(1);
/// How often is looked whether the NTB is as it was set up, and how long after it failed it is opened again.
pub(super) const AGAIN: Duration = Duration::from_secs(1);

/// One end of an NTB, as its driver has it.
pub trait NtbDriver: Arenas + Send {
    /// How the arenas are laid out, by the sizes of the windows.
    fn layout(&self) -> ArenaLayout;

    /// Rings the peer's doorbell.
    fn ring(&self);

    /// Readable when the peer has rung.
    fn bell(&self) -> BorrowedFd<'_>;

    /// Takes note of the peer's ring, so that it can ring again; false when there was none.
    fn answer(&self) -> bool;

    /// Whether the NTB still is as it was set up.
    fn works(&self) -> bool;
}

/// Opens an end of an NTB, when the link begins and again after it failed.
pub type OpenNtb = Box<dyn Fn() -> std::io::Result<Box<dyn NtbDriver>> + Send>;

/// What the link through one NTB has counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BridgeStatus {
    /// The host at the other end.
    pub host: String,
    /// Whether that host's node is there.
    pub up: bool,
    /// Why nothing is said to whoever is at the other end instead; `None` where nobody is found there.
    pub mismatch: Option<PeerMismatch>,
    /// Whether this process has ended the link for good, as a part of it failed.
    pub failed: bool,
    /// Whether conversations go another way all the same, as that host or this one was revoked.
    pub revoked: bool,
    /// Bytes of conversations that were stored into the peer's memory, and that it stored here.
    pub bytes: [u64; 2],
    /// Conversations that this host began, and that its peer began.
    pub conversations: [u64; 2],
    /// Doorbells that were rung at the peer's end, and that rang here.
    pub doorbells: [u64; 2],
    /// How often this end slept.
    pub sleeps: u64,
    /// How often the peer was lost, or began a new life.
    pub losses: u64,
    /// How often what the peer stored made no sense.
    pub violations: u64,
}

/// An open NTB, with its conversations.
pub(super) struct MovingBridge<'e> {
    end: &'e LinkEnd,
    incoming: &'e Incoming,
    bridge: Box<dyn NtbDriver>,
    protocol: ArenaProtocol,
    /// The sockets of the conversations, by their slots.
    sockets: BTreeMap<usize, UnixStream>,
    /// Those that do not take more bytes just now, and those whose peer does not, each with the moment at which the side that
    /// sent was found to have ended.
    full: BTreeMap<usize, Option<Instant>>,
    waiting: BTreeMap<usize, Option<Instant>>,
    asleep: bool,
    buffer: Vec<u8>,
    /// What was counted in former lives.
    before: BridgeStatus,
}

impl<'e> MovingBridge<'e> {
    pub(super) fn new(
        end: &'e LinkEnd,
        bridge: Box<dyn NtbDriver>,
        incoming: &'e Incoming,
    ) -> MovingBridge<'e> {
        let life = u32::from_ne_bytes(rackbus_identity::random());
        let protocol =
            ArenaProtocol::new(bridge.layout(), end.names, end.even, life, Instant::now());
        let (sockets, full, waiting) = Default::default();
        let before = end.status();
        let (asleep, buffer) = (false, vec![0; PIECE]);
        MovingBridge {
            end,
            incoming,
            bridge,
            protocol,
            sockets,
            full,
            waiting,
            asleep,
            buffer,
            before,
        }
    }

    pub(super) fn run(&mut self) {
        let mut spin = AdaptiveSpin::default();
        let (mut idle, mut looked) = (Instant::now(), Instant::now());
        while self.end.is_to_run() {
            if looked.elapsed() > AGAIN {
                looked = Instant::now();
                if !self.bridge.works() {
                    return;
                }
            }
            if self.turn() {
                spin.waited(u64::try_from(idle.elapsed().as_nanos()).unwrap_or(u64::MAX));
                idle = Instant::now();
                self.wake_up();
            } else if !self.asleep && idle.elapsed() < Duration::from_nanos(spin.budget_ns()) {
                // Whoever is to send something may need this processor.
                std::thread::yield_now();
            } else {
                self.wait();
            }
        }
    }

    /// Tells the peer that this end goes, and ends all conversations.
    pub(super) fn leave(mut self) {
        self.protocol.leave(&*self.bridge);
        self.ring_if_asleep();
        self.count();
    }

    fn ring_if_asleep(&mut self) {
        if self.protocol.is_to_ring(&*self.bridge) {
            self.end.doorbells[0].fetch_add(1, Ordering::Relaxed);
            self.bridge.ring();
        }
    }

    /// Moves a piece of each conversation; whether anything moved.
    fn turn(&mut self) -> bool {
        let mut moved = self.look() | self.begin_wanted();
        for slot in self.sockets.keys().copied().collect::<Vec<_>>() {
            moved |= self.send(slot) | self.receive(slot);
        }
        self.ring_if_asleep();
        if moved {
            self.count();
        }
        moved
    }

    /// Looks what the peer says; whether it said anything.
    fn look(&mut self) -> bool {
        let events = self.protocol.look(&*self.bridge, Instant::now());
        self.end.note_mismatch(self.protocol.mismatch());
        self.heed(&events)
    }

    /// Does what follows from what was found; whether it was anything.
    fn heed(&mut self, events: &[ArenaEvent]) -> bool {
        for event in events {
            match *event {
                ArenaEvent::Up => {
                    tracing::info!(host = self.end.host, "the host is there, through the NTB");
                    self.end.up.store(true, Ordering::Relaxed);
                }
                ArenaEvent::Down => {
                    tracing::warn!(host = self.end.host, "the host was lost, through the NTB");
                    // Whoever finds that it is not there finds the loss counted.
                    self.count();
                    self.end.up.store(false, Ordering::Relaxed);
                    self.sockets.clear();
                    self.full.clear();
                    self.waiting.clear();
                }
                ArenaEvent::Begun(slot) => match self.incoming.put(&self.end.host) {
                    Ok(socket) => drop(self.sockets.insert(slot, socket)),
                    Err(error) => {
                        tracing::error!(%error, "a conversation through the NTB was refused");
                        self.protocol.end(&*self.bridge, slot);
                    }
                },
                ArenaEvent::Ended(slot) => self.forget(slot),
            }
        }
        !events.is_empty()
    }

    /// Begins what is wanted. What has no slot is dropped, so that it ends at once.
    fn begin_wanted(&mut self) -> bool {
        // Others want conversations meanwhile: a store through the bridge may take long.
        let wanted = self.end.take_wanted();
        let some = !wanted.is_empty();
        for socket in wanted {
            match self.protocol.begin(&*self.bridge) {
                Some(slot) => drop(self.sockets.insert(slot, socket)),
                None => {
                    let why = match self.protocol.is_up() {
                        true => "all places are taken",
                        false => "the host was lost meanwhile",
                    };
                    tracing::warn!(
                        host = self.end.host,
                        "a conversation through the NTB cannot begin: {why}"
                    );
                }
            }
        }
        some
    }

    /// Sends a piece of what the node has for its peer.
    fn send(&mut self, slot: usize) -> bool {
        let Some(socket) = self.sockets.get(&slot) else { return false };
        let Some(room) = self.protocol.room(&*self.bridge, slot) else { return self.end_of(slot) };
        if room == 0 {
            let ended = self.waiting.entry(slot).or_default();
            return is_long_over(ended, socket.is_closed()) && self.drop_rest(slot);
        }
        self.waiting.remove(&slot);
        let piece = room.min(PIECE);
        match receive_some(socket, &mut self.buffer[..piece]) {
            Ok(None) => false,
            Ok(Some(count @ 1..)) => {
                self.protocol.put(&*self.bridge, slot, &self.buffer[..count]);
                true
            }
            Ok(Some(0)) | Err(_) => self.end_of(slot),
        }
    }

    /// Gives the node a piece of what its peer sent.
    fn receive(&mut self, slot: usize) -> bool {
        if !self.sockets.contains_key(&slot) {
            return false;
        }
        let Some(count) = self.protocol.peek(&*self.bridge, slot, &mut self.buffer) else {
            return self.end_of(slot);
        };
        if count == 0 {
            self.full.remove(&slot);
            return false;
        }
        // Asked when the bytes are here: what is lost before them was lost while the link was down.
        if self.bridge.was_cut() {
            let mut events = Vec::new();
            self.protocol.cut(&*self.bridge, &mut events);
            return self.heed(&events);
        }
        let Some(socket) = self.sockets.get(&slot) else { return false };
        match send_some(socket, &self.buffer[..count]) {
            Ok(0) => {
                let ended = self.full.entry(slot).or_default();
                let has_ended = self.protocol.has_peer_ended(&*self.bridge, slot);
                is_long_over(ended, has_ended) && self.drop_rest(slot)
            }
            Ok(count) => {
                self.full.remove(&slot);
                self.protocol.take(&*self.bridge, slot, count);
                true
            }
            Err(_) => self.end_of(slot),
        }
    }

    /// Ends a conversation that has ended at the side that sent, and of which the other side takes nothing: its place is needed.
    fn drop_rest(&mut self, slot: usize) -> bool {
        tracing::warn!(
            host = self.end.host,
            "a conversation through the NTB has ended, and nobody took the rest of it for {} s: it is dropped",
            TIME_LIMIT.as_secs()
        );
        self.end_of(slot)
    }

    /// A conversation is over, at either end.
    fn end_of(&mut self, slot: usize) -> bool {
        self.protocol.end(&*self.bridge, slot);
        self.forget(slot);
        true
    }

    fn forget(&mut self, slot: usize) {
        self.full.remove(&slot);
        self.waiting.remove(&slot);
        // Whoever has the other end of the socket sees that.
        if let Some(socket) = self.sockets.remove(&slot) {
            socket.shut_down();
        }
    }

    fn wake_up(&mut self) {
        if std::mem::take(&mut self.asleep) {
            self.protocol.sleep(&*self.bridge, false);
        }
    }

    /// Sleeps until something rings or the next beat.
    fn wait(&mut self) {
        let limit = match self.asleep {
            true => self.protocol.next_beat().saturating_duration_since(Instant::now()),
            false => {
                self.asleep = true;
                self.end.sleeps.fetch_add(1, Ordering::Relaxed);
                self.protocol.sleep(&*self.bridge, true);
                ONCE_MORE
            }
        };
        let limit = limit.try_into().unwrap_or_default();
        let bell = PollFd::from_borrowed_fd(self.bridge.bell(), PollFlags::IN);
        let mut polled = vec![bell, PollFd::new(&self.end.wake, PollFlags::IN)];
        for (slot, socket) in &self.sockets {
            let mut ready = PollFlags::empty();
            ready.set(PollFlags::IN, !self.waiting.contains_key(slot));
            ready.set(PollFlags::OUT, self.full.contains_key(slot));
            if !ready.is_empty() {
                polled.push(PollFd::new(socket, ready));
            }
        }
        // An interrupted wait is a look too many.
        let _ = rustix::event::poll(&mut polled, Some(&limit));
        self.end.wake.drain();
        if self.bridge.answer() {
            self.end.doorbells[1].fetch_add(1, Ordering::Relaxed);
            // The peer rings once for each time that this end sleeps.
            self.wake_up();
        }
    }

    fn count(&self) {
        let (counts, before) = (self.protocol.counts(), &self.before);
        let sum = |one: [u64; 2], other: [u64; 2]| [one[0] + other[0], one[1] + other[1]];
        let mut counted = self.end.counted.lock().unwrap_or_else(PoisonError::into_inner);
        counted.bytes = sum(before.bytes, counts.bytes);
        counted.conversations = sum(before.conversations, counts.conversations);
        counted.losses = before.losses + counts.losses;
        counted.violations = before.violations + counts.violations;
    }
}

/// Whether the side that sent `has_ended` since longer than whoever receives may take for the rest; `ended`: when that was found.
fn is_long_over(ended: &mut Option<Instant>, has_ended: bool) -> bool {
    has_ended && ended.get_or_insert_with(Instant::now).elapsed() > TIME_LIMIT
}
