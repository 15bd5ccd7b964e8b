//! What this host's processes are connected to, wherever it is; and the questions that are on
//! their way to other nodes.

use std::ops::Range;

use super::questions::{AwaitedAnswer, PendingQuestion};
use super::{Answer, AttachedObject, Directory, Loss, Recipient, done};
use crate::message::{
    BROADCAST_NODE, Connected, ConnectionChange, ConnectorMessage, Handle, InterruptKind,
    LockHolder, LockOperation, LockReply, LockRequest, MOST_FAR_PARTIES, NodeId, OwnerMessage,
    PeerReply, Question, Refusal, Reply, SegmentId, SegmentKind, SessionEvent, SessionId,
    TargetKind,
};

/// Milliseconds that another node may take for an answer, at most.
const LONGEST: u64 = 3_000;
/// And at least, so that those who do not want to wait have a chance.
const SHORTEST: u64 = 500;

/// Milliseconds that memory may take to be complete after the question for it was answered. With [`LONGEST`] that is
/// twelve seconds, so that the process hears of it before it takes its node for dead (15 s, `attach::line`).
const COMPLETION: u64 = 9_000;

/// A connection of this host's process.
#[derive(Debug)]
pub(super) struct SegmentConnection {
    pub session: SessionId,
    pub owner: NodeId,
    /// What the session calls it: a member of a group knows its segment only.
    pub known_as: Handle,
    /// Whether the far end is still there.
    pub alive: bool,
}

impl Directory {
    pub(super) fn connect(
        &mut self,
        session: SessionId,
        node: NodeId,
        id: SegmentId,
        timeout_ms: u32,
        what: TargetKind,
    ) -> Answer {
        let node = match what {
            TargetKind::Group => self.group_home(),
            TargetKind::Attach => self.settings.node,
            TargetKind::Segment => node,
        };
        let question = Directory::segment_question(id, what);
        self.question(session, node, timeout_ms, question, AwaitedAnswer::Connection)
    }

    pub(super) fn connect_interrupt(
        &mut self,
        session: SessionId,
        node: NodeId,
        kind: InterruptKind,
        number: u32,
        timeout_ms: u32,
    ) -> Answer {
        let question = Question::Interrupt { kind, number };
        self.question(session, node, timeout_ms, question, AwaitedAnswer::Connection)
    }

    pub(super) fn ask_group(&mut self, session: SessionId, id: SegmentId, size: u64) -> Answer {
        let question = Question::Group { id, size: Some(size) };
        let home = self.group_home();
        self.question(session, home, u32::MAX, question, AwaitedAnswer::Member { id, size })
    }

    pub(super) fn map_pages(&mut self, session: SessionId, address: u64, length: u64) -> Answer {
        let inside = |range: &Range<u64>| {
            range.contains(&address) && address.checked_add(length).is_some_and(|e| e <= range.end)
        };
        let range = self.settings.ranges.iter().find(|(_, range)| inside(&range.addresses()));
        let (node, _) = range.ok_or(Refusal::NoSuchSegment)?;
        let question = Question::Pages { address, length };
        self.question(session, *node, u32::MAX, question, AwaitedAnswer::Connection)
    }

    pub(super) fn probe(&mut self, session: SessionId, node: NodeId) -> Answer {
        self.question(session, node, u32::MAX, Question::Probe, AwaitedAnswer::Probe)
    }

    pub(super) fn alive(&mut self, session: SessionId, holder: LockHolder) -> Answer {
        let question = Question::Alive(holder.session);
        self.question(session, holder.node, u32::MAX, question, AwaitedAnswer::Alive)
    }

    /// Asks the host of a connection's memory for something about a lock in it.
    pub(super) fn lock_far(
        &mut self,
        session: SessionId,
        keeper: Handle,
        request: LockRequest,
    ) -> Answer {
        let (owner, connection) = self.owner_of(session, keeper).ok_or(Refusal::Stale)?;
        if self.connections.get(&connection).is_none_or(|it| !it.alive) {
            return Err(Refusal::Stale);
        }
        // Here, and not by the owner only: with more of them the question may be longer than a packet, and its
        // conversation would end with it.
        if request.operation.parties().len() > MOST_FAR_PARTIES {
            return Err(Refusal::TooMany(MOST_FAR_PARTIES as u32));
        }
        let taken = match request.operation {
            LockOperation::Take { attempt } => Some((connection, request.offset, attempt)),
            _ => None,
        };
        let what = Question::Lock { connection, session, request };
        self.question(session, owner, u32::MAX, what, AwaitedAnswer::Lock(taken))
    }

    /// Gives back what was taken for somebody who was told that nobody answers. No answer to this is waited for.
    fn give_back(
        &mut self,
        session: SessionId,
        owner: NodeId,
        (connection, offset, attempt): (Handle, u64, u64),
    ) {
        let request = LockRequest { offset, operation: LockOperation::GiveBack { attempt } };
        let what = Question::Lock { connection, session, request };
        let (request, connection) = (self.handle().0, self.handle());
        let ask = ConnectorMessage::Question { request, connection, what };
        self.send(Recipient::Ask(owner, ask), Vec::new());
    }

    fn question(
        &mut self,
        session: SessionId,
        owner: NodeId,
        timeout_ms: u32,
        what: Question,
        asked: AwaitedAnswer,
    ) -> Answer {
        if owner == BROADCAST_NODE || !self.settings.hosts.contains_key(&owner) {
            return Err(Refusal::NoSuchNode);
        }
        self.questions.admit(session, owner)?;
        self.count_more(session, asked.counts())?;
        let (request, connection) = (self.handle().0, self.handle());
        let wait = u64::from(timeout_ms).clamp(SHORTEST, LONGEST);
        let deadline = Some(self.now.saturating_add(wait));
        let question = PendingQuestion { session, owner, connection, what: asked, deadline };
        self.questions.insert(request, question);
        self.send(
            Recipient::Ask(owner, ConnectorMessage::Question { request, connection, what }),
            Vec::new(),
        );
        Ok(None)
    }

    /// An owner's node says something.
    pub(super) fn hear_tell(
        &mut self,
        from: NodeId,
        tell: OwnerMessage,
        attached: Vec<AttachedObject>,
    ) {
        match tell {
            OwnerMessage::Answer { request, answer } => {
                if self.questions.get(request).is_some_and(|pending| pending.owner == from) {
                    self.answered(request, answer, attached);
                }
            }
            OwnerMessage::Remote { connection, change } => {
                let Some((session, known_as)) = self.known(from, connection) else { return };
                let Some(it) = self.connections.get_mut(&connection) else { return };
                it.alive &= !change.is_final();
                let connection = known_as;
                self.send(
                    Recipient::Event(session, SessionEvent::Remote { connection, change }),
                    Vec::new(),
                );
            }
            OwnerMessage::Freeze { ticket, connection, offset, length } => {
                let Some((session, keeper)) = self.known(from, connection) else { return };
                let event = SessionEvent::Freeze { ticket, keeper, offset, length };
                self.send(Recipient::Event(session, event), Vec::new());
            }
            OwnerMessage::Adopt { ticket, connection, offset, length } => {
                let Some((session, keeper)) = self.known(from, connection) else { return };
                let event = SessionEvent::Adopt { ticket, keeper, offset, length, from: offset };
                self.send(Recipient::Event(session, event), attached);
            }
            OwnerMessage::Unfreeze { ticket, connection, offset, length } => {
                let Some((session, keeper)) = self.known(from, connection) else { return };
                let event = SessionEvent::Unfreeze { ticket, keeper, offset, length };
                self.send(Recipient::Event(session, event), Vec::new());
            }
        }
    }

    /// The session behind a live connection to that owner's node, and what it calls it.
    fn known(&self, owner: NodeId, connection: Handle) -> Option<(SessionId, Handle)> {
        let connection = self.connections.get(&connection)?;
        let here = connection.owner == owner && connection.alive;
        here.then_some((connection.session, connection.known_as))
    }

    /// The connection that a session means by a handle: a member of a group knows its segment only.
    pub(super) fn connection_known_as(&self, handle: Handle) -> Option<Handle> {
        if self.connections.contains_key(&handle) {
            return Some(handle);
        }
        self.segments.get(&handle)?.group
    }

    /// A session that keeps memory through a connection has frozen it, or adopted the new one.
    pub(super) fn pass_on(
        &mut self,
        session: SessionId,
        connection: Handle,
        ask: ConnectorMessage,
    ) {
        let mine = self.connections.get(&connection).filter(|it| it.session == session);
        if let Some(owner) = mine.map(|connection| connection.owner) {
            self.send(Recipient::Ask(owner, ask), Vec::new());
        }
    }

    fn answered(
        &mut self,
        request: u64,
        answer: Result<PeerReply, Refusal>,
        attached: Vec<AttachedObject>,
    ) {
        let Some(pending) = self.questions.remove(request) else { return };
        let PendingQuestion { session, owner, connection, what, deadline } = pending;
        let late = deadline.is_none() || !self.sessions.contains_key(&session);
        let disconnect = ConnectorMessage::Disconnect { connection };
        let grant = match answer {
            Ok(grant) => grant,
            Err(refusal) => {
                if what.is_kept() {
                    self.discount(session, what.counts());
                    // Its owner's node may have made it, and have failed to send it with its memory.
                    if matches!(refusal, Refusal::System(_)) {
                        self.send(Recipient::Ask(owner, disconnect), Vec::new());
                    }
                }
                if !late {
                    self.send(Recipient::Reply(session, Reply::Refused(refusal)), Vec::new());
                }
                return;
            }
        };
        if late {
            // Nobody waits for it any more.
            if let AwaitedAnswer::Lock(Some(taken)) = what
                && let PeerReply::Lock(LockReply::Taken { .. }) = grant
            {
                self.give_back(session, owner, taken);
            }
            if what.is_kept() {
                self.discount(session, what.counts());
                let ask = match self.sessions.contains_key(&session) {
                    true => disconnect,
                    false => ConnectorMessage::Died { connection },
                };
                self.send(Recipient::Ask(owner, ask), Vec::new());
            }
            return;
        }
        let mut known_as = connection;
        let reply = match (what, grant) {
            (AwaitedAnswer::Alive, PeerReply::Alive(alive)) => Reply::Alive(alive),
            (AwaitedAnswer::Lock(_), PeerReply::Lock(reply)) => Reply::Lock(reply),
            (AwaitedAnswer::Probe, _) => Reply::Done,
            (AwaitedAnswer::Member { id, size }, _) => {
                known_as = self.new_member(session, id, size, connection);
                Reply::Created { segment: known_as, id, address: None }
            }
            (AwaitedAnswer::Connection, PeerReply::Memory { size, write, address }) => {
                Reply::Connected(Connected { connection, size, write, address })
            }
            (AwaitedAnswer::Connection, PeerReply::Pages { lengths, write }) => {
                Reply::Pages { connection, lengths, write }
            }
            // A peer that answers something else than it was asked is not to be understood.
            (AwaitedAnswer::Connection | AwaitedAnswer::Alive | AwaitedAnswer::Lock(_), _) => {
                if what.is_kept() {
                    self.discount(session, what.counts());
                    self.send(Recipient::Ask(owner, disconnect), Vec::new());
                }
                let refused = Reply::Refused(Refusal::NotResponding);
                return self.send(Recipient::Reply(session, refused), Vec::new());
            }
        };
        if what.is_kept() {
            self.connections
                .insert(connection, SegmentConnection { session, owner, known_as, alive: true });
        }
        self.send(Recipient::Reply(session, reply), attached);
    }

    fn new_member(
        &mut self,
        session: SessionId,
        id: SegmentId,
        size: u64,
        connection: Handle,
    ) -> Handle {
        let segment = self.handle();
        let member = super::segments::Segment {
            id,
            session,
            size,
            kind: SegmentKind::Group,
            memory: None,
            offset: None,
            available: false,
            shared: false,
            group: Some(connection),
            guests: Default::default(),
            lingering: Default::default(),
            moving: None,
            locks: Default::default(),
        };
        self.segments.insert(segment, member);
        segment
    }

    pub(super) fn disconnect(&mut self, session: SessionId, handle: Handle) -> Answer {
        match self.connections.get(&handle) {
            Some(connection) if connection.session == session => {}
            _ => return Err(Refusal::Stale),
        }
        self.leave(handle, ConnectionChange::Removed);
        done()
    }

    /// Ends a connection of this host's; `change` is `Lost` where its process has died.
    pub(super) fn leave(&mut self, handle: Handle, change: ConnectionChange) {
        let Some(connection) = self.connections.remove(&handle) else { return };
        self.discount(connection.session, 1);
        if connection.alive {
            let ask = match change {
                ConnectionChange::Lost => ConnectorMessage::Died { connection: handle },
                _ => ConnectorMessage::Disconnect { connection: handle },
            };
            self.send(Recipient::Ask(connection.owner, ask), Vec::new());
        }
    }

    pub(super) fn drop_connections(&mut self, session: SessionId) {
        let of = |(handle, connection): (&Handle, &SegmentConnection)| {
            (connection.session == session).then_some(*handle)
        };
        let handles: Vec<Handle> = self.connections.iter().filter_map(of).collect();
        for handle in handles {
            self.leave(handle, ConnectionChange::Lost);
        }
    }

    /// The node of owners is gone: what led there is lost, and nobody will answer.
    pub(super) fn lose_owner(&mut self, node: NodeId, loss: Loss) {
        let lost = self.connections.iter_mut().filter(|(_, it)| it.owner == node && it.alive);
        let lost: Vec<(Handle, SessionId)> = lost
            .map(|(_, connection)| {
                connection.alive = false;
                (connection.known_as, connection.session)
            })
            .collect();
        for (connection, session) in lost {
            for change in [ConnectionChange::NotOperational, ConnectionChange::Lost] {
                self.send(
                    Recipient::Event(session, SessionEvent::Remote { connection, change }),
                    Vec::new(),
                );
            }
        }
        // A node that others of its processes' connections come from lives: another conversation was lost.
        let connected = (node, Handle(0))..=(node, Handle(u64::MAX));
        let dead = loss == Loss::Dead && self.guests.range(connected).next().is_none();
        for request in self.questions.to_owner(node) {
            let asked = self.questions.get(request).map(|pending| pending.what);
            let answer = match asked {
                // Locks are taken from those that are dead, and from nobody else.
                Some(AwaitedAnswer::Alive) => Ok(PeerReply::Alive(!dead)),
                _ => Err(Refusal::NotResponding),
            };
            self.answered(request, answer, Vec::new());
        }
    }

    /// The answer to the question for a connection has come, and is told when the memory that it gives is complete: that takes
    /// longer, the larger it is.
    pub fn is_being_completed(&mut self, now: u64, owner: NodeId, connection: Handle) {
        self.at(now);
        let until = self.now.saturating_add(COMPLETION);
        self.questions.prolong(owner, connection, until);
    }

    /// Tells those who have waited long enough.
    pub(super) fn expire_questions(&mut self) {
        for (session, what) in self.questions.expire(self.now) {
            let reply = match what {
                // A node that is slow says nothing of its processes, and locks are taken from
                // those that are dead.
                AwaitedAnswer::Alive => Reply::Alive(true),
                _ => Reply::Refused(Refusal::NotResponding),
            };
            self.send(Recipient::Reply(session, reply), Vec::new());
        }
    }
}
