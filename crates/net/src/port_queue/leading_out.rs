//! Which uplink a queue sends by, and what uplinks say to each other.

use rackbus_memory::frames::FRAME_HEADER;

use super::PortQueue;
use super::outgoing::{Outgoing, Ready};

impl PortQueue {
    /// The station that leads outside now: the first that works, or is about to. One that is frozen is used only where
    /// there is no other.
    pub fn way_out(&mut self) -> Option<usize> {
        self.leads_out(false)
    }

    /// The same, by what is so at this moment.
    pub(crate) fn look_for_way_out(&mut self) -> Option<usize> {
        self.leads_out(true)
    }

    fn leads_out(&mut self, now: bool) -> Option<usize> {
        let switch = self.switch.clone();
        let own = self.id.station;
        let uplinks = switch.uplinks();
        let mut frozen = None;
        for uplink in uplinks {
            if *uplink == own {
                return Some(own);
            }
            if self.ready(*uplink) == Ready::Down {
                continue;
            }
            // Where there is no other, nobody has to know.
            if uplinks.len() == 1 || !self.is_silent(*uplink, now) {
                return Some(*uplink);
            }
            frozen = frozen.or(Some(*uplink));
        }
        frozen
    }

    /// Whether a station takes nothing of what lies in its ring.
    fn is_silent(&mut self, to: usize, now: bool) -> bool {
        let now_ns = (self.clock)();
        let Outgoing::Open { sender, sent, liveness, .. } = &mut self.outgoing[to] else {
            return false;
        };
        if now || liveness.is_due(now_ns) {
            sender.flush();
            let unread = sender.unread();
            liveness.look(now_ns, sent.wrapping_sub(unread), unread);
        }
        liveness.is_silent()
    }

    /// Whether a station sends to this one by a ring, or this one to it.
    pub(crate) fn is_joined(&self, station: usize) -> bool {
        self.incoming.has_from(station) || matches!(self.outgoing[station], Outgoing::Open { .. })
    }

    /// Whether nothing lies in the ring to a station, if it has one.
    pub(crate) fn has_taken_all(&self, to: usize) -> bool {
        match &self.outgoing[to] {
            Outgoing::Open { sender, .. } => sender.used() == 0,
            _ => true,
        }
    }

    /// Puts a frame into the ring to a station, if that is open and has room, and wakes its receiver.
    pub(crate) fn say(&mut self, to: usize, frame: &[u8]) {
        if self.ready(to) != Ready::Open {
            return;
        }
        if let Outgoing::Open { sender, .. } = &mut self.outgoing[to]
            && sender.send(&[0; FRAME_HEADER], frame, &[]).is_ok()
        {
            sender.flush();
            self.sent(to, frame.len());
        }
    }
}
