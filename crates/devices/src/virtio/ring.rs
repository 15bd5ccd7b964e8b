//! A virtqueue as its device uses it: requests come, are completed in the order in which they came, and each side
//! says when it wants to be woken.

use rackbus_memory::{Access, DmaSlice, DmaSpace, PinnedPieces};
use rackbus_spec::virtio::feature;
use serde::{Deserialize, Serialize};

use super::packed::PackedRing;
use super::split::SplitRing;
use super::{BufferChain, DriverFault};

/// Why a request could not be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// The driver did what none may do.
    #[error(transparent)]
    Fault(#[from] DriverFault),
    /// Memory cannot be reached now: its mapping may come back.
    #[error("memory that the function does not reach")]
    Unreachable,
}

/// A request that is completed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UsedRequest {
    /// The driver's name for it.
    pub id: u16,
    /// Descriptors of the ring that it took.
    pub slots: u16,
    /// Bytes that were written.
    pub written: u32,
}

/// Where a queue is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueAddresses {
    /// How many descriptors the ring has.
    pub size: u16,
    /// Address of the descriptor area.
    pub descriptors: u64,
    /// Address of the driver area (the available ring of a split one).
    pub driver: u64,
    /// Address of the device area (the used ring of a split one).
    pub device: u64,
}

/// How far a queue is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cursor {
    /// The next request: an index that runs on (split), or a place in the ring (packed).
    pub next: u16,
    /// Of a packed ring, the wrap counter there.
    pub wrap: bool,
}

/// A queue in use.
#[derive(Debug)]
pub enum VirtioRing {
    /// Descriptors, and two rings of indices.
    Split(SplitRing),
    /// A packed ring: descriptors are made available and used in one array.
    Packed(PackedRing),
}

impl VirtioRing {
    /// A queue at `place` as its driver begins with it, under these features.
    ///
    /// # Errors
    /// [`DriverFault::Queue`] when it cannot be there.
    pub fn new(
        dma: &DmaSpace,
        place: QueueAddresses,
        features: u64,
    ) -> Result<VirtioRing, DriverFault> {
        let event_index = features & feature::EVENT_IDX != 0;
        match features & feature::RING_PACKED != 0 {
            true => PackedRing::new(dma, place).map(VirtioRing::Packed),
            false => SplitRing::new(dma, place, event_index).map(VirtioRing::Split),
        }
    }

    /// Looks its memory up again: mappings have changed.
    pub fn resolve(&mut self, dma: &DmaSpace) {
        match self {
            VirtioRing::Split(ring) => ring.resolve(dma),
            VirtioRing::Packed(ring) => ring.resolve(dma),
        }
    }

    /// Releases its memory, until it is looked up again.
    pub fn release_memory(&mut self) {
        match self {
            VirtioRing::Split(ring) => ring.release_memory(),
            VirtioRing::Packed(ring) => ring.release_memory(),
        }
    }

    /// How far it is: to go back to, or to continue from elsewhere.
    #[inline]
    pub fn cursor(&self) -> Cursor {
        match self {
            VirtioRing::Split(ring) => ring.cursor(),
            VirtioRing::Packed(ring) => ring.cursor(),
        }
    }

    /// Goes back to where it was: what was taken since is not completed, and is taken again.
    #[inline]
    pub fn rewind(&mut self, cursor: Cursor) {
        match self {
            VirtioRing::Split(ring) => ring.rewind(cursor),
            VirtioRing::Packed(ring) => ring.rewind(cursor),
        }
    }

    /// Goes on where a queue was that had completed all that it had taken.
    ///
    /// # Errors
    /// [`DriverFault::Queue`] when it cannot have been there.
    pub fn go_on(&mut self, cursor: Cursor) -> Result<(), DriverFault> {
        match self {
            VirtioRing::Split(ring) => {
                ring.go_on(cursor);
                Ok(())
            }
            VirtioRing::Packed(ring) => ring.go_on(cursor),
        }
    }

    /// Takes the next request into `chain`; false when there is none.
    ///
    /// # Errors
    /// [`QueueError`]; nothing is taken then.
    #[inline]
    pub fn take(&mut self, dma: &DmaSpace, chain: &mut BufferChain) -> Result<bool, QueueError> {
        match self {
            VirtioRing::Split(ring) => ring.take(dma, chain),
            VirtioRing::Packed(ring) => ring.take(dma, chain),
        }
    }

    /// Completes requests that were taken, in that order; the driver sees all of them at once.
    #[inline]
    pub fn complete(&mut self, used: &[UsedRequest]) {
        match self {
            VirtioRing::Split(ring) => ring.complete(used),
            VirtioRing::Packed(ring) => ring.complete(used),
        }
    }

    /// Whether the driver wants an interrupt for what was completed since this was asked last.
    #[inline]
    pub fn wants_interrupt(&mut self) -> bool {
        match self {
            VirtioRing::Split(ring) => ring.wants_interrupt(),
            VirtioRing::Packed(ring) => ring.wants_interrupt(),
        }
    }

    /// Whether there is a request.
    #[inline]
    pub fn has_work(&self) -> bool {
        match self {
            VirtioRing::Split(ring) => ring.has_work(),
            VirtioRing::Packed(ring) => ring.has_work(),
        }
    }

    /// Asks the driver for notifications, or not to send any: the queue is polled. True when something has come of which
    /// the driver may have told nothing.
    #[inline]
    pub fn ask_notifications(&mut self, wanted: bool) -> bool {
        match self {
            VirtioRing::Split(ring) => ring.ask_notifications(wanted),
            VirtioRing::Packed(ring) => ring.ask_notifications(wanted),
        }
    }
}

/// A part of a queue in memory.
#[derive(Debug)]
pub(super) struct RingArea {
    base: u64,
    length: usize,
    access: Access,
    memory: Option<PinnedPieces>,
}

impl RingArea {
    /// `length` bytes at `base`, which has to be a multiple of `alignment`.
    pub fn new(
        dma: &DmaSpace,
        base: u64,
        length: usize,
        alignment: u64,
        access: Access,
    ) -> Result<RingArea, DriverFault> {
        if !base.is_multiple_of(alignment) || base.checked_add(length as u64).is_none() {
            return Err(DriverFault::Queue);
        }
        let mut area = RingArea { base, length, access, memory: None };
        area.resolve(dma);
        Ok(area)
    }

    pub fn resolve(&mut self, dma: &DmaSpace) {
        self.memory = dma.pin_pieces(self.base, self.length, self.access).ok();
    }

    pub fn release_memory(&mut self) {
        self.memory = None;
    }

    #[inline]
    pub fn is_reached(&self) -> bool {
        self.memory.is_some()
    }

    /// `length` bytes at `offset`. Mappings end at pages: what is aligned to its own size is never in two.
    #[inline]
    pub fn at(&self, offset: usize, length: usize) -> Option<DmaSlice<'_>> {
        self.memory.as_ref()?.at(offset, length)
    }
}
