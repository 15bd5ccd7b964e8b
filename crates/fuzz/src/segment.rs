//! What processes and other nodes say to a host's segment service: a directory that is fed with
//! their messages, whatever they are, and a shell that does what it says.
//!
//! Messages are read from the input in their own encoding, so that most mutations are messages
//! again. Peers answer what they are asked when the input says so, as orderly ones do. Memory is let
//! go of once, nothing is sent that is not there, and when all are gone nothing is left.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rackbus_fabric::FabricHandle;
use rackbus_segment::directory::{AttachedObject, DirectorySettings, HostRange, LinePart, Loss};
use rackbus_segment::message::{
    ConnectorMessage, InterruptKind, LockReply, Notice, OwnerMessage, PeerReply, Question, Refusal,
    Reply, SegmentAccess, SegmentKind, SessionEvent, SessionRequest, TargetKind, VERSION,
    Withdrawal, decode, encode,
};
use rackbus_segment::{
    Directory, DirectoryAction, Handle, NodeId, ObjectId, Objects, Recipient, SessionId,
};
use serde::{Serialize, de::DeserializeOwned};

use crate::input::Input;

/// This host, and two others.
const NODES: [NodeId; 3] = [4, 8, 12];
const EXPORT: u64 = 1 << 20;
/// Messages of one input.
const MOST: usize = 200;

#[derive(Debug, Default)]
struct Store {
    next: u64,
    live: BTreeSet<ObjectId>,
    /// Nothing more can be made.
    full: bool,
}

impl Store {
    fn make(&mut self) -> Result<ObjectId, String> {
        if self.full {
            return Err("no memory".to_owned());
        }
        Ok(self.add())
    }

    fn add(&mut self) -> ObjectId {
        self.next += 1;
        let id = ObjectId(self.next);
        self.live.insert(id);
        id
    }
}

impl Objects for Store {
    fn memory(&mut self, _: u64) -> Result<ObjectId, String> {
        self.make()
    }
    fn event(&mut self) -> Result<ObjectId, String> {
        self.make()
    }
    fn line(&mut self, _: LinePart) -> Result<ObjectId, String> {
        self.make()
    }
    fn rung(&self, line: ObjectId) -> Result<u32, String> {
        self.live.get(&line).map(|_| 7).ok_or_else(|| format!("{line:?} is not there"))
    }
}

/// Something that an orderly peer answers.
#[derive(Debug)]
enum Open {
    /// A session, to what it was told.
    Notice(SessionId, Notice),
    /// A connector's node asks.
    Ask(NodeId, ConnectorMessage),
    /// An owner's node is asked.
    Question(NodeId, u64, Question),
    /// A copy is to be made.
    Copy(Handle),
    /// Memory is to be emptied.
    Empty(Handle),
}

struct Host {
    directory: Directory,
    store: Store,
    now: u64,
    open: VecDeque<Open>,
    /// The processes' sessions: their numbers, of which none is used twice.
    sessions: [SessionId; 4],
    /// Replies that each session waits for: those to [`SessionRequest`]s, of which every one has one.
    waiting: BTreeMap<SessionId, u64>,
}

impl Host {
    fn new() -> Host {
        let range = |node: NodeId| HostRange { base: u64::from(node) << 32, size: EXPORT };
        let settings = DirectorySettings {
            node: NODES[0],
            hosts: NODES.iter().map(|node| (*node, format!("h{node}"))).collect(),
            range: range(NODES[0]),
            ranges: NODES.iter().map(|node| (*node, range(*node))).collect(),
            rules: Default::default(),
            machines: false,
        };
        let fabric = FabricHandle::of_hosts(settings.hosts.values().map(String::as_str)).unwrap();
        Host {
            directory: Directory::new(settings, fabric),
            store: Store::default(),
            now: 0,
            open: VecDeque::new(),
            sessions: [1, 2, 3, 4].map(SessionId),
            waiting: BTreeMap::new(),
        }
    }

    fn with(&mut self, act: impl FnOnce(&mut Directory, u64, &mut Store) -> Vec<DirectoryAction>) {
        let outputs = act(&mut self.directory, self.now, &mut self.store);
        let mut cut = Vec::new();
        for output in outputs {
            match output {
                DirectoryAction::Send(to, attached) => {
                    for it in &attached {
                        assert!(self.store.live.contains(&it.object), "{it:?} is sent and gone");
                    }
                    self.sent(to, &attached);
                }
                DirectoryAction::Copy { ticket, .. } => self.open.push_back(Open::Copy(ticket)),
                DirectoryAction::Empty { job, .. } => self.open.extend(job.map(Open::Empty)),
                DirectoryAction::Forget(object) => {
                    assert!(self.store.live.remove(&object), "{object:?} is forgotten twice");
                }
                DirectoryAction::Cut(session) => cut.push(session),
            }
        }
        cut.into_iter().for_each(|session| self.close(session));
    }

    fn sent(&mut self, to: Recipient, attached: &[AttachedObject]) {
        match to {
            Recipient::Reply(session, reply) => {
                assert_eq!(decode::<Reply>(&encode(&reply)).as_ref(), Some(&reply));
                if !self.sessions.contains(&session) {
                    // The shell has nobody to give it to.
                    return;
                }
                let waiting = self.waiting.get_mut(&session).filter(|count| **count > 0);
                *waiting.unwrap_or_else(|| panic!("nobody asked for {reply:?}")) -= 1;
                let given = match reply {
                    Reply::Pages { lengths, .. } => lengths.len(),
                    _ => attached.len(),
                };
                assert_eq!(given, attached.len(), "pages without their memory");
            }
            Recipient::Event(session, event) => {
                assert_eq!(decode::<SessionEvent>(&encode(&event)).as_ref(), Some(&event));
                let notice = match event {
                    SessionEvent::Freeze { ticket, keeper, .. } => {
                        Notice::Frozen { ticket, keeper }
                    }
                    SessionEvent::Adopt { ticket, keeper, .. } => {
                        Notice::Adopted { ticket, keeper }
                    }
                    _ => return,
                };
                self.open.push_back(Open::Notice(session, notice));
            }
            Recipient::Ask(node, ask) => {
                assert_ne!(node, NODES[0], "a node does not ask itself aloud");
                assert_eq!(decode::<ConnectorMessage>(&encode(&ask)).as_ref(), Some(&ask));
                if let ConnectorMessage::Question { request, what, .. } = ask {
                    self.open.push_back(Open::Question(node, request, what));
                }
            }
            Recipient::Tell(node, tell) => {
                assert_ne!(node, NODES[0], "a node does not tell itself aloud");
                assert_eq!(decode::<OwnerMessage>(&encode(&tell)).as_ref(), Some(&tell));
                let ask = match tell {
                    OwnerMessage::Freeze { ticket, connection, .. } => {
                        ConnectorMessage::Frozen { ticket, connection }
                    }
                    OwnerMessage::Adopt { ticket, connection, .. } => {
                        ConnectorMessage::Adopted { ticket, connection }
                    }
                    _ => return,
                };
                self.open.push_back(Open::Ask(node, ask));
            }
        }
    }

    fn close(&mut self, session: SessionId) {
        self.waiting.remove(&session);
        if let Some(own) = self.sessions.iter_mut().find(|own| **own == session) {
            // Its process may attach again.
            own.0 += 4;
        }
        self.with(|directory, now, store| directory.closed(now, session, store));
    }

    fn request(&mut self, session: SessionId, request: SessionRequest) {
        *self.waiting.entry(session).or_default() += 1;
        self.with(|directory, now, store| directory.request(now, session, request, store));
    }

    /// As the shell does: what came along is there while it is dealt with.
    fn tell(&mut self, node: NodeId, tell: OwnerMessage, count: u8) {
        let mut object = || AttachedObject { object: self.store.add(), write: count & 4 == 0 };
        let attached: Vec<AttachedObject> = (0..count & 3).map(|_| object()).collect();
        let taken = attached.clone();
        self.with(|directory, now, store| directory.told(now, node, tell, attached, store));
        for it in taken {
            assert!(self.store.live.remove(&it.object), "{it:?} was the shell's to forget");
        }
    }

    /// An orderly peer, or the shell, does what it was asked for.
    fn obey(&mut self, input: &mut Input<'_>) {
        match self.open.pop_front() {
            None => {}
            Some(Open::Notice(session, notice)) => {
                self.with(|directory, now, store| directory.noticed(now, session, notice, store));
            }
            Some(Open::Ask(node, ask)) => {
                self.with(|directory, now, store| directory.asked(now, node, ask, store));
            }
            Some(Open::Question(node, request, what)) => {
                let how = input.u8();
                let (answer, count) = grant(&what, how);
                self.tell(node, OwnerMessage::Answer { request, answer }, count);
            }
            Some(Open::Copy(ticket)) => {
                let outcome = self.outcome(input);
                self.with(|directory, now, store| directory.copied(now, ticket, outcome, store));
            }
            Some(Open::Empty(job)) => {
                let outcome = self.outcome(input);
                self.with(|directory, now, store| directory.emptied(now, job, outcome, store));
            }
        }
    }

    fn outcome(&self, input: &mut Input<'_>) -> Result<(), String> {
        if input.u8() & 7 == 7 { Err("it failed".to_owned()) } else { Ok(()) }
    }

    /// All go, and what is under way comes to its end: nothing is left.
    fn end(&mut self) {
        let sessions: Vec<SessionId> = self.waiting.keys().copied().collect();
        sessions.into_iter().for_each(|session| self.close(session));
        for node in [NODES[1], NODES[2]] {
            self.with(|d, now, store| d.owner_gone(now, node, Loss::Dead, store));
            self.with(|d, now, store| d.connector_gone(now, node, store));
        }
        for round in 0.. {
            assert!(round < 10_000, "it does not come to rest");
            if !self.open.is_empty() {
                self.obey(&mut Input::new(&[]));
            } else if let Some(due) = self.directory.next_tick() {
                self.now = self.now.max(due);
                self.with(|directory, now, store| directory.tick(now, store));
            } else {
                break;
            }
        }
        assert!(self.store.live.is_empty(), "{:?} are kept for nobody", self.store.live);
    }
}

/// What an owner's node answers, and how much memory is beside it.
fn grant(what: &Question, how: u8) -> (Result<PeerReply, Refusal>, u8) {
    if how & 7 == 7 {
        return (Err(Refusal::NoSuchSegment), 0);
    }
    let memory = PeerReply::Memory { size: 8192, write: how & 8 == 0, address: None };
    match what {
        Question::Segment { .. } | Question::Group { .. } => (Ok(memory), 1),
        Question::Interrupt { .. } => (Ok(memory), 2 + (how >> 4 & 1)),
        Question::Pages { length, .. } => {
            (Ok(PeerReply::Pages { lengths: vec![*length], write: true }), 1)
        }
        Question::Probe => (Ok(PeerReply::Here), 0),
        Question::Lock { .. } => (Ok(PeerReply::Lock(LockReply::Taken { died: how & 8 == 0 })), 0),
        Question::Alive(_) => (Ok(PeerReply::Alive(how & 8 == 0)), 0),
    }
}

/// The message that the input goes on with.
fn message<T>(input: &mut Input<'_>) -> Option<T>
where
    T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug,
{
    let rest = input.rest();
    let Ok((message, left)) = postcard::take_from_bytes::<T>(rest) else {
        // What a peer sends may be none at all.
        assert!(decode::<T>(rest).is_none(), "it is read once and not again");
        input.u8();
        return None;
    };
    input.bytes(rest.len() - left.len());
    assert_eq!(decode::<T>(&encode(&message)).as_ref(), Some(&message), "it is read otherwise");
    Some(message)
}

fn step(host: &mut Host, input: &mut Input<'_>) {
    let choice = input.u8();
    let session = host.sessions[usize::from(choice >> 4 & 3)];
    let node = NODES[1 + usize::from(choice >> 4 & 1)];
    match choice & 15 {
        0..=6 => {
            if let Some(request) = message::<SessionRequest>(input) {
                host.request(session, request);
            }
        }
        7 => {
            if let Some(notice) = message::<Notice>(input) {
                host.with(|directory, now, store| directory.noticed(now, session, notice, store));
            }
        }
        8 | 9 => {
            if let Some(ask) = message::<ConnectorMessage>(input) {
                host.with(|directory, now, store| directory.asked(now, node, ask, store));
            }
        }
        10 => {
            if let Some(tell) = message::<OwnerMessage>(input) {
                host.tell(node, tell, choice >> 5);
            }
        }
        11 | 12 => host.obey(input),
        13 => {
            host.now += input.number() & 0xffff_ffff;
            host.with(|directory, now, store| directory.tick(now, store));
        }
        14 => match choice >> 6 {
            0 => host.close(session),
            1 => host.with(|d, now, store| d.owner_gone(now, node, Loss::Dead, store)),
            2 => host.with(|d, now, store| d.owner_gone(now, node, Loss::OutOfReach, store)),
            _ => host.with(|d, now, store| d.connector_gone(now, node, store)),
        },
        _ => host.store.full = choice & 0x10 != 0,
    }
}

/// Says what `data` holds.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let mut host = Host::new();
    let sessions = u64::from(input.u8() & 3);
    for session in 1..=sessions {
        host.request(SessionId(session), SessionRequest::Hello { version: VERSION });
    }
    for _ in 0..MOST {
        if input.is_empty() {
            break;
        }
        step(&mut host, &mut input);
    }
    host.end();
}

/// A choice of the fuzzer's, and the bytes of what is said.
fn said(choice: u8, bytes: Vec<u8>) -> Vec<u8> {
    [vec![choice], bytes].concat()
}

/// A request of a session, counted from 1.
fn ask(session: u8, request: &SessionRequest) -> Vec<u8> {
    said((session - 1) << 4, encode(request))
}

/// The oldest output is carried out.
fn obey() -> Vec<u8> {
    vec![11, 0]
}

/// A question of another node.
fn question(what: Question) -> Vec<u8> {
    said(8, encode(&ConnectorMessage::Question { request: 1, connection: Handle(5), what }))
}

fn create(id: u32, kind: SegmentKind) -> SessionRequest {
    SessionRequest::CreateSegment { id, choose: false, size: 8192, kind }
}

fn connect(node: NodeId, what: TargetKind) -> SessionRequest {
    SessionRequest::Connect { node, id: 1, timeout_ms: 1000, what }
}

/// Sessions of one host share a segment, which is withdrawn.
fn own_seed() -> Vec<u8> {
    let segment = Handle(1);
    let withdraw = |how| ask(1, &SessionRequest::SetUnavailable { segment, how });
    [
        ask(1, &create(1, SegmentKind::Shared)),
        ask(1, &SessionRequest::SetAvailable { segment }),
        ask(1, &SessionRequest::Share { segment }),
        ask(2, &connect(4, TargetKind::Segment)),
        ask(2, &connect(4, TargetKind::Attach)),
        withdraw(Withdrawal::Force),
    ]
    .concat()
}

/// Another node connects, and is no longer allowed to.
fn guest_seed() -> Vec<u8> {
    let segment = Handle(1);
    let rule =
        SessionRequest::SetShare { first: 1, last: 9, node: None, share: SegmentAccess::None };
    [
        ask(1, &create(1, SegmentKind::Shared)),
        ask(1, &SessionRequest::SetAvailable { segment }),
        question(Question::Segment { id: 1, what: TargetKind::Segment }),
        ask(1, &rule),
        obey(),
        obey(),
        obey(),
        said(8, encode(&ConnectorMessage::Disconnect { connection: Handle(5) })),
        said(8, encode(&ConnectorMessage::Died { connection: Handle(5) })),
        vec![13, 200],
    ]
    .concat()
}

/// A session connects to other nodes, one of which moves the memory.
fn away_seed() -> Vec<u8> {
    let kind = InterruptKind::Data;
    [
        ask(1, &connect(8, TargetKind::Segment)),
        obey(),
        ask(1, &SessionRequest::ConnectInterrupt { node: 12, kind, number: 3, timeout_ms: 5 }),
        obey(),
        said(
            10,
            encode(&OwnerMessage::Freeze {
                ticket: Handle(1),
                connection: Handle(1),
                offset: 0,
                length: 8192,
            }),
        ),
        obey(),
        said(
            0x2a,
            encode(&OwnerMessage::Adopt {
                ticket: Handle(1),
                connection: Handle(1),
                offset: 0,
                length: 8192,
            }),
        ),
        obey(),
        ask(1, &SessionRequest::Probe { node: 8 }),
        vec![0x4e, 13, 0xf0, 0xff, 0xff],
    ]
    .concat()
}

/// Interrupts are made, connected and removed.
fn interrupts_seed() -> Vec<u8> {
    let kind = InterruptKind::Data;
    [
        ask(1, &SessionRequest::CreateInterrupt { kind, number: Some(1), shared: false }),
        ask(2, &SessionRequest::ConnectInterrupt { node: 4, kind, number: 1, timeout_ms: 5 }),
        question(Question::Interrupt { kind, number: 1 }),
        ask(
            1,
            &SessionRequest::CreateInterrupt {
                kind: InterruptKind::Plain,
                number: None,
                shared: true,
            },
        ),
        ask(1, &SessionRequest::RemoveInterrupt { interrupt: Handle(1) }),
    ]
    .concat()
}

/// Pages are opened, mapped, closed and freed.
fn pages_seed() -> Vec<u8> {
    let extent = Handle(1);
    let pages =
        |node, write| SessionRequest::OpenPages { extent, offset: 0, length: 4096, node, write };
    [
        ask(1, &SessionRequest::Allocate { size: 16384 }),
        ask(1, &pages(8, true)),
        ask(1, &pages(4, false)),
        ask(2, &SessionRequest::MapPages { address: 4 << 32, length: 4096 }),
        question(Question::Pages { address: 4 << 32, length: 4096 }),
        ask(1, &SessionRequest::ClosePages { extent, offset: 0, length: 4096 }),
        obey(),
        obey(),
        obey(),
        ask(1, &SessionRequest::Free { extent }),
        ask(2, &SessionRequest::ListSegments { skip: 0 }),
    ]
    .concat()
}

/// Groups, and segments of the other kinds.
fn groups_seed() -> Vec<u8> {
    [
        ask(1, &create(2, SegmentKind::Group)),
        ask(2, &create(2, SegmentKind::Group)),
        question(Question::Group { id: 2, size: Some(8192) }),
        ask(1, &connect(252, TargetKind::Group)),
        ask(2, &create(3, SegmentKind::Empty)),
        ask(2, &create(4, SegmentKind::Private)),
    ]
    .concat()
}

/// Requests of each kind, and conversations with other nodes.
pub fn seeds() -> Vec<Vec<u8>> {
    let seeds =
        [own_seed(), guest_seed(), away_seed(), interrupts_seed(), pages_seed(), groups_seed()];
    seeds.map(|it| [vec![2], it].concat()).to_vec()
}
