//! Extents: memory in the rack's address space whose pages are opened to one host at a time, and
//! closed again (Marlin's global pool, section 3).
//!
//! An extent's own memory is never given to anybody but its process. Pages that are opened move
//! into memory of their own, which is what the other host gets; when they are closed they move
//! back, and what was left with the other host is emptied (invariant I4). When their owner frees the extent or dies, who
//! maps pages that are open reads what they held last.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::moves::{Keeper, MovedMemory};
use super::{
    Answer, AttachedObject, ConnectionTarget, Directory, DirectoryAction, GuestConnection, Objects,
    Recipient, system,
};
use crate::message::{
    ConnectionChange, Handle, NodeId, ObjectId, OwnerMessage, PeerReply, Refusal, Reply, SessionId,
};

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// Pieces that one mapping may be made of: each is a descriptor beside the answer.
const MAX_PIECES: u32 = 64;

/// Memory of a process in the rack's address space.
#[derive(Debug)]
pub(super) struct ExtentEntry {
    session: SessionId,
    offset: u64,
    size: u64,
    memory: ObjectId,
    /// What is opened, by its first byte.
    opened: BTreeMap<u64, Opened>,
    /// The move that is under way, with what it is for.
    moving: Option<(Handle, Opening)>,
}

impl ExtentEntry {
    pub(super) fn size(&self) -> u64 {
        self.size
    }
}

/// Pages that one host may reach.
#[derive(Debug)]
struct Opened {
    length: u64,
    memory: ObjectId,
    node: NodeId,
    write: bool,
    guests: BTreeSet<GuestConnection>,
}

/// Pages on their way to being opened, or closed.
#[derive(Debug, Clone, Copy)]
struct Opening {
    memory: ObjectId,
    node: NodeId,
    write: bool,
}

impl Directory {
    pub(super) fn allocate(
        &mut self,
        session: SessionId,
        size: u64,
        objects: &mut dyn Objects,
    ) -> Answer {
        if size == 0 || !size.is_multiple_of(PAGE) {
            return Err(Refusal::Illegal("an extent has whole pages of 4096 bytes".into()));
        }
        self.count(session)?;
        let offset = self.take_room(size).inspect_err(|_| self.discount(session, 1))?;
        let memory = objects.memory(size).map_err(|cause| {
            self.give_room(offset, size);
            self.discount(session, 1);
            system(cause)
        })?;
        let extent = self.handle();
        let opened = BTreeMap::new();
        self.extents
            .insert(extent, ExtentEntry { session, offset, size, memory, opened, moving: None });
        let address = self.settings.range.base + offset;
        Ok(Some((Reply::Extent { extent, address }, vec![AttachedObject::whole(memory)])))
    }

    fn own_extent(
        &mut self,
        session: SessionId,
        handle: Handle,
    ) -> Result<&mut ExtentEntry, Refusal> {
        match self.extents.get_mut(&handle) {
            Some(extent) if extent.session == session => Ok(extent),
            _ => Err(Refusal::Stale),
        }
    }

    pub(super) fn free(&mut self, session: SessionId, handle: Handle) -> Answer {
        self.own_extent(session, handle)?;
        let ticket = self.new_ticket(session);
        self.end_extent(handle, ConnectionChange::Removed, Some(ticket));
        self.answer_ticket(ticket)
    }

    pub(super) fn drop_extents(&mut self, session: SessionId) {
        let of = |(handle, extent): (&Handle, &ExtentEntry)| {
            (extent.session == session).then_some(*handle)
        };
        let handles: Vec<Handle> = self.extents.iter().filter_map(of).collect();
        for handle in handles {
            self.end_extent(handle, ConnectionChange::Lost, None);
        }
    }

    /// Ends an extent, and tells those who reach pages of it `change`; `ticket` waits until nothing can be read of what
    /// is being closed.
    fn end_extent(&mut self, handle: Handle, change: ConnectionChange, ticket: Option<Handle>) {
        let Some(extent) = self.extents.remove(&handle) else { return };
        self.discount(extent.session, 1);
        let mut waiting = self.waiting_for(extent.moving.map(|(moving, _)| moving));
        waiting.extend(ticket);
        // What is being closed is still among what is open; what is being opened was not given to anybody.
        let moved = extent.moving.map(|(_, opening)| opening.memory);
        let opening = moved.filter(|it| extent.opened.values().all(|opened| opened.memory != *it));
        self.out.extend(opening.map(DirectoryAction::Forget));
        for opened in extent.opened.into_values() {
            self.lose_guests(opened.guests, change);
            // Who still maps it may read what it held last, unless it is being taken away.
            match moved == Some(opened.memory) {
                true => self.discard(opened.memory, opened.length, waiting.clone()),
                false => self.out.push(DirectoryAction::Forget(opened.memory)),
            }
        }
        self.out.push(DirectoryAction::Forget(extent.memory));
        self.give_room(extent.offset, extent.size);
        // Last: it tells those who wait that nothing is left to be read.
        if let Some((ticket, _)) = extent.moving {
            self.abandon_move(ticket);
        }
    }

    fn lose_guests(&mut self, guests: BTreeSet<GuestConnection>, change: ConnectionChange) {
        for (node, connection) in guests {
            self.guests.remove(&(node, connection));
            let tell = OwnerMessage::Remote { connection, change };
            self.send(Recipient::Tell(node, tell), Vec::new());
        }
    }

    pub(super) fn open_pages(
        &mut self,
        session: SessionId,
        handle: Handle,
        range: Range<u64>,
        (node, write): (NodeId, bool),
        objects: &mut dyn Objects,
    ) -> Answer {
        if !self.settings.hosts.contains_key(&node) {
            return Err(Refusal::NoSuchNode);
        }
        let extent = self.own_extent(session, handle)?;
        check(extent, &range)?;
        if extent.overlapping(&range).next().is_some() {
            return Err(Refusal::Illegal(
                "some of these pages are open already; close them first".into(),
            ));
        }
        let memory = objects.memory(range.end - range.start).map_err(system)?;
        let (from, to) = ((extent.memory, range.start), (memory, 0));
        let ticket = self.new_ticket(session);
        let keepers = vec![Keeper::Session(session, handle)];
        let moving =
            self.begin_move(ticket, MovedMemory::Opening(handle), (from, to), range, keepers);
        if let Some(extent) = self.extents.get_mut(&handle) {
            extent.moving = Some((moving, Opening { memory, node, write }));
        }
        self.answer_ticket(ticket)
    }

    pub(super) fn pages_opened(&mut self, handle: Handle, range: Range<u64>, stayed: bool) {
        let Some(extent) = self.extents.get_mut(&handle) else { return };
        let Some((_, opening)) = extent.moving.take() else { return };
        if stayed {
            return;
        }
        let Opening { memory, node, write } = opening;
        let length = range.end - range.start;
        let guests = BTreeSet::new();
        extent.opened.insert(range.start, Opened { length, memory, node, write, guests });
    }

    pub(super) fn close_pages(
        &mut self,
        session: SessionId,
        handle: Handle,
        range: Range<u64>,
    ) -> Answer {
        let extent = self.own_extent(session, handle)?;
        check(extent, &range)?;
        let whole = |start: &u64, opened: &Opened| {
            (*start, opened.length) == (range.start, range.end - range.start)
        };
        let Some(opened) = extent.opened.get_mut(&range.start) else {
            return Err(Refusal::Illegal("these pages are not open".into()));
        };
        if !whole(&range.start, opened) {
            return Err(Refusal::Illegal(
                "pages are closed as they were opened, all together".into(),
            ));
        }
        let guests = std::mem::take(&mut opened.guests);
        let opening = Opening { memory: opened.memory, node: opened.node, write: opened.write };
        let (from, to) = ((opened.memory, 0), (extent.memory, range.start));
        // A mapping of several pieces is lost as a whole.
        for opened in extent.opened.values_mut() {
            opened.guests.retain(|guest| !guests.contains(guest));
        }
        self.lose_guests(guests, ConnectionChange::Revoked);
        let ticket = self.new_ticket(session);
        let keepers = vec![Keeper::Session(session, handle)];
        let moving =
            self.begin_move(ticket, MovedMemory::Closing(handle), (from, to), range, keepers);
        if let Some(extent) = self.extents.get_mut(&handle) {
            extent.moving = Some((moving, opening));
        }
        self.answer_ticket(ticket)
    }

    pub(super) fn pages_closed(&mut self, handle: Handle, range: Range<u64>, stayed: bool) {
        let Some(extent) = self.extents.get_mut(&handle) else { return };
        let Some((_, opening)) = extent.moving.take() else { return };
        if stayed {
            return;
        }
        extent.opened.remove(&range.start);
        self.out.push(DirectoryAction::Forget(opening.memory));
    }

    /// Another host's process wants to reach pages.
    pub(super) fn reach_pages(
        &mut self,
        guest: GuestConnection,
        address: u64,
        length: u64,
    ) -> Result<(PeerReply, Vec<AttachedObject>), Refusal> {
        let base = self.settings.range.base;
        let found = self.extents.iter_mut().find_map(|(handle, extent)| {
            let start = address.checked_sub(base + extent.offset)?;
            let end = start.checked_add(length).filter(|end| *end <= extent.size)?;
            Some((*handle, extent, start..end))
        });
        // Not opened, not there, another's: one answer, which tells nothing.
        let (handle, extent, range) = found.ok_or(Refusal::Denied)?;
        if range.is_empty() || !range.start.is_multiple_of(PAGE) || !length.is_multiple_of(PAGE) {
            return Err(Refusal::Illegal("pages have borders at multiples of 4096".into()));
        }
        if extent.moving.is_some() {
            return Err(Refusal::Busy);
        }
        let (pieces, write) = extent.pieces(&range, guest.0).ok_or(Refusal::Denied)?;
        if u32::try_from(pieces.len()).is_ok_and(|count| count > MAX_PIECES) {
            return Err(Refusal::TooMany(MAX_PIECES));
        }
        let mut loans = Vec::new();
        for (start, opened) in pieces.iter().filter_map(|it| extent.opened.get_key_value(it)) {
            let range = (extent.offset + start, opened.length);
            loans.push(self.windows.memory(guest, range, opened.write)?);
        }
        let mut attached = Vec::new();
        let mut lengths = Vec::new();
        for start in pieces {
            let Some(opened) = extent.opened.get_mut(&start) else { return Err(Refusal::Denied) };
            opened.guests.insert(guest);
            attached.push(AttachedObject { object: opened.memory, write: opened.write });
            lengths.push(opened.length);
        }
        self.guests.insert(guest, (ConnectionTarget::Pages(handle), loans));
        Ok((PeerReply::Pages { lengths, write }, attached))
    }

    pub(super) fn guest_left_pages(&mut self, guest: GuestConnection, handle: Handle) {
        let Some(extent) = self.extents.get_mut(&handle) else { return };
        for opened in extent.opened.values_mut() {
            opened.guests.remove(&guest);
        }
    }
}

impl ExtentEntry {
    /// The opened ranges that share a byte with `range`.
    fn overlapping(&self, range: &Range<u64>) -> impl Iterator<Item = (&u64, &Opened)> {
        let (start, end) = (range.start, range.end);
        self.opened.range(..end).filter(move |(from, opened)| **from + opened.length > start)
    }

    /// The opened ranges that `range` is made of, if it is, and all are open to `node`; and
    /// whether it may store to all of them.
    fn pieces(&self, range: &Range<u64>, node: NodeId) -> Option<(Vec<u64>, bool)> {
        let (mut at, mut write, mut starts) = (range.start, true, Vec::new());
        while at < range.end {
            let opened = self.opened.get(&at).filter(|opened| opened.node == node)?;
            starts.push(at);
            write &= opened.write;
            at += opened.length;
        }
        (at == range.end).then_some((starts, write))
    }
}

/// Whether a range is of whole pages inside of an extent that is at rest.
fn check(extent: &ExtentEntry, range: &Range<u64>) -> Result<(), Refusal> {
    if range.is_empty()
        || range.end > extent.size
        || !range.start.is_multiple_of(PAGE)
        || !range.end.is_multiple_of(PAGE)
    {
        return Err(Refusal::Illegal(
            "pages lie inside of the extent, at multiples of 4096".into(),
        ));
    }
    match extent.moving {
        Some(_) => Err(Refusal::Busy),
        None => Ok(()),
    }
}
