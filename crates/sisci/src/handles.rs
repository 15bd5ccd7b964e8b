//! Handles that programs hold: numbers that look like pointers, never pointers.
//!
//! A handle names a slot of its sort's table and the slot's generation. One that was closed, made
//! up, or is of another sort finds nothing: it is refused, not followed.

use std::ffi::c_void;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::constants::errors::SCI_ERR_ILLEGAL_PARAMETER;
use crate::error::{SciResult, fail};
use crate::forks::{HeldLock, is_unusable};

/// A handle as programs have it.
pub type RawHandle = *mut c_void;

/// A type of objects that programs have handles of.
pub trait HandleKind: Sized + Send + Sync + 'static {
    /// The sort's number, 1 to 15.
    const TAG: u64;

    /// All of the sort.
    fn table() -> &'static HandleTable<Self>;
}

/// The handles of all objects of one type.
#[derive(Debug)]
pub struct HandleTable<T> {
    slots: RwLock<Slots<T>>,
}

#[derive(Debug)]
struct Slots<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<Arc<T>>,
}

/// Bits of a handle: the slot and one below, the sort in between, the generation above.
const INDEX_BITS: u32 = 28;
const TAG_BITS: u32 = 4;

impl<T: HandleKind> HandleTable<T> {
    /// A table without objects.
    pub const fn new() -> HandleTable<T> {
        HandleTable { slots: RwLock::new(Slots { slots: Vec::new(), free: Vec::new() }) }
    }

    fn read(&self) -> RwLockReadGuard<'_, Slots<T>> {
        self.slots.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Slots<T>> {
        self.slots.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its lock, held while the process forks.
    pub(crate) fn hold(&'static self) -> Option<HeldLock> {
        crate::forks::hold_lock(&self.slots)
    }

    /// Takes an object in, which is made with the handle that it gets.
    pub fn add(&self, make: impl FnOnce(RawHandle) -> T) -> RawHandle {
        let mut slots = self.write();
        let index = match slots.free.pop() {
            Some(index) => index,
            None => {
                let index = u32::try_from(slots.slots.len()).unwrap_or(u32::MAX);
                slots.slots.push(Slot { generation: 1, value: None });
                index
            }
        };
        let slot = &mut slots.slots[index as usize];
        let handle = encode::<T>(index, slot.generation);
        slot.value = Some(Arc::new(make(handle)));
        handle
    }

    /// The object of a handle.
    pub fn get(&self, handle: RawHandle) -> Option<Arc<T>> {
        let (index, generation) = decode::<T>(handle).filter(|_| !is_unusable())?;
        let slots = self.read();
        let slot = slots.slots.get(index as usize)?;
        slot.value.as_ref().filter(|_| slot.generation == generation).cloned()
    }

    /// The object of a handle, which is no handle any more.
    pub fn take(&self, handle: RawHandle) -> Option<Arc<T>> {
        let (index, generation) = decode::<T>(handle).filter(|_| !is_unusable())?;
        let mut slots = self.write();
        let slot = slots.slots.get_mut(index as usize)?;
        if slot.generation != generation {
            return None;
        }
        let value = slot.value.take()?;
        slot.generation = slot.generation.wrapping_add(1).max(1);
        slots.free.push(index);
        Some(value)
    }

    /// Every object of the table, in no order.
    pub fn all(&self) -> Vec<Arc<T>> {
        self.read().slots.iter().filter_map(|slot| slot.value.clone()).collect()
    }

    /// Takes every object out.
    pub fn clear(&self) -> Vec<Arc<T>> {
        self.take_all(|_| true)
    }

    /// Takes those objects out that are `wanted`.
    pub fn take_all(&self, wanted: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let mut all = Vec::new();
        let mut slots = self.write();
        for index in 0..slots.slots.len() {
            let slot = &mut slots.slots[index];
            if let Some(value) = slot.value.take_if(|value| wanted(value)) {
                slot.generation = slot.generation.wrapping_add(1).max(1);
                all.push(value);
                slots.free.push(u32::try_from(index).unwrap_or(u32::MAX));
            }
        }
        all
    }
}

impl<T: HandleKind> Default for HandleTable<T> {
    fn default() -> Self {
        HandleTable::new()
    }
}

fn encode<T: HandleKind>(index: u32, generation: u32) -> RawHandle {
    let slot = u64::from(index) + 1;
    let number = (u64::from(generation) << (INDEX_BITS + TAG_BITS)) | (T::TAG << INDEX_BITS) | slot;
    std::ptr::without_provenance_mut(usize::try_from(number).unwrap_or(0))
}

fn decode<T: HandleKind>(handle: RawHandle) -> Option<(u32, u32)> {
    let number = handle.addr() as u64;
    let slot = number & ((1 << INDEX_BITS) - 1);
    let tag = (number >> INDEX_BITS) & ((1 << TAG_BITS) - 1);
    if tag != T::TAG {
        return None;
    }
    let generation = u32::try_from(number >> (INDEX_BITS + TAG_BITS)).ok()?;
    Some((u32::try_from(slot.checked_sub(1)?).ok()?, generation))
}

/// The object of a handle.
pub(crate) fn find<T: HandleKind>(handle: RawHandle) -> SciResult<Arc<T>> {
    T::table().get(handle).map_or_else(|| fail(SCI_ERR_ILLEGAL_PARAMETER), Ok)
}

/// Makes a sort of handle.
macro_rules! kind {
    ($type:ty, $tag:expr) => {
        impl $crate::handles::HandleKind for $type {
            const TAG: u64 = $tag;

            fn table() -> &'static $crate::handles::HandleTable<Self> {
                static TABLE: $crate::handles::HandleTable<$type> =
                    $crate::handles::HandleTable::new();
                &TABLE
            }
        }
    };
}
pub(crate) use kind;

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct One(u32);
    kind!(One, 14);
    #[derive(Debug)]
    struct Other;
    kind!(Other, 15);

    #[test]
    fn only_a_live_handle_of_the_sort_finds_something() {
        let handle = One::table().add(|_| One(5));
        assert_eq!(*find::<One>(handle).unwrap(), One(5));
        assert!(find::<Other>(handle).is_err());
        assert!(find::<One>(std::ptr::null_mut()).is_err());
        for bit in 0..usize::BITS {
            let forged = std::ptr::without_provenance_mut(handle.addr() ^ (1 << bit));
            assert!(find::<One>(forged).is_err(), "bit {bit}");
        }
        One::table().take(handle).unwrap();
        assert!(find::<One>(handle).is_err());
        let next = One::table().add(|_| One(6));
        assert_ne!(next, handle);
        assert!(One::table().take(handle).is_none());
        assert_eq!(*find::<One>(next).unwrap(), One(6));
    }
}
