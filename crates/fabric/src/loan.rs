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

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

pub use bar::BarPlace;
pub use counted::Counted;

use crate::derive;
use crate::domain::{Access, MapError};
use crate::rack::format_size;
use crate::system::{
    AccessError, Fabric, ObjectKey, Requester, Resolved, Route, SpaceError, Target,
};
use crate::topology::{ComponentId, HostId, Kind, Link, Topology, TopologyError};

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
        target: Target,
    ) -> Result<Entries, LoanError> {
        if let Requester::Device(function) = requester {
            self.check_function(function, iova, length)?;
        }
        let counted = match target {
            Target::Lent { object, offset } => {
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
        target: Target,
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
        self.map(host, at, length, access, Target::Window { ntb, peer, address })?;
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
            // It has nothing yet: that is the last step.
            Requester::Device(_) | Requester::Cpu(_) => {}
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
            Requester::Device(id) => {
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
        found.ok_or(SpaceError::Range(MapError::Wraps { start: behind, length }))
    }
}

/// The fabric of a node, shared by all that lend, borrow and share there.
#[derive(Debug, Clone)]
pub struct FabricHandle(Arc<Mutex<Fabric>>);

/// A range that a requester reaches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reached {
    /// What the requester calls its first byte.
    pub address: u64,
    /// Its length in bytes.
    pub length: u64,
    /// What it may do.
    pub access: Access,
    /// Where it leads, and which way.
    pub route: Route,
}

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

    fn lock(&self) -> MutexGuard<'_, Fabric> {
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
            let front = fabric.topology.add(Some(owner), Kind::Device, &name);
            let joined = front.and_then(|id| fabric.topology.connect(root, id, Link::Internal));
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
        target: Target,
    ) -> Result<Loan, LoanError> {
        let requester = Requester::Cpu(host);
        let entries = self.lock().lend(requester, 0, (length, access), owner, target)?;
        Ok(Loan {
            range: (entries.at, length),
            access,
            record: Some(Arc::new(Record::new(self, entries))),
            memory: (),
        })
    }

    /// As [`Fabric::resolve`].
    ///
    /// # Errors
    /// [`AccessError`].
    pub fn resolve(
        &self,
        requester: Requester,
        address: u64,
        length: u64,
        access: Access,
    ) -> Result<Resolved, AccessError> {
        self.lock().resolve(requester, address, length, access)
    }

    /// As [`Fabric::route`].
    ///
    /// # Errors
    /// [`AccessError`].
    pub fn route(
        &self,
        requester: Requester,
        address: u64,
        access: Access,
    ) -> Result<Route, AccessError> {
        self.lock().route(requester, address, access)
    }

    /// Adds a function of `host`, at its root complex. Nothing changes where there is one of that name.
    ///
    /// # Errors
    /// [`UnknownPart`] when there is no such host, or something else has the name.
    pub fn add_function(&self, host: &str, device: &str) -> Result<(), UnknownPart> {
        let name = format!("{host}/{device}");
        let mut fabric = self.lock();
        if let Some(id) = fabric.topology().named(&name) {
            let there = fabric.topology().component(id).kind == Kind::Device;
            return if there { Ok(()) } else { Err(UnknownPart(name)) };
        }
        let owner = host_named(fabric.topology(), host)?;
        let root = fabric.topology().host(owner).root;
        let function = fabric.topology.add(Some(owner), Kind::Device, &name);
        let joined = function.and_then(|id| fabric.topology.connect(root, id, Link::Internal));
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

fn host_named(topology: &Topology, name: &str) -> Result<HostId, UnknownPart> {
    topology.host_named(name).ok_or_else(|| UnknownPart(name.to_owned()))
}

/// What the front of a function that runs at another host is called: `alpha/nvme0@beta`.
fn front_name(function: &str, host: &str) -> String {
    format!("{function}@{host}")
}

impl Fabric {
    /// What the function or host of that name reaches by loans: a function's front elsewhere included,
    /// a host's processors. In the order of their addresses.
    ///
    /// # Errors
    /// [`UnknownPart`].
    pub fn reached(&self, name: &str) -> Result<Vec<Reached>, UnknownPart> {
        let topology = self.topology();
        if let Some(host) = topology.host_named(name) {
            // Its address space also has the windows that its functions use, and what others reach.
            let loans = self.shared.get(&host).into_iter().flatten();
            let space = self.space(host);
            let ranges = loans.filter_map(|at| space?.starting_at(*at));
            let ranges = ranges.map(|m| (m.start, m.length(), m.access));
            return Ok(self.routes(Requester::Cpu(host), ranges));
        }
        let function =
            topology.named(name).filter(|id| topology.component(*id).kind == Kind::Device);
        let function = function.ok_or_else(|| UnknownPart(name.to_owned()))?;
        let fronts =
            topology.hosts().filter_map(|(_, host)| topology.named(&front_name(name, &host.name)));
        let mut all = Vec::new();
        for id in [function].into_iter().chain(fronts) {
            let ranges = self.domain(id).into_iter().flat_map(|domain| domain.iter());
            let ranges = ranges.map(|m| (m.start, m.length(), m.access));
            all.extend(self.routes(Requester::Device(id), ranges));
        }
        Ok(all)
    }

    fn routes(
        &self,
        requester: Requester,
        ranges: impl Iterator<Item = (u64, Option<u64>, Access)>,
    ) -> Vec<Reached> {
        let reached = |(address, length, access): (u64, Option<u64>, Access)| {
            let length = length.unwrap_or(u64::MAX);
            let route = self.route(requester, address, access).ok()?;
            Some(Reached { address, length, access, route })
        };
        ranges.filter_map(reached).collect()
    }
}

/// What one host lends of its memory to one function: the only source of its loans.
#[derive(Debug, Clone)]
pub struct Lending {
    fabric: FabricHandle,
    function: ComponentId,
    owner: HostId,
}

impl Lending {
    /// A host alone with one function, which lends it all that it has: for what runs without a rack.
    pub fn alone() -> Lending {
        const FUNCTION: &str = "host/function";
        let mut topology = Topology::new();
        let host = topology.add_host("host", u64::MAX, true).expect("the first of its name");
        let function = topology.add(Some(host), Kind::Device, FUNCTION).expect("as above");
        let root = topology.host(host).root;
        topology.connect(root, function, Link::Internal).expect("both are in one host");
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
                let target = Target::Lent { object: memory.object(), offset: memory.offset() };
                let requester = Requester::Device(self.function);
                let range = (length, access);
                let entries =
                    self.fabric.lock().lend(requester, iova, range, self.owner, target)?;
                Some(Arc::new(Record::new(&self.fabric, entries)))
            }
        };
        Ok(Loan { range: (iova, length), access, record, memory })
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
    range: (u64, u64),
    access: Access,
    /// `None` where no memory is behind it.
    record: Option<Arc<Record>>,
    memory: M,
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
pub struct LoanEnd(Weak<Record>);

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
struct Record {
    fabric: FabricHandle,
    entries: Mutex<Option<Entries>>,
}

impl Record {
    fn new(fabric: &FabricHandle, entries: Entries) -> Record {
        Record { fabric: fabric.clone(), entries: Mutex::new(Some(entries)) }
    }

    fn end(&self) {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(entries) = entries {
            self.fabric.lock().close(&entries, ALL);
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.end();
    }
}
