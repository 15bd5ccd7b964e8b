//! What this host's lent functions reach now, kept as loans in a [`Fabric`].
//!
//! Each session's DMA mappings pass through here: the fabric decides first (a range that it
//! refuses is never mapped), then the engine maps, and both forget together. So the fabric can
//! say at any moment whose memory an address of a function's is, and which way its DMA goes.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rackbus_fabric::{
    Access, AccessError, ComponentId, Fabric, HostId, Loan, Requester, Route, SpaceError, Topology,
};
use rackbus_pci::endpoint::{IrqChange, Region};
use rackbus_pci::vfio_user::{Device, DeviceError, DeviceShape};
use rustix::io::Errno;

/// A function or a host that the rack's topology does not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the rack file of this node knows no {0}; restart the rack with one file for all")]
pub struct Unknown(pub String);

/// What the functions of one lender reach.
#[derive(Debug)]
pub struct Reach {
    fabric: Mutex<Fabric>,
}

impl Reach {
    /// Nothing reached.
    pub fn new(topology: Topology) -> Arc<Self> {
        Arc::new(Reach { fabric: Mutex::new(Fabric::new(topology)) })
    }

    /// Whose memory `function` reaches at `iova`, and the way there.
    ///
    /// # Errors
    /// [`AccessError`] when it reaches nothing there.
    pub fn route(&self, function: &str, iova: u64, access: Access) -> Result<Route, AccessError> {
        let fabric = self.fabric();
        let device = fabric.topology().named(function).ok_or(AccessError::Requester)?;
        fabric.route(Requester::Device(device), iova, access)
    }

    /// Serves `device`, which is `function`, to `borrower`, and keeps what it may reach.
    ///
    /// # Errors
    /// [`Unknown`] when the rack has no such function or host.
    pub fn track<D: Device>(
        self: &Arc<Self>,
        device: D,
        function: &str,
        borrower: &str,
    ) -> Result<TrackedDevice<D>, Unknown> {
        let fabric = self.fabric();
        let unknown = |name: &str| Unknown(name.to_owned());
        let function = fabric.topology().named(function).ok_or_else(|| unknown(function))?;
        let borrower = fabric.topology().host_named(borrower).ok_or_else(|| unknown(borrower))?;
        drop(fabric);
        Ok(TrackedDevice {
            device,
            reach: self.clone(),
            function,
            borrower,
            loans: Mutex::default(),
        })
    }

    fn fabric(&self) -> MutexGuard<'_, Fabric> {
        self.fabric.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A function in the hands of one borrower.
#[derive(Debug)]
pub struct TrackedDevice<D: Device> {
    device: D,
    reach: Arc<Reach>,
    function: ComponentId,
    borrower: HostId,
    /// By the address that the function knows.
    loans: Mutex<BTreeMap<u64, Loan>>,
}

impl<D: Device> TrackedDevice<D> {
    fn loans(&self) -> MutexGuard<'_, BTreeMap<u64, Loan>> {
        self.loans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget_all(&self) {
        let loans = std::mem::take(&mut *self.loans());
        let mut fabric = self.reach.fabric();
        loans.into_values().for_each(|loan| fabric.take_back(loan));
    }
}

impl<D: Device> Drop for TrackedDevice<D> {
    fn drop(&mut self) {
        // A device that has stopped reaches nothing any more.
        let _ = self.device.unmap_all();
        self.forget_all();
    }
}

impl<D: Device> Device for TrackedDevice<D> {
    fn shape(&self) -> &DeviceShape {
        self.device.shape()
    }

    fn read(&self, region: Region, offset: u64, count: usize) -> Result<Vec<u8>, DeviceError> {
        self.device.read(region, offset, count)
    }

    fn write(
        &self,
        region: Region,
        offset: u64,
        data: Vec<u8>,
        posted: bool,
    ) -> Result<(), DeviceError> {
        self.device.write(region, offset, data, posted)
    }

    fn map(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<(OwnedFd, u64)>,
    ) -> Result<(), DeviceError> {
        // Without a descriptor there is nothing to reach.
        let Some((descriptor, offset)) = memory else {
            return self.device.map(iova, length, access, None);
        };
        if self.loans().contains_key(&iova) {
            // The same again, or an overlap: the device knows which, and nothing changes.
            return self.device.map(iova, length, access, Some((descriptor, offset)));
        }
        let loan = self
            .reach
            .fabric()
            .lend(self.function, self.borrower, iova, length, access, offset)
            .map_err(refusal)?;
        match self.device.map(iova, length, access, Some((descriptor, offset))) {
            Ok(()) => {
                self.loans().insert(iova, loan);
                Ok(())
            }
            Err(error) => {
                self.reach.fabric().take_back(loan);
                Err(error)
            }
        }
    }

    fn unmap(&self, iova: u64, length: u64) -> Result<(), DeviceError> {
        self.device.unmap(iova, length)?;
        if let Some(loan) = self.loans().remove(&iova) {
            self.reach.fabric().take_back(loan);
        }
        Ok(())
    }

    fn unmap_all(&self) -> Result<(), DeviceError> {
        self.device.unmap_all()?;
        self.forget_all();
        Ok(())
    }

    fn set_irqs(&self, change: IrqChange) -> Result<(), DeviceError> {
        self.device.set_irqs(change)
    }

    fn reset(&self) -> Result<(), DeviceError> {
        self.device.reset()
    }
}

fn refusal(error: SpaceError) -> DeviceError {
    match error {
        SpaceError::Range(range) => rackbus_memory::MapError::Domain(range).into(),
        other => DeviceError::new(Errno::INVAL, other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rackbus_devices::nvme::{Nvme, NvmeConfig};
    use rackbus_fabric::rack::Rack;
    use rackbus_fabric::{Place, derive};
    use rackbus_memory::SharedMemory;
    use rackbus_pci::Engine;
    use rackbus_pci::engine::EngineOptions;
    use rackbus_pci::vfio_user::EngineDevice;

    const RACK: &str = "name = \"test\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\n\
                        size = \"1 MiB\"\n[hosts.beta]\n";
    const FUNCTION: &str = "alpha/nvme0";

    fn reach() -> Arc<Reach> {
        let rack = Rack::parse("rack.toml", RACK).unwrap();
        Reach::new(derive::here(&rack).unwrap())
    }

    #[test]
    fn what_is_mapped_is_reached_and_nothing_else_and_nothing_afterwards() {
        let reach = reach();
        let model = Nvme::new(&NvmeConfig::memory(1 << 20, "S1")).unwrap();
        let engine = Engine::start("test", Box::new(model), EngineOptions::default()).unwrap();
        let device = EngineDevice::new(engine.handle().clone()).unwrap();
        let memory = SharedMemory::create("guest", 1 << 16).unwrap();
        let map = |served: &TrackedDevice<EngineDevice>, iova, length| {
            let descriptor = memory.descriptor().unwrap();
            served.map(iova, length, Access::all(), Some((descriptor, 4096)))
        };
        let goes = |iova| reach.route(FUNCTION, iova, Access::WRITE);

        let served = reach.track(device.session(), FUNCTION, "beta").unwrap();
        assert!(goes(0x1_0000).is_err());
        map(&served, 0x1_0000, 8192).unwrap();
        let route = goes(0x1_1fff).unwrap();
        let beta = reach.fabric().topology().host_named("beta").unwrap();
        assert_eq!(route.place, Place::Memory { host: beta, offset: 4096 + 8191 });
        assert!(goes(0x1_2000).is_err() && goes(0xffff).is_err());

        assert_eq!(map(&served, 0x1_1000, 4096).unwrap_err().errno, Errno::EXIST);
        assert_eq!(map(&served, u64::MAX - 4095, 8192).unwrap_err().errno, Errno::INVAL);
        // The engine refuses what the descriptor does not have: the fabric forgets it, too.
        assert!(map(&served, 0x10_0000, 1 << 20).is_err());
        assert!(goes(0x10_0000).is_err());

        served.unmap(0x1_0000, 8192).unwrap();
        assert!(goes(0x1_0000).is_err());
        map(&served, 0x1_0000, 4096).unwrap();
        drop(served);
        assert!(goes(0x1_0000).is_err(), "the next borrower begins with nothing");
        assert!(reach.track(device.session(), FUNCTION, "omega").is_err());
    }
}
