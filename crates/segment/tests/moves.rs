//! The moving of memory (freeze, copy, adopt, unfreeze, abandon) under seeded random schedules, with
//! keepers that are slow, silent or liars, nodes that die, and memory that is removed meanwhile.
//!
//! Each memory has a value; a store is followed by a signal that no node carries (a doorbell), so
//! that whoever shares the memory looks at once. What is checked:
//!
//! * A store before a signal is seen by everybody who has not been cut off.
//! * No store of an honest writer is lost to a move, and no writer waits for ever.
//! * I4: who was cut off shares no memory with those who stayed, once it is said to be so.
//!
//! A failing seed prints the command that replays it with its trace; `RACKBUS_SEEDS` says how many
//! seeds to run.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;

use rackbus_fabric::FabricHandle;
use rackbus_seeds::{Random, Simulation};
use rackbus_segment::directory::{Attached, HostRange, LinePart, Loss, Settings};
use rackbus_segment::message::{
    Ask, Event, Notice, Reply, Request, SegmentKind, Share, Target, Tell, VERSION, Withdrawal,
};
use rackbus_segment::{Directory, Handle, NodeId, ObjectId, Objects, Output, SessionId, To};

const NODES: [NodeId; 3] = [4, 8, 12];
/// One that is emptied at once, and one that takes its time.
const SIZES: [u64; 2] = [8192, 8 << 20];
const SEEDS: u64 = 100_000;
/// So many show each mistake.
const FOUND_WITHIN: u64 = 10_000;

type Who = (NodeId, SessionId);

/// One of several, if there is one.
fn one<T: Copy>(random: &mut Random, of: &[T]) -> Option<T> {
    of.get(random.below(of.len())).copied()
}

/// A deliberate mistake, to prove that the simulation notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    None,
    /// Writers go on when they have the new memory, and not when all have it.
    UnfreezeAtAdoption,
    /// What is given back during a move is forgotten before it is unfrozen.
    ForgetFirst,
    /// The node says that it has copied before it has.
    LateCopy,
    /// The node says that memory is empty before it is.
    NeverEmptied,
}

/// How a process answers when its memory is moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    Honest,
    /// Hears nothing of it.
    Silent,
    /// Answers at once, and changes nothing: it writes to what it had, whenever it likes.
    Liar,
}

/// Memory as a process has it mapped.
#[derive(Debug, Clone, Copy)]
struct View {
    object: ObjectId,
    size: u64,
    write: bool,
    frozen: bool,
    /// It was told that it has lost it.
    over: bool,
    /// The owner's node has decided that it has lost it.
    cut: bool,
    /// Not because the right was taken from it: it did not answer in time, or the conversation
    /// broke. It may have the new memory, like one who has disconnected, and loses it with the next
    /// move.
    late: bool,
}

struct Client {
    manner: Manner,
    views: BTreeMap<Handle, View>,
    segments: Vec<Handle>,
    connections: Vec<Handle>,
    /// Mappings that outlive what they were of.
    kept: Vec<View>,
    inbox: VecDeque<(Event, Vec<Attached>)>,
    asking: Option<Request>,
    started: BTreeSet<Handle>,
}

enum Carried {
    Ask(Ask),
    Tell(Tell, Vec<Attached>),
}

/// Work of a node's threads.
enum Work {
    Copy(Handle, ObjectId, ObjectId),
    Empty(Handle, ObjectId),
}

struct Store {
    next: u64,
}

impl Store {
    fn make(&mut self) -> ObjectId {
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

struct World {
    random: Random,
    mistake: Mistake,
    now: u64,
    excused: bool,
    directories: BTreeMap<NodeId, (Directory, Store)>,
    clients: BTreeMap<Who, Client>,
    carried: BTreeMap<(NodeId, NodeId, bool), VecDeque<Carried>>,
    work: Vec<(NodeId, Work)>,
    values: BTreeMap<ObjectId, u64>,
    /// Which segment each memory is, or was, of: moves go from one to the next.
    segment_of: BTreeMap<ObjectId, u64>,
    /// The last store to each segment, unless it was that of a liar or of one who is cut off: that
    /// may or may not reach the others.
    stored: BTreeMap<u64, Option<u64>>,
    /// Memory that such have written to.
    scribbled: BTreeSet<ObjectId>,
    /// Connections that were cut before their processes heard of them.
    cut_early: BTreeSet<(NodeId, Handle)>,
    stores: u64,
    lives: u64,
    trace: Option<String>,
}

impl World {
    fn new(seed: u64, mistake: Mistake, traced: bool) -> World {
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

    fn note(&mut self, text: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace {
            let _ = writeln!(trace, "{now:>6}  {}", text());
        }
    }

    fn start(&mut self, node: NodeId) {
        let range = |node: NodeId| HostRange { base: u64::from(node) << 32, size: 1 << 30 };
        let settings = Settings {
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

    fn with(
        &mut self,
        node: NodeId,
        act: impl FnOnce(&mut Directory, u64, &mut Store) -> Vec<Output>,
    ) {
        let Some((directory, store)) = self.directories.get_mut(&node) else { return };
        let outputs = act(directory, self.now, store);
        for output in outputs {
            self.note(|| format!("{node}: {output:?}"));
            self.perform(node, output);
        }
    }

    fn perform(&mut self, node: NodeId, output: Output) {
        match output {
            Output::Send(To::Reply(session, reply), attached) => {
                self.replied((node, session), reply, &attached);
            }
            Output::Send(To::Event(session, event), attached) => {
                if let Event::Remote { connection, change } = event
                    && change.is_final()
                {
                    self.cut((node, session), connection);
                }
                if let Some(client) = self.clients.get_mut(&(node, session)) {
                    client.inbox.push_back((event, attached));
                }
            }
            Output::Send(To::Ask(to, ask), _) => {
                self.carried.entry((node, to, true)).or_default().push_back(Carried::Ask(ask));
            }
            Output::Send(To::Tell(to, tell), attached) => {
                if let Tell::Remote { connection, change } = tell
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
            Output::Copy { ticket, from, to, .. } => {
                let segment = self.segment_of[&from.0];
                self.segment_of.insert(to.0, segment);
                self.work.push((node, Work::Copy(ticket, from.0, to.0)));
            }
            Output::Empty { job: Some(job), object, .. } => {
                self.work.push((node, Work::Empty(job, object)));
            }
            Output::Empty { job: None, object, .. } => {
                self.values.insert(object, 0);
            }
            Output::Forget(_) => {}
            Output::Cut(session) => self.end_session((node, session)),
        }
    }

    fn cut(&mut self, who: Who, handle: Handle) {
        let view = self.clients.get_mut(&who).and_then(|client| client.views.get_mut(&handle));
        if let Some(view) = view.filter(|view| !view.cut) {
            (view.cut, view.late) = (true, self.excused);
        }
    }

    fn replied(&mut self, who: Who, reply: Reply, attached: &[Attached]) {
        let Some(client) = self.clients.get_mut(&who) else { return };
        let asked = client.asking.take().expect("a reply that nobody asked for");
        let (handle, size) = match (&reply, asked) {
            (Reply::Created { segment, .. }, Request::CreateSegment { size, .. }) => {
                client.segments.push(*segment);
                (*segment, size)
            }
            (Reply::Connected(connected), _) => {
                client.connections.push(connected.connection);
                (connected.connection, connected.size)
            }
            (Reply::Started { ticket }, _) => {
                client.started.insert(*ticket);
                return;
            }
            _ => return,
        };
        let Attached { object, write } = attached[0];
        let cut = self.cut_early.remove(&(who.0, handle));
        let view = View { object, size, write, frozen: false, over: false, cut, late: false };
        client.views.insert(handle, view);
        let fresh = self.segment_of.len() as u64;
        self.segment_of.entry(object).or_insert(fresh);
    }

    /// A process deals with its oldest event.
    fn hear(&mut self, who: Who) {
        let Some(client) = self.clients.get_mut(&who) else { return };
        let (honest, mistake) = (client.manner == Manner::Honest, self.mistake);
        let Some((event, attached)) = client.inbox.pop_front() else { return };
        let mut change = |handle: &Handle, change: &dyn Fn(&mut View)| {
            if let Some(view) = client.views.get_mut(handle).filter(|view| honest && !view.over) {
                change(view);
            }
        };
        let notice = match event {
            Event::Freeze { ticket, keeper, .. } => {
                change(&keeper, &|view| view.frozen = true);
                Some(Notice::Frozen { ticket, keeper })
            }
            Event::Adopt { ticket, keeper, offset, length, .. } => {
                change(&keeper, &|view| {
                    assert_eq!((offset, length), (0, view.size));
                    view.object = attached[0].object;
                    view.frozen &= mistake != Mistake::UnfreezeAtAdoption;
                });
                Some(Notice::Adopted { ticket, keeper })
            }
            Event::Unfreeze { keeper, .. } => {
                change(&keeper, &|view| view.frozen = false);
                None
            }
            Event::Remote { connection, change: how } if how.is_final() => {
                change(&connection, &|view| (view.over, view.frozen) = (true, false));
                None
            }
            Event::Finished { ticket, outcome } => {
                assert_eq!(outcome, Ok(()));
                client.started.remove(&ticket);
                None
            }
            _ => None,
        };
        if let Some(notice) = notice.filter(|_| client.manner != Manner::Silent) {
            let (node, session) = who;
            self.with(node, |directory, now, store| directory.noticed(now, session, notice, store));
        }
    }

    fn ask(&mut self, who: Who, request: Request) {
        let Some(client) = self.clients.get_mut(&who).filter(|it| it.asking.is_none()) else {
            return;
        };
        client.asking = Some(request.clone());
        self.note(|| format!("{who:?} asks {request:?}"));
        let (node, session) = who;
        self.with(node, |directory, now, store| directory.request(now, session, request, store));
    }

    fn new_session(&mut self, node: NodeId) {
        self.lives += 1;
        let who = (node, SessionId(self.lives));
        let manner = match self.random.below(12) {
            0 => Manner::Silent,
            1 => Manner::Liar,
            _ => Manner::Honest,
        };
        let client = Client {
            manner,
            views: BTreeMap::new(),
            segments: Vec::new(),
            connections: Vec::new(),
            kept: Vec::new(),
            inbox: VecDeque::new(),
            asking: None,
            started: BTreeSet::new(),
        };
        self.clients.insert(who, client);
        self.note(|| format!("{who:?} begins, {manner:?}"));
        self.ask(who, Request::Hello { version: VERSION });
    }

    fn end_session(&mut self, who: Who) {
        if self.clients.remove(&who).is_some() {
            self.note(|| format!("{who:?} ends"));
            let (node, session) = who;
            self.with(node, |directory, now, store| directory.closed(now, session, store));
        }
    }

    /// A node dies and starts anew.
    fn crash(&mut self, node: NodeId) {
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
    fn break_off(&mut self, from: NodeId, to: NodeId) {
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

    /// Ends what a process has by a handle; mappings of it stay.
    fn give_back(&mut self, who: Who, handle: Handle, request: Request) {
        let free = |client: &&mut Client| client.asking.is_none();
        let Some(client) = self.clients.get_mut(&who).filter(free) else { return };
        let Some(mut view) = client.views.remove(&handle) else { return };
        client.segments.retain(|it| *it != handle);
        client.connections.retain(|it| *it != handle);
        view.frozen &= self.mistake == Mistake::ForgetFirst;
        client.kept.push(view);
        self.ask(who, request);
    }

    /// A process stores to memory that it may store to, and signals whoever shares it.
    fn store(&mut self, who: Who, handle: Handle) -> Result<(), String> {
        let client = &self.clients[&who];
        let view = client.views[&handle];
        if view.frozen || !view.write {
            return Ok(());
        }
        self.stores += 1;
        let (value, segment) = (self.stores, self.segment_of[&view.object]);
        self.values.insert(view.object, value);
        self.note(|| format!("{who:?} stores {value} to {:?} by {handle:?}", view.object));
        if self.clients[&who].manner != Manner::Honest || view.cut || view.over {
            self.stored.insert(segment, None);
            self.scribbled.insert(view.object);
            return Ok(());
        }
        self.stored.insert(segment, Some(value));
        for (reader, other) in self.members(segment) {
            let read = self.values.get(&other.object).copied().unwrap_or(0);
            if read != value {
                return Err(format!("{reader:?} was signalled {value} and reads {read}"));
            }
        }
        Ok(())
    }

    /// The honest processes that share a segment.
    fn members(&self, segment: u64) -> Vec<(Who, View)> {
        let honest = self.clients.iter().filter(|(_, client)| client.manner == Manner::Honest);
        let views = honest.flat_map(|(who, client)| client.views.values().map(|it| (*who, *it)));
        views
            .filter(|(_, view)| !view.cut && !view.over)
            .filter(|(_, view)| self.segment_of[&view.object] == segment)
            .collect()
    }

    /// Something that is under way continues; false when nothing is.
    fn advance(&mut self) -> bool {
        let queues: Vec<_> =
            self.carried.iter().filter(|(_, it)| !it.is_empty()).map(|(key, _)| *key).collect();
        let hears = |(_, client): &(&Who, &Client)| !client.inbox.is_empty();
        let clients: Vec<Who> = self.clients.iter().filter(hears).map(|(who, _)| *who).collect();
        let choice = self.random.below(queues.len() + clients.len() + self.work.len());
        if let Some((from, to, _)) = queues.get(choice).copied() {
            let carried = self.carried.get_mut(&queues[choice]).and_then(VecDeque::pop_front);
            match carried.expect("it is not empty") {
                Carried::Ask(ask) => {
                    self.with(to, |directory, now, store| directory.asked(now, from, ask, store));
                }
                Carried::Tell(tell, attached) => self.with(to, |directory, now, store| {
                    directory.told(now, from, tell, attached, store)
                }),
            }
        } else if let Some(who) = clients.get(choice - queues.len()) {
            self.hear(*who);
        } else if choice - queues.len() - clients.len() < self.work.len() {
            let (node, work) = self.work.swap_remove(choice - queues.len() - clients.len());
            self.finish(node, &work);
        } else {
            return false;
        }
        true
    }

    /// A thread of a node is done with something.
    fn finish(&mut self, node: NodeId, work: &Work) {
        let value = |world: &World, object| world.values.get(object).copied().unwrap_or(0);
        match work {
            Work::Copy(ticket, from, to) => {
                let copied = value(self, from);
                if self.mistake == Mistake::LateCopy {
                    // What it will have copied: nothing yet.
                    self.with(node, |directory, now, store| {
                        directory.copied(now, *ticket, Ok(()), store)
                    });
                    return;
                }
                self.values.insert(*to, copied);
                self.with(node, |directory, now, store| {
                    directory.copied(now, *ticket, Ok(()), store)
                });
            }
            Work::Empty(job, object) => {
                if self.mistake != Mistake::NeverEmptied {
                    self.values.insert(*object, 0);
                }
                self.with(node, |directory, now, store| {
                    directory.emptied(now, *job, Ok(()), store)
                });
            }
        }
    }

    /// Time passes until somebody is due.
    fn tick(&mut self) -> bool {
        let due = self.directories.values().filter_map(|(it, _)| it.next_tick()).min();
        let Some(due) = due.filter(|due| *due < u64::MAX) else { return false };
        self.now = self.now.max(due);
        self.excused = true;
        for node in NODES {
            self.with(node, |directory, now, store| directory.tick(now, store));
        }
        self.excused = false;
        true
    }

    fn step(&mut self) -> Result<(), String> {
        let whos: Vec<Who> = self.clients.keys().copied().collect();
        let who = one(&mut self.random, &whos);
        let node = NODES[self.random.below(3)];
        let id = 1 + self.random.below(2) as u32;
        let Some(who) = who else {
            self.new_session(node);
            return Ok(());
        };
        let client = &self.clients[&who];
        let (segments, connections) = (client.segments.clone(), client.connections.clone());
        let views: Vec<Handle> = client.views.keys().copied().collect();
        match self.random.below(100) {
            0 => self.crash(node),
            1 => self.end_session(who),
            2..=3 if whos.len() < 8 => self.new_session(node),
            4..=11 => {
                let size = SIZES[self.random.below(2)];
                let kind = SegmentKind::Shared;
                self.ask(who, Request::CreateSegment { id, choose: false, size, kind });
            }
            12..=19 => {
                if let Some(segment) = one(&mut self.random, &segments) {
                    self.ask(who, Request::SetAvailable { segment });
                }
            }
            20..=31 => {
                let (timeout_ms, what) = (1_000, Target::Segment);
                self.ask(who, Request::Connect { node, id, timeout_ms, what });
            }
            32..=37 => {
                let share = [Share::None, Share::Read, Share::Write][self.random.below(3)];
                let node = Some(node);
                self.ask(who, Request::SetShare { first: 1, last: 2, node, share });
            }
            38..=39 => {
                if let Some(segment) = one(&mut self.random, &segments) {
                    let how = Withdrawal::Force;
                    self.ask(who, Request::SetUnavailable { segment, how });
                }
            }
            40 => {
                if let Some(segment) = one(&mut self.random, &segments) {
                    self.give_back(who, segment, Request::Remove { segment });
                }
            }
            41..=42 => {
                if let Some(connection) = one(&mut self.random, &connections) {
                    self.give_back(who, connection, Request::Disconnect { connection });
                }
            }
            43 => {
                // Now and then a node stands still, and learns late what time it is.
                self.now += if self.random.below(4) == 0 { 10_000 } else { 0 };
                self.tick();
            }
            44 => {
                let other = NODES[self.random.below(3)];
                if other != node {
                    self.break_off(node, other);
                }
            }
            45..=62 => {
                if let Some(handle) = one(&mut self.random, &views) {
                    self.store(who, handle)?;
                }
            }
            _ => drop(self.advance()),
        }
        Ok(())
    }

    /// Lets everything happen that is under way, and looks what has come of it.
    fn rest(&mut self) -> Result<(), String> {
        for round in 0.. {
            if round > 100_000 {
                return Err("it does not come to rest".to_owned());
            }
            if !self.advance() && !self.tick() {
                break;
            }
        }
        for (who, client) in self.clients.iter().filter(|(_, it)| it.manner == Manner::Honest) {
            if client.asking.is_some() || !client.started.is_empty() {
                return Err(format!("{who:?} waits for an answer"));
            }
            if client.views.values().chain(&client.kept).any(|view| view.frozen) {
                return Err(format!("a writer of {who:?} waits for ever"));
            }
        }
        let segments: BTreeSet<u64> = self.segment_of.values().copied().collect();
        segments.into_iter().try_for_each(|segment| self.check(segment))
    }

    /// What holds of a segment at rest.
    fn check(&self, segment: u64) -> Result<(), String> {
        let members = self.members(segment);
        let Some((first, now)) = members.first() else { return Ok(()) };
        if let Some((other, view)) = members.iter().find(|(_, view)| view.object != now.object) {
            return Err(format!("{first:?} has {:?} and {other:?} {:?}", now.object, view.object));
        }
        let value = self.values.get(&now.object).copied().unwrap_or(0);
        let stored = self.stored.get(&segment).copied().unwrap_or(Some(0));
        if let Some(stored) = stored.filter(|stored| *stored != value) {
            return Err(format!("{first:?} reads {value}, {stored} was stored last"));
        }
        let cut = self.clients.iter().flat_map(|(who, client)| {
            client.views.values().filter(|view| view.cut).map(move |view| (who, view))
        });
        for (who, view) in cut.filter(|(_, view)| self.segment_of[&view.object] == segment) {
            if view.object == now.object && !view.late {
                return Err(format!("{who:?} was cut off and still has {:?}", view.object));
            }
            let left = self.values.get(&view.object).copied().unwrap_or(0);
            if left != 0 && !view.late && !self.scribbled.contains(&view.object) {
                return Err(format!("{who:?} was cut off and still reads {left}"));
            }
        }
        Ok(())
    }
}

fn run(seed: u64, mistake: Mistake, traced: bool) -> Result<(), (String, String)> {
    let mut world = World::new(seed, mistake, traced);
    let rounds = 1 + world.random.below(6);
    let outcome = (0..rounds).try_for_each(|_| {
        let steps = 20 + world.random.below(120);
        (0..steps).try_for_each(|_| world.step())?;
        world.rest()
    });
    outcome.map_err(|error| (error, world.trace.unwrap_or_default()))
}

#[test]
fn a_move_loses_nothing_and_leaves_nobody_behind() {
    let simulation = Simulation { test: "-p rackbus-segment --test moves", usual: SEEDS };
    simulation.run(|seed, traced| {
        run(seed, Mistake::None, traced).map_err(|(error, trace)| format!("{error}\n{trace}"))
    });
}

/// A simulation that finds no planted mistake would prove nothing.
#[test]
fn planted_mistakes_are_found() {
    use Mistake::{ForgetFirst, LateCopy, NeverEmptied, UnfreezeAtAdoption};
    for mistake in [UnfreezeAtAdoption, ForgetFirst, LateCopy, NeverEmptied] {
        let found = (0..FOUND_WITHIN).find(|seed| run(*seed, mistake, false).is_err());
        assert!(found.is_some(), "{mistake:?} went unnoticed");
        println!("{mistake:?} is found by seed {found:?}");
    }
}
