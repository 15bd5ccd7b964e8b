//! Lent reach: a borrower's memory, laid open to a function that it has borrowed.
//!
//! This is Device Lending's arrangement (2019, section 4): the function's IOMMU domain leads to a
//! window of the lender's NTB, the window to the borrower's NTB, and that one's IOMMU domain to
//! the borrower's memory. Each of the four steps is an entry here, made and taken away together,
//! so that the fabric answers for what lent functions reach at any moment.

use crate::domain::{Access, Domain, MapError};
use crate::system::{Fabric, SpaceError, Target};
use crate::topology::{ComponentId, HostId};

/// A range of a borrower's memory that a function may use. Only
/// [`take_back`](Fabric::take_back) ends it.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the function reaches the memory until the loan is taken back"]
pub struct Loan {
    function: ComponentId,
    lender: HostId,
    borrower: HostId,
    iova: u64,
    length: u64,
    /// What the borrower's host calls the memory.
    address: u64,
    /// The borrower's NTB, and what the lender's host calls the window to it; `None` when the
    /// borrower is the lender.
    window: Option<(ComponentId, u64)>,
}

impl Loan {
    /// What the function calls the range: its beginning and length.
    pub fn range(&self) -> (u64, u64) {
        (self.iova, self.length)
    }
}

impl Fabric {
    /// Lets `function` use `[iova, iova + length)`: memory of `borrower`, from `offset` on.
    ///
    /// # Errors
    /// [`SpaceError`]; nothing changes then.
    pub fn lend(
        &mut self,
        function: ComponentId,
        borrower: HostId,
        iova: u64,
        length: u64,
        access: Access,
        offset: u64,
    ) -> Result<Loan, SpaceError> {
        let part = self.topology().component(function);
        let lender = part.host.ok_or_else(|| SpaceError::Misplaced(part.name.clone()))?;
        let address = self.free(borrower, length)?;
        self.map(borrower, address, length, access, Target::Memory { offset })?;
        let mut loan = Loan { function, lender, borrower, iova, length, address, window: None };
        match self.open(&mut loan, access) {
            Ok(()) => Ok(loan),
            Err(error) => {
                self.take_back(loan);
                Err(error)
            }
        }
    }

    /// Opens the way from the function to the memory.
    fn open(&mut self, loan: &mut Loan, access: Access) -> Result<(), SpaceError> {
        let Loan { function, lender, borrower, iova, length, address, .. } = *loan;
        let mut seen_as = address;
        if lender != borrower {
            let (ntb, peer) = self.topology().bridge(lender, borrower).ok_or_else(|| {
                SpaceError::Misplaced(self.topology().host(borrower).name.clone())
            })?;
            seen_as = self.free(lender, length)?;
            self.map(lender, seen_as, length, access, Target::Window { ntb, peer, address })?;
            loan.window = Some((peer, seen_as));
            self.grant(peer, address, length, access, address)?;
        }
        self.grant(function, iova, length, access, seen_as)
    }

    /// Ends a loan: on return nothing of it is reached any more.
    pub fn take_back(&mut self, loan: Loan) {
        let Loan { function, lender, borrower, iova, length, address, window } = loan;
        // From the function on, so that no step leads nowhere in between. A loan that failed to
        // open lacks the later steps: another's mapping may be in their place, so each is
        // checked to be this loan's own.
        let seen_as = window.map_or(address, |(_, seen_as)| seen_as);
        let owns = self.domain(function).is_some_and(|domain| leads_to(domain, iova, seen_as));
        if owns {
            let _ = self.withdraw(function, iova, length);
        }
        if let Some((peer, seen_as)) = window {
            // Windows and borrowers' addresses are chosen to be free: what is there is its own.
            let _ = self.withdraw(peer, address, length);
            let _ = self.unmap(lender, seen_as, length);
        }
        let _ = self.unmap(borrower, address, length);
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
        found.ok_or(SpaceError::Range(MapError::Wraps { start: behind, length }))
    }
}

/// Whether the mapping that begins at `iova` leads to `address`.
fn leads_to(domain: &Domain<u64>, iova: u64, address: u64) -> bool {
    let hit = domain.resolve(iova, 1, Access::empty());
    hit.is_ok_and(|hit| hit.offset == 0 && *hit.target == address)
}
