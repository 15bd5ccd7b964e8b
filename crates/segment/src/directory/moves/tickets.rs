//! Requests of owners that are answered when moves have ended.

use crate::directory::{Answer, Directory, Recipient};
use crate::message::{Handle, Refusal, Reply, SessionEvent, SessionId};

/// Somebody who waits for moves.
#[derive(Debug)]
pub(in crate::directory) struct MoveTicket {
    pub(super) session: SessionId,
    /// Moves still under way.
    pub(super) left: u32,
    pub(super) outcome: Result<(), Refusal>,
    /// Whether the session has been told to wait.
    started: bool,
}

impl Directory {
    pub(in crate::directory) fn new_ticket(&mut self, session: SessionId) -> Handle {
        let handle = self.handle();
        let ticket = MoveTicket { session, left: 0, outcome: Ok(()), started: false };
        self.tickets.insert(handle, ticket);
        handle
    }

    /// What to say to who asked: that it is done already, or that it has begun.
    pub(in crate::directory) fn answer_ticket(&mut self, handle: Handle) -> Answer {
        match self.tickets.get_mut(&handle) {
            Some(ticket) if ticket.left > 0 => {
                ticket.started = true;
                Ok(Some((Reply::Started { ticket: handle }, Vec::new())))
            }
            Some(_) => {
                let ticket = self.tickets.remove(&handle);
                ticket.map_or(Ok(()), |ticket| ticket.outcome)?;
                crate::directory::done()
            }
            None => crate::directory::done(),
        }
    }

    pub(in crate::directory) fn ticket_failed(&mut self, handle: Handle, why: Refusal) {
        if let Some(ticket) = self.tickets.get_mut(&handle) {
            ticket.outcome = Err(why);
        }
    }

    pub(super) fn ticket_step(&mut self, handle: Handle) {
        let Some(ticket) = self.tickets.get_mut(&handle) else { return };
        ticket.left = ticket.left.saturating_sub(1);
        if ticket.left > 0 || !ticket.started {
            return;
        }
        if let Some(ticket) = self.tickets.remove(&handle) {
            let event = SessionEvent::Finished { ticket: handle, outcome: ticket.outcome };
            self.send(Recipient::Event(ticket.session, event), Vec::new());
        }
    }

    pub(in crate::directory) fn drop_tickets(&mut self, session: SessionId) {
        self.tickets.retain(|_, ticket| ticket.session != session);
    }

    /// Who waits for a move that is under way.
    pub(in crate::directory) fn waiting_for(&self, moving: Option<Handle>) -> Vec<Handle> {
        let one = moving.and_then(|handle| self.moves.get(&handle));
        one.map_or_else(Vec::new, |one| {
            std::iter::once(one.ticket).chain(one.again.iter().copied()).collect()
        })
    }
}
