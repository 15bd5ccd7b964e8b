//! The rings that others send to a queue by, and whose turn it is: each in turn, for as many bytes as every other.

use std::os::fd::OwnedFd;

use rackbus_memory::FrameReceiver;
use rustix::event::epoll;

use super::{PortQueueId, offload_of};
use crate::counters::LaneCounters;
use crate::port::{Cause, Frame, MIN_FRAME};
use crate::switch::StationSwitch;

/// Bytes that a ring's turn has: two of the largest frames.
const TURN_BYTES: usize = 128 << 10;
/// Frames that make no sense which one look may throw away.
const MOST_THROWN_AWAY: usize = 64;

#[derive(Debug, Default)]
pub(super) struct IncomingRings {
    rings: Vec<Ring>,
    turn: usize,
    /// Bytes that are left of the turn.
    left: usize,
    /// The ring of the frame that was looked at, and its bytes.
    current: Option<(usize, usize)>,
    /// The current frame was given out before.
    seen: bool,
}

#[derive(Debug)]
struct Ring {
    from: PortQueueId,
    number: u64,
    /// The ring that its sender had before, while that is not empty: frames of a flow stay in order.
    behind: Option<u64>,
    receiver: Box<FrameReceiver>,
    /// Its sender is gone.
    ended: bool,
}

/// Bytes of a frame that are looked at here: its addresses, and two VLAN tags.
const LOOK: usize = 24;

/// What a ring has.
enum RingContent {
    Frame(usize),
    Nothing,
    /// It is of no more use.
    Over,
}

impl IncomingRings {
    pub fn add(&mut self, from: PortQueueId, number: u64, receiver: FrameReceiver) {
        let before = self.rings.iter_mut().rfind(|it| it.from == from);
        let behind = before.map(|before| {
            before.ended = true;
            before.number
        });
        let receiver = Box::new(receiver);
        self.rings.push(Ring { from, number, behind, receiver, ended: false });
    }

    /// The ring of that number has ended: it goes when what is in it was taken.
    pub fn end(&mut self, number: u64) {
        if let Some(ring) = self.rings.iter_mut().find(|it| it.number == number) {
            ring.ended = true;
        }
    }

    /// Whether there is a ring of a station, which has not ended.
    pub fn has_from(&self, station: usize) -> bool {
        self.rings.iter().any(|ring| ring.from.station == station && !ring.ended)
    }

    /// The ring of the next frame for station `to`.
    #[inline]
    pub fn find(
        &mut self,
        to: usize,
        switch: &StationSwitch,
        clock: &dyn Fn() -> u64,
        counters: &LaneCounters,
        wake: &OwnedFd,
    ) -> Option<usize> {
        if let Some((at, _)) = self.current {
            self.seen = true;
            return Some(at);
        }
        let mut looks = self.rings.len();
        while looks > 0 {
            let at = self.turn;
            match self.rings[at].look(to, switch, clock, counters) {
                RingContent::Frame(bytes) if self.left > 0 => {
                    self.left = self.left.saturating_sub(bytes);
                    (self.current, self.seen) = (Some((at, bytes)), false);
                    return Some(at);
                }
                // It has had its turn; alone it has the next one, too.
                RingContent::Frame(_) => {}
                RingContent::Nothing => looks -= 1,
                RingContent::Over => {
                    let ring = self.rings.remove(at);
                    let _ = epoll::delete(wake, &ring.receiver);
                    // What was behind its sender may be elsewhere from now on; no frame of it is left to be learned from.
                    switch.forget(ring.from.station);
                    let next = self.rings.iter_mut().find(|it| it.behind == Some(ring.number));
                    next.into_iter().for_each(|it| it.behind = None);
                    looks = self.rings.len();
                    if looks == 0 {
                        break;
                    }
                }
            }
            self.turn = if at + 1 >= self.rings.len() { 0 } else { at + 1 };
            self.left = TURN_BYTES;
        }
        None
    }

    /// The frame that was found in a ring.
    #[inline]
    pub fn frame(&mut self, at: usize) -> Option<Frame<'_>> {
        let frame = self.rings[at].receiver.peek().ok()??;
        Some(Frame { offload: offload_of(&frame.header), bytes: frame.bytes })
    }

    /// Whether a frame was given out that is not consumed yet.
    pub fn has_current(&self) -> bool {
        self.current.is_some()
    }

    /// Whether the current frame was not given out before.
    pub fn is_new(&self) -> bool {
        !self.seen
    }

    #[inline]
    pub fn consume(&mut self, counters: &LaneCounters) {
        let Some((at, bytes)) = self.current.take() else { return };
        let ring = &mut self.rings[at];
        ring.receiver.consume();
        let peer = &counters.peers[ring.from.station];
        peer.received.add(1);
        peer.received_bytes.add(bytes as u64);
    }

    /// Arms all rings; false when one has something.
    pub fn park(&mut self) -> bool {
        self.current.is_none()
            && self.rings.iter_mut().all(|ring| ring.receiver.park() && !ring.ended)
    }

    pub fn unpark(&mut self, number: u64) {
        let ring = self.rings.iter_mut().find(|ring| ring.number == number);
        if let Some(ring) = ring {
            ring.receiver.unpark();
        }
    }
}

impl Ring {
    /// Looks for a frame, and throws away what is none.
    #[inline]
    fn look(
        &mut self,
        to: usize,
        switch: &StationSwitch,
        clock: &dyn Fn() -> u64,
        counters: &LaneCounters,
    ) -> RingContent {
        if self.behind.is_some() {
            return RingContent::Nothing;
        }
        for _ in 0..MOST_THROWN_AWAY {
            let frame = match self.receiver.peek() {
                Ok(Some(frame)) => frame,
                Ok(None) if !self.ended => return RingContent::Nothing,
                Ok(None) => return RingContent::Over,
                Err(error) => {
                    tracing::warn!(from = self.from.station, %error, "a ring's sender violates the protocol; the ring is not used any more");
                    return RingContent::Over;
                }
            };
            let bytes = frame.bytes.len();
            // Read once: the sender may change it.
            let mut head = [0; LOOK];
            let looked_at = frame.bytes.copy_to(&mut head);
            let checked = match bytes {
                MIN_FRAME.. if !offload_of(&frame.header).is_sound(bytes) => Err(Cause::Offload),
                MIN_FRAME.. => {
                    switch.check_arrival((self.from.station, to), &head[..looked_at], clock)
                }
                _ => Err(Cause::Length),
            };
            let Err(cause) = checked else { return RingContent::Frame(bytes) };
            counters.peers[self.from.station].drops.count(cause);
            self.receiver.consume();
        }
        RingContent::Nothing
    }
}
