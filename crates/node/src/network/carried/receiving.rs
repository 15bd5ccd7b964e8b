//! The end of the node that has the receivers of rings: puts what comes into them. What it is sent is not trusted.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use rackbus_memory::frames::{FRAME_HEADER, FrameError};
use rackbus_memory::{Carrier, FrameSender};

use super::super::Shared;
use super::super::messages::{ReceiverMessage, SenderMessage, decode};
use super::super::peers::AskingNode;
use super::{Head, Idle, MessageQueue, Over, WINDOW, Wire, cost, kind};

/// A node that sends to this host's rings.
pub(in super::super) struct ReceivingEnd {
    shared: Arc<Shared>,
    asker: Arc<AskingNode>,
    pub(super) wire: Wire,
    outbox: Arc<MessageQueue<ReceiverMessage>>,
    pub(super) rings: BTreeMap<u64, ReceivingRing>,
}

/// A ring of this machine, which another one's frames go into.
pub(super) struct ReceivingRing {
    sender: FrameSender,
    /// Frames that it has no room for, in their order.
    pub(super) waiting: VecDeque<([u8; FRAME_HEADER], Vec<u8>)>,
    /// Bytes of the window that are used.
    used: usize,
    /// Bytes and frames that were put in, and that the sender does not know of.
    owed: (usize, u32),
    /// Something was put in since its receiver was told.
    touched: bool,
}

impl ReceivingEnd {
    /// The end over a connection from `asker` that begins `now`.
    pub fn new(
        shared: &Arc<Shared>,
        asker: Arc<AskingNode>,
        carrier: Box<dyn Carrier>,
        outbox: Arc<MessageQueue<ReceiverMessage>>,
        now: Instant,
    ) -> ReceivingEnd {
        let (shared, wire) = (shared.clone(), Wire::new(carrier, now));
        ReceivingEnd { shared, asker, wire, outbox, rings: BTreeMap::new() }
    }

    /// Receives until the connection is over; why it is.
    pub fn run(mut self) -> Over {
        let mut idle = Idle::default();
        loop {
            let turn = self.turn(Instant::now());
            let done = match turn {
                Ok(some) if idle.is_over(some) => self.sleep(),
                Ok(_) => Ok(()),
                Err(over) => Err(over),
            };
            if let Err(over) = done {
                return over;
            }
        }
    }

    /// Does what there is to do at `now`; whether there was anything.
    pub(super) fn turn(&mut self, now: Instant) -> Result<bool, Over> {
        let mut some = self.say()?;
        some |= self.wire.receive(now)?;
        while let Some((head, bytes)) = self.wire.next()? {
            self.hear(&head, bytes)?;
            self.wire.is_taken()?;
        }
        for ring in self.rings.values_mut() {
            some |= ring.put_waiting()?;
            ring.flush();
        }
        self.give_back(WINDOW / 4);
        Ok(self.wire.give()? || some)
    }

    /// Messages of other threads.
    fn say(&mut self) -> Result<bool, Over> {
        let mut some = false;
        while let Some(message) = self.outbox.take()? {
            if let ReceiverMessage::Closed { ring } = message {
                self.rings.remove(&ring);
            }
            self.wire.put_message(&message);
            some = true;
        }
        Ok(some)
    }

    fn hear(&mut self, head: &Head, bytes: std::ops::Range<usize>) -> Result<(), Over> {
        match head.kind {
            kind::MESSAGE => {
                let ask: SenderMessage = decode(&self.wire.buffer[bytes]).ok_or(Over::Violation)?;
                if let SenderMessage::Close { ring } = ask {
                    self.rings.remove(&ring);
                }
                let shared = self.shared.clone();
                if let Some((answer, made)) = shared.asked(&self.asker, ask) {
                    if let Some(made) = made {
                        self.rings.insert(made.number, ReceivingRing::new(made.sender));
                    }
                    self.wire.put_message(&answer);
                }
                Ok(())
            }
            kind::FRAME => {
                // One that was closed meanwhile takes nothing any more.
                match self.rings.get_mut(&head.ring.get()) {
                    Some(ring) => ring.take(&head.header, &self.wire.buffer[bytes]),
                    None => Ok(()),
                }
            }
            kind::LOOK => {
                self.wire.put(&Head { kind: kind::SEEN, ..Head::default() });
                Ok(())
            }
            _ => Err(Over::Violation),
        }
    }

    /// Gives windows back of which so many bytes are owed at least.
    fn give_back(&mut self, least: usize) {
        for (number, ring) in &mut self.rings {
            let (bytes, frames) = ring.owed;
            if bytes == 0 || bytes < least {
                continue;
            }
            ring.owed = (0, 0);
            ring.used -= bytes;
            let mut head = Head { kind: kind::CREDIT, ring: (*number).into(), ..Head::default() };
            head.length = (bytes as u32).into();
            head.header[..4].copy_from_slice(&frames.to_le_bytes());
            self.wire.put(&head);
        }
    }

    fn sleep(&mut self) -> Result<(), Over> {
        if self.arm()? {
            self.wire.wait(&self.waits_for())?;
        }
        self.disarm();
        Ok(())
    }

    /// Asks whoever has something for it to ring; false when there is something already.
    pub(super) fn arm(&mut self) -> Result<bool, Over> {
        // The sender is told all that it does not know before nothing is done for a while.
        self.give_back(0);
        self.wire.give()?;
        let mut quiet = true;
        for ring in self.rings.values_mut() {
            if let Some((_, bytes)) = ring.waiting.front() {
                quiet &= ring.sender.park(bytes.len());
            }
        }
        Ok(quiet)
    }

    /// What becomes readable then, beside the connection.
    pub(super) fn waits_for(&self) -> Vec<BorrowedFd<'_>> {
        let waiting = self.rings.values().filter(|ring| !ring.waiting.is_empty());
        let rings = waiting.map(|ring| ring.sender.as_fd());
        std::iter::once(self.outbox.event.as_fd()).chain(rings).collect()
    }

    pub(super) fn disarm(&mut self) {
        self.outbox.event.drain();
        self.rings.values_mut().for_each(|ring| ring.sender.unpark());
    }
}

impl ReceivingRing {
    fn new(sender: FrameSender) -> ReceivingRing {
        ReceivingRing { sender, waiting: VecDeque::new(), used: 0, owed: (0, 0), touched: false }
    }

    /// Takes a frame that came.
    fn take(&mut self, header: &[u8; FRAME_HEADER], bytes: &[u8]) -> Result<(), Over> {
        self.used += cost(bytes.len());
        if self.used > WINDOW {
            return Err(Over::Violation);
        }
        if !self.waiting.is_empty() || !self.put(header, bytes)? {
            self.waiting.push_back((*header, bytes.to_vec()));
        }
        Ok(())
    }

    /// Puts a frame in; false when there is no room.
    fn put(&mut self, header: &[u8; FRAME_HEADER], bytes: &[u8]) -> Result<bool, Over> {
        match self.sender.send(header, bytes, &[]) {
            Ok(()) => {
                self.touched = true;
            }
            Err(FrameError::Full) => return Ok(false),
            // Its receiver's queue is of this process: there is nobody to put it in for any more.
            Err(FrameError::Broken(_)) => {}
            Err(FrameError::Length) => return Err(Over::Violation),
        }
        self.owed = (self.owed.0 + cost(bytes.len()), self.owed.1 + 1);
        Ok(true)
    }

    /// Puts in what has room by now; whether there was anything.
    fn put_waiting(&mut self) -> Result<bool, Over> {
        let mut some = false;
        while let Some((header, bytes)) = self.waiting.pop_front() {
            if !self.put(&header, &bytes)? {
                self.waiting.push_front((header, bytes));
                break;
            }
            some = true;
        }
        Ok(some)
    }

    fn flush(&mut self) {
        if std::mem::take(&mut self.touched) {
            self.sender.flush();
        }
    }
}

impl Drop for ReceivingRing {
    /// What was put in is its receiver's, whatever becomes of the connection.
    fn drop(&mut self) {
        self.flush();
    }
}
