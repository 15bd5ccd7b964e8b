//! Doorbells, trapped or shadowed (NVM Express base 1.4, sections 3.1.24, 5.7 and 7.13).
//!
//! With a *shadow* page the host stores a doorbell's value in its own memory, where a polling
//! controller sees it, and writes the register, which costs a trap, only when the store moved the
//! value across the *event index* that the controller published. Values count entries of the
//! ring, so they wrap at its size; the host's rule
//!
//! ```text
//! need_event = (u16)(new - event_index - 1) < (u16)(new - old)
//! ```
//!
//! is taken modulo 2^16: stepping from `old` to `new` rings when the event index lies in
//! `[old, new)`, and a step that wraps covers `[old, 2^16)` and `[0, new)`.
//!
//! So there are two positions for the event index. *Armed*: at the value seen last, so that the
//! very next store rings. *Away*: one behind it, the position that the host reaches last, a whole
//! round later; it is moved on before the host can get there.

use std::sync::atomic::Ordering;

use rackbus_memory::{Access, DmaSpace, PinnedPieces};
use rackbus_pci::RestoreError;
use serde::{Deserialize, Serialize};

use super::queue::{pin_asked, pin_ring};
use super::saved::require;

/// Rings of up to this many entries are filled to the brim as a matter of course.
const SMALL_RING: u16 = 64;

/// The two pages of a Doorbell Buffer Config command.
#[derive(Debug)]
pub struct ShadowPages {
    addresses: [u64; 2],
    length: usize,
    /// The host's doorbell values.
    pub values: Option<PinnedPieces>,
    /// The event indices that the controller publishes.
    pub events: Option<PinnedPieces>,
}

impl ShadowPages {
    /// The pages at these addresses, `length` bytes each.
    pub fn new(dma: &DmaSpace, values: u64, events: u64, length: usize) -> Self {
        let (addresses, by) = ([values, events], (dma, Access::READ | Access::WRITE));
        let mut pages = ShadowPages { addresses, length, values: None, events: None };
        pages.take(|place| pin_asked(by, place, size_of::<u32>()));
        pages
    }

    /// Their addresses: values, event indices.
    pub fn addresses(&self) -> [u64; 2] {
        self.addresses
    }

    /// Looks up the pages' memory again. They are used only when both can be reached.
    pub fn resolve(&mut self, dma: &DmaSpace) {
        let by = (dma, Access::READ | Access::WRITE);
        self.take(|place| pin_ring(by, place, size_of::<u32>()));
    }

    /// Takes the memory that `pin` finds at addresses and lengths.
    fn take(&mut self, pin: impl Fn((u64, usize)) -> Option<PinnedPieces>) {
        let [values, events] = self.addresses.map(|address| pin((address, self.length)));
        (self.values, self.events) = match (values, events) {
            (Some(values), Some(events)) => (Some(values), Some(events)),
            _ => (None, None),
        };
    }
}

#[inline]
fn load(page: &PinnedPieces, slot: usize) -> Option<u32> {
    page.at(slot, size_of::<u32>())?.load_u32(0, Ordering::Acquire)
}

#[inline]
fn store(page: &PinnedPieces, slot: usize, value: u32) {
    if let Some(word) = page.at(slot, size_of::<u32>()) {
        word.store_u32(0, value, Ordering::Release);
    }
}

/// What reading a shadow doorbell found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShadowValue {
    /// The value known already.
    Same,
    /// A new value within the ring; it is not taken over yet.
    Moved(u16),
    /// A new value that no ring of this size has.
    Invalid,
}

/// A doorbell that was saved.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DoorbellState {
    value: u16,
    shadowed: bool,
    raw: u32,
    armed: bool,
    away_from: u16,
}

impl DoorbellState {
    /// The doorbell of a ring with `size` entries, whose place in the shadow pages is `slot`. The
    /// event index is published anew.
    ///
    /// # Errors
    /// When no such ring has these values.
    pub fn restore(self, size: u16, slot: usize) -> Result<ShadowDoorbell, RestoreError> {
        let DoorbellState { value, shadowed, raw, armed, away_from } = self;
        require(value < size && away_from < size, "a doorbell's value")?;
        let slot = shadowed.then_some(slot);
        Ok(ShadowDoorbell { size, value, slot, raw, armed, event_index: None, away_from })
    }
}

/// The controller's side of one doorbell.
#[derive(Debug)]
pub struct ShadowDoorbell {
    size: u16,
    value: u16,
    /// Byte offset in the shadow pages; `None` while the doorbell is only trapped.
    slot: Option<usize>,
    /// What the shadow page held at the last look, valid or not.
    raw: u32,
    armed: bool,
    /// The event index published last.
    event_index: Option<u16>,
    /// The position that the event index was last moved away from.
    away_from: u16,
}

impl ShadowDoorbell {
    /// The doorbell of a ring with `size` entries, at 0 and not shadowed.
    pub fn new(size: u16) -> Self {
        ShadowDoorbell {
            size,
            value: 0,
            slot: None,
            raw: 0,
            armed: false,
            event_index: None,
            away_from: 0,
        }
    }

    /// The doorbells' pages as a value.
    pub fn save(&self) -> DoorbellState {
        let ShadowDoorbell { value, raw, armed, away_from, .. } = *self;
        DoorbellState { value, shadowed: self.slot.is_some(), raw, armed, away_from }
    }

    /// The value taken over last.
    #[inline]
    pub fn value(&self) -> u16 {
        self.value
    }

    /// Whether the host stores it in the shadow page.
    #[inline]
    pub fn is_shadowed(&self) -> bool {
        self.slot.is_some()
    }

    /// Takes over a value; it must be below the ring's size.
    #[inline]
    pub fn set(&mut self, value: u16) {
        debug_assert!(value < self.size);
        self.value = value;
    }

    /// Takes over a value from the doorbell register; false when no ring of this size has it.
    pub fn take(&mut self, value: u32) -> bool {
        match u16::try_from(value) {
            Ok(value) if value < self.size => {
                self.value = value;
                true
            }
            _ => false,
        }
    }

    /// From now on the host stores the value at byte `slot` of the shadow pages. Both words are
    /// written to the current value, which arms the doorbell and wipes what an earlier queue
    /// with this identifier left there.
    pub fn attach(&mut self, slot: usize, pages: &ShadowPages) {
        self.slot = Some(slot);
        self.event_index = None;
        self.raw = u32::from(self.value);
        if let Some(values) = &pages.values {
            store(values, slot, self.raw);
        }
        self.arm(pages.events.as_ref());
    }

    /// Looks at the shadow page. A value is reported once.
    #[inline]
    pub fn look(&mut self, values: Option<&PinnedPieces>) -> ShadowValue {
        let (Some(slot), Some(values)) = (self.slot, values) else {
            return ShadowValue::Same;
        };
        let Some(raw) = load(values, slot) else {
            return ShadowValue::Same;
        };
        if raw == self.raw {
            return ShadowValue::Same;
        }
        self.raw = raw;
        match u16::try_from(raw) {
            Ok(value) if value < self.size => ShadowValue::Moved(value),
            _ => ShadowValue::Invalid,
        }
    }

    /// Whether the shadow page has a value that [`look`](ShadowDoorbell::look) has not seen.
    #[inline]
    pub fn has_news(&self, values: Option<&PinnedPieces>) -> bool {
        let (Some(slot), Some(values)) = (self.slot, values) else {
            return false;
        };
        load(values, slot).is_some_and(|raw| raw != self.raw)
    }

    /// Publishes the event index so that the next store rings. The caller then issues a full
    /// barrier and asks [`has_news`](ShadowDoorbell::has_news), or a store in between is lost.
    pub fn arm(&mut self, events: Option<&PinnedPieces>) {
        self.armed = true;
        self.publish(self.raw as u16, events);
    }

    /// Moves the event index out of the host's way, to just behind the value seen last, if it is
    /// armed or the host has gone a part of the round since. The host reads the index with each
    /// store, so writing it more often would cost a cache miss there.
    ///
    /// It has to be done before the host hears that entries up to this value are consumed: from
    /// then on it may go as far as the index was before.
    #[inline]
    pub fn keep_away(&mut self, events: Option<&PinnedPieces>) {
        if self.slot.is_some() && (self.armed || self.is_stale(self.value)) {
            self.armed = false;
            self.away_from = self.value;
            let behind = if self.value == 0 { self.size - 1 } else { self.value - 1 };
            self.publish(behind, events);
        }
    }

    /// Whether `position` is so far beyond the last move of the event index that the index should
    /// move on: in a ring of some size, a quarter round, which no host notices unless it fills
    /// three quarters of the ring; in a small one, which hosts do fill, any step.
    #[inline]
    pub fn is_stale(&self, position: u16) -> bool {
        let gone = if position >= self.away_from {
            position - self.away_from
        } else {
            self.size - self.away_from + position
        };
        let far = if self.size > SMALL_RING { self.size / 4 } else { 1 };
        self.slot.is_some() && gone >= far
    }

    /// The page may be another one now: the next index is published whatever was there.
    pub fn forget_event_index(&mut self) {
        self.event_index = None;
    }

    fn publish(&mut self, event_index: u16, events: Option<&PinnedPieces>) {
        if let (Some(slot), Some(events)) = (self.slot, events)
            && self.event_index != Some(event_index)
        {
            store(events, slot, u32::from(event_index));
            self.event_index = Some(event_index);
        }
    }
}

/// The host's rule for writing the doorbell register after storing `new` over `old`: for drivers
/// and tests. All arithmetic is modulo 2^16 (see the module's text).
pub fn need_event(event_index: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event_index).wrapping_sub(1) < new.wrapping_sub(old)
}
