//! The shells around the directories: messages, memory, processes.

#[path = "barriers.rs"]
mod barriers;
#[path = "parties.rs"]
mod parties;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use barriers::{Barrier, BarrierMemory, Standing};
use rackbus_fabric::FabricHandle;
use rackbus_seeds::Random;
use rackbus_segment::directory::{
    AttachedObject, DirectorySettings, HostRange, LinePart, LockAccess, LockState, Loss,
};
use rackbus_segment::message::{
    ConnectorMessage, LockHolder, LockOperation, LockReply, Notice, OwnerMessage, Question, Reply,
    SegmentKind, SessionEvent, SessionRequest, VERSION,
};
use rackbus_segment::{
    Directory, DirectoryAction, Handle, NodeId, ObjectId, Objects, Recipient, SessionId,
};

const HOME: NodeId = 4;
const FAR: [NodeId; 2] = [8, 12];
const SEGMENT: u32 = 7;
const OFFSETS: [u64; 2] = [0, 128];
const OWNER: SessionId = SessionId(1);

/// A deliberate mistake, to prove that the simulation notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mistake {
    None,
    /// What was taken for somebody who had been told that nobody answers stays taken.
    LosesLateRelease,
    /// What is given back of an attempt that was to be told of a death is as if nobody had died.
    ForgetsDeaths,
    /// A conversation is replaced by another one, and the owner's node does not notice.
    MissesCuts,
    /// What comes twice counts as another attempt.
    TakesTwice,
    /// An arrival that comes twice counts as one at the end of the next phase.
    ArrivesTwice,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word {
    Held(LockHolder),
    LeftByDead,
}

#[derive(Debug, Default)]
struct Store {
    next: u64,
    words: BTreeMap<(ObjectId, u64), Word>,
    barriers: BTreeMap<(ObjectId, u64), BarrierMemory>,
    /// Where a holder has died, and nobody was told so yet.
    untold: BTreeSet<u64>,
    /// Where a lock was given as if nobody had died.
    concealed: Option<u64>,
}

impl Objects for Store {
    fn memory(&mut self, _size: u64) -> Result<ObjectId, String> {
        self.next += 1;
        Ok(ObjectId(self.next))
    }
    fn event(&mut self) -> Result<ObjectId, String> {
        Err("no event".into())
    }
    fn line(&mut self, _part: LinePart) -> Result<ObjectId, String> {
        Err("no line".into())
    }
    fn rung(&self, _line: ObjectId) -> Result<u32, String> {
        Err("no line".into())
    }
    fn lock(&mut self, memory: ObjectId, at: u64, access: LockAccess<'_>) -> Option<LockState> {
        if matches!(access, LockAccess::Arrive { .. } | LockAccess::Exclude { .. }) {
            return self.barriers.entry((memory, at)).or_default().access(access);
        }
        let word = self.words.get(&(memory, at)).copied();
        let holder = |word| match word {
            Some(Word::Held(holder)) => Some(holder),
            _ => None,
        };
        match access {
            LockAccess::Look => {}
            LockAccess::Take(_) if holder(word).is_some() => {}
            LockAccess::Take(me) => {
                self.words.insert((memory, at), Word::Held(me));
                if word != Some(Word::LeftByDead) && self.untold.contains(&at) {
                    self.concealed = Some(at);
                }
                return Some(LockState::Taken { died: word == Some(Word::LeftByDead) });
            }
            LockAccess::Free(me) if holder(word) == Some(me) => {
                self.words.remove(&(memory, at));
            }
            LockAccess::FreeOfDead(dead) if holder(word) == Some(dead) => {
                self.words.insert((memory, at), Word::LeftByDead);
                self.untold.insert(at);
            }
            LockAccess::Free(_) | LockAccess::FreeOfDead(_) => {}
            LockAccess::Arrive { .. } | LockAccess::Exclude { .. } => return None,
        }
        Some(LockState::Held(holder(self.words.get(&(memory, at)).copied())))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum View {
    Idle,
    Asking(u64, u64),
    Holding(u64, u64),
    /// At the barrier: phases that it said it has passed.
    Arriving(Option<u32>),
    Busy,
}

/// A process on another machine.
#[derive(Debug)]
struct Party {
    connection: Option<Handle>,
    view: View,
    /// It waits for an answer, and asks nothing meanwhile.
    waiting: bool,
    /// Whom it was told to hold the lock, and where.
    seen: Option<(u64, LockHolder)>,
    standing: Standing,
}

#[derive(Debug, Clone)]
enum Carried {
    Ask(ConnectorMessage),
    Tell(OwnerMessage),
}

type Who = (NodeId, SessionId);

pub struct World {
    pub random: Random,
    mistake: Mistake,
    traced: bool,
    now: u64,
    directories: BTreeMap<NodeId, Directory>,
    stores: BTreeMap<NodeId, Store>,
    parties: BTreeMap<Who, Party>,
    /// Between the owner's node and a connector's: what it is asked, and what it says.
    asks: BTreeMap<NodeId, VecDeque<Carried>>,
    tells: BTreeMap<NodeId, VecDeque<Carried>>,
    /// Who has not noticed yet that the conversation is over: the owner's node, the connector's.
    unnoticed: BTreeMap<NodeId, [bool; 2]>,
    copies: VecDeque<(Handle, ObjectId, ObjectId)>,
    segment: Handle,
    frozen: bool,
    attempts: u64,
    sessions: u64,
    barrier: Barrier,
}

impl World {
    pub fn new(seed: u64, mistake: Mistake, traced: bool) -> World {
        let mut world = World {
            random: Random(seed),
            mistake,
            traced,
            now: 0,
            directories: BTreeMap::new(),
            stores: BTreeMap::new(),
            parties: BTreeMap::new(),
            asks: BTreeMap::new(),
            tells: BTreeMap::new(),
            unnoticed: FAR.map(|node| (node, [false; 2])).into(),
            copies: VecDeque::new(),
            segment: Handle(0),
            frozen: false,
            attempts: 0,
            sessions: 1,
            barrier: Barrier::default(),
        };
        for node in [HOME, FAR[0], FAR[1]] {
            world.start(node);
        }
        world.request((HOME, OWNER), SessionRequest::Hello { version: VERSION });
        let (kind, size) = (SegmentKind::Shared, 4096);
        let create = SessionRequest::CreateSegment { id: SEGMENT, choose: false, size, kind };
        world.request((HOME, OWNER), create);
        let segment = world.segment;
        world.request((HOME, OWNER), SessionRequest::SetAvailable { segment });
        for node in [FAR[0], FAR[0], FAR[1]] {
            world.new_party(node);
        }
        let parties = world.parties.keys().map(|(node, session)| (*node, *session));
        let all = parties.chain([(HOME, OWNER)]);
        let all = all.map(|(node, session)| LockHolder { node, session });
        world.barrier.parties = all.collect();
        world
    }

    fn start(&mut self, node: NodeId) {
        let range = |node: NodeId| HostRange { base: u64::from(node) << 32, size: 1 << 20 };
        let nodes = [HOME, FAR[0], FAR[1]];
        let settings = DirectorySettings {
            node,
            hosts: nodes.iter().map(|node| (*node, format!("h{node}"))).collect(),
            range: range(node),
            ranges: nodes.iter().map(|node| (*node, range(*node))).collect(),
            rules: Default::default(),
            machines: true,
        };
        let fabric = FabricHandle::of_hosts(settings.hosts.values().map(String::as_str)).unwrap();
        self.directories.insert(node, Directory::new(settings, fabric));
        self.stores.insert(node, Store::default());
    }

    fn new_party(&mut self, node: NodeId) {
        self.sessions += 1;
        let who = (node, SessionId(self.sessions));
        let (view, standing) = (View::Idle, Standing::default());
        let party = Party { connection: None, view, waiting: false, seen: None, standing };
        self.parties.insert(who, party);
        self.request(who, SessionRequest::Hello { version: VERSION });
    }

    fn note(&self, what: impl FnOnce() -> String) {
        if self.traced {
            println!("{}", what());
        }
    }

    fn with(
        &mut self,
        node: NodeId,
        act: impl FnOnce(&mut Directory, u64, &mut Store) -> Vec<DirectoryAction>,
    ) {
        let directory = self.directories.get_mut(&node).unwrap();
        let outputs = act(directory, self.now, self.stores.get_mut(&node).unwrap());
        for output in outputs {
            self.perform(node, output);
        }
    }

    fn request(&mut self, (node, session): Who, request: SessionRequest) {
        self.note(|| format!("{node}/{} asks {request:?}", session.0));
        if let Some(party) = self.parties.get_mut(&(node, session)) {
            assert!(!std::mem::replace(&mut party.waiting, true));
        }
        self.with(node, |directory, now, store| directory.request(now, session, request, store));
    }

    fn perform(&mut self, node: NodeId, output: DirectoryAction) {
        match output {
            DirectoryAction::Send(Recipient::Reply(session, reply), _) => {
                self.replied((node, session), reply)
            }
            DirectoryAction::Send(Recipient::Event(session, event), _) => {
                self.happened((node, session), event)
            }
            DirectoryAction::Send(Recipient::Ask(_, ask), _) => self.send_ask(node, ask),
            DirectoryAction::Send(Recipient::Tell(to, tell), attached) => {
                self.send_tell(to, tell, &attached)
            }
            DirectoryAction::Copy { ticket, from, to, .. } => {
                self.copies.push_back((ticket, from.0, to.0));
            }
            DirectoryAction::Empty { job, object, .. } => {
                let words = &mut self.stores.get_mut(&node).unwrap().words;
                words.retain(|(memory, _), _| *memory != object);
                let barriers = &mut self.stores.get_mut(&node).unwrap().barriers;
                barriers.retain(|(memory, _), _| *memory != object);
                if let Some(job) = job {
                    self.with(node, |directory, now, store| {
                        directory.emptied(now, job, Ok(()), store)
                    });
                }
            }
            DirectoryAction::Forget(_) => {}
            DirectoryAction::Cut(session) => panic!("{session:?} has answered"),
        }
    }

    fn send_ask(&mut self, node: NodeId, mut ask: ConnectorMessage) {
        if self.unnoticed[&node][1] {
            return;
        }
        if self.mistake == Mistake::LosesLateRelease
            && let ConnectorMessage::Question { what: Question::Lock { request, .. }, .. } = &ask
            && matches!(request.operation, LockOperation::GiveBack { .. })
        {
            return;
        }
        if self.mistake == Mistake::ForgetsDeaths
            && let ConnectorMessage::Question { what: Question::Lock { request, .. }, .. } =
                &mut ask
            && let LockOperation::GiveBack { attempt } = request.operation
        {
            request.operation = LockOperation::Release { attempt };
        }
        self.asks.entry(node).or_default().push_back(Carried::Ask(ask));
    }

    /// What a move asks of a connector on another machine, the owner's node answers in its place.
    fn send_tell(&mut self, to: NodeId, tell: OwnerMessage, attached: &[AttachedObject]) {
        let answer = match tell {
            OwnerMessage::Freeze { ticket, connection, .. } => {
                ConnectorMessage::Frozen { ticket, connection }
            }
            OwnerMessage::Adopt { ticket, connection, .. } => {
                assert_eq!(attached.len(), 1);
                ConnectorMessage::Adopted { ticket, connection }
            }
            OwnerMessage::Unfreeze { .. } => return,
            OwnerMessage::Answer { .. } | OwnerMessage::Remote { .. } => {
                if !self.unnoticed[&to][0] {
                    self.tells.entry(to).or_default().push_back(Carried::Tell(tell));
                }
                return;
            }
        };
        self.with(HOME, |directory, now, store| directory.asked(now, to, answer, store));
    }

    fn replied(&mut self, who: Who, reply: Reply) {
        if who == (HOME, OWNER) {
            if let Reply::Created { segment, .. } = reply {
                self.segment = segment;
            }
            return;
        }
        self.note(|| format!("{}/{} hears {reply:?}", who.0, who.1.0));
        let Some(party) = self.parties.get_mut(&who) else { return };
        let before = party.view;
        party.waiting = false;
        party.view = match (&reply, party.view) {
            (Reply::Connected(connected), _) => {
                party.connection = Some(connected.connection);
                View::Idle
            }
            (Reply::Lock(LockReply::Taken { died }), View::Asking(attempt, at)) => {
                if *died {
                    self.stores.get_mut(&HOME).unwrap().untold.remove(&at);
                }
                View::Holding(attempt, at)
            }
            (Reply::Lock(LockReply::Held { holder }), View::Asking(_, at)) => {
                party.seen = holder.map(|holder| (at, holder));
                View::Idle
            }
            // What could not be let go is the holder's still, and it tries again.
            (Reply::Refused(_), View::Holding(attempt, at)) => View::Holding(attempt, at),
            _ => View::Idle,
        };
        if let (Reply::Lock(LockReply::Barrier { passed, phase }), View::Arriving(asked)) =
            (reply, before)
        {
            self.heard_of_barrier(who, asked, passed, phase);
        }
    }

    fn happened(&mut self, who: Who, event: SessionEvent) {
        match event {
            SessionEvent::Remote { connection, change } if change.is_final() => {
                let Some(party) = self.parties.get_mut(&who) else { return };
                if party.connection == Some(connection) {
                    // What it waits for is of the past.
                    party.view = if party.waiting { View::Busy } else { View::Idle };
                    party.connection = None;
                    party.standing.passed = None;
                }
            }
            SessionEvent::Freeze { ticket, keeper, .. } => {
                self.frozen = true;
                self.notice(who, Notice::Frozen { ticket, keeper });
            }
            SessionEvent::Adopt { ticket, keeper, .. } => {
                self.notice(who, Notice::Adopted { ticket, keeper });
            }
            SessionEvent::Unfreeze { .. } => self.frozen = false,
            _ => {}
        }
    }

    fn notice(&mut self, (node, session): Who, notice: Notice) {
        self.with(node, |directory, now, store| directory.noticed(now, session, notice, store));
    }

    /// The conversation between the owner's node and another is over; each side notices in its time.
    fn cut(&mut self, node: NodeId) {
        self.note(|| format!("cut {node}"));
        self.barrier.cut.push(node);
        self.asks.remove(&node);
        self.tells.remove(&node);
        self.unnoticed.insert(node, [true; 2]);
    }

    fn notice_cut(&mut self, node: NodeId, side: usize) {
        let unnoticed = self.unnoticed.get_mut(&node).unwrap();
        if !std::mem::take(&mut unnoticed[side]) {
            return;
        }
        self.note(|| format!("{} of {node} notices", ["the owner's node", "the node"][side]));
        match side {
            0 if self.mistake == Mistake::MissesCuts => {}
            0 => {
                self.with(HOME, |directory, now, store| directory.connector_gone(now, node, store))
            }
            _ => self.with(node, |directory, now, store| {
                directory.owner_gone(now, HOME, Loss::OutOfReach, store)
            }),
        }
    }

    fn deliver(&mut self, choice: usize) -> bool {
        let mut ready: Vec<(NodeId, bool)> = Vec::new();
        for (queues, asks) in [(&self.asks, true), (&self.tells, false)] {
            let some = queues.iter().filter(|(_, queue)| !queue.is_empty());
            ready.extend(some.map(|(node, _)| (*node, asks)));
        }
        if ready.is_empty() {
            return false;
        }
        let (node, asks) = ready[choice % ready.len()];
        // What is said in a new conversation comes after the end of the one before.
        self.notice_cut(node, usize::from(!asks));
        let queues = if asks { &mut self.asks } else { &mut self.tells };
        match queues.get_mut(&node).and_then(VecDeque::pop_front) {
            Some(Carried::Ask(ask)) => {
                self.with(HOME, |directory, now, store| directory.asked(now, node, ask, store));
            }
            Some(Carried::Tell(tell)) => {
                self.with(node, |directory, now, store| {
                    directory.told(now, HOME, tell, Vec::new(), store)
                });
            }
            None => {}
        }
        true
    }

    fn finish_copy(&mut self) -> bool {
        let Some((ticket, from, to)) = self.copies.pop_front() else { return false };
        let words = &mut self.stores.get_mut(&HOME).unwrap().words;
        let copied: Vec<_> =
            words.range((from, 0)..=(from, u64::MAX)).map(|(k, w)| (k.1, *w)).collect();
        words.extend(copied.into_iter().map(|(at, word)| ((to, at), word)));
        let barriers = &mut self.stores.get_mut(&HOME).unwrap().barriers;
        if let Some(barrier) = barriers.get(&(from, barriers::AT)).cloned() {
            barriers.insert((to, barriers::AT), barrier);
        }
        self.with(HOME, |directory, now, store| directory.copied(now, ticket, Ok(()), store));
        true
    }

    pub fn step(&mut self) -> Result<(), String> {
        match self.random.below(100) {
            0..40 => {
                let choice = self.random.below(100);
                self.deliver(choice);
            }
            40..52 => self.try_to_lock(),
            52..60 => drop(self.unlock()),
            60..67 => drop(self.arrive()),
            67..69 => self.arrive_here(),
            69..76 => drop(self.reconnect()),
            76..79 => self.declare(),
            79 => drop(self.exclude(true)),
            80..85 => self.duplicate(),
            85..88 => self.lock_here(),
            88..90 => self.die(),
            90..92 => {
                let node = FAR[self.random.below(2)];
                self.cut(node);
            }
            92..95 => {
                let (node, side) = (FAR[self.random.below(2)], self.random.below(2));
                self.notice_cut(node, side);
            }
            95 => self.restart(),
            96 => self.change_rights(),
            97 => drop(self.finish_copy()),
            _ => {
                self.now += 300 * self.random.below(12) as u64;
                for node in [HOME, FAR[0], FAR[1]] {
                    self.with(node, |directory, now, store| directory.tick(now, store));
                }
            }
        }
        self.check()
    }

    /// Who holds a lock by a connection that is there has it.
    fn check(&self) -> Result<(), String> {
        let home = &self.directories[&HOME];
        self.check_barrier()?;
        if let Some(at) = self.stores[&HOME].concealed {
            return Err(format!("{at} is given as if nobody had died, and nobody was told"));
        }
        if self.frozen || !self.copies.is_empty() {
            return Ok(());
        }
        let Some(memory) = home.memory_of(OWNER, self.segment) else { return Ok(()) };
        for (who, party) in &self.parties {
            let (View::Holding(attempt, at), Some(connection)) = (party.view, party.connection)
            else {
                continue;
            };
            let word = self.stores[&HOME].words.get(&(memory, at));
            let mine = Word::Held(LockHolder { node: who.0, session: who.1 });
            if !home.keepers(who.0, [(connection, 0..1)]).is_empty() && word != Some(&mine) {
                return Err(format!("{who:?} holds {at} by attempt {attempt}, and it is {word:?}"));
            }
        }
        Ok(())
    }

    /// Lets everything happen that is under way, and checks that nothing is locked by nobody.
    pub fn rest(&mut self) -> Result<(), String> {
        for round in 0.. {
            if round > 20_000 {
                return Err("it does not come to rest".to_owned());
            }
            FAR.into_iter().for_each(|node| (0..2).for_each(|side| self.notice_cut(node, side)));
            if self.deliver(round) || self.finish_copy() || self.unlock() {
                self.check()?;
                continue;
            }
            let due = self.directories.values().filter_map(Directory::next_tick).min();
            let Some(due) = due else { break };
            self.now = self.now.max(due);
            for node in [HOME, FAR[0], FAR[1]] {
                self.with(node, |directory, now, store| directory.tick(now, store));
            }
        }
        let Some(memory) = self.directories[&HOME].memory_of(OWNER, self.segment) else {
            return Err("the segment is gone".to_owned());
        };
        let here = LockHolder { node: HOME, session: OWNER };
        let words = &self.stores[&HOME].words;
        let known: BTreeSet<_> = OFFSETS.map(|at| (memory, at)).into();
        for key in known {
            match words.get(&key) {
                Some(Word::Held(holder)) if *holder != here => {
                    return Err(format!("{:?} is held by {holder:?}, who does not know", key.1));
                }
                _ => {}
            }
        }
        Ok(())
    }
}
