//! What a vfio-user server serves: a device that may be here (an engine) or elsewhere (a lender).

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rackbus_fabric::{BarPlace, Lending, LoanError};
use rackbus_memory::{Access, MapError, MemoryHandle, Stream, UnmapError};
use rackbus_spec::vfio_user::{irq, region};
use rustix::io::Errno;

use crate::endpoint::{Endpoint, FunctionRegion, IrqChange, OutOfRegion};
use crate::engine::{EngineHandle, EngineStopped};
use crate::function::{Bar, BarMemory, Mappable};
use crate::interrupts::WiringError;
use crate::polled::NotPolled;
use crate::vfio_user::bars::SharedBars;
use crate::vfio_user::requests::Requests;

/// Why a device refused a request: what is said in the log, and the number that goes on the wire.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct RequestRefused {
    /// The error number for the reply.
    pub errno: Errno,
    /// What was wrong, for the log.
    pub message: String,
}

impl RequestRefused {
    /// An error with its number and text.
    pub fn new(errno: Errno, message: impl Into<String>) -> Self {
        RequestRefused { errno, message: message.into() }
    }
}

impl From<EngineStopped> for RequestRefused {
    fn from(error: EngineStopped) -> Self {
        RequestRefused::new(Errno::NODEV, error.to_string())
    }
}

impl From<OutOfRegion> for RequestRefused {
    fn from(error: OutOfRegion) -> Self {
        RequestRefused::new(Errno::INVAL, error.to_string())
    }
}

impl From<WiringError> for RequestRefused {
    fn from(error: WiringError) -> Self {
        RequestRefused::new(Errno::INVAL, error.to_string())
    }
}

impl From<NotPolled> for RequestRefused {
    fn from(error: NotPolled) -> Self {
        let errno = match &error {
            NotPolled::Class
            | NotPolled::Barrier
            | NotPolled::Bar(_)
            | NotPolled::Elsewhere
            | NotPolled::State => Errno::NOTSUP,
            NotPolled::Memory(_) => Errno::NOMEM,
            NotPolled::Descriptor(_) => Errno::MFILE,
        };
        RequestRefused::new(errno, error.to_string())
    }
}

impl From<UnmapError> for RequestRefused {
    fn from(error: UnmapError) -> Self {
        RequestRefused::new(Errno::NOENT, error.to_string())
    }
}

impl From<LoanError> for RequestRefused {
    fn from(error: LoanError) -> Self {
        MapError::from(error).into()
    }
}

impl From<MapError> for RequestRefused {
    fn from(error: MapError) -> Self {
        let errno = match &error {
            MapError::Domain(rackbus_fabric::DomainMapError::Overlaps { .. }) => Errno::EXIST,
            MapError::TooMany(_)
            | MapError::Exhausted(_)
            | MapError::TooManyBytes(_)
            | MapError::Lend(LoanError::TooMuch { .. }) => Errno::NOSPC,
            MapError::Revoked | MapError::Lend(LoanError::NoIommu { .. }) => Errno::ACCESS,
            MapError::Domain(_) | MapError::Region(_) | MapError::Lend(_) => Errno::INVAL,
        };
        RequestRefused::new(errno, error.to_string())
    }
}

/// One region, as its user may learn it.
#[derive(Debug, Clone, Default)]
pub struct RegionShape {
    /// Bytes; 0 for a region that is not there.
    pub size: u64,
    /// The part of the region that a client may map.
    pub mappable: Option<SharedPart>,
}

/// The part of a region that its user may map.
#[derive(Debug, Clone)]
pub struct SharedPart {
    /// Memory that the part is, as long as its function does not move it.
    pub memory: BarMemory,
    /// Where the region begins in it.
    pub offset: u64,
    /// Offset in the region and length of each mappable part.
    pub areas: Vec<(u64, u64)>,
}

/// What a device looks like: its regions and interrupts. Fixed for as long as it is served.
#[derive(Debug, Clone)]
pub struct DeviceShape {
    /// Regions by number, `vfio_user::region`.
    pub regions: Vec<RegionShape>,
    /// Vectors by interrupt index, `vfio_user::irq`.
    pub irqs: Vec<u32>,
}

impl DeviceShape {
    /// Of a function with these BARs, and so many vectors of MSI-X and of MSI.
    pub fn new(bars: Vec<Bar>, msix: u16, msi: u16) -> Self {
        let mut regions = vec![RegionShape::default(); region::COUNT as usize];
        for bar in bars {
            let share =
                |part: Mappable| SharedPart { memory: part.memory, offset: 0, areas: part.areas };
            let mappable = bar.mappable.map(share);
            regions[usize::from(bar.index)] = RegionShape { size: bar.size, mappable };
        }
        regions[region::CONFIG as usize].size = rackbus_spec::pcie::CONFIG_SPACE_SIZE as u64;
        let mut irqs = vec![0; irq::COUNT as usize];
        irqs[irq::INTX as usize] = 1;
        irqs[irq::MSIX as usize] = msix.into();
        irqs[irq::MSI as usize] = msi.into();
        // The lender asks for the function back through this one.
        irqs[irq::REQ as usize] = 1;
        DeviceShape { regions, irqs }
    }
}

/// A device that can be used through vfio-user. Calls come from one connection's thread at a time.
pub trait ServedDevice: Send + Sync {
    /// What it looks like.
    fn shape(&self) -> &DeviceShape;

    /// Reads `count` bytes of a region from `offset` on.
    ///
    /// # Errors
    /// When the range is not inside the region.
    fn read(
        &self,
        region: FunctionRegion,
        offset: u64,
        count: usize,
    ) -> Result<Vec<u8>, RequestRefused>;

    /// Writes `data` to a region from `offset` on. A *posted* write may return before the device has taken it, in order.
    ///
    /// # Errors
    /// When the range is not inside the region.
    fn write(
        &self,
        region: FunctionRegion,
        offset: u64,
        data: Vec<u8>,
        posted: bool,
    ) -> Result<(), RequestRefused>;

    /// Lets the device reach `[iova, iova + length)`, which is `memory` or cannot be
    /// reached.
    ///
    /// # Errors
    /// When the range or the descriptor is refused.
    fn map(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<MemoryHandle>,
    ) -> Result<(), RequestRefused>;

    /// Takes a mapping away; on return the device does not reach it.
    ///
    /// # Errors
    /// When there is no such mapping.
    fn unmap(&self, iova: u64, length: u64) -> Result<(), RequestRefused>;

    /// Takes all mappings away.
    ///
    /// # Errors
    /// When the device is gone.
    fn unmap_all(&self) -> Result<(), RequestRefused>;

    /// Opens a window to the BAR of another function of the user's: the device reaches `memory`, which is
    /// at `place`, at `[iova, iova + length)`. Only the node that borrowed both may ask for it.
    ///
    /// # Errors
    /// When the window is refused, or not available from here.
    fn open_window(
        &self,
        _iova: u64,
        _length: u64,
        _access: Access,
        _place: BarPlace,
        _memory: MemoryHandle,
    ) -> Result<(), RequestRefused> {
        Err(RequestRefused::new(
            Errno::NOTSUP,
            "the borrower's node opens windows, and nobody else",
        ))
    }

    /// Closes a window; on return the device does not reach it.
    ///
    /// # Errors
    /// When there is no such window.
    fn close_window(&self, _iova: u64, _length: u64) -> Result<(), RequestRefused> {
        Err(RequestRefused::new(
            Errno::NOTSUP,
            "the borrower's node closes windows, and nobody else",
        ))
    }

    /// The registers of BAR `bar` as memory, and their length in bytes; see [`polled`](crate::polled).
    ///
    /// # Errors
    /// When they are only accessible by messages.
    fn registers(&self, _bar: u8) -> Result<(OwnedFd, u64), RequestRefused> {
        Err(NotPolled::Class.into())
    }

    /// Changes the interrupt wiring.
    ///
    /// # Errors
    /// When a vector does not exist or a descriptor is not fit.
    fn set_irqs(&self, change: IrqChange) -> Result<(), RequestRefused>;

    /// Resets the function, as a driver asks by `DEVICE_RESET`.
    ///
    /// # Errors
    /// When the device is gone.
    fn reset(&self) -> Result<(), RequestRefused>;

    /// Counts a request of its user's that was refused. The log has such requests at level `debug` only, because a user
    /// can send any number of them. A device that keeps no count ignores the call.
    fn count_refused(&self) {}

    /// What it asks of its user by messages; nothing for a device that reaches all memory by mappings. Always the
    /// same one. A conversation about a device that asks cannot be taken up by another process.
    fn requests(&self) -> Option<&Requests> {
        None
    }
}

impl<D: ServedDevice + ?Sized> ServedDevice for Box<D> {
    fn shape(&self) -> &DeviceShape {
        (**self).shape()
    }

    fn read(
        &self,
        region: FunctionRegion,
        offset: u64,
        count: usize,
    ) -> Result<Vec<u8>, RequestRefused> {
        (**self).read(region, offset, count)
    }

    fn write(
        &self,
        region: FunctionRegion,
        offset: u64,
        data: Vec<u8>,
        posted: bool,
    ) -> Result<(), RequestRefused> {
        (**self).write(region, offset, data, posted)
    }

    fn map(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<MemoryHandle>,
    ) -> Result<(), RequestRefused> {
        (**self).map(iova, length, access, memory)
    }

    fn unmap(&self, iova: u64, length: u64) -> Result<(), RequestRefused> {
        (**self).unmap(iova, length)
    }

    fn unmap_all(&self) -> Result<(), RequestRefused> {
        (**self).unmap_all()
    }

    fn open_window(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        place: BarPlace,
        memory: MemoryHandle,
    ) -> Result<(), RequestRefused> {
        (**self).open_window(iova, length, access, place, memory)
    }

    fn close_window(&self, iova: u64, length: u64) -> Result<(), RequestRefused> {
        (**self).close_window(iova, length)
    }

    fn registers(&self, bar: u8) -> Result<(OwnedFd, u64), RequestRefused> {
        (**self).registers(bar)
    }

    fn set_irqs(&self, change: IrqChange) -> Result<(), RequestRefused> {
        (**self).set_irqs(change)
    }

    fn reset(&self) -> Result<(), RequestRefused> {
        (**self).reset()
    }

    fn count_refused(&self) {
        (**self).count_refused();
    }

    fn requests(&self) -> Option<&Requests> {
        (**self).requests()
    }
}

/// A function that an engine in this process runs.
#[derive(Debug, Clone)]
pub struct EngineDevice {
    engine: EngineHandle,
    shape: Arc<DeviceShape>,
    /// Held by the sessions that must leave nothing behind.
    _scrub: Option<Arc<ScrubOnDrop>>,
    /// What of the BARs the user of a session may map. Ends after the function was scrubbed.
    bars: Option<Arc<SharedBars>>,
    /// The BARs whose memory goes along with the medium ([`Function::front_memory`](crate::Function::front_memory)).
    front_memory: &'static [u8],
}

/// Scrubs a function when its user is gone.
#[derive(Debug)]
struct ScrubOnDrop(EngineHandle);

impl Drop for ScrubOnDrop {
    fn drop(&mut self) {
        // If the engine has stopped, what it held is unmapped already.
        let _ = self.0.call(|endpoint| endpoint.scrub());
    }
}

impl EngineDevice {
    /// Serves what `engine` runs.
    ///
    /// # Errors
    /// When the engine has stopped.
    pub fn new(engine: EngineHandle) -> Result<Self, RequestRefused> {
        let (bars, msix, msi, front_memory) = engine.call(|endpoint| {
            let info = endpoint.info();
            (endpoint.bars(), info.msix_vectors, info.msi_vectors, endpoint.front_memory())
        })?;
        let shape = Arc::new(DeviceShape::new(bars, msix, msi));
        Ok(EngineDevice { engine, shape, _scrub: None, bars: None, front_memory })
    }

    /// The device for one user: when the last clone of it is dropped, the function is scrubbed.
    pub fn session(&self) -> EngineDevice {
        let _scrub = Some(Arc::new(ScrubOnDrop(self.engine.clone())));
        EngineDevice { _scrub, ..self.clone() }
    }

    /// The same for a user that lends its memory by `lending`. What the engine logs until the session ends is about what the
    /// caller's thread logs about now. The user may be there over a `conversation`,
    /// which may end while this host stalls: what the user had lent is not touched afterwards.
    ///
    /// # Errors
    /// When the engine has stopped, or the user's host cannot have what may be mapped of the function's BARs.
    pub fn session_of(
        &self,
        lending: Lending,
        conversation: Option<Arc<dyn Stream>>,
    ) -> Result<EngineDevice, RequestRefused> {
        let bars = SharedBars::new(lending.clone(), &self.shape)?;
        let session = EngineDevice { bars: Some(Arc::new(bars)), ..self.session() };
        let about = tracing::Span::current();
        self.engine.post(move |endpoint| {
            endpoint.begin(lending, conversation);
            endpoint.log_about(about);
        })?;
        Ok(session)
    }

    /// Its user has the function's medium, with a front elsewhere, and of its BARs those whose memory goes along with the
    /// medium: none where that is `carried` to another machine.
    pub fn share_medium(&self, carried: bool) {
        if let Some(bars) = &self.bars {
            bars.keep(if carried { &[] } else { self.front_memory });
        }
    }

    /// The user has the registers of a BAR as so many bytes of memory.
    pub(super) fn share_registers(&self, bar: u8, length: u64) -> Result<(), LoanError> {
        self.bars.as_ref().map_or(Ok(()), |bars| bars.share_registers(bar, length))
    }

    /// The engine behind it.
    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }
}

impl ServedDevice for EngineDevice {
    fn shape(&self) -> &DeviceShape {
        &self.shape
    }

    fn read(
        &self,
        region: FunctionRegion,
        offset: u64,
        count: usize,
    ) -> Result<Vec<u8>, RequestRefused> {
        let read = self.engine.call(move |endpoint| {
            let mut data = vec![0; count];
            endpoint.read(region, offset, &mut data).map(|()| data)
        })?;
        Ok(read?)
    }

    fn write(
        &self,
        region: FunctionRegion,
        offset: u64,
        data: Vec<u8>,
        posted: bool,
    ) -> Result<(), RequestRefused> {
        if posted {
            let engine = self.engine.clone();
            return Ok(self.engine.post(move |endpoint| {
                if let Err(error) = endpoint.write(region, offset, &data) {
                    tracing::debug!(%error, "posted write dropped");
                    engine.count_refused();
                }
            })?);
        }
        Ok(self.engine.call(move |endpoint| endpoint.write(region, offset, &data))??)
    }

    fn map(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<MemoryHandle>,
    ) -> Result<(), RequestRefused> {
        Ok(self.engine.call(move |endpoint| endpoint.map(iova, length, access, memory))??)
    }

    fn unmap(&self, iova: u64, length: u64) -> Result<(), RequestRefused> {
        Ok(self.engine.call(move |endpoint| endpoint.unmap(iova, length))??)
    }

    fn unmap_all(&self) -> Result<(), RequestRefused> {
        self.engine.call(|endpoint| endpoint.unmap_all())?;
        Ok(())
    }

    fn open_window(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        place: BarPlace,
        memory: MemoryHandle,
    ) -> Result<(), RequestRefused> {
        let open = move |endpoint: &mut Endpoint| {
            endpoint.open_window(iova, length, access, place, memory)
        };
        Ok(self.engine.call(open)??)
    }

    fn close_window(&self, iova: u64, length: u64) -> Result<(), RequestRefused> {
        Ok(self.engine.call(move |endpoint| endpoint.close_window(iova, length))??)
    }

    fn registers(&self, bar: u8) -> Result<(OwnedFd, u64), RequestRefused> {
        let (file, length) = self.engine.call(move |endpoint| endpoint.poll_registers(bar))??;
        self.share_registers(bar, length)?;
        Ok((file, length))
    }

    fn count_refused(&self) {
        self.engine.count_refused();
    }

    fn set_irqs(&self, change: IrqChange) -> Result<(), RequestRefused> {
        Ok(self.engine.call(move |endpoint| endpoint.set_irqs(change))??)
    }

    fn reset(&self) -> Result<(), RequestRefused> {
        Ok(self.engine.call(|endpoint| endpoint.reset())?)
    }
}
