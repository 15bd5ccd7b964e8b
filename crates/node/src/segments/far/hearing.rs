//! What is heard of the other node, and takes effect here.

use std::borrow::Cow;
use std::sync::{Arc, PoisonError};

use rackbus_segment::Handle;
use rackbus_segment::coherence::Violation;
use rackbus_segment::message::CarriedMessage;

use super::super::hiding::ConnectionRange;
use super::super::outbox::LetterQueue;
use super::bells::BellReceiver;
use super::{Applied, CommonMemory, ConnectionKey, End, Far, FarConversation, pair};

/// Bytes of what is stored in one step.
const WORD: u64 = 8;

/// What is said in a conversation that another one has replaced.
const REPLACED: &str = "it has begun another conversation";

impl Far {
    /// Hears what is no message of the directory's in a conversation that has not been replaced.
    ///
    /// # Errors
    /// What is wrong with it; the conversation ends.
    pub fn hear(
        &self,
        (way, outbox): (FarConversation, &Arc<LetterQueue>),
        carried: CarriedMessage<'_>,
    ) -> Result<(), String> {
        if !self.lock().is_with(way, outbox) {
            return Err(REPLACED.to_owned());
        }
        let end = |connection| self.lock().ends.get(&(way, connection)).cloned();
        match carried {
            CarriedMessage::Said { .. } => {}
            CarriedMessage::Stores { connection, batch, last, held, runs, data } => {
                let part = (connection, batch, last, held);
                return self
                    .hear_part((way, outbox), part, |pair| pair.hear(batch, last, &runs, &data));
            }
            CarriedMessage::Copied { connection, batch, last, held, offset, data } => {
                let part = (connection, batch, last, held);
                return self.hear_part((way, outbox), part, |pair| {
                    pair.hear_copied(batch, last, offset, data)
                });
            }
            CarriedMessage::LandingWanted { providers } => {
                self.hear_wanted((way, outbox), providers)?;
            }
            CarriedMessage::LandingGiven { offer } => self.hear_given((way, outbox), offer)?,
            CarriedMessage::Landed { connection, batch, held, offset, place, length } => {
                let memory = self.lock().landing_memory();
                let landed = memory.filter(|_| way == FarConversation::ToConnector);
                let data = landed.and_then(|memory| memory.read(place, length));
                let data = data.ok_or("bytes that have landed nowhere")?;
                return self.hear_part((way, outbox), (connection, batch, true, held), |pair| {
                    pair.hear_copied(batch, true, offset, Cow::Owned(data))
                });
            }
            CarriedMessage::Release => self.take_effect((way, outbox)),
            CarriedMessage::Held { .. } => self.hear_held((way, outbox)),
            CarriedMessage::Applied { connection, batch } => {
                self.hear_applied((way, outbox), connection, batch, false)?;
            }
            CarriedMessage::AppliedAlone { connection, batch } => {
                self.hear_applied((way, outbox), connection, batch, true)?;
            }
            CarriedMessage::PassOn { number } => self.pass_on(way, outbox, number)?,
            CarriedMessage::PassedOn { number } => {
                if !self.lock().flushes.passed_on(number) {
                    return Err("a flush that was not to be passed on".to_owned());
                }
                // Another one may be due.
                self.kick();
                self.flushed.notify_all();
            }
            CarriedMessage::Rung { connection, count } => {
                if let Some(End::Receiver(receiver)) = end(connection) {
                    receiver.rung(count);
                }
                self.lock().send(way, &CarriedMessage::Reached { connection });
            }
            CarriedMessage::Message { connection, data } => {
                self.hear_message(way, connection, data.into_owned())?;
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
        Ok(())
    }

    /// The other side holds a batch.
    fn hear_held(&self, (way, outbox): (FarConversation, &Arc<LetterQueue>)) {
        let mut state = self.lock();
        if state.is_with(way, outbox) {
            state.held += 1;
        }
        drop(state);
        self.kick();
    }

    /// A data interrupt's message came for the receiver of a connection.
    fn hear_message(
        &self,
        way: FarConversation,
        connection: Handle,
        data: Vec<u8>,
    ) -> Result<(), String> {
        let end = self.lock().ends.get(&(way, connection)).cloned();
        if let Some(End::Receiver(receiver)) = end {
            if !receiver.message(data) {
                return Err("a message that there was no room for".to_owned());
            }
            if self.hand_on(connection, &receiver) {
                self.kick();
            }
        }
        self.lock().send(way, &CarriedMessage::Reached { connection });
        Ok(())
    }

    /// A part of a batch came, for its connection, with its number, and whether it is the last of it and held: with the last,
    /// the batch takes effect, or is held for others.
    fn hear_part(
        &self,
        (way, outbox): (FarConversation, &Arc<LetterQueue>),
        (connection, batch, last, held): (Handle, u64, bool, bool),
        hear: impl FnOnce(&CommonMemory) -> Result<bool, Violation>,
    ) -> Result<(), String> {
        // What came too late for a connection that is over is nobody's; what waits for it is released.
        if let Some(pair) = self.memory((way, connection)) {
            if !hear(&pair).map_err(|violation| violation.to_string())? {
                return Ok(());
            }
            let mut state = self.lock();
            if !state.is_with(way, outbox) {
                return Err(REPLACED.to_owned());
            }
            if !state.staged.contains(&(way, connection)) {
                state.staged.push((way, connection));
            }
        } else if !last {
            return Ok(());
        }
        if !held {
            self.take_effect((way, outbox));
            return Ok(());
        }
        let state = self.lock();
        if state.is_with(way, outbox) {
            state.send(way, &CarriedMessage::Held { connection, batch });
        }
        Ok(())
    }

    /// A batch took effect at the other side; `alone` where that is the home, and tells it to no further machine.
    fn hear_applied(
        &self,
        (way, outbox): (FarConversation, &Arc<LetterQueue>),
        connection: Handle,
        batch: u64,
        alone: bool,
    ) -> Result<(), String> {
        let Some(pair) = self.memory((way, connection)) else { return Ok(()) };
        // First: who finds nothing under way finds this, too.
        if way == FarConversation::ToOwner && !alone && outbox.has_locks() {
            self.lock().flushes.is_told_on();
        }
        pair.applied(batch).map_err(|violation| violation.to_string())?;
        self.kick();
        Ok(())
    }

    /// All that came and is staged takes effect, and its senders are told.
    fn take_effect(&self, (way, outbox): (FarConversation, &Arc<LetterQueue>)) {
        let staged = {
            let mut state = self.lock();
            if !state.is_with(way, outbox) {
                return;
            }
            std::mem::take(&mut state.staged)
        };
        let pairs: Vec<(ConnectionKey, Arc<CommonMemory>)> =
            staged.into_iter().filter_map(|link| Some((link, self.memory(link)?))).collect();
        self.apply(&pairs, pair::take_effect);
    }

    /// Lets batches take effect by `take` while processes are kept from what changes, and tells their senders, and who
    /// waits for memory that is complete by that. Nobody else has the effects until the senders are told. So no snapshot
    /// that has one of them in it is sent before: a replica knows by the answer what the home says afterwards.
    fn apply(
        &self,
        pairs: &[(ConnectionKey, Arc<CommonMemory>)],
        take: fn(&[Arc<CommonMemory>]) -> Vec<Vec<u64>>,
    ) {
        // First, so that nobody is kept from memory while it is read for others, or others' stores take effect.
        let effects = self.effects.write().unwrap_or_else(PoisonError::into_inner);
        let span = |(link, pair): &(ConnectionKey, Arc<CommonMemory>)| {
            pair.staged_range().map(|(offset, length)| (*link, offset, length))
        };
        let mut spans: Vec<ConnectionRange> = pairs.iter().filter_map(span).collect();
        // One word changes in one step, whoever looks. What was copied before or behind it does not.
        if let [(_, offset, length)] = spans[..]
            && !pairs.iter().any(|(_, pair)| pair.has_copied())
            && offset / WORD == (offset + length - 1) / WORD
        {
            spans.clear();
        }
        let memories: Vec<Arc<CommonMemory>> = pairs.iter().map(|(_, pair)| pair.clone()).collect();
        let applied = (self.host.hide)(&spans, &|| {
            let numbers = take(&memories);
            let applied: Applied =
                pairs.iter().zip(numbers).map(|((link, _), number)| (*link, number)).collect();
            let of = pairs.iter().map(|(_, pair)| pair).zip(&applied);
            let answered = of.flat_map(|(pair, (link, batches))| {
                batches.iter().map(move |batch| (pair, *link, *batch))
            });
            // Only connectors' hosts ask whether others have it.
            let homes = pairs.iter().filter(|(link, _)| link.0 == FarConversation::ToConnector);
            let leading = self.leading(homes.map(|(_, pair)| pair));
            let answered: Vec<_> = answered
                .map(|(pair, link, batch)| (pair, link, batch, leading.is_alone(pair)))
                .collect();
            let mut state = self.lock();
            for (pair, link, batch, alone) in answered {
                // One of that name that has begun anew was sent nothing of it.
                let same = |end: &End| matches!(end, End::Memory(own) if Arc::ptr_eq(own, pair));
                if state.ends.get(&link).is_some_and(same) {
                    state.answer(link, batch, alone);
                }
            }
            applied
        });
        drop(effects);
        for ((way, connection), batches) in applied {
            if way == FarConversation::ToOwner && batches.contains(&1) {
                (self.host.complete)(connection);
            }
        }
    }

    /// Lets take effect what was to while memory was moved.
    pub(super) fn catch_up(&self) {
        let mut pairs = self.lock().memories();
        pairs.retain(|(_, pair)| pair.is_overdue());
        if pairs.is_empty() || pairs.iter().any(|(_, pair)| pair.is_paused()) {
            return;
        }
        self.apply(&pairs, pair::catch_up);
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
