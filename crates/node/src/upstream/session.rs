//! The function of another program in its user's hands: what the program was passed of that, and what is asked of it.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use rackbus_fabric::{BarPlace, Lending};
use rackbus_memory::{Access, Carried, MemoryHandle};
use rackbus_pci::MediumOffer;
use rackbus_pci::endpoint::{FunctionRegion, IrqChange};
use rackbus_pci::vfio_user::{DeviceShape, RequestRefused, ServedDevice, SharedBars};
use rustix::io::Errno;

use super::locked;
use super::process::ServerProcess;
use crate::lendable::Attached;
use crate::mappings::{Mappings, MapsMemory};
use crate::remote::RemoteDevice;
use crate::wired::WiredInterrupts;

/// The function while it has a user, for its session, for who takes it away, and for who passes it on to another process.
#[derive(Debug)]
pub(super) struct OpenedUpstream {
    pub(super) device: RemoteDevice,
    /// The connection to the server, which another process goes on with.
    pub(super) connection: UnixStream,
    /// What the server was passed.
    pub(super) mappings: Mutex<Mappings>,
    /// What its user has wired.
    pub(super) interrupts: WiredInterrupts,
}

/// The function in its user's hands.
pub(super) struct UpstreamSession {
    pub(super) function: Arc<OpenedUpstream>,
    pub(super) lending: Lending,
    /// The program, where it was run for this user.
    pub(super) process: Option<Arc<Mutex<Option<ServerProcess>>>>,
    /// Where others find the function.
    pub(super) opened: Arc<Mutex<Option<Arc<OpenedUpstream>>>>,
    pub(super) unsettled: Arc<Mutex<bool>>,
    /// What its user may map.
    pub(super) bars: Option<SharedBars>,
}

impl UpstreamSession {
    fn device(&self) -> &RemoteDevice {
        &self.function.device
    }
}

impl Drop for UpstreamSession {
    fn drop(&mut self) {
        match &self.process {
            Some(process) => {
                // Not under the lock: one that cannot be killed must not keep who takes the function away.
                let process = locked(process).take();
                if let Some(process) = process {
                    self.device().conversation().end();
                    process.end();
                }
            }
            None => {
                let device = self.device();
                let settled = device.is_there()
                    && locked(&self.function.mappings).clear(device).is_ok()
                    && device.reset().is_ok()
                    // An answer in the server's place is none.
                    && device.is_there();
                *locked(&self.unsettled) = !settled;
            }
        }
        // Until here it can be ended by who takes the function away. The loans end with this.
        *locked(&self.opened) = None;
    }
}

impl MapsMemory for RemoteDevice {
    fn map(
        &self,
        (iova, length): (u64, u64),
        access: Access,
        memory: &MemoryHandle,
        _window: bool,
    ) -> Result<(), RequestRefused> {
        ServedDevice::map(self, iova, length, access, Some(memory.clone()))
    }

    fn unmap(&self, (iova, length): (u64, u64)) -> Result<(), RequestRefused> {
        ServedDevice::unmap(self, iova, length)
    }
}

impl Attached for UpstreamSession {
    fn serve_medium(&self, _carried: Option<Carried>) -> Result<MediumOffer, String> {
        Err("another program serves the function whole, so its front cannot run at the borrower; \
             borrow it without `isolation = \"strict\"`"
            .to_owned())
    }
}

impl ServedDevice for UpstreamSession {
    fn shape(&self) -> &DeviceShape {
        self.device().shape()
    }

    fn read(
        &self,
        region: FunctionRegion,
        offset: u64,
        count: usize,
    ) -> Result<Vec<u8>, RequestRefused> {
        self.device().read(region, offset, count)
    }

    fn write(
        &self,
        region: FunctionRegion,
        offset: u64,
        data: Vec<u8>,
        posted: bool,
    ) -> Result<(), RequestRefused> {
        self.device().write(region, offset, data, posted)
    }

    fn map(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        wanted: Option<MemoryHandle>,
    ) -> Result<(), RequestRefused> {
        let by = (&self.lending, self.device());
        locked(&self.function.mappings).map(by, (iova, length), access, wanted)
    }

    fn unmap(&self, iova: u64, length: u64) -> Result<(), RequestRefused> {
        locked(&self.function.mappings).unmap(self.device(), (iova, length))
    }

    fn unmap_all(&self) -> Result<(), RequestRefused> {
        locked(&self.function.mappings).unmap_all(self.device())
    }

    fn open_window(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        place: BarPlace,
        memory: MemoryHandle,
    ) -> Result<(), RequestRefused> {
        if memory.is_of_device() {
            let said =
                "another program serves the function, and is not given the registers of a device";
            return Err(RequestRefused::new(Errno::NOTSUP, said));
        }
        let by = (&self.lending, self.device());
        locked(&self.function.mappings).open_window(by, (iova, length), access, place, memory)
    }

    fn close_window(&self, iova: u64, length: u64) -> Result<(), RequestRefused> {
        locked(&self.function.mappings).close_window(self.device(), (iova, length))
    }

    fn set_irqs(&self, change: IrqChange) -> Result<(), RequestRefused> {
        self.function
            .interrupts
            .change(&self.lending, change, |change| self.device().set_irqs(change))
    }

    fn reset(&self) -> Result<(), RequestRefused> {
        self.device().reset()
    }
}
