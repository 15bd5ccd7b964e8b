//! What a function elsewhere was lent of this host's memory, counted where the memory is.
//!
//! Each lender's fabric bounds what is lent to its own functions. Together lenders could be lent more than the
//! host has by the rack file, so the borrower's node counts what passes through it, in the record that has the
//! loans of the fronts here. Memory that is mapped for several functions counts once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rackbus_fabric::{CountedBytes, FabricHandle, HostId, LentMemory, LoanError, ObjectKey};
use serde::{Deserialize, Serialize};

/// The ranges of one function. Clones are the same ones.
#[derive(Debug, Clone)]
pub struct LentOut {
    fabric: FabricHandle,
    /// None where the fabric knows no such host, and nothing bounds what it lends.
    owner: Option<HostId>,
    ranges: Arc<Mutex<BTreeMap<u64, LentRangeGuard>>>,
}

/// A range that is counted as long as this lives.
#[derive(Debug)]
pub struct LentRangeGuard {
    range: LentRange,
    #[expect(dead_code, reason = "what is counted is discounted when it is dropped")]
    counted: CountedBytes,
}

/// A range that is lent, as it continues in another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LentRange {
    /// What the function calls its first byte.
    pub iova: u64,
    /// Its length in bytes.
    pub length: u64,
    /// The file that the memory is in, by the numbers of its device and of its inode.
    pub object: (u64, u64),
    /// Where the memory begins in the file.
    pub offset: u64,
}

impl LentOut {
    /// Nothing yet of what `host` has.
    pub fn new(fabric: FabricHandle, host: &str) -> LentOut {
        let owner = fabric.host(host);
        LentOut { fabric, owner, ranges: Arc::default() }
    }

    /// Counts a range that is to be lent, in the place of one with the same address, which is given back.
    ///
    /// # Errors
    /// [`LoanError::TooMuch`] when the host does not have so much; nothing changes then.
    pub fn lend(
        &self,
        iova: u64,
        length: u64,
        memory: &impl LentMemory,
    ) -> Result<Option<LentRangeGuard>, LoanError> {
        let (ObjectKey(device, inode), offset) = (memory.object(), memory.offset());
        self.count(LentRange { iova, length, object: (device, inode), offset })
    }

    fn count(&self, range: LentRange) -> Result<Option<LentRangeGuard>, LoanError> {
        let LentRange { iova, length, object: (device, inode), offset } = range;
        let object = ObjectKey(device, inode);
        let Some(owner) = self.owner else { return Ok(None) };
        let counted = self.fabric.count(owner, object, offset, length)?;
        Ok(self.lock().insert(iova, LentRangeGuard { range, counted }))
    }

    /// The range that begins at `iova` was not lent after all: what was there `before` still is.
    pub fn take_back(&self, iova: u64, before: Option<LentRangeGuard>) {
        // What is removed is discounted when the lock is free.
        let _refused = match before {
            Some(before) => self.lock().insert(iova, before),
            None => self.lock().remove(&iova),
        };
    }

    /// The ranges inside of `[iova, iova + length)` are lent no more.
    pub fn end(&self, iova: u64, length: u64) {
        let last = iova.saturating_add(length.saturating_sub(1));
        let mut ranges = self.lock();
        let inside: Vec<u64> = ranges.range(iova..=last).map(|(iova, _)| *iova).collect();
        let ended: Vec<_> = inside.iter().filter_map(|iova| ranges.remove(iova)).collect();
        drop(ranges);
        // Discounted when the lock is free.
        drop(ended);
    }

    /// Nothing is lent any more.
    pub fn end_all(&self) {
        let _ranges = std::mem::take(&mut *self.lock());
    }

    /// All that is lent.
    pub fn ranges(&self) -> Vec<LentRange> {
        self.lock().values().map(|entry| entry.range).collect()
    }

    /// Goes on with what another process counted.
    ///
    /// # Errors
    /// As [`lend`](LentOut::lend).
    pub fn resume(&self, ranges: Vec<LentRange>) -> Result<(), LoanError> {
        ranges.into_iter().try_for_each(|range| self.count(range).map(drop))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, LentRangeGuard>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
