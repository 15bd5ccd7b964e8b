//! Multicast groups (reflective memory): memory that every member maps, so that one store reaches
//! all of them.
//!
//! A group's memory is kept by its *home*, the host of the rack with the lowest node id, for as
//! long as it has members. Without multicast hardware this is what every member's copy being equal
//! comes down to: that there is one. Who loses the right to it is left behind as with segments: the
//! memory moves ([`moves`](super::moves)).

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use super::locks::FarLocks;
use super::moves::{Keeper, Lingering, MovedMemory, RevokedHolders};
use super::{
    AttachedObject, ConnectionTarget, Directory, DirectoryAction, GuestConnection, Objects,
    Recipient, system,
};
use crate::message::{
    ConnectionChange, Handle, NodeId, ObjectId, OwnerMessage, PeerReply, Refusal, SegmentAccess,
    SegmentEntry, SegmentId,
};

/// A group whose home this host is.
#[derive(Debug)]
pub(super) struct Group {
    memory: ObjectId,
    size: u64,
    offset: u64,
    guests: BTreeMap<GuestConnection, Joined>,
    lingering: Lingering,
    /// The move that is under way.
    moving: Option<Handle>,
    /// What parties on other machines have locked in it.
    locks: FarLocks,
}

/// A member of a group, or a sender to it.
#[derive(Debug)]
struct Joined {
    member: bool,
    share: SegmentAccess,
}

impl Group {
    fn has_members(&self) -> bool {
        self.guests.values().any(|joined| joined.member)
    }

    pub(super) fn memory(&self) -> ObjectId {
        self.memory
    }

    /// The bytes of its memory.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Whether its memory is on its way elsewhere.
    pub(super) fn is_moving(&self) -> bool {
        self.moving.is_some()
    }

    /// The move of its memory that is under way.
    pub(super) fn moving(&self) -> Option<Handle> {
        self.moving
    }

    /// What parties on other machines have locked in it.
    pub(super) fn locks(&mut self) -> &mut FarLocks {
        &mut self.locks
    }

    /// All who have joined it, or are connected to it.
    pub(super) fn guests(&self) -> impl Iterator<Item = GuestConnection> {
        self.guests.keys().copied()
    }

    /// Whether one of those who joined may store.
    pub(super) fn writes(&self, guest: GuestConnection) -> bool {
        self.guests.get(&guest).is_some_and(|joined| joined.share == SegmentAccess::Write)
    }
}

impl Directory {
    /// The host that keeps groups' memory.
    pub(super) fn group_home(&self) -> NodeId {
        self.settings.hosts.keys().next().copied().unwrap_or(self.settings.node)
    }

    /// A new member (with a size) or sender of a group.
    pub(super) fn join_group(
        &mut self,
        guest: GuestConnection,
        id: SegmentId,
        size: Option<u64>,
        objects: &mut dyn Objects,
    ) -> Result<(PeerReply, Vec<AttachedObject>), Refusal> {
        if self.group_home() != self.settings.node {
            return Err(Refusal::NoSuchSegment);
        }
        // The memory is this host's, so its rules are the group's.
        let share = self.rule(id, guest.0);
        if share < self.needed(size.is_some()) {
            return Err(Refusal::Denied);
        }
        if let (Some(size), false) = (size, self.groups.contains_key(&id)) {
            let offset = self.take_room(size)?;
            let memory = objects.memory(size).map_err(|cause| {
                self.give_room(offset, size);
                system(cause)
            })?;
            let (guests, lingering, locks) = Default::default();
            let group = Group { memory, size, offset, guests, lingering, moving: None, locks };
            self.groups.insert(id, group);
        }
        let group = self.groups.get_mut(&id).ok_or(Refusal::NoSuchSegment)?;
        if size.is_some_and(|size| size != group.size) {
            return Err(Refusal::OtherSize { size: group.size });
        }
        if group.moving.is_some() {
            return Err(Refusal::Busy);
        }
        let write = share == SegmentAccess::Write;
        let lent = self.windows.memory(guest, (group.offset, group.size), write);
        let loan = match lent {
            Ok(loan) => loan,
            Err(refusal) => {
                // It may have been made for this guest.
                if !group.has_members() {
                    self.end_group(id, ConnectionChange::Removed, None);
                }
                return Err(refusal);
            }
        };
        group.guests.insert(guest, Joined { member: size.is_some(), share });
        self.guests.insert(guest, (ConnectionTarget::Group(id), vec![loan]));
        let grant = PeerReply::Memory { size: group.size, write, address: None };
        Ok((grant, vec![AttachedObject { object: group.memory, write }]))
    }

    /// The least that a member, or a sender, must be allowed to do.
    fn needed(&self, member: bool) -> SegmentAccess {
        if member { SegmentAccess::Write } else { SegmentAccess::Read }
    }

    /// A member or sender has left. Without members there is no group: its senders are told `change`, which says
    /// whether the last member ended in order.
    pub(super) fn leave_group(
        &mut self,
        guest: GuestConnection,
        id: SegmentId,
        change: ConnectionChange,
    ) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let Some(joined) = group.guests.remove(&guest) else { return };
        group.lingering.was_released(guest.0, joined.share);
        if !group.has_members() {
            return self.end_group(id, change, None);
        }
        if let Some(ticket) = group.moving {
            self.keeper_gone(ticket, Keeper::Guest(guest));
        }
    }

    /// Ends a group without members, and tells its senders `change`. Where it is taken away from somebody, `ticket`
    /// waits until nothing of it can be read.
    fn end_group(&mut self, id: SegmentId, change: ConnectionChange, ticket: Option<Handle>) {
        let Some(group) = self.groups.remove(&id) else { return };
        self.forget_locks(&group.locks);
        let mut waiting = self.waiting_for(group.moving);
        waiting.extend(ticket);
        // It is emptied then, also for those who lose no right.
        let change = if waiting.is_empty() { change } else { ConnectionChange::Revoked };
        for (node, connection) in group.guests.into_keys() {
            self.guests.remove(&(node, connection));
            let tell = OwnerMessage::Remote { connection, change };
            self.send(Recipient::Tell(node, tell), Vec::new());
        }
        self.give_room(group.offset, group.size);
        match waiting.is_empty() {
            true => self.out.push(DirectoryAction::Forget(group.memory)),
            false => self.discard(group.memory, group.size, waiting),
        }
        // Last: it tells those who wait that nothing is left to be read.
        if let Some(ticket) = group.moving {
            self.abandon_move(ticket);
        }
    }

    /// Who is to lose groups of these numbers, as the rules are now.
    pub(super) fn groups_to_revoke(&self, ids: RangeInclusive<SegmentId>) -> Vec<RevokedHolders> {
        let revoked = |(id, group): (&SegmentId, &Group)| {
            let lost = |(guest, joined): (&GuestConnection, &Joined)| {
                let rule = self.rule(*id, guest.0);
                (rule < joined.share || rule < self.needed(joined.member)).then_some(*guest)
            };
            let guests = group.guests.iter().filter_map(lost).collect();
            let lingers = group.lingering.lingers(|node| self.rule(*id, node));
            RevokedHolders { kept: MovedMemory::Group(*id), guests, lingers }
        };
        self.groups.range(ids).map(revoked).collect()
    }

    /// Takes a group away from one of its members or senders, but for the memory; whether it was
    /// one.
    pub(super) fn revoke_group(
        &mut self,
        id: SegmentId,
        guest: GuestConnection,
        objects: &mut dyn Objects,
    ) -> bool {
        self.end_locks(guest, true, objects);
        let Some(group) = self.groups.get_mut(&id) else { return false };
        let Some(joined) = group.guests.remove(&guest) else { return false };
        group.lingering.was_released(guest.0, joined.share);
        let moving = group.moving;
        self.guests.remove(&guest);
        let tell = OwnerMessage::Remote { connection: guest.1, change: ConnectionChange::Revoked };
        self.send(Recipient::Tell(guest.0, tell), Vec::new());
        if let Some(ticket) = moving {
            self.keeper_gone(ticket, Keeper::Guest(guest));
        }
        true
    }

    /// Begins to move a group into new memory, for those who stay.
    pub(super) fn move_group(&mut self, id: SegmentId, ticket: Handle, objects: &mut dyn Objects) {
        let Some(group) = self.groups.get(&id) else { return };
        if !group.has_members() {
            // What its senders still map is emptied with the rest.
            return self.end_group(id, ConnectionChange::Revoked, Some(ticket));
        }
        if let Some(moving) = group.moving {
            // Where others have moved on already, it needs another move after this one.
            return self.move_again(moving, ticket);
        }
        let new = match objects.memory(group.size) {
            Ok(new) => new,
            Err(cause) => return self.ticket_failed(ticket, system(cause)),
        };
        let (old, length) = (group.memory, group.size);
        let keepers = group.guests.keys().map(|guest| Keeper::Guest(*guest)).collect();
        let places = ((old, 0), (new, 0));
        let begun = self.begin_move(ticket, MovedMemory::Group(id), places, 0..length, keepers);
        if let Some(group) = self.groups.get_mut(&id) {
            group.moving = Some(begun);
            group.lingering.are_left_behind();
        }
    }

    /// A group is in its new memory.
    pub(super) fn group_moved(
        &mut self,
        id: SegmentId,
        (old, new): (ObjectId, ObjectId),
        again: Vec<Handle>,
        objects: &mut dyn Objects,
    ) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.memory = new;
            group.moving = None;
            group.lingering.moved(old == new);
            let settled = group.locks.settle(new, objects);
            self.settle_later(settled);
            if old != new {
                self.out.push(DirectoryAction::Forget(old));
            }
        }
        for ticket in again {
            self.move_group(id, ticket, objects);
        }
    }

    /// The hosts that have joined a group which is kept here, or are connected to it.
    pub fn group_hosts(&self, id: SegmentId) -> impl Iterator<Item = NodeId> {
        self.groups
            .get(&id)
            .into_iter()
            .flat_map(|group| group.guests.keys().map(|(node, _)| *node))
    }

    /// The groups that are kept here, as entries of the list of segments.
    pub(super) fn group_entries(&self) -> impl Iterator<Item = SegmentEntry> {
        self.groups.iter().map(|(id, group)| SegmentEntry {
            id: *id,
            size: group.size,
            available: true,
            group: true,
            session: None,
            connections: group.guests.keys().map(|(node, _)| *node).collect(),
            address: None,
        })
    }
}
