//! Moving memory: how it is taken away from somebody who may keep the old mapping for ever.
//!
//! Every *keeper* (the owner, connectors that stay) is asked to stop writing (freeze); when all
//! have, the bytes are copied; then each is given the new memory, to be read only (adopt). When all
//! use it, they may write again (unfreeze), and what was left behind is emptied. So whoever learns of a
//! store by a signal that no node carries finds it: no keeper reads the old memory when the first
//! one writes to the new. A keeper that does not answer in time is no keeper any more: it is cut
//! off.
//!
//! The other way round there is no time limit: a keeper's writers wait for as long as the node that
//! moves the memory lives. Only that node knows which memory the others have by now; writers that
//! went on by themselves would write where nobody reads, or where somebody reads who has lost his
//! access. A node that dies closes its conversations, and its keepers are cut off, which lets their
//! writers go. One that stalls (stopped, or its host) keeps them waiting until it goes on or is
//! ended; `rackbus status` shows since when it was not heard from.

mod keepers;
mod tickets;

use std::collections::BTreeMap;
use std::ops::Range;

use super::{AttachedObject, Directory, DirectoryAction, GuestConnection, Objects, Recipient};
use crate::message::{
    ConnectionChange, Handle, ObjectId, OwnerMessage, SegmentAccess, SessionEvent, SessionId,
};
pub(super) use keepers::Keeper;
pub(super) use keepers::Lingering;
pub(super) use keepers::MovedMemory;
pub(super) use keepers::RevokedHolders;
pub(super) use tickets::MoveTicket;

/// Milliseconds that a keeper may take for each step.
const PATIENCE: u64 = 2_000;

/// Milliseconds that a tick may be late. More says that this node itself stalled, and may not
/// have heard what keepers answered meanwhile.
const LATE: u64 = 500;

/// Bytes that are emptied at once: it takes less time than telling somebody that it is done.
const AT_ONCE: u64 = 4 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Freezing,
    Copying,
    Adopting,
    /// Everybody is in the new memory, and the old is being emptied.
    Emptying,
}

/// Memory and the first byte in it.
type Place = (ObjectId, u64);

/// A move under way.
#[derive(Debug)]
pub(super) struct DirectoryMove {
    /// Whom to tell when it is done.
    ticket: Handle,
    kept: MovedMemory,
    from: Place,
    to: Place,
    range: Range<u64>,
    phase: Phase,
    /// Whether each keeper has answered in this phase.
    keepers: BTreeMap<Keeper, bool>,
    /// Tickets that need another move after this one.
    again: Vec<Handle>,
    pub deadline: u64,
    /// Whether the keepers were given more time, because this node stalled.
    extended: bool,
}

impl Directory {
    /// Begins a move of `range` of what the keepers call theirs.
    pub(super) fn begin_move(
        &mut self,
        ticket: Handle,
        kept: MovedMemory,
        (from, to): (Place, Place),
        range: Range<u64>,
        keepers: Vec<Keeper>,
    ) -> Handle {
        if let Some(ticket) = self.tickets.get_mut(&ticket) {
            ticket.left += 1;
        }
        let handle = self.handle();
        for keeper in &keepers {
            self.say_freeze(handle, *keeper, &range);
        }
        let keepers = keepers.into_iter().map(|keeper| (keeper, false)).collect();
        let deadline = self.now.saturating_add(PATIENCE);
        let phase = Phase::Freezing;
        let again = Vec::new();
        let extended = false;
        self.moves.insert(
            handle,
            DirectoryMove {
                ticket,
                kept,
                from,
                to,
                range,
                phase,
                keepers,
                again,
                deadline,
                extended,
            },
        );
        handle
    }

    /// After a move that is under way, another is needed for `ticket`.
    pub(super) fn move_again(&mut self, moving: Handle, ticket: Handle) {
        if let Some(one) = self.moves.get_mut(&moving) {
            one.again.push(ticket);
            if let Some(ticket) = self.tickets.get_mut(&ticket) {
                // Held until that move has begun, and is counted itself.
                ticket.left += 1;
            }
        }
    }

    /// The keepers of a move that is over may write again.
    fn say_unfreeze(&mut self, ticket: Handle, one: &DirectoryMove) {
        let (offset, length) = (one.range.start, one.range.end - one.range.start);
        for keeper in one.keepers.keys() {
            match *keeper {
                Keeper::Session(session, keeper) => {
                    let event = SessionEvent::Unfreeze { ticket, keeper, offset, length };
                    self.send(Recipient::Event(session, event), Vec::new());
                }
                Keeper::Guest((node, connection)) => {
                    let tell = OwnerMessage::Unfreeze { ticket, connection, offset, length };
                    self.send(Recipient::Tell(node, tell), Vec::new());
                }
            }
        }
    }

    fn say_freeze(&mut self, ticket: Handle, keeper: Keeper, range: &Range<u64>) {
        let (offset, length) = (range.start, range.end - range.start);
        match keeper {
            Keeper::Session(session, keeper) => {
                let event = SessionEvent::Freeze { ticket, keeper, offset, length };
                self.send(Recipient::Event(session, event), Vec::new());
            }
            Keeper::Guest((node, connection)) => {
                let tell = OwnerMessage::Freeze { ticket, connection, offset, length };
                self.send(Recipient::Tell(node, tell), Vec::new());
            }
        }
    }

    pub(super) fn session_frozen(&mut self, session: SessionId, ticket: Handle, keeper: Handle) {
        self.keeper_answered(ticket, Keeper::Session(session, keeper), Phase::Freezing);
    }

    pub(super) fn guest_frozen(&mut self, ticket: Handle, guest: GuestConnection) {
        self.keeper_answered(ticket, Keeper::Guest(guest), Phase::Freezing);
    }

    pub(super) fn session_adopted(&mut self, session: SessionId, ticket: Handle, keeper: Handle) {
        self.keeper_answered(ticket, Keeper::Session(session, keeper), Phase::Adopting);
    }

    pub(super) fn guest_adopted(&mut self, ticket: Handle, guest: GuestConnection) {
        self.keeper_answered(ticket, Keeper::Guest(guest), Phase::Adopting);
    }

    fn keeper_answered(&mut self, handle: Handle, keeper: Keeper, phase: Phase) {
        let Some(one) = self.moves.get_mut(&handle).filter(|one| one.phase == phase) else {
            return;
        };
        if let Some(answered) = one.keepers.get_mut(&keeper) {
            *answered = true;
        }
        self.advance(handle);
    }

    /// Where the bytes of `memory` are while it is moved by `moving`: those who have followed store to where it will be.
    pub(super) fn place_in_move(&self, moving: Option<Handle>, memory: ObjectId) -> ObjectId {
        match moving.and_then(|moving| self.moves.get(&moving)) {
            Some(one) if matches!(one.phase, Phase::Adopting | Phase::Emptying) => one.to.0,
            Some(_) | None => memory,
        }
    }

    /// A keeper needs the memory no more.
    pub(super) fn keeper_gone(&mut self, handle: Handle, keeper: Keeper) {
        if let Some(one) = self.moves.get_mut(&handle) {
            one.keepers.remove(&keeper);
            self.advance(handle);
        }
    }

    fn advance(&mut self, handle: Handle) {
        let Some(one) = self.moves.get_mut(&handle) else { return };
        if !one.keepers.values().all(|answered| *answered) {
            return;
        }
        // The other phases end with `copied`, in `settle_moves` and with `emptied`.
        if one.phase == Phase::Freezing {
            one.phase = Phase::Copying;
            one.deadline = u64::MAX;
            let length = one.range.end - one.range.start;
            let copy = DirectoryAction::Copy { ticket: handle, from: one.from, to: one.to, length };
            self.out.push(copy);
        }
    }

    /// The bytes of a move are copied, or could not be.
    pub fn copied(
        &mut self,
        now: u64,
        handle: Handle,
        outcome: Result<(), String>,
        objects: &mut dyn Objects,
    ) -> Vec<DirectoryAction> {
        self.at(now);
        // What was moved may have been removed meanwhile; then `abandon_move` released the memory.
        if let Some(one) = self.moves.get_mut(&handle).filter(|one| one.phase == Phase::Copying) {
            one.phase = Phase::Adopting;
            one.deadline = now.saturating_add(PATIENCE);
            match outcome {
                Ok(()) => self.say_adopt(handle),
                Err(cause) => {
                    // The keepers go on where they are; who was to lose the memory has not.
                    if !matches!(one.kept, MovedMemory::Closing(_)) {
                        self.out.push(DirectoryAction::Forget(one.to.0));
                    }
                    one.to = one.from;
                    one.keepers.values_mut().for_each(|answered| *answered = true);
                    let ticket = one.ticket;
                    self.ticket_failed(ticket, super::system(cause));
                }
            }
        }
        self.finish(objects)
    }

    fn say_adopt(&mut self, handle: Handle) {
        let Some(one) = self.moves.get_mut(&handle) else { return };
        let (offset, length) = (one.range.start, one.range.end - one.range.start);
        let (object, from) = one.to;
        one.keepers.values_mut().for_each(|answered| *answered = false);
        let keepers: Vec<Keeper> = one.keepers.keys().copied().collect();
        for keeper in keepers {
            match keeper {
                Keeper::Session(session, keeper) => {
                    let event =
                        SessionEvent::Adopt { ticket: handle, keeper, offset, length, from };
                    self.send(
                        Recipient::Event(session, event),
                        vec![AttachedObject::whole(object)],
                    );
                }
                Keeper::Guest((node, connection)) => {
                    let write = self.guest_writes((node, connection));
                    let tell = OwnerMessage::Adopt { ticket: handle, connection, offset, length };
                    self.send(Recipient::Tell(node, tell), vec![AttachedObject { object, write }]);
                }
            }
        }
        self.advance(handle);
    }

    /// Whether a connector of a segment, or one who joined a group, may store.
    fn guest_writes(&self, guest: GuestConnection) -> bool {
        match self.guests.get(&guest).map(|(target, _)| target) {
            Some(super::ConnectionTarget::Segment(handle)) => {
                let segment = self.segments.get(handle);
                segment.and_then(|it| it.guests.get(&guest)) == Some(&SegmentAccess::Write)
            }
            Some(super::ConnectionTarget::Group(id)) => {
                self.groups.get(id).is_some_and(|group| group.writes(guest))
            }
            _ => false,
        }
    }

    /// Ends the moves that every keeper has followed.
    pub(super) fn settle_moves(&mut self, objects: &mut dyn Objects) {
        loop {
            let settled = self.moves.iter().find(|(_, one)| {
                one.phase == Phase::Adopting && one.keepers.values().all(|answered| *answered)
            });
            let Some(handle) = settled.map(|(handle, _)| *handle) else { return };
            let Some(mut one) = self.moves.remove(&handle) else { return };
            // Before the next move of the same memory begins.
            self.say_unfreeze(handle, &one);
            let (object, offset) = one.from;
            let length = one.range.end - one.range.start;
            if one.to != one.from && self.empty((object, offset), length, handle) {
                one.phase = Phase::Emptying;
                one.deadline = u64::MAX;
                self.moves.insert(handle, one);
            } else {
                self.moved(one, objects);
            }
        }
    }

    /// A move is over, and nothing is left where its memory was.
    fn moved(&mut self, one: DirectoryMove, objects: &mut dyn Objects) {
        let stayed = one.to == one.from;
        match one.kept {
            MovedMemory::Segment(segment) => {
                self.segment_moved(segment, (one.from.0, one.to.0), one.again.clone(), objects);
            }
            MovedMemory::Group(id) => {
                self.group_moved(id, (one.from.0, one.to.0), one.again.clone(), objects);
            }
            MovedMemory::Opening(extent) => self.pages_opened(extent, one.range, stayed),
            MovedMemory::Closing(extent) => self.pages_closed(extent, one.range, stayed),
        }
        for ticket in std::iter::once(one.ticket).chain(one.again) {
            self.ticket_step(ticket);
        }
    }

    /// Has memory emptied; whether that takes so long that `emptied` tells when it is done, with
    /// this job.
    fn empty(&mut self, (object, offset): Place, length: u64, job: Handle) -> bool {
        let later = length > AT_ONCE;
        let job = later.then_some(job);
        self.out.push(DirectoryAction::Empty { job, object, offset, length });
        later
    }

    /// Has all of an object's memory emptied, and releases it. These tickets wait for it.
    pub(super) fn discard(&mut self, object: ObjectId, length: u64, waiting: Vec<Handle>) {
        let job = self.handle();
        if self.empty((object, 0), length, job) {
            for ticket in &waiting {
                if let Some(ticket) = self.tickets.get_mut(ticket) {
                    ticket.left += 1;
                }
            }
            self.emptying.insert(job, waiting);
        }
        self.out.push(DirectoryAction::Forget(object));
    }

    /// Memory is emptied, or could not be.
    pub fn emptied(
        &mut self,
        now: u64,
        job: Handle,
        outcome: Result<(), String>,
        objects: &mut dyn Objects,
    ) -> Vec<DirectoryAction> {
        self.at(now);
        let waiting = match self.moves.get(&job) {
            Some(one) if one.phase == Phase::Emptying => vec![one.ticket],
            // A move that was abandoned meanwhile has passed on its tickets.
            _ => self.emptying.get(&job).cloned().unwrap_or_default(),
        };
        if let Err(cause) = outcome {
            for ticket in waiting {
                self.ticket_failed(ticket, super::system(cause.clone()));
            }
        }
        if self.moves.get(&job).is_some_and(|one| one.phase == Phase::Emptying)
            && let Some(one) = self.moves.remove(&job)
        {
            self.moved(one, objects);
        }
        for ticket in self.emptying.remove(&job).unwrap_or_default() {
            self.ticket_step(ticket);
        }
        self.finish(objects)
    }

    /// What was to be moved is gone.
    pub(super) fn abandon_move(&mut self, handle: Handle) {
        let waiting = self.waiting_for(Some(handle));
        let Some(one) = self.moves.remove(&handle) else { return };
        if one.to != one.from && matches!(one.kept, MovedMemory::Segment(_) | MovedMemory::Group(_))
        {
            self.discard(one.to.0, one.range.end - one.range.start, waiting.clone());
        }
        for ticket in waiting {
            self.ticket_step(ticket);
        }
    }

    /// Cuts off the keepers that did not answer in time.
    pub(super) fn expire_moves(&mut self, objects: &mut dyn Objects) {
        let now = self.now;
        for one in self.moves.values_mut() {
            if one.deadline.saturating_add(LATE) < now && !one.extended {
                one.extended = true;
                one.deadline = now.saturating_add(PATIENCE);
            }
        }
        // For connectors on other machines this node answers itself, when it has read all that it has in common with
        // theirs: that may take long, and is no reason to end their connections.
        let (machines, own) = (self.settings.machines, self.settings.node);
        let is_elsewhere = |keeper: &Keeper| matches!(keeper, Keeper::Guest((node, _)) if machines && *node != own);
        let mut late: Vec<(Handle, Vec<Keeper>)> = Vec::new();
        for (handle, one) in self.moves.iter_mut().filter(|(_, one)| one.deadline <= now) {
            let silent = one.keepers.iter().filter(|(_, answered)| !**answered);
            let (elsewhere, silent): (Vec<_>, Vec<_>) =
                silent.map(|(keeper, _)| *keeper).partition(is_elsewhere);
            if !elsewhere.is_empty() {
                one.deadline = now.saturating_add(PATIENCE);
            }
            late.push((*handle, silent));
        }
        for (handle, silent) in late {
            for keeper in silent {
                match keeper {
                    Keeper::Session(session, _) => self.out.push(DirectoryAction::Cut(session)),
                    Keeper::Guest(guest) => {
                        self.drop_guest(guest, ConnectionChange::Lost, objects);
                        let tell = OwnerMessage::Remote {
                            connection: guest.1,
                            change: ConnectionChange::Revoked,
                        };
                        self.send(Recipient::Tell(guest.0, tell), Vec::new());
                    }
                }
                self.keeper_gone(handle, keeper);
            }
        }
    }
}
