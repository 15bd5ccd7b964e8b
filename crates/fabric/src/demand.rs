//! The way of an access whose target nobody has mapped yet: mapped as lending and sharing do it, and
//! then asked for with [`Fabric::route`].
//!
//! The timing model and `rackbus path` ask in this way, so neither can tell of one that the live system
//! would not take.

use std::collections::BTreeMap;

use crate::domain::Access;
use crate::system::{AccessError, AddressTarget, Fabric, Requester, Route, SpaceError};
use crate::topology::{ComponentId, HostId};

/// Bytes of a BAR of a device that nothing says more of.
pub const BAR: u64 = 256 << 20;

/// What an access is meant for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Destination {
    /// The memory of this host.
    Memory(HostId),
    /// A device's first BAR.
    Device(ComponentId),
    /// What is at an address of a host, for requesters of that host.
    Address(HostId, u64),
}

/// Why there is no way.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WayError {
    /// It could not be mapped.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// The two are not joined.
    #[error("nothing joins the two")]
    NotJoined,
    /// An access is refused.
    #[error(transparent)]
    Access(AccessError),
}

impl From<AccessError> for WayError {
    fn from(error: AccessError) -> WayError {
        match error {
            AccessError::NoWay => WayError::NotJoined,
            other => WayError::Access(other),
        }
    }
}

/// A fabric in which every host has its own memory from address 0 on, and whatever else is asked for is
/// mapped when it is first asked for.
#[derive(Debug, Clone)]
pub struct DemandMapped {
    fabric: Fabric,
    mapped: BTreeMap<(HostId, Destination), u64>,
}

impl DemandMapped {
    /// `fabric`, whose hosts have their memory from address 0 on, as [`derive::fabric`](crate::derive::fabric)
    /// makes it.
    pub fn new(fabric: Fabric) -> DemandMapped {
        DemandMapped { fabric, mapped: BTreeMap::new() }
    }

    /// The fabric with what was mapped so far.
    pub fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    /// Where `host` has what is meant in its address space, if it was mapped there.
    pub fn mapped(&self, host: HostId, to: Destination) -> Option<u64> {
        self.mapped.get(&(host, to)).copied()
    }

    /// Bytes of what is meant.
    pub fn length(&self, to: Destination) -> u64 {
        match to {
            Destination::Memory(host) => self.fabric.topology().host(host).memory_size,
            Destination::Device(_) | Destination::Address(..) => BAR,
        }
    }

    /// Where an access of `requester` ends that is meant for `to`, and its way.
    ///
    /// # Errors
    /// [`WayError`].
    pub fn route(&mut self, requester: Requester, to: Destination) -> Result<Route, WayError> {
        let host = self.fabric.host_of(requester)?;
        let address = self.address(host, to)?;
        if let Requester::Device(id) = requester {
            // What only the file maps has a length of its own: a single byte tells the way.
            let length = match to {
                Destination::Address(..) => 1,
                _ => self.length(to),
            };
            self.grant(id, address, length)?;
        }
        Ok(self.fabric.route(requester, address, Access::all())?)
    }

    /// Where `host` has `to` in its address space, mapped when it is not yet.
    fn address(&mut self, host: HostId, to: Destination) -> Result<u64, WayError> {
        let topology = self.fabric.topology();
        let there = match to {
            Destination::Memory(there) => there,
            Destination::Device(id) => topology.component(id).host.ok_or(WayError::NotJoined)?,
            Destination::Address(there, address) if there == host => return Ok(address),
            Destination::Address(..) => return Err(WayError::NotJoined),
        };
        if let Some(address) = self.mapped.get(&(host, to)) {
            return Ok(*address);
        }
        let length = self.length(to);
        let address = match to {
            _ if there != host => {
                let ours = self.address(there, to)?;
                self.fabric.topology().bridge(host, there).ok_or(WayError::NotJoined)?;
                let window = self.fabric.open_window(host, there, (ours, length), Access::all())?;
                let (peer, address) = window;
                self.grant(peer, ours, length)?;
                address
            }
            Destination::Device(device) => {
                let address = self.fabric.free(host, length)?;
                let target = AddressTarget::Bar { device, bar: 0, offset: 0 };
                self.fabric.map(host, address, length, Access::all(), target)?;
                address
            }
            // A host's own memory is there already.
            _ => 0,
        };
        self.mapped.insert((host, to), address);
        Ok(address)
    }

    fn grant(&mut self, id: ComponentId, address: u64, length: u64) -> Result<(), SpaceError> {
        let domain = self.fabric.domain(id);
        if domain.is_some_and(|domain| domain.resolve(address, 1, Access::all()).is_ok()) {
            return Ok(());
        }
        self.fabric.grant(id, address, length, Access::all(), address)
    }
}
