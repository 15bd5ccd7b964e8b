//! Moving memory: how it is taken away from somebody who may keep the old mapping for ever.
//!
//! Every *keeper* (the owner, connectors that stay) is asked to stop writing (freeze); when all
//! have, the bytes are copied; then each is given the new memory, to be read only (adopt). When all
//! use it, they may write again (thaw), and what was left behind is emptied. So whoever learns of a
//! store by a signal that no node carries finds it: no keeper reads the old memory when the first
//! one writes to the new. A keeper that does not answer in time is no keeper any more: it is cut
//! off.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{Answer, Attached, Directory, Guest, Objects, Output, To};
use crate::message::{Change, Event, Handle, ObjectId, Refusal, Reply, SessionId, Tell};

/// Milliseconds that a keeper may take for each step.
const PATIENCE: u64 = 2_000;

/// Who keeps memory that is being moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Keeper {
    /// A session of this host, and what it calls the memory.
    Session(SessionId, Handle),
    /// A connector.
    Guest(Guest),
}

/// What is being moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kept {
    Segment(Handle),
    /// Pages of an extent, to be opened.
    Opening(Handle),
    /// Pages of an extent, to be closed.
    Closing(Handle),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Freezing,
    Copying,
    Adopting,
}

/// Memory and the first byte in it.
type Place = (ObjectId, u64);

/// A move under way.
#[derive(Debug)]
pub(super) struct Move {
    /// Whom to tell when it is done.
    ticket: Handle,
    kept: Kept,
    from: Place,
    to: Place,
    range: Range<u64>,
    phase: Phase,
    /// Whether each keeper has answered in this phase.
    keepers: BTreeMap<Keeper, bool>,
    /// Tickets that need another move after this one.
    again: Vec<Handle>,
    pub deadline: u64,
}

/// Somebody who waits for moves.
#[derive(Debug)]
pub(super) struct Ticket {
    session: SessionId,
    /// Moves still under way.
    left: u32,
    outcome: Result<(), Refusal>,
    /// Whether the session has been told to wait.
    started: bool,
}

impl Directory {
    pub(super) fn new_ticket(&mut self, session: SessionId) -> Handle {
        let handle = self.handle();
        let ticket = Ticket { session, left: 0, outcome: Ok(()), started: false };
        self.tickets.insert(handle, ticket);
        handle
    }

    /// What to say to who asked: that it is done already, or that it has begun.
    pub(super) fn answer_ticket(&mut self, handle: Handle) -> Answer {
        match self.tickets.get_mut(&handle) {
            Some(ticket) if ticket.left > 0 => {
                ticket.started = true;
                Ok(Some((Reply::Started { ticket: handle }, Vec::new())))
            }
            Some(_) => {
                let ticket = self.tickets.remove(&handle);
                ticket.map_or(Ok(()), |ticket| ticket.outcome)?;
                super::done()
            }
            None => super::done(),
        }
    }

    pub(super) fn ticket_failed(&mut self, handle: Handle, why: Refusal) {
        if let Some(ticket) = self.tickets.get_mut(&handle) {
            ticket.outcome = Err(why);
        }
    }

    fn ticket_step(&mut self, handle: Handle) {
        let Some(ticket) = self.tickets.get_mut(&handle) else { return };
        ticket.left = ticket.left.saturating_sub(1);
        if ticket.left > 0 || !ticket.started {
            return;
        }
        if let Some(ticket) = self.tickets.remove(&handle) {
            let event = Event::Finished { ticket: handle, outcome: ticket.outcome };
            self.send(To::Event(ticket.session, event), Vec::new());
        }
    }

    pub(super) fn drop_tickets(&mut self, session: SessionId) {
        self.tickets.retain(|_, ticket| ticket.session != session);
    }

    /// Begins a move of `range` of what the keepers call theirs.
    pub(super) fn begin_move(
        &mut self,
        ticket: Handle,
        kept: Kept,
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
        self.moves.insert(
            handle,
            Move { ticket, kept, from, to, range, phase, keepers, again, deadline },
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
    fn say_thaw(&mut self, ticket: Handle, one: &Move) {
        let (offset, length) = (one.range.start, one.range.end - one.range.start);
        for keeper in one.keepers.keys() {
            match *keeper {
                Keeper::Session(session, keeper) => {
                    let event = Event::Thaw { ticket, keeper, offset, length };
                    self.send(To::Event(session, event), Vec::new());
                }
                Keeper::Guest((node, connection)) => {
                    let tell = Tell::Thaw { ticket, connection, offset, length };
                    self.send(To::Tell(node, tell), Vec::new());
                }
            }
        }
    }

    fn say_freeze(&mut self, ticket: Handle, keeper: Keeper, range: &Range<u64>) {
        let (offset, length) = (range.start, range.end - range.start);
        match keeper {
            Keeper::Session(session, keeper) => {
                let event = Event::Freeze { ticket, keeper, offset, length };
                self.send(To::Event(session, event), Vec::new());
            }
            Keeper::Guest((node, connection)) => {
                let tell = Tell::Freeze { ticket, connection, offset, length };
                self.send(To::Tell(node, tell), Vec::new());
            }
        }
    }

    pub(super) fn session_frozen(&mut self, session: SessionId, ticket: Handle, keeper: Handle) {
        self.keeper_answered(ticket, Keeper::Session(session, keeper), Phase::Freezing);
    }

    pub(super) fn guest_frozen(&mut self, ticket: Handle, guest: Guest) {
        self.keeper_answered(ticket, Keeper::Guest(guest), Phase::Freezing);
    }

    pub(super) fn session_adopted(&mut self, session: SessionId, ticket: Handle, keeper: Handle) {
        self.keeper_answered(ticket, Keeper::Session(session, keeper), Phase::Adopting);
    }

    pub(super) fn guest_adopted(&mut self, ticket: Handle, guest: Guest) {
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
        // The other phases end with `copied` and in `settle_moves`.
        if one.phase == Phase::Freezing {
            one.phase = Phase::Copying;
            one.deadline = u64::MAX;
            let length = one.range.end - one.range.start;
            let copy = Output::Copy { ticket: handle, from: one.from, to: one.to, length };
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
    ) -> Vec<Output> {
        self.now = now;
        // What was moved may have been removed meanwhile; then `abandon_move` let go of the memory.
        if let Some(one) = self.moves.get_mut(&handle).filter(|one| one.phase == Phase::Copying) {
            one.phase = Phase::Adopting;
            one.deadline = now.saturating_add(PATIENCE);
            match outcome {
                Ok(()) => self.say_adopt(handle),
                Err(cause) => {
                    // The keepers go on where they are; who was to lose the memory has not.
                    if !matches!(one.kept, Kept::Closing(_)) {
                        self.out.push(Output::Forget(one.to.0));
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
                    let event = Event::Adopt { ticket: handle, keeper, offset, length, from };
                    self.send(To::Event(session, event), vec![Attached::whole(object)]);
                }
                Keeper::Guest((node, connection)) => {
                    let write = self.guest_writes((node, connection));
                    let tell = Tell::Adopt { ticket: handle, connection, offset, length };
                    self.send(To::Tell(node, tell), vec![Attached { object, write }]);
                }
            }
        }
        self.advance(handle);
    }

    /// Whether a connector of a segment may store.
    fn guest_writes(&self, guest: Guest) -> bool {
        let Some(super::Led::Segment(handle)) = self.guests.get(&guest) else { return false };
        let share = self.segments.get(handle).and_then(|segment| segment.guests.get(&guest));
        share == Some(&crate::message::Share::Write)
    }

    /// Ends the moves that every keeper has followed.
    pub(super) fn settle_moves(&mut self, objects: &mut dyn Objects) {
        loop {
            let settled = self.moves.iter().find(|(_, one)| {
                one.phase == Phase::Adopting && one.keepers.values().all(|answered| *answered)
            });
            let Some(handle) = settled.map(|(handle, _)| *handle) else { return };
            let Some(one) = self.moves.remove(&handle) else { return };
            // Before the next move of the same memory begins.
            self.say_thaw(handle, &one);
            let stayed = one.to == one.from;
            match one.kept {
                Kept::Segment(segment) => {
                    self.segment_moved(segment, (one.from.0, one.to.0), one.again.clone(), objects);
                }
                Kept::Opening(extent) => self.pages_opened(extent, one.range, stayed),
                Kept::Closing(extent) => self.pages_closed(extent, one.range, stayed),
            }
            self.ticket_step(one.ticket);
            for ticket in one.again {
                self.ticket_step(ticket);
            }
        }
    }

    /// What was to be moved is gone.
    pub(super) fn abandon_move(&mut self, handle: Handle) {
        let Some(one) = self.moves.remove(&handle) else { return };
        if one.to != one.from && matches!(one.kept, Kept::Segment(_)) {
            let length = one.range.end - one.range.start;
            self.out.push(Output::Empty { object: one.to.0, offset: 0, length });
            self.out.push(Output::Forget(one.to.0));
        }
        for ticket in std::iter::once(one.ticket).chain(one.again) {
            self.ticket_step(ticket);
        }
    }

    /// Cuts off the keepers that did not answer in time.
    pub(super) fn expire_moves(&mut self) {
        let now = self.now;
        let late = self.moves.iter().filter(|(_, one)| one.deadline <= now);
        let late: Vec<(Handle, Vec<Keeper>)> = late
            .map(|(handle, one)| {
                let silent = one.keepers.iter().filter(|(_, answered)| !**answered);
                (*handle, silent.map(|(keeper, _)| *keeper).collect())
            })
            .collect();
        for (handle, silent) in late {
            for keeper in silent {
                match keeper {
                    Keeper::Session(session, _) => self.out.push(Output::Cut(session)),
                    Keeper::Guest(guest) => {
                        self.drop_guest(guest);
                        let tell = Tell::Remote { connection: guest.1, change: Change::Lost };
                        self.send(To::Tell(guest.0, tell), Vec::new());
                    }
                }
                self.keeper_gone(handle, keeper);
            }
        }
    }
}
