//! Loans: memory and interrupts of one host, within reach of a function or processor of another.
//!
//! This is Device Lending's arrangement (2019, section 4): a function's IOMMU domain leads to a window
//! of its host's NTB, the window to the owner's NTB, and that one's IOMMU domain to the owner's memory.
//! A processor's access to a segment takes the same way, without the first step. Each step is an entry
//! in the [`Fabric`], and all are made and taken away together, so that it answers at any moment for
//! what is reached.
//!
//! The fabric of a node is one and shared ([`FabricHandle`]). Nothing in a node leads to memory of
//! others but a [`Loan`] from it, and whoever has the loan has the handle of the memory with it.

mod bar;
mod counted;
mod handle;
mod held;
mod interrupt;
mod reached;

pub use bar::BarPlace;
pub use counted::CountedBytes;

use crate::domain::{Access, DomainMapError};
use crate::rack::format_size;
use crate::system::{AddressTarget, Fabric, ObjectKey, Requester, SpaceError};
use crate::topology::{ComponentId, HostId};
pub use handle::FabricHandle;
use handle::front_name;
use held::LoanRecord;
pub use held::{Lending, Loan, LoanEnd};
pub use reached::Reached;

/// Why memory is not lent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoanError {
    /// The range, or what it would lead to.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// The function whose BAR it is.
    #[error(transparent)]
    Unknown(#[from] UnknownPart),
    /// Nothing would check what the function reaches.
    #[error(
        "{host} has no IOMMU (iommu = false in the rack file), so nothing would bound what {function} \
         reaches there; no memory is lent to it"
    )]
    NoIommu {
        /// The host that runs the function.
        host: String,
        /// Name of the function, HOST/DEVICE.
        function: String,
    },
    /// The owner has less memory than would be lent.
    #[error(
        "{host} has {} of memory by the rack file, and {} of it would be lent here together",
        format_size(*.memory),
        format_size(*.lent)
    )]
    TooMuch {
        /// Name of the host whose memory it is.
        host: String,
        /// The bytes that it has.
        memory: u64,
        /// The bytes that would be lent.
        lent: u64,
    },
}

/// A host or function that the rack does not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the rack file of this node knows no {0}; restart the rack with one file for all")]
pub struct UnknownPart(pub String);

/// What leads to memory that somebody lends: as the link carries it.
pub trait LentMemory {
    /// Which of its owner's files or other objects it is in.
    fn object(&self) -> ObjectKey;

    /// Where it begins in that.
    fn offset(&self) -> u64;
}

/// The entries of a loan.
#[derive(Debug)]
struct Entries {
    requester: Requester,
    owner: HostId,
    /// What the requester calls the range; known from the beginning for a device.
    at: u64,
    length: u64,
    /// What the owner's host calls it.
    address: u64,
    /// The owner's NTB, and what the requester's host calls the window to it; `None` when that is the
    /// owner.
    window: Option<(ComponentId, u64)>,
    /// The bytes of an object that count as lent.
    counted: Option<(ObjectKey, u64)>,
}

/// As many steps as a loan may have.
const ALL: usize = usize::MAX;

impl Fabric {
    /// Lets `requester` use `length` bytes of `target`, which `owner` has. A device's IOMMU domain has
    /// them at `iova`; a processor, for which it means nothing, where there is room.
    fn lend(
        &mut self,
        requester: Requester,
        iova: u64,
        (length, access): (u64, Access),
        owner: HostId,
        target: AddressTarget,
    ) -> Result<Entries, LoanError> {
        if let Requester::Device(function) = requester {
            self.check_function(function, iova, length)?;
        }
        let counted = match target {
            AddressTarget::Lent { object, offset } => {
                self.count(owner, object, offset, length)?;
                Some((object, offset))
            }
            _ => None,
        };
        let mut entries =
            Entries { requester, owner, at: iova, length, address: 0, window: None, counted };
        match self.open(&mut entries, access, target) {
            Ok(()) => Ok(entries),
            Err((error, steps)) => {
                self.close(&entries, steps);
                Err(error.into())
            }
        }
    }

    /// Whether a function may be lent this range of its addresses.
    fn check_function(&self, id: ComponentId, iova: u64, length: u64) -> Result<(), LoanError> {
        let part = self.topology().component(id);
        let misplaced = || SpaceError::Misplaced(part.name.clone());
        let host = self.topology().host(part.host.ok_or_else(misplaced)?);
        if !host.iommu {
            let (host, function) = (host.name.clone(), part.name.clone());
            return Err(LoanError::NoIommu { host, function });
        }
        let free = self.domain(id).map_or(Ok(()), |domain| domain.check(iova, length));
        Ok(free.map_err(SpaceError::Range)?)
    }

    /// Counts bytes of `owner`'s as lent, if it has so many.
    fn count(
        &mut self,
        owner: HostId,
        object: ObjectKey,
        offset: u64,
        length: u64,
    ) -> Result<(), LoanError> {
        let end =
            offset.checked_add(length).ok_or(SpaceError::TooLong { start: offset, length })?;
        let (bytes, objects) = self.lent.entry(owner).or_default();
        let coverage = objects.entry(object).or_default();
        let counted = bytes.checked_add(coverage.missing(offset, end));
        let host = self.topology.host(owner);
        let Some(lent) = counted.filter(|lent| *lent <= host.memory_size) else {
            if coverage.is_empty() {
                objects.remove(&object);
            }
            let (host, memory) = (host.name.clone(), host.memory_size);
            return Err(LoanError::TooMuch { host, memory, lent: counted.unwrap_or(u64::MAX) });
        };
        *bytes = lent;
        coverage.add(offset, end);
        Ok(())
    }

    fn discount(&mut self, owner: HostId, (object, offset): (ObjectKey, u64), length: u64) {
        let Some((bytes, objects)) = self.lent.get_mut(&owner) else { return };
        let Some(coverage) = objects.get_mut(&object) else { return };
        *bytes -= coverage.remove(offset, offset + length);
        if coverage.is_empty() {
            objects.remove(&object);
        }
    }

    /// Opens the way from the requester to the memory; with the error, how many steps were made.
    fn open(
        &mut self,
        entries: &mut Entries,
        access: Access,
        target: AddressTarget,
    ) -> Result<(), (SpaceError, usize)> {
        let Entries { requester, owner, length, .. } = *entries;
        let host = self.host_of(requester).map_err(|error| (error, 0))?;
        entries.address = self.free(owner, length).map_err(|error| (error, 0))?;
        let address = entries.address;
        self.map(owner, address, length, access, target).map_err(|error| (error, 0))?;
        let mut seen_as = address;
        let mut steps = 1;
        if host != owner {
            let (peer, at) =
                self.open_window(host, owner, (address, length), access).map_err(|e| (e, steps))?;
            entries.window = Some((peer, at));
            steps = 2;
            self.grant(peer, address, length, access, address).map_err(|error| (error, steps))?;
            steps = 3;
            seen_as = at;
        }
        match requester {
            Requester::Cpu(host) => {
                entries.at = seen_as;
                self.shared.entry(host).or_default().insert(seen_as);
            }
            Requester::Device(function) => self
                .grant(function, entries.at, length, access, seen_as)
                .map_err(|error| (error, steps))?,
            Requester::Interrupts(function) => {
                self.remap(function, entries.at, seen_as).map_err(|error| (error, steps))?
            }
        }
        Ok(())
    }

    /// Opens a window of `host` to `[address, address + length)` of the host `to`: the NTB that enters
    /// there, and where the window is. That NTB's IOMMU domain has yet to let it through.
    ///
    /// # Errors
    /// [`SpaceError`]; nothing changes then.
    pub fn open_window(
        &mut self,
        host: HostId,
        to: HostId,
        (address, length): (u64, u64),
        access: Access,
    ) -> Result<(ComponentId, u64), SpaceError> {
        let misplaced = || SpaceError::Misplaced(self.topology.host(to).name.clone());
        let bridge = match self.bridges.get(&(host, to)) {
            Some(bridge) => *bridge,
            None => self.topology.bridge(host, to).ok_or_else(misplaced)?,
        };
        self.bridges.insert((host, to), bridge);
        let (ntb, peer) = bridge;
        let at = self.free(host, length)?;
        self.map(host, at, length, access, AddressTarget::Window { ntb, peer, address })?;
        Ok((peer, at))
    }

    /// Takes away what was opened: all of it (`ALL`), or its first `steps`. From the requester on, so that no
    /// step leads nowhere in between.
    fn close(&mut self, entries: &Entries, steps: usize) {
        let Entries { requester, owner, at, length, address, window, counted } = *entries;
        // Addresses of hosts were chosen to be free, and a device's range was: what is there is this
        // loan's own.
        match requester {
            Requester::Device(function) if steps == ALL => {
                let _ = self.withdraw(function, at, length);
            }
            Requester::Cpu(host) if steps == ALL => {
                self.shared.entry(host).or_default().remove(&at);
            }
            Requester::Interrupts(function) if steps == ALL => {
                let _ = self.unremap(function, at);
            }
            // It has nothing yet: that is the last step.
            Requester::Device(_) | Requester::Interrupts(_) | Requester::Cpu(_) => {}
        }
        if let Some((peer, seen_as)) = window {
            if steps >= 3 {
                let _ = self.withdraw(peer, address, length);
            }
            if let Ok(host) = self.host_of(requester) {
                let _ = self.unmap(host, seen_as, length);
            }
        }
        if steps >= 1 {
            let _ = self.unmap(owner, address, length);
        }
        if let Some(counted) = counted {
            self.discount(owner, counted, length);
        }
    }

    pub(crate) fn host_of(&self, requester: Requester) -> Result<HostId, SpaceError> {
        match requester {
            Requester::Cpu(host) => Ok(host),
            Requester::Device(id) | Requester::Interrupts(id) => {
                let part = self.topology.component(id);
                part.host.ok_or_else(|| SpaceError::Misplaced(part.name.clone()))
            }
        }
    }

    /// Where a host's address space has `length` free addresses.
    ///
    /// # Errors
    /// [`SpaceError`] when it has not.
    pub fn free(&self, host: HostId, length: u64) -> Result<u64, SpaceError> {
        let Some(space) = self.space(host) else {
            return Ok(0);
        };
        // Behind the last mapping, where it costs no search; else wherever there is room.
        let behind = space.last().and_then(|last| last.checked_add(1)).unwrap_or(0);
        let found = space.gap(behind, length).or_else(|| space.gap(0, length));
        found.ok_or(SpaceError::Range(DomainMapError::Wraps { start: behind, length }))
    }
}
