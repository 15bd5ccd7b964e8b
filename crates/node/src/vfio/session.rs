//! A physical function in its user's hands.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rackbus_fabric::{BarPlace, LoanError};
use rackbus_memory::{Access, Carried, Lending, MemoryHandle, Stream};
use rackbus_pci::endpoint::{FunctionRegion, IrqChange};
use rackbus_pci::vfio_user::{
    DeviceShape, RegionShape, RequestRefused, ServedDevice as User, SharedBars, SharedPart,
};
use rackbus_pci::{BarMemory, MediumOffer};
use rackbus_spec::vfio_user::{irq, region};
use rackbus_vfio::{InterruptIndex, ResetMethod, VfioDevice, VfioError};
use rustix::io::Errno;

use super::opened::OpenedFunction;
use super::shown::ShownConfiguration;
use super::wiring::{Wiring, WiringStep};
use super::{Shared, locked};
use crate::lendable::Attached;

/// The function in its user's hands.
pub(super) struct PhysicalSession {
    name: String,
    opened: Arc<OpenedFunction>,
    shared: Arc<Shared>,
    shape: DeviceShape,
    lending: Lending,
    /// What its user may map.
    bars: Option<SharedBars>,
}

impl PhysicalSession {
    /// Begins with a function that was reset. With `mapped`, its user may map its registers.
    pub(super) fn begin(
        name: &str,
        device: VfioDevice,
        mapped: bool,
        lending: Lending,
        stream: &Arc<dyn Stream>,
        shared: Arc<Shared>,
    ) -> Result<PhysicalSession, VfioError> {
        let opened = OpenedFunction::reset(name, device, stream)?;
        PhysicalSession::of(name, opened, mapped, lending, shared)
    }

    /// With a function that is open.
    pub(super) fn of(
        name: &str,
        opened: OpenedFunction,
        mapped: bool,
        lending: Lending,
        shared: Arc<Shared>,
    ) -> Result<PhysicalSession, VfioError> {
        let device = &opened.device;
        let file = |cause| VfioError::File { path: device.address().to_string().into(), cause };
        let shape = shape(device, &locked(&opened.shown), mapped).map_err(file)?;
        let opened = Arc::new(opened);
        *locked(&shared.opened) = Some(opened.clone());
        shared.watch(name, &opened);
        Ok(PhysicalSession { name: name.to_owned(), opened, shared, shape, lending, bars: None })
    }

    /// The same, with what its user may map of its registers as loans.
    ///
    /// # Errors
    /// [`LoanError`]: nobody has the function then.
    pub(super) fn sharing_bars(self) -> Result<PhysicalSession, LoanError> {
        let bars = SharedBars::new(self.lending.clone(), &self.shape)?;
        let mut session = self;
        session.bars = Some(bars);
        Ok(session)
    }

    fn device(&self) -> &VfioDevice {
        &self.opened.device
    }

    fn is_gone(&self) -> bool {
        self.opened.is_gone()
    }

    /// Carries out what the wiring says.
    fn carry_out(
        &self,
        wiring: &mut Wiring<OwnedFd>,
        steps: Vec<WiringStep>,
    ) -> Result<(), RequestRefused> {
        for step in steps {
            let done = match &step {
                WiringStep::Off(kind) => self.device().unwire(*kind),
                WiringStep::Wire(kind, range) => {
                    let events = wiring.events(*kind, range.clone()).into_iter();
                    let events: Vec<_> = events.map(|event| event.map(AsFd::as_fd)).collect();
                    self.device().wire(*kind, range.start, &events)
                }
                WiringStep::Ring(kind, range) => {
                    for vector in range.clone() {
                        // One without a wire has nobody to be rung.
                        let _ = self.device().fire(*kind, vector);
                    }
                    Ok(())
                }
            };
            if let Err(error) = done {
                wiring.failed();
                for kind in [InterruptIndex::Intx, InterruptIndex::Msi, InterruptIndex::Msix] {
                    let _ = self.device().unwire(kind);
                }
                return Err(refusal(error));
            }
        }
        Ok(())
    }

    /// Wires interrupts, or fires them, as the user asks.
    fn rewire(&self, change: IrqChange) -> Result<(), RequestRefused> {
        let device = self.device();
        let mut wiring = locked(&self.opened.wiring);
        let steps = match change {
            IrqChange::WireVectors(start, events) => {
                let wired = wiring.wire(start, events);
                let said = format!("vectors from {start} on are not all there");
                wired.map_err(|_| RequestRefused::new(Errno::INVAL, said))?
            }
            IrqChange::UnwireVectors => wiring.unwire(),
            IrqChange::WireIntx(event) => wiring.wire_pin(event),
            IrqChange::MaskIntx(masked) if wiring.pin_is_live() => {
                return device.mask_intx(masked).map_err(refusal);
            }
            IrqChange::FireIntx if wiring.pin_is_live() => {
                return device.fire(InterruptIndex::Intx, 0).map_err(refusal);
            }
            IrqChange::MaskIntx(_) | IrqChange::FireIntx => return Ok(()),
            IrqChange::FireVectors(vectors) => {
                let Some(kind) = wiring.live_messages() else { return Ok(()) };
                let mut vectors = vectors.into_iter();
                return vectors.try_for_each(|it| device.fire(kind, it.into()).map_err(refusal));
            }
        };
        self.carry_out(&mut wiring, steps)
    }

    /// Counts a mapping, or says why it is none: its user hears of a number only.
    fn told(&self, mapped: Result<(), RequestRefused>) -> Result<(), RequestRefused> {
        self.shared.count();
        mapped.inspect_err(|error| {
            tracing::warn!(device = self.name, %error, "memory is not mapped");
        })
    }

    fn after_reset(&self, method: ResetMethod) {
        tracing::debug!(device = self.name, %method, "reset by its user");
        locked(&self.opened.shown).reset();
        self.shared.count();
    }
}

/// What the function looks like: what VFIO has of it, without its expansion ROM.
fn shape(device: &VfioDevice, shown: &ShownConfiguration, mapped: bool) -> io::Result<DeviceShape> {
    let mut regions = vec![RegionShape::default(); region::COUNT as usize];
    for bar in 0u8..6 {
        let facts = device.region(region::BAR0 + u32::from(bar));
        let areas = if mapped { shown.mappable(bar, &facts.areas) } else { Vec::new() };
        let mappable = match areas.is_empty() {
            true => None,
            false => {
                let memory = BarMemory::new(device.as_fd().try_clone_to_owned()?);
                Some(SharedPart { memory, offset: facts.offset, areas })
            }
        };
        regions[usize::from(bar)] = RegionShape { size: facts.size, mappable };
    }
    regions[region::CONFIG as usize].size = device.region(region::CONFIG).size.min(4096);
    let mut irqs = vec![0; irq::COUNT as usize];
    irqs[irq::INTX as usize] = device.vectors(InterruptIndex::Intx);
    irqs[irq::MSI as usize] = device.vectors(InterruptIndex::Msi);
    irqs[irq::MSIX as usize] = device.vectors(InterruptIndex::Msix);
    // The lender asks for the function back through this one.
    irqs[irq::REQ as usize] = 1;
    Ok(DeviceShape { regions, irqs })
}

/// What goes back to the user.
pub(super) fn refusal(error: VfioError) -> RequestRefused {
    let errno = match &error {
        VfioError::OutOfRegion { .. } | VfioError::Range { .. } => Errno::INVAL,
        VfioError::TooManyMappings | VfioError::LockedMemory { .. } => Errno::NOSPC,
        VfioError::NotMapped { .. } => Errno::NOENT,
        VfioError::NoReset(_) => Errno::NOTSUP,
        VfioError::Refused { cause, .. } => *cause,
        _ => Errno::IO,
    };
    RequestRefused::new(errno, error.to_string())
}

fn number(region: FunctionRegion) -> u32 {
    match region {
        FunctionRegion::Bar(bar) => region::BAR0 + u32::from(bar),
        FunctionRegion::Config => region::CONFIG,
    }
}

impl Attached for PhysicalSession {
    fn serve_medium(&self, _carried: Option<Carried>) -> Result<MediumOffer, String> {
        Err("a function of the machine has registers of its own and reaches memory by itself, so its front \
             cannot run at the borrower; borrow it on its lender's machine, without `isolation = \"strict\"`"
            .to_owned())
    }
}

impl User for PhysicalSession {
    fn shape(&self) -> &DeviceShape {
        &self.shape
    }

    fn read(
        &self,
        target: FunctionRegion,
        offset: u64,
        count: usize,
    ) -> Result<Vec<u8>, RequestRefused> {
        self.shared.count();
        let mut data = vec![0xff; count];
        match self.device().read(number(target), offset, &mut data) {
            Ok(()) => {}
            Err(error @ VfioError::OutOfRegion { .. }) => return Err(refusal(error)),
            // Its memory is off, or it is gone: it answers as nobody does.
            Err(_) => {
                data.fill(0xff);
                return Ok(data);
            }
        }
        let shown = locked(&self.opened.shown);
        match target {
            FunctionRegion::Config => shown.read(offset, &mut data),
            FunctionRegion::Bar(bar) => shown.read_bar(bar, offset, &mut data),
        }
        Ok(data)
    }

    fn write(
        &self,
        target: FunctionRegion,
        offset: u64,
        data: Vec<u8>,
        _posted: bool,
    ) -> Result<(), RequestRefused> {
        self.shared.count();
        let sent = |outcome: Result<(), VfioError>| match outcome {
            Err(error @ VfioError::OutOfRegion { .. }) => Err(refusal(error)),
            // As above: it goes nowhere.
            _ => Ok(()),
        };
        match target {
            FunctionRegion::Bar(bar) => {
                sent(self.device().write(number(target), offset, &data))?;
                locked(&self.opened.shown).write_bar(bar, offset, &data);
                Ok(())
            }
            FunctionRegion::Config => {
                let mut shown = locked(&self.opened.shown);
                let before = shown.enabled();
                for (at, part) in shown.write(offset, &data) {
                    sent(self.device().write(number(target), at, part))?;
                }
                let enabled = shown.enabled();
                drop(shown);
                if enabled == before {
                    return Ok(());
                }
                let mut wiring = locked(&self.opened.wiring);
                let steps = wiring.enable(enabled);
                self.carry_out(&mut wiring, steps)
            }
        }
    }

    fn map(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<MemoryHandle>,
    ) -> Result<(), RequestRefused> {
        if self.is_gone() {
            return Ok(());
        }
        let by = (&self.lending, &*self.opened);
        let mapped = locked(&self.opened.mappings).map(by, (iova, length), access, memory);
        self.told(mapped)
    }

    fn unmap(&self, iova: u64, length: u64) -> Result<(), RequestRefused> {
        locked(&self.opened.mappings).unmap(&*self.opened, (iova, length))
    }

    fn unmap_all(&self) -> Result<(), RequestRefused> {
        locked(&self.opened.mappings).unmap_all(&*self.opened)
    }

    fn open_window(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        place: BarPlace,
        memory: MemoryHandle,
    ) -> Result<(), RequestRefused> {
        let by = (&self.lending, &*self.opened);
        let opened =
            locked(&self.opened.mappings).open_window(by, (iova, length), access, place, memory);
        self.told(opened)
    }

    fn close_window(&self, iova: u64, length: u64) -> Result<(), RequestRefused> {
        locked(&self.opened.mappings).close_window(&*self.opened, (iova, length))
    }

    fn set_irqs(&self, change: IrqChange) -> Result<(), RequestRefused> {
        if self.is_gone() {
            return Ok(());
        }
        self.opened.interrupts.change(&self.lending, change, |change| self.rewire(change))
    }

    fn reset(&self) -> Result<(), RequestRefused> {
        if self.is_gone() {
            return Ok(());
        }
        // As after a function-level reset, the wires stay the user's; the kernel sees to them.
        let method = self.device().reset().map_err(refusal)?;
        self.after_reset(method);
        let mut wiring = locked(&self.opened.wiring);
        let steps = wiring.enable(None);
        self.carry_out(&mut wiring, steps)
    }
}

impl Drop for PhysicalSession {
    fn drop(&mut self) {
        // Nobody else ends it from now on.
        let watch = locked(&self.shared.watch).take();
        drop(watch);
        self.opened.revoke();
        if self.is_gone() {
            // It is looked at anew before it is lent again.
        } else if let Err(error) = self.device().reset() {
            tracing::error!(device = self.name, %error, "the function could not be reset after its user");
            *locked(&self.shared.trouble) = Some(format!("{}: {error}", self.name));
        }
        *locked(&self.shared.opened) = None;
        // The device is closed, and the loans end, with this.
    }
}
