//! An IOMMU domain: which addresses a requester may use, how, and what each leads to.
//!
//! A sorted map of disjoint ranges. It decides; what a range leads to is the caller's `T` (a
//! mapped window in the live system, a hop in the timing model). Default deny: an access that no
//! mapping covers is a [`Fault`], as a completer abort would be (invariant I1).

use bitflags::bitflags;

bitflags! {
    /// What a mapping allows, or an access wants.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Access: u8 {
        /// The requester may read.
        const READ = 1;
        /// The requester may write.
        const WRITE = 2;
    }
}

/// Why a range could not be mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DomainMapError {
    /// A range of no bytes.
    #[error("a mapping at {start:#x} of no bytes")]
    Empty {
        /// Where it would begin.
        start: u64,
    },
    /// The range goes past the end of the 64-bit address space.
    #[error("the mapping {start:#x}+{length:#x} goes past the end of the address space")]
    Wraps {
        /// Where it would begin.
        start: u64,
        /// Length of the range in bytes.
        length: u64,
    },
    /// Part of the range is mapped already.
    #[error("the mapping {start:#x}+{length:#x} overlaps {other_start:#x}+{other_length:#x}")]
    Overlaps {
        /// Where it would begin.
        start: u64,
        /// Length of the range in bytes.
        length: u64,
        /// Where the existing mapping begins.
        other_start: u64,
        /// The existing mapping's length.
        other_length: u64,
    },
}

/// The range is not that of a mapping, or of several whole ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{start:#x}+{length:#x} is not the range of whole mappings")]
pub struct UnmapError {
    /// Where it would begin.
    pub start: u64,
    /// Length of the range in bytes.
    pub length: u64,
}

/// Why an access is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("access to {address:#x}+{length:#x}: {cause}")]
pub struct Fault {
    /// First address of the access that is refused.
    pub address: u64,
    /// Length of the access in bytes.
    pub length: u64,
    /// What was missing: a mapping, or a right that it does not give.
    pub cause: FaultCause,
}

/// The cause of a [`Fault`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FaultCause {
    /// No mapping covers it.
    #[error("not mapped")]
    NotMapped,
    /// The mapping does not allow this access.
    #[error("denied by the mapping's rights")]
    Denied,
    /// It goes past the end of the address space.
    #[error("it goes past the end of the address space")]
    Wraps,
    /// It has no bytes.
    #[error("it has no bytes")]
    Empty,
}

/// One mapping: a range of addresses, what it allows, and what is there.
#[derive(Debug, Clone)]
pub struct DomainMapping<T> {
    /// First address of the range.
    pub start: u64,
    /// Last address: inclusive, so that a mapping may end with the address space.
    pub last: u64,
    /// Accesses that the mapping allows.
    pub access: Access,
    /// What it leads to.
    pub target: T,
}

impl<T> DomainMapping<T> {
    /// Its length; `None` for the whole 64-bit address space, whose length is 2^64.
    pub fn length(&self) -> Option<u64> {
        (self.last - self.start).checked_add(1)
    }
}

/// Where an access leads.
#[derive(Debug, PartialEq, Eq)]
pub struct Hit<'a, T> {
    /// What the mapping leads to.
    pub target: &'a T,
    /// Offset of the access in the mapping.
    pub offset: u64,
    /// How many of the asked bytes lie in this mapping, from the access's start.
    pub length: u64,
}

/// An IOMMU domain: the mappings of one requester, which do not overlap.
#[derive(Debug, Clone)]
pub struct Domain<T> {
    /// Sorted by start, disjoint.
    mappings: Vec<DomainMapping<T>>,
}

impl<T> Default for Domain<T> {
    fn default() -> Self {
        Domain { mappings: Vec::new() }
    }
}

impl<T> Domain<T> {
    /// A domain in which nothing is mapped, so that every access is refused.
    pub fn new() -> Self {
        Domain::default()
    }

    /// Whether `[start, start + length)` could be mapped now.
    ///
    /// # Errors
    /// What [`map`](Domain::map) would refuse it with.
    pub fn check(&self, start: u64, length: u64) -> Result<(), DomainMapError> {
        self.place(start, length).map(drop)
    }

    /// The mapping of exactly `[start, start + length)`.
    pub fn get(&self, start: u64, length: u64) -> Option<&DomainMapping<T>> {
        self.exact(start, length).map(|index| &self.mappings[index])
    }

    /// The mapping that begins at `start`.
    pub fn starting_at(&self, start: u64) -> Option<&DomainMapping<T>> {
        let index = self.mappings.binary_search_by_key(&start, |m| m.start).ok()?;
        Some(&self.mappings[index])
    }

    fn exact(&self, start: u64, length: u64) -> Option<usize> {
        let last = length.checked_sub(1).and_then(|more| start.checked_add(more))?;
        let index = self.mappings.binary_search_by_key(&start, |m| m.start).ok()?;
        (self.mappings[index].last == last).then_some(index)
    }

    /// Maps `[start, start + length)` to `target`.
    ///
    /// # Errors
    /// [`DomainMapError`]; the domain is unchanged then.
    pub fn map(
        &mut self,
        start: u64,
        length: u64,
        access: Access,
        target: T,
    ) -> Result<(), DomainMapError> {
        let (index, last) = self.place(start, length)?;
        self.mappings.insert(index, DomainMapping { start, last, access, target });
        Ok(())
    }

    /// Takes the mapping of exactly `[start, start + length)` away and returns its target.
    ///
    /// # Errors
    /// [`UnmapError`] when there is none; the domain is unchanged then.
    pub fn unmap(&mut self, start: u64, length: u64) -> Result<T, UnmapError> {
        let index = self.exact(start, length).ok_or(UnmapError { start, length })?;
        Ok(self.mappings.remove(index).target)
    }

    /// Takes all mappings inside of `[start, start + length)` away and returns their targets, by address.
    ///
    /// # Errors
    /// [`UnmapError`] when there is none, or one is inside in part; the domain is unchanged then.
    pub fn unmap_within(&mut self, start: u64, length: u64) -> Result<Vec<T>, UnmapError> {
        let wrong = UnmapError { start, length };
        let last = length.checked_sub(1).and_then(|more| start.checked_add(more)).ok_or(wrong)?;
        let first = self.mappings.partition_point(|m| m.last < start);
        let end = self.mappings.partition_point(|m| m.start <= last);
        let inside = self.mappings.get(first..end).unwrap_or_default();
        if inside.is_empty() || inside.iter().any(|m| m.start < start || m.last > last) {
            return Err(wrong);
        }
        Ok(self.mappings.drain(first..end).map(|m| m.target).collect())
    }

    /// Takes every mapping away and returns their targets, by address.
    pub fn clear(&mut self) -> Vec<T> {
        self.mappings.drain(..).map(|m| m.target).collect()
    }

    /// Where `[address, address + length)` leads: the mapping that covers its first byte, and how
    /// many of its bytes lie there. `access` must be allowed.
    ///
    /// # Errors
    /// [`Fault`].
    #[inline]
    pub fn resolve(&self, address: u64, length: u64, access: Access) -> Result<Hit<'_, T>, Fault> {
        let fault = |cause| Fault { address, length, cause };
        let Some(more) = length.checked_sub(1) else {
            return Err(fault(FaultCause::Empty));
        };
        let last = address.checked_add(more).ok_or(fault(FaultCause::Wraps))?;
        let after = self.mappings.partition_point(|m| m.start <= address);
        let mapping = after
            .checked_sub(1)
            .map(|index| &self.mappings[index])
            .filter(|m| m.last >= address)
            .ok_or(fault(FaultCause::NotMapped))?;
        if !mapping.access.contains(access) {
            return Err(fault(FaultCause::Denied));
        }
        // At most `length`, so the sum cannot overflow.
        let covered = mapping.last.min(last) - address + 1;
        Ok(Hit { target: &mapping.target, offset: address - mapping.start, length: covered })
    }

    /// What each mapping leads to, by address, to change.
    pub fn targets_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.mappings.iter_mut().map(|mapping| &mut mapping.target)
    }

    /// The mappings, by address.
    pub fn iter(&self) -> impl Iterator<Item = &DomainMapping<T>> {
        self.mappings.iter()
    }

    /// The last mapped address.
    pub fn last(&self) -> Option<u64> {
        self.mappings.last().map(|m| m.last)
    }

    /// The first address from `from` on where `length` bytes are not mapped.
    pub fn gap(&self, from: u64, length: u64) -> Option<u64> {
        let more = length.checked_sub(1)?;
        let mut start = from;
        for mapping in &self.mappings[self.mappings.partition_point(|m| m.last < from)..] {
            if start.checked_add(more)? < mapping.start {
                return Some(start);
            }
            start = mapping.last.checked_add(1)?;
        }
        start.checked_add(more).map(|_| start)
    }

    /// How many mappings there are.
    pub fn len(&self) -> usize {
        self.mappings.len()
    }

    /// Whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.mappings.is_empty()
    }

    /// Where a new mapping would go, and its last address.
    fn place(&self, start: u64, length: u64) -> Result<(usize, u64), DomainMapError> {
        let more = length.checked_sub(1).ok_or(DomainMapError::Empty { start })?;
        let last = start.checked_add(more).ok_or(DomainMapError::Wraps { start, length })?;
        let index = self.mappings.partition_point(|m| m.start < start);
        let before = index.checked_sub(1).map(|i| &self.mappings[i]).filter(|m| m.last >= start);
        let after = self.mappings.get(index).filter(|m| m.start <= last);
        match before.or(after) {
            Some(other) => Err(DomainMapError::Overlaps {
                start,
                length,
                other_start: other.start,
                other_length: other.length().unwrap_or(u64::MAX),
            }),
            None => Ok((index, last)),
        }
    }
}
