//! Frames are sent: to one station or to all, waiting for a receiver without room or dropping for it.

use rackbus_memory::DmaSlice;
use rackbus_memory::frames::{FRAME_HEADER, FrameError};
use rustix::event::epoll;
use zerocopy::IntoBytes;

use super::PortQueue;
use super::outgoing::{Outgoing, Ready};
use crate::capture::Captured;
use crate::offload::Offload;
use crate::port::{Cause, Sent};
use crate::switch::{FrameTarget, HEAD};

impl PortQueue {
    /// Sends a frame of `head` and, behind it, `parts` without their first bytes, as many as `head` has: `head`
    /// is the beginning of the parts, read once.
    pub fn send_checked(&mut self, offload: Offload, head: &[u8], parts: &[DmaSlice<'_>]) -> Sent {
        self.hear();
        let length = parts.iter().map(DmaSlice::len).sum::<usize>().max(head.len());
        let looked_at = head.get(..HEAD).unwrap_or(head);
        match self.switch.decide(self.id.station, &offload, looked_at, length) {
            Ok((FrameTarget::Station(to), _)) => self.send_to(to, offload, head, parts, length),
            Ok((FrameTarget::Outside, _)) => match self.way_out() {
                Some(to) => self.send_to(to, offload, head, parts, length),
                None => self.drop_undecided(Cause::Down),
            },
            Ok((FrameTarget::All, tagged)) => {
                self.send_to_all(tagged, offload, head, parts, length)
            }
            Err(cause) => self.drop_undecided(cause),
        }
    }

    fn drop_undecided(&self, cause: Cause) -> Sent {
        self.handle.counters().drops.count(cause);
        Sent::Dropped(cause)
    }

    fn send_to(
        &mut self,
        to: usize,
        offload: Offload,
        head: &[u8],
        parts: &[DmaSlice<'_>],
        length: usize,
    ) -> Sent {
        let ready = self.ready(to);
        let sent = match (ready, &mut self.outgoing[to]) {
            (Ready::Open, Outgoing::Open { sender, .. }) => {
                sender.send(&header_of(&offload), head, parts)
            }
            (Ready::Wait, _) => return Sent::Full,
            _ => return self.dropped(to, Cause::Down),
        };
        match sent {
            Ok(()) => {
                self.sent(to, length);
                self.capture_sent(head, parts);
                Sent::Done
            }
            Err(FrameError::Full) => self.full(to, length),
            Err(FrameError::Length) => self.dropped(to, Cause::Length),
            Err(FrameError::Broken(_)) => {
                self.lose(to);
                self.dropped(to, Cause::Down)
            }
        }
    }

    /// To all that hear it and have room; those whose ring is just being opened are waited for.
    fn send_to_all(
        &mut self,
        tagged: bool,
        offload: Offload,
        head: &[u8],
        parts: &[DmaSlice<'_>],
        length: usize,
    ) -> Sent {
        let stations = self.switch.stations();
        let switch = self.switch.clone();
        let hear = |from| (0..stations).filter(move |to| switch.hears(*to, from, tagged));
        let receivers: Vec<usize> = hear(self.id.station).collect();
        // All are asked for before any is waited for.
        let waits = receivers.iter().filter(|to| self.ready(**to) == Ready::Wait).count() > 0;
        if waits {
            return Sent::Full;
        }
        for to in receivers {
            let Outgoing::Open { sender, .. } = &mut self.outgoing[to] else {
                self.dropped(to, Cause::Down);
                continue;
            };
            match sender.send(&header_of(&offload), head, parts) {
                Ok(()) => self.sent(to, length),
                Err(FrameError::Full) => drop(self.dropped(to, Cause::Full)),
                Err(FrameError::Length) => drop(self.dropped(to, Cause::Length)),
                Err(FrameError::Broken(_)) => {
                    self.lose(to);
                    self.dropped(to, Cause::Down);
                }
            }
        }
        self.handle.counters().groups.add(1);
        self.capture_sent(head, parts);
        Sent::Done
    }

    /// The station that leads outside now: the first that works, or is about to.
    pub fn way_out(&mut self) -> Option<usize> {
        let switch = self.switch.clone();
        let own = self.id.station;
        let mut uplinks = switch.uplinks().iter().copied();
        uplinks.find(|uplink| *uplink == own || self.ready(*uplink) != Ready::Down)
    }

    /// Whether the ring to a station can be used; it is asked for where there is none.
    pub(super) fn ready(&mut self, to: usize) -> Ready {
        if let Outgoing::Open { .. } = self.outgoing[to] {
            return Ready::Open;
        }
        let now = (self.clock)();
        let (ready, asks) = self.outgoing[to].ready(now);
        if asks {
            self.opener.open(self.id, to);
        }
        ready
    }

    pub(super) fn sent(&mut self, to: usize, length: usize) {
        let Outgoing::Open { pressure, touched, .. } = &mut self.outgoing[to] else { return };
        pressure.took();
        if !std::mem::replace(touched, true) {
            self.touched.push(to);
        }
        let counters = &self.handle.counters().peers[to];
        counters.sent.add(1);
        counters.sent_bytes.add(length as u64);
    }

    pub(super) fn full(&mut self, to: usize, length: usize) -> Sent {
        let now = (self.clock)();
        let Outgoing::Open { pressure, sender, .. } = &mut self.outgoing[to] else {
            return self.dropped(to, Cause::Down);
        };
        match pressure.is_full(now) {
            crate::pressure::Advice::Wait => {
                // The receiver may sleep, with all of this in its ring.
                sender.flush();
                // Once for each, however often it is tried: nobody has to sleep in between.
                match self.blocked.iter_mut().find(|(station, _)| *station == to) {
                    Some((_, waits_for)) => *waits_for = length,
                    None => self.blocked.push((to, length)),
                }
                Sent::Full
            }
            crate::pressure::Advice::Drop => self.dropped(to, Cause::Full),
        }
    }

    pub(super) fn dropped(&self, to: usize, cause: Cause) -> Sent {
        self.handle.counters().peers[to].drops.count(cause);
        Sent::Dropped(cause)
    }

    /// The ring to a station is of no more use; the next frame asks for another.
    pub(super) fn lose(&mut self, to: usize) {
        let before = std::mem::replace(&mut self.outgoing[to], Outgoing::lost((self.clock)()));
        if let Outgoing::Open { sender, .. } = before {
            // It may be in the set no more if its descriptor is closed elsewhere, which nobody does.
            let _ = epoll::delete(&self.wake, &sender);
        }
        let counters = &self.handle.counters().peers[to];
        counters.is_open.set(0);
        counters.waiting_bytes.set(0);
        self.touched.retain(|it| *it != to);
    }

    /// Puts a copy of a frame that was sent into the ring of a capture.
    #[inline]
    fn capture_sent(&mut self, head: &[u8], parts: &[DmaSlice<'_>]) {
        let Some(capture) = &mut self.capture else { return };
        let header = Captured { sent: true, time_ns: (self.clock)() }.to_header();
        if capture.send(&header, head, parts).is_err() {
            self.handle.counters().not_captured.add(1);
        }
        capture.flush();
    }
}

/// The header of a frame in a ring.
pub(super) fn header_of(offload: &Offload) -> [u8; FRAME_HEADER] {
    let mut header = [0; FRAME_HEADER];
    header.copy_from_slice(offload.as_bytes());
    header
}
