//! The end of the node that asked for rings: takes frames out of them and sends these.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use rackbus_memory::frames::RingBroken;
use rackbus_memory::{Carrier, FrameReceiver, FrameSender};
use rackbus_net::{News, PortQueueId};

use super::super::Shared;
use super::super::messages::{ReceiverMessage, SenderMessage, decode};
use super::super::rings::ring_of_this_machine;
use super::{Head, Idle, MessageQueue, Over, WINDOW, Wire, cost, kind};

/// Frames of a ring that are taken in its turn.
const TURN: usize = 16;

/// A node that has the receivers of rings, asked by this one.
pub(in super::super) struct SendingEnd {
    shared: Arc<Shared>,
    host: String,
    pub(super) wire: Wire,
    outbox: Arc<MessageQueue<SenderMessage>>,
    pub(super) rings: Vec<SendingRing>,
    /// The ring that is first in the next turn.
    first: usize,
    /// Questions that the other node has not answered.
    unanswered: usize,
}

/// A ring of this machine, whose frames go to another one's.
pub(super) struct SendingRing {
    /// Its number at its receiver.
    number: u64,
    from: PortQueueId,
    to: usize,
    receiver: FrameReceiver,
    /// Bytes that may be sent.
    credit: usize,
    /// Frames that were sent, and that the other node has not put into its ring yet.
    under_way: u64,
}

impl SendingEnd {
    /// The end over a connection to `host` that begins `now`.
    pub fn new(
        shared: &Arc<Shared>,
        host: &str,
        carrier: Box<dyn Carrier>,
        outbox: Arc<MessageQueue<SenderMessage>>,
        now: Instant,
    ) -> SendingEnd {
        let (shared, host) = (shared.clone(), host.to_owned());
        let wire = Wire::new(carrier, now);
        SendingEnd { shared, host, wire, outbox, rings: Vec::new(), first: 0, unanswered: 0 }
    }

    /// Sends until the connection is over; why it is. Its rings are to be [given up](SendingEnd::give_up) then.
    pub fn run(&mut self) -> Over {
        let mut idle = Idle::default();
        loop {
            let done = match self.turn(Instant::now()) {
                Ok(some) if idle.is_over(some) => self.sleep(),
                Ok(_) => Ok(()),
                Err(over) => Err(over),
            };
            if let Err(over) = done {
                return over;
            }
        }
    }

    /// What was on its way is lost, and counted by the queues, which were told before that their rings are of no more
    /// use.
    pub fn give_up(self) {
        for ring in self.rings {
            ring.lost(&self.shared);
        }
    }

    /// Does what there is to do at `now`; whether there was anything.
    pub(super) fn turn(&mut self, now: Instant) -> Result<bool, Over> {
        let mut some = self.say(now)?;
        some |= self.wire.receive(now)?;
        while let Some((head, bytes)) = self.wire.next()? {
            self.hear(&head, bytes)?;
        }
        some |= self.take_frames(now)?;
        self.wire.look(self.is_owed(), now)?;
        Ok(self.wire.give()? || some)
    }

    /// Whether the other node is to say something.
    fn is_owed(&self) -> bool {
        self.unanswered > 0 || self.rings.iter().any(|ring| ring.under_way > 0)
    }

    /// Messages of other threads.
    fn say(&mut self, now: Instant) -> Result<bool, Over> {
        let mut some = false;
        while let Some(message) = self.outbox.take()? {
            match message {
                SenderMessage::Close { ring } => self.forget(ring),
                SenderMessage::Open { .. } => {
                    if !self.is_owed() {
                        // The other node owes nothing until now.
                        self.wire.heard = now;
                    }
                    self.unanswered += 1;
                }
            }
            self.wire.put_message(&message);
            some = true;
        }
        Ok(some)
    }

    fn forget(&mut self, number: u64) {
        if let Some(at) = self.rings.iter().position(|ring| ring.number == number) {
            self.rings.swap_remove(at).lost(&self.shared);
        }
    }

    fn hear(&mut self, head: &Head, bytes: std::ops::Range<usize>) -> Result<(), Over> {
        match head.kind {
            kind::MESSAGE => {
                let message = decode(&self.wire.buffer[bytes]).ok_or(Over::Violation)?;
                let closed = match message {
                    ReceiverMessage::Closed { ring } => Some(ring),
                    ReceiverMessage::Opened { .. } | ReceiverMessage::Refused { .. } => {
                        self.unanswered = self.unanswered.saturating_sub(1);
                        None
                    }
                };
                let (shared, host) = (self.shared.clone(), self.host.clone());
                if !shared.told(&host, message, |number, ends| self.open(number, ends)) {
                    return Err(Over::Violation);
                }
                // Its queue was told just now, and puts nothing in behind what is counted here.
                closed.into_iter().for_each(|ring| self.forget(ring));
                Ok(())
            }
            kind::CREDIT => self.credit(head),
            kind::SEEN => Ok(()),
            _ => Err(Over::Violation),
        }
    }

    /// A ring in this machine's memory for what goes to a ring of the other one's.
    pub(super) fn open(
        &mut self,
        number: u64,
        (from, to): (PortQueueId, usize),
    ) -> std::io::Result<FrameSender> {
        let (sender, receiver) = ring_of_this_machine()?;
        let ring = SendingRing { number, from, to, receiver, credit: WINDOW, under_way: 0 };
        self.rings.push(ring);
        Ok(sender)
    }

    fn credit(&mut self, head: &Head) -> Result<(), Over> {
        let number = head.ring.get();
        // One that was closed meanwhile is not there any more.
        let Some(ring) = self.rings.iter_mut().find(|ring| ring.number == number) else {
            return Ok(());
        };
        let [a, b, c, d, ..] = head.header;
        let frames = u64::from(u32::from_le_bytes([a, b, c, d]));
        let credit = ring.credit.checked_add(head.length.get() as usize);
        ring.credit = credit.filter(|credit| *credit <= WINDOW).ok_or(Over::Violation)?;
        ring.under_way = ring.under_way.checked_sub(frames).ok_or(Over::Violation)?;
        // It gives both back together: a ring with nothing on its way that may not send would never rest.
        let agree = ring.under_way > 0 || ring.credit == WINDOW;
        agree.then_some(()).ok_or(Over::Violation)
    }

    /// Frames of all rings in turn, as far as there is room.
    fn take_frames(&mut self, now: Instant) -> Result<bool, Over> {
        let mut some = false;
        let count = self.rings.len();
        for nth in 0..count {
            let at = (self.first + nth) % count;
            let ring = &mut self.rings[at];
            for _ in 0..TURN {
                if !self.wire.has_room() {
                    self.first = at;
                    return Ok(some);
                }
                match ring.send_next(&mut self.wire, now) {
                    Ok(false) => break,
                    Ok(true) => some = true,
                    // Nobody but this process has it.
                    Err(_) => return Err(Over::Violation),
                }
            }
        }
        self.first = if count == 0 { 0 } else { (self.first + 1) % count };
        Ok(some)
    }

    fn sleep(&mut self) -> Result<(), Over> {
        if self.arm() {
            self.wire.wait(&self.waits_for())?;
        }
        self.disarm();
        Ok(())
    }

    /// Asks whoever has something for it to ring; false when there is something already.
    pub(super) fn arm(&mut self) -> bool {
        let has_room = self.wire.has_room();
        let mut waits = self.rings.iter_mut().filter(|ring| has_room && ring.may_send());
        waits.all(|ring| ring.receiver.park())
    }

    /// What becomes readable then, beside the connection.
    pub(super) fn waits_for(&self) -> Vec<BorrowedFd<'_>> {
        let has_room = self.wire.has_room();
        let rings = self.rings.iter().filter(|ring| has_room && ring.may_send());
        let rings = rings.map(|ring| ring.receiver.as_fd());
        std::iter::once(self.outbox.event.as_fd()).chain(rings).collect()
    }

    pub(super) fn disarm(&mut self) {
        self.outbox.event.drain();
        self.rings.iter_mut().for_each(|ring| ring.receiver.unpark());
    }
}

impl SendingRing {
    /// What comes into a ring whose window is used up waits for the other node.
    fn may_send(&self) -> bool {
        self.credit >= WINDOW / 2 || self.under_way == 0
    }

    /// Puts the next frame into what is sent; false when there is none, or the window is used up.
    fn send_next(&mut self, wire: &mut Wire, now: Instant) -> Result<bool, RingBroken> {
        let Some(frame) = self.receiver.peek()? else { return Ok(false) };
        let length = frame.bytes.len();
        if cost(length) > self.credit {
            return Ok(false);
        }
        wire.put(&Head {
            length: (length as u32).into(),
            kind: kind::FRAME,
            spare: 0,
            header: frame.header,
            ring: self.number.into(),
        });
        let at = wire.out.len();
        wire.out.resize(at + length, 0);
        frame.bytes.copy_to(&mut wire.out[at..]);
        if self.under_way == 0 {
            // The other node owes nothing until now.
            wire.heard = now;
        }
        self.credit -= cost(length);
        self.under_way += 1;
        self.receiver.consume();
        Ok(true)
    }

    /// The ring is over: its queue counts what is in it, or on its way.
    fn lost(self, shared: &Shared) {
        if let Some(queue) = shared.lock().port_queue(self.from) {
            queue.tell(News::Undelivered(self.to, self.receiver, self.under_way));
        }
    }
}
