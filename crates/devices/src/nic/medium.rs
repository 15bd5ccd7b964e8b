//! A function whose front runs elsewhere than its port: at a borrower that wants strict isolation, or on another machine.
//! The front has a `RemotePort`, and the lender serves its own port to that (`served`).
//!
//! Between the two goes an exchange ([`rackbus_memory::Exchange`]). Frames go in *batches*: a place for data holds as many
//! as fit, each behind a `Record`. A batch that the front sends is a question, which is answered when the port has
//! taken all of it. For what comes, the front asks beforehand, with places that the lender fills: so neither side can be
//! flooded, and a front that takes nothing costs the lender no memory. What is asked is kept in its order; batches that come
//! are numbered, because their data may arrive beside the link. For the same reason a batch says in which *generation* it was
//! filled, since when frames are taken: one that is late does not count for one after the driver's reset.
//!
//! Rates and who may send what are the lender's. What a batch says is read once, and checked by whoever takes it.

mod remote;
mod served;
#[cfg(test)]
mod tests;

pub(super) use remote::{RemotePort, RemotePortState};
pub(super) use served::{ServedPort, ServedState};

use std::sync::Arc;

use rackbus_memory::{DmaSlice, ExchangeLayout, InheritedEnd, PinnedSlice};
use rackbus_net::port::{MAX_FRAME, MIN_FRAME};
use rackbus_net::{Frame, Offload};
use rackbus_pci::{Function, MediumAccess};
use serde::{Deserialize, Serialize};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::counters::NicCounters;
use super::function::Nic;
use crate::class::FrontError;
use crate::lost::Lost;

/// Batches that may be on their way in each direction.
const BATCHES: u16 = 31;
/// The slot of a [`kind::ATTEND`], behind those of batches in both directions.
const ATTEND: u16 = 2 * BATCHES;
/// The slot of a [`kind::WATCH`].
const WATCH: u16 = ATTEND + 1;

/// A place for each slot: room for the longest frame, and for as much again.
pub const LAYOUT: ExchangeLayout =
    ExchangeLayout { tags: 2 * (BATCHES as u32 + 1), data_bytes: 128 << 10 };

/// Whether a slot is one of batches that the front sends.
fn is_outward(slot: u16) -> bool {
    slot < BATCHES
}

/// Whether a slot is one of batches that the front receives.
fn is_inward(slot: u16) -> bool {
    (BATCHES..ATTEND).contains(&slot)
}

/// What a front needs to know of the function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NicDescription {
    /// Serial number of the function.
    pub serial: u64,
    /// The address of its port.
    pub mac: [u8; 6],
    /// Bytes of the longest packet.
    pub mtu: u16,
    /// Pairs of a receive and a transmit queue that the function offers its driver.
    pub pairs: u16,
    /// Bytes per second in each direction, which the lender keeps to.
    pub rate: Option<u64>,
    /// Whether the port's link is up.
    pub up: bool,
    /// Whether drivers are offered split rings alone. Fronts of former versions know of no such functions, and refuse
    /// the description.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub split_rings: bool,
}

/// What an [`Ask`] asks for.
mod kind {
    /// Frames are sent: those of the batch in the place.
    pub const SEND: u8 = 1;
    /// The place is for frames that come.
    pub const ROOM: u8 = 2;
    /// Frames are taken from now on, or are not: then what is there is given up.
    pub const ATTEND: u8 = 3;
    /// To be answered when the link is not as the flag says.
    pub const WATCH: u8 = 4;
}

/// What the front sends: a batch, room for one, or what it wants to be told.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Ask {
    slot: U16,
    kind: u8,
    /// Whether frames are taken, or the link is up.
    flag: u8,
    /// Bytes of the batch; of [`kind::ATTEND`] its generation, from 1 to 255: batches that come say it again.
    bytes: U32,
}

/// What the lender sends when it has done what was asked, or has something to tell.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Answer {
    slot: U16,
    /// Whether the link is up.
    up: u8,
    /// Of a batch that came, the generation of the last [`kind::ATTEND`] before it was filled; 0 where it said none.
    generation: u8,
    /// Bytes of the batch that came.
    bytes: U32,
    /// Of a batch that came, its number; of one that was sent, how many of its frames were dropped.
    number: U32,
}

/// What is before each frame of a batch.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Record {
    length: U32,
    offload: Offload,
    spare: [u8; 2],
}

/// Bytes of a [`Record`]; records begin at multiples of it.
const RECORD: usize = size_of::<Record>();

/// A batch that is put together.
#[derive(Debug)]
struct Filling {
    slot: u16,
    place: PinnedSlice,
    bytes: usize,
}

impl Filling {
    fn new(slot: u16, place: PinnedSlice) -> Filling {
        Filling { slot, place, bytes: 0 }
    }

    /// Whether a frame of so many bytes has room.
    fn has_room(&self, length: usize) -> bool {
        self.bytes + RECORD + length <= self.place.get().len()
    }

    /// Puts a frame of so many bytes in, which has room.
    fn put(&mut self, offload: Offload, length: usize, parts: &[DmaSlice<'_>]) {
        let place = self.place.get();
        let record = Record { length: (length as u32).into(), offload, spare: [0; 2] };
        place.write_obj(self.bytes, &record);
        let mut at = self.bytes + RECORD;
        for part in parts {
            if let Some(room) = place.part(at, part.len()) {
                at += room.copy_from_slice(*part);
            }
        }
        self.bytes = (self.bytes + RECORD + length).next_multiple_of(RECORD);
    }
}

/// A batch that is taken apart. Whoever filled it may still change it.
#[derive(Debug)]
struct Batch {
    slot: u16,
    place: PinnedSlice,
    /// Where the next record is.
    at: usize,
    /// What that said: the frame's length, and what is left to do to it.
    found: Option<(usize, Offload)>,
}

/// A batch is none that there can be.
#[derive(Debug)]
struct Malformed;

impl Batch {
    fn new(slot: u16, place: PinnedSlice, at: usize) -> Batch {
        Batch { slot, place, at, found: None }
    }

    /// Whether there is another frame, which is then the [next](Batch::frame).
    fn find(&mut self) -> Result<bool, Malformed> {
        let place = self.place.get();
        if self.found.is_some() || self.at >= place.len() {
            return Ok(self.found.is_some());
        }
        let record: Record = place.read_obj(self.at).ok_or(Malformed)?;
        let length = record.length.get() as usize;
        let is_inside = place.part(self.at + RECORD, length).is_some();
        let is_frame = (MIN_FRAME..=MAX_FRAME).contains(&length);
        if !is_inside || !is_frame || !record.offload.is_sound(length) {
            return Err(Malformed);
        }
        self.found = Some((length, record.offload));
        Ok(true)
    }

    /// The frame that was found.
    fn frame(&self) -> Option<Frame<'_>> {
        let (length, offload) = self.found?;
        let bytes = self.place.get().part(self.at + RECORD, length)?;
        Some(Frame { offload, bytes })
    }

    /// Goes on behind the frame that was found.
    fn consume(&mut self) {
        if let Some((length, _)) = self.found.take() {
            self.at = (self.at + RECORD + length).next_multiple_of(RECORD);
        }
    }

    /// Goes to the end; how many frames that left out.
    fn skip_all(&mut self) -> Result<u32, Malformed> {
        let mut frames = 0;
        while self.find()? {
            self.consume();
            frames += 1;
        }
        Ok(frames)
    }
}

/// The front of a function whose port another node has; `lost` says when it is gone.
///
/// # Errors
/// [`FrontError`].
pub(super) fn front(
    description: &str,
    access: MediumAccess,
    lost: Lost,
) -> Result<Box<dyn Function>, FrontError> {
    let description: NicDescription = serde_json::from_str(description)?;
    let counters = Arc::<NicCounters>::default();
    let remote = match access {
        MediumAccess::Handles(handles) => {
            RemotePort::join(&description, handles.try_into()?, lost, counters.clone())?
        }
        MediumAccess::Carried(carried) => {
            RemotePort::carried(&description, carried, lost, counters.clone())?
        }
    };
    Ok(Box::new(Nic::front(&description, remote, counters)))
}

/// The same where an earlier life of the front is gone on with.
///
/// # Errors
/// [`FrontError`].
pub(super) fn front_again(
    description: &str,
    end: InheritedEnd,
    lost: Lost,
) -> Result<Box<dyn Function>, FrontError> {
    let description: NicDescription = serde_json::from_str(description)?;
    let counters = Arc::<NicCounters>::default();
    let remote = RemotePort::again(&description, end, lost, counters.clone())?;
    Ok(Box::new(Nic::front(&description, remote, counters)))
}
