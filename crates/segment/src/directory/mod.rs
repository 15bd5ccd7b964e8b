//! One host's directory of shared memory: its segments, interrupts and extents, who is connected
//! to them, and what its own processes are connected to elsewhere.
//!
//! A node has two parts to play, and a conversation with each other node for each of them: as the
//! *connector's* node it asks on behalf of its processes (`connections`), as the *owner's* node
//! it answers (`segments`, `interrupts`, `groups`, `pages`). A process that connects to its
//! own host goes the same way, with the node as both.
//!
//! Taking memory away from somebody who may keep the old mapping for ever means to move it
//! (`moves`): those who keep the memory stop writing, it is copied elsewhere, they go on there,
//! and what was left behind is emptied. Memory whose owner has gone is kept by nobody: it is released
//! as it is, and who still maps it may read what it held last.

mod asked;
mod connections;
mod groups;
mod guests;
mod interface;
mod interrupts;
mod locks;
mod moves;
mod notes;
mod numbers;
mod pages;
mod queries;
mod questions;
mod segments;
mod windows;

use std::collections::{BTreeMap, VecDeque};

use rackbus_fabric::FabricHandle;
use rackbus_fabric::pool::Extents;

use crate::message::{
    ConnectionChange, ConnectorMessage, Handle, InterruptKind, NodeId, Notice, OLDEST_VERSION,
    ObjectId, OwnerMessage, Refusal, Reply, SegmentAccess, SegmentId, SessionId, SessionRequest,
    VERSION, Welcome,
};
use connections::SegmentConnection;
use groups::Group;
use guests::{Guests, RefusalCounts};
pub use interface::{
    AttachedObject, DirectoryAction, DirectorySettings, HostRange, LinePart, LockAccess, LockState,
    Loss, Objects, Recipient,
};
use interrupts::InterruptEntry;
use moves::{DirectoryMove, MoveTicket};
use notes::FarNotes;
use numbers::TakenNumbers;
use pages::ExtentEntry;
pub use queries::widen;
use questions::Questions;
use segments::Segment;
use windows::Windows;

/// What one process may have of segments, connections, interrupts and extents together.
pub const MAX_HANDLES: u32 = 65_536;

/// A connection of another host's process to something of this host: its node, and what that
/// node calls it.
type GuestConnection = (NodeId, Handle);

/// See the module's documentation. Time is in milliseconds of the shell's clock.
#[derive(Debug)]
pub struct Directory {
    settings: DirectorySettings,
    windows: Windows,
    next: u64,
    now: u64,
    sessions: BTreeMap<SessionId, u32>,
    space: Extents,
    segments: BTreeMap<Handle, Segment>,
    by_id: BTreeMap<SegmentId, Handle>,
    /// The numbers in that, to choose another one.
    taken_ids: TakenNumbers,
    groups: BTreeMap<SegmentId, Group>,
    interrupts: BTreeMap<(InterruptKind, u32), InterruptEntry>,
    taken_interrupts: BTreeMap<InterruptKind, TakenNumbers>,
    interrupt_handles: BTreeMap<Handle, (InterruptKind, u32)>,
    extents: BTreeMap<Handle, ExtentEntry>,
    /// What connections of others' processes lead to here, and the loans by which they do.
    guests: Guests,
    connections: BTreeMap<Handle, SegmentConnection>,
    /// How much is noted of locks and barriers that other nodes' processes have here.
    far_notes: FarNotes,
    /// When what could not be done of those in memory is tried again.
    locks_due: Option<u64>,
    /// What other machines had too much of.
    refused: RefusalCounts,
    questions: Questions,
    moves: BTreeMap<Handle, DirectoryMove>,
    tickets: BTreeMap<Handle, MoveTicket>,
    /// Memory that is being emptied, with the tickets that wait for it.
    emptying: BTreeMap<Handle, Vec<Handle>>,
    out: Vec<DirectoryAction>,
    /// Messages of this node to itself.
    own: VecDeque<(Recipient, Vec<AttachedObject>)>,
}

/// What a guest's connection leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ConnectionTarget {
    Segment(Handle),
    Group(SegmentId),
    Interrupt(InterruptKind, u32),
    /// Opened pages of an extent, from this offset on.
    Pages(Handle),
}

impl Directory {
    /// An empty one. What others reach of this host is lent by `fabric`, which has the hosts of the
    /// settings.
    pub fn new(settings: DirectorySettings, fabric: FabricHandle) -> Directory {
        let space = Extents::new(settings.range.size);
        Directory {
            windows: Windows::new(&settings, fabric),
            settings,
            next: 1,
            now: 0,
            sessions: BTreeMap::new(),
            space,
            segments: BTreeMap::new(),
            by_id: BTreeMap::new(),
            taken_ids: TakenNumbers::default(),
            groups: BTreeMap::new(),
            interrupts: BTreeMap::new(),
            taken_interrupts: BTreeMap::new(),
            interrupt_handles: BTreeMap::new(),
            extents: BTreeMap::new(),
            guests: Guests::default(),
            connections: BTreeMap::new(),
            far_notes: FarNotes::default(),
            locks_due: None,
            refused: RefusalCounts::default(),
            questions: Questions::default(),
            moves: BTreeMap::new(),
            tickets: BTreeMap::new(),
            emptying: BTreeMap::new(),
            out: Vec::new(),
            own: VecDeque::new(),
        }
    }

    /// A session says something.
    pub fn request(
        &mut self,
        now: u64,
        session: SessionId,
        request: SessionRequest,
        objects: &mut dyn Objects,
    ) -> Vec<DirectoryAction> {
        self.at(now);
        let answer = if matches!(request, SessionRequest::Hello { .. }) {
            self.hello(session, &request)
        } else if self.sessions.contains_key(&session) {
            self.requested(session, request, objects)
        } else {
            Err(Refusal::Version)
        };
        match answer {
            Ok(Some((reply, attached))) => self.send(Recipient::Reply(session, reply), attached),
            Ok(None) => {}
            Err(refusal) => {
                self.send(Recipient::Reply(session, Reply::Refused(refusal)), Vec::new())
            }
        }
        self.finish(objects)
    }

    /// A reply could not be sent with its memory: what it gives is given back, and the session is told `why` instead.
    pub fn unsent(
        &mut self,
        now: u64,
        session: SessionId,
        reply: &Reply,
        why: String,
        objects: &mut dyn Objects,
    ) -> Vec<DirectoryAction> {
        self.at(now);
        if let Some(undo) = reply.undo() {
            // What is gone meanwhile needs not be given back.
            let _ = self.requested(session, undo, objects);
        }
        self.send(Recipient::Reply(session, Reply::Refused(Refusal::System(why))), Vec::new());
        self.finish(objects)
    }

    /// A session answers an event.
    pub fn noticed(
        &mut self,
        now: u64,
        session: SessionId,
        notice: Notice,
        objects: &mut dyn Objects,
    ) -> Vec<DirectoryAction> {
        self.at(now);
        let keeper = match notice {
            Notice::Frozen { keeper, .. } | Notice::Adopted { keeper, .. } => keeper,
            // It is the shell that hides.
            Notice::Hidden { .. } => return self.finish(objects),
        };
        match (notice, self.connection_known_as(keeper)) {
            (Notice::Frozen { ticket, .. }, Some(connection)) => {
                self.pass_on(session, connection, ConnectorMessage::Frozen { ticket, connection });
            }
            (Notice::Adopted { ticket, .. }, Some(connection)) => {
                self.pass_on(session, connection, ConnectorMessage::Adopted { ticket, connection });
            }
            (Notice::Frozen { ticket, .. }, None) => self.session_frozen(session, ticket, keeper),
            (Notice::Adopted { ticket, .. }, None) => self.session_adopted(session, ticket, keeper),
            (Notice::Hidden { .. }, _) => {}
        }
        self.finish(objects)
    }

    /// A session is gone, and with it all that it had.
    pub fn closed(
        &mut self,
        now: u64,
        session: SessionId,
        objects: &mut dyn Objects,
    ) -> Vec<DirectoryAction> {
        self.at(now);
        if self.sessions.remove(&session).is_some() {
            self.drop_connections(session);
            self.drop_segments(session);
            self.drop_interrupts(session);
            self.drop_extents(session);
            self.drop_tickets(session);
        }
        self.finish(objects)
    }

    /// Another node, as a connector's, says something. What came beside it is not looked at.
    pub fn asked(
        &mut self,
        now: u64,
        from: NodeId,
        ask: ConnectorMessage,
        objects: &mut dyn Objects,
    ) -> Vec<DirectoryAction> {
        self.at(now);
        self.hear_ask(from, ask, objects);
        self.finish(objects)
    }

    /// Another node, as an owner's, says something.
    pub fn told(
        &mut self,
        now: u64,
        from: NodeId,
        tell: OwnerMessage,
        attached: Vec<AttachedObject>,
        objects: &mut dyn Objects,
    ) -> Vec<DirectoryAction> {
        self.at(now);
        self.hear_tell(from, tell, attached);
        self.finish(objects)
    }

    /// The conversation with an owner's node has ended, or could not begin.
    pub fn owner_gone(
        &mut self,
        now: u64,
        node: NodeId,
        loss: Loss,
        objects: &mut dyn Objects,
    ) -> Vec<DirectoryAction> {
        self.at(now);
        self.lose_owner(node, loss);
        self.finish(objects)
    }

    /// The conversation with a connector's node has ended.
    pub fn connector_gone(
        &mut self,
        now: u64,
        node: NodeId,
        objects: &mut dyn Objects,
    ) -> Vec<DirectoryAction> {
        self.at(now);
        let first = (node, Handle(0));
        let last = (node, Handle(u64::MAX));
        let gone: Vec<GuestConnection> =
            self.guests.range(first..=last).map(|(guest, _)| *guest).collect();
        for guest in gone {
            // Nobody can ask it whether its processes live: who waits for them goes on without them.
            self.end_locks(guest, true, objects);
            self.drop_guest(guest, ConnectionChange::Lost, objects);
        }
        self.finish(objects)
    }

    /// Does what is due at `now`, in milliseconds: time limits of moves and of answers, and locks that could not be let go.
    pub fn tick(&mut self, now: u64, objects: &mut dyn Objects) -> Vec<DirectoryAction> {
        self.at(now);
        self.expire_questions();
        self.expire_moves(objects);
        self.retry_locks(objects);
        self.finish(objects)
    }

    /// When [`tick`](Directory::tick) is to be called next, if at all.
    pub fn next_tick(&self) -> Option<u64> {
        let moves = self.moves.values().map(|one| one.deadline);
        moves.chain(self.questions.next_due()).chain(self.locks_due).min()
    }

    /// Time does not go back, whoever looked at the clock last.
    fn at(&mut self, now: u64) {
        self.now = self.now.max(now);
    }

    fn hello(&mut self, session: SessionId, request: &SessionRequest) -> Answer {
        let known = matches!(request, SessionRequest::Hello { version } if (OLDEST_VERSION..=VERSION).contains(version));
        if !known || self.sessions.contains_key(&session) {
            return Err(Refusal::Version);
        }
        self.sessions.insert(session, 0);
        let hosts = self.settings.hosts.iter().map(|(node, name)| (*node, name.clone())).collect();
        let (node, machines) = (self.settings.node, self.settings.machines);
        let welcome = Welcome { session, node, hosts, machines };
        Ok(Some((Reply::Welcome(welcome), Vec::new())))
    }

    fn requested(
        &mut self,
        session: SessionId,
        request: SessionRequest,
        objects: &mut dyn Objects,
    ) -> Answer {
        match request {
            SessionRequest::Hello { .. } => Err(Refusal::Version),
            SessionRequest::CreateSegment { id, choose, size, kind } => {
                self.create_segment(session, (id, choose), size, kind, objects)
            }
            SessionRequest::GiveMemory { segment } => self.give_memory(session, segment, objects),
            SessionRequest::SetAvailable { segment } => self.set_available(session, segment),
            SessionRequest::SetUnavailable { segment, how } => {
                self.set_unavailable(session, segment, how, objects)
            }
            SessionRequest::Share { segment } => self.share(session, segment),
            SessionRequest::Remove { segment } => self.remove_segment(session, segment),
            SessionRequest::Connect { node, id, timeout_ms, what } => {
                self.connect(session, node, id, timeout_ms, what)
            }
            // Memory is kept the same by the shell, which asks here for what it does not know itself.
            SessionRequest::Flush { .. } => done(),
            // The shell copies, where it shares no memory with the other host.
            SessionRequest::CopyBuffer | SessionRequest::Copy { .. } => Err(Refusal::Illegal(
                "bytes are copied by the node only to memory of another machine; copy to the mapping".into(),
            )),
            SessionRequest::Lock { keeper, request } => self.lock_far(session, keeper, request),
            SessionRequest::Disconnect { connection } => self.disconnect(session, connection),
            SessionRequest::CreateInterrupt { kind, number, shared } => {
                self.create_interrupt(session, kind, number, shared, objects)
            }
            SessionRequest::RemoveInterrupt { interrupt } => {
                self.remove_interrupt(session, interrupt)
            }
            SessionRequest::ConnectInterrupt { node, kind, number, timeout_ms } => {
                self.connect_interrupt(session, node, kind, number, timeout_ms)
            }
            SessionRequest::Probe { node } => self.probe(session, node),
            SessionRequest::Alive { holder } => self.alive(session, holder),
            SessionRequest::SetShare { first, last, node, share } => {
                self.set_share(session, first..=last, node, share, objects)
            }
            // Borrowed by the shell, where it lends any.
            SessionRequest::ListDevices { .. }
            | SessionRequest::BorrowDevice { .. }
            | SessionRequest::ReturnDevice { .. } => {
                Err(Refusal::NotLent("this node borrows no devices for programs".to_owned()))
            }
            SessionRequest::ListSegments { skip } => {
                Ok(Some((self.list_segments(skip), Vec::new())))
            }
            SessionRequest::Allocate { size } => self.allocate(session, size, objects),
            SessionRequest::Free { extent } => self.free(session, extent),
            SessionRequest::OpenPages { extent, offset, length, node, write } => self.open_pages(
                session,
                extent,
                offset..offset.saturating_add(length),
                (node, write),
                objects,
            ),
            SessionRequest::ClosePages { extent, offset, length } => {
                self.close_pages(session, extent, offset..offset.saturating_add(length))
            }
            SessionRequest::MapPages { address, length } => {
                self.map_pages(session, address, length)
            }
        }
    }

    fn handle(&mut self) -> Handle {
        let handle = Handle(self.next);
        self.next += 1;
        handle
    }

    /// Counts one more thing that a session has.
    fn count(&mut self, session: SessionId) -> Result<(), Refusal> {
        self.count_more(session, 1)
    }

    /// The same of several things, or of none of them where there is no room for all.
    fn count_more(&mut self, session: SessionId, more: u32) -> Result<(), Refusal> {
        let counted = self.sessions.get_mut(&session).ok_or(Refusal::Version)?;
        if counted.saturating_add(more) > MAX_HANDLES {
            return Err(Refusal::TooMany(MAX_HANDLES));
        }
        *counted += more;
        Ok(())
    }

    fn discount(&mut self, session: SessionId, less: u32) {
        if let Some(count) = self.sessions.get_mut(&session) {
            *count = count.saturating_sub(less);
        }
    }

    /// Sends, to this node itself where it is meant.
    fn send(&mut self, to: Recipient, attached: Vec<AttachedObject>) {
        match to {
            Recipient::Ask(node, _) | Recipient::Tell(node, _) if node == self.settings.node => {
                self.own.push_back((to, attached));
            }
            Recipient::Event(session, _) | Recipient::Reply(session, _)
                if !self.sessions.contains_key(&session)
                    && !matches!(to, Recipient::Reply(_, Reply::Refused(_))) => {}
            to => self.out.push(DirectoryAction::Send(to, attached)),
        }
    }

    /// Hears what this node said to itself, and hands out what is to be done.
    fn finish(&mut self, objects: &mut dyn Objects) -> Vec<DirectoryAction> {
        let node = self.settings.node;
        self.settle_moves(objects);
        while let Some((to, attached)) = self.own.pop_front() {
            match to {
                Recipient::Ask(_, ask) => self.hear_ask(node, ask, objects),
                Recipient::Tell(_, tell) => self.hear_tell(node, tell, attached),
                Recipient::Reply(..) | Recipient::Event(..) => {}
            }
            self.settle_moves(objects);
        }
        std::mem::take(&mut self.out)
    }

    /// What the rules let a host do with a segment of this one.
    fn rule(&self, id: SegmentId, node: NodeId) -> SegmentAccess {
        if node == self.settings.node {
            return SegmentAccess::Write;
        }
        let hosts = &self.settings.hosts;
        match (hosts.get(&self.settings.node), hosts.get(&node)) {
            (Some(owner), Some(host)) => self.settings.rules.allowed(owner, id, host).into(),
            _ => SegmentAccess::None,
        }
    }

    /// Whether the rules let a host use anything of this one: interrupts have no rules of their own.
    fn may_use_any(&self, node: NodeId) -> bool {
        let hosts = &self.settings.hosts;
        match (hosts.get(&self.settings.node), hosts.get(&node)) {
            (Some(owner), Some(host)) => self.settings.rules.allows_any(owner, host),
            _ => false,
        }
    }
}

/// An answer to give now, or one that comes later (`None`).
type Answer = Result<Option<(Reply, Vec<AttachedObject>)>, Refusal>;

/// The answer that says only that it is done.
fn done() -> Answer {
    Ok(Some((Reply::Done, Vec::new())))
}

fn system(cause: String) -> Refusal {
    Refusal::System(cause)
}
