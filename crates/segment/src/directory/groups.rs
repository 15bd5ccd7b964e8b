//! Multicast groups (reflective memory): memory that every member maps, so that one store reaches
//! all of them.
//!
//! A group's memory is kept by its *home*, the host of the rack with the lowest node id, for as
//! long as it has members. Without multicast hardware this is what every member's copy being equal
//! comes down to: that there is one.

use std::collections::BTreeSet;

use super::{Attached, Directory, Guest, Led, Objects, Output, To, system};
use crate::message::{Change, Grant, NodeId, ObjectId, Refusal, SegmentId, Share, Tell};

/// A group whose home this host is.
#[derive(Debug)]
pub(super) struct Group {
    memory: ObjectId,
    size: u64,
    offset: u64,
    members: BTreeSet<Guest>,
    senders: BTreeSet<Guest>,
}

impl Directory {
    /// The host that keeps groups' memory.
    pub(super) fn group_home(&self) -> NodeId {
        self.settings.hosts.keys().next().copied().unwrap_or(self.settings.node)
    }

    /// A new member (with a size) or sender of a group.
    pub(super) fn join_group(
        &mut self,
        guest: Guest,
        id: SegmentId,
        size: Option<u64>,
        objects: &mut dyn Objects,
    ) -> Result<(Grant, Vec<Attached>), Refusal> {
        if self.group_home() != self.settings.node {
            return Err(Refusal::NoSuchSegment);
        }
        // The memory is this host's, so its rules are the group's.
        let rule = self.rule(id, guest.0);
        if rule == Share::None || (size.is_some() && rule < Share::Write) {
            return Err(Refusal::Denied);
        }
        let write = rule == Share::Write;
        if let (Some(size), false) = (size, self.groups.contains_key(&id)) {
            let offset = self.take_room(size)?;
            let memory = objects.memory(size).map_err(|cause| {
                self.give_room(offset, size);
                system(cause)
            })?;
            let (members, senders) = Default::default();
            self.groups.insert(id, Group { memory, size, offset, members, senders });
        }
        let group = self.groups.get_mut(&id).ok_or(Refusal::NoSuchSegment)?;
        match size {
            Some(size) if size != group.size => {
                return Err(Refusal::Illegal("the group's other members have another size".into()));
            }
            Some(_) => group.members.insert(guest),
            None => group.senders.insert(guest),
        };
        self.guests.insert(guest, Led::Group(id));
        let grant = Grant::Memory { size: group.size, write, address: None };
        Ok((grant, vec![Attached { object: group.memory, write }]))
    }

    /// A member or sender has left. Without members there is no group.
    pub(super) fn leave_group(&mut self, guest: Guest, id: SegmentId) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        group.members.remove(&guest);
        group.senders.remove(&guest);
        if !group.members.is_empty() {
            return;
        }
        let Some(group) = self.groups.remove(&id) else { return };
        for (node, connection) in group.senders {
            self.guests.remove(&(node, connection));
            let tell = Tell::Remote { connection, change: Change::Lost };
            self.send(To::Tell(node, tell), Vec::new());
        }
        self.give_room(group.offset, group.size);
        self.out.push(Output::Forget(group.memory));
    }
}
