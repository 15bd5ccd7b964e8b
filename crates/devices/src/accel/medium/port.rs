//! The end that has the engines: takes operations of a front elsewhere and does them.
//!
//! The front is hostile: a message is copied out once, and its slot and fields are checked before anything is done.
//! One that breaks the rules is not listened to any more. What it may change while engines read it, its input, is
//! as hostile as memory of a tenant is, and read as that.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rackbus_memory::exchange::MESSAGE_BYTES;
use rackbus_memory::exchange::session::SessionSide;
use rackbus_memory::{Carried, Exchange, ExchangeError, ExchangeHandles, InheritedEnd, ticks};
use rackbus_pci::{Bus, Work as Polled};
use rackbus_spec::accel::{Operation, OperationStatus};
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, IntoBytes};

use super::super::QUEUES;
use super::super::function::count;
use super::super::gather::{Gather, MessageMemory};
use super::super::job::FinishedJob;
use super::super::request::check;
use super::super::waiting;
use super::local::{Local, LocalWork, OrderMemory};
use super::{
    Answer, Ask, LAYOUT, Medium, OperationOrder, RefusedDescriptor, SLOTS, STOP, SubmitOutcome,
    input_tag, kind, output_tag,
};
use crate::either::either_of;

/// Messages taken in one poll: a revocation waits no longer than these take to begin.
const TURN: usize = 32;

/// Serves the engines to one front.
#[derive(Debug)]
pub struct AcceleratorPort {
    exchange: Exchange,
    /// Operations under way, by slot.
    slots: Vec<Option<Slot>>,
    /// Questions for contexts, which wait until their tenant has paid for those before. Others pass by them.
    held: VecDeque<Ask>,
    /// The front is not listened to any more.
    over: bool,
    /// The port was saved, and nothing happened since: engines have released the places for data.
    memory_released: bool,
    /// Of the exchange's event and the engines': whoever polls waits for one descriptor.
    either: OwnedFd,
}

/// Whether an operation was begun in an earlier life: what was allowed then, is done.
#[derive(Debug, Clone, Copy)]
enum Begins {
    First,
    Again,
}

/// An operation under way.
struct Slot {
    number: u64,
    ask: Ask,
    work: LocalWork,
    /// The processor's counter when it began.
    begun: u64,
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot").field("number", &self.number).finish_non_exhaustive()
    }
}

/// A port that another process goes on with: the questions that are not answered, which are done again. Their input
/// is where the front put it, and stays until they are answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AcceleratorPortState {
    asks: Vec<Vec<u8>>,
    over: bool,
    /// Slots of those whose contexts are not what their handles name any more: another key may have the handle now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    orphaned: Vec<u16>,
}

impl AcceleratorPort {
    /// In shared memory, beside engines that make `event` readable; with what the front joins by.
    ///
    /// # Errors
    /// When memory or descriptors cannot be obtained.
    pub fn new(event: BorrowedFd<'_>) -> Result<(AcceleratorPort, ExchangeHandles), ExchangeError> {
        let (exchange, handles) = Exchange::create("accel-medium", LAYOUT)?;
        Ok((AcceleratorPort::with_exchange(exchange, event)?, handles))
    }

    /// The same for a front whose operations `carried` carries.
    ///
    /// # Errors
    /// As [`new`](AcceleratorPort::new).
    pub fn carried(
        carried: Carried,
        event: BorrowedFd<'_>,
    ) -> Result<AcceleratorPort, ExchangeError> {
        AcceleratorPort::with_exchange(Exchange::carried("accel-medium", carried, LAYOUT)?, event)
    }

    fn with_exchange(
        exchange: Exchange,
        event: BorrowedFd<'_>,
    ) -> Result<AcceleratorPort, ExchangeError> {
        let either = either_of([Some(exchange.as_fd()), Some(event)]);
        let either = either.map_err(|cause| ExchangeError::Events(cause.into()))?;
        let slots = (0..SLOTS).map(|_| None).collect();
        Ok(AcceleratorPort {
            exchange,
            slots,
            held: VecDeque::new(),
            over: false,
            memory_released: false,
            either,
        })
    }

    /// What is not answered, to be done again by whoever [resumes](AcceleratorPort::resume) it, and what that needs of the
    /// exchange. Engines touch no place for data any more, unless this port is polled again.
    ///
    /// # Errors
    /// When there are no descriptors left; it continues as it was.
    pub fn save(
        &mut self,
        local: &mut Local,
        bus: &Bus<'_>,
    ) -> std::io::Result<(AcceleratorPortState, Vec<OwnedFd>)> {
        for slot in self.slots.iter().flatten() {
            slot.work.release_memory();
        }
        self.memory_released = true;
        self.answer_finished(local, bus);
        self.answer_refused(local, bus);
        self.exchange.ring();
        let files = self.exchange.pass_on()?;
        let asks = self.slots.iter().flatten().map(|slot| &slot.ask).chain(&self.held);
        let asks = asks.map(|ask| ask.as_bytes().to_vec());
        let orphaned = self.slots.iter().flatten().filter(|slot| local.is_orphaned(&slot.work));
        let orphaned = orphaned.map(|slot| slot.ask.slot.get()).collect();
        Ok((AcceleratorPortState { asks: asks.collect(), over: self.over, orphaned }, files))
    }

    /// Goes on here after all with what was [saved](AcceleratorPort::save).
    pub fn take_back(&mut self, local: &mut Local) {
        self.exchange.take_back();
        if std::mem::take(&mut self.memory_released) {
            self.take_up(local);
        }
    }

    /// Goes on where an earlier port was saved.
    ///
    /// # Errors
    /// As [`new`](AcceleratorPort::new).
    pub fn resume(
        end: InheritedEnd,
        local: &mut Local,
        state: &AcceleratorPortState,
        bus: &Bus<'_>,
    ) -> Result<AcceleratorPort, ExchangeError> {
        let event = local.outbox.event().as_fd();
        let mut port = AcceleratorPort::with_exchange(
            Exchange::again(SessionSide::Answers, end, LAYOUT)?,
            event,
        )?;
        port.over = state.over;
        for bytes in &state.asks {
            let ask = Ask::read_from_bytes(bytes).ok().filter(|ask| ask.kind == kind::RUN);
            let taken = ask.is_some_and(|ask| {
                let slot = ask.slot.get();
                if state.orphaned.contains(&slot) && slot < SLOTS {
                    port.answer(slot, OperationStatus::InvalidContext, 0, 0);
                    return true;
                }
                // One at a time, as always: many would make the pause long.
                if ask.creates() {
                    return port.hold(ask);
                }
                let taken = port.take(local, bus, &ask, Begins::Again);
                local.submit(ask.queue.into());
                taken
            });
            if !taken {
                port.close();
            }
        }
        // The front may rest until it hears of what was answered here.
        port.exchange.ring();
        Ok(port)
    }

    /// Answers what has ended and takes operations.
    pub fn poll(&mut self, local: &mut Local, bus: &Bus<'_>) -> Polled {
        if std::mem::take(&mut self.memory_released) {
            self.take_up(local);
        }
        let mut done = self.answer_finished(local, bus);
        done += self.take_messages(local, bus);
        done += self.answer_finished(local, bus);
        if done > 0 {
            self.exchange.ring();
            return Polled::Done;
        }
        if !self.held.is_empty() {
            return Polled::Asleep(Some(bus.now_ns + waiting::LOOK_NS));
        }
        match self.exchange.is_closed() && self.is_idle() {
            true => Polled::Asleep(None),
            false => Polled::Idle,
        }
    }

    /// Takes questions; how many that were. One that has a context made is the last, for that may take long.
    fn take_messages(&mut self, local: &mut Local, bus: &Bus<'_>) -> usize {
        let (mut done, mut queue) = (0, 0);
        for nth in 0..TURN {
            if self.over {
                break;
            }
            let Some(ask) = self.next_ask(local) else { break };
            if nth == 0 {
                bus.user.before_access();
            }
            if bus.dma.revoker().is_revoked() {
                // It was given up while this host stalled: what it asked for is not done.
                self.close();
                break;
            }
            done += 1;
            let creates = ask.is_some_and(|ask| ask.creates()) && local.may_create();
            let taken = ask.is_some_and(|ask| {
                if u16::from(ask.queue) != queue {
                    // Engines know of operations by their queue pair.
                    local.submit(queue);
                    queue = ask.queue.into();
                }
                match ask.creates() && !creates {
                    true => self.hold(ask),
                    false => self.take(local, bus, &ask, Begins::First),
                }
            });
            if !taken {
                tracing::warn!("a front violates the protocol and is disconnected");
                self.close();
            }
            if creates {
                break;
            }
        }
        local.submit(queue);
        done
    }

    /// What was held and may begin now, or the next message, as the question that it is, if it is one; nothing where
    /// there is no message.
    fn next_ask(&mut self, local: &mut Local) -> Option<Option<Ask>> {
        if !self.held.is_empty() && local.may_create() {
            return Some(self.held.pop_front());
        }
        let mut message = [0; MESSAGE_BYTES];
        let length = self.exchange.receive(&mut message)?;
        Some(message.get(..length).and_then(|bytes| Ask::read_from_bytes(bytes).ok()))
    }

    /// Keeps a question until its tenant owes nothing more; false when it is none that there can be.
    fn hold(&mut self, ask: Ask) -> bool {
        let possible = self.is_possible(&ask);
        self.held.extend(possible.then_some(ask));
        possible
    }

    /// Whether an operation can be begun as a question says: in a slot that is free, with room for its data.
    fn is_possible(&self, ask: &Ask) -> bool {
        let slot = ask.slot.get();
        let is_free = self.slots.get(usize::from(slot)).is_some_and(Option::is_none);
        let is_held = self.held.iter().any(|held| held.slot.get() == slot);
        let fits = ask.input_length.get() as usize <= LAYOUT.data_bytes
            && ask.output_length.get() as usize <= LAYOUT.data_bytes;
        is_free && !is_held && fits && u16::from(ask.queue) < QUEUES
    }

    fn is_idle(&self) -> bool {
        self.held.is_empty() && self.slots.iter().all(Option::is_none)
    }

    /// Takes a question; false when it is none that there can be.
    fn take(&mut self, local: &mut Local, bus: &Bus<'_>, ask: &Ask, begins: Begins) -> bool {
        let slot = ask.slot.get();
        match ask.kind {
            kind::STOP if slot == STOP => self.stop(local),
            kind::RUN => {
                if !self.is_possible(ask) {
                    return false;
                }
                let (number, since) = (local.number(), ticks::now());
                let begun =
                    self.begin(local, number, ask, (begins, since)).unwrap_or_else(|status| {
                        local.refuse(RefusedDescriptor { number, begun: since }, status)
                    });
                match begun {
                    SubmitOutcome::Work(work) => {
                        let kept = Slot { number, ask: *ask, work, begun: bus.user.ticks() };
                        self.slots[usize::from(slot)] = Some(kept);
                    }
                    SubmitOutcome::Ended(finished, time) => {
                        self.answer_ended(local, (ask, time), finished);
                    }
                    SubmitOutcome::Over(value) => {
                        count(&local.operations, ask.stages[0], 0, true, [0; 2]);
                        self.answer(slot, OperationStatus::Success, 0, value);
                    }
                }
            }
            _ => return false,
        }
        true
    }

    fn begin(
        &mut self,
        local: &mut Local,
        number: u64,
        ask: &Ask,
        (begins, taken): (Begins, u64),
    ) -> Result<SubmitOutcome<LocalWork>, OperationStatus> {
        let descriptor = ask.descriptor();
        let plan = check(&descriptor)?;
        if plan.operations() == [Operation::Wait] {
            return Err(OperationStatus::InvalidOperation);
        }
        let memory = self.memory(ask).ok_or(OperationStatus::Transfer)?;
        let order = OperationOrder {
            number,
            queue: ask.queue.into(),
            descriptor: &descriptor,
            plan: &plan,
        };
        let begun = match begins {
            Begins::First => local.begin_first(&order, OrderMemory::Held(memory), taken),
            Begins::Again => local.start(&order, OrderMemory::Held(memory), (0, taken)),
        };
        if plan.operations()[0] == Operation::CreateContext
            && let Some((input, _)) = self.memory(ask)
        {
            // What a context is made of may be a key.
            input.clear(input.len());
        }
        begun
    }

    /// The places for data of an operation.
    fn memory(&self, ask: &Ask) -> Option<(Gather, Gather)> {
        let slot = ask.slot.get();
        let place = |tag, length: u32| {
            let mut gather = Gather::default();
            if length > 0 {
                gather.push(self.exchange.data(tag, length as usize)?);
            }
            Some(gather)
        };
        let input = place(input_tag(slot), ask.input_length.get())?;
        Some((input, place(output_tag(slot), ask.output_length.get())?))
    }

    /// Answers what engines have ended; how many that were.
    fn answer_finished(&mut self, local: &mut Local, bus: &Bus<'_>) -> usize {
        let mut done = 0;
        for FinishedJob { number, status, written, value } in local.outbox.take() {
            let is_it = |slot: &Option<Slot>| slot.as_ref().is_some_and(|it| it.number == number);
            // What was given up may still come.
            let Some(slot) = self.slots.iter().position(is_it) else { continue };
            if let Some(Slot { ask, begun, .. }) = self.slots[slot].take() {
                let finished = FinishedJob { number, status, written, value };
                self.answer_ended(local, (&ask, [begun, bus.user.ticks()]), finished);
            }
            done += 1;
        }
        done
    }

    /// Answers what was refused and waits for its turn: to ask again might lead to something else.
    fn answer_refused(&mut self, local: &Local, bus: &Bus<'_>) {
        for slot in 0..self.slots.len() {
            let kept = self.slots[slot].take_if(|slot| slot.work.refused().is_some());
            let Some(Slot { number, ask, work, begun }) = kept else { continue };
            work.cancel();
            let status = work.refused().unwrap_or(OperationStatus::EngineFailed);
            let finished = FinishedJob { number, status, written: 0, value: 0 };
            self.answer_ended(local, (&ask, [begun, bus.user.ticks()]), finished);
        }
    }

    /// Counts an operation that has ended, which took from one reading of the processor's counter to the other, and
    /// answers it.
    fn answer_ended(
        &mut self,
        local: &Local,
        (ask, time): (&Ask, [u64; 2]),
        finished: FinishedJob,
    ) {
        let FinishedJob { status, written, value, .. } = finished;
        let (bytes, good) = (ask.input_length.get().into(), status == OperationStatus::Success);
        count(&local.operations, ask.stages[0], bytes, good, time);
        let value = u32::try_from(value).unwrap_or(u32::MAX);
        self.answer(ask.slot.get(), status, written, value);
    }

    fn answer(&mut self, slot: u16, status: OperationStatus, written: usize, value: u32) {
        let answer = Answer {
            slot: slot.into(),
            status: (status as u16).into(),
            written: (written as u32).into(),
            value: value.into(),
        };
        // Engines write no more than there is room for.
        let data = (written > 0).then_some((output_tag(slot), written));
        // There is room for one answer of each slot, unless the front does not take them.
        if self.exchange.send(answer.as_bytes(), data).is_err() {
            self.close();
        }
    }

    /// The front begins anew.
    fn stop(&mut self, local: &mut Local) {
        for ask in std::mem::take(&mut self.held) {
            self.answer(ask.slot.get(), OperationStatus::EngineFailed, 0, 0);
        }
        for slot in 0..SLOTS {
            if let Some(Slot { work, .. }) = self.slots[usize::from(slot)].take() {
                work.cancel();
                self.answer(slot, OperationStatus::EngineFailed, 0, 0);
            }
        }
        local.clear();
        self.answer(STOP, OperationStatus::Success, 0, 0);
    }

    /// Operations go on after all.
    fn take_up(&mut self, local: &mut Local) {
        for slot in self.slots.iter().flatten() {
            if let Some(memory) = self.memory(&slot.ask) {
                local.resume(&slot.work, memory);
            }
            local.submit(slot.ask.queue.into());
        }
    }

    fn close(&mut self) {
        self.over = true;
        self.exchange.close();
        self.give_up();
    }

    /// Nobody hears of what is under way.
    fn give_up(&mut self) {
        self.held.clear();
        for slot in &mut self.slots {
            if let Some(Slot { work, .. }) = slot.take() {
                work.cancel();
            }
        }
    }

    /// Ends it: on return nothing that the front asked for is under way, and it hears no more.
    pub fn end(&mut self) {
        match self.memory_released {
            // Somebody else continues with the exchange.
            true => self.give_up(),
            false => self.close(),
        }
    }

    /// Whoever polls is about to sleep; false when there is something to do.
    pub fn rest(&mut self) -> bool {
        self.exchange.rest() || self.exchange.is_closed()
    }

    /// Readable when there is something to do.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.either.as_fd()
    }
}
