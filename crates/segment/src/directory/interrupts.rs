//! The host's interrupts, and who may send them.
//!
//! An interrupt is a line in shared memory that its senders ring and an event for when its owner
//! sleeps; each sender of a data interrupt has a ring of messages of its own beside it. So a sender
//! that misbehaves or dies spoils nobody's messages but its own.

use std::collections::BTreeMap;

use super::{
    Answer, AttachedObject, ConnectionTarget, Directory, DirectoryAction, GuestConnection,
    LinePart, Objects, Recipient, done, system,
};
use crate::message::{
    ConnectionChange, FIRST_FREE_ID, Handle, InterruptKind, ObjectId, OwnerMessage, PeerReply,
    Refusal, Reply, SessionEvent, SessionId,
};

/// An interrupt of this host.
#[derive(Debug)]
pub(super) struct InterruptEntry {
    line: ObjectId,
    event: ObjectId,
    shared: bool,
    /// Those who made it, and what each calls it.
    owners: BTreeMap<Handle, SessionId>,
    /// Its senders, and the rings of those that send data.
    guests: BTreeMap<GuestConnection, Option<(Handle, ObjectId)>>,
}

impl Directory {
    pub(super) fn create_interrupt(
        &mut self,
        session: SessionId,
        kind: InterruptKind,
        number: Option<u32>,
        shared: bool,
        objects: &mut dyn Objects,
    ) -> Answer {
        if shared && kind == InterruptKind::Data {
            return Err(Refusal::Illegal("a data interrupt has one owner".into()));
        }
        let number = match number {
            Some(number) => number,
            None => {
                let taken = self.taken_interrupts.entry(kind).or_default();
                taken.first_free(FIRST_FREE_ID).ok_or(Refusal::InUse)?
            }
        };
        let key = (kind, number);
        if self.interrupts.get(&key).is_some_and(|it| !(it.shared && shared)) {
            return Err(Refusal::InUse);
        }
        // Counted before the number is known: a ring that comes after the reply is never taken for
        // one that came before it.
        let joined = self.interrupts.get(&key).map(|it| objects.rung(it.line)).transpose();
        let rung = joined.map_err(system)?.unwrap_or(0);
        self.count(session)?;
        if !self.interrupts.contains_key(&key) {
            let made = objects.line(LinePart::Doorbell).and_then(|line| match objects.event() {
                Ok(event) => Ok((line, event)),
                Err(cause) => {
                    self.out.push(DirectoryAction::Forget(line));
                    Err(cause)
                }
            });
            let (line, event) = made.map_err(|cause| {
                self.discount(session, 1);
                system(cause)
            })?;
            let (owners, guests) = Default::default();
            self.interrupts.insert(key, InterruptEntry { line, event, shared, owners, guests });
            self.taken_interrupts.entry(kind).or_default().take(number);
        }
        let handle = self.handle();
        self.interrupt_handles.insert(handle, key);
        let interrupt = self.interrupts.get_mut(&key).ok_or(Refusal::Stale)?;
        interrupt.owners.insert(handle, session);
        let attached =
            vec![AttachedObject::whole(interrupt.line), AttachedObject::whole(interrupt.event)];
        Ok(Some((Reply::Interrupt { interrupt: handle, number, rung }, attached)))
    }

    pub(super) fn remove_interrupt(&mut self, session: SessionId, handle: Handle) -> Answer {
        let key = self.interrupt_handles.get(&handle).ok_or(Refusal::Stale)?;
        let interrupt = self.interrupts.get(key).ok_or(Refusal::Stale)?;
        if interrupt.owners.get(&handle) != Some(&session) {
            return Err(Refusal::Stale);
        }
        self.end_interrupt(handle, ConnectionChange::Removed);
        done()
    }

    pub(super) fn drop_interrupts(&mut self, session: SessionId) {
        let handles: Vec<Handle> = self
            .interrupts
            .values()
            .flat_map(|interrupt| &interrupt.owners)
            .filter(|(_, owner)| **owner == session)
            .map(|(handle, _)| *handle)
            .collect();
        for handle in handles {
            self.end_interrupt(handle, ConnectionChange::Lost);
        }
    }

    fn end_interrupt(&mut self, handle: Handle, change: ConnectionChange) {
        let Some(key) = self.interrupt_handles.remove(&handle) else { return };
        let Some(interrupt) = self.interrupts.get_mut(&key) else { return };
        if let Some(session) = interrupt.owners.remove(&handle) {
            self.discount(session, 1);
        }
        let Some(interrupt) = self.interrupts.get(&key) else { return };
        if !interrupt.owners.is_empty() {
            return;
        }
        let Some(interrupt) = self.interrupts.remove(&key) else { return };
        if let Some(taken) = self.taken_interrupts.get_mut(&key.0) {
            taken.give(key.1);
        }
        for ((node, connection), ring) in interrupt.guests {
            self.guests.remove(&(node, connection));
            let tell = OwnerMessage::Remote { connection, change };
            self.send(Recipient::Tell(node, tell), Vec::new());
            self.out.extend(ring.map(|(_, object)| DirectoryAction::Forget(object)));
        }
        self.out.push(DirectoryAction::Forget(interrupt.line));
        self.out.push(DirectoryAction::Forget(interrupt.event));
    }

    /// Somebody wants to send to an interrupt.
    pub(super) fn connect_sender(
        &mut self,
        guest: GuestConnection,
        key: (InterruptKind, u32),
        objects: &mut dyn Objects,
    ) -> Result<(PeerReply, Vec<AttachedObject>), Refusal> {
        if !self.interrupts.contains_key(&key) {
            return Err(Refusal::NoSuchInterrupt);
        }
        if !self.may_use_any(guest.0) {
            return Err(Refusal::Denied);
        }
        let loan = self.windows.interrupt(guest, key.0, key.1)?;
        let ring = match key.0 {
            InterruptKind::Plain => None,
            InterruptKind::Data => {
                let object = objects.line(LinePart::Ring).map_err(system)?;
                Some((self.handle(), object))
            }
        };
        let interrupt = self.interrupts.get_mut(&key).ok_or(Refusal::NoSuchInterrupt)?;
        interrupt.guests.insert(guest, ring);
        let mut attached =
            vec![AttachedObject::whole(interrupt.line), AttachedObject::whole(interrupt.event)];
        let owners: Vec<(Handle, SessionId)> =
            interrupt.owners.iter().map(|(handle, session)| (*handle, *session)).collect();
        if let Some((ring, object)) = ring {
            for (interrupt, session) in owners {
                let event = SessionEvent::Sender { interrupt, ring };
                self.send(Recipient::Event(session, event), vec![AttachedObject::whole(object)]);
            }
            attached.push(AttachedObject::whole(object));
        }
        self.guests.insert(guest, (ConnectionTarget::Interrupt(key.0, key.1), vec![loan]));
        Ok((PeerReply::Memory { size: 0, write: true, address: None }, attached))
    }

    /// A sender is gone.
    pub(super) fn sender_left(&mut self, guest: GuestConnection, key: (InterruptKind, u32)) {
        let Some(interrupt) = self.interrupts.get_mut(&key) else { return };
        let Some(Some((ring, object))) = interrupt.guests.remove(&guest) else { return };
        let owners: Vec<(Handle, SessionId)> =
            interrupt.owners.iter().map(|(handle, session)| (*handle, *session)).collect();
        for (interrupt, session) in owners {
            self.send(
                Recipient::Event(session, SessionEvent::SenderGone { interrupt, ring }),
                Vec::new(),
            );
        }
        self.out.push(DirectoryAction::Forget(object));
    }
}
