//! Messages to somebody who may be slow to take them: never waited for, kept in order, and given
//! up when there are too many.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::sequencer::essential_thread;
use rackbus_link::VERSIONS;
use rackbus_memory::{AsHandle, PacketStream, ResourceHandle, StreamError};
use rackbus_segment::message::ConnectorMessage;

/// Messages that wait for a peer before it counts as gone.
pub const MOST: usize = 65_536;

/// How long to wait when the system carries as many descriptors as it will.
const AGAIN: Duration = Duration::from_millis(1);

/// A message, and what goes beside it.
#[derive(Debug)]
pub struct Letter {
    /// The message as it is sent.
    pub bytes: Vec<u8>,
    /// What is passed with it.
    pub handles: Vec<ResourceHandle>,
}

/// One direction of a conversation.
#[derive(Debug)]
pub struct LetterQueue {
    packets: Arc<dyn PacketStream>,
    /// The version of the link that the peer speaks, where it is another node.
    version: u32,
    local: Option<IpAddr>,
    waiting: Mutex<VecDeque<Letter>>,
    /// This side ended the conversation, because nothing could be sent any more.
    given_up: AtomicBool,
}

impl LetterQueue {
    /// An outbox that sends over this connection.
    pub fn new(packets: Arc<dyn PacketStream>) -> Arc<LetterQueue> {
        LetterQueue::to_node(packets, (VERSIONS.newest(), None))
    }

    /// The same to a node that speaks this version of the link, and is reached from this address of the machine, where that is
    /// known.
    pub fn to_node(
        packets: Arc<dyn PacketStream>,
        (version, local): (u32, Option<IpAddr>),
    ) -> Arc<LetterQueue> {
        let (waiting, given_up) = Default::default();
        Arc::new(LetterQueue { packets, version, local, waiting, given_up })
    }

    /// Whether the peer knows locks in memory of another machine, and flushes that are passed on.
    pub fn has_locks(&self) -> bool {
        self.version >= 2
    }

    /// Whether the peer knows what was copied, beside stores.
    pub fn has_copies(&self) -> bool {
        self.version >= 4
    }

    /// Whether copies may go beside the link.
    pub fn has_landings(&self) -> bool {
        self.version >= 5
    }

    /// Whether what goes on with a copy may be sent before what is under way of it has taken effect.
    pub fn has_streams(&self) -> bool {
        self.version >= 6
    }

    /// The address of this machine from which the peer is reached, where that is known.
    pub fn local_address(&self) -> Option<IpAddr> {
        self.local
    }

    /// What is asked, in a message that the peer knows: an older one is not told that a process has died, only that the
    /// connection has ended.
    pub fn known(&self, ask: ConnectorMessage) -> ConnectorMessage {
        match ask {
            ConnectorMessage::Died { connection } if self.version < 3 => {
                ConnectorMessage::Disconnect { connection }
            }
            ask => ask,
        }
    }

    /// The connection, to receive from.
    pub fn packets(&self) -> &dyn PacketStream {
        &*self.packets
    }

    /// Sends a message, or keeps it until there is room. A peer that is gone loses it: whoever
    /// receives from it learns that.
    pub fn send(self: &Arc<Self>, letter: Letter) {
        let mut waiting = self.lock();
        if waiting.is_empty() {
            match self.now(&letter) {
                Ok(()) => return,
                // Too many descriptors: those that others have not taken yet count, too.
                Err(StreamError::TimedOut | StreamError::TooManyDescriptors) => {}
                Err(cause) => return self.end(cause),
            }
            let outbox = self.clone();
            let deliver = move || outbox.deliver();
            if essential_thread("outbox", deliver).is_err() {
                return self.give_up();
            }
        }
        if waiting.len() >= MOST {
            tracing::warn!("a peer takes no messages and is disconnected");
            return self.give_up();
        }
        waiting.push_back(letter);
    }

    /// Whether it was this side that ended the conversation.
    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }

    /// How many messages wait for the peer to take them.
    pub fn waiting(&self) -> usize {
        self.lock().len()
    }

    /// Ends the conversation from this side.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
        self.packets.shut_down();
    }

    /// Nothing can be sent any more.
    fn end(&self, cause: StreamError) {
        match cause {
            StreamError::Closed => self.packets.shut_down(),
            _ => self.give_up(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Letter>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self, letter: &Letter) -> Result<(), StreamError> {
        let handles: Vec<_> = letter.handles.iter().map(AsHandle::as_handle).collect();
        self.packets.send(&letter.bytes, &handles)
    }

    /// Sends what waits, until nothing does.
    fn deliver(&self) {
        loop {
            self.packets.wait_sendable();
            let mut waiting = self.lock();
            while let Some(letter) = waiting.front() {
                match self.now(letter) {
                    Ok(()) => drop(waiting.pop_front()),
                    Err(StreamError::TimedOut) => break,
                    Err(StreamError::TooManyDescriptors) => {
                        // Nothing tells when others have taken theirs.
                        drop(waiting);
                        std::thread::sleep(AGAIN);
                        waiting = self.lock();
                    }
                    Err(cause) => {
                        waiting.clear();
                        self.end(cause);
                    }
                }
            }
            if waiting.is_empty() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rackbus_memory::packets::MAX_PACKET;
    use rackbus_memory::{AdaptiveSpin, Packets};
    use rackbus_segment::Handle;

    #[test]
    fn an_older_node_is_told_of_a_death_as_of_any_other_end() {
        let connection = Handle(7);
        let died = ConnectorMessage::Died { connection };
        for (version, told) in [
            (2, ConnectorMessage::Disconnect { connection }),
            (3, ConnectorMessage::Died { connection }),
        ] {
            let (ours, _theirs) = Packets::pair().unwrap();
            assert_eq!(
                LetterQueue::to_node(Arc::new(ours), (version, None)).known(died.clone()),
                told
            );
        }
    }

    #[test]
    fn a_slow_peer_gets_everything_in_order() {
        let (ours, theirs) = Packets::pair().unwrap();
        let outbox = LetterQueue::new(Arc::new(ours));
        for number in 0..20_000_u32 {
            outbox.send(Letter { bytes: number.to_le_bytes().to_vec(), handles: Vec::new() });
        }
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::default());
        for number in 0..20_000_u32 {
            let packet = theirs.receive(&mut buffer, &mut spin, None).unwrap();
            assert_eq!(buffer[..packet.length], number.to_le_bytes());
        }
    }
}
