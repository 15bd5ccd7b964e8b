//! What this host's directory says to connectors on other machines: what it gives them is something that stands for it
//! there, and what they would do in a move is done here in their place.

use std::sync::Arc;

use rackbus_segment::directory::AttachedObject;
use rackbus_segment::message::{
    ConnectionChange, ConnectorMessage, OwnerMessage, PeerReply, Refusal, StandIn, encode,
};
use rackbus_segment::{Handle, NodeId};

use super::SegmentsState;
use super::far::{CommonMemory, Far, FarConversation, InterruptParts, stand_ins};
use super::objects::Object;

impl SegmentsState {
    /// Says something to the node of a connector on another machine.
    pub(super) fn tell_far(
        &mut self,
        node: NodeId,
        far: &Arc<Far>,
        tell: OwnerMessage,
        attached: &[AttachedObject],
    ) {
        match tell {
            OwnerMessage::Answer { request, answer } => {
                self.answer_far((node, far), request, answer, attached)
            }
            OwnerMessage::Remote { connection, change } => {
                let bytes = encode(&tell);
                if change.is_final() {
                    // A move that is abandoned does not say so, and what came for others would wait for it.
                    far.resume((FarConversation::ToConnector, connection));
                }
                match change {
                    // It keeps what it held last.
                    ConnectionChange::Removed | ConnectionChange::Lost
                        if far.close((FarConversation::ToConnector, connection), &bytes) =>
                    {
                        return;
                    }
                    change if change.is_final() => {
                        far.forget((FarConversation::ToConnector, connection))
                    }
                    _ => {}
                }
                far.say(FarConversation::ToConnector, &bytes, None);
            }
            // What stands there for the memory is not moved: this host's part of it is.
            OwnerMessage::Freeze { ticket, connection, .. } => {
                let memory = far.memory((FarConversation::ToConnector, connection));
                let pause = |memory: &CommonMemory| memory.pause();
                let answer = ConnectorMessage::Frozen { ticket, connection };
                self.in_the_place_of(node, far, answer, memory, pause);
            }
            OwnerMessage::Adopt { ticket, connection, .. } => {
                let object = attached.first().and_then(|it| self.store.get(it.object)).cloned();
                let memory = far.memory((FarConversation::ToConnector, connection));
                let adopt = |memory: &CommonMemory| {
                    object.into_iter().for_each(|object| memory.adopt(object));
                };
                let answer = ConnectorMessage::Adopted { ticket, connection };
                self.in_the_place_of(node, far, answer, memory, adopt);
            }
            OwnerMessage::Unfreeze { connection, .. } => {
                far.resume((FarConversation::ToConnector, connection))
            }
        }
    }

    /// A move goes a step further at memory that a connector on another machine has in common, and this is answered in the
    /// connector's place: at once where there is none (any more), else when nothing reads or stores the memory of before.
    fn in_the_place_of(
        &mut self,
        node: NodeId,
        far: &Arc<Far>,
        answer: ConnectorMessage,
        memory: Option<Arc<CommonMemory>>,
        step: impl FnOnce(&CommonMemory),
    ) {
        let Some(memory) = memory else { return self.in_their_place.push((node, answer)) };
        step(&memory);
        far.answer_settled(memory, answer);
    }

    fn answer_far(
        &mut self,
        (node, far): (NodeId, &Arc<Far>),
        request: u64,
        answer: Result<PeerReply, Refusal>,
        attached: &[AttachedObject],
    ) {
        let connection = far.answered(FarConversation::ToConnector, request);
        let objects = attached
            .iter()
            .filter_map(|it| self.store.get(it.object).map(|object| (object.clone(), it.write)));
        let objects: Vec<(Arc<Object>, bool)> = objects.collect();
        let given = match (&answer, connection) {
            (Ok(PeerReply::Memory { size, .. }), Some(connection)) => {
                stand_ins(&objects, *size).filter(|_| give(far, connection, &objects))
            }
            _ => None,
        };
        match (given, connection) {
            (Some(given), Some(connection)) => {
                let memory = match given[..] {
                    [StandIn::Memory { size, write }] => Some((size, write)),
                    _ => None,
                };
                far.say(
                    FarConversation::ToConnector,
                    &encode(&OwnerMessage::Answer { request, answer }),
                    Some((connection, given)),
                );
                // Only now: what is stored is said behind it.
                if let (Some(form), Some((object, _))) = (memory, objects.into_iter().next()) {
                    far.add_memory((FarConversation::ToConnector, connection), object, form);
                }
            }
            (None, _) if !attached.is_empty() => {
                // The directory has made it, and nobody there knows of it.
                let over = connection.map(|connection| ConnectorMessage::Disconnect { connection });
                self.in_their_place.extend(over.map(|over| (node, over)));
                let answer = Err(Refusal::System("its memory cannot be mapped".to_owned()));
                far.say(
                    FarConversation::ToConnector,
                    &encode(&OwnerMessage::Answer { request, answer }),
                    None,
                );
            }
            _ => {
                let admits = matches!(&answer, Ok(PeerReply::Lock(reply)) if reply.admits());
                let bytes = encode(&OwnerMessage::Answer { request, answer });
                match admits {
                    true => far.say_behind_stores(FarConversation::ToConnector, &bytes),
                    false => far.say(FarConversation::ToConnector, &bytes, None),
                }
            }
        }
    }
}

/// Makes this end of an interrupt; false when it, or memory, cannot be mapped.
fn give(far: &Arc<Far>, connection: Handle, objects: &[(Arc<Object>, bool)]) -> bool {
    match objects {
        [(memory, _)] => memory.region().is_ok(),
        [(bell, _), (event, _), rest @ ..] => {
            let ring = rest.first().map(|(ring, _)| ring.clone());
            let line = InterruptParts { bell: bell.clone(), event: event.clone(), ring };
            far.add_receiver(connection, &line)
        }
        [] => false,
    }
}
