//! Conversations with nodes of other machines: what the directory says, without memory beside it.
//!
//! What the directory gives away, [`far`](super::far) makes something of that stands for it on the other machine;
//! a move of memory, which connectors that have it mapped would have to take part in, is one of this host alone.

use std::sync::Arc;

use rackbus_memory::AdaptiveSpin;
use rackbus_memory::packets::{MAX_PACKET, Packet};
use rackbus_memory::prompt::run_promptly;
use rackbus_segment::directory::{AttachedObject, LinePart, Loss};
use rackbus_segment::message::{
    CarriedMessage, ConnectorMessage, OwnerMessage, PeerReply, Question, Refusal, StandIn, decode,
    encode,
};
use rackbus_segment::{Handle, NodeId, Objects, Recipient, SegmentId, SessionId};

use super::far::{
    Applied, Far, FarConversation, FarHost, InterruptParts, LIMIT, flush_all, is_whole,
};
use super::hiding::ConnectionRange;
use super::outbox::LetterQueue;
use super::{Owner, Segments, SegmentsState};

/// Answers that wait for the memory that goes with them, by the owner's node and the connection.
pub(super) type HeldAnswers =
    std::collections::BTreeMap<(NodeId, Handle), (OwnerMessage, Vec<AttachedObject>)>;

/// Whether something is given to a host on another machine, and if not why.
fn refusal(state: &SegmentsState, node: NodeId, what: &Question) -> Option<Refusal> {
    let why = match what {
        // What an older one has flushed may come to a third together with what was stored behind it.
        Question::Group { id, .. } if state.has_older_machine(*id, node) => {
            "a multicast group is used on three machines only where the nodes of all are of this version: upgrade those \
             that are older"
        }
        Question::Pages { .. } => {
            "hosts on different machines share no pages of the rack's memory; use a segment"
        }
        Question::Segment { .. }
        | Question::Group { .. }
        | Question::Interrupt { .. }
        | Question::Probe
        | Question::Alive(_)
        | Question::Lock { .. } => return None,
    };
    Some(Refusal::Illegal(why.into()))
}

impl Segments {
    /// Says it to a node of another machine, if it is for one; else it is handed back, as its node knows it.
    pub(super) fn deliver_far(
        state: &mut SegmentsState,
        to: Recipient,
        attached: &[AttachedObject],
    ) -> Option<Recipient> {
        match to {
            Recipient::Ask(node, ask) => {
                let ask = match state.owners.get(&node) {
                    Some(Owner::Here(outbox)) => outbox.known(ask),
                    Some(Owner::Dialling(_)) | None => ask,
                };
                match state.fars.get(&node).filter(|far| far.has(FarConversation::ToOwner)) {
                    Some(far) => ask_far(far, &ask),
                    None => return Some(Recipient::Ask(node, ask)),
                }
            }
            Recipient::Tell(node, tell) => {
                match state
                    .fars
                    .get(&node)
                    .filter(|far| far.has(FarConversation::ToConnector))
                    .cloned()
                {
                    Some(far) => state.tell_far(node, &far, tell, attached),
                    None => return Some(Recipient::Tell(node, tell)),
                }
            }
            Recipient::Reply(..) | Recipient::Event(..) => return Some(to),
        }
        None
    }

    /// Hears the node of an owner on another machine until it is gone; how.
    pub(super) fn hear_far_owner(
        self: &Arc<Self>,
        node: NodeId,
        outbox: &Arc<LetterQueue>,
    ) -> Loss {
        let far = {
            // Under the lock, so that nothing that is said now comes before what waits.
            let mut state = self.lock();
            let Some(far) = state.far(self, node) else { return Loss::OutOfReach };
            far.begin(FarConversation::ToOwner, outbox.clone());
            let before = state.owners.insert(node, Owner::Here(outbox.clone()));
            if let Some(Owner::Dialling(waiting)) = before {
                let asks = waiting.iter().filter_map(|letter| decode(&letter.bytes));
                asks.for_each(|ask| ask_far(&far, &ask));
            }
            far
        };
        let mut heard = false;
        let end = self.listen_far(outbox, |carried| {
            heard = true;
            match carried {
                CarriedMessage::Said { message, given } => {
                    let tell: OwnerMessage =
                        decode(&message).ok_or("no message of this protocol")?;
                    self.hear_tell(node, &far, tell, given)
                }
                carried => far.hear((FarConversation::ToOwner, outbox), carried),
            }
        });
        let mut state = self.lock();
        let SegmentsState { held, store, .. } = &mut *state;
        held.retain(|(of, _), (_, attached)| {
            let stays = *of != node;
            if !stays {
                attached.iter().for_each(|it| store.forget(it.object));
            }
            stays
        });
        drop(state);
        match end {
            rackbus_memory::StreamError::Closed if heard && !outbox.is_given_up() => Loss::Dead,
            _ => Loss::OutOfReach,
        }
    }

    /// Receives until the conversation has ended, or makes no sense; how it ended.
    fn listen_far(
        &self,
        outbox: &Arc<LetterQueue>,
        mut hear: impl FnMut(CarriedMessage<'_>) -> Result<(), String>,
    ) -> rackbus_memory::StreamError {
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::new(0, 50_000));
        run_promptly();
        loop {
            let received = outbox.packets().receive(&mut buffer, &mut spin, None);
            let packet = match received.and_then(Packet::whole) {
                Ok(packet) => packet,
                Err(error) => return error,
            };
            let carried = buffer.get(..packet.length).and_then(decode::<CarriedMessage<'_>>);
            let heard = carried.ok_or_else(|| "no message of this protocol".to_owned());
            if let Err(what) = heard.and_then(&mut hear) {
                tracing::warn!(what, "a node sent a malformed message and is disconnected");
                outbox.packets().shut_down();
                return rackbus_memory::StreamError::TimedOut;
            }
        }
    }

    fn told(self: &Arc<Self>, node: NodeId, tell: OwnerMessage, attached: Vec<AttachedObject>) {
        let taken = attached.clone();
        let mut state = self.lock();
        self.ask_in(&mut state, |directory, now, objects| {
            directory.told(now, node, tell, attached, objects)
        });
        taken.into_iter().for_each(|it| state.store.forget(it.object));
    }

    /// The memory of a connection has all that it had at its home at first: who asked for it is answered.
    fn is_complete(self: &Arc<Self>, node: NodeId, connection: Handle) {
        let held = self.lock().held.remove(&(node, connection));
        if let Some((answer, attached)) = held {
            self.told(node, answer, attached);
        }
    }

    /// An owner's node says something; an answer that gives memory is kept until that is complete.
    fn hear_tell(
        self: &Arc<Self>,
        node: NodeId,
        far: &Arc<Far>,
        tell: OwnerMessage,
        given: Option<(Handle, Vec<StandIn>)>,
    ) -> Result<(), String> {
        let over = match &tell {
            OwnerMessage::Remote { connection, change } if change.is_final() => Some(*connection),
            _ => None,
        };
        let connection = match &tell {
            OwnerMessage::Answer { request, .. } => Some(
                far.answered(FarConversation::ToOwner, *request)
                    .ok_or("an answer to no question")?,
            ),
            _ => None,
        };
        // Its memory is complete no more: it has what came, and is told of the end behind that.
        if let Some(connection) = over {
            self.is_complete(node, connection);
        }
        let Some((named, given)) = given else {
            self.told(node, tell, Vec::new());
            if let Some(connection) = over {
                far.forget((FarConversation::ToOwner, connection));
            }
            return Ok(());
        };
        if connection != Some(named) || !is_whole(&given) {
            return Err("memory for a connection that was not asked for".to_owned());
        }
        let made = self.is_credible(node, &tell, &given);
        match made.and_then(|()| self.stand_in(far, named, &given)) {
            Ok(attached) if matches!(given[..], [StandIn::Memory { .. }]) => {
                let mut state = self.lock();
                state.held.insert((node, named), (tell, attached));
                let now = self.now();
                state.directory.is_being_completed(now, node, named);
            }
            Ok(attached) => self.told(node, tell, attached),
            Err(cause) => {
                // The owner has made it; the directory releases it.
                far.say(
                    FarConversation::ToOwner,
                    &encode(&ConnectorMessage::Disconnect { connection: named }),
                    None,
                );
                let OwnerMessage::Answer { request, .. } = tell else { return Ok(()) };
                self.told(node, OwnerMessage::Answer { request, answer: Err(cause) }, Vec::new());
            }
        }
        Ok(())
    }

    /// Whether an owner may have memory of the size that it names: what stands for it here takes so much of this process'
    /// addresses. It exports so much, and says the same to the directory.
    fn is_credible(
        &self,
        node: NodeId,
        tell: &OwnerMessage,
        given: &[StandIn],
    ) -> Result<(), Refusal> {
        let [StandIn::Memory { size, .. }] = given else { return Ok(()) };
        let export = self.lock().directory.export_of(node);
        match tell {
            OwnerMessage::Answer { answer: Ok(PeerReply::Memory { size: told, .. }), .. }
                if told == size && *size <= export =>
            {
                Ok(())
            }
            _ => Err(Refusal::System(format!(
                "its owner names memory of {size} bytes, and the rack file lets it export {export}; is that the same file?"
            ))),
        }
    }

    /// Makes what stands here for what a connection leads to.
    fn stand_in(
        &self,
        far: &Arc<Far>,
        connection: Handle,
        given: &[StandIn],
    ) -> Result<Vec<AttachedObject>, Refusal> {
        let mut state = self.lock();
        let mut made = Vec::new();
        for one in given {
            let (object, write) = match one {
                StandIn::Memory { size, write } => (state.store.memory(*size), *write),
                StandIn::Doorbell => (state.store.line(LinePart::Doorbell), true),
                StandIn::Event => (state.store.event(), true),
                StandIn::Ring => (state.store.line(LinePart::Ring), true),
            };
            match object {
                Ok(object) => made.push(AttachedObject { object, write }),
                Err(cause) => {
                    made.iter().for_each(|it| state.store.forget(it.object));
                    return Err(Refusal::System(cause));
                }
            }
        }
        let object = |at: usize| made.get(at).and_then(|it| state.store.get(it.object)).cloned();
        match (given, object(0), object(1)) {
            ([StandIn::Memory { size, write }], Some(memory), _) => {
                // Of memory that this node cannot map, nothing could be said or stored.
                if let Err(cause) = memory.region() {
                    made.iter().for_each(|it| state.store.forget(it.object));
                    return Err(Refusal::System(cause.to_string()));
                }
                far.add_memory((FarConversation::ToOwner, connection), memory, (*size, *write));
            }
            (_, Some(bell), Some(event)) => {
                let line = InterruptParts { bell, event, ring: object(2) };
                if let Err(refusal) = far.add_sender(connection, &line) {
                    made.iter().for_each(|it| state.store.forget(it.object));
                    return Err(refusal);
                }
            }
            _ => return Err(Refusal::System("memory that is gone".to_owned())),
        }
        Ok(made)
    }

    /// Hears the node of a connector on another machine until it is gone.
    pub(super) fn attend_far(self: &Arc<Self>, node: NodeId, outbox: &Arc<LetterQueue>) {
        let far = {
            let mut state = self.lock();
            let Some(far) = state.far(self, node) else { return outbox.packets().shut_down() };
            if let Some(before) = state.connectors.remove(&node) {
                // The node began anew before its former conversation was noticed to be over. What is said of that
                // is not for the new one.
                before.packets().shut_down();
                self.connector_lost(&mut state, node);
            }
            state.connectors.insert(node, outbox.clone());
            far.begin(FarConversation::ToConnector, outbox.clone());
            far
        };
        self.listen_far(outbox, |carried| {
            let message = match carried {
                CarriedMessage::Said { message, .. } => message,
                carried => {
                    return far.hear((FarConversation::ToConnector, outbox), carried);
                }
            };
            let ask: ConnectorMessage = decode(&message).ok_or("no message of this protocol")?;
            let mut state = self.lock();
            if !state.is_with(node, outbox) {
                return Err("it has begun another conversation".to_owned());
            }
            let over = match &ask {
                ConnectorMessage::Question { request, connection, what } => {
                    if let Some(refusal) = refusal(&state, node, what) {
                        let tell = OwnerMessage::Answer { request: *request, answer: Err(refusal) };
                        far.say(FarConversation::ToConnector, &encode(&tell), None);
                        return Ok(());
                    }
                    far.asked(FarConversation::ToConnector, *request, *connection);
                    None
                }
                ConnectorMessage::Disconnect { connection }
                | ConnectorMessage::Died { connection } => Some(*connection),
                // Connectors on other machines take no part in moves.
                ConnectorMessage::Frozen { .. } | ConnectorMessage::Adopted { .. } => return Ok(()),
            };
            self.ask_in(&mut state, |directory, now, objects| {
                directory.asked(now, node, ask, objects)
            });
            if let Some(connection) = over {
                far.forget((FarConversation::ToConnector, connection));
            }
            Ok(())
        });
        outbox.packets().shut_down();
        let mut state = self.lock();
        if state.is_with(node, outbox) {
            state.connectors.remove(&node);
            self.connector_lost(&mut state, node);
        }
    }

    /// Waits until what a session stored to the memory of a segment or a connection has taken effect on other
    /// machines; whether it has everywhere.
    pub(super) fn flush(&self, session: SessionId, keeper: Handle) -> bool {
        let fars: Vec<Arc<Far>> = {
            let state = self.lock();
            let object = state.directory.memory_of(session, keeper);
            let Some(object) = object.and_then(|it| state.store.get(it)) else {
                let found = state.directory.owner_of(session, keeper);
                let found = found.filter(|(owner, _)| state.is_on_another_machine(*owner));
                let far = found.and_then(|(owner, connection)| {
                    Some((state.fars.get(&owner)?.clone(), connection))
                });
                drop(state);
                // What it leads to may be gone: then nothing of it is there, and nothing has arrived.
                return far.is_none_or(|(far, connection)| far.flush_connection(connection));
            };
            state.fars.values().filter(|far| far.has_memory(object)).cloned().collect()
        };
        flush_all(&fars)
    }
}

/// Says something to the node of an owner on another machine.
fn ask_far(far: &Arc<Far>, ask: &ConnectorMessage) {
    let bytes = encode(ask);
    match ask {
        ConnectorMessage::Question { request, connection, .. } => {
            far.asked(FarConversation::ToOwner, *request, *connection)
        }
        ConnectorMessage::Disconnect { connection } | ConnectorMessage::Died { connection }
            if far.close((FarConversation::ToOwner, *connection), &bytes) =>
        {
            return;
        }
        ConnectorMessage::Disconnect { .. }
        | ConnectorMessage::Died { .. }
        | ConnectorMessage::Frozen { .. }
        | ConnectorMessage::Adopted { .. } => {}
    }
    far.say(FarConversation::ToOwner, &bytes, None);
}

impl SegmentsState {
    /// Whether an owner's node is, or was when it was last heard, one that shares no memory with this one.
    pub(super) fn is_on_another_machine(&self, owner: NodeId) -> bool {
        match self.owners.get(&owner) {
            Some(Owner::Here(outbox)) => !outbox.packets().passes_memory(),
            Some(Owner::Dialling(_)) | None => self.fars.contains_key(&owner),
        }
    }

    /// Whether a multicast group would be in use by hosts of two further machines with `node`'s, of which one does not
    /// pass flushes on.
    fn has_older_machine(&self, group: SegmentId, node: NodeId) -> bool {
        let hosts = self.directory.group_hosts(group);
        let others: Vec<NodeId> =
            hosts.filter(|host| *host != node && self.fars.contains_key(host)).collect();
        let older = |host: &NodeId| self.connectors.get(host).is_some_and(|it| !it.has_locks());
        !others.is_empty() && others.iter().chain([&node]).any(older)
    }

    /// What this host has in common with another; `None` when there is no thread for it.
    fn far(&mut self, service: &Arc<Segments>, node: NodeId) -> Option<Arc<Far>> {
        if let Some(far) = self.fars.get(&node) {
            return Some(far.clone());
        }
        let [hiding, told, moving] = std::array::from_fn(|_| Arc::downgrade(service));
        let hide = move |ranges: &[ConnectionRange], effect: &dyn Fn() -> Applied| match hiding
            .upgrade()
        {
            Some(service) => service.while_hidden(node, ranges, effect),
            None => effect(),
        };
        let complete = move |connection| {
            if let Some(service) = told.upgrade() {
                service.is_complete(node, connection);
            }
        };
        let settled = move |answer| {
            if let Some(service) = moving.upgrade() {
                service.ask(|directory, now, objects| directory.asked(now, node, answer, objects));
            }
        };
        let host = FarHost::new(hide, complete, settled, self.senders.clone());
        let host = host.with_lanes(self.lanes.clone(), self.copied.clone());
        let far = Far::new(self.effects.clone(), LIMIT, self.passing.clone(), host).ok()?;
        self.passing.add(&far);
        Some(self.fars.entry(node).or_insert(far).clone())
    }
}
