//! The host's own segments: made, offered, taken back, removed.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use rackbus_fabric::sharing::{MOST_CHANGES, TooManyChanges};

use super::locks::FarLocks;
use super::moves::{Keeper, Lingering, MovedMemory, RevokedHolders};
use super::{
    Answer, AttachedObject, ConnectionTarget, Directory, DirectoryAction, GuestConnection, Objects,
    Recipient, done, system,
};
use crate::message::{
    ConnectionChange, FIRST_FREE_ID, Handle, NodeId, ObjectId, OwnerMessage, PeerReply, Question,
    Refusal, Reply, SegmentAccess, SegmentEntry, SegmentId, SegmentKind, SessionEvent, SessionId,
    TargetKind, Withdrawal,
};

/// Bytes of the largest segment or extent.
const MAX_SIZE: u64 = 1 << 62;

/// Segments in one reply to a list.
const LISTED: usize = 128;
/// Connections of each of them.
const LISTED_CONNECTIONS: usize = 32;

/// A segment of this host.
#[derive(Debug)]
pub(super) struct Segment {
    pub id: SegmentId,
    pub session: SessionId,
    pub size: u64,
    pub kind: SegmentKind,
    /// `None` while an empty segment has none, and for members of a group.
    pub memory: Option<ObjectId>,
    /// Where in this host's export.
    pub offset: Option<u64>,
    pub available: bool,
    pub shared: bool,
    /// A member's connection to its group.
    pub group: Option<Handle>,
    pub guests: BTreeMap<GuestConnection, SegmentAccess>,
    /// Who may keep a mapping without a right to it.
    pub lingering: Lingering,
    /// The move that is under way.
    pub moving: Option<Handle>,
    /// What parties on other machines have locked in it.
    pub locks: FarLocks,
}

impl Segment {
    /// Whether a connection may store to it.
    pub(super) fn writes(&self, guest: GuestConnection) -> bool {
        self.guests.get(&guest).is_some_and(|share| *share == SegmentAccess::Write)
    }
}

impl Directory {
    pub(super) fn create_segment(
        &mut self,
        session: SessionId,
        (id, choose): (SegmentId, bool),
        size: u64,
        kind: SegmentKind,
        objects: &mut dyn Objects,
    ) -> Answer {
        if !(1..=MAX_SIZE).contains(&size) {
            return Err(Refusal::Size);
        }
        if kind == SegmentKind::Group {
            return self.ask_group(session, id, size);
        }
        let id = match choose {
            true => self.taken_ids.first_free(id.max(FIRST_FREE_ID)).ok_or(Refusal::InUse)?,
            false if self.by_id.contains_key(&id) => return Err(Refusal::InUse),
            false => id,
        };
        self.count(session)?;
        let made = self.make_memory(size, kind, objects);
        let (offset, memory) = made.inspect_err(|_| self.discount(session, 1))?;
        let handle = self.handle();
        self.segments.insert(
            handle,
            Segment {
                id,
                session,
                size,
                kind,
                memory,
                offset,
                available: false,
                shared: false,
                group: None,
                guests: BTreeMap::new(),
                lingering: Lingering::default(),
                moving: None,
                locks: FarLocks::default(),
            },
        );
        self.by_id.insert(id, handle);
        self.taken_ids.take(id);
        let address = offset.map(|offset| self.settings.range.base + offset);
        let attached = memory.map(AttachedObject::whole).into_iter().collect();
        Ok(Some((Reply::Created { segment: handle, id, address }, attached)))
    }

    /// Takes room of the export, and memory for it where the segment has its own.
    fn make_memory(
        &mut self,
        size: u64,
        kind: SegmentKind,
        objects: &mut dyn Objects,
    ) -> Result<(Option<u64>, Option<ObjectId>), Refusal> {
        let offset = self.take_room(size)?;
        if kind == SegmentKind::Empty {
            return Ok((Some(offset), None));
        }
        match objects.memory(size) {
            Ok(memory) => Ok((Some(offset), Some(memory))),
            Err(cause) => {
                self.give_room(offset, size);
                Err(system(cause))
            }
        }
    }

    pub(super) fn give_memory(
        &mut self,
        session: SessionId,
        handle: Handle,
        objects: &mut dyn Objects,
    ) -> Answer {
        let segment = self.own_segment(session, handle)?;
        let unseen = !segment.available && !segment.shared && segment.guests.is_empty();
        let memory = match segment.memory {
            _ if segment.kind != SegmentKind::Empty => None,
            None => Some(objects.memory(segment.size).map_err(system)?),
            // The process could not map it where it wanted, and tries again.
            Some(memory) => Some(memory).filter(|_| unseen && segment.moving.is_none()),
        };
        let memory = memory.ok_or_else(|| {
            Refusal::Illegal(
                "only an empty segment can be given memory, before others use it".into(),
            )
        })?;
        segment.memory = Some(memory);
        Ok(Some((Reply::Memory, vec![AttachedObject::whole(memory)])))
    }

    /// A session's own segment.
    pub(super) fn own_segment(
        &mut self,
        session: SessionId,
        handle: Handle,
    ) -> Result<&mut Segment, Refusal> {
        match self.segments.get_mut(&handle) {
            Some(segment) if segment.session == session => Ok(segment),
            _ => Err(Refusal::Stale),
        }
    }

    pub(super) fn set_available(&mut self, session: SessionId, handle: Handle) -> Answer {
        let segment = self.own_segment(session, handle)?;
        if segment.kind == SegmentKind::Private {
            return Err(Refusal::Illegal("a private segment cannot be made available".into()));
        }
        if segment.memory.is_none() && segment.group.is_none() {
            return Err(Refusal::Illegal("an empty segment has nothing to offer yet".into()));
        }
        segment.available = true;
        done()
    }

    pub(super) fn set_unavailable(
        &mut self,
        session: SessionId,
        handle: Handle,
        how: Withdrawal,
        objects: &mut dyn Objects,
    ) -> Answer {
        let segment = self.own_segment(session, handle)?;
        // Those who connected while it was available can be cut off later, too.
        if !segment.available && how != Withdrawal::Force {
            return Err(Refusal::Illegal("the segment is not available".into()));
        }
        segment.available = false;
        let guests: Vec<GuestConnection> = segment.guests.keys().copied().collect();
        match how {
            Withdrawal::Quiet => done(),
            Withdrawal::Notify => {
                for (node, connection) in guests {
                    let change = ConnectionChange::Disconnect;
                    self.send(
                        Recipient::Tell(node, OwnerMessage::Remote { connection, change }),
                        Vec::new(),
                    );
                }
                done()
            }
            Withdrawal::Force => {
                let lingers = segment.lingering.lingers(|_| SegmentAccess::None);
                let kept = MovedMemory::Segment(handle);
                self.revoke(session, vec![RevokedHolders { kept, guests, lingers }], objects)
            }
        }
    }

    pub(super) fn share(&mut self, session: SessionId, handle: Handle) -> Answer {
        let segment = self.own_segment(session, handle)?;
        if segment.memory.is_none() {
            return Err(Refusal::Illegal("an empty segment has nothing to share yet".into()));
        }
        segment.shared = true;
        done()
    }

    pub(super) fn remove_segment(&mut self, session: SessionId, handle: Handle) -> Answer {
        self.own_segment(session, handle)?;
        self.end_segment(handle, ConnectionChange::Removed);
        done()
    }

    /// Ends every segment of a session.
    pub(super) fn drop_segments(&mut self, session: SessionId) {
        let of = |(handle, segment): (&Handle, &Segment)| {
            (segment.session == session).then_some(*handle)
        };
        let handles: Vec<Handle> = self.segments.iter().filter_map(of).collect();
        for handle in handles {
            self.end_segment(handle, ConnectionChange::Lost);
        }
    }

    fn end_segment(&mut self, handle: Handle, change: ConnectionChange) {
        let Some(segment) = self.segments.remove(&handle) else { return };
        self.forget_locks(&segment.locks);
        self.discount(segment.session, 1);
        if self.by_id.get(&segment.id) == Some(&handle) {
            self.by_id.remove(&segment.id);
            self.taken_ids.give(segment.id);
        }
        // It is emptied then, also for those who lose no right.
        let told = if segment.moving.is_some() { ConnectionChange::Revoked } else { change };
        for (node, connection) in segment.guests.into_keys() {
            self.guests.remove(&(node, connection));
            let tell = OwnerMessage::Remote { connection, change: told };
            self.send(Recipient::Tell(node, tell), Vec::new());
        }
        if let Some(connection) = segment.group {
            self.leave(connection, change);
        }
        if let Some(object) = segment.memory {
            // Who still maps it may read what it held last, unless it is being taken away.
            match segment.moving {
                Some(_) => self.discard(object, segment.size, self.waiting_for(segment.moving)),
                None => self.out.push(DirectoryAction::Forget(object)),
            }
        }
        if let Some(offset) = segment.offset {
            self.give_room(offset, segment.size);
        }
        // Last: it tells those who wait that nothing is left to be read.
        if let Some(ticket) = segment.moving {
            self.abandon_move(ticket);
        }
    }

    /// Another node's process, or one of this node's, wants to use a segment.
    pub(super) fn connect_guest(
        &mut self,
        guest: GuestConnection,
        id: SegmentId,
        what: TargetKind,
    ) -> Result<(PeerReply, Vec<AttachedObject>), Refusal> {
        let rule = self.rule(id, guest.0);
        let handle = *self.by_id.get(&id).ok_or(Refusal::NoSuchSegment)?;
        let segment = self.segments.get_mut(&handle).ok_or(Refusal::NoSuchSegment)?;
        let open = match what {
            TargetKind::Attach => segment.shared && guest.0 == self.settings.node,
            TargetKind::Segment => segment.available,
            TargetKind::Group => false,
        };
        let Some(memory) = segment.memory.filter(|_| open) else {
            return Err(Refusal::NoSuchSegment);
        };
        if rule == SegmentAccess::None {
            return Err(Refusal::Denied);
        }
        if segment.moving.is_some() {
            return Err(Refusal::Busy);
        }
        let write = rule == SegmentAccess::Write;
        let range = segment.offset.map(|offset| (offset, segment.size));
        let loan = range.map(|range| self.windows.memory(guest, range, write)).transpose()?;
        segment.guests.insert(guest, rule);
        let address = segment.offset.map(|offset| self.settings.range.base + offset);
        let grant = PeerReply::Memory { size: segment.size, write, address };
        let event = SessionEvent::Connected { segment: handle, node: guest.0 };
        let owner = segment.session;
        let target = ConnectionTarget::Segment(handle);
        self.guests.insert(guest, (target, loan.into_iter().collect()));
        self.send(Recipient::Event(owner, event), Vec::new());
        Ok((grant, vec![AttachedObject { object: memory, write }]))
    }

    /// A guest has released a segment.
    pub(super) fn guest_left_segment(&mut self, guest: GuestConnection, handle: Handle) {
        let Some(segment) = self.segments.get_mut(&handle) else { return };
        let Some(share) = segment.guests.remove(&guest) else { return };
        segment.lingering.was_released(guest.0, share);
        let (owner, moving) = (segment.session, segment.moving);
        let event = SessionEvent::Disconnected { segment: handle, node: guest.0 };
        self.send(Recipient::Event(owner, event), Vec::new());
        if let Some(ticket) = moving {
            self.keeper_gone(ticket, Keeper::Guest(guest));
        }
    }

    /// Takes segments and groups away from some of those that are connected to them, and where it is
    /// said so from those that were before and may keep a mapping. Answers when nothing of what their
    /// owners write from then on can be read by them (invariant I4).
    fn revoke(
        &mut self,
        session: SessionId,
        revoked: Vec<RevokedHolders>,
        objects: &mut dyn Objects,
    ) -> Answer {
        let mut begun = Vec::new();
        for RevokedHolders { kept, guests, lingers } in revoked {
            let mut needed = lingers;
            for guest in guests {
                needed |= match kept {
                    MovedMemory::Segment(handle) => self.revoke_segment(handle, guest, objects),
                    MovedMemory::Group(id) => self.revoke_group(id, guest, objects),
                    MovedMemory::Opening(_) | MovedMemory::Closing(_) => false,
                };
            }
            if needed {
                begun.push(kept);
            }
        }
        if begun.is_empty() {
            return done();
        }
        let ticket = self.new_ticket(session);
        for kept in begun {
            match kept {
                MovedMemory::Segment(handle) => self.move_segment(handle, ticket, objects),
                MovedMemory::Group(id) => self.move_group(id, ticket, objects),
                MovedMemory::Opening(_) | MovedMemory::Closing(_) => {}
            }
        }
        self.answer_ticket(ticket)
    }

    /// Takes a segment away from somebody who is connected, but for the memory; whether it was.
    fn revoke_segment(
        &mut self,
        handle: Handle,
        guest: GuestConnection,
        objects: &mut dyn Objects,
    ) -> bool {
        self.end_locks(guest, true, objects);
        let Some(segment) = self.segments.get_mut(&handle) else { return false };
        let Some(share) = segment.guests.remove(&guest) else { return false };
        segment.lingering.was_released(guest.0, share);
        let (owner, moving) = (segment.session, segment.moving);
        self.guests.remove(&guest);
        let tell = OwnerMessage::Remote { connection: guest.1, change: ConnectionChange::Revoked };
        self.send(Recipient::Tell(guest.0, tell), Vec::new());
        let event = SessionEvent::Disconnected { segment: handle, node: guest.0 };
        self.send(Recipient::Event(owner, event), Vec::new());
        if let Some(ticket) = moving {
            self.keeper_gone(ticket, Keeper::Guest(guest));
        }
        true
    }

    /// Begins to move a segment into new memory.
    fn move_segment(&mut self, handle: Handle, ticket: Handle, objects: &mut dyn Objects) {
        let Some(segment) = self.segments.get(&handle) else { return };
        let Some(old) = segment.memory else { return };
        if let Some(moving) = segment.moving {
            // Where others have moved on already, it needs another move after this one.
            self.move_again(moving, ticket);
            return;
        }
        let new = match objects.memory(segment.size) {
            Ok(new) => new,
            Err(cause) => return self.ticket_failed(ticket, system(cause)),
        };
        let mut keepers = vec![Keeper::Session(segment.session, handle)];
        keepers.extend(segment.guests.keys().map(|guest| Keeper::Guest(*guest)));
        let length = segment.size;
        let kept = MovedMemory::Segment(handle);
        let begun = self.begin_move(ticket, kept, ((old, 0), (new, 0)), 0..length, keepers);
        if let Some(segment) = self.segments.get_mut(&handle) {
            segment.moving = Some(begun);
            segment.lingering.are_left_behind();
        }
    }

    /// A segment is in its new memory.
    pub(super) fn segment_moved(
        &mut self,
        handle: Handle,
        (old, new): (ObjectId, ObjectId),
        again: Vec<Handle>,
        objects: &mut dyn Objects,
    ) {
        if let Some(segment) = self.segments.get_mut(&handle) {
            segment.memory = Some(new);
            segment.moving = None;
            segment.lingering.moved(old == new);
            let settled = segment.locks.settle(new, objects);
            self.settle_later(settled);
            if old != new {
                self.out.push(DirectoryAction::Forget(old));
            }
        }
        for ticket in again {
            self.move_segment(handle, ticket, objects);
        }
    }

    pub(super) fn set_share(
        &mut self,
        session: SessionId,
        ids: RangeInclusive<SegmentId>,
        node: Option<NodeId>,
        share: SegmentAccess,
        objects: &mut dyn Objects,
    ) -> Answer {
        if ids.is_empty() {
            return Err(Refusal::Illegal(
                "the first segment of a range comes before its last".into(),
            ));
        }
        let hosts: Vec<(NodeId, String)> = match node {
            Some(node) => {
                let name = self.settings.hosts.get(&node).ok_or(Refusal::NoSuchNode)?;
                vec![(node, name.clone())]
            }
            None => self.settings.hosts.iter().map(|(node, name)| (*node, name.clone())).collect(),
        };
        let owner = self.settings.hosts.get(&self.settings.node).cloned().unwrap_or_default();
        let names: Vec<&str> = hosts.iter().map(|(_, name)| name.as_str()).collect();
        let set = self.settings.rules.set(&owner, ids.clone(), &names, share.into());
        // Before anything is taken away: who cannot be refused from now on keeps it.
        set.map_err(|TooManyChanges| Refusal::TooMany(MOST_CHANGES as u32))?;
        let mut revoked = Vec::new();
        for (id, handle) in self.by_id.range(ids.clone()) {
            let Some(segment) = self.segments.get(handle) else { continue };
            let lost = |(guest, share): (&GuestConnection, &SegmentAccess)| {
                (self.rule(*id, guest.0) < *share).then_some(*guest)
            };
            let guests: Vec<GuestConnection> = segment.guests.iter().filter_map(lost).collect();
            let lingers = segment.lingering.lingers(|node| self.rule(*id, node));
            revoked.push(RevokedHolders { kept: MovedMemory::Segment(*handle), guests, lingers });
        }
        revoked.extend(self.groups_to_revoke(ids));
        self.revoke(session, revoked, objects)
    }

    pub(super) fn list_segments(&self, skip: u32) -> Reply {
        let skip = usize::try_from(skip).unwrap_or(usize::MAX);
        let segments = self.by_id.iter().filter_map(|(id, handle)| {
            let segment = self.segments.get(handle)?;
            Some(SegmentEntry {
                id: *id,
                size: segment.size,
                available: segment.available,
                group: false,
                session: Some(segment.session),
                connections: segment.guests.keys().map(|(node, _)| *node).collect(),
                address: segment.offset.map(|offset| self.settings.range.base + offset),
            })
        });
        let mut entries = segments.chain(self.group_entries()).skip(skip);
        let mut list: Vec<SegmentEntry> = entries.by_ref().take(LISTED).collect();
        list.iter_mut().for_each(|entry| entry.connections.truncate(LISTED_CONNECTIONS));
        Reply::Segments { list, more: entries.next().is_some() }
    }

    /// Takes room of what this host exports.
    pub(super) fn take_room(&mut self, size: u64) -> Result<u64, Refusal> {
        let free = self.space.free_bytes();
        self.space.allocate(size).ok_or(Refusal::NoSpace { free })
    }

    pub(super) fn give_room(&mut self, offset: u64, size: u64) {
        self.space.free(offset, size);
    }

    /// The question behind a connection to a segment.
    pub(super) fn segment_question(id: SegmentId, what: TargetKind) -> Question {
        match what {
            TargetKind::Segment | TargetKind::Attach => Question::Segment { id, what },
            TargetKind::Group => Question::Group { id, size: None },
        }
    }
}
