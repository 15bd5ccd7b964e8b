//! Three hosts' directories under random requests, delays and deaths: what holds whenever all is
//! at rest, and that it comes to rest.
//!
//! The simulation is the shells: it makes objects (numbers), carries messages in their order but
//! at any time, copies and empties memory (noting it), and ends sessions and nodes. Sessions do what
//! the library does: they answer what is moved. Some never do. A failing seed prints the command
//! that replays it; `RACKBUS_SEEDS` says how many seeds to run.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rackbus_fabric::FabricHandle;
use rackbus_seeds::{Random, Simulation};
use rackbus_segment::directory::{AttachedObject, DirectorySettings, HostRange, LinePart, Loss};
use rackbus_segment::message::{
    ConnectionChange, ConnectorMessage, InterruptKind, Notice, OwnerMessage, Reply, SegmentAccess,
    SegmentKind, SessionEvent, SessionRequest, TargetKind, VERSION, Withdrawal,
};
use rackbus_segment::{
    Directory, DirectoryAction, Handle, NodeId, ObjectId, Objects, Recipient, SessionId,
};

const NODES: [NodeId; 3] = [4, 8, 12];
const EXPORT: u64 = 1 << 20;
const SEEDS: u64 = 100_000;

/// A host's objects, and the whole rack's record of them: an object is the same wherever it goes.
#[derive(Debug, Default)]
struct Store {
    next: u64,
    live: BTreeSet<ObjectId>,
    emptied: BTreeSet<ObjectId>,
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
enum Carried {
    Ask(ConnectorMessage),
    Tell(OwnerMessage, Vec<AttachedObject>),
}

/// What a session knows, and what memory it was ever handed.
#[derive(Debug, Default)]
struct Client {
    /// Answers what is moved; some do not.
    answers: bool,
    segments: Vec<Handle>,
    connections: Vec<Handle>,
    extents: Vec<Handle>,
    interrupts: Vec<Handle>,
    /// The memory that it has under each handle now.
    memory: BTreeMap<Handle, ObjectId>,
    /// Memory that it was handed and that is not its any more.
    former: BTreeSet<ObjectId>,
    /// Memory that it may still read, whose owner has gone.
    left: BTreeSet<ObjectId>,
    waiting: usize,
    started: BTreeSet<Handle>,
}

struct Rack {
    now: u64,
    directories: BTreeMap<NodeId, Directory>,
    stores: BTreeMap<NodeId, Store>,
    clients: BTreeMap<(NodeId, SessionId), Client>,
    carried: BTreeMap<(NodeId, NodeId, bool), VecDeque<Carried>>,
    copies: VecDeque<(NodeId, Handle)>,
    next_session: u64,
}

impl Rack {
    fn new() -> Rack {
        let mut rack = Rack {
            now: 0,
            directories: BTreeMap::new(),
            stores: BTreeMap::new(),
            clients: BTreeMap::new(),
            carried: BTreeMap::new(),
            copies: VecDeque::new(),
            next_session: 1,
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
        let outputs = act(directory, self.now, store);
        self.perform(node, outputs);
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
                client.left.extend(client.memory.remove(&connection));
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

    fn ask(&mut self, who: (NodeId, SessionId), request: SessionRequest) {
        let Some(client) = self.clients.get_mut(&who) else { return };
        client.waiting += 1;
        let (node, session) = who;
        self.with(node, |directory, now, store| directory.request(now, session, request, store));
    }

    fn new_session(&mut self, node: NodeId, answers: bool) {
        let session = SessionId(self.next_session);
        self.next_session += 1;
        let client = Client { answers, ..Client::default() };
        self.clients.insert((node, session), client);
        self.ask((node, session), SessionRequest::Hello { version: VERSION });
    }

    fn end_session(&mut self, who: (NodeId, SessionId)) {
        if self.clients.remove(&who).is_some() {
            let (node, session) = who;
            self.with(node, |directory, now, store| directory.closed(now, session, store));
        }
    }

    /// A node dies, and starts anew.
    fn crash(&mut self, node: NodeId) {
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
            self.with(other, |directory, now, store| directory.connector_gone(now, node, store));
        }
    }

    /// Delivers one message, the `choice`th of what could be; false when there is none.
    fn deliver(&mut self, choice: usize) -> bool {
        let ready: Vec<_> = self
            .carried
            .iter()
            .filter(|(_, queue)| !queue.is_empty())
            .map(|(key, _)| *key)
            .collect();
        let count = ready.len() + usize::from(!self.copies.is_empty());
        if count == 0 {
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
    fn rest(&mut self) {
        for round in 0.. {
            assert!(round < 100_000, "it does not come to rest");
            if self.deliver(round) {
                continue;
            }
            let due = NODES.iter().filter_map(|node| self.directories[node].next_tick()).min();
            let Some(due) = due else { return };
            self.now = self.now.max(due);
            for node in NODES {
                self.with(node, |directory, now, store| directory.tick(now, store));
            }
        }
    }

    /// What holds at rest.
    fn check(&self) {
        let emptied: BTreeSet<ObjectId> =
            self.stores.values().flat_map(|store| store.emptied.iter().copied()).collect();
        for (who, client) in &self.clients {
            assert_eq!(client.waiting, 0, "{who:?} waits for a reply");
            assert!(client.started.is_empty(), "{who:?} waits for the end of a move");
            // I4: of what was taken away, nothing is left where it was.
            for object in &client.former {
                assert!(emptied.contains(object), "{who:?} still has {object:?}");
            }
            for object in client.former.union(&client.left) {
                for (other, mine) in &self.clients {
                    let used = mine.memory.values().any(|memory| memory == object);
                    assert!(!used, "{object:?}, not {who:?}'s any more, is in use by {other:?}");
                }
            }
            // Nobody was left behind in memory that was emptied.
            for (handle, object) in &client.memory {
                assert!(!emptied.contains(object), "{who:?} has lost {object:?} of {handle:?}");
            }
        }
    }
}

/// Something that a session, or fate, does.
#[derive(Debug, Clone)]
enum Step {
    Session { node: usize, answers: bool },
    End { who: usize },
    Crash { node: usize },
    Deliver { choice: usize, times: usize },
    Create { who: usize, id: u32, group: bool },
    Offer { who: usize, which: usize },
    Withdraw { who: usize, which: usize, how: u8 },
    Remove { who: usize, which: usize },
    Connect { who: usize, node: usize, id: u32, group: bool },
    Disconnect { who: usize, which: usize },
    Rule { who: usize, id: u32, node: usize, share: u8 },
    Interrupt { who: usize, number: u32, data: bool },
    Trigger { who: usize, node: usize, number: u32, data: bool },
    Allocate { who: usize },
    Pages { who: usize, which: usize, page: u64, node: usize, open: bool },
    Reach { who: usize, node: usize, page: u64 },
}

/// What somebody does next; the numbers are out of a hundred.
fn step(random: &mut Random) -> Step {
    let (who, which) = (random.below(8), random.below(4));
    let (node, id) = (random.below(3), 1 + random.below(3) as u32);
    let mut chance = |percent| random.below(100) < percent;
    let (group, data, answers) = (chance(20), chance(50), chance(90));
    let number = id.min(2);
    match random.below(58) {
        0..3 => Step::Session { node, answers },
        3 => Step::End { who },
        4 => Step::Crash { node },
        5..17 => Step::Deliver { choice: random.next() as usize, times: 1 + random.below(5) },
        17..21 => Step::Create { who, id, group },
        21..26 => Step::Offer { who, which },
        26..29 => Step::Withdraw { who, which, how: random.below(3) as u8 },
        29 => Step::Remove { who, which },
        30..38 => Step::Connect { who, node, id, group },
        38..40 => Step::Disconnect { who, which },
        40..43 => Step::Rule { who, id, node, share: random.below(3) as u8 },
        43 => Step::Interrupt { who, number, data },
        44..46 => Step::Trigger { who, node, number, data },
        46..48 => Step::Allocate { who },
        48..55 => {
            let page = random.below(4) as u64;
            Step::Pages { who, which, page, node, open: data }
        }
        _ => Step::Reach { who, node, page: random.below(8) as u64 },
    }
}

impl Rack {
    fn client(&self, nth: usize) -> Option<(NodeId, SessionId)> {
        self.clients.keys().nth(nth % self.clients.len().max(1)).copied()
    }

    fn one_of(
        &self,
        who: usize,
        which: usize,
        of: fn(&Client) -> &Vec<Handle>,
    ) -> Option<((NodeId, SessionId), Handle)> {
        let who = self.client(who)?;
        let handles = of(&self.clients[&who]);
        Some((who, *handles.get(which % handles.len().max(1))?))
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Session { node, answers } => self.new_session(NODES[node], answers),
            Step::End { who } => {
                if let Some(who) = self.client(who) {
                    self.end_session(who);
                }
            }
            Step::Crash { node } => self.crash(NODES[node]),
            Step::Deliver { choice, times } => {
                for nth in 0..times {
                    self.deliver(choice.wrapping_add(nth));
                }
            }
            _ => {
                if let Some((who, request)) = self.request(step) {
                    // What is released is not the client's any more, whatever is answered.
                    if let SessionRequest::Disconnect { connection: handle }
                    | SessionRequest::Remove { segment: handle } = request
                    {
                        let client = self.clients.get_mut(&who).unwrap();
                        client.memory.remove(&handle);
                        client.connections.retain(|it| *it != handle);
                        client.segments.retain(|it| *it != handle);
                    }
                    self.ask(who, request);
                }
            }
        }
    }

    fn request(&self, step: &Step) -> Option<((NodeId, SessionId), SessionRequest)> {
        let segments: fn(&Client) -> &Vec<Handle> = |client| &client.segments;
        let kind = |data| if data { InterruptKind::Data } else { InterruptKind::Plain };
        Some(match *step {
            Step::Create { who, id, group } => {
                let kind = if group { SegmentKind::Group } else { SegmentKind::Shared };
                let size = 8192;
                (self.client(who)?, SessionRequest::CreateSegment { id, choose: false, size, kind })
            }
            Step::Offer { who, which } => {
                let (who, segment) = self.one_of(who, which, segments)?;
                (who, SessionRequest::SetAvailable { segment })
            }
            Step::Withdraw { who, which, how } => {
                let (who, segment) = self.one_of(who, which, segments)?;
                let how = [Withdrawal::Quiet, Withdrawal::Notify, Withdrawal::Force][how as usize];
                (who, SessionRequest::SetUnavailable { segment, how })
            }
            Step::Remove { who, which } => {
                let (who, segment) = self.one_of(who, which, segments)?;
                (who, SessionRequest::Remove { segment })
            }
            Step::Connect { who, node, id, group } => {
                let what = if group { TargetKind::Group } else { TargetKind::Segment };
                let node = NODES[node];
                (self.client(who)?, SessionRequest::Connect { node, id, timeout_ms: 1_000, what })
            }
            Step::Disconnect { who, which } => {
                let (who, connection) = self.one_of(who, which, |client| &client.connections)?;
                (who, SessionRequest::Disconnect { connection })
            }
            Step::Rule { who, id, node, share } => {
                let share = [SegmentAccess::None, SegmentAccess::Read, SegmentAccess::Write]
                    [share as usize];
                let node = Some(NODES[node]);
                (self.client(who)?, SessionRequest::SetShare { first: id, last: id, node, share })
            }
            Step::Interrupt { who, number, data } => {
                let (kind, number) = (kind(data), Some(number));
                (self.client(who)?, SessionRequest::CreateInterrupt { kind, number, shared: !data })
            }
            Step::Trigger { who, node, number, data } => {
                let (node, kind) = (NODES[node], kind(data));
                let timeout_ms = 1_000;
                (
                    self.client(who)?,
                    SessionRequest::ConnectInterrupt { node, kind, number, timeout_ms },
                )
            }
            Step::Allocate { who } => {
                (self.client(who)?, SessionRequest::Allocate { size: 4 * 4096 })
            }
            Step::Pages { who, which, page, node, open } => {
                let (who, extent) = self.one_of(who, which, |client| &client.extents)?;
                let (offset, length) = (page * 4096, 4096);
                let request = match open {
                    true => {
                        let (node, write) = (NODES[node], true);
                        SessionRequest::OpenPages { extent, offset, length, node, write }
                    }
                    false => SessionRequest::ClosePages { extent, offset, length },
                };
                (who, request)
            }
            Step::Reach { who, node, page } => {
                let address = (u64::from(NODES[node]) << 32) + page * 4096;
                (self.client(who)?, SessionRequest::MapPages { address, length: 4096 })
            }
            _ => return None,
        })
    }
}

fn run(seed: u64, traced: bool) -> Result<(), String> {
    let mut random = Random(seed);
    let mut rack = Rack::new();
    for node in NODES {
        rack.new_session(node, true);
        rack.new_session(node, true);
    }
    for nth in 0..1 + random.below(120) {
        let step = step(&mut random);
        if traced {
            println!("{nth:>4}  {step:?}");
        }
        rack.take(&step);
        if nth % 40 == 39 {
            rack.rest();
            rack.check();
        }
    }
    rack.rest();
    rack.check();
    // Nothing is left of anything when all are gone.
    let all: Vec<_> = rack.clients.keys().copied().collect();
    for who in all {
        rack.end_session(who);
    }
    rack.rest();
    for (node, store) in &rack.stores {
        assert!(store.live.is_empty(), "host {node} keeps {:?}", store.live);
    }
    Ok(())
}

#[test]
fn what_is_taken_away_is_gone_and_what_is_left_is_whole() {
    Simulation { test: "-p rackbus-segment --test simulation", usual: SEEDS }.run(run);
}
