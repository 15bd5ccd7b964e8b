//! Who keeps memory that is to be taken away, and whether anybody does.

use std::collections::BTreeMap;

use crate::directory::GuestConnection;
use crate::message::{Handle, NodeId, SegmentAccess, SegmentId, SessionId};

/// Who keeps memory that is being moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::directory) enum Keeper {
    /// A session of this host, and what it calls the memory.
    Session(SessionId, Handle),
    /// A connection of somebody else's to the memory.
    Guest(GuestConnection),
}

/// What is being moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::directory) enum MovedMemory {
    Segment(Handle),
    Group(SegmentId),
    /// Pages of an extent, to be opened.
    Opening(Handle),
    /// Pages of an extent, to be closed.
    Closing(Handle),
}

/// Somebody is to lose something.
#[derive(Debug)]
pub(in crate::directory) struct RevokedHolders {
    pub kept: MovedMemory,
    /// Those who are connected.
    pub guests: Vec<GuestConnection>,
    /// Whether there are others, who were before and may keep a mapping.
    pub lingers: bool,
}

/// Hosts whose processes were connected to memory, have no right to it any more, and may keep a
/// mapping of it; with the most that they could do.
#[derive(Debug, Default)]
pub(in crate::directory) struct Lingering {
    former: BTreeMap<NodeId, SegmentAccess>,
    /// Those of them that the move that is under way leaves behind.
    leaving: BTreeMap<NodeId, SegmentAccess>,
}

impl Lingering {
    /// A host's process has no right to the memory any more.
    pub(in crate::directory) fn was_released(&mut self, node: NodeId, share: SegmentAccess) {
        let most = self.former.entry(node).or_insert(share);
        *most = share.max(*most);
    }

    /// Whether one of them could do more than `allowed` says for its host.
    pub(in crate::directory) fn lingers(&self, allowed: impl Fn(NodeId) -> SegmentAccess) -> bool {
        self.former.iter().chain(&self.leaving).any(|(node, share)| allowed(*node) < *share)
    }

    /// A move has begun, which leaves all of them behind.
    pub(in crate::directory) fn are_left_behind(&mut self) {
        self.leaving = std::mem::take(&mut self.former);
    }

    /// That move is over; `stayed` when the bytes could not be moved, and nobody was left behind.
    pub(in crate::directory) fn moved(&mut self, stayed: bool) {
        let left = std::mem::take(&mut self.leaving);
        if stayed {
            left.into_iter().for_each(|(node, share)| self.was_released(node, share));
        }
    }
}
