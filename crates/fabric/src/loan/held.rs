//! Loans as their holders have them: dropping one takes it away everywhere.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::{ALL, CountedBytes, Entries, FabricHandle, LentMemory, LoanError};
use crate::domain::Access;
use crate::system::{AddressTarget, Fabric, Requester};
use crate::topology::{ComponentId, ComponentKind, HostId, Topology, TopologyLink};

/// What one host lends of its memory to one function: the only source of its loans.
#[derive(Debug, Clone)]
pub struct Lending {
    pub(super) fabric: FabricHandle,
    pub(super) function: ComponentId,
    pub(super) owner: HostId,
}

impl Lending {
    /// A host alone with one function, which lends it all that it has: for what runs without a rack.
    pub fn alone() -> Lending {
        const FUNCTION: &str = "host/function";
        let mut topology = Topology::new();
        let host = topology.add_host("host", u64::MAX, true).expect("the first of its name");
        let function = topology.add(Some(host), ComponentKind::Device, FUNCTION).expect("as above");
        let root = topology.host(host).root;
        topology.connect(root, function, TopologyLink::Internal).expect("both are in one host");
        Lending { fabric: FabricHandle::new(Fabric::new(topology)), function, owner: host }
    }

    /// Lends `memory` to the function, which calls it `[iova, iova + length)`. What there is no memory
    /// for is a loan too, of nothing that could be reached.
    ///
    /// # Errors
    /// [`LoanError`]; nothing changes then.
    pub fn lend<M: LentMemory>(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<M>,
    ) -> Result<Loan<Option<M>>, LoanError> {
        let record = match &memory {
            None => None,
            Some(memory) => {
                let target =
                    AddressTarget::Lent { object: memory.object(), offset: memory.offset() };
                let requester = Requester::Device(self.function);
                let range = (length, access);
                let entries =
                    self.fabric.lock().lend(requester, iova, range, self.owner, target)?;
                Some(Arc::new(LoanRecord::new(&self.fabric, entries)))
            }
        };
        Ok(Loan { range: (iova, length), access, record, memory })
    }

    /// Counts bytes of `memory` as lent until what is returned is dropped: who asks this before it lends them is refused
    /// before it has changed anything else for that.
    ///
    /// # Errors
    /// [`LoanError::TooMuch`] when the host does not have so much; nothing changes then.
    pub fn count<M: LentMemory>(&self, memory: &M, length: u64) -> Result<CountedBytes, LoanError> {
        self.fabric.count(self.owner, memory.object(), memory.offset(), length)
    }

    /// Bytes of memory that the owner has by the rack file; all there can be where that does not say.
    pub fn memory(&self) -> u64 {
        self.fabric.with(|fabric| fabric.topology().host(self.owner).memory_size)
    }

    /// The fabric that has the loans.
    pub fn fabric(&self) -> &FabricHandle {
        &self.fabric
    }
}

/// A range within somebody's reach, with the handle `M` of the memory that it leads to. It is reached
/// until the loan is dropped, or [ended](LoanEnd::end) from elsewhere.
#[derive(Debug)]
#[must_use = "a loan that is dropped is over"]
pub struct Loan<M = ()> {
    pub(super) range: (u64, u64),
    pub(super) access: Access,
    /// `None` where no memory is behind it.
    pub(super) record: Option<Arc<LoanRecord>>,
    pub(super) memory: M,
}

impl<M> Loan<M> {
    /// What its user calls it: beginning and length.
    pub fn range(&self) -> (u64, u64) {
        self.range
    }

    /// What it may be used for.
    pub fn access(&self) -> Access {
        self.access
    }

    /// What leads to the memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The loan by itself, and what leads to the memory. They do not become one again: a loan comes
    /// with the handle that it was made for, or with none.
    pub fn into_parts(self) -> (Loan, M) {
        let Loan { range, access, record, memory } = self;
        (Loan { range, access, record, memory: () }, memory)
    }

    /// What ends it from elsewhere.
    pub fn ending(&self) -> LoanEnd {
        LoanEnd(self.record.as_ref().map_or_else(Weak::new, Arc::downgrade))
    }

    /// Ends it: nothing is reached by it any more.
    pub fn end(&self) {
        self.ending().end();
    }
}

/// Ends a loan that somebody else has.
#[derive(Debug, Clone)]
pub struct LoanEnd(Weak<LoanRecord>);

impl LoanEnd {
    /// Ends it, if it is not over.
    pub fn end(&self) {
        if let Some(record) = self.0.upgrade() {
            record.end();
        }
    }
}

/// A loan's entries in the fabric, as long as it lasts.
#[derive(Debug)]
pub(super) struct LoanRecord {
    pub(super) fabric: FabricHandle,
    pub(super) entries: Mutex<Option<Entries>>,
}

impl LoanRecord {
    pub(super) fn new(fabric: &FabricHandle, entries: Entries) -> LoanRecord {
        LoanRecord { fabric: fabric.clone(), entries: Mutex::new(Some(entries)) }
    }

    pub(super) fn end(&self) {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(entries) = entries {
            self.fabric.lock().close(&entries, ALL);
        }
    }
}

impl Drop for LoanRecord {
    fn drop(&mut self) {
        self.end();
    }
}
