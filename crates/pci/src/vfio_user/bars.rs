//! What a function's user has of its BARs as memory, as loans: by them its accesses reach the registers without anybody
//! in between.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Mutex, PoisonError};

use rackbus_fabric::{Lending, Loan, LoanError};

use super::device::DeviceShape;

/// A PCI function has BARs 0 to 5.
const BARS: usize = 6;

/// The parts of a function's BARs that its user may map, until this is dropped.
#[derive(Debug)]
pub struct SharedBars {
    lending: Lending,
    /// Each with its BAR.
    mappable: Mutex<Vec<(u8, Loan)>>,
    /// By BAR: registers that the function looks at, of which the user has asked for the memory.
    registers: Mutex<BTreeMap<u8, Loan>>,
}

impl SharedBars {
    /// What a function of this shape gives to map to who lends it memory by `lending`.
    ///
    /// # Errors
    /// [`LoanError`].
    pub fn new(lending: Lending, shape: &DeviceShape) -> Result<SharedBars, LoanError> {
        let mut mappable = Vec::new();
        for (bar, region) in (0..).zip(shape.regions.iter().take(BARS)) {
            let areas = region.mappable.iter().flat_map(|part| &part.areas);
            // Another program may say that nothing of a region can be mapped by a part of no length.
            for area in areas.filter(|(_, length)| *length > 0) {
                mappable.push((bar, lending.share_bar(bar, *area)?));
            }
        }
        Ok(SharedBars { lending, mappable: Mutex::new(mappable), registers: Mutex::default() })
    }

    /// Ends what is shared of all BARs but these: the user has the function's medium instead, and memory of these with it.
    pub fn keep(&self, bars: &[u8]) {
        let mut mappable = self.mappable.lock().unwrap_or_else(PoisonError::into_inner);
        mappable.retain(|(bar, _)| bars.contains(bar));
        self.registers.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// The user is given the registers of a BAR as `length` bytes of memory, for the first time or again.
    ///
    /// # Errors
    /// [`LoanError`].
    pub fn share_registers(&self, bar: u8, length: u64) -> Result<(), LoanError> {
        let mut registers = self.registers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Entry::Vacant(none) = registers.entry(bar) {
            none.insert(self.lending.share_bar(bar, (0, length))?);
        }
        Ok(())
    }
}
