//! The end that has the front: its operations are done by engines that another node has.
//!
//! Input is copied when an operation is sent, output when its answer comes; in between nothing of it touches the
//! tenant's memory, so that mappings may change as they like. That node never sees the tenant's memory. It does
//! see the tenant's keys: an engine needs them.

use std::os::fd::{BorrowedFd, OwnedFd};

use rackbus_memory::{Carried, DmaSpace, ExchangeError, ExchangeHandles, InheritedEnd, ticks};
use rackbus_pci::{Bus, MediumOffer, MediumRefused, Work as Polled};
use rackbus_spec::accel::{Descriptor, Operation, OperationStatus};
use serde::{Deserialize, Serialize};

use super::super::contexts::LARGEST_CONTEXT;
use super::super::gather::MessageMemory;
use super::super::job::FinishedJob;
use super::super::{MediumError, request};
use super::{
    AcceleratorDescription, Answer, Ask, LAYOUT, Medium, OperationOrder, RefusedDescriptor, SLOTS,
    STOP, SubmitOutcome, input_tag, kind, output_tag,
};
use crate::front_exchange::FrontExchange;
use crate::lost::Lost;

/// Engines that another node has.
#[derive(Debug)]
pub struct RemoteMedium {
    description: AcceleratorDescription,
    exchange: FrontExchange,
    /// Operations that the other node has, by slot.
    slots: [Option<RemoteOperation>; SLOTS as usize],
    /// Slots that are free; the one freed last is used first, its places may still be near.
    free: Vec<u16>,
    /// Something was asked for since the last stop.
    used: bool,
    /// The other node is to give up everything, and has not answered. Nothing begins until then.
    stopping: bool,
    /// Names that were given to operations so far.
    numbers: u64,
    /// The front was saved, and nothing happened since: somebody else continues with the exchange.
    saved: bool,
}

/// An operation that the other node has.
#[derive(Debug, Clone, Copy)]
struct RemoteOperation {
    /// Who waits for it; `None` when it was given up.
    owner: Option<Owner>,
    /// It brought a key, or patterns: its input is wiped when it is answered.
    secret: usize,
}

#[derive(Debug, Clone, Copy)]
struct Owner {
    number: u64,
    descriptor: Descriptor,
}

/// The slot of an operation.
pub type RemoteWork = u16;

/// What a saved front has of its medium beside operations under way.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoteMediumState {
    /// Slots of operations that were given up and are not answered, each with the bytes to be wiped then.
    given_up: Vec<(u16, usize)>,
    used: bool,
    stopping: bool,
}

impl RemoteMedium {
    /// Over what the other node offered.
    ///
    /// # Errors
    /// [`ExchangeError`] when that is not fit.
    pub fn new(
        description: AcceleratorDescription,
        handles: ExchangeHandles,
        lost: Lost,
    ) -> Result<RemoteMedium, ExchangeError> {
        Ok(RemoteMedium::with_exchange(description, FrontExchange::join(handles, LAYOUT, lost)?))
    }

    /// The same over what `carried` carries.
    ///
    /// # Errors
    /// As [`new`](RemoteMedium::new).
    pub fn carried(
        description: AcceleratorDescription,
        carried: Carried,
        lost: Lost,
    ) -> Result<RemoteMedium, ExchangeError> {
        let exchange = FrontExchange::carried("accel-front", carried, LAYOUT, lost)?;
        Ok(RemoteMedium::with_exchange(description, exchange))
    }

    /// The same where an earlier life of the front is gone on with, which is restored next.
    ///
    /// # Errors
    /// As [`new`](RemoteMedium::new).
    pub fn again(
        description: AcceleratorDescription,
        end: InheritedEnd,
        lost: Lost,
    ) -> Result<RemoteMedium, ExchangeError> {
        let exchange = FrontExchange::again(end, LAYOUT, lost)?;
        Ok(RemoteMedium::with_exchange(description, exchange))
    }

    fn with_exchange(description: AcceleratorDescription, exchange: FrontExchange) -> RemoteMedium {
        RemoteMedium {
            description,
            exchange,
            slots: [None; SLOTS as usize],
            free: (0..SLOTS).rev().collect(),
            used: false,
            stopping: false,
            numbers: 0,
            saved: false,
        }
    }

    /// The function's serial number.
    pub fn serial(&self) -> u64 {
        self.description.serial
    }

    fn slot(&mut self, slot: u16) -> Option<&mut Option<RemoteOperation>> {
        self.slots.get_mut(usize::from(slot))
    }

    /// Ends the operation in a slot.
    fn finish(&mut self, dma: &DmaSpace, answer: &Answer) -> Option<FinishedJob> {
        let slot = answer.slot.get();
        let status = OperationStatus::from_number(answer.status.get());
        let asked = match status {
            Some(_) => self.slot(slot).and_then(Option::take),
            None => None,
        };
        let Some((status, asked)) = status.zip(asked) else {
            self.exchange.break_off();
            return None;
        };
        let RemoteOperation { owner, secret } = asked;
        self.wipe(slot, secret);
        let Some(Owner { number, descriptor }) = owner else {
            let handle = u16::try_from(answer.value.get()).unwrap_or(0);
            if secret > 0 && status == OperationStatus::Success && !self.stopping {
                // A context that nobody knows of would stay.
                self.forget(slot, handle);
            } else {
                self.free.push(slot);
            }
            return None;
        };
        self.free.push(slot);
        let (written, value) = (answer.written.get() as usize, answer.value.get().into());
        if written > descriptor.output_length as usize {
            self.exchange.break_off();
            return Some(FinishedJob {
                number,
                status: OperationStatus::Unreachable,
                written: 0,
                value: 0,
            });
        }
        match self.put(dma, slot, &descriptor, status, written) {
            Ok(()) => Some(FinishedJob { number, status, written, value }),
            Err(status) => Some(FinishedJob { number, status, written: 0, value: 0 }),
        }
    }

    /// Wipes what brought a context.
    fn wipe(&self, slot: u16, secret: usize) {
        if let Some(place) = self.exchange.data(input_tag(slot), secret) {
            place.get().fill(0);
        }
    }

    /// Has a context destroyed, in a slot that is free.
    fn forget(&mut self, slot: u16, handle: u16) {
        let descriptor = Descriptor {
            stages: [Operation::DestroyContext as u8, 0, 0, 0],
            contexts: [handle, 0, 0, 0],
            ..Descriptor::default()
        };
        self.slots[usize::from(slot)] = Some(RemoteOperation { owner: None, secret: 0 });
        self.exchange.send(&Ask::run(slot, 0, &descriptor), None);
    }

    /// Puts the output of an operation where its descriptor says.
    fn put(
        &self,
        dma: &DmaSpace,
        slot: u16,
        descriptor: &Descriptor,
        status: OperationStatus,
        written: usize,
    ) -> Result<(), OperationStatus> {
        let unauthentic = status == OperationStatus::NotAuthentic;
        if written == 0 && !unauthentic {
            return Ok(());
        }
        let output = request::memory_to_write(dma, descriptor)?;
        if unauthentic {
            output.clear_unauthentic(descriptor.input_length as usize);
        } else if let Some(place) = self.exchange.data(output_tag(slot), written) {
            output.copy_from(place.get());
        }
        Ok(())
    }

    /// Nobody answers any more.
    fn fail_all(&mut self, out: &mut Vec<FinishedJob>) {
        self.exchange.close();
        // What would begin behind it ends at once.
        self.stopping = false;
        for slot in 0..SLOTS {
            let Some(asked) = self.slots[usize::from(slot)].take() else { continue };
            self.wipe(slot, asked.secret);
            self.free.push(slot);
            let failed = |Owner { number, .. }| FinishedJob {
                number,
                status: OperationStatus::Unreachable,
                written: 0,
                value: 0,
            };
            out.extend(asked.owner.map(failed));
        }
    }
}

impl Medium for RemoteMedium {
    type Work = RemoteWork;
    type SavedWork = u16;
    type Saved = RemoteMediumState;

    fn operations(&self) -> u64 {
        self.description.operations
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn room(&self, _under_way: usize) -> usize {
        match self.stopping || self.exchange.is_untold() {
            true => 0,
            false => self.free.len(),
        }
    }

    fn begin(
        &mut self,
        dma: &DmaSpace,
        order: &OperationOrder<'_>,
        _taken: u64,
    ) -> Result<SubmitOutcome<RemoteWork>, OperationStatus> {
        let OperationOrder { number, queue, descriptor, plan } = *order;
        let length = descriptor.input_length;
        let (mut secret, mut input) = (0, None);
        match plan.operations()[0] {
            Operation::CreateContext if length > LARGEST_CONTEXT => {
                return Err(OperationStatus::InvalidField);
            }
            Operation::CreateContext => secret = length as usize,
            _ => {}
        }
        if plan.operations()[0] != Operation::DestroyContext {
            // The output is looked up again when it is there; one that is not there is told before.
            input = Some(request::memory_to_read(dma, descriptor)?);
        }
        if self.exchange.is_lost() {
            return Err(OperationStatus::Unreachable);
        }
        let slot = self.free.pop().ok_or(OperationStatus::NoRoom)?;
        let mut ask = Ask::run(slot, queue, descriptor);
        let mut data = None;
        match input {
            Some(input) if length > 0 => {
                if let Some(place) = self.exchange.data(input_tag(slot), length as usize) {
                    input.copy_to(place.get());
                    data = Some((input_tag(slot), length as usize));
                }
            }
            Some(_) => {}
            None => (ask.input_length, ask.output_length) = (0.into(), 0.into()),
        }
        let owner = Some(Owner { number, descriptor: *descriptor });
        self.slots[usize::from(slot)] = Some(RemoteOperation { owner, secret });
        self.used = true;
        self.exchange.send(&ask, data);
        Ok(SubmitOutcome::Work(slot))
    }

    fn refuse(
        &mut self,
        refused: RefusedDescriptor,
        status: OperationStatus,
    ) -> SubmitOutcome<RemoteWork> {
        // The engines' node does not hear of it: nobody but this function's user waits for that.
        let RefusedDescriptor { number, begun } = refused;
        let finished = FinishedJob { number, status, written: 0, value: 0 };
        SubmitOutcome::Ended(finished, [begun, ticks::now()])
    }

    fn refused(&self, _work: &RemoteWork) -> Option<OperationStatus> {
        None
    }

    fn submit(&mut self, _queue: u16) {
        self.exchange.ring();
    }

    fn take_finished(&mut self, dma: &DmaSpace) -> Vec<FinishedJob> {
        let mut finished = Vec::new();
        self.saved = false;
        // As many as there can be: a peer that answers without pause keeps nobody.
        for _ in 0..SLOTS + 1 {
            let Some(answer) = self.exchange.receive::<Answer>() else { break };
            match answer.slot.get() == STOP && self.stopping {
                true => self.stopping = false,
                false => finished.extend(self.finish(dma, &answer)),
            }
        }
        if self.exchange.is_lost() {
            self.fail_all(&mut finished);
        }
        finished
    }

    fn release_memory(&mut self, _work: &RemoteWork) {}

    fn take_up(
        &mut self,
        _dma: &DmaSpace,
        _order: (u16, &Descriptor),
        _work: &RemoteWork,
    ) -> Result<(), OperationStatus> {
        Ok(())
    }

    fn cancel(&mut self, work: &RemoteWork) {
        if let Some(Some(asked)) = self.slot(*work) {
            asked.owner = None;
        }
    }

    // What was sent is done, and paid for.
    fn forget_given_up(&mut self) {}

    fn stop(&mut self) {
        // What is asked for from here on comes behind it.
        if !self.saved
            && std::mem::take(&mut self.used)
            && !self.stopping
            && !self.exchange.is_lost()
        {
            self.stopping = true;
            let ask = Ask { slot: STOP.into(), kind: kind::STOP, ..Ask::default() };
            self.exchange.send(&ask, None);
            self.submit(0);
        }
    }

    fn sleep(&mut self) -> bool {
        self.submit(0);
        let quiet = self.exchange.rest();
        match self.exchange.is_lost() {
            // Nothing comes any more; what is under way is still to fail.
            true => self.slots.iter().all(Option::is_none),
            false => quiet || self.exchange.is_untold(),
        }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.exchange.wake_fd()
    }

    fn scrub(&mut self) {}

    fn offer(&mut self, _: u64, _: Option<Carried>) -> Result<MediumOffer, MediumRefused> {
        Err(MediumRefused::InUse)
    }

    fn serve(&mut self, _bus: &Bus<'_>) -> Option<Polled> {
        None
    }

    fn save(&mut self, _bus: &Bus<'_>) -> std::io::Result<(RemoteMediumState, Vec<OwnedFd>)> {
        self.submit(0);
        let files = self.exchange.pass_on()?;
        let slots = (0..).zip(&self.slots);
        let given_up = slots.filter_map(|(slot, asked)| match asked {
            Some(RemoteOperation { owner: None, secret }) => Some((slot, *secret)),
            _ => None,
        });
        let given_up = given_up.collect();
        self.saved = true;
        Ok((RemoteMediumState { given_up, used: self.used, stopping: self.stopping }, files))
    }

    fn take_back(&mut self) {
        self.saved = false;
        self.exchange.take_back();
    }

    fn save_work(&self, _order: &OperationOrder<'_>, work: &RemoteWork) -> u16 {
        *work
    }

    fn restore(&mut self, _bus: &Bus<'_>, saved: &RemoteMediumState) -> Result<(), MediumError> {
        for (slot, secret) in &saved.given_up {
            self.expect(*slot, RemoteOperation { owner: None, secret: *secret })?;
        }
        (self.used, self.stopping) = (saved.used, saved.stopping);
        self.exchange.set_told();
        Ok(())
    }

    fn check_saved(&self, order: &OperationOrder<'_>, _saved: &u16) -> Result<(), MediumError> {
        match order.plan.operations()[0] {
            Operation::Wait => Err(MediumError("a descriptor that is never under way")),
            _ => Ok(()),
        }
    }

    /// It was sent, and is still to be answered.
    fn begin_again(
        &mut self,
        _dma: &DmaSpace,
        order: &OperationOrder<'_>,
        saved: &u16,
    ) -> Result<SubmitOutcome<RemoteWork>, OperationStatus> {
        let creates = order.plan.operations()[0] == Operation::CreateContext;
        let secret = if creates { order.descriptor.input_length as usize } else { 0 };
        let owner = Some(Owner { number: order.number, descriptor: *order.descriptor });
        match self.expect(*saved, RemoteOperation { owner, secret }) {
            Ok(()) => Ok(SubmitOutcome::Work(*saved)),
            Err(_) => Err(OperationStatus::Unreachable),
        }
    }
}

impl RemoteMedium {
    /// An operation of an earlier life is in this slot.
    fn expect(&mut self, slot: u16, asked: RemoteOperation) -> Result<(), MediumError> {
        match self.slot(slot) {
            Some(free @ None) => *free = Some(asked),
            _ => return Err(MediumError("the slot of an operation")),
        }
        self.free.retain(|free| *free != slot);
        Ok(())
    }
}
