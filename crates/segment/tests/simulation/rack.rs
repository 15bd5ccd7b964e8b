//! Three hosts with their directories, sessions, objects and what is on its way between them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rackbus_fabric::FabricHandle;
use rackbus_segment::directory::{AttachedObject, DirectorySettings, HostRange, LinePart, Loss};
use rackbus_segment::message::{
    ConnectionChange, ConnectorMessage, Notice, OwnerMessage, Reply, SessionEvent, SessionRequest,
    VERSION,
};
use rackbus_segment::{
    Directory, DirectoryAction, Handle, NodeId, ObjectId, Objects, Recipient, SessionId,
};

use super::{NODES, Policy};

const EXPORT: u64 = 1 << 20;

/// A host's objects, and the whole rack's record of them: an object is the same wherever it goes.
#[derive(Debug, Default)]
pub struct Store {
    pub next: u64,
    pub live: BTreeSet<ObjectId>,
    pub emptied: BTreeSet<ObjectId>,
}

impl Store {
    fn make(&mut self) -> ObjectId {
        self.next += 1;
        let id = ObjectId(self.next);
        self.live.insert(id);
        id
    }
}

impl Objects for Store {
    fn memory(&mut self, _size: u64) -> Result<ObjectId, String> {
        Ok(self.make())
    }
    fn event(&mut self) -> Result<ObjectId, String> {
        Ok(self.make())
    }
    fn line(&mut self, _part: LinePart) -> Result<ObjectId, String> {
        Ok(self.make())
    }
    fn rung(&self, _line: ObjectId) -> Result<u32, String> {
        Ok(0)
    }
}

/// What is on its way between two nodes, each direction of each conversation in its order.
#[derive(Debug, Clone)]
pub enum Carried {
    Ask(ConnectorMessage),
    Tell(OwnerMessage, Vec<AttachedObject>),
}

/// What a session knows, and what memory it was ever handed.
#[derive(Debug, Default)]
pub struct Client {
    /// Answers what is moved; some do not.
    pub answers: bool,
    pub segments: Vec<Handle>,
    pub connections: Vec<Handle>,
    pub extents: Vec<Handle>,
    pub interrupts: Vec<Handle>,
    /// The memory that it has under each handle now.
    pub memory: BTreeMap<Handle, ObjectId>,
    /// Memory that it was handed and that is not its any more.
    pub former: BTreeSet<ObjectId>,
    /// Memory that it may still read, whose owner has gone.
    pub left: BTreeSet<ObjectId>,
    pub waiting: usize,
    pub started: BTreeSet<Handle>,
}

pub struct Rack {
    pub policy: Policy,
    pub now: u64,
    /// When each node looked at the clock last to do what is due.
    pub ticked: BTreeMap<NodeId, u64>,
    pub directories: BTreeMap<NodeId, Directory>,
    pub stores: BTreeMap<NodeId, Store>,
    pub clients: BTreeMap<(NodeId, SessionId), Client>,
    pub carried: BTreeMap<(NodeId, NodeId, bool), VecDeque<Carried>>,
    pub copies: VecDeque<(NodeId, Handle)>,
    /// Conversations that ended, of which the first node has yet to hear: with an old policy.
    pub unheard: VecDeque<(NodeId, NodeId)>,
    pub next_session: u64,
    /// Whether a conversation with an owner's node is lost that lives.
    pub owners_live: bool,
    /// What was wrong between two checks.
    pub wrong: Option<String>,
}

impl Rack {
    pub fn new(policy: Policy) -> Rack {
        let mut rack = Rack {
            policy,
            now: 0,
            ticked: BTreeMap::new(),
            directories: BTreeMap::new(),
            stores: BTreeMap::new(),
            clients: BTreeMap::new(),
            carried: BTreeMap::new(),
            copies: VecDeque::new(),
            unheard: VecDeque::new(),
            next_session: 1,
            owners_live: false,
            wrong: None,
        };
        for node in NODES {
            rack.start(node);
            // Objects of different hosts have different numbers, so that one can be followed.
            rack.stores.insert(node, Store { next: u64::from(node) << 32, ..Store::default() });
        }
        rack
    }

    fn start(&mut self, node: NodeId) {
        let range = |node: NodeId| HostRange { base: u64::from(node) << 32, size: EXPORT };
        let settings = DirectorySettings {
            node,
            hosts: NODES.iter().map(|node| (*node, format!("h{node}"))).collect(),
            range: range(node),
            ranges: NODES.iter().map(|node| (*node, range(*node))).collect(),
            rules: Default::default(),
            machines: false,
        };
        let fabric = FabricHandle::of_hosts(settings.hosts.values().map(String::as_str)).unwrap();
        self.directories.insert(node, Directory::new(settings, fabric));
    }

    fn with(
        &mut self,
        node: NodeId,
        act: impl FnOnce(&mut Directory, u64, &mut Store) -> Vec<DirectoryAction>,
    ) {
        let (Some(directory), Some(store)) =
            (self.directories.get_mut(&node), self.stores.get_mut(&node))
        else {
            return;
        };
        let now = match self.policy {
            Policy::TimeOfTheLastTick => self.ticked.get(&node).copied().unwrap_or_default(),
            Policy::Current | Policy::EndsTheNextConversation => self.now,
        };
        let outputs = act(directory, now, store);
        self.perform(node, outputs);
    }

    /// Each node does what is due, if anything is.
    pub fn tick(&mut self) {
        for node in NODES {
            if self.directories[&node].next_tick().is_none_or(|due| due > self.now) {
                continue;
            }
            self.ticked.insert(node, self.now);
            let (Some(directory), Some(store)) =
                (self.directories.get_mut(&node), self.stores.get_mut(&node))
            else {
                continue;
            };
            let outputs = directory.tick(self.now, store);
            self.look_who_is_cut_off(node, &outputs);
            self.perform(node, outputs);
        }
    }

    /// Time passes, in which all arrives that is under way: who answers at all has answered before more of it passes.
    pub fn pass(&mut self, milliseconds: u64) {
        let until = self.now + milliseconds;
        for round in 0.. {
            assert!(round < 100_000, "it does not come to rest");
            if self.deliver(round) {
                continue;
            }
            match NODES.iter().filter_map(|node| self.directories[node].next_tick()).min() {
                Some(due) if due <= until => self.now = self.now.max(due),
                _ => break,
            }
            self.tick();
        }
        self.now = until;
    }

    fn perform(&mut self, node: NodeId, outputs: Vec<DirectoryAction>) {
        for output in outputs {
            match output {
                DirectoryAction::Send(Recipient::Reply(session, reply), attached) => {
                    self.replied((node, session), reply, &attached);
                }
                DirectoryAction::Send(Recipient::Event(session, event), attached) => {
                    self.happened((node, session), event, &attached);
                }
                DirectoryAction::Send(Recipient::Ask(to, ask), _) => {
                    assert_ne!(to, node, "a node does not ask itself aloud");
                    self.carried.entry((node, to, true)).or_default().push_back(Carried::Ask(ask));
                }
                DirectoryAction::Send(Recipient::Tell(to, tell), attached) => {
                    let queue = self.carried.entry((node, to, false)).or_default();
                    queue.push_back(Carried::Tell(tell, attached));
                }
                DirectoryAction::Copy { ticket, .. } => self.copies.push_back((node, ticket)),
                DirectoryAction::Empty { object, length, .. } => {
                    // Single pages of extents are emptied as well: those have no holders here.
                    if length > 4096 {
                        self.stores.get_mut(&node).unwrap().emptied.insert(object);
                    }
                }
                DirectoryAction::Forget(object) => {
                    let store = self.stores.get_mut(&node).unwrap();
                    assert!(store.live.remove(&object), "{object:?} is forgotten twice");
                }
                DirectoryAction::Cut(session) => self.end_session((node, session)),
            }
        }
    }

    fn replied(&mut self, who: (NodeId, SessionId), reply: Reply, attached: &[AttachedObject]) {
        let Some(client) = self.clients.get_mut(&who) else { return };
        client.waiting = client.waiting.checked_sub(1).expect("a reply that nobody asked for");
        let memory = attached.first().map(|it| it.object);
        match reply {
            Reply::Created { segment, .. } => {
                client.segments.push(segment);
                client.memory.extend(memory.map(|object| (segment, object)));
            }
            Reply::Extent { extent, .. } => {
                client.extents.push(extent);
                client.memory.extend(memory.map(|object| (extent, object)));
            }
            Reply::Connected(connected) => {
                client.connections.push(connected.connection);
                // The line of an interrupt that has ended rings for nobody.
                let memory = memory.filter(|_| connected.size > 0);
                client.memory.extend(memory.map(|object| (connected.connection, object)));
            }
            Reply::Pages { connection, lengths, .. } => {
                assert_eq!(lengths.len(), attached.len());
                client.connections.push(connection);
            }
            Reply::Interrupt { interrupt, .. } => client.interrupts.push(interrupt),
            Reply::Started { ticket } => {
                client.started.insert(ticket);
            }
            _ => {}
        }
    }

    fn happened(
        &mut self,
        who: (NodeId, SessionId),
        event: SessionEvent,
        attached: &[AttachedObject],
    ) {
        let Some(client) = self.clients.get_mut(&who) else { return };
        let notice = match event {
            SessionEvent::Freeze { ticket, keeper, .. } => Some(Notice::Frozen { ticket, keeper }),
            SessionEvent::Adopt { ticket, keeper, .. } => {
                let whole = !client.extents.contains(&keeper);
                if let Some(old) = client.memory.insert(keeper, attached[0].object)
                    && whole
                {
                    client.former.insert(old);
                }
                Some(Notice::Adopted { ticket, keeper })
            }
            SessionEvent::Remote { connection, change: ConnectionChange::Revoked } => {
                client.former.extend(client.memory.remove(&connection));
                None
            }
            SessionEvent::Remote { connection, change } if change.is_final() => {
                let memory = client.memory.remove(&connection);
                client.left.extend(memory.filter(|_| !self.owners_live));
                None
            }
            SessionEvent::Finished { ticket, .. } => {
                client.started.remove(&ticket);
                None
            }
            _ => None,
        };
        if let Some(notice) = notice.filter(|_| client.answers) {
            let (node, session) = who;
            self.with(node, |directory, now, store| directory.noticed(now, session, notice, store));
        }
    }

    pub fn ask(&mut self, who: (NodeId, SessionId), request: SessionRequest) {
        let Some(client) = self.clients.get_mut(&who) else { return };
        client.waiting += 1;
        let (node, session) = who;
        self.with(node, |directory, now, store| directory.request(now, session, request, store));
    }

    pub fn new_session(&mut self, node: NodeId, answers: bool) {
        let session = SessionId(self.next_session);
        self.next_session += 1;
        let client = Client { answers, ..Client::default() };
        self.clients.insert((node, session), client);
        self.ask((node, session), SessionRequest::Hello { version: VERSION });
    }

    pub fn end_session(&mut self, who: (NodeId, SessionId)) {
        if self.clients.remove(&who).is_some() {
            let (node, session) = who;
            self.with(node, |directory, now, store| directory.closed(now, session, store));
        }
    }

    /// A node dies, and starts anew.
    pub fn crash(&mut self, node: NodeId) {
        self.clients.retain(|(on, _), _| *on != node);
        self.carried.retain(|(from, to, _), _| *from != node && *to != node);
        self.copies.retain(|(on, _)| *on != node);
        let store = self.stores.get_mut(&node).unwrap();
        // What its processes had is theirs alone from now on, and nobody is given it again.
        store.emptied.extend(std::mem::take(&mut store.live));
        self.start(node);
        for other in NODES.into_iter().filter(|other| *other != node) {
            self.with(other, |directory, now, store| {
                directory.owner_gone(now, node, Loss::Dead, store)
            });
            self.connector_gone(other, node);
        }
    }

    /// A conversation in which `connector` asks and `owner` answers is lost with all that was on its way, and another
    /// one is there at once.
    pub fn lose_conversation(&mut self, connector: NodeId, owner: NodeId) {
        self.carried.remove(&(connector, owner, true));
        self.carried.remove(&(owner, connector, false));
        // What their processes still have mapped is not the end of its owner: it may be in use there.
        self.owners_live = true;
        self.with(connector, |directory, now, store| {
            directory.owner_gone(now, owner, Loss::OutOfReach, store)
        });
        self.owners_live = false;
        self.connector_gone(owner, connector);
    }

    /// The conversation in which `node` asked has ended.
    fn connector_gone(&mut self, owner: NodeId, node: NodeId) {
        if self.policy == Policy::EndsTheNextConversation {
            return self.unheard.push_back((owner, node));
        }
        self.with(owner, |directory, now, store| directory.connector_gone(now, node, store));
    }

    /// With an old policy, that an earlier conversation ended is heard when the next one has begun.
    fn hear_ends(&mut self) {
        while let Some((owner, node)) = self.unheard.pop_front() {
            self.with(owner, |directory, now, store| directory.connector_gone(now, node, store));
        }
    }

    /// Delivers one message, the `choice`th of what could be; false when there is none.
    pub fn deliver(&mut self, choice: usize) -> bool {
        let ready: Vec<_> = self
            .carried
            .iter()
            .filter(|(_, queue)| !queue.is_empty())
            .map(|(key, _)| *key)
            .collect();
        let count = ready.len() + usize::from(!self.copies.is_empty());
        if count == 0 {
            self.hear_ends();
            return false;
        }
        let Some(key) = ready.get(choice % count) else {
            let (node, ticket) = self.copies.pop_front().unwrap();
            self.with(node, |directory, now, store| directory.copied(now, ticket, Ok(()), store));
            return true;
        };
        let (from, to, _) = *key;
        match self.carried.get_mut(key).unwrap().pop_front().unwrap() {
            Carried::Ask(ask) => {
                self.with(to, |directory, now, store| directory.asked(now, from, ask, store));
                self.hear_ends();
            }
            Carried::Tell(tell, attached) => {
                self.with(to, |directory, now, store| {
                    directory.told(now, from, tell, attached, store)
                });
            }
        }
        true
    }

    /// Lets everything happen that is under way.
    pub fn rest(&mut self) {
        for round in 0.. {
            assert!(round < 100_000, "it does not come to rest");
            if self.deliver(round) {
                continue;
            }
            let due = NODES.iter().filter_map(|node| self.directories[node].next_tick()).min();
            let Some(due) = due else { return };
            self.now = self.now.max(due);
            self.tick();
        }
    }
}
