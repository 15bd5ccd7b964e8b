//! A node's fabric, shared by all that lend and borrow.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Lending, Loan, LoanError, LoanRecord, UnknownPart};
use crate::derive;
use crate::domain::Access;
use crate::system::{AddressTarget, Fabric, Requester};
use crate::topology::{ComponentKind, HostId, Topology, TopologyError, TopologyLink};

/// The fabric of a node, shared by all that lend, borrow and share there.
#[derive(Debug, Clone)]
pub struct FabricHandle(Arc<Mutex<Fabric>>);

impl FabricHandle {
    /// A fabric to be shared.
    pub fn new(fabric: Fabric) -> FabricHandle {
        FabricHandle(Arc::new(Mutex::new(fabric)))
    }

    /// The same of hosts of these names that share memory, each of any size, with no devices.
    ///
    /// # Errors
    /// [`TopologyError::Duplicate`].
    pub fn of_hosts<'n>(
        names: impl IntoIterator<Item = &'n str>,
    ) -> Result<FabricHandle, TopologyError> {
        Ok(FabricHandle::new(Fabric::new(derive::of_hosts(names)?)))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Fabric> {
        // Each change of it is made whole before anything can fail.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What memory `borrower` lends to `function`, which runs where it is.
    ///
    /// # Errors
    /// [`UnknownPart`].
    pub fn lending(&self, function: &str, borrower: &str) -> Result<Lending, UnknownPart> {
        let fabric = self.lock();
        let topology = fabric.topology();
        let id = topology.named(function).ok_or_else(|| UnknownPart(function.to_owned()))?;
        let owner = host_named(topology, borrower)?;
        drop(fabric);
        Ok(Lending { fabric: self.clone(), function: id, owner })
    }

    /// The same for a front of `function` that runs at `borrower` itself.
    ///
    /// # Errors
    /// [`UnknownPart`].
    pub fn front_lending(&self, function: &str, borrower: &str) -> Result<Lending, UnknownPart> {
        let unknown = || UnknownPart(function.to_owned());
        let (host, device) = function.split_once('/').ok_or_else(unknown)?;
        self.add_function(host, device)?;
        let mut fabric = self.lock();
        let owner = host_named(fabric.topology(), borrower)?;
        let name = front_name(function, borrower);
        if fabric.topology().named(&name).is_none() {
            let root = fabric.topology().host(owner).root;
            let front = fabric.topology.add(Some(owner), ComponentKind::Device, &name);
            let joined =
                front.and_then(|id| fabric.topology.connect(root, id, TopologyLink::Internal));
            joined.map_err(|_| unknown())?;
        }
        drop(fabric);
        self.lending(&name, borrower)
    }

    /// Lets the processors of `host` reach `length` bytes of `target`, which `owner` has.
    ///
    /// # Errors
    /// [`LoanError`]; nothing changes then.
    pub fn share(
        &self,
        host: HostId,
        owner: HostId,
        length: u64,
        access: Access,
        target: AddressTarget,
    ) -> Result<Loan, LoanError> {
        let requester = Requester::Cpu(host);
        let entries = self.lock().lend(requester, 0, (length, access), owner, target)?;
        Ok(Loan {
            range: (entries.at, length),
            access,
            record: Some(Arc::new(LoanRecord::new(self, entries))),
            memory: (),
        })
    }

    /// Adds a function of `host`, at its root complex. Nothing changes where there is one of that name.
    ///
    /// # Errors
    /// [`UnknownPart`] when there is no such host, or something else has the name.
    pub fn add_function(&self, host: &str, device: &str) -> Result<(), UnknownPart> {
        let name = format!("{host}/{device}");
        let mut fabric = self.lock();
        if let Some(id) = fabric.topology().named(&name) {
            let there = fabric.topology().component(id).kind == ComponentKind::Device;
            return if there { Ok(()) } else { Err(UnknownPart(name)) };
        }
        let owner = host_named(fabric.topology(), host)?;
        let root = fabric.topology().host(owner).root;
        let function = fabric.topology.add(Some(owner), ComponentKind::Device, &name);
        let joined =
            function.and_then(|id| fabric.topology.connect(root, id, TopologyLink::Internal));
        joined.map_err(|_| UnknownPart(name))
    }

    /// Number of the host with this name.
    pub fn host(&self, name: &str) -> Option<HostId> {
        self.lock().topology().host_named(name)
    }

    /// Calls `look` with the fabric as it is now. It must not lend, nor drop a loan: both would wait
    /// for it.
    pub fn with<T>(&self, look: impl FnOnce(&Fabric) -> T) -> T {
        look(&self.lock())
    }
}

pub(super) fn host_named(topology: &Topology, name: &str) -> Result<HostId, UnknownPart> {
    topology.host_named(name).ok_or_else(|| UnknownPart(name.to_owned()))
}

/// What the front of a function that runs at another host is called: `alpha/nvme0@beta`.
pub(super) fn front_name(function: &str, host: &str) -> String {
    format!("{function}@{host}")
}
