//! Other hosts' nodes: the conversation in which this host's processes connect to theirs, and the
//! one in which theirs connect to this host's.

use std::io::ErrorKind;
use std::sync::Arc;

use rackbus_link::{Hello, IncomingConnection, LinkError, Purpose, VERSIONS};
use rackbus_memory::packets::{MAX_PACKET, Packet};
use rackbus_memory::{AdaptiveSpin, StreamError};
use rackbus_segment::NodeId;
use rackbus_segment::directory::Loss;
use rackbus_segment::message::{ConnectorMessage, OwnerMessage, Question, Refusal, decode, encode};

use super::far::FarConversation;
use super::outbox::LetterQueue;
use super::{Owner, Segments, SegmentsState};

/// What it says of a node that it could not be reached. Nobody listens at the address of a dead
/// one; whatever else went wrong may be this node's own want of descriptors, or the other's hurry.
fn loss_by(error: &LinkError) -> Loss {
    match error {
        LinkError::Unreachable { cause, .. }
            if matches!(cause.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound) =>
        {
            Loss::Dead
        }
        _ => Loss::OutOfReach,
    }
}

/// So many parties of a lock fit into any question.
const SHORT_PARTIES: usize = 64;

/// Bytes of a question that goes to another node, at most: between machines it has a head.
const MOST_ASKED: usize = MAX_PACKET - 64;

/// Whether a message is longer than what another node receives. One that came in part would be taken for malformed, and the
/// conversation of all processes here with that node would end.
pub(super) fn is_too_long(ask: &ConnectorMessage) -> bool {
    // All others have the same few bytes, whatever they say; so have locks of few parties.
    match ask {
        ConnectorMessage::Question { what: Question::Lock { request, .. }, .. } => {
            request.operation.parties().len() > SHORT_PARTIES && encode(ask).len() > MOST_ASKED
        }
        _ => false,
    }
}

/// The answer in the owner's place to a question that is not sent.
pub(super) fn refused_as_too_long(ask: ConnectorMessage) -> Option<OwnerMessage> {
    let ConnectorMessage::Question { request, .. } = ask else { return None };
    let why = "it is longer than a message between two hosts may be";
    Some(OwnerMessage::Answer { request, answer: Err(Refusal::Illegal(why.into())) })
}

impl SegmentsState {
    /// Whether this is the conversation in which a connector's node asks now.
    pub(super) fn is_with(&self, node: NodeId, outbox: &Arc<LetterQueue>) -> bool {
        self.connectors.get(&node).is_some_and(|it| Arc::ptr_eq(it, outbox))
    }
}

impl Segments {
    /// Connects to an owner's node on a thread of its own, which then hears what it says.
    ///
    /// # Errors
    /// When there is no thread for it.
    pub(super) fn dial(
        self: &Arc<Self>,
        state: &SegmentsState,
        node: NodeId,
    ) -> std::io::Result<()> {
        let name = state.hosts.iter().find(|(id, _)| *id == node).map(|(_, name)| name.clone());
        let service = self.clone();
        let talk = move || {
            let Some(name) = name else { return };
            let loss = match service.reach(&name) {
                Ok(outbox) => service.hear_owner(node, &outbox),
                Err(error) => {
                    tracing::info!(%error, "segments of another host cannot be reached");
                    loss_by(&error)
                }
            };
            service.owner_lost(node, loss);
        };
        std::thread::Builder::new().name("owner".into()).spawn(talk).map(drop)
    }

    fn reach(&self, name: &str) -> Result<Arc<LetterQueue>, LinkError> {
        let hello = Hello {
            versions: VERSIONS,
            rack: self.rack.clone(),
            from: self.host.clone(),
            to: name.to_owned(),
            service: Purpose::Segments,
        };
        let nobody = || LinkError::Unreachable {
            address: name.to_owned(),
            cause: std::io::Error::other("nobody knows where it is; is its node up?"),
        };
        let address = self.link.locate(name).ok_or_else(nobody)?;
        let stream = self.link.connect(&address, &hello)?;
        let broken = |cause| LinkError::Broken { peer: name.to_owned(), cause };
        let (version, local) = (stream.version(), stream.local_address());
        Ok(LetterQueue::to_node(stream.offer_packets().map_err(broken)?, (version, local)))
    }

    /// Says what waits to be said, and hears until the node is gone; how.
    fn hear_owner(self: &Arc<Self>, node: NodeId, outbox: &Arc<LetterQueue>) -> Loss {
        if !outbox.packets().passes_memory() {
            return self.hear_far_owner(node, outbox);
        }
        {
            // Under the lock, so that nothing that is said now comes before what waits.
            let mut state = self.lock();
            let before = state.owners.insert(node, Owner::Here(outbox.clone()));
            if let Some(Owner::Dialling(waiting)) = before {
                waiting.into_iter().for_each(|letter| outbox.send(letter));
            }
        }
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::new(0, 50_000));
        let mut heard = false;
        loop {
            let received = outbox.packets().receive(&mut buffer, &mut spin, None);
            let packet = match received.and_then(Packet::whole) {
                Ok(packet) => packet,
                // A node that has never said anything may not have had room for the conversation.
                Err(StreamError::Closed) if heard && !outbox.is_given_up() => return Loss::Dead,
                Err(_) => return Loss::OutOfReach,
            };
            heard = true;
            let Some(tell) = buffer.get(..packet.length).and_then(decode) else {
                tracing::warn!(node, "a node sent a malformed message and is disconnected");
                return Loss::OutOfReach;
            };
            let mut state = self.lock();
            let attached = Segments::take_in(&mut state, packet.handles);
            let taken = attached.clone();
            self.ask_in(&mut state, |directory, now, objects| {
                directory.told(now, node, tell, attached, objects)
            });
            taken.into_iter().for_each(|it| state.store.forget(it.object));
        }
    }

    /// What was asked of the node, and the conversation, end in one step: what is asked next
    /// begins another one.
    fn owner_lost(self: &Arc<Self>, node: NodeId, loss: Loss) {
        let mut state = self.lock();
        state.owners.remove(&node);
        if let Some(far) = state.fars.get(&node) {
            far.end(FarConversation::ToOwner);
        }
        self.ask_in(&mut state, |directory, now, objects| {
            directory.owner_gone(now, node, loss, objects)
        });
    }

    /// Hears a connector's node until it is gone. The caller has a thread for it.
    pub fn attend(self: &Arc<Self>, incoming: IncomingConnection) {
        let from = incoming.hello.from.clone();
        let known = self.lock().hosts.iter().find(|(_, name)| *name == from).map(|(node, _)| *node);
        let Some(node) = known else {
            return incoming.refuse(&format!("the rack has no host {from}"));
        };
        let version = incoming.version;
        let Ok(stream) = incoming.accept() else { return };
        let local = stream.local_address();
        let Ok(packets) = stream.take_packets() else { return };
        drop(stream);
        let outbox = LetterQueue::to_node(packets, (version, local));
        if !outbox.packets().passes_memory() {
            return self.attend_far(node, &outbox);
        }
        {
            let mut state = self.lock();
            if let Some(before) = state.connectors.remove(&node) {
                // The node began anew before its former conversation was noticed to be over. What is said of that
                // is not for the new one.
                before.packets().shut_down();
                self.connector_lost(&mut state, node);
            }
            state.connectors.insert(node, outbox.clone());
        }
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::new(0, 50_000));
        while let Ok(packet) =
            outbox.packets().receive(&mut buffer, &mut spin, None).and_then(Packet::whole)
        {
            let Some(ask) = buffer.get(..packet.length).and_then(decode) else {
                tracing::warn!(node, "a node sent a malformed message and is disconnected");
                break;
            };
            let mut state = self.lock();
            if !state.is_with(node, &outbox) {
                // What was said in a conversation that is over leads nowhere.
                break;
            }
            self.ask_in(&mut state, |directory, now, objects| {
                directory.asked(now, node, ask, objects)
            });
        }
        outbox.packets().shut_down();
        let mut state = self.lock();
        if state.is_with(node, &outbox) {
            state.connectors.remove(&node);
            self.connector_lost(&mut state, node);
        }
    }

    pub(super) fn connector_lost(self: &Arc<Self>, state: &mut SegmentsState, node: NodeId) {
        if let Some(far) = state.fars.get(&node) {
            far.end(FarConversation::ToConnector);
        }
        self.ask_in(state, |directory, now, objects| directory.connector_gone(now, node, objects));
    }
}

#[cfg(test)]
mod tests {
    use rackbus_segment::message::{CarriedMessage, LockHolder, LockOperation, LockRequest};
    use rackbus_segment::{Handle, SessionId};

    use super::*;

    fn question(parties: usize) -> ConnectorMessage {
        let party = LockHolder { node: u32::MAX, session: SessionId(u64::MAX) };
        let operation = LockOperation::Arrive { parties: vec![party; parties], passed: None };
        let request = LockRequest { offset: u64::MAX, operation };
        let (connection, session) = (Handle(u64::MAX), SessionId(u64::MAX));
        let what = Question::Lock { connection, session, request };
        ConnectorMessage::Question { request: u64::MAX, connection, what }
    }

    #[test]
    fn what_is_not_too_long_is_no_longer_than_a_packet_with_its_head() {
        let fits = (1..).take_while(|parties| !is_too_long(&question(*parties))).last().unwrap();
        for parties in [1, fits] {
            let message = encode(&question(parties)).into();
            let said = encode(&CarriedMessage::Said { message, given: None });
            assert!(said.len() <= MAX_PACKET, "{} bytes of {parties} parties", said.len());
        }
        assert!(fits > 2000, "{fits}");
        let refused = refused_as_too_long(question(fits + 1));
        assert!(matches!(
            refused,
            Some(OwnerMessage::Answer { request: u64::MAX, answer: Err(_) })
        ));
    }
}
