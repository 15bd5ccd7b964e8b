//! Other nodes: the conversation in which this one asks another for rings, and those in which others ask this one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use rackbus_link::{Conversation, Hello, IncomingConnection, LinkError, Purpose, VERSIONS};
use rackbus_memory::frames::FrameEvents;
use rackbus_memory::packets::{MAX_PACKET, Packet};
use rackbus_memory::{AdaptiveSpin, FrameSender, HandleRef, Handles, PacketStream};
use rackbus_net::port_queue::LAYOUT;
use rackbus_net::{News, PortQueueId, StationKind};
use serde::Serialize;

use super::carried::{MessageQueue, ReceivingEnd, SendingEnd};
use super::messages::{ReceiverMessage, SenderMessage, decode, encode};
use super::rings::MadeRing;
use super::{NetworkService, Shared, State};

/// How another node is told something.
enum Voice<M> {
    /// Packets, which memory goes along with.
    Packets(Arc<dyn PacketStream>),
    /// What the thread of a connection to another machine sends, with frames.
    Carried(Arc<MessageQueue<M>>),
}

impl<M: Serialize> Voice<M> {
    /// Says something; false when the other node takes nothing.
    fn say(&self, message: M, handles: &[HandleRef<'_>]) -> bool {
        match self {
            Voice::Packets(packets) => packets.send(&encode(&message), handles).is_ok(),
            Voice::Carried(outbox) => outbox.say(message),
        }
    }

    fn end(&self) {
        match self {
            Voice::Packets(packets) => packets.shut_down(),
            Voice::Carried(outbox) => outbox.end(),
        }
    }
}

/// A node that this one asks.
#[derive(Default)]
pub(super) struct Peer {
    /// `None` while it is being connected to.
    voice: Option<Voice<SenderMessage>>,
    /// What was asked and is not answered yet, by the number of the question.
    pending: HashMap<u64, (PortQueueId, usize)>,
    /// Rings that this host's queues send into, by number.
    rings: HashMap<u64, (PortQueueId, usize)>,
}

impl Peer {
    /// Says something. A node that takes no messages answers none either: what waits for it ends in time.
    fn say(&self, ask: SenderMessage) -> bool {
        self.voice.as_ref().is_none_or(|voice| voice.say(ask, &[]))
    }

    /// What the sender of a ring to a station is told when its receiver has ended it. What goes to another machine is
    /// counted by who has the other end of its ring.
    fn news_of_loss(&self, to: usize) -> News {
        match self.voice {
            Some(Voice::Packets(_)) => News::Gone(to),
            _ => News::Lost(to),
        }
    }

    /// A port of this host's is closed: nothing will be sent from it any more.
    pub fn sender_gone(&mut self, station: usize) {
        let gone: Vec<u64> = (self.rings.iter())
            .filter(|(_, (from, _))| from.station == station)
            .map(|(ring, _)| *ring)
            .collect();
        for ring in gone {
            self.rings.remove(&ring);
            self.say(SenderMessage::Close { ring });
        }
        self.pending.retain(|_, (from, _)| from.station != station);
    }
}

/// A node that asks this one.
pub(super) struct AskingNode {
    host: String,
    voice: Voice<ReceiverMessage>,
}

impl AskingNode {
    /// A node on another machine.
    pub fn on_another_machine(
        host: String,
        outbox: Arc<MessageQueue<ReceiverMessage>>,
    ) -> AskingNode {
        AskingNode { host, voice: Voice::Carried(outbox) }
    }

    /// Nobody takes anything out of a ring of its any more.
    pub fn ring_closed(&self, ring: u64) {
        if !self.voice.say(ReceiverMessage::Closed { ring }, &[]) {
            // It takes no messages: it asks anew when it is back.
            self.voice.end();
        }
    }

    /// Whether the memory of its rings is passed to it.
    pub fn has_memory(&self) -> bool {
        matches!(self.voice, Voice::Packets(_))
    }
}

impl Shared {
    /// Asks the node of `host` for a ring.
    pub(super) fn ask(self: &Arc<Self>, from: PortQueueId, to: usize, host: &str) {
        let mut state = self.lock();
        let Some(port_queue) = state.port_queue(from) else { return };
        state.next_request += 1;
        let request = state.next_request;
        let is_new = !state.peers.contains_key(host);
        let peer = state.peers.entry(host.to_owned()).or_default();
        peer.pending.insert(request, (from, to));
        let said = peer.say(self.open_question(request, from, to));
        if !said {
            peer.pending.remove(&request);
            port_queue.tell(News::Failed(to));
        }
        if is_new && let Err(error) = self.dial(host) {
            tracing::error!(%error, host, "a host cannot be reached by the network: cannot start a thread");
            self.peer_lost(&mut state, host);
        }
    }

    fn open_question(&self, request: u64, from: PortQueueId, to: usize) -> SenderMessage {
        let name = |station: usize| self.stations.all()[station].name.clone();
        SenderMessage::Open { request, from: name(from.station), queue: from.number, to: name(to) }
    }

    /// Connects to a node on a thread of its own, which then hears what it says.
    fn dial(self: &Arc<Self>, host: &str) -> std::io::Result<()> {
        let (shared, host) = (self.clone(), host.to_owned());
        let talk = move || {
            let over = match shared.reach(&host) {
                Ok(stream) => shared.talk_to(&host, &*stream),
                Err(error) => {
                    tracing::debug!(%error, host, "a host is out of the network's reach");
                    None
                }
            };
            shared.peer_lost(&mut shared.lock(), &host);
            // Behind that: from now on its queues put nothing into its rings any more.
            over.into_iter().for_each(SendingEnd::give_up);
        };
        std::thread::Builder::new().name("network peer".into()).spawn(talk).map(drop)
    }

    fn reach(&self, host: &str) -> Result<Arc<dyn Conversation>, LinkError> {
        let hello = Hello {
            versions: VERSIONS,
            rack: self.rack.clone(),
            from: self.host.clone(),
            to: host.to_owned(),
            service: Purpose::Network,
        };
        let unknown = || LinkError::Unreachable {
            address: host.to_owned(),
            cause: std::io::ErrorKind::NotFound.into(),
        };
        let address = self.link.locate(host).ok_or_else(unknown)?;
        self.link.connect(&address, &hello)
    }

    /// Asks what waits to be asked, and goes on until the node is gone; what then is left of a connection to another
    /// machine.
    fn talk_to(self: &Arc<Self>, host: &str, stream: &dyn Conversation) -> Option<SendingEnd> {
        let Some(carrier) = stream.carrier() else {
            match stream.offer_packets() {
                Ok(packets) => self.hear_peer(host, packets),
                Err(error) => tracing::debug!(%error, host, "a host is out of the network's reach"),
            }
            return None;
        };
        let outbox = MessageQueue::new().inspect_err(
            |error| tracing::error!(%error, host, "a host cannot be reached by the network"),
        );
        let outbox = Arc::new(outbox.ok()?);
        self.begin_with_machine(host, &outbox);
        let mut end = SendingEnd::new(self, host, carrier, outbox, Instant::now());
        let over = end.run();
        tracing::debug!(host, %over, "frames are not sent to a host any more");
        Some(end)
    }

    /// Asks what waits to be asked, by what the thread of a connection to another machine sends.
    pub(super) fn begin_with_machine(&self, host: &str, outbox: &Arc<MessageQueue<SenderMessage>>) {
        self.begin_with(host, Voice::Carried(outbox.clone()));
    }

    /// Asks by `voice` what waits to be asked.
    fn begin_with(&self, host: &str, voice: Voice<SenderMessage>) {
        let mut state = self.lock();
        let Some(peer) = state.peers.get_mut(host) else { return };
        peer.voice = Some(voice);
        let waiting: Vec<_> = peer.pending.iter().map(|(it, what)| (*it, *what)).collect();
        let mut unasked = Vec::new();
        for (request, (from, to)) in waiting {
            if !peer.say(self.open_question(request, from, to)) {
                peer.pending.remove(&request);
                unasked.push((from, to));
            }
        }
        for (from, to) in unasked {
            if let Some(port_queue) = state.port_queue(from) {
                port_queue.tell(News::Failed(to));
            }
        }
    }

    /// Hears answers until the node is gone.
    fn hear_peer(self: &Arc<Self>, host: &str, packets: Arc<dyn PacketStream>) {
        self.begin_with(host, Voice::Packets(packets.clone()));
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::new(0, 0));
        while let Ok(packet) = packets.receive(&mut buffer, &mut spin, None).and_then(Packet::whole)
        {
            let Some(tell) = buffer.get(..packet.length).and_then(decode) else {
                tracing::warn!(host, "a node sent a malformed message and is disconnected");
                break;
            };
            if !self.told(host, tell, |_, _| sender(packet.handles)) {
                tracing::warn!(host, "a node opened one ring twice and is disconnected");
                break;
            }
        }
        packets.shut_down();
    }

    /// A node that has rings said something. `open` makes the sender of a ring of this number, between a queue and a
    /// station. False when the node breaks the protocol: the conversation is to end.
    pub(super) fn told(
        &self,
        host: &str,
        tell: ReceiverMessage,
        open: impl FnOnce(u64, (PortQueueId, usize)) -> std::io::Result<FrameSender>,
    ) -> bool {
        let mut state = self.lock();
        let Some(peer) = state.peers.get_mut(host) else { return true };
        match tell {
            // The queue of the first would not be told of the ring's end.
            ReceiverMessage::Opened { ring, .. } if peer.rings.contains_key(&ring) => return false,
            ReceiverMessage::Opened { request, ring } => {
                let Some((from, to)) = peer.pending.remove(&request) else {
                    peer.say(SenderMessage::Close { ring });
                    return true;
                };
                let news = match open(ring, (from, to)) {
                    Ok(sender) => {
                        peer.rings.insert(ring, (from, to));
                        News::Opened(to, sender)
                    }
                    Err(error) => {
                        tracing::warn!(%error, host, "a ring cannot be used");
                        peer.say(SenderMessage::Close { ring });
                        News::Failed(to)
                    }
                };
                if let Some(port_queue) = state.port_queue(from) {
                    port_queue.tell(news);
                }
            }
            ReceiverMessage::Refused { request, reason } => {
                tracing::debug!(host, reason, "a ring was refused");
                let Some((from, to)) = peer.pending.remove(&request) else { return true };
                if let Some(port_queue) = state.port_queue(from) {
                    port_queue.tell(News::Failed(to));
                }
            }
            ReceiverMessage::Closed { ring } => {
                let Some((from, to)) = peer.rings.remove(&ring) else { return true };
                // Its queue has another one since, which this may be told after.
                let is_replaced = peer.rings.values().any(|ends| *ends == (from, to));
                let news = peer.news_of_loss(to);
                if let Some(port_queue) = state.port_queue(from).filter(|_| !is_replaced) {
                    port_queue.tell(news);
                }
            }
        }
        true
    }

    /// A node is gone: what was asked of it is answered by that, and its rings are of no more use.
    pub(super) fn peer_lost(&self, state: &mut State, host: &str) {
        let Some(peer) = state.peers.remove(host) else { return };
        for (from, to) in peer.pending.values() {
            if let Some(port_queue) = state.port_queue(*from) {
                port_queue.tell(News::Failed(*to));
            }
        }
        for (from, to) in peer.rings.values() {
            if let Some(port_queue) = state.port_queue(*from) {
                port_queue.tell(peer.news_of_loss(*to));
            }
        }
    }
}

/// The sender of a ring that came with a message.
fn sender(mut handles: Handles) -> std::io::Result<FrameSender> {
    let bytes = LAYOUT.bytes().unwrap_or(0) as u64;
    let memory = handles.shared_memory(bytes).map_err(std::io::Error::other)?;
    let mut event = || handles.event().map_err(std::io::Error::other);
    let events = FrameEvents { frames: event()?, room: event()? };
    handles.finish().map_err(std::io::Error::other)?;
    let sender = FrameSender::new(memory.region().clone(), events, LAYOUT);
    sender.ok_or_else(|| std::io::Error::other("its memory is no ring"))
}

impl NetworkService {
    /// Hears a node that asks for rings, until it is gone. The caller has a thread for it.
    pub fn attend(&self, incoming: IncomingConnection) {
        let host = incoming.hello.from.clone();
        if self.0.stations.named(&host).is_none_or(|(_, station)| station.kind != StationKind::Host)
        {
            return incoming.refuse(&format!("the rack has no host {host}"));
        }
        let Ok(stream) = incoming.accept() else { return };
        let asker = match stream.carrier() {
            None => {
                let Ok(packets) = stream.take_packets() else { return };
                drop(stream);
                let voice = Voice::Packets(packets.clone());
                let asker = Arc::new(AskingNode { host, voice });
                self.0.meet(&asker);
                self.0.hear_asker(&asker, &*packets);
                asker
            }
            Some(carrier) => {
                let Ok(outbox) = MessageQueue::new() else { return };
                let outbox = Arc::new(outbox);
                let asker = Arc::new(AskingNode::on_another_machine(host, outbox.clone()));
                self.0.meet(&asker);
                let now = Instant::now();
                let end = ReceivingEnd::new(&self.0, asker.clone(), carrier, outbox, now);
                let over = end.run();
                tracing::debug!(host = asker.host, %over, "frames of a host are not received any more");
                asker
            }
        };
        self.0.asker_lost(&asker);
    }
}

impl Shared {
    /// A node begins to ask. A host has one node: an earlier one, whose machine may be gone, is heard no more.
    pub(super) fn meet(&self, asker: &Arc<AskingNode>) {
        let before = self.lock().askers.insert(asker.host.clone(), Arc::downgrade(asker));
        if let Some(before) = before.and_then(|before| before.upgrade()) {
            before.voice.end();
        }
    }

    /// A node that asked is gone: its rings end.
    pub(super) fn asker_lost(&self, asker: &Arc<AskingNode>) {
        asker.voice.end();
        let mut state = self.lock();
        let is_its =
            |of: &Option<Arc<AskingNode>>| of.as_ref().is_some_and(|it| Arc::ptr_eq(it, asker));
        let rings: Vec<u64> = (state.rings.iter())
            .filter(|(_, ring)| is_its(&ring.asker))
            .map(|(number, _)| *number)
            .collect();
        rings.into_iter().for_each(|number| state.end_ring(number));
    }

    /// Hears a node that is passed memory, until it is gone.
    fn hear_asker(&self, asker: &Arc<AskingNode>, packets: &dyn PacketStream) {
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::new(0, 0));
        while let Ok(packet) = packets.receive(&mut buffer, &mut spin, None).and_then(Packet::whole)
        {
            let Some(ask) = buffer.get(..packet.length).and_then(decode) else {
                let host = &asker.host;
                tracing::warn!(host, "a node sent a malformed message and is disconnected");
                return;
            };
            let Some((answer, made)) = self.asked(asker, ask) else { continue };
            let said = match &made {
                Some(made) => asker.voice.say(answer, &made.beside()),
                None => asker.voice.say(answer, &[]),
            };
            if !said {
                // It asks anew when it is back.
                return;
            }
        }
    }

    /// A node asks for a ring, or is done with one: what it is to be answered, and the ring that was made.
    pub(super) fn asked(
        &self,
        asker: &Arc<AskingNode>,
        ask: SenderMessage,
    ) -> Option<(ReceiverMessage, Option<MadeRing>)> {
        let mut state = self.lock();
        match ask {
            SenderMessage::Open { request, from, queue: number, to } => {
                let ends = self.ends(&asker.host, &from, &to);
                let made = ends.and_then(|(station, to)| {
                    state.make_ring(self, Some(asker.clone()), PortQueueId { station, number }, to)
                });
                Some(match made {
                    Ok(made) => {
                        let ring = made.number;
                        (ReceiverMessage::Opened { request, ring }, Some(made))
                    }
                    Err(reason) => (ReceiverMessage::Refused { request, reason }, None),
                })
            }
            SenderMessage::Close { ring } => {
                let is_its = state.rings.get(&ring).and_then(|it| it.asker.as_ref());
                if is_its.is_some_and(|it| Arc::ptr_eq(it, asker)) {
                    state.end_ring(ring);
                }
                None
            }
        }
    }

    /// The stations that a node of `host` means: one of its own, and one of this host's.
    fn ends(&self, host: &str, from: &str, to: &str) -> Result<(usize, usize), String> {
        let named = |name: &str, host: &str| {
            let found = self.stations.named(name).filter(|(_, station)| station.host == host);
            found.map(|(nth, _)| nth).ok_or_else(|| format!("{host} has no port {name}"))
        };
        let ends = (named(from, host)?, named(to, &self.host)?);
        match self.switch.may_meet(ends.0, ends.1) {
            true => Ok(ends),
            false => Err(format!("{from} and {to} are kept apart")),
        }
    }
}

#[cfg(test)]
mod tests;
