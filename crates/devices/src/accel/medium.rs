//! What does a function's operations: its device's engines, in the same process ([`Local`]) or at the lender
//! while the function's front runs at its borrower ([`RemoteMedium`], and the lender's end of that, [`AcceleratorPort`]).
//!
//! Between the two goes an exchange ([`rackbus_memory::Exchange`]). An operation is an [`Ask`], which has all of
//! its descriptor but the addresses; its input is in one place for data, its output in another, so that engines
//! may read one while they write the other. The tenant's memory is reached by the front only, its keys are kept
//! by the lender only.

mod local;
mod port;
mod remote;
#[cfg(test)]
mod tests;

pub(super) use local::{Local, MOST};
use port::AcceleratorPort;
use remote::RemoteMedium;

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use rackbus_memory::{Carried, CarriedSession, DmaSpace, ExchangeLayout, InheritedEnd};
use rackbus_pci::{
    Bus, Function, MediumAccess, MediumOffer, MediumRefused, Operations, Work as Polled,
};
use rackbus_spec::accel::{Descriptor, Operation, OperationStatus, STAGES};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::function::{Front, NAMES};
use super::job::FinishedJob;
use super::request::CheckedDescriptor;
use super::{LARGEST, MediumError};
use crate::class::FrontError;
use crate::lost::Lost;

/// An operation that a front begins.
#[derive(Debug, Clone, Copy)]
pub struct OperationOrder<'a> {
    /// The front's name for it.
    pub number: u64,
    /// The queue pair that the descriptor came by.
    pub queue: u16,
    /// What is asked for.
    pub descriptor: &'a Descriptor,
    /// What is asked for, with every field within its bounds.
    pub plan: &'a CheckedDescriptor,
}

/// A descriptor that asks for what cannot be.
#[derive(Debug, Clone, Copy)]
pub struct RefusedDescriptor {
    /// The front's name for it.
    pub number: u64,
    /// The processor's counter when it was taken up.
    pub begun: u64,
}

/// What submitting a descriptor led to at once.
pub enum SubmitOutcome<W> {
    /// It is under way.
    Work(W),
    /// It is done, with this as the completion's value.
    Over(u32),
    /// It was under way, and has ended; the processor's counter when it began and ended.
    Ended(FinishedJob, [u64; 2]),
}

/// What does a function's operations.
pub trait Medium: fmt::Debug + Send + Sized + 'static {
    /// What is kept of an operation while it is under way.
    type Work: Send;
    /// The same in a saved function.
    type SavedWork: fmt::Debug + Serialize + DeserializeOwned;
    /// What a saved function has of the medium beside.
    type Saved: fmt::Debug + Serialize + DeserializeOwned;

    /// The operations that it does, a bit for each number.
    fn operations(&self) -> u64;

    /// A name for an operation, which none before had, whoever asked for that.
    fn number(&mut self) -> u64;

    /// How many operations may begin now, where so many are under way.
    fn room(&self, under_way: usize) -> usize;

    /// Whether a context may be made now: not while the tenant owes what making others took. Where that is not known
    /// here, whoever makes it asks.
    fn may_create(&mut self) -> bool {
        true
    }

    /// Begins an operation, which reaches memory from here on. Its descriptor was taken up at `taken` by the processor's
    /// counter.
    ///
    /// # Errors
    /// The status that it ends with at once.
    fn begin(
        &mut self,
        dma: &DmaSpace,
        order: &OperationOrder<'_>,
        taken: u64,
    ) -> Result<SubmitOutcome<Self::Work>, OperationStatus>;

    /// Takes a descriptor that is refused with `status`, and that was taken up at `begun` by the processor's counter. It
    /// ends so in its turn, as an operation does that is short: where engines are shared, their tenant pays for what it
    /// took to look at it.
    fn refuse(
        &mut self,
        refused: RefusedDescriptor,
        status: OperationStatus,
    ) -> SubmitOutcome<Self::Work>;

    /// The status with which it is going to end that was refused; nothing where it is an operation.
    fn refused(&self, work: &Self::Work) -> Option<OperationStatus>;

    /// Passes what has begun since the last time, in this queue pair, to the engines.
    fn submit(&mut self, queue: u16);

    /// What has ended. Its output is where the descriptor says.
    fn take_finished(&mut self, dma: &DmaSpace) -> Vec<FinishedJob>;

    /// On return nothing of it touches the tenant's memory until it is [taken up](Medium::take_up).
    fn release_memory(&mut self, work: &Self::Work);

    /// Mappings have changed: resolves the memory of work that released it.
    ///
    /// # Errors
    /// The status that it ends with, because the memory is not there any more; it is [cancelled](Medium::cancel)
    /// then.
    fn take_up(
        &mut self,
        dma: &DmaSpace,
        order: (u16, &Descriptor),
        work: &Self::Work,
    ) -> Result<(), OperationStatus>;

    /// Gives it up. On return nothing of it touches the tenant's memory, and it does not end.
    fn cancel(&mut self, work: &Self::Work);

    /// What was [given up](Medium::cancel) has no place before the engines any more.
    fn forget_given_up(&mut self);

    /// All was given up: as after power-on, without a context.
    fn stop(&mut self);

    /// The engine is about to sleep: what ends from now on makes the [descriptor](Medium::wake_fd) readable. False
    /// when something has ended.
    fn sleep(&mut self) -> bool;

    /// Readable when something has ended.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>>;

    /// The function's user goes.
    fn scrub(&mut self);

    /// Serves a front elsewhere from now on, until it is [stopped](Medium::stop).
    ///
    /// # Errors
    /// [`MediumRefused`]; it goes on as it was.
    fn offer(
        &mut self,
        serial: u64,
        carried: Option<Carried>,
    ) -> Result<MediumOffer, MediumRefused>;

    /// Serves that front for a while; `None` where there is none.
    fn serve(&mut self, bus: &Bus<'_>) -> Option<Polled>;

    /// Whether it serves a front elsewhere.
    fn serves_elsewhere(&self) -> bool {
        false
    }

    /// What is saved goes on, with the port of a front whose operations this carries.
    fn carried_by(&mut self, session: CarriedSession) {
        drop(session);
    }

    /// What is known beside operations under way, as a value, and descriptors that go with it.
    ///
    /// # Errors
    /// When memory or descriptors cannot be obtained, or the medium stays in its process.
    fn save(&mut self, bus: &Bus<'_>) -> std::io::Result<(Self::Saved, Vec<OwnedFd>)>;

    /// What was [saved](Medium::save) is of no use to anybody else any more.
    fn take_back(&mut self);

    /// An operation under way as a value.
    fn save_work(&self, order: &OperationOrder<'_>, work: &Self::Work) -> Self::SavedWork;

    /// Goes on with what was [saved](Medium::save).
    ///
    /// # Errors
    /// What is wrong with it.
    fn restore(&mut self, bus: &Bus<'_>, saved: &Self::Saved) -> Result<(), MediumError>;

    /// Whether this is an operation that can be under way.
    ///
    /// # Errors
    /// What is wrong with it.
    fn check_saved(
        &self,
        order: &OperationOrder<'_>,
        saved: &Self::SavedWork,
    ) -> Result<(), MediumError>;

    /// Goes on with an operation that was under way, which is [submitted](Medium::submit) afterwards.
    ///
    /// # Errors
    /// The status that it ends with.
    fn begin_again(
        &mut self,
        dma: &DmaSpace,
        order: &OperationOrder<'_>,
        saved: &Self::SavedWork,
    ) -> Result<SubmitOutcome<Self::Work>, OperationStatus>;
}

/// Operations that a front elsewhere may have under way.
const SLOTS: u16 = 63;
/// The slot of a [`kind::STOP`].
const STOP: u16 = SLOTS;

/// Two places for data for each slot: the input's and the output's.
pub const LAYOUT: ExchangeLayout =
    ExchangeLayout { tags: 2 * (SLOTS as u32 + 1), data_bytes: LARGEST as usize };

fn input_tag(slot: u16) -> u32 {
    2 * u32::from(slot)
}

fn output_tag(slot: u16) -> u32 {
    2 * u32::from(slot) + 1
}

/// What a front needs to know of the device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AcceleratorDescription {
    /// Serial number of the function.
    pub serial: u64,
    /// The operations that its engines do, a bit for each number.
    pub operations: u64,
}

/// What an [`Ask`] asks for.
mod kind {
    /// An operation is begun, as its descriptor says.
    pub const RUN: u8 = 1;
    /// All operations are given up, all contexts wiped. Each operation is answered, then this.
    pub const STOP: u8 = 2;
}

/// A question: do this.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Ask {
    slot: U16,
    kind: u8,
    queue: u8,
    stages: [u8; STAGES],
    contexts: [U16; STAGES],
    nonce: [u8; 16],
    associated: U32,
    input_length: U32,
    output_length: U32,
}

impl Ask {
    fn run(slot: u16, queue: u16, descriptor: &Descriptor) -> Ask {
        Ask {
            slot: slot.into(),
            kind: kind::RUN,
            queue: queue as u8,
            stages: descriptor.stages,
            contexts: descriptor.contexts.map(U16::new),
            nonce: descriptor.nonce,
            associated: descriptor.associated.into(),
            input_length: descriptor.input_length.into(),
            output_length: descriptor.output_length.into(),
        }
    }

    /// Whether it asks for a context.
    fn creates(&self) -> bool {
        self.kind == kind::RUN && self.stages[0] == Operation::CreateContext as u8
    }

    /// The descriptor, without addresses.
    fn descriptor(&self) -> Descriptor {
        Descriptor {
            stages: self.stages,
            contexts: self.contexts.map(U16::get),
            nonce: self.nonce,
            associated: self.associated.get(),
            input_length: self.input_length.get(),
            output_length: self.output_length.get(),
            ..Descriptor::default()
        }
    }
}

/// An answer: it has ended.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Answer {
    slot: U16,
    /// The number of its [`OperationStatus`].
    status: U16,
    /// Bytes that the operation put out.
    written: U32,
    /// What its completion has as its value.
    value: U32,
}

/// The front of an accelerator whose engines another node has; `lost` says when it is gone.
///
/// # Errors
/// [`FrontError`].
pub fn front(
    description: &str,
    access: MediumAccess,
    lost: Lost,
) -> Result<Box<dyn Function>, FrontError> {
    let description: AcceleratorDescription = serde_json::from_str(description)?;
    let remote = match access {
        MediumAccess::Handles(handles) => {
            RemoteMedium::new(description, handles.try_into()?, lost)?
        }
        MediumAccess::Carried(carried) => RemoteMedium::carried(description, carried, lost)?,
    };
    Ok(front_with(remote))
}

/// The same where an earlier life of the front is gone on with.
///
/// # Errors
/// [`FrontError`].
pub fn front_again(
    description: &str,
    end: InheritedEnd,
    lost: Lost,
) -> Result<Box<dyn Function>, FrontError> {
    let description: AcceleratorDescription = serde_json::from_str(description)?;
    Ok(front_with(RemoteMedium::again(description, end, lost)?))
}

fn front_with(remote: RemoteMedium) -> Box<dyn Function> {
    let serial = remote.serial();
    Box::new(Front::with_medium(remote, serial, Operations::new(&NAMES)))
}
