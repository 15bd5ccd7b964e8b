//! Frames are sent: to one station or to many, waiting for a receiver without room or dropping for it.

use rackbus_memory::frames::{FRAME_HEADER, FrameError};
use rackbus_memory::{DmaSlice, FrameSender};
use rustix::event::epoll;
use zerocopy::IntoBytes;

use super::PortQueue;
use super::outgoing::{Outgoing, Ready};
use crate::beginning::looked_at;
use crate::capture::Captured;
use crate::ethernet::TAG;
use crate::offload::Offload;
use crate::port::{Cause, MAX_FRAME, SendOutcome};
use crate::switch::FrameTarget;
use crate::vlan::{FrameVlan, Rewrite};

impl PortQueue {
    /// Sends a frame of `head` and, behind it, `parts` without their first bytes, as many as `head` has: `head`
    /// is the beginning of the parts, read once.
    pub fn send_checked(
        &mut self,
        offload: Offload,
        head: &[u8],
        parts: &[DmaSlice<'_>],
    ) -> SendOutcome {
        self.hear();
        let length = parts.iter().map(DmaSlice::len).sum::<usize>().max(head.len());
        let looked_at = &head[..looked_at(head, length).min(head.len())];
        let (own, clock) = (self.id.station, &*self.clock);
        let decided = self.switch.decide(own, &offload, looked_at, length, clock);
        let frame = Sending { offload, head, parts };
        match decided {
            Ok((FrameTarget::Station(to), vlan)) => match self.switch.rewrite(to, &vlan) {
                Some(rewrite) => self.send_to(to, &rewrite, &frame),
                None => self.drop_undecided(Cause::Vlan),
            },
            Ok((FrameTarget::Outside, vlan)) => match self.way_out() {
                Some(to) => match self.switch.rewrite(to, &vlan) {
                    Some(rewrite) => self.send_to(to, &rewrite, &frame),
                    None => self.drop_undecided(Cause::Vlan),
                },
                None => self.drop_undecided(Cause::Down),
            },
            Ok((FrameTarget::All, vlan)) if self.answered(&vlan, &frame) => SendOutcome::Done,
            Ok((FrameTarget::All, vlan)) => {
                let switch = self.switch.clone();
                let all = 0..switch.stations();
                let heard = |to| Some((to, switch.heard_as(to, own, &vlan)?));
                self.send_to_all(all.filter_map(heard).collect(), &frame)
            }
            Ok((FrameTarget::Flood, vlan)) => {
                let switch = self.switch.clone();
                let way_out = self.way_out().filter(|it| *it != own);
                let all = (0..switch.stations()).filter(|it| switch.has_others(*it));
                let heard = |to| Some((to, switch.heard_as(to, own, &vlan)?));
                let receivers: Vec<_> = all.chain(way_out).filter_map(heard).collect();
                match receivers.is_empty() {
                    true => self.drop_undecided(Cause::Unknown),
                    false => self.send_to_all(receivers, &frame),
                }
            }
            Err(cause) => self.drop_undecided(cause),
        }
    }

    /// Whether a frame for many asked what is known here, and its sender has the answer.
    fn answered(&mut self, vlan: &FrameVlan, frame: &Sending<'_>) -> bool {
        let answer = self.switch.answer(self.id.station, vlan, frame.head);
        if !answer.is_some_and(|answer| self.answers.put(&answer)) {
            return false;
        }
        self.handle.counters().answered.add(1);
        self.capture_sent(frame.head, frame.parts);
        true
    }

    fn drop_undecided(&self, cause: Cause) -> SendOutcome {
        self.handle.counters().drops.count(cause);
        SendOutcome::Dropped(cause)
    }

    fn send_to(&mut self, to: usize, rewrite: &Rewrite, frame: &Sending<'_>) -> SendOutcome {
        let ready = self.ready(to);
        let sent = match (ready, &mut self.outgoing[to]) {
            (Ready::Open, Outgoing::Open { sender, .. }) => frame.put(sender, rewrite),
            (Ready::Wait, _) => return SendOutcome::Full,
            _ => return self.dropped(to, Cause::Down),
        };
        match sent {
            Ok(length) => {
                self.sent(to, length);
                self.capture_sent(frame.head, frame.parts);
                SendOutcome::Done
            }
            Err(FrameError::Full) => self.full(to, (frame.length() + TAG).min(MAX_FRAME)),
            Err(FrameError::Length) => self.dropped(to, Cause::Length),
            Err(FrameError::Broken(_)) => {
                self.lose(to);
                self.dropped(to, Cause::Down)
            }
        }
    }

    /// To those of `receivers` that have room; those whose ring is just being opened are waited for.
    fn send_to_all(
        &mut self,
        receivers: Vec<(usize, Rewrite)>,
        frame: &Sending<'_>,
    ) -> SendOutcome {
        // All are asked for before any is waited for.
        let waits = receivers.iter().filter(|(to, _)| self.ready(*to) == Ready::Wait).count() > 0;
        if waits {
            return SendOutcome::Full;
        }
        if !self.flood.ready((self.clock)()) {
            return self.drop_undecided(Cause::Rate);
        }
        self.flood.spend(1);
        for (to, rewrite) in receivers {
            let Outgoing::Open { sender, .. } = &mut self.outgoing[to] else {
                self.dropped(to, Cause::Down);
                continue;
            };
            match frame.put(sender, &rewrite) {
                Ok(length) => self.sent(to, length),
                Err(FrameError::Full) => drop(self.dropped(to, Cause::Full)),
                Err(FrameError::Length) => drop(self.dropped(to, Cause::Length)),
                Err(FrameError::Broken(_)) => {
                    self.lose(to);
                    self.dropped(to, Cause::Down);
                }
            }
        }
        self.handle.counters().groups.add(1);
        self.capture_sent(frame.head, frame.parts);
        SendOutcome::Done
    }

    /// Whether the ring to a station can be used; it is asked for where there is none.
    pub(super) fn ready(&mut self, to: usize) -> Ready {
        if let Outgoing::Open { .. } = self.outgoing[to] {
            return Ready::Open;
        }
        let now = (self.clock)();
        let (ready, asks) = self.outgoing[to].ready(now, &mut self.patience);
        if asks {
            self.opener.open(self.id, to);
        }
        ready
    }

    pub(super) fn sent(&mut self, to: usize, length: usize) {
        let Outgoing::Open { pressure, sent, touched, .. } = &mut self.outgoing[to] else { return };
        *sent = sent.wrapping_add(1);
        if pressure.is_on() {
            pressure.took((self.clock)());
        }
        self.sent = self.sent.wrapping_add(1);
        if !std::mem::replace(touched, true) {
            self.touched.push(to);
        }
        let counters = &self.handle.counters().peers[to];
        counters.sent.add(1);
        counters.sent_bytes.add(length as u64);
    }

    pub(super) fn full(&mut self, to: usize, length: usize) -> SendOutcome {
        if !self.waits {
            return self.dropped(to, Cause::Full);
        }
        let now = (self.clock)();
        let others = self.sent.wrapping_sub(self.handle.counters().peers[to].sent.get());
        let Outgoing::Open { pressure, sender, .. } = &mut self.outgoing[to] else {
            return self.dropped(to, Cause::Down);
        };
        match pressure.is_full(now, others) {
            crate::pressure::Advice::Wait => {
                // The receiver may sleep, with all of this in its ring.
                sender.flush();
                // Once for each, however often it is tried: nobody has to sleep in between.
                match self.blocked.iter_mut().find(|(station, _)| *station == to) {
                    Some((_, waits_for)) => *waits_for = length,
                    None => self.blocked.push((to, length)),
                }
                SendOutcome::Full
            }
            crate::pressure::Advice::Drop => self.dropped(to, Cause::Full),
        }
    }

    pub(super) fn dropped(&self, to: usize, cause: Cause) -> SendOutcome {
        self.handle.counters().peers[to].drops.count(cause);
        SendOutcome::Dropped(cause)
    }

    /// Whoever received from the ring to a station is gone, and takes nothing out of it any more.
    pub(super) fn gone(&mut self, to: usize) {
        let Outgoing::Open { sender, .. } = &mut self.outgoing[to] else { return };
        sender.flush();
        let left = sender.unread();
        self.lose(to);
        self.handle.counters().peers[to].drops.add(Cause::Down, left);
    }

    /// The ring to a station is of no more use; the next frame asks for another.
    pub(super) fn lose(&mut self, to: usize) {
        let before = std::mem::replace(&mut self.outgoing[to], Outgoing::lost((self.clock)()));
        if let Outgoing::Open { mut sender, .. } = before {
            // Whoever counts what is left in it is to find all of it.
            sender.flush();
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

/// A frame that is sent: `head`, and `parts` without as many bytes.
struct Sending<'f> {
    offload: Offload,
    head: &'f [u8],
    parts: &'f [DmaSlice<'f>],
}

impl Sending<'_> {
    fn length(&self) -> usize {
        self.parts.iter().map(DmaSlice::len).sum::<usize>().max(self.head.len())
    }

    /// Writes it into a ring, as its receiver takes it; its length there.
    #[inline]
    fn put(&self, sender: &mut FrameSender, rewrite: &Rewrite) -> Result<usize, FrameError> {
        if rewrite.is_none() {
            sender.send(&header_of(&self.offload), self.head, self.parts)?;
            return Ok(self.length());
        }
        let (begin, length, rest) = rewrite.apply(self.head).ok_or(FrameError::Length)?;
        let offload = header_of(&rewrite.offload(&self.offload));
        let behind = (self.parts, self.head.len());
        sender.send_rewritten(&offload, &begin[..length], rest, behind)
    }
}

/// The header of a frame in a ring.
pub(super) fn header_of(offload: &Offload) -> [u8; FRAME_HEADER] {
    let mut header = [0; FRAME_HEADER];
    header.copy_from_slice(offload.as_bytes());
    header
}
