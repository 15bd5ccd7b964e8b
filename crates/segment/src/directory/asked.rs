//! What the nodes of other hosts ask of this one for their processes, and what becomes of those that are connected here.

use super::*;
use crate::message::{PeerReply, Question, TargetKind};

impl Directory {
    /// A connector's node says something.
    pub(super) fn hear_ask(
        &mut self,
        from: NodeId,
        ask: ConnectorMessage,
        objects: &mut dyn Objects,
    ) {
        match ask {
            ConnectorMessage::Question { request, connection, what } => {
                let guest = (from, connection);
                let answer = match self.guests.contains_key(&guest) {
                    true => Err(Refusal::Stale),
                    false => self.answer(guest, what, objects),
                };
                let (answer, attached) = match answer {
                    Ok((grant, attached)) => (Ok(grant), attached),
                    Err(refusal) => (Err(refusal), Vec::new()),
                };
                self.send(
                    Recipient::Tell(from, OwnerMessage::Answer { request, answer }),
                    attached,
                );
            }
            ConnectorMessage::Disconnect { connection } => {
                self.drop_guest((from, connection), ConnectionChange::Removed, objects)
            }
            ConnectorMessage::Died { connection } => {
                self.drop_guest((from, connection), ConnectionChange::Lost, objects)
            }
            ConnectorMessage::Frozen { ticket, connection } => {
                self.guest_frozen(ticket, (from, connection))
            }
            ConnectorMessage::Adopted { ticket, connection } => {
                self.guest_adopted(ticket, (from, connection))
            }
        }
    }

    fn answer(
        &mut self,
        guest: GuestConnection,
        what: Question,
        objects: &mut dyn Objects,
    ) -> Result<(PeerReply, Vec<AttachedObject>), Refusal> {
        let connects =
            !matches!(what, Question::Lock { .. } | Question::Alive(_) | Question::Probe);
        if connects && guest.0 != self.settings.node {
            let asked = what.clone();
            return self.connect_bounded(guest, &asked, |it| it.answer_one(guest, what, objects));
        }
        self.answer_one(guest, what, objects)
    }

    fn answer_one(
        &mut self,
        guest: GuestConnection,
        what: Question,
        objects: &mut dyn Objects,
    ) -> Result<(PeerReply, Vec<AttachedObject>), Refusal> {
        match what {
            // A group is asked for by a question of its own. By this one its number would be a segment's, whose bytes
            // nobody has counted.
            Question::Segment { what: TargetKind::Group, .. } => Err(Refusal::NoSuchSegment),
            Question::Segment { id, what } => self.connect_guest(guest, id, what),
            Question::Group { id, size } => self.join_group(guest, id, size, objects),
            Question::Interrupt { kind, number } => {
                self.connect_sender(guest, (kind, number), objects)
            }
            Question::Pages { address, length } => self.reach_pages(guest, address, length),
            Question::Probe => Ok((PeerReply::Here, Vec::new())),
            Question::Alive(session) => {
                Ok((PeerReply::Alive(self.sessions.contains_key(&session)), Vec::new()))
            }
            Question::Lock { connection, session, request } => {
                let reply = self.lock((guest.0, connection), session, request, objects)?;
                Ok((PeerReply::Lock(reply), Vec::new()))
            }
        }
    }

    /// A connection of others to something of this host's has ended: `change` is what those are told who depended on
    /// it, `Removed` where it ended in order.
    pub(super) fn drop_guest(
        &mut self,
        guest: GuestConnection,
        change: ConnectionChange,
        objects: &mut dyn Objects,
    ) {
        self.end_locks(guest, false, objects);
        match self.guests.remove(&guest).map(|(target, _)| target) {
            Some(ConnectionTarget::Segment(handle)) => self.guest_left_segment(guest, handle),
            Some(ConnectionTarget::Group(id)) => self.leave_group(guest, id, change),
            Some(ConnectionTarget::Interrupt(kind, number)) => {
                self.sender_left(guest, (kind, number))
            }
            Some(ConnectionTarget::Pages(extent)) => self.guest_left_pages(guest, extent),
            None => {}
        }
    }
}
