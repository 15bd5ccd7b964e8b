//! The hosts of a seeded schedule: their directories, what is on its way between them, and what lies in memory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;

use rackbus_fabric::FabricHandle;
use rackbus_seeds::Random;
use rackbus_segment::directory::{AttachedObject, DirectorySettings, HostRange, LinePart, Loss};
use rackbus_segment::message::{ConnectorMessage, OwnerMessage, SessionEvent, SessionRequest};
use rackbus_segment::{Directory, DirectoryAction, Handle, NodeId, ObjectId, Objects, Recipient};

use crate::{Mistake, NODES, Who};

/// How a process answers when its memory is moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    Honest,
    /// Hears nothing of it.
    Silent,
    /// Answers at once, and changes nothing: it writes to what it had, whenever it likes.
    Liar,
}

/// Memory as a process has it mapped.
#[derive(Debug, Clone, Copy)]
pub struct View {
    pub object: ObjectId,
    pub size: u64,
    pub write: bool,
    pub frozen: bool,
    /// It was told that it has lost it.
    pub over: bool,
    /// The owner's node has decided that it has lost it.
    pub cut: bool,
    /// Not because the right was taken from it: it did not answer in time, or the conversation
    /// broke. It may have the new memory, like one who has disconnected, and loses it with the next
    /// move.
    pub late: bool,
}

pub struct Client {
    pub manner: Manner,
    pub views: BTreeMap<Handle, View>,
    pub segments: Vec<Handle>,
    pub connections: Vec<Handle>,
    /// Mappings that outlive what they were of.
    pub kept: Vec<View>,
    pub inbox: VecDeque<(SessionEvent, Vec<AttachedObject>)>,
    pub asking: Option<SessionRequest>,
    pub started: BTreeSet<Handle>,
}

pub enum Carried {
    Ask(ConnectorMessage),
    Tell(OwnerMessage, Vec<AttachedObject>),
}

/// Work of a node's threads.
pub enum Work {
    Copy(Handle, ObjectId, ObjectId),
    Empty(Handle, ObjectId),
}

pub struct Store {
    pub next: u64,
}

impl Store {
    pub fn make(&mut self) -> ObjectId {
        self.next += 1;
        ObjectId(self.next)
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

pub struct World {
    pub random: Random,
    pub mistake: Mistake,
    pub now: u64,
    pub excused: bool,
    pub directories: BTreeMap<NodeId, (Directory, Store)>,
    pub clients: BTreeMap<Who, Client>,
    pub carried: BTreeMap<(NodeId, NodeId, bool), VecDeque<Carried>>,
    pub work: Vec<(NodeId, Work)>,
    pub values: BTreeMap<ObjectId, u64>,
    /// Which segment each memory is, or was, of: moves go from one to the next.
    pub segment_of: BTreeMap<ObjectId, u64>,
    /// The last store to each segment, unless it was that of a liar or of one who is cut off: that
    /// may or may not reach the others.
    pub stored: BTreeMap<u64, Option<u64>>,
    /// Memory that such have written to.
    pub scribbled: BTreeSet<ObjectId>,
    /// Connections that were cut before their processes heard of them.
    pub cut_early: BTreeSet<(NodeId, Handle)>,
    pub stores: u64,
    pub lives: u64,
    pub trace: Option<String>,
}

impl World {
    pub fn new(seed: u64, mistake: Mistake, traced: bool) -> World {
        let mut world = World {
            random: Random(seed),
            mistake,
            now: 0,
            excused: false,
            directories: BTreeMap::new(),
            clients: BTreeMap::new(),
            carried: BTreeMap::new(),
            work: Vec::new(),
            values: BTreeMap::new(),
            segment_of: BTreeMap::new(),
            stored: BTreeMap::new(),
            cut_early: BTreeSet::new(),
            scribbled: BTreeSet::new(),
            stores: 0,
            lives: 0,
            trace: traced.then(String::new),
        };
        NODES.into_iter().for_each(|node| world.start(node));
        for node in NODES.into_iter().chain(NODES) {
            world.new_session(node);
        }
        world
    }

    pub fn note(&mut self, text: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace {
            let _ = writeln!(trace, "{now:>6}  {}", text());
        }
    }

    pub fn start(&mut self, node: NodeId) {
        let range = |node: NodeId| HostRange { base: u64::from(node) << 32, size: 1 << 30 };
        let settings = DirectorySettings {
            node,
            hosts: NODES.iter().map(|node| (*node, format!("h{node}"))).collect(),
            range: range(node),
            ranges: NODES.iter().map(|node| (*node, range(*node))).collect(),
            rules: Default::default(),
            machines: false,
        };
        self.lives += 1;
        // Objects of different lives have different numbers, so that each can be followed.
        let store = Store { next: self.lives << 32 };
        let fabric = FabricHandle::of_hosts(settings.hosts.values().map(String::as_str)).unwrap();
        self.directories.insert(node, (Directory::new(settings, fabric), store));
    }

    pub fn with(
        &mut self,
        node: NodeId,
        act: impl FnOnce(&mut Directory, u64, &mut Store) -> Vec<DirectoryAction>,
    ) {
        let Some((directory, store)) = self.directories.get_mut(&node) else { return };
        let outputs = act(directory, self.now, store);
        for output in outputs {
            self.note(|| format!("{node}: {output:?}"));
            self.perform(node, output);
        }
    }

    pub fn perform(&mut self, node: NodeId, output: DirectoryAction) {
        match output {
            DirectoryAction::Send(Recipient::Reply(session, reply), attached) => {
                self.replied((node, session), reply, &attached);
            }
            DirectoryAction::Send(Recipient::Event(session, event), attached) => {
                if let SessionEvent::Remote { connection, change } = event
                    && change.is_final()
                {
                    self.cut((node, session), connection);
                }
                if let Some(client) = self.clients.get_mut(&(node, session)) {
                    client.inbox.push_back((event, attached));
                }
            }
            DirectoryAction::Send(Recipient::Ask(to, ask), _) => {
                self.carried.entry((node, to, true)).or_default().push_back(Carried::Ask(ask));
            }
            DirectoryAction::Send(Recipient::Tell(to, tell), attached) => {
                if let OwnerMessage::Remote { connection, change } = tell
                    && change.is_final()
                {
                    let who = self.clients.iter().find(|((on, _), client)| {
                        *on == to && client.views.contains_key(&connection)
                    });
                    match who.map(|(who, _)| *who) {
                        Some(who) => self.cut(who, connection),
                        None => drop(self.cut_early.insert((to, connection))),
                    }
                }
                let queue = self.carried.entry((node, to, false)).or_default();
                queue.push_back(Carried::Tell(tell, attached));
            }
            DirectoryAction::Copy { ticket, from, to, .. } => {
                let segment = self.segment_of[&from.0];
                self.segment_of.insert(to.0, segment);
                self.work.push((node, Work::Copy(ticket, from.0, to.0)));
            }
            DirectoryAction::Empty { job: Some(job), object, .. } => {
                self.work.push((node, Work::Empty(job, object)));
            }
            DirectoryAction::Empty { job: None, object, .. } => {
                self.values.insert(object, 0);
            }
            DirectoryAction::Forget(_) => {}
            DirectoryAction::Cut(session) => self.end_session((node, session)),
        }
    }

    pub fn cut(&mut self, who: Who, handle: Handle) {
        let view = self.clients.get_mut(&who).and_then(|client| client.views.get_mut(&handle));
        if let Some(view) = view.filter(|view| !view.cut) {
            (view.cut, view.late) = (true, self.excused);
        }
    }

    /// A node dies and starts anew.
    pub fn crash(&mut self, node: NodeId) {
        self.note(|| format!("{node} dies"));
        self.clients.retain(|(on, _), _| *on != node);
        self.cut_early.retain(|(on, _)| *on != node);
        self.carried.retain(|(from, to, _), _| *from != node && *to != node);
        self.work.retain(|(on, _)| *on != node);
        self.start(node);
        for other in NODES.into_iter().filter(|other| *other != node) {
            self.with(other, |directory, now, store| {
                directory.owner_gone(now, node, Loss::Dead, store)
            });
            self.with(other, |directory, now, store| directory.connector_gone(now, node, store));
        }
    }

    /// The conversation in which `from` asks `to` breaks; both live.
    pub fn break_off(&mut self, from: NodeId, to: NodeId) {
        self.note(|| format!("{from} and {to} lose each other"));
        self.carried.remove(&(from, to, true));
        self.carried.remove(&(to, from, false));
        self.excused = true;
        self.with(from, |directory, now, store| {
            directory.owner_gone(now, to, Loss::OutOfReach, store)
        });
        self.with(to, |directory, now, store| directory.connector_gone(now, from, store));
        self.excused = false;
    }
}
