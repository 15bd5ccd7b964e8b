//! What the shell asks about the directory, which changes nothing: whose memory a handle leads to, and how much there is.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;

use super::groups::Group;
use super::pages::ExtentEntry;
use super::{ConnectionTarget, Directory, GuestConnection, ObjectId};
use crate::{Handle, NodeId, SessionId};

impl Directory {
    /// The memory of this host that a session's segment has, or that its connection or membership leads to.
    pub fn memory_of(&self, session: SessionId, handle: Handle) -> Option<ObjectId> {
        let own = self.segments.get(&handle).filter(|it| it.session == session);
        if let Some((memory, moving)) = own.and_then(|own| Some((own.memory?, own.moving))) {
            return Some(self.place_in_move(moving, memory));
        }
        let (owner, connection) = self.owner_of(session, handle)?;
        let (target, _) =
            self.guests.get(&(owner, connection)).filter(|_| owner == self.settings.node)?;
        match target {
            ConnectionTarget::Segment(handle) => {
                let segment = self.segments.get(handle)?;
                Some(self.place_in_move(segment.moving, segment.memory?))
            }
            ConnectionTarget::Group(id) => {
                let group = self.groups.get(id)?;
                Some(self.place_in_move(group.moving(), group.memory()))
            }
            ConnectionTarget::Interrupt(..) | ConnectionTarget::Pages(_) => None,
        }
    }

    /// The sessions that may have something mapped of what these connections of another node lead to, each with what it
    /// calls the memory, and one range around all that is asked about of that. Each memory is looked at once, however many
    /// connections lead to it.
    pub fn keepers(
        &self,
        node: NodeId,
        ranges: impl IntoIterator<Item = (Handle, Range<u64>)>,
    ) -> BTreeMap<(SessionId, Handle), Range<u64>> {
        let mut targets: BTreeMap<ConnectionTarget, Range<u64>> = BTreeMap::new();
        for (connection, range) in ranges {
            if let Some((target, _)) = self.guests.get(&(node, connection)) {
                widen(targets.entry(*target), range);
            }
        }
        let mut kept = BTreeMap::new();
        for (target, range) in targets {
            for keeper in self.keepers_of(target) {
                widen(kept.entry(keeper), range.clone());
            }
        }
        kept
    }

    fn keepers_of(&self, target: ConnectionTarget) -> Vec<(SessionId, Handle)> {
        let own = |guests: &mut dyn Iterator<Item = GuestConnection>| -> Vec<(SessionId, Handle)> {
            let own = guests.filter(|(node, _)| *node == self.settings.node);
            own.filter_map(|(_, connection)| self.keeper_of(connection)).collect()
        };
        match target {
            ConnectionTarget::Segment(handle) => {
                let Some(segment) = self.segments.get(&handle) else { return Vec::new() };
                let mut kept = own(&mut segment.guests.keys().copied());
                kept.push((segment.session, handle));
                kept
            }
            ConnectionTarget::Group(id) => {
                self.groups.get(&id).map(|group| own(&mut group.guests())).unwrap_or_default()
            }
            ConnectionTarget::Interrupt(..) | ConnectionTarget::Pages(_) => Vec::new(),
        }
    }

    /// The session that has a connection, and what it calls it.
    pub fn keeper_of(&self, connection: Handle) -> Option<(SessionId, Handle)> {
        self.connections.get(&connection).map(|it| (it.session, it.known_as))
    }

    /// Whether the rack's hosts are machines, which share no memory.
    pub fn between_machines(&self) -> bool {
        self.settings.machines
    }

    /// The node that a session's connection, or its membership of a group, leads to, and the connection.
    pub fn owner_of(&self, session: SessionId, handle: Handle) -> Option<(NodeId, Handle)> {
        let connection = self.connection_known_as(handle)?;
        let found = self.connections.get(&connection).filter(|it| it.session == session)?;
        Some((found.owner, connection))
    }

    /// How many bytes a host exports: none of its segments and groups has more.
    pub fn export_of(&self, node: NodeId) -> u64 {
        let ranges = self.settings.ranges.iter();
        ranges.filter(|(of, _)| *of == node).map(|(_, range)| range.size).max().unwrap_or(0)
    }

    /// How many there are now of what is kept here, each by its name.
    pub fn statistics(&self) -> [(&'static str, usize); 8] {
        [
            ("sessions", self.sessions.len()),
            ("segments", self.segments.len()),
            ("groups", self.groups.len()),
            ("interrupts", self.interrupts.len()),
            ("page extents", self.extents.len()),
            ("connections to others", self.connections.len()),
            ("connections of others", self.guests.len()),
            ("moves under way", self.moves.len()),
        ]
    }

    /// Bytes of what sessions here have made, each by its name, and of what this host exports at most. A member of a group has
    /// the group's bytes.
    pub fn sizes(&self) -> [(&'static str, u64); 4] {
        [
            (
                "segments",
                self.segments.values().filter(|it| it.group.is_none()).map(|it| it.size).sum(),
            ),
            ("groups", self.groups.values().map(Group::size).sum()),
            ("page extents", self.extents.values().map(ExtentEntry::size).sum()),
            ("exported", self.settings.range.size),
        ]
    }
}

/// Makes a range so wide that it has another one in it.
pub fn widen<Key: Ord>(entry: Entry<'_, Key, Range<u64>>, more: Range<u64>) {
    let range = entry.or_insert_with(|| more.clone());
    *range = range.start.min(more.start)..range.end.max(more.end);
}
