//! What is heard of the other node, and takes effect here.

use std::sync::{Arc, PoisonError};

use rackbus_segment::Handle;
use rackbus_segment::message::CarriedMessage;

use super::super::hiding::ConnectionRange;
use super::super::outbox::Outbox;
use super::bells::BellReceiver;
use super::{Applied, CommonMemory, ConnectionKey, End, Far, FarConversation};

/// Bytes of what is stored in one step.
const WORD: u64 = 8;

/// What is said in a conversation that another one has replaced.
const REPLACED: &str = "it has begun another conversation";

impl Far {
    /// Hears what is no message of the directory's in a conversation that has not been replaced; what takes effect does so in what `hidden` is given to call, so
    /// that no process sees a part of these ranges changed. The connections whose memory has by that all that the other
    /// side had at first.
    ///
    /// # Errors
    /// What is wrong with it; the conversation ends.
    pub fn hear(
        &self,
        (way, outbox): (FarConversation, &Arc<Outbox>),
        carried: CarriedMessage<'_>,
        hidden: impl FnOnce(&[ConnectionRange], &dyn Fn() -> Applied) -> Applied,
    ) -> Result<Vec<Handle>, String> {
        if !self.lock().is_with(way, outbox) {
            return Err(REPLACED.to_owned());
        }
        let end = |connection| self.lock().ends.get(&(way, connection)).cloned();
        match carried {
            CarriedMessage::Said { .. } => {}
            CarriedMessage::Stores { connection, batch, last, held, runs, data } => {
                // What came too late for a connection that is over is nobody's; what waits for it is released.
                if let Some(End::Memory(pair)) = end(connection) {
                    let whole = pair.hear(batch, last, &runs, &data);
                    if !whole.map_err(|violation| violation.to_string())? {
                        return Ok(Vec::new());
                    }
                    self.lock().staged.push((way, connection));
                } else if !last {
                    return Ok(Vec::new());
                }
                match held {
                    true => self.lock().send(way, &CarriedMessage::Held { connection, batch }),
                    false => return Ok(self.take_effect((way, outbox), hidden)),
                }
            }
            CarriedMessage::Release => return Ok(self.take_effect((way, outbox), hidden)),
            CarriedMessage::Held { .. } => {
                let mut state = self.lock();
                if state.is_with(way, outbox) {
                    state.held += 1;
                }
                drop(state);
                self.kick();
            }
            CarriedMessage::Applied { connection, batch } => {
                if let Some(pair) = self.memory((way, connection)) {
                    pair.applied(batch).map_err(|violation| violation.to_string())?;
                    self.kick();
                }
            }
            CarriedMessage::Rung { connection, count } => {
                if let Some(End::Receiver(receiver)) = end(connection) {
                    receiver.rung(count);
                }
                self.lock().send(way, &CarriedMessage::Reached { connection });
            }
            CarriedMessage::Message { connection, data } => {
                if let Some(End::Receiver(receiver)) = end(connection) {
                    if !receiver.message(data.into_owned()) {
                        return Err("a message that there was no room for".to_owned());
                    }
                    if self.hand_on(connection, &receiver) {
                        self.kick();
                    }
                }
                self.lock().send(way, &CarriedMessage::Reached { connection });
            }
            CarriedMessage::Reached { connection } => {
                if let Some(End::Sender(sender)) = end(connection) {
                    sender.reached();
                }
            }
            CarriedMessage::Taken { connection } => {
                if let Some(End::Sender(sender)) = end(connection) {
                    sender.taken();
                }
            }
        }
        Ok(Vec::new())
    }

    /// All that came and is staged takes effect, and its senders are told.
    fn take_effect(
        &self,
        (way, outbox): (FarConversation, &Arc<Outbox>),
        hidden: impl FnOnce(&[ConnectionRange], &dyn Fn() -> Applied) -> Applied,
    ) -> Vec<Handle> {
        let staged = {
            let mut state = self.lock();
            if !state.is_with(way, outbox) {
                return Vec::new();
            }
            std::mem::take(&mut state.staged)
        };
        let pairs: Vec<(ConnectionKey, Arc<CommonMemory>)> =
            staged.into_iter().filter_map(|link| Some((link, self.memory(link)?))).collect();
        let span = |(link, pair): &(ConnectionKey, Arc<CommonMemory>)| {
            pair.staged_range().map(|(offset, length)| (*link, offset, length))
        };
        let mut spans: Vec<ConnectionRange> = pairs.iter().filter_map(span).collect();
        // One word changes in one step, whoever looks.
        if let [(_, offset, length)] = spans[..]
            && offset / WORD == (offset + length - 1) / WORD
        {
            spans.clear();
        }
        // First, so that nobody is kept from memory while it is read for others, or others' stores take effect.
        let effects = self.effects.write().unwrap_or_else(PoisonError::into_inner);
        let applied = hidden(&spans, &|| self.apply(&pairs, CommonMemory::take_effect));
        drop(effects);
        let mut complete = Vec::new();
        for ((way, connection), batch) in applied {
            let Some(batch) = batch else { continue };
            if (way, batch) == (FarConversation::ToOwner, 1) {
                complete.push(connection);
            }
        }
        complete
    }

    /// Lets batches take effect by `take`, and tells their senders; the caller has the effects for itself until they
    /// are told. So no snapshot that has one of them in it is sent before: a replica knows by the answer what the home
    /// says afterwards.
    fn apply(
        &self,
        pairs: &[(ConnectionKey, Arc<CommonMemory>)],
        take: fn(&CommonMemory) -> Option<u64>,
    ) -> Applied {
        let applied: Applied = pairs.iter().map(|(link, pair)| (*link, take(pair))).collect();
        let mut state = self.lock();
        for (link, batch) in &applied {
            if let Some(batch) = *batch {
                state.answer(*link, batch);
            }
        }
        applied
    }

    /// Lets take effect what was to while memory was moved.
    pub(super) fn catch_up(&self) {
        let mut pairs = self.lock().memories();
        pairs.retain(|(_, pair)| pair.is_overdue());
        if !pairs.is_empty() {
            let _effects = self.effects.write().unwrap_or_else(PoisonError::into_inner);
            self.apply(&pairs, CommonMemory::catch_up);
        }
    }

    /// Hands messages on to an interrupt; whether some wait for room.
    pub(super) fn hand_on(&self, connection: Handle, receiver: &BellReceiver) -> bool {
        let (taken, waiting) = receiver.hand_on();
        let state = self.lock();
        (0..taken).for_each(|_| {
            state.send(FarConversation::ToConnector, &CarriedMessage::Taken { connection })
        });
        waiting
    }
}
