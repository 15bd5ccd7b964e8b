//! A device whose configuration space is followed: what its user programs decides what its peers reach.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rackbus_memory::{Access, Gate, MemoryHandle};
use rackbus_pci::endpoint::{FunctionRegion, IrqChange};
use rackbus_pci::vfio_user::{DeviceShape, RequestRefused, ServedDevice};

use super::{PeerGroups, PeerMembership};

/// A device whose configuration space is followed.
#[derive(Debug)]
pub struct Followed<D> {
    device: Arc<D>,
    membership: Arc<PeerMembership>,
}

impl<D: ServedDevice + 'static> Followed<D> {
    /// `device`, which is the member of a group.
    pub fn new(device: D, membership: Arc<PeerMembership>) -> Self {
        Followed { device: Arc::new(device), membership }
    }

    /// The same of a device that its user has programmed already: what it reaches and what reaches it follows
    /// from that, on a thread of its own, for its lender may be on its way into another process as well.
    /// Windows that are open already are opened again. Nobody may take up the conversations meanwhile: it is
    /// done inside of `gate`.
    pub(crate) fn again(
        device: D,
        membership: Arc<PeerMembership>,
        groups: &PeerGroups,
        gate: Gate,
    ) -> Self {
        let followed = Followed::new(device, membership);
        let (device, membership) = (followed.device.clone(), followed.membership.clone());
        let resuming = groups.resuming.clone();
        let look = move || {
            drop(resuming.read());
            let _passage = gate.enter();
            membership.look_beside(&*device);
        };
        if let Err(cause) = std::thread::Builder::new().name("peers".into()).spawn(look) {
            tracing::error!(%cause, "functions of one user may not reach each other any more");
        }
        followed
    }
}

impl<D> Drop for Followed<D> {
    fn drop(&mut self) {
        // Before the device: what others reach of it is closed while it is there.
        self.membership.leave();
    }
}

impl<D: ServedDevice> ServedDevice for Followed<D> {
    fn shape(&self) -> &DeviceShape {
        self.device.shape()
    }

    fn read(
        &self,
        region: FunctionRegion,
        offset: u64,
        count: usize,
    ) -> Result<Vec<u8>, RequestRefused> {
        self.device.read(region, offset, count)
    }

    fn write(
        &self,
        region: FunctionRegion,
        offset: u64,
        data: Vec<u8>,
        posted: bool,
    ) -> Result<(), RequestRefused> {
        let written = self.device.write(region, offset, data, posted);
        if region == FunctionRegion::Config {
            self.membership.look(&*self.device);
        }
        written
    }

    fn map(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<MemoryHandle>,
    ) -> Result<(), RequestRefused> {
        self.device.map(iova, length, access, memory)
    }

    fn unmap(&self, iova: u64, length: u64) -> Result<(), RequestRefused> {
        self.device.unmap(iova, length)
    }

    fn unmap_all(&self) -> Result<(), RequestRefused> {
        self.device.unmap_all()
    }

    fn registers(&self, bar: u8) -> Result<(OwnedFd, u64), RequestRefused> {
        self.device.registers(bar)
    }

    fn count_refused(&self) {
        self.device.count_refused();
    }

    fn set_irqs(&self, change: IrqChange) -> Result<(), RequestRefused> {
        self.device.set_irqs(change)
    }

    fn reset(&self) -> Result<(), RequestRefused> {
        let reset = self.device.reset();
        self.membership.look(&*self.device);
        reset
    }
}
